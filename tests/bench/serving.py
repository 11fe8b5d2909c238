"""What clients of the server get: throughput together, first tokens in company, of later turns and after a restart.

    python -m tests.bench.serving MODEL.nook [--clients 8] [--tokens 128] [--repeat 3] [--history 4000]

Starts `inglenook serve` as anybody would and asks it over HTTP, from another
process. Prints one JSON object; times are medians:

    alone_tps, together_tps, gain     tokens per second of one client and of all, prompts included
    seeded_same                       a seeded answer is the same alone and in company
    behind_long_s                     first token of a short request that comes while `history` tokens are read for
                                      another
    cold_s, next_turn, restarted      first token of a conversation of `history` tokens; the shares of it that the next
                                      turn takes, and one after a restart of the server
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.report import ROOT
from tests.serving import request_bytes

_WORDS = Path(__file__).with_name("serving.py").read_text(encoding="utf-8").split()
Turns = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Reply:
    """begun_s: when it was asked; first_s, end_s: first token and end, after that. prompt and tokens: counted there."""

    begun_s: float
    first_s: float
    end_s: float
    text: str
    prompt: int
    tokens: int


@contextmanager
def served(model: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """The address of a server of its own process."""
    command = [sys.executable, str(ROOT / "main.py"), "serve", str(model), "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8") as process:
        try:
            assert process.stderr is not None
            said = ""
            for line in process.stderr:
                said += line
                if found := re.search(r"http://(.*):(\d+)/v1", line):
                    yield found[1], int(found[2])
                    return
            sys.exit(f"the server did not start: {said}")
        finally:
            process.terminate()


def ask(address: tuple[str, int], turns: Turns, tokens: int, seed: int | None = None) -> Reply:
    """A streamed answer. Pieces are stamped as they come and read afterwards, so that the client takes little time."""
    body = {"messages": turns, "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"temperature": 1.0, "seed": seed} if seed is not None else {"temperature": 0}
    begun_s = time.perf_counter()
    pieces: list[tuple[float, bytes]] = []
    with socket.create_connection(address) as connection:
        connection.sendall(request_bytes("/v1/chat/completions", json.dumps(body).encode()))
        while data := connection.recv(1 << 16):
            pieces.append((time.perf_counter() - begun_s, data))
    first_s, before = 0.0, b""
    for at_s, data in pieces:
        before += data
        if not first_s and re.search(rb'"delta":\{"content":"[^"]', before):
            first_s = at_s
    events = [json.loads(line) for line in re.findall(rb"data: (\{.*\})", before)]
    if not events or "usage" not in events[-1]:
        sys.exit(f"no answer: {before[:2000].decode(errors='replace')}")
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    usage = events[-1]["usage"]
    return Reply(begun_s, first_s, pieces[-1][0], text, usage["prompt_tokens"], usage["completion_tokens"])


def asked(text: str) -> Turns:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def of_tokens(chance: random.Random, tokens: int) -> str:
    """A text of about so many tokens that nobody has read before."""
    return " ".join(chance.choice(_WORDS) for _ in range(tokens // 3))


def throughput(
    address: tuple[str, int], clients: int, tokens: int, repeat: int, chance: random.Random
) -> dict[str, Any]:
    """One client and many in turns, so that both meet the same weather."""
    alone, together = [], []
    seeded = asked("Tell a story about a lighthouse.")
    same = True
    by_itself = ask(address, seeded, 32, seed=7).text
    with ThreadPoolExecutor(clients + 1) as pool:
        for _ in range(repeat):
            numbers = [chance.randrange(10**9) for _ in range(clients + 1)]
            stories = [asked(f"Write a long story about the number {number}.") for number in numbers]
            one = ask(address, stories.pop(), tokens)
            alone.append(one.tokens / one.end_s)
            begun_s = time.perf_counter()
            replies = list(pool.map(lambda turns: ask(address, turns, tokens), stories))
            together.append(sum(reply.tokens for reply in replies) / (time.perf_counter() - begun_s))
            companions = [pool.submit(ask, address, turns, 48) for turns in stories[1:]]
            same &= ask(address, seeded, 32, seed=7).text == by_itself
            for companion in companions:
                companion.result()
    gain = median(b / a for a, b in zip(alone, together, strict=True))
    return {
        "alone_tps": round(median(alone), 1),
        "together_tps": round(median(together), 1),
        "gain": round(gain, 2),
        "seeded_same": same,
    }


def behind_a_long_prompt(address: tuple[str, int], history: int, repeat: int, chance: random.Random) -> float:
    """Seconds to the first token of somebody who asks little while much is read for another."""
    seconds = []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(repeat):
            long = pool.submit(ask, address, asked(of_tokens(chance, history)), 1)
            time.sleep(0.3)
            seconds.append(ask(address, asked(f"What is {chance.randrange(1000)} + 1?"), 4).first_s)
            long.result()
    return median(seconds)


def turns_of(model: Path, flags: tuple[str, ...], history: int, repeat: int, chance: random.Random) -> dict[str, Any]:
    """First tokens of a conversation: cold, at its next turn, and at the one after a restart."""
    cold, later, restarted, prompts, told = [], [], [], [], []
    with served(model, *flags) as address:
        ask(address, asked("hi"), 4)
        for _ in range(repeat):
            turns = asked(of_tokens(chance, history))
            first = ask(address, turns, 16)
            turns += [{"role": "assistant", "content": first.text}, *asked("And in other words?")]
            second = ask(address, turns, 16)
            turns += [{"role": "assistant", "content": second.text}, *asked("Say it in one word.")]
            cold.append(first.first_s)
            later.append(second.first_s / first.first_s)
            prompts.append(first.prompt)
            told.append(turns)
        time.sleep(5)  # pages are written while nobody asks
    with served(model, *flags) as address:
        ask(address, asked("hi"), 4)
        for before_s, turns in zip(cold, told, strict=True):
            restarted.append(ask(address, turns, 16).first_s / before_s)
    return {
        "history": round(median(prompts)),
        "cold_s": round(median(cold), 3),
        "next_turn": round(median(later), 4),
        "restarted": round(median(restarted), 4),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--history", type=int, default=4000)
    wanted = parser.parse_args()
    chance = random.Random()
    flags = ("--context", str(2 * wanted.history), "--max-batch-size", str(wanted.clients), "--snapshot-mb", "2048")
    with served(wanted.model, *flags) as address:
        ask(address, asked("hi"), 16)
        found = throughput(address, wanted.clients, wanted.tokens, wanted.repeat, chance)
        found["behind_long_s"] = round(behind_a_long_prompt(address, wanted.history, wanted.repeat, chance), 3)
    found |= turns_of(wanted.model, flags, wanted.history, wanted.repeat, chance)
    print(json.dumps(found, indent=1))  # noqa: T201 - what the command is for


if __name__ == "__main__":
    main()
