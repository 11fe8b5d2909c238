"""Makes the goldens `family-CASE.npz` of `families.py`, with torch and transformers in float32.

    python -m tests.goldens.make_families [CASE ...]

A case is a `config.json` as published folders write it, which transformers
must load with no tensor missing or left over. Families that transformers does
not hold are computed by one it does, after their tensors were renamed, cut or
joined (`Case.reference`). The arrays are those of `make_goldens.py`, with fewer columns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.goldens import make_goldens, tiny_folder
from tests.goldens.families import (
    CONTEXT,
    GOLDENS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    VOCAB,
    Shapes,
    Values,
    tensors,
    write_model,
)

Tensors = dict[str, NDArray[np.float32]]
COLUMNS = 24


@dataclass(frozen=True)
class Case:
    """A tiny model.

    config: of the folder.
    shapes: of the folder's tensors, from those of the reference; the same when None.
    reference: (config, tensors) for transformers from the folder's; the same when None.
    run: logits of the reference, when a plain call is not all.
    """

    config: Values
    zero_centred: bool = False
    shapes: Callable[[Shapes], Shapes] | None = None
    reference: Callable[[Values], Values] | None = None
    back: Callable[[Tensors], Tensors] = lambda given: given
    run: Callable[[Any, NDArray[Any]], NDArray[np.float32]] = make_goldens.all_logits


def published(architecture: str, model_type: str, **changes: Any) -> Values:
    """A config.json with the keys that most have; `key=...` leaves one out."""
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    return {key: value for key, value in (config | changes).items() if value is not ...}


NO_RMS: Values = {"rms_norm_eps": ..., "layer_norm_eps": 1e-5}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
GEMMA: Values = {
    "head_dim": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": True,
}
GEMMA2: Values = GEMMA | {
    "query_pre_attn_scalar": 24,
    "sliding_window": 64,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "cache_implementation": "hybrid",
}
GEMMA3: Values = GEMMA | {
    "query_pre_attn_scalar": 24,
    "sliding_window": 64,
    "sliding_window_pattern": 2,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
GEMMA4: Values = {
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_act": ...,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "final_logit_softcapping": 3.0,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_experts": None,
    "num_global_key_value_heads": None,
    "num_kv_shared_layers": 0,
    "rope_theta": ...,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 64,
    "tie_word_embeddings": True,
    "use_double_wide_mlp": False,
}
GLM: Values = {"head_dim": HEAD_DIM, "partial_rotary_factor": 0.5, "attention_bias": True, "rms_norm_eps": 1.5625e-07}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0 + 0.1 * pair for pair in range(6)],
    "long_factor": [1.5 + 0.5 * pair for pair in range(6)],
}
MLA: Values = {
    "num_key_value_heads": HEADS,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "attention_bias": False,
}
DEEPSEEK_MOE: Values = {
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "seq_aux": True,
}
DEEPSEEK_YARN: Values = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 8,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 64,
    "type": "yarn",
}
DEEPSEEK_V2: Values = {
    **MLA,
    **DEEPSEEK_MOE,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "rope_scaling": DEEPSEEK_YARN,
}
DEEPSEEK_V3: Values = {
    **MLA,
    **DEEPSEEK_MOE,
    "q_lora_rank": 48,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_scaling": DEEPSEEK_YARN,
}
DELTA_NET: Values = {
    "head_dim": 32,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS: Values = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "norm_topk_prob": True,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
MROPE: Values = {
    "rope_type": "default",
    "rope_theta": 100000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}
PLAIN_MLP: Values = {"num_key_value_heads": HEADS}


# ------------------------------------------------------------------ families that transformers does not hold


def _llama(**changes: Any) -> Callable[[Values], Values]:
    return lambda config: {
        **{key: value for key, value in config.items() if key not in {"bias", "qkv_bias"}},
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **changes,
    }


def _joined(shapes: Shapes, into: str, parts: list[str]) -> Shapes:
    """Shapes with each layer's parts joined by rows."""
    shapes = dict(shapes)
    for number in range(LAYERS):
        sizes = [shapes.pop(f"model.layers.{number}.{part}.weight") for part in parts]
        shapes[f"model.layers.{number}.{into}.weight"] = (sum(size[0] for size in sizes), sizes[0][1])
    return shapes


