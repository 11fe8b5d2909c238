"""A decoder whose logits depend on nothing but what it reads back through the page tables.

It writes (id, position) of every token into its page, as a real decoder writes
keys and values, and makes logits from all ids it finds there. A wrong page
table, a stale page, a skipped or doubled position changes every later token.
`plain_logits` is the same function without pages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.core.pages import PageLayout, PagePool
from engine.models.batch import Batch

_ENTRY = 8  # bytes per token in the fake cache: int32 id, int32 position


def fake_pages(count: int, tokens: int = 4) -> PagePool:
    """A pool whose pages are full of rubbish, as used memory is."""
    pool = PagePool(count, PageLayout(tokens=tokens, layer_bytes=(tokens * _ENTRY,)))
    pool.memory[:] = 0xA5
    return pool


def plain_logits(ids: Sequence[int] | NDArray[np.int32], vocab: int) -> NDArray[np.float32]:
    """float32 (vocab,): a function of every id and its position."""
    values = np.asarray(ids, np.uint64)
    with np.errstate(over="ignore"):
        places = np.arange(1, values.size + 1, dtype=np.uint64)
        mixed = (values + np.uint64(1)) * (places * np.uint64(0x9E3779B97F4A7C15) + np.uint64(12345))
        mixed ^= mixed >> np.uint64(29)
        state = np.bitwise_xor.reduce(mixed * np.uint64(0xBF58476D1CE4E5B9)) + np.uint64(values.size)
        row = (np.arange(vocab, dtype=np.uint64) + state) * np.uint64(0x94D049BB133111EB)
        row ^= row >> np.uint64(31)
        row *= np.uint64(0xBF58476D1CE4E5B9)
    return ((row >> np.uint64(40)).astype(np.float32) / np.float32(2**22)) - np.float32(2)


class FakeDecoder:
    """Stands in for `engine.models.decoder.Decoder`.

    shape(ids, row): a chance to change the row of logits that follows `ids`.
    before_step: called with each batch, on the thread that computes.
    """

    def __init__(
        self,
        pages: PagePool,
        vocab: int,
        *,
        shape: Callable[[list[int], NDArray[np.float32]], NDArray[np.float32]] | None = None,
        before_step: Callable[[Batch], None] | None = None,
    ) -> None:
        self.pages = pages
        self.vocab = vocab
        self.steps = 0
        self.tokens = 0
        self.largest = 0
        self.cancelled = False
        self._shape = shape
        self._before_step = before_step
        self._stop = threading.Event()
        self._cache = pages.memory.reshape(pages.count, -1).view(np.int32).reshape(pages.count, -1, 2)

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        self._check(batch)
        if self._before_step is not None:
            self._before_step(batch)
        size = self.pages.layout.tokens
        owners: dict[tuple[int, int], int] = {}
        rows: dict[int, NDArray[np.float32]] = {}
        for token in range(batch.ids.size):
            sequence, position = int(batch.sequence_of[token]), int(batch.positions[token])
            page = int(batch.tables[sequence, position // size])
            assert owners.setdefault((page, position % size), sequence) == sequence, "two sequences write one place"
            self._cache[page, position % size] = batch.ids[token], position
        for token in batch.wanted.tolist():
            rows[token] = self._row(batch.tables[batch.sequence_of[token]], int(batch.positions[token]) + 1)
        self.cancelled = self._stop.is_set()
        if self.cancelled:
            return np.full((batch.wanted.size, self.vocab), np.nan, np.float32)
        self.steps += 1
        self.tokens += batch.ids.size
        self.largest = max(self.largest, batch.ids.size)
        return np.array([rows[token] for token in batch.wanted.tolist()], np.float32).reshape(-1, self.vocab)

    def cancel(self) -> None:
        self._stop.set()

    def clear_cancel(self) -> None:
        self._stop.clear()

    def _row(self, table: NDArray[np.int32], length: int) -> NDArray[np.float32]:
        size = self.pages.layout.tokens
        places = np.arange(length)
        found = self._cache[table[places // size], places % size]
        assert np.array_equal(found[:, 1], places), "a page holds other positions than its table says"
        ids = found[:, 0]
        row = plain_logits(ids, self.vocab)
        return row if self._shape is None else self._shape(ids.tolist(), row)

    @staticmethod
    def _check(batch: Batch) -> None:
        for array in (batch.ids, batch.positions, batch.sequence_of, batch.tables, batch.lengths, batch.wanted):
            assert array.dtype == np.int32
        assert batch.ids.size == batch.positions.size == batch.sequence_of.size > 0
        same = np.diff(batch.sequence_of) == 0
        assert np.all(np.diff(batch.sequence_of) >= 0)
        assert np.all(np.diff(batch.positions)[same] == 1)
        assert np.all(np.diff(batch.wanted) > 0)
        last = np.append(~same, True)
        assert np.array_equal(batch.lengths, batch.positions[last] + 1)
        assert set(batch.wanted.tolist()) <= set(np.flatnonzero(last).tolist())
