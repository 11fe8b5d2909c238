"""Between the window and the engine: calls go out and return at once, events come back on the window's thread.

The engine is imported here, on the desk thread, after the window is painted.
Besides the window's there are these threads: the desk (import and everything
asked of the engine, in order), the engine's own, and one for each conversion,
look at a folder or look at the library. All are daemons: one that does not come back cannot hold up the end
of the program. Events are gathered for about 33 ms and text of one answer is
joined, so the window hears at most 30 times a second, whatever the speed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QObject, Qt, Signal

from engine.errors import InglenookError
from engine.settings import EngineSettings, Sampling
from gui.data.attachments import AttachmentError, read_attachment
from gui.data.store import Attached, Message
from gui.kit.i18n import tr
from gui.kit.timing import timer
from gui.kit.words import engine_words, error_words

if TYPE_CHECKING:
    from engine import api

__all__ = [
    "Answering",
    "Bridge",
    "Counted",
    "EngineFactory",
    "EngineReady",
    "FileRead",
    "Inspected",
    "Library",
    "ModelEntry",
    "PromptShown",
    "WorkFailed",
]

_log = logging.getLogger(__name__)

_GATHER_MS = 33

EngineFactory = Callable[[], Any]
"""Gives what `engine.api` offers; called on the desk thread."""


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine is imported and waits for a model. `sentence` says why not, when it could not be."""

    sentence: str = ""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that can be chosen. Parameters and context are 0 for the starter."""

    path: Path
    name: str
    detail: str  # "int4, group 32"
    disk_bytes: int = 0
    parameters: int = 0
    context: int = 0
    starter: bool = False
    problem: str = ""  # why it cannot be used
    licence: str = ""
    grade: str = ""  # of its fidelity, where that was measured


@dataclass(frozen=True, slots=True)
class Library:
    """What can be chosen now; the starter last. broken: files of the library that cannot be used."""

    models: tuple[ModelEntry, ...]
    broken: tuple[ModelEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class Inspected:
    """What lies at a path: a report, or a sentence why there is none."""

    path: Path
    report: api.ModelReport | None
    sentence: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Counted:
    """How many tokens something takes: a conversation, a draft, a file."""

    subject: str
    tokens: int


@dataclass(frozen=True, slots=True)
class PromptShown:
    """The prompt of an answer as the model gets it; empty when it cannot be shown."""

    message: str
    tokens: tuple[api.PromptToken, ...]


@dataclass(frozen=True, slots=True)
class FileRead:
    """A file that was to be attached: its text, or a sentence why there is none."""

    path: Path
    file: Attached | None
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """Something asked of the desk could not be done; one sentence."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Answering:
    """What an answer is made from."""

    id: str
    messages: tuple[Message, ...]
    sampling: Sampling
    begin: str = ""
    alternatives: int | None = None
    overflow: api.Overflow = "stop"
    started_s: float = 0.0


