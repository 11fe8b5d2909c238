"""The measurements run and write what they should; what they measure is not looked at."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from defusedxml import ElementTree

import engine
from tests import factory
from tests.bench import kernels as kernel_figures
from tests.bench import peers, performance
from tests.bench.report import table
from tests.bench.svg import Point, Roof, roofline

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A toy that has the context for every measurement."""
    config = factory.cfg(max_position_embeddings=8192)
    folder = factory.make(tmp_path / "folder", config)
    for _ in engine.convert(folder, tmp_path / "toy.nook"):
        pass
    return tmp_path / "toy.nook"


def test_every_kernel_has_figures(compiled_kernels, capfd):
    kernel_figures.main(["--quick", "--layers", "1", "--samples", "1", "--json"])
    found = json.loads(capfd.readouterr().out)
    figures = found["figures"]
    assert found["peak_tops"] > 0
    products = {"attention.qkv", "attention.out", "feed_forward.gate_up", "feed_forward.down"}
    assert {one["kernel"] for one in figures} == products | {"norm", "activate", "attend"}
    assert all(one["microseconds"] > 0 and one["of_read"] > 0 for one in figures)
    assert all((one["of_peak"] is None) == (one["kernel"] in {"norm", "activate"}) for one in figures)
    # Attention of one token: all keys and values once, 64 dimensions of int8 and a scale each.
    attend = next(one for one in figures if one["kernel"] == "attend" and one["tokens"] == 1)
    read = attend["gb_per_s"] * 1e9 * attend["microseconds"] / 1e6
    assert read == pytest.approx(4097 * 2 * 2 * (64 + 2))


def test_performance_writes_its_document_and_picture(compiled_kernels, model, tmp_path):
    performance.main([str(model), "--quick", "--out", str(tmp_path)])
    text = (tmp_path / "performance.md").read_text(encoding="utf-8")
    assert "Provisional" in text
    assert "performance.svg" in text
    assert str(tmp_path) not in text
    for title in ("One answer", "Prompts", "Answers together"):
        assert "| toy " in text.split(f"## {title}")[1].split("## ")[0]
    assert ElementTree.parse(tmp_path / "performance.svg").getroot().tag == f"{SVG}svg"


def test_what_a_step_needs(model):
    toy = performance.Model.opened(model)
    matrices = [one for one in toy.spec.tensors() if one.role in {"linear", "head"}]
    assert toy.products == sum(one.parameters for one in matrices)
    bytes_one, operations_one = toy.decode(100, 1, "int8")
    bytes_four, operations_four = toy.decode(100, 4, "int8")
    assert operations_four == 4 * operations_one
    # Weights once, keys and values for each; 2 layers of 2 heads of 16 dimensions and a scale.
    assert bytes_four - bytes_one == 3 * 100 * 2 * 2 * 2 * (16 + 2)
    assert operations_one == 2 * toy.products + 2 * 4 * 4 * 16 * 100


def test_the_picture_holds_every_point_below_a_title_made_safe():
    points = [Point("a <b>", "decode", 2, 5e10), Point("a <b>", "prefill", 300, 1e12), Point("c", "batch", 9, 2e11)]
    root = ElementTree.fromstring(roofline("Speeds & limits", [Roof("roof", 5e10, 1e13)], points))
    assert root.findtext(f"{SVG}title") == "Speeds & limits"
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a <b>", "c", "decode", "prefill", "batch", "roof"} <= set(words)
    assert len(list(root.iter(f"{SVG}circle"))) == 2  # the point, and in the legend


PEER = """
import json, sys
words = sys.argv[1:]
print("some words before")
if "-npl" in words:
    print(json.dumps({"pl": 8, "speed_tg": 40.0}))
else:
    fast = 2 if words[words.index("-fa") + 1] == "off" else 1
    print(json.dumps({"n_depth": 0, "avg_ts": 10.0 * fast}))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the peer is a script that names its interpreter")
def test_peers_are_measured_in_turns(model, tmp_path, monkeypatch, capfd):
    for name in ("llama-bench", "llama-batched-bench"):
        program = tmp_path / name
        program.write_text(f"#!{sys.executable}\n{PEER}", encoding="utf-8")
        program.chmod(0o755)
    gguf = tmp_path / "toy.gguf"
    gguf.write_bytes(b"")
    mine = dict.fromkeys(peers.MEASURES, 30.0)
    monkeypatch.setattr(peers, "ours", lambda *_: mine)
    words = [str(model), "--llama-bench", str(tmp_path / "llama-bench"), "--gguf", str(gguf), "--rounds", "2"]
    peers.main([*words, "--json"])
    found = json.loads(capfd.readouterr().out)
    assert found["medians"]["llama.cpp toy"] == dict.fromkeys(peers.MEASURES[:4], 20.0) | {"batch 8": 40.0}
    assert found["ratios"]["llama.cpp toy"]["decode"] == 1.5
    peers.main(words)
    written = capfd.readouterr()
    assert "to llama.cpp toy" in written.out
    assert written.err.splitlines()[:3] == [
        "round 1 of 2: Inglenook",
        "round 1 of 2: llama.cpp toy",
        "round 2 of 2: Inglenook",
    ]


def test_our_own_speeds_have_every_measure(compiled_kernels, model):
    speeds = peers.ours(model, 1, None)
    assert set(speeds) == set(peers.MEASURES)
    assert min(speeds.values()) > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gguf", "a.gguf"], "--gguf needs --llama-bench"),
        (["--llama-bench", "nowhere/llama-bench"], "needs at least one --gguf"),
        (["--llama-bench", "nowhere/llama-bench", "--gguf", "a.gguf"], "llama-bench is missing; build llama.cpp"),
        (["--openvino", "nowhere"], "nowhere is missing"),
    ],
)
def test_what_is_missing_is_named(words, said, tmp_path):
    file = tmp_path / "toy.nook"
    file.write_bytes(b"")
    with pytest.raises(SystemExit, match=said):
        peers.main([str(file), *words])


def test_a_missing_openvino_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="OpenVINO GenAI is not installed"):
        peers.main([str(tmp_path), "--openvino", str(tmp_path)])


def test_tables_are_markdown():
    assert table(("a", "b"), [("long", "1")]) == "| a    | b |\n|------|--:|\n| long | 1 |\n"
