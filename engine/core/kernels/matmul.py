"""Products of packed weights with the batch's activations.

Weights lie in blocks of 16 rows (`engine.core.quant`), so one vector holds one
column, or four, of 16 output rows: no sum ever crosses lanes. A tile of tokens
shares each loaded line of weights. The order of float operations for one
output is fixed and does not depend on the tile: groups in order for int4 and
int8, four chains of columns for floats.
"""

from engine.core.kernels import amx
from engine.core.kernels import fields as at
from engine.core.kernels.common import batch_rows, load_float, share_first
from engine.core.kernels.simd import (
    BYTES_START,
    HAS_AMX,
    HAS_VNNI512,
    NIBBLE_CHUNK,
    high_nibbles,
    int64,
    kernel,
    load_bf16x16,
    load_f16x16,
    load_f32x16,
    load_i8x64,
    load_i64,
    load_nibbles,
    low_nibbles,
    prefetch_l2,
    splat_f32,
    tiles,
    to_float,
)
from engine.core.operations import WeightKind

Q4, Q8, F16, BF16, F32 = (int(kind) for kind in WeightKind)
AHEAD = 8192
"""Bytes between a line of weights and the one asked for in advance; measured on DRAM-bound products."""


def q4_tile(tile):
    """Tokens of one tile times one block of int4 rows: kernel(codes, meta, groups, group, x, ...) -> sums."""
    zero_sums, zero_integers, zero_chunk = tile.zero_sums, tile.zero_integers, tile.zero_chunk
    dot, widened, add_scaled = tile.dot_nibbles, tile.widened, tile.add_scaled_from_zero

    @kernel
    def product(codes, meta, groups, group, x, x_stride, x_scales, x_sums, x_scale_stride):
        sums = zero_sums()
        chunk_columns = min(group, NIBBLE_CHUNK)
        for index in range(groups):
            dots = zero_integers()
            for _ in range(group // chunk_columns):
                chunk = zero_chunk()
                for _ in range(chunk_columns // 32):
                    for _ in range(4):
                        line = load_i8x64(codes)
                        prefetch_l2(codes + AHEAD)
                        chunk = dot(chunk, low_nibbles(line), x, x_stride)
                        chunk = dot(chunk, high_nibbles(line), x + 4, x_stride)
                        codes += 64
                        x += 8
                dots = widened(dots, chunk)
            scale = load_f16x16(meta)
            zero_point = to_float(load_nibbles(meta + 32))
            meta += 40
            sums = add_scaled(sums, dots, scale, zero_point, x_scales + 4 * index, x_sums + 4 * index, x_scale_stride)
        return sums

    return product


def q8_tile(tile):
    """Tokens of one tile times one block of int8 rows."""
    zero_sums, start, dot, add_scaled = tile.zero_sums, tile.sums_times, tile.dot_bytes, tile.add_scaled

    @kernel
    def product(codes, meta, groups, group, x, x_stride, x_scales, x_sums, x_scale_stride):
        sums = zero_sums()
        for index in range(groups):
            dots = start(BYTES_START, x_sums + 4 * index, x_scale_stride)
            for _ in range(group // 32):
                for _ in range(8):
                    prefetch_l2(codes + AHEAD)
                    dots = dot(dots, load_i8x64(codes), x, x_stride)
                    codes += 64
                    x += 4
            sums = add_scaled(sums, dots, load_f16x16(meta), x_scales + 4 * index, x_scale_stride)
            meta += 32
        return sums

    return product


def float_tile(tile, load, size):
    """Tokens of one tile times one block of float rows: four chains by column, joined (0 + 1) + (2 + 3)."""
    zero_sums, add_products, add = tile.zero_sums, tile.add_products, tile.add

    @kernel
    def product(values, columns, x, x_stride):
        first, second, third, fourth = zero_sums(), zero_sums(), zero_sums(), zero_sums()
        for _ in range(columns // 4):
            prefetch_l2(values + AHEAD)
            first = add_products(first, load(values), x, x_stride)
            second = add_products(second, load(values + 16 * size), x + 4, x_stride)
            third = add_products(third, load(values + 32 * size), x + 8, x_stride)
            fourth = add_products(fourth, load(values + 48 * size), x + 12, x_stride)
            values += 64 * size
            x += 16
        return add(add(first, second), add(third, fourth))

    return product


def finished(tile):
    """What follows every product: the power of two, the bias, and the place it goes to."""
    multiplied, shifted, store, store_added = tile.multiplied, tile.shifted, tile.store, tile.store_added

    @kernel
    def finish(sums, factor, bias, out, out_stride, add):
        sums = multiplied(sums, splat_f32(factor))
        if bias != 0:
            sums = shifted(sums, load_f32x16(bias))
        if add:
            store_added(out, out_stride, sums)
        else:
            store(out, out_stride, sums)

    return finish


def integer_rows(make, tile, panel_divisor, record_bytes):
    """All blocks of a thread for `tile.count` tokens of an integer format."""
    product, finish = make(tile), finished(tile)

    @kernel
    def rows(row, block, token):
        columns, group = load_i64(row + at.MATMUL_COLUMNS), load_i64(row + at.MATMUL_GROUP)
        groups = columns // group
        codes = load_i64(row + at.MATMUL_PANELS) + block * (columns // panel_divisor) * 64
        meta = load_i64(row + at.MATMUL_META) + block * groups * record_bytes
        x_stride, x_scale_stride = load_i64(row + at.X_STRIDE), load_i64(row + at.X_SCALE_STRIDE)
        x = load_i64(row + at.X_CODES) + token * x_stride
        x_scales = load_i64(row + at.X_SCALES) + token * x_scale_stride
        x_sums = load_i64(row + at.X_SUMS) + token * x_scale_stride
        sums = product(codes, meta, groups, group, x, x_stride, x_scales, x_sums, x_scale_stride)
        put(finish, row, block, token, sums)

    return rows


def float_rows(load, size, tile):
    """All blocks of a thread for `tile.count` tokens of a float format."""
    product, finish = float_tile(tile, load, size), finished(tile)

    @kernel
    def rows(row, block, token):
        columns = load_i64(row + at.MATMUL_COLUMNS)
        values = load_i64(row + at.MATMUL_PANELS) + block * columns * 16 * size
        x_stride = load_i64(row + at.X_STRIDE)
        x = load_i64(row + at.X_CODES) + token * x_stride
        put(finish, row, block, token, product(values, columns, x, x_stride))

    return rows


@kernel
def put(finish, row, block, token, sums):
    """Store the finished tile of `block` and `token`."""
    bias = load_i64(row + at.MATMUL_BIAS)
    out_stride = load_i64(row + at.MATMUL_OUT_STRIDE)
    out = load_i64(row + at.MATMUL_OUT) + token * out_stride + block * 64
    finish(
        sums,
        load_float(row + at.MATMUL_FACTOR),
        bias + block * 64 if bias != 0 else int64(0),
        out,
        out_stride,
        load_i64(row + at.MATMUL_ADD),
    )


def blocks_of(make_rows, sizes):
    """kernel(row, start, tokens, first, last): blocks first..last for tokens start..tokens, in tiles of these sizes."""
    large, medium, small = (make_rows(tiles(count)) for count in sizes)
    large_count, medium_count = sizes[0], sizes[1]

    @kernel
    def product(row, start, tokens, first, last):
        for block in range(first, last):
            token = start
            while tokens - token >= large_count:
                large(row, block, token)
                token += large_count
            while tokens - token >= medium_count:
                medium(row, block, token)
                token += medium_count
            while token < tokens:
                small(row, block, token)
                token += 1

    return product


TILES = (8, 3, 1) if HAS_VNNI512 else (6, 2, 1)
"""Tokens of a tile: what the registers hold beside a line of weights; measured."""

q4_blocks = blocks_of(lambda tile: integer_rows(q4_tile, tile, 8, 40), TILES)
q8_blocks = blocks_of(lambda tile: integer_rows(q8_tile, tile, 4, 32), TILES)
f16_blocks = blocks_of(lambda tile: float_rows(load_f16x16, 2, tile), (4, 2, 1))
bf16_blocks = blocks_of(lambda tile: float_rows(load_bf16x16, 2, tile), (4, 2, 1))
f32_blocks = blocks_of(lambda tile: float_rows(load_f32x16, 4, tile), (4, 2, 1))


if HAS_AMX:
    _finish = finished(tiles(amx.TOKENS))
    q4_amx, q8_amx = amx.amx_blocks(put, _finish, True), amx.amx_blocks(put, _finish, False)


@kernel
def matmul(row, state, member, members):
    """out[t] (+)= (weights @ x[t]) * factor + bias, for this thread's blocks of 16 rows."""
    blocks = load_i64(row + at.MATMUL_BLOCKS)
    first, last = share_first(blocks, member, members), share_first(blocks, member + 1, members)
    products(row, state, member, batch_rows(row, state), first, last)


@kernel
def products(row, state, member, tokens, first, last):
    """Blocks first..last of a product, for the first `tokens` rows of its activations."""
    kind = load_i64(row + at.MATMUL_KIND)
    start = int64(0)
    if HAS_AMX and kind <= Q8 and tokens >= amx.TOKENS:
        start = tokens // amx.TOKENS * amx.TOKENS
        if kind == Q4:
            q4_amx(row, state, member, start, first, last)
        else:
            q8_amx(row, state, member, start, first, last)
    if kind == Q4:
        q4_blocks(row, start, tokens, first, last)
    elif kind == Q8:
        q8_blocks(row, start, tokens, first, last)
    elif kind == F16:
        f16_blocks(row, start, tokens, first, last)
    elif kind == BF16:
        bf16_blocks(row, start, tokens, first, last)
    else:
        f32_blocks(row, start, tokens, first, last)
