"""Families with layer norms: Cohere, and those from GPT-2 to StarCoder2 whose feed-forward has no gate."""

from __future__ import annotations

from functools import partial
from typing import Any

from engine.models.blueprint import FULL, SLIDING, Blueprint, decoder, family, layer_kinds
from engine.models.families.llama import LLAMA_NAMES
from engine.models.hf_config import HfConfig
from engine.models.names import Names, Part, table
from engine.models.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, QkNorm

__all__: list[str] = []

_NORM_BIASES: Names = table(
    {
        "layers.{n}.attention.norm.bias": "model.layers.{n}.input_layernorm.bias",
        "layers.{n}.feed_forward.norm.bias": "model.layers.{n}.post_attention_layernorm.bias",
        "norm.bias": "model.norm.bias",
    }
)
_BODIES = (("transformer.", ""), ("", ""))


@family(("CohereForCausalLM", "cohere"))
def cohere(config: HfConfig) -> Blueprint:
    """Command R: attention and feed-forward read the same norm of x."""
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    normed = config.flag("use_qk_norm", default=False)
    names = table(
        {
            "layers.{n}.attention.q_norm": Part("model.layers.{n}.self_attn.q_norm.weight", flat=heads),
            "layers.{n}.attention.k_norm": Part("model.layers.{n}.self_attn.k_norm.weight", flat=kv_heads),
        }
    )
    return _cohere(config, names, "each" if normed else None)


@family(("Cohere2ForCausalLM", "cohere2"))
def cohere2(config: HfConfig) -> Blueprint:
    """Command R7B, Command A: three of four layers have a window and positions, the fourth has neither."""
    window = config.size_or_none("sliding_window", absent=4096)
    every = config.size("sliding_window_pattern", config.size("_sliding_window_pattern", 4))
    config.text("order_of_interleaved_layers")
    config.must("rotary_pct", allowed=1.0)
    config.must("position_embedding_type", allowed="rope_gptj")
    config.must("use_gated_activation", allowed=True)
    config.must("use_parallel_block", allowed=True)
    config.must("use_parallel_embedding", allowed=False)
    config.must("use_embedding_sharing", allowed=True)
    kinds = layer_kinds(config, lambda layer: SLIDING if (layer + 1) % every else FULL, window)

    def adjust(number: int, layer: LayerSpec) -> LayerSpec:
        return layer if kinds(number) == SLIDING else layer.attending(rope=None)

    return _cohere(config, {}, None, kinds=kinds, window=window, adjust=adjust)


def _cohere(config: HfConfig, names: Names, qk_norm: QkNorm | None, **more: Any) -> Blueprint:
    config.spell(rms_norm_eps="layer_norm_eps")
    bias = config.flag("attention_bias", default=False)
    return decoder(
        config,
        {**LLAMA_NAMES, **names},
        context=8192,
        theta=500000.0,
        interleaved=True,
        norm="layer",
        epsilon=1e-5,
        tied=True,
        attention=partial(AttentionSpec, qkv_bias=bias, out_bias=bias, qk_norm=qk_norm),
        layer=partial(LayerSpec, parallel=True, shared_norm=True),
        model=partial(ModelSpec, logit_scale=config.number("logit_scale", 0.0625)),
        **more,
    )


@family(("StableLmForCausalLM", "stablelm"), ("StableLMEpochForCausalLM", "stablelm_epoch"))
def stablelm(config: HfConfig) -> Blueprint:
    """StableLM 2: Llama with layer norms; the 12B has parallel blocks and norms on every head."""
    config.spell(rms_norm_eps="norm_eps" if "norm_eps" in config else "layer_norm_eps")
    if "rope_pct" in config:
        config.spell(partial_rotary_factor="rope_pct")
    bias, parallel = config.flag("use_qkv_bias", default=False), config.flag("use_parallel_residual", default=False)
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    norms = {
        "layers.{n}.attention.q_norm": _heads("q", heads),
        "layers.{n}.attention.k_norm": _heads("k", kv_heads),
    }
    normed = config.flag("qk_layernorm", default=False)
    return decoder(
        config,
        {**LLAMA_NAMES, **_NORM_BIASES, **table(norms)},
        context=4096,
        partial=0.25,
        norm="layer",
        epsilon=1e-5,
        attention=partial(AttentionSpec, qkv_bias=bias, qk_norm="each" if normed else None),
        layer=partial(LayerSpec, parallel=parallel, shared_norm=parallel),
        model=partial(ModelSpec, norm_bias=True),
    )


