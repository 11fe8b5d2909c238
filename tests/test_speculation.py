"""Guesses change when tokens come, never which: every answer equals the plain one, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine import api
from engine.errors import InputError, SettingError
from engine.runtime.events import Request
from engine.runtime.loop import Loop
from engine.runtime.model import Model, _check_draft
from engine.runtime.sampler import Sampler
from engine.runtime.speculation import Confidence, DraftModel, Lookup, continuation
from engine.settings import Conversion, EngineSettings, Sampling
from tests import factory
from tests.fakes import VOCAB, Ear, FakeDecoder, fake_pages, ready, toy


def run(loop: Loop) -> None:
    for _ in range(5000):
        if not loop.step():
            return
    pytest.fail("no end in sight")


def habits(before: list[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
    """A model that mostly follows from the last token, so that its answers begin to repeat."""
    row = row.copy()
    row[97 + (before[-1] * 3) % 7] += 3.8
    return row


def moody(before: list[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
    """A small model that agrees with `habits` except now and then."""
    row = habits(before, row)
    if len(before) % 5 == 0:
        row[97 + len(before) % 7] += 9.0
    return row


def with_lookup(guess_rows: int = 6, **toys: Any) -> Model:
    return replace(toy(shape=habits, end_ids=(), **toys), speculator=Lookup, guess_rows=guess_rows)


def with_draft(guess_rows: int = 6, draft_pages: int = 40, draft_context: int = 256, **toys: Any) -> Model:
    pool = fake_pages(draft_pages)
    decoder = FakeDecoder(pool, VOCAB, shape=moody)
    model = toy(shape=habits, end_ids=(), **toys)

    def speculator() -> DraftModel:
        sampler = Sampler(VOCAB, missing=model.missing_ids)
        return DraftModel(decoder, pool, sampler, b"small", context=draft_context, batch_tokens=64, share=0.1)

    return replace(model, speculator=speculator, guess_rows=guess_rows)


GREEDY = Sampling(temperature=0.0, repetition_penalty=1.0, max_tokens=40)
Maker = Callable[..., Model]
MAKERS = pytest.mark.parametrize("make", [with_lookup, with_draft])


def answers(model: Model, prompts: Sequence[tuple[int, ...]], sampling: Sampling, **fields: Any) -> list[Any]:
    loop, ears = Loop(model, slice_tokens=fields.pop("slice_tokens", None)), [Ear() for _ in prompts]
    for number, (prompt, ear) in enumerate(zip(prompts, ears, strict=True)):
        loop.add(Request(str(number), prompt, sampling, **fields), ear)
        loop.step()
    run(loop)
    assert model.pages.available == model.pages.count
    return [ear.done for ear in ears]


def essence(done: Any) -> tuple[Any, ...]:
    return done.token_ids, done.text, done.reason, done.logprobs


# ---------------------------------------------------------------- equal to plain decoding


@MAKERS
@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(97, 103), min_size=1, max_size=25).map(tuple), min_size=1, max_size=5),
    temperature=st.sampled_from([0.0, 0.4, 1.2]),
    penalty=st.sampled_from([1.0, 1.2]),
    frequency=st.sampled_from([0.0, 0.3]),
    guess_rows=st.integers(1, 12),
    pages=st.integers(16, 60),
    slice_tokens=st.sampled_from([3, None]),
    longest=st.integers(1, 40),
)
def test_guessing_changes_no_answer(
    make: Maker,
    prompts: list[tuple[int, ...]],
    temperature: float,
    penalty: float,
    frequency: float,
    guess_rows: int,
    pages: int,
    slice_tokens: int | None,
    longest: int,
) -> None:
    """Several answers at once, few pages (so that some are paused), penalties that look back over accepted tokens."""
    sampling = Sampling(
        temperature=temperature,
        repetition_penalty=penalty,
        frequency_penalty=frequency,
        seed=5,
        max_tokens=longest,
    )
    plain = [answers(toy(shape=habits, end_ids=(), context=60), [p], sampling, logprobs=2)[0] for p in prompts]
    model = make(guess_rows, pages=pages, context=60)
    found = answers(model, prompts, sampling, logprobs=2, slice_tokens=slice_tokens)
    assert [essence(done) for done in found] == [essence(done) for done in plain]


@MAKERS
def test_guesses_save_steps_and_are_counted(make: Maker) -> None:
    model = make()
    (done,) = answers(model, [tuple(b"abcabcabc")], GREEDY)
    usage = done.usage
    assert usage.completion_tokens == 40 == usage.decode_steps + usage.accepted_tokens
    assert usage.accepted_tokens >= 15
    assert usage.guessed_tokens >= usage.accepted_tokens
    assert usage.tokens_per_step == 40 / usage.decode_steps
    assert model.decoder.steps == usage.decode_steps
    (plain,) = answers(toy(shape=habits, end_ids=()), [tuple(b"abcabcabc")], GREEDY)
    assert (plain.usage.decode_steps, plain.usage.guessed_tokens, plain.usage.tokens_per_step) == (40, 0, 1.0)


@MAKERS
def test_an_answer_that_ends_within_accepted_guesses_ends_there(make: Maker) -> None:
    full = answers(make(), [tuple(b"abcabc")], GREEDY)[0]
    for end in set(full.token_ids):
        cut = full.token_ids[: full.token_ids.index(end)]
        done = answers(replace(make(), end_ids=frozenset({end})), [tuple(b"abcabc")], GREEDY)[0]
        assert (done.token_ids, done.reason) == (cut, "stop")
        assert done.usage.completion_tokens == len(cut) + 1
    stop = full.text[7:10]
    done = answers(make(), [tuple(b"abcabc")], GREEDY.model_copy(update={"stop": (stop,)}))[0]
    assert (done.text, done.reason) == (full.text[: full.text.index(stop)], "stop")


@MAKERS
def test_a_rejected_guess_is_never_found_by_others(make: Maker) -> None:
    """The prefix index names pages by their tokens; a page with a guess that did not come true would lie."""
    model = make(guess_rows=8)
    loop = Loop(model)
    chance = np.random.default_rng(0)
    sampling = Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, max_tokens=40)
    for number in range(12):
        ear = Ear()
        prompt = tuple(chance.integers(97, 100, 11).tolist())
        loop.add(Request(str(number), prompt, sampling.model_copy(update={"seed": number})), ear)
        run(loop)
        whole = (*prompt, *ear.done.token_ids)
        again, alone = Ear(), Ear()
        loop.add(Request("again", whole, GREEDY), again)
        run(loop)
        assert again.done.usage.cached_tokens >= (len(whole) - 1) // 4 * 4 - 4
        fresh = Loop(toy(shape=habits, end_ids=()))
        fresh.add(Request("alone", whole, GREEDY), alone)
        run(fresh)
        assert again.done.token_ids == alone.done.token_ids


@MAKERS
def test_an_interrupted_step_changes_nothing(make: Maker) -> None:
    expected = answers(make(), [tuple(b"abcabc")], GREEDY)[0].token_ids
    model = make()
    decoder: Any = model.decoder
    loop, ear = Loop(model), Ear()
    loop.add(Request("r", tuple(b"abcabc"), GREEDY), ear)
    for turn in range(400):
        decoder.clear_cancel()
        if turn % 3 == 1:
            decoder.cancel()
        if not loop.step():
            break
    assert ear.done.token_ids == expected


def test_the_full_context_is_used_and_not_exceeded() -> None:
    for length in (20, 21, 22, 23):
        plain = answers(toy(shape=habits, end_ids=(), context=32), [(97,) * length], GREEDY)[0]
        for make in (with_lookup, with_draft):
            done = answers(make(12, context=32), [(97,) * length], GREEDY)[0]
            assert (done.reason, len(done.token_ids)) == ("context", 32 - length)
            assert done.token_ids == plain.token_ids


# ---------------------------------------------------------------- the draft model


def test_a_small_model_without_room_makes_no_guesses() -> None:
    prompts = [tuple(b"abcabc"), tuple(b"bcabca")]
    plain = [essence(answers(toy(shape=habits, end_ids=()), [prompt], GREEDY)[0]) for prompt in prompts]
    for small in ({"draft_pages": 3}, {"draft_context": 9}, {"draft_pages": 14}):
        found = answers(with_draft(**small), prompts, GREEDY)
        assert [essence(done) for done in found] == plain


def test_a_small_model_that_fails_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = with_draft()
    assert model.speculator is not None
    speculator: Any = model.speculator()
    speculator._decoder._shape = lambda _ids, row: np.full_like(row, np.nan)
    (done,) = answers(replace(model, speculator=lambda: speculator), [tuple(b"abcabc")], GREEDY)
    assert done.token_ids == answers(toy(shape=habits, end_ids=()), [tuple(b"abcabc")], GREEDY)[0].token_ids
    assert done.usage.guessed_tokens == 0
    assert [record.message for record in caplog.records].count(
        "guessing failed and is switched off; answers go on without it"
    ) == 1


def test_the_small_models_pages_come_back() -> None:
    model = with_draft()
    assert model.speculator is not None
    speculator: Any = model.speculator()
    model = replace(model, speculator=lambda: speculator)
    answers(model, [tuple(b"abcabc"), tuple(b"cba")], GREEDY)
    pool = speculator._cache.pages
    assert pool.available == pool.count
    assert not speculator._mirrors


def test_the_second_turn_finds_what_the_small_model_read() -> None:
    model = with_draft()
    assert model.speculator is not None
    speculator: Any = model.speculator()
    model = replace(model, speculator=lambda: speculator)
    decoder = speculator._decoder
    first = answers(model, [tuple(b"abcabcabcabc")], GREEDY)[0]
    before = decoder.tokens
    answers(model, [(*tuple(b"abcabcabcabc"), *first.token_ids, 97)], GREEDY.model_copy(update={"max_tokens": 3}))
    assert decoder.tokens - before < 20


def test_a_small_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = factory.make(tmp_path / "other", tok=factory.tok_json(extra=("<strange>",)))
    same = factory.make(tmp_path / "same")
    sources = [_source(path) for path in (same, other)]
    _check_draft(sources[0], toy().tokenizer, "toy")
    with pytest.raises(InputError, match=r"other cannot guess for toy: token \d+ is"):
        _check_draft(sources[1], toy().tokenizer, "toy")


def _source(path: Path) -> Any:
    from engine.convert.load import open_model
    from engine.progress import finish

    return finish(open_model(path))


@pytest.mark.usefixtures("compiled_kernels")
def test_draft_without_a_model_is_refused(tmp_path: Path) -> None:
    folder = factory.make(tmp_path / "toy")
    with (
        pytest.raises(SettingError, match="needs the model's name"),
        ready(folder, speculation="draft", context=64, threads=1),
    ):
        pass


@pytest.mark.usefixtures("compiled_kernels")
def test_naming_a_draft_model_is_enough(tmp_path: Path) -> None:
    folder = factory.make(tmp_path / "toy")
    with ready(folder, draft=str(folder), context=64, threads=1) as model:
        assert model.speculator is not None
        assert isinstance(model.speculator(), DraftModel)
    with ready(folder, draft=str(folder), speculation="ngram", context=64, threads=1) as model:
        assert model.speculator is Lookup


# ---------------------------------------------------------------- looking back


def test_the_longest_and_then_the_latest_match_counts() -> None:
    ids = np.array([1, 2, 3, 9, 7, 2, 3, 8, 5, 1, 2, 3], np.int32)
    assert continuation(ids, 3).tolist() == [9, 7, 2]
    ids = np.array([2, 3, 9, 0, 2, 3, 8, 0, 2, 3], np.int32)
    assert continuation(ids, 2).tolist() == [8, 0]


def test_one_equal_token_is_no_match() -> None:
    assert continuation(np.array([5, 1, 2, 7, 1], np.int32), 4).size == 0
    assert continuation(np.array([5], np.int32), 4).size == 0
    assert continuation(np.array([1, 2, 1, 2], np.int32), 0).size == 0


def test_a_repetition_goes_on() -> None:
    assert continuation(np.array([8, 1, 2, 3, 1, 2, 3, 1, 2], np.int32), 7).tolist() == [3, 1, 2, 3, 1, 2, 3]
    assert continuation(np.array([4, 4, 4], np.int32), 5).tolist() == [4] * 5


@given(ids=st.lists(st.integers(0, 3), min_size=1, max_size=40), most=st.integers(0, 20))
def test_lookup_agrees_with_its_definition(ids: list[int], most: int) -> None:
    best: tuple[int, int] | None = None
    for place in range(len(ids) - 1):
        matched = 0
        while matched < 8 and matched <= place and ids[place - matched] == ids[len(ids) - 1 - matched]:
            matched += 1
        if matched >= 2 and (best is None or (matched, place) >= best):
            best = (matched, place)
    expected: list[int] = []
    if best is not None:
        longer = list(ids)
        for number in range(most):
            expected.append(longer[best[1] + 1 + number])
            longer.append(expected[-1])
    assert continuation(np.array(ids, np.int32), most).tolist() == expected


# ---------------------------------------------------------------- confidence


def test_guesses_that_never_come_true_cost_next_to_nothing() -> None:
    confidence, guessed = Confidence(0.1), 0
    for _ in range(1000):
        most = min(confidence.most(), 15)
        guessed += most
        confidence.saw(most, 0)
    assert guessed * 0.1 < 0.02 * 1000  # steps' worth of time, of a thousand steps


def test_guesses_that_come_true_grow_to_the_most() -> None:
    confidence = Confidence(0.1)
    for _ in range(12):
        most = min(confidence.most(), 15)
        confidence.saw(most, most)
    assert confidence.most() >= 15
    confidence.saw(15, 0)
    assert 4 <= confidence.most() < 15
    for _ in range(1000):
        confidence.saw(15, 15)
    assert confidence.most() >= 15


# ---------------------------------------------------------------- real kernels


def _eager(speculator: Callable[[], Any]) -> Any:
    """Guessing by a model as large as the one that answers never pays; here it is done all the same."""
    made = speculator()
    made.cost = 0.1
    return made


PROMPT = "one two three four one two three four one two three"
OTHERS = ("the fire the fire the", "aaaaaaaa", "In the beginning")


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mode", ["ngram", "draft"])
@pytest.mark.parametrize("kv", ["int8", "f16"])
def test_with_real_kernels(tmp_path: Path, threads: int, mode: str, kv: str) -> None:
    """Verified rows are rows of a batch; company does not matter to the bit, so neither does a guess."""
    folder = factory.make(tmp_path / "toy")
    common = {"threads": threads, "context": 256, "kv": kv, "max_batch_size": 4}
    samplings = [
        Sampling(temperature=0.0, repetition_penalty=1.0, max_tokens=90),
        Sampling(temperature=0.7, seed=3, repetition_penalty=1.0, presence_penalty=0.2, max_tokens=60),
    ]
    with ready(folder, Conversion(), **common) as model:
        plain = [[essence(d) for d in answers(model, [PROMPT, *OTHERS], s, logprobs=3)] for s in samplings]
    with ready(folder, Conversion(), **common, speculation=mode, draft=str(folder), draft_tokens=16) as guessing:
        eager = replace(guessing, speculator=partial(_eager, guessing.speculator))
        found = [answers(eager, [PROMPT, *OTHERS], s, logprobs=3) for s in samplings]
    assert [[essence(d) for d in row] for row in found] == plain
    usages = [done.usage for row in found for done in row]
    assert sum(usage.accepted_tokens for usage in usages) > 20
    if mode == "draft":  # the same model agrees with itself, with the same random numbers
        assert sum(usage.accepted_tokens for usage in usages) > 0.9 * sum(usage.guessed_tokens for usage in usages)


@pytest.mark.usefixtures("compiled_kernels")
def test_the_starter_copies_sooner_and_says_the_same() -> None:
    path = api.starter_path()
    if path is None:
        pytest.skip("the starter package is not installed")
    text = "The lighthouse keeper counted nineteen ships, four gulls and one very small boat with a red sail."
    prompt = (api.Message("user", f"Repeat this text twice, word by word: {text} {text}"),)
    answers_of: dict[str, Any] = {}
    for mode in ("off", "ngram"):
        with ready(path, speculation=mode, context=512, max_batch_size=1) as model:
            for temperature in (0.0, 0.8):
                sampling = Sampling(temperature=temperature, seed=1, max_tokens=48)
                answers_of[mode, temperature] = answers(model, [prompt], sampling)[0]
    for temperature in (0.0, 0.8):
        assert essence(answers_of["off", temperature]) == essence(answers_of["ngram", temperature])
    assert answers_of["ngram", 0.0].usage.tokens_per_step > 1.2


def test_settings_have_flags_and_limits() -> None:
    assert EngineSettings().speculation == "ngram"
    with pytest.raises(ValueError, match="draft_tokens"):
        EngineSettings(draft_tokens=0)
