"""What surrounds the texts of a conversation: bubbles, files, names, thoughts, progress, and what can be done."""

from __future__ import annotations

import math
import time

from PySide6.QtCore import QEvent, QPointF, QRect, QRectF, Qt
from PySide6.QtGui import QFontMetrics, QPainter, QPaintEvent
from PySide6.QtWidgets import QLabel, QPushButton, QToolButton, QWidget
from typing_extensions import override

from gui.chat.transcript.texts import Cell, CopyButton, Desk, Prose
from gui.chat.turns import Turn
from gui.chat.words import activity_words, answer_facts, answer_table, can_continue, ending_words, thought_words
from gui.kit.controls import IconButton
from gui.kit.i18n import tr
from gui.kit.icons import paint_icon
from gui.kit.theme import look
from gui.kit.timing import timer

__all__ = ["Files", "Foot", "Head", "Status", "Thinking", "Thought", "Unseen", "User"]

_SIDE = 28  # a small button


class _Versions(QWidget):
    """Which of several versions is shown: ‹ 2/3 ›."""

    def __init__(self, parent: QWidget, view: Desk) -> None:
        super().__init__(parent)
        self._view = view
        self._message = ""
        self._older = IconButton("left", tr("The version before"), self, size=14)
        self._older.setObjectName("olderVersion")
        self._older.clicked.connect(lambda: view.act("older", self._message))
        self._newer = IconButton("right", tr("The next version"), self, size=14)
        self._newer.setObjectName("newerVersion")
        self._newer.clicked.connect(lambda: view.act("newer", self._message))
        self._words = QLabel(self)
        self._words.setObjectName("versionWords")
        self._words.setProperty("role", "caption")
        self._words.setAlignment(Qt.AlignmentFlag.AlignCenter)

    def show_turn(self, turn: Turn) -> int:
        """Show where a turn stands among its versions; the width that takes, 0 when there is one only."""
        self._message = turn.message.id
        several = turn.versions > 1
        self.setVisible(several)
        if not several:
            return 0
        said = f"{turn.version + 1}/{turn.versions}"
        self._words.setText(said)
        self._words.setAccessibleName(tr("Version {number} of {count}", number=turn.version + 1, count=turn.versions))
        self._older.setEnabled(turn.version > 0)
        self._newer.setEnabled(turn.version + 1 < turn.versions)
        middle = QFontMetrics(look().font(12)).horizontalAdvance(said) + 8
        self._older.setGeometry(0, 2, 24, 24)
        self._words.setGeometry(24, 0, middle, _SIDE)
        self._newer.setGeometry(24 + middle, 2, 24, 24)
        self.resize(48 + middle, _SIDE)
        return 48 + middle


class User(QWidget):
    """What the user wrote, in a bubble at the right; below it, what can be done with it."""

    def __init__(self, view: Desk) -> None:
        super().__init__(view.viewport())
        self._cell: Cell | None = None
        self._width = 0
        self._bubble = QRectF()
        self.text = Prose(view)
        self.text.setParent(self)
        self._copy = CopyButton(self, tr("Copy message"))
        self._copy.source = lambda: self._cell.turn.message.content if self._cell and self._cell.turn else ""
        self._edit = IconButton("rename", tr("Edit this message"), self, size=16)
        self._edit.setObjectName("editMessage")
        self._edit.show_icon("rename", "faint")
        self._edit.clicked.connect(lambda: view.act("edit", self._message()))
        self._versions = _Versions(self, view)
        self._actions = (self._copy, self._edit)

    def _message(self) -> str:
        return self._cell.turn.message.id if self._cell is not None and self._cell.turn is not None else ""

    def fill(self, cell: Cell, width: int) -> int:
        """Show a part of the message."""
        pad_x, pad_y = 16, 10
        if cell != self._cell or width != self._width:
            self._cell, self._width = cell, width
            self._size = self.text.fill_plain(cell.text, int(width * 0.82) - 2 * pad_x)
        size = self._size
        full = size.width() if cell.first and cell.last else int(width * 0.82) - 2 * pad_x
        height = size.height() + 2 * pad_y
        self._bubble = QRectF(width - full - 2 * pad_x, 0, full + 2 * pad_x, height)
        self.text.setGeometry(int(self._bubble.left()) + pad_x, pad_y, full, size.height())
        self.update()
        if not cell.last or cell.turn is None:
            for made in (*self._actions, self._versions):
                made.hide()
            return height
        right = width
        right -= self._versions.show_turn(cell.turn)
        self._versions.move(right, height + 2)
        for number, made in enumerate(self._actions):
            made.setGeometry(right - (_SIDE + 2) * (number + 1), height + 2, _SIDE, _SIDE)
        self._show_actions(self.underMouse())
        return height + _SIDE + 2

    def _show_actions(self, wanted: bool) -> None:  # noqa: FBT001 (a state)
        last = self._cell is not None and self._cell.last
        for made in self._actions:
            made.setVisible(last and (wanted or made.hasFocus()))

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(look().color("bubble"))
        first = self._cell is None or self._cell.first
        last = self._cell is None or self._cell.last
        rect = self._bubble.adjusted(0, 0 if first else -20, 0, 0 if last else 20)
        painter.setClipRect(self._bubble)
        painter.drawRoundedRect(rect, 16, 16)

    @override
    def event(self, event: QEvent) -> bool:
        if event.type() in {QEvent.Type.HoverEnter, QEvent.Type.Enter}:
            self._show_actions(True)
        elif event.type() == QEvent.Type.Leave:
            self._show_actions(False)
        return super().event(event)


