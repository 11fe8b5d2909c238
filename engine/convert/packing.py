"""Packs one tensor by slices of rows, on several threads, in little memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from math import frexp
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from engine.convert.feedback import HEADROOM, Feedback, has_feedback, rounded
from engine.convert.quantised import Coded
from engine.convert.recipe import repeats
from engine.convert.source import Source
from engine.core.cpu import machine
from engine.core.library import Kernels
from engine.core.quant import BLOCK_ROWS, FORMATS, Codes, Layout, magnitude
from engine.errors import InputError, ModelFolderError
from engine.models.assignment import Assignment
from engine.models.weights import VECTOR

__all__ = ["Packing", "Slice", "workers"]

Bytes = NDArray[np.uint8]
Rows = NDArray[np.float32]
Span = tuple[int, int]
Result = TypeVar("Result")

# Where the largest scale of codes that are repeated as they are is put: the top of float16, so that small ones last.
_SCALE_BITS = 15
# Float32 rows that one thread works on at a time.
_SLICE_BYTES = 8 << 20
# The same where columns are rounded one by one, each of all the rows at once.
_FEEDBACK_SLICE_BYTES = 16 << 20
# A tensor of at most this many float32 bytes is kept between the search for its largest weight and the packing;
# larger ones are read twice.
_KEPT_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Slice:
    """Packed bytes of some rows, and how far into the tensor's packed bytes they belong."""

    offset: int
    data: Bytes


def workers() -> ThreadPoolExecutor:
    """As many threads as this process may use cores, within reason."""
    return ThreadPoolExecutor(min(machine().default_threads, 16), thread_name_prefix="packing")


