"""The number of threads that suits a machine: measured when asked, remembered, used by later loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import api
from engine.core.cpu import Core, Machine
from engine.folders import cache_folder
from engine.progress import finish
from engine.runtime.autotune import candidates, recall, remember, tune
from engine.runtime.model import Tuning
from engine.settings import EngineSettings
from tests import factory
from tests.fakes import toy


def machine_of(cores: int, threads: int = 1, quota: float | None = None) -> Machine:
    made = tuple(Core(tuple(range(i * threads, (i + 1) * threads))) for i in range(cores))
    return Machine("toy", "x86-64", frozenset(), made, cores, quota, 1)


def test_candidates_are_the_default_and_its_neighbours() -> None:
    assert [t.threads for t in candidates(machine_of(8, 2)) if not t.pinned] == [8, 7, 4, 16]
    assert [t.threads for t in candidates(machine_of(2)) if not t.pinned] == [2, 1]
    assert [t.threads for t in candidates(machine_of(1)) if not t.pinned] == [1]
    assert [t.threads for t in candidates(machine_of(8), spare=2) if not t.pinned] == [6, 5, 3]
    assert candidates(machine_of(4))[0] == Tuning(4, pinned=False)
    assert {t.pinned for t in candidates(machine_of(4))} == {False, True}


def test_the_fastest_is_found() -> None:
    made: list[Tuning] = []
    released: list[int] = []

    def make(tuning: Tuning) -> Any:
        made.append(tuning)
        slow_s = 0.0005 if tuning == Tuning(2, pinned=True) else 0.004 * tuning.threads

        def wait(_batch: Any) -> None:
            import time

            time.sleep(slow_s)

        return replace(toy(before_step=wait, end_ids=()), release=lambda: released.append(1))

    tunings = tuple(Tuning(threads, pinned) for threads in (1, 2) for pinned in (False, True))
    found = finish(tune(make, tunings, seconds=0.5))
    assert min(found, key=found.__getitem__) == Tuning(2, pinned=True)
    assert set(found) == set(tunings)
    assert made[:4] == list(tunings)
    assert made.count(Tuning(2, pinned=False)) == 1  # more than twice as slow: no second turn
    assert len(released) == len(made)


def test_what_is_remembered_is_for_machines_and_sizes_like_this(tmp_path: Path) -> None:
    here, tuning = machine_of(8), Tuning(5, pinned=True)
    assert recall(tmp_path, here, "avx2", 10**9) is None
    remember(tmp_path, here, "avx2", 10**9, tuning)
    assert recall(tmp_path, here, "avx2", 10**9) == tuning
    assert recall(tmp_path, here, "avx2", 11 * 10**8) == tuning
    for other in (
        recall(tmp_path, here, "avx2", 4 * 10**9),
        recall(tmp_path, here, "generic", 10**9),
        recall(tmp_path, machine_of(7), "avx2", 10**9),
        recall(tmp_path, machine_of(8, quota=2.0), "avx2", 10**9),
        recall(tmp_path, here, "avx2", 10**9, spare=1),
    ):
        assert other is None
    remember(tmp_path, here, "generic", 10**9, Tuning(2, pinned=False))
    assert recall(tmp_path, here, "avx2", 10**9) == tuning
    assert [path.name for path in tmp_path.iterdir()] == ["threads.json"]


@pytest.mark.parametrize(
    "rubbish", ["", "[]", "{", '{"KEY": {"threads": 99, "pinned": true}}', '{"KEY": {"threads": "2"}}']
)
def test_rubbish_in_the_file_is_no_obstacle(tmp_path: Path, rubbish: str) -> None:
    here = machine_of(2)
    remember(tmp_path, here, "avx2", 10**9, Tuning(1, pinned=False))
    file = tmp_path / "threads.json"
    key = file.read_text().split('"')[1]
    file.write_text(rubbish.replace("KEY", key))
    assert recall(tmp_path, here, "avx2", 10**9) is None
    remember(tmp_path, here, "avx2", 10**9, Tuning(1, pinned=True))
    assert recall(tmp_path, here, "avx2", 10**9) == Tuning(1, pinned=True)


@pytest.mark.usefixtures("compiled_kernels")
def test_a_load_uses_what_was_found_unless_it_asks_for_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runtime.autotune._SECONDS", 0.0)
    folder = factory.make(tmp_path / "toy")
    file = cache_folder() / "threads.json"
    file.unlink(missing_ok=True)
    try:
        *steps, found = api.autotune(folder)
        assert any(step.stage == "measure" for step in steps if isinstance(step, api.Progress))
        assert isinstance(found, dict)
        assert found["measured"][0]["threads"] == found["threads"]
        tuned = Tuning(1, pinned=False)
        from engine.core.cpu import machine

        remember(cache_folder(), machine(), machine().tiers[-1], found["weight_bytes"], tuned)
        for settings, threads in ((EngineSettings(context=64), 1), (EngineSettings(context=64, threads=2), 2)):
            model = finish(api._opened(folder, settings))
            assert model.info.threads == min(threads, machine().most_threads)
            model.release()
    finally:
        file.unlink(missing_ok=True)
