"""Conversion: right numbers, the same bytes every time, little memory, and nothing left when it is stopped."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from engine.convert import packing
from engine.convert.convert import convert, quantised_in_memory
from engine.convert.load import open_model
from engine.convert.recipe import conversion_for, recipe
from engine.convert.report import inspect
from engine.convert.source import defaults_from, end_ids_from, open_source
from engine.core.quant import FORMATS
from engine.errors import ModelFolderError, SettingError, UnsupportedModelError
from engine.models.store import open_nook, verify
from engine.models.weights import NO_END_NOTICE, VECTOR
from engine.progress import finish
from engine.settings import Conversion
from tests.factory import bf16, cfg, make, mistral, qwen2, qwen3, st_bytes, tok_json, weights

DOWN = "model.layers.0.mlp.down_proj.weight"
FAMILIES = {"llama": dict, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3}


def opened(path, conversion=Conversion()):
    return finish(open_model(path, conversion))


def matrix(model, name):
    tensor = model.weights.tensor(name)
    if tensor.format == VECTOR:
        return tensor.vector()
    form = FORMATS[tensor.format]
    return form.unpack(tensor.data, tensor.exponent, tensor.rows, tensor.cols, tensor.group)


def same_weights(one, other):
    assert one.weights.names == other.weights.names
    for name in one.weights.names:
        ours, theirs = one.weights.tensor(name), other.weights.tensor(name)
        assert (ours.format, ours.group, ours.exponent) == (theirs.format, theirs.group, theirs.exponent), name
        np.testing.assert_array_equal(ours.data, theirs.data, err_msg=name)


# --- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_file_holds_what_packing_in_memory_gives(family, bits, tmp_path):
    folder = make(tmp_path / "toy", **FAMILIES[family]())
    finish(convert(folder, tmp_path / "toy.nook", Conversion(bits=bits)))
    finish(verify(tmp_path / "toy.nook"))
    file, memory = opened(tmp_path / "toy.nook"), opened(folder, Conversion(bits=bits))
    same_weights(file, memory)
    assert file.spec == memory.spec
    assert (file.files, file.end_ids, file.defaults) == (memory.files, memory.end_ids, memory.defaults)
    assert (file.label, file.name) == (memory.label, memory.name)


@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bits_keep_every_number(family, tmp_path):
    arguments = FAMILIES[family]()
    model = opened(make(tmp_path / "toy", **arguments), Conversion(bits=16))
    theirs = arguments.get("tensors") or weights(cfg())
    np.testing.assert_array_equal(matrix(model, "embedding"), theirs["model.embed_tokens.weight"])
    np.testing.assert_array_equal(matrix(model, "norm"), theirs["model.norm.weight"])
    for number in range(2):
        ours, layer = f"layers.{number}", f"model.layers.{number}"
        stacked = np.concatenate([theirs[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv"])
        np.testing.assert_array_equal(matrix(model, f"{ours}.attention.qkv"), stacked)
        if family == "qwen2":
            biases = np.concatenate([theirs[f"{layer}.self_attn.{part}_proj.bias"] for part in "qkv"])
            np.testing.assert_array_equal(matrix(model, f"{ours}.attention.qkv.bias"), biases)
        if family == "qwen3":
            np.testing.assert_array_equal(
                matrix(model, f"{ours}.attention.k_norm"), theirs[f"{layer}.self_attn.k_norm.weight"]
            )
        gate_up = np.concatenate([theirs[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up")])
        np.testing.assert_array_equal(matrix(model, f"{ours}.feed_forward.gate_up"), gate_up)
        np.testing.assert_array_equal(
            matrix(model, f"{ours}.feed_forward.down"), theirs[f"{layer}.mlp.down_proj.weight"]
        )


@pytest.mark.parametrize(("dtype", "kept"), [("BF16", "bf16"), ("F16", "f16"), ("F32", "f32")])
def test_sixteen_bits_keep_the_source_s_precision(dtype, kept, tmp_path):
    folder = make(tmp_path / "toy", dtype=dtype)
    model = opened(folder, Conversion(bits=16))
    assert {model.weights.tensor(name).format for name in model.weights.names} == {kept, VECTOR}
    assert opened(folder, conversion_for("f32")).label == "float32"
    theirs = weights(cfg())[DOWN]
    rounded = (bf16(theirs).astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else theirs
    rounded = rounded.astype(np.float16).astype(np.float32) if dtype == "F16" else rounded
    np.testing.assert_array_equal(matrix(model, "layers.0.feed_forward.down"), rounded.reshape(theirs.shape))


def test_parts_of_different_precision_become_float32(tmp_path):
    tensors = dict(weights(cfg()))
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = ("BF16", tensors[name].shape, bf16(tensors[name]).tobytes())
    model = opened(make(tmp_path / "toy", tensors=tensors), Conversion(bits=16))
    assert model.weights.tensor("layers.0.attention.qkv").format == "f32"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_codes_are_as_the_format_promises(bits, group, tmp_path, kernels):
    model = opened(make(tmp_path / "toy"), Conversion(bits=bits, group_size=group))
    theirs = weights(cfg())
    name, finer = {4: ("q4", "q6"), 8: ("q8", "q8")}[bits]
    for tensor in ("embedding", "head"):
        assert (model.weights.tensor(tensor).format, model.weights.tensor(tensor).group) == (finer, group)
    down = model.weights.tensor("layers.0.feed_forward.down")
    assert (down.format, down.group) == (name, group)
    packed = FORMATS[name].pack(theirs[DOWN], group, kernels())
    np.testing.assert_array_equal(down.data, packed.buffer)
    assert down.exponent == packed.exponent


@pytest.mark.parametrize("slice_bytes", [1, 16 * 4 * 64, 48 * 4 * 64])
@pytest.mark.parametrize("kept_bytes", [0, 1 << 30])
@pytest.mark.parametrize("conversion", [Conversion(), Conversion(bits=8, group_size=64), Conversion(bits=16)])
def test_slices_do_not_show(conversion, slice_bytes, kept_bytes, tmp_path, monkeypatch):
    """Tensors of 128, 64, 224 and 319 rows; the last is no multiple of 16."""
    config = cfg(intermediate_size=112, vocab_size=319)
    folder = make(tmp_path / "toy", config)
    whole = opened(folder, conversion)
    finish(convert(folder, tmp_path / "whole.nook", conversion))
    monkeypatch.setattr(packing, "_SLICE_BYTES", slice_bytes)
    monkeypatch.setattr(packing, "_KEPT_BYTES", kept_bytes)
    same_weights(opened(folder, conversion), whole)
    finish(convert(folder, tmp_path / "sliced.nook", conversion))
    assert (tmp_path / "sliced.nook").read_bytes() == (tmp_path / "whole.nook").read_bytes()


def test_shapes_that_the_kernels_do_not_take_are_refused_before_conversion(tmp_path):
    for changes, words in (({"intermediate_size": 100}, "intermediate size = 100"), ({"head_dim": 8}, "head_dim = 8")):
        folder = make(tmp_path / "odd", cfg(**changes))
        with pytest.raises(UnsupportedModelError, match=words):
            finish(convert(folder, tmp_path / "odd.nook"))
        assert not inspect(folder).usable


# --- recipes --------------------------------------------------------------------------------------------------------


def test_exceptions_to_the_recipe(tmp_path):
    folder = make(tmp_path / "toy")
    keep = ("layers.*=q8", "layers.1.*=f32", "layers.1.attention.qkv=q4", "head=f16")
    finish(convert(folder, tmp_path / "toy.nook", Conversion(keep=keep)))
    model = open_nook(tmp_path / "toy.nook")
    formats = {name: model.weights.tensor(name).format for name in model.weights.names}
    assert formats["layers.0.attention.qkv"] == "q8"
    assert formats["layers.1.feed_forward.down"] == "f32"
    assert formats["layers.1.attention.qkv"] == "q4"
    assert formats["head"] == "f16"
    assert formats["embedding"] == "q6"
    assert formats["layers.1.attention.norm"] == VECTOR


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("layers.7.*=q8", "matches no tensor"),
        ("lm_head.weight=q8", "matches no tensor"),
        ("*.norm=q8", "only norms and biases"),
        ("head=q3", "write PATTERN=FORMAT"),
        ("head", "write PATTERN=FORMAT"),
    ],
)
def test_a_useless_exception_is_an_error(rule, words, tmp_path):
    with pytest.raises(SettingError, match=words) as caught:
        finish(convert(make(tmp_path / "toy"), tmp_path / "toy.nook", Conversion(keep=(rule,))))
    assert rule.partition("=")[0] in str(caught.value)
    assert not (tmp_path / "toy.nook").exists()


def test_short_names_of_conversions():
    assert conversion_for("auto") == conversion_for("q4") == Conversion()
    with pytest.raises(SettingError, match="dtype must be one of"):
        conversion_for("q3")


def test_a_recipe_covers_every_tensor(tmp_path):
    source = open_source(make(tmp_path / "toy"))
    kept = {assignment.tensor.name: source.kept(assignment) for assignment in source.assignments}
    assert recipe(source.spec, Conversion(), kept, {}).keys() == {tensor.name for tensor in source.spec.tensors()}


# --- tied heads (F03) -----------------------------------------------------------------------------------------------


def test_a_tied_head_with_and_without_its_tensor(tmp_path):
    config = cfg(tie_word_embeddings=True)
    same = weights(config)
    same["lm_head.weight"] = same["model.embed_tokens.weight"]
    without = opened(make(tmp_path / "no_head", config, weights(config, lm_head=False)))
    with_same = opened(make(tmp_path / "same_head", config, same))
    with_other = opened(make(tmp_path / "other_head", config, weights(config)))
    same_weights(without, with_same)
    same_weights(without, with_other)
    assert not without.notices
    assert not with_same.notices
    assert len(with_other.notices) == 1
    assert "lm_head.weight differs from model.embed_tokens.weight" in with_other.notices[0]
    finish(convert(tmp_path / "other_head", tmp_path / "other.nook"))
    assert open_nook(tmp_path / "other.nook").notices == with_other.notices


# --- vocabularies (F05) and end tokens (T06) ------------------------------------------------------------------------


def test_rows_beyond_the_tokenizer_are_padding(tmp_path):
    folder = make(tmp_path / "padded", cfg(vocab_size=512))
    finish(convert(folder, tmp_path / "padded.nook"))
    assert open_nook(tmp_path / "padded.nook").spec.vocab_size == 512


def test_tokens_beyond_the_rows_are_named(tmp_path):
    folder = make(tmp_path / "short", cfg(vocab_size=258))
    with pytest.raises(ModelFolderError, match=r"<\|im_start\|> = 258, <\|im_end\|> = 259") as caught:
        finish(convert(folder, tmp_path / "short.nook"))
    assert "258 rows" in str(caught.value)
    assert not (tmp_path / "short.nook").exists()


def test_tokens_that_only_the_configuration_declares_count(tmp_path):
    declared = {"added_tokens_decoder": {"320": {"content": "<pad>", "special": True}}}
    with pytest.raises(ModelFolderError, match="<pad> = 320"):
        open_source(make(tmp_path / "declared", tokcfg=declared))


@pytest.mark.parametrize(
    ("config", "gen", "tokcfg", "expected", "notices"),
    [
        ({"eos_token_id": 257}, {"eos_token_id": [259, 257]}, {"eos_token": "<|im_end|>"}, {257, 259}, 0),
        ({"eos_token_id": 257}, None, {"eos_token": "<|im_end|>"}, {257, 259}, 0),
        ({"eos_token_id": None}, {"eos_token_id": None}, {"eos_token": None}, set(), 0),
        ({"eos_token_id": [257, 99999]}, None, {}, {257}, 1),
        ({"eos_token_id": -1}, {"eos_token_id": True}, {}, {257}, 2),
        ({"eos_token_id": "257"}, {"eos_token_id": {"a": 1}}, {}, {257}, 2),
    ],
)
def test_end_tokens_are_the_union_of_all_sources(config, gen, tokcfg, expected, notices, tmp_path):
    source = open_source(make(tmp_path / "m", cfg(**config), gen=gen, tokcfg=tokcfg))
    assert source.end_ids == expected
    assert len(source.notices) == notices


def test_wrong_end_tokens_of_one_file_are_one_notice():
    found, notices = end_ids_from({"config.json": [[1], 2, 1, None, True, 1.0, "2"]}, 10)
    assert found == {1, 2}
    assert notices == ["config.json names the end token [1] and 3 more, which is no token of the model; it is ignored"]


def test_a_folder_without_a_tokenizer_can_be_opened_but_not_converted(tmp_path):
    folder = make(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    assert "there is no tokenizer" in opened(folder).notices[0]
    with pytest.raises(ModelFolderError, match="has no tokenizer") as refusal:
        finish(convert(folder, tmp_path / "m.nook"))
    report = inspect(folder)
    assert not report.usable
    assert [problem.sentence for problem in report.problems] == [str(refusal.value)]


def test_a_turn_that_the_template_ends_needs_no_named_end_token(tmp_path):
    """The notice is for models whose answers have no end at all, and is given once."""
    config, nothing = cfg(eos_token_id=...), {"eos_token": None}
    by_template = opened(make(tmp_path / "template", config, tokcfg=nothing))
    assert (by_template.end_ids, by_template.notices) == (frozenset(), ())
    endless = opened(make(tmp_path / "endless", config, tokcfg=nothing, template=None))
    assert endless.notices == (NO_END_NOTICE,)


def test_a_damaged_tokenizer_is_found_before_conversion(tmp_path):
    folder = make(tmp_path / "m")
    (folder / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises((ModelFolderError, UnsupportedModelError), match=r"tokenizer\.json"):
        open_source(folder)


def test_recommended_settings():
    generation = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0,
        "repetition_penalty": 1.1,
        "do_sample": True,
        "max_length": 20,
    }
    defaults, notices = defaults_from(generation)
    assert defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.1}
    assert notices == []
    assert defaults_from({"do_sample": False, "temperature": 0.6})[0] == {"temperature": 0.0}
    defaults, notices = defaults_from({"temperature": 50, "top_k": "20", "top_p": None})
    assert defaults == {}
    assert len(notices) == 2


# --- weights beyond the ordinary (F15) ------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_large_and_tiny_weights_survive(bits, tmp_path):
    tensors = weights(cfg())
    tensors[DOWN][0], tensors[DOWN][1] = 7e4, 1e-30
    folder = make(tmp_path / "range", cfg(torch_dtype="bfloat16"), tensors, dtype="BF16")
    down = matrix(opened(folder, Conversion(bits=bits)), "layers.0.feed_forward.down")
    assert np.isfinite(down).all()
    np.testing.assert_allclose(down[0], 7e4, rtol=1 / 128)
    assert np.abs(down[1]).max() < 1e-20


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize(
    ("name", "row"),
    [
        (DOWN, 3),
        ("model.layers.1.self_attn.k_proj.weight", 31),
        ("model.layers.1.self_attn.v_proj.weight", 0),
        ("model.layers.0.input_layernorm.weight", 5),
        ("lm_head.weight", 319),
    ],
)
def test_a_weight_that_is_no_number_is_refused_by_name(name, row, bits, value, tmp_path):
    tensors = weights(cfg())
    tensors[name][row] = value
    folder = make(tmp_path / "nan", tensors=tensors)
    for work in (
        convert(folder, tmp_path / "nan.nook", Conversion(bits=bits)),
        open_model(folder, Conversion(bits=bits)),
    ):
        with pytest.raises(ModelFolderError, match="NaN or infinite") as caught:
            finish(work)
        assert str(caught.value).startswith(name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nan"]


def test_a_weight_too_large_for_float16_is_refused_by_name(tmp_path):
    tensors = weights(cfg())
    tensors[DOWN][2, 5] = 7e4
    folder = make(tmp_path / "m", tensors=tensors)
    with pytest.raises(ModelFolderError, match="too large for f16") as caught:
        opened(folder, Conversion(keep=("*.down=f16",)))
    assert str(caught.value).startswith(DOWN)


def test_a_float64_source_is_rounded_once(tmp_path):
    tensors = weights(cfg())
    wide = {name: ("F64", array.shape, array.astype(np.float64).tobytes()) for name, array in tensors.items()}
    same_weights(opened(make(tmp_path / "f64", tensors=wide)), opened(make(tmp_path / "f32", tensors=tensors)))


# --- tensors nobody uses (F16) --------------------------------------------------------------------------------------


def test_a_harmless_buffer_converts(tmp_path):
    tensors = weights(cfg()) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    finish(convert(make(tmp_path / "inv", tensors=tensors), tmp_path / "inv.nook"))
    finish(convert(make(tmp_path / "plain"), tmp_path / "plain.nook"))
    same_weights(open_nook(tmp_path / "inv.nook"), open_nook(tmp_path / "plain.nook"))


@pytest.mark.parametrize(
    ("config", "extra"),
    [
        (cfg(), "model.layers.0.self_attn.q_proj.bias"),
        (cfg(), "model.layers.0.self_attn.q_norm.weight"),
        (cfg(model_type="newthing", architectures=["NewThingForCausalLM"]), None),
    ],
)
def test_what_is_not_used_is_refused(config, extra, tmp_path):
    tensors = weights(config) | ({extra: np.ones(64, np.float32)} if extra else {})
    with pytest.raises(UnsupportedModelError) as caught:
        finish(convert(make(tmp_path / "m", config, tensors), tmp_path / "m.nook"))
    assert (extra or "NewThingForCausalLM") in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


# --- progress and stops (F17) ---------------------------------------------------------------------------------------


def test_progress_runs_from_nothing_to_all(tmp_path):
    folder = make(tmp_path / "toy")
    steps = list(convert(folder, tmp_path / "toy.nook"))
    assert steps[0].done == 0
    assert steps[-1].done == steps[-1].total == sum(array.nbytes for array in weights(cfg()).values())
    assert [step.done for step in steps] == sorted(step.done for step in steps)
    assert all((step.stage, step.unit) == ("convert", "bytes") for step in steps)
    assert {"embedding", "layers.1.attention.qkv", "head"} <= {step.note for step in steps}


def test_a_load_can_be_stopped_anywhere(tmp_path):
    folder = make(tmp_path / "toy")
    for count in range(1, 20, 4):
        work = quantised_in_memory(open_source(folder), Conversion())
        for _ in range(count):
            assert next(work).stage == "load"
        work.close()


def in_child(code, *arguments):
    program = "import sys\nfrom pathlib import Path\nfrom engine.convert.convert import convert\n" + textwrap.dedent(
        code
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_killed_conversion_leaves_no_file_and_the_next_one_is_clean(tmp_path):
    folder, out = make(tmp_path / "toy"), tmp_path / "out" / "toy.nook"
    out.parent.mkdir()
    child = in_child(
        """
        for number, step in enumerate(convert(Path(sys.argv[1]), Path(sys.argv[2]))):
            if number == 12:
                print("half", flush=True)
                sys.stdin.read()
        """,
        folder,
        out,
    )
    assert child.stdout.readline() == "half\n"
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    assert not out.exists()
    assert list(out.parent.iterdir())
    # Another conversion into the folder clears what the killed one left; so does the same one.
    finish(convert(folder, out.with_name("other.nook")))
    assert [path.name for path in out.parent.iterdir()] == ["other.nook"]
    finish(convert(folder, out))
    assert out.read_bytes() == out.with_name("other.nook").read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX limits")
@pytest.mark.parametrize("limit", [20_000, 60_000, 100_000])
def test_a_real_write_error_leaves_nothing(limit, tmp_path):
    folder, out = make(tmp_path / "toy"), tmp_path / "out" / "toy.nook"
    out.parent.mkdir()
    child = in_child(
        """
        import resource
        from engine.errors import OutOfSpaceError
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
        try:
            list(convert(Path(sys.argv[1]), Path(sys.argv[2])))
        except OutOfSpaceError as error:
            print(error)
        """,
        folder,
        out,
        limit,
    )
    said, complaints = child.communicate(timeout=60)
    assert "became full" in said, complaints
    assert list(out.parent.iterdir()) == []


def test_stopping_takes_less_than_a_second_on_a_large_tensor(tmp_path):
    config = cfg(vocab_size=40_000, hidden_size=256, head_dim=16, num_hidden_layers=1)
    folder = make(tmp_path / "m", config)
    work = convert(folder, tmp_path / "m.nook")
    for _ in range(3):
        next(work)
    start = time.monotonic()
    work.close()
    assert time.monotonic() - start < 1


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX accounting")
def test_memory_stays_small_whatever_the_tensor(tmp_path):
    """A tensor of 200 MB of float32 passes through a process that may grow by far less."""
    rows, columns = 200_000, 256
    config = cfg(vocab_size=rows, hidden_size=columns, head_dim=16, num_hidden_layers=1)
    folder = make(tmp_path / "m", cfg(), tok=tok_json())
    tensors = weights({**config, "vocab_size": 320}, lm_head=False)
    block = bf16(np.random.default_rng(0).normal(0, 0.02, (rows, columns))).tobytes()
    tensors["model.embed_tokens.weight"] = ("BF16", (rows, columns), block)
    make(folder, {**config, "tie_word_embeddings": True}, tensors)
    child = in_child(
        """
        import resource
        from engine.convert import packing
        packing._KEPT_BYTES = 16 << 20
        from engine.convert.source import open_source
        open_source(Path(sys.argv[1]))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        list(convert(Path(sys.argv[1]), Path(sys.argv[2])))
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
        """,
        folder,
        tmp_path / "m.nook",
    )
    said, complaints = child.communicate(timeout=110)
    assert int(said) < 150, complaints


def test_the_source_may_be_a_gguf_or_a_folder_but_not_a_nook_file(tmp_path):
    folder = make(tmp_path / "toy")
    finish(convert(folder, tmp_path / "toy.nook"))
    with pytest.raises(Exception, match=r"is a \.nook file already"):
        finish(convert(tmp_path / "toy.nook", tmp_path / "again.nook"))


def test_hidden_tensors_of_a_header_are_not_overlooked(tmp_path):
    folder = make(tmp_path / "toy")
    tensors = weights(cfg()) | {"surprise": np.ones(3, np.float32)}
    (folder / "model.safetensors").write_bytes(st_bytes(tensors))
    with pytest.raises(UnsupportedModelError, match="surprise"):
        open_source(folder)


# --- a source that is written to meanwhile --------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_source_overwritten_meanwhile_is_refused(file, resume, tmp_path):
    folder = make(tmp_path / "toy")
    steps = convert(folder, tmp_path / "toy.nook", resume=resume)
    while next(steps).done == 0:
        pass
    weights_file = folder / file
    data = weights_file.read_bytes()
    with weights_file.open("r+b") as opened_file:
        opened_file.write(data)
    status = weights_file.stat()
    os.utime(weights_file, ns=(status.st_atime_ns, status.st_mtime_ns + 10_000_000))
    with pytest.raises(ModelFolderError, match=f"{file} was changed while it was read"):
        finish(steps)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toy"]


def test_a_source_removed_meanwhile_is_refused_in_memory_too(tmp_path):
    folder = make(tmp_path / "toy")
    steps = open_model(folder)
    while (progress := next(steps)).done < progress.total:
        if progress.done:
            (folder / "config.json").unlink(missing_ok=True)
        if progress.note == "norm":
            break
    with pytest.raises(ModelFolderError, match=r"config\.json was changed"):
        finish(steps)
