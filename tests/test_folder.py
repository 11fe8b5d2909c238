"""Model folders: whatever is wrong with one ends in a sentence, and nothing in it is ever run or followed outside."""

import json
import os
import shutil
import sys
import zipfile

import numpy as np
import pytest

from engine.convert.convert import convert
from engine.convert.files import parse_json, plain_name
from engine.convert.folder import describe, find_model, model_name, stored_tensors
from engine.convert.report import inspect
from engine.convert.source import open_source
from engine.errors import InputError, ModelFolderError, UnsupportedModelError
from engine.models.store import open_nook
from engine.progress import finish
from tests.factory import cfg, make, shard, st_bytes, weights

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def refused(path, kind=ModelFolderError):
    """The sentence with which a model is refused, by `open_source` and by `inspect` alike."""
    with pytest.raises(kind) as caught:
        open_source(path)
    sentence = str(caught.value)
    assert "\n" not in sentence
    report = inspect(path)
    assert not report.usable
    assert [problem.sentence for problem in report.problems if problem.fatal] == [sentence]
    return sentence


# --- shards and their index (F01, F13) ------------------------------------------------------------------------------


def test_shards_hold_the_same_model_as_one_file(tmp_path):
    tensors = weights(cfg())
    whole = open_source(make(tmp_path / "whole", tensors=tensors))
    split = open_source(shard(make(tmp_path / "split"), tensors, 3))
    for ours, theirs in zip(whole.assignments, split.assignments, strict=True):
        rows = ours.tensor.rows
        np.testing.assert_array_equal(whole.rows(ours, 0, rows), split.rows(theirs, 0, rows))


def test_a_missing_shard_is_named(tmp_path):
    sentence = refused(shard(make(tmp_path / "a"), weights(cfg()), 3, drop=(2,)))
    assert "model-00002-of-00003.safetensors" in sentence
    assert "download is incomplete" in sentence


def test_an_index_that_points_at_the_wrong_shard_is_named(tmp_path):
    def wrong(weight_map):
        return dict.fromkeys(weight_map, "model-00001-of-00002.safetensors")

    sentence = refused(shard(make(tmp_path / "b"), weights(cfg()), 2, wm=wrong))
    assert "model.safetensors.index.json" in sentence
    assert "model-00001-of-00002.safetensors" in sentence
    assert "more, but it does not" in sentence


def test_an_absent_layer_that_is_not_used_is_a_notice(tmp_path):
    def with_extra(weight_map):
        return {**weight_map, "model.layers.2.eh_proj.weight": "mtp.safetensors"}

    source = open_source(shard(make(tmp_path / "c"), weights(cfg()), 2, wm=with_extra))
    assert any("mtp.safetensors" in notice for notice in source.notices)


def test_tensors_that_the_index_does_not_list_are_reported(tmp_path):
    tensors = weights(cfg()) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}

    def without(weight_map):
        return {name: file for name, file in weight_map.items() if "inv_freq" not in name}

    source = open_source(shard(make(tmp_path / "d"), tensors, 2, wm=without))
    assert any("inv_freq" in notice and "does not list" in notice for notice in source.notices)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder = shard(make(tmp_path / "e"), weights(cfg()), 2)
    second = folder / "model-00002-of-00002.safetensors"
    first = (folder / "model-00001-of-00002.safetensors").read_bytes()
    names = json.loads(first[8 : 8 + int.from_bytes(first[:8], "little")])
    doubled = {name: weights(cfg())[name] for name in [*names, *list(weights(cfg()))[1::2]]}
    second.write_bytes(st_bytes(doubled))
    assert "is both in" in refused(folder)


def test_shards_without_an_index(tmp_path):
    folder = shard(make(tmp_path / "f"), weights(cfg()), 2)
    (folder / "model.safetensors.index.json").unlink()
    assert any("model.safetensors.index.json" in notice for notice in open_source(folder).notices)
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert "model-00001-of-00002.safetensors is missing" in refused(folder)


