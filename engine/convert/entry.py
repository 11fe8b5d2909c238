"""Where a stranger's tensor lies in a file, and getting it out by rows, by columns or whole.

Whoever makes an `Entry` has checked it against the file's size; what is read
here is never longer than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine.convert.files import open_for_reading
from engine.errors import ModelFolderError

__all__ = ["FLOAT8", "FLOATS", "NUMPY_TYPES", "Entry", "as_float32", "read_columns", "read_raw", "read_rows"]

Array = NDArray[Any]
Rows = NDArray[np.float32]

# The types that hold weights by themselves.
FLOATS: Mapping[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
FLOAT8: Mapping[str, np.dtype[Any]] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
NUMPY_TYPES: Mapping[str, np.dtype[Any]] = {
    **FLOATS,
    **FLOAT8,
    **{
        name: np.dtype(kind)
        for name, kind in {"BOOL": "u1", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2"}.items()
    },
    **{name: np.dtype(kind) for name, kind in {"U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8"}.items()},
}
# What each byte of a float8 type means.
_TABLES = {dtype: np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32) for dtype in FLOAT8.values()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of one file. dtype as safetensors spells it; `begin`, `end` are offsets in the file.

    strides: steps between neighbours, in numbers, where the tensor does not
        simply lie row after row; never negative, and all within begin..end.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    strides: tuple[int, ...] | None = None

    @property
    def bytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.begin

    @property
    def columns(self) -> int:
        """Numbers in a row; a single number is a row of one."""
        return self.shape[-1] if self.shape else 1


def read_rows(entry: Entry, first: int, count: int) -> Rows:
    """Rows first .. first + count as float32 (count, columns); a vector is one row.

    A tensor with more than two sides is its rows one after the other.

    Raises:
        ModelFolderError: the file is shorter than its header said when it was opened
    """
    return as_float32(read_raw(entry, first, count))


def read_raw(entry: Entry, first: int = 0, count: int | None = None) -> Array:
    """As `read_rows`, of all rows by default, in the tensor's own type."""
    dtype, columns = NUMPY_TYPES[entry.dtype], entry.columns
    if count is None:
        count = prod(entry.shape[:-1])
    if entry.strides is not None:
        return _strided(entry, first, count)
    raw = np.empty(count * columns, dtype)
    _read_into(entry, entry.begin + first * columns * dtype.itemsize, raw)
    return raw.reshape(count, columns)


def read_columns(entry: Entry, first: int, count: int) -> Array:
    """Columns first .. first + count of a matrix in its own type, (rows, count)."""
    if entry.strides is not None:
        return read_raw(entry)[:, first : first + count]
    dtype, (rows, columns) = NUMPY_TYPES[entry.dtype], entry.shape
    raw = np.empty((rows, count), dtype)
    step, place = columns * dtype.itemsize, entry.begin + first * dtype.itemsize
    with open_for_reading(entry.path, buffered=False) as file:
        for row in raw.view(np.uint8):
            file.seek(place)
            place += step
            if file.readinto(row.data) != row.nbytes:
                raise _shorter(entry)
    return raw


def as_float32(raw: Array) -> Rows:
    """Any of `NUMPY_TYPES` as float32; beyond its range becomes infinite, which whoever packs it refuses by name."""
    if raw.dtype in _TABLES:
        return _TABLES[raw.dtype][raw.view(np.uint8)]
    if raw.dtype == FLOATS["BF16"]:
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore"):
        return raw.astype(np.float32, copy=False)


def _strided(entry: Entry, first: int, count: int) -> Array:
    """Rows of a tensor whose numbers do not lie one after the other: what spans them is read, then picked from."""
    assert entry.strides is not None
    dtype = NUMPY_TYPES[entry.dtype]
    rows, columns = (1, 1, *entry.shape)[-2:]
    row_step, column_step = (0, 1, *entry.strides)[-2:]
    if first + count > rows:
        raise IndexError(f"rows {first}..{first + count} of {rows}")
    if not count or not columns:
        return np.empty((count, columns), dtype)
    span = np.empty((count - 1) * row_step + (columns - 1) * column_step + 1, dtype)
    _read_into(entry, entry.begin + first * row_step * dtype.itemsize, span)
    steps = (row_step * dtype.itemsize, column_step * dtype.itemsize)
    return np.ascontiguousarray(np.lib.stride_tricks.as_strided(span, (count, columns), steps))


def _read_into(entry: Entry, place: int, raw: Array) -> None:
    if place + raw.nbytes > entry.end:
        raise IndexError(f"{raw.nbytes} bytes at {place} of a tensor that ends at {entry.end}")
    with open_for_reading(entry.path) as file:
        file.seek(place)
        if file.readinto(raw.view(np.uint8).data) != raw.nbytes:
            raise _shorter(entry)


def _shorter(entry: Entry) -> ModelFolderError:
    return ModelFolderError(f"{entry.path.name} became shorter while it was read")
