"""The table that a decoder is lowered to: operation rows, their fields, the state of one step.

Plain numbers shared by the kernels (which read them by address) and the
lowering (which writes them). An operation is `ROW_WORDS` int64 words: the
opcode, then its fields in the order of `FIELDS`. Floats travel as the bits of
a float64. Addresses are absolute.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "AMX_BLOCKS",
    "AMX_COLUMNS",
    "AMX_UNIT",
    "CHUNK_TOKENS",
    "FIELDS",
    "KV_F16",
    "KV_F32",
    "KV_INT8",
    "PACK",
    "PAGE_TOKENS",
    "PARTIAL_HEAD",
    "ROW_WORDS",
    "STATE",
    "STATE_WORDS",
    "TILE_ROWS",
    "X_CHUNK",
    "X_TOKENS",
    "Activation",
    "Norm",
    "Opcode",
    "Program",
    "Routing",
    "RowSet",
    "WeightKind",
    "float_bits",
    "pack_job",
    "pack_scratch_bytes",
]

ROW_WORDS: Final = 40
PAGE_TOKENS: Final = 64
"""Positions that one page of the KV cache holds."""
CHUNK_TOKENS: Final = 512
"""Attention folds its result in runs of this many positions; part of the canonical arithmetic."""
PARTIAL_HEAD: Final = 16
"""Floats before the output of a partial result: maximum, sum, then room to the next cache line."""
X_TOKENS: Final = 16
"""Tokens of a tile of quantised activations."""
X_CHUNK: Final = 1088
"""Bytes from 64 columns of such a tile to the next: a line more than they need, lest all fall into few cache sets."""
AMX_BLOCKS: Final = 8
AMX_COLUMNS: Final = 1024
"""Blocks of rows, and columns of them, that products on AMX tiles work on at a time."""
AMX_UNIT: Final = 16 * AMX_BLOCKS
"""Columns of gates, and of ups, that go through the activation together: whole spans of what they are input to."""
TILE_ROWS: Final = 64
"""Query rows (token, head) that share a sweep over the pages."""


class Opcode(IntEnum):
    """What an operation does; the kernel of that name does it."""

    EMBED = 1
    ANGLES = 2
    NORM = 3
    QUANTISE = 4
    ACTIVATE = 5
    MATMUL = 6
    ROTATE = 7
    ATTEND = 8
    MERGE = 9
    PREPARE = 10
    RESIDUAL = 11
    SOFTCAP = 12
    ROUTE = 13
    DISPATCH = 14
    EXPERTS = 15
    COMBINE = 16
    MOVE = 17
    CONVOLVE = 18
    DECAY = 19
    DELTA = 20
    GATE = 21


class WeightKind(IntEnum):
    """How a kernel reads packed weights (`quant.FORMATS`)."""

    Q4 = 0
    Q6 = 1
    Q8 = 2
    F16 = 3
    BF16 = 4
    F32 = 5


class RowSet(IntEnum):
    """Which rows of the batch an operation works on."""

    TOKENS = 0
    WANTED = 1
    ROUTED = 2
    """Pairs of a token and an expert chosen for it, by expert."""
    GATHERED = 3
    """The same, from a buffer with a row for each token."""


class Activation(IntEnum):
    """The non-linearity of a feed-forward block."""

    SILU = 0
    GELU_TANH = 1
    GELU = 2
    RELU2 = 3
    SWIGLU_CLAMPED = 4


class Routing(IntEnum):
    """How a router's logits become weights of experts."""

    SOFTMAX = 0
    SIGMOID = 1
    CHOSEN = 2


class Norm(IntEnum):
    """What is done to a row, or to a head of it, before its weights are applied."""

    NONE = 0
    RMS = 1
    LAYER = 2


