"""The server under load and ill treatment (case H10): clients that vanish, full queues, the end with streams open."""

from __future__ import annotations

import http.client
import json
import logging
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from engine.settings import EngineSettings
from tests import factory, http_fuzz, http_soak
from tests.fakes import toy
from tests.serving import eventually, request_bytes, serving, speaking, status_of

ROOT = Path(__file__).resolve().parent.parent


def slow(pause_s: float = 0.01, **changes: Any) -> Any:
    """A model that answers for ever, a token at a time."""
    return toy(before_step=lambda _batch: time.sleep(pause_s), context=4096, pages=512, end_ids=(), **changes)


def test_bodies_that_nobody_should_send() -> None:
    traces = http_fuzz.Traces()
    logging.getLogger().addHandler(traces)
    try:
        with serving(lambda _: toy(context=1024, pages=512)) as client:
            statuses = http_fuzz.fuzz(client, 1200, seed=random.randrange(10**6))
            assert client.chat(max_tokens=1).status == 200
    finally:
        logging.getLogger().removeHandler(traces)
    assert statuses[200] > 50
    assert statuses[400] > 300
    assert not traces.found, traces.found[:3]


def test_bad_manners_for_a_while() -> None:
    with serving(lambda _: toy(pages=http_soak.PAGES, page_tokens=16, context=400)) as client:
        expected = http_soak.expected_answer(client)
        kinds = http_soak.round_of(client, 200, 16, random.randrange(10**6), long=90, expected=expected)
    assert sum(kinds.values()) == 200


