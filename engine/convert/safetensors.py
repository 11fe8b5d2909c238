"""Reads the header of safetensors files, checked number by number: which tensors there are, and where.

The verdict on a header is that of the reference library. Nothing is allocated
and nothing will be read at a place that the file's own size does not vouch for.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.convert.entry import Entry
from engine.convert.files import open_for_reading, what_it_is_instead
from engine.errors import ModelFolderError

__all__ = ["read_header"]

# Bits of every type that the format knows.
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(
        ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
        8,
    ),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
}
_LARGEST_HEADER = 100_000_000
_U64 = 1 << 64


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file by name, in the order of their data.

    Raises:
        ModelFolderError: the file is not a whole and sound safetensors file;
            the sentence tells a broken download, a git-LFS pointer, a web page
            and a damaged header apart
    """
    with open_for_reading(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
            raise ModelFolderError(_not_a_header(path, size, length))
        header = file.read(length)
    if len(header) != length:
        raise ModelFolderError(f"{path.name} became shorter while it was read")
    entries = dict(_entries(path, header, size - 8 - length))
    return {name: entries[name] for name in sorted(entries, key=lambda name: (entries[name].begin, entries[name].end))}


def _not_a_header(path: Path, size: int, length: int) -> str:
    instead = what_it_is_instead(path)
    if instead is not None:
        return instead
    if size < 8 or 2 <= length <= _LARGEST_HEADER:
        return f"{path.name} is only {size} bytes long: the download looks incomplete, fetch it again"
    return f"{path.name} is no safetensors file: it claims a header of {length} bytes"


def _entries(path: Path, header: bytes, data_bytes: int) -> Iterator[tuple[str, Entry]]:
    values = _json(path, header)
    metadata = values.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise _damaged(path, "its __metadata__ are not texts")
    found = {name: _entry(path, name, value) for name, value in values.items()}
    end = 0
    for name, entry in sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise _damaged(path, f"{_short(name)} does not begin where the tensor before it ends")
        end = entry.end
    if end > data_bytes:
        raise ModelFolderError(
            f"{path.name} ends {end - data_bytes} bytes too early: the download looks incomplete, fetch it again"
        )
    if end < data_bytes:
        raise _damaged(path, f"{data_bytes - end} bytes at its end belong to no tensor")
    data = 8 + len(header)
    for name, entry in found.items():
        yield name, Entry(path, entry.dtype, entry.shape, data + entry.begin, data + entry.end)


def _entry(path: Path, name: str, value: Any) -> Entry:
    """One tensor with offsets counted from the first tensor."""
    if not isinstance(value, dict):
        raise _damaged(path, f"{_short(name)} is not described by an object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _damaged(path, f"{_short(name)} has the unknown type {_short(dtype)}")
    if not isinstance(shape, list) or not all(_is_u64(side) for side in shape):
        raise _damaged(path, f"{_short(name)} has no valid shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_u64(offset) for offset in offsets):
        raise _damaged(path, f"{_short(name)} has no valid data_offsets")
    begin, end = offsets
    if end < begin:
        raise _damaged(path, f"{_short(name)} ends before it begins")
    count = 1
    for side in shape:
        count *= side
        if count >= _U64:
            raise _damaged(path, f"the shape of {_short(name)} is too large")
    bits = count * _BITS[dtype]
    if bits >= _U64 or bits % 8 or bits // 8 != end - begin:
        raise _damaged(path, f"{_short(name)} has {end - begin} bytes, which its type and shape contradict")
    return Entry(path, dtype, tuple(shape), begin, end)


def _json(path: Path, header: bytes) -> dict[str, Any]:
    try:
        values = json.loads(header.decode(), object_pairs_hook=_strict_object, parse_constant=_refuse)
        # A lone surrogate cannot be written as UTF-8; what json lets pass is no text.
        json.dumps(list(values), ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise _damaged(path, "its header is not JSON") from None
    if not isinstance(values, dict):
        raise _damaged(path, "its header is not a JSON object")
    return values


def _strict_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    # Tensors are not looked up twice by the reference either; a repeated name is nobody's honest work.
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _refuse(constant: str) -> float:
    raise ValueError(constant)


def _is_u64(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _U64


def _damaged(path: Path, what: str) -> ModelFolderError:
    return ModelFolderError(f"{path.name} is damaged: {what}; fetch it again")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