def _heads(letter: str, count: int) -> tuple[str, ...]:
    return tuple(f"model.layers.{{n}}.self_attn.{letter}_layernorm.norms.{head}.weight" for head in range(count))


@family(("Starcoder2ForCausalLM", "starcoder2"))
def starcoder2(config: HfConfig) -> Blueprint:
    """StarCoder2."""
    config.spell(rms_norm_eps="norm_epsilon")
    config.must("norm_type", allowed="layer_norm")
    config.must("mlp_type", allowed="default")
    bias = config.flag("use_bias", default=True)
    window = config.size_or_none("sliding_window", absent=None)
    kind = FULL if window is None else SLIDING
    names = table(
        {
            "layers.{n}.feed_forward.up": "model.layers.{n}.mlp.c_fc.weight",
            "layers.{n}.feed_forward.up.bias": "model.layers.{n}.mlp.c_fc.bias",
            "layers.{n}.feed_forward.down": "model.layers.{n}.mlp.c_proj.weight",
            "layers.{n}.feed_forward.down.bias": "model.layers.{n}.mlp.c_proj.bias",
        }
    )
    return decoder(
        config,
        {**LLAMA_NAMES, **_NORM_BIASES, **names},
        context=4096,
        act="gelu_pytorch_tanh",
        norm="layer",
        epsilon=1e-5,
        tied=True,
        kinds=lambda _: kind,
        window=window,
        attention=partial(AttentionSpec, qkv_bias=bias, out_bias=bias),
        feed_forward=partial(FeedForwardSpec, gated=False, bias=bias),
        model=partial(ModelSpec, norm_bias=True),
    )


@family(("PhiForCausalLM", "phi"))
def phi(config: HfConfig) -> Blueprint:
    """Phi-1, Phi-1.5, Phi-2: attention and feed-forward read the same norm of x."""
    config.spell(rms_norm_eps="layer_norm_eps")
    config.must("qk_layernorm", allowed=False)
    names = table(
        {
            "layers.{n}.attention.out": "model.layers.{n}.self_attn.dense.weight",
            "layers.{n}.attention.out.bias": "model.layers.{n}.self_attn.dense.bias",
            "layers.{n}.feed_forward.up": "model.layers.{n}.mlp.fc1.weight",
            "layers.{n}.feed_forward.up.bias": "model.layers.{n}.mlp.fc1.bias",
            "layers.{n}.feed_forward.down": "model.layers.{n}.mlp.fc2.weight",
            "layers.{n}.feed_forward.down.bias": "model.layers.{n}.mlp.fc2.bias",
            "norm": "model.final_layernorm.weight",
            "norm.bias": "model.final_layernorm.bias",
            "head.bias": "lm_head.bias",
        }
    )
    return decoder(
        config,
        {**LLAMA_NAMES, **_NORM_BIASES, **names},
        context=2048,
        partial=0.5,
        act="gelu_new",
        norm="layer",
        epsilon=1e-5,
        attention=partial(AttentionSpec, qkv_bias=True, out_bias=True),
        feed_forward=partial(FeedForwardSpec, gated=False, bias=True),
        layer=partial(LayerSpec, parallel=True, shared_norm=True),
        model=partial(ModelSpec, norm_bias=True, head_bias=True),
    )


def _fused(stored: str, repeats: int, size: int, end: str) -> tuple[Part, Part, Part]:
    """q, k and v that are stored by key/value head: its query heads, then its key, then its value."""
    run = (repeats + 2) * size
    name = f"{stored}.{end}"
    return (
        Part(name, run, 0, repeats * size),
        Part(name, run, repeats * size, size),
        Part(name, run, (repeats + 1) * size, size),
    )


