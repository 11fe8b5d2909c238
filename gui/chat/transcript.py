"""The conversation as it is read: one light widget per visible piece of a message, however long the chat is.

A message is an entry, an entry is a column of cells (head, prose, code, foot
...). Only cells near the viewport have widgets; the others have a measured or
estimated height. The place the reader looks at is an anchor, so that text
growing or being measured elsewhere never moves it. Text can be selected across
cells and messages.

    entry 0   [user bubble]                          cell 0
    entry 1   [head][prose][code][prose][foot]       cells 0..4     <- anchor: (entry, cell, pixels)
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from PySide6.QtCore import QEvent, QModelIndex, QPoint, QPointF, QRect, QRectF, QSize, Qt, QUrl, Signal
from PySide6.QtGui import (
    QContextMenuEvent,
    QDesktopServices,
    QGuiApplication,
    QKeyEvent,
    QKeySequence,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QResizeEvent,
    QTextCursor,
    QTextDocument,
    QTextFormat,
    QWheelEvent,
)
from PySide6.QtWidgets import (
    QAbstractScrollArea,
    QFrame,
    QLabel,
    QMenu,
    QPlainTextEdit,
    QSizePolicy,
    QTextEdit,
    QWidget,
)
from typing_extensions import override

from gui.chat.highlight import Highlighter, language_name
from gui.chat.markdown import Splitter, plain_parts, write_markdown, write_plain
from gui.chat.turns import ChatModel, Turn
from gui.chat.words import activity_words, answer_facts, ending_words
from gui.kit.controls import IconButton
from gui.kit.i18n import tr
from gui.kit.icons import paint_icon
from gui.kit.theme import code_font, look
from gui.kit.timing import timer

__all__ = ["Cell", "CopyButton", "Transcript"]

_COLUMN = 760  # widest line of text, at 100 %
_EDGE = 28  # least space beside the column
_TOP = 26
_GAP = 26  # between messages
_AHEAD = 300  # pixels above and below the viewport that are laid out beforehand
_FLUSH_MS = 50
_CODE_LINE = 4000  # longer lines of code are broken when shown: their layout would stop the window

_MEASURED_LINES = 300

Kind = Literal["head", "user", "prose", "code", "status", "foot"]
_GAPS: dict[Kind, int] = {"head": 6, "user": 2, "prose": 12, "code": 12, "status": 6, "foot": 0}


@dataclass(frozen=True, slots=True)
class Cell:
    """What one piece shows. `turn` belongs to status and foot."""

    kind: Kind
    text: str = ""
    language: str = ""
    turn: Turn | None = None
    first: bool = True
    last: bool = True


@dataclass(slots=True)
class _Place:
    """A cell in the layout: its height (measured when `exact`) and its widget while it is near the viewport."""

    cell: Cell
    height: int
    exact: bool = False
    widget: _CellWidget | None = None


@dataclass(slots=True)
class _Entry:
    turn: Turn
    height: int
    top: int = 0
    places: list[_Place] | None = None  # None until it first comes near the viewport
    splitter: Splitter = field(default_factory=Splitter)
    fed: str = ""


class _CellWidget(Protocol):
    """What the view asks of a cell's widget; all are QWidgets."""

    def fill(self, cell: Cell, width: int) -> int:
        """Show `cell` at `width` pixels; the height it needs."""
        ...


