"""The `.nook` file: what is written comes back, every damaged byte is found and named, hostile numbers are refused."""

import errno
import hashlib
import json
import shutil

import numpy as np
import pytest

from engine.convert.convert import convert
from engine.core.quant import ALIGNMENT, FORMATS
from engine.errors import FileDamagedError, InputError, OutOfSpaceError, ResourceError
from engine.models.store import FOOTER_BYTES, HEADER_BYTES, NookFile, copied_nook, footer, header, open_nook, verify
from engine.models.weights import VECTOR
from engine.models.writer import NookWriter, clean_partials
from engine.progress import finish
from engine.settings import Conversion
from tests.factory import cfg, make, qwen2, weights

SMALL = cfg(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    vocab_size=260,
    num_attention_heads=2,
    num_key_value_heads=1,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("source") / "toy", SMALL, gen={"temperature": 0.5, "eos_token_id": [257, 259]})


@pytest.fixture(scope="module")
def original(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("nook") / "toy.nook"
    finish(convert(folder, path))
    return path


@pytest.fixture
def nook(original, tmp_path):
    return shutil.copy(original, tmp_path / "toy.nook")


# --- what is written comes back -------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [False, True])
def test_a_model_comes_back(folder, original, resident, kernels):
    model = finish(copied_nook(original)) if resident else open_nook(original)
    assert (model.kind, model.name, model.label) == ("nook", "toy", "int4, group 32")
    assert model.end_ids == {257, 259}
    assert model.defaults == {"temperature": 0.5}
    assert model.files.keys() == {"tokenizer.json", "tokenizer_config.json"}
    for name, data in model.files.items():
        assert data == (folder / name).read_bytes()
    theirs = weights(SMALL)
    for tensor in model.spec.tensors():
        stored = model.weights.tensor(tensor.name)
        assert stored.address % ALIGNMENT == 0
        assert (stored.rows, stored.cols) == (tensor.rows, tensor.cols)
        if tensor.role == "vector":
            assert stored.format == VECTOR
            assert stored.vector().dtype == np.float32
    norm = model.weights.tensor("layers.0.attention.norm").vector()
    np.testing.assert_array_equal(norm, theirs["model.layers.0.input_layernorm.weight"])
    qkv = model.weights.tensor("layers.0.attention.qkv")
    unpacked = FORMATS[qkv.format].unpack(qkv.data, qkv.exponent, qkv.rows, qkv.cols, qkv.group)
    stacked = np.concatenate([theirs[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"])
    packed = FORMATS["q4"].pack(stacked, 32, kernels())
    np.testing.assert_array_equal(unpacked, FORMATS["q4"].unpack(packed.buffer, packed.exponent, *stacked.shape, 32))
    assert np.abs(unpacked - stacked).max() < 0.03


def test_opening_maps_and_copies_nothing(original):
    file = NookFile.open(original)
    data = file.tensor("embedding").data
    assert not data.flags.writeable
    assert data.base is not None
    assert file.total_bytes == sum(file.tensor(name).bytes for name in file.names)
    with pytest.raises(KeyError):
        file.tensor("head.bias")


def test_layers_begin_on_pages_and_tensors_on_lines(original):
    manifest = NookFile.open(original).manifest
    seen = set()
    for tensor in manifest.tensors:
        layer = ".".join(tensor.name.split(".")[:2])
        assert tensor.offset % (64 if layer in seen else 4096) == 0
        seen.add(layer)


def test_equal_weights_have_equal_identities(folder, original, tmp_path):
    finish(convert(folder, tmp_path / "again.nook"))
    assert open_nook(tmp_path / "again.nook").identity == open_nook(original).identity
    assert (tmp_path / "again.nook").read_bytes() == original.read_bytes()
    finish(convert(folder, tmp_path / "other.nook", Conversion(bits=8)))
    assert open_nook(tmp_path / "other.nook").identity != open_nook(original).identity


# --- damage ---------------------------------------------------------------------------------------------------------


def place_of(manifest, head_offset, size, position):
    """What the report must name for a flipped byte at `position`."""
    if position < HEADER_BYTES:
        return "header", ""
    if position >= size - FOOTER_BYTES:
        return "footer", "header"
    if position >= head_offset:
        return "manifest", ""
    for piece in manifest.pieces:
        if piece.offset <= position < piece.offset + piece.bytes:
            return piece.name, ""
    return "padding", ""


def test_any_flipped_byte_is_found_and_named(nook):
    data = bytearray(nook.read_bytes())
    manifest = NookFile.open(nook).manifest
    start = int.from_bytes(data[16:24], "little")
    size = len(data)
    dice = np.random.default_rng(size)
    positions = [*range(HEADER_BYTES), *range(size - FOOTER_BYTES, size)]
    positions += [spot for piece in manifest.pieces for spot in (piece.offset, piece.offset + piece.bytes - 1)]
    ends = [HEADER_BYTES, *(piece.offset + piece.bytes for piece in manifest.pieces)]
    gaps = zip(ends, [*(piece.offset for piece in manifest.pieces), start], strict=True)
    positions += [spot for low, high in gaps if low < high for spot in (low, high - 1)]
    positions += [start, size - FOOTER_BYTES - 1, *dice.integers(0, size, 200)]
    for position in positions:
        flipped = data.copy()
        flipped[position] ^= int(dice.integers(1, 256))
        nook.write_bytes(flipped)
        with pytest.raises((FileDamagedError, InputError)) as caught:
            finish(verify(nook))
        words = place_of(manifest, start, size, position)
        sentence = str(caught.value)
        if position < 4:
            assert "no .nook file" in sentence
        elif 8 <= position < 12:
            assert "newer Inglenook" in sentence or "header" in sentence
        elif 32 <= position < 40:
            assert "bytes long" in sentence
        elif 40 <= position < 72 or 16 <= position < 32:
            assert "manifest" in sentence or "header" in sentence
        else:
            assert any(word and word in sentence for word in words), (position, sentence)


def test_verify_reports_and_ends_for_a_sound_file(original):
    steps = list(verify(original))
    assert steps[-1].done == steps[-1].total == original.stat().st_size
    assert all(step.stage == "verify" for step in steps)
    assert [step.done for step in steps] == sorted(step.done for step in steps)


def test_a_file_cut_short_is_seen_at_once(nook):
    data = nook.read_bytes()
    for length in (0, 3, 7, 8, 100, 128, 4096, len(data) // 2, len(data) - 64, len(data) - 1):
        nook.write_bytes(data[:length])
        with pytest.raises(InputError) as caught:
            NookFile.open(nook)
        assert isinstance(caught.value, FileDamagedError) == (length > 3)
        with pytest.raises(InputError):
            finish(verify(nook))
    nook.write_bytes(data + b"\0")
    with pytest.raises(FileDamagedError, match="bytes long"):
        NookFile.open(nook)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (7, "was written by a newer Inglenook (file version 7, this one reads 2); update Inglenook or"),
        (1, "was written by an older Inglenook (file version 1, this one reads 2);"),
        (0, "is damaged: its header was altered;"),
    ],
)
def test_a_file_of_another_version_says_so_in_a_sentence(nook, version, words):
    data = bytearray(nook.read_bytes())
    data[8] = version
    nook.write_bytes(data)
    for refused in (NookFile.open, lambda path: finish(verify(path))):
        with pytest.raises(FileDamagedError) as caught:
            refused(nook)
        assert str(caught.value) == f"toy.nook {words} convert the model again"


def test_what_is_no_nook_file_says_so(tmp_path):
    path = tmp_path / "text.nook"
    path.write_text("hello " * 100)
    with pytest.raises(InputError, match=r"no \.nook file"):
        NookFile.open(path)
    with pytest.raises(InputError, match="does not exist"):
        NookFile.open(tmp_path / "nowhere.nook")
    with pytest.raises(InputError):
        NookFile.open(tmp_path)


# --- hostile manifests ----------------------------------------------------------------------------------------------


def with_manifest(path, edit):
    """Rewrite a file's manifest, hashes and all, as an attacker would."""
    data = path.read_bytes()
    start = int.from_bytes(data[16:24], "little")
    values = json.loads(data[start : len(data) - FOOTER_BYTES])
    edited = edit(values)
    raw = edited if isinstance(edited, bytes) else json.dumps(values).encode()
    size = start + len(raw) + FOOTER_BYTES
    beginning = header(start, raw, size)
    path.write_bytes(beginning + data[HEADER_BYTES:start] + raw + footer(beginning, size))


def tensor(number, **changes):
    def edit(values):
        values["tensors"][number].update(changes)

    return edit


def spec(**changes):
    def edit(values):
        values["spec"].update(changes)

    return edit


def drop_tensor(values):
    del values["tensors"][3]


def swap_tensors(values):
    values["tensors"][2], values["tensors"][3] = values["tensors"][3], values["tensors"][2]


def grow(values):
    values["tensors"][0].update(rows=1 << 40, bytes=1 << 50)
    values["spec"]["vocab_size"] = 1 << 24


def overlap(values):
    values["tensors"][1]["offset"] = values["tensors"][0]["offset"]


def move_file(values):
    values["files"][0]["offset"] = 1 << 40


HOSTILE = {
    "an offset beyond the file": tensor(0, offset=1 << 40),
    "a negative offset": tensor(0, offset=-64),
    "an offset into the header": tensor(0, offset=64),
    "an odd offset": tensor(0, offset=4097),
    "two tensors in one place": overlap,
    "bytes that the shape contradicts": tensor(0, bytes=64),
    "another shape": tensor(0, rows=16),
    "a monstrous shape": grow,
    "an unknown format": tensor(0, format="q3"),
    "a vector as a matrix": tensor(0, format="f32v"),
    "a matrix as a vector": tensor(1, format="q4", group=32),
    "a group that does not exist": tensor(0, group=7),
    "an exponent out of range": tensor(0, exponent=5000),
    "an exponent of text": tensor(0, exponent="0"),
    "a shape of text": tensor(0, rows="260"),
    "a shape of truth": tensor(0, rows=True),
    "a hash that is none": tensor(0, sha256="x" * 64),
    "a name of nothing": tensor(0, name="../../etc/passwd"),
    "a missing tensor": drop_tensor,
    "tensors in another order": swap_tensors,
    "a file beyond the file": move_file,
    "a hidden size of nothing": spec(hidden=0),
    "a hidden size beyond sense": spec(hidden=1 << 60),
    "another hidden size": spec(hidden=64),
    "no layers": spec(layers=[]),
    "a context below one": spec(context=0),
    "an epsilon of NaN": lambda values: json.dumps(values).replace("1e-05", "NaN").encode(),
    "an end token outside": lambda values: values.update(end_ids=[260]),
    "a surprising key": lambda values: values.update(surprise=1),
    "no JSON": lambda _: b"{" * 1000,
    "an abyss": lambda _: b'{"name":' + b"[" * 200_000,
    "no UTF-8": lambda _: b'{"name": "\xff"}',
    "a list": lambda _: b"[]",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_is_refused(case, nook):
    with_manifest(nook, HOSTILE[case])
    with pytest.raises(FileDamagedError, match=r"toy\.nook cannot be trusted") as caught:
        NookFile.open(nook)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


JUNK = [None, True, -1, 0, 1, 7, 64, 2**31, 2**63, 2**70, 1.5, 1e308, "", "x", "../x", "q8", [], [1], {}, {"name": 1}]


def spots(values, path=()):
    """Every place in a JSON value."""
    yield path
    children = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, child in children:
        yield from spots(child, (*path, key))


def test_any_altered_value_is_refused_or_harmless(original, tmp_path):
    path = tmp_path / "toy.nook"
    data = original.read_bytes()
    start = int.from_bytes(data[16:24], "little")
    manifest = json.loads(data[start : len(data) - FOOTER_BYTES])
    places = [place for place in spots(manifest) if place]
    dice = np.random.default_rng(3)
    accepted = 0
    for _ in range(500):
        place, junk = places[dice.integers(len(places))], JUNK[dice.integers(len(JUNK))]
        altered = json.loads(json.dumps(manifest))
        inner = altered
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = junk
        raw = json.dumps(altered).encode()
        size = start + len(raw) + FOOTER_BYTES
        beginning = header(start, raw, size)
        path.write_bytes(beginning + data[HEADER_BYTES:start] + raw + footer(beginning, size))
        try:
            file = NookFile.open(path)
        except FileDamagedError:
            continue
        accepted += 1
        tensors = [file.tensor(name) for name in file.names]
        assert [tensor.name for tensor in tensors] == [tensor.name for tensor in file.manifest.spec.tensors()]
        assert all(len(tensor.data) == tensor.bytes for tensor in tensors)
        assert all(len(content) > 0 for content in file.files().values())
    assert 0 < accepted < 250


def test_an_honest_rewrite_is_accepted(nook):
    with_manifest(nook, lambda values: values.update(fidelity={"grade": "A", "kl_mean": 0.01}))
    assert NookFile.open(nook).manifest.fidelity == {"grade": "A", "kl_mean": 0.01}
    finish(verify(nook))


def test_heads_that_do_not_divide_are_refused(nook):
    def edit(values):
        values["spec"]["layers"][0]["attention"]["kv_heads"] = 3

    with_manifest(nook, edit)
    with pytest.raises(FileDamagedError, match="cannot be trusted"):
        NookFile.open(nook)


def test_room_is_kept_for_a_fidelity_report(original):
    data = original.read_bytes()
    start = int.from_bytes(data[16:24], "little")
    raw = data[start : len(data) - FOOTER_BYTES]
    assert len(raw) - len(raw.rstrip(b" ")) >= 4096


# --- writing --------------------------------------------------------------------------------------------------------


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_nothing_has_the_name_before_the_end_and_nothing_is_left_after_a_stop(folder, tmp_path):
    out = tmp_path / "out.nook"
    work = convert(folder, out)
    for _ in range(5):
        next(work)
    assert "out.nook" not in left_in(tmp_path)
    assert left_in(tmp_path)
    work.close()
    assert left_in(tmp_path) == []


def test_a_good_file_survives_a_failed_conversion(folder, nook):
    before = nook.read_bytes()
    work = convert(folder, nook, Conversion(bits=8))
    for _ in range(5):
        next(work)
    work.close()
    assert nook.read_bytes() == before
    assert left_in(nook.parent) == ["toy.nook"]
    finish(convert(folder, nook, Conversion(bits=8)))
    assert open_nook(nook).label == "int8, group 32"


def steps_of(folder, out):
    work = convert(folder, out)
    count = sum(1 for _ in work)
    out.unlink()
    return count


def test_resuming_gives_the_identical_bytes_from_any_stop(folder, original, tmp_path):
    out = tmp_path / "out.nook"
    for stop in range(1, steps_of(folder, out), 3):
        work = convert(folder, out, resume=True)
        for _ in range(stop):
            next(work)
        work.close()
        assert "out.nook" not in left_in(tmp_path)
        finish(convert(folder, out, resume=True))
        assert out.read_bytes() == original.read_bytes()
        assert left_in(tmp_path) == ["out.nook"]
        out.unlink()


def stopped(folder, out, conversion=Conversion(), *, steps=12):
    work = convert(folder, out, conversion, resume=True)
    for _ in range(steps):
        next(work)
    work.close()
    return out.with_name(out.name + ".partial"), out.with_name(out.name + ".partial.journal")


def test_a_partial_file_is_believed_only_as_far_as_its_bytes_bear_it_out(folder, original, tmp_path):
    out = tmp_path / "out.nook"
    partial, journal = stopped(folder, out, steps=17)
    manifest = NookFile.open(original).manifest
    data = bytearray(partial.read_bytes())
    data[manifest.tensors[0].offset + 5] ^= 1
    q4 = next(tensor for tensor in manifest.tensors if tensor.name.endswith("out"))
    data[q4.offset + 32 * 32 // 2 + 32 * 20 // 8] ^= 1  # near the seam of its parts
    partial.write_bytes(data)
    with journal.open("a") as file:
        file.write('{"name": "layers.0.feed_')  # cut off by a power failure
    finish(convert(folder, out, resume=True))
    assert out.read_bytes() == original.read_bytes()


def test_a_second_resume_believes_what_the_first_one_made(folder, original, tmp_path):
    out = tmp_path / "out.nook"
    _, journal = stopped(folder, out)
    with journal.open("a") as file:
        file.write('{"name": "layers.0.feed_')
    before = len(journal.read_text().splitlines())
    stopped(folder, out, steps=18)
    assert len(journal.read_text().splitlines()) > before
    finish(convert(folder, out, resume=True))
    assert out.read_bytes() == original.read_bytes()


def test_a_partial_file_of_other_settings_or_weights_is_not_continued(folder, original, tmp_path):
    out = tmp_path / "out.nook"
    stopped(folder, out, Conversion(bits=8))
    finish(convert(folder, out, resume=True))
    assert out.read_bytes() == original.read_bytes()

    source = make(tmp_path / "source", SMALL)
    stopped(source, out)
    make(tmp_path / "source", SMALL, {name: 2 * values for name, values in weights(SMALL).items()})
    finish(convert(source, out, resume=True))
    finish(convert(source, tmp_path / "clean.nook"))
    assert out.read_bytes() == (tmp_path / "clean.nook").read_bytes()


def test_without_resume_a_partial_file_is_thrown_away(folder, original, tmp_path):
    out = tmp_path / "out.nook"
    stopped(folder, out)
    finish(convert(folder, out))
    assert out.read_bytes() == original.read_bytes()
    assert left_in(tmp_path) == ["out.nook"]


def test_what_killed_conversions_left_is_cleaned(folder, tmp_path):
    kept = stopped(folder, tmp_path / "kept.nook")
    (tmp_path / "killed.nook.partial").write_bytes(b"x" * 1000)
    (tmp_path / "killed.nook.partial.journal").write_text('{"job": "1", "resumable": false}\n')
    (tmp_path / "older.nook.partial").write_bytes(b"x")
    (tmp_path / "model.nook").write_bytes(b"not ours to touch")
    clean_partials(tmp_path)
    assert left_in(tmp_path) == sorted([path.name for path in kept] + ["model.nook"])


def test_a_running_conversion_is_left_alone(folder, tmp_path):
    out = tmp_path / "out.nook"
    work = convert(folder, out)
    for _ in range(5):
        next(work)
    clean_partials(tmp_path)
    with pytest.raises(ResourceError, match=r"another conversion is writing out\.nook"):
        finish(convert(folder, out))
    finish(work)
    finish(verify(out))
    assert left_in(tmp_path) == ["out.nook"]


def test_the_room_is_checked_before_anything_is_written(folder, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=20_000))
    with pytest.raises(OutOfSpaceError) as caught:
        finish(convert(folder, tmp_path / "out.nook"))
    assert str(tmp_path) in str(caught.value)
    assert "0.00 GB free" in str(caught.value)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT])
@pytest.mark.parametrize("after", [0, 3, 9])
def test_a_drive_that_becomes_full_leaves_nothing(folder, nook, monkeypatch, code, after):
    before = nook.read_bytes()
    write, calls = NookWriter.write, iter(range(1000))

    def full(self, *arguments):
        if next(calls) < after:
            return write(self, *arguments)
        with pytest.MonkeyPatch.context() as patch:
            broken = type("Full", (), {"seek": lambda *_: None, "write": lambda *_: raise_(OSError(code, "full"))})()
            patch.setattr(self, "_file", broken)
            return write(self, *arguments)

    monkeypatch.setattr(NookWriter, "write", full)
    with pytest.raises(OutOfSpaceError, match="became full"):
        finish(convert(folder, nook, Conversion(bits=8)))
    assert nook.read_bytes() == before
    assert left_in(nook.parent) == ["toy.nook"]


def raise_(error):
    raise error


@pytest.mark.parametrize("name", ["out.gguf", "out", "model.safetensors", "config.json"])
def test_only_nook_files_are_written(folder, tmp_path, name):
    with pytest.raises(InputError, match=r"ends in \.nook"):
        finish(convert(folder, tmp_path / name))
    assert left_in(tmp_path) == []


def test_a_folder_that_is_not_there_or_not_ours(folder, tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        finish(convert(folder, tmp_path / "nowhere" / "out.nook"))
    (tmp_path / "dir.nook").mkdir()
    with pytest.raises(InputError):
        finish(convert(folder, tmp_path / "dir.nook"))


def test_the_hashes_are_of_the_bytes(original):
    file = NookFile.open(original)
    for stored in file.manifest.tensors:
        assert hashlib.sha256(file.tensor(stored.name).data.tobytes()).hexdigest() == stored.sha256


def test_a_tied_head_is_stored_once(tmp_path):
    source = make(tmp_path / "toy", **qwen2())
    finish(convert(source, tmp_path / "toy.nook"))
    model = open_nook(tmp_path / "toy.nook")
    assert model.spec.tied_head
    assert "head" not in model.weights.names
    assert model.weights.tensor("embedding").format == "q6"
