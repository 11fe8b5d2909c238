"""Reads the header of a GGUF file: metadata and tensor places, every number checked before use.

Our own reader: the `gguf` package's takes 20 seconds for the vocabulary of a
Qwen model and trusts the lengths it finds. The package de-quantises (`read_rows`).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from engine.convert.files import open_for_reading, what_it_is_instead
from engine.errors import ModelFolderError, UnsupportedModelError

__all__ = ["CODINGS", "GgufFile", "GgufTensor", "read_codes", "read_gguf", "read_rows"]

# Types that are whole numbers with one scale for so many columns: what they are in our formats.
CODINGS: Mapping[GGMLQuantizationType, tuple[str, int]] = {
    GGMLQuantizationType.Q4_0: ("q4", 32),
    GGMLQuantizationType.Q8_0: ("q8", 32),
}
_MAGIC = b"GGUF"
_VERSIONS = {2, 3}
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MOST_ENTRIES = 1 << 20
_LARGEST_DIMENSION = 1 << 40
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor, slowest side first: (rows, columns), (entries,), or (experts, rows, columns).

    Rows lie one after the other from `begin` on.
    """

    path: Path
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int

    @property
    def columns(self) -> int:
        """Numbers in a row."""
        return self.shape[-1]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        block, size = GGML_QUANT_SIZES[self.type]
        return self.columns // block * size

    @property
    def bytes(self) -> int:
        """Bytes in the file."""
        return self.row_bytes * math.prod(self.shape[:-1])

    def experts(self) -> list[GgufTensor]:
        """The matrices of a tensor with three sides."""
        count, *sides = self.shape
        size = self.bytes // count
        return [replace(self, shape=tuple(sides), begin=self.begin + expert * size) for expert in range(count)]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What the header says. metadata: numbers, texts, booleans, and lists of those."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """The header of a GGUF file.

    Raises:
        ModelFolderError: it is cut short, damaged or no GGUF file
        UnsupportedModelError: a version or weight format that is not read; named
    """
    with open_for_reading(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        if file.read(4) != _MAGIC:
            raise ModelFolderError(what_it_is_instead(path) or f"{path.name} is no GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, _Cursor(path, data, 4, size))


def read_rows(tensor: GgufTensor, first: int, count: int) -> NDArray[np.float32]:
    """Rows first .. first + count, de-quantised to float32 (count, columns).

    Raises:
        ModelFolderError: the file is shorter than it was when it was opened
    """
    raw = _raw_rows(tensor, first, count)
    # Zero times an infinite scale is NaN; whoever packs the rows refuses those by name.
    with np.errstate(all="ignore"):
        values: NDArray[np.float32] = dequantize(raw, tensor.type)
    return values.reshape(count, tensor.columns)


def read_codes(tensor: GgufTensor, first: int, count: int) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Rows as they are stored, of the types in `CODINGS`: codes (count, columns), scales (count, columns / 32).

    Raises:
        ModelFolderError: as for `read_rows`
    """
    blocks = _raw_rows(tensor, first, count).reshape(count, -1, GGML_QUANT_SIZES[tensor.type][1])
    scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0].astype(np.float32)
    stored = blocks[:, :, 2:]
    is_q4 = CODINGS[tensor.type][0] == "q4"
    codes: NDArray[Any] = np.concatenate([stored & 15, stored >> 4], axis=2) if is_q4 else stored.view(np.int8)
    return np.ascontiguousarray(codes).reshape(count, tensor.columns), scales


