"""Chooses scales, multipliers, offsets and codes of two-level formats (`engine.core.quant`), and packs them.

Lanes are the 16 rows of a block. For each span of columns the candidates are

* five scales around the smallest that lets the largest weight fit int8;
* for each group, three multipliers around the one whose steps cover its range;
* for each of these, three offsets: the lowest weight met exactly, the highest, or both off by as much;

and what has the least squared error, each column's weighted by its importance,
is kept. Scales below the smallest that fits clip a few weights to serve all
others better. The sums have one order, so a file's bytes depend on the weights
alone.
"""

import numpy as np

from engine.core.kernels import fields as at
from engine.core.kernels.common import load_float
from engine.core.kernels.simd import (
    f16_above,
    float32,
    high_bits_of_code,
    int32,
    int64,
    kernel,
    load_f32,
    load_f32x16,
    load_i32x16,
    load_i64,
    low_bits_of_code,
    maximum,
    minimum,
    quotient_or_zero,
    round_lanes,
    round_to_int,
    select_less,
    set_rounding,
    splat_f32,
    splat_i32,
    store_f16x16,
    store_f32,
    store_f32x16,
    store_i8,
    store_i32x16,
    store_i64,
)


@kernel
def factor_tried(number):
    """Multiples of the smallest fitting scale that are tried."""
    if number == 0:
        return float32(1.0)
    if number == 1:
        return float32(0.94)
    if number == 2:
        return float32(0.88)
    return float32(1.08) if number == 3 else float32(1.18)


