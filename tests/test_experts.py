"""Routed experts: the choice, the order of pairs, the products and their sum equal their twins on every tier."""

from __future__ import annotations

import numpy as np
import pytest

from engine.core.build import TARGETS
from engine.core.operations import ROW_WORDS, Opcode, Program, Routing, RowSet
from engine.models.spec import ExpertsSpec
from tests import naive
from tests.workbench import Activations, Weights, Workbench, address, packer, product_scratch_bytes, same_bits

CHOICES = [
    ExpertsSpec(8, 2, normalised=True),
    ExpertsSpec(60, 4),
    ExpertsSpec(33, 8, routing="chosen"),
    ExpertsSpec(
        32, 6, routing="sigmoid", normalised=True, scale=2.5, groups=8, chosen_groups=3, group_by="two", correction=True
    ),
    ExpertsSpec(64, 6, scale=16.0, groups=8, chosen_groups=2),
    ExpertsSpec(1, 1),
]


@pytest.fixture(scope="module", params=list(TARGETS))
def bench(request, kernels):
    bench = Workbench(kernels(request.param))
    yield bench
    bench.close()


def random(*shape, seed=0, scale=1.0):
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def routed(bench, logits, how, correction, members):
    """(experts, weights, places, firsts, tokens of pairs) by ROUTE and DISPATCH."""
    tokens = len(logits)
    padded = -(-how.count // 16) * 16
    source = bench.array((tokens, padded))
    source[:, : how.count] = logits
    held = bench.array(padded)
    held[: how.count] = 0 if correction is None else correction
    experts, weights = bench.array((tokens, how.chosen), np.int32), bench.array((tokens, how.chosen))
    places, firsts = bench.array((tokens, how.chosen), np.int32), bench.array(how.count + 1, np.int32)
    pairs = bench.array(tokens * how.chosen, np.int32)
    program = Program()
    program.add(
        Opcode.ROUTE,
        source=address(source),
        source_stride=source.strides[0],
        count=how.count,
        chosen=how.chosen,
        routing=int(Routing[how.routing.upper()]),
        normalised=int(how.normalised),
        scale=how.scale,
        groups=how.groups,
        chosen_groups=how.chosen_groups,
        two_of_group=int(how.group_by == "two"),
        correction=address(held) if how.correction else 0,
        experts=address(experts),
        weights=address(weights),
    )
    program.add(
        Opcode.DISPATCH,
        count=how.count,
        chosen=how.chosen,
        experts=address(experts),
        places=address(places),
        firsts=address(firsts),
    )
    words = {"routed": tokens * how.chosen, "routed_tokens": pairs}
    bench.run(program, tokens, members=members, scratch_bytes=12 * padded + 256, **words)
    return experts, weights, places, firsts, pairs


@pytest.mark.parametrize("how", CHOICES, ids=str)
def test_choice_equals_its_twin(bench, how):
    """Equal logits, too: the first expert of them counts."""
    logits = random(40, how.count, seed=1, scale=2.0)
    logits[3] = 0.5
    logits[4] = np.round(logits[4])
    logits[5] *= 40
    correction = random(how.count, seed=2, scale=0.3) if how.correction else None
    want = [naive.canonical_route(row, how, correction) for row in logits]
    for members in (1, 3):
        experts, weights, places, firsts, pairs = routed(bench, logits, how, correction, members)
        assert np.array_equal(experts, [chosen for chosen, _ in want])
        assert same_bits(weights, np.stack([share for _, share in want]))
        order = np.argsort(experts.ravel(), kind="stable")
        assert np.array_equal(pairs, order // how.chosen)
        assert np.array_equal(places.ravel()[order], np.arange(order.size))
        assert np.array_equal(firsts, np.searchsorted(experts.ravel()[order], np.arange(how.count + 1)))


@pytest.mark.parametrize("how", CHOICES, ids=str)
def test_choice_means_what_it_says(how):
    """Weights within 1e-6 of float64, relatively; the same experts where nothing is equal."""
    logits = random(40, how.count, seed=1, scale=2.0)
    correction = random(how.count, seed=2, scale=0.3) if how.correction else None
    chosen, weights = naive.route(logits.astype(np.float64), how, 0.0 if correction is None else correction)
    for row, experts, shares in zip(logits, chosen, weights, strict=True):
        got, found = naive.canonical_route(row, how, correction)
        assert np.array_equal(got, experts)
        assert np.abs(found / shares - 1).max() <= 1e-6


@pytest.mark.parametrize(("name", "group"), [("q4", 32), ("q6", 64), ("q8", 64), ("bf16", 0), ("f32", 0)])
@pytest.mark.parametrize("tokens", [1, 3, 37])
def test_products_of_pairs_equal_those_of_each_expert(bench, name, group, tokens):
    """Experts without tokens, with one, and with many; as if each were a matrix of its own."""
    how, rows, cols = ExpertsSpec(6, 2), 48, 128
    stacked = Weights.packed(random(how.count * rows, cols, seed=3, scale=0.1), name, group, packer())
    bias = random(how.count, rows, seed=4)
    xs, logits = random(tokens, cols, seed=5), random(tokens, how.count, seed=6, scale=3.0)
    logits[:, 4] = -50
    every = stacked.canonical(xs)
    sizes = {part.name: part.bytes // how.count for part in stacked.layout.parts}
    for members in (1, 2, 3):
        experts, _, places, firsts, pairs = routed(bench, logits, how, None, 1)
        x = Activations.room(bench, len(pairs), stacked.layout)
        source, held, out = bench.copy(xs), bench.copy(bias), bench.array((len(pairs), rows + 16))
        program = Program()
        place = {"source": address(source), "source_stride": source.strides[0]}
        program.add(Opcode.QUANTISE, **x.fields(), rows=int(RowSet.GATHERED), **place, width=cols)
        program.add(
            Opcode.EXPERTS,
            **x.fields(),
            rows=int(RowSet.ROUTED),
            **stacked.fields() | {"blocks": rows // 16},
            bias=address(held),
            out=address(out),
            out_stride=out.strides[0],
            add=0,
            activates=0,
            count=how.count,
            firsts=address(firsts),
            panels_step=sizes.get("codes", sizes.get("values")),
            meta_step=sizes.get("meta", 0),
            bias_step=4 * rows,
        )
        words = {"routed": len(pairs), "routed_tokens": pairs}
        scratch = product_scratch_bytes(len(pairs)) + 8 * ROW_WORDS
        bench.run(program, tokens, members=members, scratch_bytes=scratch, **words)
        for token in range(tokens):
            for rank in range(how.chosen):
                expert = experts[token, rank]
                part = slice(expert * rows, (expert + 1) * rows)
                want = every[token, part] * np.float32(2.0**stacked.exponent) if not group else every[token, part]
                assert same_bits(out[places[token, rank], :rows], want + bias[expert])
        assert np.isnan(out[:, rows:]).all()


@pytest.mark.parametrize("gated", [None, False, True])
def test_sum_by_weight_equals_its_twin(bench, gated):
    """In the order of choice, then the shared block, then times the factor onto what is there."""
    tokens, width, chosen = 3, 1104, 2
    outs, before, shared = random(6, width, seed=7), random(tokens, width, seed=8), random(tokens, width, seed=9)
    weights, gates = random(tokens, chosen, seed=10), random(tokens, 16, seed=11)
    places = np.array([[4, 0], [1, 5], [2, 3]], np.int32)
    want = np.empty_like(before)
    for token in range(tokens):
        total = np.zeros(width, np.float32)
        for rank in range(chosen):
            total = naive.fma(weights[token, rank], outs[places[token, rank]], total)
        if gated is not None:
            one = np.float32(1)
            share = one / (one + naive.canonical_exp(-gates[token, :1])) if gated else one
            total = naive.fma(share, shared[token], total)
        want[token] = naive.fma(total, np.float32(0.22), before[token])
    held = [bench.copy(values) for values in (outs, weights, places, shared, gates)]
    for members in (1, 3):
        out = bench.copy(before)
        program = Program()
        program.add(
            Opcode.COMBINE,
            source=address(held[0]),
            source_stride=held[0].strides[0],
            width=width,
            chosen=chosen,
            weights=address(held[1]),
            places=address(held[2]),
            shared=0 if gated is None else address(held[3]),
            shared_stride=held[3].strides[0],
            shared_gate=address(held[4]) if gated else 0,
            shared_gate_stride=held[4].strides[0],
            scale=0.22,
            out=address(out),
            out_stride=out.strides[0],
        )
        bench.run(program, tokens, members=members)
        assert same_bits(out, want)
