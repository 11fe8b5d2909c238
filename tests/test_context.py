"""A conversation longer than the context: what goes, what stays, and that it is said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ContextOverflowError
from engine.runtime.context import fit
from engine.runtime.events import ContextCut, Delta, Done, Message, Overflow, Progress, Request, Started
from engine.runtime.loop import Loop
from engine.settings import Sampling
from tests.fakes import END, Ear, saying, toy

GREEDY = Sampling(temperature=0.0, repetition_penalty=1.0, max_tokens=12, loop_limit=0)


def characters(messages: tuple[Message, ...]) -> int:
    return sum(len(message.content) for message in messages)


def conversation(turns: int, size: int = 10) -> list[Message]:
    told = [Message("system", "s" * size)]
    for number in range(turns):
        told += [Message("user", f"{number}".ljust(size, "u")), Message("assistant", f"{number}".ljust(size, "a"))]
    return [*told, Message("user", "?" * size)]


# ---------------------------------------------------------------- what goes


def test_rolling_leaves_out_the_oldest_whole_turns() -> None:
    fitted = fit(conversation(5), "rolling", characters, most=100, wanted=75, request_id="r")
    assert fitted.cut.dropped_messages == (1, 2, 3, 4, 5, 6)
    assert (fitted.cut.tokens_before, fitted.cut.tokens_after) == (120, 60)
    assert [message.role for message in fitted.messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert str(fitted.cut) == "6 earlier messages were left out so that the conversation fits the context"


def test_pinned_messages_stay_and_the_rest_of_their_turn_goes() -> None:
    told = conversation(3)
    told[1] = Message("user", "u" * 10, pinned=True)
    fitted = fit(told, "rolling", characters, most=100, wanted=35, request_id="r")
    assert fitted.cut.dropped_messages == (2, 3, 4, 5, 6)
    assert fitted.messages[1].pinned


def test_middle_keeps_the_first_turn_and_the_last_ones() -> None:
    fitted = fit(conversation(5), "middle", characters, most=100, wanted=85, request_id="r")
    assert fitted.cut.dropped_messages == (3, 4, 5, 6)
    assert fitted.messages[1].content.startswith("0")


def test_middle_cuts_a_message_that_is_too_long_by_itself() -> None:
    told = [Message("system", "s" * 10), Message("user", "b" + "x" * 500 + "e")]
    fitted = fit(told, "middle", characters, most=100, wanted=80, request_id="r")
    assert fitted.cut.cut_message == 1
    text = fitted.messages[1].content
    assert text.startswith("bx")
    assert text.endswith("xe")
    assert "[...]" in text
    assert 70 <= characters(fitted.messages) <= 80
    assert "the middle of a long message was left out" in str(fitted.cut)


@pytest.mark.parametrize("policy", ["rolling", "summarise"])
def test_what_must_stay_and_does_not_fit_is_refused_with_numbers(policy: Overflow) -> None:
    told = [Message("system", "s" * 200), *conversation(2)[1:]]
    with pytest.raises(ContextOverflowError, match="holds 101") as caught:
        fit(told, policy, characters, most=100, wanted=80, request_id="r")
    assert caught.value.needed_tokens == 211


@given(
    roles=st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), max_size=14),
    sizes=st.lists(st.integers(1, 30), min_size=15, max_size=15),
    pins=st.lists(st.booleans(), min_size=15, max_size=15),
    policy=st.sampled_from(["rolling", "middle", "summarise"]),
    most=st.integers(20, 200),
)
def test_nothing_is_lost_silently(
    roles: list[Any], sizes: list[int], pins: list[bool], policy: Overflow, most: int
) -> None:
    told = [
        Message(role, chr(65 + n) * size, pinned=pin)
        for n, (role, size, pin) in enumerate(zip([*roles, "user"], sizes, pins, strict=False))
    ]
    wanted = most * 3 // 4
    try:
        fitted = fit(told, policy, characters, most=most, wanted=wanted, request_id="r")
    except ContextOverflowError:
        needed = [m for n, m in enumerate(told) if m.pinned or m.role == "system" or n == len(told) - 1]
        assert policy == "middle" or characters(tuple(needed)) > most
        return
    cut = fitted.cut
    kept = [n for n in range(len(told)) if n not in cut.dropped_messages]
    for number, message in zip(kept, fitted.messages, strict=True):
        assert message == told[number] or number == cut.cut_message
    assert [told[n] for n in cut.dropped_messages] == list(fitted.gone)
    assert not any(m.pinned or m.role == "system" for m in fitted.gone)
    assert len(told) - 1 not in cut.dropped_messages
    assert cut.tokens_after == characters(fitted.messages) <= most


# ---------------------------------------------------------------- in the loop


def run(loop: Loop) -> None:
    for _ in range(5000):
        if not loop.step():
            return
    pytest.fail("no end in sight")


def chat(turns: int) -> tuple[Message, ...]:
    return tuple(conversation(turns, size=8))


def ask(loop: Loop, turns: int, overflow: Overflow, **fields: Any) -> Ear:
    ear = Ear()
    loop.add(Request("r", chat(turns), fields.pop("sampling", GREEDY), overflow=overflow, **fields), ear)
    run(loop)
    return ear


def test_stop_refuses_and_rolling_answers_and_says_what_went() -> None:
    assert ask(Loop(toy()), 20, "stop").failed.kind == "ContextOverflowError"
    model = toy()
    ear = ask(Loop(model), 20, "rolling")
    (cut,) = ear.done.cuts
    assert cut.dropped_messages[0] == 1
    assert cut.tokens_before > 256 > cut.tokens_after == ear.done.usage.prompt_tokens
    assert isinstance(ear.events[0], Started)
    assert ear.events[1] == cut
    assert str(cut) in ear.done.notices
    left = [m for n, m in enumerate(chat(20)) if n not in cut.dropped_messages]
    expected = Ear()
    other = Loop(toy())
    other.add(Request("r", tuple(left), GREEDY), expected)
    run(other)
    assert ear.done.token_ids == expected.done.token_ids
    assert model.pages.available == model.pages.count


def test_what_fits_is_left_alone() -> None:
    for overflow in ("rolling", "middle", "summarise"):
        assert ask(Loop(toy()), 2, overflow).done.cuts == ()  # type: ignore[arg-type]


def test_the_next_turns_find_the_same_beginning() -> None:
    """So much is left out at once that not every turn leaves out more, and reads everything again."""
    loop = Loop(toy())
    first = ask(loop, 20, "rolling")
    again = ask(loop, 20, "rolling")
    assert again.done.cuts == first.done.cuts
    assert again.done.usage.cached_tokens > 0.9 * again.done.usage.prompt_tokens - 4


@pytest.mark.parametrize("overflow", ["rolling", "middle", "summarise"])
def test_an_answer_that_fills_the_context_goes_on(overflow: Overflow) -> None:
    wanted = GREEDY.model_copy(update={"max_tokens": 90})
    model = toy(shape=saying([97] * 5000, after=0), end_ids=())
    ear = ask(Loop(model), 5, overflow, sampling=wanted)
    assert (ear.done.reason, len(ear.done.token_ids)) == ("length", 90)
    assert ear.done.text == "a" * 90 == "".join(delta.text for delta in ear.deltas)
    assert ear.done.cuts
    assert [event for event in ear.events if isinstance(event, ContextCut)] == list(ear.done.cuts)
    assert model.pages.available == model.pages.count
    stopped = ask(Loop(toy(shape=saying([97] * 5000, after=0), end_ids=())), 5, "stop", sampling=wanted)
    assert stopped.done.reason == "context"


def test_an_answer_longer_than_the_context_ends_there() -> None:
    wanted = GREEDY.model_copy(update={"max_tokens": 2000})
    ear = ask(Loop(toy(shape=saying([97] * 5000, after=0), end_ids=())), 5, "rolling", sampling=wanted)
    assert ear.done.reason == "context"
    assert len(ear.done.token_ids) > 150


def test_raw_texts_and_ids_are_cut_too() -> None:
    ids = (256, *np.random.default_rng(0).integers(97, 100, 300).tolist())
    for overflow, kept in (("rolling", (256, *ids[-243:])), ("middle", (*ids[:122], *ids[-122:]))):
        loop, ear = Loop(toy()), Ear()
        loop.add(Request("r", ids, GREEDY, overflow=overflow), ear)  # type: ignore[arg-type]
        run(loop)
        (cut,) = ear.done.cuts
        assert (cut.tokens_before, cut.tokens_after, cut.dropped_messages) == (301, 244, ())
        expected, other = Ear(), Loop(toy())
        other.add(Request("r", kept, GREEDY), expected)
        run(other)
        assert ear.done.token_ids == expected.done.token_ids


# ---------------------------------------------------------------- summaries


def summarising(text: str = "They counted ships.") -> Any:
    """Says the summary to whoever asks for one, and "ok" to others."""
    question = list(b"Summarise this part")

    def shape(before: list[int], row: Any) -> Any:
        row = np.full_like(row, -10.0)
        joined = bytes(token if token < 256 else 0 for token in before)
        said = joined.split(b"assistant\n")[-1]
        wanted = text.encode() if bytes(question) in joined else b"ok"
        row[wanted[len(said)] if len(said) < len(wanted) else END] = 10.0
        return row

    return toy(shape=shape, context=1024, pages=300)


def long_chat() -> tuple[Message, ...]:
    return tuple(conversation(20, size=40))


def test_a_summary_takes_the_place_of_the_oldest_turns() -> None:
    model = summarising()
    loop, ear = Loop(model), Ear()
    loop.add(Request("r", long_chat(), GREEDY, overflow="summarise"), ear)
    assert "r" in loop
    run(loop)
    (cut,) = ear.done.cuts
    assert cut.summary == "They counted ships."
    assert "summarised" in str(cut)
    assert ear.done.text == "ok"
    left = [m for n, m in enumerate(long_chat()) if n not in cut.dropped_messages]
    told = (left[0], Message("system", "Summary of the conversation so far: They counted ships."), *left[1:])
    assert ear.done.usage.prompt_tokens == model.encode(told).ids.size == cut.tokens_after
    assert {event.stage for event in ear.progress} <= {"queue", "prefill"}
    assert any(event.note == "summarising what came before" for event in ear.progress)
    assert loop.idle
    assert model.pages.available == model.pages.count


def test_a_summary_that_says_nothing_leaves_the_turns_out() -> None:
    ear, loop = Ear(), Loop(summarising(" "))
    loop.add(Request("r", long_chat(), GREEDY, overflow="summarise"), ear)
    run(loop)
    assert ear.done.cuts[0].summary == ""
    assert "left out" in ear.done.notices[0]


def test_cancelling_while_it_is_summarised() -> None:
    model = summarising()
    loop, ear = Loop(model, slice_tokens=32), Ear()
    loop.add(Request("r", long_chat(), GREEDY, overflow="summarise"), ear)
    loop.step()
    loop.add(Request("r", (65,), GREEDY), refused := Ear())
    assert "already" in refused.failed.message
    loop.cancel("r")
    assert ear.done.reason == "cancelled"
    assert loop.idle
    assert "r" not in loop
    assert model.pages.available == model.pages.count


@settings(max_examples=30)
@given(
    turns=st.integers(1, 40),
    overflow=st.sampled_from(["stop", "rolling", "middle", "summarise"]),
    longest=st.integers(1, 120),
    stop_at=st.integers(0, 60),
)
def test_every_request_ends_once_and_gives_its_pages_back(
    turns: int, overflow: Overflow, longest: int, stop_at: int
) -> None:
    model = toy(pages=70)
    loop, ear, other = Loop(model, slice_tokens=50), Ear(), Ear()
    loop.add(Request("r", chat(turns), GREEDY.model_copy(update={"max_tokens": longest}), overflow=overflow), ear)
    loop.add(Request("other", chat(2), GREEDY), other)
    for _ in range(stop_at):
        loop.step()
    if stop_at % 3 == 0:
        loop.cancel("r")
    run(loop)
    assert ear.ended
    assert isinstance(other.events[-1], Done)
    assert loop.idle
    assert model.pages.available == model.pages.count
    if isinstance(ear.events[-1], Done):
        assert "".join(d.text for d in ear.events if isinstance(d, Delta)) == ear.done.text
        assert not any(isinstance(e, Progress) and e.request_id != "r" for e in ear.events)