def _raw_rows(tensor: GgufTensor, first: int, count: int) -> NDArray[np.uint8]:
    with open_for_reading(tensor.path) as file:
        file.seek(tensor.begin + first * tensor.row_bytes)
        raw = np.empty((count, tensor.row_bytes), np.uint8)
        if file.readinto(raw.data) != raw.nbytes:
            raise ModelFolderError(f"{tensor.path.name} became shorter while it was read")
    return raw


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    version = cursor.number("<u4")
    if version not in _VERSIONS:
        raise UnsupportedModelError(
            f"{path.name} has GGUF version {version}; versions 2 and 3 of little-endian files are read"
        )
    tensor_count, entry_count = cursor.number("<u8"), cursor.number("<u8")
    if max(tensor_count, entry_count) > _MOST_ENTRIES:
        raise cursor.damaged("it claims more entries than any model has")
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = cursor.text()
        if key in metadata:
            raise cursor.damaged(f"{key[:80]} occurs twice in its metadata")
        metadata[key] = cursor.value(cursor.number("<u4"))
    found = [_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.damaged(f"its alignment {alignment} is no power of two")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, kind, shape, offset in found:
        if name in tensors:
            raise cursor.damaged(f"{name[:80]} occurs twice")
        tensors[name] = GgufTensor(path, kind, shape, start + offset)
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
        if tensor.begin < end:
            raise cursor.damaged(f"{name[:80]} overlaps another tensor")
        end = tensor.begin + tensor.bytes
    if tensors and end > cursor.size:
        raise ModelFolderError(
            f"{path.name} ends {end - cursor.size} bytes too early: the download looks incomplete, fetch it again"
        )
    return GgufFile(path, metadata, tensors)


def _tensor_info(cursor: _Cursor) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    name = cursor.text()
    sides = [cursor.number("<u8") for _ in range(min(cursor.number("<u4"), 5))]
    code, offset = cursor.number("<u4"), cursor.number("<u8")
    if not 1 <= len(sides) <= 4 or not all(1 <= side <= _LARGEST_DIMENSION for side in sides):
        raise cursor.damaged(f"{name[:80]} has no valid shape")
    # The file counts the fastest side first; sides of 1 at the end say nothing.
    while len(sides) > 1 and sides[-1] == 1:
        sides.pop()
    try:
        kind = GGMLQuantizationType(code)
        block, size = GGML_QUANT_SIZES[kind]
        dequantize(np.zeros((1, size), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        raise UnsupportedModelError(
            f"{name[:80]} ({cursor.path.name}) has the weight format {code}, which is not read; get another file"
        ) from None
    if sides[0] % block:
        raise cursor.damaged(f"{name[:80]} has rows that are no multiple of {block} weights")
    if offset > cursor.size:
        raise ModelFolderError(
            f"{cursor.path.name} ends before {name[:80]} begins: the download looks incomplete, fetch it again"
        )
    return name, kind, tuple(reversed(sides)), offset


class _Cursor:
    """Walks through the header and never beyond the file."""

    def __init__(self, path: Path, data: mmap.mmap, at: int, size: int) -> None:
        self.path, self.data, self.at, self.size = path, data, at, size

    def damaged(self, what: str) -> ModelFolderError:
        return ModelFolderError(f"{self.path.name} is damaged: {what}; fetch it again")

    def number(self, kind: str) -> int:
        return int.from_bytes(self.take(int(kind[2])), "little")

    def take(self, count: int) -> bytes:
        if count > self.size - self.at:
            raise ModelFolderError(
                f"{self.path.name} ends inside its header: the download looks incomplete, fetch it again"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def text(self) -> str:
        return self.take(self.number("<u8")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.number("<u4"), self.number("<u8"))
        return self._scalars(kind, 1)[0]

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            # Each text has eight bytes of length at least, so a claim beyond the file fails before it costs anything.
            if count > (self.size - self.at) // 8:
                raise self.damaged("a list in its metadata is longer than the file")
            return self._texts(count)
        return self._scalars(kind, count)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise self.damaged(f"its metadata have a value of the unknown type {kind}")
        values = np.frombuffer(self.take(count * int(_SCALARS[kind][2])), _SCALARS[kind])
        if kind == _BOOL:
            return list(values.astype(bool).tolist())
        # The shortest decimal that means the same float32: 1e-05, not 9.999999747378752e-06.
        return [float(str(value)) for value in values] if _SCALARS[kind] == "<f4" else list(values.tolist())

    def _texts(self, count: int) -> list[str]:
        unpack, data, at, end = struct.Struct("<Q").unpack_from, self.data, self.at, self.size
        texts = []
        for _ in range(count):
            if at + 8 > end:
                break
            start = at + 8
            at = start + unpack(data, at)[0]
            if at > end:
                break
            texts.append(data[start:at].decode("utf-8", "replace"))
        if len(texts) < count:
            raise ModelFolderError(
                f"{self.path.name} ends inside its header: the download looks incomplete, fetch it again"
            )
        self.at = at
        return texts
