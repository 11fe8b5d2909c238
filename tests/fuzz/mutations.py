"""Files that are almost right: JSON documents with a few parts exchanged, bytes with a few changed."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

__all__ = ["changed_bytes", "changed_document", "changed_json"]

_NUMBERS = [0, -1, 1, 2, 7, 64, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 53, 1 << 63, 10**40, -(10**40)]
_FLOATS = [0.5, -0.0, 1e-300, 1e308, float("inf"), float("-inf"), float("nan")]
_TEXTS = ["", "0", "a", "NaN", "\0", "\ud800", "é世😀", "../x", "/etc/hostname", "x" * 5000, "default", "weight", "U8"]
_SCALARS = st.sampled_from([*_NUMBERS, *_FLOATS, *_TEXTS, None, True, False])
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(_TEXTS[:6]), inner, max_size=4),
    max_leaves=6,
)


def _places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Ways to every part of a document, some of each long list only."""
    found = [place] if place else []
    if isinstance(value, dict):
        keys = list(value)
        for key in keys[:40] + keys[-5:]:
            found += _places(value[key], (*place, key))
    elif isinstance(value, list):
        for number in range(min(len(value), 8)):
            found += _places(value[number], (*place, number))
    return found


@st.composite
def changed_document(draw: st.DrawFn, document: Any) -> Any:
    """A copy of a document with one to four parts exchanged, removed, renamed or added."""
    result = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 4))):
        places = _places(result)
        if not places:
            return result
        *way, last = draw(st.sampled_from(places))
        holder = result
        for step in way:
            holder = holder[step]
        match draw(st.sampled_from(["exchange", "remove", "add", "rename", "move"])):
            case "exchange":
                holder[last] = draw(_VALUES)
            case "remove":
                del holder[last]
            case "add" if isinstance(holder, dict):
                holder[draw(st.sampled_from(_TEXTS))] = draw(_VALUES)
            case "add":
                holder.insert(last, draw(_VALUES))
            case "rename" if isinstance(holder, dict):
                holder[draw(st.sampled_from([*_TEXTS, *map(str, holder)]))] = holder.pop(last)
            case _:
                way = draw(st.sampled_from(places))
                other = result
                for step in way:
                    other = other[step] if isinstance(other, dict | list) and _has(other, step) else None
                holder[last] = copy.deepcopy(other)
    return result


def _has(holder: Any, step: Any) -> bool:
    return step in holder if isinstance(holder, dict) else isinstance(step, int) and step < len(holder)


@st.composite
def changed_json(draw: st.DrawFn, document: Any) -> bytes:
    """A document as text, with parts of it, or now and then letters of it, changed."""
    text = json.dumps(draw(changed_document(document))).encode()
    return draw(changed_bytes(text)) if draw(st.integers(0, 4)) == 0 else text


@st.composite
def changed_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes with a few changed, left out, repeated or cut off."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(changed) - 1)))
        length = draw(st.sampled_from([1, 1, 2, 4, 8, 100]))
        match draw(st.sampled_from(["set", "set", "set", "cut", "remove", "repeat", "insert"])):
            case "set":
                changed[place : place + 1] = bytes([draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x5B, 0x7B]))])
            case "cut":
                del changed[place:]
            case "remove":
                del changed[place : place + length]
            case "repeat":
                changed[place:place] = changed[place : place + length]
            case _:
                changed[place:place] = draw(st.binary(min_size=1, max_size=8))
    return bytes(changed)
