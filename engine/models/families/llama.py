"""Llama and the families that differ from it by a bias, a norm, a window or a factor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engine.errors import ModelFolderError, UnsupportedModelError
from engine.models.blueprint import FULL, SLIDING, Blueprint, decoder, family, layer_kinds
from engine.models.hf_config import HfConfig, shown
from engine.models.names import Names, Part, table
from engine.models.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, QueryGrowth

__all__ = ["LLAMA_NAMES", "QK_NORM_NAMES", "STACKED_NAMES", "qwen_windows"]

LLAMA_NAMES: Names = table(
    {
        "embedding": "model.embed_tokens.weight",
        "layers.{n}.attention.norm": "model.layers.{n}.input_layernorm.weight",
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
        "layers.{n}.attention.out": "model.layers.{n}.self_attn.o_proj.weight",
        "layers.{n}.attention.out.bias": "model.layers.{n}.self_attn.o_proj.bias",
        "layers.{n}.feed_forward.norm": "model.layers.{n}.post_attention_layernorm.weight",
        "layers.{n}.feed_forward.gate_up": (
            "model.layers.{n}.mlp.gate_proj.weight",
            "model.layers.{n}.mlp.up_proj.weight",
        ),
        "layers.{n}.feed_forward.gate_up.bias": (
            "model.layers.{n}.mlp.gate_proj.bias",
            "model.layers.{n}.mlp.up_proj.bias",
        ),
        "layers.{n}.feed_forward.up": "model.layers.{n}.mlp.up_proj.weight",
        "layers.{n}.feed_forward.down": "model.layers.{n}.mlp.down_proj.weight",
        "layers.{n}.feed_forward.down.bias": "model.layers.{n}.mlp.down_proj.bias",
        "norm": "model.norm.weight",
        "head": "lm_head.weight",
    }
)

QK_NORM_NAMES: Names = table(
    {
        "layers.{n}.attention.q_norm": "model.layers.{n}.self_attn.q_norm.weight",
        "layers.{n}.attention.k_norm": "model.layers.{n}.self_attn.k_norm.weight",
    }
)

STACKED_NAMES: Names = table(
    {
        "layers.{n}.attention.qkv": "model.layers.{n}.self_attn.qkv_proj.weight",
        "layers.{n}.feed_forward.gate_up": "model.layers.{n}.mlp.gate_up_proj.weight",
    }
)

POST_NORM_NAMES: Names = table(
    {
        "layers.{n}.attention.post_norm": "model.layers.{n}.post_attention_layernorm.weight",
        "layers.{n}.feed_forward.post_norm": "model.layers.{n}.post_feedforward_layernorm.weight",
    }
)


@family(("LlamaForCausalLM", "llama"))
def llama(config: HfConfig) -> Blueprint:
    """Llama 1 to 3, and the many models that took its shape: SmolLM2, TinyLlama, Yi, DeepSeek distillates."""
    config.must("rope_interleaved", allowed=False)
    attention, feed_forward = _biases(config)
    return decoder(config, LLAMA_NAMES, context=2048, attention=attention, feed_forward=feed_forward)


def _biases(config: HfConfig) -> tuple[partial[AttentionSpec], partial[FeedForwardSpec]]:
    """`attention_bias` on all four products of attention, `mlp_bias` on all of the feed-forward."""
    bias = config.flag("attention_bias", default=False)
    attention = partial(AttentionSpec, qkv_bias=bias, out_bias=bias)
    return attention, partial(FeedForwardSpec, bias=config.flag("mlp_bias", default=False))


@family(("MistralForCausalLM", "mistral"))
def mistral(config: HfConfig) -> Blueprint:
    """Mistral 7B and its kin: Llama with a sliding window in every layer, unless that is null."""
    window = config.size_or_none("sliding_window", absent=4096)
    kind = FULL if window is None else SLIDING
    kinds = config.texts("layer_types")
    if kinds is not None and set(kinds) != {kind}:
        raise UnsupportedModelError(f"layer_types ({config.where}) contradicts sliding_window, which Mistral obeys")
    return decoder(config, LLAMA_NAMES, context=131072, kinds=lambda _: kind, window=window)


@family(("Ministral3ForCausalLM", "ministral3"))
def ministral3(config: HfConfig) -> Blueprint:
    """Ministral 3: yarn, and queries that grow beyond the length before it."""
    window = config.size_or_none("sliding_window", absent=None)
    kind = FULL if window is None else SLIDING
    growth = None
    rope = config.nested("rope_parameters")
    rate = None if rope is None else rope.number_or_none("llama_4_scaling_beta")
    if rope is not None and rate is not None:
        growth = QueryGrowth(rate, rope.size("original_max_position_embeddings"))
    return decoder(
        config,
        LLAMA_NAMES,
        context=262144,
        kinds=lambda _: kind,
        window=window,
        head_dim=128,
        epsilon=1e-5,
        rope_keys=("llama_4_scaling_beta", "max_position_embeddings"),
        attention=partial(AttentionSpec, query_growth=growth),
    )


@family(("Qwen2ForCausalLM", "qwen2"))
def qwen2(config: HfConfig) -> Blueprint:
    """Qwen2 and Qwen2.5: Llama with biases on q, k and v."""
    config.must("attention_bias", allowed=True)
    config.must("use_mrope", allowed=False)
    kinds, window = qwen_windows(config)
    attention = partial(AttentionSpec, qkv_bias=True)
    return decoder(config, LLAMA_NAMES, context=32768, kinds=kinds, window=window, attention=attention)


@family(("Qwen3ForCausalLM", "qwen3"))
def qwen3(config: HfConfig) -> Blueprint:
    """Qwen3 without experts: norms on the heads of q and k instead of biases."""
    bias = config.flag("attention_bias", default=False)
    kinds, window = qwen_windows(config)
    attention = partial(AttentionSpec, qkv_bias=bias, out_bias=bias, qk_norm="head")
    names = {**LLAMA_NAMES, **QK_NORM_NAMES}
    return decoder(config, names, context=32768, kinds=kinds, window=window, attention=attention)


def qwen_windows(config: HfConfig) -> tuple[Callable[[int], str], int | None]:
    """Kind of each layer by `layer_types`, else from layer `max_window_layers` on, if windows are used at all."""
    used = config.flag("use_sliding_window", default=False)
    config.ignore("sliding_window")  # may be 0 where it is not used
    window = config.size_or_none("sliding_window", absent=4096) if used else None
    first = config.size("max_window_layers", 28, least=0)
    return layer_kinds(config, lambda layer: SLIDING if layer >= first else FULL, window), window


@family(("SmolLM3ForCausalLM", "smollm3"))
def smollm3(config: HfConfig) -> Blueprint:
    """SmolLM3: every fourth layer is without positions."""
    interval = config.size("no_rope_layer_interval", 4)
    listed = config.switches("no_rope_layers")
    if listed is not None and len(listed) < config.size("num_hidden_layers"):
        raise ModelFolderError(f"no_rope_layers ({config.where}) has {len(listed)} entries for more layers")

    def rotated(layer: int) -> bool:
        return (layer + 1) % interval != 0 if listed is None else listed[layer]

    config.ignore("max_window_layers")
    used = config.flag("use_sliding_window", default=False)
    size = config.size_or_none("sliding_window", absent=None)
    window = size if used else None
    kinds = layer_kinds(config, lambda layer: FULL if rotated(layer) else SLIDING, window)

    def adjust(number: int, layer: LayerSpec) -> LayerSpec:
        return layer if rotated(number) else layer.attending(rope=None)

    attention, feed_forward = _biases(config)
    return decoder(
        config,
        LLAMA_NAMES,
        context=32768,
        theta=2000000.0,
        kinds=kinds,
        window=window,
        tied=True,
        adjust=adjust,
        attention=attention,
        feed_forward=feed_forward,
    )


@family(("SeedOssForCausalLM", "seed_oss"))
def seed_oss(config: HfConfig) -> Blueprint:
    """Seed-OSS: Llama with biases on q, k and v."""
    attention = partial(
        AttentionSpec,
        qkv_bias=config.flag("attention_bias", default=True),
        out_bias=config.flag("attention_out_bias", default=False),
    )
    bias = config.flag("mlp_bias", default=False)
    return decoder(
        config,
        LLAMA_NAMES,
        context=524288,
        head_dim=128,
        attention=attention,
        feed_forward=partial(FeedForwardSpec, bias=bias),
    )


_HUNYUAN_UNUSED = (
    "attention_head_dim",
    "cla_share_factor",
    "class_num",
    "dense_list",
    "im_end_id",
    "im_newline_id",
    "im_start_id",
    "mask_init_id",
    "mask_id",
    "org_vocab_size",
    "pad_id",
    "pool_type",
    "text_end_id",
    "text_start_id",
)


@family(("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"))
def hunyuan_dense(config: HfConfig) -> Blueprint:
    """Hunyuan dense: norms of the heads of q and k after their rotation, whose base may be stretched."""
    for key, allowed in {
        "use_qk_norm": True,
        "use_cla": False,
        "mlp_bias": False,
        "norm_type": "rms",
        "use_rotary_pos_emb": True,
        "position_embedding_xdrope": False,
        "num_experts": 1,
        "add_classification_head": False,
    }.items():
        config.must(key, allowed)
    # What goes with cross-layer attention, pictures and classification, which are not used.
    for key in _HUNYUAN_UNUSED:
        config.ignore(key)
    bias = config.flag("attention_bias", default=False)
    names = {
        **LLAMA_NAMES,
        **table(
            {
                "layers.{n}.attention.q_norm": "model.layers.{n}.self_attn.query_layernorm.weight",
                "layers.{n}.attention.k_norm": "model.layers.{n}.self_attn.key_layernorm.weight",
            }
        ),
    }
    attention = partial(AttentionSpec, qkv_bias=bias, out_bias=bias, qk_norm="head", qk_norm_last=True)
    return decoder(config, names, context=2048, epsilon=1e-5, attention=attention)


@family(("Ernie4_5ForCausalLM", "ernie4_5"), ("Ernie4_5_ForCausalLM", "ernie4_5"))
def ernie_dense(config: HfConfig) -> Blueprint:
    """ERNIE 4.5 dense: rotation of neighbouring pairs."""
    bias = config.flag("use_bias", default=False)
    return decoder(
        config,
        LLAMA_NAMES,
        context=131072,
        head_dim=128,
        theta=500000.0,
        epsilon=1e-5,
        tied=True,
        interleaved=True,
        attention=partial(AttentionSpec, qkv_bias=bias, out_bias=bias),
        feed_forward=partial(FeedForwardSpec, bias=bias),
    )


@family(("InternLM2ForCausalLM", "internlm2"))
def internlm2(config: HfConfig) -> Blueprint:
    """InternLM2: Llama under other names; each key/value head is stored behind its query heads."""
    config.must("bias", allowed=False)
    config.text("attn_implementation")
    heads, kv_heads = config.size("num_attention_heads"), config.size("num_key_value_heads", 0, least=0)
    kv_heads = kv_heads or heads
    size = max(1, config.size("hidden_size") // heads)
    repeats = max(1, heads // kv_heads)
    run = (repeats + 2) * size
    stored = "model.layers.{n}.attention.wqkv.weight"
    names = {
        **LLAMA_NAMES,
        **table(
            {
                "embedding": "model.tok_embeddings.weight",
                "head": "output.weight",
                "layers.{n}.attention.norm": "model.layers.{n}.attention_norm.weight",
                "layers.{n}.attention.qkv": (
                    Part(stored, run, 0, repeats * size),
                    Part(stored, run, repeats * size, size),
                    Part(stored, run, (repeats + 1) * size, size),
                ),
                "layers.{n}.attention.out": "model.layers.{n}.attention.wo.weight",
                "layers.{n}.feed_forward.norm": "model.layers.{n}.ffn_norm.weight",
                "layers.{n}.feed_forward.gate_up": (
                    "model.layers.{n}.feed_forward.w1.weight",
                    "model.layers.{n}.feed_forward.w3.weight",
                ),
                "layers.{n}.feed_forward.down": "model.layers.{n}.feed_forward.w2.weight",
            }
        ),
    }
    return decoder(config, names, context=32768)


@family(("InternLM3ForCausalLM", "internlm3"))
def internlm3(config: HfConfig) -> Blueprint:
    """InternLM3: Llama with flags of its own for biases."""
    bias = config.flag("bias", default=False)
    return decoder(
        config,
        LLAMA_NAMES,
        context=32768,
        epsilon=1e-5,
        attention=partial(AttentionSpec, qkv_bias=config.flag("qkv_bias", default=False), out_bias=bias),
        feed_forward=partial(FeedForwardSpec, bias=bias),
    )


@family(("MiniCPMForCausalLM", "minicpm"))
def minicpm(config: HfConfig) -> Blueprint:
    """MiniCPM 1 and 2, MiniCPM 4 without its sparse attention: Llama with factors on embedding, blocks and logits."""
    layers, hidden = config.size("num_hidden_layers"), config.size("hidden_size")
    config.must("num_experts", allowed=0)
    config.must("mup_denominator", allowed=32)
    if "sparse_config" in config:
        config.nested("sparse_config")
        config.notices.append("sparse attention is not used: all of the text is attended to")
    return decoder(
        config,
        LLAMA_NAMES,
        context=2048,
        tied=True,
        layer=partial(LayerSpec, residual_scale=config.number("scale_depth", 1.0) / layers**0.5),
        model=partial(
            ModelSpec,
            embedding_scale=config.number("scale_emb", 1.0),
            logit_scale=config.number("dim_model_base", 1.0) / hidden,
        ),
    )


@family(("GraniteForCausalLM", "granite"))
def granite(config: HfConfig) -> Blueprint:
    """Granite 3 dense: Llama with a factor at every place that can have one."""
    attention, feed_forward = _biases(config)
    return decoder(
        config,
        LLAMA_NAMES,
        context=2048,
        scale=config.number("attention_multiplier", 1.0),
        layer=partial(LayerSpec, residual_scale=config.number("residual_multiplier", 1.0)),
        model=partial(
            ModelSpec,
            embedding_scale=config.number("embedding_multiplier", 1.0),
            logit_scale=1.0 / config.number("logits_scaling", 1.0),
        ),
        attention=attention,
        feed_forward=feed_forward,
    )


@family(("OlmoForCausalLM", "olmo"))
def olmo(config: HfConfig) -> Blueprint:
    """OLMo 1: layer norms without weights; q, k and v may be clipped."""
    bias = config.flag("attention_bias", default=False)
    return decoder(
        config,
        LLAMA_NAMES,
        context=2048,
        norm="layer",
        epsilon=1e-5,
        attention=partial(AttentionSpec, qkv_bias=bias, out_bias=bias, clip=config.number_or_none("clip_qkv")),
        model=partial(ModelSpec, norm_weight=False),
    )


@family(("Olmo2ForCausalLM", "olmo2"))
def olmo2(config: HfConfig) -> Blueprint:
    """OLMo 2: norms of what blocks give instead of what they get, and of all heads of q, of k, together."""
    return _olmo2(config)


@family(("Olmo3ForCausalLM", "olmo3"))
def olmo3(config: HfConfig) -> Blueprint:
    """OLMo 3: OLMo 2 with a window in three of four layers; long contexts are scaled in the fourth only."""
    window = config.size_or_none("sliding_window", absent=4096)
    kinds = layer_kinds(config, lambda layer: FULL if (layer + 1) % 4 == 0 else SLIDING, window)
    return _olmo2(config, kinds, window, sliding_theta=config.number("rope_theta", 500000.0))


def _olmo2(
    config: HfConfig,
    kinds: Callable[[int], str] = lambda _: FULL,
    window: int | None = None,
    sliding_theta: float | None = None,
) -> Blueprint:
    bias = config.flag("attention_bias", default=False)
    return decoder(
        config,
        {**LLAMA_NAMES, **QK_NORM_NAMES, **POST_NORM_NAMES},
        context=2048,
        theta=500000.0,
        epsilon=1e-5,
        kinds=kinds,
        window=window,
        sliding_theta=sliding_theta,
        attention=partial(AttentionSpec, qkv_bias=bias, out_bias=bias, qk_norm="width"),
        layer=partial(LayerSpec, norms="post"),
    )


@family(("Exaone4ForCausalLM", "exaone4"))
def exaone4(config: HfConfig) -> Blueprint:
    """EXAONE 4: norms of what blocks give; where layers differ, those that see everything have no positions."""
    window = config.size_or_none("sliding_window", absent=4096)
    kinds = layer_kinds(config, _pattern(config), window)

    def adjust(number: int, layer: LayerSpec) -> LayerSpec:
        if window is None or kinds(number) == SLIDING:
            return layer
        return layer.attending(rope=None)

    return decoder(
        config,
        {**LLAMA_NAMES, **QK_NORM_NAMES, **POST_NORM_NAMES},
        context=2048,
        epsilon=1e-5,
        kinds=kinds,
        window=window,
        attention=partial(AttentionSpec, qk_norm="head"),
        layer=partial(LayerSpec, norms="post"),
        adjust=adjust,
    )


def _pattern(config: HfConfig) -> Callable[[int], str]:
    """`sliding_window_pattern`: every so many layers one that sees everything, or letters, "LLLG"."""
    if isinstance(config.values.get("sliding_window_pattern"), str):
        letters = config.text("sliding_window_pattern") or ""
        if not letters or set(letters) - {"L", "G"}:
            raise ModelFolderError(f"sliding_window_pattern = {shown(letters)} ({config.where}) is not of L and G")
        return lambda layer: SLIDING if letters[layer % len(letters)] == "L" else FULL
    every = config.size("sliding_window_pattern", 4, least=0)
    return lambda layer: FULL if every == 0 or (layer + 1) % every == 0 else SLIDING


@family(("Phi3ForCausalLM", "phi3"))
def phi3(config: HfConfig) -> Blueprint:
    """Phi-3, Phi-3.5, Phi-4 and its minis: Llama with q, k, v and gate, up stored together."""
    window = config.size_or_none("sliding_window", absent=None)
    kind = FULL if window is None else SLIDING
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.must(key, allowed=False)
    for key in ("full_attn_mod", "interpolate_factor"):
        config.must(key, allowed=1)
    return decoder(
        config,
        {**LLAMA_NAMES, **STACKED_NAMES},
        context=4096,
        partial=1.0,
        epsilon=1e-5,
        kinds=lambda _: kind,
        window=window,
    )


@family(("BaichuanForCausalLM", "baichuan"), ("BaiChuanForCausalLM", "baichuan"))
def baichuan(config: HfConfig) -> Blueprint:
    """Baichuan 1 and 2: the 7B is a Llama, the 13B has no rotation but ALiBi; the head of Baichuan 2 has unit rows."""
    second = "z_loss_weight" in config.values or config.size("vocab_size") == 125696
    config.must("z_loss_weight", allowed=0)
    alibi = "max_position_embeddings" not in config
    reach = config.size("model_max_length", 4096)
    names = {**LLAMA_NAMES, **table({"layers.{n}.attention.qkv": "model.layers.{n}.self_attn.W_pack.weight"})}
    if second:
        names |= table({"head": Part("lm_head.weight", unit=True)})
    return decoder(config, names, context=reach, rotates=not alibi, attention=partial(AttentionSpec, alibi=alibi))
