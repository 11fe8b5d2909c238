"""Watches the memory while the server or a batch job runs: a curve in the log, a warning before anything dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import psutil

from engine import api

__all__ = ["watch_memory"]

log = logging.getLogger(__name__)

_LOOK_S = 2.0
_CURVE_S = 60.0
_FULL = 0.90
_RELIEVED = 0.85  # below this the next warning is due again


async def watch_memory(
    warn: Callable[[str], None],
    *,
    memory: Callable[[], tuple[int, int]] = api.memory,
    look_s: float = _LOOK_S,
    curve_s: float = _CURVE_S,
) -> None:
    """Until cancelled: a line of log each `curve_s`, `warn(sentence)` whenever more than 90 % come into use."""
    process = psutil.Process()
    warned, next_line = False, 0.0
    clock = asyncio.get_running_loop().time
    while True:
        total, free = memory()
        resident = process.memory_info().rss
        share = 1 - free / total
        if clock() >= next_line:
            next_line = clock() + curve_s
            log.info("memory: %.0f MB here, %.0f %% of %.1f GB in use", resident / 1e6, 100 * share, total / 1e9)
        if share >= _FULL and not warned:
            warned = True
            sentence = (
                f"{100 * share:.0f} % of the memory are in use ({free / 1e9:.1f} GB free); "
                "close other programs, or use a smaller model or context"
            )
            log.warning("%s", sentence)
            warn(sentence)
        elif share < _RELIEVED:
            warned = False
        await asyncio.sleep(look_s)
