"""The box at the bottom of the chat page: what is being written, what goes with it, what waits, the figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from PySide6.QtCore import QEvent, QObject, QPoint, Qt
from PySide6.QtWidgets import QFileDialog, QFrame, QHBoxLayout, QLineEdit, QMenu, QVBoxLayout, QWidget
from typing_extensions import override

from gui.bridge import FileRead
from gui.chat.composer import Composer
from gui.data.attachments import PATTERNS
from gui.data.store import Attached
from gui.kit.controls import ContextGauge, Elided, IconButton, label, small_icon
from gui.kit.dialogs import choose
from gui.kit.flow import Flow
from gui.kit.i18n import tr
from gui.kit.layout import centre, clear
from gui.kit.theme import look
from gui.kit.timing import timer
from gui.kit.words import count_words
from gui.session import Session

__all__ = ["MessageBox"]


class MessageBox(QWidget):
    """Writes, edits and sends messages of a session's conversation in view."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._editing = ""  # the message that is being written anew
        self._files: list[Attached] = []
        self._reading: set[Path] = set()
        self._costs: dict[str, int] = {}  # tokens of attached files, by name
        self._frame = QFrame()
        self._frame.setObjectName("composerFrame")
        centre(self, self._frame, 800, (28, 4, 39, 16))  # the scroll bar of the transcript is at the right
        column = QVBoxLayout(self._frame)
        column.setContentsMargins(18, 13, 10, 9)
        column.setSpacing(6)
        column.addWidget(self._make_editing())
        column.addWidget(self._make_waiting())
        column.addWidget(self._make_chips())
        column.addWidget(self._make_begin())
        self.composer = Composer()
        self.composer.sent.connect(self.send_now)
        self.composer.refused.connect(lambda sentence: session.notice.emit(sentence, "warning"))
        self.composer.files_pasted.connect(self.attach)
        self.composer.installEventFilter(self)
        column.addWidget(self.composer)
        column.addLayout(self._make_bar())

        self._keep_draft = timer(self, 400, self._draft_changed, once=True)
        self._count_draft = timer(self, 350, self._count, once=True)
        self.composer.textChanged.connect(self._typed)
        session.current_changed.connect(self.show_current)
        session.running_changed.connect(self._show_send)
        session.waiting_changed.connect(self._show_waiting)
        session.model_changed.connect(self._show_model)
        session.figures_changed.connect(self._show_figures)
        session.counted.connect(self._counted)
        session.bridge.event.connect(self._apply)
        self._shown = session.current.id if session.current is not None else None
        self.show_current()
        self._show_figures()
        self._show_waiting()

    # ---- parts

    def _make_editing(self) -> QFrame:
        self._edit_banner = QFrame()
        self._edit_banner.setObjectName("editBanner")
        row = QHBoxLayout(self._edit_banner)
        row.setContentsMargins(0, 0, 0, 0)
        self._edit_words = Elided("strong")
        row.addWidget(self._edit_words, 1)
        cancel = IconButton("close", tr("Leave the message as it is"), size=16)
        cancel.setObjectName("cancelEdit")
        cancel.clicked.connect(self.end_edit)
        row.addWidget(cancel)
        self._edit_banner.hide()
        return self._edit_banner

    def _make_waiting(self) -> QWidget:
        self._waiting = QWidget()
        self._waiting.setObjectName("waitingMessages")
        self._waiting_rows = QVBoxLayout(self._waiting)
        self._waiting_rows.setContentsMargins(0, 0, 0, 0)
        self._waiting_rows.setSpacing(2)
        return self._waiting

    def _make_chips(self) -> QWidget:
        self._chips = QWidget()
        self._chips.setObjectName("attachments")
        self._chip_flow = Flow(self._chips)
        self._chips.hide()
        return self._chips

    def _make_begin(self) -> QFrame:
        self._begin_row = QFrame()
        row = QHBoxLayout(self._begin_row)
        row.setContentsMargins(0, 0, 0, 0)
        row.addWidget(label(tr("The answer begins with"), "caption"))
        self._begin = QLineEdit()
        self._begin.setObjectName("beginAnswer")
        self._begin.setAccessibleName(tr("The answer begins with"))
        row.addWidget(self._begin, 1)
        close = IconButton("close", tr("Let the model begin"), size=16)
        close.clicked.connect(self._end_begin)
        row.addWidget(close)
        self._begin_row.hide()
        return self._begin_row

    def _make_bar(self) -> QHBoxLayout:
        row = QHBoxLayout()
        row.setSpacing(10)
        self.attach_button = IconButton("clip", tr("Attach files"), size=18)
        self.attach_button.setObjectName("attach")
        self.attach_button.clicked.connect(self._browse)
        row.addWidget(self.attach_button)
        more = IconButton("more", tr("More"), size=18)
        more.setObjectName("composerMore")
        more.clicked.connect(lambda: self._show_more(more.mapToGlobal(QPoint(0, -8))))
        row.addWidget(more)
        self.gauge = ContextGauge()
        self.gauge.asked.connect(self._show_context)
        row.addWidget(self.gauge)
        self.speed = label("", "caption")
        self.speed.setObjectName("statusSpeed")
        row.addWidget(self.speed)
        self.hint = Elided("caption")
        self.hint.setObjectName("sendHint")
        row.addWidget(self.hint, 1)
        self.send = IconButton("send", tr("Send"), size=20)
        self.send.setObjectName("send")
        self.send.show_icon("send", "on_accent")
        self.send.setFixedSize(34, 34)
        self.send.clicked.connect(self.send_now)
        row.addWidget(self.send)
        self.stop = IconButton("stop", tr("Stop"), size=20)
        self.stop.setObjectName("stop")
        self.stop.call(tr("Stop"), tr("Stop") + "  (Esc)")
        self.stop.show_icon("stop", "window")
        self.stop.setFixedSize(34, 34)
        self.stop.clicked.connect(self.stop_now)
        row.addWidget(self.stop)
        return row

    # ---- sending

    def send_now(self) -> None:
        """Send what is written, or put it in the place of what is edited."""
        text = self.composer.text()
        if self._editing:
            message, self._editing = self._editing, ""
            self._session.edit(message, text)
            self.end_edit()
        elif self._reading:
            return
        elif self._too_long and self._session.overflow == "ask":
            self._ask_overflow()
        else:
            self._send()

    def stop_now(self) -> None:
        """End the running answer; what waits comes back into the box, before what is being typed."""
        self.keep_draft()
        self._session.stop()

    def _send(self) -> None:
        if self._session.send(self.composer.text(), tuple(self._files), self._begin.text()):
            self._keep_draft.stop()
            self._count_draft.stop()
            self._files.clear()
            self._show_files()
            self._end_begin()
            self.composer.clear()

    @property
    def _too_long(self) -> int:
        """How many tokens too long the conversation would become; 0 when it fits or is not known."""
        session = self._session
        if not session.context_tokens or session.answer is not None or not session.draft_tokens:
            return 0
        return max(0, session.used_tokens + session.draft_tokens - session.context_tokens)

    def _ask_overflow(self) -> None:
        session = self._session
        model = session.state.model
        assert model is not None
        needed = session.used_tokens + session.draft_tokens
        ways = []
        more = min(model.model_context, max(2 * session.context_tokens, needed + 2048))
        if more > needed and more > session.context_tokens:
            words = tr("Load with {count} tokens of context", count=count_words(more))
            ways.append((words, "overflowReload", "", lambda: session.load_with_context(more)))
        if session.chat.turns and session.draft_tokens < session.context_tokens:
            ways.append((tr("Ask in a new chat"), "overflowNew", "", self._send_in_new_chat))
        rolling = tr("Leave out the oldest messages")
        if session.chat.turns:
            ways.append((rolling, "overflowRolling", "", self._send_rolling))
        ways.append((tr("Send anyway"), "overflowSend", "", self._send))
        detail = tr(
            "With this message the conversation takes {needed} tokens, and the context holds {context}.",
            needed=count_words(needed),
            context=count_words(session.context_tokens),
        )
        choose(self, tr("This is more than the model can read"), detail, ways)

    def _send_rolling(self) -> None:
        self._session.choose_overflow("rolling")
        self._send()

    def _send_in_new_chat(self) -> None:
        text, files, begin = self.composer.text(), tuple(self._files), self._begin.text()
        self.composer.clear()
        self._session.new_chat()
        if self._session.send(text, files, begin):
            self._files.clear()
            self._show_files()
            self._end_begin()

    # ---- editing

    def edit(self, message: str, text: str, words: str) -> None:
        """Write a message anew; `words` say which."""
        self.keep_draft()
        self._editing = message
        self._edit_words.show_text(words)
        self._edit_banner.show()
        self.composer.setPlainText(text)
        self.composer.moveCursor(self.composer.textCursor().MoveOperation.End)
        self.composer.setFocus()
        self._show_send()

    @property
    def editing(self) -> bool:
        """An earlier message is being written anew."""
        return bool(self._editing)

    def end_edit(self) -> None:
        """Back to the next message."""
        self._editing = ""
        self._edit_banner.hide()
        self.composer.setPlainText(self._session.draft)
        self._keep_draft.stop()
        self._show_send()

    # ---- files

    def attach(self, paths: Sequence[Path]) -> None:
        """Read files that go with the message."""
        for path in paths:
            if path not in self._reading:
                self._reading.add(path)
                self._session.bridge.read_file(path)
        self._show_files()

    def _browse(self) -> None:
        dialog = QFileDialog(self, tr("Attach files"))
        dialog.setFileMode(QFileDialog.FileMode.ExistingFiles)
        dialog.setNameFilters([f"{tr('Texts and documents')} ({PATTERNS})", f"{tr('All files')} (*)"])
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.filesSelected.connect(lambda names: self.attach([Path(name) for name in names]))
        dialog.open()

    def _apply(self, event: object) -> None:
        if isinstance(event, FileRead) and event.path in self._reading:
            self._reading.discard(event.path)
            if event.file is None:
                self._session.notice.emit(event.sentence, "warning")
            else:
                self._files.append(event.file)
                self._session.count_file(event.file.name, event.file)
            self._show_files()
            self._typed()

    def _counted(self, subject: str, tokens: int) -> None:
        if any(file.name == subject for file in self._files):
            self._costs[subject] = tokens
            self._show_files()

    def _show_files(self) -> None:
        clear(self._chip_flow)
        for number, file in enumerate(self._files):
            cost = self._costs.get(file.name)
            said = file.name if cost is None else f"{file.name} · {tr('{count} tokens', count=count_words(cost))}"
            self._chip_flow.addWidget(_Chip("file", said, tr("Remove {name}", name=file.name),
                                            partial(self._drop_file, number)))  # fmt: skip
        for path in sorted(self._reading):
            said = tr("Reading {name}…", name=path.name)
            self._chip_flow.addWidget(_Chip("file", said, tr("Remove {name}", name=path.name),
                                            partial(self._drop_reading, path)))  # fmt: skip
        self._chips.setVisible(self._chip_flow.count() > 0)
        self._chips.updateGeometry()
        self._show_send()

    def _drop_file(self, number: int) -> None:
        self._files.pop(number)
        self._show_files()
        self._typed()

    def _drop_reading(self, path: Path) -> None:
        self._reading.discard(path)
        self._show_files()

    # ---- the menus

    def _show_more(self, place: QPoint) -> None:
        menu = QMenu(self)
        menu.setObjectName("composerMenu")
        menu.addAction(tr("Attach files…")).triggered.connect(self._browse)
        begin = menu.addAction(tr("Write how the answer begins"))
        begin.triggered.connect(self.ask_begin)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(place)

    def ask_begin(self) -> None:
        """Let the user write the beginning of the answer."""
        self._begin_row.show()
        self._begin.setFocus()

    def _end_begin(self) -> None:
        self._begin.clear()
        self._begin_row.hide()

    def _show_context(self) -> None:
        """What the context holds, in words."""
        session = self._session
        left = max(0, session.context_tokens - session.context_used - session.draft_tokens)
        lines = [
            tr("This conversation: {count} tokens", count=count_words(session.context_used)),
            tr("This message: {count} tokens", count=count_words(session.draft_tokens)),
            tr("Room for the answer: {count} tokens", count=count_words(left)),
            self._seen_words(),
        ]
        menu = QMenu(self)
        menu.setObjectName("contextMenu")
        for words in lines:
            menu.addAction(words).setEnabled(False)
        model = session.state.model
        if model is not None and model.model_context > session.context_tokens:
            menu.addSeparator()
            more = min(model.model_context, 2 * session.context_tokens)
            words = tr("Load with {count} tokens of context", count=count_words(more))
            menu.addAction(words).triggered.connect(lambda: session.load_with_context(more))
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(self.gauge.mapToGlobal(QPoint(0, -menu.sizeHint().height() - 4)))

    def _seen_words(self) -> str:
        unseen = sum(turn.unseen for turn in self._session.chat.turns)
        if unseen:
            return tr("The model no longer reads {count} messages.", count=str(unseen))
        if self._session.context_used > self._session.context_tokens:
            return tr("The conversation is longer than the context.")
        return tr("The model still sees the whole conversation.")

    # ---- drafts

    def insert_text(self, text: str) -> None:
        """Put a dropped text where the cursor stands."""
        self.composer.insertPlainText(text)
        self.composer.setFocus()

    def _typed(self) -> None:
        self._show_send()
        if not self._editing:
            self._keep_draft.start()
            self._count_draft.start()

    def _count(self) -> None:
        self._session.count_draft(self.composer.text(), self._files)

    def _draft_changed(self) -> None:
        if not self._editing:
            self._session.keep_draft(self.composer.text())

    def keep_draft(self) -> None:
        """Store what is typed now."""
        if self._keep_draft.isActive():
            self._keep_draft.stop()
            self._draft_changed()

    # ---- what is to be seen

    def show_current(self) -> None:
        """Another conversation, or another draft of the same."""
        identity = self._session.current.id if self._session.current is not None else None
        if identity != self._shown:
            self._shown = identity
            self._editing = ""
            self._edit_banner.hide()
            self._files.clear()
            self._reading.clear()
            self._show_files()
        if not self._editing and self.composer.text() != self._session.draft:
            self.composer.setPlainText(self._session.draft)
            self.composer.moveCursor(self.composer.textCursor().MoveOperation.End)
        self._keep_draft.stop()
        self._show_send()
        self._show_waiting()

    def _show_waiting(self) -> None:
        clear(self._waiting_rows)
        current = self._session.current
        line = self._session.waiting.get(current.id, []) if current is not None else []
        for number, waiting in enumerate(line):
            row = _Chip("temporary", tr("Next: {text}", text=" ".join(waiting.text.split())),
                        tr("Do not send this"), partial(self._session.drop_waiting, number))  # fmt: skip
            row.setObjectName("waitingMessage")
            self._waiting_rows.addWidget(row)
        self._waiting.setVisible(bool(line))

    def _show_model(self) -> None:
        self._show_send()
        self._show_figures()
        if self._session.state.kind == "ready":
            for file in self._files:
                self._session.count_file(file.name, file)
            self._count_draft.start()

    def _show_send(self) -> None:
        session = self._session
        answering = session.answer is not None
        written = bool(self.composer.text().strip()) or bool(self._files)
        self.stop.setVisible(answering)
        self.send.setVisible(not answering or (written and not self._editing))
        reason = ""
        if self._editing and answering:
            reason = tr("The answer is being written.")
        elif session.state.kind == "none":
            reason = tr("Choose a model first.") if session.engine_ready else tr("The engine is starting…")
        elif session.state.kind == "failed":
            reason = tr("The model could not be loaded.")
        elif self._reading:
            reason = tr("A file is being read…")
        self.send.setEnabled(written and not reason)
        self.send.call(tr("Send"), reason or tr("Send"))
        said = reason if written else ""
        if not said and written and self._too_long:
            said = tr("{count} tokens too long for the context", count=count_words(self._too_long))
        elif not said and written and answering:
            said = tr("Sent when this answer is complete")
        self.hint.show_text(said)
        self.composer.setPlaceholderText(tr("Write the next message") if answering else tr("Write a message"))

    def _show_figures(self) -> None:
        session = self._session
        self.gauge.show_use(session.context_used, session.context_tokens, session.draft_tokens)
        self.speed.setText(tr("{speed} tokens/s", speed=f"{session.speed_tps:.1f}") if session.speed_tps else "")
        self._show_send()

    @override
    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if watched is self.composer and event.type() in {QEvent.Type.FocusIn, QEvent.Type.FocusOut}:
            self._frame.setProperty("active", event.type() == QEvent.Type.FocusIn)
            self._frame.style().polish(self._frame)
        return super().eventFilter(watched, event)


class _Chip(QFrame):
    """A thing with a name that can be taken away."""

    def __init__(self, icon_name: str, text: str, away: str, do: Callable[[], object]) -> None:
        super().__init__()
        self.setProperty("role", "filechip")
        row = QHBoxLayout(self)
        row.setContentsMargins(8, 1, 3, 1)
        row.setSpacing(5)
        row.addWidget(small_icon(icon_name, "accent", 16))
        name = Elided("", text)
        name.setObjectName("chipText")
        wide = name.fontMetrics().horizontalAdvance(text) + 6
        name.setMinimumWidth(min(wide, look().gap(420)))
        row.addWidget(name, 1)
        close = IconButton("close", away, size=14)
        close.setObjectName("chipRemove")
        close.clicked.connect(lambda _on=False: do())
        row.addWidget(close)
