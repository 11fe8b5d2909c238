"""Every family that GGUF files can hold is the model of its folder: names by the gguf package, values by its writer."""

import numpy as np
import pytest
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFWriter, RopeScalingType, get_tensor_name_map

from engine.convert.gguf_families import FAMILIES
from engine.convert.source import open_source
from engine.errors import UnsupportedModelError
from tests.factory import byte_alphabet
from tests.goldens import families as goldens
from tests.test_gguf import interleaved

EXTRA = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
TWISTED = {"granite", "ministral3", "mixtral", "smollm3"}
LAYER_NORM = {"cohere", "cohere2", "stablelm", "starcoder2"}


def experts(writer, config):
    writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def caps(writer, config):
    for key, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if config.get(key):
            add(config[key])


def windows(writer, config):
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def olmo3(writer, config):
    windows(writer, config)
    writer.add_rope_freq_base_swa(config["rope_theta"])
    scaled(writer, config)


def gemma2(writer, config):
    caps(writer, config)
    writer.add_sliding_window(config["sliding_window"])


def gemma3(writer, config):
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base_swa(config["rope_local_base_freq"])
    writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])


def phi3(writer, config):
    partly_turned(writer, config)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    for length in ("long", "short"):
        factors = np.array(config["rope_scaling"][f"{length}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{length}.weight", factors)


def granite(writer, config):
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def cohere2(writer, config):
    writer.add_logit_scale(config["logit_scale"])
    windows(writer, config)


def partly_turned(writer, config):
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(size * config["partial_rotary_factor"]))


def scaled(writer, config):
    rope = config.get("rope_parameters") or config["rope_scaling"]
    assert rope["rope_type"] == "yarn"
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if "attention_factor" in rope:
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])


def ministral3(writer, config):
    rope = config["rope_parameters"]
    scaled(writer, config)
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


# Case of the goldens -> architecture, and what its converter writes beside what all write.
CASES = {
    "cohere": ("command-r", lambda writer, config: writer.add_logit_scale(config["logit_scale"])),
    "cohere2": ("cohere2", cohere2),
    "ernie4_5": ("ernie4_5", None),
    "exaone4": ("exaone4", windows),
    "gemma": ("gemma", None),
    "gemma2": ("gemma2", gemma2),
    "gemma3": ("gemma3", gemma3),
    "glm4": ("glm4", partly_turned),
    "granite": ("granite", granite),
    "hunyuan_dense": ("hunyuan-dense", None),
    "ministral3": ("mistral3", ministral3),
    "mixtral": ("llama", experts),
    "olmo2": ("olmo2", None),
    "olmo3": ("olmo2", olmo3),
    "phi3": ("phi3", phi3),
    "qwen2_moe": ("qwen2moe", experts),
    "qwen3_moe": ("qwen3moe", experts),
    "seed_oss": ("seed_oss", None),
    "smollm3": ("smollm3", None),
    "stablelm": ("stablelm", partly_turned),
    "starcoder2": ("starcoder2", None),
}


# What the goldens have, and files of these architectures cannot say.
CHANGES = {
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32, "sliding_window_pattern": 6},
    "granite": {"attention_bias": False, "mlp_bias": False},
    "hunyuan_dense": {"rope_scaling": None},
    "qwen2_moe": {"num_hidden_layers": 1},
    "smollm3": {"no_rope_layers": None},
    "starcoder2": {"sliding_window": None},
}


def model(case):
    """config.json and the shapes of the tensors."""
    _, meta = goldens.golden(case)
    config = meta["config"] | CHANGES.get(case, {})
    layers = {f"model.layers.{number}" for number in range(config["num_hidden_layers"])}
    shapes = {
        name: shape
        for name, shape in meta["shapes"].items()
        if (not name.startswith("model.layers.") or name[: name.index(".", 13)] in layers)
        and not (case == "granite" and name.endswith(".bias"))
    }
    return config, shapes, meta["zero_centred"]


def theta_of(config):
    return (config.get("rope_parameters") or config).get("rope_theta", 10000.0)


def renamed(case, config, tensors):
    """Tensors as llama.cpp's converter leaves them."""
    architecture = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}[CASES[case][0]]
    names = get_tensor_name_map(MODEL_ARCH(architecture), config["num_hidden_layers"])
    stacks = {}
    for theirs, given in tensors.items():
        rows = given
        if case in TWISTED and ("q_proj" in theirs or "k_proj" in theirs):
            heads = config["num_attention_heads" if "q_proj" in theirs else "num_key_value_heads"]
            rows = interleaved(rows, heads)
        if case.startswith("gemma") and theirs.endswith("norm.weight"):
            rows = rows + np.float32(1)
        if ".experts." in theirs:
            before, after = theirs.split(".experts.")
            number, part = after.split(".", 1)
            stacks.setdefault(f"{before}.experts.{part}", {})[int(number)] = rows
            continue
        if theirs.endswith("shared_expert_gate.weight"):
            rows = rows.reshape(-1)
        yield names.get_name(theirs, try_suffixes=(".weight", ".bias")), rows
    for theirs, matrices in stacks.items():
        stacked = np.stack([matrices[number] for number in range(len(matrices))])
        yield names.get_name(theirs, try_suffixes=(".weight", ".bias")), stacked


def write(path, case):
    config, shapes, zero_centred = model(case)
    architecture, more = CASES[case]
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(theta_of(config))
    if case in LAYER_NORM:
        epsilon = next(config[key] for key in ("layer_norm_eps", "norm_epsilon") if key in config)
        writer.add_layer_norm_eps(epsilon)
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if more is not None:
        more(writer, config)
    alphabet = byte_alphabet()
    tokens = [*(alphabet[byte] for byte in range(256)), *EXTRA]
    tokens += [f"<unused{number}>" for number in range(config["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in EXTRA else 5 if token.startswith("<unused") else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)
    values = goldens.tensors(shapes, tied=config.get("tie_word_embeddings", False), zero_centred=zero_centred)
    for name, rows in renamed(case, config, values):
        writer.add_tensor(name, np.ascontiguousarray(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_the_model_of_its_folder(case, tmp_path):
    config, shapes, zero_centred = model(case)
    goldens.write_model(tmp_path / case, config, shapes, zero_centred=zero_centred)
    folder = open_source(tmp_path / case)
    file = open_source(write(tmp_path / f"{case}.gguf", case))
    assert file.spec == folder.spec
    for theirs, ours in zip(folder.assignments, file.assignments, strict=True):
        rows = theirs.tensor.rows
        np.testing.assert_allclose(
            file.rows(ours, 0, rows), folder.rows(theirs, 0, rows), rtol=0, atol=2e-7, err_msg=theirs.tensor.name
        )


def test_every_architecture_is_covered():
    assert FAMILIES.keys() - {"qwen2", "qwen3"} == {architecture for architecture, _ in CASES.values()}


def test_an_unknown_architecture_is_refused_by_name(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="architecture 'mamba'"):
        open_source(tmp_path / "m.gguf")
