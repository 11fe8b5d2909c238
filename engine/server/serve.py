"""Starts and stops the server: the socket, the signals, the end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.api import Engine
from engine.errors import InputError, ResourceError
from engine.server.app import create_app
from engine.server.guard import is_loopback
from engine.server.hub import Hub
from engine.server.metrics import Metrics
from engine.server.watch import watch_memory
from engine.server.wire import ApiError
from engine.settings import EngineSettings, ServerSettings

__all__ = ["KEY_VARIABLE", "Server"]

KEY_VARIABLE = "INGLENOOK_API_KEY"

log = logging.getLogger(__name__)
_CONNECTIONS = 1024
_HEADER_BYTES = 64 << 10
_REQUEST_S = 30.0


class Server:
    """One server. `run` blocks until it is stopped by a signal or by `stop`, from any thread.

    models: by name; see `engine.server.hub.named_models`.

    Raises:
        InputError: it would listen beyond this computer without a key, or cannot listen there
    """

    def __init__(
        self,
        models: dict[str, Path],
        engine_settings: EngineSettings = EngineSettings(),
        settings: ServerSettings = ServerSettings(),
        *,
        engine: Callable[[], Engine] = Engine,
    ) -> None:
        keys = (*settings.api_key, *filter(None, [os.environ.get(KEY_VARIABLE)]))
        settings = settings.model_copy(update={"api_key": tuple(key for key in keys if key)})
        if not settings.api_key and not is_loopback(settings.host):
            raise InputError(
                f"listening at {settings.host} lets other computers in; give an API key (--api-key or "
                f"{KEY_VARIABLE}), or listen at 127.0.0.1"
            )
        self.metrics = Metrics()
        self.models = models
        self._engine_settings, self._settings, self._engine = engine_settings, settings, engine
        self._socket = _listening(settings.host, settings.port)
        self._server: _Uvicorn | None = None
        self._hub: Hub | None = None
        self._stopped = False

    @property
    def answers(self) -> int:
        """Answers that are under way or waiting now; may be asked from any thread."""
        return 0 if self._hub is None else self._hub.answers

    @property
    def url(self) -> str:
        """Where clients find it, without /v1."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(
        self, ready: Callable[[], None] = lambda: None, warn: Callable[[str], None] = lambda _sentence: None
    ) -> None:
        """Load the first model, call `ready`, serve until stopped. warn: told when the memory runs out.

        Raises:
            ResourceError: the first model cannot be loaded
        """
        _allow_connections()
        with self._socket:
            asyncio.run(self._run(ready, warn))

    def stop(self) -> None:
        """End as after Ctrl+C: what is running gets `shutdown_s` to finish."""
        self._stopped = True
        if self._server is not None:
            self._server.should_exit = True

    async def _run(self, ready: Callable[[], None], warn: Callable[[str], None]) -> None:
        hub = self._hub = Hub(
            self.models,
            self._engine_settings,
            queue=self._settings.queue,
            idle_minutes=self._settings.idle_minutes,
            engine=self._engine,
        )
        config = uvicorn.Config(
            create_app(hub, self._settings, self.metrics),
            http=_Connection,
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_CONNECTIONS,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=self._settings.shutdown_s + 5,
        )
        logging.getLogger("uvicorn.access").disabled = True  # it writes queries; the guard's lines have what is wanted
        self._server = _Uvicorn(config, hub, self._settings.shutdown_s)
        self._server.should_exit = self._stopped
        aside = [asyncio.ensure_future(hub.unload_idle()), asyncio.ensure_future(watch_memory(warn))]
        try:
            first = next(iter(hub.models.values()))
            try:
                await hub.load(first)
            except ApiError as error:
                raise ResourceError(error.message) from None
            ready()
            await self._server.serve(sockets=[self._socket])
        finally:
            for task in aside:
                task.cancel()
            await asyncio.gather(*aside, return_exceptions=True)
            await hub.close()


class _Connection(H11Protocol):
    """Given up when the beginning of a request does not become a whole one in time; uvicorn waits for ever."""

    _timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _CONNECTIONS:
            transport.abort()  # before it costs more; those that bring nothing make room within half a minute
        else:
            self._expect_request()

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_request()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._expect_nothing()

    def _expect_request(self) -> None:
        cycle = vars(self)["cycle"]  # None before the first request, which its annotation denies
        if cycle is not None and not cycle.response_complete:
            self._expect_nothing()
        elif self._timer is None:
            self._timer = self.loop.call_later(_REQUEST_S, self.transport.close)

    def _expect_nothing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Uvicorn(uvicorn.Server):
    """Ends well: signals stop it once, running answers get their time, then their clients are told."""

    def __init__(self, config: uvicorn.Config, hub: Hub, shutdown_s: float) -> None:
        super().__init__(config)
        self._hub = hub
        self._shutdown_s = shutdown_s

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that was obeyed is not raised again afterwards."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nobody new; after `shutdown_s` tell those still waiting."""
        self._hub.leaving.set()
        timer = asyncio.get_running_loop().call_later(self._shutdown_s, self._hub.closing.set)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def _allow_connections() -> None:
    """Let the process have as many files open as it may and needs; many systems begin with 1,024 or 256."""
    if sys.platform == "win32":
        return
    import resource

    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * _CONNECTIONS if most == resource.RLIM_INFINITY else min(most, 4 * _CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        InputError: it cannot
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InputError(f"{host} is no address of this computer ({error.strerror or error})") from None
    try:
        if os.name != "nt":  # on Windows it would let two servers share a port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(256)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise InputError(
            f"{host}:{port} cannot be listened at ({error.strerror or error}); choose another with --port"
        ) from None
    return listening
