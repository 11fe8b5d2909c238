"""What the window works on: conversations and running answers; knows no widget.

A message is stored before its answer is asked for; an answer's text is stored
once a second while it grows. Answers go on when another conversation is shown.
What is sent while an answer is being written waits its turn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import Signal

from engine.settings import EngineSettings, Sampling, checked
from gui.bridge import Answering, Bridge, Counted, PromptShown, WorkFailed
from gui.chat.turns import Activity, ChatModel, Turn, advance, with_versions
from gui.conversions import Conversions
from gui.data.history import alternating, prompt_text, thought_of
from gui.data.preferences import PreferencesFile
from gui.data.presets import BUILT_IN, NEUTRAL
from gui.data.store import MEMORY, Attached, Conversation, Message, Store, new_id
from gui.kit.i18n import tr
from gui.kit.timing import timer
from gui.model_desk import ModelDesk, ModelState
from gui.serving import Serving

if TYPE_CHECKING:
    from engine import api

__all__ = ["ModelState", "Running", "Session", "Waiting"]

_KEEP_MS = 1000
_TITLE = 80
_ALTERNATIVES = 5
_POLICIES: dict[str, api.Overflow] = {
    "ask": "stop",
    "rolling": "rolling",
    "middle": "middle",
    "summarise": "summarise",
}
_DRAFT = "draft"  # the subject of a count of what is being written


@dataclass(slots=True)
class Running:
    """An answer that is being written."""

    turn: Turn
    history: tuple[Message, ...]
    sampling: Sampling
    stored: Future[Any]
    begin_s: float
    first_s: float = 0.0  # when the first text came
    thought_s: float = 0.0  # when the thinking ended
    kept: int = 0  # characters that are stored
    asked: bool = False  # the engine has it
    trace: list[api.TokenLogprob] = field(default_factory=list)
    unseen: tuple[str, ...] = ()  # messages that did not fit the context


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message that is sent when the answer before it is complete."""

    text: str
    attached: tuple[Attached, ...] = ()


