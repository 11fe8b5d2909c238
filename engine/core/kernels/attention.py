"""Rotary embedding, the paged KV cache, and attention over it.

A page holds 64 positions of every layer; within it, each key/value head of a
layer has its own run of bytes, so that a query sweeps it front to back:

    int8  keys    int8 (head_dim / 2, 64, 2)       two dimensions of a position side by side
          scales  f16  (head_dim / group, 64)
          values  int8 (32, head_dim, 2)           two positions of a dimension side by side
          scales  f16  (head_dim / group, 64)
    f16   keys    f16  (head_dim, 64)
          values  f16  (64, head_dim)
    f32   as f16, in float32: for comparison with a reference

No sum crosses lanes: scores have one position a lane, outputs one dimension.
With int8 pages queries and probabilities are quantised to int16, so that both
products are exact int32 sums (16-bit times 8-bit), one float step per group.

The arithmetic of one query and head is canonical: positions are taken in
chunks of 512, each from scratch (maximum, exponentials, sums), and folded in
order. Tiles of queries, threads and the batch only change who computes it.
"""

import numpy as np

from engine.core.kernels import amx_attention as tiled
from engine.core.kernels import fields as at
from engine.core.kernels.common import load_float, share_first, significant
from engine.core.kernels.rows import normalise
from engine.core.kernels.scores import add_sink, bend
from engine.core.kernels.simd import (
    HAS_AMX,
    HAS_VNNI512,
    absolute,
    drop_first,
    exp,
    float32,
    fma,
    int32,
    int64,
    keep_first,
    kernel,
    load_f16x16,
    load_f32,
    load_f32x16,
    load_i8x32_as_i16,
    load_i16x16,
    load_i32,
    load_i64,
    max_lanes,
    maximum,
    prefetch_l1,
    round_to_f16,
    round_to_int,
    splat_f32,
    store_f16,
    store_f32,
    store_f32x16,
    store_i8,
    store_i32_as_i8,
    store_i32_as_i16,
    store_i64,
    store_second_bytes,
    sum_lanes,
    tiles,
)
from engine.core.operations import CHUNK_TOKENS, KV_F16, KV_F32, KV_INT8, PAGE_TOKENS, PARTIAL_HEAD, TILE_ROWS

CHUNK_PAGES = CHUNK_TOKENS // PAGE_TOKENS
ROW = 4 * CHUNK_TOKENS
"""Bytes of one row of scores; probabilities in int16 take half of it."""


# ------------------------------------------------- rotation and writing to pages


