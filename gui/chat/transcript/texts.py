"""The texts of a conversation: prose and code that can be selected and copied across cells."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from PySide6.QtCore import QPoint, QRectF, QSize, Qt
from PySide6.QtGui import (
    QContextMenuEvent,
    QGuiApplication,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QTextCursor,
    QTextFormat,
    QWheelEvent,
)
from PySide6.QtWidgets import QFrame, QLabel, QPlainTextEdit, QTextEdit, QWidget
from typing_extensions import override

from gui.chat.highlight import Highlighter, language_name
from gui.chat.markdown import write_markdown, write_plain
from gui.chat.turns import Turn
from gui.kit.controls import IconButton
from gui.kit.i18n import tr
from gui.kit.theme import code_font, look
from gui.kit.timing import timer

__all__ = ["Cell", "CellWidget", "Code", "CopyButton", "Desk", "Kind", "Prose", "broken"]

_CODE_LINE = 4000  # longer lines of code are broken when shown: their layout would stop the window
_MEASURED_LINES = 300

Kind = Literal["head", "unseen", "files", "user", "thought", "thinking", "prose", "code", "status", "foot"]


@dataclass(frozen=True, slots=True)
class Cell:
    """What one piece shows. `turn` belongs to user, thought, status and foot; open: a thought is unfolded."""

    kind: Kind
    text: str = ""
    language: str = ""
    turn: Turn | None = None
    first: bool = True
    last: bool = True
    open: bool = False


class CellWidget(Protocol):
    """What the view asks of a cell's widget; all are QWidgets."""

    def fill(self, cell: Cell, width: int) -> int:
        """Show `cell` at `width` pixels; the height it needs."""
        ...


class Desk(Protocol):
    """What a cell's widget asks of the view it lies in."""

    def viewport(self) -> QWidget:
        """The parent of all cells."""
        ...

    def act(self, action: str, message: str) -> None:
        """Something is to be done with a message."""
        ...

    def offer_actions(self, message: str, place: QPoint) -> None:
        """Show the menu of what can be done with a message."""
        ...

    def take_key(self, event: QKeyEvent) -> bool:
        """A key that may mean the conversation; True when it was taken."""
        ...

    def end_selection(self, event: QMouseEvent) -> None:
        """A mouse button is about to go down."""
        ...

    def begin_selection(self, editor: QTextEdit | QPlainTextEdit, event: QMouseEvent) -> None:
        """A mouse button went down."""
        ...

    def extend_selection(self, editor: QTextEdit | QPlainTextEdit, event: QMouseEvent) -> bool:
        """The mouse is dragged; True when this concerns more than one text."""
        ...

    def offer_menu(self, editor: QTextEdit | QPlainTextEdit, event: QContextMenuEvent, address: str) -> None:
        """Show the menu of a text."""
        ...

    def offer_link(self, address: str, place: QPoint) -> None:
        """Say where a link goes."""
        ...


class _Selectable:
    """What texts have in common whose selection belongs to the whole conversation; mixed into Qt's editors."""

    _view: Desk

    def address_at(self, place: QPoint) -> str:
        """The address of a link there; "" when there is none."""
        del place
        return ""

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """Keys that mean the conversation go there."""
        if not self._view.take_key(event):
            super().keyPressEvent(event)  # type: ignore[misc]

    def mousePressEvent(self, event: QMouseEvent) -> None:
        """A selection begins."""
        self._view.end_selection(event)
        super().mousePressEvent(event)  # type: ignore[misc]
        self._view.begin_selection(self, event)  # type: ignore[arg-type]

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        """A selection grows, beyond this text perhaps."""
        if not self._view.extend_selection(self, event):  # type: ignore[arg-type]
            super().mouseMoveEvent(event)  # type: ignore[misc]

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        """The menu of a text."""
        self._view.offer_menu(self, event, self.address_at(event.pos()))  # type: ignore[arg-type]


class Prose(_Selectable, QTextEdit):
    """Text that can be selected and copied: a part of an answer, or what the user wrote."""

    def __init__(self, view: Desk) -> None:
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
    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        over_link = bool(self.anchorAt(event.position().toPoint()))
        self.viewport().setCursor(Qt.CursorShape.PointingHandCursor if over_link else Qt.CursorShape.IBeamCursor)
        super().mouseMoveEvent(event)

    @override
    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        super().mouseReleaseEvent(event)
        address = self.anchorAt(event.position().toPoint())
        if address and event.button() == Qt.MouseButton.LeftButton and not self.textCursor().hasSelection():
            self._view.offer_link(address, event.globalPosition().toPoint())

    @override
    def address_at(self, place: QPoint) -> str:
        return self.anchorAt(place)


class _CodeText(_Selectable, QPlainTextEdit):
    """The text of a code block: never wrapped, selectable."""

    def __init__(self, parent: QWidget, view: Desk) -> None:
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


class Code(QFrame):
    """A code block: its language, a button that copies it, its text."""

    def __init__(self, view: Desk) -> None:
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
            shown = broken(cell.text)
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


def broken(code: str) -> str:
    """Code with lines that are too long to lay out broken; what is copied by the button is the original."""
    code = code.replace("\r", "").replace("\0", "\ufffd")
    if len(code) <= _CODE_LINE:
        return code
    lines = []
    for line in code.split("\n"):
        lines += [line[at : at + _CODE_LINE] for at in range(0, max(1, len(line)), _CODE_LINE)]
    return "\n".join(lines)
