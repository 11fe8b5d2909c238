"""Model families as data: what each `config.json` means, and what its tensors are called.

Knows nothing of files. A family reads its configuration key by key through
`HfConfig`; a key that is neither read nor harmless is an error, so nothing
that changes the arithmetic can be overlooked. Names are one table from our
tensors to theirs; `assign` proves that every tensor of theirs is used exactly
once and every one of ours is filled.

To add a family: a function with `@family`, and names where they differ.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.errors import ModelFolderError, UnsupportedModelError
from engine.models.spec import (
    Activation,
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    RopeScaling,
    RopeSpec,
    TensorSpec,
)

__all__ = [
    "LLAMA_NAMES",
    "QK_NORM_NAMES",
    "Assignment",
    "Assignments",
    "Blueprint",
    "HfConfig",
    "assign",
    "dense",
    "families",
    "family",
    "is_optional",
    "recognise",
]

# Our tensor -> theirs; several are stacked by rows in this order; {n} is the layer.
Names = Mapping[str, tuple[str, ...]]

LLAMA_NAMES: Names = {
    "embedding": ("model.embed_tokens.weight",),
    "layers.{n}.attention.norm": ("model.layers.{n}.input_layernorm.weight",),
    "layers.{n}.attention.qkv": (
        "model.layers.{n}.self_attn.q_proj.weight",
        "model.layers.{n}.self_attn.k_proj.weight",
        "model.layers.{n}.self_attn.v_proj.weight",
    ),
    "layers.{n}.attention.qkv.bias": (
        "model.layers.{n}.self_attn.q_proj.bias",
        "model.layers.{n}.self_attn.k_proj.bias",
        "model.layers.{n}.self_attn.v_proj.bias",
    ),
    "layers.{n}.attention.out": ("model.layers.{n}.self_attn.o_proj.weight",),
    "layers.{n}.attention.out.bias": ("model.layers.{n}.self_attn.o_proj.bias",),
    "layers.{n}.feed_forward.norm": ("model.layers.{n}.post_attention_layernorm.weight",),
    "layers.{n}.feed_forward.gate_up": (
        "model.layers.{n}.mlp.gate_proj.weight",
        "model.layers.{n}.mlp.up_proj.weight",
    ),
    "layers.{n}.feed_forward.gate_up.bias": (
        "model.layers.{n}.mlp.gate_proj.bias",
        "model.layers.{n}.mlp.up_proj.bias",
    ),
    "layers.{n}.feed_forward.down": ("model.layers.{n}.mlp.down_proj.weight",),
    "layers.{n}.feed_forward.down.bias": ("model.layers.{n}.mlp.down_proj.bias",),
    "norm": ("model.norm.weight",),
    "head": ("lm_head.weight",),
}

QK_NORM_NAMES: Names = {
    "layers.{n}.attention.q_norm": ("model.layers.{n}.self_attn.q_norm.weight",),
    "layers.{n}.attention.k_norm": ("model.layers.{n}.self_attn.k_norm.weight",),
}

# Keys that never change what a forward pass computes in any family above.
HARMLESS = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_commit_hash",
        "_flash_attn_2_enabled",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "embd_pdrop",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "hidden_dropout",
        "hidden_dropout_prob",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_llama_config",
        "label2id",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "max_sequence_length",
        "min_length",
        "model_max_length",
        "model_type",
        "neftune_noise_alpha",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_nextn_predict_layers",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "resid_pdrop",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
        "use_flash_attn",
    }
)

# Keys that every configuration may have, and the only value that the families above can follow.
_NEUTRAL: Mapping[str, Any] = {"add_cross_attention": False, "is_encoder_decoder": False, "pruned_heads": {}}

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Buffers that old exports carry beside the weights; all can be computed from the configuration.
_IGNORED = re.compile(r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|position_ids)$")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")

_LARGEST = 1 << 31
_MOST_LAYERS = 4096
_SHOWN = 5
_LONGEST_SHOWN = 120


class HfConfig:
    """A configuration read key by key; `close` refuses whatever nobody read.

    where: the file, and the key inside it for nested values, as errors name it.
    architecture: the family that reads it.
    notices: sentences for the reader, gathered on the way.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where
        self.architecture = ""
        self.notices: list[str] = []
        self._read: set[str] = set()

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number from `least` on; null or absent gives `default`, or is an error when there is none."""
        value = self._take(key)
        if value is None:
            if default is None:
                raise ModelFolderError(f"{self.where} does not say {key}")
            return default
        return self._whole(key, value, least)

    def size_or_none(self, key: str, absent: int | None) -> int | None:
        """A whole number above 0 or null; `absent` when the key is not there."""
        if key not in self.values:
            return absent
        value = self._take(key)
        return None if value is None else self._whole(key, value, 1)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; null or absent gives `default`, or is an error when there is none."""
        value = self.number_or_none(key)
        if value is None:
            if default is None:
                raise ModelFolderError(f"{self.where} does not say {key}")
            return default
        return value

    def number_or_none(self, key: str) -> float | None:
        """A finite number above 0, or None when null or absent."""
        value = self._take(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelFolderError(f"{key} = {_shown(value)} ({self.where}) is not a number above 0")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self._take(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelFolderError(f"{key} = {_shown(value)} ({self.where}) is neither true nor false")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        """A string, or `default` when null or absent."""
        value = self._take(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ModelFolderError(f"{key} = {_shown(value)} ({self.where}) is not a text")
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None when null or absent."""
        value = self._take(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise ModelFolderError(f"{key} = {_shown(value)} ({self.where}) is not a list of texts")
        return tuple(value)

    def nested(self, key: str) -> HfConfig | None:
        """An object to read key by key, or None when null, empty or absent."""
        value = self._take(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ModelFolderError(f"{key} = {_shown(value)} ({self.where}) is not an object")
        return HfConfig(value, f"{key} in {self.where}") if value else None

    def must(self, key: str, allowed: Any) -> None:
        """Refuse any value but `allowed`, null and absence."""
        value = self._take(key)
        if value is not None and (value != allowed or isinstance(value, bool) is not isinstance(allowed, bool)):
            raise UnsupportedModelError(
                f"{key} = {_shown(value)} ({self.where}) is not supported; {_shown(allowed)} is"
            )

    def close(self, reader: str, harmless: Iterable[str] = ()) -> None:
        """Refuse what was not read. A null says nothing and passes.

        Raises:
            UnsupportedModelError: `config.json sets attn_logit_softcapping, ...`
        """
        known = self._read.union(harmless)
        unread = sorted(key for key, value in self.values.items() if key not in known and value is not None)
        if unread:
            raise UnsupportedModelError(f"{self.where} sets {_listed(unread)}, which {reader} does not read here")

    def _take(self, key: str) -> Any:
        self._read.add(key)
        return self.values.get(key)

    def _whole(self, key: str, value: Any, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
            raise ModelFolderError(f"{key} = {_shown(value)} ({self.where}) is not a whole number from {least} on")
        return value


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a configuration says: the model, and the names its tensors carry."""

    spec: ModelSpec
    names: Names
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Family:
    architecture: str
    model_type: str
    read: Callable[[HfConfig], Blueprint]


_FAMILIES: dict[str, _Family] = {}


def family(
    architecture: str, model_type: str
) -> Callable[[Callable[[HfConfig], Blueprint]], Callable[[HfConfig], Blueprint]]:
    """Register the reader of one architecture, as `architectures` and `model_type` of `config.json` name it."""

    def register(read: Callable[[HfConfig], Blueprint]) -> Callable[[HfConfig], Blueprint]:
        _FAMILIES[architecture] = _Family(architecture, model_type, read)
        return read

    return register


def families() -> tuple[str, ...]:
    """The supported architectures, sorted."""
    return tuple(sorted(_FAMILIES))


def recognise(values: Mapping[str, Any], where: str = "config.json") -> Blueprint:
    """The model that a `config.json` describes. where: what errors call it.

    Raises:
        UnsupportedModelError: another architecture, or a key that changes the
            arithmetic in a way that Inglenook does not know; named
        ModelFolderError: a key is missing or of the wrong type; named
    """
    config = HfConfig(values, where)
    found = _family_of(config)
    config.architecture = found.architecture
    for key, allowed in _NEUTRAL.items():
        config.must(key, allowed)
    blueprint = found.read(config)
    config.close(found.architecture, HARMLESS)
    return Blueprint(blueprint.spec, blueprint.names, tuple(config.notices))


def _family_of(config: HfConfig) -> _Family:
    architectures = config.texts("architectures") or ()
    model_type = config.text("model_type")
    if not architectures:
        for candidate in _FAMILIES.values():
            if candidate.model_type == model_type:
                return candidate
    name = ", ".join(architectures) or model_type
    if name is None:
        raise ModelFolderError(f"{config.where} names no architecture (architectures, model_type), so this is no model")
    found = _FAMILIES.get(name)
    if found is None:
        raise UnsupportedModelError(f"{_listed([name])} ({config.where}) is not supported; {_all_of(families())} are")
    if model_type not in {None, found.model_type}:
        raise UnsupportedModelError(
            f"{config.where} calls itself {name}, but model_type = {_shown(model_type)} is an unsupported family"
        )
    return found


# --- families -------------------------------------------------------------------------------------------------------


@family("LlamaForCausalLM", "llama")
def llama(config: HfConfig) -> Blueprint:
    """Llama 1 to 3, and the many models that took its shape: SmolLM2, TinyLlama, Yi, DeepSeek distillates."""
    bias = config.flag("attention_bias", default=False)
    config.must("rope_interleaved", allowed=False)
    return dense(
        config,
        LLAMA_NAMES,
        context=2048,
        qkv_bias=bias,
        out_bias=bias,
        feed_forward_bias=config.flag("mlp_bias", default=False),
    )


@family("MistralForCausalLM", "mistral")
def mistral(config: HfConfig) -> Blueprint:
    """Mistral 7B and its kin: Llama with a sliding window in every layer, unless that is null."""
    window = config.size_or_none("sliding_window", absent=4096)
    kinds = config.texts("layer_types")
    if kinds is not None and set(kinds) != {"full_attention" if window is None else "sliding_attention"}:
        raise UnsupportedModelError(f"layer_types ({config.where}) contradicts sliding_window, which Mistral obeys")
    return dense(config, LLAMA_NAMES, context=131072, windows=lambda _: window)


@family("Qwen2ForCausalLM", "qwen2")
def qwen2(config: HfConfig) -> Blueprint:
    """Qwen2 and Qwen2.5: Llama with biases on q, k and v."""
    config.must("attention_bias", allowed=True)
    config.must("use_mrope", allowed=False)
    return dense(config, LLAMA_NAMES, context=32768, qkv_bias=True, windows=_qwen_windows(config))


@family("Qwen3ForCausalLM", "qwen3")
def qwen3(config: HfConfig) -> Blueprint:
    """Qwen3 without experts: norms on the heads of q and k instead of biases."""
    bias = config.flag("attention_bias", default=False)
    return dense(
        config,
        {**LLAMA_NAMES, **QK_NORM_NAMES},
        context=32768,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        windows=_qwen_windows(config),
    )


def _qwen_windows(config: HfConfig) -> Callable[[int], int | None]:
    """Window of each layer by `layer_types`, else from layer `max_window_layers` on, if windows are used at all."""
    used = config.flag("use_sliding_window", default=False)
    size = config.size_or_none("sliding_window", absent=4096)
    first = config.size("max_window_layers", 28, least=0)
    kinds = config.texts("layer_types")
    window = size if used else None
    if kinds is None:
        return lambda layer: window if layer >= first else None
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(
            f"layer_types ({config.where}) has {_listed(sorted(unknown))}, which is not supported"
        )
    if "sliding_attention" in kinds and window is None:
        raise ModelFolderError(
            f"layer_types ({config.where}) asks for sliding windows, but there is no window size in use"
        )
    if len(kinds) < config.size("num_hidden_layers"):
        raise ModelFolderError(f"layer_types ({config.where}) has {len(kinds)} entries for more layers")
    return lambda layer: window if kinds[layer] == "sliding_attention" else None


def dense(
    config: HfConfig,
    names: Names,
    *,
    context: int,
    qkv_bias: bool = False,
    out_bias: bool = False,
    feed_forward_bias: bool = False,
    qk_norm: bool = False,
    windows: Callable[[int], int | None] = lambda _: None,
) -> Blueprint:
    """The common decoder: RMS norm, attention, RMS norm, gated feed-forward, in every layer.

    context: of a configuration that does not say `max_position_embeddings`.
    windows: layer -> sliding window.
    """
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    head_dim = config.size_or_none("head_dim", absent=None)
    if head_dim is None:
        if hidden % heads:
            raise ModelFolderError(f"hidden_size = {hidden} ({config.where}) is no multiple of {heads} attention heads")
        head_dim = hidden // heads
    kv_heads = config.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelFolderError(
            f"{heads} attention heads ({config.where}) cannot share {kv_heads} key/value heads evenly"
        )
    ropes, reach = _ropes(config, head_dim, config.size("max_position_embeddings", context))
    feed_forward = FeedForwardSpec(config.size("intermediate_size"), _activation(config), bias=feed_forward_bias)

    def layer(number: int) -> LayerSpec:
        window = windows(number)
        attention = AttentionSpec(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=ropes("full_attention" if window is None else "sliding_attention"),
            window=window,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            qk_norm=qk_norm,
        )
        return LayerSpec(attention, feed_forward)

    count = config.size("num_hidden_layers")
    if count > _MOST_LAYERS:
        raise ModelFolderError(
            f"num_hidden_layers = {count} ({config.where}) is more than the {_MOST_LAYERS} supported"
        )
    spec = ModelSpec(
        family=config.architecture,
        hidden=hidden,
        vocab_size=config.size("vocab_size"),
        context=reach,
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        layers=tuple(layer(number) for number in range(count)),
        tied_head=config.flag("tie_word_embeddings", default=False),
    )
    return Blueprint(spec, names)


def _activation(config: HfConfig) -> Activation:
    name = config.text("hidden_act", "silu") or ""
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"hidden_act = {_shown(name)} ({config.where}) is not supported; {_all_of(sorted(_ACTIVATIONS))} are"
        )
    return _ACTIVATIONS[name]


# --- rotary positions -----------------------------------------------------------------------------------------------


def _ropes(config: HfConfig, head_dim: int, context: int) -> tuple[Callable[[str], RopeSpec], int]:
    """Rotary embedding by kind of layer, and how many tokens the model reaches.

    The parameters come as `rope_scaling` (old), as `rope_parameters` (new), as
    both with the same content, or one set for each kind of layer.
    """
    config.must("partial_rotary_factor", 1.0)
    theta = config.number_or_none("rope_theta")
    original = config.size_or_none("original_max_position_embeddings", absent=None)
    sets = [given for given in (config.nested("rope_parameters"), config.nested("rope_scaling")) if given is not None]
    merged: dict[str, Any] = {}
    for given in sets:
        values = _one_name_for_type(given)
        for key in merged.keys() & values.keys():
            if merged[key] != values[key]:
                raise ModelFolderError(f"rope_parameters and rope_scaling ({config.where}) disagree on {key}")
        merged |= values
    where = sets[0].where if sets else config.where
    read = partial(_rope, config, head_dim=head_dim, context=context, theta=theta, original=original)
    kinds = merged.keys() & {"full_attention", "sliding_attention"}
    if not kinds:
        rope, reach = read(HfConfig(merged, where))
        return lambda _: rope, reach
    if merged.keys() - kinds:
        raise ModelFolderError(f"{where} mixes parameters for all layers with parameters for some")
    by_kind: dict[str, tuple[RopeSpec, int]] = {}
    for kind in sorted(kinds):
        own = HfConfig(merged, where).nested(kind)
        if own is not None:
            by_kind[kind] = read(HfConfig(_one_name_for_type(own), own.where))

    def rope_of(kind: str) -> RopeSpec:
        if kind not in by_kind:
            raise ModelFolderError(f"{where} has no parameters for {kind} layers, which the model has")
        return by_kind[kind][0]

    return rope_of, min((reach for _, reach in by_kind.values()), default=context)


def _one_name_for_type(given: HfConfig) -> dict[str, Any]:
    """`type` is the old name of `rope_type`, and "su" of "longrope"."""
    values = dict(given.values)
    old, new = values.pop("type", None), values.pop("rope_type", None)
    names = ["longrope" if name == "su" else name for name in (new, old) if name is not None]
    if len(names) > 1 and names[0] != names[1]:
        raise ModelFolderError(f"{given.where} gives both type = {_shown(old)} and rope_type = {_shown(new)}")
    return {**values, "rope_type": names[0]} if names else values


def _rope(
    config: HfConfig,
    parameters: HfConfig,
    *,
    head_dim: int,
    context: int,
    theta: float | None,
    original: int | None,
) -> tuple[RopeSpec, int]:
    if head_dim % 2:
        raise UnsupportedModelError(f"a head size of {head_dim} ({config.where}) is odd; rotary positions need pairs")
    own_theta = parameters.number_or_none("rope_theta")
    if own_theta is not None and theta is not None and own_theta != theta:
        config.notices.append(f"{parameters.where} gives rope_theta = {own_theta:g}; {theta:g} beside it is not used")
    theta = own_theta or theta or 10000.0
    parameters.must("partial_rotary_factor", 1.0)
    kind = parameters.text("rope_type") or "default"
    if kind not in _ROPE_KINDS:
        raise UnsupportedModelError(
            f"rope type {_shown(kind)} ({parameters.where}) is not supported; {_all_of(sorted(_ROPE_KINDS))} are"
        )
    scaling, reach = _ROPE_KINDS[kind](config, parameters, context, original)
    parameters.close(f'rope type "{kind}"', {"finetuned", "original_max_position_embeddings"})
    return RopeSpec(theta, head_dim, scaling=scaling), reach


_Scaled = tuple[RopeScaling | None, int]


def _rope_default(_config: HfConfig, parameters: HfConfig, context: int, _original: int | None) -> _Scaled:
    parameters.must("factor", 1.0)
    return None, context


def _rope_linear(_config: HfConfig, parameters: HfConfig, context: int, _original: int | None) -> _Scaled:
    factor = _factor(parameters)
    return RopeScaling("linear", factor, context), min(int(context * factor), _LARGEST)


def _rope_dynamic(config: HfConfig, parameters: HfConfig, context: int, _original: int | None) -> _Scaled:
    # Beyond the trained length every frequency would depend on how long the text has become, so that keys cached
    # earlier no longer fit. Up to it the scaling does nothing; the model ends there.
    config.notices.append(
        f'rope type "dynamic" ({parameters.where}) changes positions beyond {context} tokens; '
        "the model is used up to that length"
    )
    return RopeScaling("dynamic", _factor(parameters), context), context


def _rope_llama3(config: HfConfig, parameters: HfConfig, context: int, original: int | None) -> _Scaled:
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if high <= low:
        raise ModelFolderError(f"high_freq_factor must be above low_freq_factor ({parameters.where}), not {high:g}")
    trained = _trained_length(config, parameters, context, original)
    return RopeScaling("llama3", _factor(parameters), trained, low_freq_factor=low, high_freq_factor=high), context


def _rope_yarn(config: HfConfig, parameters: HfConfig, context: int, original: int | None) -> _Scaled:
    trained = _trained_length(config, parameters, context, original)
    factor = _factor(parameters, context / trained)
    scaling = RopeScaling(
        "yarn",
        factor,
        trained,
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        attention_factor=parameters.number_or_none("attention_factor"),
        mscale=parameters.number_or_none("mscale"),
        mscale_all_dim=parameters.number_or_none("mscale_all_dim"),
        truncate=parameters.flag("truncate", default=True),
    )
    return scaling, min(max(context, int(trained * factor)), _LARGEST)


_ROPE_KINDS: dict[str, Callable[[HfConfig, HfConfig, int, int | None], _Scaled]] = {
    "default": _rope_default,
    "linear": _rope_linear,
    "dynamic": _rope_dynamic,
    "llama3": _rope_llama3,
    "yarn": _rope_yarn,
}


def _factor(parameters: HfConfig, default: float | None = None) -> float:
    factor = parameters.number("factor", default)
    if factor < 1:
        raise ModelFolderError(f"factor = {factor:g} ({parameters.where}) must be at least 1")
    return factor


def _trained_length(config: HfConfig, parameters: HfConfig, context: int, original: int | None) -> int:
    own = parameters.size_or_none("original_max_position_embeddings", absent=None)
    if original is None and own is None:
        config.notices.append(
            f"{parameters.where} does not say original_max_position_embeddings; the model's {context} tokens are taken"
        )
    return original or own or context


# --- tensors --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assignment:
    """One tensor of ours and the tensors of theirs that fill it, stacked in this order."""

    tensor: TensorSpec
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Assignments:
    """Where every tensor comes from.

    redundant: a stored head of a model whose head is its embedding: (theirs,
    the name of what is used instead). The reader of weights says when they differ.
    """

    tensors: tuple[Assignment, ...]
    redundant: tuple[tuple[str, str], ...]
    notices: tuple[str, ...]


def assign(blueprint: Blueprint, shapes: Mapping[str, Sequence[int]]) -> Assignments:
    """Prove that tensors of these shapes are the blueprint's, each used once and each of ours filled.

    Raises:
        ModelFolderError: tensors are missing, or have other shapes than the
            configuration asks for; named
        UnsupportedModelError: there are tensors that the family does not use; named
    """
    spec = blueprint.spec
    tensors = tuple(Assignment(tensor, _sources(blueprint.names, tensor.name)) for tensor in spec.tensors())
    used = {source for assignment in tensors for source in assignment.sources}
    missing = [source for assignment in tensors for source in assignment.sources if source not in shapes]
    if missing:
        raise ModelFolderError(f"the model files lack {_listed(missing)}, which {spec.family} needs")
    redundant: list[tuple[str, str]] = []
    extra_layers: set[int] = set()
    unknown: list[str] = []
    for name in shapes:
        if name in used or _IGNORED.search(name):
            continue
        layer = _LAYER.search(name)
        if layer and int(layer[2][:9]) >= len(spec.layers):
            extra_layers.add(int(layer[2][:9]))
        elif spec.tied_head and (name,) == blueprint.names["head"]:
            redundant.append((name, blueprint.names["embedding"][0]))
        else:
            unknown.append(name)
    if unknown:
        raise UnsupportedModelError(
            f"the model files hold {_listed(sorted(unknown))}, which {spec.family} as configured does not use"
        )
    for assignment in tensors:
        _check_shapes(assignment, shapes)
    notices = [
        f"layer {number} is beyond the {len(spec.layers)} configured layers and is left out"
        for number in sorted(extra_layers)
    ]
    return Assignments(tensors, tuple(redundant), tuple(notices))


def is_optional(name: str, spec: ModelSpec) -> bool:
    """Whether a model can do without a tensor of theirs: a buffer, or part of a layer beyond the configured ones."""
    layer = _LAYER.search(name)
    return bool(_IGNORED.search(name)) or (layer is not None and int(layer[2][:9]) >= len(spec.layers))


def _sources(names: Names, name: str) -> tuple[str, ...]:
    number = re.match(r"layers\.(\d+)\.", name)
    if number is None:
        return names[name]
    pattern = "layers.{n}." + name[number.end() :]
    return tuple(source.replace("{n}", number[1]) for source in names[pattern])


def _check_shapes(assignment: Assignment, shapes: Mapping[str, Sequence[int]]) -> None:
    tensor = assignment.tensor
    # A single source may hold all parts already stacked.
    parts = tensor.parts if len(assignment.sources) == len(tensor.parts) else (sum(tensor.parts),)
    for source, part in zip(assignment.sources, parts, strict=True):
        wanted = (part,) if tensor.role == "vector" else (part, tensor.cols)
        shape = tuple(shapes[source])
        if shape != wanted:
            raise ModelFolderError(
                f"{source} is {_times(shape)}, but the configuration asks for {_times(wanted)}: "
                "the weights belong to another configuration"
            )


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a single number"


def _shown(value: Any) -> str:
    """A value as JSON, cut: a hostile one may be megabytes long."""
    text = repr(value) if isinstance(value, float) else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    shown = [name if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]}..." for name in names[:_SHOWN]]
    if len(names) > _SHOWN:
        return f"{', '.join(shown)} and {len(names) - _SHOWN} more"
    return _all_of(shown)


def _all_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
