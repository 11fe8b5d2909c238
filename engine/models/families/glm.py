"""GLM-4 and ChatGLM: half of each head turns, in neighbouring pairs."""

from __future__ import annotations

from functools import partial

from engine.errors import UnsupportedModelError
from engine.models.blueprint import Blueprint, decoder, family
from engine.models.families.llama import LLAMA_NAMES, STACKED_NAMES
from engine.models.hf_config import HfConfig
from engine.models.names import Names, table
from engine.models.spec import AttentionSpec, FeedForwardSpec, LayerSpec

__all__: list[str] = []

_GLM_NAMES: Names = {
    **LLAMA_NAMES,
    "layers.{n}.feed_forward.gate_up": STACKED_NAMES["layers.{n}.feed_forward.gate_up"],
}
_GLM4_NAMES: Names = {
    **_GLM_NAMES,
    **table(
        {
            "layers.{n}.attention.post_norm": "model.layers.{n}.post_self_attn_layernorm.weight",
            "layers.{n}.feed_forward.post_norm": "model.layers.{n}.post_mlp_layernorm.weight",
        }
    ),
}
_CHATGLM_NAMES: Names = table(
    {
        "embedding": "transformer.embedding.word_embeddings.weight",
        "layers.{n}.attention.norm": "transformer.encoder.layers.{n}.input_layernorm.weight",
        "layers.{n}.attention.qkv": "transformer.encoder.layers.{n}.self_attention.query_key_value.weight",
        "layers.{n}.attention.qkv.bias": "transformer.encoder.layers.{n}.self_attention.query_key_value.bias",
        "layers.{n}.attention.out": "transformer.encoder.layers.{n}.self_attention.dense.weight",
        "layers.{n}.attention.out.bias": "transformer.encoder.layers.{n}.self_attention.dense.bias",
        "layers.{n}.feed_forward.norm": "transformer.encoder.layers.{n}.post_attention_layernorm.weight",
        "layers.{n}.feed_forward.gate_up": "transformer.encoder.layers.{n}.mlp.dense_h_to_4h.weight",
        "layers.{n}.feed_forward.gate_up.bias": "transformer.encoder.layers.{n}.mlp.dense_h_to_4h.bias",
        "layers.{n}.feed_forward.down": "transformer.encoder.layers.{n}.mlp.dense_4h_to_h.weight",
        "layers.{n}.feed_forward.down.bias": "transformer.encoder.layers.{n}.mlp.dense_4h_to_h.bias",
        "norm": "transformer.encoder.final_layernorm.weight",
        "head": "transformer.output_layer.weight",
    }
)


@family(("GlmForCausalLM", "glm"))
def glm(config: HfConfig) -> Blueprint:
    """GLM-4 9B, GLM-Edge."""
    return _glm(config, _GLM_NAMES, LayerSpec)


@family(("Glm4ForCausalLM", "glm4"))
def glm4(config: HfConfig) -> Blueprint:
    """GLM-4-0414: norms on both sides of a block."""
    return _glm(config, _GLM4_NAMES, partial(LayerSpec, norms="both"))


def _glm(config: HfConfig, names: Names, layer: type[LayerSpec] | partial[LayerSpec]) -> Blueprint:
    return decoder(
        config,
        names,
        context=131072,
        head_dim=128,
        partial=0.5,
        interleaved=True,
        epsilon=1.5625e-7,
        attention=partial(AttentionSpec, qkv_bias=config.flag("attention_bias", default=True)),
        layer=layer,
    )


@family(("ChatGLMModel", "chatglm"), ("ChatGLMForConditionalGeneration", "chatglm"))
def chatglm(config: HfConfig) -> Blueprint:
    """ChatGLM2, ChatGLM3 and GLM-4 9B in their own layout."""
    if "position_encoding_2d" in config.values:
        raise UnsupportedModelError(
            f"this is ChatGLM-6B, the first ({config.where}: position_encoding_2d), which reads its prompt in both "
            "directions; ChatGLM2, ChatGLM3 and GLM-4 are supported"
        )
    config.spell(
        num_hidden_layers="num_layers",
        intermediate_size="ffn_hidden_size",
        head_dim="kv_channels",
        rms_norm_eps="layernorm_epsilon",
        max_position_embeddings="seq_length",
        vocab_size="padded_vocab_size",
    )
    for key, allowed in {
        "rmsnorm": True,
        "original_rope": True,
        "post_layer_norm": True,
        "apply_residual_connection_post_layernorm": False,
        "fp32_residual_connection": False,
        "interleaved_qkv": False,
        "quantization_bit": 0,
        "pre_seq_len": 0,
        "prefix_projection": False,
    }.items():
        config.must(key, allowed)
    # How the computation is arranged, not what it gives.
    for key in ("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion"):
        config.flag(key, default=True)
    bias = config.flag("add_bias_linear", default=False)
    config.size("multi_query_group_num", 1)
    if config.flag("multi_query_attention", default=False):
        config.spell(num_key_value_heads="multi_query_group_num")
    return decoder(
        config,
        _CHATGLM_NAMES,
        context=2048,
        head_dim=128,
        theta=10000.0 * config.number("rope_ratio", 1.0),
        partial=0.5,
        interleaved=True,
        epsilon=1e-5,
        attention=partial(AttentionSpec, qkv_bias=bias or config.flag("add_qkv_bias", default=False), out_bias=bias),
        feed_forward=partial(FeedForwardSpec, bias=bias),
    )
