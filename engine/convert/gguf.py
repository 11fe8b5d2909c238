"""A GGUF file as a `Source`: its metadata become a configuration, its tensors get their Hugging Face names back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.convert.gguf_file import CODINGS, GgufFile, GgufTensor, read_codes, read_gguf, read_rows
from engine.convert.gguf_tokenizer import CONTROL, END_TEXTS, tokenizer_files
from engine.convert.quantised import Coded
from engine.convert.source import Source, check_vocabulary, end_ids_from, fingerprint, stamps, with_template
from engine.errors import UnsupportedModelError
from engine.models.assignment import assign
from engine.models.families import recognise
from engine.models.rope import inverse_frequencies
from engine.models.spec import ModelSpec, RopeScaling, RopeSpec

__all__ = ["open_gguf"]

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "attn_factor": "attention_factor",
}
_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FACTORS = "rope_freqs.weight"
_KEPT = {"F32": "f32", "BF16": "bf16"}


def open_gguf(path: Path, notices: Sequence[str] = ()) -> Source:
    """The model in a GGUF file.

    Raises:
        ModelFolderError: the file is damaged, cut short or contradicts itself
        UnsupportedModelError: its architecture, tokenizer or a setting is not supported; named
    """
    before = stamps([path])
    file = read_gguf(path)
    config = _config(file)
    tensors = {_their_name(name): tensor for name, tensor in file.tensors.items() if name != _FACTORS}
    blueprint = recognise(config, f"the metadata of {path.name}")
    assignments = assign(blueprint, {name: tensor.shape for name, tensor in tensors.items()})
    spec = blueprint.spec
    files = tokenizer_files(file.metadata, path.name)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    check_vocabulary(spec.vocab_size, dict(enumerate(tokens[spec.vocab_size :], spec.vocab_size)))
    end_ids, end_notices = end_ids_from(_end_tokens(file.metadata), spec.vocab_size)
    source = Source(
        path=path,
        kind="gguf",
        name=path.stem,
        spec=spec,
        assignments=assignments.tensors,
        redundant=assignments.redundant,
        reader=_GgufReader(tensors, _rotary_heads(spec)),
        files=files,
        end_ids=end_ids,
        defaults={},
        licence=_text(file.metadata, "general.license"),
        licence_text="",
        fingerprints=(fingerprint(path),),
        stamps=before,
        notices=(*notices, *blueprint.notices, *assignments.notices, *end_notices),
    )
    return with_template(source, {token: number for number, token in enumerate(tokens)}.get)


def _config(file: GgufFile) -> dict[str, Any]:
    """The metadata as a `config.json` would say them; what has no translation keeps its name and is refused later."""
    name = file.metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path.name} has the architecture {str(name)[:80]!r}; {', '.join(_ARCHITECTURES)} are read from GGUF"
        )
    if file.metadata.get("split.count", 1) != 1:
        raise UnsupportedModelError(
            f"{file.path.name} is one part of a split model; join the parts first (gguf-split --merge)"
        )
    architecture, model_type = _ARCHITECTURES[name]
    own = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    config: dict[str, Any] = {"architectures": [architecture], "model_type": model_type}
    config |= {_KEYS.get(key, key): _one(value) for key, value in own.items() if not key.startswith("rope.scaling.")}
    for key in ("num_local_experts", "num_experts_per_tok"):
        if config.get(key) == 0:
            del config[key]
    for key in ("attention.value_length", "rope.dimension_count"):
        size = config.pop(key, None)
        if size is not None and size != _head_dim(config):
            raise UnsupportedModelError(
                f"{key} = {str(size)[:40]} ({file.path.name}) differs from the head size, which is not supported"
            )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None:
        config.setdefault("vocab_size", embedding.shape[0])
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    scaling = _scaling(file, own, config)
    if scaling:
        config["rope_scaling"] = scaling
    return config


def _scaling(file: GgufFile, own: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_scaling`, from the metadata or from the factors that Llama 3 files carry as a tensor."""
    given = {key.removeprefix("rope.scaling."): value for key, value in own.items() if key.startswith("rope.scaling.")}
    kind = given.pop("type", "none")
    given.pop("finetuned", None)
    if _FACTORS in file.tensors:
        if kind != "none":
            raise UnsupportedModelError(f"{file.path.name} scales positions twice ({_FACTORS} and {str(kind)[:40]})")
        return _llama3_scaling(file, config)
    if kind == "none":
        return {}
    return {"rope_type": kind} | {_SCALING.get(key, key): value for key, value in given.items()}


