"""What the window works on: conversations, running answers, the model; knows no widget.

A message is stored before its answer is asked for; an answer's text is stored
once a second while it grows. Answers go on when another conversation is shown.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from PySide6.QtCore import QObject, Signal

from engine.settings import Sampling
from gui.bridge import Answering, Bridge, Counted, EngineReady, Library, ModelEntry, WorkFailed
from gui.chat.turns import Activity, ChatModel, Turn, advance
from gui.data.preferences import PreferencesFile
from gui.data.store import Conversation, Message, Store, new_id
from gui.kit.i18n import tr
from gui.kit.timing import timer

if TYPE_CHECKING:
    from engine import api

__all__ = ["ModelState", "Running", "Session"]

_KEEP_MS = 1000
_TITLE = 80


@dataclass(frozen=True, slots=True)
class ModelState:
    """The model in use: which, and how far it is. `share` is 0..1 where known; `sentence` says why it failed."""

    kind: Literal["none", "loading", "ready", "failed"] = "none"
    path: Path | None = None
    name: str = ""
    stage: str = ""
    share: float | None = None
    sentence: str = ""
    model: api.LoadedModel | None = None


@dataclass(slots=True)
class Running:
    """An answer that is being written."""

    turn: Turn
    history: tuple[Message, ...]
    stored: Future[Any]
    begin_s: float
    first_s: float = 0.0  # when the first text came
    kept: int = 0  # characters that are stored
    asked: bool = False  # the engine has it


class Session(QObject):
    """The truth behind the window."""

    notice = Signal(str, str)  # a sentence, and "note" | "warning" | "problem"
    model_changed = Signal()
    library_changed = Signal()
    conversations_changed = Signal()
    current_changed = Signal()
    running_changed = Signal()
    figures_changed = Signal()

    def __init__(self, store: Store, bridge: Bridge, preferences: PreferencesFile) -> None:
        super().__init__()
        self.store = store
        self.bridge = bridge
        self.preferences = preferences
        self.chat = ChatModel()
        self.current: Conversation | None = None
        self.state = ModelState()
        self.models: tuple[ModelEntry, ...] = ()
        self.engine_ready = False
        self.engine_failure = ""
        self.running: dict[str, Running] = {}  # by message
        self.speed_tps = 0.0
        self.first_s = 0.0
        self.used_tokens = 0
        self._keep = timer(self, _KEEP_MS, self._keep_pieces)
        bridge.event.connect(self.apply)
        preferences.changed.connect(lambda _before: self._show_running())

    # ---- conversations

    def new_chat(self) -> None:
        """An empty conversation; it exists once something was sent."""
        if self.current is None and not self.chat.turns:
            self.current_changed.emit()
            return
        self.current = None
        self.chat.show([])
        self._forget_figures()
        self.current_changed.emit()

    def open(self, identity: str) -> None:
        """Show a conversation."""
        found = self.store.conversation(identity)
        if found is None or (self.current is not None and self.current.id == identity):
            return
        self.current = found
        turns = []
        for message in self.store.branch(found):
            running = self.running.get(message.id)
            turns.append(self._shown(running.turn) if running is not None else Turn(message))
        self.chat.show(turns)
        self._forget_figures()
        self.current_changed.emit()
        self._count()

    def rename(self, identity: str, title: str) -> None:
        """Give a conversation another title; an empty one changes nothing."""
        title = " ".join(title.split())[:_TITLE]
        if title:
            self.store.rename(identity, title)
            if self.current is not None and self.current.id == identity:
                self.current = replace(self.current, title=title)
                self.current_changed.emit()
            self.conversations_changed.emit()

    def remove(self, identity: str) -> None:
        """Delete a conversation; its running answer ends."""
        for running in [known for known in self.running.values() if known.turn.message.conversation == identity]:
            self.bridge.cancel(running.turn.message.id)
            self.running.pop(running.turn.message.id)
        self.store.remove(identity)
        if self.current is not None and self.current.id == identity:
            self.current = None
            self.chat.show([])
            self._forget_figures()
            self.current_changed.emit()
        self.running_changed.emit()
        self.conversations_changed.emit()

    def keep_draft(self, text: str) -> None:
        """Keep what is typed in the current conversation and not sent."""
        if self.current is None:
            self.preferences.change(draft=text)
        elif self.current.draft != text:
            self.current = replace(self.current, draft=text)
            self.store.keep_draft(self.current.id, text)

    @property
    def draft(self) -> str:
        """What was typed in the current conversation and not sent."""
        return self.preferences.values.draft if self.current is None else self.current.draft

    # ---- answers

    @property
    def answer(self) -> Running | None:
        """The running answer of the conversation in view."""
        last = self.chat.turns[-1] if self.chat.turns else None
        return self.running.get(last.message.id) if last is not None else None

    @property
    def can_send(self) -> bool:
        """A message can be sent now; it waits when the model is still loading."""
        return self.answer is None and self.state.kind in {"loading", "ready"}

    @property
    def can_regenerate(self) -> bool:
        """The last answer can be made again."""
        turns = self.chat.turns
        return self.can_send and len(turns) >= 2 and turns[-1].message.role == "assistant"

    @property
    def sampling(self) -> Sampling:
        """The values the next answer is drawn with."""
        return self.preferences.values.sampling_over(self.sampling_defaults)

    @property
    def sampling_defaults(self) -> Sampling:
        """The model's own values."""
        return self.state.model.defaults if self.state.model is not None else Sampling()

    def choose_sampling(self, name: str, value: Any) -> None:
        """Set one value; the model's own value is not kept as a choice."""
        chosen = dict(self.preferences.values.sampling)
        if value == getattr(self.sampling_defaults, name):
            chosen.pop(name, None)
        else:
            chosen[name] = value
        self.preferences.change(sampling=chosen)

    def send(self, text: str) -> bool:
        """Store a message and ask for its answer; False when that is not possible now."""
        if not text.strip() or not self.can_send:
            return False
        if self.current is None:
            identity = new_id()
            title = " ".join(text.split("\n", 1)[0].split())[:_TITLE] or tr("New chat")
            self.store.create(identity, title)
            self.current = Conversation(identity, title)
            self.preferences.change(draft="")
            self.current_changed.emit()
        parent = self.chat.turns[-1].message.id if self.chat.turns else None
        message = Message(new_id(), self.current.id, parent, "user", text)
        self.store.add(message)
        self.keep_draft("")
        self.chat.append(Turn(message))
        self._answer(message)
        return True

    def regenerate(self) -> None:
        """Answer the last message anew; the old answer stays in the store as another version."""
        if not self.can_regenerate:
            return
        self.chat.cut(len(self.chat.turns) - 1)
        self._answer(self.chat.turns[-1].message)

    def stop(self) -> None:
        """End the running answer of the conversation in view; what is written stays."""
        running = self.answer
        if running is None:
            return
        if running.asked:
            self.bridge.cancel(running.turn.message.id)
        else:
            message = replace(running.turn.message, state="done", reason="cancelled")
            self._end(replace(running.turn, message=message, activity=None))

    def _answer(self, question: Message) -> None:
        name = self.state.model.name if self.state.model is not None else self.state.name
        message = Message(new_id(), question.conversation, question.id, "assistant", "", "growing", model=name)
        stored = self.store.add(message)
        turn = Turn(message, Activity("queue" if self.state.kind == "ready" else "model"))
        history = _alternating([known.message for known in self.chat.turns])
        self.running[message.id] = Running(turn, history, stored, time.monotonic())
        self.chat.append(turn)
        self.speed_tps = self.first_s = 0.0
        self._keep.start()
        self._ask_waiting()
        self.running_changed.emit()
        self.figures_changed.emit()
        self.conversations_changed.emit()

    def _ask_waiting(self) -> None:
        """Give the engine what waited for the model."""
        if self.state.kind != "ready" or self.state.model is None:
            return
        for running in self.running.values():
            if not running.asked:
                running.asked = True
                message = replace(running.turn.message, model=self.state.model.name)
                running.turn = replace(running.turn, message=message, activity=Activity("queue"))
                self.chat.put(self._shown(running.turn))
                self.bridge.answer(Answering(message.id, running.history, self.sampling), running.stored)

    def _end(self, turn: Turn) -> None:
        """An answer has its final text."""
        running = self.running.pop(turn.message.id)
        facts = dict(turn.message.facts)
        if running.first_s:
            facts["first_s"] = round(running.first_s - running.begin_s, 3)
        turn = replace(turn, message=replace(turn.message, facts=facts))
        self.store.finish(turn.message)
        if not self.running:
            self._keep.stop()
        self.chat.put(turn)
        if self._in_view(turn):
            self.speed_tps = float(facts.get("decode_tps", 0.0))
            self.first_s = float(facts.get("first_s", 0.0))
            if "prompt_tokens" in facts:
                self.used_tokens = int(facts["prompt_tokens"]) + int(facts["completion_tokens"])
        self.running_changed.emit()
        self.figures_changed.emit()
        self.conversations_changed.emit()

    def _keep_pieces(self) -> None:
        for identity, running in self.running.items():
            text = running.turn.message.content
            if len(text) > running.kept:
                self.store.grow(identity, text[running.kept :])
                running.kept = len(text)

    def _shown(self, turn: Turn) -> Turn:
        """With streaming switched off, text is shown when it is complete, and stored as ever."""
        if turn.growing and not self.preferences.values.streaming:
            return replace(turn, message=replace(turn.message, content=""))
        return turn

    def _show_running(self) -> None:
        for running in self.running.values():
            self.chat.put(self._shown(running.turn))

    def _in_view(self, turn: Turn) -> bool:
        return self.current is not None and turn.message.conversation == self.current.id

    # ---- the model

    @property
    def starter_is_loaded(self) -> bool:
        """Whether the model in use is the one that comes with the program."""
        return any(entry.starter and entry.path == self.state.path for entry in self.models)

    def choose_model(self, path: Path) -> None:
        """Load a model in place of the present one; conversations stay."""
        entry = next((known for known in self.models if known.path == path), None)
        self.state = ModelState("loading", path, entry.name if entry is not None else path.stem)
        self.preferences.change(model=str(path), loading=str(path))
        self.preferences.save()
        self.bridge.load(path, self.preferences.values.engine)
        self.model_changed.emit()
        self.running_changed.emit()

    def cancel_load(self) -> None:
        """Give up loading."""
        self.bridge.cancel_load()

    def unload(self) -> None:
        """Give the model's memory back."""
        self.state = ModelState()
        self.bridge.unload()
        self._model_settled()

    def reload_model(self) -> None:
        """Load the present model again, with changed engine settings."""
        if self.state.path is not None:
            self.choose_model(self.state.path)

    def _first_model(self) -> None:
        """At the start: the model used last, else whatever there is."""
        preferences = self.preferences.values
        last = Path(preferences.model) if preferences.model else None
        if preferences.loading:
            name = Path(preferences.loading).name
            self.preferences.change(loading="")
            self.notice.emit(
                tr(
                    "Inglenook ended while it was loading {name}, so that model is not loaded by itself now.", name=name
                ),
                "warning",
            )
            return
        if last is not None and last.exists():
            self.choose_model(last)
        elif self.models:
            self.choose_model(self.models[0].path)

    def _model_settled(self) -> None:
        self.preferences.change(loading="")
        self.preferences.save()
        self.model_changed.emit()
        self.running_changed.emit()
        self.figures_changed.emit()

    def _model_failed(self, sentence: str) -> None:
        self.state = replace(self.state, kind="failed", sentence=sentence, share=None, model=None)
        for running in [known for known in self.running.values() if not known.asked]:
            message = replace(running.turn.message, state="failed", reason=sentence)
            self._end(replace(running.turn, message=message, activity=None))
        self._model_settled()

    # ---- events

    def apply(self, event: object) -> None:
        """One event of the bridge or the engine."""
        match event:
            case EngineReady(sentence=""):
                self.engine_ready = True
                self._first_model()
                self.model_changed.emit()
            case EngineReady(sentence=sentence):
                self.engine_failure = sentence
                self.notice.emit(sentence, "problem")
                self.model_changed.emit()
            case Library(models=models):
                self.models = models
                self.library_changed.emit()
            case Counted(conversation=identity, tokens=tokens):
                if self.current is not None and self.current.id == identity and self.answer is None:
                    self.used_tokens = tokens
                    self.figures_changed.emit()
            case WorkFailed(sentence=sentence):
                self.notice.emit(sentence, "problem")
            case _:
                self._apply_engine(event)

    def _apply_engine(self, event: object) -> None:
        from engine import api  # loaded long since: the event came from there

        match event:
            case api.Loaded(model=model):
                self.state = ModelState("ready", self.state.path or model.path, model.name, model=model)
                for sentence in model.notices:
                    self.notice.emit(sentence, "note")
                self._model_settled()
                self._ask_waiting()
                self._count()
            case api.Progress(request_id=None):
                if self.state.kind == "loading":
                    share = min(1.0, event.done / event.total) if event.total else None
                    self.state = replace(self.state, stage=event.stage, share=share)
                    self.model_changed.emit()
            case api.Failed(request_id=None):
                if event.kind == "Cancelled":
                    self.state = ModelState()
                    self._model_failed(tr("Loading was cancelled."))
                    self.state = ModelState()
                    self.model_changed.emit()
                elif self.state.kind == "loading":
                    self._model_failed(event.message)
                else:
                    self.notice.emit(event.message, "problem")
            case api.Started() | api.Progress() | api.Delta() | api.Done() | api.Failed():
                running = self.running.get(event.request_id or "")
                if running is not None:
                    self._advance(running, advance(running.turn, event))

    def _advance(self, running: Running, turn: Turn) -> None:
        now = time.monotonic()
        if turn.message.content and not running.first_s:
            running.first_s = now
        running.turn = turn
        if not turn.growing:
            self._end(turn)
            return
        self.chat.put(self._shown(turn))
        if self._in_view(turn):
            if turn.activity is not None and turn.activity.total:
                self.used_tokens = turn.activity.total
            if running.first_s:
                self.first_s = running.first_s - running.begin_s
                self.speed_tps = (turn.tokens - 1) / (now - running.first_s) if now - running.first_s > 0.5 else 0.0
            self.figures_changed.emit()

    @property
    def context_tokens(self) -> int:
        """Tokens a conversation can hold; 0 while no model is loaded."""
        return self.state.model.context if self.state.model is not None else 0

    @property
    def context_used(self) -> int:
        """Tokens the conversation in view takes, with the answer so far."""
        return self.used_tokens + (self.answer.turn.tokens if self.answer is not None else 0)

    def _forget_figures(self) -> None:
        self.speed_tps = self.first_s = 0.0
        self.used_tokens = 0
        self.figures_changed.emit()
        self.running_changed.emit()

    def _count(self) -> None:
        if self.state.kind == "ready" and self.current is not None and self.answer is None and self.chat.turns:
            self.bridge.count(self.current.id, _alternating([turn.message for turn in self.chat.turns]))

    def shut_down(self) -> None:
        """Store everything as it is; answers that are running are interrupted."""
        self._keep.stop()
        for running in list(self.running.values()):
            message = replace(running.turn.message, state="interrupted", reason="closed")
            self.store.finish(message)
        self.running.clear()
        self.preferences.change(loading="")  # closing while a model loads is no crash
        self.preferences.save()


def _alternating(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages as a template takes them: without answers that came to nothing, questions then joined."""
    kept: list[Message] = []
    for message in messages:
        if message.role == "assistant" and not message.content:
            continue
        if kept and kept[-1].role == message.role == "user":
            kept[-1] = replace(kept[-1], content=f"{kept[-1].content}\n\n{message.content}")
        else:
            kept.append(message)
    return tuple(kept)
