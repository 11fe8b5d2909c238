"""A prefix is reused when, and only when, it is the same prefix of the same model (case R05)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runtime import prefix as prefix_module
from engine.runtime.cache import Cache
from engine.runtime.prefix import PrefixIndex, page_name
from engine.runtime.scheduler import Scheduler
from engine.runtime.sequence import Sequence
from tests.fakes import FakeDecoder, fake_pages, plain_logits

VOCAB = 13


@pytest.fixture(params=["names", "every name collides"])
def collide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Everything here must give right answers even when the hash is worth nothing."""
    if request.param != "names":
        monkeypatch.setattr(prefix_module, "page_name", lambda _before, _ids: b"")
    return request.param != "names"


class Chat:
    """One model's scheduler, asked one prompt after another (page size 4)."""

    def __init__(self, pages: int = 32, identity: bytes = b"model A", slice_tokens: int | None = None) -> None:
        self.pool = fake_pages(pages)
        self.decoder = FakeDecoder(self.pool, VOCAB)
        self.use(identity, slice_tokens)

    def use(self, identity: bytes, slice_tokens: int | None = None) -> None:
        self.prefix = PrefixIndex(self.pool, identity)
        self.scheduler = Scheduler(
            Cache(self.pool, self.prefix), context=256, most_running=4, batch_tokens=64, slice_tokens=slice_tokens
        )

    def ask(self, *prompts: list[int], count: int = 3) -> list[Sequence]:
        sequences = [Sequence(prompt, len(prompt) + count) for prompt in prompts]
        for sequence in sequences:
            self.scheduler.add(sequence)
        while (plan := self.scheduler.plan()) is not None:
            logits = self.decoder.forward(plan.batch)
            self.scheduler.computed(plan)
            for row, sequence in enumerate(span.sequence for span in plan.spans if span.rows):
                sequence.append(int(logits[row].argmax()))
                if sequence.generated == count:
                    self.scheduler.finish(sequence)
        for sequence in sequences:
            ids = sequence.ids.tolist()
            for n in range(sequence.prompt, sequence.length):
                assert ids[n] == int(plain_logits(ids[:n], VOCAB).argmax()), "an answer from somebody else's state"
        assert self.pool.available == self.pool.count
        return sequences


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def test_the_same_prompt_is_found_but_for_its_last_page() -> None:
    chat = Chat()
    for length, cached in ((12, 8), (13, 12), (11, 8), (4, 0), (5, 4)):
        text = prompt(length, length)
        assert chat.ask(text)[0].cached == 0
        before = chat.decoder.tokens
        assert chat.ask(text)[0].cached == cached
        assert chat.decoder.tokens - before == length - cached + 2


@pytest.mark.usefixtures("collide")
def test_exactly_full_pages_sent_twice_still_compute_the_last_position() -> None:
    chat = Chat()
    first, second = (chat.ask(prompt(8))[0] for _ in range(2))
    assert first.ids.tolist() == second.ids.tolist()
    assert second.cached == 4


def test_an_answer_is_part_of_the_next_turns_prefix() -> None:
    chat = Chat()
    turn = chat.ask(prompt(10), count=9)[0].ids.tolist()
    assert chat.ask([*turn, 1, 2, 3])[0].cached == 16  # 18 of 19 were computed


def test_prompts_that_differ_in_the_last_id_of_a_page(collide: bool) -> None:
    chat = Chat()
    text = prompt(16)
    for place in (3, 7, 11, 15):
        other = [*text]
        other[place] = (other[place] + 1) % VOCAB
        chat.ask(text)
        cached = chat.ask(other)[0].cached
        assert cached <= place
        if not collide:
            assert cached == place - 3


def test_two_chats_that_branch_inside_a_page_share_only_the_pages_before(collide: bool) -> None:
    chat = Chat()
    text = prompt(10)
    chat.ask(text, count=6)
    branches = chat.ask([*text, 1, 2, 3, 4], [*text, 4, 3, 2, 1], count=8)
    assert [s.cached for s in branches] == [4, 4] if collide else [8, 8]