def _llama3_scaling(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Recognise the parameters that the factors were computed from: all published Llama 3 models share all but one."""
    tensor = file.tensors[_FACTORS]
    factors = read_rows(tensor, 0, 1)[0]
    head_dim, theta = _head_dim(config), config.get("rope_theta", 10000.0)
    largest = float(factors.max())
    if len(factors) * 2 == head_dim and isinstance(theta, float) and theta > 0 and 1 <= largest < np.inf:
        scaling = RopeScaling("llama3", largest, 8192)
        plain, _ = inverse_frequencies(RopeSpec(theta, head_dim))
        scaled, _ = inverse_frequencies(RopeSpec(theta, head_dim, scaling=scaling))
        if np.allclose(plain / scaled, factors, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": largest,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_context,
            }
    raise UnsupportedModelError(f"{_FACTORS} ({file.path.name}) is not the scaling of any Llama 3 model")


def _head_dim(config: Mapping[str, Any]) -> int:
    """Head size as the configuration implies it, 0 when it does not."""
    hidden, heads, size = (config.get(key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
    if isinstance(size, int):
        return size
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else 0


def _one(value: Any) -> Any:
    """A list of equal values, one for each layer, as that value."""
    return value[0] if isinstance(value, list) and value and all(entry == value[0] for entry in value) else value


def _their_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; other names stay and are refused by the family."""
    match name.split("."):
        case ["blk", layer, kind, end] if kind in _LAYER_TENSORS and layer.isdigit():
            return f"model.layers.{int(layer[:9])}.{_LAYER_TENSORS[kind]}.{end}"
        case [kind, end] if kind in _TENSORS:
            return f"{_TENSORS[kind]}.{end}"
    return name


class _GgufReader:
    """Tensors of a GGUF file under their Hugging Face names, rows of q and k in the Hugging Face order.

    rotary_heads: of tensors whose rows the converter to GGUF has interleaved
    for rotary positions: row 2i + s of a head is row i + s * half there.
    """

    def __init__(self, tensors: Mapping[str, GgufTensor], rotary_heads: Mapping[str, int]) -> None:
        self._tensors = tensors
        self._rotary_heads = rotary_heads

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def kept(self, name: str) -> str:
        # What was quantised fits float16 within its rounding, far below what quantising has cost already.
        return _KEPT.get(self._tensors[name].type.name, "f16")

    def bytes(self, name: str) -> int:
        return self._tensors[name].bytes

    def dtype(self, name: str) -> str:
        return self._tensors[name].type.name

    def rows(self, name: str, first: int, count: int) -> NDArray[np.float32]:
        tensor = self._tensors[name]
        if len(tensor.shape) == 1 and name in self._rotary_heads:  # a bias
            return _untwisted(read_rows(tensor, 0, 1).reshape(-1, 1), self._rotary_heads[name]).reshape(1, -1)
        return self._in_their_order(name, first, count, read_rows)

    def coding(self, name: str) -> tuple[str, int] | None:
        return CODINGS.get(self._tensors[name].type)

    def coded(self, name: str, first: int, count: int) -> Coded:
        levels, _ = CODINGS[self._tensors[name].type]
        codes = self._in_their_order(name, first, count, lambda *span: read_codes(*span)[0])
        scales = self._in_their_order(name, first, count, lambda *span: read_codes(*span)[1])
        return Coded(codes, scales, np.full(scales.shape, 8, np.uint8) if levels == "q4" else None)

    def _in_their_order(
        self, name: str, first: int, count: int, read: Callable[[GgufTensor, int, int], NDArray[Any]]
    ) -> NDArray[Any]:
        """Rows as the Hugging Face layout has them, by a reader of rows as they lie in the file."""
        tensor, heads = self._tensors[name], self._rotary_heads.get(name)
        if heads is None:
            return read(tensor, first, count)
        size = tensor.shape[0] // heads
        begin, end = first // size * size, -(-(first + count) // size) * size
        rows = _untwisted(read(tensor, begin, end - begin), (end - begin) // size)
        return rows[first - begin : first - begin + count]


def _untwisted(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows (heads * size, columns) from pairs beside each other to halves after each other."""
    count, columns = rows.shape
    return rows.reshape(heads, count // heads // 2, 2, columns).swapaxes(1, 2).reshape(count, columns)


def _rotary_heads(spec: ModelSpec) -> dict[str, int]:
    """The interleaved tensors, q and k of every layer of some architectures, and how many heads each has."""
    heads: dict[str, int] = {}
    if spec.family == "LlamaForCausalLM":
        for number, layer in enumerate(spec.layers):
            for end in ("weight", "bias"):
                heads[f"model.layers.{number}.self_attn.q_proj.{end}"] = layer.attention.heads
                heads[f"model.layers.{number}.self_attn.k_proj.{end}"] = layer.attention.kv_heads
    return heads


def _end_tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """End tokens by where they are named: three roles, and control tokens that can mean nothing else."""
    named = {
        f"tokenizer.ggml.{role}_token_id": metadata.get(f"tokenizer.ggml.{role}_token_id")
        for role in ("eos", "eot", "eom")
    }
    tokens = enumerate(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True))
    return named | {
        "the vocabulary": [number for number, (text, kind) in tokens if kind == CONTROL and text in END_TEXTS]
    }


def _text(metadata: Mapping[str, Any], key: str) -> str:
    value = metadata.get(key)
    return value[:100] if isinstance(value, str) else ""
