"""What several kernels share: reading fields, splitting work, rows of the batch, quantising activations."""

from engine.core.kernels import fields as at
from engine.core.kernels.simd import (
    F32,
    F64,
    _pointer,
    absolute,
    float32,
    int32,
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
    store_i16,
    store_i32,
    store_i32_as_i8,
    sum_int_lanes,
)
from engine.core.operations import X_CHUNK, X_TOKENS, RowSet, WeightKind

TOKENS, WANTED, GATHERED = int(RowSet.TOKENS), int(RowSet.WANTED), int(RowSet.GATHERED)
Q4, Q6, Q8 = int(WeightKind.Q4), int(WeightKind.Q6), int(WeightKind.Q8)


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
def block_codes(row, block):
    """Where the codes of a block of rows begin: `columns` of 4, 6 or 8 bits for 16 rows."""
    kind = load_i64(row + at.MATMUL_KIND)
    bytes_of_column = 8 if kind == Q4 else 12 if kind == Q6 else 16
    return load_i64(row + at.MATMUL_PANELS) + block * load_i64(row + at.MATMUL_COLUMNS) * bytes_of_column


@kernel
def block_meta(row, block):
    """Where the records of a block of rows begin, one for each span."""
    columns, span = load_i64(row + at.MATMUL_COLUMNS), load_i64(row + at.MATMUL_SPAN)
    record = 32
    if load_i64(row + at.MATMUL_KIND) < Q8:
        record += 24 * (span // load_i64(row + at.MATMUL_GROUP))
    return load_i64(row + at.MATMUL_META) + block * ((columns + span - 1) // span) * record


@kernel
def quantise_spans(source, width, first, last, span, group, codes, scales, sums, stride):
    """Columns first..last of one row to int8, a scale per span and a sum per group.

    source   float32 (width,)   columns from `width` on count as zero
    codes    int8, the token's place in its tile of activations: round(x * (127 / max |x|))
    scales   float32 at every `stride` bytes, one a span: max |x| / 127
    sums     words at every `stride` bytes: minus the sum of the codes of two groups as int16, of a
             group that is a whole span as int32

    first is a multiple of the span, last too or the end of the row.
    """
    groups = span // group
    words = max(groups // 2, int64(1))
    start = int64(first)
    while start < last:
        index, end = start // span, min(start + span, last)
        largest = splat_f32(float32(0.0))
        for column in range(start, min(end, width), 16):
            largest = maximum(absolute(load_f32x16(source + 4 * column)), largest)
        size = significant(max_lanes(largest))
        factor = float32(127.0) / size if size > float32(0.0) else float32(0.0)
        factors = splat_f32(factor)
        store_f32(scales + index * stride, size / float32(127.0))
        number = index * words * 2
        begin = int64(start)
        while begin < end:
            total = splat_i32(0)
            for column in range(begin, begin + group, 16):
                if column < width:
                    code = round_to_int(load_f32x16(source + 4 * column) * factors)
                else:
                    code = splat_i32(0)
                store_i32_as_i8(codes + (column >> 6) * X_CHUNK + (column & 63), code)
                total = total + code
            less = int32(-sum_int_lanes(total))
            if groups == 1:
                store_i32(sums + index * stride, less)
            else:
                store_i16(sums + number // 2 * stride + number % 2 * 2, less)
            number += 1
            begin += group
        start += span


@kernel
def put_activations(row, index, source, width, first, last):
    """Columns first..last of float32 `source` as the operation's activation row `index`.

    Quantised by span, or copied when the weights that will meet them are floats.
    """
    span = load_i64(row + at.X_SPAN)
    codes = load_i64(row + at.X_CODES)
    if span == 0:
        codes += index * load_i64(row + at.X_STRIDE)
        for column in range(first, min(last, width), 16):
            store_f32x16(codes + 4 * column, load_f32x16(source + 4 * column))
        return
    codes += index // X_TOKENS * load_i64(row + at.X_STRIDE) + index % X_TOKENS * 64
    quantise_spans(
        source,
        width,
        first,
        last,
        span,
        load_i64(row + at.X_GROUP),
        codes,
        load_i64(row + at.X_SCALES) + 4 * index,
        load_i64(row + at.X_SUMS) + 4 * index,
        load_i64(row + at.X_SCALE_STRIDE),
    )