class Bridge(QObject):
    """The window's end of the engine. `event` carries frozen values only."""

    event = Signal(object)  # type: ignore[assignment]  # hides QObject.event, which nobody here calls
    _arrived = Signal()

    def __init__(self, factory: EngineFactory | None = None) -> None:
        super().__init__()
        self._factory = factory or (lambda: import_module("engine.api"))
        self._api: Any = None
        self._engine: api.Engine | None = None
        self._lock = threading.Lock()
        self._waiting: deque[object] = deque()
        self._announced = False
        self._loads = 0
        self._closing = False
        self._imported = threading.Event()  # or it failed, or it is too late
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stops: list[threading.Event] = []
        self._gather = timer(self, _GATHER_MS, self._deliver, once=True)
        self._delivered_s = 0.0
        self._arrived.connect(self._schedule, Qt.ConnectionType.QueuedConnection)

    # ---- from the window

    def start(self) -> None:
        """Import the engine and say what models there are; EngineReady and Library follow."""
        self._thread("desk", self._desk)
        self._jobs.put(self._begin)

    def load(self, path: Path, settings: EngineSettings) -> None:
        """Load a model; Progress, then Loaded or Failed (request_id None) follow.

        A load that another one replaces is not heard of again.
        """
        self._loads += 1
        number = self._loads

        def sink(event: object) -> None:
            if number == self._loads:
                self.post(event)

        self._do(lambda: self._running().load(path, settings, sink))

    def cancel_load(self) -> None:
        """Give up loading."""
        if self._engine is not None:
            self._engine.cancel_load()

    def unload(self) -> None:
        """Give the model's memory back."""
        self._do(lambda: self._running().unload())

    def answer(self, asked: Answering, stored: Future[Any] | None = None) -> None:
        """Begin an answer once what it answers is `stored`; the engine's events follow."""

        def job() -> None:
            if stored is not None:
                stored.exception()  # a disk that is full is said elsewhere, and no reason not to answer
            self._running().submit(self._request(asked), self.post)

        self._do(job, request_id=asked.id)

    def _request(self, asked: Answering) -> api.Request:
        messages = tuple(
            self._api.Message(message.role, message.content, pinned=bool(message.facts.get("pinned")))
            for message in asked.messages
        )
        started = datetime.fromtimestamp(asked.started_s).astimezone() if asked.started_s else None
        request: api.Request = self._api.Request(
            asked.id,
            messages,
            asked.sampling,
            logprobs=asked.alternatives,
            started=started,
            begin=asked.begin,
            overflow=asked.overflow,
        )
        return request

    def show_prompt(self, asked: Answering) -> None:
        """Ask for the exact prompt of an answer, token by token; PromptShown follows."""

        def job() -> None:
            self._running().prompt_tokens(self._request(asked), lambda tokens: self.post(PromptShown(asked.id, tokens)))

        self._do(job)

    def cancel(self, request_id: str) -> None:
        """End an answer now."""
        self._do(lambda: self._running().cancel(request_id))

    def count(self, subject: str, messages: Sequence[Message]) -> None:
        """Count the tokens of a conversation, or of what will become part of one; Counted follows."""

        def job() -> None:
            turns = [self._api.Message(message.role, message.content) for message in messages]
            self._running().count_tokens(turns, lambda tokens: self.post(Counted(subject, tokens)))

        self._do(job)

    def refresh_library(self) -> None:
        """Look at the library again; Library follows."""
        self._aside("library", self._list_models)

    def inspect(self, path: Path) -> None:
        """Look at a dropped folder or file; Inspected follows."""

        def job() -> None:
            try:
                report = self._offered().inspect(path)
            except InglenookError as error:
                self.post(Inspected(path, None, str(error), type(error).__name__))
            except Exception:  # noqa: BLE001 (a strange folder must not end the window; the log has it)
                _log.exception("inspecting %s", path)
                self.post(Inspected(path, None, tr("{name} could not be read; the log says more.", name=path.name)))
            else:
                self.post(Inspected(path, report))

        self._aside("inspect", job)

    def read_file(self, path: Path) -> None:
        """Read a file that is to be attached; FileRead follows."""

        def job() -> None:
            try:
                self.post(FileRead(path, read_attachment(path)))
            except AttachmentError as error:
                self.post(FileRead(path, None, str(error)))

        self._thread("attach", job)

    def remove_model(self, path: Path) -> None:
        """Delete a model of the library from the disk."""

        def job() -> None:
            try:
                path.unlink()
            except OSError as error:
                self.post(
                    WorkFailed(tr("{name} could not be removed: {reason}.", name=path.name, reason=error.strerror))
                )
            self._list_models()

        self._aside("remove", job)

    def task(self, name: str, job: Callable[[Any, threading.Event], Iterator[object]]) -> threading.Event:
        """Run a generator on a thread of its own and post what it yields; the event asks it to stop.

        job: called with what the engine offers and that event
        """
        stop = threading.Event()
        self._stops = [*(known for known in self._stops if not known.is_set()), stop]

        def work() -> None:
            steps = job(self._offered(), stop)
            for step in steps:
                if self._closing:
                    break
                self.post(step)

        self._aside(name, work)
        return stop

    def close(self) -> None:
        """Stop everything; returns at once, `join` waits. Nothing is signalled from now on."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._waiting.clear()
        self._gather.stop()
        for stop in self._stops:
            stop.set()
        self._imported.set()
        self._jobs.put(None)
        self._thread("close", self._close_engine)

    def join(self, timeout_s: float) -> bool:
        """Wait for all threads to end; False when one does not."""
        until = time.monotonic() + timeout_s
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # ---- from any thread

    def post(self, event: object) -> None:
        """Hand an event to the window's thread; the sink of all engine calls."""
        with self._lock:
            if self._closing:
                return
            self._waiting.append(event)
            if self._announced:
                return
            self._announced = True
            self._arrived.emit()

    # ---- on the window's thread

    def _schedule(self) -> None:
        since_ms = (time.monotonic() - self._delivered_s) * 1000
        if since_ms >= _GATHER_MS:
            self._deliver()
        else:
            self._gather.start(round(_GATHER_MS - since_ms))

    def _deliver(self) -> None:
        with self._lock:
            events = list(self._waiting)
            self._waiting.clear()
            self._announced = False
        self._delivered_s = time.monotonic()
        for event in self._joined(events):
            if self._closing:
                return
            self.event.emit(event)

    def _joined(self, events: list[object]) -> list[object]:
        """The events, with consecutive pieces of one answer's text joined."""
        if self._api is None:
            return events
        joined: list[object] = []
        for event in events:
            last = joined[-1] if joined else None
            delta = self._api.Delta
            if isinstance(event, delta) and isinstance(last, delta) and last.request_id == event.request_id:
                joined[-1] = replace(
                    last,
                    text=last.text + event.text,
                    token_ids=last.token_ids + event.token_ids,
                    logprobs=last.logprobs + event.logprobs,
                )
            else:
                joined.append(event)
        return joined

    # ---- on the desk thread

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads = [*(known for known in self._threads if known.is_alive()), thread]
        thread.start()
        return thread

    def _do(self, job: Callable[[], None], request_id: str | None = None) -> None:
        """On the desk, after everything that was asked for before."""
        self._jobs.put(self._guarded(job, request_id))

    def _aside(self, name: str, job: Callable[[], None]) -> None:
        """On a thread of its own: a slow disk must not keep "stop" waiting on the desk."""
        guarded = self._guarded(job)

        def work() -> None:
            self._imported.wait()
            if not self._closing:
                guarded()

        self._thread(name, work)

    def _guarded(self, job: Callable[[], None], request_id: str | None = None) -> Callable[[], None]:
        def guarded() -> None:
            try:
                job()
            except InglenookError as error:
                self._fail(str(error), type(error).__name__, request_id)
            except Exception:  # noqa: BLE001 (a fault ends this job, not the desk; it is logged)
                _log.exception("a job of the window")
                self._fail(tr("Something went wrong inside Inglenook; the log says more."), "", request_id)

        return guarded

    def _fail(self, sentence: str, kind: str, request_id: str | None) -> None:
        """kind: the error's class in `engine.errors`; "" when the sentence is in the window's language already."""
        if request_id is None or self._api is None:
            self.post(WorkFailed(error_words(kind, sentence)))
        else:
            self.post(self._api.Failed(request_id, sentence, kind))

    def _desk(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not self._closing:
                job()

    def _begin(self) -> None:
        try:
            self._api = self._factory()
            self._engine = self._api.Engine()
        except Exception as error:  # noqa: BLE001 (whatever it is, the window has to say it)
            _log.exception("starting the engine")
            reason = str(error) if isinstance(error, InglenookError) else f"{type(error).__name__}: {error}"
            self.post(EngineReady(tr("The engine could not be started ({reason}).", reason=reason)))
            return
        finally:
            self._imported.set()
        self._guarded(self._list_models)()
        self.post(EngineReady())

    def _running(self) -> api.Engine:
        if self._engine is None:
            raise InglenookError(tr("The engine is not running."))
        return self._engine

    def _offered(self) -> Any:
        """What the engine offers to faces."""
        if self._api is None:
            raise InglenookError(tr("The engine is not running."))
        return self._api

    def _list_models(self) -> None:
        offered = self._offered()
        known = [
            ModelEntry(
                model.path,
                model.name,
                engine_words(model.format),
                model.disk_bytes,
                model.parameters,
                model.context,
                problem=engine_words(model.problem),
                licence=model.licence,
                grade=model.grade,
            )
            for model in offered.library_models(broken=True)
        ]
        entries = [entry for entry in known if not entry.problem]
        starter = offered.starter_path()
        if starter is not None:
            name, _, precision = Path(starter).stem.partition(".")
            detail = ", ".join(filter(None, (tr("starter model"), precision)))
            entries.append(ModelEntry(Path(starter), name, detail, Path(starter).stat().st_size, starter=True))
        self.post(Library(tuple(entries), tuple(entry for entry in known if entry.problem)))

    def _close_engine(self) -> None:
        for thread in self._threads:
            if thread.name == "desk":
                thread.join()  # an engine that is just being made is closed, too
        if self._engine is not None:
            self._engine.close()
