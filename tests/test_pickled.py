"""`pytorch_model.bin`: the tensors that are in it, and nothing that is in it is ever run (F12)."""

import json
import os
import pickle
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.convert.convert import convert
from engine.convert.entry import read_raw, read_rows
from engine.convert.pickled import read_pickled
from engine.convert.report import inspect
from engine.convert.source import open_source
from engine.errors import InputError, ModelFolderError, UnsupportedModelError
from engine.progress import finish
from engine.settings import Conversion
from tests.factory import bf16, cfg, make, weights
from tests.torch_files import StoredTensor, archive_program, write_archive, write_legacy

WRITERS = {"archive": write_archive, "legacy": write_legacy}
MATRIX = np.random.default_rng(3).normal(0, 1, (12, 10)).astype(np.float32)


@pytest.fixture(params=WRITERS)
def write(request):
    return WRITERS[request.param]


def pickled(folder, write, tensors):
    (folder / "model.safetensors").unlink()
    write(folder / "pytorch_model.bin", tensors)
    return folder


def test_tensors_are_those_that_were_saved(write, tmp_path):
    path = tmp_path / "pytorch_model.bin"
    shared = np.arange(40, dtype=np.float32)
    tensors = {
        "plain": MATRIX,
        "half": MATRIX.astype(np.float16),
        "brain": bf16(MATRIX),
        "transposed": StoredTensor(MATRIX.reshape(-1), (10, 12), (1, 10)),
        "cut out": StoredTensor(MATRIX.reshape(-1), (5, 3), (10, 1), 24),
        "first of two": StoredTensor(shared, (4, 5), (5, 1)),
        "second of two": StoredTensor(shared, (4, 5), (5, 1), 20),
        "vector": StoredTensor(shared, (5,), (3,), 2),
        "number": StoredTensor(shared, (), (), 7),
        "nothing": StoredTensor(shared, (0, 4), (4, 1)),
        "one row": StoredTensor(shared, (1, 6), (999, 1), 1),
        "step": np.array([5], np.int64),
    }
    write(path, tensors)
    entries = read_pickled(path)
    assert list(entries) == list(tensors)
    expected = {
        "plain": MATRIX,
        "half": MATRIX.astype(np.float16),
        "transposed": MATRIX.T,
        "cut out": MATRIX[2:7, 4:7],
        "first of two": shared[:20].reshape(4, 5),
        "second of two": shared[20:].reshape(4, 5),
        "vector": shared[2:15:3][None],
        "number": shared[7:8][None],
        "nothing": np.empty((0, 4), np.float32),
        "one row": shared[1:7][None],
    }
    for name, values in expected.items():
        rows = len(values)
        np.testing.assert_array_equal(read_rows(entries[name], 0, rows), values.astype(np.float32), err_msg=name)
        for first in range(rows):
            np.testing.assert_array_equal(read_rows(entries[name], first, 1)[0], values[first], err_msg=name)
    np.testing.assert_array_equal(read_raw(entries["brain"]).view(np.uint16), bf16(MATRIX))
    assert entries["step"].dtype == "I64"


def test_a_pickled_model_is_the_same_model(write, tmp_path):
    plain, folder = make(tmp_path / "plain"), pickled(make(tmp_path / "pickled"), write, weights(cfg()))
    finish(convert(plain, tmp_path / "plain.nook", Conversion()))
    finish(convert(folder, tmp_path / "pickled.nook", Conversion()))
    sources = [open_source(plain), open_source(folder)]
    for ours, theirs in zip(*(source.assignments for source in sources), strict=True):
        rows = ours.tensor.rows
        np.testing.assert_array_equal(sources[0].rows(ours, 0, rows), sources[1].rows(theirs, 0, rows))
    assert inspect(folder).source_dtype == "float32"


