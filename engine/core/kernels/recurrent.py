"""Layers that remember a sequence in a fixed number of values: short convolutions, the gated delta rule.

What a sequence was is read from one place and what it has become is written
to another (`memories` of the step's state), at the layer's own offset, `place`.
A token's arithmetic is the same whether it comes with others or alone, so
slices of a prompt give the bits of one pass.
"""

from engine.core.kernels import fields as at
from engine.core.kernels.common import share_first
from engine.core.kernels.simd import (
    absolute,
    exp,
    float32,
    fma,
    kernel,
    load_f32,
    load_f32x16,
    load_i64,
    maximum,
    reciprocal,
    splat_f32,
    store_f32x16,
)

PIECE = 128
"""Columns of a convolution that one member does at a time."""


@kernel
def convolution_input(row, source, index, column, before):
    """16 columns of row `index` of a segment; rows below 0 are those that the sequence ended with before."""
    width, taps = load_i64(row + at.CONVOLVE_WIDTH), load_i64(row + at.CONVOLVE_TAPS)
    if index < 0:
        if before == 0:
            return splat_f32(float32(0.0))
        return load_f32x16(before + 4 * ((taps - 1 + index) * width + column))
    place = source + index * load_i64(row + at.CONVOLVE_SOURCE_STRIDE) + 4 * column
    x = load_f32x16(place)
    if load_i64(row + at.CONVOLVE_GATED):
        x = x * load_f32x16(place + 8 * width)
    return x


@kernel
def convolve(row, state, member, members):
    """A causal convolution of each column by itself, over the last `taps` rows of a sequence.

    weights  float32 (taps, width)       the last one meets the row itself
    bias     float32 (width,)            0 for none
    memory   float32 (taps - 1, width)   the inputs of the last rows

    Not gated: out = silu(convolution(source)). Gated, a source row is b, c and x of `width` each:
    out = c * convolution(b * x).
    """
    segments, table = load_i64(state + at.STATE_SEGMENTS), load_i64(state + at.STATE_SEGMENT_TABLE)
    width, taps = load_i64(row + at.CONVOLVE_WIDTH), load_i64(row + at.CONVOLVE_TAPS)
    weights, bias = load_i64(row + at.CONVOLVE_WEIGHTS), load_i64(row + at.CONVOLVE_BIAS)
    gated, memories = load_i64(row + at.CONVOLVE_GATED), load_i64(state + at.STATE_MEMORIES)
    zero, one = splat_f32(float32(0.0)), splat_f32(float32(1.0))
    pieces = (width + PIECE - 1) // PIECE
    units = segments * pieces
    for unit in range(share_first(units, member, members), share_first(units, member + 1, members)):
        segment, first = unit // pieces, unit % pieces * PIECE
        start, count = load_i64(table + 32 * segment), load_i64(table + 32 * segment + 8)
        before = load_i64(memories + 16 * segment)
        if before != 0:
            before += load_i64(row + at.CONVOLVE_PLACE)
        after = load_i64(memories + 16 * segment + 8) + load_i64(row + at.CONVOLVE_PLACE)
        source = load_i64(row + at.CONVOLVE_SOURCE) + start * load_i64(row + at.CONVOLVE_SOURCE_STRIDE)
        out = load_i64(row + at.CONVOLVE_OUT) + start * load_i64(row + at.CONVOLVE_OUT_STRIDE)
        for column in range(first, min(first + PIECE, width), 16):
            for index in range(count):
                total = zero
                if bias != 0:
                    total = load_f32x16(bias + 4 * column)
                for tap in range(taps):
                    x = convolution_input(row, source, index + tap - (taps - 1), column, before)
                    total = fma(x, load_f32x16(weights + 4 * (tap * width + column)), total)
                if gated:
                    c = source + index * load_i64(row + at.CONVOLVE_SOURCE_STRIDE) + 4 * (width + column)
                    total = total * load_f32x16(c)
                else:
                    total = total * reciprocal(one + exp(zero - total))
                store_f32x16(out + index * load_i64(row + at.CONVOLVE_OUT_STRIDE) + 4 * column, total)
            for slot in range(taps - 1):
                x = convolution_input(row, source, count + slot - (taps - 1), column, before)
                store_f32x16(after + 4 * (slot * width + column), x)


@kernel
def softplus(x):
    """ln(1 + e ** x) = max(x, 0) + 2 artanh(y / (2 + y)) with y = e ** -|x|, the second by its series."""
    zero = splat_f32(float32(0.0))
    y = exp(zero - absolute(x))
    z = y / (splat_f32(float32(2.0)) + y)
    square = z * z
    series = splat_f32(float32(2.0 / 17.0))
    series = fma(series, square, splat_f32(float32(2.0 / 15.0)))
    series = fma(series, square, splat_f32(float32(2.0 / 13.0)))
    series = fma(series, square, splat_f32(float32(2.0 / 11.0)))
    series = fma(series, square, splat_f32(float32(2.0 / 9.0)))
    series = fma(series, square, splat_f32(float32(2.0 / 7.0)))
    series = fma(series, square, splat_f32(float32(2.0 / 5.0)))
    series = fma(series, square, splat_f32(float32(2.0 / 3.0)))
    series = fma(series, square, splat_f32(float32(2.0)))
    return fma(series, z, maximum(x, zero))


