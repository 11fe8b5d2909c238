"""Model families as data: what each `config.json` means, and what its tensors are called.

A family reads its configuration key by key through `HfConfig`; a key that is
neither read nor harmless is an error. Names are one table from our tensors to
theirs; `assignment.py` proves that both sides are complete.

To add a family: a function with `@family`, and names where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelFolderError, UnsupportedModelError
from engine.models.hf_config import HARMLESS, HfConfig, all_of, listed, shown
from engine.models.rope_config import ropes
from engine.models.spec import Activation, AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec

__all__ = [
    "LLAMA_NAMES",
    "QK_NORM_NAMES",
    "Blueprint",
    "Names",
    "dense",
    "families",
    "family",
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

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

_MOST_LAYERS = 4096


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
        raise UnsupportedModelError(f"{listed([name])} ({config.where}) is not supported; {all_of(families())} are")
    if model_type not in {None, found.model_type}:
        raise UnsupportedModelError(
            f"{config.where} calls itself {name}, but model_type = {shown(model_type)} is an unsupported family"
        )
    return found


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
            f"layer_types ({config.where}) has {listed(sorted(unknown))}, which is not supported"
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
    rope_of, reach = ropes(config, head_dim, config.size("max_position_embeddings", context))
    feed_forward = FeedForwardSpec(config.size("intermediate_size"), _activation(config), bias=feed_forward_bias)

    def layer(number: int) -> LayerSpec:
        window = windows(number)
        attention = AttentionSpec(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=rope_of("full_attention" if window is None else "sliding_attention"),
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
            f"hidden_act = {shown(name)} ({config.where}) is not supported; {all_of(sorted(_ACTIVATIONS))} are"
        )
    return _ACTIVATIONS[name]
