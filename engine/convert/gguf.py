"""A GGUF file as a `Source`: its metadata become a configuration, its tensors get their Hugging Face names back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.convert.gguf_families import FAMILIES, KEYS, GgufFamily
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

_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "attn_factor": "attention_factor",
}
_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_FACTORS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_MOST_EXPERTS = 4096
_SCALINGS = (_FACTORS, _LONG, _SHORT)
_KEPT = {"F32": "f32", "BF16": "bf16"}


def open_gguf(path: Path, notices: Sequence[str] = ()) -> Source:
    """The model in a GGUF file.

    Raises:
        ModelFolderError: the file is damaged, cut short or contradicts itself
        UnsupportedModelError: its architecture, tokenizer or a setting is not supported; named
    """
    before = stamps([path])
    file = read_gguf(path)
    family = _family(file)
    config = _config(file, family)
    tensors = _renamed(file, family)
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
        reader=_GgufReader(
            tensors, _rotary_heads(spec) if family.twisted else {}, norms_plus_one=family.norms_plus_one
        ),
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


def _family(file: GgufFile) -> GgufFamily:
    name = str(file.metadata.get("general.architecture"))
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"{file.path.name} has the architecture {name[:80]!r}; {', '.join(FAMILIES)} are read from GGUF"
        )
    if file.metadata.get("split.count", 1) != 1:
        raise UnsupportedModelError(
            f"{file.path.name} is one part of a split model; join the parts first (gguf-split --merge)"
        )
    return FAMILIES[name]


def _config(file: GgufFile, family: GgufFamily) -> dict[str, Any]:
    """The metadata as a `config.json` would say them; what has no translation keeps its name and is refused later."""
    start = f"{file.metadata['general.architecture']}."
    own = {key.removeprefix(start): value for key, value in file.metadata.items() if key.startswith(start)}
    names = {**KEYS, **family.keys}
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    config |= {names.get(key, key): _one(value) for key, value in own.items() if not key.startswith("rope.scaling.")}
    for key in ("num_local_experts", "num_experts_per_tok"):
        if config.get(key) == 0:
            del config[key]
    size = config.pop("attention.value_length", None)
    if size is not None and size != _head_dim(config):
        raise UnsupportedModelError(
            f"attention.value_length = {str(size)[:40]} ({file.path.name}) differs from the head size, "
            "which is not supported"
        )
    turned = config.pop("rope.dimension_count", None)
    if turned is not None and turned != _head_dim(config):
        config["partial_rotary_factor"] = _share(turned, _head_dim(config))
    windows = own.get("attention.sliding_window_pattern")
    if isinstance(windows, list):
        del config["attention.sliding_window_pattern"]
        config["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None:
        config.setdefault("vocab_size", embedding.shape[0])
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    scaling = _scaling(file, own, config)
    if scaling:
        config["rope_scaling"] = scaling
    family.complete(config, file.tensors)
    return config


def _share(part: Any, whole: int) -> Any:
    """Part of a whole; what is no number stays, and is refused by whoever reads it."""
    return part / whole if type(part) is int and whole else part


def _scaling(file: GgufFile, own: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_scaling`, from the metadata or from the factors that Llama 3 files carry as a tensor."""
    given = {key.removeprefix("rope.scaling."): value for key, value in own.items() if key.startswith("rope.scaling.")}
    kind = given.pop("type", "none")
    given.pop("finetuned", None)
    if _LONG in file.tensors and _SHORT in file.tensors:
        original = given.get("original_context_length")
        return {
            "rope_type": "longrope",
            "long_factor": _decimals(file.tensors[_LONG]),
            "short_factor": _decimals(file.tensors[_SHORT]),
            **({} if original is None else {"original_max_position_embeddings": original}),
        }
    if _FACTORS in file.tensors:
        if kind != "none":
            raise UnsupportedModelError(f"{file.path.name} scales positions twice ({_FACTORS} and {str(kind)[:40]})")
        return _llama3_scaling(file, config)
    if kind == "none":
        return {}
    return {"rope_type": kind} | {_SCALING.get(key, key): value for key, value in given.items()}


def _decimals(tensor: GgufTensor) -> list[float]:
    """A vector in the shortest decimals that mean the same float32, as configurations are written."""
    return [float(str(value)) for value in read_rows(tensor, 0, 1)[0]]


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


def _renamed(file: GgufFile, family: GgufFamily) -> dict[str, GgufTensor]:
    """Tensors under a folder's names, those of all experts apart; other names stay and are refused by the family."""
    layer_names = family.layer_names
    found: dict[str, GgufTensor] = {}
    for name, tensor in file.tensors.items():
        match name.split("."):
            case _ if name in _SCALINGS:
                continue
            case ["blk", layer, kind, end] if kind in layer_names and layer.isdigit():
                theirs = f"model.layers.{int(layer[:9])}.{layer_names[kind]}.{end}"
            case [kind, end] if kind in _TENSORS:
                theirs = f"{_TENSORS[kind]}.{end}"
            case _:
                theirs = name
        if "{e}" in theirs and len(tensor.shape) == 3 and tensor.shape[0] <= _MOST_EXPERTS:
            found |= {theirs.replace("{e}", str(expert)): one for expert, one in enumerate(tensor.experts())}
        elif theirs.endswith("shared_expert_gate.weight"):
            found[theirs] = replace(tensor, shape=(1, *tensor.shape))  # a matrix of one row is written as a vector
        else:
            found[theirs] = tensor
    return found


class _GgufReader:
    """Tensors of a GGUF file under their Hugging Face names, rows of q and k in the Hugging Face order.

    rotary_heads: of tensors whose rows the converter to GGUF has interleaved
    for rotary positions: row 2i + s of a head is row i + s * half there.
    norms_plus_one: norm weights have a 1 added.
    """

    def __init__(
        self, tensors: Mapping[str, GgufTensor], rotary_heads: Mapping[str, int], *, norms_plus_one: bool
    ) -> None:
        self._tensors = tensors
        self._rotary_heads = rotary_heads
        self._norms_plus_one = norms_plus_one

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
        if self._norms_plus_one and name.endswith("norm.weight"):
            return read_rows(tensor, first, count) - np.float32(1)
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
    """Q and k of every layer, and how many heads each has."""
    heads: dict[str, int] = {}
    for number, attention in enumerate(spec.attentions):
        for end in ("weight", "bias"):
            heads[f"model.layers.{number}.self_attn.q_proj.{end}"] = attention.heads
            heads[f"model.layers.{number}.self_attn.k_proj.{end}"] = attention.kv_heads
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
