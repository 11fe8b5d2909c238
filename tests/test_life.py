"""The life of a request: its place in the queue, signs of life, its time, its turn, and why it ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import api
from engine.progress import Progress
from engine.runtime.events import Done, Message, Request
from engine.runtime.loop import Loop
from engine.runtime.model import Model
from engine.runtime.repetition import repeats
from engine.runtime.service import Service
from engine.settings import EngineSettings, Sampling
from tests.fakes import Ear, saying, toy

GREEDY = Sampling(temperature=0.0, repetition_penalty=1.0, max_tokens=12, loop_limit=0)


class Clock:
    """Goes on by `step_s` with every step of the model."""

    def __init__(self, step_s: float = 0.1) -> None:
        self.now_s, self.step_s = 100.0, step_s

    def __call__(self) -> float:
        return self.now_s

    def tick(self, _batch: Any) -> None:
        self.now_s += self.step_s


def looped(clock: Clock, settings: EngineSettings = EngineSettings(), **toys: Any) -> Loop:
    model = replace(toy(before_step=clock.tick, end_ids=(), **toys), settings=settings)
    return Loop(model, clock=clock, slice_tokens=8)


def run(loop: Loop) -> None:
    for _ in range(5000):
        if not loop.step():
            return
    pytest.fail("no end in sight")


# ---------------------------------------------------------------- in the queue


def test_the_place_in_the_queue_is_told_and_moves_up() -> None:
    loop = looped(Clock(), most_running=1)
    ears = [Ear() for _ in range(4)]
    for number, ear in enumerate(ears):
        loop.add(Request(str(number), (65, number), GREEDY), ear)
    run(loop)
    assert not [event for event in ears[0].progress if event.stage == "queue"]
    places = [event for event in ears[3].progress if event.stage == "queue"]
    assert [event.note for event in places if event.note] == sorted((e.note for e in places), reverse=True)
    assert list(dict.fromkeys(event.note for event in places)) == [
        "2 before this one",
        "1 before this one",
        "0 before this one",
    ]
    assert all(event.unit == "requests" and event.eta_s is not None and event.eta_s > 0 for event in places)
    etas = [event.eta_s for event in places]
    assert etas[-1] is not None
    assert etas[0] is not None
    assert etas[-1] < etas[0]


def test_an_estimate_is_about_right_once_answers_have_been_seen() -> None:
    clock = Clock(0.1)
    loop = looped(clock, most_running=1)
    for number in range(40):
        loop.add(Request(str(number), (65, number), GREEDY), Ear())
    run(loop)
    first, second = Ear(), Ear()
    loop.add(Request("a", (66,), GREEDY), first)
    loop.add(Request("b", (67,), GREEDY), second)
    began_s = clock.now_s
    run(loop)
    told = next(event for event in second.progress if event.stage == "queue")
    actual_s = second.done.usage.queue_s
    assert told.eta_s is not None
    assert 0.5 * actual_s < told.eta_s < 2 * actual_s
    assert clock.now_s - began_s < 4


def test_whoever_waits_or_is_silent_hears_something_every_second() -> None:
    clock = Clock(0.3)
    heard: dict[str, list[tuple[float, Any]]] = {"quiet": [], "waits": []}
    loop = looped(clock, most_running=1, shape=saying([97] * 100, after=0))
    for name, events in heard.items():
        request = Request(name, (65,) * 3, GREEDY.model_copy(update={"max_tokens": 40}), stream=False)
        loop.add(request, lambda event, events=events: events.append((clock.now_s, event)))
    run(loop)
    for events in heard.values():
        times = [100.0, *(at for at, _ in events)]
        assert max(np.diff(times)) <= 1.0 + 2 * 0.3
    stages = {event.stage for _, event in heard["quiet"] if isinstance(event, Progress)}
    assert stages == {"prefill", "decode"}
    decoding = [event for _, event in heard["quiet"] if isinstance(event, Progress) and event.stage == "decode"]
    assert [event.done for event in decoding] == sorted(event.done for event in decoding)
    assert decoding[-1].total == 40


# ---------------------------------------------------------------- deadlines (case R16)


def test_a_deadline_of_ones_own_ends_the_answer() -> None:
    clock = Clock(0.1)
    loop, ear, other = looped(clock), Ear(), Ear()
    loop.add(Request("r", (65,), GREEDY.model_copy(update={"max_tokens": 200}), deadline_s=2.0), ear)
    loop.add(Request("other", (66,), GREEDY.model_copy(update={"max_tokens": 60})), other)
    run(loop)
    assert ear.done.reason == "deadline"
    assert 15 <= len(ear.done.token_ids) <= 25
    assert "after 2 s" in ear.done.notices[-1]
    assert other.done.reason == "length"


def test_a_deadline_counts_in_the_queue_too() -> None:
    loop = looped(Clock(0.1), most_running=1)
    first, ear = Ear(), Ear()
    loop.add(Request("first", (65,), GREEDY.model_copy(update={"max_tokens": 100})), first)
    loop.add(Request("r", (66,), GREEDY, deadline_s=1.0), ear)
    run(loop)
    assert (ear.done.reason, ear.done.text) == ("deadline", "")
    assert first.done.reason == "length"


def test_slow_but_getting_on_is_no_reason_to_end() -> None:
    """Each step takes two minutes, which nobody expected."""
    loop, ear = looped(Clock(120.0)), Ear()
    loop.add(Request("r", tuple(range(65, 90)), GREEDY.model_copy(update={"max_tokens": 60})), ear)
    run(loop)
    assert (ear.done.reason, len(ear.done.token_ids)) == ("length", 60)


def test_what_does_not_get_on_ends_by_itself() -> None:
    clock = Clock(0.5)
    loop, ear = looped(clock), Ear()
    loop.add(Request("r", (65,), GREEDY.model_copy(update={"max_tokens": 50})), ear)
    loop.step()
    decoder: Any = loop._model.decoder
    decoder.cancel()  # every step comes to nothing from now on
    steps = 0
    while not ear.ended:
        loop.step()
        steps += 1
        assert steps < 1000
    assert ear.done.reason == "deadline"
    assert "did not get on" in ear.done.notices[-1]
    assert 30 < clock.now_s - 100 < 300
    assert loop.idle


def test_a_computer_that_slept_ends_nothing() -> None:
    clock = Clock(0.1)
    loop, ear, waiting = looped(clock, most_running=1), Ear(), Ear()
    loop.add(Request("r", (65,), GREEDY.model_copy(update={"max_tokens": 50})), ear)
    loop.add(Request("w", (66,), GREEDY), waiting)
    for turn in range(400):
        if turn % 10 == 5:
            clock.now_s += 8 * 3600
        if not loop.step():
            break
    assert (ear.done.reason, waiting.done.reason) == ("length", "length")


def test_a_clock_that_goes_back_does_no_harm() -> None:
    clock = Clock(0.1)
    loop, ear = looped(clock), Ear()
    loop.add(Request("r", (65,), GREEDY), ear)
    loop.step()
    clock.now_s -= 24 * 3600
    run(loop)
    assert ear.done.reason == "length"


# ---------------------------------------------------------------- limits


def test_too_many_requests_are_refused_with_numbers_and_a_time() -> None:
    clock = Clock()
    loop = looped(clock, EngineSettings(most_requests=3), most_running=1)
    ears = [Ear() for _ in range(5)]
    for number, ear in enumerate(ears):
        loop.add(Request(str(number), (65, number), GREEDY), ear)
    for ear in ears[3:]:
        assert ear.failed.kind == "BusyError"
        assert "3 requests are on their way, and 3 may be" in ear.failed.message
        assert ear.failed.retry_s > 0
    run(loop)
    assert [ear.done.reason for ear in ears[:3]] == ["length"] * 3


def test_one_client_does_not_take_all_places() -> None:
    loop = looped(Clock(), EngineSettings(most_of_client=2))
    ears = [Ear() for _ in range(4)]
    for number, ear in enumerate(ears):
        client = "b" if number == 3 else "a"
        loop.add(Request(str(number), (65, number), GREEDY, client=client), ear)
    assert "2 requests of this client" in ears[2].failed.message
    run(loop)
    assert [ears[n].done.reason for n in (0, 1, 3)] == ["length"] * 3


def test_the_longest_request_is_limited() -> None:
    loop = looped(Clock(), EngineSettings(most_request_tokens=30))
    long, full = Ear(), Ear()
    loop.add(Request("long", (65,) * 30, GREEDY), long)
    loop.add(Request("full", (65,) * 25, GREEDY), full)
    run(loop)
    assert (long.failed.needed_tokens, long.failed.context_tokens) == (31, 30)
    assert (full.done.reason, len(full.done.token_ids)) == ("context", 5)


# ---------------------------------------------------------------- turns


def test_clients_take_turns() -> None:
    loop = looped(Clock(), most_running=1)
    order: list[str] = []

    def sink(event: Any) -> None:
        if isinstance(event, Done):
            order.append(event.request_id)

    for number in range(6):
        loop.add(Request(f"a{number}", (65, number), GREEDY, client="a"), sink)
    for number in range(2):
        loop.add(Request(f"b{number}", (66, number), GREEDY, client="b"), sink)
    run(loop)
    assert order == ["a0", "b0", "a1", "b1", "a2", "a3", "a4", "a5"]


def test_who_comes_late_takes_turns_from_then_on() -> None:
    loop = looped(Clock(), most_running=1)
    order: list[str] = []

    def sink(event: Any) -> None:
        if isinstance(event, Done):
            order.append(event.request_id)
            if len(order) == 4:
                for number in range(4):
                    loop.add(Request(f"b{number}", (66, number), GREEDY, client="b"), sink)

    for number in range(8):
        loop.add(Request(f"a{number}", (65, number), GREEDY, client="a"), sink)
    run(loop)
    assert [name[0] for name in order[4:]].count("b") == 4
    assert all(order[4:][n : n + 2] in ([f"a{m}", f"b{k}"], [f"b{k}", f"a{m}"]) for n, m, k in ((0, 4, 0), (2, 5, 1)))


def test_a_client_with_many_requests_cannot_starve_another() -> None:
    loop = looped(Clock(), most_running=2)
    order: list[str] = []

    def sink(event: Any) -> None:
        if isinstance(event, Done):
            order.append(event.request_id)

    for number in range(40):
        loop.add(Request(f"a{number}", (65, number), GREEDY, client="a"), sink)
    for number in range(5):
        loop.add(Request(f"b{number}", (66, number), GREEDY, client="b"), sink)
    run(loop)
    assert max(order.index(f"b{number}") for number in range(5)) <= 14


def test_shortest_remaining_goes_first_and_the_longest_is_not_forgotten() -> None:
    settings = EngineSettings(scheduling="shortest-remaining")
    loop = looped(Clock(), settings, most_running=1)
    order: list[str] = []

    def sink(event: Any) -> None:
        if isinstance(event, Done):
            order.append(event.request_id)

    lengths = {"now": 5, "long": 60, **{f"s{n}": 3 + n % 4 for n in range(20)}}
    for number, (name, length) in enumerate(lengths.items()):
        loop.add(Request(name, (65, number), GREEDY.model_copy(update={"max_tokens": length})), sink)
    run(loop)
    short = [name for name in order[:7] if name.startswith("s")]
    assert [lengths[name] for name in short] == sorted(lengths[name] for name in short)
    assert 8 <= order.index("long") <= 10


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """Half of each step's prompt tokens are the short one's, so it answers after a few steps, not after fifty."""
    clock = Clock(0.1)
    loop = looped(clock, context=1024, pages=300)
    long, short = Ear(), Ear()
    loop.add(Request("long", tuple(np.arange(400) % 90 + 33), GREEDY), long)
    loop.step()
    loop.add(Request("short", tuple(range(65, 77)), GREEDY), short)
    run(loop)
    assert short.done.usage.prefill_s <= 0.4
    assert long.done.usage.prefill_s < 6.0


# ---------------------------------------------------------------- repetition


def test_an_answer_that_goes_round_in_circles_ends_with_a_reason() -> None:
    model = toy(shape=saying(list(b"the end. ") * 200, after=1), end_ids=(), context=2048, pages=600)
    for limit, length in ((64, 64), (200, 208)):
        ear = Ear()
        loop = Loop(model)
        loop.add(Request("r", (65,), GREEDY.model_copy(update={"max_tokens": 900, "loop_limit": limit})), ear)
        run(loop)
        assert ear.done.reason == "loop"
        assert len(ear.done.token_ids) == length
        assert f"repeated itself for {limit} tokens" in ear.done.notices[-1]
    ear = Ear()
    loop.add(Request("r", (65,), GREEDY.model_copy(update={"max_tokens": 900})), ear)
    run(loop)
    assert ear.done.reason == "length"


@given(
    piece=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    before=st.lists(st.integers(0, 3), max_size=10),
    limit=st.integers(1, 60),
    broken=st.booleans(),
)
def test_repetition_by_its_definition(piece: list[int], before: list[int], limit: int, broken: bool) -> None:
    ids = [*before, *piece * 8]
    if broken:
        ids[-1 - limit // 2 % len(ids)] = 9
    tail = ids[len(ids) - limit :]
    expected = len(ids) >= limit and any(
        all(tail[n] == tail[n - period] for n in range(period, limit)) for period in range(1, limit // 4 + 1)
    )
    assert repeats(np.array(ids, np.int32), limit) == expected


# ---------------------------------------------------------------- read ahead


def test_what_was_read_ahead_is_found() -> None:
    model = toy()
    loop, ahead, ear = Loop(model), Ear(), Ear()
    system = (Message("system", "You keep a lighthouse and count ships."),)
    loop.add(Request("ahead", system, prefill_only=True), ahead)
    run(loop)
    assert (ahead.done.reason, ahead.done.text, ahead.done.token_ids) == ("prefilled", "", ())
    assert ahead.done.usage.completion_tokens == 0
    loop.add(Request("r", (*system, Message("user", "How many?")), GREEDY), ear)
    run(loop)
    assert ear.done.usage.cached_tokens >= 40
    assert model.pages.available == model.pages.count


def test_the_engine_reads_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def opener(_path: Path, _settings: EngineSettings) -> Generator[Progress, None, Model]:
        yield Progress("load", 0, 1)
        return toy()

    monkeypatch.setattr(api, "_opened", opener)
    engine, ahead, ear = api.Engine(), Ear(), Ear()
    engine.load("toy", EngineSettings(), lambda _event: None)
    messages = [Message("system", "You keep a lighthouse and count ships.")]
    engine.prefill(messages, ahead)
    ahead.wait()
    engine.submit(Request("r", (*messages, Message("user", "?")), GREEDY), ear)
    ear.wait()
    assert ear.done.usage.cached_tokens >= 40
    cancelled = Ear()
    engine.cancel(engine.prefill([Message("user", "x" * 100)], cancelled))
    cancelled.wait()
    assert cancelled.done.reason in ("cancelled", "prefilled")
    engine.close()


# ---------------------------------------------------------------- cancelling (case R07)


def test_cancel_of_a_request_nobody_has_looked_at_yet() -> None:
    """It lies in the inbox while a long step of another goes on."""
    entered = threading.Event()

    def slow(_batch: Any) -> None:
        entered.set()
        model.decoder._stop.wait(5.0)  # type: ignore[attr-defined]

    model = toy(before_step=slow)

    def opener(_path: Path, _settings: EngineSettings) -> Generator[Progress, None, Model]:
        yield Progress("load", 0, 1)
        return model

    service, first, second = Service(opener), Ear(), Ear()
    try:
        service.load(Path("toy"), EngineSettings(), lambda _event: None)
        service.submit(Request("first", (65,), GREEDY), first)
        assert entered.wait(5)
        service.submit(Request("second", (66,), GREEDY), second)
        begin_s = time.monotonic()
        service.cancel("second")
        second.wait()
        assert time.monotonic() - begin_s < 0.25
        assert second.done.reason == "cancelled"
    finally:
        service.close()
