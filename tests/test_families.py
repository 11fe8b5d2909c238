"""Configurations: every key read, refused by name or harmless; every tensor used once and every one of ours filled."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InputError, ModelFolderError, UnsupportedModelError
from engine.models.assignment import assign, is_optional
from engine.models.families import Blueprint, families, recognise
from engine.models.hf_config import HARMLESS, HfConfig
from engine.models.names import table
from engine.models.spec import ModelSpec, RopeScaling
from tests.factory import cfg, mistral, qwen2, qwen3, weights

LLAMA, MISTRAL, QWEN2, QWEN3 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
CONFIGS = {
    LLAMA: cfg,
    MISTRAL: lambda **changes: mistral(**changes)["config"],
    QWEN2: lambda **changes: qwen2(**changes)["config"],
    QWEN3: lambda **changes: qwen3(**changes)["config"],
}


def shapes(tensors):
    return {name: tensor.shape for name, tensor in tensors.items()}


def attention(config, layer=0):
    return recognise(config).spec.layers[layer].attention


def windows(config):
    return [layer.attention.window for layer in recognise(config).spec.layers]


# --- what is read ---------------------------------------------------------------------------------------------------


def test_the_families_of_this_version():
    architectures = [name for together in families() for name in together]
    assert set(CONFIGS) < set(architectures)
    assert len(architectures) == len(set(architectures))


@pytest.mark.parametrize("family", CONFIGS)
def test_a_family_reads_its_own_configuration(family):
    spec = recognise(CONFIGS[family]()).spec
    assert spec.family == family
    assert (spec.hidden, spec.vocab_size, spec.context, len(spec.layers)) == (64, 320, 256, 2)
    assert spec.norm_epsilon == 1e-5
    layer = spec.layers[0]
    assert layer.feed_forward.intermediate == 96
    assert layer.attention.qkv_bias == (family == QWEN2)
    assert not layer.attention.out_bias
    assert layer.attention.qk_norm == ("head" if family == QWEN3 else None)
    assert spec.tied_head == (family in {QWEN2, QWEN3})


@pytest.mark.parametrize("family", CONFIGS)
def test_a_specification_survives_its_json(family):
    spec = recognise(CONFIGS[family](rope_scaling={"type": "yarn", "factor": 4.0})).spec
    assert ModelSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": "64"},
        {"hidden": True},
        {"hidden": 64.0},
        {"hidden": 0},
        {"hidden": 1 << 40},
        {"norm_epsilon": float("nan")},
        {"context": -1},
        {"layers": []},
        {"surprise": 1},
    ],
)
def test_json_that_is_no_specification_is_refused(change):
    values = recognise(cfg()).spec.to_json() | change
    with pytest.raises(ValueError):
        ModelSpec.from_json(values)


def test_biases_follow_their_flags():
    plain = attention(cfg(attention_bias=True))
    assert plain.qkv_bias
    assert plain.out_bias
    assert recognise(cfg(mlp_bias=True)).spec.layers[0].feed_forward.bias
    both = attention(CONFIGS[QWEN3](attention_bias=True))
    assert both.qkv_bias
    assert both.out_bias
    assert not attention(CONFIGS[QWEN2]()).out_bias


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"head_dim": 32}, (4, 2, 32)),
        ({"head_dim": None}, (4, 2, 16)),
        ({"num_key_value_heads": ...}, (4, 4, 16)),
        ({"num_key_value_heads": None}, (4, 4, 16)),
        ({"num_key_value_heads": 1}, (4, 1, 16)),
        ({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 16}, (5, 5, 16)),
    ],
)
def test_heads(changes, expected):
    found = attention(cfg(**changes))
    assert (found.heads, found.kv_heads, found.head_dim) == expected
    assert found.scale == expected[2] ** -0.5
    assert found.rope.dim == expected[2]


def test_windows_of_mistral_hold_in_every_layer():
    assert windows(CONFIGS[MISTRAL](sliding_window=32)) == [32, 32]
    assert windows(CONFIGS[MISTRAL](sliding_window=None)) == [None, None]
    # what the reference takes for a key that is absent
    assert windows(CONFIGS[MISTRAL](sliding_window=...)) == [4096, 4096]


@pytest.mark.parametrize("family", [QWEN2, QWEN3])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 32}, [None, None]),
        ({"sliding_window": 32, "use_sliding_window": False}, [None, None]),
        ({"sliding_window": 32, "use_sliding_window": True}, [None, None]),  # layers from 28 on have one
        ({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}, [None, 32]),
        ({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0}, [32, 32]),
        ({"use_sliding_window": True, "max_window_layers": 0}, [4096, 4096]),
        ({"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, [None, None]),
        (
            {
                "sliding_window": 32,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            [32, None],
        ),
        ({"sliding_window": None, "layer_types": ["full_attention", "full_attention"]}, [None, None]),
    ],
)
def test_windows_of_qwen(family, changes, expected):
    assert windows(CONFIGS[family](**changes)) == expected


def test_harmless_keys_are_harmless():
    noise = dict.fromkeys(HARMLESS - {"architectures", "model_type"}, 7)
    assert recognise(cfg() | noise).spec == recognise(cfg()).spec
    assert recognise(cfg(whatever=None)).spec == recognise(cfg()).spec


# --- what is refused ------------------------------------------------------------------------------------------------

REFUSED = [
    (cfg(model_type="newthing", architectures=["NewThingForCausalLM"]), ["NewThingForCausalLM", "docs/models.md"]),
    (
        cfg(architectures=["LlamaForSequenceClassification"]),
        ["LlamaForSequenceClassification", "a head that classifies"],
    ),
    (cfg(architectures=["MambaForCausalLM"]), ["MambaForCausalLM", "state space layers"]),
    (cfg(architectures=None, model_type="newthing"), ["newthing"]),
    (cfg(model_type="granite"), ["LlamaForCausalLM", '"granite"']),
    (cfg(logits_scaling=16.0, final_logit_softcapping=30.0), ["final_logit_softcapping", "logits_scaling"]),
    (cfg(residual_multiplier=1.0), ["residual_multiplier"]),
    (cfg(sliding_window=4096), ["sliding_window"]),
    (cfg(hidden_act="relu6"), ["hidden_act", '"relu6"', "silu"]),
    (cfg(partial_rotary_factor=0.5), ["partial_rotary_factor", "0.5"]),
    (cfg(rope_interleaved=True), ["rope_interleaved"]),
    (cfg(head_dim=15), ["15 numbers of a head", "pairs"]),
    (CONFIGS[QWEN2](use_mrope=True), ["use_mrope"]),
    (CONFIGS[QWEN2](attention_bias=False), ["attention_bias"]),
    (CONFIGS[QWEN2](layer_types=["chunked_attention"] * 2), ["layer_types", "chunked_attention"]),
    (CONFIGS[MISTRAL](sliding_window=8, layer_types=["full_attention"] * 2), ["layer_types", "sliding_window"]),
]


@pytest.mark.parametrize(("config", "words"), REFUSED, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_what_is_not_supported_is_refused_by_name(config, words):
    with pytest.raises(UnsupportedModelError) as caught:
        recognise(config)
    for word in words:
        assert word in str(caught.value)


WRONG = [
    (cfg(hidden_size="64"), ["hidden_size", '"64"', "config.json"]),
    (cfg(hidden_size=True), ["hidden_size", "true"]),
    (cfg(hidden_size=64.0), ["hidden_size", "64.0"]),
    (cfg(hidden_size=-64), ["hidden_size", "-64"]),
    (cfg(hidden_size=...), ["config.json does not say hidden_size"]),
    (cfg(hidden_size=66, head_dim=None), ["hidden_size = 66", "4"]),
    (cfg(num_key_value_heads=3), ["4 attention heads", "3 key/value heads"]),
    (cfg(num_hidden_layers=10**9), ["num_hidden_layers = 1000000000"]),
    (cfg(num_hidden_layers=0), ["num_hidden_layers"]),
    (cfg(rms_norm_eps=float("nan")), ["rms_norm_eps"]),
    (cfg(rms_norm_eps=float("inf")), ["rms_norm_eps"]),
    (cfg(rope_theta=0), ["rope_theta"]),
    (cfg(tie_word_embeddings="yes"), ["tie_word_embeddings", '"yes"']),
    (cfg(architectures="LlamaForCausalLM"), ["architectures"]),
    (cfg(architectures=None, model_type=None), ["no architecture"]),
    (CONFIGS[QWEN2](layer_types=["full_attention"]), ["layer_types", "1 entries"]),
    (CONFIGS[QWEN2](layer_types=["sliding_attention"] * 2), ["layer_types", "window"]),
]


@pytest.mark.parametrize(("config", "words"), WRONG, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_what_is_wrong_is_named(config, words):
    with pytest.raises(ModelFolderError) as caught:
        recognise(config)
    for word in words:
        assert word in str(caught.value)


def test_a_monstrous_value_does_not_make_a_monstrous_message():
    for value in ("x" * 10**6, [1] * 10**6, {"a" * 10**6: 1}):
        with pytest.raises(InputError) as caught:
            recognise(cfg(hidden_size=value))
        assert len(str(caught.value)) < 300
    for key in ("hidden_act", "model_type"):
        with pytest.raises(InputError) as caught:
            recognise(cfg(**{key: "x" * 10**6}))
        assert len(str(caught.value)) < 300
    for changes in ({"architectures": ["x" * 10**6]}, {"rope_scaling": {"type": "x" * 10**6}}):
        with pytest.raises(InputError) as caught:
            recognise(cfg(**changes))
        assert len(str(caught.value)) < 300
    with pytest.raises(InputError) as caught:
        recognise(cfg(**{f"key{n}": 1 for n in range(1000)}))
    assert "and 995 more" in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted(
    {*cfg(), "rope_scaling", "rope_parameters", "head_dim", "sliding_window", "layer_types", "attention_bias"}
)


@given(st.sampled_from(list(CONFIGS)), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3))
def test_any_value_of_any_key_gives_a_sound_specification_or_a_sentence(family, changes):
    try:
        spec = recognise(CONFIGS[family]() | changes).spec
    except InputError:
        return
    assert ModelSpec.from_json(spec.to_json()) == spec


# --- rotary positions (F07, F08) ------------------------------------------------------------------------------------


def rope(**changes):
    blueprint = recognise(cfg(**changes))
    return blueprint.spec.layers[0].attention.rope, blueprint.spec.context, blueprint.notices


@pytest.mark.parametrize(
    "given", [None, {}, {"rope_type": "default", "rope_theta": 1e4}, {"type": "default"}, {"rope_type": "default"}]
)
def test_no_scaling_in_all_its_spellings(given):
    assert rope(rope_scaling=given) == rope()
    assert rope()[0].scaling is None


SCALINGS = [
    ({"type": "linear", "factor": 4.0}, RopeScaling("linear", 4.0, 256), 1024, 0),
    ({"rope_type": "linear", "factor": 4}, RopeScaling("linear", 4.0, 256), 1024, 0),
    ({"type": "dynamic", "factor": 2.0}, RopeScaling("dynamic", 2.0, 256), 256, 1),
    ({"type": "yarn", "factor": 4.0}, RopeScaling("yarn", 4.0, 256), 1024, 1),
    (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        RopeScaling("yarn", 4.0, 64),
        256,
        0,
    ),
    (
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64, "mscale": 0.7, "truncate": False},
        RopeScaling("yarn", 4.0, 64, mscale=0.7, truncate=False),
        256,
        0,
    ),
    (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        RopeScaling("llama3", 8.0, 64),
        256,
        0,
    ),
    (
        {"type": "linear", "rope_type": "linear", "factor": 2.0, "finetuned": True},
        RopeScaling("linear", 2.0, 256),
        512,
        0,
    ),
]


@pytest.mark.parametrize(("given", "scaling", "context", "notices"), SCALINGS)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaling(key, given, scaling, context, notices):
    found = rope(**{key: given})
    assert found[0].scaling == scaling
    assert found[1] == context
    assert len(found[2]) == notices


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"type": "su", "short_factor": [1.0] * 8}, ["long_factor", "rope_scaling"]),
        ({"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 7}, ["long_factor", "7 entries", "8 pairs"]),
        ({"rope_type": "frobnicate", "factor": 2}, ['"frobnicate"', "linear"]),
        ({"type": "linear", "factor": 0}, ["factor = 0"]),
        ({"type": "linear", "factor": 0.5}, ["factor = 0.5", "at least 1"]),
        ({"type": "linear", "factor": "4"}, ["factor", '"4"']),
        ({"type": "linear"}, ["does not say factor"]),
        ({"type": "linear", "factor": 2, "surprise": 1}, ["surprise"]),
        ({"rope_type": "default", "factor": 2}, ["factor = 2"]),
        ({"type": "yarn", "rope_type": "linear", "factor": 2}, ["type", "rope_type"]),
        ({"rope_type": "llama3", "factor": 8.0}, ["low_freq_factor"]),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}, ["high_freq_factor"]),
        ({"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"mrope_section": [1, 2], "rope_type": "default"}, ["mrope_section"]),
        (1, ["rope_scaling = 1", "not an object"]),
        ([{"type": "linear"}], ["not an object"]),
    ],
)
def test_scaling_that_is_refused(given, words):
    with pytest.raises(InputError) as caught:
        rope(rope_scaling=given)
    for word in words:
        assert word in str(caught.value)


def test_theta_in_its_old_and_new_place():
    old = rope(rope_theta=5e5)
    assert rope(rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 5e5}) == old
    assert rope(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}) == old
    assert rope(rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 500000}) == old
    by_kind = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}
    assert rope(rope_theta=..., rope_parameters=by_kind) == old
    assert old[0].theta == 5e5
    assert rope(rope_theta=...)[0].theta == 10000.0


def test_the_new_place_wins_with_a_notice():
    found, _, notices = rope(rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert found.theta == 5e5
    assert len(notices) == 1
    assert "500000" in notices[0]
    assert "10000" in notices[0]


def test_both_places_must_agree():
    scaling = {"rope_type": "linear", "factor": 2.0}
    assert rope(rope_scaling=scaling, rope_parameters=scaling | {"rope_theta": 1e4}) == rope(rope_scaling=scaling)
    with pytest.raises(ModelFolderError, match="disagree on factor"):
        rope(rope_scaling=scaling, rope_parameters=scaling | {"factor": 4.0})


def test_parameters_by_kind_of_layer():
    by_kind = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    config = CONFIGS[QWEN3](
        rope_theta=...,
        rope_parameters=by_kind,
        use_sliding_window=True,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"],
    )
    assert [layer.attention.rope.theta for layer in recognise(config).spec.layers] == [1e4, 1e6]
    del by_kind["sliding_attention"]
    with pytest.raises(ModelFolderError, match="sliding_attention"):
        recognise(config)
    with pytest.raises(ModelFolderError, match="mixes"):
        rope(rope_parameters={"full_attention": {"rope_theta": 1e6}, "rope_type": "default"})


# --- tensors (F01, F03, F06, F16) -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CONFIGS)
def test_every_tensor_is_used_once_and_every_one_of_ours_filled(family):
    config = CONFIGS[family]()
    theirs = shapes(weights(config, lm_head=not config["tie_word_embeddings"]))
    found = assign(recognise(config), theirs)
    used = [source for assignment in found.tensors for source in assignment.sources]
    assert sorted(used) == sorted(theirs)
    assert [assignment.tensor for assignment in found.tensors] == list(recognise(config).spec.tensors())
    assert sum(assignment.tensor.parameters for assignment in found.tensors) == recognise(config).spec.parameters
    assert found.redundant == found.notices == ()


def llama(**changes):
    return recognise(cfg(**changes))


def test_missing_tensors_are_listed():
    theirs = shapes(weights(cfg()))
    del theirs["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(
        ModelFolderError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight, which LlamaForCausalLM needs"
    ):
        assign(llama(), theirs)


def test_a_bias_the_file_has_is_never_dropped():
    theirs = shapes(weights(cfg())) | {"model.layers.0.self_attn.q_proj.bias": (64,)}
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias"):
        assign(llama(), theirs)
    with pytest.raises(ModelFolderError, match=r"lack model\.layers\.0\.self_attn\.k_proj\.bias"):
        assign(llama(attention_bias=True), theirs)
    complete = cfg(attention_bias=True)
    assert assign(recognise(complete), shapes(weights(complete)))


def test_norms_of_heads_are_never_dropped():
    theirs = shapes(weights(cfg())) | {"model.layers.0.self_attn.q_norm.weight": (16,)}
    with pytest.raises(UnsupportedModelError, match=r"q_norm\.weight"):
        assign(llama(), theirs)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "model.layers.0.self_attn.rotary_emb.cos_cached",
        "position_ids",
    ],
)
def test_buffers_are_harmless(name):
    theirs = shapes(weights(cfg())) | {name: (8,)}
    assert assign(llama(), theirs) == assign(llama(), shapes(weights(cfg())))
    assert is_optional(name, llama())


def test_layers_beyond_the_configured_ones_are_left_out_with_a_notice():
    theirs = shapes(weights(cfg())) | {"model.layers.2.eh_proj.weight": (64, 128), "model.layers.2.norm.weight": (64,)}
    found = assign(llama(), theirs)
    assert found.tensors == assign(llama(), shapes(weights(cfg()))).tensors
    assert len(found.notices) == 1
    assert "layer 2" in found.notices[0]
    assert is_optional("model.layers.2.eh_proj.weight", llama())
    assert not is_optional("model.layers.1.eh_proj.weight", llama())


def test_a_tied_head_is_the_embedding():
    tied = llama(tie_word_embeddings=True)
    without = assign(tied, shapes(weights(cfg(), lm_head=False)))
    beside = assign(tied, shapes(weights(cfg())))
    assert without.tensors == beside.tensors
    assert without.redundant == ()
    assert beside.redundant == (("lm_head.weight", "model.embed_tokens.weight"),)
    with pytest.raises(ModelFolderError, match=r"lack lm_head\.weight"):
        assign(llama(), shapes(weights(cfg(), lm_head=False)))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"head_dim": 8}, "q_proj"),
        ({"num_key_value_heads": 4}, "k_proj"),
        ({"intermediate_size": 128}, "gate_proj"),
        ({"hidden_size": 128, "head_dim": 16}, "embed_tokens"),
        ({"vocab_size": 321}, "embed_tokens"),
    ],
)
def test_a_shape_that_contradicts_the_configuration_is_named(changes, name):
    with pytest.raises(ModelFolderError) as caught:
        assign(llama(**changes), shapes(weights(cfg())))
    assert name in str(caught.value)
    assert " x " in str(caught.value)


def test_a_single_tensor_may_hold_all_parts():
    plain = llama()
    names = dict(plain.names) | table({"layers.{n}.attention.qkv": "model.layers.{n}.qkv.weight"})
    theirs = shapes(weights(cfg()))
    for number in range(2):
        for part in "qkv":
            del theirs[f"model.layers.{number}.self_attn.{part}_proj.weight"]
        theirs[f"model.layers.{number}.qkv.weight"] = (128, 64)
    found = assign(Blueprint(plain.spec, names), theirs)
    assert found.tensors[2].sources == ("model.layers.0.qkv.weight",)


def test_reading_a_key_twice_or_never():
    config = HfConfig({"a": 1, "b": 2})
    assert config.size("a") == config.size("a") == 1
    with pytest.raises(UnsupportedModelError, match=r"config\.json sets b, which X"):
        config.close("X")
    config.close("X", {"b"})


def test_a_spec_with_impossible_heads_cannot_be_made():
    good = recognise(cfg()).spec.layers[0].attention
    with pytest.raises(ValueError):
        replace(good, kv_heads=3)
    with pytest.raises(ValueError):
        replace(good, rope=replace(good.rope, dim=32))
