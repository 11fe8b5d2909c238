"""Makes toy Hugging Face folders of some 400 kB, in milliseconds, for every test that needs a model.

Knows the file formats only (`config.json`, safetensors, a byte-level
`tokenizer.json`); imports nothing of Inglenook, so that a fault of ours cannot
hide in the input. The same arguments give the same bytes.

    folder = make(tmp_path / "toy")                                   # a Llama
    folder = make(tmp_path / "toy", cfg(num_key_value_heads=1))       # its weights follow the configuration
    folder = make(tmp_path / "toy", **qwen3())                        # another family
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CHATML",
    "bf16",
    "byte_alphabet",
    "cfg",
    "make",
    "mistral",
    "qwen2",
    "qwen3",
    "shard",
    "st_bytes",
    "tok_json",
    "weights",
]

Config = dict[str, Any]
RawTensor = tuple[str, Sequence[int], bytes]  # safetensors dtype, shape, bytes: for tensors that numpy cannot hold
Tensors = Mapping[str, "NDArray[Any] | RawTensor"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_NUMPY_TYPES: dict[str, type[np.generic]] = {
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I8": np.int8,
    "U8": np.uint8,
}

_BASE: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "float32",
}


def cfg(**changes: Any) -> Config:
    """The toy Llama's `config.json` with `changes`; `key=...` (Ellipsis) leaves the key out."""
    return {key: value for key, value in (_BASE | changes).items() if not isinstance(value, EllipsisType)}


