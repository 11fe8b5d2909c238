"""Finds out how many threads suit this machine and a model, when asked to, and remembers it.

The default, a thread per fast core, is right on most machines. Which of some
neighbours is faster is measured with real steps; the result is kept in the
cache folder by processor, cores, tier and size of the weights, and used by
every later load that does not say how many threads it wants.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Generator
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from engine.core.cpu import Machine
from engine.progress import Progress
from engine.runtime.events import Done, Event, Request
from engine.runtime.loop import Loop
from engine.runtime.model import Model, Tuning
from engine.settings import Sampling

__all__ = ["candidates", "recall", "remember", "tune"]

log = logging.getLogger(__name__)

_SECONDS = 10.0
_PROMPT_TOKENS, _ANSWER_TOKENS = 64, 24
_FILE = "threads.json"


def candidates(here: Machine, spare: int = 0) -> tuple[Tuning, ...]:
    """What is worth trying: the default first, then fewer and more threads, each free to move and pinned."""
    usual = here.threads(0, spare)
    logical = max(1, here.most_threads - spare)
    counts = dict.fromkeys([usual, max(1, usual - 1), -(-usual // 2), min(2 * usual, logical)])
    return tuple(Tuning(threads, pinned) for threads in counts for pinned in (False, True))


def tune(
    make: Callable[[Tuning], Model], tunings: tuple[Tuning, ...], *, seconds: float = _SECONDS
) -> Generator[Progress, None, dict[Tuning, float]]:
    """Seconds that a short prompt and answer take with each tuning, the least of its runs; about `seconds` in all.

    The tunings take turns, so that a disturbance hits all alike. One that is twice as slow as the best gets no
    further turn.
    """
    began_s = time.monotonic()
    best: dict[Tuning, float] = {}
    turn = 0
    while turn == 0 or (time.monotonic() - began_s < seconds and turn < 8):
        for number, tuning in enumerate(tunings):
            if turn and (best[tuning] > 2 * min(best.values()) or time.monotonic() - began_s > seconds):
                continue
            yield Progress("measure", turn * len(tunings) + number, 8 * len(tunings), "steps", _words(tuning))
            model = make(tuning)
            try:
                best[tuning] = min(best.get(tuning, math.inf), _seconds(model))
            finally:
                model.release()
        turn += 1
    return best


def _words(tuning: Tuning) -> str:
    return f"{tuning.threads} threads{', pinned' if tuning.pinned else ''}"


def _seconds(model: Model) -> float:
    chance = np.random.default_rng(0)
    allowed = np.setdiff1d(np.arange(model.vocab_size), model.missing_ids)
    took: list[float] = []

    def sink(event: Event) -> None:
        if isinstance(event, Done):
            took.append(event.usage.prefill_s + event.usage.decode_s)

    for _ in range(2):  # the first warms up
        loop = Loop(model)
        prompt = tuple(chance.choice(allowed, _PROMPT_TOKENS).tolist())
        loop.add(Request("measure", prompt, Sampling(temperature=0.0, max_tokens=_ANSWER_TOKENS)), sink)
        while loop.step():
            pass
    return took[-1]


# ---------------------------------------------------------------- what is remembered


def _key(here: Machine, tier: str, weight_bytes: int, spare: int) -> str:
    """Equal for machines and models that behave alike: the same cores and tier, weights of about the same size."""
    cores = [(core.cpus, core.fast, core.node) for core in here.cores]
    size = round(2 * math.log2(max(1, weight_bytes)))
    return sha256(repr((here.name, cores, here.quota, tier, size, spare)).encode()).hexdigest()[:24]


def recall(folder: Path, here: Machine, tier: str, weight_bytes: int, *, spare: int = 0) -> Tuning | None:
    """What `remember` was told for a machine and model like these; None when nothing is known."""
    known = _known(folder).get(_key(here, tier, weight_bytes, spare))
    if not isinstance(known, dict):
        return None
    threads, pinned = known.get("threads"), known.get("pinned")
    if type(threads) is not int or type(pinned) is not bool or not 1 <= threads <= here.most_threads:
        return None
    return Tuning(threads, pinned)


def remember(folder: Path, here: Machine, tier: str, weight_bytes: int, tuning: Tuning, *, spare: int = 0) -> None:
    """Use this tuning from now on.

    Raises:
        OSError: it cannot be written
    """
    known = _known(folder) | {_key(here, tier, weight_bytes, spare): asdict(tuning)}
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{_FILE}.{os.getpid()}"
    new.write_text(json.dumps(known, indent=1), encoding="utf-8")
    new.replace(folder / _FILE)


def _known(folder: Path) -> dict[str, Any]:
    """All that is remembered; a file that cannot be read is none."""
    try:
        known = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read and is ignored: %s", folder / _FILE, error)
        return {}
    return known if isinstance(known, dict) else {}
