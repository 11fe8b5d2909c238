"""The weight formats: what their bytes mean, how weights get in and out, what they cost.

Knows nothing of files or models. A matrix W of float32 (rows, cols) becomes ONE
byte buffer whose layout every kernel reads:

    rows are padded to 16 and cut into blocks of 16; cols are padded to the group
    and to 64 (integer codes) or to 16 (f16, bf16, f32). `span` columns share one
    float16 scale, `group` columns share the small integers beside it.

    q4   codes  uint8 [block][col/8][64]    byte 4r+i: row r; low nibble column
                                            8j+i, high nibble column 8j+4+i
    q6   codes  uint8 [block][col/16][192]  two such lines of the low four bits, then
                                            byte 4r+i: high two bits of columns 16j+4k+i
                                            at bit 2k
         meta   uint8 [block][span][32 + 24 span/group]
                16 x f16 scale; then for each group 16 multipliers less one, of 4 bits
                (byte i: row 2i low, 2i+1 high); then for each two groups 16 x 2 offsets
                (for a single group 16)
                W = (code * multiplier - offset) * scale * 2**exponent
    q8   codes  int8  [block][col/4][64]    byte 4r+i: row r, column 4j+i; -127..127
         meta   f16   [block][span][16]     W = code * scale * 2**exponent
    f16, bf16, f32
         values       [block][col][16]      W = value

Two levels of scales let products sum integers over a whole span: code * multiplier
- offset fits int8, so 128 columns cost one float step, and the multiplier is four
bits where a float16 would be sixteen. `q4g` has the bytes of q4 with a span of one
group: what was quantised elsewhere with a float scale per group fits it exactly.

Each part begins on a multiple of 64 bytes. `exponent` is one integer for the
whole tensor: the power of two that keeps float16 scales from overflowing and
from vanishing, whatever the size of the weights.

A big tensor streams: choose the exponent from the largest |W| (`magnitude`,
`Format.exponent_for`), then pack slices of whole blocks into their place with
`Layout.pack_rows`; slices are independent of each other, so threads may share
the work. The bytes depend on the weights alone, never on the slicing or the CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import frexp
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from engine.core.memory import aligned
from engine.core.operations import float_bits, pack_job, pack_scratch_bytes
from engine.errors import InputError

if TYPE_CHECKING:
    from engine.core.library import Kernels

__all__ = ["ALIGNMENT", "BLOCK_ROWS", "FORMATS", "Codes", "Format", "Layout", "Packed", "Part", "magnitude"]

BLOCK_ROWS = 16
ALIGNMENT = 64
_GROUPS = (32, 64, 128, 256)
_SPAN = 128
# The tile unit takes 64 columns of int8 at a time.
_CODE_COLUMNS = 64
# Elements worked on at once: float32 temporaries then stay in the L2 cache.
_CHUNK_ELEMENTS = 1 << 17

Array = NDArray[Any]
Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class Packed(NamedTuple):
    """A packed matrix: `buffer` uint8 (Layout.bytes,), begins on a multiple of 64 bytes."""

    buffer: Bytes
    exponent: int


class Codes(NamedTuple):
    """A quantised matrix before packing, row-major and unpadded.

    codes        uint8 (rows, cols), 0..15 or 0..63; q8 int8 (rows, cols) -127..127
    scales       float16 (rows, ceil(cols / span)), finite, of any sign
    multipliers  uint8 (rows, ceil(cols / group)), 1..16 (q6: 1..4); q8 None
    offsets      uint8, shape of multipliers, 0..128 and such that code * multiplier - offset <= 127; q8 None
    """

    codes: Array
    scales: NDArray[np.float16]
    multipliers: Bytes | None = None
    offsets: Bytes | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Where one part lies in the packed buffer; shape and dtype as in the module's table."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def bytes(self) -> int:
        """Bytes without the padding that may follow."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


def magnitude(weights: Float32) -> float:
    """The largest |weight|, 0.0 when there are none.

    Raises:
        InputError: a weight is not a finite number
    """
    if weights.size == 0:
        return 0.0
    largest = max(float(weights.max()), -float(weights.min()))
    if not np.isfinite(largest):
        raise InputError("a weight is not a finite number (NaN or infinity), so the tensor cannot be packed")
    return abs(largest)