@kernel
def rotate(row, state, member, members):
    """Norm, rotation and quantisation of queries; the same of keys, with values, into the pages.

    source row: query heads, key heads, value heads, each head_dim float32. One unit of work is one
    query head, or one key head with its value head.
    """
    tokens = load_i64(state + at.STATE_TOKENS)
    positions, tables = load_i64(state + at.STATE_POSITIONS), load_i64(state + at.STATE_TOKEN_TABLES)
    heads, kv_heads = load_i64(row + at.ROTATE_HEADS), load_i64(row + at.ROTATE_KV_HEADS)
    head_dim, kind = load_i64(row + at.ROTATE_HEAD_DIM), load_i64(row + at.ROTATE_KV_KIND)
    group = load_i64(row + at.ROTATE_KV_GROUP)
    epsilon = load_float(row + at.ROTATE_EPSILON)
    per_token = heads + kv_heads
    units = tokens * per_token
    for unit in range(share_first(units, member, members), share_first(units, member + 1, members)):
        token, head = unit // per_token, unit % per_token
        source = load_i64(row + at.ROTATE_SOURCE) + token * load_i64(row + at.ROTATE_SOURCE_STRIDE)
        vector = source + head * head_dim * 4
        norms = load_i64(row + at.ROTATE_Q_NORM) if head < heads else load_i64(row + at.ROTATE_K_NORM)
        norm_last = load_i64(row + at.ROTATE_NORM_LAST)
        if norms != 0 and not norm_last:
            normalise(vector, head_dim, norms, epsilon, vector)
        turn(row, vector, token)
        if norms != 0 and norm_last:
            normalise(vector, head_dim, norms, epsilon, vector)
        balance(row, vector, head, heads, kv_heads, head_dim)
        if head < heads:
            index = token * heads + head
            put_query(row, vector, index, head_dim, kind, group)
            continue
        position = int64(load_i32(positions + 4 * token))
        page = int64(load_i32(load_i64(tables + 8 * token) + 4 * (position // PAGE_TOKENS)))
        kv_head = head - heads
        place = (
            load_i64(row + at.ROTATE_POOL)
            + page * load_i64(row + at.ROTATE_PAGE_BYTES)
            + kv_head * load_i64(row + at.ROTATE_HEAD_BYTES)
        )
        values = source + (heads + kv_heads + kv_head) * head_dim * 4
        put_key_and_value(vector, values, place, position % PAGE_TOKENS, head_dim, kind, group)


@kernel
def turn(row, vector, token):
    """Rotate the pairs of a head by the token's angles, in place (Su et al. 2021, "RoFormer")."""
    angles = load_i64(row + at.ROTATE_ANGLES)
    if angles == 0:
        return
    count = load_i64(row + at.ROTATE_ROTARY_DIM) // 2
    cosines = angles + token * 8 * count
    sines = cosines + 4 * count
    if count % 16 == 0 and not load_i64(row + at.ROTATE_INTERLEAVED):
        for column in range(0, 4 * count, 64):
            first, second = vector + column, vector + 4 * count + column
            a, b = load_f32x16(first), load_f32x16(second)
            cosine_lanes, sine_lanes = load_f32x16(cosines + column), load_f32x16(sines + column)
            store_f32x16(first, a * cosine_lanes - b * sine_lanes)
            store_f32x16(second, b * cosine_lanes + a * sine_lanes)
        return
    if load_i64(row + at.ROTATE_INTERLEAVED):
        step, other = 8, 4
    else:
        step, other = 4, 4 * count
    for index in range(count):
        first, second = vector + step * index, vector + step * index + other
        x, y = load_f32(first), load_f32(second)
        cosine, sine = load_f32(cosines + 4 * index), load_f32(sines + 4 * index)
        store_f32(first, x * cosine - y * sine)
        store_f32(second, y * cosine + x * sine)


@kernel
def balance(row, vector, head, heads, kv_heads, head_dim):
    """Divide keys by a power of two per dimension and multiply queries by it: scores stay, keys become even.

    factors  float32 (2, kv_heads, head_dim)   for keys, then for queries
    """
    factors = load_i64(row + at.ROTATE_BALANCE)
    if factors == 0:
        return
    if head < heads:
        place = factors + (kv_heads + head // (heads // kv_heads)) * head_dim * 4
    else:
        place = factors + (head - heads) * head_dim * 4
    for column in range(0, head_dim, 16):
        store_f32x16(vector + 4 * column, load_f32x16(vector + 4 * column) * load_f32x16(place + 4 * column))


@kernel
def largest_of(vector, count):
    size = splat_f32(float32(0.0))
    for column in range(0, count, 16):
        size = maximum(absolute(load_f32x16(vector + 4 * column)), size)
    return max_lanes(size)


@kernel
def put_query(row, vector, index, head_dim, kind, group):
    """The query for this page kind: int16 with a scale per group, or float32; the attention scale is in it."""
    scale = load_float(row + at.ROTATE_SCALE)
    queries = load_i64(row + at.ROTATE_QUERIES)
    if kind != KV_INT8:
        scales = splat_f32(scale)
        for column in range(0, head_dim, 16):
            store_f32x16(queries + (index * head_dim + column) * 4, load_f32x16(vector + 4 * column) * scales)
        return
    groups = head_dim // group
    for number in range(groups):
        start = vector + 4 * number * group
        size = significant(largest_of(start, group))
        factor = splat_f32(float32(32767.0) / size if size > float32(0.0) else float32(0.0))
        for column in range(0, group, 16):
            code = round_to_int(load_f32x16(start + 4 * column) * factor)
            store_i32_as_i16(queries + (index * head_dim + number * group + column) * 2, code)
        store_f32(
            load_i64(row + at.ROTATE_QUERY_SCALES) + 4 * (index * groups + number), size / float32(32767.0) * scale
        )


@kernel
def put_key_and_value(key, value, place, slot, head_dim, kind, group):
    """Write position `slot` of a page."""
    if kind == KV_F32:
        values = place + 4 * head_dim * PAGE_TOKENS
        for column in range(head_dim):
            store_f32(place + 4 * (column * PAGE_TOKENS + slot), load_f32(key + 4 * column))
            store_f32(values + 4 * (slot * head_dim + column), load_f32(value + 4 * column))
        return
    if kind == KV_F16:
        for column in range(head_dim):
            store_f16(place + 2 * (column * PAGE_TOKENS + slot), within_f16(load_f32(key + 4 * column)))
        values = place + 2 * head_dim * PAGE_TOKENS
        for column in range(head_dim):
            store_f16(values + 2 * (slot * head_dim + column), within_f16(load_f32(value + 4 * column)))
        return
    scales_bytes = head_dim // group * PAGE_TOKENS * 2
    key_scales = place + head_dim * PAGE_TOKENS
    values = key_scales + scales_bytes
    value_scales = values + head_dim * PAGE_TOKENS
    for number in range(head_dim // group):
        first = number * group
        factor = put_scale(key + 4 * first, group, key_scales + 2 * (number * PAGE_TOKENS + slot))
        for column in range(first, first + group):
            code = to_code(load_f32(key + 4 * column), factor)
            store_i8(place + (column // 2) * 2 * PAGE_TOKENS + 2 * slot + column % 2, code)
        factor = put_scale(value + 4 * first, group, value_scales + 2 * (number * PAGE_TOKENS + slot))
        for column in range(first, first + group):
            code = to_code(load_f32(value + 4 * column), factor)
            store_i8(values + (slot // 2) * 2 * head_dim + 2 * column + slot % 2, code)


@kernel
def within_f16(value):
    """The value, or the largest half of its sign: an infinity would outlive its owner in a reused page."""
    return min(max(value, float32(-65504.0)), float32(65504.0))


@kernel
def put_scale(vector, group, place):
    """Store max |x| / 127 as a half; returns the factor that makes codes of x."""
    scale = round_to_f16(within_f16(largest_of(vector, group) / float32(127.0)))
    store_f16(place, scale)
    return float32(1.0) / scale if scale > float32(0.0) else float32(0.0)


@kernel
def to_code(value, factor):
    """The nearest integer of value * factor, at most 127 in size."""
    scaled = min(max(value * factor, float32(-127.0)), float32(127.0))
    return int32((scaled + float32(12582912.0)) - float32(12582912.0))


# ----------------------------------------------------------- scores and outputs


def int8_scores(tile):
    """Scores of `tile.count` query rows with 32 positions of an int8 page."""
    zero, dot, add_scaled, zero_sums = tile.zero_integers, tile.dot_halfwords, tile.add_scaled, tile.zero_sums
    store, load = tile.store, tile.load

    @kernel
    def scores(queries, query_stride, scales, scale_stride, out, out_stride, keys, key_scales, head_dim, group, _):
        for number in range(head_dim // group):
            low, high = zero(), zero()
            for pair in range(number * group // 2, (number + 1) * group // 2):
                line = keys + pair * 2 * PAGE_TOKENS
                low = dot(low, load_i8x32_as_i16(line), queries + 4 * pair, query_stride)
                high = dot(high, load_i8x32_as_i16(line + 32), queries + 4 * pair, query_stride)
            if number == 0:
                low_sums, high_sums = zero_sums(), zero_sums()
            else:
                low_sums, high_sums = load(out, out_stride), load(out + 64, out_stride)
            at_scales = key_scales + 2 * number * PAGE_TOKENS
            low_sums = add_scaled(low_sums, low, load_f16x16(at_scales), scales + 4 * number, scale_stride)
            high_sums = add_scaled(high_sums, high, load_f16x16(at_scales + 32), scales + 4 * number, scale_stride)
            store(out, out_stride, low_sums)
            store(out + 64, out_stride, high_sums)

    return scores


def float_scores(tile, load, size):
    """Scores of `tile.count` query rows with 32 positions of a page of floats of `size` bytes."""
    zero_sums, add_products, store = tile.zero_sums, tile.add_products, tile.store

    @kernel
    def scores(queries, query_stride, scales, scale_stride, out, out_stride, keys, key_scales, head_dim, group, _):
        low, high = zero_sums(), zero_sums()
        for column in range(head_dim):
            line = keys + column * size * PAGE_TOKENS
            low = add_products(low, load(line), queries + 4 * column, query_stride)
            high = add_products(high, load(line + 16 * size), queries + 4 * column, query_stride)
        store(out, out_stride, low)
        store(out + 64, out_stride, high)

    return scores


def int8_outputs(tile):
    """32 dimensions of the outputs of `tile.count` rows over the pages of a chunk, from int16 probabilities."""
    zero, dot, store = tile.zero_integers, tile.dot_halfwords, tile.store_scaled

    @kernel
    def outputs(probabilities, stride, scales, _, out, out_stride, pages, count, offset, row_bytes, width):
        low, high = zero(), zero()
        for page in range(count):
            values = load_i64(pages + 8 * page) + offset
            after = load_i64(pages + 8 * page + 8) + offset
            for pair in range(PAGE_TOKENS // 2):
                p = probabilities + 2 * (page * PAGE_TOKENS + 2 * pair)
                prefetch_l1(after + pair * row_bytes)
                low = dot(low, load_i8x32_as_i16(values + pair * row_bytes), p, stride)
                if width > 16:
                    high = dot(high, load_i8x32_as_i16(values + pair * row_bytes + 32), p, stride)
        store(out, out_stride, low, scales)
        if width > 16:
            store(out + 64, out_stride, high, scales)

    return outputs


def float_outputs(tile, load, size):
    """32 dimensions of the outputs of `tile.count` rows over the pages of a chunk."""
    zero_sums, add_products, store = tile.zero_sums, tile.add_products, tile.store

    @kernel
    def outputs(probabilities, stride, scales, _, out, out_stride, pages, count, offset, row_bytes, width):
        low, high = zero_sums(), zero_sums()
        for page in range(count):
            values = load_i64(pages + 8 * page) + offset
            after = load_i64(pages + 8 * page + 8) + offset
            for slot in range(PAGE_TOKENS):
                p = probabilities + 4 * (page * PAGE_TOKENS + slot)
                prefetch_l1(after + slot * row_bytes)
                low = add_products(low, load(values + slot * row_bytes), p, stride)
                if width > 16:
                    high = add_products(high, load(values + slot * row_bytes + 16 * size), p, stride)
        store(out, out_stride, low)
        if width > 16:
            store(out + 64, out_stride, high)

    return outputs


LARGE, MEDIUM = (4, 2) if HAS_VNNI512 else (2, 2)
"""Rows of a register tile: what 32 wide, or 16 narrow, registers hold beside two vectors of keys."""

_LARGE, _MEDIUM, _SMALL = tiles(LARGE), tiles(MEDIUM), tiles(1)


def all_rows(make):
    """kernel(rows, ...): a tile kernel applied to any number of rows, largest tiles first.

    Its own arguments: places of rows and their strides (queries or probabilities, scales, out), then
    what is the same for all rows.
    """
    large, medium, small = make(_LARGE), make(_MEDIUM), make(_SMALL)

    @kernel
    def apply(rows, first, first_stride, second, second_stride, out, out_stride, a, b, c, d, e):
        left = rows
        while left >= LARGE:
            large(first, first_stride, second, second_stride, out, out_stride, a, b, c, d, e)
            first, second, out = first + LARGE * first_stride, second + LARGE * second_stride, out + LARGE * out_stride
            left -= LARGE
        while left >= MEDIUM:
            medium(first, first_stride, second, second_stride, out, out_stride, a, b, c, d, e)
            first, second = first + MEDIUM * first_stride, second + MEDIUM * second_stride
            out += MEDIUM * out_stride
            left -= MEDIUM
        while left > 0:
            small(first, first_stride, second, second_stride, out, out_stride, a, b, c, d, e)
            first, second, out = first + first_stride, second + second_stride, out + out_stride
            left -= 1

    return apply


scores_int8, outputs_int8 = all_rows(int8_scores), all_rows(int8_outputs)
scores_f16 = all_rows(lambda tile: float_scores(tile, load_f16x16, 2))
scores_f32 = all_rows(lambda tile: float_scores(tile, load_f32x16, 4))
outputs_f16 = all_rows(lambda tile: float_outputs(tile, load_f16x16, 2))
outputs_f32 = all_rows(lambda tile: float_outputs(tile, load_f32x16, 4))


@kernel
def page_scores(rows, kind, queries, query_stride, scales, scale_stride, place, head_dim, group, out):
    """Scores of all rows of a tile with the 64 positions of one page."""
    key_scales = place + head_dim * PAGE_TOKENS
    for half in range(2):
        o = out + 128 * half
        if kind == KV_INT8:
            keys, half_scales = place + 64 * half, key_scales + 64 * half
            scores_int8(
                rows, queries, query_stride, scales, scale_stride, o, ROW, keys, half_scales, head_dim, group, 0
            )
        elif kind == KV_F16:
            scores_f16(rows, queries, query_stride, scales, scale_stride, o, ROW, place + 64 * half, 0, head_dim, 0, 0)
        else:
            scores_f32(rows, queries, query_stride, scales, scale_stride, o, ROW, place + 128 * half, 0, head_dim, 0, 0)


@kernel
def softmax(scores, first, last, vectors):
    """exp(score - maximum) of positions first..last, 0 elsewhere; in place. Returns maximum and sum.

    The sum has 16 lanes, each in order of position, joined as a tree.
    """
    largest = splat_f32(float32(-np.inf))
    for vector in range(vectors):
        x = load_f32x16(scores + 64 * vector)
        if first > 16 * vector or last < 16 * vector + 16:
            x = keep_first(x, int32(last - 16 * vector))
            x = drop_first(x, int32(first - 16 * vector))
            store_f32x16(scores + 64 * vector, x)
        largest = maximum(x, largest)
    top = max_lanes(largest)
    if top == float32(-np.inf):
        top = float32(0.0)  # a query that sees nothing here: all its exponentials become 0
    tops, total = splat_f32(top), splat_f32(float32(0.0))
    for vector in range(vectors):
        x = exp(load_f32x16(scores + 64 * vector) - tops)
        store_f32x16(scores + 64 * vector, x)
        total = total + x
    return top, sum_lanes(total)


@kernel
def weigh(probabilities, scales, vectors, out):
    """Probabilities times the values' scales, as int16; returns the scale that undoes it.

    scales  float32 (512,)
    out     int16 (512,), or its high bytes and then its low bytes where tiles want them
    """
    largest = splat_f32(float32(0.0))
    for vector in range(vectors):
        largest = maximum(load_f32x16(probabilities + 64 * vector) * load_f32x16(scales + 64 * vector), largest)
    size = significant(max_lanes(largest))
    factor = splat_f32(float32(32767.0) / size if size > float32(0.0) else float32(0.0))
    for vector in range(vectors):
        weighted = load_f32x16(probabilities + 64 * vector) * load_f32x16(scales + 64 * vector)
        code = round_to_int(weighted * factor)
        if HAS_AMX:
            store_second_bytes(out + 16 * vector, code)
            store_i32_as_i8(out + CHUNK_TOKENS + 16 * vector, code)
        else:
            store_i32_as_i16(out + 32 * vector, code)
    return size / float32(32767.0)


@kernel
def chunk_outputs(
    rows, kind, pages, count, place_of_values, head_dim, group, scores, halves, scales, work, out, stride
):
    """out[r] = sum over the chunk of probability * value, for all rows of a tile."""
    vectors = 4 * count
    steps = work - ROW  # the values' scales of one group of dimensions
    value_scales = place_of_values + head_dim * PAGE_TOKENS
    wide = group if kind == KV_INT8 else head_dim
    if HAS_AMX and kind == KV_INT8:
        for page in range(count):
            place = load_i64(pages + 8 * page) + place_of_values
            after = load_i64(pages + 8 * page + 8) + place_of_values
            values = work + tiled.WORK_BYTES + page * PAGE_TOKENS * head_dim
            tiled.interleave(place, after, 2 * head_dim, PAGE_TOKENS // 4, head_dim, values)
        tiled.configure(work, 64)
    for number in range(head_dim // wide):
        begin = number * wide
        if kind == KV_INT8:
            for vector in range(vectors):
                place = load_i64(pages + 8 * (vector // 4)) + value_scales + number * 2 * PAGE_TOKENS
                store_f32x16(steps + 64 * vector, load_f16x16(place + 32 * (vector % 4)))
            for index in range(rows):
                scale = weigh(scores + index * ROW, steps, vectors, halves + index * ROW // 2)
                store_f32(scales + 4 * index, scale)
        if HAS_AMX and kind == KV_INT8:
            values = work + tiled.WORK_BYTES
            sixteens = (rows + 15) // 16 * 16
            tiled.group_outputs(sixteens, halves, values, count, head_dim, begin, wide, scales, work, out, stride)
            continue
        for first in range(begin, begin + wide, 32):
            width = min(int64(32), begin + wide - first)
            o = out + 4 * first
            if kind == KV_INT8:
                offset, row_bytes = place_of_values + 2 * first, 2 * head_dim
                outputs_int8(rows, halves, ROW // 2, scales, 4, o, stride, pages, count, offset, row_bytes, width)
            elif kind == KV_F16:
                offset, row_bytes = place_of_values + 2 * first, 2 * head_dim
                outputs_f16(rows, scores, ROW, scales, 0, o, stride, pages, count, offset, row_bytes, width)
            else:
                offset, row_bytes = place_of_values + 4 * first, 4 * head_dim
                outputs_f32(rows, scores, ROW, scales, 0, o, stride, pages, count, offset, row_bytes, width)


@kernel
def fold(total, part, head_dim):
    """total <- total joined with part, both [maximum, sum, ..., output] with outputs not yet divided."""
    before, new = load_f32(total), load_f32(part)
    top = max(before, new)
    pair = exp(splat_f32(before - top))
    keep = max_lanes(pair)
    gain = max_lanes(exp(splat_f32(new - top)))
    store_f32(total, top)
    store_f32(total + 4, load_f32(total + 4) * keep + load_f32(part + 4) * gain)
    keeps, gains = splat_f32(keep), splat_f32(gain)
    for column in range(0, head_dim, 16):
        place = total + 4 * (PARTIAL_HEAD + column)
        joined = fma(load_f32x16(part + 4 * (PARTIAL_HEAD + column)), gains, load_f32x16(place) * keeps)
        store_f32x16(place, joined)


@kernel
def divide(total, head_dim, out):
    """The output of a query: the folded sum of values over the folded sum of probabilities."""
    inverse = splat_f32(float32(1.0) / load_f32(total + 4))
    for column in range(0, head_dim, 16):
        store_f32x16(out + 4 * column, load_f32x16(total + 4 * (PARTIAL_HEAD + column)) * inverse)


# ----------------------------------------------------------------- the operation


@kernel
def first_visible(position, window):
    return max(int64(0), position - window + 1) if window > 0 else int64(0)


@kernel
def attend(row, state, member, members):
    """Attention of the batch's queries over their pages.

    A segment of one token (decoding) is shared among the members by chunk and key/value head, its
    partial results are folded by `merge`; longer segments (prefill) by tile of tokens and head.
    """
    segments, table = load_i64(state + at.STATE_SEGMENTS), load_i64(state + at.STATE_SEGMENT_TABLE)
    kv_heads = load_i64(row + at.ATTEND_KV_HEADS)
    window = load_i64(row + at.ATTEND_WINDOW)
    repeats = load_i64(row + at.ATTEND_HEADS) // kv_heads
    tile_tokens = max(int64(1), TILE_ROWS // repeats)
    unit = int64(0)
    for segment in range(segments):
        entry = table + 32 * segment
        first_row, count, start = load_i64(entry), load_i64(entry + 8), load_i64(entry + 16)
        pages = load_i64(entry + 24)
        if count == 1:
            low, high = first_visible(start, window) // CHUNK_TOKENS, start // CHUNK_TOKENS
            for chunk in range(low, high + 1):
                for kv_head in range(kv_heads):
                    if unit % members == member:
                        part = load_i64(row + at.ATTEND_PARTIALS)
                        attend_tile(
                            row, state, member, first_row, 1, start, pages, kv_head, chunk, chunk, part, segment
                        )
                    unit += 1
            continue
        for tile in range((count + tile_tokens - 1) // tile_tokens):
            first = tile * tile_tokens
            tokens = min(tile_tokens, count - first)
            position = start + first
            low = first_visible(position, window) // CHUNK_TOKENS
            high = (position + tokens - 1) // CHUNK_TOKENS
            for kv_head in range(kv_heads):
                if unit % members == member:
                    here = first_row + first
                    attend_tile(row, state, member, here, tokens, position, pages, kv_head, low, high, 0, 0)
                unit += 1


@kernel
def attend_tile(row, state, member, first_row, tokens, start, table, kv_head, low, high, partials, segment):
    """Chunks low..high of one key/value head for `tokens` consecutive queries.

    partials 0: fold the chunks and write the outputs. Otherwise (one token, one chunk): leave the
    chunk's result where `merge` looks for it.
    """
    heads, kv_heads = load_i64(row + at.ATTEND_HEADS), load_i64(row + at.ATTEND_KV_HEADS)
    head_dim, window = load_i64(row + at.ATTEND_HEAD_DIM), load_i64(row + at.ATTEND_WINDOW)
    kind, group = load_i64(row + at.ATTEND_KV_KIND), load_i64(row + at.ATTEND_KV_GROUP)
    repeats = heads // kv_heads
    rows = tokens * repeats
    size = 2 if kind == KV_INT8 else 4
    groups = head_dim // group
    part_bytes = 4 * (PARTIAL_HEAD + head_dim)

    # The thread's scratch: page addresses, gathered queries, scores, int16 probabilities, results, and what tiles need:
    # keys of a page, then values of a chunk. Room for rows in sixteens.
    scratch = load_i64(state + at.STATE_SCRATCH) + member * load_i64(state + at.STATE_SCRATCH_BYTES)
    room = (rows + 15) // 16 * 16
    pages, scales = scratch, scratch + 128
    queries = scales + room * 4
    query_scales = queries + room * head_dim * 4
    scores = query_scales + room * 128  # up to 32 groups, as in a head of 496
    halves = scores + room * ROW
    parts = halves + room * ROW // 2
    totals = parts + room * part_bytes
    work = totals + room * part_bytes + ROW

    for index in range(rows):
        token, head = first_row + index // repeats, kv_head * repeats + index % repeats
        source = load_i64(row + at.ATTEND_QUERIES) + (token * heads + head) * head_dim * size
        if HAS_AMX and kind == KV_INT8:
            for column in range(0, head_dim, 16):
                code = load_i16x16(source + 2 * column)
                store_second_bytes(queries + index * head_dim + column, code)
                store_i32_as_i8(queries + (room + index) * head_dim + column, code)
        else:
            for word in range(0, head_dim * size, 4):
                store_f32(queries + index * head_dim * size + word, load_f32(source + word))
        if kind == KV_INT8:
            source = load_i64(row + at.ATTEND_QUERY_SCALES) + (token * heads + head) * groups * 4
            for number in range(groups):
                place = number * room + index if HAS_AMX else index * groups + number
                store_f32(query_scales + 4 * place, load_f32(source + 4 * number))

    head_place = load_i64(row + at.ATTEND_POOL) + kv_head * load_i64(row + at.ATTEND_HEAD_BYTES)
    page_bytes = load_i64(row + at.ATTEND_PAGE_BYTES)
    if kind == KV_INT8:
        place_of_values = head_dim * PAGE_TOKENS + groups * PAGE_TOKENS * 2
    else:
        place_of_values = (2 if kind == KV_F16 else 4) * head_dim * PAGE_TOKENS

    for chunk in range(low, high + 1):
        begin = chunk * CHUNK_TOKENS
        visible = min(start + tokens - begin, int64(CHUNK_TOKENS))
        count = (visible + PAGE_TOKENS - 1) // PAGE_TOKENS
        # Pages that no query of the tile sees any more may be gone: the first that counts stands for them.
        dead = max(int64(0), first_visible(start, window) - begin) // PAGE_TOKENS
        for page in range(count):
            number = int64(load_i32(table + 4 * (chunk * CHUNK_PAGES + max(page, dead))))
            store_i64(pages + 8 * page, head_place + number * page_bytes)
        store_i64(pages + 8 * count, load_i64(pages + 8 * (count - 1)))
        if HAS_AMX and kind == KV_INT8:
            tiled.configure(work, group)
            keys = work + tiled.WORK_BYTES
            for page in range(count):
                place, after, o = load_i64(pages + 8 * page), load_i64(pages + 8 * page + 8), scores + 256 * page
                tiled.page_scores(room, queries, query_scales, place, after, head_dim, group, work, keys, o, ROW)
        for page in range(count):
            if HAS_AMX and kind == KV_INT8:
                break
            page_scores(
                rows,
                kind,
                queries,
                head_dim * size,
                query_scales,
                4 * groups,
                load_i64(pages + 8 * page),
                head_dim,
                group,
                scores + 256 * page,
            )
        for index in range(rows):
            position = start + index // repeats - begin
            head = kv_head * repeats + index % repeats
            bend(row, head, scores + index * ROW, begin, position + begin, 4 * count)
            top, total = softmax(
                scores + index * ROW,
                first_visible(position + begin, window) - begin,
                position + 1,
                4 * count,
            )
            store_f32(parts + index * part_bytes, top)
            store_f32(parts + index * part_bytes + 4, total)
        chunk_outputs(
            rows,
            kind,
            pages,
            count,
            place_of_values,
            head_dim,
            group,
            scores,
            halves,
            scales,
            work,
            parts + 4 * PARTIAL_HEAD,
            part_bytes,
        )
        for index in range(rows):
            part = parts + index * part_bytes
            if partials != 0:
                chunks = load_i64(row + at.ATTEND_PARTIAL_CHUNKS)
                head = kv_head * repeats + index
                copy_floats(partials + ((segment * heads + head) * chunks + chunk) * part_bytes, part, part_bytes)
                continue
            position = start + index // repeats
            if position < begin or first_visible(position, window) >= begin + CHUNK_TOKENS:
                continue  # this query sees nothing of the chunk
            if chunk == first_visible(position, window) // CHUNK_TOKENS:
                copy_floats(totals + index * part_bytes, part, part_bytes)
            else:
                fold(totals + index * part_bytes, part, head_dim)
    if HAS_AMX and kind == KV_INT8:
        tiled.release()
    if partials != 0:
        return
    for index in range(rows):
        token, head = first_row + index // repeats, kv_head * repeats + index % repeats
        out = load_i64(row + at.ATTEND_OUT) + token * load_i64(row + at.ATTEND_OUT_STRIDE) + head * head_dim * 4
        add_sink(load_i64(row + at.ATTEND_SINKS), head, totals + index * part_bytes, head_dim)
        divide(totals + index * part_bytes, head_dim, out)


@kernel
def copy_floats(out, source, size):
    for offset in range(0, size, 64):
        store_f32x16(out + offset, load_f32x16(source + offset))


@kernel
def merge(row, state, member, members):
    """Fold the chunks of segments of one token, in order."""
    segments, table = load_i64(state + at.STATE_SEGMENTS), load_i64(state + at.STATE_SEGMENT_TABLE)
    heads, head_dim = load_i64(row + at.MERGE_HEADS), load_i64(row + at.MERGE_HEAD_DIM)
    window, chunks = load_i64(row + at.MERGE_WINDOW), load_i64(row + at.MERGE_PARTIAL_CHUNKS)
    part_bytes = 4 * (PARTIAL_HEAD + head_dim)
    units = segments * heads
    for unit in range(share_first(units, member, members), share_first(units, member + 1, members)):
        segment, head = unit // heads, unit % heads
        entry = table + 32 * segment
        if load_i64(entry + 8) != 1:
            continue
        position = load_i64(entry + 16)
        first = load_i64(row + at.MERGE_PARTIALS) + (segment * heads + head) * chunks * part_bytes
        low = first_visible(position, window) // CHUNK_TOKENS
        total = first + low * part_bytes
        for chunk in range(low + 1, position // CHUNK_TOKENS + 1):
            fold(total, first + chunk * part_bytes, head_dim)
        out = load_i64(row + at.MERGE_OUT) + load_i64(entry) * load_i64(row + at.MERGE_OUT_STRIDE) + head * head_dim * 4
        add_sink(load_i64(row + at.MERGE_SINKS), head, total, head_dim)
        divide(total, head_dim, out)