@kernel
def pack(job, first, last):
    """Quantise and pack blocks first..last of the job's rows."""
    columns, span = load_i64(job + at.PACK_COLUMNS), load_i64(job + at.PACK_SPAN)
    group, steps = load_i64(job + at.PACK_GROUP), load_i64(job + at.PACK_STEPS)
    factor = load_float(job + at.PACK_FACTOR)
    panel = load_i64(job + at.PACK_SCRATCH)
    store_i64(panel, 0x1F80)
    set_rounding(panel)
    record = 32 + 24 * (span // group)
    bytes_of_column = 8 if steps == 15 else 12
    for block in range(first, last):
        meta = load_i64(job + at.PACK_META) + block * ((columns + span - 1) // span) * record
        codes = load_i64(job + at.PACK_CODES) + block * columns * bytes_of_column
        begin = int64(0)
        while begin < columns:
            count = min(span, columns - begin)
            for lane in range(16):
                source = load_i64(job + at.PACK_SOURCE) + 4 * ((16 * block + lane) * columns + begin)
                for column in range(count):
                    store_f32(panel + 64 * column + 4 * lane, load_f32(source + 4 * column) * factor)
            importance = load_i64(job + at.PACK_IMPORTANCE) + 4 * begin
            pack_span(job, panel, count, importance, meta, codes)
            meta += record
            codes += count * bytes_of_column
            begin += span


@kernel
def pack_span(job, panel, columns, importance, meta, codes):
    """One span of one block, float32 (columns, 16) at `panel`: search, then write its record and codes."""
    group, span = load_i64(job + at.PACK_GROUP), load_i64(job + at.PACK_SPAN)
    steps, most = load_i64(job + at.PACK_STEPS), load_i64(job + at.PACK_MOST)
    values = panel + 64 * span
    trial = values + 64 * span
    found = trial + 128 * (span // group)
    smallest = smallest_scale(panel, columns, group, steps, most)
    least, scale = splat_f32(float32(np.inf)), splat_f32(float32(0.0))
    for number in range(5):
        trying = f16_above(smallest * splat_f32(factor_tried(number)))
        scaled_by(panel, columns, trying, values)
        error = splat_f32(float32(0.0))
        begin = int64(0)
        while begin < columns:
            best = trial + 128 * (begin // group)
            error = error + search_group(values, importance, begin, group, steps, most, best)
            begin += group
        error = (error * trying) * trying
        for vector in range(2 * (columns // group)):
            place = found + 64 * vector
            store_f32x16(place, select_less(error, least, load_f32x16(trial + 64 * vector), load_f32x16(place)))
        scale = select_less(error, least, trying, scale)
        least = minimum(error, least)
    scaled_by(panel, columns, scale, values)
    write_record(meta, scale, found, columns // group, span // group)
    top, zero = splat_f32(float32(steps)), splat_f32(float32(0.0))
    begin = int64(0)
    while begin < columns:
        inverse = splat_f32(float32(1.0)) / load_f32x16(found + 128 * (begin // group))
        offset = load_f32x16(found + 128 * (begin // group) + 64)
        for column in range(begin, begin + group):
            code = round_lanes((load_f32x16(values + 64 * column) + offset) * inverse)
            store_i32x16(values + 64 * column, round_to_int(minimum(maximum(code, zero), top)))
        begin += group
    if steps == 15:
        write_four_bits(values, columns, codes)
    else:
        write_six_bits(values, columns, codes)


@kernel
def smallest_scale(panel, columns, group, steps, most):
    """The scale at which every weight fits int8, and every group's range the steps of the largest multiplier."""
    scale = splat_f32(float32(0.0))
    begin = int64(0)
    while begin < columns:
        low, high = range_of(panel, begin, group)
        scale = maximum(high * splat_f32(float32(1 / 127)), scale)
        scale = maximum(low * splat_f32(float32(-1 / 128)), scale)
        scale = maximum((high - low) * splat_f32(float32(1.0) / float32(steps * most)), scale)
        begin += group
    return scale


@kernel
def range_of(panel, begin, group):
    """The lowest and the highest of a group's weights and 0."""
    low, high = splat_f32(float32(0.0)), splat_f32(float32(0.0))
    for column in range(begin, begin + group):
        value = load_f32x16(panel + 64 * column)
        low, high = minimum(value, low), maximum(value, high)
    return low, high


@kernel
def scaled_by(panel, columns, scale, out):
    """out = panel / scale, and 0 where the scale is 0 (a span of zeros)."""
    inverse = quotient_or_zero(splat_f32(float32(1.0)), scale)
    for column in range(columns):
        store_f32x16(out + 64 * column, load_f32x16(panel + 64 * column) * inverse)


@kernel
def search_group(values, importance, begin, group, steps, most, best):
    """The best multiplier and offset of a group, left at `best`; returns their error in units of the scale."""
    zero, one, half = splat_f32(float32(0.0)), splat_f32(float32(1.0)), splat_f32(float32(0.5))
    top = splat_f32(float32(steps))
    low, high = range_of(values, begin, group)
    nominal = round_lanes((high - low) * splat_f32(float32(1.0) / float32(steps)))
    least = splat_f32(float32(np.inf))
    for change in range(-1, 2):
        multiplier = minimum(maximum(nominal + splat_f32(float32(change)), one), splat_f32(float32(most)))
        inverse, reach = one / multiplier, top * multiplier
        bottom = maximum(reach - splat_f32(float32(127.0)), zero)
        lowest, highest = zero - low, reach - high
        for place in range(3):
            wanted = (lowest + highest) * half
            if place == 1:
                wanted = lowest
            elif place == 2:
                wanted = highest
            offset = minimum(maximum(round_lanes(wanted), bottom), splat_f32(float32(128.0)))
            error = zero
            for column in range(begin, begin + group):
                moved = load_f32x16(values + 64 * column) + offset
                code = minimum(maximum(round_lanes(moved * inverse), zero), top)
                off = code * multiplier - moved
                error = error + (off * off) * splat_f32(load_f32(importance + 4 * column))
            store_f32x16(best, select_less(error, least, multiplier, load_f32x16(best)))
            store_f32x16(best + 64, select_less(error, least, offset, load_f32x16(best + 64)))
            least = minimum(error, least)
    return least


@kernel
def write_record(meta, scale, found, count, groups):
    """Scale, multipliers and offsets of a span, of whose `groups` the first `count` exist."""
    store_f16x16(meta, scale)
    offsets = meta + 32 + 8 * groups
    for number in range(groups):
        even = int32(0)
        for lane in range(16):
            place = found + 128 * number + 4 * lane
            less, offset = int32(0), int32(0)
            if number < count:
                less, offset = int32(load_f32(place)) - int32(1), int32(load_f32(place + 64))
            if lane % 2 == 0:
                even = less
            else:
                store_i8(meta + 32 + 8 * number + lane // 2, even | less << 4)
            if groups == 1:
                store_i8(offsets + lane, offset)
            else:
                store_i8(offsets + 32 * (number // 2) + 2 * lane + number % 2, offset)


@kernel
def shifted(code, places):
    return code * splat_i32(int32(1) << int32(places))


@kernel
def write_four_bits(codes, columns, out):
    """Lines of 16 rows x 8 columns."""
    for column in range(0, columns, 8):
        line = splat_i32(0)
        for i in range(4):
            line = line + shifted(load_i32x16(codes + 64 * (column + i)), 8 * i)
            line = line + shifted(load_i32x16(codes + 64 * (column + 4 + i)), 8 * i + 4)
        store_i32x16(out, line)
        out += 64


@kernel
def write_six_bits(codes, columns, out):
    """Lines of the low four bits of 16 rows x 8 columns, twice, then one of the high two bits of all 16."""
    for column in range(0, columns, 16):
        high = splat_i32(0)
        for half in range(2):
            low = splat_i32(0)
            for j in range(2):
                for i in range(4):
                    code = load_i32x16(codes + 64 * (column + 8 * half + 4 * j + i))
                    low = low + shifted(low_bits_of_code(code), 8 * i + 4 * j)
                    high = high + shifted(high_bits_of_code(code), 8 * i + 2 * (2 * half + j))
            store_i32x16(out + 64 * half, low)
        store_i32x16(out + 128, high)
        out += 192
