"""Kernels of recurrent layers, and what goes with them, equal their twins on every tier."""

from __future__ import annotations

import numpy as np
import pytest

from engine.core.build import TARGETS
from engine.core.operations import Opcode, Program
from tests import naive
from tests.workbench import Workbench, address, same_bits

U = 2.0**-24  # half a unit in the last place


@pytest.fixture(scope="module", params=list(TARGETS))
def bench(request, kernels):
    bench = Workbench(kernels(request.param))
    yield bench
    bench.close()


def random(*shape, seed=0, scale=1.0):
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def segments_of(bench, sizes, places):
    """Words of the state for consecutive segments; places: (memory before or None, memory after) of each."""
    table, memories = bench.array((len(sizes), 4), np.int64), bench.array((len(sizes), 2), np.int64)
    starts = np.cumsum([0, *sizes[:-1]])
    table[:, 0], table[:, 1] = starts, sizes
    memories[:] = [(0 if before is None else address(before), address(after)) for before, after in places]
    return {"segments": len(sizes), "segment_table": table, "memories": memories}


def test_runs_are_moved(bench):
    source = bench.copy(random(3, 200))
    for members in (1, 2):
        out = bench.array((3, 400))
        program = Program()
        program.add(
            Opcode.MOVE,
            source=address(source) + 64,
            source_stride=source.strides[0],
            source_step=160,
            out=address(out),
            out_stride=out.strides[0],
            out_step=320,
            count=4,
            width=32,
            scale=0.5,
        )
        program.add(
            Opcode.MOVE,
            source=address(source),
            source_stride=source.strides[0],
            source_step=0,
            out=address(out) + 128,
            out_stride=out.strides[0],
            out_step=320,
            count=5,
            width=48,
            scale=1.0,
        )
        bench.run(program, 3, members=members)
        for run in range(5):
            if run < 4:
                first = 16 + 40 * run
                assert same_bits(out[:, 80 * run : 80 * run + 32], source[:, first : first + 32] * np.float32(0.5))
            assert same_bits(out[:, 80 * run + 32 : 80 * run + 80], source[:, :48])


@pytest.mark.parametrize("normed", [True, False])
def test_gates_equal_their_twin(bench, normed):
    heads, size, tokens = 3, 32, 5
    given, gates, weight = (
        random(tokens, heads * size),
        random(tokens, heads * size, seed=1, scale=4.0),
        random(size, seed=2),
    )
    want = given.copy()
    if normed:
        for row in want.reshape(-1, size):
            row[:] = naive.canonical_rms_norm(row, weight, 1e-5)
        want *= naive.canonical_activate("silu", gates)
    else:
        want *= naive.canonical_sigmoid(gates)
    held, beside = bench.copy(weight), bench.copy(gates)
    for members in (1, 3):
        source = bench.copy(given)
        program = Program()
        program.add(
            Opcode.GATE,
            source=address(source),
            source_stride=source.strides[0],
            heads=heads,
            head_dim=size,
            weight=address(held) if normed else 0,
            epsilon=1e-5,
            gates=address(beside),
            gates_stride=beside.strides[0],
            silu=int(normed),
        )
        bench.run(program, tokens, members=members)
        assert same_bits(source, want)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("width", "taps", "biased"), [(16, 3, False), (272, 4, True), (128, 2, False)])
def test_convolutions_equal_their_twin(bench, gated, width, taps, biased):
    """Sequences that begin, go on, or are shorter than the kernel; what is left of them is what the next step needs."""
    sizes = [7, 1, 2]
    wide = (3 if gated else 1) * width
    rows, weights, bias = random(sum(sizes), wide), random(taps, width, seed=1), random(width, seed=2)
    before = [None, random(taps - 1, width, seed=3), random(taps - 1, width, seed=4)]
    want, left = [], []
    for part, memory in zip(np.split(rows, np.cumsum(sizes)[:-1]), before, strict=True):
        b, c, x = np.split(part, 3, axis=1) if gated else (None, None, part)
        given = x if b is None else b * x
        past = np.zeros((taps - 1, width), np.float32) if memory is None else memory
        made = naive.canonical_convolution(given, weights, past, bias if biased else None)
        plain = naive.convolution(given, weights, past, bias if biased else 0.0)
        size = naive.convolution(np.abs(given), np.abs(weights), np.abs(past), np.abs(bias) if biased else 0.0)
        assert (np.abs(made - plain) <= (taps + 1) * U * size).all()
        want.append(naive.canonical_activate("silu", made) if c is None else made * c)
        left.append(np.concatenate([past, given])[-(taps - 1) :])
    source, held, added = bench.copy(rows), bench.copy(weights), bench.copy(bias)
    places = [(None if memory is None else bench.copy(np.pad(memory, ((1, 0), (0, 0))))) for memory in before]
    for members in (1, 3):
        out = bench.array((sum(sizes), width))
        after = [bench.array((taps, width)) for _ in sizes]
        program = Program()
        program.add(
            Opcode.CONVOLVE,
            source=address(source),
            source_stride=source.strides[0],
            width=width,
            taps=taps,
            weights=address(held),
            bias=address(added) if biased else 0,
            gated=int(gated),
            out=address(out),
            out_stride=out.strides[0],
            place=4 * width,
        )
        state = segments_of(bench, sizes, list(zip(places, after, strict=True)))
        bench.run(program, sum(sizes), members=members, **state)
        assert same_bits(out, np.concatenate(want))
        for memory, expected in zip(after, left, strict=True):
            assert same_bits(memory[1:], expected)


