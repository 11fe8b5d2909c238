"""The page pool as a machine: every page is free, idle, or held exactly as often as it is referenced."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from engine.core.pages import PageLayout, PagePool

LAYOUT = PageLayout(tokens=4, layer_bytes=(100, 64, 1))


def test_layers_begin_on_cache_lines() -> None:
    assert LAYOUT.layer_offsets == (0, 128, 192)
    assert LAYOUT.page_bytes == 256


def test_memory_is_aligned_zero_and_one_row_per_page() -> None:
    pool = PagePool(3, LAYOUT)
    assert pool.memory.shape == (3, 256)
    assert pool.memory.ctypes.data % 64 == 0
    assert not pool.memory.any()
    pool.memory[1] = 7
    assert not pool.memory[[0, 2]].any()


def test_pages_of_no_layers_need_no_memory() -> None:
    assert PagePool(2, PageLayout(tokens=4, layer_bytes=())).memory.shape == (2, 0)


def test_releasing_what_is_not_held_is_our_mistake() -> None:
    pool = PagePool(1, LAYOUT)
    with pytest.raises(AssertionError, match="page 0 is not held"):
        pool.release(0)
    with pytest.raises(AssertionError, match="page 0 is not held"):
        pool.keep(0)


class PoolMachine(RuleBasedStateMachine):
    """Twin: a counter of holds and a list of idle pages, longest idle first."""

    holds = Bundle("holds")

    @initialize(count=st.integers(1, 6))
    def create(self, count: int) -> None:
        self.pool = PagePool(count, LAYOUT)
        self.pool.on_evict = self.evicted
        self.held: Counter[int] = Counter()
        self.kept: set[int] = set()
        self.idle: list[int] = []
        self.evictions: list[int] = []

    def evicted(self, page: int) -> None:
        self.evictions.append(page)

    @precondition(lambda self: self.pool.available)
    @rule(target=holds)
    def take(self) -> int:
        free = self.pool.count - len(self.held) - len(self.idle)
        expected = [] if free else [self.idle.pop(0)]
        page = self.pool.take()
        assert self.evictions == expected
        self.evictions.clear()
        assert page not in self.held
        assert page not in self.idle
        self.kept.discard(page)
        self.held[page] += 1
        return page

    @rule(page=holds)
    def keep(self, page: int) -> None:
        self.pool.keep(page)
        self.kept.add(page)

    @rule(target=holds, page=holds)
    def share_held(self, page: int) -> int:
        self.pool.share(page)
        self.held[page] += 1
        return page

    @precondition(lambda self: self.idle)
    @rule(target=holds, data=st.data())
    def share_idle(self, data: st.DataObject) -> int:
        page = data.draw(st.sampled_from(self.idle))
        self.pool.share(page)
        self.idle.remove(page)
        self.held[page] += 1
        return page

    @rule(page=consumes(holds))
    def release(self, page: int) -> None:
        self.pool.release(page)
        self.held[page] -= 1
        if not self.held[page]:
            del self.held[page]
            if page in self.kept:
                self.idle.append(page)

    @rule()
    def drop_idle(self) -> None:
        self.pool.drop_idle()
        assert self.evictions == self.idle
        self.evictions.clear()
        self.kept.difference_update(self.idle)
        self.idle.clear()

    @invariant()
    def counts_agree(self) -> None:
        assert [self.pool.holders(page) for page in range(self.pool.count)] == [
            self.held[page] for page in range(self.pool.count)
        ]
        assert self.pool.idle == len(self.idle)
        assert self.pool.available == self.pool.count - len(self.held)
        assert not self.evictions


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
