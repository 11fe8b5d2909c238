"""Families of which some layers remember a sequence otherwise than by keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from engine.errors import ModelFolderError
from engine.models.blueprint import FULL, Blueprint, decoder, family, layer_kinds, text_part
from engine.models.families.experts import experts, parts_of_experts, sparse
from engine.models.families.llama import LLAMA_NAMES
from engine.models.hf_config import HfConfig
from engine.models.names import Names, Part, table
from engine.models.spec import AttentionSpec, ConvolutionSpec, DeltaSpec, FeedForwardSpec, LayerSpec

__all__: list[str] = []

_CONVOLUTION = "conv"
_LINEAR = "linear_attention"


# ------------------------------------------------------------------ LFM2

_LFM2_UNUSED = (
    "block_dim",
    "block_mlp_init_scale",
    "block_norm_eps",
    "block_out_init_scale",
    "block_use_xavier_init",
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "num_heads",
)


def _lfm2_names(hidden: int) -> Names:
    layer = "model.layers.{n}"
    return {
        **LLAMA_NAMES,
        **table(
            {
                "layers.{n}.attention.norm": f"{layer}.operator_norm.weight",
                "layers.{n}.attention.q_norm": f"{layer}.self_attn.q_layernorm.weight",
                "layers.{n}.attention.k_norm": f"{layer}.self_attn.k_layernorm.weight",
                "layers.{n}.attention.out": f"{layer}.self_attn.out_proj.weight",
                "layers.{n}.recurrence.norm": f"{layer}.operator_norm.weight",
                "layers.{n}.recurrence.in": f"{layer}.conv.in_proj.weight",
                "layers.{n}.recurrence.in.bias": f"{layer}.conv.in_proj.bias",
                "layers.{n}.recurrence.kernel": Part(f"{layer}.conv.conv.weight", flat=hidden, depthwise=True),
                "layers.{n}.recurrence.kernel.bias": f"{layer}.conv.conv.bias",
                "layers.{n}.recurrence.out": f"{layer}.conv.out_proj.weight",
                "layers.{n}.recurrence.out.bias": f"{layer}.conv.out_proj.bias",
                "layers.{n}.feed_forward.norm": f"{layer}.ffn_norm.weight",
                "layers.{n}.feed_forward.gate_up": (
                    f"{layer}.feed_forward.w1.weight",
                    f"{layer}.feed_forward.w3.weight",
                ),
                "layers.{n}.feed_forward.down": f"{layer}.feed_forward.w2.weight",
                "layers.{n}.feed_forward.router": f"{layer}.feed_forward.gate.weight",
                "layers.{n}.feed_forward.router.correction": f"{layer}.feed_forward.expert_bias",
                "layers.{n}.feed_forward.experts.gate_up": (
                    f"{layer}.feed_forward.experts.{{e}}.w1.weight",
                    f"{layer}.feed_forward.experts.{{e}}.w3.weight",
                ),
                "layers.{n}.feed_forward.experts.down": f"{layer}.feed_forward.experts.{{e}}.w2.weight",
                "norm": "model.embedding_norm.weight",
            }
        ),
    }


def _lfm2(
    config: HfConfig, usual: Callable[[int], str], adjust: Callable[[int, LayerSpec], LayerSpec], **how: Any
) -> Blueprint:
    """Gated short convolutions in most layers, attention with norms of each head in the others."""
    config.must("use_pos_enc", allowed=True)
    if "tie_embedding" in config:
        config.ignore("tie_word_embeddings")
        config.spell(tie_word_embeddings="tie_embedding")
    config.spell(rms_norm_eps="norm_eps")
    hidden = config.size("hidden_size")
    kinds = layer_kinds(config, usual, None, frozenset({_CONVOLUTION}))
    taps = config.size("conv_L_cache", 3, least=2)
    convolution = ConvolutionSpec(hidden, taps, config.flag("conv_bias", default=False))
    if all(kinds(number) == _CONVOLUTION for number in range(config.size("num_hidden_layers"))):
        raise ModelFolderError(f"{config.where} describes a model without attention")

    def mixed(number: int, layer: LayerSpec) -> LayerSpec:
        if kinds(number) == _CONVOLUTION:
            layer = replace(layer, attention=None, convolution=convolution)
        return adjust(number, layer)

    return decoder(
        config,
        _lfm2_names(hidden),
        context=128000,
        theta=1000000.0,
        epsilon=1e-5,
        tied=True,
        attention=partial(AttentionSpec, qk_norm="head"),
        adjust=mixed,
        **how,
    )


@family(("Lfm2ForCausalLM", "lfm2"))
def lfm2(config: HfConfig) -> Blueprint:
    """LFM2, dense."""
    for key in _LFM2_UNUSED:
        config.ignore(key)
    config.must("block_use_swiglu", allowed=True)
    if "block_ff_dim" in config:
        config.ignore("intermediate_size")
        config.spell(intermediate_size="block_ff_dim")
    adjusts = config.flag("block_auto_adjust_ff_dim", default=True)
    multiplier = config.number("block_ffn_dim_multiplier", 1.0)
    multiple = config.size("block_multiple_of", 256)
    attending = config.whole_numbers("full_attn_idxs")

    def feed_forward(intermediate: int, activation: Any) -> FeedForwardSpec:
        if adjusts:
            intermediate = -(-int(multiplier * (2 * intermediate // 3)) // multiple) * multiple
        return FeedForwardSpec(intermediate, activation)

    def usual(number: int) -> str:
        return FULL if attending is None or number in attending else _CONVOLUTION

    return _lfm2(config, usual, lambda _, layer: layer, feed_forward=feed_forward)


@family(("Lfm2MoeForCausalLM", "lfm2_moe"))
def lfm2_moe(config: HfConfig) -> Blueprint:
    """LFM2 with experts but for the first layers."""
    dense = config.size("num_dense_layers", 2, least=0)
    width = config.size("moe_intermediate_size", 1792)
    chosen = experts(
        config,
        routing="sigmoid",
        correction=config.flag("use_expert_bias", default=True),
        normalised=config.flag("norm_topk_prob", default=True),
        scale=config.number("routed_scaling_factor", 1.0),
    )

    def adjust(number: int, layer: LayerSpec) -> LayerSpec:
        if number < dense:
            return layer
        return replace(layer, feed_forward=replace(layer.feed_forward, intermediate=width, experts=chosen))

    return _lfm2(config, lambda _: FULL, adjust)


# ------------------------------------------------------------------ Qwen3-Next, Qwen3.5


def _norm(name: str) -> Part:
    return Part(name, plus=1.0)


def _qwen_names(size: int, delta: DeltaSpec, *, stacked: bool) -> Names:
    """stacked: q, k, v and gates of a delta net are stored by key head; else each by itself."""
    layer = "model.layers.{n}"
    queries, gates = f"{layer}.self_attn.q_proj", f"{layer}.linear_attn"
    keys, values = delta.key_dim, delta.heads // delta.key_heads * delta.value_dim
    run, each = 2 * keys + 2 * values, delta.heads // delta.key_heads
    qkvz, ba = f"{gates}.in_proj_qkvz.weight", f"{gates}.in_proj_ba.weight"
    inputs: tuple[Part, ...] = (
        Part(qkvz, run, 0, keys),
        Part(qkvz, run, keys, keys),
        Part(qkvz, run, 2 * keys, values),
        Part(qkvz, run, 2 * keys + values, values),
    )
    kept: tuple[Part, ...] = (Part(ba, 2 * each, 0, each), Part(ba, 2 * each, each, each))
    if not stacked:
        whole = f"{gates}.in_proj_qkv.weight"
        # One tensor after the other: runs as long as the whole.
        total, key_rows = sum(delta.parts), delta.parts[0]
        inputs = (
            Part(whole, total, 0, key_rows),
            Part(whole, total, key_rows, key_rows),
            Part(whole, total, 2 * key_rows, delta.parts[2]),
            Part(f"{gates}.in_proj_z.weight"),
        )
        kept = (Part(f"{gates}.in_proj_b.weight"), Part(f"{gates}.in_proj_a.weight"))
    return {
        **LLAMA_NAMES,
        **table(
            {
                "layers.{n}.attention.norm": _norm(f"{layer}.input_layernorm.weight"),
                "layers.{n}.attention.qkv": (
                    Part(f"{queries}.weight", 2 * size, 0, size),
                    f"{layer}.self_attn.k_proj.weight",
                    f"{layer}.self_attn.v_proj.weight",
                    Part(f"{queries}.weight", 2 * size, size, size),
                ),
                "layers.{n}.attention.qkv.bias": (
                    Part(f"{queries}.bias", 2 * size, 0, size),
                    f"{layer}.self_attn.k_proj.bias",
                    f"{layer}.self_attn.v_proj.bias",
                    Part(f"{queries}.bias", 2 * size, size, size),
                ),
                "layers.{n}.attention.q_norm": _norm(f"{layer}.self_attn.q_norm.weight"),
                "layers.{n}.attention.k_norm": _norm(f"{layer}.self_attn.k_norm.weight"),
                "layers.{n}.recurrence.norm": _norm(f"{layer}.input_layernorm.weight"),
                "layers.{n}.recurrence.in": inputs,
                "layers.{n}.recurrence.gates": kept,
                "layers.{n}.recurrence.decay": f"{gates}.A_log",
                "layers.{n}.recurrence.decay.bias": f"{gates}.dt_bias",
                "layers.{n}.recurrence.kernel": Part(f"{gates}.conv1d.weight", flat=sum(delta.parts), depthwise=True),
                "layers.{n}.recurrence.out_norm": f"{gates}.norm.weight",
                "layers.{n}.recurrence.out": f"{gates}.out_proj.weight",
                "layers.{n}.feed_forward.norm": _norm(f"{layer}.post_attention_layernorm.weight"),
                "norm": _norm("model.norm.weight"),
            }
        ),
    }


def _qwen(
    config: HfConfig, adjust: Callable[[int, LayerSpec], LayerSpec], *, stacked: bool, names: Names, **how: Any
) -> Blueprint:
    """Delta nets in three of four layers; attention with a gate and partial rotation in the fourth."""
    every = config.size("full_attention_interval", 4)
    kinds = layer_kinds(config, lambda number: _LINEAR if (number + 1) % every else FULL, None, frozenset({_LINEAR}))
    if all(kinds(number) == _LINEAR for number in range(config.size("num_hidden_layers"))):
        raise ModelFolderError(f"{config.where} describes a model without attention")
    try:
        delta = DeltaSpec(
            config.size("linear_num_key_heads", 16),
            config.size("linear_num_value_heads", 32),
            config.size("linear_key_head_dim", 128),
            config.size("linear_value_head_dim", 128),
            config.size("linear_conv_kernel_dim", 4, least=2),
        )
    except ValueError as error:
        raise ModelFolderError(f"{config.where}: {error}") from None
    bias = config.flag("attention_bias", default=False)

    def mixed(number: int, layer: LayerSpec) -> LayerSpec:
        if kinds(number) == _LINEAR:
            layer = replace(layer, attention=None, delta=delta)
        return adjust(number, layer)

    config.must("hidden_act", allowed="silu")
    config.must("attn_output_gate", allowed=True)
    for unused in ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        config.ignore(unused)
    return decoder(
        config,
        {**_qwen_names(config.size("head_dim", 256), delta, stacked=stacked), **names},
        context=32768,
        head_dim=256,
        partial=0.25,
        rope_keys=("mrope_section", "mrope_interleaved"),
        attention=partial(AttentionSpec, qk_norm="head", qkv_bias=bias, out_bias=bias, gated=True),
        adjust=mixed,
        ignored=r"mtp\.",
        **how,
    )


def _qwen_experts(config: HfConfig) -> Callable[[int, LayerSpec], LayerSpec]:
    width = config.size("moe_intermediate_size", 512)
    chosen = experts(
        config,
        normalised=config.flag("norm_topk_prob", default=True),
        shared=config.size("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
    return sparse(config, chosen, width)


def _either_way(width: int) -> Names:
    """Experts stacked, gates above ups, or each by itself."""
    block = "model.layers.{n}.mlp"
    names = dict(parts_of_experts(block))
    apart = "layers.{n}.feed_forward.experts.gate_up", "layers.{n}.feed_forward.experts.down"
    gate_up = f"{block}.experts.gate_up_proj"
    names[apart[0]] = tuple(
        Part(gate_up, 2 * width, place * width, width, stacked=True, otherwise=part)
        for place, part in enumerate(names[apart[0]])
    )
    names[apart[1]] = (Part(f"{block}.experts.down_proj", stacked=True, otherwise=names[apart[1]][0]),)
    return names


@family(("Qwen3NextForCausalLM", "qwen3_next"))
def qwen3_next(config: HfConfig) -> Blueprint:
    """Qwen3-Next: experts in every layer."""
    names = _either_way(config.size("moe_intermediate_size", 512))
    return _qwen(config, _qwen_experts(config), stacked=True, names=names, intermediate=5632)


@family(("Qwen3_5ForCausalLM", "qwen3_5_text"))
def qwen3_5(config: HfConfig) -> Blueprint:
    """Qwen3.5, dense."""
    return _qwen(config, lambda _, layer: layer, stacked=False, names={}, intermediate=12288)


@family(("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"))
def qwen3_5_moe(config: HfConfig) -> Blueprint:
    """Qwen3.5 with experts in every layer."""
    names = _either_way(config.size("moe_intermediate_size", 512))
    return _qwen(config, _qwen_experts(config), stacked=False, names=names, intermediate=512)


@family(("Qwen3_5ForConditionalGeneration", "qwen3_5"))
def qwen3_5_with_pictures(config: HfConfig) -> Blueprint:
    """Qwen3.5 with a vision tower, of which the text part is used."""
    return _with_pictures(config, qwen3_5)


@family(("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"))
def qwen3_5_moe_with_pictures(config: HfConfig) -> Blueprint:
    """The same with experts."""
    return _with_pictures(config, qwen3_5_moe)


def _with_pictures(config: HfConfig, read: Callable[[HfConfig], Blueprint]) -> Blueprint:
    for key in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        config.size_or_none(key, absent=None)
    config.nested("vision_config")
    return replace(
        text_part(config, read, tied=False),
        spellings=(("model.language_model.", ""), ("language_model.model.", "language_model.")),
        ignored=r"mtp\.|(model\.)?visual\.",
    )
