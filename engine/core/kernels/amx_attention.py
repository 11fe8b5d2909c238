"""Attention over int8 pages on AMX tiles: 16 query rows times 16 positions, or 16 dimensions, at once.

Queries and probabilities are int16; each is two planes of bytes, value = 256 * high + low with
low unsigned, and two tiles of products. Their exact sums are put together before the float step, so
the results are those of every other tier. Pages hold pairs of dimensions, or of positions, side by
side; the tile unit wants fours, so a page's lines are interleaved on the way, once for all rows.

Rows come in sixteens: what lies beyond the last row is computed and never looked at.
"""

from engine.core.kernels.simd import (
    int64,
    kernel,
    load_f16x16,
    load_interleaved,
    prefetch_l2,
    store_i8x64,
    store_i64,
    tile_configure,
    tile_registers,
    tile_release,
    tiles,
)
from engine.core.operations import CHUNK_TOKENS, PAGE_TOKENS

# Products 16 x 16 int32, rows of queries or probabilities, and the keys or values that both planes share.
_HIGH, _LOW = tile_registers(0, 1, 2), tile_registers(3, 4, 2)
high_zero, high_left, high_dot, high_store = _HIGH.zero, _HIGH.load_left, _HIGH.dot, _HIGH.store
low_zero, low_left, low_dot, low_store = _LOW.zero, _LOW.load_left, _LOW.dot_unsigned, _LOW.store
load_right = _HIGH.load_right

_ROWS = tiles(16)
zero_sums, store_sums = _ROWS.zero_sums, _ROWS.store
add_scaled_planes, store_scaled_planes = _ROWS.add_scaled_planes, _ROWS.store_scaled_planes

CONFIGURATION, PRODUCTS = 0, 64
WORK_BYTES = PRODUCTS + 2048
"""Of scratch for the tile shapes and the two tiles of products."""


@kernel
def configure(work, depth):
    """Shapes of the tiles for products over `depth` bytes: 16, 32 or 64."""
    for word in range(8):
        store_i64(work + 8 * word, 0)
    # Palette 1; then bytes per row of each tile from byte 16, rows of each from byte 48.
    store_i64(work, 1)
    store_i64(work + 16, 64 | depth << 16 | 64 << 32 | 64 << 48)
    store_i64(work + 24, depth)
    store_i64(work + 48, 16 | 16 << 8 | (depth // 4) << 16 | 16 << 24 | 16 << 32)
    tile_configure(work)


@kernel
def interleave(source, after, line_bytes, quads, width, out):
    """Lines of `width` pairs to fours: out (width / 16, quads, 64 bytes) for the tile unit's right operand.

    after: what will be wanted next, asked for in advance
    """
    for quad in range(quads):
        first = source + 2 * quad * line_bytes
        for line in range(0, 2 * line_bytes, 64):
            prefetch_l2(after + 2 * quad * line_bytes + line)
        for block in range(width // 16):
            line = load_interleaved(first + 32 * block, first + line_bytes + 32 * block)
            store_i8x64(out + 64 * (block * quads + quad), line)


@kernel
def page_scores(rows, queries, scales, place, after, head_dim, group, work, keys, out, out_stride):
    """Scores of all rows with the 64 positions of one page.

    queries  int8 planes (2, rows, head_dim), high first; rows a multiple of 16
    scales   float32 (head_dim / group, rows)
    keys     scratch for the page's keys, 64 * head_dim bytes
    """
    groups = head_dim // group
    interleave(place, after, 2 * PAGE_TOKENS, head_dim // 4, PAGE_TOKENS, keys)
    low_plane = rows * head_dim
    for row in range(0, rows, 16):
        for block in range(PAGE_TOKENS // 16):
            sums = zero_sums()
            for number in range(groups):
                high_zero()
                low_zero()
                left = queries + row * head_dim + number * group
                high_left(left, head_dim)
                load_right(keys + 16 * (block * head_dim + number * group), 64)
                high_dot()
                low_left(left + low_plane, head_dim)
                low_dot()
                high_store(work + PRODUCTS, 64)
                low_store(work + PRODUCTS + 1024, 64)
                key_scales = place + head_dim * PAGE_TOKENS + 2 * (number * PAGE_TOKENS + 16 * block)
                at_scale = scales + 4 * (number * rows + row)
                sums = add_scaled_planes(sums, work + PRODUCTS, load_f16x16(key_scales), at_scale, int64(4))
            store_sums(out + row * out_stride + 64 * block, out_stride, sums)


@kernel
def group_outputs(rows, planes, values, count, head_dim, first, width, scales, work, out, out_stride):
    """Dimensions first..first + width of the outputs of all rows over the pages of a chunk.

    planes  uint8 (rows, 2, CHUNK_TOKENS): high bytes of the int16 probabilities, then low ones
    values  interleaved, 64 * head_dim bytes a page
    scales  float32 (rows,)
    """
    for row in range(0, rows, 16):
        for block in range(first // 16, (first + width) // 16):
            high_zero()
            low_zero()
            for page in range(count):
                left = planes + 2 * CHUNK_TOKENS * row + PAGE_TOKENS * page
                high_left(left, 2 * CHUNK_TOKENS)
                load_right(values + page * PAGE_TOKENS * head_dim + 1024 * block, 64)
                high_dot()
                low_left(left + CHUNK_TOKENS, 2 * CHUNK_TOKENS)
                low_dot()
            high_store(work + PRODUCTS, 64)
            low_store(work + PRODUCTS + 1024, 64)
            store_scaled_planes(out + row * out_stride + 64 * block, out_stride, work + PRODUCTS, scales + 4 * row)


@kernel
def release():
    tile_release()
