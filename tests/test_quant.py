"""The weight formats: the layout against literal loops, the search against its twin, the error against its promise."""

import os
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.build import TARGETS
from engine.core.quant import FORMATS, Codes, magnitude
from engine.errors import InputError
from tests import naive
from tests.workbench import Weights, packer

FORMAT_AND_GROUP = [(name, group) for name, row in FORMATS.items() for group in row.groups]
QUANTISED = [(name, group) for name, group in FORMAT_AND_GROUP if group]
TWO_LEVEL = [(name, group) for name, group in QUANTISED if name != "q8"]
# The largest code, and the largest multiplier with which it fits a byte.
STEPS = {"q4": 15, "q4g": 15, "q6": 63}
MOST = {"q4": 16, "q4g": 16, "q6": 4}
CODE_BITS = {"q4": 4, "q4g": 4, "q6": 6, "q8": 8, "f16": 16, "bf16": 16, "f32": 32}
SIDES = st.integers(1, 70)
KINDS = ["gauss", "tails", "positive", "negative", "one big", "sparse", "groups differ"]


def gauss(rows, cols, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal((rows, cols)) * scale).astype(np.float32)


def span_of(name, group):
    """Columns that share a scale, by the module's table."""
    return max(group, 128) if name in {"q4", "q6"} else group


