"""The one window: a rail of pages, banners above them, a drop sign over everything."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

from PySide6.QtCore import QByteArray, QRectF, QSize, Qt, QTimer, Signal
from PySide6.QtGui import (
    QCloseEvent,
    QDragEnterEvent,
    QDragLeaveEvent,
    QDropEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QResizeEvent,
)
from PySide6.QtWidgets import (
    QButtonGroup,
    QFrame,
    QHBoxLayout,
    QMainWindow,
    QStackedWidget,
    QToolButton,
    QVBoxLayout,
    QWidget,
)
from typing_extensions import override

from gui.chat.page import ChatPage
from gui.data.drop import Drop, accepts, read_drop
from gui.data.preferences import Preferences
from gui.kit.controls import Banner
from gui.kit.i18n import language, set_language, tr
from gui.kit.icons import app_icon, paint_icon, refresh_icons, set_icon
from gui.kit.shortcuts import Shortcuts
from gui.kit.theme import look
from gui.models.page import ModelsPage
from gui.pages.diagnostics import DiagnosticsPage
from gui.pages.manual import Manual
from gui.pages.server import ServerPage
from gui.pages.settings import SettingsPage
from gui.session import Session

__all__ = ["PageName", "Window"]

PageName = Literal["chat", "models", "diagnostics", "server", "settings"]

_FIRST_SIZE = QSize(1320, 840)
_RAIL = 88


class Window(QMainWindow):
    """Everything the user sees. `painted` is emitted once, when the window is on the screen."""

    painted = Signal()

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self._was_painted = False
        self.setObjectName("window")
        self.setWindowTitle("Inglenook")
        self.setWindowIcon(app_icon())
        self.setMinimumSize(420, 420)
        self.setAcceptDrops(True)
        self._build()
        self._sign = _DropSign(self)
        session.notice.connect(self.say)
        session.preferences.changed.connect(self._preferences_changed)
        look().changed.connect(refresh_icons)
        if not self.restoreGeometry(QByteArray.fromBase64(session.preferences.values.geometry.encode())):
            self.resize(_FIRST_SIZE)

    def _build(self) -> None:
        """Make all pages; again when the language or the text size changes."""
        central = QWidget()
        row = QHBoxLayout(central)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(0)
        rail = QFrame()
        rail.setObjectName("rail")
        rail.setFixedWidth(max(_RAIL, look().px(_RAIL)))
        column = QVBoxLayout(rail)
        column.setContentsMargins(6, 12, 6, 12)
        column.setSpacing(6)
        row.addWidget(rail)
        main = QVBoxLayout()
        main.setSpacing(0)
        row.addLayout(main, 1)
        self._banners = QVBoxLayout()
        self._banners.setSpacing(0)
        main.addLayout(self._banners)
        self.pages = QStackedWidget()
        self.pages.setObjectName("pages")
        main.addWidget(self.pages, 1)
        self.chat_page = ChatPage(self.session)
        self.chat_page.models_asked.connect(lambda: self.show_page("models"))
        self.models_page = ModelsPage(self.session)
        self.models_page.chat_asked.connect(self._chat_with)
        self.models_page.dropped.connect(self._take)
        self.models_page.measure_asked.connect(self._measure)
        self.diagnostics_page = DiagnosticsPage(self.session)
        self.server_page = ServerPage(self.session)
        self.settings_page = SettingsPage(self.session)
        self.settings_page.tune_asked.connect(self._tune)
        self.settings_page.manual_asked.connect(self.show_manual)
        self._buttons = QButtonGroup(rail)
        self._places: dict[str, int] = {}
        self._add_page(column, "chat", tr("Chat"), self.chat_page)
        self._add_page(column, "models", tr("Models"), self.models_page)
        self._add_page(column, "diagnostics", tr("Diagnostics"), self.diagnostics_page)
        self._add_page(column, "server", tr("Server"), self.server_page)
        column.addStretch(1)
        self._add_page(column, "settings", tr("Settings"), self.settings_page)
        self._buttons.idClicked.connect(self._page_chosen)
        self._buttons.button(0).setChecked(True)
        self._keys = self._make_shortcuts(central)
        self.setCentralWidget(central)

    def _add_page(self, column: QVBoxLayout, name: str, title: str, page: QWidget) -> None:
        made = QToolButton()
        made.setObjectName(f"page{name.capitalize()}")
        made.setText(title)
        made.setAccessibleName(title)
        made.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextUnderIcon)
        made.setCheckable(True)
        made.setCursor(Qt.CursorShape.PointingHandCursor)
        made.setFixedWidth(max(_RAIL - 12, look().px(_RAIL - 12)))
        set_icon(made, name, "muted", 22)
        place = self.pages.addWidget(page)
        self._places[name] = place
        self._buttons.addButton(made, place)
        made.setVisible(name not in self.session.preferences.hidden_pages)
        column.addWidget(made, 0, Qt.AlignmentFlag.AlignHCenter)

    def _make_shortcuts(self, parent: QWidget) -> Shortcuts:
        """Made with the pages they act on, and gone with them."""
        made = Shortcuts(
            parent,
            {
                "new_chat": self._new_chat,
                "temporary_chat": lambda: self._new_chat(temporary=True),
                "search": self._search,
                "search_too": self._search,
                "stop": self.chat_page.escape,
                "regenerate": self.session.regenerate,
                "continue": self.session.continue_answer,
                "edit_last": self.chat_page.edit_last,
                "copy_last": self.chat_page.copy_last,
                "attach": self.chat_page.box.attach_button.click,
                "pick_model": self._pick_model,
                "sidebar": self.chat_page.sidebar_toggle.click,
                "controls": self.chat_page.controls_toggle.click,
                "larger": lambda: self._resize_text(10),
                "smaller": lambda: self._resize_text(-10),
                "shortcuts": self._show_shortcuts,
                "manual": self.show_manual,
                "chat_page": lambda: self.show_page("chat"),
                "models_page": lambda: self.show_page("models"),
                "diagnostics_page": lambda: self.show_page("diagnostics"),
                "server_page": lambda: self.show_page("server"),
                "settings_page": lambda: self.show_page("settings"),
                "quit": self.close,
            },
        )
        made.apply(self.session.preferences.values.shortcuts)
        return made

    # ---- pages

    def show_page(self, name: PageName) -> None:
        """Bring a page to the front, unless an administrator took it away."""
        if name in self.session.preferences.hidden_pages:
            return
        self._buttons.button(self._places[name]).setChecked(True)
        self._page_chosen(self._places[name])

    def _page_chosen(self, place: int) -> None:
        self.pages.setCurrentIndex(place)
        if place == self._places["chat"]:
            self.chat_page.composer.setFocus()
            return
        page = self.pages.widget(place)
        if isinstance(page, ModelsPage | DiagnosticsPage | ServerPage):
            page.arrive()

    def come_forward(self) -> None:
        """Be seen, wherever the window was."""
        self.setWindowState(self.windowState() & ~Qt.WindowState.WindowMinimized)
        self.show()
        self.raise_()
        self.activateWindow()

    def say(self, sentence: str, kind: str) -> None:
        """Show a sentence across the window until it is closed; the same one only once."""
        for index in range(self._banners.count()):
            known = self._banners.itemAt(index).widget()
            if isinstance(known, Banner) and known.text.text() == sentence:
                return
        banner = Banner(sentence, cast("Literal['note', 'warning', 'problem']", kind))
        banner.closed.connect(banner.deleteLater)
        self._banners.addWidget(banner)

    def _new_chat(self, *, temporary: bool = False) -> None:
        self.show_page("chat")
        self.chat_page.keep_draft()
        self.session.new_chat(temporary=temporary)

    def _search(self) -> None:
        self.show_page("chat")
        self.chat_page.focus_search()

    def _pick_model(self) -> None:
        self.show_page("chat")
        self.chat_page.picker.showPopup()

    def _show_shortcuts(self) -> None:
        self.show_page("settings")
        self.settings_page.show_shortcuts()

    def show_manual(self) -> None:
        """Open the manual; the one that is open comes forward."""
        opened: list[Manual] = list(self.findChildren(Manual))
        manual = opened[0] if opened else Manual(self)
        manual.show()
        manual.raise_()
        manual.activateWindow()

    def _resize_text(self, step: int) -> None:
        size = max(80, min(200, self.session.preferences.values.text_size + step))
        self.session.preferences.change(text_size=size)

    def _measure(self, path: Path) -> None:
        self.show_page("diagnostics")
        self.diagnostics_page.measure_model(path)

    def _tune(self) -> None:
        self.show_page("diagnostics")
        self.diagnostics_page.tune_threads()

    def _chat_with(self, path: Path) -> None:
        if self.session.state.path != path or self.session.state.kind in {"none", "failed"}:
            self.session.choose_model(path)
            self.chat_page.picker.show_models(self.session.models, self.session.state)
        self.show_page("chat")
        self.session.new_chat()

    def _preferences_changed(self, before: Preferences) -> None:
        now = self.session.preferences.values
        if now.shortcuts != before.shortcuts:
            self._keys.apply(now.shortcuts)
        if (now.theme, now.text_size) != (before.theme, before.text_size):
            look().choose(now.theme, now.text_size)
        if now.language != before.language:
            spoken = language()
            set_language(now.language)
            if language() == spoken:
                return
        elif now.text_size == before.text_size:
            return
        QTimer.singleShot(0, self._rebuild)  # the control that was used is part of what is replaced

    def _rebuild(self) -> None:
        self.chat_page.keep_draft()
        place = self.pages.currentIndex()
        old = self.takeCentralWidget()
        self._build()
        old.hide()
        old.deleteLater()
        self.centralWidget().show()  # at once: Qt would wait a turn of the loop, and the window would flash
        self._buttons.button(place).setChecked(True)
        self.pages.setCurrentIndex(place)
        self._sign.raise_()

    # ---- drops

    def _take(self, drop: Drop) -> None:
        if drop.model is not None:
            self.show_page("models")
            self.models_page.open_model(drop.model)
        elif drop.text:
            self.show_page("chat")
            self.chat_page.insert_text(drop.text)
        elif drop.files:
            self.show_page("chat")
            self.chat_page.attach(drop.files)
        elif drop.refusal:
            self.show_page("models")
            self.models_page.refuse(drop)

    @override
    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        if accepts(event.mimeData()):
            event.acceptProposedAction()
            self._sign.show_over(self.rect())

    @override
    def dragLeaveEvent(self, event: QDragLeaveEvent) -> None:
        self._sign.hide()

    @override
    def dropEvent(self, event: QDropEvent) -> None:
        self._sign.hide()
        event.acceptProposedAction()
        drop = read_drop(event.mimeData())
        QTimer.singleShot(0, lambda: self._take(drop))  # the other program waits until this returns

    # ---- Qt

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        if not self._was_painted:
            self._was_painted = True
            QTimer.singleShot(0, self.painted.emit)

    @override
    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if self._sign.isVisible():
            self._sign.show_over(self.rect())

    @override
    def closeEvent(self, event: QCloseEvent) -> None:
        """Store everything and let go; nothing here waits."""
        self.chat_page.keep_draft()
        geometry = bytes(self.saveGeometry().toBase64().data()).decode()
        self.session.preferences.change(geometry=geometry)
        self.session.serving.stop()
        self.session.shut_down()
        self.session.bridge.close()
        super().closeEvent(event)


class _DropSign(QWidget):
    """Shown over the window while something is held over it."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        self.hide()

    def show_over(self, rect: object) -> None:
        """Cover the window."""
        self.setGeometry(rect)  # type: ignore[call-overload]
        self.raise_()
        self.show()

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        veil = look().color("window")
        veil.setAlphaF(0.92)
        painter.fillRect(self.rect(), veil)
        pen = QPen(look().color("accent"), 2)
        pen.setDashPattern([5, 4])
        painter.setPen(pen)
        painter.setBrush(look().color("accent_soft"))
        painter.drawRoundedRect(QRectF(self.rect()).adjusted(18, 18, -18, -18), 20, 20)
        size = look().px(48)
        middle = QRectF(self.rect()).center()
        paint_icon(painter, "drop", QRectF(middle.x() - size / 2, middle.y() - size, size, size), "accent")
        painter.setPen(look().color("text"))
        painter.setFont(look().font(20, bold=True))
        words = QRectF(24, middle.y() + 12, self.width() - 48, 60)
        painter.drawText(words, Qt.AlignmentFlag.AlignHCenter | Qt.AlignmentFlag.AlignTop, tr("Drop it here"))
