"""Where the time of a step goes: every operation of the model, timed on its own."""

from __future__ import annotations

from collections.abc import Generator
from statistics import median
from typing import Any

import numpy as np

from engine.models.batch import Batch
from engine.progress import Progress
from engine.runtime.memories import Alternation
from engine.runtime.model import Model

__all__ = ["profile"]

_ROUNDS = 5


def profile(
    model: Model, *, depth: int, prompt_tokens: int
) -> Generator[Progress, None, dict[str, list[dict[str, Any]]]]:
    """{"decode": rows, "prefill": rows} with rows {"operation", "layer", "seconds"}, medians, in the order of a step.

    decode is one token with `depth` before it; prefill is a slice of a prompt, as long as a step takes. Each operation
    is entered from Python and waits for all threads: some microseconds more than in a step.
    """
    slice_tokens = min(prompt_tokens, model.batch_tokens)
    size = model.pages.layout.tokens
    pages = [model.pages.take() for _ in range(-(-max(depth + 1, slice_tokens) // size))]
    memory = Alternation(model.memories)
    try:
        table = np.array([pages], np.int32)
        found: dict[str, list[dict[str, Any]]] = {}
        for done, (name, start, count) in enumerate((("decode", depth, 1), ("prefill", 0, slice_tokens))):
            yield Progress("measure", done, 2, "steps", f"operations of {name}")
            for begin in range(0, start, model.batch_tokens):  # what the token looks back at
                model.decoder.forward(_batch(table, begin, min(model.batch_tokens, start - begin), memory))
                memory.stepped()
            rounds = [model.decoder.timed(_batch(table, start, count, memory)) for _ in range(_ROUNDS)]
            memory.begin()
            found[name] = [
                {"operation": same[0].name, "layer": same[0].layer, "seconds": median(one.seconds for one in same)}
                for same in zip(*rounds, strict=True)
            ]
        return found
    finally:
        memory.release()
        for page in pages:
            model.pages.release(page)


def _batch(table: np.ndarray[Any, np.dtype[np.int32]], start: int, count: int, memory: Alternation) -> Batch:
    return Batch(
        ids=np.zeros(count, np.int32),
        positions=np.arange(start, start + count, dtype=np.int32),
        sequence_of=np.zeros(count, np.int32),
        tables=table,
        lengths=np.array([start + count], np.int32),
        wanted=np.array([count - 1], np.int32),
        memories=memory.step(),
    )
