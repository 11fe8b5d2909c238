"""LoRA adapters: merged into their base while it is read, or the base is named (F11)."""

import json

import numpy as np
import pytest

from engine.convert.convert import convert
from engine.convert.report import inspect
from engine.convert.source import open_source
from engine.errors import ModelFolderError, UnsupportedModelError
from engine.models.store import open_nook
from engine.progress import finish
from engine.settings import Conversion
from tests.factory import cfg, make, st_bytes, tok_json, weights
from tests.torch_files import write_archive

Q_PROJ, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
BASE = weights(cfg())


def low_rank(name, rank=4, seed=1):
    """A (rank, columns) and B (rows, rank)."""
    random = np.random.default_rng(seed)
    rows, columns = BASE[f"{name}.weight"].shape
    return (
        random.normal(0, 0.1, (rank, columns)).astype(np.float32),
        random.normal(0, 0.1, (rows, rank)).astype(np.float32),
    )


def adapter(folder, tensors, base="org/base", **settings):
    folder.mkdir()
    values = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 4, "lora_alpha": 8} | settings
    (folder / "adapter_config.json").write_text(json.dumps(values))
    (folder / "adapter_model.safetensors").write_bytes(st_bytes(tensors))
    return folder


def parts(name, a, b):
    return {
        f"base_model.model.{name}.lora_A.weight": a,
        f"base_model.model.{name}.lora_B.weight": b,
    }


def matrix(source, name):
    return source.reader.rows(f"{name}.weight", 0, BASE[f"{name}.weight"].shape[0])


def test_a_change_is_added_to_its_matrix(tmp_path):
    make(tmp_path / "base")
    a, b = low_rank(Q_PROJ)
    source = open_source(adapter(tmp_path / "lora", parts(Q_PROJ, a, b)))
    expected = BASE[f"{Q_PROJ}.weight"] + 2.0 * (b.astype(np.float64) @ a)
    np.testing.assert_allclose(matrix(source, Q_PROJ), expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(source.reader.rows(f"{Q_PROJ}.weight", 5, 7), matrix(source, Q_PROJ)[5:12])
    np.testing.assert_array_equal(matrix(source, DOWN), BASE[f"{DOWN}.weight"])
    assert source.name == "lora"
    assert any("lora was put into" in notice for notice in source.notices)


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"lora_alpha": 16}, 4.0),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"proj": 2, "layers.0.self_attn.q_proj": 32}}, 8.0),
        ({"rank_pattern": {"q_proj": 4}, "r": 64}, 2.0),
    ],
)
def test_how_much_is_added(settings, scale, tmp_path):
    make(tmp_path / "base")
    a, b = low_rank(Q_PROJ)
    source = open_source(adapter(tmp_path / "lora", parts(Q_PROJ, a, b), **settings))
    expected = BASE[f"{Q_PROJ}.weight"] + scale * (b.astype(np.float64) @ a)
    np.testing.assert_allclose(matrix(source, Q_PROJ), expected, rtol=0, atol=1e-5)


def test_lengths_of_rows(tmp_path):
    make(tmp_path / "base")
    a, b = low_rank(DOWN)
    lengths = np.random.default_rng(2).uniform(0.5, 2, 64).astype(np.float32)
    tensors = parts(DOWN, a, b) | {f"base_model.model.{DOWN}.lora_magnitude_vector": lengths}
    source = open_source(adapter(tmp_path / "lora", tensors, use_dora=True))
    changed = BASE[f"{DOWN}.weight"] + 2.0 * (b.astype(np.float64) @ a)
    expected = changed / np.linalg.norm(changed, axis=1, keepdims=True) * lengths[:, None]
    np.testing.assert_allclose(matrix(source, DOWN), expected, rtol=0, atol=1e-6)


