"""What several kernels share: reading fields, splitting work, rows of the batch, quantising activations."""

from engine.core.kernels import fields as at
from engine.core.kernels.simd import (
    F32,
    F64,
    _pointer,
    absolute,
    float32,
    int64,
    kernel,
    load_f32x16,
    load_i32,
    load_i64,
    max_lanes,
    maximum,
    operation,
    round_to_int,
    splat_f32,
    splat_i32,
    store_f32,
    store_f32x16,
    store_i32,
    store_i32_as_i8,
    sum_int_lanes,
)
from engine.core.operations import RowSet

TOKENS, WANTED, GATHERED = int(RowSet.TOKENS), int(RowSet.WANTED), int(RowSet.GATHERED)


@operation(float32, int64)
def load_float(builder, address):
    """A field that carries the bits of a float64."""
    return builder.fptrunc(builder.load(_pointer(builder, address), typ=F64, align=8), F32)


@kernel
def share_first(units, member, members):
    """The first of the contiguous run of units that is this thread's."""
    return units * member // members


@kernel
def batch_rows(row, state):
    """How many rows the operation works on."""
    rows = load_i64(row + at.ROWS)
    if rows == WANTED:
        return load_i64(state + at.STATE_WANTED)
    if rows == TOKENS:
        return load_i64(state + at.STATE_TOKENS)
    return load_i64(state + at.STATE_ROUTED)


@kernel
def source_row(row, state, index):
    """Where row `index` of the operation lies in a buffer of all the batch's tokens."""
    rows = load_i64(row + at.ROWS)
    if rows == WANTED:
        return int64(load_i32(load_i64(state + at.STATE_WANTED_ROWS) + 4 * index))
    if rows == GATHERED:
        return int64(load_i32(load_i64(state + at.STATE_ROUTED_TOKENS) + 4 * index))
    return index


TINIEST = float32(2.0**-100)
"""Below this a maximum counts as zero: its reciprocal, times 32767, would leave the range of float32."""


@kernel
def significant(size):
    """A maximum to divide by, or exactly 0."""
    return size if size >= TINIEST else float32(0.0)


@kernel
def quantise_groups(source, width, first, last, group, codes, scales, sums):
    """Columns first..last of one row to int8, a scale and a sum per group.

    source          float32 (width,)       columns from `width` on count as zero
    codes           int8    (last - first,) round(x * (127 / max |x|)), written at their column
    scales, sums    float32, int32 (groups,)  max |x| / 127; the sum of the codes

    first and last are multiples of the group, the group one of 16.
    """
    for index in range(first // group, last // group):
        start = index * group
        largest = splat_f32(float32(0.0))
        for column in range(start, min(start + group, width), 16):
            largest = maximum(absolute(load_f32x16(source + 4 * column)), largest)
        size = significant(max_lanes(largest))
        factor = float32(127.0) / size if size > float32(0.0) else float32(0.0)
        factors = splat_f32(factor)
        total = splat_i32(0)
        for column in range(start, start + group, 16):
            if column < width:
                code = round_to_int(load_f32x16(source + 4 * column) * factors)
            else:
                code = splat_i32(0)
            store_i32_as_i8(codes + column, code)
            total = total + code
        store_f32(scales + 4 * index, size / float32(127.0))
        store_i32(sums + 4 * index, sum_int_lanes(total))


@kernel
def put_activations(row, index, source, width, first, last):
    """Columns first..last of float32 `source` as the operation's activation row `index`.

    Quantised by group, or copied when the weights that will meet them are floats.
    """
    group = load_i64(row + at.X_GROUP)
    codes = load_i64(row + at.X_CODES) + index * load_i64(row + at.X_STRIDE)
    if group == 0:
        for column in range(first, min(last, width), 16):
            store_f32x16(codes + 4 * column, load_f32x16(source + 4 * column))
        return
    offset = index * load_i64(row + at.X_SCALE_STRIDE)
    scales = load_i64(row + at.X_SCALES) + offset
    sums = load_i64(row + at.X_SUMS) + offset
    quantise_groups(source, width, first, last, group, codes, scales, sums)
