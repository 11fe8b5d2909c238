"""Answers a file of requests through continuous batching, without a socket, into a file that can be gone on with.

A line is a request as OpenAI's batch files have it, or only its body:

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
    {"messages": [...]}
    {"prompt": "..."}

Each is answered by the server's own endpoint, so that both mean the same. The
output has a line per request, written whole as soon as it is answered. Started
again, the job keeps the lines that are there and does the rest; what failed
for the computer's own fault is tried again.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine import api
from engine.api import Engine, Progress
from engine.errors import InglenookError, InputError, ResourceError
from engine.server.app import create_app
from engine.server.guard import App
from engine.server.hub import Hub
from engine.server.metrics import Metrics
from engine.server.watch import watch_memory
from engine.server.wire import ApiError, encoded, parsed_json
from engine.settings import EngineSettings, ServerSettings

__all__ = ["BatchResult", "run_batch"]

_URLS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
_WAITING = 10_000
_LONGEST_LINE = 64 << 20


@dataclass(frozen=True, slots=True)
class BatchResult:
    """out: the file, its lines, how many of them are errors, and how many an earlier run had written."""

    out: Path
    lines: int
    failed: int
    kept: int


@dataclass(frozen=True, slots=True)
class _Line:
    """A request. fault: why there is none; body is empty then."""

    custom_id: str
    url: str
    model: str
    body: dict[str, Any]
    fault: str = ""


def run_batch(
    source: Path,
    out: Path,
    *,
    model: str | None = None,
    settings: EngineSettings = EngineSettings(),
    warn: Callable[[str], None] = lambda _sentence: None,
    engine: Callable[[], Engine] = Engine,
) -> Generator[Progress | BatchResult, None, None]:
    """Answer the requests of `source` into `out`; the last value is a BatchResult. Closing it stops.

    model: answers all of them; None: each names its own.

    Raises:
        InputError: the file cannot be read, two requests have one id, or `out` belongs to another file
        ResourceError: `out` cannot be written, or the model cannot be loaded
    """
    lines = list(_lines(source, model))
    _check_ids(lines)
    kept = _kept(out, {line.custom_id for line in lines})
    left = [line for line in lines if line.custom_id not in kept]
    failed = sum(kept.values())
    yield Progress("batch", len(kept), len(lines))
    paths, faults = _found({line.model for line in left if not line.fault})
    left = [replace(line, fault=line.fault or faults.get(line.model, "")) for line in left]
    # A model after the other: they would take turns.
    left.sort(key=lambda line: line.model)
    try:
        with out.open("ab") as file, asyncio.Runner() as runner:
            job = _Job(paths, settings, 2 * settings.max_batch_size, engine)
            try:
                runner.run(job.begin(warn))
                done = len(kept)
                for answer in job.answers(runner, left):
                    failed += answer["error"] is not None or answer["response"]["status_code"] >= 400
                    file.write(encoded(answer) + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                    done += 1
                    yield Progress("batch", done, len(lines))
            finally:
                runner.run(job.end())
    except OSError as error:
        raise ResourceError(f"{out} cannot be written: {error.strerror or error}") from None
    yield BatchResult(out, len(lines), failed, len(kept))


class _Job:
    """Requests under way, `together` at most, to an application without a socket."""

    def __init__(
        self, models: dict[str, Path], settings: EngineSettings, together: int, engine: Callable[[], Engine]
    ) -> None:
        self._models, self._settings, self._together, self._engine = models, settings, together, engine
        self._tasks: set[asyncio.Task[dict[str, Any]]] = set()

    async def begin(self, warn: Callable[[str], None]) -> None:
        """Before the first request."""
        self._hub = Hub(self._models, self._settings, queue=_WAITING, idle_minutes=0, engine=self._engine)
        self._app: App = create_app(self._hub, ServerSettings(body_mb=1024), Metrics())
        self._watch = asyncio.ensure_future(watch_memory(warn))

    async def end(self) -> None:
        """Stop what is under way and give everything back."""
        for task in (*self._tasks, self._watch):
            task.cancel()
        await asyncio.gather(*self._tasks, self._watch, return_exceptions=True)
        await self._hub.close()

    def answers(self, runner: asyncio.Runner, lines: list[_Line]) -> Iterator[dict[str, Any]]:
        """Answers as they come."""
        waiting = iter(lines)
        while True:
            yield from (done := runner.run(self._some(waiting)))
            if not done:
                return

    async def _some(self, waiting: Iterator[_Line]) -> list[dict[str, Any]]:
        while len(self._tasks) < self._together and (line := next(waiting, None)) is not None:
            self._tasks.add(asyncio.ensure_future(self._answer(line)))
        if not self._tasks:
            return []
        done, self._tasks = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        return [task.result() for task in done]

    async def _answer(self, line: _Line) -> dict[str, Any]:
        told: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id}
        if line.fault:
            return told | {"response": None, "error": {"code": "invalid_request", "message": line.fault}}
        status, body = await self._asked(line.url, encoded(line.body))
        return told | {"response": {"status_code": status, "request_id": told["id"], "body": body}, "error": None}

    async def _asked(self, url: str, body: bytes) -> tuple[int, Any]:
        """A request to the application, as a server would hand it over."""
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": url,
            "raw_path": url.encode(),
            "query_string": b"",
        }
        scope |= {"headers": headers, "http_version": "1.1", "scheme": "http", "root_path": "", "client": None}
        sent = False
        status = 0
        parts: list[bytes] = []

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()  # this client stays
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return status, json.loads(b"".join(parts))


def _lines(source: Path, model: str | None) -> Iterator[_Line]:
    """The requests of a file; a line that is none has a fault."""
    try:
        with source.open("rb") as file:
            for number, data in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), 1):
                if data.strip():
                    yield _line(number, data.strip().removeprefix(b"\xef\xbb\xbf"), model)
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror or error}") from None


def _line(number: int, data: bytes, model: str | None) -> _Line:
    name = f"line-{number}"
    try:
        given = parsed_json(data)
    except ApiError as error:
        return _Line(name, "", "", {}, f"line {number}: {error.message}")
    custom = given.get("custom_id")
    if isinstance(custom, str) and custom:
        name = custom
    body = given.get("body", given if "custom_id" not in given and "url" not in given else None)
    if not isinstance(body, dict):
        return _Line(name, "", "", {}, f"line {number}: a body is missing")
    url = given.get("url") or next((url for url, field in _URLS.items() if field in body), "")
    if url not in _URLS or given.get("method", "POST") != "POST":
        return _Line(name, "", "", {}, f"line {number}: only POST to {' and '.join(_URLS)} is answered here")
    wanted = model if model is not None else body.get("model")
    if not isinstance(wanted, str) or not wanted:
        return _Line(name, "", "", {}, f"line {number}: it names no model; --model names one for all")
    # The answer goes into a line, whole.
    body = {field: value for field, value in body.items() if field not in ("stream", "stream_options")}
    return _Line(name, url, wanted, body | {"model": wanted})


def _check_ids(lines: list[_Line]) -> None:
    seen: set[str] = set()
    for line in lines:
        if line.custom_id in seen:
            raise InputError(f"two requests have the custom_id {line.custom_id[:80]!r}; give each its own")
        seen.add(line.custom_id)


def _kept(out: Path, wanted: set[str]) -> dict[str, bool]:
    """Ids that an earlier run answered, and whether with an error; takes out what is half-written or worth another try.

    Raises:
        InputError: the file is of another batch, or none of ours
        ResourceError: it cannot be rewritten
    """
    try:
        data = out.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"{out} cannot be read: {error.strerror or error}") from None
    kept: dict[str, bool] = {}
    lines: list[bytes] = []
    complete = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    for line in complete:
        try:
            answer = json.loads(line)
            name, response, fault = answer["custom_id"], answer["response"], answer["error"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InputError(f"{out} is no output of a batch; choose another with --out") from None
        if name not in wanted:
            raise InputError(f"{out} answers another batch ({str(name)[:80]!r}); choose another with --out")
        status = response["status_code"] if response else 400
        if status < 500 and name not in kept:
            kept[name] = fault is not None or status >= 400
            lines.append(line)
    if b"".join(lines) != data:
        partial = out.with_name(out.name + ".partial")
        try:
            partial.write_bytes(b"".join(lines))
            partial.replace(out)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise ResourceError(f"{out} cannot be written: {error.strerror or error}") from None
    return kept


def _found(names: set[str]) -> tuple[dict[str, Path], dict[str, str]]:
    """Where the models are, and of those that are nowhere, why."""
    paths: dict[str, Path] = {}
    faults: dict[str, str] = {}
    for name in sorted(names):
        try:
            paths[name] = api.resolve_model(name)
        except InglenookError as error:
            faults[name] = str(error)
    return paths, faults
