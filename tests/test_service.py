"""The engine's thread: orders from anywhere, one model, every request answered once, nothing hangs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import InputError, ModelFolderError
from engine.progress import Progress
from engine.runtime.events import Delta, Done, Failed, Loaded, Message, Request
from engine.runtime.loop import Loop
from engine.runtime.model import Model
from engine.runtime.service import CANCELLED, Service
from engine.settings import EngineSettings, Sampling
from tests.fakes import END, Ear, saying, toy

ENDLESS = Sampling(temperature=0.0, repetition_penalty=1.0, max_tokens=1_000_000)
BRIEF = Sampling(temperature=0.0, repetition_penalty=1.0, max_tokens=5)
PATH, SETTINGS = Path("toy"), EngineSettings()


class LoadEar:
    """A sink for loading."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self._end = threading.Event()

    def __call__(self, event: Any) -> None:
        assert not self._end.is_set(), f"{event} came after the end"
        self.events.append(event)
        if isinstance(event, Loaded | Failed):
            self._end.set()

    def wait(self) -> Any:
        assert self._end.wait(10), self.events
        return self.events[-1]


class Gate:
    """An opener whose loading goes on when `open()` is called, or fails with what `fail` says."""

    def __init__(self, make: Callable[[], Model] = toy) -> None:
        self.make = make
        self.passed = threading.Event()
        self.error: Exception | None = None
        self.closed = 0
        self.released = 0

    def __call__(self, path: Path, settings: EngineSettings) -> Generator[Progress, None, Model]:
        try:
            yield Progress("load", 0, 2, note=str(path))
            while not self.passed.wait(0.002):
                yield Progress("load", 1, 2)
            if self.error is not None:
                raise self.error
        except GeneratorExit:
            self.closed += 1
            raise
        return replace(self.make(), release=self._release)

    def _release(self) -> None:
        self.released += 1


@pytest.fixture
def serve() -> Iterator[Callable[..., Service]]:
    """Services that are closed at the end of the test."""
    services: list[Service] = []

    def start(opener: Any = None, *, loaded: bool = False) -> Service:
        gate = opener or Gate()
        if loaded:
            gate.passed.set()
        service = Service(gate)
        services.append(service)
        if loaded:
            ear = LoadEar()
            service.load(PATH, SETTINGS, ear)
            assert isinstance(ear.wait(), Loaded)
        return service

    yield start
    for service in services:
        service.close()


def endless(**changes: Any) -> Model:
    """Says "a" until it is stopped or its 4,096 tokens are full."""
    return toy(shape=saying([97] * 5000, after=1), end_ids=(), context=4096, pages=1100, **changes)


def until(true: Callable[[], object], seconds: float = 10) -> None:
    deadline_s = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.001)


# ---------------------------------------------------------------- loading


def test_a_model_is_loaded_and_answers(serve: Callable[..., Service]) -> None:
    gate = Gate(lambda: toy(shape=saying(list(b"Hello"), after=1)))
    gate.passed.set()
    service, loading, ear = serve(gate), LoadEar(), Ear()
    service.load(PATH, SETTINGS, loading)
    service.submit(Request("r", (65,), BRIEF), ear)
    assert loading.wait() == Loaded(toy().info)
    assert [event.note for event in loading.events[:-1]] == ["toy"]
    assert ear.wait() == ear.done
    assert ear.done.text == "Hello"


def test_without_a_model_a_request_fails(serve: Callable[..., Service]) -> None:
    ear = Ear()
    serve().submit(Request("r", (65,), BRIEF), ear)
    assert isinstance(ear.wait(), Failed)
    assert "no model is loaded" in ear.failed.message


def test_requests_wait_for_the_model_that_is_loading(serve: Callable[..., Service]) -> None:
    gate = Gate()
    service, loading, first, second = serve(gate), LoadEar(), Ear(), Ear()
    service.load(PATH, SETTINGS, loading)
    service.submit(Request("1", (65,), BRIEF), first)
    service.submit(Request("2", (65,), BRIEF), second)
    service.cancel("1")
    assert isinstance(first.wait(), Done)
    assert first.done.reason == "cancelled"
    assert not second.events
    gate.passed.set()
    assert isinstance(second.wait(), Done)


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (ModelFolderError("config.json of toy is missing"), "ModelFolderError", "config.json of toy is missing"),
        (ZeroDivisionError("oh"), "InternalError", "oh"),
    ],
)
def test_a_load_that_fails_says_so_to_all_who_wait(
    serve: Callable[..., Service], error: Exception, kind: str, sentence: str
) -> None:
    gate = Gate()
    gate.error = error
    service, loading, ear, later = serve(gate), LoadEar(), Ear(), Ear()
    service.load(PATH, SETTINGS, loading)
    service.submit(Request("r", (65,), BRIEF), ear)
    until(lambda: service._early)
    gate.passed.set()
    for failed in (loading.wait(), ear.wait()):
        assert failed.kind == kind
        assert sentence in failed.message
    assert (loading.wait().request_id, ear.failed.request_id) == (None, "r")
    service.submit(Request("r", (65,), BRIEF), later)
    assert "no model is loaded" in later.wait().message


