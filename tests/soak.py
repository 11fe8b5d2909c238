"""Runs a model under a mixed load for as long as is wanted, and says whether anything was lost.

    python -m tests.soak MODEL [--requests 200] [--pages 40] [--seconds 0] [--seed 0]

Requests of several clients with short and long prompts, shared beginnings, all
ways of dealing with a full context, seeded and not, come over time; a third of
them is cancelled at a random moment. Every request must end exactly once, no
page may be missing at the end, memory must not grow, and the answers of the
seeded ones must be those they get alone. Prints one JSON object; exit code 1
when anything of this failed. `seconds` repeats rounds until they have passed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from engine import api
from engine.api import Done, Event, Failed, Loaded, Message, Request, Sampling
from engine.settings import EngineSettings

SENTENCE = "the lighthouse keeper counted nineteen ships and wrote their names into a blue book every morning"
WORDS = SENTENCE.split()
OVERFLOWS = ("stop", "rolling", "middle", "summarise")


class Ear:
    """Takes one request's events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ends = 0
        self.ended = threading.Event()
        self.first_s = self.end_s = 0.0

    def __call__(self, event: Event) -> None:
        now_s = time.monotonic()
        if isinstance(event, api.Delta) and not self.first_s:
            self.first_s = now_s
        if isinstance(event, Done | Failed):
            self.ends += 1
            self.end_s = now_s
            self.events.append(event)
            self.ended.set()


def text(chance: random.Random, words: int) -> str:
    """Words without much sense."""
    return " ".join(chance.choice(WORDS) for _ in range(words))


def request(chance: random.Random, name: str, shared: str, most_words: int) -> Request:
    """One request of the mixture."""
    words, number = chance.choice((5, 20, 60, most_words)), chance.randrange(1000)
    turns = [Message("system", shared), Message("user", text(chance, words))]
    if chance.random() < 0.3:
        turns += [Message("assistant", text(chance, 15)), Message("user", text(chance, 10))]
    return Request(
        name,
        tuple(turns),
        Sampling(temperature=chance.choice((0.0, 0.8)), seed=number, max_tokens=chance.randrange(4, 48)),
        stream=chance.random() < 0.8,
        client=chance.choice("abcd"),
        overflow=chance.choice(OVERFLOWS),  # type: ignore[arg-type]
    )


def status(engine: api.Engine) -> Any:
    """What the engine says it is doing."""
    told: list[Any] = []
    heard = threading.Event()

    def sink(found: Any) -> None:
        told.append(found)
        heard.set()

    engine.status(sink)
    return told[0] if heard.wait(30) else None


def soak(model: str, requests: int, pages: int, seconds: float, seed: int) -> dict[str, Any]:
    """Rounds of `requests` requests; what went wrong stands under "problems"."""
    chance = random.Random(seed)
    engine, problems = api.Engine(), []
    loaded: list[Any] = []
    ready = threading.Event()

    def on_load(event: Any) -> None:
        if isinstance(event, Loaded | Failed):
            loaded.append(event)
            ready.set()

    context = 16 * 64
    engine.load(model, EngineSettings(context=context, max_batch_size=4), on_load)
    ready.wait()
    if not isinstance(loaded[0], Loaded):
        raise SystemExit(loaded[0].message)
    spare: list[int] = []

    def shrink(found: Any, _loop: Any) -> None:
        spare.extend(found.pages.take() for _ in range(found.pages.count - pages))

    engine._service.call(shrink)
    shared = text(chance, 80)
    process, began_s = psutil.Process(), time.monotonic()
    memory, counts, firsts, rounds = [], dict[str, int](), [], 0
    while rounds == 0 or time.monotonic() - began_s < seconds:
        ears: list[tuple[Request, Ear, float]] = []
        for number in range(requests):
            asked = request(chance, f"{rounds}.{number}", shared, most_words=600)
            ear = Ear()
            ears.append((asked, ear, time.monotonic()))
            engine.submit(asked, ear)
            if chance.random() < 0.33:
                threading.Timer(chance.random() * 3, engine.cancel, [asked.id]).start()
            time.sleep(chance.random() * 0.02)
        for asked, ear, _ in ears:
            if not ear.ended.wait(600):
                problems.append(f"{asked.id} did not end")
        time.sleep(0.1)
        for asked, ear, added_s in ears:
            if ear.ends != 1:
                problems.append(f"{asked.id} ended {ear.ends} times")
                continue
            end = ear.events[-1]
            counts[end.reason if isinstance(end, Done) else end.kind] = (
                counts.get(end.reason if isinstance(end, Done) else end.kind, 0) + 1
            )
            if isinstance(end, Failed) and end.kind != "ContextOverflowError":
                problems.append(f"{asked.id} failed: {end.message}")
            if ear.first_s:
                firsts.append(ear.first_s - added_s)
        found = status(engine)
        if found is None or (found.running, found.waiting, found.free_pages) != (0, 0, pages):
            problems.append(f"after round {rounds}: {found}")
        memory.append(process.memory_info().rss)
        whole = [(a, e.events[-1]) for a, e, _ in ears if isinstance(e.events[-1], Done)]
        for asked, done in chance.sample(whole, min(5, len(whole))):
            if done.reason not in ("stop", "length"):
                continue
            again = Ear()
            engine.submit(replace(asked, id=f"{asked.id} alone"), again)
            again.ended.wait(600)
            alone = again.events[-1]
            if not isinstance(alone, Done) or alone.token_ids != done.token_ids:
                problems.append(f"{asked.id} was answered otherwise alone")
        rounds += 1
    engine.close()
    firsts.sort()
    return {
        "rounds": rounds,
        "requests": rounds * requests,
        "seconds": round(time.monotonic() - began_s, 1),
        "ends": counts,
        "first_token_s": {"median": round(firsts[len(firsts) // 2], 3), "worst": round(firsts[-1], 3)},
        "rss_mb": [round(size / 1e6, 1) for size in memory],
        "pages": pages,
        "problems": problems,
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--pages", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    found = soak(Path(wanted.model), wanted.requests, wanted.pages, wanted.seconds, wanted.seed)  # type: ignore[arg-type]
    print(json.dumps(found, indent=1))  # noqa: T201
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
