"""Many clients with bad manners, for long: python -m tests.http_soak [--minutes 10] [--model PATH] [--clients 16]

Rounds of 200 requests, short and long, streamed and whole, some seeded, some
given up by the client at a random moment (closed, or reset), some by readers
that take a byte now and then, against a pool of 40 pages. Afterwards every
page must be back, nothing may be under way, seeded answers must be the same as
alone, and the memory must not have grown.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from engine import api
from engine.settings import EngineSettings
from tests.fakes import toy
from tests.serving import Client, eventually, request_bytes, serving

PAGES = 40
_SEEDED = {"seed": 7, "max_tokens": 12, "temperature": 1.0}


def one(client: Client, number: int, seed: int, long: int, expected: str) -> str:
    """A request of one kind or another; what became of it."""
    chance = random.Random(f"{seed} {number}")
    words = " ".join(str(chance.randrange(1000)) for _ in range(chance.choice([2, 5, 20, long])))
    kind = chance.choice(["whole", "streamed", "seeded", "closed", "reset", "slow", "unread", "bad"])
    match kind:
        case "whole":
            answer = client.chat(words, max_tokens=chance.randint(1, 40), n=chance.choice([1, 1, 3]))
            assert answer.status in (200, 429), answer.body
            return f"{kind} {answer.status}"
        case "seeded":
            answer = client.chat("same", **_SEEDED)
            assert answer.status in (200, 429), answer.body
            if answer.status == 200:
                text = answer.json["choices"][0]["message"]["content"]
                assert text == expected, (text, expected)
            return f"{kind} {answer.status}"
        case "bad":
            assert client.chat(words, max_tokens=0).status == 400
            return kind
        case "streamed":
            answer = client.chat(words, max_tokens=chance.randint(1, 40), stream=True)
            assert answer.status in (200, 429), answer.body
            if answer.status == 200:
                assert answer.events[-1]["choices"][0]["finish_reason"] in ("stop", "length")
            return f"{kind} {answer.status}"
    body = json.dumps({"messages": [{"role": "user", "content": words}], "stream": True, "max_tokens": 10_000}).encode()
    connection = socket.create_connection(client.address, timeout=client.timeout_s)
    connection.sendall(request_bytes("/v1/chat/completions", body))
    if kind == "slow":
        for _ in range(20):
            if not connection.recv(10):
                break
            time.sleep(0.01)
    elif kind != "unread":
        connection.settimeout(chance.uniform(0.001, 0.5))
        try:
            while connection.recv(4096):
                pass
        except TimeoutError:
            pass
    if kind == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    return kind


def expected_answer(client: Client) -> str:
    """The seeded answer, alone."""
    answer = client.chat("same", **_SEEDED)
    assert answer.status == 200, answer.body
    text: str = answer.json["choices"][0]["message"]["content"]
    return text


def round_of(client: Client, requests: int, clients: int, seed: int, *, long: int, expected: str) -> Counter[str]:
    """So many requests at once and after each other; then everything must be as before."""
    with ThreadPoolExecutor(clients) as pool:
        kinds = Counter(pool.map(lambda number: one(client, number, seed, long, expected), range(requests)))
    eventually(lambda: at_rest(client), 30)
    return kinds


def at_rest(client: Client) -> bool:
    """Nothing is under way and every page is back."""
    free, pages = client.metric("cache_pages_free"), client.metric("cache_pages")
    busy = [*client.metric("answers_running").values(), *client.metric("answers_waiting").values()]
    return free == pages and not any(busy)


def soak(client: Client, minutes: float, clients: int, say: Callable[[str], Any], *, long: int) -> None:
    """Rounds until the time is over.

    Raises:
        AssertionError: something was lost, stuck or grew
    """
    client.timeout_s = 300  # who waits longer is stuck
    expected = expected_answer(client)
    process = psutil.Process()
    first_bytes = 0
    end_s = time.monotonic() + 60 * minutes
    number = 0
    while number < 2 or time.monotonic() < end_s:
        kinds = round_of(client, 200, clients, number, long=long, expected=expected)
        resident, threads = process.memory_info().rss, threading.active_count()
        # The first rounds fill caches: the tokenizer's, the allocator's.
        first_bytes = resident if number < 3 else first_bytes
        say(f"round {number}: {dict(sorted(kinds.items()))}; {resident / 1e6:.1f} MB, {threads} threads\n")
        assert resident < 1.1 * first_bytes + 20e6, f"the memory grew from {first_bytes} to {resident} bytes"
        number += 1


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--model", type=Path, help="a real model; without it, a toy")
    arguments = parser.parse_args()
    if arguments.model is None:
        with serving(lambda _: toy(pages=PAGES, page_tokens=16, context=400)) as client:
            soak(client, arguments.minutes, arguments.clients, sys.stdout.write, long=90)
        return
    # The most pages there are: as many as answers together, each of one context.
    settings = EngineSettings(context=640, max_batch_size=4)
    models = {"model": arguments.model}
    with serving(models=models, engine=api.Engine, engine_settings=settings) as client:
        assert set(client.metric("cache_pages").values()) == {PAGES}
        soak(client, arguments.minutes, arguments.clients, sys.stdout.write, long=90)


if __name__ == "__main__":
    main()