@dataclass(frozen=True)
class Format(ABC):
    """One way to store weights; the rows of `FORMATS`.

    Attributes:
        name: as in manifests and on the command line
        groups: allowed numbers of columns that share a scale; (0,) for formats
            without scales
    """

    name: str
    groups: tuple[int, ...]

    def layout(self, rows: int, cols: int, group: int) -> Layout:
        """The layout of one matrix.

        Raises:
            InputError: the format has no such group, or a side is not positive
        """
        if group not in self.groups:
            allowed = ", ".join(map(str, self.groups))
            raise InputError(f"format {self.name} has no group size {group}; it has {allowed}")
        if rows < 1 or cols < 1:
            raise InputError(f"a matrix of {rows} x {cols} weights cannot be packed")
        return Layout(self, rows, cols, group)

    def group_for(self, wanted: int) -> int:
        """`wanted`, or the nearest size that the format has; 0 for a format without groups."""
        return min(self.groups, key=lambda group: abs(group - wanted))

    def span_for(self, group: int) -> int:
        """Columns that share a float16 scale, and whose activations share one; 0 without scales."""
        return group

    @property
    def steps(self) -> int:
        """The largest code of formats whose codes, from 0 on, are searched for; 0 for others."""
        return 0

    def padded(self, rows: int, cols: int, group: int) -> tuple[int, int]:
        """(rows, cols) as stored."""
        return _round_up(rows, BLOCK_ROWS), _round_up(cols, max(group, _CODE_COLUMNS) if group else BLOCK_ROWS)

    def packed_bytes(self, rows: int, cols: int, group: int) -> int:
        """Bytes of the packed buffer."""
        return self.layout(rows, cols, group).bytes

    def pack(self, weights: Float32, group: int, kernels: Kernels) -> Packed:
        """Pack a whole matrix, float32 (rows, cols), by the compiled search of any tier.

        Raises:
            InputError: a weight is not finite or does not fit the format
        """
        rows, cols = weights.shape
        layout = self.layout(rows, cols, group)
        exponent = self.exponent_for(magnitude(weights))
        buffer = layout.empty()
        layout.pack_rows(weights, 0, buffer, exponent, kernels)
        return Packed(buffer, exponent)

    def unpack(self, buffer: Bytes, exponent: int, rows: int, cols: int, group: int) -> Float32:
        """The weights a packed buffer stands for, float32 (rows, cols)."""
        return self.layout(rows, cols, group).unpack(buffer, exponent)

    @abstractmethod
    def bits_per_weight(self, group: int) -> float:
        """Bits one weight costs in whole spans, scales included, padding not."""

    @abstractmethod
    def exponent_for(self, largest: float) -> int:
        """The exponent for a tensor whose largest |weight| this is."""

    @abstractmethod
    def parts(self, rows: int, cols: int, group: int) -> tuple[Part, ...]:
        """The parts of the packed buffer for padded rows and cols."""

    @abstractmethod
    def pack_blocks(  # noqa: PLR0917 - what, how, to where
        self,
        weights: Float32,
        group: int,
        exponent: int,
        parts: dict[str, Array],
        kernels: Kernels,
        importance: Float32,
    ) -> None:
        """Pack padded rows (of whole blocks, C-contiguous) into views of their place in the parts.

        importance: float32 (padded cols,), 1 for padding
        """

    @abstractmethod
    def unpack_blocks(self, parts: dict[str, Array], group: int, exponent: int) -> Float32:
        """The inverse, float32 (16 * blocks, padded cols)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the weights of one matrix lie in its packed buffer. Make it with `Format.layout`."""

    format: Format
    rows: int
    cols: int
    group: int

    @property
    def span(self) -> int:
        """Columns that share a float16 scale; 0 without scales."""
        return self.format.span_for(self.group)

    @property
    def padded_rows(self) -> int:
        """Rows as stored, a multiple of 16."""
        return self.format.padded(self.rows, self.cols, self.group)[0]

    @property
    def padded_cols(self) -> int:
        """Columns as stored, a multiple of the group or of 16."""
        return self.format.padded(self.rows, self.cols, self.group)[1]

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts, in the order of their offsets."""
        return self.format.parts(self.padded_rows, self.padded_cols, self.group)

    @property
    def bytes(self) -> int:
        """Size of the packed buffer, a multiple of 64."""
        last = self.parts[-1]
        return _round_up(last.offset + last.bytes, ALIGNMENT)

    def empty(self) -> Bytes:
        """A zeroed buffer of the right size, beginning on a multiple of 64 bytes."""
        return aligned(self.bytes, np.uint8)

    def pack_rows(  # noqa: PLR0917 - what, to where, how
        self,
        weights: Float32,
        first_row: int,
        out: Bytes,
        exponent: int,
        kernels: Kernels,
        importance: Float32 | None = None,
    ) -> None:
        """Pack rows first_row.. of the matrix into their place in `out`.

        weights     float32 (some rows, cols)
        first_row   a multiple of 16; the slice ends on one too, or at the last row
        out         uint8 (bytes,), of which only these rows' blocks are written
        exponent    `format.exponent_for` the largest |weight| of the WHOLE matrix
        importance  float32 (cols,), weight of each column's squared error where a search minimises it; None: all alike

        Raises:
            InputError: a weight is not finite or does not fit the format
        """
        self._check_slice(weights.shape, first_row)
        # Padding counts like a column of zeros: it is to stay 0.
        weighing = np.ones(self.padded_cols, np.float32)
        if importance is not None:
            weighing[: self.cols] = importance
        step = max(BLOCK_ROWS, _CHUNK_ELEMENTS // self.padded_cols // BLOCK_ROWS * BLOCK_ROWS)
        for start in range(0, weights.shape[0], step):
            chunk = weights[start : start + step]
            magnitude(chunk)  # refuses what is not finite
            shape = (_round_up(chunk.shape[0], BLOCK_ROWS), self.padded_cols)
            if chunk.shape != shape or chunk.dtype != np.float32 or not chunk.flags.c_contiguous:
                padded = np.zeros(shape, np.float32)
                padded[: chunk.shape[0], : self.cols] = chunk
                chunk = padded
            place = self._views(out, (first_row + start) // BLOCK_ROWS, shape[0] // BLOCK_ROWS)
            self.format.pack_blocks(chunk, self.group, exponent, place, kernels, weighing)

    def pack_codes(self, codes: Codes, first_row: int, out: Bytes) -> None:
        """Pack codes, scales and zeros made elsewhere, unchanged; slices as for `pack_rows`.

        Raises:
            InputError: the format has no codes, or a value does not fit it
        """
        if not isinstance(self.format, _Integer):
            raise InputError(f"format {self.format.name} holds plain values, not codes")
        self._check_slice(codes.codes.shape, first_row)
        self.format.check(codes)
        rows = _round_up(codes.codes.shape[0], BLOCK_ROWS)
        padded = np.zeros((rows, self.padded_cols), codes.codes.dtype)
        padded[: codes.codes.shape[0], : self.cols] = codes.codes
        place = self._views(out, first_row // BLOCK_ROWS, rows // BLOCK_ROWS)
        spans = -(-self.padded_cols // self.span)
        groups = spans * (self.span // self.group)
        self.format.place(
            Codes(
                padded,
                _padded(codes.scales, (rows, spans), 0),
                None if codes.multipliers is None else _padded(codes.multipliers, (rows, groups), 1),
                None if codes.offsets is None else _padded(codes.offsets, (rows, groups), 0),
            ),
            place,
        )

    def codes(self, buffer: Bytes) -> Codes:
        """What `pack_codes` was given, or `pack_rows` chose; the whole matrix.

        Raises:
            InputError: the format has no codes
        """
        if not isinstance(self.format, _Integer):
            raise InputError(f"format {self.format.name} holds plain values, not codes")
        found = self.format.collect(self._views(buffer, 0, self.padded_rows // BLOCK_ROWS))
        spans, groups = -(-self.cols // self.span), -(-self.cols // self.group)
        return Codes(
            found.codes[: self.rows, : self.cols],
            found.scales[: self.rows, :spans],
            None if found.multipliers is None else found.multipliers[: self.rows, :groups],
            None if found.offsets is None else found.offsets[: self.rows, :groups],
        )

    def unpack(self, buffer: Bytes, exponent: int) -> Float32:
        """The whole matrix, float32 (rows, cols)."""
        return self.unpack_rows(buffer, exponent, 0, self.rows)

    def unpack_rows(self, buffer: Bytes, exponent: int, first_row: int, count: int) -> Float32:
        """Rows first_row .. first_row + count, float32 (count, cols); any row may be first."""
        first_block = first_row // BLOCK_ROWS
        end_block = -(-(first_row + count) // BLOCK_ROWS)
        blocks = self.format.unpack_blocks(
            self._views(buffer, first_block, end_block - first_block), self.group, exponent
        )
        start = first_row - first_block * BLOCK_ROWS
        return np.ascontiguousarray(blocks[start : start + count, : self.cols])

    def _views(self, buffer: Bytes, first_block: int, count: int) -> dict[str, Array]:
        return {
            part.name: buffer[part.offset : part.offset + part.bytes]
            .view(part.dtype)
            .reshape(part.shape)[first_block : first_block + count]
            for part in self.parts
        }

    def _check_slice(self, shape: tuple[int, ...], first_row: int) -> None:
        end = first_row + shape[0]
        if (
            first_row % BLOCK_ROWS
            or end > self.rows
            or (end % BLOCK_ROWS and end != self.rows)
            or shape[1] != self.cols
        ):
            raise ValueError(f"rows {first_row}..{end} of {shape[1]} columns are no slice of {self.rows} x {self.cols}")


@dataclass(frozen=True)
class _Integer(Format):
    """Integer codes and float16 scales.

    A scale is at least 64 times smaller than the largest weight it serves, so the
    exponent may move that weight just below 2**22, and small groups keep scales
    of full precision.
    """

    @override
    def exponent_for(self, largest: float) -> int:
        """The exponent that brings `largest` into [2**21, 2**22).

        At least -126, so that 2**exponent is a normal float32.
        """
        return max(frexp(largest)[1] - 22, -126) if largest else 0

    @abstractmethod
    def check(self, codes: Codes) -> None:
        """Refuse what the format cannot hold.

        Raises:
            InputError: named by kind and value
        """

    @abstractmethod
    def place(self, codes: Codes, parts: dict[str, Array]) -> None:
        """Put padded codes into their place."""

    @abstractmethod
    def collect(self, parts: dict[str, Array]) -> Codes:
        """The inverse of `place`."""

    @override
    def unpack_blocks(self, parts: dict[str, Array], group: int, exponent: int) -> Float32:
        """The integer times the scale is exact in float32; so is the power of two unless the result is below 1e-38."""
        found = self.collect(parts)
        rows, cols = found.codes.shape
        values = found.codes.astype(np.float32)
        if found.multipliers is not None and found.offsets is not None:
            values *= np.repeat(found.multipliers, group, axis=1)[:, :cols]
            values -= np.repeat(found.offsets, group, axis=1)[:, :cols]
        values *= np.repeat(found.scales.astype(np.float32), self.span_for(group), axis=1)[:, :cols]
        values *= np.float32(2.0) ** np.float32(exponent)
        return values.reshape(rows, cols)


@dataclass(frozen=True)
class _TwoLevel(_Integer):
    """Codes of `bits` bits with a multiplier and an offset per group, and a float16 scale per span.

    Promised, for a span of weights: with R the range max(w, 0) - min(w, 0) of a
    group, and S the largest of max(w) / 127, -min(w) / 128 and R / 252 (for 6
    bits; R / 240 for 4) over the span's groups, in a tensor whose largest |w| is
    M >= 2**-100:
        sum of squared errors <= sum over groups of group * E**2
        E = (R / (2 * steps) + S / 2) * (1 + 2**-9) + M * 2**-46
    for steps = 15 (63): half a step of the least multiplier that covers the range,
    a step being less than S longer than an exact one. The offset, an integer, clips
    at most half a unit, no more than half a step. The scale is rounded up, M * 2**-45
    being float16's smallest number. Other choices replace that one only where the
    sum of squares is smaller. A group of zeros is exact.
    Of their root mean square, normally distributed weights lose in groups of 32
    columns 7.3 % (q4; 10.0 % in groups of 256), 7.1 % (q4g) or 2.0 % (q6).

    bits: of one code
    whole: whether the span is one group, as in `q4g`
    """

    bits: int
    whole: bool = False

    @property
    @override
    def steps(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def most(self) -> int:
        """The largest multiplier: code * multiplier must stay below 256."""
        return min(16, 255 // self.steps)

    @override
    def span_for(self, group: int) -> int:
        """128 columns, more for a larger group."""
        return group if self.whole else max(group, _SPAN)

    @override
    def bits_per_weight(self, group: int) -> float:
        """The code's; 12 for each group, 16 for each span."""
        return self.bits + 12 / group + 16 / self.span_for(group)

    @override
    def parts(self, rows: int, cols: int, group: int) -> tuple[Part, ...]:
        """Codes, meta."""
        blocks, span = rows // BLOCK_ROWS, self.span_for(group)
        lines = (cols // 8, 64) if self.bits == 4 else (cols // 16, 192)
        codes = Part("codes", 0, (blocks, *lines), np.dtype(np.uint8))
        meta_shape = (blocks, -(-cols // span), 32 + 24 * (span // group))
        return codes, Part("meta", _round_up(codes.bytes, ALIGNMENT), meta_shape, np.dtype(np.uint8))

    @override
    def pack_blocks(
        self,
        weights: Float32,
        group: int,
        exponent: int,
        parts: dict[str, Array],
        kernels: Kernels,
        importance: Float32,
    ) -> None:
        """Search scales, multipliers and offsets; `kernels/packing.py` says how."""
        rows, cols = weights.shape
        span = self.span_for(group)
        scratch = aligned(pack_scratch_bytes(span), np.uint8)
        job = pack_job(
            source=weights.ctypes.data,
            columns=cols,
            group=group,
            span=span,
            steps=self.steps,
            most=self.most,
            factor=float_bits(2.0**-exponent),
            importance=importance.ctypes.data,
            codes=parts["codes"].ctypes.data,
            meta=parts["meta"].ctypes.data,
            scratch=scratch.ctypes.data,
        )
        kernels.pack(job.ctypes.data, 0, rows // BLOCK_ROWS)

    @override
    def check(self, codes: Codes) -> None:
        """Codes, multipliers and offsets in their ranges, and their weights in int8."""
        if codes.multipliers is None or codes.offsets is None:
            raise InputError(f"format {self.name} needs multipliers and offsets")
        _check_range(self.name, "code", codes.codes, 0, self.steps)
        _check_range(self.name, "multiplier", codes.multipliers, 1, self.most)
        _check_range(self.name, "offset", codes.offsets, 0, 128)
        highest = self.steps * codes.multipliers.astype(np.int64) - codes.offsets
        _check_range(self.name, "largest weight in units of the scale", highest, -128, 127)
        _check_finite(codes.scales)

    @override
    def place(self, codes: Codes, parts: dict[str, Array]) -> None:
        """Interleave 16 rows to lines, and what a span shares to records."""
        assert codes.multipliers is not None
        assert codes.offsets is not None
        rows, cols = codes.codes.shape
        blocks, spans = rows // BLOCK_ROWS, codes.scales.shape[1]
        groups = codes.multipliers.shape[1] // spans
        # Four columns at a time: their nibbles never meet, so uint32 moves are exact on every byte order.
        quads = np.ascontiguousarray(codes.codes, np.uint8).view(np.uint32)
        low = quads & np.uint32(0x0F0F0F0F)
        low = low.reshape(blocks, BLOCK_ROWS, cols // 8, 2).transpose(0, 2, 1, 3)
        lines = low[..., 0] | low[..., 1] << np.uint32(4)  # (blocks, cols / 8, 16)
        out = parts["codes"].view(np.uint32)
        if self.bits == 4:
            out[:] = lines
        else:
            high = (quads >> np.uint32(4)) & np.uint32(0x03030303)
            high = high.reshape(blocks, BLOCK_ROWS, cols // 16, 4).transpose(0, 2, 1, 3)
            joined = high[..., 0] | high[..., 1] << np.uint32(2) | high[..., 2] << np.uint32(4)
            out[..., :32] = lines.reshape(blocks, cols // 16, 32)
            out[..., 32:] = joined | high[..., 3] << np.uint32(6)
        meta = parts["meta"]
        meta[:, :, :32].view(np.float16)[:] = codes.scales.reshape(blocks, BLOCK_ROWS, spans).transpose(0, 2, 1)
        less = (codes.multipliers - 1).reshape(blocks, BLOCK_ROWS // 2, 2, spans, groups)
        nibbles = (less[:, :, 0] | less[:, :, 1] << 4).transpose(0, 2, 3, 1)  # (blocks, spans, groups, 8)
        meta[:, :, 32 : 32 + 8 * groups] = nibbles.reshape(blocks, spans, 8 * groups)
        offsets = codes.offsets.reshape(blocks, BLOCK_ROWS, spans, max(groups // 2, 1), min(groups, 2))
        meta[:, :, 32 + 8 * groups :] = offsets.transpose(0, 2, 3, 1, 4).reshape(blocks, spans, 16 * groups)

    @override
    def collect(self, parts: dict[str, Array]) -> Codes:
        """The inverse of `place`."""
        lines, meta = np.ascontiguousarray(parts["codes"]), parts["meta"]
        blocks = lines.shape[0]
        spans, groups = meta.shape[1], (meta.shape[2] - 32) // 24
        rows = blocks * BLOCK_ROWS
        low = lines[..., : 64 if self.bits == 4 else 128].reshape(blocks, -1, BLOCK_ROWS, 4)
        codes = np.stack([low & 15, low >> 4], axis=2)  # (blocks, cols / 8, 2, 16, 4)
        if self.bits != 4:
            high = (
                lines[..., 128:].reshape(blocks, -1, 1, BLOCK_ROWS, 4)
                >> np.arange(0, 8, 2, dtype=np.uint8)[:, None, None]
            )
            codes |= (high & 3).reshape(codes.shape) << 4
        codes = codes.transpose(0, 3, 1, 2, 4).reshape(rows, -1)
        scales = np.ascontiguousarray(meta[:, :, :32]).view(np.float16).transpose(0, 2, 1).reshape(rows, spans)
        nibbles = meta[:, :, 32 : 32 + 8 * groups].reshape(blocks, spans, groups, 8)
        pairs = np.stack([nibbles & 15, nibbles >> 4], axis=-1).reshape(blocks, spans * groups, BLOCK_ROWS)
        offsets = meta[:, :, 32 + 8 * groups :].reshape(blocks, spans, max(groups // 2, 1), BLOCK_ROWS, min(groups, 2))
        return Codes(
            codes,
            scales,
            pairs.transpose(0, 2, 1).reshape(rows, spans * groups) + np.uint8(1),
            offsets.transpose(0, 3, 1, 2, 4).reshape(rows, spans * groups),
        )


@dataclass(frozen=True)
class _Q8(_Integer):
    """8-bit codes, symmetric; a span is a group.

    Promised, for a group whose largest |w| is m in a tensor whose largest is M:
    every error <= m / 254 * (1 + 2**-9) + M * 2**-45 (half a step; the scale is
    rounded up, so nothing is clipped). Zero is exact.
    """

    @override
    def bits_per_weight(self, group: int) -> float:
        """8 bits, and 16 for each group's scale."""
        return 8 + 16 / group

    @override
    def parts(self, rows: int, cols: int, group: int) -> tuple[Part, ...]:
        """Codes, meta."""
        blocks = rows // BLOCK_ROWS
        codes = Part("codes", 0, (blocks, cols // 4, 64), np.dtype(np.int8))
        meta = Part("meta", _round_up(codes.bytes, ALIGNMENT), (blocks, cols // group, 16), np.dtype(np.float16))
        return codes, meta

    @override
    def pack_blocks(
        self,
        weights: Float32,
        group: int,
        exponent: int,
        parts: dict[str, Array],
        kernels: Kernels,
        importance: Float32,
    ) -> None:
        """The smallest scale that reaches the largest weight of each group."""
        rows, cols = weights.shape
        grouped = weights.reshape(rows, cols // group, group) * np.float32(2.0) ** np.float32(-exponent)
        scale = _float16_above(np.abs(grouped).max(axis=2) * np.float32(1 / 127))
        steps = np.rint(grouped * _reciprocal(scale)[:, :, None])
        np.clip(steps, -127, 127, out=steps)
        self.place(Codes(steps.astype(np.int8).reshape(rows, cols), scale.astype(np.float16)), parts)

    @override
    def check(self, codes: Codes) -> None:
        """Codes are -127..127; there is nothing else."""
        if codes.multipliers is not None or codes.offsets is not None:
            raise InputError(f"format {self.name} has no multipliers and no offsets")
        _check_range(self.name, "code", codes.codes, -127, 127)
        _check_finite(codes.scales)

    @override
    def place(self, codes: Codes, parts: dict[str, Array]) -> None:
        """Interleave 16 rows x 4 columns to a line."""
        rows, cols = codes.codes.shape
        blocks, groups = rows // BLOCK_ROWS, codes.scales.shape[1]
        quads = np.ascontiguousarray(codes.codes, np.int8).view(np.uint32)
        parts["codes"].view(np.uint32)[:] = quads.reshape(blocks, BLOCK_ROWS, cols // 4).transpose(0, 2, 1)
        parts["meta"][:] = codes.scales.reshape(blocks, BLOCK_ROWS, groups).transpose(0, 2, 1)

    @override
    def collect(self, parts: dict[str, Array]) -> Codes:
        """The inverse of `place`."""
        lines, meta = parts["codes"], parts["meta"]
        blocks, quarters, _ = lines.shape
        rows = blocks * BLOCK_ROWS
        codes = lines.reshape(blocks, quarters, BLOCK_ROWS, 4).transpose(0, 2, 1, 3).reshape(rows, quarters * 4)
        return Codes(codes, meta.transpose(0, 2, 1).reshape(rows, meta.shape[1]))


@dataclass(frozen=True)
class _Float(Format):
    """Plain values, rounded to nearest even.

    Promised: |error| <= |w| * 2**-(significant bits), + 2**-25 for f16 (its
    smallest number); f32 is exact. A weight beyond the format's largest number
    is refused, never made infinite.
    """

    dtype: np.dtype[Any]

    @override
    def bits_per_weight(self, group: int) -> float:
        """The value's bits; there is nothing beside it."""
        return float(self.dtype.itemsize * 8)

    @override
    def exponent_for(self, largest: float) -> int:
        """Always 0."""
        return 0

    @override
    def parts(self, rows: int, cols: int, group: int) -> tuple[Part, ...]:
        """Values."""
        return (Part("values", 0, (rows // BLOCK_ROWS, cols, BLOCK_ROWS), self.dtype),)

    @override
    def pack_blocks(
        self,
        weights: Float32,
        group: int,
        exponent: int,
        parts: dict[str, Array],
        kernels: Kernels,
        importance: Float32,
    ) -> None:
        """Round and interleave 16 rows."""
        with np.errstate(over="ignore"):
            values = weights.astype(self.dtype)
        if not np.isfinite(values).all():
            raise InputError(f"a weight of {magnitude(weights):.4g} is too large for {self.name}; use another format")
        rows, cols = weights.shape
        parts["values"][:] = values.reshape(rows // BLOCK_ROWS, BLOCK_ROWS, cols).transpose(0, 2, 1)

    @override
    def unpack_blocks(self, parts: dict[str, Array], group: int, exponent: int) -> Float32:
        """Every value is exact in float32."""
        values = parts["values"]
        blocks, cols, _ = values.shape
        return values.transpose(0, 2, 1).reshape(blocks * BLOCK_ROWS, cols).astype(np.float32)


def _float16_above(values: Float32) -> Float32:
    """The smallest float16 numbers that are not below these non-negative ones, as float32."""
    nearest = values.astype(np.float16)
    below = nearest.astype(np.float32) < values
    return (nearest.view(np.uint16) + below.astype(np.uint16)).view(np.float16).astype(np.float32)


def _reciprocal(values: Float32) -> Float32:
    """1 / value, and 0 for 0 (the scale of a group of zeros)."""
    return np.divide(np.float32(1), values, out=np.zeros_like(values), where=values > 0)


def _padded(values: Array, shape: tuple[int, int], filling: int) -> Array:
    out = np.full(shape, filling, values.dtype)
    out[: values.shape[0], : values.shape[1]] = values
    return out


def _check_range(name: str, kind: str, values: Array, low: int, high: int) -> None:
    if values.size and (values.min() < low or values.max() > high):
        wrong = int(values.min()) if values.min() < low else int(values.max())
        raise InputError(f"{kind} {wrong} does not fit format {name}, which has {low}..{high}")


def _check_finite(scales: NDArray[np.float16]) -> None:
    if not np.isfinite(scales).all():
        raise InputError("a scale is not a finite number (NaN or infinity)")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        _TwoLevel("q4", _GROUPS, bits=4),
        _TwoLevel("q4g", _GROUPS, bits=4, whole=True),
        _TwoLevel("q6", _GROUPS, bits=6),
        _Q8("q8", _GROUPS),
        _Float("f16", (0,), dtype=np.dtype(np.float16)),
        _Float("bf16", (0,), dtype=np.dtype(ml_dtypes.bfloat16)),
        _Float("f32", (0,), dtype=np.dtype(np.float32)),
    )
}
