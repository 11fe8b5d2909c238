"""Models in parts: whatever is split is joined to the same bytes, also in steps; nothing of the list is believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.convert import courier
from engine.errors import FileDamagedError, InputError, OutOfSpaceError
from engine.progress import finish


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch):
    """A part of "1 MB" has ten bytes here, and blocks have three."""
    monkeypatch.setattr(courier, "_MEGABYTE", 10)
    monkeypatch.setattr(courier, "_BLOCK", 3)


def folder_of(place: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return place


FILES = {"config.json": b"{}", "a/model-1.safetensors": bytes(range(25)), "empty": b"", "z.bin": b"x" * 10}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@given(data=st.binary(min_size=1, max_size=95), part=st.integers(1, 4))
def test_a_file_comes_back(tmp_path_factory, data, part):
    place = tmp_path_factory.mktemp("parts")
    source = place / "模型.nook"
    source.write_bytes(data)
    written = finish(courier.split(source, place / "stick", part))
    assert [path.stat().st_size for path in written[:-1]] == [
        min(part * 10, len(data) - start) for start in range(0, len(data), part * 10)
    ]
    joined = finish(courier.join(place / "stick", place / "back.nook"))
    assert joined.read_bytes() == data
    assert sorted(path.name for path in place.iterdir()) == ["back.nook", "stick", "模型.nook"]


def test_a_folder_comes_back_without_hidden_files(tmp_path):
    source = folder_of(tmp_path / "qwen", {**FILES, ".cache/huggingface/x": b"secret", ".git": b"no"})
    finish(courier.split(source, tmp_path / "stick", 1))
    (tmp_path / "home").mkdir()
    joined = finish(courier.join(tmp_path / "stick", tmp_path / "home"))
    assert joined == tmp_path / "home" / "qwen"
    assert contents(joined) == FILES


def test_parts_may_come_one_at_a_time(tmp_path):
    source = folder_of(tmp_path / "qwen", FILES)
    *parts, listed = finish(courier.split(source, tmp_path / "stick", 1))
    here = tmp_path / "here"
    here.mkdir()
    listed.rename(here / listed.name)
    for number, part in enumerate(parts):
        with pytest.raises(InputError, match=f"it is part {number + 1} of {len(parts)}; bring it"):
            finish(courier.join(here, tmp_path / "back"))
        part.rename(here / part.name)
        if number:
            (here / parts[number - 1].name).unlink()  # the stick is needed for the next one
    finish(courier.join(here, tmp_path / "back"))
    assert contents(tmp_path / "back") == FILES


def test_an_interrupted_split_keeps_what_is_written(tmp_path):
    source = tmp_path / "m.nook"
    source.write_bytes(bytes(range(45)))
    work = courier.split(source, tmp_path / "stick", 1)
    for progress in work:
        if progress.done >= 32:
            break
    work.close()
    assert not (tmp_path / "stick" / "parts.json").exists()
    first = (tmp_path / "stick" / "m.nook.001").stat()
    (tmp_path / "stick" / "m.nook.002").write_bytes(b"another's!")
    finish(courier.split(source, tmp_path / "stick", 1))
    assert (tmp_path / "stick" / "m.nook.001").stat() == first
    assert finish(courier.join(tmp_path / "stick", tmp_path / "back.nook")).read_bytes() == bytes(range(45))


def test_a_damaged_part_is_named_and_can_be_brought_again(tmp_path):
    source = tmp_path / "m.nook"
    source.write_bytes(bytes(range(45)))
    *parts, _listed = finish(courier.split(source, tmp_path / "stick", 1))
    good = parts[2].read_bytes()
    for bad in (b"y" * 10, good[:-1], good + b"z"):
        parts[2].write_bytes(bad)
        with pytest.raises(FileDamagedError, match=r"m\.nook\.003 is not as it was written; copy it again"):
            finish(courier.join(tmp_path / "stick", tmp_path / "back.nook"))
        assert not (tmp_path / "back.nook").exists()
    parts[2].write_bytes(good)
    assert finish(courier.join(tmp_path / "stick", tmp_path / "back.nook")).read_bytes() == bytes(range(45))


def test_what_is_there_is_not_overwritten(tmp_path):
    source = folder_of(tmp_path / "qwen", FILES)
    finish(courier.split(source, tmp_path / "stick", 1))
    with pytest.raises(InputError, match="is there already"):
        finish(courier.join(tmp_path / "stick", tmp_path))


def test_a_full_drive_is_said_beforehand(tmp_path, monkeypatch):
    source = folder_of(tmp_path / "qwen", FILES)
    monkeypatch.setattr(courier.shutil, "disk_usage", lambda _folder: type("Usage", (), {"free": 3}))
    with pytest.raises(OutOfSpaceError, match="are needed on the drive"):
        finish(courier.split(source, tmp_path / "stick", 1))


@pytest.mark.parametrize("megabytes", [0, -1, 4295])
def test_parts_fit_on_fat32(tmp_path, megabytes):
    with pytest.raises(InputError, match="part_mb must be between 1 and 4294"):
        finish(courier.split(folder_of(tmp_path / "qwen", FILES), tmp_path / "stick", megabytes))


def test_nothing_to_split(tmp_path):
    (tmp_path / "empty.nook").touch()
    with pytest.raises(InputError, match="is empty"):
        finish(courier.split(tmp_path / "empty.nook", tmp_path / "stick", 1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "../out"}, "cannot be written"),
        ({"name": "C:evil"}, "cannot be written"),
        ({"files": [{"path": "../../.bashrc", "bytes": 37}]}, "cannot be written"),
        ({"files": [{"path": "/etc/passwd", "bytes": 37}]}, "cannot be written"),
        ({"files": [{"path": "a/nul.json", "bytes": 37}]}, "cannot be written"),
        ({"files": [{"path": "a", "bytes": 30}, {"path": "A", "bytes": 7}]}, "cannot be written"),
        ({"files": [{"path": "a", "bytes": -1}, {"path": "b", "bytes": 38}]}, "is damaged"),
        ({"files": [{"path": "a", "bytes": True}]}, "is damaged"),
        ({"files": [{"path": "a", "bytes": 10**18}]}, "is damaged"),
        ({"files": []}, "is damaged"),
        ({"files": 5}, "is damaged"),
        ({"parts": []}, "is damaged"),
        ({"parts": [{"name": "/dev/zero", "bytes": 37, "sha256": "0"}]}, "cannot be written"),
        ({"format": 2}, "another version"),
    ],
)
def test_a_strangers_list_leads_nowhere(tmp_path, change, said):
    source = folder_of(tmp_path / "qwen", FILES)
    listed = finish(courier.split(source, tmp_path / "stick", 1))[-1]
    listed.write_text(json.dumps(json.loads(listed.read_text("utf-8")) | change), "utf-8")
    before = set(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=said):
        finish(courier.join(tmp_path / "stick", tmp_path / "back"))
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "[" * 100_000])
def test_a_list_that_is_none(tmp_path, text):
    (tmp_path / "parts.json").write_text(text, "utf-8")
    with pytest.raises(FileDamagedError, match=r"parts\.json is damaged"):
        finish(courier.join(tmp_path, tmp_path / "back"))


def test_no_list(tmp_path):
    with pytest.raises(InputError, match="name the folder of the parts"):
        finish(courier.join(tmp_path, tmp_path / "back"))
