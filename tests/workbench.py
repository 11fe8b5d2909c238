"""Runs single operations of the kernels on numpy arrays, and sees what they write where they must not.

Kernels are given addresses and check nothing. So every array here lies between
two strips of known bytes that `run` looks at afterwards, and outputs are NaN
until they are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from engine.core.library import Kernels, prepared_kernels
from engine.core.memory import LINE, aligned
from engine.core.operations import (
    AMX_BLOCKS,
    AMX_COLUMNS,
    STATE,
    STATE_WORDS,
    X_CHUNK,
    X_TOKENS,
    Opcode,
    Program,
    WeightKind,
)
from engine.core.quant import FORMATS, Codes, Layout
from engine.core.team import Team
from engine.progress import finish
from tests import naive

Array = NDArray[Any]
Float32 = NDArray[np.float32]

_STRIP = 4 * LINE
_STRIP_BYTE = 0xA5
_KINDS = {name: WeightKind[name[:2].upper() if name.startswith("q") else name.upper()] for name in FORMATS}


@cache
def packer() -> Kernels:
    """The kernels that pack weights for tests: the best tier's, though all pack alike."""
    return finish(prepared_kernels())


def address(array: Array) -> int:
    """Of the first byte."""
    return int(array.ctypes.data)


def same_bits(a: Array, b: Array) -> bool:
    """Equal in shape, type and every bit: tells 0.0 from -0.0, and one NaN is like itself."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


class Workbench:
    """Teams of one to three members of one tier; `close` when done."""

    def __init__(self, kernels: Kernels) -> None:
        self.tier = kernels.tier
        self._teams = {members: Team(kernels, members) for members in (1, 2, 3)}
        self._rooms: list[NDArray[np.uint8]] = []

    def close(self) -> None:
        """Send the threads home."""
        for team in self._teams.values():
            team.close()

    def array(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        """An array on a cache line, watched until the next `run`: floats NaN, integers of all one bits."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        room = aligned(size + 2 * _STRIP, np.uint8)
        room[:_STRIP] = room[_STRIP + size :] = _STRIP_BYTE
        room[_STRIP : _STRIP + size] = 0xFF
        self._rooms.append(room)
        return room[_STRIP : _STRIP + size].view(kind).reshape(shape)

    def copy(self, values: Array) -> Array:
        """The same numbers in a watched array."""
        out = self.array(values.shape, values.dtype)
        out[:] = values
        return out

    def run(
        self, program: Program, tokens: int, *, members: int = 1, scratch_bytes: int = 0, **state: int | Array
    ) -> None:
        """Execute the program for a batch of `tokens` rows.

        state: other words of `operations.STATE`; an array stands for its address
        """
        words = np.zeros(STATE_WORDS, np.int64)
        each = -(-max(scratch_bytes, LINE) // LINE) * LINE
        scratch = self.array((members, each), np.uint8)
        known: dict[str, int | Array] = {"tokens": tokens, "scratch": scratch, "scratch_bytes": each}
        for name, value in (known | state).items():
            words[STATE.index(name)] = value if isinstance(value, int) else address(value)
        assert self._teams[members].run(program.table(), words)
        rooms, self._rooms = self._rooms, []
        for room in rooms:
            assert (room[:_STRIP] == _STRIP_BYTE).all(), "written before the beginning of an array"
            assert (room[-_STRIP:] == _STRIP_BYTE).all(), "written beyond the end of an array"


@dataclass(frozen=True, eq=False)
class Activations:
    """Rows of activations as a product reads them.

    tiles    int8 (tiles of 16 tokens, chunks of 64 columns, X_CHUNK), or float32 (rows, columns) when span is 0
    scales   float32 (spans, tokens)
    sums     int32 (words, tokens)
    """

    span: int
    group: int
    columns: int
    tiles: Array
    scales: Float32
    sums: Array

    @classmethod
    def room(cls, bench: Workbench, rows: int, layout: Layout) -> Activations:
        """Room that nothing was written to, for what meets weights of this layout; strides are wider than the rows."""
        span, group, columns = layout.span, layout.group, layout.padded_cols
        if not span:
            tiles = bench.array((rows, columns + 64), np.float32)[:, :columns]
            return cls(0, 0, columns, tiles, bench.array((1, 1)), bench.array((1, 1), np.int32))
        tokens, spans = -(-rows // X_TOKENS) * X_TOKENS, -(-columns // span)
        tiles = bench.array((tokens // X_TOKENS, columns // 64, X_CHUNK), np.int8)
        words = spans * max(span // group // 2, 1)
        return cls(
            span,
            group,
            columns,
            tiles,
            bench.array((spans, tokens + 3))[:, :tokens],
            bench.array((words, tokens + 3), np.int32)[:, :tokens],
        )

    @property
    def codes(self) -> NDArray[np.int8]:
        """int8 (tokens, columns)."""
        tiles, chunks, _ = self.tiles.shape
        lines = self.tiles[:, :, : 64 * X_TOKENS].reshape(tiles, chunks, X_TOKENS, 64)
        return lines.transpose(0, 2, 1, 3).reshape(tiles * X_TOKENS, chunks * 64)

    def sums_of(self, row: int) -> NDArray[np.int64]:
        """Minus the sums of a row's codes by group, as far as the columns reach."""
        words = np.ascontiguousarray(self.sums[:, row])
        halves = words if self.span == self.group else words.view("<i2")
        return halves[: self.columns // self.group].astype(np.int64)

    def fields(self) -> dict[str, int]:
        """The fields of an operation that writes or reads them."""
        return {
            "x_span": self.span,
            "x_group": self.group,
            "x_codes": address(self.tiles),
            "x_stride": self.tiles.strides[0],
            "x_scales": address(self.scales),
            "x_sums": address(self.sums),
            "x_scale_stride": self.scales.strides[0],
            "x_columns": self.columns,
        }


@dataclass(frozen=True, eq=False)
class Weights:
    """A packed matrix, and what it means."""

    layout: Layout
    buffer: NDArray[np.uint8]
    exponent: int

    @classmethod
    def packed(cls, w: Float32, format_name: str, group: int, kernels: Kernels) -> Weights:
        """As conversion packs them."""
        made = FORMATS[format_name].pack(w, group, kernels)
        return cls(FORMATS[format_name].layout(*w.shape, group), made.buffer, made.exponent)

    @classmethod
    def of_codes(cls, codes: Codes, format_name: str, group: int, exponent: int = 0) -> Weights:
        """Of codes, scales, multipliers and offsets chosen by hand."""
        layout = FORMATS[format_name].layout(*codes.codes.shape, group)
        buffer = layout.empty()
        layout.pack_codes(codes, 0, buffer)
        return cls(layout, buffer, exponent)

    @property
    def quantised(self) -> naive.Quantised:
        """The twin of an integer format."""
        return naive.Quantised(self.layout.codes(self.buffer), self.exponent, self.layout.group, self.layout.span)

    @property
    def dense(self) -> Array:
        """What they mean: float64 (rows, cols) of an integer format, else float32."""
        if self.layout.group:
            return self.quantised.weights()
        return self.layout.unpack(self.buffer, self.exponent)

    def canonical(self, xs: Float32) -> Float32:
        """The float32 (tokens, rows) that every kernel returns, without bias and the like."""
        if self.layout.group:
            return np.stack([naive.canonical_quantised_matvec(self.quantised, x) for x in xs])
        return np.stack([naive.canonical_float_matvec(self.dense, x) for x in xs])

    def fields(self, scale: float = 1.0) -> dict[str, int | float]:
        """The fields of an operation that reads them."""
        offsets = {part.name: part.offset for part in self.layout.parts}
        start = address(self.buffer)
        return {
            "kind": int(_KINDS[self.layout.format.name]),
            "panels": start,
            "meta": start + offsets.get("meta", 0),
            "blocks": self.layout.padded_rows // 16,
            "columns": self.layout.padded_cols,
            "group": self.layout.group,
            "span": self.layout.span,
            "factor": 2.0**self.exponent * scale,
        }


def product_scratch_bytes(tokens: int) -> int:
    """What a product on AMX tiles keeps: tile shapes, two tiles of products, unpacked blocks, sums that wait."""
    return 64 + 2048 + AMX_BLOCKS * (16 * AMX_COLUMNS + 64 * tokens)


def product(bench: Workbench, weights: Weights, xs: Float32, *, members: int = 1, **fields: Any) -> Float32:
    """weights @ x for each row of xs (tokens, cols), by the operations QUANTISE and MATMUL: (tokens, rows).

    fields: of MATMUL, to give other values to: bias, out (an array), add, factor
    """
    tokens, cols = xs.shape
    x = Activations.room(bench, tokens, weights.layout)
    out = fields.pop("out", None)
    if out is None:
        out = bench.array((tokens, weights.layout.padded_rows))
    source = bench.copy(xs)
    known = {"bias": 0, "add": 0, "rows": 0, "activates": 0} | weights.fields() | x.fields()
    program = Program()
    program.add(
        Opcode.QUANTISE,
        **x.fields(),
        rows=0,
        source=address(source),
        source_stride=source.strides[0],
        width=cols,
    )
    program.add(Opcode.MATMUL, **(known | {"out": address(out), "out_stride": out.strides[0]} | fields))
    bench.run(program, tokens, members=members, scratch_bytes=product_scratch_bytes(tokens))
    return out[:, : weights.layout.rows]
