"""A running server for tests, and a client that sends exactly the bytes it is told to."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import api
from engine.progress import Progress
from engine.runtime.model import Model
from engine.runtime.service import Service
from engine.server.serve import Server
from engine.settings import EngineSettings, ServerSettings
from tests.fakes import END, toy

ASSISTANT = (258, *b"assistant\n")  # how a prompt of the toy's template ends: <|im_start|> and the role


class ToyEngine(api.Engine):
    """The engine around a toy model; `make` gives it."""

    def __init__(self, make: Callable[[Path], Model] = lambda _path: toy()) -> None:
        def opened(path: Path, _settings: EngineSettings) -> Generator[Progress, None, Model]:
            yield Progress("load", 0, 1, "bytes")
            return make(path)

        self._service = Service(opened)


def speaking(text: str | bytes | Sequence[int], *, pause_s: float = 0.0) -> Callable[..., NDArray[np.float32]]:
    """The model answers every conversation with exactly this text."""
    ids = list(text.encode() if isinstance(text, str) else text)

    def shape(before: list[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
        if pause_s:
            time.sleep(pause_s)
        start = len(before) - before[::-1].index(258) - 1 + len(ASSISTANT) if 258 in before else len(before)
        place = len(before) - start
        row = np.full_like(row, -10.0)
        row[ids[place] if 0 <= place < len(ids) else END] = 10.0
        return row

    return shape


@contextmanager
def serving(
    make: Callable[[Path], Model] = lambda _path: toy(),
    *,
    models: dict[str, Path] | None = None,
    engine_settings: EngineSettings = EngineSettings(),
    engine: Callable[[], api.Engine] | None = None,
    **settings: Any,
) -> Iterator[Client]:
    """A server around toy models, in a thread, at a free port; ends with the block and must do so in time."""
    named = {"toy": Path("toy")} if models is None else models
    chosen = ServerSettings(**{"port": 0, "shutdown_s": 1} | settings)
    server = Server(named, engine_settings, chosen, engine=engine or (lambda: ToyEngine(make)))
    ready = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            server.run(ready.set)
        except BaseException as error:  # noqa: BLE001 - raised where the test waits
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="server")
    thread.start()
    assert ready.wait(300)
    if failures:
        thread.join()
        raise failures[0]
    try:
        yield Client(server)
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"
        assert not failures, failures


@dataclass
class Answer:
    """status, headers by lower-case name, body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body, parse_constant=lambda name: AssertionError(f"{name} is no JSON"))

    @property
    def error(self) -> dict[str, Any]:
        found = self.json
        assert set(found) == {"error"}, found
        assert set(found["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = found["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """Data of server-sent events; the last one must be [DONE]."""
        lines = [line for line in self.body.decode().split("\n\n") if line and not line.startswith(":")]
        assert lines[-1] == "data: [DONE]", lines[-1]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@dataclass
class Client:
    """Talks to a server. key: sent with every request."""

    server: Server
    key: str | None = None
    timeout_s: float = 30
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.server.url.removeprefix("http://").rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def base(self) -> str:
        return f"{self.server.url}/v1"

    def get(self, path: str, **headers: str) -> Answer:
        return self.send("GET", path, None, headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send("POST", path, data, {"Content-Type": "application/json", **headers})

    def chat(self, content: str = "hi", **fields: Any) -> Answer:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    def send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Answer:
        connection = http.client.HTTPConnection(*self.address, timeout=self.timeout_s)
        try:
            auth = {"Authorization": f"Bearer {self.key}"} if self.key is not None else {}
            connection.request(method, path, body, {**self.headers, **auth, **headers})
            response = connection.getresponse()
            told = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, told, response.read())
        finally:
            connection.close()

    def raw(self, data: bytes, *, timeout_s: float = 20) -> bytes:
        """Everything that comes back for exactly these bytes, until the server closes."""
        with socket.create_connection(self.address, timeout=timeout_s) as connection:
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(data)
            parts = []
            # A server that refuses what it has not read to the end may reset the connection after its reply.
            with suppress(ConnectionResetError):
                while part := connection.recv(65536):
                    parts.append(part)
            return b"".join(parts)

    def open_stream(self, **fields: Any) -> socket.socket:
        """A connection on which a streamed answer is under way."""
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}).encode()
        connection = socket.create_connection(self.address, timeout=self.timeout_s)
        connection.sendall(request_bytes("/v1/chat/completions", body))
        return connection

    def metric(self, name: str) -> dict[str, float]:
        """The values of a metric by their labels."""
        lines = self.get("/metrics").body.decode().splitlines()
        found = [line.rpartition(" ") for line in lines if line.startswith(f"inglenook_{name}{{")]
        return {labels.partition("{")[2].rstrip("}"): float(value) for labels, _, value in found}


def request_bytes(path: str, body: bytes, *headers: str, method: str = "POST", host: str | None = "localhost") -> bytes:
    """An HTTP request, written out."""
    lines = [f"{method} {path} HTTP/1.1", *([f"Host: {host}"] if host is not None else [])]
    if not any(header.lower().startswith(("content-length", "transfer-encoding")) for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    if not any(header.lower().startswith("content-type") for header in headers):
        lines.append("Content-Type: application/json")
    lines += [*headers, "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def status_of(reply: bytes) -> int:
    """The status of a raw reply."""
    return int(reply.split(b" ", 2)[1])


def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Fail unless `condition` holds soon."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.02)
