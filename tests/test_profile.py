"""The times of a step's operations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.progress import finish
from engine.runtime.memories import Alternation
from engine.runtime.profile import _batch, profile
from tests import factory
from tests.fakes import ready

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.usefixtures("compiled_kernels")


def test_every_operation_of_every_layer_is_timed_and_answers_stay_the_same(tmp_path: Path) -> None:
    with ready(factory.make(tmp_path / "toy"), context=128, threads=1) as model:
        free = model.pages.available
        table = np.array([[0, 1]], np.int32)
        memory = Alternation(model.memories)
        before = model.decoder.forward(_batch(table, 0, 70, memory)).copy()
        found = finish(profile(model, depth=40, prompt_tokens=70))
        assert np.array_equal(model.decoder.forward(_batch(table, 0, 70, memory)), before)
        assert model.pages.available == free
    assert set(found) == {"decode", "prefill"}
    for rows in found.values():
        assert all(row["seconds"] > 0 for row in rows)
        assert {row["layer"] for row in rows} == {None, 0, 1}
        of_layers = [[row["operation"] for row in rows if row["layer"] == layer] for layer in (0, 1)]
        assert of_layers[0] == of_layers[1]
        products = {"attention.qkv", "attention.out", "feed_forward.gate_up", "feed_forward.down"}
        assert products | {"norm", "rotate", "attend"} <= set(of_layers[0])
        assert [row["operation"] for row in rows if row["layer"] is None][-1] == "head"


def test_the_table(tmp_path: Path) -> None:
    folder = factory.make(tmp_path / "toy")
    command = [sys.executable, "main.py", "bench", str(folder), "--profile", "--repeat", "1", "--batch", "1"]
    command += ["--gen-tokens", "4", "--prompt-tokens", "16", "--depth", "8", "--threads", "1"]
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=100).stdout
    assert "feed_forward.down" in text
    for step in ("decode", "prefill"):
        section = text.partition(f"\n{step}\noperation")[2]
        by_operation, _, by_layer = section.partition("\nlayer ")
        shares = [float(line.split()[3]) for line in by_operation.splitlines() if " % " in line]
        assert abs(sum(shares) - 100) < 1
        assert [line.split()[0] for line in by_layer.splitlines()[1:4]] == ["outside", "0", "1"]
    told = json.loads(
        subprocess.run([*command, "--json"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=100).stdout
    )
    assert {row["layer"] for row in told["profile"]["decode"]} == {None, 0, 1}