class _Prose(QTextEdit):
    """Text that can be selected and copied: a part of an answer, or what the user wrote."""

    def __init__(self, view: Transcript) -> None:
        super().__init__(view.viewport())
        self._view = view
        self._quotes = False
        self._cell: Cell | None = None
        _calm(self)
        self.setTextInteractionFlags(
            Qt.TextInteractionFlag.TextSelectableByMouse
            | Qt.TextInteractionFlag.TextSelectableByKeyboard
            | Qt.TextInteractionFlag.LinksAccessibleByMouse
        )
        self.document().setDocumentMargin(0)
        self.document().setUndoRedoEnabled(False)

    def fill(self, cell: Cell, width: int) -> int:
        """Show a part of an answer."""
        self.resize(width, self.height())  # the widget lays its document out at its own width, too
        if cell != self._cell:
            self._cell = cell
            self.document().setDefaultFont(look().font())
            write_markdown(self.document(), cell.text)
            self._quotes = ">" in cell.text
        self.document().setTextWidth(width)
        return math.ceil(self.document().size().height())

    def fill_plain(self, text: str, width: int) -> QSize:
        """Show text as it is, no wider than it must be."""
        self._quotes = False
        self._cell = None
        self.resize(width, self.height())
        self.document().setDefaultFont(look().font())
        write_plain(self.document(), text)
        self.document().setTextWidth(width)
        ideal = math.ceil(self.document().idealWidth()) + 1
        self.document().setTextWidth(min(width, ideal))
        return QSize(min(width, ideal), math.ceil(self.document().size().height()))

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        if self._quotes:
            painter = QPainter(self.viewport())
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(look().color("line"))
            layout = self.document().documentLayout()
            block = self.document().begin()
            while block.isValid():
                level = block.blockFormat().intProperty(QTextFormat.Property.BlockQuoteLevel)
                after = block.next()
                below = after.blockFormat().intProperty(QTextFormat.Property.BlockQuoteLevel) if after.isValid() else 0
                rect = layout.blockBoundingRect(block)
                for depth in range(level):
                    bottom = layout.blockBoundingRect(after).top() if depth < below else rect.bottom()
                    bar = QRectF(look().gap(16) * depth, rect.top(), 3, bottom - rect.top())
                    painter.drawRoundedRect(bar, 1.5, 1.5)
                block = after
            painter.end()
        super().paintEvent(event)

    @override
    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()

    @override
    def keyPressEvent(self, event: QKeyEvent) -> None:
        if not self._view.take_key(event):
            super().keyPressEvent(event)

    @override
    def mousePressEvent(self, event: QMouseEvent) -> None:
        self._view.end_selection(event)
        super().mousePressEvent(event)
        self._view.begin_selection(self, event)

    @override
    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        over_link = bool(self.anchorAt(event.position().toPoint()))
        self.viewport().setCursor(Qt.CursorShape.PointingHandCursor if over_link else Qt.CursorShape.IBeamCursor)
        if not self._view.extend_selection(self, event):
            super().mouseMoveEvent(event)

    @override
    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        super().mouseReleaseEvent(event)
        address = self.anchorAt(event.position().toPoint())
        if address and event.button() == Qt.MouseButton.LeftButton and not self.textCursor().hasSelection():
            self._view.offer_link(address, event.globalPosition().toPoint())

    @override
    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        self._view.offer_menu(self, event, self.anchorAt(event.pos()))


class _CodeText(QPlainTextEdit):
    """The text of a code block: never wrapped, selectable."""

    def __init__(self, parent: QWidget, view: Transcript) -> None:
        super().__init__(parent)
        self._view = view
        _calm(self)
        self.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAsNeeded)
        self.setTextInteractionFlags(
            Qt.TextInteractionFlag.TextSelectableByMouse | Qt.TextInteractionFlag.TextSelectableByKeyboard
        )
        self.document().setDocumentMargin(0)
        self.document().setUndoRedoEnabled(False)
        option = self.document().defaultTextOption()
        option.setTextDirection(Qt.LayoutDirection.LeftToRight)
        self.document().setDefaultTextOption(option)

    @override
    def wheelEvent(self, event: QWheelEvent) -> None:
        sideways = event.angleDelta().x() or event.modifiers() & Qt.KeyboardModifier.ShiftModifier
        if sideways and self.horizontalScrollBar().maximum():
            super().wheelEvent(event)
        else:
            event.ignore()

    @override
    def keyPressEvent(self, event: QKeyEvent) -> None:
        if not self._view.take_key(event):
            super().keyPressEvent(event)

    @override
    def mousePressEvent(self, event: QMouseEvent) -> None:
        self._view.end_selection(event)
        super().mousePressEvent(event)
        self._view.begin_selection(self, event)

    @override
    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        if not self._view.extend_selection(self, event):
            super().mouseMoveEvent(event)

    @override
    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        self._view.offer_menu(self, event, "")


class _Code(QFrame):
    """A code block: its language, a button that copies it, its text."""

    def __init__(self, view: Transcript) -> None:
        super().__init__(view.viewport())
        self.setObjectName("codeBlock")
        self._cell: Cell | None = None
        self._shown = ""
        self._language = QLabel(self)
        self._language.setProperty("role", "caption")
        self._copy = CopyButton(self, tr("Copy code"))
        self._copy.source = lambda: self._cell.text if self._cell else ""
        self.text = _CodeText(self, view)
        self.text.setAccessibleName(tr("Code"))
        self._highlighter = Highlighter(self.text.document())

    def fill(self, cell: Cell, width: int) -> int:
        """Show the code; text that only grew is appended."""
        if cell != self._cell:
            self._cell = cell
            self._language.setText(language_name(cell.language) or tr("Code"))
            self.text.setFont(code_font())
            shown = _broken(cell.text)
            if self._shown and shown.startswith(self._shown):
                cursor = QTextCursor(self.text.document())
                cursor.movePosition(QTextCursor.MoveOperation.End)
                cursor.insertText(shown[len(self._shown) :])
            else:
                self.text.setPlainText(shown)
            self._shown = shown
            self._highlighter.begin(cell.language, shown)
        return self._lay_out(width)

    def _lay_out(self, width: int) -> int:
        pad, head = look().gap(14), look().px(12) + 18
        tall = self._text_height()  # which lays the text out, so that its width is known
        wide = self.text.document().documentLayout().documentSize().width() > width - pad - 4
        height = tall + (self.text.horizontalScrollBar().sizeHint().height() if wide else 0)
        self._language.setGeometry(pad, 4, width - 80, head - 4)
        self._copy.setGeometry(width - 36, 4, 28, 28)
        self.text.setGeometry(pad, head + 4, width - pad - 4, height + 2)
        return head + height + (14 if wide else 18)

    def _text_height(self) -> int:
        """Lines with Chinese are higher than others; where there are many lines, some stand for all."""
        count = self.text.document().blockCount()
        block, height, seen = self.text.document().begin(), 0.0, 0
        while block.isValid() and seen < _MEASURED_LINES:
            height += self.text.blockBoundingGeometry(block).height()
            seen += 1
            block = block.next()
        return math.ceil(height * count / max(1, seen))


