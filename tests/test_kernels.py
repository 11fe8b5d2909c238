"""Every operation of the kernels, on every tier of this processor: to the bit what `naive.canonical_*` says, and
within a bound of float64 numbers what the formula says.

u is 2**-24, float32's unit of rounding. Outputs are NaN before, so an entry
that is not written shows; `workbench` sees what is written elsewhere.
"""

from __future__ import annotations

import ctypes
import math
import platform
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.core.build import TARGETS
from engine.core.memory import aligned
from engine.core.operations import (
    CHUNK_TOKENS,
    KV_F16,
    KV_F32,
    KV_INT8,
    PAGE_TOKENS,
    Activation,
    Norm,
    Opcode,
    Program,
    RowSet,
)
from engine.core.quant import FORMATS, Codes
from engine.models.decoder import kv_group, page_layout, scratch_bytes
from engine.models.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, RopeSpec
from tests import naive
from tests.workbench import Activations, Weights, Workbench, address, packer, product, same_bits

U = 2.0**-24
EVERY_FORMAT = [(name, group) for name, row in FORMATS.items() for group in row.groups]
QUANTISED = [(name, group) for name, group in EVERY_FORMAT if group]
few = settings(
    max_examples=12,
    deadline=None,  # other programs share the processor
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module", params=list(TARGETS))
def bench(request, kernels):
    bench = Workbench(kernels(request.param))
    yield bench
    bench.close()


@cache
def random(*shape, seed=0, scale=1.0):
    """Normal float32 numbers; the same for every tier, so that twins need computing once."""
    values = (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)
    values.setflags(write=False)
    return values


# ---------------------------------------------------------------- activations


def rows_for_quantising(width):
    """Rows that are hard to round: none, tiny, huge, ties, extremes at the ends of a group."""
    normal = random(8, width, seed=3)
    rows = [normal[0], normal[1] * np.float32(1e-20), normal[2] * np.float32(1e-38), normal[3] * np.float32(1e38)]
    rows.append(np.zeros(width, np.float32))
    rows.append(np.where(np.arange(width) < width // 2, np.float32(0), normal[4]))
    # 127 / 127 is 1, so these are halves: to even, both ways.
    ties = (np.arange(width) % 250 - 125 + np.float32(0.5)).astype(np.float32)
    ties[::16] = 127
    rows.append(ties)
    ends = normal[5].copy()
    ends[::32], ends[31::32] = 1e4, -1e4
    rows.append(ends)
    rows.append(np.full(width, -(2.0**-100), np.float32))  # the smallest that counts
    rows.append(np.full(width, np.nextafter(np.float32(2.0**-100), np.float32(0)), np.float32))
    return np.stack(rows)


@pytest.mark.parametrize(
    ("name", "group"), [("q4", 32), ("q4", 64), ("q4g", 32), ("q4g", 64), ("q8", 128), ("q8", 256)]
)
@pytest.mark.parametrize("width", [16, 48, 240, 256, 1024, 1040, 2320])
def test_activations_are_quantised_to_the_bit(bench, width, name, group):
    """Widths that end inside a group, and on both sides of the pieces of 1024 columns that threads share."""
    xs = rows_for_quantising(width)
    layout = FORMATS[name].layout(16, width, group)
    for members in (1, 3):
        x = Activations.room(bench, len(xs), layout)
        source = bench.copy(xs)
        program = Program()
        stride = source.strides[0]
        program.add(Opcode.QUANTISE, **x.fields(), rows=0, source=address(source), source_stride=stride, width=width)
        bench.run(program, len(xs), members=members)
        for row, values in enumerate(xs):
            check_quantised(x, row, values)
            assert not x.codes[row, width:].any(), "columns beyond the width must weigh nothing"


def check_quantised(x, row, values):
    """Codes, scales and sums of one row are those of the twin."""
    codes, scales = naive.quantise_activations(values, x.span)
    assert np.array_equal(x.codes[row, : values.size], codes), row
    assert same_bits(np.ascontiguousarray(x.scales[: scales.size, row]), scales), row
    assert not x.scales[scales.size :, row].any()
    sums = np.zeros(x.columns, np.int64)
    sums[: values.size] = codes
    assert np.array_equal(x.sums_of(row), -sums.reshape(-1, x.group).sum(axis=1)), row


def test_activations_lose_half_a_step_at_most():
    """|x - code * scale| <= scale * (1/2 + 128 u): half a step, and the roundings of factor, product and scale."""
    for x in rows_for_quantising(240)[[0, 1, 3, 5, 6, 7]]:
        left = naive.dequantised_activations(x, 32)
        _, scales = naive.quantise_activations(x, 32)
        step = np.repeat(scales.astype(np.float64), 32)[:240]
        assert (np.abs(x - left) <= step * (0.5 + 128 * U)).all()


def test_only_wanted_rows_are_taken(bench):
    xs = random(9, 64, seed=4)
    wanted = np.array([8, 2, 2, 5], np.int32)
    for opcode in (Opcode.QUANTISE, Opcode.NORM):
        x = Activations.room(bench, 4, FORMATS["f32"].layout(16, 64, 0))
        source, weight = bench.copy(xs), bench.copy(np.ones(64, np.float32))
        rest = (
            {"norm": int(Norm.RMS), "weight": address(weight), "bias": 0, "epsilon": 1e-6}
            if opcode is Opcode.NORM
            else {}
        )
        program = Program()
        program.add(
            opcode,
            **x.fields(),
            rows=int(RowSet.WANTED),
            source=address(source),
            source_stride=source.strides[0],
            width=64,
            **rest,
        )
        rows = bench.copy(wanted)
        bench.run(program, 9, members=2, scratch_bytes=4 * 64 + 64, wanted=4, wanted_rows=rows)
        want = xs[wanted]
        if opcode is Opcode.NORM:
            want = np.stack([naive.canonical_rms_norm(row, weight, 1e-6) for row in want])
        assert same_bits(x.tiles, want)


# ---------------------------------------------------------------- products


@cache
def matrix(name, group, rows, cols, seed=0):
    return Weights.packed(random(rows, cols, seed=seed, scale=0.05), name, group, packer())


@cache
def expected(name, group, rows, cols, tokens):
    return matrix(name, group, rows, cols).canonical(random(tokens, cols, seed=1))


@pytest.mark.parametrize(("name", "group"), EVERY_FORMAT)
@pytest.mark.parametrize(
    ("rows", "cols"),
    [
        (16, 256),
        (33, 272),  # rows end inside a block, columns inside a group
        (80, 512),  # five blocks for three threads
        (1, 16),
    ],
)
def test_products_equal_their_twin(bench, name, group, rows, cols):
    """Every combination of tiles (8 + 3, 6 + 2 + 1, 16 + 16 + 8 + 3, ...) gives the numbers of a token alone."""
    xs, want = random(43, cols, seed=1), expected(name, group, rows, cols, 43)
    for tokens in (*range(1, 12), 16, 17, 43):
        got = product(bench, matrix(name, group, rows, cols), xs[:tokens], members=(1, 3)[tokens % 2])
        assert same_bits(got, want[:tokens]), tokens


@pytest.mark.parametrize(("name", "group"), EVERY_FORMAT)
def test_products_mean_what_they_say(name, group):
    """|canonical - float64| <= (n + 2) u sum |terms|, for n roundings in the longest chain of sums.

    Quantised: a term is one group's dot * scale * scale; the dot is exact, the product of the scales rounds once,
    each group's fma once. Floats: cols / 4 roundings a chain, two more to join the four.
    """
    rows, cols = 33, 272
    weights, xs = matrix(name, group, rows, cols), random(43, cols, seed=1)
    want = expected(name, group, rows, cols, 43)
    if not group:
        exact = naive.linear(weights.dense, xs)
        size = np.abs(xs).astype(np.float64) @ np.abs(weights.dense).astype(np.float64).T
        chain = cols // 4
    else:
        exact = naive.linear(weights.quantised, xs)
        dense, size = weights.dense, np.zeros_like(exact)
        for token, x in enumerate(xs):
            left = naive.dequantised_activations(x, weights.layout.span)
            for start in range(0, cols, weights.layout.span):
                span = slice(start, start + weights.layout.span)
                size[token] += np.abs(dense[:, span] @ left[span])
        chain = -(-cols // weights.layout.span)
    assert (np.abs(want - exact) <= (chain + 2) * U * size).all()


@pytest.mark.parametrize(("name", "group"), QUANTISED)
def test_products_of_extreme_codes_are_exact(bench, name, group):
    """The largest dots there are, -128 * 127 and 127 * 127 in every column: no sum may saturate or wrap.

    Scales are float16's largest, its smallest subnormal, and negative ones.
    """
    rows, cols, rng = 48, 512, np.random.default_rng(2)
    groups, spans = (rows, cols // group), (rows, cols // FORMATS[name].span_for(group))
    scales = rng.choice([6e-8, 65504.0, -65504.0, -6e-8, 1.0], spans).astype(np.float16)
    if name == "q8":
        codes = Codes(np.repeat(rng.choice([-127, 127], groups), group, axis=1).astype(np.int8), scales)
        mixed = -codes.codes
    else:
        steps = 15 if name != "q6" else 63
        most = min(16, 255 // steps)
        kinds = np.array([(most, 128, 0), (most, steps * most - 127, steps), (1, 0, steps), (1, 128, 0)])
        kind = kinds[rng.integers(0, 4, groups)]
        multipliers, offsets = kind[..., 0].astype(np.uint8), kind[..., 1].astype(np.uint8)
        codes = Codes(np.repeat(kind[..., 2], group, axis=1).astype(np.uint8), scales, multipliers, offsets)
        mixed = np.uint8(steps) - codes.codes
    turned = rng.random(codes.codes.shape) < np.repeat(rng.choice([0, 0.5], groups), group, axis=1)
    codes.codes[turned] = mixed[turned]
    weights = Weights.of_codes(codes, name, group, exponent=-7)
    xs = np.full((17, cols), 3.0, np.float32)
    xs[1:] *= rng.choice([-1, 1], (16, cols)).astype(np.float32)
    xs[2] = -3.0
    want = weights.canonical(xs)
    assert np.isfinite(want).all()
    for tokens in (1, 3, 11, 17):
        assert same_bits(product(bench, weights, xs[:tokens]), want[:tokens])


@pytest.mark.parametrize(("name", "values"), [("f16", [6e-8, 65504.0, -6e-5]), ("bf16", [1e-40, 3e38, -1e-38])])
def test_products_of_extreme_floats_are_exact(bench, name, values):
    """Subnormal weights count, and so do subnormal results: nothing is flushed to zero."""
    rng = np.random.default_rng(5)
    w = rng.choice(np.array(values, np.float32), (16, 64))
    xs = random(3, 64, seed=6) * np.float32(1e-3)
    if name == "bf16":
        w[8:] = rng.choice(np.array([1e-40, -3e-39], np.float32), (8, 64))
    weights = Weights.packed(w, name, 0, packer())
    want = weights.canonical(xs)
    assert same_bits(product(bench, weights, xs), want)
    assert (np.abs(want[:, 8:]) > 0).all()


@pytest.mark.parametrize(("name", "group"), [("q4", 32), ("q6", 64), ("q8", 128), ("f16", 0), ("bf16", 0), ("f32", 0)])
def test_factor_bias_and_residual_are_applied_in_that_order(bench, name, group):
    """out + ((w x) * factor + bias), each rounded; columns of out beyond the padded rows are nobody's."""
    weights, xs = matrix(name, group, 33, 272), random(43, 272, seed=1)
    bias, before = random(48, seed=7), random(43, 48, seed=8)
    plain = expected(name, group, 33, 272, 43)
    # The kernel multiplies by one number, as float32: the power of two and the scale together.
    scaled = plain * np.float32(2.0**-weights.exponent) * np.float32(2.0**weights.exponent * 0.1)
    for members in (1, 2):
        out = bench.array((43, 80))[:, :48]
        out[:] = before
        held = bench.copy(bias)
        factor = 2.0**weights.exponent * 0.1
        got = product(bench, weights, xs, members=members, out=out, bias=address(held), add=1, factor=factor)
        assert same_bits(got, before[:, :33] + (scaled + bias[:33]))
        stored = bench.array((43, 48))
        got = product(bench, weights, xs, members=members, out=stored, bias=address(held))
        assert same_bits(got, plain + bias[:33])


@few
@given(
    which=st.sampled_from(EVERY_FORMAT),
    rows=st.integers(1, 70),
    blocks=st.integers(1, 30),
    tokens=st.integers(1, 50),
    members=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_of_product(bench, which, rows, blocks, tokens, members, seed):
    rng = np.random.default_rng(seed)
    name, group = which
    w = (rng.standard_normal((rows, 16 * blocks)) * 10.0 ** rng.integers(-3, 3)).astype(np.float32)
    xs = (rng.standard_normal((tokens, 16 * blocks)) * 10.0 ** rng.integers(-6, 6)).astype(np.float32)
    weights = Weights.packed(w, name, group, packer())
    assert same_bits(product(bench, weights, xs, members=members), weights.canonical(xs))


@pytest.fixture
def float_mode():
    """Gives a function that sets the float unit's control word of this thread, as careless libraries do."""
    if platform.machine().lower() not in {"x86_64", "amd64"}:
        pytest.skip("MXCSR is a register of x86-64")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly("""
        declare void @llvm.x86.sse.ldmxcsr(ptr)
        define void @set(ptr %word) {
            call void @llvm.x86.sse.ldmxcsr(ptr %word)
            ret void
        }""")
    engine = llvm.create_mcjit_compiler(module, llvm.Target.from_default_triple().create_target_machine())
    call = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_uint32))(engine.get_function_address("set"))

    def setter(word):
        call(ctypes.byref(ctypes.c_uint32(word)))

    yield setter
    setter(0x1F80)
    engine.close()


@pytest.mark.parametrize("tier", TARGETS)
def test_the_float_mode_of_the_process_changes_nothing(kernels, float_mode, tier):
    """Subnormals flushed, rounding towards zero, in the calling thread and the one that starts the workers."""
    w = np.full((48, 64), 1e-38, np.float32)
    weights, xs = Weights.packed(w, "f32", 0, packer()), random(5, 64, seed=6) * np.float32(1e-3)
    want = weights.canonical(xs)
    assert (np.abs(want) > 0).all()
    usable = kernels(tier)
    float_mode(0x1F80 | 0x8040 | 0x6000)
    bench = Workbench(usable)
    try:
        float_mode(0x1F80 | 0x8040 | 0x6000)
        got = product(bench, weights, xs, members=3)
    finally:
        float_mode(0x1F80)
        bench.close()
    assert same_bits(got, want)


@pytest.mark.parametrize("tier", TARGETS)
def test_reading_reads_everything(kernels, tier):
    """The entry point that measures bandwidth: every float counts in the maxima it leaves."""
    values = aligned(64 * 100, np.float32)
    values[:] = random(64 * 100, seed=22)
    out = np.full(16, np.nan, np.float32)
    kernels(tier).read(address(values), values.nbytes, address(out))
    # Its four vectors start at zero.
    assert same_bits(out, np.maximum(values.reshape(-1, 16).max(axis=0), np.float32(0)))


# ---------------------------------------------------------------- embedding, norm, activation, angles


@pytest.mark.parametrize(("name", "group"), EVERY_FORMAT)
def test_embedding_takes_rows(bench, name, group):
    """Exact but for one rounding, of the product with the scale: code and weight's scale have 16 bits together."""
    weights = matrix(name, group, 70, 272)
    ids = np.array([0, 69, 15, 16, 31, 69, 33], np.int32)
    scale = math.sqrt(640.0)
    factor = np.float32(2.0**weights.exponent) * np.float32(scale)
    dense = np.asarray(weights.dense, np.float64)[ids] * 2.0**-weights.exponent
    want = (dense * np.float64(factor)).astype(np.float32)
    for members in (1, 3):
        out = bench.array((7, 300))
        program = Program()
        program.add(
            Opcode.EMBED,
            **weights.fields(),
            out=address(out),
            out_stride=out.strides[0],
            width=272,
            scale=scale,
            by_position=0,
        )
        bench.run(program, 7, members=members, ids=bench.copy(ids))
        assert same_bits(out[:, :272], want)
        assert np.isnan(out[:, 272:]).all()


def test_embeddings_of_positions_are_added(bench):
    weights = matrix("f32", 0, 70, 272)
    positions = np.array([0, 1, 69, 3], np.int32)
    before = random(4, 300, seed=33)
    out = bench.copy(before)
    program = Program()
    place = {"out": address(out), "out_stride": out.strides[0]}
    program.add(Opcode.EMBED, **weights.fields(), **place, width=272, scale=1.0, by_position=1)
    bench.run(program, 4, members=2, ids=bench.copy(positions[::-1]), positions=bench.copy(positions))
    assert same_bits(out[:, :272], before[:, :272] + np.asarray(weights.dense, np.float32)[positions])
    assert same_bits(out[:, 272:], before[:, 272:])


@pytest.mark.parametrize("width", [16, 64, 576, 896, 4096])
@pytest.mark.parametrize("group", [0, 32, 256])
def test_norm_equals_its_twin(bench, width, group):
    xs = random(5, width, seed=9, scale=3.0).copy()
    xs[1] *= np.float32(1e-12)  # epsilon decides
    xs[2] = 0
    xs[3] *= np.float32(1e15)
    weight = random(width, seed=10)
    want = np.stack([naive.canonical_rms_norm(row, weight, 1e-6) for row in xs])
    layout = FORMATS["q4g" if group else "f32"].layout(16, width, group)
    for members in (1, 3):
        x = Activations.room(bench, 5, layout)
        source, held = bench.copy(xs), bench.copy(weight)
        program = Program()
        program.add(
            Opcode.NORM,
            **x.fields(),
            rows=0,
            source=address(source),
            source_stride=source.strides[0],
            width=width,
            norm=int(Norm.RMS),
            weight=address(held),
            bias=0,
            epsilon=1e-6,
        )
        bench.run(program, 5, members=members, scratch_bytes=4 * width)
        for row in range(5):
            if group:
                check_quantised(x, row, want[row])
            else:
                assert same_bits(x.tiles[row], want[row])


@pytest.mark.parametrize("width", [16, 100, 576, 4096])
def test_norm_means_what_it_says(width):
    """Relative error <= (n / 32 + 5) u, n the width.

    n / 16 roundings a lane and four to join them, all of positive numbers, are halved by the root; then mean,
    epsilon, root, reciprocal and two products, half of the first two.
    """
    xs, weight = random(4, width, seed=9, scale=3.0), random(width, seed=10)
    for row in xs:
        exact = naive.rms_norm(row[None], weight, 1e-6)[0]
        error = np.abs(naive.canonical_rms_norm(row, weight, 1e-6) - exact)
        assert (error <= (math.ceil(width / 16) / 2 + 2 + 5) * U * np.abs(exact)).all()


@pytest.mark.parametrize("width", [16, 64, 896])
@pytest.mark.parametrize("parts", ["", "weight", "weight bias"])
def test_layer_norm_equals_its_twin(bench, width, parts):
    xs = random(4, width, seed=9, scale=3.0).copy()
    xs[1] *= np.float32(1e-12)  # epsilon decides
    xs[2] = 7
    weight, bias = (
        random(width, seed=seed) if name in parts else None for seed, name in ((10, "weight"), (34, "bias"))
    )
    want = np.stack([naive.canonical_layer_norm(row, weight, bias, 1e-5) for row in xs])
    held = [None if values is None else bench.copy(values) for values in (weight, bias)]
    fields = {
        "norm": int(Norm.LAYER),
        "weight": 0 if weight is None else address(held[0]),
        "bias": 0 if bias is None else address(held[1]),
        "epsilon": 1e-5,
        "width": width,
    }
    for members in (1, 3):
        x = Activations.room(bench, 4, FORMATS["f32"].layout(16, width, 0))
        source, added = bench.copy(xs), bench.copy(xs)
        program = Program()
        place = {"source": address(source), "source_stride": source.strides[0]}
        program.add(Opcode.NORM, **x.fields(), rows=0, **place, **fields)
        program.add(Opcode.RESIDUAL, **place, **fields, out=address(added), out_stride=added.strides[0])
        bench.run(program, 4, members=members, scratch_bytes=4 * width)
        assert same_bits(x.tiles, want)
        assert same_bits(added, xs + want)


@pytest.mark.parametrize("width", [16, 576, 4096])
def test_layer_norm_means_what_it_says(width):
    """Within (n / 32 + 12) u of the largest result: as the other norm, and the mean, whose error is that of a sum."""
    xs, weight, bias = random(4, width, seed=9, scale=3.0), random(width, seed=10), random(width, seed=34)
    for row in xs:
        exact = naive.layer_norm(row[None], weight, bias, 1e-5)[0]
        error = np.abs(naive.canonical_layer_norm(row, weight, bias, 1e-5) - exact)
        assert error.max() <= (width / 32 + 12) * U * np.abs(exact).max()


def test_a_residual_is_added_as_it_is_or_normed(bench):
    xs, branch, weight = random(5, 96, seed=1), random(5, 96, seed=2), random(96, seed=3)
    normed = np.stack([naive.canonical_rms_norm(row, weight, 1e-6) for row in branch])
    held = bench.copy(weight)
    for kind, want in ((Norm.NONE, xs + branch), (Norm.RMS, xs + normed)):
        out, source = bench.copy(xs), bench.copy(branch)
        program = Program()
        program.add(
            Opcode.RESIDUAL,
            source=address(source),
            source_stride=source.strides[0],
            width=96,
            norm=int(kind),
            weight=address(held),
            bias=0,
            epsilon=1e-6,
            out=address(out),
            out_stride=out.strides[0],
        )
        bench.run(program, 5, members=2)
        assert same_bits(out, want)


@pytest.mark.parametrize("kind", ["clip", "width", "each", "growth"])
def test_preparation_equals_its_twin(bench, kind):
    heads, kv_heads, size, tokens = 4, 2, 32, 6
    q, kv = heads * size, kv_heads * size
    qkv = random(tokens, q + 2 * kv, seed=21, scale=2.0)
    weights, factors = random(q + kv, seed=22), random(4, seed=23)
    positions = np.array([0, 1, 63, 64, 130, 255], np.int32)
    want = qkv.copy()
    match kind:
        case "clip":
            want = np.clip(qkv, np.float32(-1.5), np.float32(1.5))
        case "growth":
            want[:, :q] *= factors[positions // 64][:, None]
        case _:
            run = size if kind == "each" else None
            for row in want:
                for first, end in ((0, q), (q, q + kv)):
                    for start in range(first, end, run or end - first):
                        part = slice(start, start + (run or end - first))
                        if kind == "each":
                            row[part] = naive.canonical_layer_norm(row[part], weights[part], None, 1e-5)
                        else:
                            row[part] = naive.canonical_rms_norm(row[part], weights[part], 1e-5)
    held, grown = bench.copy(weights), bench.copy(factors)
    for members in (1, 2):
        source = bench.copy(qkv)
        program = Program()
        program.add(
            Opcode.PREPARE,
            source=address(source),
            source_stride=source.strides[0],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=size,
            clip=1.5 if kind == "clip" else 0.0,
            norm=int({"width": Norm.RMS, "each": Norm.LAYER}.get(kind, Norm.NONE)),
            run=size if kind == "each" else 0,
            q_norm=address(held),
            k_norm=address(held) + 4 * q,
            epsilon=1e-5,
            growth=address(grown) if kind == "growth" else 0,
            growth_period=64,
        )
        bench.run(program, tokens, members=members, positions=bench.copy(positions))
        assert same_bits(source, want)


def test_soft_cap_equals_its_twin_and_means_what_it_says(bench):
    """|canonical - float64| <= 6 u times the cap: exp's error, and five roundings of numbers up to 1."""
    xs = np.stack([np.linspace(-400, 400, 2048), np.linspace(-3, 3, 2048)]).astype(np.float32)
    want = naive.canonical_softcap(xs, 30.0)
    assert np.abs(want - 30 * np.tanh(xs.astype(np.float64) / 30)).max() <= 6 * U * 30
    for members in (1, 3):
        logits = bench.copy(xs)
        program = Program()
        place = {"source": address(logits), "source_stride": logits.strides[0]}
        program.add(Opcode.SOFTCAP, **place, width=2048, size=30.0)
        bench.run(program, 5, members=members, wanted=2)
        assert same_bits(logits, want)


GATES = np.concatenate(
    [
        random(700, seed=11, scale=3.0),
        np.linspace(-100, 100, 700, dtype=np.float32),
        np.array([0.0, -0.0, 87.0, -87.0, 88.0, -88.0, 1e-30, -1e-30, 1e4, -1e4, 1e12, -1e12], np.float32),
        np.zeros(4, np.float32),
    ]
)  # (1416,): not a multiple of a piece, one more than 1024


@pytest.mark.parametrize("group", [0, 32, 256])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu", "relu2", "swiglu_clamped"])
def test_activation_equals_its_twin(bench, kind, gated, group):
    if kind == "swiglu_clamped" and not gated:
        return  # it has a gate in any case
    width = 1408
    gates = np.stack([GATES[:width], GATES[8:], -GATES[:width]])
    ups = random(3, width, seed=12)
    want = naive.canonical_activate(kind, gates, ups if gated else None)
    layout = FORMATS["q4g" if group else "f32"].layout(16, width, group)
    for members in (1, 2, 3):
        x = Activations.room(bench, 3, layout)
        source = bench.copy(np.concatenate([gates, ups], axis=1) if gated else gates)
        program = Program()
        program.add(
            Opcode.ACTIVATE,
            **x.fields(),
            rows=0,
            source=address(source),
            source_stride=source.strides[0],
            width=width,
            function=int(Activation[kind.upper()]),
            gated=int(gated),
            from_tiles=0,
        )
        bench.run(program, 3, members=members, scratch_bytes=4 * width)
        for row in range(3):
            if group:
                check_quantised(x, row, want[row])
            else:
                assert same_bits(x.tiles[row], want[row])


def test_exp_means_what_it_says():
    """Relative error <= 2e-7 within -87 .. 88 (a polynomial good to 1e-7, and its last two roundings)."""
    x = np.concatenate([np.linspace(-87, 88, 200_001, dtype=np.float32), random(1000, seed=13, scale=0.01)])
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(naive.canonical_exp(x) - exact) <= 2e-7 * exact).all()
    assert np.array_equal(naive.canonical_exp(np.array([-87.01, -1e30, -np.inf], np.float32)), np.zeros(3))
    assert naive.canonical_exp(np.array([0.0, -0.0], np.float32)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("kind", "relative"), [("silu", 4e-7), ("gelu_tanh", 2.2e-5)])
def test_activation_means_what_it_says(kind, relative):
    """|canonical - float64| <= relative * |exact| + |x| (e**-88 + 2**-52).

    silu: exp to 2e-7, and a sum, a quotient and a product, u each. gelu_tanh: roundings of its exponent, of up to
    4 u of at most 88, are relative errors of the exponential. Where the exponential would exceed e**88 it stays
    there, and the result, which should vanish, is |x| e**-88. 2**-52 is what 1 + tanh loses in float64.
    """
    x = GATES[np.abs(GATES) < 700]
    exact = naive.activate(kind, x)
    got = naive.canonical_activate(kind, x, np.ones_like(x))
    left_over = np.abs(x) * (np.exp(-88.0) + 2.0**-52)
    assert (np.abs(got - exact) <= relative * np.abs(exact) + 1.01 * left_over).all()


def test_gelu_means_what_it_says():
    """|canonical - float64| <= |x| 2e-7 + 1e-7: the formula's 1.5e-7 / 2, and roundings."""
    x = GATES[np.abs(GATES) < 700]
    error = np.abs(naive.canonical_activate("gelu", x) - naive.activate("gelu", x))
    assert (error <= 2e-7 * np.abs(x) + 1e-7).all()


POSITIONS = np.array([0, 1, 63, 64, 511, 4095, 32767, 131071, 999_999, 10_000_000], np.int32)
FREQUENCIES = (10000.0 ** (-np.arange(32) / 32)).astype(np.float32)


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_angles_equal_their_twin(bench, factor):
    want = naive.canonical_angles(POSITIONS, FREQUENCIES, factor)
    for members in (1, 3):
        out = bench.array(want.shape)
        frequencies, positions = bench.copy(FREQUENCIES), bench.copy(POSITIONS)
        program = Program()
        program.add(
            Opcode.ANGLES,
            frequencies=address(frequencies),
            count=32,
            out=address(out),
            attention_factor=factor,
        )
        bench.run(program, len(POSITIONS), members=members, positions=positions)
        assert same_bits(out, want)


def test_angles_mean_what_they_say():
    """|cos, sin - float64 of the float32 angle| <= u, and 1e-8 for angles whose multiple of pi / 2 is beyond 2**20."""
    angle = (POSITIONS.astype(np.float32)[:, None] * FREQUENCIES).astype(np.float64)
    exact = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    error = np.abs(naive.canonical_angles(POSITIONS, FREQUENCIES, 1.0) - exact)
    assert (error <= U + np.where(angle > 1e6, 1e-8, 0)[:, None]).all()


# ---------------------------------------------------------------- attention

KV_KINDS = {"int8": KV_INT8, "f16": KV_F16, "f32": KV_F32}
_STALE = {"int8": b"\xff\x7b", "f16": b"\xff\x7b", "f32": np.float32(3e38).tobytes()}
"""What lies in pages before: the largest finite numbers. Reused pages hold what others left there."""


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    rotary_dim: int | None = None
    interleaved: bool = False
    qk_norm: bool = False
    norm_last: bool = False
    balanced: bool = False
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False

    @property
    def width(self):
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def scale(self):
        return self.head_dim**-0.5

    def spec(self, context=2048):
        rope = None if self.rotary_dim is None else RopeSpec(1e4, self.rotary_dim, self.interleaved)
        attention = AttentionSpec(self.heads, self.kv_heads, self.head_dim, self.scale, rope, self.window)
        return ModelSpec("test", 16, 16, context, 1e-6, (LayerSpec(attention, FeedForwardSpec(16)),), tied_head=True)


class Layer:
    """Rotation, cache and attention of one layer, over pages in an order of their own for every sequence."""

    def __init__(self, bench, shape, kv, sequences=1, context=1088, seed=0):
        self.bench, self.shape, self.kv = bench, shape, kv
        self.spec = shape.spec()
        self.page_bytes = page_layout(self.spec, kv).page_bytes
        pages = -(-context // PAGE_TOKENS)
        order = np.random.default_rng(seed).permutation(sequences * pages).astype(np.int32)
        self.tables = order.reshape(sequences, pages)
        self.pool = np.frombuffer(_STALE[kv] * (sequences * pages * self.page_bytes // len(_STALE[kv])), np.uint8)
        self.pool = np.ascontiguousarray(self.pool.reshape(sequences * pages, self.page_bytes)).copy()
        self.chunks = -(-context // CHUNK_TOKENS)

    def step(self, parts, members=1):
        """Attention outputs (tokens, heads, head_dim) of [(sequence, first position, qkv (n, width))]."""
        bench, shape = self.bench, self.shape
        tokens = sum(len(qkv) for _, _, qkv in parts)
        source = bench.copy(np.concatenate([qkv for _, _, qkv in parts]))
        positions = np.concatenate([np.arange(first, first + len(qkv)) for _, first, qkv in parts]).astype(np.int32)
        tables = bench.copy(self.tables)
        places = address(tables) + np.array([number for number, _, qkv in parts for _ in qkv]) * tables.strides[0]
        segments = bench.array((len(parts), 4), np.int64)
        row = 0
        for index, (number, first, qkv) in enumerate(parts):
            segments[index] = row, len(qkv), first, address(tables) + number * tables.strides[0]
            row += len(qkv)
        pool = bench.copy(self.pool)
        group = kv_group(shape.head_dim)
        heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
        self.queries = bench.array((tokens, shape.heads, shape.head_dim), np.int16 if self.kv == "int8" else np.float32)
        self.query_scales = bench.array((tokens, shape.heads, shape.head_dim // group))
        pages = {
            "kv_kind": KV_KINDS[self.kv],
            "kv_group": group,
            "pool": address(pool),
            "page_bytes": self.page_bytes,
            "head_bytes": self.page_bytes // shape.kv_heads if shape.kv_heads > 1 else self.page_bytes,
            "queries": address(self.queries),
            "query_scales": address(self.query_scales),
        }
        angles = norms = balance = None
        if shape.rotary_dim is not None:
            angles = bench.copy(turns(shape, positions))
        if shape.qk_norm:
            norms = bench.copy(norm_weights(shape))
        if shape.balanced:
            balance = bench.copy(balance_factors(shape))
        out = bench.array((tokens, shape.heads * shape.head_dim + 16))
        partials = bench.array((len(parts), shape.heads, self.chunks, 16 + shape.head_dim))
        program = Program()
        program.add(
            Opcode.ROTATE,
            source=address(source),
            source_stride=source.strides[0],
            **heads,
            rotary_dim=shape.rotary_dim or 0,
            interleaved=int(shape.interleaved),
            angles=0 if angles is None else address(angles),
            q_norm=0 if norms is None else address(norms),
            k_norm=0 if norms is None else address(norms) + norms.strides[0],
            norm_last=int(shape.norm_last),
            epsilon=1e-6,
            balance=0 if balance is None else address(balance),
            scale=shape.scale,
            **pages,
        )
        place = {"out": address(out), "out_stride": out.strides[0]}
        sinks, slopes = bench.copy(sink_scores(shape)), bench.copy(alibi_slopes(shape))
        folding = {
            "window": shape.window or 0,
            "partials": address(partials),
            "partial_chunks": self.chunks,
            "sinks": address(sinks) if shape.sinks else 0,
        }
        bends = {"softcap": shape.softcap, "slopes": address(slopes) if shape.alibi else 0}
        program.add(Opcode.ATTEND, **heads, **pages, **place, **folding, **bends)
        program.add(Opcode.MERGE, heads=shape.heads, head_dim=shape.head_dim, **place, **folding)
        bench.run(
            program,
            tokens,
            members=members,
            scratch_bytes=scratch_bytes(self.spec, 64),
            positions=bench.copy(positions),
            segments=len(parts),
            segment_table=segments,
            token_tables=bench.copy(places),
        )
        self.pool = pool
        assert np.isnan(out[:, shape.heads * shape.head_dim :]).all()
        return out[:, : shape.heads * shape.head_dim].reshape(tokens, shape.heads, shape.head_dim)

    def pages_of(self, sequence):
        """uint8 (pages, kv_heads, bytes of a head), in order of position."""
        used = self.shape.kv_heads * (self.page_bytes // self.shape.kv_heads)
        return self.pool[self.tables[sequence], :used].reshape(self.tables.shape[1], self.shape.kv_heads, -1)


def turns(shape, positions):
    frequencies = (10000.0 ** (-2 * np.arange(shape.rotary_dim // 2) / shape.rotary_dim)).astype(np.float32)
    return naive.canonical_angles(positions, frequencies, 1.0)


def norm_weights(shape):
    """Of queries, of keys."""
    return random(2, shape.head_dim, seed=14) * np.float32(0.2) + np.float32(1)


def sink_scores(shape):
    return random(shape.heads, seed=16, scale=3.0)


def alibi_slopes(shape):
    return naive.alibi_slopes(shape.heads).astype(np.float32)


def balance_factors(shape):
    """float32 (2, kv_heads, head_dim): powers of two for keys, their inverses for queries."""
    exponents = np.random.default_rng(15).integers(-8, 9, (shape.kv_heads, shape.head_dim))
    return np.stack([np.ldexp(np.float32(1), -exponents), np.ldexp(np.float32(1), exponents)])


@dataclass
class Twin:
    """The same sequence by the twins: q float32 (tokens, heads, head_dim); keys and values as cached, and plain."""

    shape: Shape
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    keys: naive.Cached
    values: naive.Cached

    def output(self, position):
        """float32 (heads, head_dim) of the query at a position."""
        seen = [
            naive.Cached(c.numbers[: position + 1], None if c.scales is None else c.scales[: position + 1])
            for c in (self.keys, self.values)
        ]
        return naive.canonical_attention(
            self.q[position],
            *seen,
            self.shape.scale,
            self.shape.window,
            softcap=self.shape.softcap,
            slopes=alibi_slopes(self.shape) if self.shape.alibi else None,
            sinks=sink_scores(self.shape) if self.shape.sinks else None,
        )


def normed_heads(shape, q, k):
    of_queries, of_keys = norm_weights(shape)
    q = np.stack([[naive.canonical_rms_norm(head, of_queries, 1e-6) for head in token] for token in q])
    k = np.stack([[naive.canonical_rms_norm(head, of_keys, 1e-6) for head in token] for token in k])
    return q, k


def twin(shape, kv, qkv):
    q, k, v = np.split(qkv.reshape(len(qkv), -1, shape.head_dim), [shape.heads, shape.heads + shape.kv_heads], axis=1)
    if shape.qk_norm and not shape.norm_last:
        q, k = normed_heads(shape, q, k)
    if shape.rotary_dim is not None:
        angles = turns(shape, np.arange(len(qkv), dtype=np.int32))
        q = naive.canonical_rotate(q, angles, interleaved=shape.interleaved)
        k = naive.canonical_rotate(k, angles, interleaved=shape.interleaved)
    if shape.qk_norm and shape.norm_last:
        q, k = normed_heads(shape, q, k)
    if shape.balanced:
        of_keys, of_queries = balance_factors(shape)
        q, k = q * np.repeat(of_queries, shape.heads // shape.kv_heads, axis=0), k * of_keys
    return Twin(shape, q, k, v, naive.canonical_cached(k, kv), naive.canonical_cached(v, kv))


@cache
def sequence(shape, tokens, seed=0):
    """qkv (tokens, width); a few heads and positions stand out, so that softmax is not flat."""
    qkv = random(tokens, shape.width, seed=seed).copy()
    qkv[::7] *= np.float32(3)
    qkv[5 % tokens] *= np.float32(1e-3)
    return qkv


@cache
def twin_of(shape, kv, tokens, seed=0):
    return twin(shape, kv, sequence(shape, tokens, seed))


@cache
def wanted_output(shape, kv, tokens, position, seed=0):
    return twin_of(shape, kv, tokens, seed).output(position)


def check(shape, kv, tokens, got, positions, seed=0):
    """`got` holds the outputs of the last len(got) of `tokens` positions."""
    for position in positions:
        row = position - (tokens - len(got))
        assert same_bits(got[row], wanted_output(shape, kv, tokens, position, seed)), position


ROTATIONS = [
    Shape(4, 2, 16),
    Shape(4, 2, 32, rotary_dim=32),
    Shape(3, 1, 48, rotary_dim=32),
    Shape(2, 2, 64, rotary_dim=48, interleaved=True, qk_norm=True),
    Shape(8, 1, 80, rotary_dim=80, qk_norm=True),
    Shape(6, 2, 96, rotary_dim=96, qk_norm=True, balanced=True),
    Shape(4, 2, 32, rotary_dim=16, qk_norm=True, norm_last=True),
    Shape(2, 1, 256, rotary_dim=64),
]


@pytest.mark.parametrize("kv", KV_KINDS)
@pytest.mark.parametrize("shape", ROTATIONS, ids=str)
def test_keys_values_and_queries_lie_where_the_layout_says(bench, shape, kv):
    """Norm, rotation and rounding of every number, in its place of its page; other places keep what was there."""
    tokens = 130
    want = twin_of(shape, kv, tokens)
    layer = Layer(bench, shape, kv, context=192)
    layer.step([(0, 0, sequence(shape, tokens))], members=2)
    dim, pages = shape.head_dim, layer.pages_of(0)
    for kv_head in range(shape.kv_heads):
        head = np.ascontiguousarray(pages[:, kv_head])
        if kv == "int8":
            groups = want.keys.scales.shape[2]
            sizes = np.cumsum([dim * 64, groups * 128, dim * 64])
            k, ks, v, vs = np.split(head, sizes, axis=1)
            k = k.view(np.int8).reshape(-1, dim // 2, 64, 2).transpose(0, 2, 1, 3).reshape(-1, dim)
            v = v.view(np.int8).reshape(-1, 32, dim, 2).transpose(0, 1, 3, 2).reshape(-1, dim)
            for codes, scales, cached in ((k, ks, want.keys), (v, vs, want.values)):
                halves = np.ascontiguousarray(scales).view(np.float16).reshape(-1, groups, 64).transpose(0, 2, 1)
                assert np.array_equal(codes[:tokens], cached.numbers[:, kv_head])
                got = halves.reshape(-1, groups)[:tokens].astype(np.float32)
                assert same_bits(got, np.ascontiguousarray(cached.scales[:, kv_head]))
        else:
            kind = np.float16 if kv == "f16" else np.float32
            halves = head.view(kind).astype(np.float32).reshape(len(head), 2, -1)
            k = halves[:, 0].reshape(-1, dim, 64).transpose(0, 2, 1).reshape(-1, dim)
            v = halves[:, 1].reshape(-1, dim)
            assert np.array_equal(k[:tokens], want.keys.numbers[:, kv_head])
            assert np.array_equal(v[:tokens], want.values.numbers[:, kv_head])
            stale = np.frombuffer(_STALE[kv], kind)[0].astype(np.float32)
            assert (k[tokens:] == stale).all()
            assert (v[tokens:] == stale).all()
    if kv == "int8":
        codes, sizes = naive.canonical_int16(want.q.reshape(tokens, shape.heads, -1, want.keys.group))
        assert np.array_equal(layer.queries, codes.reshape(layer.queries.shape))
        assert same_bits(layer.query_scales, sizes * np.float32(shape.scale))
    else:
        assert same_bits(layer.queries, want.q * np.float32(shape.scale))


HEAD_SHAPES = [
    Shape(1, 1, 16),
    Shape(4, 2, 32),
    Shape(3, 1, 64),
    Shape(8, 2, 80),
    Shape(5, 1, 96),
    Shape(12, 2, 64),
    Shape(7, 1, 128),
    Shape(8, 1, 256),
    Shape(4, 1, 496),
    Shape(2, 1, 512),
    Shape(4, 2, 32, softcap=2.0, window=100),
    Shape(6, 3, 32, alibi=True),
    Shape(4, 4, 48, sinks=True, window=90),
]
"""1 to 8 query heads share a key head; head sizes with groups of 16 and of 32, up to the largest with each."""


@pytest.mark.parametrize("kv", KV_KINDS)
@pytest.mark.parametrize("shape", HEAD_SHAPES, ids=str)
def test_attention_equals_its_twin(bench, shape, kv):
    """A prompt of 131 tokens at once and by tokens, every position of it on the way through tiles and pages."""
    tokens = 131
    qkv = sequence(shape, tokens)
    got = Layer(bench, shape, kv, context=192).step([(0, 0, qkv)], members=3)
    check(shape, kv, tokens, got, [0, 1, 15, 31, 32, 63, 64, 65, 127, 128, 130])
    layer = Layer(bench, shape, kv, context=192, seed=1)
    layer.step([(0, 0, qkv[:129])])
    for position in (129, 130):
        assert same_bits(layer.step([(0, position, qkv[position : position + 1])], members=2)[0], got[position])


@pytest.mark.parametrize("kv", KV_KINDS)
@pytest.mark.parametrize("shape", [Shape(4, 2, 32), Shape(2, 1, 80, window=600)], ids=str)
def test_attention_at_the_borders_of_chunks(bench, shape, kv):
    """511, 512, 513 and 1025 positions, in one piece, in pieces that end anywhere, and token by token at the ends."""
    tokens = 1025
    qkv = sequence(shape, tokens)
    got = Layer(bench, shape, kv).step([(0, 0, qkv)], members=2)
    check(shape, kv, tokens, got, [510, 511, 512, 513, 1023, 1024])
    layer, start, pieces = Layer(bench, shape, kv, seed=2), 0, []
    for size in (500, 11, 1, 1, 1, 130, 300, 79, 1, 1):
        pieces.append(layer.step([(0, start, qkv[start : start + size])], members=1 + start % 3))
        start += size
    assert start == tokens
    assert same_bits(np.concatenate(pieces), got)


@pytest.mark.parametrize("kv", KV_KINDS)
@pytest.mark.parametrize("window", [1, 15, 16, 63, 64, 65, 100, 512, 513])
def test_window_edges(bench, window, kv):
    """The first key that is seen, and the first that is not; pages before the window may belong to others by now."""
    shape = Shape(2, 1, 32, window=window)
    tokens = 600
    qkv = sequence(shape, tokens)
    layer = Layer(bench, shape, kv, context=640)
    got = layer.step([(0, 0, qkv)], members=2)
    check(shape, kv, tokens, got, [0, window - 1, min(window, 599), min(window + 63, 599), 511, 512, 575, 599])
    # The last token again, with every page that it does not see given away.
    dead = max(0, tokens - window) // PAGE_TOKENS
    layer.tables = layer.tables.copy()
    layer.tables[0, :dead] = 0x7FFFFFFF
    assert same_bits(layer.step([(0, tokens - 1, qkv[-1:])], members=2)[0], got[-1])
    layer.tables[0, : max(0, tokens - 20 - window) // PAGE_TOKENS] = 0x7FFFFFFF
    if dead == max(0, tokens - 20 - window + 1) // PAGE_TOKENS:
        assert same_bits(layer.step([(0, tokens - 20, qkv[-20:])], members=3), got[-20:])


@pytest.mark.parametrize("kv", KV_KINDS)
def test_company_changes_nothing(bench, kv):
    """Sequences of other lengths in the same step, before and after, prompts and single tokens mixed."""
    shape = Shape(6, 2, 64, rotary_dim=64)
    mine, others = sequence(shape, 140), [sequence(shape, 90, seed) for seed in (1, 2, 3)]
    layer = Layer(bench, shape, kv, sequences=4, context=192)
    alone = Layer(bench, shape, kv, context=192, seed=5).step([(0, 0, mine)])
    got = [layer.step([(1, 0, others[0][:40]), (0, 0, mine[:70]), (2, 0, others[1][:1])], members=3)[40:110]]
    got.append(layer.step([(0, 70, mine[70:71]), (3, 0, others[2][:33]), (1, 40, others[0][40:41])], members=2)[:1])
    got.append(layer.step([(2, 1, others[1][1:2]), (3, 33, others[2][33:34]), (0, 71, mine[71:139])], members=1)[2:])
    got.append(layer.step([(1, 41, others[0][41:90]), (0, 139, mine[139:])], members=3)[49:])
    assert same_bits(np.concatenate(got), alone)
    check(shape, kv, 140, alone, [0, 69, 70, 71, 139])


@few
@given(
    repeats=st.integers(1, 8),
    kv_heads=st.integers(1, 2),
    sixteens=st.integers(1, 32),
    window=st.none() | st.integers(1, 90),
    tokens=st.integers(1, 150),
    cut=st.integers(0, 150),
    kv=st.sampled_from(list(KV_KINDS)),
    members=st.integers(1, 3),
    data=st.data(),
)
def test_any_shape_of_attention(bench, repeats, kv_heads, sixteens, window, tokens, cut, kv, members, data):
    shape = Shape(repeats * kv_heads, kv_heads, 16 * sixteens, window)
    qkv = random(tokens, shape.width, seed=data.draw(st.integers(0, 99)))
    layer, cut = Layer(bench, shape, kv, context=192), min(cut, tokens - 1)
    if cut:
        layer.step([(0, 0, qkv[:cut])], members=members)
    got = layer.step([(0, cut, qkv[cut:])], members=members)
    want = twin(shape, kv, qkv)
    for position in {cut, tokens - 1, data.draw(st.integers(cut, tokens - 1))}:
        assert same_bits(got[position - cut], want.output(position))


@pytest.mark.parametrize("kv", KV_KINDS)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
def test_extreme_keys_and_values(bench, size, kv):
    """Zeros, numbers that vanish and numbers beyond float16's range give the twin's finite numbers."""
    shape = Shape(2, 1, 32)
    qkv = random(70, shape.width, seed=20) * np.float32(size)
    if kv != "int8" and size > 1:
        qkv[:, : 3 * 32] *= np.float32(1e-30)  # scores of float pages must stay within float32
        qkv[:, 3 * 32 :] = np.clip(qkv[:, 3 * 32 :], -1e30, 1e30)
    if kv == "int8" and size > 1:
        qkv[:, : 2 * 32] *= np.float32(1e-30)
    got = Layer(bench, shape, kv, context=128).step([(0, 0, qkv)], members=2)
    want = twin(shape, kv, qkv)
    assert np.isfinite(got).all()
    for position in (0, 1, 63, 69):
        assert same_bits(got[position], want.output(position))


def attention_bound(made, position, kv):
    """How far the canonical output of a position may be from float64 of the plain q, k and v: (heads, head_dim).

    Score i is off by at most e_i: half a step of the keys (int8; half a unit of float16) and half a step of the
    int16 query, times what they meet; one rounding a term; the polynomial of exp. With every weight p_i off by a
    factor within exp(+-e_i), the output moves by at most exp(max e) sum p_i (exp(e_i) - 1) |v_i - output|. On top:
    p_i times half a step of the values; half a step of int16 of the largest p_i * scale, times the code it
    meets; one rounding a term of the sum of values.
    """
    shape, dim = made.shape, made.shape.head_dim
    repeats = shape.heads // shape.kv_heads
    first = 0 if shape.window is None else max(0, position - shape.window + 1)
    seen = slice(first, position + 1)

    def spread(per_kv_head):
        return np.repeat(per_kv_head[seen].astype(np.float64), repeats, axis=1)

    q, k, v = made.q[position].astype(np.float64) * shape.scale, spread(made.k), spread(made.v)
    scores = np.einsum("hd,phd->ph", q, k)
    weights = np.exp(scores - scores.max(axis=0))
    weights /= weights.sum(axis=0)
    output = np.einsum("ph,phd->hd", weights, v)
    off_by = np.einsum("hd,phd->ph", np.abs(q), np.abs(k)) * (dim + 4) * U + 2e-7
    value_error, sum_error = np.zeros_like(v), np.zeros_like(output)
    if kv == "f16":
        off_by += np.einsum("hd,phd->ph", np.abs(q), np.abs(k) * 2.0**-11 + 2.0**-25)
        value_error = np.abs(v) * 2.0**-11 + 2.0**-25
    elif kv == "int8":
        group = made.keys.group
        key_step, value_step = (np.repeat(spread(c.scales), group, axis=2) for c in (made.keys, made.values))
        # A scale is rounded to 11 bits, so the largest number of a group may end 127 * 2**-11 steps too low.
        half = 0.5 + 127 * 2.0**-11
        largest = np.abs(q).reshape(shape.heads, -1, group).max(axis=2)
        query_step = np.repeat(largest, group, axis=1) / 32767
        off_by += half * np.einsum("hd,phd->ph", np.abs(q), key_step)
        off_by += 0.5 * np.einsum("hd,phd->ph", query_step, np.abs(k) + key_step)
        value_error = half * value_step
        codes = np.abs(spread(made.values.numbers)).sum(axis=0)
        sum_error = 0.5 * (weights[:, :, None] * value_step).max(axis=0) / 32767 * codes
    grow = np.exp(off_by.max(axis=0))[:, None]
    moved = np.einsum("ph,phd->hd", weights * np.expm1(off_by), np.abs(v - output))
    of_values = np.einsum("ph,phd->hd", weights, value_error)
    roundings = (len(v) + 8) * U * np.einsum("ph,phd->hd", weights, np.abs(v))
    return grow**2 * (moved + of_values + sum_error + roundings)


@pytest.mark.parametrize("kv", KV_KINDS)
@pytest.mark.parametrize("shape", [Shape(4, 2, 32), Shape(5, 1, 96), Shape(8, 2, 80, window=70)], ids=str)
def test_attention_means_what_it_says(shape, kv):
    """Within `attention_bound` at every head and entry."""
    made = twin_of(shape, kv, 131)
    for position in (0, 1, 64, 130):
        seen = slice(position + 1)
        exact = naive.attention(made.q[position : position + 1], made.k[seen], made.v[seen], shape.scale, shape.window)
        error = np.abs(wanted_output(shape, kv, 131, position) - exact[0])
        assert (error <= attention_bound(made, position, kv)).all()


def test_rotation_means_what_it_says():
    """|canonical - float64| <= (u + 2 u) (|x| + |y|): the angle's rounding, two products and a sum."""
    for shape in ROTATIONS[1:4]:
        x = random(50, 2, shape.head_dim, seed=21)
        positions = np.arange(50)
        angles = turns(shape, positions.astype(np.int32))
        got = naive.canonical_rotate(x, angles, interleaved=shape.interleaved)
        rope = RopeSpec(1e4, shape.rotary_dim, shape.interleaved)
        exact = naive.rotate(x, positions, rope)
        # The float32 frequency and angle are part of the model as it was trained: off by 2 u of the angle.
        slack = 2 * U * positions[:, None, None] * np.abs(x).max() * 2
        assert (np.abs(got - exact) <= 6 * U * np.abs(x).max() * 2 + slack).all()