@family(("GPTNeoXForCausalLM", "gpt_neox"))
def gpt_neox(config: HfConfig) -> Blueprint:
    """GPT-NeoX, Pythia."""
    config.spell(
        rms_norm_eps="layer_norm_eps",
        partial_rotary_factor="rotary_pct",
        rope_theta="rotary_emb_base",
    )
    bias, parallel = config.flag("attention_bias", default=True), config.flag("use_parallel_residual", default=True)
    size = max(1, config.size("hidden_size") // config.size("num_attention_heads"))
    stored = "gpt_neox.layers.{n}.attention.query_key_value"
    names = table(
        {
            "embedding": "gpt_neox.embed_in.weight",
            "layers.{n}.attention.norm": "gpt_neox.layers.{n}.input_layernorm.weight",
            "layers.{n}.attention.norm.bias": "gpt_neox.layers.{n}.input_layernorm.bias",
            "layers.{n}.attention.qkv": _fused(stored, 1, size, "weight"),
            "layers.{n}.attention.qkv.bias": _fused(stored, 1, size, "bias"),
            "layers.{n}.attention.out": "gpt_neox.layers.{n}.attention.dense.weight",
            "layers.{n}.attention.out.bias": "gpt_neox.layers.{n}.attention.dense.bias",
            "layers.{n}.feed_forward.norm": "gpt_neox.layers.{n}.post_attention_layernorm.weight",
            "layers.{n}.feed_forward.norm.bias": "gpt_neox.layers.{n}.post_attention_layernorm.bias",
            "layers.{n}.feed_forward.up": "gpt_neox.layers.{n}.mlp.dense_h_to_4h.weight",
            "layers.{n}.feed_forward.up.bias": "gpt_neox.layers.{n}.mlp.dense_h_to_4h.bias",
            "layers.{n}.feed_forward.down": "gpt_neox.layers.{n}.mlp.dense_4h_to_h.weight",
            "layers.{n}.feed_forward.down.bias": "gpt_neox.layers.{n}.mlp.dense_4h_to_h.bias",
            "norm": "gpt_neox.final_layer_norm.weight",
            "norm.bias": "gpt_neox.final_layer_norm.bias",
            "head": "embed_out.weight",
        }
    )
    return decoder(
        config,
        names,
        context=2048,
        partial=0.25,
        act="gelu",
        norm="layer",
        epsilon=1e-5,
        attention=partial(AttentionSpec, qkv_bias=bias, out_bias=bias),
        feed_forward=partial(FeedForwardSpec, gated=False, bias=True),
        layer=partial(LayerSpec, parallel=parallel),
        model=partial(ModelSpec, norm_bias=True),
    )


@family(("GPT2LMHeadModel", "gpt2"))
def gpt2(config: HfConfig) -> Blueprint:
    """GPT-2: a vector for each position, matrices stored the other way round."""
    config.spell(
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
        hidden_act="activation_function",
        rms_norm_eps="layer_norm_epsilon",
        intermediate_size="n_inner",
    )
    config.must("scale_attn_weights", allowed=True)
    config.must("scale_attn_by_inverse_layer_idx", allowed=False)
    config.flag("reorder_and_upcast_attn", default=False)
    config.size_or_none("n_ctx", absent=None)
    names = table(
        {
            "embedding": "model.wte.weight",
            "positions": "model.wpe.weight",
            "layers.{n}.attention.norm": "model.h.{n}.ln_1.weight",
            "layers.{n}.attention.norm.bias": "model.h.{n}.ln_1.bias",
            "layers.{n}.attention.qkv": Part("model.h.{n}.attn.c_attn.weight", transposed=True),
            "layers.{n}.attention.qkv.bias": "model.h.{n}.attn.c_attn.bias",
            "layers.{n}.attention.out": Part("model.h.{n}.attn.c_proj.weight", transposed=True),
            "layers.{n}.attention.out.bias": "model.h.{n}.attn.c_proj.bias",
            "layers.{n}.feed_forward.norm": "model.h.{n}.ln_2.weight",
            "layers.{n}.feed_forward.norm.bias": "model.h.{n}.ln_2.bias",
            "layers.{n}.feed_forward.up": Part("model.h.{n}.mlp.c_fc.weight", transposed=True),
            "layers.{n}.feed_forward.up.bias": "model.h.{n}.mlp.c_fc.bias",
            "layers.{n}.feed_forward.down": Part("model.h.{n}.mlp.c_proj.weight", transposed=True),
            "layers.{n}.feed_forward.down.bias": "model.h.{n}.mlp.c_proj.bias",
            "norm": "model.ln_f.weight",
            "norm.bias": "model.ln_f.bias",
            "head": "lm_head.weight",
        }
    )
    return decoder(
        config,
        names,
        context=1024,
        intermediate=4 * config.size("hidden_size"),
        rotates=False,
        act="gelu_new",
        norm="layer",
        epsilon=1e-5,
        tied=True,
        attention=partial(AttentionSpec, qkv_bias=True, out_bias=True),
        feed_forward=partial(FeedForwardSpec, gated=False, bias=True),
        model=partial(ModelSpec, norm_bias=True, learned_positions=True),
        spellings=_BODIES,
        ignored=r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias$",
    )


@family(("FalconForCausalLM", "falcon"))
def falcon(config: HfConfig) -> Blueprint:
    """Falcon 7B and 40B: parallel blocks, one key/value head or a few."""
    config.must("alibi", allowed=False)
    config.must("parallel_attn", allowed=True)
    config.spell(
        rms_norm_eps="layer_norm_epsilon",
        hidden_act="activation",
        num_key_value_heads="num_kv_heads",
        intermediate_size="ffn_hidden_size",
    )
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    many = config.flag("new_decoder_architecture", default=False)
    multi_query = config.flag("multi_query", default=True)
    kv_heads = config.size("num_key_value_heads", heads)
    if not many:
        kv_heads = 1 if multi_query else heads
    norms = config.size("num_ln_in_parallel_attn", 2 if many else 1)
    shared = not many or norms == 1
    bias = config.flag("bias", default=False)
    size = max(1, hidden // heads)
    layer, stored = "model.h.{n}", "model.h.{n}.self_attention.query_key_value"
    first, second = ("input_layernorm", "") if shared else ("ln_attn", "ln_mlp")
    repeats = max(1, heads // kv_heads)
    names = table(
        {
            "embedding": "model.word_embeddings.weight",
            "layers.{n}.attention.norm": f"{layer}.{first}.weight",
            "layers.{n}.attention.norm.bias": f"{layer}.{first}.bias",
            "layers.{n}.attention.qkv": _fused(stored, repeats, size, "weight"),
            "layers.{n}.attention.qkv.bias": _fused(stored, repeats, size, "bias"),
            "layers.{n}.attention.out": f"{layer}.self_attention.dense.weight",
            "layers.{n}.attention.out.bias": f"{layer}.self_attention.dense.bias",
            "layers.{n}.feed_forward.norm": f"{layer}.{second}.weight",
            "layers.{n}.feed_forward.norm.bias": f"{layer}.{second}.bias",
            "layers.{n}.feed_forward.up": f"{layer}.mlp.dense_h_to_4h.weight",
            "layers.{n}.feed_forward.up.bias": f"{layer}.mlp.dense_h_to_4h.bias",
            "layers.{n}.feed_forward.down": f"{layer}.mlp.dense_4h_to_h.weight",
            "layers.{n}.feed_forward.down.bias": f"{layer}.mlp.dense_4h_to_h.bias",
            "norm": "model.ln_f.weight",
            "norm.bias": "model.ln_f.bias",
            "head": "lm_head.weight",
        }
    )
    return decoder(
        config,
        names,
        context=2048,
        intermediate=4 * hidden,
        kv_heads=kv_heads,
        act="gelu",
        norm="layer",
        epsilon=1e-5,
        tied=True,
        attention=partial(AttentionSpec, qkv_bias=bias, out_bias=bias),
        feed_forward=partial(FeedForwardSpec, gated=False, bias=bias),
        layer=partial(LayerSpec, parallel=True, shared_norm=shared),
        model=partial(ModelSpec, norm_bias=True),
        spellings=_BODIES,
    )
