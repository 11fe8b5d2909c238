"""Families with latent attention: DeepSeek-V2, V3 and what took their shape, MiniCPM3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from engine.errors import ModelFolderError, UnsupportedModelError
from engine.models.blueprint import Blueprint, decoder, family
from engine.models.families.experts import experts, parts_of_experts
from engine.models.families.llama import LLAMA_NAMES
from engine.models.hf_config import HfConfig, shown
from engine.models.names import Names, table
from engine.models.rope import logarithm
from engine.models.spec import AttentionSpec, ExpertsSpec, LatentSpec, LayerSpec, ModelSpec

__all__: list[str] = []

_EXPERTS: Names = {
    **parts_of_experts("model.layers.{n}.mlp", shared="shared_experts"),
    **table({"layers.{n}.feed_forward.router.correction": "model.layers.{n}.mlp.gate.e_score_correction_bias"}),
}


def _names(*, inner_queries: bool) -> Names:
    """inner_queries: q is made of an inner vector."""
    layer = "model.layers.{n}.self_attn"
    queries = f"{layer}.q_a_proj.weight" if inner_queries else f"{layer}.q_proj.weight"
    return {
        **LLAMA_NAMES,
        **table(
            {
                "layers.{n}.attention.down": (queries, f"{layer}.kv_a_proj_with_mqa.weight"),
                "layers.{n}.attention.query_norm": f"{layer}.q_a_layernorm.weight",
                "layers.{n}.attention.query_up": f"{layer}.q_b_proj.weight",
                "layers.{n}.attention.key_norm": f"{layer}.kv_a_layernorm.weight",
                "layers.{n}.attention.key_up": f"{layer}.kv_b_proj.weight",
            }
        ),
    }


def _decoder(
    config: HfConfig,
    names: Names,
    *,
    query_rank: int | None = 1536,
    key_rank: int = 512,
    plain: int = 128,
    rotary: int = 64,
    values: int = 128,
    **how: Any,
) -> Blueprint:
    """`decoder` with latent attention. The numbers are those of a configuration that does not say them."""
    heads = config.size("num_attention_heads")
    rotary, plain = config.size("qk_rope_head_dim", rotary), config.size("qk_nope_head_dim", plain)
    rank = config.size_or_none("q_lora_rank", absent=query_rank)
    values = config.size("v_head_dim", values)
    latent = LatentSpec(config.size("kv_lora_rank", key_rank), plain, values, rank)
    config.must("attention_bias", allowed=False)
    for implied in ("num_key_value_heads", "qk_head_dim", "head_dim"):
        config.ignore(implied)
    config.spell(head_dim="qk_rope_head_dim")  # the part of a head that rotary positions are made for

    def attention(**given: Any) -> AttentionSpec:
        scale, scaling = (plain + rotary) ** -0.5, given["rope"].scaling
        if scaling is not None and scaling.mscale_all_dim is not None and scaling.factor > 1:
            scale *= (0.1 * scaling.mscale_all_dim * logarithm(scaling.factor) + 1) ** 2
        size = -(-max(plain + rotary, values) // 16) * 16
        return AttentionSpec(**given | {"head_dim": size, "scale": scale}, latent=latent)

    config.notices.append("keys and values are kept for every head, so that a long context takes much memory")
    names = {**_names(inner_queries=rank is not None), **names}
    return decoder(config, names, head_dim=rotary, kv_heads=heads, attention=attention, **how)


def _sparse(
    config: HfConfig, chosen: ExpertsSpec, dense: Callable[[int], bool]
) -> Callable[[int, LayerSpec], LayerSpec]:
    intermediate = config.size("moe_intermediate_size")

    def adjust(number: int, layer: LayerSpec) -> LayerSpec:
        if dense(number):
            return layer
        return replace(layer, feed_forward=replace(layer.feed_forward, intermediate=intermediate, experts=chosen))

    return adjust


def _shared(config: HfConfig, count: int) -> int | None:
    """Width of the blocks that every token goes through, together; None for none."""
    count = config.size("n_shared_experts", count, least=0)
    return count * config.size("moe_intermediate_size") if count else None


def _ignore_training(config: HfConfig) -> None:
    config.must("moe_layer_freq", allowed=1)
    for key in ("aux_loss_alpha", "ep_size", "seq_aux"):
        config.ignore(key)


@family(("DeepseekV2ForCausalLM", "deepseek_v2"))
def deepseek_v2(config: HfConfig) -> Blueprint:
    """DeepSeek-V2 and V2-Lite."""
    _ignore_training(config)
    config.must("norm_topk_prob", allowed=False)
    config.must("scoring_func", allowed="softmax")
    config.must("mlp_bias", allowed=False)
    method = config.text("topk_method", "greedy")
    if method not in {"greedy", "group_limited_greedy"}:
        raise UnsupportedModelError(
            f"topk_method = {shown(method)} ({config.where}) is not supported; greedy and group_limited_greedy are"
        )
    groups, chosen_groups = config.size_or_none("n_group", absent=None), config.size_or_none("topk_group", absent=None)
    grouped = method == "group_limited_greedy"
    chosen = experts(
        config,
        scale=config.number("routed_scaling_factor", 1.0),
        groups=groups or 1 if grouped else 1,
        chosen_groups=chosen_groups or 1 if grouped else 1,
        shared=_shared(config, 2),
    )
    first = config.size("first_k_dense_replace", 0, least=0)
    adjust = _sparse(config, chosen, lambda number: number < first)
    return _decoder(config, _EXPERTS, context=2048, interleaved=True, adjust=adjust)


@family(("DeepseekV3ForCausalLM", "deepseek_v3"))
def deepseek_v3(config: HfConfig) -> Blueprint:
    """DeepSeek-V3 and R1, Moonlight: experts by sigmoid, with a correction that counts for the choice only."""
    first = config.size("first_k_dense_replace", 3, least=0)
    return _deepseek_v3(config, lambda number: number < first, groups=8, chosen_groups=4, scale=2.5)


@family(("Glm4MoeLiteForCausalLM", "glm4_moe_lite"))
def glm4_moe_lite(config: HfConfig) -> Blueprint:
    """GLM-4.7-Flash: DeepSeek-V3 with other sizes."""
    kinds = config.texts("mlp_layer_types")
    first = config.size("first_k_dense_replace", 1, least=0)
    if kinds is not None and (set(kinds) - {"dense", "sparse"} or len(kinds) < config.size("num_hidden_layers")):
        raise ModelFolderError(f"mlp_layer_types ({config.where}) is not dense or sparse for every layer")
    return _deepseek_v3(
        config,
        lambda number: number < first if kinds is None else kinds[number] == "dense",
        groups=1,
        chosen_groups=1,
        scale=1.8,
        query_rank=768,
        plain=192,
        values=256,
        context=202752,
        partial=1.0,
        epsilon=1e-5,
    )


def _deepseek_v3(
    config: HfConfig,
    dense: Callable[[int], bool],
    *,
    groups: int,
    chosen_groups: int,
    scale: float,
    context: int = 4096,
    **how: Any,
) -> Blueprint:
    _ignore_training(config)
    config.must("topk_method", allowed="noaux_tc")
    config.must("scoring_func", allowed="sigmoid")
    chosen = experts(
        config,
        routing="sigmoid",
        correction=True,
        normalised=config.flag("norm_topk_prob", default=True),
        scale=config.number("routed_scaling_factor", scale),
        groups=config.size("n_group", groups),
        chosen_groups=config.size("topk_group", chosen_groups),
        group_by="two",
        shared=_shared(config, 1),
    )
    interleaved = config.flag("rope_interleave", default=True)
    adjust = _sparse(config, chosen, dense)
    return _decoder(config, _EXPERTS, context=context, interleaved=interleaved, adjust=adjust, **how)


@family(("MiniCPM3ForCausalLM", "minicpm3"))
def minicpm3(config: HfConfig) -> Blueprint:
    """MiniCPM3: MiniCPM with latent attention."""
    layers, hidden = config.size("num_hidden_layers"), config.size("hidden_size")
    config.must("mlp_bias", allowed=False)
    return _decoder(
        config,
        {},
        query_rank=768,
        key_rank=256,
        plain=64,
        rotary=32,
        values=max(1, hidden // config.size("num_attention_heads")),
        context=32768,
        epsilon=1e-5,
        tied=True,
        layer=partial(LayerSpec, residual_scale=config.number("scale_depth", 1.4) / layers**0.5),
        model=partial(
            ModelSpec,
            embedding_scale=config.number("scale_emb", 12.0),
            logit_scale=config.number("dim_model_base", 256.0) / hidden,
        ),
    )
