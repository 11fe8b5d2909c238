"""Drops: paths are decoded once, by Qt; what is no model is refused in words; nothing is fetched (case G09)."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path

import pytest
from PySide6.QtCore import QMimeData, QUrl

from gui.data.drop import read_drop, read_paths

NAMES = [
    "a b",
    "100%",
    "%20",
    "a+b",
    "#1",
    "模型",
    "what?",
    "semi;colon",
    unicodedata.normalize("NFC", "é"),
    unicodedata.normalize("NFD", "é"),
    "😀",
]


def urls(*paths: Path | str) -> QMimeData:
    mime = QMimeData()
    mime.setUrls([QUrl(path) if isinstance(path, str) else QUrl.fromLocalFile(str(path)) for path in paths])
    return mime


@pytest.mark.parametrize("name", NAMES)
def test_odd_names_arrive_as_they_are(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    assert read_drop(urls(folder)).model == folder


def test_an_encoded_address_is_decoded_once(tmp_path):
    folder = tmp_path / "My modél%23 #1"
    folder.mkdir()
    encoded = "file://" + str(tmp_path) + "/My%20mod%C3%A9l%2523%20%231"
    assert read_drop(urls(encoded)).model == folder


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.model"]
)
def test_a_file_of_a_model_means_its_folder(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).touch()
    assert read_drop(urls(tmp_path / name)).model == tmp_path


def test_all_files_of_a_model_mean_its_folder_once(tmp_path):
    for name in ("config.json", "a.safetensors", "b.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    assert read_drop(urls(*sorted(tmp_path.iterdir()))).model == tmp_path


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert read_drop(urls(tmp_path / "link")).model == tmp_path / "real"


@pytest.mark.parametrize("name", ["model.gguf", "MODEL.GGUF", "model.nook"])
def test_single_file_models(tmp_path, name):
    (tmp_path / name).touch()
    assert read_drop(urls(tmp_path / name)).model == tmp_path / name


def test_two_models_are_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    drop = read_drop(urls(tmp_path / "a", tmp_path / "b"))
    assert drop.model is None
    assert "one model at a time" in drop.refusal


@pytest.mark.parametrize(
    "address", ["http://x/y", "https://huggingface.co/a/b", "ftp://x/y", "smb://host/share", "data:,x"]
)
def test_remote_addresses_are_refused(address):
    drop = read_drop(urls(address))
    assert drop.model is None
    assert "opens no addresses" in drop.refusal


def test_a_share_that_is_not_there_is_refused():
    assert "does not exist" in read_drop(urls("file://host/share/model")).refusal


def test_what_is_gone_is_refused(tmp_path):
    assert read_drop(urls(tmp_path / "gone")).refusal == "gone does not exist."


def test_an_empty_drop_is_refused():
    assert read_drop(urls()).refusal
    assert read_drop(QMimeData()).refusal


def test_dropped_text_goes_to_the_message():
    mime = QMimeData()
    mime.setText("file:///tmp/looks/like/a/path")
    assert read_drop(mime).text == "file:///tmp/looks/like/a/path"


def test_a_text_file_goes_to_the_message(tmp_path):
    (tmp_path / "note.txt").write_bytes("\ufeff你好\n".encode())
    assert read_drop(urls(tmp_path / "note.txt")).text == "你好\n"


def test_texts_in_other_encodings_are_read_and_long_ones_attached(tmp_path):
    (tmp_path / "gbk.txt").write_bytes("你好，世界。".encode("gbk"))
    (tmp_path / "long.txt").write_bytes(b"x" * 300_000)
    assert read_drop(urls(tmp_path / "gbk.txt")).text == "你好，世界。"
    assert read_drop(urls(tmp_path / "long.txt")).files == (tmp_path / "long.txt",)


def test_documents_are_attached_several_at_once(tmp_path):
    paths = [tmp_path / name for name in ("report.pdf", "table.xlsx", "package.json")]
    for path in paths:
        path.touch()
    assert read_drop(urls(*paths)).files == tuple(paths)


def test_other_files_are_refused_by_name(tmp_path):
    (tmp_path / "photo.jpg").touch()
    assert "photo.jpg is not a model" in read_drop(urls(tmp_path / "photo.jpg")).refusal


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_linked_file_of_a_hub_snapshot_means_its_folder(name, tmp_path):
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "blobs" / file[0]).write_text("{}")
        (snapshot / file).symlink_to(f"../../blobs/{file[0]}")
    assert read_paths([snapshot / name]).model == snapshot
