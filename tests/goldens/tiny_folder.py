"""Writes a tiny Hugging Face model folder with reproducible random weights.

Needs numpy only (no torch, no transformers), so a test makes the model that a stored golden belongs to instead
of shipping weights. The folder holds config.json, generation_config.json and model.safetensors (or shards with
an index); it has no tokenizer.

    python -m tests.goldens.tiny_folder OUT_DIR --case llama-yarn [--dtype f32|bf16|f16] [--shards N] [--style 4|5]
    python -m tests.goldens.tiny_folder --list

Why the bytes are the same on every machine and with every numpy:

* the random bits are the raw output of Philox-4x64, keyed by sha256("seed:tensor name"); numpy guarantees that
  stream, but not that of Generator.standard_normal(), which is therefore not used;
* a "normal" value is the centred and scaled sum of 8 16-bit integers (Irwin-Hall: mean 0, variance 1,
  |z| <= 4.9): integer arithmetic and correctly rounded float64 products only, no log, cos or SIMD detail;
* every weight is rounded to a multiple of 2**-16 and then to 8 significant bits. Such a number is exact in
  float32, bfloat16 and float16, so all three dtypes give the same model and share one golden.

Weights: linear layers N(0, 1 / fan_in); the embedding N(0, 1), or N(0, 1 / hidden) where it is also the output
matrix; norm gains 1 + N(0, 0.1**2); biases N(0, 0.05**2).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Config = dict[str, Any]
Tensors = dict[str, NDArray[np.float32]]

VOCAB, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 1024, 128, 384, 4, 8, 2

# The rope settings let 300 tokens go well past the original context of 64.
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
_YARN_OPTIONS = {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
    "attention_factor": 1.3,
}
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
# Published Qwen2.5 folders name the kind of scaling "type", not "rope_type".
_YARN_QWEN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}

CASES: dict[str, tuple[str, Config]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    # The large epsilon makes an engine that ignores rms_norm_eps fail.
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-2}),
    "llama-llama3": ("llama", {"rope_theta": 500000.0, "rope_scaling": _LLAMA3}),
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-yarn": ("llama", {"rope_scaling": _YARN}),
    "llama-yarn-options": ("llama", {"head_dim": 32, "rope_scaling": _YARN_OPTIONS}),
    # Dynamic NTK: the base depends on the length of the sequence (beyond max_position_embeddings).
    "llama-dynamic": ("llama", {"max_position_embeddings": 64, "rope_scaling": _DYNAMIC}),
    "mistral": ("mistral", {"sliding_window": None}),
    # A window of 64 lets position i see positions i-63 .. i, in every layer.
    "mistral-swa64": ("mistral", {"sliding_window": 64}),
    "mistral-headdim32": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", {"rope_theta": 1000000.0, "rope_scaling": _YARN_QWEN}),
    # Layers below max_window_layers see everything, the others a window.
    "qwen2-swa64": ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-headdim32": ("qwen3", {"head_dim": 32}),
}
"""Name -> (model_type, keys of config.json that differ from the common ones of `make_config`)."""

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SAFETENSORS_TYPES = {"f32": "F32", "bf16": "BF16", "f16": "F16"}
_TORCH_TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def make_config(case: str, dtype: str = "f32", style: int = 4) -> Config:
    """The config.json of a case.

    style 4: rope_theta and rope_scaling, as most published folders have them;
    style 5: the rope_parameters of transformers 5. Both describe the same model.
    """
    model_type, changes = CASES[case]
    config: Config = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": _TORCH_TYPES[dtype],
    }
    no_window = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": LAYERS}
    if model_type == "llama":
        config |= {"attention_bias": False, "mlp_bias": False}
    elif model_type == "qwen2":
        config |= no_window
    elif model_type == "qwen3":
        config |= {"attention_bias": False} | no_window
    config |= changes
    if style == 5:
        scaling = dict(config.pop("rope_scaling") or {})
        kind = scaling.pop("type", None) or scaling.pop("rope_type", "default")
        config["rope_parameters"] = scaling | {"rope_type": kind, "rope_theta": config.pop("rope_theta")}
        config["dtype"] = config.pop("torch_dtype")
    return config


def tensor_shapes(case: str) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape in file order, with the names that published folders use."""
    config = make_config(case)
    head_dim = config.get("head_dim") or HIDDEN // HEADS
    q, kv = HEADS * head_dim, KV_HEADS * head_dim
    out_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    qkv_bias = out_bias or config["model_type"] == "qwen2"
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}

    def linear(name: str, rows: int, cols: int, *, bias: bool) -> None:
        shapes[name + ".weight"] = (rows, cols)
        if bias:
            shapes[name + ".bias"] = (rows,)

    for number in range(LAYERS):
        layer = f"model.layers.{number}."
        shapes[layer + "input_layernorm.weight"] = (HIDDEN,)
        linear(layer + "self_attn.q_proj", q, HIDDEN, bias=qkv_bias)
        linear(layer + "self_attn.k_proj", kv, HIDDEN, bias=qkv_bias)
        linear(layer + "self_attn.v_proj", kv, HIDDEN, bias=qkv_bias)
        linear(layer + "self_attn.o_proj", HIDDEN, q, bias=out_bias)
        if config["model_type"] == "qwen3":
            shapes[layer + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[layer + "self_attn.k_norm.weight"] = (head_dim,)
        shapes[layer + "post_attention_layernorm.weight"] = (HIDDEN,)
        linear(layer + "mlp.gate_proj", INTERMEDIATE, HIDDEN, bias=mlp_bias)
        linear(layer + "mlp.up_proj", INTERMEDIATE, HIDDEN, bias=mlp_bias)
        linear(layer + "mlp.down_proj", HIDDEN, INTERMEDIATE, bias=mlp_bias)
    shapes["model.norm.weight"] = (HIDDEN,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return shapes


def _philox_bits(label: str, count: int) -> NDArray[np.uint64]:
    """`count` 64-bit words that depend on the label only."""
    key = int.from_bytes(hashlib.sha256(label.encode()).digest()[:16], "little")
    return np.random.Philox(key=key).random_raw(count)


def normal(label: str, count: int) -> NDArray[np.float64]:
    """`count` values, nearly N(0, 1), the same everywhere (see the module's docstring)."""
    parts = _philox_bits(label, 2 * count).astype("<u8").view("<u2").reshape(count, 8)
    total = parts.astype(np.int64).sum(axis=1) - 4 * 65535
    return total * (1.0 / math.sqrt(8 * (65536.0**2 - 1) / 12))


def round_weight(x: NDArray[np.float64]) -> NDArray[np.float32]:
    """The nearest multiple of 2**-16, then 8 significant bits: exact in float32, bfloat16 and float16."""
    mantissa, exponent = np.frexp(np.rint(x * 65536.0) / 65536.0)
    return np.ldexp(np.rint(mantissa * 256.0) / 256.0, exponent).astype(np.float32)


def make_tensors(case: str, seed: int = 0) -> Tensors:
    """Tensor name -> values. Tensors of the same name and shape are the same in every case."""
    tied = make_config(case)["tie_word_embeddings"]
    tensors: Tensors = {}
    for name, shape in tensor_shapes(case).items():
        values = normal(f"{seed}:{name}", math.prod(shape)).reshape(shape)
        if name.endswith("norm.weight"):
            values = 1.0 + 0.1 * values
        elif name.endswith(".bias"):
            values = 0.05 * values
        elif name != "model.embed_tokens.weight" or tied:
            values = values * math.sqrt(1.0 / shape[-1])
        tensors[name] = round_weight(values)
    return tensors


def token_ids(count: int = 300, vocab: int = VOCAB, seed: int = 0) -> NDArray[np.int32]:
    """The goldens' fixed id sequence: ids 3 .. vocab - 1 (0, 1 and 2 are left out as pad, bos and eos)."""
    words = _philox_bits(f"{seed}:token ids", count)
    return (words % np.uint64(vocab - 3)).astype(np.int32) + np.int32(3)


def _tensor_bytes(x: NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "f32":
        return x.astype("<f4").tobytes()
    if dtype == "f16":
        return x.astype("<f2").tobytes()
    return (x.astype("<f4").view("<u4") >> np.uint32(16)).astype("<u2").tobytes()


def save_safetensors(path: Path, tensors: Mapping[str, NDArray[np.float32]], dtype: str) -> str:
    """Write one .safetensors file; returns its sha256."""
    header: Config = {"__metadata__": {"format": "pt"}}
    blobs, offset = [], 0
    for name, x in tensors.items():
        blob = _tensor_bytes(x, dtype)
        place = [offset, offset + len(blob)]
        header[name] = {"dtype": _SAFETENSORS_TYPES[dtype], "shape": list(x.shape), "data_offsets": place}
        blobs.append(blob)
        offset += len(blob)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    data = b"".join([struct.pack("<Q", len(head)), head, *blobs])
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def _write_json(path: Path, values: Config) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def write_folder(out: Path | str, case: str, dtype: str = "f32", seed: int = 0, shards: int = 1, style: int = 4) -> str:
    """Write the folder of a case; returns the sha256 of the (first) weight file."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", make_config(case, dtype, style))
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    tensors = make_tensors(case, seed)
    if shards == 1:
        return save_safetensors(folder / "model.safetensors", tensors, dtype)
    names, digests = list(tensors), []
    where: dict[str, str] = {}
    for shard in range(shards):
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        digests.append(save_safetensors(folder / file, {name: tensors[name] for name in part}, dtype))
        where |= dict.fromkeys(part, file)
    total = sum(x.size for x in tensors.values()) * (4 if dtype == "f32" else 2)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})
    return digests[0]


def main() -> None:
    """The command line of the module's docstring."""
    parser = argparse.ArgumentParser(description="Write a tiny model folder with reproducible random weights.")
    parser.add_argument("out", nargs="?")
    parser.add_argument("--case", choices=list(CASES))
    parser.add_argument("--dtype", default="f32", choices=list(_SAFETENSORS_TYPES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--style", type=int, default=4, choices=[4, 5])
    parser.add_argument("--list", action="store_true", help="name the cases")
    given = parser.parse_args()
    if given.list:
        sys.stdout.write("\n".join(CASES) + "\n")
    elif not given.out or not given.case:
        parser.error("OUT_DIR and --case are needed")
    else:
        digest = write_folder(given.out, given.case, given.dtype, given.seed, given.shards, given.style)
        sys.stdout.write(f"{digest} {given.out}\n")


if __name__ == "__main__":
    main()