class Session(ModelDesk):
    """The truth behind the window."""

    conversations_changed = Signal()
    current_changed = Signal()
    running_changed = Signal()
    figures_changed = Signal()
    parameters_changed = Signal()
    waiting_changed = Signal()
    counted = Signal(str, int)  # a subject and its tokens
    prompt_shown = Signal(object)  # a PromptShown

    def __init__(self, store: Store, bridge: Bridge, preferences: PreferencesFile) -> None:
        super().__init__(bridge, preferences)
        self.store = store
        self.crashed = store.cut_off > 0
        self.chat = ChatModel()
        self.current: Conversation | None = None
        self.temporary = False  # the next conversation is not kept
        self.running: dict[str, Running] = {}  # by message
        self.waiting: dict[str, list[Waiting]] = {}  # by conversation
        self.speed_tps = 0.0
        self.first_s = 0.0
        self.used_tokens = 0
        self.draft_tokens = 0
        self.conversions = Conversions(bridge)
        self.serving = Serving(bridge)
        self._memory: Store | None = None  # of temporary conversations
        self._new_system: str | None = None
        self._keep = timer(self, _KEEP_MS, self._keep_pieces)
        bridge.event.connect(self.apply)
        preferences.changed.connect(self._preferences_changed)

    # ---- conversations

    def new_chat(self, *, temporary: bool = False) -> None:
        """An empty conversation; it exists once something was sent."""
        self._leave_temporary()
        self.temporary = temporary
        self._new_system = None
        self.current = None
        if self.chat.turns:
            self.chat.show([])
        self._forget_figures()
        self.current_changed.emit()
        self.parameters_changed.emit()

    def open(self, identity: str) -> None:
        """Show a conversation."""
        found = self.store.conversation(identity)
        if found is None or (self.current is not None and self.current.id == identity):
            return
        self._leave_temporary()
        self._show(found)

    def rename(self, identity: str, title: str) -> None:
        """Give a conversation another title; an empty one changes nothing."""
        title = " ".join(title.split())[:_TITLE]
        if title:
            self._change(identity, title=title)

    def pin(self, identity: str, *, pinned: bool) -> None:
        """Keep a conversation at the top of the list, or no longer."""
        self._change(identity, pinned=pinned)

    def move(self, identity: str, folder: str) -> None:
        """Put a conversation into a folder; "" takes it out."""
        self._change(identity, folder=" ".join(folder.split())[:_TITLE])

    def _change(self, identity: str, **values: Any) -> None:
        self._store_of(identity).change(identity, **values)
        if self.current is not None and self.current.id == identity:
            self.current = replace(self.current, **values)
            self.current_changed.emit()
        self.conversations_changed.emit()

    def remove(self, identity: str) -> None:
        """Delete a conversation; its running answer ends."""
        for running in [known for known in self.running.values() if known.turn.message.conversation == identity]:
            self.bridge.cancel(running.turn.message.id)
            self.running.pop(running.turn.message.id)
        self.waiting.pop(identity, None)
        self._store_of(identity).remove(identity)
        if self.current is not None and self.current.id == identity:
            self.current = None
            self.temporary = False
            self.chat.show([])
            self._forget_figures()
            self.current_changed.emit()
        self.running_changed.emit()
        self.conversations_changed.emit()

    def adopt(self, conversation: Conversation, messages: Sequence[Message]) -> None:
        """Add a conversation that comes from elsewhere, and show it."""
        self.store.insert(conversation, messages)
        self.conversations_changed.emit()
        self.open(conversation.id)

    def whole(self, identity: str) -> tuple[Conversation, list[Message]] | None:
        """A conversation with all its versions, to write it to a file."""
        store = self._store_of(identity)
        found = store.conversation(identity)
        return None if found is None else (found, store.tree(identity))

    def keep_draft(self, text: str) -> None:
        """Keep what is typed in the current conversation and not sent."""
        if self.current is None:
            if not self.temporary:
                self.preferences.change(draft=text)
        elif self.current.draft != text:
            self.current = replace(self.current, draft=text)
            self._store_of(self.current.id).change(self.current.id, draft=text)

    @property
    def draft(self) -> str:
        """What was typed in the current conversation and not sent."""
        if self.current is None:
            return "" if self.temporary else self.preferences.values.draft
        return self.current.draft

    def _store_of(self, conversation: str) -> Store:
        """Where a conversation is kept."""
        current = self.current
        temporary = current is not None and current.temporary and current.id == conversation
        return self._memory if temporary and self._memory is not None else self.store

    def _leave_temporary(self) -> None:
        """A temporary conversation ends when another is shown."""
        if self.current is not None and self.current.temporary:
            identity = self.current.id
            for running in [known for known in self.running.values() if known.turn.message.conversation == identity]:
                self.bridge.cancel(running.turn.message.id)
                self.running.pop(running.turn.message.id)
            self.waiting.pop(identity, None)
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self.temporary = False

    def _show(self, conversation: Conversation) -> None:
        self.current = conversation
        store = self._store_of(conversation.id)
        siblings = store.siblings(conversation.id)
        turns = []
        for message in store.branch(conversation):
            running = self.running.get(message.id)
            turn = self._shown(running.turn) if running is not None else Turn(message)
            turns.append(with_versions(turn, siblings))
        self.chat.show(turns)
        self._mark_unseen()
        self._forget_figures()
        self.current_changed.emit()
        self.parameters_changed.emit()
        self._count()

    # ---- parameters

    @property
    def choices(self) -> dict[str, Any]:
        """What was chosen of the sampler's values: for this conversation, or for the next one."""
        if self.current is None:
            return self.preferences.values.sampling
        chosen = self.current.settings.get("sampling")
        return dict(chosen) if isinstance(chosen, dict) else {}

    @property
    def sampling(self) -> Sampling:
        """The values the next answer is drawn with."""
        try:
            return checked(Sampling, {**self.sampling_defaults.model_dump(), **self.choices})
        except Exception:  # noqa: BLE001 (a file from elsewhere may hold what is no value)
            return self.sampling_defaults

    @property
    def sampling_defaults(self) -> Sampling:
        """The model's own values."""
        return self.state.model.defaults if self.state.model is not None else Sampling()

    def choose_sampling(self, name: str, value: Any) -> None:
        """Set one value; the model's own value is not kept as a choice."""
        chosen = dict(self.choices)
        if value == getattr(self.sampling_defaults, name):
            chosen.pop(name, None)
        else:
            chosen[name] = value
        self._choose(chosen)

    def choose_preset(self, name: str) -> None:
        """Take over the values of a preset."""
        known = {**BUILT_IN, **self.preferences.values.presets}
        kept = {key: value for key, value in self.choices.items() if key in {"max_tokens", "seed", "stop"}}
        self._choose({**kept, **known[name]})

    def neutralise(self) -> None:
        """Set every value to where it does nothing: the model's bare probabilities."""
        self._choose({**self.choices, **NEUTRAL})

    def reset_sampling(self) -> None:
        """Back to the model's own values."""
        self._choose({})

    def keep_preset(self, name: str) -> None:
        """Keep the values in force under a name of the user's."""
        values = {key: value for key, value in self.choices.items() if key != "seed"}
        self.preferences.change(presets={**self.preferences.values.presets, name: values})
        self.parameters_changed.emit()

    def remove_preset(self, name: str) -> None:
        """Forget a preset of the user's."""
        left = {key: value for key, value in self.preferences.values.presets.items() if key != name}
        self.preferences.change(presets=left)
        self.parameters_changed.emit()

    def _choose(self, chosen: dict[str, Any]) -> None:
        if self.current is None:
            self.preferences.change(sampling=chosen)
        else:
            settings = {**self.current.settings, "sampling": chosen}
            self.current = replace(self.current, settings=settings)
            self._store_of(self.current.id).change(self.current.id, settings=settings)
        self.parameters_changed.emit()

    @property
    def system(self) -> str:
        """The system prompt of the conversation in view, or of the next one."""
        if self.current is not None:
            return self.current.system
        return self.preferences.values.system if self._new_system is None else self._new_system

    def set_system(self, text: str) -> None:
        """Change the system prompt of this conversation."""
        if text == self.system:
            return
        if self.current is None:
            self._new_system = text
        else:
            self.current = replace(self.current, system=text)
            self._store_of(self.current.id).change(self.current.id, system=text)
            self._count()
        self.parameters_changed.emit()

    @property
    def overflow(self) -> str:
        """What happens when this chat outgrows the context."""
        chosen = self.current.settings.get("overflow") if self.current is not None else None
        return str(chosen or self.preferences.values.overflow)

    def choose_overflow(self, policy: str) -> None:
        """Decide it for this chat."""
        if self.current is not None:
            settings = {**self.current.settings, "overflow": policy}
            self.current = replace(self.current, settings=settings)
            self._store_of(self.current.id).change(self.current.id, settings=settings)

    def pin_message(self, identity: str) -> None:
        """Let the model always read a message, however long the chat becomes; again: no longer."""
        row = self._row(identity)
        if row < 0:
            return
        turn = self.chat.turns[row]
        facts = {**turn.message.facts, "pinned": not turn.message.facts.get("pinned", False)}
        turn = replace(turn, message=replace(turn.message, facts=facts))
        self._store_of(turn.message.conversation).keep_facts(turn.message)
        self.chat.put(turn)

    def _mark_unseen(self) -> None:
        """What the last answer was made without."""
        answers = [turn.message for turn in self.chat.turns if turn.message.role == "assistant"]
        self.chat.mark_unseen(frozenset(answers[-1].facts.get("unseen", ())) if answers else ())

    # ---- answers

    @property
    def answer(self) -> Running | None:
        """The running answer of the conversation in view."""
        last = self.chat.turns[-1] if self.chat.turns else None
        return self.running.get(last.message.id) if last is not None else None

    @property
    def can_send(self) -> bool:
        """A message can be sent now; it waits when the model is still loading or an answer is being written."""
        return self.state.kind in {"loading", "ready"}

    @property
    def can_answer(self) -> bool:
        """An answer can begin at once."""
        return self.answer is None and self.can_send

    @property
    def can_regenerate(self) -> bool:
        """The last answer can be made again."""
        turns = self.chat.turns
        return self.can_answer and len(turns) >= 2 and turns[-1].message.role == "assistant"

    def send(self, text: str, attached: tuple[Attached, ...] = (), begin: str = "") -> bool:
        """Store a message and ask for its answer; False when that is not possible now.

        While an answer is being written it waits until that is complete. begin: how the answer is to begin
        """
        if not (text.strip() or attached) or not self.can_send:
            return False
        if self.answer is not None:
            assert self.current is not None
            self.waiting.setdefault(self.current.id, []).append(Waiting(text, attached))
            self.keep_draft("")
            self.waiting_changed.emit()
            return True
        conversation = self._begun(text, attached)
        parent = self.chat.turns[-1].message.id if self.chat.turns else None
        message = Message(new_id(), conversation.id, parent, "user", text, created_s=time.time(), attached=attached)
        self._store_of(conversation.id).add(message)
        self.keep_draft("")
        self.draft_tokens = 0
        self.chat.append(Turn(message))
        self._answer(message, begin)
        return True

    def _begun(self, text: str, attached: tuple[Attached, ...]) -> Conversation:
        """The conversation in view; a new one when there is none."""
        if self.current is not None:
            return self.current
        identity = new_id()
        line = next((line for line in text.split("\n") if line.strip()), attached[0].name if attached else "")
        title = " ".join(line.split())[:_TITLE] or tr("New chat")
        settings: dict[str, Any] = {"sampling": dict(self.preferences.values.sampling)}
        system, temporary = self.system, self.temporary
        conversation = Conversation(identity, title, system=system, settings=settings, temporary=temporary)
        if temporary:
            self._memory = Store(Path(MEMORY))
            self.preferences.change(greeted=True)
        else:
            self.preferences.change(draft="", greeted=True)
        self.current = conversation
        self._store_of(identity).create(identity, title, system=system, settings=settings)
        self.current_changed.emit()
        return conversation

    def drop_waiting(self, number: int) -> None:
        """Take back a message that waits."""
        if self.current is not None and number < len(self.waiting.get(self.current.id, ())):
            self.waiting[self.current.id].pop(number)
            self.waiting_changed.emit()

    def regenerate(self, identity: str | None = None) -> None:
        """Answer anew; the old answer stays in the store as another version."""
        turns = self.chat.turns
        row = self._row(identity) if identity is not None else len(turns) - 1
        if not self.can_answer or row < 1 or turns[row].message.role != "assistant":
            return
        self.chat.cut(row)
        self._answer(self.chat.turns[-1].message, again=True)

    def edit(self, identity: str, text: str) -> None:
        """Write a message anew as another version; a question is answered at once."""
        row = self._row(identity)
        if row < 0 or not text.strip() or self.answer is not None:
            return
        old = self.chat.turns[row].message
        if old.content == text:
            return
        question = old.role == "user"
        if question and not self.can_send:
            return
        message = replace(
            old, id=new_id(), content=text, state="done", reason="edited" if not question else "", created_s=time.time()
        )
        self._store_of(old.conversation).add(message)
        self.chat.cut(row)
        self.chat.append(Turn(message))
        if question:
            self._answer(message, again=True)
        else:
            self._renumber()
            self._count()
            self.running_changed.emit()

    def show_version(self, identity: str, step: int) -> None:
        """Show the version before (-1) or after (1) a message, with what follows it."""
        row = self._row(identity)
        if row < 0 or self.answer is not None or self.current is None:
            return
        store = self._store_of(self.current.id)
        versions = store.versions(self.chat.turns[row].message)
        wanted = versions.index(identity) + step
        if not 0 <= wanted < len(versions):
            return
        self.current = replace(self.current, head=store.leaf_below(versions[wanted]))
        store.change(self.current.id, head=self.current.head)
        self._show(self.current)

    def branch(self, identity: str) -> None:
        """A new conversation that begins like this one, up to a message."""
        row = self._row(identity)
        if row < 0 or self.current is None:
            return
        copy = new_id()
        messages: list[Message] = []
        for turn in self.chat.turns[: row + 1]:
            parent = messages[-1].id if messages else None
            messages.append(replace(turn.message, id=new_id(), conversation=copy, parent=parent))
        title = tr("{title} (branch)", title=self.current.title)[:_TITLE]
        self.adopt(replace(self.current, id=copy, title=title, head=messages[-1].id, draft="", pinned=False,
                           changed_s=0.0, temporary=False), messages)  # fmt: skip

    def remove_message(self, identity: str) -> None:
        """Delete a message and what follows it."""
        row = self._row(identity)
        if row < 0 or self.answer is not None or self.current is None:
            return
        self._store_of(self.current.id).remove_message(identity)
        self.current = replace(self.current, head=self.chat.turns[row].message.parent)
        self._show(self.current)
        self.running_changed.emit()

    def continue_answer(self, identity: str | None = None, *, instead: str | None = None) -> None:
        """Go on with an answer that ended early.

        instead: a beginning of the answer that takes its place as a new version, which goes on from there
        """
        row = self._row(identity) if identity is not None else len(self.chat.turns) - 1
        if not self.can_answer or row < 1 or self.chat.turns[row].message.role != "assistant":
            return
        if instead is not None:
            self.chat.cut(row)
            self._answer(self.chat.turns[-1].message, instead, again=True)
            return
        self.chat.cut(row + 1)
        turn = self.chat.turns[row]
        message = replace(turn.message, state="growing", reason="")
        stored = self._store_of(message.conversation).resume(message)
        self._run(replace(turn, message=message, begun=len(message.content)), stored)

    def stop(self) -> None:
        """End the running answer of the conversation in view; what is written stays."""
        running = self.answer
        if running is None:
            return
        if self.current is not None and self.waiting.get(self.current.id):
            # What waits would be sent at once, and whoever stops wants to think.
            texts = [waiting.text for waiting in self.waiting.pop(self.current.id)]
            self.keep_draft("\n\n".join(filter(None, (*texts, self.draft))))
            self.waiting_changed.emit()
            self.current_changed.emit()
        if running.asked:
            self.bridge.cancel(running.turn.message.id)
        else:
            message = replace(running.turn.message, state="done", reason="cancelled")
            self._end(replace(running.turn, message=message, activity=None))

    def trace(self, identity: str) -> Any:
        """The tokens of an answer with their probabilities, where they were kept."""
        return self._store_of(self.current.id if self.current is not None else "").trace(identity)

    def show_prompt(self, identity: str) -> None:
        """Ask for the exact prompt that an answer was made from; `prompt_shown` follows."""
        row = self._row(identity)
        if row >= 0:
            history = self._history(row)
            self.bridge.show_prompt(Answering(identity, history, self.sampling, started_s=self._started_s))

    def _row(self, identity: str) -> int:
        return next((row for row, turn in enumerate(self.chat.turns) if turn.message.id == identity), -1)

    def _history(self, end: int) -> tuple[Message, ...]:
        """What the model reads before the turn at `end`."""
        return alternating([turn.message for turn in self.chat.turns[:end]], self.system)

    @property
    def _started_s(self) -> float:
        return self.chat.turns[0].message.created_s if self.chat.turns else 0.0

    def _answer(self, question: Message, begin: str = "", *, again: bool = False) -> None:
        """Begin an answer. again: it, or its question, is another version of one that is there."""
        name = self.state.model.name if self.state.model is not None else self.state.name
        message = Message(
            new_id(),
            question.conversation,
            question.id,
            "assistant",
            begin,
            "growing",
            model=name,
            created_s=time.time(),
        )
        stored = self._store_of(question.conversation).add(message)
        turn = Turn(message, begun=len(begin))
        self.chat.append(turn)
        if again:
            self._renumber()
        self._run(turn, stored)

    def _run(self, turn: Turn, stored: Future[Any]) -> None:
        """Let an answer grow; its turn is the last in view."""
        turn = replace(turn, activity=Activity("queue" if self.state.kind == "ready" else "model"))
        running = Running(turn, self._history(len(self.chat.turns) - 1), self.sampling, stored, time.monotonic())
        running.kept = turn.begun
        self.running[turn.message.id] = running
        self.chat.put(self._shown(turn))
        self.speed_tps = self.first_s = 0.0
        self._keep.start()
        self._ask_waiting()
        self.running_changed.emit()
        self.figures_changed.emit()
        self.conversations_changed.emit()

    def _renumber(self) -> None:
        """After a new version: the numbers beside messages."""
        if self.current is not None:
            self.chat.renumber(self._store_of(self.current.id).siblings(self.current.id))

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
                asked = Answering(
                    message.id,
                    running.history,
                    running.sampling,
                    message.content[: running.turn.begun],
                    _ALTERNATIVES if self.preferences.values.keep_probabilities else None,
                    _POLICIES[self.overflow],
                    self._started_s if self._in_view(running.turn) else 0.0,
                )
                self.bridge.answer(asked, running.stored)

    def _end(self, turn: Turn) -> None:
        """An answer has its final text."""
        running = self.running.pop(turn.message.id)
        facts = dict(turn.message.facts)
        if running.first_s:
            facts["first_s"] = round(running.first_s - running.begin_s, 3)
        if running.thought_s:
            facts["thought_s"] = round(running.thought_s - running.begin_s, 2)
        if running.unseen:
            facts["unseen"] = list(running.unseen)
        turn = replace(turn, message=replace(turn.message, facts=facts))
        store = self._store_of(turn.message.conversation)
        store.finish(turn.message)
        if running.trace:
            store.keep_trace(turn.message.id, _trace_json(running.trace))
        if not self.running:
            self._keep.stop()
        self.chat.put(turn)
        if self._in_view(turn):
            self._mark_unseen()
            self.speed_tps = float(facts.get("decode_tps", 0.0))
            self.first_s = float(facts.get("first_s", 0.0))
            if "prompt_tokens" in facts:
                self.used_tokens = int(facts["prompt_tokens"]) + int(facts["completion_tokens"])
        self.running_changed.emit()
        self.figures_changed.emit()
        self.conversations_changed.emit()
        self._send_waiting(turn)

    def _send_waiting(self, ended: Turn) -> None:
        """Send what was written meanwhile; it stays where it is while another conversation is shown."""
        line = self.waiting.get(ended.message.conversation)
        if not line or not self._in_view(ended) or ended.message.state == "failed":
            return
        waiting = line.pop(0)
        self.waiting_changed.emit()
        draft = self.draft
        self.send(waiting.text, waiting.attached)
        self.keep_draft(draft)

    def _keep_pieces(self) -> None:
        for identity, running in self.running.items():
            text = running.turn.message.content
            if len(text) > running.kept:
                self._store_of(running.turn.message.conversation).grow(identity, text[running.kept :])
                running.kept = len(text)

    def _shown(self, turn: Turn) -> Turn:
        """With streaming switched off, text is shown when it is complete, and stored as ever."""
        if turn.growing and not self.preferences.values.streaming:
            return replace(turn, message=replace(turn.message, content=turn.message.content[: turn.begun]))
        return turn

    def _preferences_changed(self, _before: object) -> None:
        for running in self.running.values():
            self.chat.put(self._shown(running.turn))

    def _in_view(self, turn: Turn) -> bool:
        return self.current is not None and turn.message.conversation == self.current.id

    # ---- the model

    def _model_settled(self) -> None:
        super()._model_settled()
        self.running_changed.emit()
        self.figures_changed.emit()

    def _model_failed(self, sentence: str, *, wants_memory: bool = False) -> None:
        for running in [known for known in self.running.values() if not known.asked]:
            message = replace(running.turn.message, state="failed", reason=sentence)
            self._end(replace(running.turn, message=message, activity=None))
        super()._model_failed(sentence, wants_memory=wants_memory)

    def _model_ready(self) -> None:
        self._ask_waiting()
        self._count()

    def choose_model(self, path: Path, settings: EngineSettings | None = None) -> None:
        """Load a model in place of the present one; conversations stay."""
        super().choose_model(path, settings)
        self.running_changed.emit()

    # ---- events

    def apply(self, event: object) -> None:
        """One event of the bridge or the engine."""
        match event:
            case Counted(subject=subject, tokens=tokens):
                if subject == _DRAFT:
                    self.draft_tokens = tokens
                    self.figures_changed.emit()
                elif self.current is not None and self.current.id == subject and self.answer is None:
                    self.used_tokens = tokens
                    self.figures_changed.emit()
                self.counted.emit(subject, tokens)
            case PromptShown():
                self.prompt_shown.emit(event)
            case WorkFailed(sentence=sentence):
                self.notice.emit(sentence, "problem")
            case _:
                if not self._apply_model(event):
                    self._apply_engine(event)

    def _apply_engine(self, event: object) -> None:
        from engine import api  # loaded long since: the event came from there

        match event:
            case api.ContextCut():
                cut = self.running.get(event.request_id)
                if cut is not None:
                    dropped = (cut.history[index].id for index in event.dropped_messages if index < len(cut.history))
                    cut.unseen = tuple(dict.fromkeys((*cut.unseen, *dropped)))
            case api.Started() | api.Progress() | api.Delta() | api.Done() | api.Failed():
                running = self.running.get(event.request_id or "")
                if running is not None:
                    if isinstance(event, api.Delta):
                        running.trace += event.logprobs
                    self._advance(running, advance(running.turn, event))

    def _advance(self, running: Running, turn: Turn) -> None:
        now = time.monotonic()
        if len(turn.message.content) > turn.begun and not running.first_s:
            running.first_s = now
        if running.first_s and not running.thought_s and "</think>" in turn.message.content:
            thought = thought_of(turn.message.content)
            running.thought_s = now if thought is not None and not thought.open else 0.0
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
    def context_used(self) -> int:
        """Tokens the conversation in view takes, with the answer so far."""
        return self.used_tokens + (self.answer.turn.tokens if self.answer is not None else 0)

    def count_draft(self, text: str, attached: Sequence[Attached] = ()) -> None:
        """Count what is being written; `draft_tokens` follows."""
        if not text.strip() and not attached:
            self.draft_tokens = 0
            self.figures_changed.emit()
        elif self.state.kind == "ready":
            message = Message("", "", None, "user", text, attached=tuple(attached))
            self.bridge.count(_DRAFT, [replace(message, content=prompt_text(message))])

    def count_file(self, subject: str, file: Attached) -> None:
        """Count a file that may be attached; `counted` follows."""
        if self.state.kind == "ready":
            message = Message("", "", None, "user", "", attached=(file,))
            self.bridge.count(subject, [replace(message, content=prompt_text(message))])

    def _forget_figures(self) -> None:
        self.speed_tps = self.first_s = 0.0
        self.used_tokens = self.draft_tokens = 0
        self.figures_changed.emit()
        self.running_changed.emit()
        self.waiting_changed.emit()

    def _count(self) -> None:
        if self.state.kind == "ready" and self.current is not None and self.answer is None and self.chat.turns:
            self.bridge.count(self.current.id, self._history(len(self.chat.turns)))

    def shut_down(self) -> None:
        """Store everything as it is; answers that are running are interrupted."""
        self._keep.stop()
        for running in list(self.running.values()):
            message = replace(running.turn.message, state="interrupted", reason="closed")
            self._store_of(message.conversation).finish(message)
        self.running.clear()
        for identity, line in self.waiting.items():
            found = self.store.conversation(identity)
            if found is not None:
                texts = [waiting.text for waiting in line]
                self.store.change(identity, draft="\n\n".join(filter(None, (*texts, found.draft))))
        if self._memory is not None:
            self._memory.close()
        self.preferences.change(loading="")  # closing while a model loads is no crash
        self.preferences.save()


def _trace_json(trace: Sequence[api.TokenLogprob]) -> str:
    """[[id, bytes as hexadecimal, logprob, [[id, bytes, logprob], ...]], ...]."""
    return json.dumps(
        [
            [
                token.token_id,
                token.token_bytes.hex(),
                round(token.logprob, 4),
                [[other, name.hex(), round(logprob, 4)] for other, name, logprob in token.alternatives],
            ]
            for token in trace
        ]
    )
