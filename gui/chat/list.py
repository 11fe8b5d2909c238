"""The list of conversations: its model, how a row is painted, renaming in place."""

from __future__ import annotations

from collections.abc import Callable
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
from PySide6.QtGui import QInputMethodEvent, QKeyEvent, QPainter
from PySide6.QtWidgets import (
    QAbstractItemView,
    QLineEdit,
    QListView,
    QMenu,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QWidget,
)
from typing_extensions import override

from gui.data.store import Conversation
from gui.kit.i18n import tr
from gui.kit.theme import look

__all__ = ["ChatList", "ChatListModel"]

Index = QModelIndex | QPersistentModelIndex


class ChatListModel(QAbstractListModel):
    """Conversations in the order in which they are shown; some of them being answered."""

    ConversationRole = Qt.ItemDataRole.UserRole
    RunningRole = Qt.ItemDataRole.UserRole + 1

    def __init__(self, rename: Callable[[str, str], None]) -> None:
        super().__init__()
        self._rename = rename
        self.conversations: list[Conversation] = []
        self.running: frozenset[str] = frozenset()

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008 (Qt's signature)
        """One row per conversation."""
        return 0 if parent.isValid() else len(self.conversations)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        """The title, or the conversation itself."""
        conversation = self.conversations[index.row()]
        match role:
            case Qt.ItemDataRole.DisplayRole | Qt.ItemDataRole.EditRole | Qt.ItemDataRole.AccessibleTextRole:
                return conversation.title
            case Qt.ItemDataRole.ToolTipRole:
                return conversation.title
            case self.ConversationRole:
                return conversation
            case self.RunningRole:
                return conversation.id in self.running
        return None

    def flags(self, index: Index) -> Qt.ItemFlag:
        """Titles can be edited in place."""
        return super().flags(index) | Qt.ItemFlag.ItemIsEditable

    def setData(self, index: Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        """A new title."""
        if role != Qt.ItemDataRole.EditRole:
            return False
        self._rename(self.conversations[index.row()].id, str(value))
        return True

    def show(self, conversations: list[Conversation]) -> None:
        """Show other conversations, or the same in another order."""
        if [known.id for known in conversations] == [known.id for known in self.conversations]:
            self.conversations = conversations
            if conversations:
                self.dataChanged.emit(self.index(0), self.index(len(conversations) - 1))
            return
        self.beginResetModel()
        self.conversations = conversations
        self.endResetModel()

    def mark_running(self, running: frozenset[str]) -> None:
        """These are being answered now."""
        if running != self.running:
            self.running = running
            if self.conversations:
                self.dataChanged.emit(self.index(0), self.index(len(self.conversations) - 1))


class _TitleEdit(QLineEdit):
    """Knows whether Enter belongs to an input method."""

    composing = False

    @override
    def inputMethodEvent(self, event: QInputMethodEvent) -> None:
        self.composing = bool(event.preeditString())
        super().inputMethodEvent(event)


class _Row(QStyledItemDelegate):
    """A conversation: title, a line of the text that was found, a dot while it is answered."""

    @override
    def sizeHint(self, option: QStyleOptionViewItem, index: Index) -> QSize:
        snippet = index.data(ChatListModel.ConversationRole).snippet
        return QSize(120, look().px(14) + 20 + (look().px(12) + 6 if snippet else 0))

    @override
    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        conversation = index.data(ChatListModel.ConversationRole)
        state, rect = option.state, QRect(option.rect).adjusted(0, 1, 0, -1)  # type: ignore[attr-defined]
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

    @override
    def createEditor(self, parent: QWidget, option: QStyleOptionViewItem, index: Index) -> QWidget:
        editor = _TitleEdit(parent)
        editor.setAccessibleName(tr("Title"))
        return editor

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
        composing = isinstance(editor, _TitleEdit) and editor.composing
        if composing and isinstance(event, QKeyEvent) and event.key() in {Qt.Key.Key_Return, Qt.Key.Key_Enter}:
            return True
        return super().eventFilter(editor, event)


class ChatList(QListView):
    """The conversations; Enter or a click opens one, F2 renames, Delete removes."""

    opened = Signal(str)
    remove_asked = Signal(str)

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
        model = self._list()
        for row, conversation in enumerate(model.conversations):
            if conversation.id == identity:
                index = model.index(row)
                flags = QItemSelectionModel.SelectionFlag
                self.selectionModel().setCurrentIndex(index, flags.ClearAndSelect)
                return
        self.selectionModel().clear()

    def _list(self) -> ChatListModel:
        model = self.model()
        assert isinstance(model, ChatListModel)
        return model

    def _open(self, index: QModelIndex) -> None:
        self.opened.emit(index.data(ChatListModel.ConversationRole).id)

    @override
    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() == Qt.Key.Key_Delete and self.currentIndex().isValid():
            self.remove_asked.emit(self.currentIndex().data(ChatListModel.ConversationRole).id)
        else:
            super().keyPressEvent(event)

    def _menu(self, place: QPoint) -> None:
        index = self.indexAt(place)
        if not index.isValid():
            return
        identity = index.data(ChatListModel.ConversationRole).id
        menu = QMenu(self)
        menu.addAction(tr("Rename")).triggered.connect(lambda: self.edit(index))
        menu.addAction(tr("Delete…")).triggered.connect(lambda: self.remove_asked.emit(identity))
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(self.viewport().mapToGlobal(place))
