"""The loop: requests in, events out; every request ends once, whatever happens to it or to others."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.errors import InternalError
from engine.runtime.events import Delta, Done, Event, Message, Progress, Prompt, Request, Started
from engine.runtime.loop import Loop
from engine.runtime.model import Model
from engine.settings import Sampling
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests import factory
from tests.factory import CHATML, tok_json
from tests.fakes import END, VOCAB, Ear, plain_logits, ready, saying, tokenizer_files, toy

GREEDY = Sampling(temperature=0.0, repetition_penalty=1.0, max_tokens=12)


def run(loop: Loop) -> None:
    for _ in range(3000):
        if not loop.step():
            assert loop.idle
            return
    pytest.fail("no end in sight")


def ask(model: Model, prompt: Prompt, sampling: Sampling = GREEDY, **fields: Any) -> Ear:
    loop, ear = Loop(model), Ear()
    loop.add(Request("r", prompt, sampling, **fields), ear)
    run(loop)
    assert model.pages.available == model.pages.count
    return ear


def greedy_alone(prompt: Sequence[int], count: int) -> list[int]:
    """What the toy says, by the definition of its logits."""
    ids = list(prompt)
    for _ in range(count):
        row = plain_logits(ids, VOCAB)
        row[260:] = -np.inf
        token = int(row.argmax())
        if token == END:
            break
        ids.append(token)
    return ids[len(prompt) :]


# ---------------------------------------------------------------- the course of a request


def test_a_request_from_start_to_end() -> None:
    prompt = tuple(range(66, 66 + 21))
    ear = ask(toy(), prompt)
    assert ear.events[0] == Started("r", 21, 0)
    assert ear.progress[-1].done == ear.progress[-1].total == 21
    assert {(p.stage, p.unit, p.request_id) for p in ear.progress} == {("prefill", "tokens", "r")}
    done = ear.done
    assert list(done.token_ids) == greedy_alone(prompt, 12)
    assert done.reason == "length"
    assert (done.usage.prompt_tokens, done.usage.cached_tokens, done.usage.completion_tokens) == (21, 0, 12)
    assert "".join(delta.text for delta in ear.deltas) == done.text


def test_a_second_request_reuses_the_first_ones_pages() -> None:
    model = toy()
    loop, first, second = Loop(model), Ear(), Ear()
    prompt = tuple(range(65, 65 + 21))
    loop.add(Request("1", prompt, GREEDY), first)
    run(loop)
    loop.add(Request("2", prompt, GREEDY), second)
    run(loop)
    assert second.events[0] == Started("2", 21, 20)
    assert second.done.token_ids == first.done.token_ids
    assert second.done.usage.cached_tokens == 20


def test_the_end_token_ends_and_is_not_shown() -> None:
    ear = ask(toy(shape=saying(list(b"Hello"), after=3)), tuple(b"abc"))
    assert (ear.done.reason, ear.done.text, ear.done.token_ids) == ("stop", "Hello", tuple(b"Hello"))
    assert ear.done.usage.completion_tokens == 6


@pytest.mark.parametrize("end", [97, 258, 259])
def test_every_end_token_of_the_union_ends(end: int) -> None:
    ear = ask(toy(shape=saying([98, end, 98], after=1), end_ids={97, 258, 259}), (65,))
    assert (ear.done.reason, ear.done.text) == ("stop", "b")


def test_without_an_end_token_the_answer_stops_at_its_longest() -> None:
    ear = ask(toy(shape=saying([97] * 50, after=1), end_ids=()), (65,), GREEDY.model_copy(update={"max_tokens": 7}))
    assert (ear.done.reason, ear.done.text) == ("length", "aaaaaaa")


def test_rows_without_a_token_are_never_drawn() -> None:
    def shape(_before: list[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
        row[260:] = 99.0
        return row

    hot = Sampling(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=100)
    assert max(ask(toy(shape=shape, end_ids=()), (65,), hot).done.token_ids) < 260


def test_an_answer_that_was_never_begun_has_no_times() -> None:
    loop, ear = Loop(toy(), clock=iter(range(100)).__next__), Ear()
    loop.add(Request("r", (65,), GREEDY), ear)
    loop.cancel("r")
    usage = ear.done.usage
    assert (usage.prefill_s, usage.decode_s, usage.decode_tps, usage.completion_tokens) == (0, 0, 0, 0)


def test_times_follow_the_clock() -> None:
    now = 0.0

    def tick(_batch: Any) -> None:
        nonlocal now
        now += 1.0

    model = toy(shape=saying([97] * 50, after=20), before_step=tick)
    loop, ear = Loop(model, slice_tokens=8, clock=lambda: now), Ear()
    now = 5.0
    loop.add(Request("r", (65,) * 20, GREEDY), ear)
    now = 7.0
    run(loop)
    usage = ear.done.usage
    assert (usage.queue_s, usage.prefill_s, usage.decode_s) == (2.0, 3.0, 11.0)
    assert usage.decode_tps == 1.0
    assert math.isclose(usage.prefill_tps, 20 / 3)


# ---------------------------------------------------------------- text (cases T01, T03, T04)

LETTERS = list("A 世a😀👩‍👩‍👧é한국어".encode())


@pytest.mark.parametrize("length", range(1, len(LETTERS) + 1))
def test_deltas_are_whole_characters_and_add_up(length: int) -> None:
    model = toy(shape=saying(LETTERS, after=1))
    ear = ask(model, (65,), GREEDY.model_copy(update={"max_tokens": length}))
    text = bytes(LETTERS[:length]).decode(errors="ignore")
    assert ear.done.text == "".join(delta.text for delta in ear.deltas) == text
    assert all(delta.text and "�" not in delta.text for delta in ear.deltas)
    assert ear.done.usage.completion_tokens == length
    assert ear.done.token_ids == tuple(LETTERS[:length])
    whole = ask(model, (65,), GREEDY.model_copy(update={"max_tokens": length}), stream=False)
    assert whole.done.text == text
    assert not whole.deltas


def test_a_delta_carries_the_tokens_of_its_text() -> None:
    ear = ask(toy(shape=saying(LETTERS, after=1)), (65,), GREEDY.model_copy(update={"max_tokens": 99}), logprobs=1)
    tokenizer = toy().tokenizer
    for delta in ear.deltas:
        assert b"".join(map(tokenizer.token_bytes, delta.token_ids)).decode() == delta.text
        assert [found.token_id for found in delta.logprobs] == list(delta.token_ids)
    assert [i for delta in ear.deltas for i in delta.token_ids] == LETTERS
    assert ear.done.logprobs == tuple(found for delta in ear.deltas for found in delta.logprobs)


@pytest.mark.parametrize(
    ("said", "stop", "text", "reason"),
    [
        ("The quick brown fox jumps", ("own fox",), "The quick br", "stop"),
        ("abcDEFGH", ("DEFGHIJ", "FG"), "abcDE", "stop"),
        ("aXbXX", ("XX",), "aXb", "stop"),
        ("x世界y", ("世界",), "x", "stop"),
        ("abc", ("",), "abc", "stop"),
        ("....", ("...",), "", "stop"),
        ("almost sto", ("stop",), "almost sto", "stop"),
    ],
)
def test_stop_texts_are_never_shown(said: str, stop: tuple[str, ...], text: str, reason: str) -> None:
    sampling = Sampling(temperature=0.0, repetition_penalty=1.0, stop=stop)
    for stream in (True, False):
        ear = ask(toy(shape=saying(list(said.encode()), after=1)), (65,), sampling, stream=stream)
        assert (ear.done.text, ear.done.reason) == (text, reason)
        assert not stream or "".join(delta.text for delta in ear.deltas) == text


def test_a_cancelled_answer_keeps_what_was_held_back() -> None:
    sampling = Sampling(temperature=0.0, stop=("stop here",), max_tokens=50)
    loop, ear = Loop(toy(shape=saying(list(b"please stop "), after=1))), Ear()
    loop.add(Request("r", (65,), sampling), ear)
    for _ in range(12):
        loop.step()
    assert "".join(delta.text for delta in ear.deltas) == "please "
    loop.cancel("r")
    assert (ear.done.reason, ear.done.text) == ("cancelled", "please stop ")
    assert "".join(delta.text for delta in ear.deltas) == "please stop "


# ---------------------------------------------------------------- limits (cases R01, R02)


@pytest.mark.parametrize("length", [60, 61, 62, 63])
@pytest.mark.parametrize("chats", [1, 4])
def test_a_full_context_ends_the_answer_and_says_so(length: int, chats: int) -> None:
    loop = Loop(toy(context=64, pages=40, shape=saying([97] * 2000, after=0), end_ids=()))
    ears = [Ear() for _ in range(chats)]
    for number, ear in enumerate(ears):
        prompt = (66 + number, *[65] * (length - 1))
        loop.add(Request(str(number), prompt, GREEDY.model_copy(update={"max_tokens": 1000})), ear)
    run(loop)
    for ear in ears:
        assert ear.done.reason == "context"
        assert len(ear.done.token_ids) == 64 - length
        assert ear.done.usage.completion_tokens == 64 - length


@pytest.mark.parametrize("length", [64, 65, 1000])
def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(length: int) -> None:
    model = toy(context=64)
    ear = ask(model, (65,) * length)
    assert ear.events == [ear.failed]
    assert ear.failed.kind == "ContextOverflowError"
    assert f"{length} tokens" in ear.failed.message
    assert "64" in ear.failed.message
    assert model.decoder.steps == 0


@pytest.mark.parametrize("prompt", ["word " * 2_000_000, (Message("user", "word " * 2_000_000),)], ids=["raw", "chat"])
def test_a_huge_paste_is_refused_without_being_encoded(prompt: Prompt) -> None:
    model = toy()
    encoded = 0

    def counting(text: str, original: Callable[..., list[int]]) -> list[int]:
        nonlocal encoded
        encoded += len(text)
        return original(text)

    vocabulary: Any = model.tokenizer._vocabulary
    plain, raw = vocabulary.plain, vocabulary.raw
    vocabulary.plain = lambda text, *, at_start: counting(text, lambda t: plain(t, at_start=at_start))
    vocabulary.raw = lambda text: counting(text, raw)
    ear = ask(model, prompt)
    assert ear.failed.kind == "ContextOverflowError"
    assert "256" in ear.failed.message
    assert encoded <= 8 * 256 + 100


def test_a_long_prompt_of_few_tokens_is_not_refused() -> None:
    """The shortcut for huge texts must not refuse what fits."""
    model = toy(context=40)
    pairs, word = [], "a"
    for _ in range(6):
        pairs.append([word, word])
        word += word
    files = {"tokenizer.json": json.dumps(tok_json(extra=(), merges=pairs)).encode()}
    model = replace(model, tokenizer=Tokenizer.from_files(files), end_ids=frozenset())
    assert ask(model, "a" * 64 * 20).done.usage.prompt_tokens == 20


# ---------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("prompt", "fields", "sentence"),
    [
        ((), {}, "the prompt is empty"),
        ("", {}, "the prompt is empty"),
        ((65, 320), {}, "has the id 320, and the model knows 0 to 319"),
        ((65, -1), {}, "has the id -1"),
        ((65,), {"logprobs": -1}, "logprobs must be between 0 and 100, not -1"),
        ((65,), {"logprobs": 101}, "logprobs must be between 0 and 100, not 101"),
    ],
)
def test_a_bad_request_fails_alone(prompt: Prompt, fields: dict[str, Any], sentence: str) -> None:
    loop, bad, good = Loop(toy()), Ear(), Ear()
    loop.add(Request("good", (65, 66), GREEDY), good)
    loop.add(Request("bad", prompt, GREEDY, **fields), bad)
    run(loop)
    assert sentence in bad.failed.message
    assert bad.failed.kind in ("InputError", "SettingError")
    assert list(good.done.token_ids) == greedy_alone([65, 66], 12)


def test_an_id_in_use_is_refused_and_free_again_later() -> None:
    loop, first, second, third = Loop(toy()), Ear(), Ear(), Ear()
    loop.add(Request("r", (65,), GREEDY), first)
    loop.add(Request("r", (66,), GREEDY), second)
    assert "already" in second.failed.message
    run(loop)
    assert list(first.done.token_ids) == greedy_alone([65], 12)
    loop.add(Request("r", (66,), GREEDY), third)
    run(loop)
    assert list(third.done.token_ids) == greedy_alone([66], 12)


# ---------------------------------------------------------------- faults (case S03)


@pytest.mark.parametrize("bad", [np.nan, -np.inf], ids=["nan", "nothing"])
def test_a_row_that_is_not_numbers_ends_its_request_only(bad: float) -> None:
    def shape(before: list[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.full_like(row, bad) if before[0] == 66 and len(before) > 5 else row

    loop, ears = Loop(toy(shape=shape)), [Ear() for _ in range(3)]
    for first, ear in enumerate(ears, start=65):
        loop.add(Request(str(first), (first, 1), GREEDY), ear)
    run(loop)
    failed = ears[1].failed
    assert (failed.kind, failed.request_id) == ("InternalError", "66")
    assert "not numbers" in failed.message
    assert failed.text == "".join(delta.text for delta in ears[1].deltas)
    for first in (65, 67):
        assert list(ears[first - 65].done.token_ids) == greedy_alone([first, 1], 12)


@pytest.mark.usefixtures("compiled_kernels")
def test_a_model_that_overflows_ends_its_requests_only(tmp_path: Path) -> None:
    config = factory.cfg()
    weights = factory.weights(config)
    weights["model.norm.weight"][:] = np.float32(3e38)
    with ready(factory.make(tmp_path / "hot", config, weights), threads=1, context=64) as model:
        loop, ears = Loop(model), [Ear() for _ in range(3)]
        for number, ear in enumerate(ears):
            loop.add(Request(str(number), "hello", GREEDY), ear)
        run(loop)
        assert {(ear.failed.kind, "not numbers" in ear.failed.message) for ear in ears} == {("InternalError", True)}
        assert model.pages.available == model.pages.count


def test_a_failing_step_fails_its_requests_and_the_loop_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    trouble = True

    def explode(_batch: Any) -> None:
        if trouble:
            raise RuntimeError("a bolt came loose")

    model = toy(before_step=explode)
    loop, ear, later = Loop(model), Ear(), Ear()
    loop.add(Request("r", (65,), GREEDY), ear)
    run(loop)
    assert (ear.failed.kind, "a bolt came loose" in ear.failed.message) == ("InternalError", True)
    assert "a step failed" in caplog.text
    trouble = False
    loop.add(Request("r", (65,), GREEDY), later)
    run(loop)
    assert list(later.done.token_ids) == greedy_alone([65], 12)
    assert model.pages.available == model.pages.count


@pytest.mark.parametrize("kind", [Started, Progress, Delta, Done])
def test_a_broken_sink_ends_its_request_only(kind: type[Event], caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Event] = []

    def broken(event: Event) -> None:
        heard.append(event)
        if isinstance(event, kind):
            raise TypeError("not listening")

    model = toy()
    loop, good = Loop(model), Ear()
    loop.add(Request("bad", (70, 71), GREEDY), broken)
    loop.add(Request("good", (65,), GREEDY), good)
    with caplog.at_level(logging.CRITICAL):
        run(loop)
    assert isinstance(heard[-1], kind)
    assert sum(isinstance(event, kind) for event in heard) == 1
    assert list(good.done.token_ids) == greedy_alone([65], 12)
    assert model.pages.available == model.pages.count


def test_a_sink_that_broke_is_not_called_again(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Event] = []

    def broken(event: Event) -> None:
        heard.append(event)
        if isinstance(event, Delta):
            raise TypeError("not listening")

    loop = Loop(toy())
    loop.add(Request("r", (70, 71), GREEDY.model_copy(update={"max_tokens": 1})), broken)
    run(loop)
    assert isinstance(heard[-1], Delta)
    assert [record.message for record in caplog.records] == ["the receiver of Delta failed"]


def test_a_broken_tokenizer_fails_the_request(caplog: pytest.LogCaptureFixture) -> None:
    model = toy()
    loop, ear = Loop(model), Ear()
    model.tokenizer.encode = lambda *_a, **_k: 1 / 0  # type: ignore[method-assign, assignment]
    loop.add(Request("r", "hello", GREEDY), ear)
    assert ear.failed.kind == "InternalError"
    assert loop.idle
    assert "could not be prepared" in caplog.text


# ---------------------------------------------------------------- cancelling (case R07)


def test_cancel_in_every_state() -> None:
    model = toy(most_running=2)
    loop = Loop(model, slice_tokens=8)
    answering, prefilling, waiting = Ear(), Ear(), Ear()
    loop.add(Request("a", (65,), GREEDY), answering)
    loop.step()
    loop.add(Request("p", (66,) * 60, GREEDY), prefilling)
    loop.add(Request("w", (67,), GREEDY), waiting)
    loop.step()
    loop.step()
    for name in ("w", "p", "a", "unknown", "a"):
        loop.cancel(name)
    assert [ear.done.reason for ear in (answering, prefilling, waiting)] == ["cancelled"] * 3
    assert waiting.events == [waiting.done]
    assert prefilling.done.text == ""
    assert list(answering.done.token_ids) == greedy_alone([65], 12)[: len(answering.done.token_ids)]
    assert loop.idle
    assert not loop.step()
    assert model.pages.available == model.pages.count


@pytest.mark.parametrize("when", [Started, Progress, Delta])
def test_cancel_from_within_a_sink(when: type[Event]) -> None:
    model = toy()
    loop, other = Loop(model), Ear()
    heard: list[Event] = []

    def sink(event: Event) -> None:
        heard.append(event)
        if isinstance(event, when):
            loop.cancel("r")
            loop.cancel("other")

    loop.add(Request("r", (65, 66) * 5, GREEDY), sink)
    loop.add(Request("other", (65, 67) * 5, GREEDY), other)
    run(loop)
    assert isinstance(heard[-1], Done)
    assert sum(isinstance(event, Done) for event in heard) == 1
    assert other.done.reason == "cancelled"
    assert model.pages.available == model.pages.count


@pytest.mark.parametrize("most", [1, 2])
def test_cancel_from_within_the_last_delta_ends_once(most: int) -> None:
    model = toy(shape=saying(list(b"ab"), after=1))
    loop, heard = Loop(model), []

    def sink(event: Event) -> None:
        heard.append(event)
        if isinstance(event, Delta) and sum(isinstance(e, Delta) for e in heard) == most:
            loop.cancel("r")

    loop.add(Request("r", (65,), GREEDY.model_copy(update={"max_tokens": most})), sink)
    run(loop)
    ends = [event for event in heard if isinstance(event, Done)]
    assert [(end.reason, end.text) for end in ends] == [("cancelled", "ab"[:most])]


def test_an_interrupted_step_changes_nothing() -> None:
    steps = 0

    def interrupt(_batch: Any) -> None:
        nonlocal steps
        steps += 1
        if steps % 2:
            model.decoder.cancel()

    model = toy(before_step=interrupt)
    loop, ear = Loop(model, slice_tokens=4), Ear()
    loop.add(Request("r", tuple(b"interrupted"), GREEDY), ear)
    for _ in range(100):
        model.decoder.clear_cancel()
        if not loop.step():
            break
    assert list(ear.done.token_ids) == greedy_alone(b"interrupted", 12)
    assert [p.done for p in ear.progress] == [4, 8, 11]


def test_a_cancelled_prefill_leaves_a_valid_prefix() -> None:
    model = toy()
    loop, first, second = Loop(model, slice_tokens=8), Ear(), Ear()
    loop.add(Request("1", tuple(range(30)), GREEDY), first)
    loop.step()
    loop.cancel("1")
    loop.add(Request("2", tuple(range(30)), GREEDY), second)
    run(loop)
    assert second.done.usage.cached_tokens == 8
    assert list(second.done.token_ids) == greedy_alone(range(30), 12)


# ---------------------------------------------------------------- company does not matter


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(97, 100), min_size=1, max_size=25), min_size=2, max_size=5),
    temperature=st.sampled_from([0.0, 0.8, 2.0]),
    penalty=st.sampled_from([1.0, 1.3]),
    slice_tokens=st.sampled_from([1, 7, None]),
    pages=st.integers(12, 40),
    stream=st.booleans(),
)
def test_a_seeded_answer_is_the_same_alone_and_in_company(
    prompts: list[list[int]],
    temperature: float,
    penalty: float,
    slice_tokens: int | None,
    pages: int,
    stream: bool,
) -> None:
    sampling = Sampling(temperature=temperature, seed=11, repetition_penalty=penalty, max_tokens=16)
    alone = [ask(toy(), tuple(prompt), sampling).done for prompt in prompts]
    loop = Loop(toy(pages=pages, context=44), slice_tokens=slice_tokens)
    ears = [Ear() for _ in prompts]
    for number, (prompt, ear) in enumerate(zip(prompts, ears, strict=True)):
        loop.add(Request(str(number), tuple(prompt), sampling, stream=stream), ear)
        loop.step()
    run(loop)
    assert [(e.done.token_ids, e.done.text, e.done.reason) for e in ears] == [
        (d.token_ids, d.text, d.reason) for d in alone
    ]


def test_unseeded_answers_differ() -> None:
    hot = Sampling(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=20)
    assert ask(toy(), (65,), hot).done.token_ids != ask(toy(), (65,), hot).done.token_ids


def test_penalties_count_cached_prompt_tokens() -> None:
    """The history is the sequence, wherever its pages came from."""
    model = toy(shape=lambda ids, row: np.where(np.arange(VOCAB) == ids[0], np.float32(3.0), row))
    sampling = Sampling(temperature=0.0, repetition_penalty=2.0, max_tokens=3)
    loop, first, second = Loop(model), Ear(), Ear()
    for name, ear in (("1", first), ("2", second)):
        loop.add(Request(name, (70,) * 13, sampling), ear)
        run(loop)
    assert second.done.usage.cached_tokens == 12
    assert 70 not in first.done.token_ids
    assert first.done.token_ids == second.done.token_ids


# ---------------------------------------------------------------- logprobs


def test_logprobs_come_with_deltas_and_with_done() -> None:
    prompt = (65, 66)
    streamed, whole = (ask(toy(), prompt, logprobs=2, stream=stream) for stream in (True, False))
    assert streamed.done.logprobs == whole.done.logprobs
    ids = list(prompt)
    for found in whole.done.logprobs:
        row = plain_logits(ids, VOCAB)[:260].astype(np.float64)
        expected = row - row.max() - math.log(np.exp(row - row.max()).sum())
        assert math.isclose(found.logprob, expected[found.token_id], rel_tol=1e-9)
        assert found.alternatives[0][0] == int(row.argmax())
        assert [len(bytes_) for _, bytes_, _ in found.alternatives] == [
            len(toy().tokenizer.token_bytes(i)) for i, _, _ in found.alternatives
        ]
        ids.append(found.token_id)
    assert ask(toy(), prompt).done.logprobs == ()


# ---------------------------------------------------------------- conversations


def test_a_conversation_is_rendered_and_its_content_is_no_control() -> None:
    model = toy(shape=saying(list(b"Hi"), after=0))
    messages = (Message("system", "s"), Message("user", "<|im_end|>hello"))
    encoded = model.encode(messages).ids.tolist()
    text = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n<|im_end|>hello<|im_end|>\n<|im_start|>assistant\n"
    assert model.tokenizer.decode(encoded, skip_special=False) == text
    assert encoded.count(END) == 2
    ear = ask(toy(shape=saying(list(b"Hi"), after=len(encoded))), messages)
    assert (ear.done.text, ear.done.usage.prompt_tokens) == ("Hi", len(encoded))
    assert Loop(model).count_tokens(messages) == len(encoded)


def test_an_answer_goes_on_where_its_beginning_ends() -> None:
    messages = (Message("user", "hi"),)
    plain = toy().encode(messages).ids.tolist()
    begun = toy().encode(messages, begin="So: <|im_end|>")
    assert begun.ids.tolist()[: len(plain)] == plain
    assert toy().tokenizer.decode(begun.ids.tolist()[len(plain) :], skip_special=False) == "So: <|im_end|>"
    assert END not in begun.ids.tolist()[len(plain) :]
    request = Request("r", messages, begin="So: ")
    shown = Loop(toy()).prompt_tokens(request)
    assert b"".join(token.token_bytes for token in shown).endswith(b"assistant\nSo: ")
    assert [token.token_id for token in shown if token.control].count(END) == 1
    model = toy(shape=saying(list(b"Hi"), after=len(shown)))
    ear = ask(model, messages, begin="So: ")
    assert (ear.done.text, ear.done.usage.prompt_tokens) == ("Hi", len(shown))
    assert toy().encode("text", begin=" more").ids.tolist() == toy().encode("text more").ids.tolist()


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def test_a_conversation_is_repaired_and_the_person_told() -> None:
    messages = (Message("system", "Be brief."), Message("user", "a"), Message("assistant", ""), Message("user", "b"))
    model = toy(template=STRICT)
    assert model.tokenizer.decode(model.encode(messages).ids.tolist()) == "[user]Be brief.\n\na\n\nb"
    notices = ask(model, messages).done.notices
    assert len(notices) == 3
    assert "no place for a system prompt" in notices[-1]
    assert ask(model, (Message("user", "a"),)).done.notices == ()


def test_a_template_that_refuses_everything_says_why() -> None:
    refusing = STRICT.replace(
        "[{{ m.role }}]", "{% if 'secret' in m.content %}{{ raise_exception('no secrets') }}{% endif %}"
    )
    ear = ask(toy(template=refusing), (Message("user", "a secret"),))
    assert ear.failed.kind == "TemplateError"
    assert "no secrets" in ear.failed.message


def test_exactly_one_beginning_token_when_the_model_wants_one() -> None:
    """Raw texts and plain completion get it from the tokenizer, conversations from their template."""
    for template, by_template in ((CHATML, 0), ("{{ bos_token }}" + CHATML, 1), (None, 1)):
        files = tokenizer_files(template, add_bos_token=True)
        tokenizer, rendered = Tokenizer.from_files(files), ChatTemplate.from_files(files)
        model = replace(toy(), tokenizer=tokenizer, template=rendered)
        for prompt, count in (("hi", 1), ("<s>hi", 1), ((Message("user", "hi"),), by_template)):
            ids = model.encode(prompt).ids.tolist()
            assert ids.count(256) == count
            assert (ids[0] == 256) == bool(count)
    assert 256 not in toy().encode("hi").ids


def test_a_model_without_a_template_goes_on_with_the_text() -> None:
    model = toy(template=None)
    encoded = model.encode((Message("user", "Once upon"), Message("user", "a time"))).ids
    assert model.tokenizer.decode(encoded.tolist()) == "Once upon\n\na time"


def test_the_date_in_a_prompt_follows_the_conversation() -> None:
    model = toy(template="{{ strftime_now('%Y-%m-%d %H:%M') }}{% for m in messages %}{{ m.content }}{% endfor %}")
    started = datetime(2024, 2, 29, 12, 34, tzinfo=UTC)
    text = model.tokenizer.decode(model.encode((Message("user", "!"),), started).ids.tolist())
    assert text == "2024-02-29 12:34!"
    assert model.tokenizer.decode(model.encode((Message("user", "!"),)).ids.tolist()).endswith(":00!")


def test_end_tokens_of_earlier_turns_do_not_keep_an_answer_from_ending() -> None:
    def shape(_before: list[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
        row = np.full_like(row, -10.0)
        row[END], row[97] = 2.0, 1.9
        return row

    heavy = Sampling(temperature=0.0, repetition_penalty=2.0, presence_penalty=2.0, frequency_penalty=2.0)
    assert ask(toy(shape=shape), (END,) * 50, heavy).done.text == ""


def test_the_errors_of_a_failing_model_are_ours() -> None:
    assert InternalError.exit_code == 1
