"""Weights that a quantiser has been through, as plain tensors again.

GPTQ, AWQ, compressed-tensors, bitsandbytes, MXFP4, NVFP4 and float8 all store
a matrix as small codes beside scales. Here the several stored tensors of one
matrix become one `StoredTensor` under the name the plain matrix would have.
Where the codes are whole numbers with one scale per group of columns they can
also be had as they are (`Coded`), so that no weight is rounded twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.convert.entry import FLOAT8, FLOATS, NUMPY_TYPES, Entry, as_float32, read_columns, read_raw, read_rows
from engine.errors import ModelFolderError, UnsupportedModelError

__all__ = ["Coded", "Plain", "StoredTensor", "check_scheme", "is_reordered", "plain_tensors"]

Array = NDArray[Any]
Rows = NDArray[np.float32]

_SCHEMES = ("awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "mlx", "modelopt", "mxfp4")
_KEPT = {"BF16": "bf16", "F16": "f16", "F32": "f32", "F64": "f32"}
# Order in which AWQ puts eight columns into the nibbles of a word, lowest first.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Scales of activations and of the key/value cache: both are quantised our own way.
_UNUSED = re.compile(
    r"\.(input_scale|input_zero_point|input_global_scale|output_scale|output_zero_point|k_scale|v_scale|q_scale|"
    r"kv_scale|weight_format)$"
)
_BITSANDBYTES = re.compile(r"\.quant_state\.bitsandbytes__(nf4|fp4)$")


class Coded(NamedTuple):
    """Rows of whole numbers with a scale for each group of columns: W = (codes - zeros) * scales.

    codes: uint8 0..15 ("q4"), or int8 ("q8"), (rows, columns).
    scales: float32 (rows, groups); zeros: uint8 0..15 (rows, groups), None for "q8".
    """

    codes: Array
    scales: Rows
    zeros: Array | None


class StoredTensor(Protocol):
    """One tensor of a source, however it is stored."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As the plain tensor has it."""

    @property
    def kept(self) -> str:
        """The smallest format that holds its values: "bf16", "f16" or "f32"; "" when they are no weights."""

    @property
    def bytes(self) -> int:
        """Bytes in the files."""

    @property
    def dtype(self) -> str:
        """What it is stored as, for people."""

    @property
    def coding(self) -> tuple[str, int] | None:
        """("q4" or "q8", columns that share a scale) when `coded` can be asked."""

    def rows(self, first: int, count: int) -> Rows:
        """Float32 (count, columns); a vector is one row."""

    def coded(self, first: int, count: int) -> Coded:
        """The same rows as they are stored; only where there is a `coding`."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A tensor of floats that lie there as they are."""

    entry: Entry
    coding: None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""
        return self.entry.shape

    @property
    def kept(self) -> str:
        """The type itself; bfloat16 holds every float8."""
        return _KEPT.get(self.entry.dtype, "bf16")

    @property
    def bytes(self) -> int:
        """Bytes in the file."""
        return self.entry.bytes

    @property
    def dtype(self) -> str:
        """Numpy's name for it."""
        return str(NUMPY_TYPES[self.entry.dtype])

    def rows(self, first: int, count: int) -> Rows:
        """Float32."""
        return read_rows(self.entry, first, count)

    def coded(self, first: int, count: int) -> Coded:
        """Never asked: there is no coding."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class _Quantised:
    """Codes, scales and zeros, each read by (first row, count).

    codes: (count, columns), floats where they are looked up in a table.
    scales, zeros: (count, groups).
    order: the group of each column, where groups are not neighbours.
    """

    shape: tuple[int, ...]
    dtype: str
    kept: str
    bytes: int
    group: int
    codes: Callable[[int, int], Array]
    scales: Callable[[int, int], Rows]
    zeros: Callable[[int, int], Array] | None = None
    levels: str = ""
    order: Array | None = None

    @property
    def coding(self) -> tuple[str, int] | None:
        return (self.levels, self.group) if self.levels and self.order is None else None

    def rows(self, first: int, count: int) -> Rows:
        values = self.codes(first, count).astype(np.float32)
        if self.zeros is not None:
            values -= self._spread(self.zeros(first, count).astype(np.float32))
        with np.errstate(all="ignore"):  # whoever packs them refuses NaN and infinity by name
            values *= self._spread(self.scales(first, count))
        return values

    def coded(self, first: int, count: int) -> Coded:
        zeros = None if self.zeros is None else self.zeros(first, count)
        return Coded(self.codes(first, count), self.scales(first, count), zeros)

    def _spread(self, grid: Array) -> Array:
        """A value for every column."""
        columns = self.shape[-1]
        if grid.shape[1] == 1:
            return grid
        return grid[:, self.order] if self.order is not None else np.repeat(grid, self.group, axis=1)[:, :columns]


def is_reordered(tensor: StoredTensor) -> bool:
    """Whether columns that share a scale lie apart, so that its codes cannot be kept as they are."""
    return isinstance(tensor, _Quantised) and tensor.order is not None


def check_scheme(settings: Mapping[str, Any]) -> None:
    """Refuse what a configuration's quantisation says of itself, if it is not one of the schemes read here.

    Raises:
        UnsupportedModelError: names the scheme and what to get instead
    """
    if not settings:
        return
    scheme = str(settings.get("quant_method", "unnamed"))
    details: dict[str, set[str | None]] = {
        "checkpoint_format": {None, "gptq", "gptq_v2", "gemm", "awq"},
        "version": {None, "gemm", "GEMM"},
        "transform_config": {None},
    }
    if scheme.lower() not in _SCHEMES:
        raise _unreadable(f'by the scheme "{scheme[:100]}"')
    for key, known in details.items():
        value = settings.get(key) or None
        if not isinstance(value, str | None) or value not in known:
            raise _unreadable(f"by {scheme} with {key} = {str(value)[:100]}")
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in {None, "dense"}:
        raise _unreadable(f"by {scheme} with {str(sparsity.get('format'))[:100]} sparsity")


def plain_tensors(entries: Mapping[str, Entry], settings: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The tensors of a folder under the names that plain weights have, in the order of `entries`.

    settings: `quantization_config` of the configuration, empty when there is none

    Raises:
        ModelFolderError: the parts of a quantised matrix contradict each other, or one is missing
        UnsupportedModelError: a kind of storage that is not read; named
    """
    gathering = _Gathering(entries, settings)
    found: dict[str, StoredTensor] = {}
    for name in entries:
        if name not in gathering.used and not _UNUSED.search(name):
            named = gathering.matrix(name)
            if named is not None:
                found[named[0]] = named[1]
    for name in entries:
        if name not in gathering.used and name not in found and not _UNUSED.search(name):
            entry = entries[name]
            if entry.dtype in FLOATS or (entry.dtype in FLOAT8 and not settings and not gathering.used):
                found[name] = Plain(entry)
            elif entry.dtype in NUMPY_TYPES and not entry.dtype.startswith(("F8", "I8", "U8")):
                found[name] = _Foreign(entry)
            else:
                raise _unreadable(f"({name[:100]} is stored as {entry.dtype}, without scales that are known)")
    order = {name: place for place, name in enumerate(entries)}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], 0)))


