"""Strings that know which of their characters people wrote.

A chat template mixes its own text with what was said. `Text` is a string for
every purpose of a template, and its operations carry along which characters
are content, so that the rendered prompt can still be told apart however the
template cut, trimmed and joined it.
"""

# ruff: noqa: D102 - these are str's methods, and do what str's do

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Self, SupportsIndex

__all__ = ["Text", "joined", "spans_of"]

Span = tuple[int, int]


class Text(str):
    """A string with the spans of it that are content; a plain `str` is template text.

    Operations that this class does not override give plain strings: whoever
    calls them has to mark the result (`template.py` marks all of it).
    """

    # Underscored names cannot be reached from a template.
    __slots__ = ("_spans",)
    _spans: tuple[Span, ...]

    def __new__(cls, value: str, spans: Iterable[Span] | None = None) -> Self:
        """`spans`: (begin, end) of content, ascending and disjoint; None means all of it."""
        text = super().__new__(cls, value)
        text._spans = ((0, len(value)),) * bool(value) if spans is None else tuple(spans)
        return text

    def _cut(self, begin: int, end: int) -> Text:
        inside = ((max(b, begin) - begin, min(e, end) - begin) for b, e in self._spans)
        return Text(str.__getitem__(self, slice(begin, end)), [(b, e) for b, e in inside if b < e])

    def _recased(self, changed: str) -> Text:
        """`changed` has this text's characters in another case: content stays where it is if none was added."""
        return Text(changed, self._spans if len(changed) == len(self) else None)

    def __str__(self) -> str:
        return self

    def __add__(self, other: object) -> Text:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> Text:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> Text:
        return joined([self] * times.__index__()) if isinstance(times, int) else NotImplemented

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> Text:
        if isinstance(key, slice):
            begin, end, step = key.indices(len(self))
            if step == 1:
                return self._cut(begin, max(begin, end))
            return joined([self._cut(i, i + 1) for i in range(begin, end, step)])
        position = range(len(self))[key]  # raises what str raises
        return self._cut(position, position + 1)

    def __iter__(self) -> Iterator[str]:
        return (self._cut(i, i + 1) for i in range(len(self)))

    def strip(self, chars: str | None = None) -> Text:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> Text:
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None) -> Text:
        return self._cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str) -> Text:
        return self._cut(len(self) - len(str.removeprefix(self, prefix)), len(self))

    def removesuffix(self, suffix: str) -> Text:
        return self._cut(0, len(str.removesuffix(self, suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:  # noqa: FBT001, FBT002 - str's signature
        lines = self._located(str.splitlines(self, keepends=True))
        lengths = map(len, str.splitlines(self, keepends))
        return [line[:length] for line, length in zip(lines, lengths, strict=True)]

    def partition(self, sep: str) -> tuple[str, str, str]:
        before, found, after = str.partition(self, sep)
        return self._three(len(before), len(found), len(after))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        before, found, after = str.rpartition(self, sep)
        return self._three(len(before), len(found), len(after))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Text:
        if len(new) < 3 and self._spans == ((0, len(self)),):
            # No control token is that short, so what is put into content may be content: a long text takes one step.
            return Text(str.replace(self, old, new, count))
        times = count.__index__()
        if not old:  # between all characters
            if times == 0:
                return self
            gaps = len(self) + 1 if times < 0 else min(times, len(self) + 1)
            parts: list[str] = []
            for position in range(gaps):
                parts += (new, self._cut(position, position + 1))
            return joined([*parts, self._cut(gaps, len(self))] if gaps <= len(self) else parts)
        return joined(_between(self.split(old, times), new))

    def join(self, parts: Iterable[str], /) -> Text:
        return joined(_between(list(parts), self))

    def upper(self) -> Text:
        return self._recased(str.upper(self))

    def lower(self) -> Text:
        return self._recased(str.lower(self))

    def title(self) -> Text:
        return self._recased(str.title(self))

    def capitalize(self) -> Text:
        return self._recased(str.capitalize(self))

    def swapcase(self) -> Text:
        return self._recased(str.swapcase(self))

    def casefold(self) -> Text:
        return self._recased(str.casefold(self))

    def _located(self, parts: Sequence[str], separator: str | None = "") -> list[str]:
        """`parts`, which str's own method cut out of this text in order, with their content.

        separator: what stood between them; None for any white space.
        """
        located: list[str] = []
        position = 0
        for part in parts:
            begin = str.index(self, part, position)
            located.append(self._cut(begin, begin + len(part)))
            position = begin + len(part) + len(separator or "")
        return located

    def _three(self, before: int, found: int, after: int) -> tuple[str, str, str]:
        end = before + found
        return self._cut(0, before), self._cut(before, end), self._cut(end, end + after)


def spans_of(text: str) -> tuple[Span, ...]:
    """(begin, end) of each stretch of content in `text`, ascending; a plain string has none."""
    return text._spans if isinstance(text, Text) else ()  # noqa: SLF001


def joined(parts: Iterable[str]) -> Text:
    """Strings put together; what was content stays content."""
    pieces = list(parts)
    spans: list[Span] = []
    position = 0
    for piece in pieces:
        for begin, end in spans_of(piece):
            if spans and spans[-1][1] == position + begin:
                spans[-1] = (spans[-1][0], position + end)
            else:
                spans.append((position + begin, position + end))
        position += len(piece)
    return Text("".join(pieces), spans)


def _between(parts: Sequence[str], separator: str) -> list[str]:
    """`parts` with `separator` between them."""
    result: list[str] = []
    for part in parts:
        result += (separator, part)
    return result[1:]
