"""The weight formats: what their bytes mean, how weights get in and out, what they cost.

Knows nothing of files, models or kernels. A matrix W of float32 (rows, cols)
becomes ONE byte buffer whose layout every kernel reads:

    rows are padded to 16 and cut into blocks of 16; cols are padded to the
    group (q4, q8) or to 16 (f16, bf16, f32); padding is zero weight.

    q4   codes  uint8 [block][col/8][64]   byte 4r+i: row r; low nibble column
                                           8j+i, high nibble column 8j+4+i
         meta   uint8 [block][group][40]   16 x f16 scale, then 16 zero points of
                                           4 bits (byte i: row 2i low, 2i+1 high)
                                           W = (code - zero) * scale * 2**exponent
    q8   codes  int8  [block][col/4][64]   byte 4r+i: row r, column 4j+i; -127..127
         meta   f16   [block][group][16]   W = code * scale * 2**exponent
    f16, bf16, f32
         values       [block][col][16]     W = value

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
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from engine.core.memory import aligned
from engine.errors import InputError

__all__ = ["ALIGNMENT", "BLOCK_ROWS", "FORMATS", "Codes", "Format", "Layout", "Packed", "Part", "magnitude"]

BLOCK_ROWS = 16
ALIGNMENT = 64
_GROUPS = (32, 64, 128, 256)
# Elements worked on at once: the handful of float32 temporaries of the q4 search then stay in the L2 cache.
_CHUNK_ELEMENTS = 1 << 17
# How far the q4 search narrows a group's range: clipping the few largest weights can serve all others better.
_Q4_RANGES = (1.0, 0.9, 0.8)

Array = NDArray[Any]
Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class Packed(NamedTuple):
    """A packed matrix: `buffer` uint8 (Layout.bytes,), begins on a multiple of 64 bytes."""

    buffer: Bytes
    exponent: int


class Codes(NamedTuple):
    """A quantised matrix before packing, row-major and unpadded.

    codes   q4 uint8 (rows, cols) 0..15; q8 int8 (rows, cols) -127..127
    scales  float16 (rows, ceil(cols / group)), finite, of any sign
    zeros   q4 uint8, shape of scales, 0..15; q8 None
    """

    codes: Array
    scales: NDArray[np.float16]
    zeros: Bytes | None


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
        """`wanted`, or 0 for a format without groups."""
        return 0 if self.groups == (0,) else wanted

    def padded(self, rows: int, cols: int, group: int) -> tuple[int, int]:
        """(rows, cols) as stored."""
        return _round_up(rows, BLOCK_ROWS), _round_up(cols, group or BLOCK_ROWS)

    def packed_bytes(self, rows: int, cols: int, group: int) -> int:
        """Bytes of the packed buffer."""
        return self.layout(rows, cols, group).bytes

    def pack(self, weights: Float32, group: int) -> Packed:
        """Pack a whole matrix, float32 (rows, cols).

        Raises:
            InputError: a weight is not finite or does not fit the format
        """
        rows, cols = weights.shape
        layout = self.layout(rows, cols, group)
        exponent = self.exponent_for(magnitude(weights))
        buffer = layout.empty()
        layout.pack_rows(weights, 0, buffer, exponent)
        return Packed(buffer, exponent)

    def unpack(self, buffer: Bytes, exponent: int, rows: int, cols: int, group: int) -> Float32:
        """The weights a packed buffer stands for, float32 (rows, cols)."""
        return self.layout(rows, cols, group).unpack(buffer, exponent)

    @abstractmethod
    def bits_per_weight(self, group: int) -> float:
        """Bits one weight costs, scales included, padding not."""

    @abstractmethod
    def exponent_for(self, largest: float) -> int:
        """The exponent for a tensor whose largest |weight| this is."""

    @abstractmethod
    def parts(self, rows: int, cols: int, group: int) -> tuple[Part, ...]:
        """The parts of the packed buffer for padded rows and cols."""

    @abstractmethod
    def pack_blocks(self, weights: Float32, group: int, exponent: int, parts: dict[str, Array]) -> None:
        """Pack padded rows (of whole blocks) into views of their place in the parts."""

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

    def pack_rows(self, weights: Float32, first_row: int, out: Bytes, exponent: int) -> None:
        """Pack rows first_row.. of the matrix into their place in `out`.

        weights     float32 (some rows, cols)
        first_row   a multiple of 16; the slice ends on one too, or at the last row
        out         uint8 (bytes,), of which only these rows' blocks are written
        exponent    `format.exponent_for` the largest |weight| of the WHOLE matrix

        Raises:
            InputError: a weight is not finite or does not fit the format
        """
        self._check_slice(weights.shape, first_row)
        step = max(BLOCK_ROWS, _CHUNK_ELEMENTS // self.padded_cols // BLOCK_ROWS * BLOCK_ROWS)
        for start in range(0, weights.shape[0], step):
            chunk = weights[start : start + step]
            magnitude(chunk)  # refuses what is not finite
            shape = (_round_up(chunk.shape[0], BLOCK_ROWS), self.padded_cols)
            if chunk.shape != shape or chunk.dtype != np.float32:
                padded = np.zeros(shape, np.float32)
                padded[: chunk.shape[0], : self.cols] = chunk
                chunk = padded
            place = self._views(out, (first_row + start) // BLOCK_ROWS, shape[0] // BLOCK_ROWS)
            self.format.pack_blocks(chunk, self.group, exponent, place)

    def pack_codes(self, codes: Codes, first_row: int, out: Bytes) -> None:
        """Pack codes, scales and zeros made elsewhere, unchanged; slices as for `pack_rows`.

        Raises:
            InputError: the format has no codes, or a value does not fit it
        """
        if not isinstance(self.format, _Integer):
            raise InputError(f"format {self.format.name} holds plain values, not codes")
        self._check_slice(codes.codes.shape, first_row)
        self.format.check(codes)
        rows, groups = _round_up(codes.codes.shape[0], BLOCK_ROWS), self.padded_cols // self.group
        scales = np.zeros((rows, groups), np.float16)
        scales[: codes.scales.shape[0]] = codes.scales
        padded = np.zeros((rows, self.padded_cols), codes.codes.dtype)
        zeros = None
        if codes.zeros is not None:
            zeros = np.zeros((rows, groups), np.uint8)
            zeros[: codes.zeros.shape[0]] = codes.zeros
            padded.reshape(rows, groups, self.group)[:] = zeros[:, :, None]  # a padding column weighs nothing
        padded[: codes.codes.shape[0], : self.cols] = codes.codes
        place = self._views(out, first_row // BLOCK_ROWS, rows // BLOCK_ROWS)
        self.format.place(Codes(padded, scales, zeros), place)

    def codes(self, buffer: Bytes) -> Codes:
        """What `pack_codes` was given, or `pack_rows` chose; the whole matrix.

        Raises:
            InputError: the format has no codes
        """
        if not isinstance(self.format, _Integer):
            raise InputError(f"format {self.format.name} holds plain values, not codes")
        found = self.format.collect(self._views(buffer, 0, self.padded_rows // BLOCK_ROWS))
        zeros = None if found.zeros is None else found.zeros[: self.rows]
        return Codes(found.codes[: self.rows, : self.cols], found.scales[: self.rows], zeros)

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
    """Integer codes and one float16 scale per row and group.

    A scale is at most `2**headroom` times smaller than float16's largest: the
    exponent moves the largest weight just below `2**headroom`.
    """

    headroom: int

    @override
    def exponent_for(self, largest: float) -> int:
        """The exponent that brings `largest` into [2**(headroom - 1), 2**headroom).

        At least -126, so that 2**exponent is a normal float32.
        """
        return max(frexp(largest)[1] - self.headroom, -126) if largest else 0

    @override
    def pack_blocks(self, weights: Float32, group: int, exponent: int, parts: dict[str, Array]) -> None:
        """Choose codes for the rows and put them into their place."""
        rows, cols = weights.shape
        # Columns of a group first: every sum over a group then adds whole contiguous rows.
        grouped = weights.reshape(rows, cols // group, group).transpose(2, 0, 1)
        scaled = np.multiply(grouped, np.float32(2.0) ** np.float32(-exponent), order="C")
        self.place(self.quantise(scaled), parts)

    @abstractmethod
    def quantise(self, scaled: Float32) -> Codes:
        """Codes (rows, cols), scales and zeros (rows, groups) for weights (group, rows, groups)."""

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
        """(code - zero) * scale is exact in float32; so is the power of two unless the result is below 1e-38."""
        codes, scales, zeros = self.collect(parts)
        rows, groups = scales.shape
        values = codes.reshape(rows, groups, group).astype(np.float32)
        if zeros is not None:
            values -= zeros[:, :, None].astype(np.float32)
        values *= scales[:, :, None].astype(np.float32)
        values *= np.float32(2.0) ** np.float32(exponent)
        return values.reshape(rows, groups * group)


class _Q4(_Integer):
    """4-bit codes with a 4-bit zero point.

    Promised, for a group of `group` weights w with R = max(w, 0) - min(w, 0), in
    a tensor whose largest |w| is M >= 2**-100:
        root mean square error  E = R / 30 * (1 + 2**-9) + M * 2**-40
        largest error           E * sqrt(group)
    E is what the full range costs at worst: half a step of R / 15, the scale
    rounded up so that no end is clipped by more than half a step, M * 2**-40
    being float16's smallest number. Other ranges replace it only where their
    sum of squares is smaller, so one weight's error may grow, but not beyond
    what the sum allows. Zero is always exact. Normally distributed weights lose
    7.7 % (group 32) to 10 % (256) of their root mean square.
    """

    @override
    def bits_per_weight(self, group: int) -> float:
        """4 bits, and 20 for each group's scale and zero point."""
        return 4 + 20 / group

    @override
    def parts(self, rows: int, cols: int, group: int) -> tuple[Part, ...]:
        """Codes, meta."""
        blocks = rows // BLOCK_ROWS
        codes = Part("codes", 0, (blocks, cols // 8, 64), np.dtype(np.uint8))
        meta = Part("meta", _round_up(codes.bytes, ALIGNMENT), (blocks, cols // group, 40), np.dtype(np.uint8))
        return codes, meta

    @override
    def quantise(self, scaled: Float32) -> Codes:
        """Of eleven candidates, the scale and zero point with the least squared error in each group."""
        low = np.minimum(scaled.min(axis=0), np.float32(0))
        high = np.maximum(scaled.max(axis=0), np.float32(0))
        search = _Q4Search(scaled)
        span = _float16_above((high - low) * np.float32(1 / 15))
        nominal = np.clip(np.rint(-low * _reciprocal(span)), 0, 15)
        search.consider(span, nominal)  # this one keeps the promise; the others can only be better
        for shift in (-1, 0, 1):
            zero = np.clip(nominal + np.float32(shift), 0, 15)
            reach = np.maximum(high * _reciprocal(15 - zero), -low * _reciprocal(zero))
            for keep in _Q4_RANGES:
                search.consider(_float16_above(reach * np.float32(keep)), zero)
        search.refit()
        return search.codes()

    @override
    def check(self, codes: Codes) -> None:
        """Codes and zeros are 0..15."""
        if codes.zeros is None:
            raise InputError(f"format {self.name} needs zero points")
        _check_range(self.name, "code", codes.codes, 0, 15)
        _check_range(self.name, "zero point", codes.zeros, 0, 15)
        _check_finite(codes.scales)

    @override
    def place(self, codes: Codes, parts: dict[str, Array]) -> None:
        """Interleave 16 rows x 8 columns to a line, and scales with zero points."""
        assert codes.zeros is not None
        rows, cols = codes.codes.shape
        blocks, groups = rows // BLOCK_ROWS, codes.scales.shape[1]
        # Four columns at a time: their nibbles never meet, so uint32 moves are exact on every byte order.
        quads = np.ascontiguousarray(codes.codes, np.uint8).view(np.uint32)
        quads = quads.reshape(blocks, BLOCK_ROWS, cols // 8, 2).transpose(0, 2, 1, 3)
        parts["codes"].view(np.uint32)[:] = quads[..., 0] | quads[..., 1] << np.uint32(4)
        meta = parts["meta"]
        meta[:, :, :32].view(np.float16)[:] = codes.scales.reshape(blocks, BLOCK_ROWS, groups).transpose(0, 2, 1)
        zeros = codes.zeros.reshape(blocks, BLOCK_ROWS // 2, 2, groups)
        meta[:, :, 32:] = (zeros[:, :, 0] | zeros[:, :, 1] << 4).transpose(0, 2, 1)

    @override
    def collect(self, parts: dict[str, Array]) -> Codes:
        """The inverse of `place`."""
        lines, meta = parts["codes"], parts["meta"]
        blocks, eighths, _ = lines.shape
        groups, rows = meta.shape[1], blocks * BLOCK_ROWS
        nibbles = np.stack([lines & 15, lines >> 4], axis=-2).reshape(blocks, eighths, 2, BLOCK_ROWS, 4)
        codes = nibbles.transpose(0, 3, 1, 2, 4).reshape(rows, eighths * 8)
        scales = np.ascontiguousarray(meta[:, :, :32]).view(np.float16).transpose(0, 2, 1).reshape(rows, groups)
        pairs = np.stack([meta[:, :, 32:] & 15, meta[:, :, 32:] >> 4], axis=-1)
        return Codes(codes, scales, pairs.reshape(blocks, groups, 16).transpose(0, 2, 1).reshape(rows, groups))


class _Q8(_Integer):
    """8-bit codes, symmetric.

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
    def quantise(self, scaled: Float32) -> Codes:
        """The smallest scale that reaches the largest weight."""
        largest = np.maximum(scaled.max(axis=0), -scaled.min(axis=0))
        scale = _float16_above(largest * np.float32(1 / 127))
        steps = np.rint(scaled * _reciprocal(scale))
        np.clip(steps, -127, 127, out=steps)
        return Codes(_row_major(steps.astype(np.int8)), scale.astype(np.float16), None)

    @override
    def check(self, codes: Codes) -> None:
        """Codes are -127..127; there are no zero points."""
        if codes.zeros is not None:
            raise InputError(f"format {self.name} has no zero points")
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
        return Codes(codes, meta.transpose(0, 2, 1).reshape(rows, meta.shape[1]), None)


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
    def pack_blocks(self, weights: Float32, group: int, exponent: int, parts: dict[str, Array]) -> None:
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


class _Q4Search:
    """The best scale and zero point so far of every group of `scaled` (group, rows, groups)."""

    def __init__(self, scaled: Float32) -> None:
        self.scaled = scaled
        shape = scaled.shape[1:]
        self.error = np.full(shape, np.inf, np.float32)
        self.scale = np.zeros(shape, np.float32)
        self.zero = np.zeros(shape, np.float32)
        self._exact, self._steps = np.empty_like(scaled), np.empty_like(scaled)

    def consider(self, scale: Float32, zero: Float32) -> None:
        """Keep this scale (float32, a float16 number) and zero point where they are better."""
        off = self._round(scale, zero)
        off -= self._exact
        off *= off
        error = off.sum(axis=0) * (scale * scale)
        # A scale of 0 says nothing of its error; it is right for zeros only, where nothing has to be better.
        better = (error < self.error) & (scale > 0)
        np.copyto(self.error, error, where=better)
        np.copyto(self.scale, scale, where=better)
        np.copyto(self.zero, zero, where=better)

    def refit(self) -> None:
        """Consider the scale that suits the best codes so far: least squares, sum(wt) / sum(tt)."""
        steps = self._round(self.scale, self.zero)
        np.multiply(steps, self.scaled, out=self._exact)
        along = self._exact.sum(axis=0)
        steps *= steps
        fitted = along * _reciprocal(steps.sum(axis=0))
        self.consider(fitted.astype(np.float16).astype(np.float32), self.zero.copy())

    def codes(self) -> Codes:
        """The codes that the best scales and zero points give."""
        steps = self._round(self.scale, self.zero)
        steps += self.zero
        codes = _row_major(steps.astype(np.uint8))
        return Codes(codes, self.scale.astype(np.float16), self.zero.astype(np.uint8))

    def _round(self, scale: Float32, zero: Float32) -> Float32:
        """The weights in steps of the scale, rounded to what codes 0..15 can say; valid until the next call."""
        np.multiply(self.scaled, _reciprocal(scale), out=self._exact)
        np.rint(self._exact, out=self._steps)
        np.maximum(self._steps, -zero, out=self._steps)
        np.minimum(self._steps, np.float32(15) - zero, out=self._steps)
        return self._steps


def _row_major(codes: Array) -> Array:
    """(group, rows, groups) -> (rows, groups * group)."""
    group, rows, groups = codes.shape
    return codes.transpose(1, 2, 0).reshape(rows, groups * group)


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
        # The search tries scales up to a fifth of the largest weight, q8 needs 1 / 127: both below float16's 65504.
        _Q4("q4", _GROUPS, headroom=17),
        _Q8("q8", _GROUPS, headroom=22),
        _Float("f16", (0,), dtype=np.dtype(np.float16)),
        _Float("bf16", (0,), dtype=np.dtype(ml_dtypes.bfloat16)),
        _Float("f32", (0,), dtype=np.dtype(np.float32)),
    )
}