BAD_NAMES = [
    "../secret.safetensors",
    "/etc/hostname",
    "C:\\x.safetensors",
    "C:x.safetensors",
    "\\\\host\\s\\x.safetensors",
    "a\0b.safetensors",
    "a\nb.safetensors",
    "NUL",
    "nul.safetensors",
    "COM1.safetensors",
    "",
    ".",
    "..",
    " x.safetensors",
    "x.safetensors.",
    "sub/x.safetensors",
    7,
    None,
    ["x.safetensors"],
    "x.bin",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_in_an_index_stay_in_the_folder(name, tmp_path):
    (tmp_path / "secret.safetensors").write_bytes(st_bytes(weights(cfg())))
    folder = shard(make(tmp_path / "p"), weights(cfg()), 1, wm=lambda weight_map: dict.fromkeys(weight_map, name))
    assert "no file of this folder" in refused(folder)


def test_ordinary_names_are_plain():
    for name in ("model-00001-of-00002.safetensors", "модель 你好 😀 100%20 #1.safetensors", "console.safetensors"):
        assert plain_name(name) == name


@pytest.mark.parametrize("content", [b"[]", b'{"weight_map": []}', b'{"weight_map": {}}', b"{", b"{}", b""])
def test_an_index_that_is_none(content, tmp_path):
    folder = shard(make(tmp_path / "m"), weights(cfg()), 1)
    (folder / "model.safetensors.index.json").write_bytes(content)
    assert "model.safetensors.index.json" in refused(folder)


# --- links (F13, F18) -----------------------------------------------------------------------------------------------


def hub(tmp_path, name="models--org--toy"):
    """A repository of the hub cache: a snapshot of links to blobs."""
    repository = tmp_path / name
    snapshot = repository / "snapshots" / "abc"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(make(tmp_path / "src").iterdir())):
        (repository / "blobs" / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return snapshot


def test_a_hub_snapshot_is_a_folder(tmp_path):
    snapshot = hub(tmp_path)
    finish(convert(snapshot, tmp_path / "out.nook"))
    assert open_nook(tmp_path / "out.nook").name == "toy"
    assert model_name(snapshot) == "toy"


@pytest.mark.parametrize("main", [True, False])
def test_a_whole_hub_repository_means_its_snapshot(main, tmp_path):
    snapshot = hub(tmp_path)
    if main:
        (snapshot.parent / "old").mkdir()
        make(snapshot.parent / "old" / "x")
        refs = snapshot.parent.parent / "refs"
        refs.mkdir()
        (refs / "main").write_text("abc")
    assert find_model(snapshot.parent.parent).path == snapshot


def test_a_dangling_link_is_an_incomplete_download(tmp_path):
    snapshot = hub(tmp_path)
    (snapshot / "generation_config.json").symlink_to("../../blobs/gone")
    sentence = refused(snapshot)
    assert "generation_config.json is a link to a file that is not there" in sentence
    assert "download is incomplete" in sentence


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_link_out_of_the_folder_is_refused(name, tmp_path):
    folder = make(tmp_path / "m")
    elsewhere = tmp_path / "elsewhere"
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)
    assert f"{name} is a link out of the model's folder" in refused(folder)


def test_a_link_to_the_folder_itself_is_fine(tmp_path):
    folder = make(tmp_path / "m")
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert open_source(link).name == "link"


def test_odd_and_long_names(tmp_path):
    folder = make(tmp_path / "Jerôme 你好 😀 100%20 #1" / ("x" * 90) / ("y" * 90) / "model.")
    out = folder.parent / "Željko – 你好 😀 %20 #1.nook"
    finish(convert(folder, out))
    assert open_nook(out).name == "model."


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_a_read_only_folder_is_only_read(tmp_path):
    folder = make(tmp_path / "m")
    before = sorted((file.name, file.stat().st_mtime_ns) for file in folder.iterdir())
    for file in folder.iterdir():
        file.chmod(0o444)
    folder.chmod(0o555)
    try:
        finish(convert(folder, tmp_path / "out.nook"))
    finally:
        folder.chmod(0o755)
    assert sorted((file.name, file.stat().st_mtime_ns) for file in folder.iterdir()) == before


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(tmp_path):
    folder = make(tmp_path / "m")
    (folder / "config.json").chmod(0)
    assert "may not be read" in refused(folder)