@kernel
def decay(row, state, member, members):
    """How much a head takes of what is new, and how much it keeps of what was.

    source  float32 (tokens, heads + heads)   b, then a
    rates, bias  float32 (heads,)             padded to whole vectors, as are the rows of source and out
    out     float32 (tokens, 2, out_step)     sigmoid(b), then exp(-rate * softplus(a + bias))
    """
    tokens, heads = load_i64(state + at.STATE_TOKENS), load_i64(row + at.DECAY_HEADS)
    rates, bias = load_i64(row + at.DECAY_RATES), load_i64(row + at.DECAY_BIAS)
    zero, one = splat_f32(float32(0.0)), splat_f32(float32(1.0))
    for token in range(share_first(tokens, member, members), share_first(tokens, member + 1, members)):
        source = load_i64(row + at.DECAY_SOURCE) + token * load_i64(row + at.DECAY_SOURCE_STRIDE)
        out = load_i64(row + at.DECAY_OUT) + token * load_i64(row + at.DECAY_OUT_STRIDE)
        for head in range(0, heads, 16):
            b = load_f32x16(source + 4 * head)
            a = load_f32x16(source + 4 * (heads + head)) + load_f32x16(bias + 4 * head)
            store_f32x16(out + 4 * head, reciprocal(one + exp(zero - b)))
            kept = exp(zero - load_f32x16(rates + 4 * head) * softplus(a))
            store_f32x16(out + load_i64(row + at.DECAY_OUT_STEP) + 4 * head, kept)


@kernel
def delta(row, state, member, members):
    """The gated delta rule (Yang et al. 2024, "Gated Delta Networks"), one token after the other.

    For each head: S *= decay; S += k (v - k S) beta; out = q S.

    source  float32 (tokens, q and k of key_heads, v of heads)   q and k are normed and scaled already
    gates   float32 (tokens, 2, gates_step)   beta, then decay
    memory  float32 (heads, value_dim / 16, key_dim, 16)   S

    One unit is 16 columns of one head's S, which depend on no others. Sums over the rows of S run in four parts.
    """
    segments, table = load_i64(state + at.STATE_SEGMENTS), load_i64(state + at.STATE_SEGMENT_TABLE)
    key_heads, heads = load_i64(row + at.DELTA_KEY_HEADS), load_i64(row + at.DELTA_HEADS)
    key_dim, value_dim = load_i64(row + at.DELTA_KEY_DIM), load_i64(row + at.DELTA_VALUE_DIM)
    memories, blocks = load_i64(state + at.STATE_MEMORIES), value_dim // 16
    zero = splat_f32(float32(0.0))
    units = segments * heads * blocks
    for unit in range(share_first(units, member, members), share_first(units, member + 1, members)):
        segment, block = unit // (heads * blocks), unit % (heads * blocks)
        head = block // blocks
        key_head = head // (heads // key_heads)
        start, count = load_i64(table + 32 * segment), load_i64(table + 32 * segment + 8)
        place = load_i64(row + at.DELTA_PLACE) + 64 * block * key_dim
        before, after = load_i64(memories + 16 * segment), load_i64(memories + 16 * segment + 8) + place
        for index in range(key_dim):
            x = zero
            if before != 0:
                x = load_f32x16(before + place + 64 * index)
            store_f32x16(after + 64 * index, x)
        for token in range(start, start + count):
            source = load_i64(row + at.DELTA_SOURCE) + token * load_i64(row + at.DELTA_SOURCE_STRIDE)
            gates = load_i64(row + at.DELTA_GATES) + token * load_i64(row + at.DELTA_GATES_STRIDE) + 4 * head
            query = source + 4 * key_head * key_dim
            key = source + 4 * (key_heads + key_head) * key_dim
            value = source + 4 * (2 * key_heads * key_dim + 16 * block)
            beta = splat_f32(load_f32(gates))
            kept = splat_f32(load_f32(gates + load_i64(row + at.DELTA_GATES_STEP)))
            a = b = c = d = zero
            for index in range(0, key_dim, 4):
                s, k = after + 64 * index, key + 4 * index
                s0, s1 = load_f32x16(s) * kept, load_f32x16(s + 64) * kept
                s2, s3 = load_f32x16(s + 128) * kept, load_f32x16(s + 192) * kept
                a = fma(s0, splat_f32(load_f32(k)), a)
                b = fma(s1, splat_f32(load_f32(k + 4)), b)
                c = fma(s2, splat_f32(load_f32(k + 8)), c)
                d = fma(s3, splat_f32(load_f32(k + 12)), d)
            lacking = (load_f32x16(value) - ((a + b) + (c + d))) * beta
            a = b = c = d = zero
            for index in range(0, key_dim, 4):
                s, k, q = after + 64 * index, key + 4 * index, query + 4 * index
                s0 = fma(lacking, splat_f32(load_f32(k)), load_f32x16(s) * kept)
                s1 = fma(lacking, splat_f32(load_f32(k + 4)), load_f32x16(s + 64) * kept)
                s2 = fma(lacking, splat_f32(load_f32(k + 8)), load_f32x16(s + 128) * kept)
                s3 = fma(lacking, splat_f32(load_f32(k + 12)), load_f32x16(s + 192) * kept)
                store_f32x16(s, s0)
                store_f32x16(s + 64, s1)
                store_f32x16(s + 128, s2)
                store_f32x16(s + 192, s3)
                a = fma(s0, splat_f32(load_f32(q)), a)
                b = fma(s1, splat_f32(load_f32(q + 4)), b)
                c = fma(s2, splat_f32(load_f32(q + 8)), c)
                d = fma(s3, splat_f32(load_f32(q + 12)), d)
            out = load_i64(row + at.DELTA_OUT) + token * load_i64(row + at.DELTA_OUT_STRIDE) + 64 * block
            store_f32x16(out, (a + b) + (c + d))
