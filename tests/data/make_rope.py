"""Writes rope.json: rotary frequencies as transformers computes them. Needs the `reference` extra.

    python tests/data/make_rope.py

The stored file came from transformers 5.24.0 and torch 2.13.0 (x86-64, AVX-512).
"""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

CONTEXT = 8192


def frequencies(dim, theta, scaling, length):
    config = LlamaConfig(
        head_dim=dim,
        hidden_size=4 * dim,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    kind = scaling["rope_type"]
    if kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=torch.tensor(length) if length else None)


def main():
    cases = []
    for dim, theta in ((64, 10000.0), (128, 500000.0), (96, 1000000.0)):
        short = [1 + i / 64 for i in range(dim // 2)]
        long = [1 + i / 4 for i in range(dim // 2)]
        for scaling, lengths in (
            ({"rope_type": "default"}, [0]),
            ({"rope_type": "linear", "factor": 4.0}, [0]),
            ({"rope_type": "dynamic", "factor": 2.0}, [0, 8192, 9000, 30000]),
            ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, [0]),
            ({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.5, "high_freq_factor": 6.0}, [0]),
            ({"rope_type": "yarn", "factor": 4.0}, [0]),
            ({"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False}, [0]),
            ({"rope_type": "yarn", "factor": 16.0, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.2}, [0]),
            ({"rope_type": "longrope", "factor": 32.0, "short_factor": short, "long_factor": long}, [0, 4096, 4097]),
        ):
            original = CONTEXT
            if scaling["rope_type"] not in {"default", "linear", "dynamic"}:
                original = scaling["original_max_position_embeddings"] = 4096
            for length in lengths:
                values, factor = frequencies(dim, theta, scaling, length)
                bits = values.numpy().view("uint32").tolist()
                cases.append(
                    {
                        "dim": dim,
                        "theta": theta,
                        "original_context": original,
                        "scaling": scaling,
                        "length": length,
                        "float32_bits": bits,
                        "attention_factor": factor,
                    }
                )
    text = ",\n".join(json.dumps(case) for case in cases)
    (Path(__file__).parent / "rope.json").write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
