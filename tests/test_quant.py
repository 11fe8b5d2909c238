"""The weight formats: the layout against literal loops, the error against the docstrings' promises."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.quant import FORMATS, Codes, magnitude
from engine.errors import InputError
from tests import naive

FORMAT_AND_GROUP = [(name, group) for name, row in FORMATS.items() for group in row.groups]
QUANTISED = [(name, group) for name, group in FORMAT_AND_GROUP if group]
SIDES = st.integers(1, 70)


def gauss(rows, cols, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal((rows, cols)) * scale).astype(np.float32)


def groups_of(weights, group):
    """(rows, groups, group), padded with zeros."""
    padded = np.zeros((weights.shape[0], -(-weights.shape[1] // group) * group))
    padded[:, : weights.shape[1]] = weights
    return padded.reshape(weights.shape[0], -1, group)


def check_promise(name, group, weights, found):
    """The bounds of the formats' docstrings, nothing looser."""
    off = np.abs(found.astype(np.float64) - weights)
    largest = float(np.abs(weights).max())
    if name == "q4":
        parts, errors = groups_of(weights, group), groups_of(off, group)
        spread = np.maximum(parts.max(axis=2), 0) - np.minimum(parts.min(axis=2), 0)
        bound = spread / 30 * (1 + 2**-9) + largest * 2**-40
        assert (np.sqrt((errors**2).mean(axis=2)) <= bound).all()
        assert (errors.max(axis=2) <= bound * group**0.5).all()
    elif name == "q8":
        parts, errors = groups_of(np.abs(weights), group), groups_of(off, group)
        assert (errors <= parts.max(axis=2, keepdims=True) / 254 * (1 + 2**-9) + largest * 2**-45).all()
    else:
        bits, smallest = {"f16": (11, 2.0**-25), "bf16": (8, 0), "f32": (24, 0)}[name]
        bound = 0 if name == "f32" else np.abs(weights.astype(np.float64)) * 2.0**-bits + smallest
        assert (off <= bound).all()
    assert (found[weights == 0] == 0).all()


