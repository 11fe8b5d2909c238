"""The block of int64 words through which a thread team is told what to do; see kernels/team.py."""

from __future__ import annotations

from typing import Final

__all__ = ["CONTROL", "CONTROL_WORDS", "DISMISS", "LEAD", "MOST_MEMBERS", "STEP_UNIT", "WORK"]

_LINE = 8  # words of a cache line

_SHARED = (
    "arrived",
    "generation",
    "taken",
    "barrier_sleepers",
    "sequence",
    "sleepers",
    "rest",
    "command",
    "cancel",
    "stop_at",
)
_SINGLE = ("program", "operations", "state", "active", "wait", "wake", "system", "number")

CONTROL: Final[dict[str, int]] = (
    {name: index * _LINE for index, name in enumerate(_SHARED)}
    | {name: len(_SHARED) * _LINE + index for index, name in enumerate(_SINGLE)}
    | {"rounding": (len(_SHARED) + 1) * _LINE, "expected": (len(_SHARED) + 2) * _LINE}
)
"""Word index of each field. Those of the first line group are written by several threads and
have a cache line each; the others are set once, or by the leader between steps; `expected` is
one line per member.

taken: how many units of the present operation's common part have been taken.
sequence: STEP_UNIT times the number of the step, plus how many members take part in it."""

MOST_MEMBERS: Final = 256
STEP_UNIT: Final = 512
CONTROL_WORDS: Final = CONTROL["expected"] + MOST_MEMBERS * _LINE

LEAD: Final = 0
WORK: Final = 1
DISMISS: Final = 2
"""What a call of the entry point `enter` is for."""