class Packing:
    """One tensor of ours on its way into a format: `measure` it, then take its `slices` or pack `into` memory.

    What the source has as whole numbers that the format can hold is repeated, not rounded a second time.
    weights: the source's rows, where they are in memory already.
    feedback: of the product's inputs; formats of few bits are then rounded for the product's sake.

    Raises, in all its steps:
        ModelFolderError: a weight is not finite, or does not fit the format;
            names the tensor as the source does
    """

    def __init__(
        self,
        source: Source,
        assignment: Assignment,
        name: str,
        group: int,
        *,
        pool: ThreadPoolExecutor,
        kernels: Kernels,
        weights: Rows | None = None,
        feedback: Feedback | None = None,
    ) -> None:
        self.exponent = 0
        self._weights = weights
        self._source, self._assignment, self._pool, self._kernels = source, assignment, pool, kernels
        self._name, self._group = name, group
        self._held: dict[int, Rows] = {}
        tensor = assignment.tensor
        self._layout = None if name == VECTOR else FORMATS[name].layout(tensor.rows, tensor.cols, group)
        levels, theirs = source.coding(assignment) or ("", 0)
        self._repeated = repeats(name, levels) and (theirs % group == 0 or theirs >= tensor.cols)
        self._feedback = feedback if has_feedback(name) and not self._repeated else None

    def measure(self) -> Iterator[None]:
        """Find the exponent, which depends on the largest of all weights. Every yield is a place to stop."""
        if self._layout is None or not self._group:
            return  # formats without scales have no exponent, so their rows are read only once
        if self._repeated:
            reach = 0.0
            for found in _in_order(self._pool, self._largest_scale, self._spans(self._layout)):
                reach = max(reach, found)
                yield
            if reach < np.inf:
                self.exponent = max(frexp(reach)[1] - _SCALE_BITS, -126) if reach else 0
                return
            self._repeated = False
        largest = 0.0
        for found in _in_order(self._pool, self._largest, self._spans(self._layout)):
            largest = max(largest, found)
            yield
        self.exponent = self._layout.format.exponent_for(largest if self._feedback is None else HEADROOM * largest)

    def slices(self) -> Iterator[list[Slice]]:
        """The packed tensor in pieces; bytes that belong to no piece are zero."""
        if self._layout is None:
            yield [Slice(0, self._vector())]
            return
        # Threads that round rows need no further ones for their products, which would only wait for each other.
        with threadpool_limits(1) if self._feedback is not None else nullcontext():
            yield from _in_order(self._pool, self._packed, self._spans(self._layout))

    def into(self, data: Bytes) -> Iterator[None]:
        """Pack into zeroed memory of the right size. Every yield is a place to stop."""
        for pieces in self.slices():
            for piece in pieces:
                data[piece.offset : piece.offset + piece.data.nbytes] = piece.data
            yield

    def _spans(self, layout: Layout) -> list[Span]:
        rows = self._assignment.tensor.rows
        size = _SLICE_BYTES if self._feedback is None else _FEEDBACK_SLICE_BYTES
        step = max(BLOCK_ROWS, size // (4 * layout.padded_cols) // BLOCK_ROWS * BLOCK_ROWS)
        return [(first, min(step, rows - first)) for first in range(0, rows, step)]

    def _largest_scale(self, span: Span) -> float:
        """Infinite when there is a code that our format has not."""
        codes, scales, _ = self._coded(*span)
        try:
            reach = magnitude(scales)
        except InputError as error:
            raise self._about(error, scales, span[0]) from None
        return np.inf if codes.dtype == np.int8 and codes.size and codes.min() < -127 else reach

    def _coded(self, first: int, count: int) -> Coded:
        """Rows as the source has them, in the levels of our format."""
        codes, scales, zeros = self._source.coded(self._assignment, first, count, self._group)
        if self._name == "q8" and zeros is not None:
            columns = np.repeat(zeros, self._group, axis=1)[:, : codes.shape[1]]
            return Coded((codes - columns).view(np.int8), scales, None)
        return Coded(codes, scales, zeros)

    def _largest(self, span: Span) -> float:
        rows = self._rows(*span)
        if self._weights is None and 4 * self._assignment.tensor.parameters <= _KEPT_BYTES:
            self._held[span[0]] = rows
        try:
            return magnitude(rows)
        except InputError as error:
            raise self._about(error, rows, span[0]) from None

    def _packed(self, span: Span) -> list[Slice]:
        first, count = span
        assert self._layout is not None
        own = self._layout.format.layout(count, self._layout.cols, self._group)
        buffer = own.empty()
        if self._repeated:
            codes, scales, zeros = self._coded(first, count)
            halves = np.ldexp(scales, -self.exponent).astype(np.float16)
            ones = None if zeros is None else np.ones_like(zeros)
            own.pack_codes(Codes(codes, halves, ones, zeros), 0, buffer)
            return list(_placed(self._layout, own, first, buffer))
        rows = self._held.pop(first, None)
        if rows is None:
            rows = self._rows(first, count)
        try:
            if self._feedback is None:
                own.pack_rows(rows, 0, buffer, self.exponent, self._kernels)
            else:
                own.pack_codes(rounded(rows, self._feedback, own, self.exponent, self._kernels), 0, buffer)
        except InputError as error:
            raise self._about(error, rows, first) from None
        return list(_placed(self._layout, own, first, buffer))

    def _rows(self, first: int, count: int) -> Rows:
        if self._weights is not None:
            return self._weights[first : first + count]
        return self._source.rows(self._assignment, first, count)

    def _vector(self) -> Bytes:
        values = self._source.rows(self._assignment, 0, 1)
        if not np.isfinite(values).all():
            raise ModelFolderError(f"{self._assignment.sources[0]} holds NaN or infinite numbers: the model is damaged")
        return values.view(np.uint8).reshape(-1)

    def _about(self, error: InputError, rows: Rows, first: int) -> ModelFolderError:
        """The error again, with the name of the tensor that the worst row came from."""
        finite = np.isfinite(rows).all(axis=1)
        if not finite.all():
            name = self._source.name_at(self._assignment, first + int(finite.argmin()))
            return ModelFolderError(f"{name} holds NaN or infinite numbers: the model is damaged")
        row = int(np.abs(rows).max(axis=1).argmax())
        return ModelFolderError(f"{self._source.name_at(self._assignment, first + row)}: {error}")


def _in_order(pool: ThreadPoolExecutor, task: Callable[[Span], Result], spans: Iterable[Span]) -> Iterator[Result]:
    """`map` on the pool that never runs far ahead of its reader."""
    ahead = 2 * pool._max_workers  # noqa: SLF001 - the pool tells its size nowhere else
    waiting: deque[Future[Result]] = deque()
    try:
        for span in spans:
            waiting.append(pool.submit(task, span))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _placed(layout: Layout, own: Layout, first: int, buffer: Bytes) -> Iterator[Slice]:
    """Where the parts of a packed slice lie in the packed whole: each part goes on block by block."""
    blocks = own.padded_rows // BLOCK_ROWS
    for whole, part in zip(layout.parts, own.parts, strict=True):
        offset = whole.offset + first // BLOCK_ROWS * (part.bytes // blocks)
        yield Slice(offset, buffer[part.offset : part.offset + part.bytes])
