"""The models that are served: loaded when first asked for, unloaded when idle or in another's way.

Models that fit side by side stay loaded, but one computes at a time: two
teams of threads on one processor would slow each other down. Who comes first
is served first, across models. All methods run on the server's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from engine import api
from engine.api import Engine, EngineStatus, Event, Failed, Loaded, LoadedModel
from engine.errors import InputError
from engine.server.wire import ApiError
from engine.settings import EngineSettings

__all__ = ["Hub", "Served", "named_models"]

log = logging.getLogger(__name__)

_MINUTE_S = 60.0
_BUSY_RETRY_S = 5
_STATUS_WAIT_S = 0.5
_RESERVE_BYTES = 512 << 20  # of the memory, for everything but models


@dataclass(eq=False)
class Served:
    """A model by its name. engine and info are there while it is loaded; users: requests that want it."""

    name: str
    path: Path
    engine: Engine | None = None
    info: LoadedModel | None = None
    users: int = 0
    last_used_s: float = field(default_factory=time.monotonic)
    status: EngineStatus = field(default_factory=EngineStatus)
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def bytes_on_disk(self) -> int:
        """Of the file or the folder's files."""
        files = self.path.iterdir() if self.path.is_dir() else [self.path]
        return sum(file.stat().st_size for file in files if file.is_file())


def named_models(arguments: Iterable[str]) -> dict[str, Path]:
    """Models by the names they are served under: `NAME=PATH`, or a path or library name that names itself.

    Raises:
        InputError: a model cannot be found, or two have one name
    """
    models: dict[str, Path] = {}
    for argument in arguments:
        alias, sign, path = argument.partition("=")
        found = api.resolve_model(argument if not sign or Path(argument).exists() else path)
        name = found.stem if found.is_file() and str(argument) != api.STARTER else Path(argument).name
        if sign and not Path(argument).exists():
            name = alias
        if name in models:
            raise InputError(f"two models are called {name}; give one another name: OTHER={found}")
        models[name] = found
    return models


