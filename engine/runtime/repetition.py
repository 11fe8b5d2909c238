"""Notices an answer that goes round in circles."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["repeats"]

_LEAST_ROUNDS = 4


def repeats(ids: npt.NDArray[np.int32], limit: int) -> bool:
    """Whether the last `limit` tokens are one piece, said four times or more (the last time perhaps in part)."""
    if not 0 < limit <= ids.size:
        return False
    tail = ids[ids.size - limit :]
    # A piece of length p repeats when every token equals the one p before it; the last token tells which p can be.
    for period in (limit - 1 - np.flatnonzero(tail[:-1] == tail[-1])[::-1]).tolist():
        if period * _LEAST_ROUNDS > limit:
            return False
        if np.array_equal(tail[period:], tail[:-period]):
            return True
    return False