def test_an_edited_message_reuses_what_comes_before_it() -> None:
    chat = Chat()
    text = prompt(40)
    chat.ask(text)
    edited = [*text[:21], (text[21] + 1) % VOCAB, *text[22:]]
    assert chat.ask(edited)[0].cached == 20


@pytest.mark.usefixtures("collide")
def test_a_page_after_another_beginning_is_not_the_same_page() -> None:
    chat = Chat()
    tail = prompt(12, 3)
    chat.ask([1, 1, 1, 1, *tail])
    assert chat.ask([2, 2, 2, 2, *tail])[0].cached == 0


@pytest.mark.usefixtures("collide")
def test_an_evicted_page_is_forgotten() -> None:
    chat = Chat(pages=6)
    first = prompt(20, 1)
    chat.ask(first)
    chat.ask(prompt(20, 2))
    assert chat.ask(first)[0].cached == 0
    assert len(chat.prefix) <= 6


def test_a_prefix_outlives_what_hangs_on_it() -> None:
    """Pages are evicted from the end of a prompt, so what is left is still findable."""
    chat = Chat(pages=8)
    first = prompt(20, 1)
    chat.ask(first)  # 22 computed tokens: five full pages and one free again
    chat.ask(prompt(13, 2))  # takes three free pages, evicts the last of the first prompt's five
    assert chat.ask(first)[0].cached == 16


@pytest.mark.usefixtures("collide")
def test_another_model_finds_nothing() -> None:
    chat = Chat()
    text = prompt(20)
    chat.ask(text)
    chat.pool.drop_idle()
    chat.use(b"model B")
    assert chat.ask(text)[0].cached == 0


def test_identity_is_part_of_every_name() -> None:
    pool = fake_pages(4)
    ids = np.arange(4, dtype=np.int32)
    published = [PrefixIndex(pool, identity).publish(None, ids, pool.take()) for identity in (b"A", b"B")]
    assert published[0] is not None
    assert published[1] is not None
    assert published[0].name != published[1].name
    assert page_name(published[0].name, ids.tobytes()) != page_name(published[1].name, ids.tobytes())


def test_the_same_prompts_side_by_side_are_computed_once() -> None:
    chat = Chat(slice_tokens=8)
    text = prompt(33)
    sequences = chat.ask(text, text, text, text)
    assert chat.decoder.tokens <= 33 + 3 * 2 + 4 * 3 + 3 * 8
    assert sum(s.cached for s in sequences) >= 3 * 24


def test_pages_computed_twice_are_held_once() -> None:
    chat = Chat()
    text = prompt(17)
    chat.ask(text, text, count=1)  # both in one step, so neither finds the other's pages
    assert chat.pool.idle == 4


@settings(max_examples=80, deadline=None)
@given(
    rounds=st.lists(
        st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), min_size=1, max_size=4), min_size=1, max_size=6
    ),
    pages=st.integers(9, 24),
    worthless=st.booleans(),
)
def test_cached_equals_uncached_after_any_history(rounds: list[list[list[int]]], pages: int, worthless: bool) -> None:
    """`Chat.ask` compares every token with the function of its whole prefix."""
    with pytest.MonkeyPatch.context() as patch:
        if worthless:
            patch.setattr(prefix_module, "page_name", lambda _before, ids: bytes(ids[:1]))
        chat = Chat(pages=pages)
        for prompts in rounds:
            chat.ask(*prompts)


def test_names_are_pinned() -> None:
    """Snapshots on disk are found by these names."""
    pool = fake_pages(1)
    published = PrefixIndex(pool, b"identity").publish(None, np.array([1, 2, 3, -1]), pool.take())
    assert published is not None
    assert published.name.hex() == "f536fd095a1fbe7381385f80952bc6ba7d54920138239b85b3e2ea2dfd96200c"
