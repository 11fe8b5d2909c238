"""Families with routed experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from engine.errors import ModelFolderError
from engine.models.blueprint import FULL, SLIDING, Blueprint, decoder, family, layer_kinds
from engine.models.families.llama import LLAMA_NAMES, QK_NORM_NAMES, qwen_windows
from engine.models.hf_config import HfConfig
from engine.models.names import Names, Part, table
from engine.models.spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec, ModelSpec

__all__ = ["QWEN_EXPERTS", "experts", "parts_of_experts", "sparse"]


def parts_of_experts(block: str, *, shared: str = "shared_expert") -> Names:
    """Tensors of a feed-forward block with experts, each by itself, as most families call them."""
    return table(
        {
            "layers.{n}.feed_forward.router": f"{block}.gate.weight",
            "layers.{n}.feed_forward.experts.gate_up": (
                f"{block}.experts.{{e}}.gate_proj.weight",
                f"{block}.experts.{{e}}.up_proj.weight",
            ),
            "layers.{n}.feed_forward.experts.down": f"{block}.experts.{{e}}.down_proj.weight",
            "layers.{n}.feed_forward.shared.gate_up": (
                f"{block}.{shared}.gate_proj.weight",
                f"{block}.{shared}.up_proj.weight",
            ),
            "layers.{n}.feed_forward.shared.down": f"{block}.{shared}.down_proj.weight",
            "layers.{n}.feed_forward.shared.gate": f"{block}.shared_expert_gate.weight",
        }
    )


QWEN_EXPERTS: Names = parts_of_experts("model.layers.{n}.mlp")


def experts(config: HfConfig, **how: object) -> ExpertsSpec:
    """Numbers of experts and of those chosen, checked against each other."""
    key = next((key for key in ("num_experts", "n_routed_experts") if key in config), "num_local_experts")
    for training in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef"):
        config.ignore(training)
    try:
        return ExpertsSpec(config.size(key), config.size("num_experts_per_tok"), **how)  # type: ignore[arg-type]
    except ValueError as error:
        raise ModelFolderError(f"{config.where}: {error}") from None


@family(("MixtralForCausalLM", "mixtral"))
def mixtral(config: HfConfig) -> Blueprint:
    """Mixtral: Mistral with eight blocks for one."""
    window = config.size_or_none("sliding_window", absent=None)
    kind = FULL if window is None else SLIDING
    names = table(
        {
            "layers.{n}.feed_forward.router": "model.layers.{n}.block_sparse_moe.gate.weight",
            "layers.{n}.feed_forward.experts.gate_up": (
                "model.layers.{n}.block_sparse_moe.experts.{e}.w1.weight",
                "model.layers.{n}.block_sparse_moe.experts.{e}.w3.weight",
            ),
            "layers.{n}.feed_forward.experts.down": "model.layers.{n}.block_sparse_moe.experts.{e}.w2.weight",
        }
    )
    return decoder(
        config,
        {**LLAMA_NAMES, **names},
        context=131072,
        theta=1000000.0,
        epsilon=1e-5,
        kinds=lambda _: kind,
        window=window,
        feed_forward=partial(FeedForwardSpec, experts=experts(config, normalised=True)),
    )


@family(("Qwen2MoeForCausalLM", "qwen2_moe"))
def qwen2_moe(config: HfConfig) -> Blueprint:
    """Qwen1.5-MoE, Qwen2-57B-A14B: a shared block beside the chosen ones, with a gate of its own."""
    kinds, window = qwen_windows(config)
    chosen = experts(
        config,
        normalised=config.flag("norm_topk_prob", default=False),
        shared=config.size("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    return decoder(
        config,
        {**LLAMA_NAMES, **QWEN_EXPERTS},
        context=32768,
        kinds=kinds,
        window=window,
        attention=partial(AttentionSpec, qkv_bias=config.flag("qkv_bias", default=True)),
        adjust=sparse(config, chosen, config.size("moe_intermediate_size", 1408)),
    )


@family(("Qwen3MoeForCausalLM", "qwen3_moe"))
def qwen3_moe(config: HfConfig) -> Blueprint:
    """Qwen3-30B-A3B and its kin."""
    bias = config.flag("attention_bias", default=False)
    kinds, window = qwen_windows(config)
    chosen = experts(config, normalised=config.flag("norm_topk_prob", default=False))
    return decoder(
        config,
        {**LLAMA_NAMES, **QK_NORM_NAMES, **QWEN_EXPERTS},
        context=32768,
        kinds=kinds,
        window=window,
        attention=partial(AttentionSpec, qkv_bias=bias, out_bias=bias, qk_norm="head"),
        adjust=sparse(config, chosen, config.size("moe_intermediate_size", 768)),
    )


def sparse(config: HfConfig, chosen: ExpertsSpec, intermediate: int) -> Callable[[int, LayerSpec], LayerSpec]:
    """Every `decoder_sparse_step`-th layer has experts, but for those of `mlp_only_layers`."""
    step = config.size("decoder_sparse_step", 1)
    dense = set(config.whole_numbers("mlp_only_layers") or ())

    def adjust(number: int, layer: LayerSpec) -> LayerSpec:
        if number in dense or (number + 1) % step:
            return layer
        block = replace(layer.feed_forward, intermediate=intermediate, experts=chosen)
        return replace(layer, feed_forward=block)

    return adjust


@family(("OlmoeForCausalLM", "olmoe"))
def olmoe(config: HfConfig) -> Blueprint:
    """OLMoE: norms of all heads of q, of k, together."""
    bias = config.flag("attention_bias", default=False)
    chosen = experts(config, normalised=config.flag("norm_topk_prob", default=False))
    return decoder(
        config,
        {**LLAMA_NAMES, **QK_NORM_NAMES, **QWEN_EXPERTS},
        context=4096,
        epsilon=1e-5,
        attention=partial(
            AttentionSpec, qkv_bias=bias, out_bias=bias, qk_norm="width", clip=config.number_or_none("clip_qkv")
        ),
        feed_forward=partial(FeedForwardSpec, experts=chosen),
    )


@family(("GraniteMoeForCausalLM", "granitemoe"))
def granite_moe(config: HfConfig) -> Blueprint:
    """Granite 3 MoE: Granite's factors, experts stored together."""
    bias = config.flag("attention_bias", default=False)
    names = table(
        {
            "layers.{n}.feed_forward.router": "model.layers.{n}.block_sparse_moe.router.layer.weight",
            "layers.{n}.feed_forward.experts.gate_up": Part(
                "model.layers.{n}.block_sparse_moe.input_linear.weight", stacked=True
            ),
            "layers.{n}.feed_forward.experts.down": Part(
                "model.layers.{n}.block_sparse_moe.output_linear.weight", stacked=True
            ),
        }
    )
    chosen = experts(config, routing="chosen")
    return decoder(
        config,
        {**LLAMA_NAMES, **names},
        context=2048,
        scale=config.number("attention_multiplier", 1.0),
        attention=partial(AttentionSpec, qkv_bias=bias, out_bias=bias),
        feed_forward=partial(FeedForwardSpec, experts=chosen),
        layer=partial(LayerSpec, residual_scale=config.number("residual_multiplier", 1.0)),
        model=partial(
            ModelSpec,
            embedding_scale=config.number("embedding_multiplier", 1.0),
            logit_scale=1.0 / config.number("logits_scaling", 1.0),
        ),
    )