# --- weights that are no plain floats (F10); those that a known scheme explains: test_quantised.py --------------------

RAW = bytes(range(256)) * 16


@pytest.mark.parametrize("dtype", ["I8", "U8", "F4"])
def test_bytes_without_scales_are_no_weights(dtype, tmp_path):
    tensors = weights(cfg()) | {Q_PROJ: (dtype, (64, 128 if dtype == "F4" else 64), RAW)}
    sentence = refused(make(tmp_path / "q", cfg(), tensors), UnsupportedModelError)
    assert f"{Q_PROJ} is stored as {dtype}" in sentence
    assert "BF16 or FP16 folder" in sentence


def test_float8_whose_scales_are_not_there_is_refused(tmp_path):
    config = cfg(quantization_config={"quant_method": "fp8"})
    tensors = weights(cfg()) | {Q_PROJ: ("F8_E4M3", (64, 64), RAW)}
    assert "F8_E4M3, without scales" in refused(make(tmp_path / "q", config, tensors), UnsupportedModelError)


def test_other_types_are_no_weights(tmp_path):
    tensors = weights(cfg()) | {Q_PROJ: ("I64", (64, 64), bytes(8 * 4096))}
    assert "stored as I64" in refused(make(tmp_path / "q", tensors=tensors), UnsupportedModelError)


# --- what is no whole model (F11) -----------------------------------------------------------------------------------


def test_a_checkpoint_without_its_configuration(tmp_path):
    folder = make(tmp_path / "ckpt")
    (folder / "config.json").unlink()
    (folder / "optimizer.pt").write_bytes(b"\x80\x02N.")
    with pytest.raises(ModelFolderError, match=r"config\.json is missing in .*copy it"):
        find_model(folder)


def test_a_lone_file_of_weights_is_told_from_what_was_saved_in_its_place(tmp_path):
    file = tmp_path / "model.safetensors"
    for data, said in (
        ((make(tmp_path / "m") / "model.safetensors").read_bytes(), "holds weights only"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>denied</html>", "is a web page"),
        (b"", "is empty"),
    ):
        file.write_bytes(data)
        with pytest.raises(ModelFolderError, match=said):
            find_model(file)


def test_a_template_that_cannot_be_used_is_a_problem(tmp_path):
    folder = make(tmp_path / "m", template="{% for m in messages %}{{ m.content }", tokcfg={"eos_token": None})
    report = inspect(folder)
    assert report.usable
    assert not report.chat_template
    assert any("goes on with the text" in problem.sentence for problem in report.problems)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_of_the_folder_means_the_folder(name, tmp_path):
    folder = make(tmp_path / "m")
    found = find_model(folder / name)
    assert (found.kind, found.path) == ("folder", folder)
    assert name in found.notices[0]
    assert inspect(folder / name).usable


def test_the_folder_around_a_model(tmp_path):
    make(tmp_path / "models" / "one")
    found = find_model(tmp_path / "models")
    assert found.path == tmp_path / "models" / "one"
    make(tmp_path / "models" / "two")
    with pytest.raises(InputError, match=r"several models \(one, two\); choose one"):
        find_model(tmp_path / "models")


def test_paths_that_mean_no_model(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        find_model(tmp_path / "nowhere")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is a link to something that is not there"):
        find_model(tmp_path / "dangling")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="is empty"):
        find_model(tmp_path / "empty")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"\x89PNG")
    with pytest.raises(InputError, match=r"no config\.json"):
        find_model(tmp_path / "photos")
    with pytest.raises(InputError, match="is no model"):
        find_model(tmp_path / "photos" / "cat.png")
    (tmp_path / "photos" / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelFolderError, match=r"config\.json is missing"):
        find_model(tmp_path / "photos" / "model.bin")


