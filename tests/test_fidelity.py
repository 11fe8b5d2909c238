"""What a file lost is measured, said in a grade, and kept; damage is named."""

from __future__ import annotations

import json

import numpy as np
import pytest

from engine import api
from engine.cli import main
from engine.convert.calibration import sample
from engine.convert.convert import convert
from engine.convert.fidelity import GRADES, fidelity
from engine.errors import InputError
from engine.models.store import NookFile, verify
from engine.progress import finish
from engine.settings import Conversion
from tests.factory import make, qwen2

pytestmark = pytest.mark.usefixtures("compiled_kernels")
TEXT = sample("", unseen=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("source") / "toy", **qwen2())


@pytest.fixture
def converted(folder, tmp_path):
    """`converted(**settings)`: a file of the folder."""

    def made(**settings):
        out = tmp_path / "toy.nook"
        finish(convert(folder, out, Conversion(**settings)))
        return out

    return made


def test_the_source_itself_loses_nothing(folder, converted):
    found = finish(fidelity(converted(bits=16, keep=("*=f32",)), folder, TEXT, kv="f32"))
    assert found.grade == "A"
    assert found.kl_mean < 1e-6
    assert found.top1_agreement == 1
    assert found.perplexity == pytest.approx(found.perplexity_source, rel=1e-5)
    assert max(layer.states for layer in found.layers) < 1e-4
    assert max(layer.weights for layer in found.layers) == 0
    assert found.damaged == ()


def test_fewer_bits_lose_more(folder, converted):
    eight, four = (finish(fidelity(converted(bits=bits), folder, TEXT)) for bits in (8, 4))
    assert 0 < eight.kl_mean < four.kl_mean
    assert all(a.weights < b.weights for a, b in zip(eight.layers, four.layers, strict=True))
    assert not eight.damaged
    assert not four.damaged


def test_a_damaged_tensor_lowers_the_grade_and_is_named(folder, converted):
    file = converted(bits=8)
    before = finish(fidelity(file, folder, TEXT))
    tensor = next(at for at in NookFile.open(file).manifest.tensors if at.name == "layers.1.feed_forward.down")
    data = bytearray(file.read_bytes())
    noise = np.random.default_rng(0).integers(0, 256, tensor.bytes // 4, np.uint8).tobytes()
    data[tensor.offset : tensor.offset + len(noise)] = noise
    file.write_bytes(data)
    after = finish(fidelity(file, folder, TEXT))
    assert after.damaged == ("layers.1.feed_forward.down",)
    assert after.grade > max(before.grade, "B")
    assert "layers.1.feed_forward.down" in after.meaning
    assert after.worst_layers[0] == 1


def test_kept_in_the_file_which_stays_whole(folder, converted):
    file = converted()
    tensors = [at.sha256 for at in NookFile.open(file).manifest.tensors]
    size = file.stat().st_size
    found = finish(fidelity(file, folder, TEXT, keep=False))
    assert NookFile.open(file).manifest.fidelity is None
    finish(fidelity(file, folder, TEXT))
    for _ in verify(file):
        pass
    assert file.stat().st_size == size
    assert [at.sha256 for at in NookFile.open(file).manifest.tensors] == tensors
    kept = api.inspect(file).fidelity
    assert kept["grade"] == found.grade
    assert kept["kl_mean"] == pytest.approx(found.kl_mean, rel=1e-3)
    assert len(kept["states"]) == len(kept["weights"]) == len(found.layers)


def test_another_model_is_refused(converted, tmp_path):
    other = make(tmp_path / "other", **qwen2(num_hidden_layers=3))
    with pytest.raises(InputError, match="different models"):
        finish(fidelity(converted(), other, TEXT))


def test_grades_have_an_order():
    limits = [most for most, _ in GRADES.values()]
    assert list(GRADES) == sorted(GRADES)
    assert limits == sorted(limits)


def test_on_the_command_line(folder, converted, capfd):
    file = converted()
    assert main(["fidelity", str(file), "--against", str(folder), "--json"]) == 0
    values = json.loads(capfd.readouterr().out)
    assert {"kl_mean", "top1_agreement", "perplexity", "perplexity_source", "grade"} <= set(values)
    assert values["grade"] in GRADES
    assert main(["fidelity", str(file), "--against", str(folder), "--no-keep"]) == 0
    assert f"{values['grade']}: {values['meaning']}" in capfd.readouterr().out
