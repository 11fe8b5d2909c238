"""One report of long work; everything that yields progress yields this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Progress", "Stage"]

Stage = Literal["compile", "load", "queue", "prefill", "convert", "verify", "measure"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far long work has come. `done` of `total` in `unit`; total 0 when unknown."""

    stage: Stage
    done: int
    total: int
    unit: Literal["tokens", "bytes", "layers", "steps"] = "steps"
    note: str = ""
    request_id: str | None = None
    eta_s: float | None = None
