"""Pages on disk: found after a restart, bit for bit; whatever is not exactly what was written is computed again."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.runtime.events import Done, Loaded, Request
from engine.runtime.loop import Loop
from engine.runtime.model import Model
from engine.runtime.service import Service
from engine.runtime.snapshots import Snapshots
from engine.settings import EngineSettings, Sampling
from tests import factory
from tests.fakes import Ear, ready, toy

GREEDY = Sampling(temperature=0.0, repetition_penalty=1.0, max_tokens=12, loop_limit=0)
PROMPT = tuple(np.random.default_rng(0).integers(65, 90, 50).tolist())


def snapshots_of(model: Model, folder: Path, *, identity: bytes = b"", limit: int = 1 << 20) -> Snapshots:
    layout = model.pages.layout
    return Snapshots(
        folder,
        identity or model.identity,
        page_bytes=layout.page_bytes,
        ids_bytes=4 * layout.tokens,
        limit_bytes=limit,
    )


def ask(loop: Loop, prompt: tuple[int, ...] = PROMPT) -> Done:
    ear = Ear()
    loop.add(Request("r", prompt, GREEDY), ear)
    while loop.step():
        pass
    return ear.done


def saved(folder: Path, **how: Any) -> tuple[Done, list[Path]]:
    """Answer once and write everything."""
    model = toy()
    loop = Loop(model, snapshots=snapshots_of(model, folder, **how))
    done = ask(loop)
    while loop.tidy():
        pass
    return done, sorted(folder.glob("*/*"))


def restarted(folder: Path, prompt: tuple[int, ...] = PROMPT, pages: int = 64, **how: Any) -> tuple[Done, int]:
    """A new engine's answer, and how many tokens it computed."""
    model = toy(pages=pages)
    done = ask(Loop(model, snapshots=snapshots_of(model, folder, **how)), prompt)
    assert model.pages.available == model.pages.count
    return done, model.decoder.tokens  # type: ignore[attr-defined, no-any-return]


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    first, files = saved(tmp_path)
    assert len(files) == 15  # 61 computed tokens in pages of 4
    done, computed = restarted(tmp_path)
    assert done.token_ids == first.token_ids
    assert done.usage.cached_tokens == 48
    assert computed == 2 + 11
    longer = (*PROMPT, *first.token_ids, 66, 67)
    done, computed = restarted(tmp_path, longer)
    assert done.usage.cached_tokens == 60
    assert done.token_ids == ask(Loop(toy()), longer).token_ids


def test_only_what_begins_alike_is_found(tmp_path: Path) -> None:
    saved(tmp_path)
    other = (*PROMPT[:10], 1, *PROMPT[11:])
    done, _ = restarted(tmp_path, other)
    assert done.usage.cached_tokens == 8
    assert done.token_ids == ask(Loop(toy()), other).token_ids


def test_another_model_or_version_finds_nothing(tmp_path: Path) -> None:
    first, _ = saved(tmp_path)
    done, _ = restarted(tmp_path, identity=b"another version")
    assert done.usage.cached_tokens == 0
    assert done.token_ids == first.token_ids


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped in the contents": lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
    "flipped in the ids": lambda data: data[:41] + bytes([data[41] ^ 1]) + data[42:],
    "flipped in the sum": lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
    "another format": lambda data: b"NOOKKV00" + data[8:],
    "cut off": lambda data: data[:-1],
    "too long": lambda data: data + b"x",
    "empty": lambda _data: b"",
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_page_is_computed_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    first, files = saved(tmp_path)
    for file in files:
        file.write_bytes(DAMAGES[damage](file.read_bytes()))
    done, _ = restarted(tmp_path)
    assert done.token_ids == first.token_ids
    assert done.usage.cached_tokens == 0
    assert "is damaged and is not used" in caplog.text
    assert len(list(tmp_path.glob("*/*"))) == len(files) - 1  # the first one is gone; the others were not looked at


def test_a_swapped_page_is_not_believed(tmp_path: Path) -> None:
    first, files = saved(tmp_path)
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, contents[1:] + contents[:1], strict=True):
        file.write_bytes(content)
    done, _ = restarted(tmp_path)
    assert (done.token_ids, done.usage.cached_tokens) == (first.token_ids, 0)


