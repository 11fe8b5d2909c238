"""Weights that are rounded for the products' sake: less error where inputs are, the same file every time."""

from __future__ import annotations

import numpy as np
import pytest

from engine.convert.calibration import BUILT_IN, cut, sample
from engine.convert.convert import convert
from engine.convert.feedback import Moments, rounded
from engine.convert.recipe import recipe
from engine.convert.sensitivity import LADDER, chosen_formats
from engine.convert.source import open_source
from engine.core.library import prepared_kernels
from engine.core.quant import FORMATS, magnitude
from engine.errors import InputError, SettingError
from engine.models.spec import TensorSpec
from engine.models.store import NookFile
from engine.models.weights import tensor_bytes
from engine.progress import finish
from engine.settings import Conversion
from tests.factory import make, qwen2

pytestmark = pytest.mark.usefixtures("compiled_kernels")
LONG = "The quick brown fox jumps over the lazy dog. " * 40


def inputs(rows, columns, seed=0):
    """Correlated, some columns far larger than others, as hidden states are."""
    random = np.random.default_rng(seed)
    mixing = random.normal(size=(columns // 4, columns)) * np.exp(random.normal(size=columns))
    noise = random.normal(size=(rows, columns)) * 0.3
    return (random.normal(size=(rows, columns // 4)) @ mixing + noise).astype(np.float32)


@pytest.mark.parametrize(("name", "group"), [("q4", 32), ("q4", 256), ("q6", 64), ("q4g", 32)])
def test_feedback_keeps_products(name, group):
    """On inputs that were not seen, the products' error is well below that of weights rounded one by one."""
    kernels = finish(prepared_kernels())
    weights = np.random.default_rng(1).normal(0, 0.02, (48, 320)).astype(np.float32)
    seen, unseen = np.split(inputs(3000, 320), [2000])
    moments = Moments(320)
    for part in np.split(seen, 4):
        moments.add(part)
    layout = FORMATS[name].layout(48, 320, group)
    exponent = layout.format.exponent_for(2 * magnitude(weights))
    plain, fitted = layout.empty(), layout.empty()
    layout.pack_rows(weights, 0, plain, exponent, kernels)
    layout.pack_codes(rounded(weights, moments.feedback(), layout, exponent, kernels), 0, fitted)
    errors = [np.square(unseen @ (layout.unpack(buffer, exponent) - weights).T).mean() for buffer in (plain, fitted)]
    assert errors[1] < 0.6 * errors[0]


def test_wide_inputs_are_taken_in_blocks():
    moments = Moments(5000)
    x = inputs(64, 5000)
    moments.add(x)
    assert np.allclose(moments.mean_squares, np.square(x).mean(axis=0), rtol=1e-4)
    assert [first for first, _ in moments.feedback().factors] == [0, 2048, 4096]


def test_columns_that_nothing_comes_to_do_no_harm():
    kernels = finish(prepared_kernels())
    weights = np.random.default_rng(1).normal(0, 0.02, (16, 64)).astype(np.float32)
    moments = Moments(64)
    moments.add(np.zeros((8, 64), np.float32))
    layout = FORMATS["q4"].layout(16, 64, 32)
    exponent, out = layout.format.exponent_for(2 * magnitude(weights)), layout.empty()
    layout.pack_codes(rounded(weights, moments.feedback(), layout, exponent, kernels), 0, out)
    assert np.abs(layout.unpack(out, exponent) - weights).max() < 0.02


@pytest.fixture
def folder(tmp_path):
    return make(tmp_path / "toy", **qwen2())


@pytest.mark.parametrize("level", ["small", "best", "attention"])
def test_a_level_says_what_it_did(folder, tmp_path, level):
    finish(convert(folder, tmp_path / "toy.nook", Conversion(level=level)))
    manifest = NookFile.open(tmp_path / "toy.nook").manifest
    assert manifest.recipe["level"] == level
    assert manifest.recipe["calibrate"] == BUILT_IN
    assert manifest.recipe["calibrate_sha256"] == sample("").sha256
    formats = {tensor.name: tensor.format for tensor in manifest.tensors}
    expected = {"small": ("q4", "q4", "q6"), "best": ("q6", "q6", "q8"), "attention": ("q8", "q4", "q6")}[level]
    names = ("layers.1.attention.qkv", "layers.1.feed_forward.down", "embedding")
    assert tuple(formats[name] for name in names) == expected


def test_the_text_decides(folder, tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text(LONG, encoding="utf-8")
    finish(convert(folder, tmp_path / "a.nook", Conversion(level="small", calibrate=str(text))))
    finish(convert(folder, tmp_path / "b.nook", Conversion(level="small")))
    finish(convert(folder, tmp_path / "c.nook", Conversion(calibrate=str(text))))
    a, b, c = (NookFile.open(tmp_path / f"{name}.nook") for name in "abc")
    name = "layers.1.feed_forward.gate_up"
    assert a.manifest.recipe["calibrate"] == "mine.txt"
    assert a.tensor(name).data.tobytes() != b.tensor(name).data.tobytes()
    assert a.tensor(name).data.tobytes() == c.tensor(name).data.tobytes()


def test_resumed_to_the_same_bytes(folder, tmp_path):
    conversion, whole, stopped = Conversion(level="small"), tmp_path / "whole.nook", tmp_path / "stopped.nook"
    steps = sum(1 for _ in convert(folder, whole, conversion))
    work = convert(folder, stopped, conversion, resume=True)
    for _ in range(steps * 2 // 3):
        next(work)
    work.close()
    assert not stopped.exists()
    finish(convert(folder, stopped, conversion, resume=True))
    assert stopped.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"level": "small", "bits": 8}, "level small decides bits"),
        ({"level": "best", "group_size": 64}, "level best decides bits"),
        ({"bits": 8, "calibrate": "mine.txt"}, "leave calibrate out"),
    ],
)
def test_settings_that_contradict_each_other(folder, settings, reason):
    source = open_source(folder)
    with pytest.raises(SettingError, match=reason):
        recipe(source.spec, Conversion(**settings), *source.formats)


def test_a_text_that_is_none(folder, tmp_path):
    for name, data, reason in (
        ("gone", None, "cannot be read"),
        ("b", b"\xff\xfe", "not UTF-8"),
        ("s", b"ab", "pages"),
    ):
        file = tmp_path / name
        if data is not None:
            file.write_bytes(data)
        with pytest.raises(InputError, match=reason):
            finish(convert(folder, tmp_path / "toy.nook", Conversion(calibrate=str(file))))
    assert not list(tmp_path.glob("*.nook*"))


def test_windows_are_spread_over_the_text(folder):
    source = open_source(folder)
    windows = cut(source, LONG * 10, most=3, tokens=64)
    assert [len(window) for window in windows] == [64, 64, 64]


def test_more_bits_go_where_they_help(folder, tmp_path):
    """Within the budget; rules by hand stay."""
    finish(convert(folder, tmp_path / "small.nook", Conversion(level="small")))
    finish(convert(folder, tmp_path / "balanced.nook", Conversion(level="balanced", keep=("layers.0.*.out=q8",))))
    small, balanced = (NookFile.open(tmp_path / f"{name}.nook") for name in ("small", "balanced"))
    formats = {tensor.name: tensor.format for tensor in balanced.manifest.tensors}
    assert formats["layers.0.attention.out"] == "q8"
    assert {"q4", "q6"} <= set(formats.values())
    assert small.total_bytes < balanced.total_bytes


@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_budget_is_kept_and_used(folder, tmp_path, as_bytes):
    spec = open_source(folder).spec
    bits = 7.0
    budget = bits * spec.parameters / 8 if as_bytes else bits
    finish(convert(folder, tmp_path / "toy.nook", Conversion(budget=budget)))
    found = 8 * NookFile.open(tmp_path / "toy.nook").total_bytes / spec.parameters
    assert bits - 0.5 < found <= bits


def test_a_budget_that_is_too_small(folder, tmp_path):
    with pytest.raises(SettingError, match=r"at least \d+ bytes \(\d+\.\d+ bits per weight\)"):
        finish(convert(folder, tmp_path / "toy.nook", Conversion(budget=3.0)))
    assert not list(tmp_path.glob("*.nook*"))


def test_what_saves_most_for_a_byte_comes_first():
    tensors = {name: TensorSpec(name, "linear", (64,), 64) for name in "abc"}
    step = tensor_bytes(tensors["a"], "q6", 32) - tensor_bytes(tensors["a"], "q4", 32)
    harm = {
        "a": {"q4": 1.0, "q6": 0.1, "q8": 0.0},
        "b": {"q4": 5.0, "q6": 0.5, "q8": 0.0},
        "c": dict.fromkeys(LADDER, 0.0),
    }
    assert chosen_formats(tensors, harm, 32, step) == {"a": "q4", "b": "q6", "c": "q4"}
    assert chosen_formats(tensors, harm, 32, 2 * step) == {"a": "q6", "b": "q6", "c": "q4"}
    assert chosen_formats(tensors, harm, 32, 100 * step) == {"a": "q8", "b": "q8", "c": "q4"}
