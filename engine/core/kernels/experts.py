"""Blocks of which a router chooses some for each token: the choice, the products by expert, the sum by weight.

A pair is a token and one expert chosen for it. Products run over pairs sorted
by expert, so that each expert's weights are read once and shared by its
tokens; a token's outputs are added in the order in which its experts were
chosen, whatever company it has.
"""

import numpy as np

from engine.core.kernels import fields as at
from engine.core.kernels.common import load_float, share_first
from engine.core.kernels.matmul import products
from engine.core.kernels.rows import PIECE
from engine.core.kernels.simd import (
    exp,
    float32,
    fma,
    int32,
    int64,
    keep_first,
    kernel,
    load_f32,
    load_f32x16,
    load_i32,
    load_i64,
    max_lanes,
    maximum,
    splat_f32,
    store_f32,
    store_f32x16,
    store_i32,
    store_i64,
    sum_lanes,
)
from engine.core.operations import ROW_WORDS, Routing

SOFTMAX, SIGMOID, CHOSEN = (int(routing) for routing in Routing)
NOTHING = float32(-np.inf)


@kernel
def exponential(x):
    """e ** x of one number."""
    return max_lanes(exp(splat_f32(x)))


@kernel
def route(row, state, member, members):
    """The experts of each token, the likeliest first, and their weights.

    source   float32 (tokens, count)   logits
    experts  int32   (tokens, chosen)
    weights  float32 (tokens, chosen)
    """
    tokens = load_i64(state + at.STATE_TOKENS)
    count, chosen = load_i64(row + at.ROUTE_COUNT), load_i64(row + at.ROUTE_CHOSEN)
    scratch = load_i64(state + at.STATE_SCRATCH) + member * load_i64(state + at.STATE_SCRATCH_BYTES)
    scores, wishes = scratch, scratch + (4 * count + 63) // 64 * 64
    for token in range(share_first(tokens, member, members), share_first(tokens, member + 1, members)):
        weigh(row, load_i64(row + at.ROUTE_SOURCE) + token * load_i64(row + at.ROUTE_SOURCE_STRIDE), scores, wishes)
        if load_i64(row + at.ROUTE_GROUPS) > 1:
            leave_groups(row, wishes, wishes + (4 * count + 63) // 64 * 64)
        experts = load_i64(row + at.ROUTE_EXPERTS) + 4 * token * chosen
        weights = load_i64(row + at.ROUTE_WEIGHTS) + 4 * token * chosen
        for rank in range(chosen):
            best = largest(wishes, int64(0), count)
            store_f32(wishes + 4 * best, NOTHING)
            store_i32(experts + 4 * rank, int32(best))
            store_f32(weights + 4 * rank, load_f32(scores + 4 * best))
        settle(row, weights, chosen)


@kernel
def weigh(row, logits, scores, wishes):
    """scores: weights of all experts, or logits where only the chosen count; wishes: what is chosen by."""
    count, routing = load_i64(row + at.ROUTE_COUNT), load_i64(row + at.ROUTE_ROUTING)
    correction = load_i64(row + at.ROUTE_CORRECTION)
    top = splat_f32(NOTHING)
    for first in range(0, count, 16):
        x = keep_first(load_f32x16(logits + 4 * first), int32(count - first))
        store_f32x16(scores + 4 * first, x)
        top = maximum(x, top)
    top, total = splat_f32(max_lanes(top)), splat_f32(float32(0.0))
    one, zero = splat_f32(float32(1.0)), splat_f32(float32(0.0))
    if routing == SOFTMAX:
        for first in range(0, count, 16):
            x = exp(load_f32x16(scores + 4 * first) - top)
            store_f32x16(scores + 4 * first, x)
            total = total + x
        total = splat_f32(sum_lanes(total))
    for first in range(0, count, 16):
        x = load_f32x16(scores + 4 * first)
        if routing == SOFTMAX:
            x = x / total
        elif routing == SIGMOID:
            x = one / (one + exp(zero - x))
        store_f32x16(scores + 4 * first, x)
        if correction != 0:
            x = x + load_f32x16(correction + 4 * first)
        store_f32x16(wishes + 4 * first, keep_first(x, int32(count - first)))


@kernel
def leave_groups(row, wishes, groups):
    """Take the wishes of all but the best groups away. groups: room for a number of each."""
    count, number = load_i64(row + at.ROUTE_COUNT), load_i64(row + at.ROUTE_GROUPS)
    size = count // number
    for group in range(number):
        first, last = group * size, (group + 1) * size
        best = largest(wishes, first, last)
        value = load_f32(wishes + 4 * best)
        if load_i64(row + at.ROUTE_TWO_OF_GROUP):
            store_f32(wishes + 4 * best, NOTHING)
            second = load_f32(wishes + 4 * largest(wishes, first, last))
            store_f32(wishes + 4 * best, value)
            value = value + second
        store_f32(groups + 4 * group, value)
    # The best groups are marked by infinity, whose wishes stay.
    for _ in range(load_i64(row + at.ROUTE_CHOSEN_GROUPS)):
        store_f32(groups + 4 * best_below_infinity(groups, number), -NOTHING)
    for index in range(count):
        if load_f32(groups + 4 * (index // size)) != -NOTHING:
            store_f32(wishes + 4 * index, NOTHING)


@kernel
def best_below_infinity(values, count):
    """Where the largest finite of the values is; the first of equal ones."""
    best, place = NOTHING, int64(0)
    for index in range(count):
        value = load_f32(values + 4 * index)
        if value > best and value != -NOTHING:
            best, place = value, index
    return place


@kernel
def largest(values, first, last):
    """Where the largest of values first..last is; the first of equal ones."""
    best, place = NOTHING, first
    for index in range(first, last):
        value = load_f32(values + 4 * index)
        if value > best:
            best, place = value, index
    return place


@kernel
def settle(row, weights, chosen):
    """Weights of the chosen: their softmax where they are logits still, divided by their sum, times the factor."""
    logits = load_i64(row + at.ROUTE_ROUTING) == CHOSEN
    if logits:
        top = load_f32(weights)
        for rank in range(chosen):
            store_f32(weights + 4 * rank, exponential(load_f32(weights + 4 * rank) - top))
    scale = load_float(row + at.ROUTE_SCALE)
    total = float32(1.0)
    if logits or load_i64(row + at.ROUTE_NORMALISED):
        total = float32(0.0)
        for rank in range(chosen):
            total = total + load_f32(weights + 4 * rank)
    for rank in range(chosen):
        store_f32(weights + 4 * rank, load_f32(weights + 4 * rank) / total * scale)


@kernel
def dispatch(row, state, member, members):
    """Sort the pairs by expert, and by token where that is the same. The first member does it: it is a few numbers.

    places         int32 (tokens, chosen)  where each pair comes
    firsts         int32 (count + 1,)      where each expert's pairs begin
    routed_tokens  int32 (pairs,)          the token of each pair, in the new order
    """
    if member != 0:
        return
    pairs, count = load_i64(state + at.STATE_ROUTED), load_i64(row + at.DISPATCH_COUNT)
    chosen = load_i64(row + at.DISPATCH_CHOSEN)
    experts, places = load_i64(row + at.DISPATCH_EXPERTS), load_i64(row + at.DISPATCH_PLACES)
    firsts, tokens = load_i64(row + at.DISPATCH_FIRSTS), load_i64(state + at.STATE_ROUTED_TOKENS)
    for expert in range(count + 1):
        store_i32(firsts + 4 * expert, int32(0))
    for pair in range(pairs):
        place = firsts + 4 * (int64(load_i32(experts + 4 * pair)) + 1)
        store_i32(place, int32(load_i32(place) + 1))
    for expert in range(count):
        place = firsts + 4 * expert
        store_i32(place + 4, int32(load_i32(place + 4) + load_i32(place)))
    # Each expert's beginning moves to its end, which is where the next begins: moved back afterwards.
    for pair in range(pairs):
        first = firsts + 4 * int64(load_i32(experts + 4 * pair))
        place = int64(load_i32(first))
        store_i32(first, int32(place + 1))
        store_i32(places + 4 * pair, int32(place))
        store_i32(tokens + 4 * place, int32(pair // chosen))
    for expert in range(count, 0, -1):
        store_i32(firsts + 4 * expert, load_i32(firsts + 4 * (expert - 1)))
    store_i32(firsts, int32(0))


@kernel
def experts(row, state, member, members):
    """The product of every pair with its expert's weights; members share the blocks of all experts that have pairs.

    Each expert is a product of its own: its row is written into the end of the member's scratch.
    """
    count, firsts = load_i64(row + at.EXPERTS_COUNT), load_i64(row + at.EXPERTS_FIRSTS)
    blocks = load_i64(row + at.MATMUL_BLOCKS)
    bias = load_i64(row + at.MATMUL_BIAS)
    busy = int64(0)
    for expert in range(count):
        if load_i32(firsts + 4 * expert) < load_i32(firsts + 4 * expert + 4):
            busy += 1
    low, high = share_first(busy * blocks, member, members), share_first(busy * blocks, member + 1, members)
    own = load_i64(state + at.STATE_SCRATCH) + (member + 1) * load_i64(state + at.STATE_SCRATCH_BYTES) - 8 * ROW_WORDS
    for word in range(ROW_WORDS):
        store_i64(own + 8 * word, load_i64(row + 8 * word))
    start = int64(0)
    for expert in range(count):
        pair, end = int64(load_i32(firsts + 4 * expert)), int64(load_i32(firsts + 4 * expert + 4))
        if pair == end:
            continue
        first, last = max(low - start, int64(0)), min(high - start, blocks)
        start += blocks
        if first >= last:
            continue
        store_i64(
            own + at.MATMUL_PANELS, load_i64(row + at.MATMUL_PANELS) + expert * load_i64(row + at.EXPERTS_PANELS_STEP)
        )
        store_i64(own + at.MATMUL_META, load_i64(row + at.MATMUL_META) + expert * load_i64(row + at.EXPERTS_META_STEP))
        if bias != 0:
            store_i64(own + at.MATMUL_BIAS, bias + expert * load_i64(row + at.EXPERTS_BIAS_STEP))
        products(own, state, member, pair, end, first, last)


@kernel
def combine(row, state, member, members):
    """out[t] += scale * (sum of weight * source[place], in the order of choice, + what the shared block gave)."""
    tokens, width = load_i64(state + at.STATE_TOKENS), load_i64(row + at.COMBINE_WIDTH)
    chosen = load_i64(row + at.COMBINE_CHOSEN)
    source, stride = load_i64(row + at.COMBINE_SOURCE), load_i64(row + at.COMBINE_SOURCE_STRIDE)
    shared, gate = load_i64(row + at.COMBINE_SHARED), load_i64(row + at.COMBINE_SHARED_GATE)
    scale = splat_f32(load_float(row + at.COMBINE_SCALE))
    pieces = (width + PIECE - 1) // PIECE
    units = tokens * pieces
    for unit in range(share_first(units, member, members), share_first(units, member + 1, members)):
        token, first = unit // pieces, unit % pieces * PIECE
        weights = load_i64(row + at.COMBINE_WEIGHTS) + 4 * token * chosen
        places = load_i64(row + at.COMBINE_PLACES) + 4 * token * chosen
        out = load_i64(row + at.COMBINE_OUT) + token * load_i64(row + at.COMBINE_OUT_STRIDE)
        share = float32(1.0)
        if gate != 0:
            logit = load_f32(gate + token * load_i64(row + at.COMBINE_SHARED_GATE_STRIDE))
            share = float32(1.0) / (float32(1.0) + exponential(-logit))
        for column in range(first, min(first + PIECE, width), 16):
            total = splat_f32(float32(0.0))
            for rank in range(chosen):
                place = source + int64(load_i32(places + 4 * rank)) * stride
                total = fma(splat_f32(load_f32(weights + 4 * rank)), load_f32x16(place + 4 * column), total)
            if shared != 0:
                given = load_f32x16(shared + token * load_i64(row + at.COMBINE_SHARED_STRIDE) + 4 * column)
                total = fma(splat_f32(share), given, total)
            store_f32x16(out + 4 * column, fma(total, scale, load_f32x16(out + 4 * column)))