class _User(QWidget):
    """What the user wrote, in a bubble at the right."""

    def __init__(self, view: Transcript) -> None:
        super().__init__(view.viewport())
        self._cell: Cell | None = None
        self._width = 0
        self._bubble = QRectF()
        self.text = _Prose(view)
        self.text.setParent(self)
        self._copy = CopyButton(self, tr("Copy message"))
        self._copy.source = lambda: self._cell.turn.message.content if self._cell and self._cell.turn else ""
        self._copy.hide()

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
        self._copy.move(max(0, int(self._bubble.left()) - 34), height - 32)
        self.update()
        return height

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(look().color("bubble"))
        first = self._cell is None or self._cell.first
        last = self._cell is None or self._cell.last
        rect = self._bubble.adjusted(0, 0 if first else -20, 0, 0 if last else 20)
        painter.drawRoundedRect(rect, 16, 16)

    @override
    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.HoverEnter or event.type() == QEvent.Type.Enter:
            self._copy.setVisible(self._cell is not None and self._cell.last)
        elif event.type() == QEvent.Type.Leave:
            self._copy.hide()
        return super().event(event)


class _Head(QWidget):
    """Who answers: the model's name."""

    def __init__(self, view: Transcript) -> None:
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
        painter.drawText(rect, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, self._name)


class _Status(QWidget):
    """What is going on while there is no text yet: words, and a bar where the way is known."""

    def __init__(self, view: Transcript) -> None:
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


