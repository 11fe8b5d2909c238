"""The chat page: conversations at the left, the one in view in the middle, the controls at the right."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject, QRectF, Qt, Signal
from PySide6.QtGui import QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QLineEdit,
    QPushButton,
    QScrollArea,
    QSizePolicy,
    QStackedLayout,
    QVBoxLayout,
    QWidget,
)
from typing_extensions import override

from engine.settings import Sampling
from gui.chat.composer import Composer
from gui.chat.list import ChatList, ChatListModel
from gui.chat.transcript import Transcript
from gui.data.preferences import Preferences
from gui.kit.controls import ContextGauge, Elided, Form, IconButton, button, label
from gui.kit.dialogs import confirm
from gui.kit.i18n import tr
from gui.kit.icons import app_icon, icon
from gui.kit.theme import look
from gui.kit.timing import timer
from gui.models.picker import ModelPicker
from gui.session import Session

__all__ = ["CONTROLS", "ChatPage", "suggestions"]

CONTROLS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "seed")
_SIDEBAR, _PANEL, _NARROW, _NARROWER = 264, 292, 1060, 760


def suggestions() -> tuple[str, ...]:
    """First things to say to a model."""
    return (
        tr("Explain how a fireplace draws its smoke, in five sentences."),
        tr("Write a Python function for the longest common prefix."),
        tr("Help me write a friendly mail that moves a meeting to Thursday."),
    )


class ChatPage(QWidget):
    """Everything around one conversation."""

    models_asked = Signal()

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.setObjectName("chatPage")
        self._session = session
        self._list = ChatListModel(session.rename)
        self._squeezed = (False, False)  # sidebar, controls: hidden because the window is narrow

        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(0)
        self.sidebar = self._make_sidebar()
        row.addWidget(self.sidebar)
        row.addWidget(self._make_middle(), 1)
        self.controls = _Controls(session)
        self.controls.setVisible(session.preferences.values.controls_open)
        row.addWidget(self.controls)

        self._keep_draft = timer(self, 400, self._draft_changed, once=True)
        self._search_later = timer(self, 120, self.refresh_list, once=True)
        self.composer.textChanged.connect(self._typed)
        self.search.textChanged.connect(lambda _text: self._search_later.start())
        session.current_changed.connect(self._show_current)
        session.conversations_changed.connect(self.refresh_list)
        session.running_changed.connect(self._show_running)
        session.model_changed.connect(self._show_model)
        session.library_changed.connect(self._show_library)
        session.figures_changed.connect(self._show_figures)
        session.preferences.changed.connect(self._show_preferences)
        self._show_preferences()
        self.refresh_list()
        self._show_library()
        self._show_current()
        self._show_figures()

    # ---- parts

    def _make_sidebar(self) -> QFrame:
        frame = QFrame()
        frame.setObjectName("sidebar")
        frame.setFixedWidth(look().gap(_SIDEBAR))
        column = QVBoxLayout(frame)
        column.setContentsMargins(12, 12, 12, 8)
        column.setSpacing(10)
        self.new_chat = button(tr("New chat"), "", "new")
        self.new_chat.setObjectName("newChat")
        self.new_chat.setToolTip(tr("New chat") + "  (Ctrl+N)")
        self.new_chat.clicked.connect(self._session.new_chat)
        column.addWidget(self.new_chat)
        self.search = QLineEdit()
        self.search.setObjectName("chatSearch")
        self.search.setAccessibleName(tr("Search conversations"))
        self.search.setPlaceholderText(tr("Search"))
        self.search.setClearButtonEnabled(True)
        self.search.addAction(icon("search", "faint", 16), QLineEdit.ActionPosition.LeadingPosition)
        column.addWidget(self.search)
        self.list = ChatList(self._list)
        self.list.opened.connect(self._session.open)
        self.list.remove_asked.connect(self._ask_remove)
        self._no_chats = label("", "caption", wrap=True)
        self._no_chats.setAlignment(Qt.AlignmentFlag.AlignHCenter | Qt.AlignmentFlag.AlignTop)
        self._no_chats.setContentsMargins(12, 20, 12, 0)
        holder = QWidget()
        self._lists = QStackedLayout(holder)
        self._lists.addWidget(self.list)
        self._lists.addWidget(self._no_chats)
        column.addWidget(holder, 1)
        return frame

    def _make_middle(self) -> QWidget:
        middle = QWidget()
        column = QVBoxLayout(middle)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self._make_top_bar())
        self.transcript = Transcript(self._session.chat)
        self.transcript.regenerate_asked.connect(self._session.regenerate)
        self.welcome = _Welcome()
        self.welcome.models_asked.connect(self.models_asked)
        self.welcome.suggested.connect(self._suggest)
        views = QWidget()
        self._views = QStackedLayout(views)
        self._views.addWidget(self.transcript)
        self._views.addWidget(self.welcome)
        column.addWidget(views, 1)
        column.addWidget(self._make_composer())
        return middle

    def _make_top_bar(self) -> QFrame:
        bar = QFrame()
        bar.setObjectName("topBar")
        row = QHBoxLayout(bar)
        row.setContentsMargins(12, 8, 12, 8)
        row.setSpacing(8)
        self.sidebar_toggle = IconButton("sidebar", tr("Show or hide the conversations"))
        self.sidebar_toggle.setObjectName("sidebarToggle")
        self.sidebar_toggle.clicked.connect(lambda: self.sidebar.setVisible(not self.sidebar.isVisible()))
        row.addWidget(self.sidebar_toggle)
        self.title = Elided()
        self.title.setObjectName("chatTitle")
        self.title.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)  # all that others leave
        row.addWidget(self.title, 1)
        self.picker = ModelPicker()
        self.picker.chosen.connect(self._session.choose_model)
        self.picker.more_asked.connect(self.models_asked)
        row.addWidget(self.picker)
        self.cancel_load = IconButton("close", tr("Cancel loading"), size=16)
        self.cancel_load.setObjectName("cancelLoad")
        self.cancel_load.clicked.connect(self._session.cancel_load)
        row.addWidget(self.cancel_load)
        self.eject = IconButton("eject", tr("Unload the model"), size=18)
        self.eject.setObjectName("unload")
        self.eject.clicked.connect(self._session.unload)
        row.addWidget(self.eject)
        self.controls_toggle = IconButton("tune", tr("Show or hide the controls"))
        self.controls_toggle.setObjectName("controlsToggle")
        self.controls_toggle.setCheckable(True)
        self.controls_toggle.setChecked(self._session.preferences.values.controls_open)
        self.controls_toggle.clicked.connect(self._toggle_controls)
        row.addWidget(self.controls_toggle)
        return bar

    def _make_composer(self) -> QWidget:
        outer = QWidget()
        row = QHBoxLayout(outer)
        row.setContentsMargins(28, 4, 39, 16)  # the scroll bar of the transcript is at the right
        row.addStretch(1)
        self._composer_frame = QFrame()
        self._composer_frame.setObjectName("composerFrame")
        self._composer_frame.setMaximumWidth(look().px(800))
        row.addWidget(self._composer_frame, 100)
        row.addStretch(1)
        column = QVBoxLayout(self._composer_frame)
        column.setContentsMargins(18, 13, 10, 9)
        column.setSpacing(6)
        self.composer = Composer()
        self.composer.sent.connect(self._send)
        self.composer.refused.connect(lambda sentence: self._session.notice.emit(sentence, "warning"))
        self.composer.installEventFilter(self)
        column.addWidget(self.composer)
        under = QHBoxLayout()
        under.setSpacing(14)
        self.gauge = ContextGauge()
        under.addWidget(self.gauge)
        self.speed = label("", "caption")
        self.speed.setObjectName("statusSpeed")
        under.addWidget(self.speed)
        self.hint = Elided("caption")
        self.hint.setObjectName("sendHint")
        under.addWidget(self.hint, 1)
        self.send = IconButton("send", tr("Send"), size=20)
        self.send.setObjectName("send")
        self.send.show_icon("send", "on_accent")
        self.send.setFixedSize(34, 34)
        self.send.clicked.connect(self._send)
        under.addWidget(self.send)
        self.stop = IconButton("stop", tr("Stop"), size=20)
        self.stop.setObjectName("stop")
        self.stop.call(tr("Stop"), tr("Stop") + "  (Esc)")
        self.stop.show_icon("stop", "window")
        self.stop.setFixedSize(34, 34)
        self.stop.clicked.connect(self._session.stop)
        under.addWidget(self.stop)
        column.addLayout(under)
        return outer

    # ---- what the user does

    def _send(self) -> None:
        if self._session.send(self.composer.text()):
            self._keep_draft.stop()
            self.composer.clear()

    def _suggest(self, text: str) -> None:
        self.composer.setPlainText(text)
        self.composer.moveCursor(self.composer.textCursor().MoveOperation.End)
        self.composer.setFocus()

    def insert_text(self, text: str) -> None:
        """Put a dropped text where the cursor stands."""
        self.composer.insertPlainText(text)
        self.composer.setFocus()

    def _typed(self) -> None:
        self._show_send()
        self._keep_draft.start()

    def _draft_changed(self) -> None:
        self._session.keep_draft(self.composer.text())

    def keep_draft(self) -> None:
        """Store what is typed now."""
        if self._keep_draft.isActive():
            self._keep_draft.stop()
            self._draft_changed()

    def _ask_remove(self, identity: str) -> None:
        conversation = next((known for known in self._list.conversations if known.id == identity), None)
        if conversation is not None:
            confirm(
                self,
                tr("Delete “{title}”?", title=conversation.title),
                tr("The conversation is removed from this computer."),
                tr("Delete"),
                lambda: self._session.remove(identity),
            )

    def _toggle_controls(self) -> None:
        shown = not self.controls.isVisible()
        self.controls.setVisible(shown)
        self.controls_toggle.setChecked(shown)
        if not self._squeezed[1]:
            self._session.preferences.change(controls_open=shown)

    def focus_search(self) -> None:
        """Go to the search field."""
        self.sidebar.show()
        self.search.setFocus()
        self.search.selectAll()

    # ---- what is to be seen

    def refresh_list(self) -> None:
        """Read the conversations that the search asks for."""
        query = self.search.text().strip()
        store = self._session.store
        self._list.show(store.search(query) if query else store.conversations())
        self.list.select(self._session.current.id if self._session.current is not None else None)
        self._no_chats.setText(tr("Nothing found.") if query else tr("Your conversations will be kept here."))
        self._lists.setCurrentIndex(0 if self._list.conversations else 1)

    def _show_current(self) -> None:
        current = self._session.current
        self.title.show_text(current.title if current is not None else "")
        self.list.select(current.id if current is not None else None)
        if self.composer.text() != self._session.draft:
            self.composer.setPlainText(self._session.draft)
            self.composer.moveCursor(self.composer.textCursor().MoveOperation.End)
        self._keep_draft.stop()
        self._show_running()
        self.composer.setFocus()

    def _show_running(self) -> None:
        running = frozenset(answer.turn.message.conversation for answer in self._session.running.values())
        self._list.mark_running(running)
        self._views.setCurrentIndex(0 if self._session.chat.turns else 1)
        self.transcript.regenerate.setEnabled(self._session.can_regenerate)
        self._show_send()

    def _show_send(self) -> None:
        session = self._session
        answering = session.answer is not None
        self.stop.setVisible(answering)
        self.send.setVisible(not answering)
        self.send.setEnabled(session.can_send and bool(self.composer.text().strip()))
        reason = ""
        if answering:
            reason = tr("The answer is being written.")
        elif session.state.kind == "none":
            reason = tr("Choose a model first.") if session.engine_ready else tr("The engine is starting…")
        elif session.state.kind == "failed":
            reason = tr("The model could not be loaded.")
        self.send.call(tr("Send"), reason or tr("Send"))
        show_hint = bool(self.composer.text().strip()) and not answering and bool(reason)
        self.hint.show_text(reason if show_hint else "")

    def _show_model(self) -> None:
        state = self._session.state
        self.picker.show_state(state)
        self.cancel_load.setVisible(state.kind == "loading")
        self.eject.setVisible(state.kind == "ready")
        self.controls.show_values()
        self._show_welcome()
        self._show_figures()
        self._show_running()

    def _show_library(self) -> None:
        self.picker.show_models(self._session.models, self._session.state)
        self._show_model()

    def _show_welcome(self) -> None:
        session = self._session
        state = session.state
        if session.engine_failure:
            self.welcome.show_trouble(tr("Inglenook cannot run here"), session.engine_failure)
        elif state.kind == "failed":
            self.welcome.show_trouble(tr("{name} could not be loaded", name=state.name), state.sentence)
        elif state.kind == "none" and session.engine_ready and not session.models:
            self.welcome.show_first_run()
        else:
            if state.kind == "loading" and state.stage == "compile":
                words = tr("At its first start Inglenook prepares code for this processor; that takes a minute or two.")
            elif state.kind == "loading":
                words = tr(
                    "{name} is getting ready. You can write already; your message waits for it.", name=state.name
                )
            elif state.kind == "ready" and session.starter_is_loaded:
                words = tr(
                    "{name} is a very small model, for a first taste: it makes things up. "
                    "Add a larger one on the Models page for real work.",
                    name=state.name,
                )
            elif state.kind == "ready":
                words = tr("{name} answers from this computer alone; nothing you write leaves it.", name=state.name)
            elif session.engine_ready:
                words = tr("Choose a model above to begin.")
            else:
                words = tr("One moment…")
            self.welcome.show_greeting(words)

    def _show_figures(self) -> None:
        session = self._session
        self.gauge.show_use(session.context_used, session.context_tokens)
        said = []
        if session.speed_tps:
            said.append(tr("{speed} tokens/s", speed=f"{session.speed_tps:.1f}"))
        if session.first_s:
            said.append(tr("first after {time} s", time=f"{session.first_s:.1f}"))
        self.speed.setText(" · ".join(said))

    def _show_preferences(self, _before: object = None) -> None:
        self.composer.send_on_enter = self._session.preferences.values.send_on_enter
        self.controls.show_values()

    # ---- Qt

    @override
    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if watched is self.composer and event.type() in {QEvent.Type.FocusIn, QEvent.Type.FocusOut}:
            self._composer_frame.setProperty("active", event.type() == QEvent.Type.FocusIn)
            self._composer_frame.style().polish(self._composer_frame)
        return super().eventFilter(watched, event)

    @override
    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        squeezed = (event.size().width() < look().gap(_NARROWER), event.size().width() < look().gap(_NARROW))
        if squeezed != self._squeezed:
            before, self._squeezed = self._squeezed, squeezed
            if squeezed[0] != before[0]:
                self.sidebar.setVisible(not squeezed[0])
            if squeezed[1] != before[1]:
                self.controls.setVisible(not squeezed[1] and self._session.preferences.values.controls_open)
            self.controls_toggle.setChecked(self.controls.isVisible())


class _Controls(QFrame):
    """How answers are drawn: the streaming switch and the sampler's values, made from the settings models."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.setObjectName("controls")
        self.setFixedWidth(look().gap(_PANEL))
        self._session = session
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        area = QScrollArea()
        area.setWidgetResizable(True)
        area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        column.addWidget(area)
        inner = QWidget()
        area.setWidget(inner)
        rows = QVBoxLayout(inner)
        rows.setContentsMargins(18, 16, 16, 18)
        rows.setSpacing(18)
        head = QHBoxLayout()
        head.addWidget(label(tr("Controls"), "heading"))
        head.addStretch(1)
        self.reset_all = button(tr("Reset all"), "ghost")
        self.reset_all.setObjectName("resetSampling")
        self.reset_all.clicked.connect(lambda: session.preferences.change(sampling={}))
        head.addWidget(self.reset_all)
        rows.addLayout(head)
        self.streaming = Form(Preferences, ["streaming"])
        self.streaming.changed.connect(lambda name, value: session.preferences.change(**{name: value}))
        rows.addWidget(self.streaming)
        line = QFrame()
        line.setProperty("role", "line")
        rows.addWidget(line)
        self.sampling = Form(Sampling, CONTROLS, nothing={"seed": tr("random")})
        self.sampling.changed.connect(session.choose_sampling)
        rows.addWidget(self.sampling)
        rows.addStretch(1)

    def show_values(self) -> None:
        """Show what is in force."""
        preferences = self._session.preferences.values
        self.streaming.show_values(preferences)
        self.sampling.show_values(self._session.sampling, self._session.sampling_defaults)
        self.reset_all.setEnabled(bool(preferences.sampling))


