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

import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from PySide6.QtCore import QModelIndex, QPoint, Qt, QUrl, Signal
from PySide6.QtGui import (
    QContextMenuEvent,
    QDesktopServices,
    QGuiApplication,
    QKeyEvent,
    QKeySequence,
    QMouseEvent,
    QResizeEvent,
    QTextCursor,
    QTextDocument,
)
from PySide6.QtWidgets import QAbstractScrollArea, QFrame, QMenu, QPlainTextEdit, QSizePolicy, QTextEdit, QWidget
from typing_extensions import override

from gui.chat.markdown import Splitter, plain_parts, write_markdown
from gui.chat.transcript.parts import Files, Foot, Head, Status, Thinking, Thought, Unseen, User
from gui.chat.transcript.texts import Cell, CellWidget, Code, Kind, Prose, broken
from gui.chat.turns import ChatModel, Turn
from gui.data.history import thought_of
from gui.kit.controls import IconButton
from gui.kit.i18n import tr
from gui.kit.theme import look
from gui.kit.timing import timer

__all__ = ["Transcript"]

_COLUMN = 760  # widest line of text, at 100 %
_EDGE = 28  # least space beside the column
_TOP = 26
_GAP = 26  # between messages
_GAP_BELOW_USER = 2  # where the row of its buttons is
_AHEAD = 300  # pixels above and below the viewport that are laid out beforehand
_FLUSH_MS = 50

_GAPS: dict[Kind, int] = {
    "head": 6,
    "unseen": 4,
    "files": 6,
    "user": 2,
    "thought": 10,
    "thinking": 10,
    "prose": 12,
    "code": 12,
    "status": 6,
    "foot": 0,
}
_TEXTS = {"prose", "code", "user", "thinking"}
_MAKERS: dict[Kind, type[Files | Foot | Head | Status | Thinking | Thought | Unseen | User | Prose | Code]] = {
    "head": Head,
    "unseen": Unseen,
    "files": Files,
    "user": User,
    "thought": Thought,
    "thinking": Thinking,
    "prose": Prose,
    "code": Code,
    "status": Status,
    "foot": Foot,
}


@dataclass(slots=True)
class _Place:
    """A cell in the layout: its height (measured when `exact`) and its widget while it is near the viewport."""

    cell: Cell
    height: int
    exact: bool = False
    widget: CellWidget | None = None


@dataclass(slots=True)
class _Entry:
    turn: Turn
    height: int
    top: int = 0
    places: list[_Place] | None = None  # None until it first comes near the viewport
    splitter: Splitter = field(default_factory=Splitter)
    fed: str = ""