def test_a_folder_without_weights(tmp_path):
    folder = make(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in refused(folder)


# --- code (F12); pickles: test_pickled.py -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["consolidated.00.pth", "model.ckpt", "tf_model.h5"])
def test_other_weights_are_never_opened(name, tmp_path):
    folder = make(tmp_path / "evil")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"")
    assert f"stored as {name}, which is not read" in refused(folder, UnsupportedModelError)


def test_code_in_the_folder_is_never_run(tmp_path):
    folder = make(tmp_path / "remote", cfg(auto_map={"AutoModelForCausalLM": "modeling_x.X"}))
    (folder / "modeling_x.py").write_text(f"import os; os.mkdir({str(tmp_path / 'pwned')!r})")
    (folder / "training_args.bin").write_bytes(b"\x80\x02N.")
    finish(convert(folder, tmp_path / "out.nook"))
    assert not (tmp_path / "pwned").exists()


# --- small files ----------------------------------------------------------------------------------------------------


def test_json_is_read_as_tolerantly_as_is_safe():
    assert parse_json(b'\xef\xbb\xbf{"a": 1}', "x") == {"a": 1}
    assert parse_json('{"a": 1}'.encode("utf-16"), "x") == {"a": 1}
    assert parse_json(b'{"a": Infinity}', "x") == {"a": float("inf")}
    assert parse_json(b'{"a": ' + b"9" * 5000 + b"}", "x") == {"a": float("inf")}
    assert parse_json(b'{"a": 1, "a": 1}', "x") == {"a": 1}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"a": 1, "a": 2}', "config.json says a twice"),
        (b"[" * 100_000, "config.json is nested too deep"),
        (b"[1]", "config.json is not a JSON object"),
        (b'{"a": ', "config.json is not valid JSON"),
        (b"\xff\xfe\x00", "config.json is not valid JSON"),
        (b"", "config.json is empty: the download looks incomplete"),
        (b"version https://git-lfs.github.com/spec/v1\n", "config.json is a git-LFS pointer"),
        (b"<!DOCTYPE html>", "config.json is a web page"),
    ],
)
def test_a_configuration_that_is_none(data, words, tmp_path):
    folder = make(tmp_path / "m")
    (folder / "config.json").write_bytes(data)
    assert words in refused(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "model.safetensors"])