def weights(
    config: Config, seed: int = 0, *, lm_head: bool = True, scale: float = 0.05
) -> dict[str, NDArray[np.float32]]:
    """Random float32 tensors under their Hugging Face names, shaped as `config` says.

    Matrices and biases are normal with deviation `scale`. Norms are near 1 but
    not 1, so that a norm applied at the wrong place shows. Biases come with
    `attention_bias`, `mlp_bias` or Qwen2, head norms with Qwen3. `lm_head=False`
    leaves the output matrix out, as folders with tied embeddings do.
    """
    random = np.random.default_rng(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    kind = config["model_type"]
    qkv_bias = config.get("attention_bias", kind == "qwen2")
    out_bias = config.get("attention_bias", False) and kind == "llama"
    tensors: dict[str, NDArray[np.float32]] = {}

    def matrix(name: str, rows: int, columns: int, *, bias: bool = False) -> None:
        tensors[f"{name}.weight"] = random.normal(0, scale, (rows, columns)).astype(np.float32)
        if bias:
            tensors[f"{name}.bias"] = random.normal(0, scale, rows).astype(np.float32)

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = random.normal(1, 0.1, size).astype(np.float32)

    matrix("model.embed_tokens", vocab, hidden)
    norm("model.norm", hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        matrix(f"{layer}.self_attn.q_proj", heads * head_dim, hidden, bias=qkv_bias)
        matrix(f"{layer}.self_attn.k_proj", kv_heads * head_dim, hidden, bias=qkv_bias)
        matrix(f"{layer}.self_attn.v_proj", kv_heads * head_dim, hidden, bias=qkv_bias)
        matrix(f"{layer}.self_attn.o_proj", hidden, heads * head_dim, bias=out_bias)
        if kind == "qwen3":
            norm(f"{layer}.self_attn.q_norm", head_dim)
            norm(f"{layer}.self_attn.k_norm", head_dim)
        mlp_bias = config.get("mlp_bias", False)
        matrix(f"{layer}.mlp.gate_proj", inner, hidden, bias=mlp_bias)
        matrix(f"{layer}.mlp.up_proj", inner, hidden, bias=mlp_bias)
        matrix(f"{layer}.mlp.down_proj", hidden, inner, bias=mlp_bias)
        norm(f"{layer}.input_layernorm", hidden)
        norm(f"{layer}.post_attention_layernorm", hidden)
    if lm_head:
        matrix("lm_head", vocab, hidden)
    return tensors


def qwen2(**changes: Any) -> dict[str, Any]:
    """Arguments of `make` for a toy Qwen2: biases on q, k and v, tied embeddings."""
    config = cfg(
        **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True} | changes
    )
    return {"config": config, "tensors": weights(config, lm_head=not config["tie_word_embeddings"])}


def qwen3(**changes: Any) -> dict[str, Any]:
    """Arguments of `make` for a toy Qwen3: head norms, and heads wider than hidden / heads."""
    config = cfg(
        **{
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "head_dim": 32,
            "tie_word_embeddings": True,
        }
        | changes
    )
    return {"config": config, "tensors": weights(config, lm_head=not config["tie_word_embeddings"])}


def mistral(**changes: Any) -> dict[str, Any]:
    """Arguments of `make` for a toy Mistral: a sliding window, explicit head width."""
    config = cfg(
        **{"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 16, "sliding_window": None}
        | changes
    )
    return {"config": config, "tensors": weights(config)}


def byte_alphabet() -> dict[int, str]:
    """Byte -> printable character, the table that byte-level BPE vocabularies are written in."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + rank) for rank, byte in enumerate(others)}


def tok_json(
    extra: Sequence[str] = ("<s>", "</s>", "<|im_start|>", "<|im_end|>"),
    merges: Sequence[Sequence[str]] = (),
    *,
    special: bool = True,
    lstrip: bool = False,
    rstrip: bool = False,
    normalized: bool = False,
) -> Config:
    """A byte-level BPE `tokenizer.json`: ids 0..255 are the bytes, then `extra` (added tokens), then `merges`."""
    vocabulary = {character: byte for byte, character in byte_alphabet().items()}
    vocabulary |= {"".join(pair): 256 + len(extra) + rank for rank, pair in enumerate(merges)}
    added = [
        {
            "id": 256 + rank,
            "content": content,
            "single_word": False,
            "lstrip": lstrip,
            "rstrip": rstrip,
            "normalized": normalized,
            "special": special,
        }
        for rank, content in enumerate(extra)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(pair) for pair in merges],
        },
    }


def bf16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """The bit patterns of finite `values` as bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def st_bytes(tensors: Tensors, dtype: str = "F32", header: Callable[[Config], Config | bytes] | None = None) -> bytes:
    """The bytes of a safetensors file.

    dtype: what arrays are stored as ("F32", "F16", "BF16", "I32", ...); a
        `RawTensor` is stored as it stands.
    header: turns the correct header into the one written, to make bad files.
    """
    entries: Config = {}
    data = bytearray()
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            kind, shape, raw = tensor
        elif dtype == "BF16":
            kind, shape, raw = dtype, tensor.shape, bf16(tensor).tobytes()
        else:
            kind, shape, raw = dtype, tensor.shape, np.ascontiguousarray(tensor, _NUMPY_TYPES[dtype]).tobytes()
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    written = header(entries) if header else entries
    text = written if isinstance(written, bytes) else json.dumps(written).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(data)


def make(
    path: Path | str,
    config: Config | None = None,
    tensors: Tensors | None = None,
    *,
    tok: Config | None = None,
    tokcfg: Config | None = None,
    template: str | None = CHATML,
    dtype: str = "F32",
    gen: Config | None = None,
) -> Path:
    """Write a loadable model folder at `path` and return it.

    tok: `tokenizer.json`; tokcfg: changes to `tokenizer_config.json`; gen:
    `generation_config.json`, absent when None; template None: no chat template.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = cfg() if config is None else config
    tokenizer_config: Config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": False,
    }
    if template is not None:
        tokenizer_config["chat_template"] = template
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer.json", tok_json() if tok is None else tok)
    _write_json(folder / "tokenizer_config.json", tokenizer_config | (tokcfg or {}))
    if gen is not None:
        _write_json(folder / "generation_config.json", gen)
    (folder / "model.safetensors").write_bytes(st_bytes(weights(config) if tensors is None else tensors, dtype))
    return folder


def shard(
    folder: Path,
    tensors: Tensors,
    n: int = 2,
    wm: Callable[[dict[str, str]], dict[str, str]] | None = None,
    drop: Sequence[int] = (),
    dtype: str = "F32",
) -> Path:
    """Replace `model.safetensors` in `folder` by `n` shards and an index.

    wm: turns the correct weight map into the one written; drop: numbers, from
    1, of shards that are not written.
    """
    (folder / "model.safetensors").unlink(missing_ok=True)
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(1, n + 1):
        file_name = f"model-{number:05d}-of-{n:05d}.safetensors"
        part = names[number - 1 :: n]
        weight_map |= dict.fromkeys(part, file_name)
        if number not in drop:
            (folder / file_name).write_bytes(st_bytes({name: tensors[name] for name in part}, dtype))
    index = {"metadata": {"total_size": 0}, "weight_map": wm(weight_map) if wm else weight_map}
    _write_json(folder / "model.safetensors.index.json", index)
    return folder


def _write_json(path: Path, values: Config) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