def test_the_folder_never_grows_beyond_its_limit(tmp_path: Path) -> None:
    _, files = saved(tmp_path / "all")
    size = files[0].stat().st_size
    model = toy()
    loop = Loop(model, snapshots=snapshots_of(model, tmp_path / "some", limit=5 * size + 3))
    for first in range(4):
        ask(loop, (first, *PROMPT))
        while loop.tidy():
            left = list((tmp_path / "some").glob("*/*"))
            assert sum(file.stat().st_size for file in left) <= 5 * size + 3
    assert len(left) == 5
    for number, file in enumerate(sorted(left)):
        os.utime(file, (number, number))
    again = snapshots_of(model, tmp_path / "some", identity=b"other", limit=2 * size)
    assert sorted(left)[3:] == sorted((tmp_path / "some").glob("*/*.page"))
    assert b"nothing" not in again


def test_with_few_pages_as_much_comes_back_as_fits(tmp_path: Path) -> None:
    first, _ = saved(tmp_path)
    done, _ = restarted(tmp_path, pages=16)
    assert done.token_ids == first.token_ids
    assert done.usage.cached_tokens == 48


def test_a_busy_pool_is_not_robbed(tmp_path: Path) -> None:
    """Pages that others hold, or that were found in the pool, stay what they are while some come from disk."""
    first, _ = saved(tmp_path)
    model = toy(pages=22)
    loop = Loop(model, snapshots=snapshots_of(model, tmp_path))
    busy, ear = Ear(), Ear()
    loop.add(Request("busy", (1, 2, 3, 4, 5, 6), GREEDY), busy)
    loop.step()
    loop.add(Request("r", PROMPT, GREEDY), ear)
    while loop.step():
        pass
    assert ear.done.token_ids == first.token_ids
    assert busy.done.token_ids == ask(Loop(toy()), (1, 2, 3, 4, 5, 6)).token_ids
    assert model.pages.available == model.pages.count


@pytest.mark.parametrize("pages", [16, 64])
def test_a_part_in_the_pool_and_the_rest_from_disk(tmp_path: Path, pages: int) -> None:
    first, _ = saved(tmp_path)
    model = toy(pages=pages)
    loop = Loop(model, snapshots=snapshots_of(model, tmp_path))
    ask(loop, PROMPT[:22])
    for number in range(3):  # so that the pool is full of idle pages
        ask(loop, tuple(range(number, number + 20)))
    done = ask(loop)
    assert done.token_ids == first.token_ids
    assert done.usage.cached_tokens == 48
    assert model.pages.available == model.pages.count


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
def test_nobody_else_may_read_them(tmp_path: Path) -> None:
    _, files = saved(tmp_path / "new")
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert {stat.S_IMODE(file.parent.stat().st_mode) for file in files} == {0o700}


def test_a_disk_that_does_not_take_them_is_no_obstacle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level(logging.WARNING):
        first, files = saved(tmp_path / "file")
    assert files == []
    assert caplog.text.count("conversations are not kept on disk") == 1
    assert first.token_ids == ask(Loop(toy())).token_ids


def test_the_service_writes_when_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runtime.service.cache_folder", lambda: tmp_path)
    monkeypatch.setattr("engine.runtime.service._QUIET_S", 0.05)
    from dataclasses import replace

    def opener(_path: Path, settings: EngineSettings) -> Any:
        if False:
            yield
        return replace(toy(), settings=settings)

    for restart in range(2):
        service, ear, loaded = Service(opener), Ear(), []
        service.load(Path("toy"), EngineSettings(snapshot_mb=1), loaded.append)
        service.submit(Request("r", PROMPT, GREEDY), ear)
        assert ear.wait() == ear.done
        assert isinstance(loaded[-1], Loaded)
        assert ear.done.usage.cached_tokens == (48 if restart else 0)
        deadline_s = time.monotonic() + 5
        while len(list(tmp_path.glob("conversations/*/*.page"))) < 15 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        before_s = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before_s < 0.1  # it waits again
        service.close()
    assert len(list(tmp_path.glob("conversations/*/*.page"))) == 15


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("kv", ["int8", "f16"])
def test_with_real_pages_the_answer_is_the_same_to_the_bit(tmp_path: Path, kv: str) -> None:
    folder = factory.make(tmp_path / "toy")
    prompt = "In the beginning there was a fire on the hearth, and nobody had yet asked what it was for. " * 2
    found = []
    for _ in range(2):
        with ready(folder, context=256, threads=1, kv=kv) as model:
            loop, ear = Loop(model, snapshots=snapshots_of(model, tmp_path / "pages", limit=1 << 30)), Ear()
            loop.add(Request("r", prompt, Sampling(temperature=0.9, seed=3, max_tokens=30), logprobs=3), ear)
            while loop.step():
                pass
            while loop.tidy():
                pass
            found.append(ear.done)
    assert found[0].usage.cached_tokens == 0
    assert found[1].usage.cached_tokens == 128
    assert (found[0].token_ids, found[0].logprobs) == (found[1].token_ids, found[1].logprobs)
