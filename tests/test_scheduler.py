"""Who runs when is not visible in any answer: batched equals alone, sliced equals whole, paused equals undisturbed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from engine.errors import ContextOverflowError
from engine.runtime.cache import Cache
from engine.runtime.prefix import PrefixIndex
from engine.runtime.scheduler import Guesser, Pace, Scheduler
from engine.runtime.sequence import Sequence, State
from engine.runtime.snapshots import Snapshots
from engine.settings import SchedulingPolicy
from tests.fakes import FakeDecoder, fake_pages, plain_logits

VOCAB = 11


def alone(prompt: list[int], count: int) -> list[int]:
    """The greedy answer as a pure function of the prompt."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(plain_logits(ids, VOCAB).argmax()))
    return ids[len(prompt) :]


class Bench:
    """A scheduler, a fake decoder and greedy answers of given lengths."""

    def __init__(
        self,
        *,
        pages: int = 64,
        page_tokens: int = 4,
        context: int = 256,
        most_running: int = 8,
        batch_tokens: int = 64,
        slice_tokens: int | None = None,
        policy: SchedulingPolicy = "first-come",
        guesser: Guesser | None = None,
        snapshots: Path | None = None,
    ) -> None:
        self.pool = fake_pages(pages, page_tokens)
        self.guesser = guesser
        self.decoder = FakeDecoder(self.pool, VOCAB)
        self.prefix = PrefixIndex(self.pool, b"toy")
        layout = self.pool.layout
        kept = snapshots and Snapshots(
            snapshots, b"toy", page_bytes=layout.page_bytes, ids_bytes=4 * layout.tokens, limit_bytes=2000
        )
        self.cache = Cache(self.pool, self.prefix, kept)
        self.scheduler = Scheduler(
            self.cache,
            policy=policy,
            context=context,
            most_running=most_running,
            batch_tokens=batch_tokens,
            slice_tokens=slice_tokens,
        )
        self.wanted: dict[Sequence, int] = {}

    def add(self, prompt: list[int], count: int, client: str = "") -> Sequence:
        self.scheduler.check(len(prompt))
        sequence = Sequence(prompt, len(prompt) + count, client)
        self.wanted[sequence] = count
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> bool:
        plan = self.scheduler.plan(self.guesser)
        if plan is None:
            return False
        ends = np.cumsum([span.tokens for span in plan.spans])
        wanted = [range(end - span.rows, end) for end, span in zip(ends, plan.spans, strict=True)]
        assert plan.batch.wanted.tolist() == [row for rows in wanted for row in rows]
        rows = iter(self.decoder.forward(plan.batch))
        self.scheduler.computed(plan)
        for span in plan.spans:
            drawn = [int(next(rows).argmax()) for _ in range(span.rows)]
            for token, guess in zip(drawn, (*span.guess.tolist(), None), strict=bool(drawn)):
                span.sequence.append(token)
                if self._ended(span.sequence):
                    self.scheduler.finish(span.sequence)
                    break
                if token != guess:
                    break
                self.scheduler.guessed_right(span.sequence)
        return True

    def _ended(self, sequence: Sequence) -> bool:
        return sequence.generated == self.wanted[sequence] or sequence.length >= self.scheduler.limit

    def run(self, most_steps: int = 2000) -> None:
        for _ in range(most_steps):
            if not self.step():
                return
        pytest.fail("no end in sight")

    def check_pages(self) -> None:
        held = Counter(page for sequence in self.scheduler.running for page in sequence.pages)
        assert [self.pool.holders(page) for page in range(self.pool.count)] == [
            held[page] for page in range(self.pool.count)
        ]
        for sequence in [*self.scheduler.waiting, *(s for s in self.wanted if s.state is State.FINISHED)]:
            assert not sequence.pages


def answer(sequence: Sequence) -> list[int]:
    return sequence.ids[sequence.prompt :].tolist()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


# ---------------------------------------------------------------- equal to alone (case S06)


