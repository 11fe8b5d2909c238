"""The engine's thread: owns the model, takes orders from an inbox, is the only one to call kernels.

Orders come from any thread and return at once; every answer, loading included,
comes through the sink given with the order, on the engine's thread.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from engine import __version__
from engine.errors import InglenookError, InputError
from engine.folders import cache_folder
from engine.progress import Progress
from engine.runtime.events import Done, Event, Failed, Loaded, Request, Usage
from engine.runtime.loop import Loop, Sink, failure
from engine.runtime.model import Model
from engine.runtime.snapshots import Snapshots
from engine.settings import EngineSettings

__all__ = ["CANCELLED", "LoadSink", "Opener", "Service"]

LoadSink = Callable[[Event | Loaded], None]
Opener = Callable[[Path, EngineSettings], Generator[Progress, None, Model]]

CANCELLED = "Cancelled"
"""`Failed.kind` of a load that somebody stopped."""

Told = TypeVar("Told")

log = logging.getLogger(__name__)
_JOIN_S = 3.0
_SWITCH_S = 0.0005
_QUIET_S = 1.0


@dataclass(slots=True, eq=False)
class _Loading:
    steps: Generator[Progress, None, Model]
    sink: LoadSink


class Service:
    """One thread with an inbox. `opener` loads a model, a step at a time.

    In a process forked from this one, whose thread stayed behind, orders raise an InputError.
    """

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._process = os.getpid()
        self._model: Model | None = None
        self._loop: Loop | None = None
        self._loading: _Loading | None = None
        self._early: dict[str, tuple[Request, Sink]] = {}  # submitted while a model is loading
        self._coming: set[str] = set()  # submitted, and still in the inbox
        self._untidy = False  # pages may wait for being written to disk
        # When a step is through, a thread that is busy in Python, a window's say, holds the interpreter for so long.
        sys.setswitchinterval(_SWITCH_S)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ orders, from any thread

    def load(self, path: Path, settings: EngineSettings, sink: LoadSink) -> None:
        """Load, replacing the present model."""
        self._order(partial(self._begin_load, path, settings, sink))

    def cancel_load(self) -> None:
        """End a load that is going on; nothing is loaded then."""
        self._order(self._end_load)

    def unload(self) -> None:
        """Give the model's memory back."""
        self._order(self._unload)

    def submit(self, request: Request, sink: Sink) -> None:
        """Answer a request."""
        self._coming.add(request.id)
        self._order(partial(self._submit, request, sink))

    def cancel(self, request_id: str) -> None:
        """End a request, and the step that computes it at once."""
        self._order(partial(self._cancel, request_id))
        loop, model = self._loop, self._model
        # One that is still in the inbox would otherwise learn of it after the present step only.
        known = request_id in self._coming or (loop is not None and request_id in loop)
        if model is not None and known:
            model.decoder.cancel()

    def call(self, job: Callable[[Model | None, Loop | None], None]) -> None:
        """Run `job` on the engine's thread between two steps."""
        self._order(lambda: job(self._model, self._loop))

    def close(self) -> None:
        """End everything; requests on their way end as cancelled. Nothing is called afterwards."""
        if self._process != os.getpid():
            return
        self._closing.set()
        self._inbox.put(lambda: None)
        model = self._model
        if model is not None:
            model.decoder.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _order(self, order: Callable[[], None]) -> None:
        if self._process != os.getpid():
            raise InputError("the engine does not follow into a forked process; load the model there")
        self._inbox.put(order)

    # ------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._model is not None:
                # Before the orders are read: a cancel that comes later stops the step that does not know of it yet.
                self._model.decoder.clear_cancel()
            self._obey()
            try:
                self._work()
            except Exception as error:
                log.exception("the engine's thread tripped")
                self._fail_all(error)
        self._unload()

    def _obey(self) -> None:
        """Carry out all waiting orders; wait for one when there is no work."""
        wait = self._loading is None and (self._loop is None or self._loop.idle)
        while True:
            try:
                order = self._inbox.get(block=wait, timeout=_QUIET_S if self._untidy else None)
            except queue.Empty:
                if wait:
                    self._tidy()
                return
            wait = False
            try:
                order()
            except Exception:
                log.exception("an order failed")

    def _work(self) -> None:
        """One step of whatever there is to do."""
        if self._closing.is_set():
            return
        if self._loading is not None:
            self._continue_load(self._loading)
        elif self._loop is not None:
            self._loop.step()
            self._untidy = True

    def _tidy(self) -> None:
        """Nobody has asked for anything for a while: write to disk until somebody does."""
        while self._loop is not None and self._inbox.empty():
            if not self._loop.tidy():
                self._untidy = False
                return

    # ------------------------------------------------------------ loading

    def _begin_load(self, path: Path, settings: EngineSettings, sink: LoadSink) -> None:
        self._end_load()
        self._drop_model("the model was replaced")
        self._loading = _Loading(self._opener(path, settings), sink)

    def _continue_load(self, loading: _Loading) -> None:
        try:
            _tell(loading.sink, next(loading.steps))
        except StopIteration as finished:
            self._loading = None
            self._model = finished.value
            self._loop = Loop(finished.value, snapshots=_snapshots(finished.value))
            _tell(loading.sink, Loaded(finished.value.info))
            for request, sink in self._take_early():
                self._loop.add(request, sink)
        except InglenookError as error:
            self._fail_load(loading.sink, error)
        except Exception as error:
            log.exception("loading failed")
            self._fail_load(loading.sink, error)

    def _fail_load(self, sink: LoadSink, error: Exception) -> None:
        self._loading = None
        _tell(sink, failure(None, error))
        for request, waiting in self._take_early():
            _tell(waiting, failure(request.id, error))

    def _end_load(self) -> None:
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.steps.close()
            _tell(loading.sink, Failed(None, "loading was cancelled", CANCELLED))
            for request, sink in self._take_early():
                _tell(sink, _cancelled(request))

    def _take_early(self) -> list[tuple[Request, Sink]]:
        early, self._early = list(self._early.values()), {}
        return early

    def _unload(self) -> None:
        self._end_load()
        self._drop_model("the model was unloaded")

    def _drop_model(self, why: str) -> None:
        if self._loop is not None:
            self._loop.cancel_all(f"the answer was stopped because {why}")
        model, self._model, self._loop = self._model, None, None
        if model is not None:
            model.release()

    # ------------------------------------------------------------ requests

    def _submit(self, request: Request, sink: Sink) -> None:
        self._coming.discard(request.id)
        if self._loop is not None:
            self._loop.add(request, sink)
        elif self._loading is not None:
            self._early[request.id] = (request, sink)
        else:
            _tell(sink, failure(request.id, InputError("no model is loaded; choose one first")))

    def _cancel(self, request_id: str) -> None:
        if request_id in self._early:
            request, sink = self._early.pop(request_id)
            _tell(sink, _cancelled(request))
        elif self._loop is not None:
            self._loop.cancel(request_id)

    def _fail_all(self, error: Exception) -> None:
        """Our own mistake outside any request: end what is there rather than repeat it for ever."""
        if self._loop is not None:
            self._loop.fail_all(error)


def _cancelled(request: Request) -> Done:
    return Done(request.id, "cancelled", "", Usage())


def _tell(sink: Callable[[Told], None], event: Told) -> None:
    try:
        sink(event)
    except Exception:
        log.exception("the receiver of %s failed", type(event).__name__)


def _snapshots(model: Model) -> Snapshots | None:
    """Where the pages of a loaded model are kept; None when its settings want none kept."""
    if not model.settings.snapshot_mb or model.memories is not None:
        return None
    layout = model.pages.layout
    return Snapshots(
        cache_folder() / "conversations",
        model.identity + __version__.encode(),
        page_bytes=layout.page_bytes,
        ids_bytes=4 * layout.tokens,
        limit_bytes=model.settings.snapshot_mb << 20,
    )