_WEIGHTS = ("kind", "panels", "meta", "blocks", "columns", "group", "span", "factor")
# Where activations go or come from. With a span of 0: float32 rows, `x_stride` bytes apart. Else int8 in tiles of
# 16 tokens: `x_stride` bytes a tile, within it a chunk of `X_CHUNK` bytes for every 64 columns, 64 bytes a token;
# scales float32 [span][token] and sums int32 [word][token], rows `x_scale_stride` bytes apart. A word of sums holds
# minus the sum of the codes of two groups as int16, of one group as int32 when a span is one group.
_ACTIVATIONS = ("x_span", "x_group", "x_codes", "x_stride", "x_scales", "x_sums", "x_scale_stride", "x_columns")

_MATMUL = (*_ACTIVATIONS, "rows", *_WEIGHTS, "bias", "out", "out_stride", "add", "activates")
_NORM = ("norm", "weight", "bias", "epsilon")

FIELDS: Final[dict[Opcode, tuple[str, ...]]] = {
    Opcode.EMBED: (*_WEIGHTS, "out", "out_stride", "width", "scale", "by_position"),
    Opcode.ANGLES: ("frequencies", "count", "out", "attention_factor"),
    Opcode.NORM: (*_ACTIVATIONS, "rows", "source", "source_stride", "width", *_NORM),
    Opcode.QUANTISE: (*_ACTIVATIONS, "rows", "source", "source_stride", "width"),
    Opcode.ACTIVATE: (*_ACTIVATIONS, "rows", "source", "source_stride", "width", "function", "gated", "from_tiles"),
    Opcode.MATMUL: _MATMUL,
    Opcode.ROTATE: (
        "source",
        "source_stride",
        "heads",
        "kv_heads",
        "head_dim",
        "rotary_dim",
        "interleaved",
        "angles",
        "q_norm",
        "k_norm",
        "norm_last",
        "epsilon",
        "balance",
        "scale",
        "kv_kind",
        "kv_group",
        "pool",
        "page_bytes",
        "head_bytes",
        "queries",
        "query_scales",
    ),
    Opcode.ATTEND: (
        "heads",
        "kv_heads",
        "head_dim",
        "window",
        "kv_kind",
        "kv_group",
        "pool",
        "page_bytes",
        "head_bytes",
        "queries",
        "query_scales",
        "out",
        "out_stride",
        "partials",
        "partial_chunks",
        "sinks",
        "softcap",
        "slopes",
    ),
    Opcode.MERGE: ("heads", "head_dim", "window", "out", "out_stride", "partials", "partial_chunks", "sinks"),
    Opcode.PREPARE: (
        "source",
        "source_stride",
        "heads",
        "kv_heads",
        "head_dim",
        "clip",
        "norm",
        "run",
        "q_norm",
        "k_norm",
        "epsilon",
        "growth",
        "growth_period",
    ),
    Opcode.RESIDUAL: ("source", "source_stride", "width", *_NORM, "out", "out_stride"),
    Opcode.SOFTCAP: ("source", "source_stride", "width", "size"),
    Opcode.ROUTE: (
        "source",
        "source_stride",
        "count",
        "chosen",
        "routing",
        "normalised",
        "scale",
        "groups",
        "chosen_groups",
        "two_of_group",
        "correction",
        "experts",
        "weights",
    ),
    Opcode.DISPATCH: ("count", "chosen", "experts", "places", "firsts"),
    # The fields of MATMUL, of the first expert; how far apart experts are, and where the pairs of each begin.
    Opcode.EXPERTS: (*_MATMUL, "count", "firsts", "panels_step", "meta_step", "bias_step"),
    Opcode.COMBINE: (
        "source",
        "source_stride",
        "width",
        "chosen",
        "weights",
        "places",
        "shared",
        "shared_stride",
        "shared_gate",
        "shared_gate_stride",
        "scale",
        "out",
        "out_stride",
    ),
    Opcode.MOVE: (
        "source",
        "source_stride",
        "source_step",
        "out",
        "out_stride",
        "out_step",
        "count",
        "width",
        "scale",
    ),
    Opcode.CONVOLVE: (
        "source",
        "source_stride",
        "width",
        "taps",
        "weights",
        "bias",
        "gated",
        "out",
        "out_stride",
        "place",
    ),
    Opcode.DECAY: ("source", "source_stride", "heads", "rates", "bias", "out", "out_stride", "out_step"),
    Opcode.DELTA: (
        "source",
        "source_stride",
        "key_heads",
        "heads",
        "key_dim",
        "value_dim",
        "gates",
        "gates_stride",
        "gates_step",
        "out",
        "out_stride",
        "place",
    ),
    Opcode.GATE: ("source", "source_stride", "heads", "head_dim", "weight", "epsilon", "gates", "gates_stride", "silu"),
}