@pytest.mark.parametrize("slice_tokens", [1, 3, 4, 7, 64, None])
@pytest.mark.parametrize("page_tokens", [1, 4, 64])
def test_sliced_equals_whole(slice_tokens: int | None, page_tokens: int) -> None:
    bench = Bench(pages=256 // page_tokens, page_tokens=page_tokens, slice_tokens=slice_tokens)
    sequence = bench.add(prompt_of(37), 20)
    bench.run()
    assert answer(sequence) == alone(prompt_of(37), 20)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 25)), min_size=1, max_size=7
    ),
    pages=st.integers(15, 40),
    page_tokens=st.sampled_from([4, 5]),
    most_running=st.integers(1, 6),
    batch_tokens=st.integers(6, 40),
    slice_tokens=st.sampled_from([1, 5, 16, None]),
    gaps=st.lists(st.integers(0, 6), min_size=7, max_size=7),
)
def test_batched_paused_and_cached_equal_alone(
    requests: list[tuple[list[int], int]],
    pages: int,
    page_tokens: int,
    most_running: int,
    batch_tokens: int,
    slice_tokens: int | None,
    gaps: list[int],
) -> None:
    """Few ids make shared prefixes common; few pages make pauses and evictions common."""
    bench = Bench(
        pages=pages,
        page_tokens=page_tokens,
        most_running=most_running,
        batch_tokens=batch_tokens,
        slice_tokens=slice_tokens,
    )
    sequences = []
    for (prompt, count), gap in zip(requests, gaps, strict=False):
        sequences.append(bench.add(prompt, count))
        for _ in range(gap):
            bench.step()
            bench.check_pages()
    bench.run()
    for sequence, (prompt, count) in zip(sequences, requests, strict=True):
        assert answer(sequence) == alone(prompt, count)
    assert bench.pool.available == bench.pool.count


def test_a_step_mixes_answers_with_a_slice() -> None:
    bench = Bench(slice_tokens=8)
    first = bench.add(prompt_of(4), 30)
    bench.step()
    bench.add(prompt_of(30, seed=1), 2)
    before = first.generated
    sizes = []
    while bench.scheduler.running[-1] is first or bench.scheduler.running[-1].remaining > 1:
        tokens = bench.decoder.tokens
        bench.step()
        sizes.append(bench.decoder.tokens - tokens)
    assert sizes[:3] == [9, 9, 9]
    assert first.generated == before + len(sizes)


def test_no_step_is_larger_than_the_decoder_takes() -> None:
    bench = Bench(batch_tokens=6, most_running=9, slice_tokens=100)
    for seed in range(9):
        bench.add(prompt_of(13, seed), 9)
    bench.run()
    assert bench.decoder.largest == 6
    assert [answer(s) for s in bench.wanted] == [alone(prompt_of(13, seed), 9) for seed in range(9)]


# ---------------------------------------------------------------- order


def test_first_come_first_served() -> None:
    bench = Bench(most_running=2)
    sequences = [bench.add(prompt_of(5, seed), 6) for seed in range(5)]
    ended: list[Sequence] = []
    while bench.step():
        ended += [s for s in sequences if s.state is State.FINISHED and s not in ended]
        running = [s.number for s in bench.scheduler.running]
        assert running == sorted(running)
        assert len(running) <= 2
    assert ended == sequences


def test_small_ones_pass_a_giant_that_waits_for_pages_but_not_for_ever() -> None:
    bench = Bench(pages=8, context=32, most_running=4)
    bench.add(prompt_of(9), 20)
    bench.step()
    giant = bench.add(prompt_of(29, seed=1), 2)
    small = [bench.add(prompt_of(3, seed), 2) for seed in range(2, 22)]
    bench.run()
    order = sorted([giant, *small], key=lambda s: s.overtaken, reverse=True)
    assert order[0] is giant
    assert giant.overtaken == 8
    for sequence, count in bench.wanted.items():
        assert answer(sequence) == alone(sequence.ids[: sequence.prompt].tolist(), count)


