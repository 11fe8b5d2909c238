"""A decoder whose logits depend on nothing but what it reads back through the page tables.

It writes (id, position) of every token into its page, as a real decoder writes
keys and values, and makes logits from all ids it finds there. A wrong page
table, a stale page, a skipped or doubled position changes every later token.
`plain_logits` is the same function without pages. `toy` makes a whole model
around it, `ready` one with real kernels, `Ear` listens to an answer.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import api
from engine.core.pages import PageLayout, PagePool
from engine.models.batch import Batch
from engine.runtime.events import Delta, Done, Event, Failed, Loaded, LoadedModel, Progress, Started
from engine.runtime.model import Model
from engine.settings import Conversion, EngineSettings, Sampling
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.factory import CHATML, tok_json

VOCAB = 320  # 256 bytes, 4 control tokens, and 60 rows without a token
END = 259  # <|im_end|>
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
        assert set(batch.wanted.tolist()) <= set(range(batch.ids.size))


Shape = Callable[[list[int], NDArray[np.float32]], NDArray[np.float32]]


def tokenizer_files(template: str | None = CHATML, **changes: Any) -> dict[str, bytes]:
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>"} | changes
    if template is not None:
        config["chat_template"] = template
    return {"tokenizer.json": json.dumps(tok_json()).encode(), "tokenizer_config.json": json.dumps(config).encode()}


def toy(
    *,
    pages: int = 64,
    page_tokens: int = 4,
    context: int = 256,
    most_running: int = 8,
    shape: Shape | None = None,
    template: str | None = CHATML,
    before_step: Callable[[Any], None] | None = None,
    end_ids: Iterable[int] = (END,),
) -> Model:
    pool = fake_pages(pages, page_tokens)
    files = tokenizer_files(template)
    decoder = FakeDecoder(pool, VOCAB, shape=shape, before_step=before_step)
    info = LoadedModel(
        path=Path("toy"),
        name="toy",
        family="Toy",
        format="float32",
        context=context,
        model_context=context,
        chat_template=template is not None,
        defaults=Sampling(),
        weight_bytes=0,
        kv_bytes=0,
        tier="generic",
        threads=1,
    )
    return Model(
        decoder=decoder,
        pages=pool,
        tokenizer=Tokenizer.from_files(files),
        template=ChatTemplate.from_files(files),
        identity=b"toy",
        vocab_size=VOCAB,
        end_ids=frozenset(end_ids),
        context=context,
        most_running=most_running,
        batch_tokens=64,
        info=info,
        release=lambda: None,
    )


def saying(ids: Sequence[int], *, after: int) -> Shape:
    """The model says exactly `ids` after a prompt of `after` tokens, then only the end token."""

    def shape(before: list[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
        place = len(before) - after
        row = np.full_like(row, -10.0)
        row[ids[place] if 0 <= place < len(ids) else END] = 10.0
        return row

    return shape


class Ear:
    """A sink that checks the order of events as they come."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._end = threading.Event()

    def __call__(self, event: Event | Loaded) -> None:
        assert not self.ended, f"{event} came after the end"
        assert not isinstance(event, Loaded)
        begun = [heard for heard in self.events if not (isinstance(heard, Progress) and heard.stage == "queue")]
        if isinstance(event, Started):
            assert not begun
        elif isinstance(event, Progress) and event.stage == "queue":
            pass  # before it starts, and again when it was paused
        elif not isinstance(event, Done | Failed):
            assert isinstance(begun[0], Started)
        self.events.append(event)
        if self.ended:
            self._end.set()

    def wait(self) -> Event:
        """The last event, waited for."""
        assert self._end.wait(10), f"no end after {self.events[-3:]}"
        return self.events[-1]

    @property
    def ended(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Done | Failed)

    @property
    def done(self) -> Done:
        assert isinstance(self.events[-1], Done), self.events[-1:]
        return self.events[-1]

    @property
    def failed(self) -> Failed:
        assert isinstance(self.events[-1], Failed), self.events[-1:]
        return self.events[-1]

    @property
    def deltas(self) -> list[Delta]:
        return [event for event in self.events if isinstance(event, Delta)]

    @property
    def progress(self) -> list[Progress]:
        return [event for event in self.events if isinstance(event, Progress)]


@contextmanager
def ready(folder: Path, conversion: Conversion = Conversion(), **settings: Any) -> Iterator[Model]:
    """A real model made of a folder, with nothing that ends its answers; wants `compiled_kernels`."""
    steps = api._opened(folder, EngineSettings(**settings), conversion=conversion)
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            model: Model = replace(finished.value, end_ids=frozenset())
            break
    try:
        yield model
    finally:
        model.release()
