"""The left side of the chat page: new chat, search, and the conversations."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QPoint, Qt, Signal
from PySide6.QtWidgets import QFileDialog, QFrame, QHBoxLayout, QLineEdit, QMenu, QStackedLayout, QVBoxLayout, QWidget

from gui.chat.list import ChatList, ChatListModel
from gui.data.archive import ArchiveError, line_of, read_conversations, to_html, to_json, to_markdown
from gui.data.store import Conversation
from gui.kit.controls import IconButton, button, label
from gui.kit.dialogs import ask_text, confirm
from gui.kit.i18n import tr
from gui.kit.icons import icon
from gui.kit.theme import look
from gui.kit.timing import timer
from gui.session import Session

__all__ = ["Sidebar"]

_WIDTH = 264


class Sidebar(QFrame):
    """The conversations, and what can be done with them."""

    opened = Signal()

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.setObjectName("sidebar")
        self.setFixedWidth(look().gap(_WIDTH))
        self._session = session
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 12, 12, 8)
        column.setSpacing(10)
        column.addLayout(self._make_top())
        column.addWidget(self._make_search())
        self.model = ChatListModel(session.rename, session.preferences.values.closed_folders)
        self.list = ChatList(self.model)
        self.list.opened.connect(self._open)
        self.list.remove_asked.connect(self._ask_remove)
        self.list.menu_asked.connect(self._show_menu)
        self.list.folder_toggled.connect(self._toggle_folder)
        self._nothing = label("", "caption", wrap=True)
        self._nothing.setAlignment(Qt.AlignmentFlag.AlignHCenter | Qt.AlignmentFlag.AlignTop)
        self._nothing.setContentsMargins(12, 20, 12, 0)
        holder = QWidget()
        self._lists = QStackedLayout(holder)
        self._lists.addWidget(self.list)
        self._lists.addWidget(self._nothing)
        column.addWidget(holder, 1)
        self._search_later = timer(self, 120, self.refresh, once=True)
        self.search.textChanged.connect(lambda _text: self._search_later.start())
        session.conversations_changed.connect(self.refresh)
        session.current_changed.connect(self._show_current)
        session.running_changed.connect(self._show_running)
        self.refresh()

    def _make_top(self) -> QHBoxLayout:
        row = QHBoxLayout()
        row.setSpacing(6)
        self.new_chat = button(tr("New chat"), "", "new")
        self.new_chat.setObjectName("newChat")
        self.new_chat.setToolTip(tr("New chat") + "  (Ctrl+N)")
        self.new_chat.clicked.connect(lambda _on=False: self._session.new_chat())
        row.addWidget(self.new_chat, 1)
        more = IconButton("more", tr("More"))
        more.setObjectName("chatMore")
        more.clicked.connect(lambda: self._show_more(more.mapToGlobal(more.rect().bottomLeft())))
        row.addWidget(more)
        return row

    def _make_search(self) -> QLineEdit:
        self.search = QLineEdit()
        self.search.setObjectName("chatSearch")
        self.search.setAccessibleName(tr("Search conversations"))
        self.search.setPlaceholderText(tr("Search"))
        self.search.setClearButtonEnabled(True)
        self.search.addAction(icon("search", "faint", 16), QLineEdit.ActionPosition.LeadingPosition)
        return self.search

    # ---- what is to be seen

    def refresh(self) -> None:
        """Read the conversations that the search asks for."""
        query = self.search.text().strip()
        store = self._session.store
        self.model.show(store.search(query) if query else store.conversations(), grouped=not query)
        self._show_current()
        self._nothing.setText(tr("Nothing found.") if query else tr("Your conversations will be kept here."))
        self._lists.setCurrentIndex(0 if self.model.conversations else 1)

    def _show_current(self) -> None:
        self.list.select(self._session.current.id if self._session.current is not None else None)

    def _show_running(self) -> None:
        self.model.mark_running(
            frozenset(answer.turn.message.conversation for answer in self._session.running.values())
        )

    # ---- what the user does

    def _open(self, identity: str) -> None:
        self._session.open(identity)
        self.opened.emit()

    def _toggle_folder(self, folder: str) -> None:
        closed = set(self._session.preferences.values.closed_folders) ^ {folder}
        self._session.preferences.change(closed_folders=sorted(closed))
        self.model.close_folders(closed)
        self._show_current()

    def _find(self, identity: str) -> Conversation | None:
        return next((known for known in self.model.conversations if known.id == identity), None)

    def _ask_remove(self, identity: str) -> None:
        conversation = self._find(identity)
        if conversation is not None:
            confirm(
                self,
                tr("Delete “{title}”?", title=conversation.title),
                tr("The conversation is removed from this computer."),
                tr("Delete"),
                lambda: self._session.remove(identity),
            )

    def _show_more(self, place: QPoint) -> None:
        menu = QMenu(self)
        menu.setObjectName("chatMoreMenu")
        temporary = menu.addAction(icon("temporary", "muted", 16), tr("New temporary chat"))
        temporary.triggered.connect(lambda: self._session.new_chat(temporary=True))
        menu.addSeparator()
        bring = menu.addAction(icon("import", "muted", 16), tr("Import chats…"))
        bring.triggered.connect(self._browse_import)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(place)

    def _show_menu(self, identity: str, place: QPoint) -> None:
        conversation = self._find(identity)
        if conversation is None:
            return
        menu = QMenu(self)
        menu.setObjectName("conversationMenu")
        menu.addAction(icon("rename", "muted", 16), tr("Rename")).triggered.connect(lambda: self.list.rename(identity))
        words = tr("Unpin") if conversation.pinned else tr("Pin to the top")
        pin = menu.addAction(icon("pin", "muted", 16), words)
        pin.triggered.connect(lambda: self._session.pin(identity, pinned=not conversation.pinned))
        self._add_folders(menu.addMenu(icon("folder", "muted", 16), tr("Move to folder")), conversation)
        write = menu.addMenu(icon("export", "muted", 16), tr("Export"))
        for ending, words in (("md", "Markdown"), ("html", "HTML"), ("json", tr("JSON, with all versions"))):
            write.addAction(words).triggered.connect(
                lambda _on=False, ending=ending: self._browse_export(identity, ending)
            )
        menu.addSeparator()
        remove = menu.addAction(icon("trash", "muted", 16), tr("Delete…"))
        remove.triggered.connect(lambda: self._ask_remove(identity))
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(place)

    def _add_folders(self, menu: QMenu, conversation: Conversation) -> None:
        move = self._session.move
        for folder in sorted({known.folder for known in self.model.conversations if known.folder}):
            made = menu.addAction(folder)
            made.setEnabled(folder != conversation.folder)
            made.triggered.connect(lambda _on=False, folder=folder: move(conversation.id, folder))
        if conversation.folder:
            menu.addAction(tr("No folder")).triggered.connect(lambda: move(conversation.id, ""))
        menu.addSeparator()
        menu.addAction(tr("New folder…")).triggered.connect(
            lambda: ask_text(self, tr("New folder"), tr("Name of the folder"), lambda name: move(conversation.id, name))
        )

    # ---- files

    def _browse_export(self, identity: str, ending: str) -> None:
        conversation = self._find(identity)
        title = conversation.title if conversation is not None else ""
        safe = "".join(letter if letter.isalnum() or letter in " -_" else "-" for letter in title).strip()[:60]
        dialog = QFileDialog(self, tr("Export"))
        dialog.setAcceptMode(QFileDialog.AcceptMode.AcceptSave)
        dialog.setDefaultSuffix(ending)
        dialog.selectFile(f"{safe or 'chat'}.{ending}")
        dialog.setNameFilter(f"*.{ending}")
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.fileSelected.connect(lambda name: self.export(identity, Path(name)))
        dialog.open()

    def export(self, identity: str, path: Path) -> None:
        """Write a conversation to a file; its ending says how."""
        found = self._session.whole(identity)
        if found is None:
            return
        conversation, messages = found
        match path.suffix.lower():
            case ".json":
                text = to_json(conversation, messages)
            case ".html":
                text = to_html(conversation, line_of(conversation, messages))
            case _:
                text = to_markdown(conversation, line_of(conversation, messages))
        try:
            path.write_text(text, "utf-8", errors="replace")
        except OSError as error:
            self._session.notice.emit(
                tr("{name} cannot be written: {reason}.", name=path.name, reason=error.strerror), "problem"
            )

    def _browse_import(self) -> None:
        dialog = QFileDialog(self, tr("Import chats"))
        dialog.setFileMode(QFileDialog.FileMode.ExistingFiles)
        dialog.setNameFilter("*.json *.md *.html")
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.filesSelected.connect(self._import_files)
        dialog.open()

    def _import_files(self, names: list[str]) -> None:
        for name in names:
            self.import_file(Path(name))

    def import_file(self, path: Path) -> None:
        """Take over the conversations of a file."""
        try:
            for conversation, messages in read_conversations(path):
                self._session.adopt(conversation, messages)
        except ArchiveError as error:
            self._session.notice.emit(str(error), "warning")
