"""One report of long work; everything that yields progress yields this.

Long work is a generator: each `Progress` is a place to stop, and closing the
generator stops it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, TypeVar

__all__ = ["Progress", "Stage", "finish"]

T = TypeVar("T")

Stage = Literal["compile", "load", "queue", "prefill", "decode", "convert", "verify", "measure", "batch", "copy"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far long work has come. `done` of `total` in `unit`; total 0 when unknown."""

    stage: Stage
    done: int
    total: int
    unit: Literal["tokens", "bytes", "layers", "steps", "requests"] = "steps"
    note: str = ""
    request_id: str | None = None
    eta_s: float | None = None


def finish(work: Generator[Progress, None, T]) -> T:
    """Do the work to its end and return its result; nobody watches."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