def round_up(value, multiple):
    return -(-value // multiple) * multiple


def parts_of(weights, columns):
    """(rows, parts, columns), padded with zeros."""
    padded = np.zeros((weights.shape[0], round_up(weights.shape[1], columns)))
    padded[:, : weights.shape[1]] = weights
    return padded.reshape(weights.shape[0], -1, columns)


def ranges(weights, columns):
    """(lowest, highest) of the weights and 0 of every part (rows, parts)."""
    parts = parts_of(weights, columns)
    return np.minimum(parts.min(axis=2), 0), np.maximum(parts.max(axis=2), 0)


def check_promise(name, group, weights, found, least=0.0):
    """The bounds of the formats' docstrings, nothing looser.

    least: added to every bound, for tensors that are smaller than those the docstrings speak of
    """
    off = np.abs(found.astype(np.float64) - weights)
    largest = float(np.abs(weights).max())
    if name in STEPS:
        span = span_of(name, group)
        low, high = ranges(weights, group)
        smallest = np.max([high / 127, -low / 128, (high - low) / (STEPS[name] * MOST[name])], axis=0)
        smallest = np.repeat(parts_of(smallest, span // group).max(axis=2), span // group, axis=1)[:, : low.shape[1]]
        bound = ((high - low) / (2 * STEPS[name]) + smallest / 2) * (1 + 2**-9) + largest * 2**-46 + least
        allowed = parts_of(group * bound**2, span // group).sum(axis=2)
        assert ((parts_of(off, span) ** 2).sum(axis=2) <= allowed).all()
        zeros = np.repeat((low == 0) & (high == 0), group, axis=1)[:, : weights.shape[1]]
        assert (found[zeros] == 0).all()
        return
    if name == "q8":
        assert (
            parts_of(off, group)
            <= parts_of(np.abs(weights), group).max(axis=2, keepdims=True) / 254 * (1 + 2**-9)
            + largest * 2**-45
            + least
        ).all()
    else:
        bits, smallest = {"f16": (11, 2.0**-25), "bf16": (8, 0), "f32": (24, 0)}[name]
        bound = 0 if name == "f32" else np.abs(weights.astype(np.float64)) * 2.0**-bits + smallest
        assert (off <= bound).all()
    assert (found[weights == 0] == 0).all()


def of_kind(kind, rows, cols, rng):
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
    return weights


@pytest.mark.parametrize(("name", "group"), FORMAT_AND_GROUP)
@given(
    rows=SIDES,
    cols=st.integers(1, 300),
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(KINDS),
    power=st.integers(-90, 15),
)
@settings(max_examples=25, deadline=None)
def test_error_keeps_the_promise(name, group, rows, cols, seed, kind, power):
    weights = of_kind(kind, rows, cols, np.random.default_rng(seed))
    top = 4 if name == "f16" else power
    low = 0 if name == "f16" else power
    weights = (weights * 2.0 ** min(max(power, low), top) / max(1, np.abs(weights).max() / 2)).astype(np.float32)
    if name == "bf16":
        weights[np.abs(weights) < 2.0**-126] = 0  # denormals have fewer bits to keep
    packed = FORMATS[name].pack(weights, group, packer())
    found = FORMATS[name].unpack(*packed, rows, cols, group)
    assert found.shape == weights.shape
    assert found.dtype == np.float32
    check_promise(name, group, weights, found)


@pytest.mark.parametrize(("name", "group"), QUANTISED)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 1e-30, 1.0, 7e4, 3e38, -7e4])
def test_one_value_everywhere(name, group, value):
    weights = np.full((3, 40), value, np.float32)
    packed = FORMATS[name].pack(weights, group, packer())
    found = FORMATS[name].unpack(*packed, 3, 40, group)
    check_promise(name, group, weights, found, least=2.0**-148)


@pytest.mark.parametrize(("name", "group"), QUANTISED)
def test_values_of_very_different_size_share_a_tensor(name, group):
    weights = np.zeros((4, 4 * group), np.float32)
    weights[0, :group] = np.linspace(-7e4, 7e4, group)
    weights[1, group : 2 * group] = np.linspace(-1e-30, 1e-30, group)  # vanishes beside 7e4, as promised
    weights[2, 2 * group :] = np.linspace(-1e-3, 2e-3, 2 * group)
    packed = FORMATS[name].pack(weights, group, packer())
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
        FORMATS[name].pack(weights, group, packer())
    layout = FORMATS[name].layout(20, 70, group)
    with pytest.raises(InputError, match="not a finite number"):
        layout.pack_rows(weights[16:], 16, layout.empty(), 0, packer())


@pytest.mark.parametrize(("name", "value"), [("f16", 7e4), ("f16", -65520.0), ("bf16", 3.4e38)])
def test_what_a_float_format_cannot_hold_is_refused(name, value):
    weights = gauss(16, 16)
    weights[3, 5] = value
    with pytest.raises(InputError, match=f"too large for {name}"):
        FORMATS[name].pack(weights, 0, packer())


# ---------------------------------------------------------------- the search


@cache
def searched():
    """Float32 (16, 576): a row of every kind, and some more."""
    rng = np.random.default_rng(3)
    rows = [of_kind(kind, 1, 576, rng)[0] for kind in KINDS for _ in range(2)]
    rows += [np.where(np.arange(576) < 300, 0, rows[0]), np.rint(4 * rows[1])]
    return np.array(rows, np.float32)


@cache
def found_by_twin(name, group):
    """(exponent, codes) for `searched`, with columns up to the next whole group."""
    exponent = FORMATS[name].exponent_for(magnitude(searched()))
    weights = parts_of(searched(), max(group, 64)).reshape(16, -1).astype(np.float32)
    span = span_of(name, group)
    return exponent, naive.canonical_packed_codes(weights, exponent, group, span, STEPS[name], MOST[name])


@pytest.mark.parametrize("tier", TARGETS)
@pytest.mark.parametrize(("name", "group"), TWO_LEVEL)
def test_every_tier_packs_what_the_twin_chooses(kernels, tier, name, group):
    """Every byte of the buffer: the choice by the twin, the place by `pack_codes`, which the literal readers prove."""
    packed = FORMATS[name].pack(searched(), group, kernels(tier))
    exponent, codes = found_by_twin(name, group)
    layout = FORMATS[name].layout(*codes.codes.shape, group)
    want = layout.empty()
    layout.pack_codes(codes, 0, want)
    assert packed.exponent == exponent
    assert np.array_equal(packed.buffer, want)


# ---------------------------------------------------------------- layout


def literal_two_level(layout, buffer, exponent):
    """The module's table, read one number at a time."""
    codes = buffer[layout.parts[0].offset :]
    meta = buffer[layout.parts[1].offset :]
    cols, group, span = layout.padded_cols, layout.group, span_of(layout.format.name, layout.group)
    groups = span // group
    weights = np.zeros((layout.padded_rows, cols))
    for row in range(layout.padded_rows):
        block, r = divmod(row, 16)
        for col in range(cols):
            if layout.format.name == "q6":
                line = (block * (cols // 16) + col // 16) * 192
                low = line + 64 * (col // 8 % 2)
                k, i = divmod(col % 16, 4)
                high = int(codes[line + 128 + 4 * r + i]) >> 2 * k & 3
            else:
                low, high = (block * (cols // 8) + col // 8) * 64, 0
            byte = int(codes[low + 4 * r + col % 4])
            code = (byte & 15 if col % 8 < 4 else byte >> 4) | high << 4
            record = (block * -(-cols // span) + col // span) * (32 + 24 * groups)
            scale = float(meta[record + 2 * r : record + 2 * r + 2].view(np.float16)[0])
            g = col % span // group
            pair = int(meta[record + 32 + 8 * g + r // 2])
            multiplier = 1 + (pair & 15 if r % 2 == 0 else pair >> 4)
            offsets = record + 32 + 8 * groups
            offset = int(meta[offsets + (r if groups == 1 else 32 * (g // 2) + 2 * r + g % 2)])
            weights[row, col] = (code * multiplier - offset) * scale * 2.0**exponent
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


LITERAL = dict.fromkeys(STEPS, literal_two_level) | {"q8": literal_q8}
LITERAL |= dict.fromkeys(("f16", "bf16", "f32"), literal_float)


@pytest.mark.parametrize(("name", "group"), FORMAT_AND_GROUP)
@pytest.mark.parametrize("shape", [(1, 1), (16, 256), (33, 65), (18, 130)])
def test_bytes_mean_what_the_table_says(name, group, shape):
    weights = gauss(*shape, scale=0.02)
    layout = FORMATS[name].layout(*shape, group)
    packed = FORMATS[name].pack(weights, group, packer())
    assert packed.buffer.shape == (layout.bytes,)
    assert packed.buffer.ctypes.data % 64 == 0
    assert [part.offset % 64 for part in layout.parts] == [0] * len(layout.parts)
    literal = LITERAL[name](layout, packed.buffer, packed.exponent)
    assert np.array_equal(literal[: shape[0], : shape[1]], layout.unpack(packed.buffer, packed.exponent))
    assert (literal[shape[0] :] == 0).all()
    # Columns that fill up a two-level group are weights of 0 to the search; beyond it, and elsewhere, they are exact.
    exact = round_up(shape[1], group) if name in STEPS else shape[1]
    assert (literal[:, exact:] == 0).all()
    stored = np.zeros_like(literal, np.float32)
    stored[: shape[0], : shape[1]] = weights
    check_promise(name, group, stored, literal)


@pytest.mark.parametrize(("name", "group"), FORMAT_AND_GROUP)
@given(rows=st.integers(1, 3000), cols=st.integers(1, 3000))
def test_sizes_are_what_is_allocated(name, group, rows, cols):
    row = FORMATS[name]
    layout = row.layout(rows, cols, group)
    stored_rows, stored_cols = row.padded(rows, cols, group)
    assert (layout.padded_rows, layout.padded_cols) == (stored_rows, stored_cols)
    assert stored_rows == round_up(rows, 16)
    assert stored_cols == round_up(cols, max(group, 64) if group else 16)
    assert layout.span == span_of(name, group)
    # A record of scales is stored whole, even where its span is not.
    beside = row.bits_per_weight(group) - CODE_BITS[name]
    bits = stored_rows * (CODE_BITS[name] * stored_cols + beside * round_up(stored_cols, layout.span or 1))
    assert sum(part.bytes for part in layout.parts) * 8 == bits
    assert row.packed_bytes(rows, cols, group) == layout.bytes
    assert layout.bytes % 64 == 0
    assert bits / 8 <= layout.bytes < bits / 8 + 64 * len(layout.parts)
    end = 0
    for part in layout.parts:
        assert part.offset >= end
        end = part.offset + part.bytes


@pytest.mark.parametrize(
    ("name", "group", "bits"),
    [("q4", 32, 4.5), ("q4", 128, 4.21875), ("q4g", 32, 4.875), ("q6", 32, 6.5), ("q8", 128, 8.125), ("bf16", 0, 16)],
)
def test_what_a_weight_costs(name, group, bits):
    assert FORMATS[name].bits_per_weight(group) == bits
    assert FORMATS[name].packed_bytes(256, 1024, group) * 8 == bits * 256 * 1024


@pytest.mark.parametrize(("name", "group"), FORMAT_AND_GROUP)
def test_slices_give_the_same_bytes(name, group):
    weights = gauss(150, 200)
    whole = FORMATS[name].pack(weights, group, packer())
    layout = FORMATS[name].layout(150, 200, group)
    exponent = FORMATS[name].exponent_for(max(magnitude(weights[:64]), magnitude(weights[64:])))
    out = layout.empty()
    slices = [(weights[a:b], a, out, exponent, packer()) for a, b in [(64, 150), (0, 16), (16, 64)]]
    threads = [threading.Thread(target=layout.pack_rows, args=arguments) for arguments in slices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert exponent == whole.exponent
    assert np.array_equal(out, whole.buffer)
    part = layout.unpack_rows(out, exponent, 21, 50)
    assert np.array_equal(part, layout.unpack(out, exponent)[21:71])


@pytest.mark.parametrize(("name", "group"), [("q4", 32), ("q6", 64), ("q8", 128), ("bf16", 0)])
def test_a_matrix_need_not_lie_as_kernels_read_it(name, group):
    """Columns of a wider one, transposed, or not float32: packed as a copy is."""
    wide = gauss(512, 48)
    want = FORMATS[name].pack(np.ascontiguousarray(wide[::2].T), group, packer())
    for weights in (wide[::2].T, np.asfortranarray(wide[::2].T), wide[::2].T.astype(np.float64)):
        found = FORMATS[name].pack(weights, group, packer())
        assert found.exponent == want.exponent
        assert np.array_equal(found.buffer, want.buffer)


def test_a_wide_matrix_is_worked_on_in_chunks():
    weights = gauss(48, 20_000)
    packed = FORMATS["q4"].pack(weights, 32, packer())
    again = FORMATS["q4"].pack(weights[16:32], 32, packer())
    layout = FORMATS["q4"].layout(48, 20_000, 32)
    assert packed.exponent == again.exponent
    assert np.array_equal(
        layout.unpack_rows(packed.buffer, packed.exponent, 16, 16),
        FORMATS["q4"].unpack(*again, 16, 20_000, 32),
    )


@pytest.mark.parametrize("span", [(8, 24), (16, 40), (32, 64), (0, 60)])
def test_slices_of_broken_blocks_are_our_mistake(span):
    layout = FORMATS["q8"].layout(50, 64, 128)
    with pytest.raises(ValueError, match="no slice"):
        layout.pack_rows(gauss(span[1] - span[0], 64), span[0], layout.empty(), 0, packer())


# ---------------------------------------------------------------- codes made elsewhere


def random_codes(name, group, rows, cols, rng):
    """All that the format can hold."""
    groups, spans = -(-cols // group), -(-cols // span_of(name, group))
    scales = rng.standard_normal((rows, spans)).astype(np.float16)
    if name == "q8":
        return Codes(rng.integers(-127, 128, (rows, cols), np.int8), scales)
    codes = rng.integers(0, STEPS[name] + 1, (rows, cols), np.uint8)
    multipliers = rng.integers(1, MOST[name] + 1, (rows, groups))
    offsets = rng.integers(np.maximum(STEPS[name] * multipliers - 127, 0), 129)
    return Codes(codes, scales, multipliers.astype(np.uint8), offsets.astype(np.uint8))


@pytest.mark.parametrize(("name", "group"), QUANTISED)
@given(rows=SIDES, cols=st.integers(1, 300), seed=st.integers(0, 2**32))
@settings(max_examples=8, deadline=None)
def test_given_codes_come_back(name, group, rows, cols, seed):
    codes = random_codes(name, group, rows, cols, np.random.default_rng(seed))
    layout = FORMATS[name].layout(rows, cols, group)
    out = layout.empty()
    first = min(16, rows)
    for start, end in ((0, first), (first, rows)):
        if start < end:
            part = Codes(*(None if values is None else values[start:end] for values in codes))
            layout.pack_codes(part, start, out)
    found = layout.codes(out)
    for kind, ours, theirs in zip(Codes._fields, found, codes, strict=True):
        assert (ours is None) == (theirs is None), kind
        if theirs is not None:
            assert ours.dtype == theirs.dtype, kind
            assert np.array_equal(ours, theirs), kind
    assert np.array_equal(layout.unpack(out, -3), naive.Quantised(codes, -3, group, layout.span).weights())
    literal = LITERAL[name](layout, out, 0)
    assert np.array_equal(literal[:rows, :cols], layout.unpack(out, 0))
    assert (literal[rows:] == 0).all()
    assert (literal[:, round_up(cols, group) :] == 0).all()


def test_what_has_a_float_scale_for_each_group_fits_exactly():
    """16 levels around a zero point of 0..15, as other 4-bit formats have them."""
    rng = np.random.default_rng(4)
    levels, zeros = rng.integers(0, 16, (32, 256), np.uint8), rng.integers(0, 16, (32, 8), np.uint8)
    scales = rng.uniform(0.001, 0.02, (32, 8)).astype(np.float16)
    layout = FORMATS["q4g"].layout(32, 256, 32)
    out = layout.empty()
    layout.pack_codes(Codes(levels, scales, np.ones_like(zeros), zeros), 0, out)
    steps = levels - np.repeat(zeros.astype(np.float32), 32, axis=1)
    assert np.array_equal(layout.unpack(out, 0), steps * np.repeat(scales.astype(np.float32), 32, axis=1))


@pytest.mark.parametrize(
    ("name", "codes", "multipliers", "offsets", "sentence"),
    [
        ("q4", 16, 1, 8, "code 16 does not fit format q4, which has 0..15"),
        ("q4g", 16, 1, 8, "code 16 does not fit format q4g, which has 0..15"),
        ("q6", 64, 1, 8, "code 64 does not fit format q6, which has 0..63"),
        ("q4", -1, 1, 8, "code -1 does not fit format q4"),
        ("q4", 3, 0, 8, "multiplier 0 does not fit format q4, which has 1..16"),
        ("q4", 3, 17, 128, "multiplier 17 does not fit format q4"),
        ("q6", 3, 5, 128, "multiplier 5 does not fit format q6, which has 1..4"),
        ("q4", 3, 16, 129, "offset 129 does not fit format q4, which has 0..128"),
        ("q4", 3, 16, 112, "largest weight in units of the scale 128 does not fit format q4"),
        ("q6", 3, 4, 124, "largest weight in units of the scale 128 does not fit format q6"),
        ("q4", 3, None, None, "needs multipliers and offsets"),
        ("q6", 3, 1, None, "needs multipliers and offsets"),
        ("q8", -128, None, None, "code -128 does not fit format q8, which has -127..127"),
        ("q8", 1, 1, 1, "has no multipliers and no offsets"),
        ("f16", 1, None, None, "plain values"),
    ],
)
def test_codes_that_do_not_fit_are_refused(name, codes, multipliers, offsets, sentence):
    row = FORMATS[name]
    layout = row.layout(16, 64, row.group_for(32))
    given_codes = Codes(
        np.full((16, 64), codes, np.int16),
        np.ones((16, 2 if name == "q4g" else 1), np.float16),
        None if multipliers is None else np.full((16, 2), multipliers, np.uint8),
        None if offsets is None else np.full((16, 2), offsets, np.uint8),
    )
    with pytest.raises(InputError, match=sentence):
        layout.pack_codes(given_codes, 0, layout.empty())


@pytest.mark.parametrize(("name", "group"), QUANTISED)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_refused(name, group, bad):
    layout = FORMATS[name].layout(16, 32, group)
    codes = random_codes(name, group, 16, 32, np.random.default_rng(0))
    codes.scales[7, 0] = bad
    with pytest.raises(InputError, match="scale is not a finite number"):
        layout.pack_codes(codes, 0, layout.empty())


@pytest.mark.parametrize("name", ["f16", "bf16", "f32"])
def test_plain_values_have_no_codes(name):
    layout = FORMATS[name].layout(16, 16, 0)
    with pytest.raises(InputError, match="holds plain values, not codes"):
        layout.codes(FORMATS[name].pack(gauss(16, 16), 0, packer()).buffer)


@pytest.mark.parametrize(
    ("name", "group"),
    [("q4", 0), ("q4", 48), ("q4g", 16), ("q6", 512), ("q8", 0), ("q8", 512), ("f16", 32)],
)
def test_groups_that_do_not_exist_are_refused(name, group):
    with pytest.raises(InputError, match=f"format {name} has no group size {group}; it has "):
        FORMATS[name].layout(16, 64, group)


@pytest.mark.parametrize(
    ("name", "wanted", "group"),
    [("q4", 32, 32), ("q6", 256, 256), ("q8", 100, 128), ("q8", 1000, 256), ("q4", 0, 32), ("f16", 32, 0)],
)
def test_the_nearest_group_that_there_is(name, wanted, group):
    assert FORMATS[name].group_for(wanted) == group


# ---------------------------------------------------------------- quality


@pytest.mark.parametrize(
    ("name", "group", "share"),
    [
        ("q4", 32, 0.073),
        ("q4", 64, 0.083),
        ("q4", 128, 0.092),
        ("q4", 256, 0.100),
        ("q4g", 32, 0.0715),
        ("q6", 32, 0.020),
        ("q6", 256, 0.0265),
        ("q8", 32, 0.0052),
        ("q8", 128, 0.0065),
    ],
)
def test_normally_distributed_weights_lose_what_the_docstrings_say(name, group, share):
    weights = gauss(256, 1024)
    found = FORMATS[name].unpack(*FORMATS[name].pack(weights, group, packer()), *weights.shape, group)
    assert np.linalg.norm(found - weights) / np.linalg.norm(weights) == pytest.approx(share, abs=5e-4)


def test_the_twin_of_the_product_is_close_to_the_product():
    weights, x = gauss(40, 320), gauss(1, 320, seed=1)[0]
    # Four standard deviations of what is lost: 7.3 %, 7.1 %, 2.2 % of weights; 0.65 % of weights and of activations.
    for name, group, share in (("q4", 32, 0.3), ("q4g", 32, 0.3), ("q6", 64, 0.1), ("q8", 128, 0.04)):
        packed = Weights.packed(weights, name, group, packer())
        matrix = packed.quantised
        assert np.array_equal(matrix.weights(), packed.layout.unpack(packed.buffer, packed.exponent))
        exact = naive.linear(matrix, x[None])[0]
        assert np.abs(exact - weights @ x).max() < share * np.linalg.norm(x)
        near = naive.canonical_quantised_matvec(matrix, x)
        bound = 1e-6 * (np.abs(matrix.weights()) @ np.abs(x))
        assert (np.abs(near - exact) <= bound).all()
    near = naive.canonical_float_matvec(weights, x)
    assert (np.abs(near - weights.astype(np.float64) @ x) <= 1e-5 * (np.abs(weights) @ np.abs(x))).all()


@pytest.mark.usefixtures("compiled_kernels")
def test_no_instruction_set_changes_a_byte():
    script = """
import hashlib
from tests.workbench import packer
from tests.test_quant import FORMATS, FORMAT_AND_GROUP, gauss
digest, kernels = hashlib.sha256(), packer()
for name, group in FORMAT_AND_GROUP:
    digest.update(FORMATS[name].pack(gauss(64, 520), group, kernels).buffer)
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