def test_shards_and_their_index(tmp_path):
    folder = make(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    tensors, weight_map = weights(cfg()), {}
    for number in (1, 2):
        part = dict(list(tensors.items())[number - 1 :: 2])
        name = f"pytorch_model-0000{number}-of-00002.bin"
        write_archive(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert inspect(folder).usable
    (folder / "pytorch_model.bin.index.json").unlink()
    assert inspect(folder).usable
    (folder / "pytorch_model-00001-of-00002.bin").unlink()
    assert "pytorch_model-00001-of-00002.bin is missing" in inspect(folder).problems[0].sentence


def test_weights_that_a_trainer_wrapped(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    write_archive(path, {"epoch": 3, "optimizer": {"lr": 0.1}, "state_dict": {"w": StoredTensor(MATRIX, (2,), (1,))}})
    assert list(read_pickled(path)) == ["w"]


def test_safetensors_come_first(tmp_path):
    folder = make(tmp_path / "m")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02garbage")
    (folder / "training_args.bin").write_bytes(b"\x80\x02garbage")
    (folder / "optimizer.pt").write_bytes(b"\x80\x02garbage")
    assert inspect(folder).usable


# --- attacks --------------------------------------------------------------------------------------------------------


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("wrap", [lambda evil: evil, lambda evil: {"model.norm.weight": evil}, lambda evil: [evil]])
@pytest.mark.parametrize("protocol", range(6))
def test_a_hostile_pickle_is_refused_by_what_it_asks_for(wrap, protocol, tmp_path):
    folder = make(tmp_path / "evil")
    (folder / "model.safetensors").unlink()
    program = pickle.dumps(wrap(Evil(tmp_path / "pwned")), protocol)
    archive_program(folder / "pytorch_model.bin", program, {})
    with pytest.raises(UnsupportedModelError, match=r"asks for (posix|nt|the instruction).*nothing was run"):
        open_source(folder)
    (folder / "pytorch_model.bin").write_bytes(program)
    with pytest.raises(InputError):
        open_source(folder)
    assert not (tmp_path / "pwned").exists()


GLOBALS = [
    "builtins eval",
    "os system",
    "torch.storage _load_from_bytes",
    "torch load",
    "collections OrderedDict.fromkeys",
    "torch._utils _rebuild_tensor_v2.__globals__",
]


@pytest.mark.parametrize("name", GLOBALS)
@pytest.mark.parametrize("called", [False, True])
def test_no_other_name_is_known(name, called, tmp_path):
    module, function = name.split(" ")
    program = b"\x80\x02c" + f"{module}\n{function}\n".encode() + (b")R." if called else b".")
    archive_program(tmp_path / "w.bin", program, {})
    with pytest.raises(UnsupportedModelError, match=f"asks for {module}"):
        read_pickled(tmp_path / "w.bin")
    stacked = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode()
    stacked += b"\x8c" + bytes([len(function)]) + function.encode() + b"\x93."
    archive_program(tmp_path / "w.bin", stacked, {})
    with pytest.raises(UnsupportedModelError, match=f"asks for {module}"):
        read_pickled(tmp_path / "w.bin")


SHARED = np.arange(40, dtype=np.float32)
BEYOND = {
    "shape": StoredTensor(SHARED, (5, 9), (9, 1)),
    "offset": StoredTensor(SHARED, (4, 10), (10, 1), 1),
    "strides": StoredTensor(SHARED, (4, 10), (11, 1)),
    "count": StoredTensor(SHARED, (50,), (1,), 0, 50),
    "huge": StoredTensor(SHARED, (1 << 40, 1 << 40), (1 << 40, 1)),
    "negative": StoredTensor(SHARED, (4, 10), (-10, 1), 30),
    "negative offset": StoredTensor(SHARED, (4,), (1,), -1),
    "no numbers": StoredTensor(SHARED, ("4",), (1,)),
    "sides": StoredTensor(SHARED, (4,), (1, 1)),
}


@pytest.mark.parametrize("case", BEYOND)
def test_a_tensor_beyond_its_bytes_is_refused(case, write, tmp_path):
    path = tmp_path / "w.bin"
    write(path, {"w": BEYOND[case]})
    with pytest.raises(ModelFolderError, match="damaged"):
        read_pickled(path)


def test_bombs_end_quickly(tmp_path):
    path = tmp_path / "w.bin"
    # A tuple that holds itself twice, a hundred times over, as a name: its hash would take for ever.
    program = b"\x80\x02)" + b"q\x00h\x00\x86" * 100 + b"q\x01}h\x01K\x01s."
    archive_program(path, program, {})
    with pytest.raises(ModelFolderError, match="cannot be read"):
        read_pickled(path)
    archive_program(path, b"\x80\x02" + b"N0" * 5_000_000 + b".", {})
    with pytest.raises(InputError):
        read_pickled(path)
    archive_program(path, b"\x80\x02}.", {"0": bytes(1 << 20)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(ModelFolderError, match="compressed"):
        read_pickled(path)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.99])
def test_a_file_that_was_cut_short_is_said_to_be(part, write, tmp_path):
    path = tmp_path / "pytorch_model.bin"
    write(path, {"w": MATRIX, "v": MATRIX[0]})
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    with pytest.raises(ModelFolderError, match="fetch it again"):
        read_pickled(path)


def test_an_archive_that_lost_a_piece_in_the_middle_is_damaged(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    write_archive(path, {"w": MATRIX})
    whole = path.read_bytes()
    path.write_bytes(whole[:40] + whole[240:])  # the directory at the end now points before the beginning
    with pytest.raises(ModelFolderError, match="beyond its ends"):
        read_pickled(path)


def test_pointers_and_pages_are_told_apart(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelFolderError, match="git-LFS pointer"):
        read_pickled(path)
    path.write_bytes(b"<!DOCTYPE html><html>denied</html>")
    with pytest.raises(ModelFolderError, match="web page"):
        read_pickled(path)


@given(st.data())
def test_changed_bytes_never_do_more_than_fail(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "changed.bin"
    write = data.draw(st.sampled_from(list(WRITERS.values())))
    write(path, {"w": MATRIX, "v": StoredTensor(SHARED, (4, 5), (5, 1), 3)})
    content = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        entries = read_pickled(path)
    except InputError:
        return
    for entry in entries.values():
        read_raw(entry)