class _Mark(QWidget):
    """The program's mark."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.setFixedSize(size, size)

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.SmoothPixmapTransform)
        rect = QRectF(self.rect())
        app_icon().paint(painter, rect.toRect())


class _Suggestion(QPushButton):
    """A first thing to say; shortened where there is no room for it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._text = text
        self.setProperty("role", "suggestion")
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setMinimumWidth(60)
        self.setAccessibleName(text)

    @override
    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.setText(self.fontMetrics().elidedText(self._text, Qt.TextElideMode.ElideRight, self.width() - 38))


class _Welcome(QWidget):
    """What stands where no conversation is yet."""

    models_asked = Signal()
    suggested = Signal(str)

    def __init__(self) -> None:
        super().__init__()
        self.setObjectName("welcome")
        row = QHBoxLayout(self)
        row.setContentsMargins(32, 24, 32, 24)
        row.addStretch(1)
        inner = QWidget()
        inner.setMaximumWidth(look().px(580))
        row.addWidget(inner, 100)
        row.addStretch(1)
        column = QVBoxLayout(inner)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(14)
        column.addStretch(3)
        center = Qt.AlignmentFlag.AlignHCenter
        column.addWidget(_Mark(60), 0, center)
        self._heading = label("", "title", wrap=True)
        self._heading.setAlignment(center)
        column.addWidget(self._heading)
        self._words = label("", "muted", wrap=True)
        self._words.setObjectName("welcomeWords")
        self._words.setAlignment(center)
        column.addWidget(self._words)
        self._add = button(tr("Add a model"), "primary", "drop", "on_accent")
        self._add.setObjectName("welcomeAdd")
        self._add.clicked.connect(self.models_asked)
        column.addSpacing(6)
        column.addWidget(self._add, 0, center)
        self._suggestions = QWidget()
        texts = QVBoxLayout(self._suggestions)
        texts.setContentsMargins(0, 0, 0, 0)
        texts.setSpacing(8)
        for text in suggestions():
            made = _Suggestion(text)
            made.clicked.connect(lambda _checked=False, text=text: self.suggested.emit(text))
            texts.addWidget(made)
        column.addWidget(self._suggestions)
        column.addStretch(4)

    def show_greeting(self, words: str) -> None:
        """There is a model, or soon will be."""
        self._show(tr("What is on your mind?"), words, add=False, suggest=True)

    def show_first_run(self) -> None:
        """There is no model yet."""
        words = tr(
            "Inglenook runs language models on this computer's processor, without a network. Drop a model's folder"
            " anywhere in this window – as it comes from Hugging Face or ModelScope – and it is prepared for you."
        )
        self._show(tr("Bring a model in from the cold"), words, add=True, suggest=False)

    def show_trouble(self, heading: str, sentence: str) -> None:
        """Something has to be done first."""
        self._show(heading, sentence, add=True, suggest=False)

    def _show(self, heading: str, words: str, *, add: bool, suggest: bool) -> None:
        self._heading.setText(heading)
        self._words.setText(words)
        self._add.setVisible(add)
        self._suggestions.setVisible(suggest)