def test_a_load_can_be_cancelled(serve: Callable[..., Service]) -> None:
    gate = Gate()
    service, loading, ear = serve(gate), LoadEar(), Ear()
    service.load(PATH, SETTINGS, loading)
    service.submit(Request("r", (65,), BRIEF), ear)
    until(lambda: len(loading.events) > 2)
    begin_s = time.monotonic()
    service.cancel_load()
    assert loading.wait().kind == CANCELLED
    assert time.monotonic() - begin_s < 0.25
    assert gate.closed == 1
    assert isinstance(ear.wait(), Done)
    assert ear.done.reason == "cancelled"
    service.cancel_load()  # nothing is loading any more


def test_loading_another_model_replaces_the_first(serve: Callable[..., Service]) -> None:
    gate = Gate(endless)
    service = serve(gate, loaded=True)
    running, loading, ear = Ear(), LoadEar(), Ear()
    service.submit(Request("r", (65,), ENDLESS), running)
    until(lambda: running.deltas)
    gate.make = lambda: toy(shape=saying(list(b"new"), after=1))
    service.load(PATH, SETTINGS, loading)
    service.submit(Request("n", (65,), BRIEF), ear)
    running.wait()
    assert running.done.reason == "cancelled"
    assert "the model was replaced" in running.done.notices[0]
    assert isinstance(loading.wait(), Loaded)
    ear.wait()
    assert ear.done.text == "new"
    assert gate.released == 1


def test_a_second_load_ends_the_first(serve: Callable[..., Service]) -> None:
    gate = Gate()
    service, first, second = serve(gate), LoadEar(), LoadEar()
    service.load(PATH, SETTINGS, first)
    until(lambda: first.events)
    service.load(PATH, SETTINGS, second)
    assert first.wait().kind == CANCELLED
    gate.passed.set()
    assert isinstance(second.wait(), Loaded)
    assert gate.closed == 1


def test_unloading_gives_the_model_back(serve: Callable[..., Service]) -> None:
    gate = Gate(endless)
    service, ear, later = serve(gate, loaded=True), Ear(), Ear()
    service.submit(Request("r", (65,), ENDLESS), ear)
    until(lambda: ear.deltas)
    service.unload()
    ear.wait()
    assert ear.done.reason == "cancelled"
    service.submit(Request("r", (65,), BRIEF), later)
    assert "no model is loaded" in later.wait().message
    assert gate.released == 1


def test_a_broken_load_sink_does_no_harm(serve: Callable[..., Service]) -> None:
    def broken(_event: Any) -> None:
        raise RuntimeError("deaf")

    gate, ear = Gate(), Ear()
    gate.passed.set()
    service = serve(gate)
    service.load(PATH, SETTINGS, broken)
    service.submit(Request("r", (65,), BRIEF), ear)
    assert isinstance(ear.wait(), Done)


# ---------------------------------------------------------------- cancelling and closing


def slow(seconds: float) -> Callable[[], Model]:
    """Every step takes so long, unless it is cancelled: as a large model's would."""

    def make() -> Model:
        def wait(_batch: Any) -> None:
            model.decoder._stop.wait(seconds)  # type: ignore[attr-defined]

        model = endless(before_step=wait)
        return model

    return make


def test_cancel_ends_a_long_step_at_once(serve: Callable[..., Service]) -> None:
    service = serve(Gate(slow(5.0)), loaded=True)
    ear = Ear()
    service.submit(Request("r", (65,), ENDLESS), ear)
    until(lambda: ear.events)
    begin_s = time.monotonic()
    service.cancel("r")
    ear.wait()
    assert time.monotonic() - begin_s < 0.25
    assert ear.done.reason == "cancelled"


def test_cancelling_one_does_not_harm_its_company(serve: Callable[..., Service]) -> None:
    service = serve(Gate(slow(0.02)), loaded=True)
    stays, goes = Ear(), [Ear() for _ in range(5)]
    service.submit(Request("stays", (65,), ENDLESS.model_copy(update={"max_tokens": 20})), stays)
    for number, ear in enumerate(goes):
        service.submit(Request(str(number), (65,), ENDLESS), ear)
        until(lambda ear=ear: ear.deltas)
        service.cancel(str(number))
        ear.wait()
    stays.wait()
    assert (stays.done.text, stays.done.reason) == ("a" * 20, "length")
    assert {ear.done.reason for ear in goes} == {"cancelled"}


def test_unknown_requests_are_ignored(serve: Callable[..., Service]) -> None:
    service, ear = serve(loaded=True), Ear()
    service.cancel("nobody")
    service.submit(Request("r", (65,), BRIEF), ear)
    assert isinstance(ear.wait(), Done)
    service.cancel("r")


