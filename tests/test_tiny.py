"""Does anything work? From a model folder to an answer, in seconds. Run it before every commit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.cli import main
from tests import factory

ROOT = Path(__file__).resolve().parent.parent

FAMILIES = {
    "llama": dict,
    "mistral": factory.mistral,
    "qwen2": factory.qwen2,
    "qwen3": factory.qwen3,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_from_folder_to_answer(family: str, tmp_path: Path) -> None:
    folder = factory.make(tmp_path / "folder", **FAMILIES[family]())
    file = tmp_path / "model.nook"

    steps = list(engine.convert(folder, file))
    assert steps[-1].done == steps[-1].total > 0

    source, made = engine.inspect(folder), engine.inspect(file)
    assert source.usable
    assert made.usable
    assert (made.family, made.parameters, made.vocab_size) == (source.family, source.parameters, source.vocab_size)

    assert list(engine.verify(file))

    model = engine.AutoModel.from_pretrained(file, max_seq_len=128)
    ids = model.tokenizer.encode("Is anybody there?")
    logits = model.logits(ids)
    assert logits.shape == (len(ids), source.vocab_size)
    assert np.isfinite(logits).all()

    answers = [model.generate("hello", max_new_tokens=12, temperature=0.0) for _ in range(2)]
    assert answers[0] == answers[1]
    assert "".join(model.generate("hello", max_new_tokens=12, temperature=0.0, stream=True)) == answers[0]
    model.close()


def test_the_folder_itself_answers_like_its_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = factory.make(tmp_path / "folder")
    file = tmp_path / "model.nook"
    flags = ["--temperature", "0", "--max-tokens", "12", "--threads", "1"]
    assert main(["convert", str(folder), "-o", str(file)]) == 0
    capfd.readouterr()
    answers = []
    for path in (folder, file, file):
        assert main(["run", str(path), "hello", *flags]) == 0
        answers.append(capfd.readouterr().out)
    assert answers[0] == answers[1] == answers[2]
    assert answers[0].endswith("\n")


def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in engine.convert(factory.make(tmp_path / "folder"), tmp_path / "qwen.nook"):
        pass
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [block for block in code if "import engine" in block]
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - our own words
    assert names["logits"].shape == (len(names["ids"]), 320)
    names["model"].close()
