"""The list of conversations: its model, how a row is painted, renaming in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from PySide6.QtCore import (
    QAbstractItemModel,
    QAbstractListModel,
    QEvent,
    QItemSelectionModel,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QPoint,
    QRect,
    QRectF,
    QSize,
    Qt,
    Signal,
)
from PySide6.QtGui import QKeyEvent, QMouseEvent, QPainter
from PySide6.QtWidgets import (
    QAbstractItemView,
    QLineEdit,
    QListView,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QWidget,
)
from typing_extensions import override

from gui.data.store import Conversation
from gui.kit.controls import LineEdit
from gui.kit.i18n import tr
from gui.kit.icons import paint_icon
from gui.kit.theme import look

__all__ = ["ChatList", "ChatListModel", "Heading"]

Index = QModelIndex | QPersistentModelIndex


@dataclass(frozen=True, slots=True)
class Heading:
    """A line above the first conversation of a group, in its row; a closed folder has a row of its own.

    folder: whose line it is, "" for a date
    """

    text: str
    folder: str = ""
    closed: bool = False


class ChatListModel(QAbstractListModel):
    """Conversations in the order in which they are shown, some with a heading; some of them being answered."""

    RowRole = Qt.ItemDataRole.UserRole
    HeadingRole = Qt.ItemDataRole.UserRole + 2
    RunningRole = Qt.ItemDataRole.UserRole + 1

    def __init__(self, rename: Callable[[str, str], None], closed: Iterable[str] = ()) -> None:
        super().__init__()
        self._rename = rename
        self._closed = frozenset(closed)
        self._grouped = True
        self.conversations: list[Conversation] = []
        self.rows: list[Heading | Conversation] = []
        self.headings: dict[int, Heading] = {}  # by row
        self.running: frozenset[str] = frozenset()

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008 (Qt's signature)
        """One row per conversation and closed folder."""
        return 0 if parent.isValid() else len(self.rows)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        """The title, or the conversation itself."""
        row = self.rows[index.row()]
        if role == self.RowRole:
            return row
        if role == self.HeadingRole:
            return self.headings.get(index.row())
        if isinstance(row, Heading):
            shown = {Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.AccessibleTextRole}
            return row.text if role in shown else None
        match role:
            case Qt.ItemDataRole.DisplayRole | Qt.ItemDataRole.EditRole | Qt.ItemDataRole.AccessibleTextRole:
                return row.title
            case Qt.ItemDataRole.ToolTipRole:
                return row.title
            case self.RunningRole:
                return row.id in self.running
        return None

    def flags(self, index: Index) -> Qt.ItemFlag:
        """Titles can be edited in place."""
        row = self.rows[index.row()] if index.isValid() else None
        if isinstance(row, Heading):
            return Qt.ItemFlag.ItemIsEnabled
        return super().flags(index) | Qt.ItemFlag.ItemIsEditable

    def setData(self, index: Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        """A new title."""
        row = self.rows[index.row()]
        if role != Qt.ItemDataRole.EditRole or isinstance(row, Heading):
            return False
        self._rename(row.id, str(value))
        return True

    def show(self, conversations: list[Conversation], *, grouped: bool = True) -> None:
        """Show other conversations, or the same in another order."""
        self.conversations = conversations
        self._grouped = grouped
        rows, headings = _grouped(conversations, self._closed) if grouped else ([*conversations], {})
        if (list(map(_identity, rows)), headings) == (list(map(_identity, self.rows)), self.headings):
            self.rows = rows
            self._say_changed()
            return
        self.beginResetModel()
        self.rows, self.headings = rows, headings
        self.endResetModel()

    def close_folders(self, closed: Iterable[str]) -> None:
        """Show only the headings of these folders."""
        self._closed = frozenset(closed)
        self.show(self.conversations, grouped=self._grouped)

    def mark_running(self, running: frozenset[str]) -> None:
        """These are being answered now."""
        if running != self.running:
            self.running = running
            self._say_changed()

    def _say_changed(self) -> None:
        if self.rows:
            self.dataChanged.emit(self.index(0), self.index(len(self.rows) - 1))


def _identity(row: Heading | Conversation) -> object:
    return row.id if isinstance(row, Conversation) else row


def _grouped(
    conversations: Sequence[Conversation], closed: frozenset[str]
) -> tuple[list[Heading | Conversation], dict[int, Heading]]:
    """Pinned ones, then folders by name, then the rest by their age; the heading of each group by its first row."""
    rows: list[Heading | Conversation] = []
    headings: dict[int, Heading] = {}

    def add(heading: Heading, group: Sequence[Conversation]) -> None:
        if group:
            headings[len(rows)] = heading
            rows.extend(group)

    add(Heading(tr("Pinned")), [known for known in conversations if known.pinned])
    folders: dict[str, list[Conversation]] = {}
    for known in conversations:
        if known.folder and not known.pinned:
            folders.setdefault(known.folder, []).append(known)
    for folder, inside in sorted(folders.items(), key=lambda item: item[0].casefold()):
        if folder in closed:
            rows.append(Heading(folder, folder, closed=True))
        else:
            add(Heading(folder, folder), inside)
    today = datetime.now().astimezone().replace(hour=0, minute=0, second=0, microsecond=0).timestamp()
    day = 86_400
    ages = ((today, tr("Today")), (today - day, tr("Yesterday")), (today - 6 * day, tr("The last seven days")))
    dated: dict[str, list[Conversation]] = {}
    for known in conversations:
        if not known.pinned and not known.folder:
            age = next((words for since, words in ages if known.changed_s >= since), tr("Older"))
            dated.setdefault(age, []).append(known)
    for age, group in dated.items():
        add(Heading(age), group)
    return rows, headings


def _heading_height() -> int:
    return look().px(12) + 16


class _Row(QStyledItemDelegate):
    """A conversation: title, a line of the text that was found, a dot while it is answered."""

    @override
    def sizeHint(self, option: QStyleOptionViewItem, index: Index) -> QSize:
        row = index.data(ChatListModel.RowRole)
        if isinstance(row, Heading):
            return QSize(120, _heading_height())
        above = _heading_height() if index.data(ChatListModel.HeadingRole) is not None else 0
        return QSize(120, above + look().px(14) + 20 + (look().px(12) + 6 if row.snippet else 0))

    @override
    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        conversation = index.data(ChatListModel.RowRole)
        heading = conversation if isinstance(conversation, Heading) else index.data(ChatListModel.HeadingRole)
        rect = QRect(option.rect)  # type: ignore[attr-defined]
        if heading is not None:
            self._paint_heading(painter, QRect(rect.left(), rect.top(), rect.width(), _heading_height()), heading)
            rect.setTop(rect.top() + _heading_height())
        if isinstance(conversation, Heading):
            painter.restore()
            return
        state, rect = option.state, rect.adjusted(0, 1, 0, -1)  # type: ignore[attr-defined]
        selected = bool(state & QStyle.StateFlag.State_Selected)
        if selected or state & QStyle.StateFlag.State_MouseOver:
            painter.setPen(Qt.PenStyle.NoPen)
            back = look().color("pressed" if selected else "hover")
            back.setAlphaF(0.75)
            painter.setBrush(back)
            painter.drawRoundedRect(rect, 9, 9)
        if state & QStyle.StateFlag.State_HasFocus and state & QStyle.StateFlag.State_KeyboardFocusChange:
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.setPen(look().color("accent"))
            painter.drawRoundedRect(QRectF(rect).adjusted(0.5, 0.5, -0.5, -0.5), 9, 9)
        inner = rect.adjusted(11, 0, -11, 0)
        if index.data(ChatListModel.RunningRole):
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(look().color("accent"))
            painter.drawEllipse(QRectF(inner.right() - 7, rect.center().y() - 3, 7, 7))
            inner.setRight(inner.right() - 14)
        painter.setFont(look().font(13.5))
        painter.setPen(look().color("text"))
        metrics = painter.fontMetrics()
        line = inner.adjusted(0, 0, 0, -(look().px(12) + 6) if conversation.snippet else 0)
        title = metrics.elidedText(conversation.title, Qt.TextElideMode.ElideRight, inner.width())
        painter.drawText(line, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, title)
        if conversation.snippet:
            painter.setFont(look().font(12))
            painter.setPen(look().color("muted"))
            found = painter.fontMetrics().elidedText(conversation.snippet, Qt.TextElideMode.ElideRight, inner.width())
            below = inner.adjusted(0, look().px(14) + 6, 0, 0)
            painter.drawText(below, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, found)
        painter.restore()

    @staticmethod
    def _paint_heading(painter: QPainter, rect: QRect, heading: Heading) -> None:
        inner = rect.adjusted(11, 6, -11, 0)
        painter.setFont(look().font(12, bold=True))
        painter.setPen(look().color("muted"))
        if heading.folder:
            size = look().px(14)
            middle = inner.center().y() - size / 2
            sign = "right" if heading.closed else "chevron-down"
            paint_icon(painter, sign, QRectF(inner.left() - 3, middle, size, size), "muted")
            inner.setLeft(inner.left() + size + 2)
        said = painter.fontMetrics().elidedText(heading.text, Qt.TextElideMode.ElideRight, inner.width())
        painter.drawText(inner, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, said)

    @override
    def createEditor(self, parent: QWidget, option: QStyleOptionViewItem, index: Index) -> QWidget:
        editor = LineEdit(parent)
        editor.setAccessibleName(tr("Title"))
        return editor

    @override
    def updateEditorGeometry(self, editor: QWidget, option: QStyleOptionViewItem, index: Index) -> None:
        rect = QRect(option.rect)  # type: ignore[attr-defined]
        if index.data(ChatListModel.HeadingRole) is not None:
            rect.setTop(rect.top() + _heading_height())
        editor.setGeometry(rect)

    @override
    def setEditorData(self, editor: QWidget, index: Index) -> None:
        assert isinstance(editor, QLineEdit)
        editor.setText(index.data(Qt.ItemDataRole.EditRole))
        editor.selectAll()

    @override
    def setModelData(self, editor: QWidget, model: QAbstractItemModel, index: Index) -> None:
        assert isinstance(editor, QLineEdit)
        model.setData(index, editor.text())

    @override
    def eventFilter(self, editor: QObject, event: QEvent) -> bool:
        composing = isinstance(editor, LineEdit) and editor.composing
        if composing and isinstance(event, QKeyEvent) and event.key() in {Qt.Key.Key_Return, Qt.Key.Key_Enter}:
            return True
        return super().eventFilter(editor, event)


class ChatList(QListView):
    """The conversations; Enter or a click opens one, F2 renames, Delete removes."""

    opened = Signal(str)
    remove_asked = Signal(str)
    menu_asked = Signal(str, QPoint)
    folder_toggled = Signal(str)

    def __init__(self, model: ChatListModel, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("chatList")
        self.setAccessibleName(tr("Conversations"))
        self.setModel(model)
        self.setItemDelegate(_Row(self))
        self.setMouseTracking(True)
        self.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setEditTriggers(QAbstractItemView.EditTrigger.EditKeyPressed)
        self.setLayoutMode(QListView.LayoutMode.Batched)  # ten thousand rows do not hold up the window
        self.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.customContextMenuRequested.connect(self._menu)
        self.clicked.connect(self._open)
        self.activated.connect(self._open)

    def select(self, identity: str | None) -> None:
        """Mark the conversation in view."""
        index = self._index_of(identity)
        if index.isValid():
            self.selectionModel().setCurrentIndex(index, QItemSelectionModel.SelectionFlag.ClearAndSelect)
        else:
            self.selectionModel().clear()

    def rename(self, identity: str) -> None:
        """Edit a title in place."""
        self.edit(self._index_of(identity))

    def _index_of(self, identity: str | None) -> QModelIndex:
        model = self.model()
        assert isinstance(model, ChatListModel)
        for number, row in enumerate(model.rows):
            if isinstance(row, Conversation) and row.id == identity:
                return model.index(number)
        return QModelIndex()

    def _open(self, index: QModelIndex) -> None:
        row = index.data(ChatListModel.RowRole)
        if isinstance(row, Conversation):
            self.opened.emit(row.id)
        elif isinstance(row, Heading) and row.folder:
            self.folder_toggled.emit(row.folder)

    @override
    def keyPressEvent(self, event: QKeyEvent) -> None:
        row = self.currentIndex().data(ChatListModel.RowRole) if self.currentIndex().isValid() else None
        if event.key() == Qt.Key.Key_Delete and isinstance(row, Conversation):
            self.remove_asked.emit(row.id)
        else:
            super().keyPressEvent(event)

    def _heading_at(self, place: QPoint) -> Heading | None:
        """The heading under a point; a click there opens no conversation."""
        index = self.indexAt(place)
        heading: Heading | None = index.data(ChatListModel.HeadingRole) if index.isValid() else None
        return heading if heading is not None and place.y() < self.visualRect(index).top() + _heading_height() else None

    @override
    def mousePressEvent(self, event: QMouseEvent) -> None:
        heading = self._heading_at(event.position().toPoint())
        if heading is None:
            super().mousePressEvent(event)
        elif heading.folder:
            self.folder_toggled.emit(heading.folder)

    def _menu(self, place: QPoint) -> None:
        row = self.indexAt(place).data(ChatListModel.RowRole)
        if isinstance(row, Conversation):
            self.menu_asked.emit(row.id, self.viewport().mapToGlobal(place))
