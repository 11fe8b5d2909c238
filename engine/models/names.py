"""Where the tensors of a model lie in other people's files: their names, and which rows of them are meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Names", "Part", "RowReader", "table"]

Rows = NDArray[np.float32]


class RowReader(Protocol):
    """Whoever reads tensors of theirs."""

    def rows(self, name: str, first: int, count: int) -> Rows:
        """Float32 (count, columns); a vector is one row."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one of their tensors, or entries of a vector; all of them where nothing else is said.

    name: with {n} for the layer's number and {e} for the expert's; `model.` and
        `lm_head` at its beginning are spelt as the files spell them.
    every, offset, take: theirs come in runs of `every`, of which `take` from `offset` on are meant.
    transposed: stored as (columns, rows).
    plus: what their numbers lack (norm weights that are stored less 1).
    unit: every row is divided by its length.
    flat: a vector that is stored as a matrix of so many rows.
    depthwise: a vector that is stored as the kernels of a convolution, (`flat`, 1, taps).
    stacked: the tensor holds all experts, one after the other.
    otherwise: what is meant in files without a tensor of this name.
    of, begin: of a stacked tensor: how many experts it holds, and the first row of the one that is meant.
    """

    name: str
    every: int = 0
    offset: int = 0
    take: int = 0
    transposed: bool = False
    plus: float = 0.0
    unit: bool = False
    flat: int = 0
    depthwise: bool = False
    stacked: bool = False
    otherwise: Part | None = None
    of: int = 0
    begin: int = 0

    def under(self, body: str, head: str) -> Part:
        """The same where files write `body` for `model.`, and `head` before `lm_head`."""
        name = self.name
        if name.startswith("model."):
            name = body + name.removeprefix("model.")
        elif name.startswith("lm_head"):
            name = head + name
        return replace(self, name=name, otherwise=self.otherwise and self.otherwise.under(body, head))

    def at(self, layer: str, expert: int, experts: int) -> Part:
        """The same of one layer, and of one of its experts."""
        return replace(
            self,
            name=self.name.replace("{n}", layer).replace("{e}", str(expert)),
            otherwise=self.otherwise and self.otherwise.at(layer, expert, experts),
            begin=expert if self.stacked else 0,
            of=experts if self.stacked else 0,
        )

    def among(self, shapes: Mapping[str, Sequence[int]]) -> Part:
        """The part as it lies in files with tensors of these shapes, or what stands for it there."""
        if self.otherwise is not None and self.name not in shapes:
            return self.otherwise.among(shapes)
        shape = shapes.get(self.name, ())
        rows = shape[1] if len(shape) == 3 else 1
        return replace(self, otherwise=None, begin=self.begin * rows)

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """What theirs must be for this to be (rows, columns), or (entries,) of ours."""
        if self.flat:
            return (self.flat, 1, ours[0] // self.flat) if self.depthwise else (self.flat, ours[0] // self.flat)
        rows = ours[0] // self.take * self.every if self.every else ours[0]
        theirs = (rows, *ours[1:])
        if self.transposed:
            theirs = theirs[::-1]
        return (self.of, *theirs) if self.of else theirs

    @property
    def is_rows(self) -> bool:
        """Whether rows of ours are rows of theirs, number for number."""
        return not (self.transposed or self.unit)

    def span(self, first: int, count: int) -> tuple[int, int, NDArray[np.int64] | slice]:
        """(first of theirs, how many of them, which of those) for rows first .. first + count of ours."""
        if not self.every:
            return self.begin + first, count, slice(None)
        wanted = self._theirs(first, count)
        begin = int(wanted[0])
        return self.begin + begin, int(wanted[-1]) + 1 - begin, wanted - begin

    def read(self, reader: RowReader, first: int, count: int, columns: int) -> Rows:
        """Float32 (count, columns): rows first .. first + count of ours."""
        if self.transposed:
            return reader.rows(self.name, self.begin, columns).T[self._theirs(first, count)]
        begin, length, wanted = self.span(first, count)
        rows = reader.rows(self.name, begin, length)[wanted]
        if self.unit:
            # A running sum has one order on every computer. Lengths below 1e-12 count as that, as in the reference.
            squares = np.cumsum(rows.astype(np.float64) ** 2, axis=1)[:, -1:]
            rows = (rows / np.maximum(np.sqrt(squares), 1e-12)).astype(np.float32)
        return rows

    def vector(self, reader: RowReader, count: int) -> Rows:
        """Float32 (count,): all entries of ours."""
        values: Rows = reader.rows(self.name, self.begin, self.flat or 1).reshape(-1)[self._theirs(0, count)]
        return values + np.float32(self.plus) if self.plus else values

    def _theirs(self, first: int, count: int) -> NDArray[np.int64]:
        rows = np.arange(first, first + count)
        return rows // self.take * self.every + self.offset + rows % self.take if self.every else rows


# Our tensor -> theirs, stacked by rows in this order; {n} is the layer.
Names = Mapping[str, tuple[Part, ...]]


def table(names: Mapping[str, str | Part | tuple[str | Part, ...]]) -> Names:
    """Names as they are written down: a plain name is a whole tensor."""

    def part(given: str | Part) -> Part:
        return Part(given) if isinstance(given, str) else given

    return {
        ours: tuple(part(given) for given in (theirs if isinstance(theirs, tuple) else (theirs,)))
        for ours, theirs in names.items()
    }