@pytest.mark.parametrize("heads", [1, 12, 16, 40])
def test_decay_equals_its_twin(bench, heads):
    padded, tokens = -(-heads // 16) * 16, 9
    source = bench.array((tokens, 2 * padded))
    source[:] = random(tokens, 2 * padded, scale=8.0)
    source[0, heads] = 100.0
    source[1, heads] = -100.0
    rates, bias = bench.array(padded), bench.array(padded)
    rates[:], bias[:] = np.exp(random(padded, seed=1)), random(padded, seed=2)
    b, a = source[:, :heads], source[:, heads : 2 * heads]
    want_kept = naive.canonical_exp(np.float32(0) - rates[:heads] * naive.canonical_softplus(a + bias[:heads]))
    for members in (1, 2):
        out = bench.array((tokens, 2 * padded))
        program = Program()
        program.add(
            Opcode.DECAY,
            source=address(source),
            source_stride=source.strides[0],
            heads=heads,
            rates=address(rates),
            bias=address(bias),
            out=address(out),
            out_stride=out.strides[0],
            out_step=4 * padded,
        )
        bench.run(program, tokens, members=members)
        assert same_bits(np.ascontiguousarray(out[:, :heads]), naive.canonical_sigmoid(b))
        assert same_bits(np.ascontiguousarray(out[:, padded : padded + heads]), want_kept)


def test_softplus_means_what_it_says():
    """Relative error <= 8 u: exp's, a quotient's, the series' last term and its roundings."""
    xs = np.concatenate([np.linspace(-80, 80, 20001), np.linspace(-1, 1, 20001)]).astype(np.float32)
    exact = np.logaddexp(0.0, xs.astype(np.float64))
    assert (np.abs(naive.canonical_softplus(xs) - exact) <= 8 * U * exact).all()


@pytest.mark.parametrize(
    ("key_heads", "heads", "key_dim", "value_dim"), [(2, 4, 16, 32), (1, 1, 128, 16), (3, 3, 32, 48)]
)
def test_the_delta_rule_equals_its_twin(bench, key_heads, heads, key_dim, value_dim):
    """In pieces as at once, from nothing and from what was before; the twin means what the formula says."""
    tokens = 11
    q, k = (random(tokens, key_heads, key_dim, seed=seed) for seed in (0, 1))
    q, k = (part / np.linalg.norm(part, axis=2, keepdims=True).astype(np.float32) for part in (q, k))
    v, gates = random(tokens, heads, value_dim, seed=2), np.random.default_rng(3).uniform(0, 1, (2, tokens, heads))
    beta, decay = gates.astype(np.float32)
    state = random(heads, key_dim, value_dim, seed=4)
    each = [np.repeat(part, heads // key_heads, axis=1) for part in (q, k)]
    padded = -(-heads // 16) * 16
    rows = bench.copy(np.concatenate([part.reshape(tokens, -1) for part in (q, k, v)], axis=1))
    beside = bench.array((tokens, 2 * padded))
    beside[:, :heads], beside[:, padded : padded + heads] = beta, decay

    def in_blocks(matrices):
        blocks = matrices.reshape(heads, key_dim, value_dim // 16, 16).swapaxes(1, 2)
        return np.concatenate([np.full(16, np.nan, np.float32), blocks.reshape(-1)])  # after what another layer keeps

    for first in (None, state):
        begin = np.zeros_like(state) if first is None else first
        want, after = naive.canonical_delta_rule(*each, v, beta, decay, begin)
        plain, _ = naive.delta_rule(*each, v, beta, decay, begin)
        assert np.abs(want - plain).max() <= 1e-5
        for members, sizes in ((1, [tokens]), (3, [4, 1, 6])):
            out = bench.array((tokens, heads * value_dim))
            before = None if first is None else bench.copy(in_blocks(first))
            start = 0
            for size in sizes:
                left = bench.array(16 + state.size)
                program = Program()
                program.add(
                    Opcode.DELTA,
                    source=address(rows) + start * rows.strides[0],
                    source_stride=rows.strides[0],
                    key_heads=key_heads,
                    heads=heads,
                    key_dim=key_dim,
                    value_dim=value_dim,
                    gates=address(beside) + start * beside.strides[0],
                    gates_stride=beside.strides[0],
                    gates_step=4 * padded,
                    out=address(out) + start * out.strides[0],
                    out_stride=out.strides[0],
                    place=64,
                )
                bench.run(program, size, members=members, **segments_of(bench, [size], [(before, left)]))
                before, start = left, start + size
            assert same_bits(out, want.reshape(tokens, -1))
            assert same_bits(before[16:], in_blocks(after)[16:])