@pytest.mark.parametrize(("name", "group"), FORMAT_AND_GROUP)
@given(
    rows=SIDES,
    cols=st.integers(1, 300),
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(["gauss", "tails", "positive", "negative", "one big", "sparse", "groups differ"]),
    power=st.integers(-90, 15),
)
@settings(max_examples=25, deadline=None)
def test_error_keeps_the_promise(name, group, rows, cols, seed, kind, power):
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((rows, cols))
    if kind == "tails":
        weights = np.clip(rng.standard_cauchy((rows, cols)), -1e4, 1e4)
    elif kind == "positive":
        weights = np.abs(weights)
    elif kind == "negative":
        weights = -1 - np.abs(weights)
    elif kind == "one big":
        weights[rng.integers(rows), rng.integers(cols)] = 1000
    elif kind == "sparse":
        weights *= rng.random((rows, cols)) < 0.1
    elif kind == "groups differ":
        weights *= np.repeat(10.0 ** rng.integers(-9, 1, (rows, -(-cols // 32))), 32, axis=1)[:, :cols]
    top = 4 if name == "f16" else power
    low = 0 if name == "f16" else power
    weights = (weights * 2.0 ** min(max(power, low), top) / max(1, np.abs(weights).max() / 2)).astype(np.float32)
    if name == "bf16":
        weights[np.abs(weights) < 2.0**-126] = 0  # denormals have fewer bits to keep
    packed = FORMATS[name].pack(weights, group)
    found = FORMATS[name].unpack(*packed, rows, cols, group)
    assert found.shape == weights.shape
    assert found.dtype == np.float32
    check_promise(name, group, weights, found)


@pytest.mark.parametrize(("name", "group"), QUANTISED)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 1e-30, 1.0, 7e4, 3e38, -7e4])
def test_one_value_everywhere(name, group, value):
    weights = np.full((3, 40), value, np.float32)
    packed = FORMATS[name].pack(weights, group)
    found = FORMATS[name].unpack(*packed, 3, 40, group)
    step = 15 if name == "q4" else 127
    assert np.abs(found.astype(np.float64) - weights).max() <= abs(float(np.float32(value))) * 0.5 / step + 2.0**-149


@pytest.mark.parametrize(("name", "group"), QUANTISED)
def test_values_of_very_different_size_share_a_tensor(name, group):
    weights = np.zeros((4, 4 * group), np.float32)
    weights[0, :group] = np.linspace(-7e4, 7e4, group)
    weights[1, group : 2 * group] = np.linspace(-1e-30, 1e-30, group)  # vanishes beside 7e4, as promised
    weights[2, 2 * group :] = np.linspace(-1e-3, 2e-3, 2 * group)
    packed = FORMATS[name].pack(weights, group)
    found = FORMATS[name].unpack(*packed, *weights.shape, group)
    assert np.isfinite(found).all()
    check_promise(name, group, weights, found)
    assert np.abs(found[2] - weights[2]).max() < 2e-4  # float16 scales alone would have lost this row


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("name", "group"), FORMAT_AND_GROUP)
def test_what_is_not_finite_is_refused(name, group, bad):
    weights = gauss(20, 70)
    weights[17, 69] = bad
    with pytest.raises(InputError, match="not a finite number"):
        FORMATS[name].pack(weights, group)
    layout = FORMATS[name].layout(20, 70, group)
    with pytest.raises(InputError, match="not a finite number"):
        layout.pack_rows(weights[16:], 16, layout.empty(), 0)


@pytest.mark.parametrize(("name", "value"), [("f16", 7e4), ("f16", -65520.0), ("bf16", 3.4e38)])
def test_what_a_float_format_cannot_hold_is_refused(name, value):
    weights = gauss(16, 16)
    weights[3, 5] = value
    with pytest.raises(InputError, match=f"too large for {name}"):
        FORMATS[name].pack(weights, 0)


# ---------------------------------------------------------------- layout


def literal_q4(layout, buffer, exponent):
    """The module's table, read one number at a time."""
    codes = buffer[layout.parts[0].offset :]
    meta = buffer[layout.parts[1].offset :]
    cols, group = layout.padded_cols, layout.group
    weights = np.zeros((layout.padded_rows, cols))
    for row in range(layout.padded_rows):
        block, r = divmod(row, 16)
        for col in range(cols):
            j, within = divmod(col, 8)
            byte = int(codes[(block * (cols // 8) + j) * 64 + 4 * r + within % 4])
            code = byte & 15 if within < 4 else byte >> 4
            start = (block * (cols // group) + col // group) * 40
            scale = float(meta[start + 2 * r : start + 2 * r + 2].view(np.float16)[0])
            pair = int(meta[start + 32 + r // 2])
            zero = pair & 15 if r % 2 == 0 else pair >> 4
            weights[row, col] = (code - zero) * scale * 2.0**exponent
    return weights


def literal_q8(layout, buffer, exponent):
    codes = buffer[layout.parts[0].offset :].view(np.int8)
    meta = buffer[layout.parts[1].offset :].view(np.float16)
    cols, group = layout.padded_cols, layout.group
    weights = np.zeros((layout.padded_rows, cols))
    for row in range(layout.padded_rows):
        block, r = divmod(row, 16)
        for col in range(cols):
            code = int(codes[(block * (cols // 4) + col // 4) * 64 + 4 * r + col % 4])
            scale = float(meta[(block * (cols // group) + col // group) * 16 + r])
            weights[row, col] = code * scale * 2.0**exponent
    return weights


def literal_float(layout, buffer, exponent):
    assert exponent == 0
    size = layout.bytes // (layout.padded_rows * layout.padded_cols)
    weights = np.zeros((layout.padded_rows, layout.padded_cols))
    for row in range(layout.padded_rows):
        block, r = divmod(row, 16)
        for col in range(layout.padded_cols):
            at = ((block * layout.padded_cols + col) * 16 + r) * size
            raw = buffer[at : at + size].tobytes()
            if layout.format.name == "bf16":
                raw = b"\0\0" + raw
            weights[row, col] = np.frombuffer(raw, np.float16 if layout.format.name == "f16" else np.float32)[0]
    return weights


LITERAL = {"q4": literal_q4, "q8": literal_q8, "f16": literal_float, "bf16": literal_float, "f32": literal_float}


@pytest.mark.parametrize(("name", "group"), FORMAT_AND_GROUP)
@pytest.mark.parametrize("shape", [(1, 1), (16, 256), (33, 65), (18, 130)])
def test_bytes_mean_what_the_table_says(name, group, shape):
    weights = gauss(*shape, scale=0.02)
    layout = FORMATS[name].layout(*shape, group)
    packed = FORMATS[name].pack(weights, group)
    assert packed.buffer.shape == (layout.bytes,)
    assert packed.buffer.ctypes.data % 64 == 0
    assert [part.offset % 64 for part in layout.parts] == [0] * len(layout.parts)
    literal = LITERAL[name](layout, packed.buffer, packed.exponent)
    assert np.array_equal(literal[: shape[0], : shape[1]], layout.unpack(packed.buffer, packed.exponent))
    assert (literal[shape[0] :] == 0).all()
    assert (literal[:, shape[1] :] == 0).all()


@pytest.mark.parametrize(("name", "group"), FORMAT_AND_GROUP)
@given(rows=st.integers(1, 3000), cols=st.integers(1, 3000))
def test_sizes_are_what_is_allocated(name, group, rows, cols):
    row = FORMATS[name]
    layout = row.layout(rows, cols, group)
    stored_rows, stored_cols = row.padded(rows, cols, group)
    assert stored_rows % 16 == stored_cols % (group or 16) == 0
    assert 0 <= stored_rows - rows < 16
    assert 0 <= stored_cols - cols < (group or 16)
    bits = sum(part.bytes for part in layout.parts) * 8
    assert bits == row.bits_per_weight(group) * stored_rows * stored_cols
    assert row.packed_bytes(rows, cols, group) == layout.bytes
    assert bits / 8 <= layout.bytes < bits / 8 + 64 * len(layout.parts)
    end = 0
    for part in layout.parts:
        assert part.offset >= end
        end = part.offset + part.bytes


@pytest.mark.parametrize(("name", "group"), FORMAT_AND_GROUP)
def test_slices_give_the_same_bytes(name, group):
    weights = gauss(150, 200)
    whole = FORMATS[name].pack(weights, group)
    layout = FORMATS[name].layout(150, 200, group)
    exponent = FORMATS[name].exponent_for(max(magnitude(weights[:64]), magnitude(weights[64:])))
    out = layout.empty()
    spans = [(64, 150), (0, 16), (16, 64)]
    threads = [threading.Thread(target=layout.pack_rows, args=(weights[a:b], a, out, exponent)) for a, b in spans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert exponent == whole.exponent
    assert np.array_equal(out, whole.buffer)
    part = layout.unpack_rows(out, exponent, 21, 50)
    assert np.array_equal(part, layout.unpack(out, exponent)[21:71])


def test_a_wide_matrix_is_worked_on_in_chunks():
    weights = gauss(48, 20_000)
    packed = FORMATS["q4"].pack(weights, 32)
    again = FORMATS["q4"].pack(weights[16:32], 32)
    layout = FORMATS["q4"].layout(48, 20_000, 32)
    assert packed.exponent == again.exponent
    assert np.array_equal(
        layout.unpack_rows(packed.buffer, packed.exponent, 16, 16),
        FORMATS["q4"].unpack(*again, 16, 20_000, 32),
    )


@pytest.mark.parametrize("span", [(8, 24), (16, 40), (32, 64), (0, 60)])
def test_slices_of_broken_blocks_are_our_mistake(span):
    layout = FORMATS["q8"].layout(50, 64, 32)
    with pytest.raises(ValueError, match="no slice"):
        layout.pack_rows(gauss(span[1] - span[0], 64), span[0], layout.empty(), 0)


# ---------------------------------------------------------------- codes made elsewhere


@given(rows=SIDES, cols=st.integers(1, 300), group=st.sampled_from([32, 64, 128, 256]), seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_given_codes_come_back(rows, cols, group, seed):
    rng = np.random.default_rng(seed)
    groups = -(-cols // group)
    scales = rng.standard_normal((rows, groups)).astype(np.float16)
    four = Codes(
        rng.integers(0, 16, (rows, cols), np.uint8), scales, rng.integers(0, 16, (rows, groups)).astype(np.uint8)
    )
    eight = Codes(rng.integers(-127, 128, (rows, cols), np.int8), scales, None)
    for name, codes in (("q4", four), ("q8", eight)):
        layout = FORMATS[name].layout(rows, cols, group)
        out = layout.empty()
        first = min(16, rows)
        for start, end in ((0, first), (first, rows)):
            zeros = None if codes.zeros is None else codes.zeros[start:end]
            if start < end:
                layout.pack_codes(Codes(codes.codes[start:end], codes.scales[start:end], zeros), start, out)
        found = layout.codes(out)
        assert np.array_equal(found.codes, codes.codes)
        assert np.array_equal(found.scales, codes.scales)
        assert (found.zeros is None) == (codes.zeros is None)
        if codes.zeros is not None:
            assert np.array_equal(found.zeros, codes.zeros)
        want = naive.Quantised(codes, -3, group).weights()
        assert np.array_equal(layout.unpack(out, -3), want)
        assert (LITERAL[name](layout, out, 0)[:, cols:] == 0).all()


@pytest.mark.parametrize(
    ("name", "codes", "zeros", "sentence"),
    [
        ("q4", 16, 8, "code 16 does not fit format q4"),
        ("q4", 3, 16, "zero point 16 does not fit format q4"),
        ("q4", 3, None, "needs zero points"),
        ("q8", -128, None, "code -128 does not fit format q8"),
        ("q8", 1, 1, "has no zero points"),
        ("f16", 1, None, "plain values"),
    ],
)
def test_codes_that_do_not_fit_are_refused(name, codes, zeros, sentence):
    row = FORMATS[name]
    layout = row.layout(16, 64, row.group_for(32))
    given_codes = Codes(
        np.full((16, 64), codes, np.int16),
        np.ones((16, 2), np.float16),
        None if zeros is None else np.full((16, 2), zeros, np.uint8),
    )
    with pytest.raises(InputError, match=sentence):
        layout.pack_codes(given_codes, 0, layout.empty())


def test_a_scale_that_is_not_finite_is_refused():
    layout = FORMATS["q8"].layout(16, 32, 32)
    codes = Codes(np.ones((16, 32), np.int8), np.full((16, 1), np.inf, np.float16), None)
    with pytest.raises(InputError, match="scale is not a finite number"):
        layout.pack_codes(codes, 0, layout.empty())


@pytest.mark.parametrize(("name", "group"), [("q4", 0), ("q4", 48), ("q8", 512), ("f16", 32)])
def test_groups_that_do_not_exist_are_refused(name, group):
    with pytest.raises(InputError, match=f"format {name} has no group size {group}"):
        FORMATS[name].layout(16, 64, group)


# ---------------------------------------------------------------- quality


@pytest.mark.parametrize(("group", "share"), [(32, 0.0775), (64, 0.088), (128, 0.0962), (256, 0.102)])
def test_q4_loses_no_more_than_the_docstring_says(group, share):
    weights = gauss(256, 1024)
    packed = FORMATS["q4"].pack(weights, group)
    found = FORMATS["q4"].unpack(*packed, *weights.shape, group)
    assert np.linalg.norm(found - weights) / np.linalg.norm(weights) < share


def test_q4_weights_on_a_grid_come_back_exactly():
    """What another 4-bit format with an integer zero point rounded loses nothing more."""
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 16, (32, 256))
    codes[:, ::32], codes[:, 1::32] = 0, 15  # each group uses its whole range
    zero = rng.integers(0, 16, (32, 8))
    scale = rng.uniform(0.001, 0.02, (32, 8)).astype(np.float16).astype(np.float32)
    weights = ((codes - np.repeat(zero, 32, axis=1)) * np.repeat(scale, 32, axis=1)).astype(np.float32)
    found = FORMATS["q4"].unpack(*FORMATS["q4"].pack(weights, 32), *weights.shape, 32)
    np.testing.assert_allclose(found, weights, atol=1e-3 * np.abs(weights).max())


def test_the_twin_of_the_product_is_close_to_the_product():
    weights, x = gauss(40, 320), gauss(1, 320, seed=1)[0]
    for name, group, share in (("q4", 32, 0.2), ("q8", 64, 0.02)):
        matrix = naive.quantised(weights, name, group)
        assert np.array_equal(
            matrix.weights(), FORMATS[name].unpack(*FORMATS[name].pack(weights, group), 40, 320, group)
        )
        exact = naive.linear(matrix, x[None])[0]
        assert np.abs(exact - weights @ x).max() < share * np.linalg.norm(x)
        near = naive.canonical_quantised_matvec(matrix, x)
        bound = 1e-6 * (np.abs(matrix.weights()) @ np.abs(x))
        assert (np.abs(near - exact) <= bound).all()
    near = naive.canonical_float_matvec(weights, x)
    assert (np.abs(near - weights.astype(np.float64) @ x) <= 1e-5 * (np.abs(weights) @ np.abs(x))).all()


def test_no_instruction_set_changes_a_byte():
    script = """
import hashlib
from tests.test_quant import FORMATS, FORMAT_AND_GROUP, gauss
digest = hashlib.sha256()
for name, group in FORMAT_AND_GROUP:
    digest.update(FORMATS[name].pack(gauss(64, 520), group).buffer)
print(digest.hexdigest())
"""
    root = Path(__file__).parent.parent
    answers = []
    for disabled in ("", "AVX512F AVX512CD AVX512_SKX AVX2 FMA3", "X86_V3 X86_V4"):
        environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": disabled, "PYTHONWARNINGS": "ignore"}
        run = subprocess.run(
            [sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True, check=False
        )
        if run.returncode == 0:  # otherwise this numpy has other names for its features
            answers.append(run.stdout)
    assert answers
    assert len(set(answers)) == 1