@family(("GptOssForCausalLM", "gpt_oss"))
def gpt_oss(config: HfConfig) -> Blueprint:
    """gpt-oss: sinks in the softmax, every other layer with a window, gates and ups row by row."""
    config.must("swiglu_limit", allowed=7.0)
    config.must("swiglu_alpha", allowed=1.702)
    config.size_or_none("experts_per_token", absent=None)
    config.size_or_none("initial_context_length", absent=None)
    window = config.size_or_none("sliding_window", absent=128)
    kinds = layer_kinds(config, lambda layer: FULL if layer % 2 else SLIDING, window)
    bias = config.flag("attention_bias", default=True)
    config.must("hidden_act", allowed="silu")
    block = "model.layers.{n}.mlp.experts"

    def gate_up(end: str, *, transposed: bool) -> tuple[Part, Part]:
        return (
            Part(f"{block}.{end}", 2, 0, 1, transposed=transposed, stacked=True),
            Part(f"{block}.{end}", 2, 1, 1, transposed=transposed, stacked=True),
        )

    packed, plain = gate_up("gate_up_proj_blocks", transposed=False), gate_up("gate_up_proj", transposed=True)
    names = table(
        {
            "layers.{n}.attention.sinks": "model.layers.{n}.self_attn.sinks",
            "layers.{n}.feed_forward.router": "model.layers.{n}.mlp.router.weight",
            "layers.{n}.feed_forward.router.bias": "model.layers.{n}.mlp.router.bias",
            "layers.{n}.feed_forward.experts.gate_up": tuple(
                replace(first, otherwise=second) for first, second in zip(packed, plain, strict=True)
            ),
            "layers.{n}.feed_forward.experts.gate_up.bias": gate_up("gate_up_proj_bias", transposed=False),
            "layers.{n}.feed_forward.experts.down": Part(
                f"{block}.down_proj_blocks",
                stacked=True,
                otherwise=Part(f"{block}.down_proj", transposed=True, stacked=True),
            ),
            "layers.{n}.feed_forward.experts.down.bias": Part(f"{block}.down_proj_bias", stacked=True),
        }
    )
    chosen = experts(config, routing="chosen", router_bias=True)
    return decoder(
        config,
        {**LLAMA_NAMES, **names},
        context=131072,
        head_dim=64,
        theta=150000.0,
        epsilon=1e-5,
        kinds=kinds,
        window=window,
        attention=partial(AttentionSpec, qkv_bias=bias, out_bias=bias, sinks=True),
        feed_forward=lambda intermediate, activation: FeedForwardSpec(  # noqa: ARG005 - its own activation
            intermediate, "swiglu_clamped", bias=True, experts=chosen
        ),
    )