def test_close_ends_everything_soon_and_is_silent_afterwards() -> None:
    gate = Gate(slow(30.0))
    gate.passed.set()
    service, loading, ears = Service(gate), LoadEar(), [Ear() for _ in range(3)]
    service.load(PATH, SETTINGS, loading)
    loading.wait()
    for number, ear in enumerate(ears):
        service.submit(Request(str(number), (65,), ENDLESS), ear)
    until(lambda: any(ear.events for ear in ears))
    begin_s = time.monotonic()
    service.close()
    assert time.monotonic() - begin_s < 1.0
    assert not service._thread.is_alive()
    assert gate.released == 1
    counts = [len(ear.events) for ear in ears]
    service.submit(Request("late", (65,), BRIEF), ears[0])
    service.close()
    assert [len(ear.events) for ear in ears] == counts
    assert ears[0].done.reason == "cancelled"


def test_close_while_loading() -> None:
    gate = Gate()
    service, loading = Service(gate), LoadEar()
    service.load(PATH, SETTINGS, loading)
    until(lambda: loading.events)
    service.close()
    assert loading.wait().kind == CANCELLED
    assert gate.closed == 1


def test_close_from_within_a_sink() -> None:
    gate = Gate(endless)
    gate.passed.set()
    service, loading = Service(gate), LoadEar()
    service.load(PATH, SETTINGS, loading)
    loading.wait()
    heard: list[Any] = []

    def sink(event: Any) -> None:
        heard.append(event)
        if isinstance(event, Delta) and not any(isinstance(e, Done) for e in heard):
            service.close()

    service.submit(Request("r", (65,), ENDLESS), sink)
    service._thread.join(5)
    assert not service._thread.is_alive()
    assert isinstance(heard[-1], Done)


# ---------------------------------------------------------------- the rest


def test_an_order_that_fails_is_logged_and_forgotten(
    serve: Callable[..., Service], caplog: pytest.LogCaptureFixture
) -> None:
    service, ear = serve(loaded=True), Ear()
    service.call(lambda _model, _loop: 1 / 0)
    service.submit(Request("r", (65,), BRIEF), ear)
    assert isinstance(ear.wait(), Done)
    assert "an order failed" in caplog.text


def test_a_loop_that_trips_fails_its_requests_and_goes_on(
    serve: Callable[..., Service], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service, ear, later = serve(loaded=True), Ear(), Ear()
    original = Loop.step
    monkeypatch.setattr(Loop, "step", lambda _loop: 1 / 0)
    service.submit(Request("r", (65,), BRIEF), ear)
    assert isinstance(ear.wait(), Failed)
    monkeypatch.setattr(Loop, "step", original)
    service.submit(Request("r", (65,), BRIEF), later)
    assert isinstance(later.wait(), Done)
    assert "tripped" in caplog.text


def test_calls_run_between_steps_on_the_engines_thread(serve: Callable[..., Service]) -> None:
    service, found = serve(loaded=True), []
    done = threading.Event()

    def job(model: Model | None, loop: Loop | None) -> None:
        assert model is not None
        assert loop is not None
        found.append((threading.current_thread().name, loop.count_tokens((Message("user", "hi"),))))
        done.set()

    service.call(job)
    assert done.wait(5)
    assert found == [("engine", len("user\nhi\nassistant\n") + 3)]


def test_an_idle_engine_uses_no_processor(serve: Callable[..., Service]) -> None:
    service, ear = serve(loaded=True), Ear()
    service.submit(Request("r", (65,), BRIEF), ear)
    ear.wait()
    time.sleep(0.05)
    before_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before_s < 0.05


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_is_told_to_load_its_own(serve: Callable[..., Service]) -> None:
    service = serve(loaded=True)
    child = os.fork()
    if child == 0:
        try:
            service.submit(Request("r", (65,), BRIEF), Ear())
        except InputError as error:
            service.close()
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    ear = Ear()
    service.submit(Request("r", (65,), BRIEF), ear)
    assert isinstance(ear.wait(), Done)


def test_many_threads_at_once(serve: Callable[..., Service]) -> None:
    """Random requests and cancels from eight threads: each request ends once, no page is lost."""
    models: list[Model] = []

    def make() -> Model:
        models.append(toy(pages=24, context=60, most_running=3))
        return models[-1]

    service = serve(Gate(make), loaded=True)
    ears: list[Ear] = []

    def client(number: int) -> None:
        chance = np.random.default_rng(number)
        for turn in range(12):
            ear = Ear()
            ears.append(ear)
            name = f"{number}.{turn}"
            prompt = tuple(chance.choice([97, 98, END], chance.integers(1, 51)).tolist())
            sampling = Sampling(max_tokens=int(chance.integers(1, 31)), seed=turn)
            service.submit(Request(name, prompt, sampling, stream=chance.random() < 0.5), ear)
            if chance.random() < 0.4:
                time.sleep(chance.random() * 0.01)
                service.cancel(name)
            if chance.random() < 0.5:
                ear.wait()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ears) == 96
    for ear in ears:
        assert isinstance(ear.wait(), Done)
    assert models[0].pages.available == models[0].pages.count