STATE: Final = (
    "tokens",
    "ids",
    "positions",
    "wanted",
    "wanted_rows",
    "segments",
    "segment_table",
    "token_tables",
    "scratch",
    "scratch_bytes",
    "routed",
    "routed_tokens",
    "memories",
)
"""Words of the step's state: counts and addresses.

ids, positions  int32 (tokens,)
wanted_rows     int32 (wanted,)        rows whose logits are computed
segment_table   int64 (segments, 4)    first row, rows, first position, address of the int32 page table
token_tables    int64 (tokens,)        address of the int32 page table of the token's sequence
routed_tokens   int32 (routed,)        token of each pair of a token and an expert, by expert
memories        int64 (segments, 2)    where recurrent layers find what a sequence was before this step, 0 for nothing,
                                       and where they leave what it is after it: never the same place, so that a step
                                       may be computed again
scratch         scratch_bytes of working memory for each thread, one after the other
"""

STATE_WORDS: Final = 16
KV_INT8: Final = 0
KV_F16: Final = 1
KV_F32: Final = 2


def float_bits(value: float) -> int:
    """A float as the int64 that carries its float64 bits."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


PACK: Final = (
    "source",
    "columns",
    "group",
    "span",
    "steps",
    "most",
    "factor",
    "importance",
    "codes",
    "meta",
    "scratch",
)
"""Words of a call of the entry point `pack`: addresses and sizes of what is quantised.

source      float32 (16 * blocks, columns), C-contiguous, multiplied by `factor` before anything else
importance  float32 (columns,)   weight of each column's squared error
codes, meta of the format's parts, first block first
scratch     `pack_scratch_bytes` of working memory
"""


def pack_job(**values: int) -> NDArray[np.int64]:
    """int64 (words of PACK,); every field must be given."""
    if set(values) != set(PACK):
        message = f"packing wants the fields {PACK}, got {tuple(values)}"
        raise ValueError(message)
    return np.array([values[name] for name in PACK], np.int64)


def pack_scratch_bytes(span: int) -> int:
    """The span's weights as panels of 16 rows, twice, and the best found of each group, twice."""
    return 2 * 64 * span + 4 * 64 * (span // 32)


class Program:
    """Operations in order, written once at load, executed at every step."""

    def __init__(self) -> None:
        self._rows: list[list[int]] = []

    def add(self, opcode: Opcode, **values: int | float) -> None:  # noqa: PYI041 - the two travel differently
        """Append an operation; every field must be given, floats are converted."""
        names = FIELDS[opcode]
        if set(values) != set(names):
            message = f"{opcode.name} wants the fields {names}, got {tuple(values)}"
            raise ValueError(message)
        row = [int(opcode)]
        row += [float_bits(value) if isinstance(value, float) else int(value) for value in (values[n] for n in names)]
        self._rows.append(row + [0] * (ROW_WORDS - len(row)))

    def table(self) -> NDArray[np.int64]:
        """int64 (operations, ROW_WORDS)."""
        return np.array(self._rows, np.int64).reshape(-1, ROW_WORDS)

    def __len__(self) -> int:
        return len(self._rows)
