"""The block of int64 words through which a thread team is told what to do; see kernels/team.py."""

from __future__ import annotations

from typing import Final

__all__ = ["CONTROL", "CONTROL_WORDS", "DISMISS", "LEAD", "WORK"]

_LINE = 8  # words of a cache line

CONTROL: Final[dict[str, int]] = (
    {
        name: index * _LINE
        for index, name in enumerate(
            ("arrived", "generation", "barrier_sleepers", "sequence", "sleepers", "command", "cancel", "stop_at")
        )
    }
    | {
        name: 8 * _LINE + index
        for index, name in enumerate(("program", "operations", "state", "members", "wait", "wake", "system", "number"))
    }
    | {"rounding": 9 * _LINE, "expected": 10 * _LINE}
)
"""Word index of each field. Those of the first line group are written by several threads and
have a cache line each; the others are set once, or by the leader between steps; `expected` is
one line per member."""

CONTROL_WORDS: Final = 10 * _LINE + 256 * _LINE

LEAD: Final = 0
WORK: Final = 1
DISMISS: Final = 2
"""What a call of the entry point `enter` is for."""