class Hub:
    """The models by name, the first being the one that is meant when a client names none.

    queue: answers that may wait beyond those that are computed together.
    """

    def __init__(
        self,
        models: dict[str, Path],
        settings: EngineSettings,
        *,
        queue: int = 64,
        idle_minutes: float = 30,
        engine: Callable[[], Engine] = Engine,
    ) -> None:
        self.models = {name: Served(name, path) for name, path in models.items()}
        self.began = time.time()
        self.leaving = asyncio.Event()  # nobody new is taken
        self.closing = asyncio.Event()  # those who still wait are told that they wait in vain
        self._settings = settings
        self._most_answers = settings.max_batch_size + queue
        self._answers = 0
        self._idle_s = _MINUTE_S * idle_minutes
        self._engine = engine
        self._turns = _Turns()

    @property
    def answers(self) -> int:
        """Answers that are under way or waiting."""
        return self._answers

    @property
    def waiting_room(self) -> int:
        """Answers that can still be taken."""
        return self._most_answers - self._answers

    def find(self, name: str | None) -> Served:
        """The model of a name.

        Raises:
            ApiError: 404, there is none
        """
        if name is None:
            return next(iter(self.models.values()))
        served = self.models.get(name)
        if served is None:
            shown = name if len(name) <= 100 and name.isprintable() else "of that name"
            raise ApiError(
                404,
                f"the model {shown} does not exist; /v1/models lists those that do",
                param="model",
                code="model_not_found",
            )
        return served

    @asynccontextmanager
    async def use(self, served: Served, answers: int = 1) -> AsyncIterator[tuple[Engine, LoadedModel]]:
        """The model, loaded, for the length of the block. answers: that it is wanted for.

        Raises:
            ApiError: 429 too much is waiting already, 503 it cannot be loaded or the server is closing
        """
        if self.leaving.is_set():
            raise ApiError(503, "the server is being stopped", retry_s=_BUSY_RETRY_S)
        if answers > self.waiting_room:
            raise ApiError(
                429,
                f"{self._answers} answers are under way or waiting, and no more are taken; try again later",
                code="queue_full",
                retry_s=_BUSY_RETRY_S,
            )
        self._answers += answers
        served.users += 1
        try:
            async with self._turns.of(served):
                yield await self._loaded(served)
        finally:
            served.users -= 1
            self._answers -= answers
            served.last_used_s = time.monotonic()

    async def load(self, served: Served) -> LoadedModel:
        """Have it loaded now."""
        async with self.use(served, 0) as (_, info):
            return info

    async def statuses(self) -> list[Served]:
        """All models, with what those that are loaded are doing, as far as they say so soon."""
        loaded = [(served, served.engine) for served in self.models.values() if served.engine is not None]
        await asyncio.gather(*(self._ask(served, engine) for served, engine in loaded))
        return list(self.models.values())

    async def unload_idle(self) -> None:
        """Unload what nobody asked for in a while; runs for ever."""
        while self._idle_s:
            await asyncio.sleep(min(self._idle_s / 4, 30))
            for served in self._idle():
                if time.monotonic() - served.last_used_s >= self._idle_s:
                    log.info(
                        "%s is unloaded: nobody asked for it in %.0f minutes", served.name, self._idle_s / _MINUTE_S
                    )
                    await self._unload(served)

    async def close(self) -> None:
        """Give everything back; answers still under way end as cancelled."""
        self.leaving.set()
        self.closing.set()
        for served in self.models.values():
            await self._unload(served)

    # ------------------------------------------------------------ loading

    async def _loaded(self, served: Served) -> tuple[Engine, LoadedModel]:
        async with served.loading:
            if served.engine is None or served.info is None:
                await self._make_room(served.bytes_on_disk)
                while True:
                    failed = await self._try_to_load(served)
                    if failed is None:
                        break
                    # Out of memory: the models that nobody uses go, the one longest idle first.
                    idle = self._idle()
                    if failed.kind != "ResourceError" or not idle:
                        log.error("%s cannot be loaded: %s", served.name, failed.message)
                        raise ApiError(
                            503, f"{served.name} cannot be loaded: {failed.message}", code="model_unavailable"
                        )
                    await self._unload(idle[0])
            assert served.engine is not None
            assert served.info is not None
            return served.engine, served.info

    async def _make_room(self, needed: int) -> None:
        """Unload until a model of that size fits beside the others.

        Mapped weights of a loaded model count as available memory, although the model is useless without them.
        """
        for served in self._idle():
            kept = sum(other.info.weight_bytes for other in self.models.values() if other.info is not None)
            if needed + kept + _RESERVE_BYTES <= api.memory()[1]:
                return
            await self._unload(served)

    async def _try_to_load(self, served: Served) -> Failed | None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Loaded | Failed] = loop.create_future()

        def end(event: Loaded | Failed) -> None:
            if not ended.done():
                ended.set_result(event)

        def hear(event: Event | Loaded) -> None:
            if isinstance(event, Loaded | Failed):
                with suppress(RuntimeError):  # the server is gone
                    loop.call_soon_threadsafe(end, event)

        engine = self._engine()
        began_s = time.monotonic()
        try:
            engine.load(served.path, self._settings, hear)
            event = await ended
        except BaseException:
            await _closed(engine)
            raise
        if isinstance(event, Failed):
            await _closed(engine)
            return event
        served.engine, served.info = engine, event.model
        log.info("%s is loaded after %.1f s: %s", served.name, time.monotonic() - began_s, event.model.format)
        for notice in event.model.notices:
            log.info("%s: %s", served.name, notice)
        return None

    def _idle(self) -> list[Served]:
        """Loaded models that no request wants, the one longest idle first."""
        idle = [served for served in self.models.values() if served.engine is not None and not served.users]
        return sorted(idle, key=lambda served: served.last_used_s)

    async def _unload(self, served: Served) -> None:
        engine, served.engine, served.info, served.status = served.engine, None, None, EngineStatus()
        if engine is not None:
            await _closed(engine)

    async def _ask(self, served: Served, engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        told: asyncio.Future[EngineStatus] = loop.create_future()

        def tell(status: EngineStatus) -> None:
            if not told.done():
                told.set_result(status)

        def hear(status: EngineStatus) -> None:
            with suppress(RuntimeError):  # the server is gone
                loop.call_soon_threadsafe(tell, status)

        engine.status(hear)
        with suppress(TimeoutError):  # it is at a long step: what it said last must do
            served.status = await asyncio.wait_for(told, _STATUS_WAIT_S)


async def _closed(engine: Engine) -> None:
    await asyncio.get_running_loop().run_in_executor(None, engine.close)


class _Turns:
    """Lets in whoever came first, together with those behind who want the same model."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Served, asyncio.Future[None]]] = deque()
        self._active: Served | None = None
        self._inside = 0

    @asynccontextmanager
    async def of(self, served: Served) -> AsyncIterator[None]:
        """The turn of a model."""
        ticket = (served, asyncio.get_running_loop().create_future())
        self._queue.append(ticket)
        self._advance()
        try:
            await ticket[1]
            yield
        finally:
            if ticket in self._queue:
                self._queue.remove(ticket)
            else:
                self._inside -= 1
            self._advance()

    def _advance(self) -> None:
        while self._queue and (self._inside == 0 or self._queue[0][0] is self._active):
            self._active, turn = self._queue.popleft()
            self._inside += 1
            if not turn.done():
                turn.set_result(None)