class Files(QWidget):
    """The files that go with a message."""

    def __init__(self, view: Desk) -> None:
        super().__init__(view.viewport())
        self.setObjectName("messageFiles")
        self._names: list[str] = []

    def fill(self, cell: Cell, width: int) -> int:
        """Show their names."""
        del width
        self._names = cell.text.split("\n")
        self.setAccessibleName(", ".join(self._names))
        self.update()
        return len(self._names) * (look().px(13) + 18) - 4

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setFont(look().font(13))
        height = look().px(13) + 14
        most = int(self.width() * 0.82) - 46
        for number, name in enumerate(self._names):
            said = painter.fontMetrics().elidedText(name, Qt.TextElideMode.ElideMiddle, most)
            wide = painter.fontMetrics().horizontalAdvance(said) + 46
            rect = QRectF(self.width() - wide + 0.5, number * (height + 4) + 0.5, wide - 1, height - 1)
            painter.setPen(look().color("line"))
            painter.setBrush(look().color("surface"))
            painter.drawRoundedRect(rect, 9, 9)
            paint_icon(painter, "file", QRectF(rect.left() + 9, rect.center().y() - 8, 16, 16), "accent")
            painter.setPen(look().color("text"))
            inner = rect.adjusted(32, 0, -10, 0)
            painter.drawText(inner, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, said)


class Unseen(QWidget):
    """Whether the model reads a message at all, where that needs saying."""

    def __init__(self, view: Desk) -> None:
        super().__init__(view.viewport())
        self.setObjectName("unseenNote")
        self._words = ""

    def fill(self, cell: Cell, width: int) -> int:
        """Show it."""
        del width
        self._words = cell.text
        self.setAccessibleName(cell.text)
        self.update()
        return look().px(20)

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setFont(look().font(12))
        painter.setPen(look().color("faint"))
        painter.drawText(self.rect(), Qt.AlignmentFlag.AlignCenter, self._words)
        wide = painter.fontMetrics().horizontalAdvance(self._words) / 2 + 14
        y, middle = self.height() / 2, self.width() / 2
        painter.setPen(look().color("line"))
        painter.drawLine(QPointF(0, y), QPointF(middle - wide, y))
        painter.drawLine(QPointF(middle + wide, y), QPointF(self.width(), y))


class Head(QWidget):
    """Who answers: the model's name."""

    def __init__(self, view: Desk) -> None:
        super().__init__(view.viewport())
        self._name = ""
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)

    def fill(self, cell: Cell, width: int) -> int:
        """Show the name."""
        del width
        self._name = cell.text
        self.setAccessibleName(cell.text)
        self.update()
        return look().px(20)

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        size = look().px(15)
        paint_icon(painter, "flame", QRectF(-1, (self.height() - size) / 2 - 1, size, size), "accent")
        painter.setFont(look().font(12, bold=True))
        painter.setPen(look().color("muted"))
        rect = self.rect().adjusted(size + 5, 0, 0, 0)
        name = painter.fontMetrics().elidedText(self._name, Qt.TextElideMode.ElideRight, rect.width())
        painter.drawText(rect, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, name)