# ---------------------------------------------------------------- the pool is too small (case R03)


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    bench = Bench(pages=8, context=256)
    with pytest.raises(ContextOverflowError, match=r"has 40 tokens and the context holds 32") as caught:
        bench.add(prompt_of(40), 5)
    assert (caught.value.needed_tokens, caught.value.context_tokens) == (41, 32)
    with pytest.raises(ContextOverflowError):
        bench.add(prompt_of(32), 1)
    sequence = bench.add(prompt_of(31), 1)
    bench.run()
    assert answer(sequence) == alone(prompt_of(31), 1)


@pytest.mark.parametrize("shared", [True, False], ids=["same prompt", "different prompts"])
def test_three_chats_that_together_need_more_than_the_pool(shared: bool) -> None:
    bench = Bench(pages=8, context=32)
    prompts = [prompt_of(8, 0 if shared else seed) for seed in range(3)]
    sequences = [bench.add(prompt, 20) for prompt in prompts]
    bench.run()
    assert [answer(s) for s in sequences] == [alone(prompt, 20) for prompt in prompts]
    assert sequences[0].pauses == 0
    assert sum(s.pauses for s in sequences) > 0
    assert max(s.pauses for s in sequences) <= 4
    assert bench.pool.available == 8


def test_one_giant_among_five_small_ones() -> None:
    bench = Bench(pages=8, context=32)
    sequences = [bench.add(prompt_of(31), 1), *(bench.add(prompt_of(4, seed), 9) for seed in range(1, 6))]
    bench.run()
    for sequence, count in bench.wanted.items():
        assert answer(sequence) == alone(sequence.ids[: sequence.prompt].tolist(), count)
    assert sequences[0].pauses == 0


def test_the_youngest_is_paused_and_its_tokens_are_kept() -> None:
    bench = Bench(pages=6, context=24)
    old, young = bench.add(prompt_of(7, 1), 17), bench.add(prompt_of(7, 2), 10)
    seen = []
    while bench.step():
        if young.state is State.PAUSED:
            seen.append((young.length, len(young.pages), young.computed))
    assert old.pauses == 0
    assert seen
    assert {(pages, computed) for _, pages, computed in seen} == {(0, 0)}
    assert answer(young) == alone(prompt_of(7, 2), 10)


def test_a_paused_sequence_finds_its_own_pages_again() -> None:
    bench = Bench()
    sequence = bench.add(prompt_of(14), 6)
    bench.step()
    bench.scheduler._pause(sequence)
    assert (sequence.computed, sequence.pages, sequence.state) == (0, [], State.PAUSED)
    computed = bench.decoder.tokens
    bench.run()
    assert sequence.cached == 0  # nobody else had computed it
    assert bench.decoder.tokens - computed == 3 + 4  # the last, partial page and the rest of the answer
    assert answer(sequence) == alone(prompt_of(14), 6)
    middle = bench.add([*sequence.ids[4:8].tolist(), 1, 2], 2)
    bench.run()
    assert middle.cached == 0


def test_the_same_pages_computed_side_by_side_are_held_once() -> None:
    bench = Bench()
    sequences = [bench.add(prompt_of(17), 3) for _ in range(2)]
    bench.step()
    assert [s.computed for s in sequences] == [17, 0]  # the second waits instead of computing the same
    bench.step()
    assert sequences[0].pages[:4] == sequences[1].pages[:4]
    assert bench.decoder.tokens == 17 + 2
    assert bench.pool.available == 64 - 6
    bench.check_pages()


def test_found_pages_that_nobody_holds_are_not_counted_as_room() -> None:
    bench = Bench(pages=8, context=32)
    bench.add(prompt_of(20), 1)
    bench.run()
    assert bench.pool.idle == 5
    bench.add(prompt_of(5, 1), 20)
    bench.step()
    longer = bench.add([*prompt_of(20), *prompt_of(8, 2)], 2)
    bench.step()
    assert longer.state is State.WAITING
    bench.run()
    assert answer(longer) == alone([*prompt_of(20), *prompt_of(8, 2)], 2)