QKV = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
_INTERN = {
    "model.tok_embeddings.": "model.embed_tokens.",
    "output.": "lm_head.",
    ".attention_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".attention.wo.": ".self_attn.o_proj.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
}
_CHATGLM = {
    "transformer.embedding.word_embeddings.": "model.embed_tokens.",
    "transformer.encoder.final_layernorm.": "model.norm.",
    "transformer.output_layer.": "lm_head.",
    "transformer.encoder.layers.": "model.layers.",
    ".self_attention.dense.": ".self_attn.o_proj.",
    ".mlp.dense_h_to_4h.": ".mlp.gate_up_proj.",
    ".mlp.dense_4h_to_h.": ".mlp.down_proj.",
}

_CHATGLM_STACK = ("self_attn.q_proj", "self_attention.query_key_value")


def _renamed(name: str, words: dict[str, str]) -> str:
    for old, new in words.items():
        name = name.replace(old, new)
    return name


def _other_way(words: dict[str, str]) -> dict[str, str]:
    return {new: old for old, new in words.items()}


def _intern_shapes(shapes: Shapes) -> Shapes:
    return {_renamed(name, _other_way(_INTERN)): size for name, size in _joined(shapes, "attention.wqkv", QKV).items()}


def _intern_back(given: Tensors) -> Tensors:
    out: Tensors = {}
    for name, values in given.items():
        if "wqkv" in name:
            runs = values.reshape(KV_HEADS, HEADS // KV_HEADS + 2, HEAD_DIM, HIDDEN)
            parts = runs[:, :-2], runs[:, -2], runs[:, -1]
            for part, rows in zip(QKV, parts, strict=True):
                out[name.replace("attention.wqkv", part)] = np.ascontiguousarray(rows.reshape(-1, HIDDEN))
        else:
            out[_renamed(name, _INTERN)] = values
    return out


def _split(given: Tensors, name: str, sizes: list[int], parts: list[str]) -> Tensors:
    """Every tensor `name` cut by rows into parts."""
    out: Tensors = {}
    for key, values in given.items():
        if name in key:
            ends = np.cumsum(sizes)[:-1]
            for part, rows in zip(parts, np.split(values, ends), strict=True):
                out[key.replace(name, part)] = np.ascontiguousarray(rows)
        else:
            out[key] = values
    return out


def _baichuan_back(given: Tensors) -> Tensors:
    return _split(given, "self_attn.W_pack", [HIDDEN] * 3, QKV)


def _unit_head(given: Tensors) -> Tensors:
    out = _baichuan_back(given)
    head = out["lm_head.weight"].astype(np.float64)
    out["lm_head.weight"] = (head / np.sqrt((head**2).sum(axis=1, keepdims=True))).astype(np.float32)
    return out


def _with_alibi(model: Any, ids: NDArray[Any]) -> NDArray[np.float32]:
    """A Llama without rotation, its scores lowered by distance."""
    import torch

    from_ = torch.arange(len(ids))
    distance = (from_[None, :] - from_[:, None]).float()
    exponents = [-8 * (head + 1) / HEADS for head in range(HEADS)]
    bias = torch.stack([distance * 2.0**exponent for exponent in exponents])
    bias = bias.masked_fill(distance > 0, float("-inf"))[None]
    model.model.rotary_emb.inv_freq.zero_()
    with torch.inference_mode():
        given = torch.from_numpy(ids.astype(np.int64))[None]
        return model(input_ids=given, attention_mask=bias).logits[0].numpy()


def _chatglm_config(config: Values) -> Values:
    return published(
        "GlmForCausalLM", "glm", **GLM | {"rms_norm_eps": config["layernorm_epsilon"]}, rope_theta=500000.0
    )


def _chatglm_shapes(shapes: Shapes) -> Shapes:
    out: Shapes = {}
    for name, size in shapes.items():
        if "k_proj" in name or "v_proj" in name:
            continue
        if "q_proj" in name:
            stacked = ((HEADS + 2 * KV_HEADS) * HEAD_DIM, *size[1:])
            out[_renamed(name, _other_way(_CHATGLM)).replace(*_CHATGLM_STACK)] = stacked
        else:
            out[_renamed(name, _other_way(_CHATGLM))] = size
    return out


def _chatglm_back(given: Tensors) -> Tensors:
    sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
    cut = _split(given, "self_attention.query_key_value", sizes, QKV)
    return {_renamed(name, _CHATGLM): values for name, values in cut.items()}


def _under(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda given: {name.removeprefix(prefix): values for name, values in given.items()}


def _beside_towers(architecture: str, model_type: str, text: Values, towers: Shapes, reference: str) -> Case:
    """A model of pictures and text, of which the text part, which `reference` computes, has tensors of its own name."""
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "image_token_id": 7,
        "video_token_id": 8,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
        "vision_config": {"hidden_size": 32},
        "torch_dtype": "float32",
    }
    return Case(
        config,
        zero_centred=model_type.startswith("qwen"),
        shapes=lambda shapes: (
            {name.replace("model.", "model.language_model.", 1): size for name, size in shapes.items()} | towers
        ),
        reference=lambda config: config["text_config"] | {"architectures": [reference]},
        back=lambda given: {
            name.replace("language_model.", ""): values for name, values in given.items() if ".language_model." in name
        },
    )


CASES: dict[str, Case] = {
    "smollm3": Case(
        published(
            "SmolLM3ForCausalLM",
            "smollm3",
            no_rope_layers=[1, 1, 0, 1],
            no_rope_layer_interval=4,
            use_sliding_window=False,
            sliding_window=None,
            attention_bias=False,
            mlp_bias=False,
            layer_types=["full_attention"] * LAYERS,
            max_window_layers=28,
            tie_word_embeddings=True,
        )
    ),
    "ministral3": Case(
        published(
            "Ministral3ForCausalLM",
            "ministral3",
            head_dim=HEAD_DIM,
            sliding_window=None,
            rope_theta=...,
            rope_parameters={
                "type": "yarn",
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "max_position_embeddings": CONTEXT,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        )
    ),
    "seed_oss": Case(
        published(
            "SeedOssForCausalLM",
            "seed_oss",
            head_dim=HEAD_DIM,
            attention_bias=True,
            attention_out_bias=False,
            mlp_bias=False,
            residual_dropout=0.1,
            rope_scaling={"rope_type": "default"},
        )
    ),
    "hunyuan_dense": Case(
        published(
            "HunYuanDenseV1ForCausalLM",
            "hunyuan_v1_dense",
            head_dim=32,
            attention_bias=False,
            mlp_bias=False,
            use_qk_norm=True,
            use_cla=False,
            eod_token_id=3,
            norm_type="rms",
            tie_word_embeddings=True,
            rope_scaling={
                "alpha": 50.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "type": "dynamic",
            },
        )
    ),
    "ernie4_5": Case(
        published(
            "Ernie4_5ForCausalLM",
            "ernie4_5",
            head_dim=32,
            use_bias=False,
            rope_theta=500000.0,
            tie_word_embeddings=True,
        )
    ),
    "internlm2": Case(
        published(
            "InternLM2ForCausalLM",
            "internlm2",
            bias=False,
            attn_implementation="eager",
            rope_scaling={"type": "dynamic", "factor": 2.0},
        ),
        shapes=_intern_shapes,
        reference=_llama(),
        back=_intern_back,
    ),
    "internlm3": Case(
        published("InternLM3ForCausalLM", "internlm3", bias=True, qkv_bias=True, head_dim=32),
        reference=_llama(attention_bias=True, mlp_bias=True),
    ),
    "minicpm": Case(
        published(
            "MiniCPMForCausalLM",
            "minicpm",
            scale_emb=12,
            scale_depth=1.4,
            dim_model_base=32,
            tie_word_embeddings=True,
            rope_scaling={
                "rope_type": "longrope",
                "original_max_position_embeddings": 64,
                "short_factor": [1.0] * 8,
                "long_factor": [1.5 + 0.5 * pair for pair in range(8)],
            },
        ),
        reference=lambda config: (
            {key: value for key, value in config.items() if key not in {"scale_emb", "scale_depth", "dim_model_base"}}
            | {
                "architectures": ["GraniteForCausalLM"],
                "model_type": "granite",
                "embedding_multiplier": 12.0,
                "residual_multiplier": 1.4 / LAYERS**0.5,
                "logits_scaling": HIDDEN / 32,
                "attention_multiplier": HEAD_DIM**-0.5,
            }
        ),
    ),
    "granite": Case(
        published(
            "GraniteForCausalLM",
            "granite",
            attention_multiplier=0.0625,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            logits_scaling=2.0,
            attention_bias=True,
            mlp_bias=True,
            rope_scaling=None,
            tie_word_embeddings=True,
        )
    ),
    "olmo": Case(published("OlmoForCausalLM", "olmo", rms_norm_eps=..., clip_qkv=0.8, attention_bias=False)),
    "olmo2": Case(published("Olmo2ForCausalLM", "olmo2", attention_bias=False, rope_theta=500000.0)),
    "olmo3": Case(
        published(
            "Olmo3ForCausalLM",
            "olmo3",
            attention_bias=False,
            sliding_window=64,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
            rope_theta=500000.0,
            rope_scaling=YARN | {"attention_factor": 1.2, "beta_fast": 32, "beta_slow": 1},
        )
    ),
    "exaone4": Case(
        published(
            "Exaone4ForCausalLM",
            "exaone4",
            head_dim=HEAD_DIM,
            sliding_window=64,
            sliding_window_pattern="LLLG",
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
        )
    ),
    "phi3": Case(
        published(
            "Phi3ForCausalLM",
            "phi3",
            attention_bias=False,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            original_max_position_embeddings=64,
            sliding_window=200,
            partial_rotary_factor=0.75,
            rope_scaling=LONGROPE,
            num_key_value_heads=HEADS,
        )
    ),
    "gemma": Case(published("GemmaForCausalLM", "gemma", **GEMMA, num_hidden_layers=3), zero_centred=True),
    "gemma2": Case(published("Gemma2ForCausalLM", "gemma2", **GEMMA2), zero_centred=True),
    "gemma3": Case(published("Gemma3ForCausalLM", "gemma3_text", **GEMMA3), zero_centred=True),
    "gemma3-pictures": Case(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "image_token_index": 262144,
            "mm_tokens_per_image": 256,
            "initializer_range": 0.02,
            "eos_token_id": [1, 106],
            "torch_dtype": "float32",
            "text_config": published(..., "gemma3_text", **GEMMA3),
            "vision_config": {"hidden_size": 32, "model_type": "siglip_vision_model", "num_hidden_layers": 1},
        },
        zero_centred=True,
        shapes=lambda shapes: (
            {f"language_model.{name}": size for name, size in shapes.items()}
            | {
                "vision_tower.vision_model.post_layernorm.weight": (32,),
                "multi_modal_projector.mm_soft_emb_norm.weight": (32,),
            }
        ),
        reference=lambda config: config["text_config"] | {"architectures": ["Gemma3ForCausalLM"]},
        back=lambda given: {
            name.removeprefix("language_model."): values for name, values in given.items() if "lang" in name
        },
    ),
    "glm": Case(published("GlmForCausalLM", "glm", **GLM)),
    "glm4": Case(published("Glm4ForCausalLM", "glm4", **GLM)),
    "chatglm": Case(
        {
            "architectures": ["ChatGLMModel"],
            "model_type": "chatglm",
            "add_bias_linear": False,
            "add_qkv_bias": True,
            "apply_query_key_layer_scaling": True,
            "apply_residual_connection_post_layernorm": False,
            "attention_dropout": 0.0,
            "attention_softmax_in_fp32": True,
            "bias_dropout_fusion": True,
            "ffn_hidden_size": INTERMEDIATE,
            "fp32_residual_connection": False,
            "hidden_dropout": 0.0,
            "hidden_size": HIDDEN,
            "kv_channels": HEAD_DIM,
            "layernorm_epsilon": 1e-5,
            "multi_query_attention": True,
            "multi_query_group_num": KV_HEADS,
            "num_attention_heads": HEADS,
            "num_layers": LAYERS,
            "original_rope": True,
            "padded_vocab_size": VOCAB,
            "post_layer_norm": True,
            "rmsnorm": True,
            "rope_ratio": 50,
            "seq_length": CONTEXT,
            "use_cache": True,
            "torch_dtype": "float16",
            "tie_word_embeddings": False,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "pre_seq_len": None,
            "prefix_projection": False,
            "quantization_bit": 0,
        },
        shapes=_chatglm_shapes,
        reference=_chatglm_config,
        back=_chatglm_back,
    ),
    "cohere": Case(
        published(
            "CohereForCausalLM",
            "cohere",
            **NO_RMS,
            attention_bias=False,
            logit_scale=0.5,
            use_qk_norm=True,
            model_max_length=CONTEXT,
            tie_word_embeddings=True,
        )
    ),
    "cohere2": Case(
        published(
            "Cohere2ForCausalLM",
            "cohere2",
            **NO_RMS,
            attention_bias=False,
            logit_scale=0.5,
            head_dim=HEAD_DIM,
            sliding_window=64,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
            cache_implementation="hybrid",
            order_of_interleaved_layers="local_attn_first",
            rotary_pct=1.0,
            position_embedding_type="rope_gptj",
            use_embedding_sharing=True,
            use_gated_activation=True,
            use_parallel_block=True,
            use_parallel_embedding=False,
            tie_word_embeddings=True,
        )
    ),
    "stablelm": Case(
        published(
            "StableLmForCausalLM",
            "stablelm",
            **NO_RMS,
            partial_rotary_factor=0.25,
            use_qkv_bias=True,
            hidden_dropout=0.0,
            rope_scaling=None,
        )
    ),
    "stablelm-parallel": Case(
        published(
            "StableLmForCausalLM",
            "stablelm",
            **NO_RMS,
            partial_rotary_factor=0.25,
            use_qkv_bias=False,
            qk_layernorm=True,
            use_parallel_residual=True,
        )
    ),
    "starcoder2": Case(
        published(
            "Starcoder2ForCausalLM",
            "starcoder2",
            rms_norm_eps=...,
            norm_epsilon=1e-5,
            use_bias=True,
            hidden_act="gelu_pytorch_tanh",
            sliding_window=64,
            norm_type="layer_norm",
            mlp_type="default",
            residual_dropout=0.0,
            embedding_dropout=0.0,
            tie_word_embeddings=True,
        )
    ),
    "phi": Case(
        published(
            "PhiForCausalLM",
            "phi",
            **NO_RMS,
            **PLAIN_MLP,
            hidden_act="gelu_new",
            partial_rotary_factor=0.5,
            qk_layernorm=False,
            embd_pdrop=0.0,
            resid_pdrop=0.1,
            rope_scaling=None,
        )
    ),
    "gpt_neox": Case(
        published(
            "GPTNeoXForCausalLM",
            "gpt_neox",
            **NO_RMS,
            num_key_value_heads=...,
            hidden_act="gelu",
            rope_theta=...,
            rotary_emb_base=10000,
            rotary_pct=0.25,
            use_parallel_residual=True,
            classifier_dropout=0.1,
            hidden_dropout=0.0,
        )
    ),
    "gpt2": Case(
        {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "attn_pdrop": 0.1,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "embd_pdrop": 0.1,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "n_ctx": CONTEXT,
            "n_embd": HIDDEN,
            "n_head": HEADS,
            "n_layer": LAYERS,
            "n_positions": CONTEXT,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "vocab_size": VOCAB,
            "tie_word_embeddings": True,
        }
    ),
    "falcon": Case(
        published(
            "FalconForCausalLM",
            "falcon",
            rms_norm_eps=...,
            intermediate_size=...,
            hidden_act=...,
            num_key_value_heads=...,
            layer_norm_epsilon=1e-5,
            multi_query=True,
            parallel_attn=True,
            bias=False,
            alibi=False,
            new_decoder_architecture=False,
            hidden_dropout=0.0,
            tie_word_embeddings=True,
        )
    ),
    "falcon-grouped": Case(
        published(
            "FalconForCausalLM",
            "falcon",
            rms_norm_eps=...,
            intermediate_size=...,
            hidden_act=...,
            num_key_value_heads=...,
            num_kv_heads=2,
            layer_norm_epsilon=1e-5,
            multi_query=True,
            parallel_attn=True,
            bias=False,
            alibi=False,
            new_decoder_architecture=True,
            hidden_dropout=0.0,
            tie_word_embeddings=True,
        )
    ),
    "baichuan": Case(
        published("BaiChuanForCausalLM", "baichuan", num_key_value_heads=..., model_max_length=CONTEXT),
        shapes=lambda shapes: _joined(shapes, "self_attn.W_pack", QKV),
        reference=_llama(),
        back=_baichuan_back,
    ),
    "baichuan2": Case(
        published(
            "BaichuanForCausalLM",
            "baichuan",
            num_key_value_heads=...,
            max_position_embeddings=...,
            model_max_length=CONTEXT,
            z_loss_weight=0,
            rope_theta=...,
        ),
        shapes=lambda shapes: _joined(shapes, "self_attn.W_pack", QKV),
        reference=_llama(max_position_embeddings=CONTEXT),
        back=_unit_head,
        run=_with_alibi,
    ),
    "mixtral": Case(
        published(
            "MixtralForCausalLM",
            "mixtral",
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=None,
            output_router_logits=False,
            router_aux_loss_coef=0.02,
        )
    ),
    "qwen2_moe": Case(
        published(
            "Qwen2MoeForCausalLM",
            "qwen2_moe",
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=48,
            shared_expert_intermediate_size=80,
            norm_topk_prob=False,
            decoder_sparse_step=1,
            mlp_only_layers=[1],
            output_router_logits=False,
            router_aux_loss_coef=0.001,
            use_sliding_window=False,
            sliding_window=64,
            max_window_layers=2,
        )
    ),
    "qwen3_moe": Case(
        published(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            num_experts=20,
            num_experts_per_tok=4,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            head_dim=32,
            attention_bias=False,
            output_router_logits=False,
            router_aux_loss_coef=0.001,
            use_sliding_window=False,
            sliding_window=None,
            max_window_layers=LAYERS,
            rope_scaling=None,
        )
    ),
    "olmoe": Case(
        published(
            "OlmoeForCausalLM",
            "olmoe",
            num_experts=8,
            num_experts_per_tok=4,
            norm_topk_prob=False,
            clip_qkv=None,
            attention_bias=False,
            output_router_logits=False,
            router_aux_loss_coef=0.01,
        )
    ),
    "granitemoe": Case(
        published(
            "GraniteMoeForCausalLM",
            "granitemoe",
            num_local_experts=8,
            num_experts_per_tok=3,
            attention_multiplier=0.0625,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            logits_scaling=2.0,
            attention_bias=False,
            output_router_logits=False,
            router_aux_loss_coef=0.0,
            rope_scaling=None,
            tie_word_embeddings=True,
        )
    ),
    "gpt_oss": Case(
        published(
            "GptOssForCausalLM",
            "gpt_oss",
            num_local_experts=8,
            num_experts_per_tok=2,
            experts_per_token=2,
            head_dim=HEAD_DIM,
            attention_bias=True,
            sliding_window=64,
            layer_types=MIXED,
            swiglu_limit=7.0,
            initial_context_length=64,
            output_router_logits=False,
            router_aux_loss_coef=0.9,
            rope_theta=150000.0,
            rope_scaling=YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        )
    ),
    "gemma4": Case(
        published(
            "Gemma4ForCausalLM",
            "gemma4_text",
            **GEMMA4
            | {
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "hidden_size_per_layer_input": 0,
                "use_bidirectional_attention": "vision",
            },
        )
    ),
    "gemma4_shared": Case(
        published(
            "Gemma4ForCausalLM",
            "gemma4_text",
            **GEMMA4
            | {
                "num_hidden_layers": 6,
                "layer_types": ["sliding_attention", "full_attention"] * 3,
                "num_kv_shared_layers": 3,
                "use_double_wide_mlp": True,
                "hidden_size_per_layer_input": 16,
                "vocab_size_per_layer_input": VOCAB,
            },
        )
    ),
    "lfm2": Case(
        published(
            "Lfm2ForCausalLM",
            "lfm2",
            intermediate_size=...,
            hidden_act=...,
            rms_norm_eps=...,
            tie_word_embeddings=True,
            rope_theta=1000000.0,
            norm_eps=1e-5,
            block_auto_adjust_ff_dim=True,
            block_dim=HIDDEN,
            block_ff_dim=120,
            block_ffn_dim_multiplier=1.0,
            block_mlp_init_scale=1.0,
            block_multiple_of=32,
            block_norm_eps=1e-5,
            block_out_init_scale=1.0,
            block_use_swiglu=True,
            block_use_xavier_init=True,
            conv_L_cache=3,
            conv_bias=False,
            conv_dim=HIDDEN,
            conv_dim_out=HIDDEN,
            conv_use_xavier_init=True,
            full_attn_idxs=[1, 3],
            num_heads=HEADS,
            use_pos_enc=True,
        )
    ),
    "lfm2_moe": Case(
        published(
            "Lfm2MoeForCausalLM",
            "lfm2_moe",
            hidden_act=...,
            rms_norm_eps=...,
            tie_word_embeddings=True,
            tie_embedding=True,
            norm_eps=1e-5,
            conv_L_cache=4,
            conv_bias=True,
            layer_types=["conv", "full_attention", "conv", "conv"],
            num_dense_layers=1,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            routed_scaling_factor=1.0,
            use_expert_bias=True,
        )
    ),
    "deepseek_v2_lite": Case(published("DeepseekV2ForCausalLM", "deepseek_v2", **DEEPSEEK_V2)),
    "deepseek_v2": Case(
        published(
            "DeepseekV2ForCausalLM",
            "deepseek_v2",
            **DEEPSEEK_V2
            | {
                "q_lora_rank": 48,
                "topk_method": "group_limited_greedy",
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 16.0,
                "rope_scaling": None,
            },
        )
    ),
    "deepseek_v3": Case(published("DeepseekV3ForCausalLM", "deepseek_v3", **DEEPSEEK_V3)),
    "glm4_moe_lite": Case(
        published(
            "Glm4MoeLiteForCausalLM",
            "glm4_moe_lite",
            **DEEPSEEK_V3
            | {"rope_scaling": None, "v_head_dim": 48, "partial_rotary_factor": 1.0, "first_k_dense_replace": ...},
        )
    ),
    "minicpm3": Case(
        published(
            "MiniCPM3ForCausalLM",
            "minicpm3",
            **MLA | {"q_lora_rank": 48, "v_head_dim": ...},
            scale_emb=12,
            scale_depth=1.4,
            dim_model_base=16,
            tie_word_embeddings=True,
        )
    ),
    "qwen3_next": Case(
        published(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            **DELTA_NET,
            **EXPERTS,
            full_attention_interval=2,
            partial_rotary_factor=0.25,
            rope_scaling=None,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
        zero_centred=True,
    ),
    "qwen3_5": Case(
        published(
            "Qwen3_5ForCausalLM",
            "qwen3_5_text",
            **DELTA_NET,
            layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            rope_theta=...,
            rope_parameters=MROPE,
            attn_output_gate=True,
            mamba_ssm_dtype="float32",
            mtp_num_hidden_layers=1,
            mtp_use_dedicated_embeddings=False,
        ),
        zero_centred=True,
    ),
    "qwen3_5_moe": Case(
        published(
            "Qwen3_5MoeForCausalLM",
            "qwen3_5_moe_text",
            **DELTA_NET,
            **EXPERTS,
            intermediate_size=...,
            full_attention_interval=4,
            rope_theta=...,
            rope_parameters=MROPE,
        ),
        zero_centred=True,
    ),
    "qwen3_5_pictures": _beside_towers(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        published(
            ...,
            "qwen3_5_text",
            **DELTA_NET,
            full_attention_interval=2,
            rope_theta=...,
            rope_parameters=MROPE,
            tie_word_embeddings=True,
        ),
        {"model.visual.merger.norm.weight": (32,), "mtp.norm.weight": (HIDDEN,)},
        "Qwen3_5ForCausalLM",
    ),
    "qwen3_5_moe_pictures": _beside_towers(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        published(
            ...,
            "qwen3_5_moe_text",
            **DELTA_NET,
            **EXPERTS,
            intermediate_size=...,
            full_attention_interval=2,
            rope_theta=...,
            rope_parameters=MROPE,
            tie_word_embeddings=True,
        ),
        {"model.visual.merger.norm.weight": (32,)},
        "Qwen3_5MoeForCausalLM",
    ),
    "gemma4_pictures": _beside_towers(
        "Gemma4ForConditionalGeneration",
        "gemma4",
        published(
            ..., "gemma4_text", **GEMMA4 | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB}
        ),
        {"model.vision_tower.std_bias": (32,), "model.embed_vision.embedding_projection.weight": (HIDDEN, 32)},
        "Gemma4ForCausalLM",
    ),
}


def _shapes_of(config: Values) -> Shapes:
    """Tensors as transformers would save them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "config.json").write_text(json.dumps(config))
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(temporary)).save_pretrained(temporary)
        head = (Path(temporary) / "model.safetensors").read_bytes()
    size = int.from_bytes(head[:8], "little")
    entries = json.loads(head[8 : 8 + size])
    return {name: tuple(entry["shape"]) for name, entry in sorted(entries.items()) if name != "__metadata__"}


def make(name: str) -> None:
    """One golden."""
    case = CASES[name]
    config = {key: value for key, value in case.config.items() if key != "architectures" or value != [...]}
    if "text_config" in config:
        config["text_config"] = {k: v for k, v in config["text_config"].items() if k != "architectures"}
    reference = config if case.reference is None else case.reference(config)
    shapes = _shapes_of(reference)
    if case.shapes is not None:
        shapes = case.shapes(shapes)
    ids = tiny_folder.token_ids(make_goldens.POSITIONS, VOCAB)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder, config, shapes, zero_centred=case.zero_centred)
        if case.reference is not None:
            tied = config.get("text_config", config).get("tie_word_embeddings", False)
            filled = case.back(tensors(shapes, tied=tied, zero_centred=case.zero_centred))
            folder = Path(temporary) / "reference"
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(reference))
            tiny_folder.save_safetensors(folder / "model.safetensors", filled, "f32")
        model = make_goldens.load_model(folder)
        logits = case.run(model, ids)
        resaved = model.config.to_dict() if case.reference is None else None
    make_goldens.COLUMNS = COLUMNS
    arrays = make_goldens.reduced(ids, logits, keep_last=True)
    meta = {
        "config": config,
        "resaved": resaved,
        "shapes": shapes,
        "zero_centred": case.zero_centred,
        "reference": type(model).__name__,
        "logits_std": float(logits.std()),
        "sdpa_max_abs_diff": 0.0,
    }
    make_goldens.save_npz(GOLDENS / f"family-{name}.npz", arrays, json.loads(json.dumps(meta, default=str)))
    make_goldens.say(f"    deviation of the logits {logits.std():.2f}")


def main() -> None:
    """The command line of the module's docstring."""
    parser = argparse.ArgumentParser(description="Make the goldens of the families.")
    parser.add_argument("case", nargs="*", metavar="CASE")
    for name in parser.parse_args().case or CASES:
        make(name)


if __name__ == "__main__":
    main()
