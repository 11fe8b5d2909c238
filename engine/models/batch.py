"""What one step computes, as a value; the border between who runs and what a model is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Batch"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of several sequences; those of one are consecutive and ascend in position.

    ids          int32 (tokens,)
    positions    int32 (tokens,)
    sequence_of  int32 (tokens,)            row of `tables` and `lengths`, ascending
    tables       int32 (sequences, pages)   page that holds positions 64 i ... 64 i + 63; entries
                                            beyond the sequence's last page mean nothing
    lengths      int32 (sequences,)         positions that have keys and values after this step
    wanted       int32 (rows,)              tokens whose logits are wanted, ascending
    memories     int32 (sequences, 2)       of models with recurrent layers: which memory tells what a sequence was
                                            before this step (-1: nothing), and which, another, is to tell what it
                                            is afterwards
    """

    ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    sequence_of: npt.NDArray[np.int32]
    tables: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    wanted: npt.NDArray[np.int32]
    memories: npt.NDArray[np.int32] | None = None
