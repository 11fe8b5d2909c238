"""A running engine and what happens around it: other work, files that vanish, sleep, and nothing at all."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine import api
from engine.api import Done, Failed, Loaded, Message, Request
from engine.errors import InputError
from engine.settings import EngineSettings, Sampling
from tests import factory
from tests.fakes import Ear

pytestmark = pytest.mark.usefixtures("compiled_kernels")
ROOT = Path(__file__).parent.parent
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
GREEDY = Sampling(temperature=0.0, max_tokens=24, loop_limit=0)


@pytest.fixture
def nook(tmp_path: Path) -> Path:
    file = tmp_path / "toy.nook"
    for _ in api.convert(factory.make(tmp_path / "toy"), file):
        pass
    return file


def test_answers_counting_and_a_conversion_at_the_same_time(tmp_path: Path, nook: Path) -> None:
    """Only the engine's thread calls kernels, so that nothing meets there (case R12)."""
    folder = factory.make(tmp_path / "other")
    trouble: list[BaseException] = []
    answers: list[str] = []
    with engine.AutoModel.from_pretrained(nook, max_seq_len=128) as model:
        expected = model.generate("hello", 24, 0.0, loop_limit=0)

        def convert() -> None:
            for number in range(3):
                for _ in api.convert(folder, tmp_path / f"{number}.nook"):
                    pass

        def ask() -> None:
            for _ in range(5):
                answers.append(model.generate("hello", 24, 0.0, loop_limit=0))
                model.logits([1, 2, 3])

        def guarded(job: object) -> None:
            try:
                job()  # type: ignore[operator]
            except BaseException as error:  # noqa: BLE001 - shown by the thread that waits
                trouble.append(error)

        threads = [threading.Thread(target=guarded, args=(job,)) for job in (convert, ask, ask)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not trouble
    assert answers == [expected] * 10


def test_a_window_ends_where_it_says(tmp_path: Path) -> None:
    """Up to eight tokens nothing is beyond a window of eight; from the ninth position on something is (case R09)."""
    ids = [11, 7, 200, 45, 9, 31, 8, 77, 120, 5, 66, 14, 3, 91, 18, 250, 40]
    weights = factory.weights(factory.cfg())

    def logits(name: str, **changes: Any) -> Any:
        config = factory.cfg(**changes)
        model = engine.AutoModel.from_pretrained(factory.make(tmp_path / name, config, weights), dtype="f32")
        return model.logits(ids)

    whole = logits("whole", **MISTRAL, sliding_window=None)
    every = logits("every", **MISTRAL, sliding_window=8)
    assert np.array_equal(every[:8], whole[:8])
    assert (np.abs(every[8:] - whole[8:]).max(axis=1) > 0).all()


def test_weights_that_are_next_to_nothing_do_no_harm(tmp_path: Path) -> None:
    """What float32 can hold only without its leading digits (case R15)."""
    weights = factory.weights(factory.cfg())
    tiny = {name: value * np.float32(1e-38) if "mlp.up" in name else value for name, value in weights.items()}
    folder = factory.make(tmp_path / "tiny", factory.cfg(), tiny)
    none = {name: value * np.float32(0) if "mlp.up" in name else value for name, value in weights.items()}
    without = factory.make(tmp_path / "none", factory.cfg(), none)
    for dtype in ("f32", "q4"):
        found, wanted = (
            engine.AutoModel.from_pretrained(path, dtype=dtype).logits([1, 2, 3]) for path in (folder, without)
        )
        assert np.isfinite(found).all()
        assert np.abs(found - wanted).max() < 1e-3


def test_a_loaded_file_may_be_replaced_or_deleted(tmp_path: Path, nook: Path) -> None:
    """What is mapped stays what it was (case R13)."""
    if os.name == "nt":
        pytest.skip("Windows does not let go of a mapped file")
    other = tmp_path / "new.nook"
    other.write_bytes(nook.read_bytes()[::-1])
    with engine.AutoModel.from_pretrained(nook, max_seq_len=128) as model:
        before = model.generate("hello", 24, 0.0)
        other.replace(nook)
        assert model.generate("hello", 24, 0.0) == before
        nook.unlink()
        assert model.generate("hello there", 24, 0.0)
    with pytest.raises(InputError):
        engine.AutoModel.from_pretrained(nook)


def test_a_file_that_was_cut_is_refused_when_it_is_loaded(nook: Path) -> None:
    os.truncate(nook, 4096)
    running, heard, ended = api.Engine(), [], threading.Event()

    def sink(event: object) -> None:
        heard.append(event)
        if isinstance(event, Loaded | Failed):
            ended.set()

    running.load(nook, EngineSettings(), sink)
    assert ended.wait(60)
    running.close()
    assert isinstance(heard[-1], Failed)
    assert "toy.nook" in heard[-1].message


def test_nothing_to_do_takes_nothing(nook: Path) -> None:
    """After an answer, with a model loaded and conversations kept on disk (case R11)."""

    def taken_s() -> float:
        before_s = time.process_time()
        time.sleep(2.0)
        return time.process_time() - before_s

    ear, ready = Ear(), threading.Event()
    with contextlib.closing(api.Engine()) as running:
        running.load(
            nook, EngineSettings(context=128, snapshot_mb=1), lambda event: isinstance(event, Loaded) and ready.set()
        )
        assert ready.wait(60)
        running.submit(Request("r", (Message("user", "hi"),), GREEDY), ear)
        ear.wait()
        # What earlier tests left in this process may run once more; the engine's own work would show each time.
        assert any(taken_s() < 0.02 for _ in range(5))
        later, began_s = Ear(), time.monotonic()
        running.submit(Request("l", (Message("user", "hi"),), GREEDY.model_copy(update={"max_tokens": 1})), later)
        later.wait()
        assert time.monotonic() - began_s < 2  # 50 ms on a machine that does nothing else


WRITER = """
import sys, engine
with engine.AutoModel.from_pretrained(sys.argv[1], max_seq_len=512, progress=None) as model:
    for piece in model.generate("hello", 300, 0.0, stream=True, loop_limit=0):
        print(piece, end="", flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="this system stops no processes")
def test_an_answer_goes_on_after_the_computer_slept(nook: Path) -> None:
    """As sleep does it: the process stands still in the middle of an answer (case R16)."""
    with engine.AutoModel.from_pretrained(nook, max_seq_len=512) as model:
        expected = model.generate("hello", 300, 0.0, loop_limit=0)
    said = nook.with_suffix(".txt")
    with said.open("wb") as out:
        command = [sys.executable, "-X", "utf8", "-c", WRITER, str(nook)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=out)
    try:
        deadline_s = time.monotonic() + 60
        while not said.stat().st_size and time.monotonic() < deadline_s:
            time.sleep(0.001)
        for _ in range(3):
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.3)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.01)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert said.read_text("utf-8") == expected


def test_every_end_is_told_once_when_the_engine_closes_in_the_middle(nook: Path) -> None:
    running, ears = api.Engine(), [Ear() for _ in range(6)]
    running.load(nook, EngineSettings(context=256), lambda _event: None)
    for number, ear in enumerate(ears):
        running.submit(Request(str(number), (65, 66, number), GREEDY.model_copy(update={"max_tokens": 200})), ear)
    while not any(ear.events for ear in ears):
        time.sleep(0.001)
    began_s = time.monotonic()
    running.close()
    assert time.monotonic() - began_s < 3
    assert all(isinstance(ear.events[-1], Done) for ear in ears if ear.events)
