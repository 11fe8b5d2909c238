"""What recurrent layers keep: found again where a page ended, given up when places are wanted, never leaked."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.pages import PageLayout, PagePool
from engine.runtime.cache import Cache
from engine.runtime.memories import Alternation
from engine.runtime.prefix import PrefixIndex
from engine.runtime.scheduler import Scheduler
from engine.runtime.sequence import Sequence, State
from tests.fakes import fake_pages

PAGE = 4


class Reader:
    """Sequences that are read by a scheduler; a memory is a sum of all tokens, kept in its place."""

    def __init__(self, places: int, *, most_running: int = 2, slice_tokens: int = 64) -> None:
        self.pages = fake_pages(64, PAGE)
        self.places = PagePool(places, PageLayout(1, (64,)))
        self.cache = Cache(self.pages, PrefixIndex(self.pages, b"toy"), memories=self.places)
        self.scheduler = Scheduler(
            self.cache, context=200, most_running=most_running, batch_tokens=64, slice_tokens=slice_tokens
        )
        self.sums = self.places.memory.view(np.int64)[:, 0]

    def add(self, tokens: list[int]) -> Sequence:
        sequence = Sequence(tokens, len(tokens) + 1)
        self.scheduler.add(sequence)
        return sequence

    def step(self, *, cancelled: bool = False) -> bool:
        plan = self.scheduler.plan()
        if plan is None:
            return False
        assert plan.batch.memories is not None
        used = plan.batch.memories[plan.batch.memories >= 0].tolist()
        assert len(used) == len(set(used)) or len(plan.spans) > 1
        for (before, after), span in zip(plan.batch.memories.tolist(), plan.spans, strict=True):
            new = int(span.sequence.ids[span.start : span.start + span.count].sum())
            self.sums[after] = (self.sums[before] if before >= 0 else 0) + new
        if cancelled:
            return True
        self.scheduler.computed(plan)
        for span in plan.spans:
            sequence = span.sequence
            assert sequence.memory is not None
            assert self.sums[sequence.memory] == sequence.ids[: sequence.computed].sum()
            if not sequence.remaining:
                self.scheduler.finish(sequence)
        return True

    def run(self) -> None:
        while self.step():
            pass


def test_a_beginning_is_found_where_a_page_ended() -> None:
    reader = Reader(8)
    first = reader.add(list(range(1, 23)))
    reader.run()
    again = reader.add([*range(1, 23), 50, 51])
    reader.run()
    assert (first.cached, again.cached) == (0, 20)
    assert reader.places.available == reader.places.count
    shorter = reader.add([*range(1, 18), 60])
    reader.run()
    assert shorter.cached == 0  # at the end of its fourth page nobody stopped


def test_what_was_given_up_is_computed_again() -> None:
    reader = Reader(4, most_running=1)
    reader.add(list(range(1, 23)))
    reader.run()
    for start in (30, 60, 90):
        reader.add(list(range(start, start + 22)))
        reader.run()
    again = reader.add([*range(1, 23), 50])
    reader.run()
    assert again.cached == 0


@settings(max_examples=100)
@given(
    texts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), min_size=1, max_size=6),
    slice_tokens=st.sampled_from([1, 3, 5, 64]),
    cancelled=st.lists(st.booleans(), max_size=20),
)
def test_sums_are_right_whatever_is_cancelled_or_shared(
    texts: list[list[int]], slice_tokens: int, cancelled: list[bool]
) -> None:
    reader = Reader(6, slice_tokens=slice_tokens)
    sequences = [reader.add(text) for text in texts]
    for stopped in cancelled:
        reader.step(cancelled=stopped)
    reader.run()
    assert all(sequence.state is State.FINISHED for sequence in sequences)
    assert reader.places.available == reader.places.count


def test_a_text_by_itself_takes_two_places_in_turn() -> None:
    pool = PagePool(2, PageLayout(1, (64,)))
    memory = Alternation(pool)
    first = memory.step()
    assert first is not None
    assert first[0, 0] == -1
    memory.stepped()
    second = memory.step()
    assert second is not None
    assert second[0].tolist() == [first[0, 1], 1 - first[0, 1]]
    memory.begin()
    assert memory.step() is not None
    memory.release()
    assert pool.available == 2
    assert Alternation(None).step() is None