class Thought(QToolButton):
    """How long the model thought; a click shows what."""

    def __init__(self, view: Desk) -> None:
        super().__init__(view.viewport())
        self.setObjectName("thought")
        self.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self._cell: Cell | None = None
        self.clicked.connect(lambda: view.act("unfold", self._message()))

    def _message(self) -> str:
        return self._cell.turn.message.id if self._cell is not None and self._cell.turn is not None else ""

    def fill(self, cell: Cell, width: int) -> int:
        """Show the time it took, or that it goes on."""
        del width
        self._cell = cell
        assert cell.turn is not None
        self.setText(thought_words(cell.turn))
        self.setAccessibleName(self.text())
        hint = tr("Hide what the model thought") if cell.open else tr("Show what the model thought")
        self.setAccessibleDescription(hint)
        self.setToolTip(hint)
        self.update()
        return look().px(13) + 14

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setFont(look().font(13))
        wide = painter.fontMetrics().horizontalAdvance(self.text()) + 62
        rect = QRectF(0.5, 0.5, min(wide, self.width()) - 1, self.height() - 1)
        painter.setPen(look().color("accent" if self.hasFocus() else "line"))
        painter.setBrush(look().color("hover" if self.underMouse() else "surface"))
        painter.drawRoundedRect(rect, 9, 9)
        paint_icon(painter, "thought", QRectF(9, self.height() / 2 - 8, 16, 16), "accent")
        painter.setPen(look().color("muted"))
        inner = rect.adjusted(30, 0, -26, 0)
        painter.drawText(inner, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, self.text())
        sign = "chevron-down" if self._cell is not None and self._cell.open else "right"
        paint_icon(painter, sign, QRectF(rect.right() - 22, self.height() / 2 - 7, 14, 14), "faint")


class Thinking(QWidget):
    """A part of what the model thought."""

    def __init__(self, view: Desk) -> None:
        super().__init__(view.viewport())
        self.text = Prose(view)
        self.text.setParent(self)
        self.text.setProperty("role", "thinking")

    def fill(self, cell: Cell, width: int) -> int:
        """Show it, as it was written."""
        size = self.text.fill_plain(cell.text, width - 18)
        self.text.setGeometry(18, 0, width - 18, size.height())
        return size.height()

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(QRectF(2, -8, 3, self.height() + 16), look().color("line"))


class Status(QWidget):
    """What is going on while there is no text yet: words, and a bar where the way is known."""

    def __init__(self, view: Desk) -> None:
        super().__init__(view.viewport())
        self.setObjectName("answerStatus")
        self._words = ""
        self._share: float | None = None
        self._timer = timer(self, 60, self.update)

    def fill(self, cell: Cell, width: int) -> int:
        """Show an activity."""
        del width
        self._words, self._share = activity_words(cell.turn)
        self.setAccessibleName(self._words)
        self.update()
        return look().px(30)

    @override
    def showEvent(self, event: object) -> None:
        self._timer.start()

    @override
    def hideEvent(self, event: object) -> None:
        self._timer.stop()

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        middle, step = look().px(10), look().px(9)
        for dot in range(3):
            color = look().color("accent")
            color.setAlphaF(0.35 + 0.6 * max(0.0, math.sin(time.monotonic() * 4.4 - dot * 0.9)))
            painter.setBrush(color)
            painter.drawEllipse(QPointF(4 + dot * step, middle), 3, 3)
        left = 3 * step + 10
        painter.setFont(look().font(13))
        painter.setPen(look().color("muted"))
        painter.drawText(
            QRectF(left, 0, self.width() - left, 2 * middle),
            Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft,
            self._words,
        )
        if self._share is not None:
            track = QRectF(0, 2 * middle + 4, min(320, self.width()), 4)
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(look().color("line"))
            painter.drawRoundedRect(track, 2, 2)
            painter.setBrush(look().color("accent"))
            track.setWidth(max(4.0, track.width() * self._share))
            painter.drawRoundedRect(track, 2, 2)