def test_a_pointer_in_place_of_any_file_is_named(name, tmp_path):
    folder = make(tmp_path / "m", gen={})
    (folder / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n")
    assert f"{name} is a git-LFS pointer" in refused(folder)


def test_licence_and_templates(tmp_path):
    folder = make(tmp_path / "m", template=None)
    assert not inspect(folder).chat_template
    (folder / "README.md").write_text("---\ntags:\n- chat\nlicense: apache-2.0\n---\n# Toy\nlicense: mit\n")
    (folder / "LICENSE.txt").write_text("the text")
    (folder / "NOTICE").write_text("the notice")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    extra = folder / "additional_chat_templates"
    extra.mkdir()
    (extra / "tools.jinja").write_text("{{ tools }}")
    found = describe(folder)
    assert found.licence == "apache-2.0"
    assert found.licence_text == "the text\n\nthe notice"
    assert found.files["chat_template.jinja"] == b"{{ messages }}"
    assert found.files["additional_chat_templates/tools.jinja"] == b"{{ tools }}"
    finish(convert(folder, tmp_path / "out.nook"))
    model = open_nook(tmp_path / "out.nook")
    assert (model.licence, model.licence_text) == ("apache-2.0", "the text\n\nthe notice")
    assert inspect(tmp_path / "out.nook").chat_template


@pytest.mark.parametrize(
    ("front", "licence"),
    [
        ("license: other\nlicense_name: llama3.2", "llama3.2"),
        ("license:\n- mit\n- x", "mit"),
        ('license: "cc-by-4.0"', "cc-by-4.0"),
        ("tags: [a]", ""),
    ],
)
def test_the_name_of_a_licence(front, licence, tmp_path):
    folder = make(tmp_path / "m")
    (folder / "README.md").write_text(f"---\n{front}\n---\n")
    assert inspect(folder).licence == licence


def test_a_report_says_as_much_as_is_known(tmp_path):
    folder = shard(make(tmp_path / "a"), weights(cfg()), 3, drop=(2,))
    report = inspect(folder)
    assert (report.family, report.layers, report.hidden, report.vocab_size) == ("LlamaForCausalLM", 2, 64, 320)
    assert report.chat_template
    unknown = inspect(make(tmp_path / "b", cfg(architectures=["NewThingForCausalLM"], model_type="newthing")))
    assert unknown.family == "NewThingForCausalLM"
    assert unknown.parameters == 0


def test_a_report_of_a_sound_folder(tmp_path):
    folder = make(tmp_path / "m", dtype="BF16")
    report = inspect(folder, tensors=True)
    assert report.usable
    assert report.problems == ()
    assert report.source_dtype == "bfloat16"
    assert report.parameters == sum(tensor.size for tensor in weights(cfg()).values())
    assert report.disk_bytes == sum(file.stat().st_size for file in folder.iterdir())
    assert [choice.label for choice in report.sizes] == [
        "int4, group 32",
        "int4, group 64",
        "int8, group 128",
        "bfloat16",
        "small (int4, group 32)",
        "balanced (int4, group 32)",
        "best (int6, group 32)",
    ]  # int4 in groups of 128 and 256 would save nothing for padding: the toy's tensors have 64 and 96 columns
    for choice in report.sizes:
        finish(convert(folder, tmp_path / "out.nook", choice.conversion))
        made = inspect(tmp_path / "out.nook", tensors=True)
        assert made.source_dtype in choice.label
        assert abs(made.disk_bytes - choice.file_bytes) < 40_000
        assert [info.name for info in made.tensors] == [info.name for info in report.tensors]
        assert made.parameters == report.parameters
    assert report.memory_bytes.keys() == {256}
    assert json.loads(json.dumps(report.to_json()))["usable"] is True


def test_all_shards_together_hold_all_tensors(tmp_path):
    folder = shard(make(tmp_path / "m"), weights(cfg()), 3)
    assert stored_tensors(folder).entries.keys() == weights(cfg()).keys()


# --- what people drop instead of the model's folder -------------------------------------------------------------------


def test_the_whole_hub_cache(tmp_path):
    hub = tmp_path / "hub"
    for name in ("models--org--one", "models--org--two"):
        make(hub / name / "snapshots" / "abc")
    with pytest.raises(InputError, match=r"several models .*models--org--one"):
        find_model(hub)
    shutil.rmtree(hub / "models--org--two")
    found = find_model(hub)
    assert model_name(found.path) == "one"
    assert inspect(hub).usable


@pytest.mark.parametrize(
    ("name", "words"),
    [("model_index.json", "images"), ("params.json", "makers' own layout"), ("mlc-chat-config.json", "compiled")],
)
def test_folders_of_other_programs(name, words, tmp_path):
    (tmp_path / name).write_text("{}")
    (tmp_path / "weights.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=words):
        find_model(tmp_path)


def test_an_archive_is_to_be_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("config.json", "{}")
    with pytest.raises(InputError, match="is an archive: unpack it"):
        find_model(tmp_path / "model.zip")


def test_a_tokenizer_that_is_much_too_small_is_mentioned(tmp_path):
    source = open_source(make(tmp_path / "m", cfg(vocab_size=512)))
    assert any("260 tokens for a model of 512" in notice for notice in source.notices)
    assert not any("tokens for a model" in notice for notice in open_source(make(tmp_path / "n")).notices)


def test_how_long_it_takes_grows_with_the_work(tmp_path):
    small = inspect(make(tmp_path / "small")).sizes
    large = inspect(make(tmp_path / "large", cfg(num_hidden_layers=8))).sizes
    for one, other in zip(small, large, strict=True):
        assert 0 < 2 * one.seconds < other.seconds < 1
