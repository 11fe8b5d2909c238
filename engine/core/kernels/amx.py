"""Products on AMX tiles: 16 output rows times 16 tokens at once, for prompts and large batches.

The packed layout is what the tile unit wants: a line of int8 weights holds 16
rows times 4 columns, which is one row of its B operand; activations, as they
lie, are its A operand. int4 codes are unpacked to int8 (less their zero point)
once per block of rows and used for all tokens. The tile sums one group, exactly;
then the float steps are those of every other tier, so the results are the same.
"""

from engine.core.kernels import fields as at
from engine.core.kernels.simd import (
    high_nibbles,
    int64,
    kernel,
    load_f16x16,
    load_i8x64,
    load_i64,
    load_nibbles,
    low_nibbles,
    minus_bytes,
    prefetch_l2,
    spread_bytes,
    store_i8x64,
    store_i64,
    tile_configure,
    tile_dot,
    tile_load_a,
    tile_load_b,
    tile_release,
    tile_store,
    tile_zero,
    tiles,
)

TOKENS = 16
_SUMS = tiles(TOKENS)
zero_sums, add_scaled_stored = _SUMS.zero_sums, _SUMS.add_scaled_stored

CONFIGURATION, PRODUCTS = 0, 64
UNPACKED = PRODUCTS + 1024
"""Where the tile shapes, one tile of products and a block's weights as int8 lie in the thread's scratch."""


@kernel
def configure(scratch, group):
    """Shapes of the three tiles: products 16 x 16, activations 16 x k, weights k / 4 x 16, k = 32 or 64."""
    bytes_of_k = min(group, 64)
    for word in range(8):
        store_i64(scratch + 8 * word, 0)
    # Palette 1; then bytes per row of each tile from byte 16, rows of each from byte 48.
    store_i64(scratch, 1)
    store_i64(scratch + 16, 64 | bytes_of_k << 16 | 64 << 32)
    store_i64(scratch + 48, 16 | 16 << 8 | (bytes_of_k // 4) << 16)
    tile_configure(scratch)


@kernel
def unpack(codes, meta, columns, group, out):
    """A block of int4 rows as int8 lines: code - zero point."""
    lines = group // 8
    for _ in range(columns // group):
        zeros = spread_bytes(load_nibbles(meta + 32))
        meta += 40
        for _ in range(lines):
            line = load_i8x64(codes)
            prefetch_l2(codes + 8192)
            store_i8x64(out, minus_bytes(low_nibbles(line), zeros))
            store_i8x64(out + 64, minus_bytes(high_nibbles(line), zeros))
            codes += 64
            out += 128


@kernel
def tile_product(weights, scales, scale_stride, groups, group, x, x_stride, x_scales, x_scale_stride, products):
    """16 tokens times one block of rows: tile of float32 sums, groups in order."""
    sums = zero_sums()
    step = min(group, 64)
    for index in range(groups):
        tile_zero()
        for _ in range(group // step):
            tile_load_a(x, x_stride)
            tile_load_b(weights, 64)
            tile_dot()
            x += step
            weights += 16 * step
        tile_store(products, 64)
        sums = add_scaled_stored(sums, products, load_f16x16(scales), x_scales + 4 * index, x_scale_stride)
        scales += scale_stride
    return sums


def amx_blocks(put, finish, four_bits):
    """kernel(row, state, member, tokens, first, last): blocks first..last for the first `tokens`, a multiple of 16."""
    record = 40 if four_bits else 32

    @kernel
    def product(row, state, member, tokens, first, last):
        columns, group = load_i64(row + at.MATMUL_COLUMNS), load_i64(row + at.MATMUL_GROUP)
        groups = columns // group
        scratch = load_i64(state + at.STATE_SCRATCH) + member * load_i64(state + at.STATE_SCRATCH_BYTES)
        x_stride, x_scale_stride = load_i64(row + at.X_STRIDE), load_i64(row + at.X_SCALE_STRIDE)
        configure(scratch + CONFIGURATION, group)
        for block in range(first, last):
            scales = load_i64(row + at.MATMUL_META) + block * groups * record
            if four_bits:
                codes = load_i64(row + at.MATMUL_PANELS) + block * columns * 8
                weights = scratch + UNPACKED
                unpack(codes, scales, columns, group, weights)
            else:
                weights = load_i64(row + at.MATMUL_PANELS) + block * columns * 16
            token = int64(0)
            while token < tokens:
                sums = tile_product(
                    weights,
                    scales,
                    record,
                    groups,
                    group,
                    load_i64(row + at.X_CODES) + token * x_stride,
                    x_stride,
                    load_i64(row + at.X_SCALES) + token * x_scale_stride,
                    x_scale_stride,
                    scratch + PRODUCTS,
                )
                put(finish, row, block, token, sums)
                token += TOKENS
        tile_release()

    return product
