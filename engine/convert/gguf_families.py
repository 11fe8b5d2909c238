"""How the families that GGUF files can hold are written down there, one row of a table for each architecture.

Says names only: what the metadata and tensors of an architecture are called in
a `config.json` and in a folder's files, and what the files leave unsaid.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FAMILIES", "KEYS", "GgufFamily"]

Config = dict[str, Any]

KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
"""Metadata that all architectures have, less the architecture's name, and what a configuration calls them."""

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
}


def _nothing(config: Config, tensors: Container[str]) -> None:
    """Most files say all there is to know."""


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """One architecture.

    architecture, model_type: as `config.json` names them.
    keys: metadata beside `KEYS`.
    layer: names of a layer's tensors beside the usual ones; {e} where a tensor holds all experts.
    complete: puts into the configuration what metadata do not say, given the names of the tensors.
    twisted: rows of q and k lie interleaved for rotary positions.
    norms_plus_one: norm weights have the 1 added that a folder's weights lack.
    """

    architecture: str
    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    layer: Mapping[str, str] = field(default_factory=dict)
    complete: Callable[[Config, Container[str]], None] = _nothing
    twisted: bool = False
    norms_plus_one: bool = False

    @property
    def layer_names(self) -> Mapping[str, str]:
        """A layer's tensors, ours by theirs."""
        return {**_LAYER, **self.layer}


def _llama(config: Config, _: Container[str]) -> None:
    """Llama files hold Mixtral, too."""
    if config.get("num_local_experts"):
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}


def _gemma2(config: Config, _: Container[str]) -> None:
    """Scores are scaled by the head size, but in the 27B by the share of a head in the hidden size."""
    config["query_pre_attn_scalar"] = _share_of_head(config, 46)


def _gemma3(config: Config, _: Container[str]) -> None:
    config["query_pre_attn_scalar"] = _share_of_head(config, 62)


def _share_of_head(config: Config, layers_of_27b: int) -> Any:
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if (
        config.get("num_hidden_layers") == layers_of_27b
        and isinstance(hidden, int)
        and isinstance(heads, int)
        and heads
    ):
        return hidden // heads
    return config.get("head_dim")


def _without_window(config: Config, _: Container[str]) -> None:
    """No window is written as none, or as one of no tokens."""
    if not config.get("sliding_window"):
        config["sliding_window"] = None


def _olmo2(config: Config, _: Container[str]) -> None:
    """OLMo 3 has windows."""
    base = config.pop("rope_theta_of_windows", None)
    if config.get("sliding_window"):
        config |= {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
        if base not in {None, config.get("rope_theta")}:
            config["rope.freq_base_swa"] = base  # nobody reads that, so it is refused by name


def _stablelm(config: Config, tensors: Container[str]) -> None:
    config["use_qkv_bias"] = "blk.0.attn_q.bias" in tensors


def _cohere(config: Config, tensors: Container[str]) -> None:
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors


def _qwen2_moe(config: Config, _: Container[str]) -> None:
    config |= {"norm_topk_prob": False, "num_experts": config.pop("num_local_experts", None)}


def _qwen3_moe(config: Config, _: Container[str]) -> None:
    config |= {"norm_topk_prob": True, "num_experts": config.pop("num_local_experts", None)}


def _ministral3(config: Config, _: Container[str]) -> None:
    """Everything about positions stands together, the growth of queries included."""
    rope = config.pop("rope_scaling", None)
    if rope:
        factor = rope.pop("yarn_log_multiplier", None)
        rope |= {} if factor is None else {"mscale": factor, "mscale_all_dim": factor}
        growth = config.pop("attention.temperature_scale", None)
        rope |= {} if growth is None else {"llama_4_scaling_beta": growth}
        config["rope_parameters"] = rope


_GEMMA2_LAYER = {**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}

FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily(
        "LlamaForCausalLM",
        "llama",
        layer={
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
            "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
            "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
        },
        complete=_llama,
        twisted=True,
    ),
    "mistral3": GgufFamily("Ministral3ForCausalLM", "ministral3", complete=_ministral3, twisted=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": GgufFamily(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        keys={
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        layer={
            **_EXPERTS,
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        complete=_qwen2_moe,
    ),
    "qwen3moe": GgufFamily(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        keys={"expert_feed_forward_length": "moe_intermediate_size"},
        layer=_EXPERTS,
        complete=_qwen3_moe,
    ),
    "gemma": GgufFamily("GemmaForCausalLM", "gemma", norms_plus_one=True),
    "gemma2": GgufFamily(
        "Gemma2ForCausalLM",
        "gemma2",
        keys={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        layer=_GEMMA2_LAYER,
        complete=_gemma2,
        norms_plus_one=True,
    ),
    "gemma3": GgufFamily(
        "Gemma3ForCausalLM",
        "gemma3_text",
        keys={
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        layer=_GEMMA2_LAYER,
        complete=_gemma3,
        norms_plus_one=True,
    ),
    "phi3": GgufFamily(
        "Phi3ForCausalLM",
        "phi3",
        layer={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        complete=_without_window,
    ),
    "granite": GgufFamily(
        "GraniteForCausalLM",
        "granite",
        keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        twisted=True,
    ),
    "olmo2": GgufFamily(
        "Olmo2ForCausalLM",
        "olmo2",
        keys={"rope.freq_base_swa": "rope_theta_of_windows"},
        layer=_POST_NORMS,
        complete=_olmo2,
    ),
    "exaone4": GgufFamily("Exaone4ForCausalLM", "exaone4", layer=_POST_NORMS, complete=_without_window),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", "smollm3", twisted=True),
    "seed_oss": GgufFamily("SeedOssForCausalLM", "seed_oss", layer={"post_attention_norm": "post_attention_layernorm"}),
    "glm4": GgufFamily(
        "Glm4ForCausalLM",
        "glm4",
        layer={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "hunyuan-dense": GgufFamily(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        layer={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "ernie4_5": GgufFamily("Ernie4_5ForCausalLM", "ernie4_5"),
    "starcoder2": GgufFamily(
        "Starcoder2ForCausalLM",
        "starcoder2",
        keys={"attention.layer_norm_epsilon": "norm_epsilon"},
        layer={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "stablelm": GgufFamily(
        "StableLmForCausalLM",
        "stablelm",
        keys={"attention.layer_norm_epsilon": "layer_norm_eps"},
        complete=_stablelm,
    ),
    "command-r": GgufFamily(
        "CohereForCausalLM",
        "cohere",
        keys={"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
        complete=_cohere,
    ),
    "cohere2": GgufFamily(
        "Cohere2ForCausalLM",
        "cohere2",
        keys={"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
    ),
}
"""By `general.architecture`."""
