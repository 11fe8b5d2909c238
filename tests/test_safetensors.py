"""Safetensors files: the reference's verdict on every header, our words for what is wrong, exact rows."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.convert.entry import FLOATS, read_rows
from engine.convert.safetensors import read_header
from engine.errors import ModelFolderError
from tests.factory import st_bytes

TENSORS = {"a": np.ones((4, 4), np.float32), "b": np.full((4, 4), 2, np.float32)}


def edited(edit):
    return st_bytes(TENSORS, header=lambda header: (edit(header), header)[1])


def named_twice(header):
    return (json.dumps(header)[:-1] + ', "a": ' + json.dumps(header["b"]) + "}").encode()


WHOLE = st_bytes(TENSORS)
BAD = {
    "cut short": (WHOLE[:-1], "1 bytes too early: the download looks incomplete"),
    "cut inside the header": (WHOLE[:40], "is only 40 bytes long: the download looks incomplete"),
    "cut inside the length": (WHOLE[:5], "is only 5 bytes long: the download looks incomplete"),
    "bytes behind the last tensor": (WHOLE + b"\0" * 8, "8 bytes at its end belong to no tensor"),
    "tensors that overlap": (edited(lambda h: h["b"].update(data_offsets=[0, 64])), "does not begin where"),
    "a hole": (edited(lambda h: h["b"].update(data_offsets=[65, 129])), "does not begin where"),
    "a negative offset": (edited(lambda h: h["a"].update(data_offsets=[-64, 0])), "no valid data_offsets"),
    "an end before the beginning": (edited(lambda h: h["a"].update(data_offsets=[64, 0])), "ends before it begins"),
    "a fractional offset": (edited(lambda h: h["a"].update(data_offsets=[0, 64.0])), "no valid data_offsets"),
    "a true offset": (edited(lambda h: h["a"].update(data_offsets=[False, 64])), "no valid data_offsets"),
    "three offsets": (edited(lambda h: h["a"].update(data_offsets=[0, 32, 64])), "no valid data_offsets"),
    "a shape that the bytes contradict": (edited(lambda h: h["b"].update(shape=[4, 400])), "type and shape contradict"),
    "a shape that overflows": (edited(lambda h: h["a"].update(shape=[2**32, 2**32])), "too large"),
    "a side beyond 64 bits": (edited(lambda h: h["a"].update(shape=[2**64, 0])), "no valid shape"),
    "an unknown type": (edited(lambda h: h["a"].update(dtype="F7")), "unknown type 'F7'"),
    "no type": (edited(lambda h: h["a"].pop("dtype")), "unknown type None"),
    "metadata that are no texts": (edited(lambda h: h.update(__metadata__={"a": 1})), "__metadata__"),
    "a tensor that is a list": (edited(lambda h: h.update(a=[1])), "not described by an object"),
    "a name twice": (st_bytes(TENSORS, header=named_twice), "not JSON"),
    "a lone surrogate": (st_bytes({}, header=lambda _: b'{"\\ud800": 1}'), "not JSON"),
    "not a number": (st_bytes({}, header=lambda _: b'{"a": NaN}'), "not JSON"),
    "an abyss": (st_bytes({}, header=lambda _: b"[" * 100_000), "not JSON"),
    "a list": (st_bytes({}, header=lambda _: b"[]"), "not a JSON object"),
    "a header of exabytes": (struct.pack("<Q", 1 << 62) + b"{}", "claims a header of 4611686018427387904 bytes"),
    "a claimed header": (struct.pack("<Q", 200_000_000) + b"{" + b" " * 99, "claims a header of 200000000 bytes"),
    "nothing": (b"", "is empty: the download looks incomplete"),
    "zeros": (bytes(4096), "nothing but zeros: the download looks incomplete"),
    "a pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n",
        "git-LFS pointer, not the file itself; run `git lfs pull`",
    ),
    "a web page": (b"<!DOCTYPE html><html>denied</html>", "is a web page"),
    "an indented web page": (b"\n  <html><body>", "is a web page"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_in_words(case, tmp_path):
    data, words = BAD[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelFolderError) as caught:
        read_header(path)
    assert words in str(caught.value)
    assert str(caught.value).startswith("model.safetensors ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", BAD)
def test_the_reference_refuses_it_too(case):
    reference = pytest.importorskip("safetensors")
    with pytest.raises(reference.SafetensorError):
        reference.deserialize(BAD[case][0])


def test_scalars_and_empty_tensors_are_sound(tmp_path):
    path = tmp_path / "ok.safetensors"
    path.write_bytes(st_bytes({"s": np.float32(3).reshape(()), "z": np.zeros((0, 4), np.float32)}))
    entries = read_header(path)
    assert {name: entry.shape for name, entry in entries.items()} == {"s": (), "z": (0, 4)}
    assert read_rows(entries["s"], 0, 1).tolist() == [[3.0]]
    assert read_rows(entries["z"], 0, 0).shape == (0, 4)


SIDES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 2**33]), max_size=3)
OFFSETS = st.lists(st.integers(-1, 40), min_size=1, max_size=3)
KINDS = st.sampled_from(["F32", "F16", "BF16", "F64", "I8", "BOOL", "F4", "F6_E2M3", "F8_E4M3", "C64", "f32", "Q4"])
HEADERS = st.dictionaries(
    st.sampled_from(["a", "b", "c", "__metadata__", ""]),
    st.one_of(
        st.fixed_dictionaries(
            {"dtype": KINDS, "shape": SIDES, "data_offsets": OFFSETS}, optional={"extra": st.integers()}
        ),
        st.dictionaries(st.sampled_from(["x", "y"]), st.one_of(st.text(max_size=2), st.integers()), max_size=2),
        st.none(),
    ),
    max_size=3,
)


@st.composite
def nearly_sound(draw):
    """Headers whose tensors follow each other, most of them right."""
    header, at = {}, 0
    for name in draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=4)):
        shape = draw(SIDES)
        kind = draw(KINDS)
        size = draw(st.sampled_from([1, 2, 4, 8])) * int(np.prod([side for side in shape if side < 9]))
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return header, at + draw(st.sampled_from([0, 0, 0, 1]))


@given(st.one_of(nearly_sound(), st.tuples(HEADERS, st.integers(0, 40))))
def test_the_verdict_is_the_reference_s(tmp_path_factory, case):
    reference = pytest.importorskip("safetensors")
    header, size = case
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(size)
    path = tmp_path_factory.getbasetemp() / "verdict.safetensors"
    path.write_bytes(data)
    try:
        theirs = {name: tuple(value["shape"]) for name, value in reference.deserialize(data)}
    except reference.SafetensorError:
        theirs = None
    try:
        ours = {name: entry.shape for name, entry in read_header(path).items()}
    except ModelFolderError:
        ours = None
    assert ours == theirs


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_are_exact(dtype, tmp_path):
    values = np.random.default_rng(1).normal(0, 1, (37, 19)).astype(FLOATS[dtype])
    path = tmp_path / "rows.safetensors"
    raw = (dtype, values.shape, values.tobytes())
    path.write_bytes(st_bytes({"before": np.ones(3, np.float32), "w": raw, "after": np.ones(3, np.float32)}))
    entry = read_header(path)["w"]
    for first, count in ((0, 37), (5, 1), (36, 1), (10, 20)):
        rows = read_rows(entry, first, count)
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows, values[first : first + count].astype(np.float32))


def test_bfloat16_keeps_every_bit_pattern(tmp_path):
    bits = np.arange(1 << 16, dtype=np.uint16)
    path = tmp_path / "bits.safetensors"
    path.write_bytes(st_bytes({"w": ("BF16", (256, 256), bits.tobytes())}))
    rows = read_rows(read_header(path)["w"], 0, 256)
    expected = (bits.astype(np.uint32) << 16).view(np.float32).reshape(256, 256)
    np.testing.assert_array_equal(rows.view(np.uint32), expected.view(np.uint32))


def test_a_number_beyond_float32_is_infinite_and_so_refused_later(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(st_bytes({"w": ("F64", (1, 1), np.float64(1e300).tobytes())}))
    assert np.isinf(read_rows(read_header(path)["w"], 0, 1)).all()


def test_a_file_that_shrinks_is_noticed(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(WHOLE)
    entry = read_header(path)["b"]
    path.write_bytes(WHOLE[:-4])
    with pytest.raises(ModelFolderError, match="became shorter"):
        read_rows(entry, 0, 4)


def test_a_name_in_the_header_may_not_be_long_in_the_message(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(st_bytes({}, header=lambda _: {"x" * 100_000: 1}))
    with pytest.raises(ModelFolderError) as caught:
        read_header(path)
    assert len(str(caught.value)) < 300