def test_embeddings_and_whole_tensors(tmp_path):
    make(tmp_path / "base")
    name = "model.embed_tokens"
    a, b = low_rank(name)  # here of the transpose
    head = np.random.default_rng(3).normal(0, 0.1, BASE["lm_head.weight"].shape).astype(np.float32)
    tensors = {
        f"base_model.model.{name}.lora_embedding_A": np.ascontiguousarray(b.T),
        f"base_model.model.{name}.lora_embedding_B": np.ascontiguousarray(a.T),
        "base_model.model.lm_head.weight": head,
    }
    source = open_source(adapter(tmp_path / "lora", tensors, modules_to_save=["lm_head"]))
    expected = BASE[f"{name}.weight"] + 2.0 * (b.astype(np.float64) @ a)
    np.testing.assert_allclose(matrix(source, name), expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(matrix(source, "lm_head"), head)


def test_an_adapter_becomes_a_file_with_its_own_tokenizer(tmp_path):
    make(tmp_path / "base")
    folder = adapter(tmp_path / "lora", parts(Q_PROJ, *low_rank(Q_PROJ)))
    (folder / "tokenizer.json").write_text(json.dumps(tok_json(extra=("<s>", "</s>", "<|own|>"))))
    assert inspect(folder).usable
    finish(convert(folder, tmp_path / "lora.nook", Conversion()))
    model = open_nook(tmp_path / "lora.nook")
    assert model.name == "lora"
    assert b"<|own|>" in model.files["tokenizer.json"]


def test_a_pickled_adapter(tmp_path):
    make(tmp_path / "base")
    tensors = parts(Q_PROJ, *low_rank(Q_PROJ))
    folder = adapter(tmp_path / "lora", tensors)
    expected = matrix(open_source(folder), Q_PROJ)
    (folder / "adapter_model.safetensors").unlink()
    write_archive(folder / "adapter_model.bin", tensors)
    np.testing.assert_array_equal(matrix(open_source(folder), Q_PROJ), expected)


@pytest.mark.parametrize("place", ["literal", "beside", "inside", "cache"])
def test_where_the_base_is_looked_for(place, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    base = {"literal": tmp_path / "far" / "away"}.get(place, "org/base")
    folder = adapter(tmp_path / "lora", parts(Q_PROJ, *low_rank(Q_PROJ)), base)
    snapshot = tmp_path / "hf" / "hub" / "models--org--base" / "snapshots" / "abc"
    where = {"literal": base, "beside": tmp_path / "base", "inside": folder / "base", "cache": snapshot}[place]
    with pytest.raises(UnsupportedModelError, match="is a LoRA adapter"):
        open_source(folder)
    make(where)
    assert open_source(folder).path == folder
    if place != "inside":
        (folder / "config.json").write_text("{}")  # some trainers put one there
        assert open_source(folder).path == folder


@pytest.mark.parametrize(
    "base", ["org/base", "", None, 7, "//host/share/base", "\\\\host\\share\\base", "a\0b", "../x"]
)
def test_a_base_that_is_not_there_is_named(base, tmp_path):
    folder = adapter(tmp_path / "lora", parts(Q_PROJ, *low_rank(Q_PROJ)))
    values = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedModelError, match="is a LoRA adapter for") as caught:
        open_source(folder / "adapter_model.safetensors")
    assert "put that model's folder beside it, named" in str(caught.value)
    if base == "org/base":
        assert "named base" in str(caught.value)
    assert not inspect(folder).usable


WRONG = {
    "another model": (parts("model.layers.9.mlp.up_proj", np.ones((4, 64)), np.ones((96, 4))), {}, "another model"),
    "another shape": (parts(Q_PROJ, np.ones((4, 32)), np.ones((64, 4))), {}, "another shape"),
    "ranks": (parts(Q_PROJ, np.ones((4, 64)), np.ones((64, 8))), {}, "another shape"),
    "half": ({f"base_model.model.{Q_PROJ}.lora_A.weight": np.ones((4, 64))}, {}, "only a part"),
    "lengths unsaid": (
        parts(Q_PROJ, *low_rank(Q_PROJ)) | {f"base_model.model.{Q_PROJ}.lora_magnitude_vector": np.ones(64)},
        {},
        "use_dora",
    ),
    "alpha": (parts(Q_PROJ, *low_rank(Q_PROJ)), {"lora_alpha": "8"}, "lora_alpha"),
    "kind": (parts(Q_PROJ, *low_rank(Q_PROJ)), {"peft_type": "IA3"}, "IA3"),
    "replication": (parts(Q_PROJ, *low_rank(Q_PROJ)), {"layer_replication": [[0, 2]]}, "layer_replication"),
    "vector": (parts(Q_PROJ, np.ones(64), np.ones((64, 4))), {}, "no matrix"),
}


@pytest.mark.parametrize("case", WRONG)
def test_adapters_that_cannot_be_merged(case, tmp_path):
    tensors, settings, words = WRONG[case]
    make(tmp_path / "base")
    with pytest.raises((ModelFolderError, UnsupportedModelError), match=words):
        open_source(adapter(tmp_path / "lora", tensors, **settings))
