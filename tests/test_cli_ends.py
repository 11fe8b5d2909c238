"""The command line where nothing can be read and nothing logged: still one sentence and its own exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import api
from engine.cli import main
from tests.factory import cfg, make, weights


@pytest.mark.skipif(not hasattr(os, "fork"), reason="closes a stream between fork and start")
def test_a_closed_input_is_an_empty_one():
    command = [sys.executable, "-m", "tests.fake_engine", "chat", "toy"]
    root = Path(__file__).resolve().parent.parent
    ended = subprocess.run(
        command, cwd=root, check=False, capture_output=True, timeout=60, preexec_fn=lambda: os.close(0)
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_log_that_cannot_be_written_is_silent(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(api, "log_folder", lambda: tmp_path)
    (tmp_path / "command-line.log").mkdir()
    assert main(["inspect", str(tmp_path / "nothing")]) == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_the_log_takes_an_undecodable_argument(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(api, "log_folder", lambda: tmp_path)
    assert main(["inspect", "a\udcff"]) == 2
    assert capfd.readouterr().err.count("\n") == 1
    assert "a\\udcff" in (tmp_path / "command-line.log").read_text(encoding="utf-8")


def test_a_dangling_link_in_the_library_is_said_and_can_be_removed(tmp_path, monkeypatch, capfd):
    for folder in ("log_folder", "library_folder"):
        monkeypatch.setattr(api, folder, lambda: tmp_path)
    link = tmp_path / "dang.nook"
    link.symlink_to(tmp_path / "nowhere")
    assert main(["models"]) == 0
    assert "dang cannot be used" in capfd.readouterr().err
    assert main(["models", "reveal", "dang"]) == 0
    assert main(["models", "remove", "dang", "--yes"]) == 0
    assert not link.is_symlink()


def test_a_conversion_ends_with_its_notices(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(api, "log_folder", lambda: tmp_path)
    folder = make(tmp_path / "toy", cfg(tie_word_embeddings=True), weights(cfg()))
    sentence = "lm_head.weight differs from model.embed_tokens.weight"
    assert main(["convert", str(folder), "-o", str(tmp_path / "a.nook")]) == 0
    assert sum(line.startswith(sentence) for line in capfd.readouterr().err.splitlines()) == 1
    assert main(["convert", str(folder), "-o", str(tmp_path / "b.nook"), "--json"]) == 0
    (notice,) = json.loads(capfd.readouterr().out)["notices"]
    assert notice.startswith(sentence)


@pytest.mark.parametrize("module", ["engine.cli", "cyclopts", "pydantic", "rich.console"])
def test_an_interrupt_during_the_imports_is_quiet(module):
    """Ctrl+C in the moment in which `module` is looked for."""
    code = (
        "import runpy, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = ['main.py', 'diagnose']\n"
        "runpy.run_path('main.py', run_name='__main__')\n"
    )
    root = Path(__file__).resolve().parent.parent
    ended = subprocess.run([sys.executable, "-c", code], cwd=root, check=False, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


@pytest.mark.parametrize("length", [252, 300, 5000])
@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["run", "hi"], ["perplexity", __file__], ["bench"]])
def test_a_path_too_long_is_one_sentence(command, length, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(api, "log_folder", lambda: tmp_path)
    for path in ("a" * length, ""):
        assert main([command[0], path, *command[1:]]) == 2
        output = capfd.readouterr()
        assert (output.out, output.err.count("\n")) == ("", 1)
        assert len(output.err) < 400
        assert "cannot be read" in output.err if path else "path is empty" in output.err


def test_where_a_conversion_cannot_be_written_is_said(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(api, "log_folder", lambda: tmp_path)
    folder = make(tmp_path / "toy")
    (tmp_path / "folder.nook").mkdir()
    before = sorted(tmp_path.rglob("*.nook*"))
    for out, sentence in (
        (tmp_path / "folder.nook", "it is a folder; name a file"),
        (folder / "config.json" / "x.nook", "config.json is a file, no folder"),
        (tmp_path / "nothing" / "x.nook", "nothing does not exist"),
        (tmp_path / ("a" * 245 + ".nook"), "the name is too long"),
        (tmp_path / ("a" * 300 + ".nook"), "the name is too long"),
        (tmp_path / "x.gguf", "ends in .nook"),
        ("", "path is empty"),
    ):
        assert main(["convert", str(folder), "-o", str(out)]) == 2
        last = capfd.readouterr().err.splitlines()[-1]
        assert last.startswith("inglenook: ")
        assert sentence in last
    assert sorted(tmp_path.rglob("*.nook*")) == before
