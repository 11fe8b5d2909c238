"""The chat page: conversations at the left, the one in view in the middle, its parameters at the right."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import Signal
from PySide6.QtGui import QGuiApplication, QResizeEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QSizePolicy, QStackedLayout, QVBoxLayout, QWidget
from typing_extensions import override

from gui.chat.box import MessageBox
from gui.chat.panel import Panel
from gui.chat.sidebar import Sidebar
from gui.chat.tokens import TokenView
from gui.chat.transcript import Transcript
from gui.chat.welcome import Welcome
from gui.data.machine import hardware_words
from gui.kit.controls import Elided, IconButton, label
from gui.kit.dialogs import confirm
from gui.kit.i18n import tr
from gui.kit.theme import look
from gui.models.picker import ModelPicker
from gui.session import Session
from gui.tasks import Diagnosed, diagnose

__all__ = ["ChatPage"]

_NARROW, _NARROWER = 1060, 760


class ChatPage(QWidget):
    """Everything around one conversation."""

    models_asked = Signal()

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.setObjectName("chatPage")
        self._session = session
        self._hardware = ""
        self._looked = 0  # how thoroughly this computer was looked at
        self._squeezed = (False, False)  # sidebar, controls: hidden because the window is narrow
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(0)
        self.sidebar = Sidebar(session)
        row.addWidget(self.sidebar)
        row.addWidget(self._make_middle(), 1)
        self.panel = Panel(session)
        self.panel.setVisible(session.preferences.values.controls_open)
        row.addWidget(self.panel)

        session.current_changed.connect(self._show_current)
        session.running_changed.connect(self._show_running)
        session.model_changed.connect(self._show_model)
        session.library_changed.connect(self._show_library)
        session.preferences.changed.connect(self._show_preferences)
        session.bridge.event.connect(self._apply)
        self._show_preferences()
        self._show_library()
        self._show_current()

    @property
    def composer(self) -> QWidget:
        """Where the next message is written."""
        return self.box.composer

    # ---- parts

    def _make_middle(self) -> QWidget:
        middle = QWidget()
        column = QVBoxLayout(middle)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self._make_top_bar())
        self.transcript = Transcript(self._session.chat)
        self.transcript.asked.connect(self._act)
        self.welcome = Welcome()
        self.welcome.models_asked.connect(self.models_asked)
        self.welcome.suggested.connect(self._suggest)
        self.welcome.language_asked.connect(lambda code: self._session.preferences.change(language=code))
        self.welcome.anyway_asked.connect(self._session.load_anyway)
        self.welcome.starter_asked.connect(self._start_with_starter)
        views = QWidget()
        self._views = QStackedLayout(views)
        self._views.addWidget(self.transcript)
        self._views.addWidget(self.welcome)
        column.addWidget(views, 1)
        self.box = MessageBox(self._session)
        column.addWidget(self.box)
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
        self.temporary = label(tr("Temporary"), "chip")
        self.temporary.setObjectName("temporaryChip")
        self.temporary.setToolTip(tr("This chat is not kept: it is gone when another one is opened."))
        row.addWidget(self.temporary)
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

    # ---- what the user does

    def _act(self, action: str, message: str) -> None:
        """Do what was asked for beside a message."""
        session = self._session
        match action:
            case "regenerate":
                session.regenerate(message)
            case "continue":
                session.continue_answer(message)
            case "older" | "newer":
                session.show_version(message, -1 if action == "older" else 1)
            case "branch":
                session.branch(message)
            case "edit":
                self._edit(message)
            case "pin":
                session.pin_message(message)
            case "tokens":
                self._show_tokens(message)
            case "delete":
                confirm(
                    self,
                    tr("Delete this message and what follows it?"),
                    tr("Other versions of it stay."),
                    tr("Delete"),
                    lambda: session.remove_message(message),
                )

    def _edit(self, message: str) -> None:
        turn = next((turn for turn in self._session.chat.turns if turn.message.id == message), None)
        if turn is not None and self._session.answer is None:
            question = turn.message.role == "user"
            words = tr("Editing a message: it is answered anew") if question else tr("Editing an answer")
            self.box.edit(message, turn.message.content, words)

    def _start_with_starter(self) -> None:
        starter = next((entry for entry in self._session.models if entry.starter), None)
        if starter is not None:
            self._session.choose_model(starter.path)

    def _look_at_computer(self) -> None:
        """At the first start: what it has at once, how fast it is when the engine's code is there."""
        session = self._session
        if session.preferences.values.greeted:
            return
        measured = session.state.kind == "ready"
        if session.engine_ready and self._looked < 1 + measured:
            self._looked = 1 + measured
            session.bridge.task("diagnose", lambda api, stop: diagnose(api, stop, benchmark=measured))

    def _apply(self, event: object) -> None:
        if isinstance(event, Diagnosed) and event.facts and not self._session.preferences.values.greeted:
            self._hardware = hardware_words(event.facts)
            self._show_first()

    def _show_first(self) -> None:
        session = self._session
        first = not session.preferences.values.greeted
        starter = next((entry.name for entry in session.models if entry.starter), "")
        waiting = first and session.state.kind in {"none", "failed"}
        self.welcome.show_first(
            (self._hardware or tr("Looking at this computer…")) if first else "", starter if waiting else ""
        )

    def _show_tokens(self, message: str) -> None:
        turn = next((turn for turn in self._session.chat.turns if turn.message.id == message), None)
        if turn is not None:
            TokenView(self._session, turn, self).open()

    def _suggest(self, text: str) -> None:
        composer = self.box.composer
        composer.setPlainText(text)
        composer.moveCursor(composer.textCursor().MoveOperation.End)
        composer.setFocus()

    def insert_text(self, text: str) -> None:
        """Put a dropped text where the cursor stands."""
        self.box.insert_text(text)

    def attach(self, paths: tuple[Path, ...]) -> None:
        """Add files to the message."""
        self.box.attach(paths)

    def keep_draft(self) -> None:
        """Store what is typed now."""
        self.box.keep_draft()
        self.panel.keep_typed()

    def _toggle_controls(self) -> None:
        shown = not self.panel.isVisible()
        self.panel.setVisible(shown)
        self.controls_toggle.setChecked(shown)
        if not self._squeezed[1]:
            self._session.preferences.change(controls_open=shown)

    def focus_search(self) -> None:
        """Go to the search field."""
        self.sidebar.show()
        self.sidebar.search.setFocus()
        self.sidebar.search.selectAll()

    def edit_last(self) -> None:
        """Edit the last message of the user."""
        asked = [turn.message.id for turn in self._session.chat.turns if turn.message.role == "user"]
        if asked:
            self._edit(asked[-1])

    def copy_last(self) -> None:
        """Copy the last answer."""
        answers = [turn.message.content for turn in self._session.chat.turns if turn.message.role == "assistant"]
        if answers:
            QGuiApplication.clipboard().setText(answers[-1])

    def escape(self) -> None:
        """End what was begun last: a search, an edit, an answer."""
        if self.sidebar.search.hasFocus():
            self.sidebar.search.clear()
            self.box.composer.setFocus()
        elif self.box.editing:
            self.box.end_edit()
        else:
            self.box.stop_now()

    # ---- what is to be seen

    def _show_current(self) -> None:
        current = self._session.current
        self.title.show_text(current.title if current is not None else "")
        self.temporary.setVisible(self._session.temporary)
        self._show_running()
        self._show_welcome()
        self.box.composer.setFocus()

    def _show_running(self) -> None:
        self._views.setCurrentIndex(0 if self._session.chat.turns else 1)
        self.transcript.regenerate.setEnabled(self._session.can_regenerate)

    def _show_model(self) -> None:
        state = self._session.state
        self.picker.show_state(state)
        self.cancel_load.setVisible(state.kind == "loading")
        self.eject.setVisible(state.kind == "ready")
        self._show_welcome()
        self._show_running()
        self._look_at_computer()

    def _show_library(self) -> None:
        self.picker.show_models(self._session.models, self._session.state)
        self._show_model()

    def _show_welcome(self) -> None:
        session = self._session
        self._show_first()
        state = session.state
        if session.engine_failure:
            self.welcome.show_trouble(tr("Inglenook cannot run here"), session.engine_failure)
        elif state.kind == "failed":
            self.welcome.show_trouble(
                tr("{name} could not be loaded", name=state.name), state.sentence, anyway=state.wants_memory
            )
        elif state.kind == "none" and session.engine_ready and not session.models:
            self.welcome.show_first_run()
        elif session.temporary:
            self.welcome.show_greeting(
                tr("This chat is temporary: nothing of it is kept, and it is gone when another one is opened.")
            )
        else:
            self.welcome.show_greeting(self._greeting())

    def _greeting(self) -> str:
        state = self._session.state
        if state.kind == "loading" and state.stage == "compile":
            return tr("At its first start Inglenook prepares code for this processor; that takes a minute or two.")
        if state.kind == "loading":
            return tr("{name} is getting ready. You can write already; your message waits for it.", name=state.name)
        if state.kind == "ready" and self._session.starter_is_loaded:
            return tr(
                "{name} is a very small model, for a first taste: it makes things up. "
                "Add a larger one on the Models page for real work.",
                name=state.name,
            )
        if state.kind == "ready":
            return tr("{name} answers from this computer alone; nothing you write leaves it.", name=state.name)
        return tr("Choose a model above to begin.") if self._session.engine_ready else tr("One moment…")

    def _show_preferences(self, _before: object = None) -> None:
        self.box.composer.send_on_enter = self._session.preferences.values.send_on_enter

    # ---- Qt

    @override
    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        squeezed = (event.size().width() < look().gap(_NARROWER), event.size().width() < look().gap(_NARROW))
        if squeezed != self._squeezed:
            before, self._squeezed = self._squeezed, squeezed
            if squeezed[0] != before[0]:
                self.sidebar.setVisible(not squeezed[0])
            if squeezed[1] != before[1]:
                self.panel.setVisible(not squeezed[1] and self._session.preferences.values.controls_open)
            self.controls_toggle.setChecked(self.panel.isVisible())