class _Foot(QWidget):
    """Below an answer: copy (and the view's regenerate), how it ended, what it took."""

    def __init__(self, view: Transcript) -> None:
        super().__init__(view.viewport())
        self._turn: Turn | None = None
        self.copy = CopyButton(self, tr("Copy answer"))
        self.copy.source = lambda: self._turn.message.content if self._turn else ""
        self._ending = QLabel(self)
        self._ending.setObjectName("answerEnding")
        self._ending.setWordWrap(True)
        self._facts = QLabel(self)
        self._facts.setProperty("role", "caption")
        self._facts.setObjectName("answerFacts")

    def fill(self, cell: Cell, width: int) -> int:
        """Show how an answer ended."""
        turn = cell.turn
        assert turn is not None
        self._turn = turn
        words, serious = ending_words(turn)
        top = 0
        self._ending.setVisible(bool(words))
        if words:
            self._ending.setText(words)
            self._ending.setProperty("role", "problem" if serious else "note")
            self._ending.style().unpolish(self._ending)
            self._ending.style().polish(self._ending)
            pad_x, pad_y = (28, 20) if serious else (0, 0)
            self._ending.setContentsMargins(pad_x // 2, pad_y // 2, pad_x // 2, pad_y // 2)
            room = QRect(0, 0, width - pad_x, 1 << 20)
            lines = self._ending.fontMetrics().boundingRect(room, int(Qt.TextFlag.TextWordWrap), words)
            full, top = min(width, lines.width() + pad_x + 4), lines.height() + pad_y
            self._ending.setGeometry(0, 0, full, top)
            top += 6
        self.copy.setVisible(bool(turn.message.content))
        self.copy.setGeometry(-6, top, 28, 28)
        self._facts.setText(answer_facts(turn))
        left = 26 + (30 if cell.last else 0)
        self._facts.setGeometry(left, top, max(0, width - left), 28)
        return top + 28


class CopyButton(IconButton):
    """Copies a text and says so with a tick."""

    def __init__(self, parent: QWidget, name: str) -> None:
        super().__init__("copy", name, parent, size=16)
        self.source: Callable[[], str] = str
        self._back = timer(self, 1400, lambda: self.show_icon("copy", "faint"), once=True)
        self.show_icon("copy", "faint")
        self.setFixedSize(28, 28)
        self.clicked.connect(self._do)

    def _do(self) -> None:
        QGuiApplication.clipboard().setText(self.source())
        self.show_icon("check", "good")
        self._back.start()


class Transcript(QAbstractScrollArea):
    """The view of a `ChatModel`."""

    regenerate_asked = Signal()

    def __init__(self, model: ChatModel, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("transcript")
        self.setAccessibleName(tr("Conversation"))
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.verticalScrollBar().setSingleStep(24)
        self._model = model
        self._entries: list[_Entry] = []
        self._tops: list[int] = []
        self._total = 0
        self._anchor = (0, 0, 0)  # entry, cell, pixels below the cell's top
        self._stick = True  # at the end, and following it
        self._settling = False
        self._live: dict[tuple[int, int], _CellWidget] = {}
        self._pool: dict[Kind, list[_CellWidget]] = {}
        self._dirty: set[int] = set()
        self._flush = timer(self, _FLUSH_MS, self._flush_dirty, once=True)
        self._origin: tuple[tuple[int, int], int] | None = None
        self._selection: tuple[tuple[int, int], int, tuple[int, int], int] | None = None

        self.regenerate = IconButton("regenerate", tr("Regenerate the answer"), self.viewport(), size=16)
        self.regenerate.setObjectName("regenerate")
        self.regenerate.show_icon("regenerate", "faint")
        self.regenerate.setFixedSize(28, 28)
        self.regenerate.hide()
        self.regenerate.clicked.connect(self.regenerate_asked)
        self._jump = IconButton("down", tr("Go to the end"), self, size=18)
        self._jump.setObjectName("jump")
        self._jump.setFixedSize(36, 36)
        self._jump.hide()
        self._jump.clicked.connect(self.go_to_end)

        model.modelReset.connect(self._reset)
        # Methods, not lambdas: Qt disconnects them when this view goes and the model stays.
        model.rowsInserted.connect(self._inserted)
        model.rowsRemoved.connect(self._removed)
        model.dataChanged.connect(self._changed)
        look().changed.connect(self._restyle)
        self._reset()

    # ---- for the page and for tests

    def toPlainText(self) -> str:
        """The source of all messages, as they can be copied."""
        return "\n\n".join(turn.message.content for turn in self._model.turns)

    def visible_text(self) -> str:
        """What the widgets in view show."""
        texts = []
        for _key, widget in sorted(self._live.items()):
            editor = _editor(widget)
            if editor is not None:
                texts.append(editor.toPlainText())
        return "\n".join(texts)

    def go_to_end(self) -> None:
        """Show the end, and follow it from now on."""
        self._stick = True
        self._settle()

    def at_end(self) -> bool:
        """The end is in view and followed."""
        return self._stick

    # ---- the model speaks

    def _reset(self) -> None:
        for key in list(self._live):
            self._release(key)
        self._selection = self._origin = None
        self._entries = [_Entry(turn, self._estimate_turn(turn)) for turn in self._model.turns]
        self._dirty.clear()
        self._stick = True
        self._settle()

    def _restyle(self) -> None:
        """Other colours or another text size: everything is drawn anew, the place stays."""
        for key in list(self._live):
            self._release(key)
        for widgets in self._pool.values():
            for widget in widgets:
                _widget(widget).deleteLater()
        self._pool.clear()
        for entry in self._entries:
            for place in entry.places or ():
                place.height, place.exact = self._estimate(place.cell), False
            entry.height = self._height(entry.places) if entry.places else self._estimate_turn(entry.turn)
        self._settle()

    def _inserted(self, _parent: QModelIndex, first: int, last: int) -> None:
        for row in range(first, last + 1):
            turn = self._model.turns[row]
            self._entries.insert(row, _Entry(turn, self._estimate_turn(turn)))
        if first > 0:
            self._renew(first - 1)  # its foot is no longer the last
        if any(self._model.turns[row].message.role == "user" for row in range(first, last + 1)):
            self._stick = True
        self._settle()

    def _removed(self, _parent: QModelIndex, first: int, last: int) -> None:
        for key in [key for key in self._live if first <= key[0] <= last]:
            self._release(key)
        del self._entries[first : last + 1]
        self._dirty = {row for row in self._dirty if row < first}
        self._selection = self._origin = None
        if self._entries:
            self._renew(len(self._entries) - 1)
        self._settle()

    def _changed(self, index: QModelIndex) -> None:
        row = index.row()
        ended = self._entries[row].turn.growing and not self._model.turns[row].growing
        self._dirty.add(row)
        if ended:
            self._flush_dirty()
        elif not self._flush.isActive():
            self._flush.start()

    def _flush_dirty(self) -> None:
        begin = time.perf_counter()
        for row in self._dirty:
            self._renew(row)
        self._dirty.clear()
        self._settle()
        # Drawing never takes more than a fifth of the time, however slow the machine.
        spent_ms = (time.perf_counter() - begin) * 1000
        self._flush.setInterval(max(_FLUSH_MS, min(1000, round(spent_ms * 5))))

    def _renew(self, row: int) -> None:
        """Take over the model's turn; cells that did not change keep their widgets."""
        entry = self._entries[row]
        entry.turn = self._model.turns[row]
        if entry.places is None:
            entry.height = self._estimate_turn(entry.turn)
            return
        cells = self._cells(row)
        width = self._width()
        places = entry.places
        for index, cell in enumerate(cells):
            if index < len(places) and places[index].cell.kind == cell.kind:
                place = places[index]
                if place.cell != cell:
                    place.cell = cell
                    if place.widget is not None:
                        place.height = place.widget.fill(cell, width)
                    else:
                        place.height, place.exact = self._estimate(cell), False
            elif index < len(places):
                self._release((row, index))
                places[index] = _Place(cell, self._estimate(cell))
            else:
                places.append(_Place(cell, self._estimate(cell)))
        for index in range(len(cells), len(places)):
            self._release((row, index))
        del places[len(cells) :]
        entry.height = self._height(places)

    def _cells(self, row: int) -> list[Cell]:
        entry = self._entries[row]
        turn = entry.turn
        message = turn.message
        if message.role == "user":
            parts = plain_parts(message.content)
            end = len(parts) - 1
            return [
                Cell("user", part.text, turn=turn, first=index == 0, last=index == end)
                for index, part in enumerate(parts)
            ]
        if not message.content.startswith(entry.fed):
            entry.splitter = Splitter()
        entry.fed = message.content
        cells = [Cell("head", message.model or tr("Answer"))]
        cells += [
            Cell("code" if part.kind == "code" else "prose", part.text, part.language)
            for part in entry.splitter.feed(message.content)
        ]
        if turn.growing:
            if turn.activity is None or turn.activity.stage != "writing" or not message.content:
                cells.append(Cell("status", turn=turn))
        else:
            cells.append(Cell("foot", turn=turn, last=row == len(self._entries) - 1))
        return cells

    # ---- layout

    def _width(self) -> int:
        return max(200, min(look().px(_COLUMN), self._room() - 2 * _EDGE))

    def _left(self) -> int:
        return max(_EDGE, (self._room() - self._width()) // 2)

    def _room(self) -> int:
        """The width beside the scroll bar, whether it is there or not: the text does not jump when it appears."""
        return self.width() - self.verticalScrollBar().sizeHint().width()

    def _estimate(self, cell: Cell) -> int:
        """A height before it is measured: characters over the width, Chinese counted double."""
        line = look().px(14) * 1.6
        if cell.kind == "code":
            return int((cell.text.count("\n") + 1) * look().px(13) * 1.2) + 56
        if cell.kind in {"prose", "user"}:
            return self._estimate_text(cell.text, line)
        return 30

    def _estimate_text(self, text: str, line: float) -> int:
        columns = (len(text) + len(text.encode("utf-8", "replace"))) / 2
        rows = columns * look().px(14) * 0.5 / self._width() + text.count("\n") * 0.6 + 1
        return int(rows * line) + 10

    def _estimate_turn(self, turn: Turn) -> int:
        return self._estimate_text(turn.message.content, look().px(14) * 1.5) + (
            30 if turn.message.role == "user" else 60
        )

    @staticmethod
    def _height(places: list[_Place]) -> int:
        height = sum(place.height + _GAPS[place.cell.kind] for place in places)
        return height - (_GAPS[places[-1].cell.kind] if places else 0)

    def _stack(self) -> None:
        """Put the entries one below the other."""
        y = _TOP
        self._tops = []
        for entry in self._entries:
            entry.top = y
            self._tops.append(y)
            y += entry.height + _GAP
        self._total = y

    def _y(self, row: int, index: int) -> int:
        entry = self._entries[row]
        y = entry.top
        for place in (entry.places or [])[:index]:
            y += place.height + _GAPS[place.cell.kind]
        return y

    def _wanted_value(self) -> int:
        """Where the scroll bar has to stand for the anchor, or the end, to be where it was."""
        last = max(0, self._total - self.viewport().height())
        if self._stick or not self._entries:
            return last
        row = min(self._anchor[0], len(self._entries) - 1)
        return max(0, min(last, self._y(row, self._anchor[1]) + self._anchor[2]))

    def _settle(self) -> None:
        """Lay out what is near the viewport, measure it, keep the anchor, place the widgets."""
        if self._settling:
            return
        self._settling = True
        try:
            for _attempt in range(10):
                self._stack()
                value = self._wanted_value()
                near: set[tuple[int, int]] = set()
                if not self._measure(value, near):
                    break
            for key in [key for key in self._live if key not in near]:
                self._release(key)
            bar = self.verticalScrollBar()
            bar.setPageStep(self.viewport().height())
            bar.setRange(0, max(0, self._total - self.viewport().height()))
            bar.setValue(value)
            self._arrange(value)
        finally:
            self._settling = False

    def _near(self, value: int) -> Iterator[int]:
        """Rows of entries that reach into the viewport or close to it."""
        low, high = value - _AHEAD, value + self.viewport().height() + _AHEAD
        row = max(0, bisect_right(self._tops, low) - 1)
        while row < len(self._entries) and self._entries[row].top <= high:
            yield row
            row += 1

    def _measure(self, value: int, near: set[tuple[int, int]]) -> bool:
        """Give widgets to the cells near the viewport; True when a height turned out different."""
        low, high = value - _AHEAD, value + self.viewport().height() + _AHEAD
        width, different = self._width(), False
        for row in self._near(value):
            entry = self._entries[row]
            if entry.places is None:
                entry.places = [_Place(cell, self._estimate(cell)) for cell in self._cells(row)]
                height = self._height(entry.places)
                different |= height != entry.height
                entry.height = height
            y = entry.top
            for index, place in enumerate(entry.places):
                if y + place.height >= low and y <= high:
                    near.add((row, index))
                    if place.widget is None:
                        place.widget = self._take(place.cell.kind)
                        self._live[row, index] = place.widget
                        place.exact = False
                    if not place.exact:
                        height = place.widget.fill(place.cell, width)
                        different |= height != place.height
                        place.height, place.exact = height, True
                        self._mark(row, index)
                y += place.height + _GAPS[place.cell.kind]
            entry.height = self._height(entry.places)
        return different

    def _arrange(self, value: int) -> None:
        left, width = self._left(), self._width()
        for (row, index), widget in self._live.items():
            places = self._entries[row].places
            assert places is not None
            _widget(widget).setGeometry(left, self._y(row, index) - value, width, places[index].height)
            _widget(widget).show()
        entry = self._entries[-1] if self._entries else None
        ended = entry is not None and entry.turn.message.role == "assistant" and not entry.turn.growing
        self.regenerate.setVisible(ended)
        if entry is not None and ended:
            bottom = entry.top + entry.height - value
            shift = 24 if entry.turn.message.content else -6
            self.regenerate.move(left + shift, bottom - 28)
            self.regenerate.raise_()
        away = not self._stick and self._total > self.viewport().height()
        self._jump.setVisible(away)
        self._jump.move((self.width() - self._jump.width()) // 2, self.height() - self._jump.height() - 14)
        self._jump.raise_()

    def _take(self, kind: Kind) -> _CellWidget:
        pool = self._pool.setdefault(kind, [])
        if pool:
            return pool.pop()
        made: dict[Kind, type[_Head | _User | _Prose | _Code | _Status | _Foot]] = {
            "head": _Head,
            "user": _User,
            "prose": _Prose,
            "code": _Code,
            "status": _Status,
            "foot": _Foot,
        }
        return made[kind](self)

    def _release(self, key: tuple[int, int]) -> None:
        widget = self._live.pop(key, None)
        if widget is None:
            return
        row, index = key
        places = self._entries[row].places
        if places is not None and index < len(places):
            place = places[index]
            place.widget = None
            kind = place.cell.kind
            self._pool.setdefault(kind, []).append(widget)
        _widget(widget).hide()

    # ---- Qt

    @override
    def scrollContentsBy(self, dx: int, dy: int) -> None:
        if self._settling:
            return
        bar = self.verticalScrollBar()
        self._stick = bar.value() >= bar.maximum() - 6
        self._take_anchor(bar.value())
        self._settle()

    def _take_anchor(self, value: int) -> None:
        if not self._entries:
            return
        row = max(0, bisect_right(self._tops, value) - 1)
        y = self._entries[row].top
        for index, place in enumerate(self._entries[row].places or []):
            below = y + place.height + _GAPS[place.cell.kind]
            if below > value:
                self._anchor = (row, index, value - y)
                return
            y = below
        self._anchor = (row, 0, value - self._entries[row].top)

    @override
    def resizeEvent(self, event: QResizeEvent) -> None:
        if event.size().width() != event.oldSize().width():
            for entry in self._entries:
                for place in entry.places or ():
                    place.exact = False
                if entry.places is None:
                    entry.height = self._estimate_turn(entry.turn)
        self._settle()

    @override
    def keyPressEvent(self, event: QKeyEvent) -> None:
        bar = self.verticalScrollBar()
        if event.matches(QKeySequence.StandardKey.MoveToStartOfLine) or event.key() == Qt.Key.Key_Home:
            bar.setValue(0)
        elif event.matches(QKeySequence.StandardKey.MoveToEndOfLine) or event.key() == Qt.Key.Key_End:
            self.go_to_end()
        else:
            super().keyPressEvent(event)

    # ---- selection across cells

    def _key_of(self, editor: QTextEdit | QPlainTextEdit) -> tuple[int, int] | None:
        return next((key for key, widget in self._live.items() if _editor(widget) is editor), None)

    def end_selection(self, event: QMouseEvent) -> None:
        """A new press ends the old selection first: Qt would begin to drag the selected text."""
        if event.button() == Qt.MouseButton.LeftButton and not event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
            self._clear_selection()

    def begin_selection(self, editor: QTextEdit | QPlainTextEdit, event: QMouseEvent) -> None:
        """A mouse button went down in a cell."""
        if event.button() != Qt.MouseButton.LeftButton:
            return
        key = self._key_of(editor)
        self._clear_selection(keep=editor)
        self._origin = None if key is None else (key, editor.textCursor().anchor())

    def extend_selection(self, editor: QTextEdit | QPlainTextEdit, event: QMouseEvent) -> bool:
        """The mouse is dragged; True when this concerns more cells than `editor`."""
        if self._origin is None or not event.buttons() & Qt.MouseButton.LeftButton:
            return False
        point = event.globalPosition().toPoint()
        local = self.viewport().mapFromGlobal(point)
        beyond = min(0, local.y()) + max(0, local.y() - self.viewport().height())
        if beyond:
            bar = self.verticalScrollBar()
            bar.setValue(bar.value() + max(-60, min(60, beyond)))
        target = self._editor_at(local.y())
        if target is None:
            return False
        key, other = target
        origin, anchor = self._origin
        if other is editor or key == origin:
            if self._selection is not None:
                self._clear_selection(keep=editor)
            return False
        position = other.cursorForPosition(other.viewport().mapFromGlobal(point)).position()
        if key > origin:
            self._selection = (origin, anchor, key, position)
        else:
            self._selection = (key, position, origin, anchor)
        for row, index in self._live:
            self._mark(row, index)
        return True

    def _editor_at(self, y: int) -> tuple[tuple[int, int], QTextEdit | QPlainTextEdit] | None:
        """The editor nearest to a height in the viewport."""
        best = None
        for key, widget in self._live.items():
            editor = _editor(widget)
            if editor is None or not _widget(widget).isVisible():
                continue
            rect = _widget(widget).geometry()
            distance = max(rect.top() - y, y - rect.bottom(), 0)
            if best is None or distance < best[0]:
                best = (distance, key, editor)
        return None if best is None else (best[1], best[2])

    def _mark(self, row: int, index: int) -> None:
        """Show the part of the selection that lies in one cell."""
        widget = self._live.get((row, index))
        editor = _editor(widget) if widget is not None else None
        if editor is None:
            return
        cursor = editor.textCursor()
        if self._selection is None:
            if cursor.hasSelection():
                cursor.clearSelection()
                editor.setTextCursor(cursor)
            return
        begin, begin_at, end, end_at = self._selection
        key = (row, index)
        length = editor.document().characterCount() - 1
        if not begin <= key <= end:
            cursor.clearSelection()
        else:
            first = min(length, begin_at) if key == begin else 0
            last = min(length, end_at) if key == end else length
            backwards = self._origin is not None and self._origin[0] == end and key == end
            cursor.setPosition(last if backwards else first)
            cursor.setPosition(first if backwards else last, QTextCursor.MoveMode.KeepAnchor)
        editor.setTextCursor(cursor)

    def _clear_selection(self, keep: QTextEdit | QPlainTextEdit | None = None) -> None:
        self._selection = None
        for widget in self._live.values():
            editor = _editor(widget)
            if editor is not None and editor is not keep and editor.textCursor().hasSelection():
                cursor = editor.textCursor()
                cursor.clearSelection()
                editor.setTextCursor(cursor)

    def select_all(self) -> None:
        """Select the whole conversation."""
        if not self._entries:
            return
        for row, entry in enumerate(self._entries):
            if entry.places is None:
                entry.places = [_Place(cell, self._estimate(cell)) for cell in self._cells(row)]
        last = self._entries[-1].places or []
        self._selection = ((0, 0), 0, (len(self._entries) - 1, len(last)), 1 << 40)
        self._settle()
        for row, index in self._live:
            self._mark(row, index)

    def selected_text(self) -> str:
        """The text of the selection across cells; "" when there is none."""
        if self._selection is None:
            return ""
        begin, begin_at, end, end_at = self._selection
        texts = []
        for row in range(begin[0], end[0] + 1):
            for index, place in enumerate(self._entries[row].places or ()):
                key = (row, index)
                if begin <= key <= end and place.cell.kind in {"prose", "code", "user"}:
                    text = _shown_text(place.cell)
                    units = text.encode("utf-16-le", "surrogatepass")
                    units = units[2 * begin_at if key == begin else 0 : 2 * end_at if key == end else None]
                    texts.append(units.decode("utf-16-le", "replace"))
        return "\n\n".join(texts)

    def take_key(self, event: QKeyEvent) -> bool:
        """Keys that mean the conversation rather than one cell; True when taken or left to the view."""
        if event.matches(QKeySequence.StandardKey.Copy) and self._selection is not None:
            QGuiApplication.clipboard().setText(self.selected_text())
            return True
        if event.matches(QKeySequence.StandardKey.SelectAll):
            self.select_all()
            return True
        moves = {
            Qt.Key.Key_PageUp,
            Qt.Key.Key_PageDown,
            Qt.Key.Key_Home,
            Qt.Key.Key_End,
            Qt.Key.Key_Up,
            Qt.Key.Key_Down,
        }
        if event.key() in moves and not event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
            event.ignore()
            return True
        return False

    def offer_menu(self, editor: QTextEdit | QPlainTextEdit, event: QContextMenuEvent, address: str) -> None:
        """The menu of a cell."""
        menu = QMenu(self)
        selected = self.selected_text() or editor.textCursor().selectedText().replace("\u2029", "\n")
        selected = selected.replace("\u2028", "\n")
        copy = menu.addAction(tr("Copy"))
        copy.setShortcut(QKeySequence.StandardKey.Copy)
        copy.setEnabled(bool(selected))
        copy.triggered.connect(lambda: QGuiApplication.clipboard().setText(selected))
        key = self._key_of(editor)
        if key is not None:
            source = self._entries[key[0]].turn.message.content
            menu.addAction(tr("Copy message")).triggered.connect(lambda: QGuiApplication.clipboard().setText(source))
        if address:
            menu.addAction(tr("Copy address")).triggered.connect(lambda: QGuiApplication.clipboard().setText(address))
        menu.addSeparator()
        menu.addAction(tr("Select all")).triggered.connect(self.select_all)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(event.globalPos())

    def offer_link(self, address: str, place: QPoint) -> None:
        """A link was clicked: say where it goes before anything leaves this program."""
        menu = QMenu(self)
        shown = address if len(address) <= 90 else address[:89] + "…"
        menu.addAction(shown).setEnabled(False)
        menu.addSeparator()
        menu.addAction(tr("Copy address")).triggered.connect(lambda: QGuiApplication.clipboard().setText(address))
        if QUrl(address).scheme().lower() in {"http", "https", "mailto"}:
            action = menu.addAction(tr("Open outside Inglenook"))
            action.triggered.connect(lambda: QDesktopServices.openUrl(QUrl(address)))
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(place)


def _calm(editor: QTextEdit | QPlainTextEdit) -> None:
    """Read-only, without frame, bars and background of its own."""
    editor.setReadOnly(True)
    editor.setFrameShape(QFrame.Shape.NoFrame)
    editor.setFocusPolicy(Qt.FocusPolicy.ClickFocus)
    editor.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
    editor.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
    editor.viewport().setAutoFillBackground(False)
    editor.setAcceptDrops(False)
    editor.setAccessibleName(tr("Message"))


def _editor(widget: _CellWidget) -> QTextEdit | QPlainTextEdit | None:
    if isinstance(widget, _Prose):
        return widget
    if isinstance(widget, _User | _Code):
        return widget.text
    return None


def _widget(widget: _CellWidget) -> QWidget:
    assert isinstance(widget, QWidget)
    return widget


def _shown_text(cell: Cell) -> str:
    if cell.kind != "prose":
        return _broken(cell.text) if cell.kind == "code" else cell.text
    document = QTextDocument()
    write_markdown(document, cell.text)
    return document.toPlainText()


def _broken(code: str) -> str:
    """Code with lines that are too long to lay out broken; what is copied by the button is the original."""
    code = code.replace("\r", "").replace("\0", "\ufffd")
    if len(code) <= _CODE_LINE:
        return code
    lines = []
    for line in code.split("\n"):
        lines += [line[at : at + _CODE_LINE] for at in range(0, max(1, len(line)), _CODE_LINE)]
    return "\n".join(lines)