class Transcript(QAbstractScrollArea):
    """The view of a `ChatModel`."""

    asked = Signal(str, str)  # what is to be done, and the message

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
        self._live: dict[tuple[int, int], CellWidget] = {}
        self._pool: dict[Kind, list[CellWidget]] = {}
        self._dirty: set[int] = set()
        self._flush = timer(self, _FLUSH_MS, self._flush_dirty, once=True)
        self._origin: tuple[tuple[int, int], int] | None = None
        self._selection: tuple[tuple[int, int], int, tuple[int, int], int] | None = None
        self._unfolded: set[str] = set()  # messages whose thoughts are shown

        self.regenerate = IconButton("regenerate", tr("Regenerate the answer"), self.viewport(), size=16)
        self.regenerate.setObjectName("regenerate")
        self.regenerate.show_icon("regenerate", "faint")
        self.regenerate.setFixedSize(28, 28)
        self.regenerate.hide()
        self.regenerate.clicked.connect(lambda: self.act("regenerate", self._entries[-1].turn.message.id))
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
        self._unfolded.clear()
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
        turn = self._entries[row].turn
        cells = []
        if turn.unseen:
            cells.append(Cell("unseen", tr("The model no longer reads this")))
        elif turn.message.facts.get("pinned"):
            cells.append(Cell("unseen", tr("Pinned: the model always reads this")))
        if turn.message.role == "user":
            return cells + self._user_cells(turn)
        cells.append(Cell("head", turn.message.model or tr("Answer")))
        text = turn.message.content
        thought = thought_of(text)
        if thought is not None:
            text = thought.answer
            unfolded = turn.message.id in self._unfolded
            cells.append(Cell("thought", turn=turn, open=unfolded))
            if unfolded and thought.text:
                cells += [Cell("thinking", part.text) for part in plain_parts(thought.text)]
        cells += self._answer_cells(self._entries[row], text)
        if turn.growing:
            said = bool(text) or thought is not None
            if turn.activity is None or turn.activity.stage != "writing" or not said:
                cells.append(Cell("status", turn=turn))
        else:
            cells.append(Cell("foot", turn=turn, last=row == len(self._entries) - 1))
        return cells

    @staticmethod
    def _user_cells(turn: Turn) -> list[Cell]:
        message = turn.message
        cells = []
        if message.attached:
            cells.append(Cell("files", "\n".join(file.name for file in message.attached)))
        if message.content or not message.attached:
            parts = plain_parts(message.content)
            end = len(parts) - 1
            cells += [
                Cell("user", part.text, turn=turn, first=index == 0, last=index == end)
                for index, part in enumerate(parts)
            ]
        return cells

    @staticmethod
    def _answer_cells(entry: _Entry, text: str) -> list[Cell]:
        if not text.startswith(entry.fed):
            entry.splitter = Splitter()
        entry.fed = text
        return [
            Cell("code" if part.kind == "code" else "prose", part.text, part.language)
            for part in entry.splitter.feed(text)
        ]

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
        if cell.kind in {"prose", "user", "thinking"}:
            return self._estimate_text(cell.text, line) + (30 if cell.kind == "user" and cell.last else 0)
        return 30

    def _estimate_text(self, text: str, line: float) -> int:
        columns = (len(text) + len(text.encode("utf-8", "replace"))) / 2
        rows = columns * look().px(14) * 0.5 / self._width() + text.count("\n") * 0.6 + 1
        return int(rows * line) + 10

    def _estimate_turn(self, turn: Turn) -> int:
        return self._estimate_text(turn.message.content, look().px(14) * 1.5) + 60

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
            y += entry.height + (_GAP_BELOW_USER if entry.turn.message.role == "user" else _GAP)
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
        foot = entry.places[-1] if entry is not None and entry.places else None
        slot = foot.widget.slot if foot is not None and isinstance(foot.widget, Foot) else None
        ended = entry is not None and entry.turn.message.role == "assistant" and not entry.turn.growing
        self.regenerate.setVisible(ended)
        if entry is not None and ended:
            bottom = entry.top + entry.height - value
            self.regenerate.move(left + (slot if slot is not None else 24), bottom - 28)
            self.regenerate.raise_()
        away = not self._stick and self._total > self.viewport().height()
        self._jump.setVisible(away)
        self._jump.move((self.width() - self._jump.width()) // 2, self.height() - self._jump.height() - 14)
        self._jump.raise_()

    def _take(self, kind: Kind) -> CellWidget:
        pool = self._pool.setdefault(kind, [])
        if pool:
            return pool.pop()
        return _MAKERS[kind](self)

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
                if begin <= key <= end and place.cell.kind in _TEXTS:
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

    def act(self, action: str, message: str) -> None:
        """Something is to be done with a message: here, or by whoever listens to `asked`."""
        if action == "unfold":
            self._unfolded ^= {message}
            for row, entry in enumerate(self._entries):
                if entry.turn.message.id == message:
                    self._stick = False
                    self._renew(row)
            self._settle()
        else:
            self.asked.emit(action, message)

    def offer_actions(self, message: str, place: QPoint) -> None:
        """The menu of an answer or a question."""
        menu = QMenu(self)
        menu.setObjectName("messageMenu")
        self._add_actions(menu, message)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(place)

    def _add_actions(self, menu: QMenu, identity: str) -> None:
        turn = next((entry.turn for entry in self._entries if entry.turn.message.id == identity), None)
        if turn is None:
            return
        question = turn.message.role == "user"
        idle = not any(entry.turn.growing for entry in self._entries)
        actions = [("edit", tr("Edit…"), idle)]
        if not question:
            actions += [
                ("regenerate", tr("Regenerate"), idle),
                ("continue", tr("Continue"), idle and bool(turn.message.content)),
                ("tokens", tr("Token view…"), not turn.growing),
            ]
        actions += [
            ("pin", tr("Pin for the model") if not turn.message.facts.get("pinned") else tr("Unpin"), not turn.growing),
            ("branch", tr("New chat from here"), not turn.growing),
            ("delete", tr("Delete from here on…"), idle),
        ]
        for action, words, possible in actions:
            made = menu.addAction(words)
            made.setEnabled(possible)
            made.triggered.connect(lambda _on=False, action=action: self.act(action, identity))

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
        menu.addAction(tr("Select all")).triggered.connect(self.select_all)
        if key is not None:
            menu.addSeparator()
            self._add_actions(menu, self._entries[key[0]].turn.message.id)
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


def _editor(widget: CellWidget) -> QTextEdit | QPlainTextEdit | None:
    if isinstance(widget, Prose):
        return widget
    if isinstance(widget, User | Code | Thinking):
        return widget.text
    return None


def _widget(widget: CellWidget) -> QWidget:
    assert isinstance(widget, QWidget)
    return widget


def _shown_text(cell: Cell) -> str:
    if cell.kind != "prose":
        return broken(cell.text) if cell.kind == "code" else cell.text
    document = QTextDocument()
    write_markdown(document, cell.text)
    return document.toPlainText()