def test_a_lone_sequence_may_use_the_whole_pool() -> None:
    bench = Bench(pages=4, context=1000)
    sequence = bench.add(prompt_of(3), 100)
    bench.run()
    assert sequence.length == 16
    assert answer(sequence) == alone(prompt_of(3), 13)


# ---------------------------------------------------------------- interruption


def test_an_interrupted_step_is_simply_done_again() -> None:
    bench = Bench(slice_tokens=8)
    sequence = bench.add(prompt_of(21), 10)
    for turn in range(60):
        if bench.scheduler.idle:
            break
        plan = bench.scheduler.plan()
        assert plan is not None
        if turn % 3:
            bench.decoder.cancel()
            bench.decoder.forward(plan.batch)
            assert bench.decoder.cancelled
            bench.decoder.clear_cancel()
        else:
            bench.step()
    assert answer(sequence) == alone(prompt_of(21), 10)


def test_ending_a_sequence_in_any_state_frees_its_pages() -> None:
    bench = Bench(pages=8, context=32, most_running=2, slice_tokens=4)
    running, prefilling, waiting = (bench.add(prompt_of(n, n), 20) for n in (3, 20, 5))
    bench.step()
    bench.step()
    assert [s.state for s in (running, prefilling, waiting)] == [State.RUNNING, State.RUNNING, State.WAITING]
    for sequence in (waiting, prefilling, running, running):
        bench.scheduler.finish(sequence)
        assert sequence.state is State.FINISHED
        bench.check_pages()
    assert bench.scheduler.idle
    assert bench.scheduler.plan() is None
    assert bench.pool.available == 8


# ---------------------------------------------------------------- pace


def test_pace_follows_the_machine() -> None:
    pace = Pace(512)
    assert pace.slice_tokens(company=False) == 128
    pace.observe(128, 1.0)
    assert pace.slice_tokens(company=False) == 128
    assert pace.slice_tokens(company=True) == 32
    for _ in range(20):
        pace.observe(512, 0.5)
    assert pace.slice_tokens(company=False) == 512
    assert pace.slice_tokens(company=True) == 224
    for _ in range(20):
        pace.observe(32, 10.0)
    assert pace.slice_tokens(company=True) == 32
    pace.observe(1, 1e-9)
    pace.observe(32, 0.0)
    assert pace.slice_tokens(company=True) == 32
    assert Pace(16).slice_tokens(company=False) == 16
    assert Pace(16, fixed=7).slice_tokens(company=True) == 7
    assert Pace(16, fixed=70).slice_tokens(company=True) == 16


# ---------------------------------------------------------------- as a machine