@dataclass(frozen=True, slots=True)
class _Foreign:
    """A tensor of whole numbers: some models carry buffers of these, which no family uses as a weight."""

    entry: Entry
    coding: None = None
    kept: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def bytes(self) -> int:
        return self.entry.bytes

    @property
    def dtype(self) -> str:
        return self.entry.dtype

    def rows(self, first: int, count: int) -> Rows:
        raise NotImplementedError

    def coded(self, first: int, count: int) -> Coded:
        raise NotImplementedError


class _Gathering:
    """Finds the stored tensors that belong to one matrix. used: those found so far."""

    def __init__(self, entries: Mapping[str, Entry], settings: Mapping[str, Any]) -> None:
        self._entries, self._settings = entries, settings
        self.used: set[str] = set()

    def matrix(self, name: str) -> tuple[str, StoredTensor] | None:
        """The matrix whose first part is called `name`, and the name it deserves; None for other tensors."""
        stem, _, end = name.rpartition(".")
        dtype = self._entries[name].dtype
        if end == "qweight":
            return f"{stem}.weight", self._words(stem)
        if end == "weight_packed":
            return f"{stem}.weight", self._packed(stem) if dtype == "I32" else self._float4(stem)
        if name.endswith("_blocks") and dtype == "U8":
            return name, self._blocks(name)
        if _BITSANDBYTES.search(name):
            weight = _BITSANDBYTES.sub("", name)
            return weight, self._normal_float(weight, name)
        if end == "weight" and dtype == "U32" and f"{stem}.scales" in self._entries:
            return name, self._affine(name, stem)
        if f"{name}.SCB" in self._entries or f"{stem}.SCB" in self._entries:
            return (name, self._row_scaled(name, stem)) if dtype == "I8" else None
        if dtype in FLOAT8 or dtype == "I8":
            for scale in (f"{name}_scale_inv", f"{name}_scale"):
                if scale in self._entries:
                    return name, self._scaled(name, scale)
        return None

    def _take(self, name: str, *dtypes: str, sides: int | None = None) -> Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise ModelFolderError(f"{name[:200]} is missing, without which quantised weights mean nothing")
        if dtypes and entry.dtype not in dtypes:
            raise ModelFolderError(f"{name[:200]} is stored as {entry.dtype} instead of {' or '.join(dtypes)}")
        if (sides is not None and len(entry.shape) != sides) or 0 in entry.shape:
            raise _contradiction(name)
        self.used.add(name)
        return entry

    def _take_if(self, name: str, *dtypes: str, sides: int | None = None) -> Entry | None:
        return self._take(name, *dtypes, sides=sides) if name in self._entries else None

    def _number(self, key: str) -> int | None:
        value = self._settings.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def _words(self, stem: str) -> StoredTensor:
        """GPTQ or AWQ: both store the matrix transposed; the one packs inputs into words, the other outputs."""
        words = self._take(f"{stem}.qweight", "I32", sides=2)
        scales = self._take(f"{stem}.scales", *FLOATS, sides=2)
        zeros = self._take_if(f"{stem}.qzeros", "I32", sides=2)
        order = self._take_if(f"{stem}.g_idx", "I32", "I64", sides=1)
        groups, rows = scales.shape
        awq = words.shape[1] != rows
        bits = self._number("bits") or (32 * zeros.shape[1] // rows if zeros else 4)
        if bits not in ({4} if awq else {2, 3, 4, 8}):
            raise _unreadable(f"with {bits} bits ({stem[:100]}.qweight)")
        columns = words.shape[0] if awq else words.shape[0] * 32 // bits
        packed_rows = -(-rows * bits // 32)
        if (words.shape[1] != packed_rows if awq else words.shape[0] * 32 % bits) or (
            zeros is not None and zeros.shape != (groups, packed_rows)
        ):
            raise _contradiction(f"{stem}.qweight")
        group = _group(self._number("group_size"), columns, groups, stem)
        # The first GPTQ files store zero points less one, and only those a quantiser can choose: 0..15, where 0 wraps.
        lift = 0 if awq or self._settings.get("checkpoint_format") == "gptq_v2" else 1
        mask = (1 << bits) - 1
        nibbles = _AWQ_ORDER if awq else None

        def stored_zeros(first: int, count: int) -> Array:
            if zeros is None:
                return np.full((count, groups), 1 << bits - 1, np.uint8)
            values = _wordwise(zeros, first, count, bits, nibbles)
            return np.ascontiguousarray((values.T + np.uint8(lift)) & np.uint8(mask))

        def codes(first: int, count: int) -> Array:
            if awq:
                return np.ascontiguousarray(_wordwise(words, first, count, bits, nibbles).T)
            return _unpacked(np.ascontiguousarray(read_columns(words, first, count).T), bits, columns)

        return _Quantised(
            shape=(rows, columns),
            dtype=f"{'AWQ' if awq else 'GPTQ'} int{bits}",
            kept="f16",
            bytes=words.bytes + scales.bytes + (zeros.bytes if zeros else 0),
            group=group,
            codes=codes,
            scales=lambda first, count: as_float32(np.ascontiguousarray(read_columns(scales, first, count).T)),
            zeros=stored_zeros,
            levels="q4" if bits <= 4 else "",
            order=None if order is None else _order(order, columns, group, groups),
        )

    def _affine(self, name: str, stem: str) -> StoredTensor:
        """MLX's integers: each group has a scale and a smallest value, W = code * scale + bias."""
        words = self._take(name, "U32", sides=2)
        scales = self._take(f"{stem}.scales", *FLOATS, sides=2)
        biases = self._take(f"{stem}.biases", *FLOATS, sides=2)
        rows, groups = scales.shape
        bits = self._number("bits") or 4
        columns = words.shape[1] * 32 // bits if bits in {2, 3, 4, 6, 8} else 0
        group = _group(self._number("group_size"), columns, groups, stem)
        if not columns or words.shape[0] != rows or scales.shape != biases.shape or columns % group:
            raise _contradiction(name)

        def values(first: int, count: int) -> Array:
            codes = _unpacked(read_raw(words, first, count), bits, columns).astype(np.float32)
            codes *= np.repeat(read_rows(scales, first, count), group, axis=1)
            codes += np.repeat(read_rows(biases, first, count), group, axis=1)
            return codes

        return _Quantised(
            shape=(rows, columns),
            dtype=f"MLX int{bits}",
            kept="f16",
            bytes=words.bytes + scales.bytes + biases.bytes,
            group=columns,
            codes=values,
            scales=lambda _, count: np.ones((count, 1), np.float32),
        )

    def _packed(self, stem: str) -> StoredTensor:
        """compressed-tensors' packed integers."""
        words = self._take(f"{stem}.weight_packed", "I32", sides=2)
        scales = self._take(f"{stem}.weight_scale", *FLOATS)
        zeros = self._take_if(f"{stem}.weight_zero_point", "I32", "I8", sides=2)
        order = self._take_if(f"{stem}.weight_g_idx", "I32", "I64", sides=1)
        rows, columns = self._sides(self._take(f"{stem}.weight_shape", "I64", "I32", sides=1), words.shape[0])
        fitting = [bits for bits in range(1, 9) if -(-columns * bits // 32) == words.shape[1]]
        if len(fitting) != 1:
            raise _contradiction(f"{stem}.weight_packed")
        bits = fitting[0]
        middle = 1 << bits - 1
        grid, groups = _by_rows(scales, rows, f"{stem}.weight_scale")
        group = _group(None, columns, groups, stem)
        if zeros is not None and zeros.shape != (-(-rows * bits // 32) if zeros.dtype == "I32" else rows, groups):
            raise _contradiction(f"{stem}.weight_zero_point")

        def stored_zeros(first: int, count: int) -> Array:
            if zeros is None:
                return np.full((count, groups), middle, np.uint8)
            if zeros.dtype == "I8":
                return (read_raw(zeros, first, count).astype(np.int16) + middle).astype(np.uint8)
            start = first // 32 * bits
            packed = read_raw(zeros, start, -(-(first + count) * bits // 32) - start)
            values = _unpacked(np.ascontiguousarray(packed.T), bits, packed.shape[0] * 32 // bits)
            return np.ascontiguousarray(values[:, first % 32 : first % 32 + count].T)

        return _Quantised(
            shape=(rows, columns),
            dtype=f"compressed-tensors int{bits}",
            kept="f16",
            bytes=words.bytes + scales.bytes,
            group=group,
            codes=lambda first, count: _unpacked(read_raw(words, first, count), bits, columns),
            scales=grid,
            zeros=stored_zeros,
            levels="q4" if bits <= 4 else "",
            order=None if order is None else _order(order, columns, group, groups),
        )

    def _float4(self, stem: str) -> StoredTensor:
        """compressed-tensors' four-bit floats: NVFP4, or MXFP4."""
        packed = self._take(f"{stem}.weight_packed", "U8", sides=2)
        scales = self._take(f"{stem}.weight_scale", "F8_E4M3", "U8", "F8_E8M0", sides=2)
        whole = self._take_if(f"{stem}.weight_global_scale", "F32")
        rows, columns = packed.shape[0], 2 * packed.shape[1]
        if scales.shape[0] != rows or (whole is not None and prod(whole.shape) != 1):
            raise _contradiction(f"{stem}.weight_scale")
        divisor = np.float32(1) if whole is None else read_rows(whole, 0, 1)[0, 0]

        def grid(first: int, count: int) -> Rows:
            raw = read_raw(scales, first, count)
            with np.errstate(all="ignore"):
                return (_powers(raw.view(np.uint8)) if scales.dtype != "F8_E4M3" else as_float32(raw)) / divisor

        return _Quantised(
            shape=(rows, columns),
            dtype="NVFP4" if scales.dtype == "F8_E4M3" else "MXFP4",
            kept="bf16",
            bytes=packed.bytes + scales.bytes,
            group=_group(None, columns, scales.shape[1], stem),
            codes=lambda first, count: _FP4[_nibbles(read_raw(packed, first, count))],
            scales=grid,
        )

    def _blocks(self, name: str) -> StoredTensor:
        """Experts in MXFP4 as gpt-oss has them: (experts, rows, groups, 16 bytes), the lower nibble first."""
        blocks = self._take(name, "U8", sides=4)
        scales = self._take(f"{name.removesuffix('_blocks')}_scales", "U8", sides=3)
        experts, rows, groups, half = blocks.shape
        if scales.shape != blocks.shape[:3]:
            raise _contradiction(name)
        columns = groups * half * 2
        by_row = Entry(blocks.path, "U8", (experts * rows, columns // 2), blocks.begin, blocks.end)
        return _Quantised(
            shape=(experts, rows, columns),
            dtype="MXFP4",
            kept="bf16",
            bytes=blocks.bytes + scales.bytes,
            group=half * 2,
            codes=lambda first, count: _FP4[_nibbles(read_raw(by_row, first, count))],
            scales=lambda first, count: _powers(read_raw(scales, first, count)),
        )

    def _scaled(self, name: str, scale: str) -> StoredTensor:
        """Float8 or int8 with a scale for all, for each row, for each group or for each block."""
        weight = self._take(name, sides=2)
        scales = self._take(scale, *FLOATS, "F8_E8M0")
        zeros = self._take_if(f"{name}_zero_point", "I8", *FLOATS)
        rows, columns = weight.shape
        block = self._settings.get("weight_block_size")
        grid, groups = _by_rows(scales, rows, scale, _block_side(block, 0))
        side = _block_side(block, 1)
        # A grid of blocks ends where the matrix does; groups of one row divide it evenly.
        blocks = scales.shape[:1] != (rows,) and len(scales.shape) == 2
        group = side if blocks and groups > 1 else _group(None, columns, groups, name)
        if ceil(columns / group) != groups:
            raise _contradiction(scale)
        zero_grid = None
        if zeros is not None:
            zero_grid, zero_groups = _by_rows(zeros, rows, f"{name}_zero_point")
            if zero_groups != groups:
                raise _contradiction(f"{name}_zero_point")
        integers = weight.dtype == "I8"
        return _Quantised(
            shape=(rows, columns),
            dtype="int8" if integers else str(FLOAT8[weight.dtype]),
            kept="f16" if integers else "bf16",
            bytes=weight.bytes + scales.bytes,
            group=group,
            codes=lambda first, count: read_raw(weight, first, count) if integers else read_rows(weight, first, count),
            scales=grid,
            zeros=zero_grid,
            levels="q8" if integers and zeros is None else "",
        )

    def _row_scaled(self, name: str, stem: str) -> StoredTensor:
        """Bitsandbytes' int8: each row's largest number is 127."""
        weight = self._take(name, "I8", sides=2)
        scale = f"{stem}.SCB" if f"{stem}.SCB" in self._entries else f"{name}.SCB"
        largest, _ = _by_rows(self._take(scale, *FLOATS), weight.shape[0], scale)
        return _Quantised(
            shape=weight.shape,
            dtype="bitsandbytes int8",
            kept="f16",
            bytes=weight.bytes,
            group=weight.columns,
            codes=lambda first, count: read_raw(weight, first, count),
            scales=lambda first, count: largest(first, count) / np.float32(127),
            levels="q8",
        )

    def _normal_float(self, name: str, state_name: str) -> StoredTensor:
        """Bitsandbytes' four bits: a table of 16 numbers, scales for blocks that run across rows."""
        state = self._state(state_name)
        packed = self._take(name, "U8")
        table = read_rows(self._take(f"{name}.quant_map", *FLOATS, sides=1), 0, 1)[0]
        largest = self._take(f"{name}.absmax", *FLOATS, "U8")
        shape, size = state.get("shape"), state.get("blocksize")
        if not (
            isinstance(shape, list)
            and len(shape) == 2
            and all(isinstance(side, int) and 0 < side < 1 << 31 for side in shape)
            and isinstance(size, int)
            and size > 0
            and packed.bytes == -(-prod(shape) // 2)
            and largest.shape[:1] == (-(-prod(shape) // size),)
            and len(table) == 16
        ):
            raise _contradiction(state_name)
        rows, columns = shape
        nested = self._nested(name, state) if largest.dtype == "U8" else None
        flat = Entry(packed.path, "U8", (packed.bytes, 1), packed.begin, packed.end)
        blocks = Entry(largest.path, largest.dtype, (largest.shape[0], 1), largest.begin, largest.end)

        def compute(first: int, count: int) -> Array:
            begin, end = first * columns, (first + count) * columns
            pairs = read_raw(flat, begin // 2, -(-end // 2) - begin // 2)[:, 0]
            codes = np.stack([pairs >> 4, pairs & 15], axis=1).reshape(-1)[begin % 2 :][: end - begin]
            start = begin // size
            raw = read_raw(blocks, start, -(-end // size) - start)[:, 0]
            scales = as_float32(raw) if nested is None else nested(raw, start)
            values: Rows = table[codes] * np.repeat(scales, size)[begin - start * size :][: end - begin]
            return values.reshape(count, columns)

        return _Quantised(
            shape=(rows, columns),
            dtype=f"bitsandbytes {state_name.rpartition('__')[2]}",
            kept="f16",
            bytes=packed.bytes + largest.bytes,
            group=columns,
            codes=compute,
            scales=lambda _, count: np.ones((count, 1), np.float32),
        )

    def _nested(self, name: str, state: Mapping[str, Any]) -> Callable[[Array, int], Rows]:
        """How the scales of bitsandbytes, when they are quantised themselves, are read from block `start` on."""
        table = read_rows(self._take(f"{name}.nested_quant_map", *FLOATS, sides=1), 0, 1)[0]
        scales = read_rows(self._take(f"{name}.nested_absmax", *FLOATS, sides=1), 0, 1)[0]
        size, offset = state.get("nested_blocksize"), state.get("nested_offset")
        if not isinstance(size, int) or size <= 0 or not isinstance(offset, int | float) or len(table) != 256:
            raise _contradiction(f"{name}.nested_absmax")

        def read(raw: Array, start: int) -> Rows:
            places = np.arange(start, start + len(raw)) // size
            if len(places) and places[-1] >= len(scales):
                raise _contradiction(f"{name}.nested_absmax")
            values: Rows = table[raw] * scales[places] + np.float32(offset)
            return values

        return read

    def _state(self, name: str) -> dict[str, Any]:
        """JSON that is stored as a tensor of bytes."""
        data = read_raw(self._take(name, "U8", sides=1), 0, 1).tobytes()
        try:
            state = json.loads(data)
        except (ValueError, RecursionError):
            state = None
        if not isinstance(state, dict):
            raise _contradiction(name)
        return state

    def _sides(self, entry: Entry, rows: int) -> tuple[int, int]:
        values = read_raw(entry, 0, 1)[0].tolist()
        if len(values) != 2 or values[0] != rows or not 0 < values[1] < 1 << 31:
            raise ModelFolderError(f"a weight_shape in {entry.path.name} contradicts the weight it describes")
        return values[0], values[1]


def _by_rows(entry: Entry, rows: int, name: str, block_rows: int = 1) -> tuple[Callable[[int, int], Rows], int]:
    """Reader of the scales of some rows (count, groups), and how many groups: of one number, a row's, or a grid."""
    if prod(entry.shape) == 1:
        one = read_rows(Entry(entry.path, entry.dtype, (1, 1), entry.begin, entry.end, entry.strides and (0, 0)), 0, 1)
        return lambda _, count: np.broadcast_to(one, (count, 1)), 1
    if len(entry.shape) == 1:
        entry = Entry(entry.path, entry.dtype, (entry.shape[0], 1), entry.begin, entry.end, _column(entry.strides))
    if len(entry.shape) != 2:
        raise _contradiction(name)
    if entry.shape[0] == rows:
        return lambda first, count: read_rows(entry, first, count), entry.shape[1]
    if ceil(rows / block_rows) != entry.shape[0]:
        raise _contradiction(name)

    def blocks(first: int, count: int) -> Rows:
        start, end = first // block_rows, (first + count - 1) // block_rows + 1
        places = np.arange(first, first + count) // block_rows - start
        return read_rows(entry, start, end - start)[places]

    return blocks, entry.shape[1]


def _column(strides: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if strides is None else (*strides, 1)


def _block_side(block: Any, side: int) -> int:
    """A side of `weight_block_size`; all published models have 128."""
    known = isinstance(block, list) and len(block) == 2 and all(type(value) is int and value > 0 for value in block)
    return int(block[side]) if known else 128


def _group(said: int | None, columns: int, groups: int, stem: str) -> int:
    """Columns that share a scale."""
    group = said if said is not None and said > 0 else -(-columns // groups)
    if -(-columns // group) != groups:
        raise _contradiction(f"{stem}.scales")
    return group


def _order(entry: Entry, columns: int, group: int, groups: int) -> Array | None:
    """The group of each column; None when groups are neighbours, as they usually are."""
    if entry.shape != (columns,):
        raise ModelFolderError(f"a g_idx in {entry.path.name} has not one entry for each column")
    order = read_raw(entry, 0, 1)[0].astype(np.int64)
    if order.min() < 0 or order.max() >= groups:
        raise ModelFolderError(f"a g_idx in {entry.path.name} names groups that are not there")
    return None if np.array_equal(order, np.arange(columns) // group) else order


def _wordwise(entry: Entry, first: int, count: int, bits: int, nibbles: tuple[int, ...] | None) -> Array:
    """Columns first .. first + count of a matrix whose rows are packed into words: uint8 (rows, count)."""
    start = first // 32 * bits
    words = read_columns(entry, start, -(-(first + count) * bits // 32) - start)
    values = _unpacked(words, bits, words.shape[1] * 32 // bits)
    if nibbles is not None:
        values = values.reshape(len(values), -1, 8)[:, :, nibbles].reshape(len(values), -1)
    return values[:, first % 32 : first % 32 + count]


def _unpacked(words: Array, bits: int, columns: int) -> Array:
    """Numbers of some bits from rows of little-endian words, lowest first: uint8 (rows, columns)."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 4:
        values = _nibbles(data)
    elif bits == 8:
        values = data
    else:
        single = np.unpackbits(data, axis=1, bitorder="little")
        used = single[:, : single.shape[1] // bits * bits].reshape(len(data), -1, bits)
        values = used @ (1 << np.arange(bits, dtype=np.uint8))
    cut: Array = values[:, :columns]
    return cut


def _nibbles(data: Array) -> Array:
    """Both halves of every byte, the lower first."""
    values = np.empty((data.shape[0], data.shape[1] * 2), np.uint8)
    values[:, ::2] = data & 15
    values[:, 1::2] = data >> 4
    return values


def _powers(exponents: Array) -> Rows:
    """2 ** (exponent - 127) of scales that are exponents only; 255 stands for none."""
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)
    scales[exponents == 255] = np.nan
    return scales


def _unreadable(how: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the model is already quantised {how}, which is not read; get its BF16 or FP16 folder"
    )


def _contradiction(name: str) -> ModelFolderError:
    return ModelFolderError(f"{name[:200]} contradicts the tensors it belongs to: the model's files are damaged")
