"""Gemma 1 to 3: norm weights stored less 1, embeddings scaled, soft caps, windows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from engine.errors import ModelFolderError
from engine.models.blueprint import FULL, SLIDING, Blueprint, decoder, family, layer_kinds
from engine.models.families.llama import LLAMA_NAMES
from engine.models.hf_config import HARMLESS, HfConfig
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
    text = config.nested("text_config")
    if text is None:
        raise ModelFolderError(f"{config.where} does not say text_config")
    # What is written beside text_config holds for the vision tower and its tokens.
    for key in ("boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image"):
        config.size_or_none(key, absent=None)
    config.nested("vision_config")
    tied = config.flag("tie_word_embeddings", default=True)
    text = HfConfig({**_USUAL_SIZES, "tie_word_embeddings": tied, **text.values}, text.where)
    text.architecture = config.architecture
    blueprint = gemma3(text)
    text.close(config.architecture, HARMLESS)
    config.notices.extend(["of the model, which also sees pictures, the text part is used", *text.notices])
    return replace(
        blueprint,
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