def half_right(answering: list[Sequence]) -> dict[Sequence, NDArray[np.int32]]:
    """Guesses of which a part comes true, for most of the sequences."""
    guesses = {}
    for sequence in answering:
        if sequence.length % 4 == 0:
            continue
        guess = alone(sequence.ids.tolist(), sequence.length % 6)
        if sequence.length % 3 == 0 and guess:
            guess[-1] = (guess[-1] + 1) % VOCAB
        # The last token of an answer needs no guess after it, and there is no room for one.
        guesses[sequence] = np.array(guess[: sequence.capacity - sequence.length - 1], np.int32)
    return guesses


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of several clients come, are computed, cancelled and interrupted in any order; pages go to disk."""

    @initialize(
        pages=st.integers(8, 20),
        most_running=st.integers(1, 4),
        slice_tokens=st.sampled_from([2, 7, 30]),
        policy=st.sampled_from(["first-come", "shortest-remaining"]),
        guesser=st.sampled_from([None, half_right]),
    )
    def create(
        self, pages: int, most_running: int, slice_tokens: int, policy: SchedulingPolicy, guesser: Guesser | None
    ) -> None:
        self.folder = TemporaryDirectory()
        self.bench = Bench(
            pages=pages,
            context=40,
            most_running=most_running,
            batch_tokens=16,
            slice_tokens=slice_tokens,
            policy=policy,
            guesser=guesser,
            snapshots=Path(self.folder.name),
        )
        self.cancelled: set[Sequence] = set()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        count=st.integers(1, 12),
        client=st.sampled_from("abc"),
    )
    def add(self, prompt: list[int], count: int, client: str) -> None:
        if len(prompt) < self.bench.scheduler.limit:
            self.bench.add(prompt, count, client)

    @rule()
    def write_pages(self) -> None:
        while self.bench.cache.save_one():
            pass

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.bench.step()

    @rule()
    def interrupted_step(self) -> None:
        plan = self.bench.scheduler.plan(self.bench.guesser)
        if plan is not None:
            self.bench.decoder.cancel()
            self.bench.decoder.forward(plan.batch)
            self.bench.decoder.clear_cancel()

    @precondition(lambda self: not self.bench.scheduler.idle)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        scheduler = self.bench.scheduler
        sequence = data.draw(st.sampled_from([*scheduler.running, *scheduler.waiting]))
        scheduler.finish(sequence)
        self.cancelled.add(sequence)

    @rule()
    def forget_idle_pages(self) -> None:
        self.bench.pool.drop_idle()
        assert len(self.bench.prefix) <= self.bench.pool.count - self.bench.pool.available

    @invariant()
    def answers_are_those_of_alone(self) -> None:
        for sequence in self.bench.wanted:
            assert answer(sequence) == alone(sequence.ids[: sequence.prompt].tolist(), sequence.generated)

    @invariant()
    def pages_are_accounted_for(self) -> None:
        self.bench.check_pages()

    @invariant()
    def order_is_kept(self) -> None:
        scheduler = self.bench.scheduler
        for queue in (scheduler.running, scheduler.waiting):
            numbers = [s.number for s in queue]
            assert numbers == sorted(numbers)

    @invariant()
    def every_client_that_waits_has_a_turn_soon(self) -> None:
        scheduler = self.bench.scheduler
        queue = [s for s in scheduler.queue() if s.overtaken < 8]
        assert sorted(queue, key=lambda s: s.number) == [s for s in scheduler.waiting if s.overtaken < 8]
        clients = {sequence.client for sequence in queue}
        # However many requests a client has, one of every other client stands among the first few.
        turns = scheduler._turns
        for client in clients:
            place = next(n for n, sequence in enumerate(queue) if sequence.client == client)
            assert place <= sum(max(0, turns[client] - turns[other]) + 1 for other in clients if other != client)

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.run()
        self.folder.cleanup()
        self.answers_are_those_of_alone()
        for sequence, count in self.bench.wanted.items():
            if sequence not in self.cancelled:
                assert sequence.generated == min(count, self.bench.scheduler.limit - sequence.prompt)
        assert self.bench.pool.available == self.bench.pool.count


SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


def test_the_fake_notices_a_wrong_page() -> None:
    """The oracle of this file can fail: swap two pages of a table and the answer changes."""
    bench = Bench()
    sequence = bench.add(prompt_of(12), 3)
    bench.step()
    sequence.pages[0], sequence.pages[1] = sequence.pages[1], sequence.pages[0]
    with pytest.raises(AssertionError, match="other positions"):
        bench.step()


def test_logits_of_the_fake_depend_on_every_id_and_place() -> None:
    base = plain_logits([1, 2, 3, 4], VOCAB)
    for other in ([2, 1, 3, 4], [1, 2, 3, 5], [0, 2, 3, 4], [1, 2, 3], [1, 2, 3, 4, 4]):
        assert not np.array_equal(plain_logits(other, VOCAB), base)
