"""Gemma 1 to 4: embeddings scaled, soft caps, windows; up to the third, norm weights are stored less 1."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from engine.errors import ModelFolderError, UnsupportedModelError
from engine.models.blueprint import FULL, SLIDING, Blueprint, decoder, family, layer_kinds, text_part
from engine.models.families.llama import LLAMA_NAMES
from engine.models.hf_config import HfConfig, shown
from engine.models.names import Names, Part, table
from engine.models.spec import AttentionSpec, LayerSpec, ModelSpec

__all__: list[str] = []


def _norm(name: str) -> Part:
    return Part(name, plus=1.0)


_GEMMA_NAMES: Names = {
    **LLAMA_NAMES,
    **table(
        {
            "layers.{n}.attention.norm": _norm("model.layers.{n}.input_layernorm.weight"),
            "layers.{n}.feed_forward.norm": _norm("model.layers.{n}.post_attention_layernorm.weight"),
            "norm": _norm("model.norm.weight"),
        }
    ),
}
_GEMMA2_NAMES: Names = {
    **_GEMMA_NAMES,
    **table(
        {
            "layers.{n}.attention.post_norm": _norm("model.layers.{n}.post_attention_layernorm.weight"),
            "layers.{n}.feed_forward.norm": _norm("model.layers.{n}.pre_feedforward_layernorm.weight"),
            "layers.{n}.feed_forward.post_norm": _norm("model.layers.{n}.post_feedforward_layernorm.weight"),
        }
    ),
}
_GEMMA3_NAMES: Names = {
    **_GEMMA2_NAMES,
    **table(
        {
            "layers.{n}.attention.q_norm": _norm("model.layers.{n}.self_attn.q_norm.weight"),
            "layers.{n}.attention.k_norm": _norm("model.layers.{n}.self_attn.k_norm.weight"),
        }
    ),
}

# Sizes that the text part of a published folder leaves out.
_USUAL_SIZES = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}


def _prepare(config: HfConfig) -> partial[ModelSpec]:
    """What all three share. `hidden_activation` is what counts where both are written."""
    config.must("use_bidirectional_attention", allowed=False)
    if "hidden_activation" in config:
        config.text("hidden_act")
        config.spell(hidden_act="hidden_activation")
    elif config.values.get("hidden_act") == "gelu":
        # The first configurations wrote this and meant the other, as every engine knows.
        config.text("hidden_act")
        config.spell(hidden_act="hidden_activation")
    return partial(
        ModelSpec,
        embedding_scale=config.size("hidden_size") ** 0.5,
        logit_softcap=config.number_or_none("final_logit_softcapping"),
    )


@family(("GemmaForCausalLM", "gemma"))
def gemma(config: HfConfig) -> Blueprint:
    """Gemma 1."""
    model = _prepare(config)
    bias = config.flag("attention_bias", default=False)
    return decoder(
        config,
        _GEMMA_NAMES,
        context=8192,
        head_dim=256,
        act="gelu_pytorch_tanh",
        tied=True,
        attention=partial(AttentionSpec, qkv_bias=bias, out_bias=bias),
        model=model,
    )


@family(("Gemma2ForCausalLM", "gemma2"))
def gemma2(config: HfConfig) -> Blueprint:
    """Gemma 2: norms on both sides of a block, a window in every other layer, soft caps."""
    return _gemma2(config, _GEMMA2_NAMES, every=2, context=8192)


@family(("Gemma3ForCausalLM", "gemma3_text"))
def gemma3(config: HfConfig) -> Blueprint:
    """Gemma 3: norms on heads of q and k, five of six layers with a window and a rotary base of their own."""
    return _gemma2(
        config,
        _GEMMA3_NAMES,
        every=config.size("sliding_window_pattern", config.size("_sliding_window_pattern", 6)),
        context=131072,
        theta=1000000.0,
        sliding_theta=config.number("rope_local_base_freq", 10000.0),
    )


@family(("Gemma3ForConditionalGeneration", "gemma3"))
def gemma3_with_pictures(config: HfConfig) -> Blueprint:
    """Gemma 3 with a vision tower, of which the text part is used."""
    for key in ("boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image"):
        config.size_or_none(key, absent=None)
    config.nested("vision_config")
    return replace(
        text_part(config, gemma3, tied=True, usual=_USUAL_SIZES),
        spellings=(("language_model.model.", "language_model."), ("model.language_model.", "")),
        ignored=r"(model\.)?(vision_tower|multi_modal_projector)\.",
    )


def _gemma2(
    config: HfConfig,
    names: Names,
    *,
    every: int,
    context: int,
    theta: float = 10000.0,
    sliding_theta: float | None = None,
) -> Blueprint:
    model = _prepare(config)
    bias = config.flag("attention_bias", default=False)
    window = config.size_or_none("sliding_window", absent=4096)
    kinds = layer_kinds(config, lambda layer: SLIDING if (layer + 1) % every else FULL, window)
    attention = partial(
        AttentionSpec,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head" if names is _GEMMA3_NAMES else None,
        softcap=config.number_or_none("attn_logit_softcapping"),
    )
    return decoder(
        config,
        names,
        context=context,
        head_dim=256,
        theta=theta,
        sliding_theta=sliding_theta,
        kinds=kinds,
        window=window,
        scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        act="gelu_pytorch_tanh",
        tied=True,
        attention=attention,
        layer=partial(LayerSpec, norms="both"),
        model=model,
    )


_LAYER = "model.layers.{n}"
_VALUES = "model.layers.{n}.self_attn.v_proj"
_KEYS = "model.layers.{n}.self_attn.k_proj"
_GEMMA4_NAMES: Names = {
    **LLAMA_NAMES,
    **table(
        {
            "layer_inputs": "model.embed_tokens_per_layer.weight",
            "layer_inputs.of_embedding": "model.per_layer_model_projection.weight",
            "layer_inputs.norm": "model.per_layer_projection_norm.weight",
            # Where there is no matrix for values, the keys before their norm are the values.
            "layers.{n}.attention.qkv": (
                f"{_LAYER}.self_attn.q_proj.weight",
                f"{_KEYS}.weight",
                Part(f"{_VALUES}.weight", otherwise=Part(f"{_KEYS}.weight")),
            ),
            "layers.{n}.attention.q": f"{_LAYER}.self_attn.q_proj.weight",
            "layers.{n}.attention.q_norm": f"{_LAYER}.self_attn.q_norm.weight",
            "layers.{n}.attention.k_norm": f"{_LAYER}.self_attn.k_norm.weight",
            "layers.{n}.attention.post_norm": f"{_LAYER}.post_attention_layernorm.weight",
            "layers.{n}.feed_forward.norm": f"{_LAYER}.pre_feedforward_layernorm.weight",
            "layers.{n}.feed_forward.post_norm": f"{_LAYER}.post_feedforward_layernorm.weight",
            "layers.{n}.input.gate": f"{_LAYER}.per_layer_input_gate.weight",
            "layers.{n}.input.out": f"{_LAYER}.per_layer_projection.weight",
            "layers.{n}.input.post_norm": f"{_LAYER}.post_per_layer_input_norm.weight",
            "layers.{n}.scale": f"{_LAYER}.layer_scalar",
        }
    ),
}


@family(("Gemma4ForCausalLM", "gemma4_text"))
def gemma4(config: HfConfig) -> Blueprint:
    """Gemma 4 without experts: wider heads where everything is seen, whose keys and values late layers share."""
    if config.flag("enable_moe_block", default=False):
        raise UnsupportedModelError(
            f"enable_moe_block = true ({config.where}) is not supported: experts beside a block for every token"
        )
    for unused in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        config.ignore(unused)
    toward = config.text("use_bidirectional_attention")
    if toward not in {None, "vision"}:  # parts of pictures see each other, but there are none
        raise UnsupportedModelError(f"use_bidirectional_attention = {shown(toward)} ({config.where}) is not supported")
    config.must("attention_bias", allowed=False)
    config.flag("attention_k_eq_v", default=False)
    config.spell(hidden_act="hidden_activation")
    count, window = config.size("num_hidden_layers"), config.size("sliding_window", 512)
    wanted = layer_kinds(config, lambda number: SLIDING if (number + 1) % 6 else FULL, window)
    kinds = [FULL if number + 1 == count else wanted(number) for number in range(count)]
    wide, wide_heads = (
        config.size("global_head_dim", 512),
        config.size_or_none("num_global_key_value_heads", absent=None),
    )
    if not config.values.get("attention_k_eq_v"):
        wide_heads = None
    # Written again by transformers, a configuration says the same layer by layer.
    by_layer = config.nested("per_layer_config")
    for number in [number for number in range(count) if kinds[number] == FULL]:
        own = None if by_layer is None else by_layer.nested(str(number))
        if own is not None:
            wide, wide_heads = own.size("head_dim", wide), own.size_or_none("num_key_value_heads", absent=wide_heads)
    shared = config.size("num_kv_shared_layers", 0, least=0)
    sources = {kind: number for number, kind in enumerate(kinds[: count - shared])}
    if shared and set(kinds) - sources.keys():
        raise ModelFolderError(f"num_kv_shared_layers = {shared} ({config.where}) leaves layers without keys")
    doubled = config.flag("use_double_wide_mlp", default=False)
    inputs = config.size("hidden_size_per_layer_input", 256, least=0)
    if inputs:
        config.must("vocab_size_per_layer_input", allowed=config.size("vocab_size"))
    else:
        config.ignore("vocab_size_per_layer_input")

    def adjust(number: int, layer: LayerSpec) -> LayerSpec:
        changes: dict[str, Any] = {}
        assert layer.attention is not None
        rope = layer.attention.rope
        if kinds[number] == FULL and rope is not None:
            changes = {"head_dim": wide, "rope": replace(rope, dim=wide)}
            changes |= {} if wide_heads is None else {"kv_heads": wide_heads}
        if number >= count - shared:
            changes |= {"keys_of": sources[kinds[number]], "value_norm": False}
            if doubled:
                block = replace(layer.feed_forward, intermediate=2 * layer.feed_forward.intermediate)
                layer = replace(layer, feed_forward=block)
        return layer.attending(**changes)

    late = "|".join(map(str, range(count - shared, count)))
    return decoder(
        config,
        _GEMMA4_NAMES,
        context=131072,
        head_dim=256,
        kinds=lambda number: kinds[number],
        window=window,
        scale=1.0,
        act="gelu_pytorch_tanh",
        tied=True,
        attention=partial(AttentionSpec, qk_norm="head", value_norm=True),
        layer=partial(LayerSpec, norms="both", scaled=True),
        model=partial(
            ModelSpec,
            embedding_scale=config.size("hidden_size") ** 0.5,
            logit_softcap=config.number_or_none("final_logit_softcapping"),
            layer_inputs=inputs or None,
        ),
        adjust=adjust,
        ignored=rf"(.+\.)?layers\.({late})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\." if shared else "",
    )


@family(("Gemma4ForConditionalGeneration", "gemma4"))
def gemma4_with_pictures(config: HfConfig) -> Blueprint:
    """Gemma 4 with towers for pictures and sound, of which the text part is used."""
    for key in config.values:
        if key.endswith(("_token_id", "_token_index")) or key == "vision_soft_tokens_per_image":
            config.ignore(key)
    for tower in ("vision_config", "audio_config"):
        config.nested(tower)
    blueprint = text_part(config, gemma4, tied=True, also="sees and hears")
    towers = r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio|multi_modal_projector)\."
    return replace(
        blueprint,
        spellings=(("model.language_model.", ""), ("language_model.model.", "language_model.")),
        ignored="|".join(part for part in (towers, blueprint.ignored) if part),
    )