class Foot(QWidget):
    """Below an answer: how it ended, what can be done with it, what it took.

    Room is left for the view's own "regenerate" below the last answer; earlier ones have their own.
    """

    def __init__(self, view: Desk) -> None:
        super().__init__(view.viewport())
        self._turn: Turn | None = None
        self.slot = 0  # where the view's button goes
        self.copy = CopyButton(self, tr("Copy answer"))
        self.copy.source = lambda: self._turn.message.content if self._turn else ""
        self._versions = _Versions(self, view)
        self._again = self._button("regenerate", tr("Regenerate this answer"), "regenerateEarlier")
        self._again.clicked.connect(lambda: view.act("regenerate", self._message()))
        self._more = self._button("more", tr("More"), "answerMore")
        self._more.clicked.connect(
            lambda: view.offer_actions(self._message(), self._more.mapToGlobal(self._more.rect().bottomLeft()))
        )
        self._go_on = QPushButton(tr("Continue"), self)
        self._go_on.setObjectName("continueAnswer")
        self._go_on.setProperty("role", "small")
        self._go_on.setCursor(Qt.CursorShape.PointingHandCursor)
        self._go_on.clicked.connect(lambda: view.act("continue", self._message()))
        self._ending = QLabel(self)
        self._ending.setObjectName("answerEnding")
        self._ending.setWordWrap(True)
        self._ending.setTextFormat(Qt.TextFormat.PlainText)
        self._facts = QLabel(self)
        self._facts.setProperty("role", "caption")
        self._facts.setObjectName("answerFacts")
        self._facts.setTextFormat(Qt.TextFormat.PlainText)

    def _button(self, icon: str, name: str, identity: str) -> IconButton:
        made = IconButton(icon, name, self, size=16)
        made.setObjectName(identity)
        made.show_icon(icon, "faint")
        return made

    def _message(self) -> str:
        return self._turn.message.id if self._turn is not None else ""

    def fill(self, cell: Cell, width: int) -> int:
        """Show how an answer ended."""
        turn = cell.turn
        assert turn is not None
        self._turn = turn
        top = self._show_ending(turn, width)
        left = -6
        wide = self._versions.show_turn(turn)
        if wide:
            self._versions.move(left, top)
            left += wide + 2
        self.copy.setVisible(bool(turn.message.content))
        if turn.message.content:
            self.copy.setGeometry(left, top, _SIDE, _SIDE)
            left += _SIDE + 2
        self.slot = left
        self._again.setVisible(not cell.last)
        self._again.setGeometry(left, top, _SIDE, _SIDE)
        left += _SIDE + 2
        self._more.setGeometry(left, top, _SIDE, _SIDE)
        left += _SIDE + 6
        go_on = can_continue(turn)
        self._go_on.setVisible(go_on)
        if go_on:
            wide = self._go_on.sizeHint().width()
            self._go_on.setGeometry(left, top + 1, wide, _SIDE - 2)
            left += wide + 8
        said = answer_facts(turn, last=cell.last)
        self._facts.setText(QFontMetrics(look().font(12)).elidedText(said, Qt.TextElideMode.ElideRight, width - left))
        self._facts.setToolTip(answer_table(turn))
        self._facts.setGeometry(left, top, max(0, width - left), _SIDE)
        return top + _SIDE

    def _show_ending(self, turn: Turn, width: int) -> int:
        words, serious = ending_words(turn)
        self._ending.setVisible(bool(words))
        if not words:
            return 0
        self._ending.setText(words)
        self._ending.setProperty("role", "problem" if serious else "note")
        self._ending.style().unpolish(self._ending)
        self._ending.style().polish(self._ending)
        pad_x, pad_y = (28, 20) if serious else (0, 0)
        self._ending.setContentsMargins(pad_x // 2, pad_y // 2, pad_x // 2, pad_y // 2)
        room = QRect(0, 0, width - pad_x, 1 << 20)
        lines = self._ending.fontMetrics().boundingRect(room, int(Qt.TextFlag.TextWordWrap), words)
        full, height = min(width, lines.width() + pad_x + 4), lines.height() + pad_y
        self._ending.setGeometry(0, 0, full, height)
        return height + 6