@pytest.mark.parametrize("ending", ["close", "reset"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_is_gone_stops_the_answer_within_a_second(ending: str, stream: bool) -> None:
    with serving(lambda _: slow()) as client:
        connection = client.open_stream(stream=stream)
        eventually(lambda: sum(client.metric("answers_running").values()) == 1)
        if ending == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        eventually(lambda: http_soak.at_rest(client), 1.0)
        eventually(lambda: sum(client.metric("requests_total").values()) == 1)


def test_half_of_thirty_clients_vanish_and_the_others_get_everything() -> None:
    text = "all of it, word by word"
    with serving(lambda _: toy(context=400, pages=40, page_tokens=16, shape=speaking(text, pause_s=0.0005))) as client:
        before = threading.active_count()
        chance = random.Random(3)

        def one(number: int) -> str:
            with client.open_stream() as connection:
                if number % 2:
                    time.sleep(chance.uniform(0, 0.2))
                    return ""
                data = b""
                while part := connection.recv(4096):
                    data += part
            return data.decode()

        with ThreadPoolExecutor(30) as pool:
            answers = list(pool.map(one, range(30)))
        assert all("data: [DONE]\n\n" in answer for answer in answers[::2])
        eventually(lambda: http_soak.at_rest(client))
        assert threading.active_count() == before


def test_a_reader_that_takes_nothing_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.guard._SEND_S", 1.0)
    with serving(lambda _: slow(0.0, shape=speaking("x" * 4000))) as client:
        lazy = []
        for _ in range(3):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect(client.address)
            body = {
                "messages": [{"role": "user", "content": "hi"}],
                "stream": True,
                "logprobs": True,
                "top_logprobs": 20,
            }
            connection.sendall(request_bytes("/v1/chat/completions", json.dumps(body).encode()))
            lazy.append(connection)
        began_s = time.monotonic()
        assert client.chat(max_tokens=3).status == 200
        assert time.monotonic() - began_s < 3
        eventually(lambda: http_soak.at_rest(client), 60)
        for connection in lazy:
            connection.close()


def test_a_connection_that_asks_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.serve._REQUEST_S", 0.3)
    with serving() as client:
        for begun in (b"", b"GET / HT", b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"):
            began_s = time.monotonic()
            assert client.raw(begun, timeout_s=10) == b""
            assert time.monotonic() - began_s < 5
        assert client.chat(max_tokens=1).status == 200


def test_a_second_request_that_comes_letter_by_letter_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.serve._REQUEST_S", 0.5)
    with serving() as client, socket.create_connection(client.address, timeout=10) as connection:
        connection.sendall(request_bytes("/health", b"", method="GET").replace(b"Connection: close\r\n", b""))
        assert status_of(connection.recv(4096)) == 200
        ended_s = time.monotonic() + 10
        with suppress(ConnectionError):
            while time.monotonic() < ended_s:
                connection.sendall(b"X")
                time.sleep(0.02)
        assert time.monotonic() < ended_s


def test_more_connections_than_there_may_be_are_closed_and_later_ones_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.serve._REQUEST_S", 2.0)
    monkeypatch.setattr("engine.server.serve._CONNECTIONS", 20)
    with serving() as client:
        crowd = [socket.create_connection(client.address, timeout=10) for _ in range(40)]
        ends: Counter[bytes] = Counter()
        for connection in crowd:
            with suppress(ConnectionError):
                ends[connection.recv(1)] += 1
            connection.close()
        assert not ends.keys() - {b""}
        assert client.chat(max_tokens=1).status == 200


def test_what_waits_beyond_the_queue_is_sent_away_with_a_time_to_come_back() -> None:
    with serving(lambda _: slow(), engine_settings=EngineSettings(max_batch_size=2), queue=1) as client:
        streams = [client.open_stream() for _ in range(3)]
        eventually(lambda: client.chat(max_tokens=1).status == 429)
        answer = client.chat(max_tokens=1)
        assert answer.error["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) > 0
        assert client.get("/health").status == 200
        assert client.get("/v1/models").status == 200
        for connection in streams:
            connection.close()
        eventually(lambda: client.chat(max_tokens=1).status == 200)
        assert client.chat(max_tokens=1, n=4).status == 429  # it would never fit


def test_a_stream_says_that_it_is_alive_while_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.answers._HEARTBEAT_S", 0.1)
    monkeypatch.setattr("engine.server.answers._FIRST_EVENT_S", 0.1)
    gate = threading.Event()
    model = toy(before_step=lambda _batch: gate.wait(20), shape=speaking("ok"))
    with serving(lambda _: model) as client, client.open_stream() as connection:
        data = b""
        while data.count(b": waiting\n\n") < 3:
            data += connection.recv(4096)
        gate.set()
        while part := connection.recv(4096):
            data += part
    assert b"data: [DONE]\n\n" in data


def test_stopping_lets_short_answers_finish_and_tells_the_others() -> None:
    with serving(lambda _: toy(shape=speaking("finished", pause_s=0.03)), shutdown_s=5) as client:
        connection = client.open_stream()
        assert connection.recv(1)
        client.server.stop()
        data = b""
        while part := connection.recv(4096):
            data += part
        assert b"data: [DONE]\n\n" in data
        connection.close()
    began_s = time.monotonic()
    with serving(lambda _: slow(), shutdown_s=1) as client:
        connection = client.open_stream()
        whole = ThreadPoolExecutor(1)
        waiting = whole.submit(lambda: client.chat(stream=False))
        assert connection.recv(1)
        eventually(lambda: sum(client.metric("answers_running").values()) == 2)
        client.server.stop()
        data = b""
        while part := connection.recv(4096):
            data += part
        assert b"event: error" in data
        assert b"[DONE]" not in data
        connection.close()
        told = waiting.result(10)
        assert told.status == 503
        assert "retry-after" in told.headers
        whole.shutdown()
    assert time.monotonic() - began_s < 8


# ---------------------------------------------------------------- as a program

# Runs main.py and ends at once when a socket is opened or reached for that is not the server's own.
WATCHED = """
import os, runpy, sys
allowed = 0
def watch(event, arguments):
    global allowed
    if event == "socket.__new__":
        return
    if event in ("socket.bind", "socket.getaddrinfo"):
        place = arguments[1] if event == "socket.bind" else arguments
        if place[0] != "127.0.0.1":
            os.write(2, f"SOCKET: {event} {arguments}\\n".encode()); os._exit(77)
        allowed += event == "socket.bind"
        if allowed > 1:
            os.write(2, b"SOCKET: a second one listens\\n"); os._exit(77)
    elif event.startswith("socket.") and event not in ("socket.listen", "socket.accept"):
        os.write(2, f"SOCKET: {event} {arguments}\\n".encode()); os._exit(77)
sys.addaudithook(watch)
sys.argv = ["main.py", *sys.argv[1:]]
runpy.run_path("main.py", run_name="__main__")
"""


@pytest.fixture
def program(tmp_path: Path, compiled_kernels: None) -> Iterator[Any]:
    """Start `serve` with arguments; gives the process and its address once it serves."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, code: str | None = None) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-c", code] if code else [sys.executable, "main.py"]
        process = subprocess.Popen(
            [*command, "serve", *arguments, "--port", "0", "--threads", "1"],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        started.append(process)
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if " at http://" in line:
                return process, line.split(" at ")[1].split("/v1")[0]
        raise AssertionError("".join(lines))

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_program_serves_and_ends_well(program: Any, tmp_path: Path, number: int) -> None:
    folder = factory.make(tmp_path / "toy")
    process, url = program(str(folder), "--context", "64", code=WATCHED)
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    body = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}'
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    assert connection.getresponse().read().startswith(b'{"id":"chatcmpl-')
    connection.close()
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert "SOCKET" not in errors


def test_usage_errors_end_with_2(tmp_path: Path) -> None:
    folder = factory.make(tmp_path / "toy")
    for arguments, word in (
        (["nowhere"], "nowhere"),
        ([str(folder), "--host", "0.0.0.0"], "API key"),
        ([str(folder), "--port", "70000"], "port"),
        ([], "no model"),
    ):
        result = subprocess.run(
            [sys.executable, "main.py", "serve", *arguments],
            cwd=ROOT,
            env=os.environ | {"XDG_DATA_HOME": str(tmp_path)},
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == 2, result.stderr
        assert word in result.stderr
        assert len(result.stderr.splitlines()) == 1
