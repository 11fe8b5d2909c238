"""The HTTP server beside the window: started, stopped, watched. Knows no widget."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from PySide6.QtCore import QObject, Signal

from engine.errors import InglenookError
from engine.settings import EngineSettings, ServerSettings
from gui.bridge import Bridge
from gui.kit.i18n import tr
from gui.kit.words import error_words

if TYPE_CHECKING:
    from engine.server.metrics import Answered

__all__ = ["ServerState", "Serving"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerState:
    """Whether the server runs, where, and why not."""

    kind: Literal["off", "starting", "on", "stopping", "failed"] = "off"
    url: str = ""
    model: str = ""
    sentence: str = ""


class Serving(QObject):
    """The server of this window; one at most."""

    changed = Signal()

    def __init__(self, bridge: Bridge) -> None:
        super().__init__()
        self.state = ServerState()
        self._bridge = bridge
        self._stop: threading.Event | None = None
        self._server: Any = None
        bridge.event.connect(self._apply)

    def start(self, path: Path, engine: EngineSettings, settings: ServerSettings) -> None:
        """Serve a model."""
        if self.state.kind in {"off", "failed"}:
            self.state = ServerState("starting", model=path.stem)
            self._stop = self._bridge.task("server", lambda api, stop: self._serve(api, stop, path, engine, settings))
            self.changed.emit()

    def stop(self) -> None:
        """Stop; what is being answered gets its time to finish."""
        if self._stop is not None and self.state.kind in {"starting", "on"}:
            self.state = replace(self.state, kind="stopping")
            self._stop.set()
            self.changed.emit()

    @property
    def answers(self) -> int:
        """Answers under way or waiting."""
        return int(self._server.answers) if self._server is not None else 0

    @property
    def latest(self) -> tuple[Answered, ...]:
        """The requests that ended last."""
        found: tuple[Answered, ...] = self._server.metrics.latest if self._server is not None else ()
        return found

    def _serve(
        self, api: Any, stop: threading.Event, path: Path, engine: EngineSettings, settings: ServerSettings
    ) -> Iterator[ServerState]:
        """On a thread of its own: what `run` blocks."""
        from engine.server.serve import Server

        try:
            server = Server({path.stem: path}, engine, settings, engine=api.Engine)
            self._server = server

            def end() -> None:
                stop.wait()
                server.stop()

            ender = threading.Thread(target=end, name="server end", daemon=True)
            ender.start()
            try:
                server.run(lambda: self._bridge.post(ServerState("on", server.url, path.stem)))
            finally:
                stop.set()
                ender.join()
        except InglenookError as error:
            yield ServerState("failed", sentence=error_words(type(error).__name__, str(error)))
        except Exception:  # noqa: BLE001 (a fault ends the server, not the window; it is logged)
            _log.exception("the server")
            yield ServerState("failed", sentence=tr("Something went wrong inside Inglenook; the log says more."))
        else:
            yield ServerState()
        finally:
            self._server = None

    def _apply(self, event: object) -> None:
        if isinstance(event, ServerState):
            self.state = event
            self.changed.emit()
