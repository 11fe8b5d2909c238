"""Products on AMX tiles: 16 output rows times 16 tokens at once, for prompts and large batches.

The packed layout is what the tile unit wants: a line of int8 weights holds 16
rows times 4 columns, which is one row of its B operand; a tile of activations,
as it lies, is its A operand. Codes are unpacked to int8 (code * multiplier -
offset) once for all tokens. The tile unit sums one span, exactly; then the
float steps are those of every other tier, so the results are the same.

Cache blocking (Goto, van de Geijn 2008): `BLOCKS` blocks of rows at a time, by
chunks of `COLUMNS` columns. A chunk of one tile of activations stays in the
first-level cache while the unpacked blocks pass by from the second; float sums
wait in between in the thread's scratch.
"""

from engine.core.kernels import fields as at
from engine.core.kernels.common import block_codes, block_meta, put_activations
from engine.core.kernels.rows import activated
from engine.core.kernels.simd import (
    high_nibbles,
    int64,
    kernel,
    load_f16x16,
    load_f32x16,
    load_first_of_pairs_spread,
    load_i8x64,
    load_i64,
    load_multipliers,
    load_second_of_pairs_spread,
    load_u8x16_spread,
    low_nibbles,
    minus_bytes,
    multiplied_codes,
    prefetch_l2,
    store_f32x16,
    store_i8x64,
    store_i64,
    tile_configure,
    tile_registers,
    tile_release,
    tiles,
    with_high_bits,
)
from engine.core.operations import AMX_BLOCKS, AMX_COLUMNS, X_CHUNK, X_TOKENS
from engine.core.operations import AMX_UNIT as UNIT

# Products 16 x 16 int32, activations, weights.
_TILES = tile_registers(0, 1, 2)
tile_zero, tile_dot, tile_store = _TILES.zero, _TILES.dot, _TILES.store
tile_load_a, tile_load_b = _TILES.load_left, _TILES.load_right
_SUMS = tiles(X_TOKENS)
zero_sums, load_sums, store_sums = _SUMS.zero_sums, _SUMS.load, _SUMS.store
add_scaled_stored = _SUMS.add_scaled_stored

CONFIGURATION, PRODUCTS = 0, 64
UNPACKED = PRODUCTS + 2048
WAITING = UNPACKED + 16 * AMX_BLOCKS * AMX_COLUMNS
"""Where tile shapes, two tiles of products, the unpacked blocks and the waiting sums lie in the thread's scratch."""


@kernel
def configure(scratch, span):
    """Shapes of the three tiles: products 16 x 16, activations 16 x k, weights k / 4 x 16, k = 32 or 64."""
    bytes_of_k = min(span, 64)
    for word in range(8):
        store_i64(scratch + 8 * word, 0)
    # Palette 1; then bytes per row of each tile from byte 16, rows of each from byte 48.
    store_i64(scratch, 1)
    store_i64(scratch + 16, 64 | bytes_of_k << 16 | 64 << 32)
    store_i64(scratch + 48, 16 | 16 << 8 | (bytes_of_k // 4) << 16)
    tile_configure(scratch)


first, second, third, fourth = with_high_bits


@kernel
def put_line(out, codes, multipliers, offsets):
    store_i8x64(out, minus_bytes(multiplied_codes(codes, multipliers), offsets))


@kernel
def four_bits(codes, multipliers, offsets, out):
    """32 columns of int4 as eight lines of int8."""
    for _ in range(4):
        line = load_i8x64(codes)
        prefetch_l2(codes + 8192)
        put_line(out, low_nibbles(line), multipliers, offsets)
        put_line(out + 64, high_nibbles(line), multipliers, offsets)
        codes += 64
        out += 128


@kernel
def six_bits(codes, multipliers, offsets, out):
    """32 columns of 6-bit codes as eight lines of int8."""
    for _ in range(2):
        low, middle, high = load_i8x64(codes), load_i8x64(codes + 64), load_i8x64(codes + 128)
        for line in range(3):
            prefetch_l2(codes + 8192 + 64 * line)
        put_line(out, first(low_nibbles(low), high), multipliers, offsets)
        put_line(out + 64, second(high_nibbles(low), high), multipliers, offsets)
        put_line(out + 128, third(low_nibbles(middle), high), multipliers, offsets)
        put_line(out + 192, fourth(high_nibbles(middle), high), multipliers, offsets)
        codes += 192
        out += 256


def unpacking(columns_of_32, bytes_of_32):
    """kernel(codes, meta, columns, group, span, out): rows of a block as int8 lines, `columns` of whole spans."""

    @kernel
    def unpack(codes, meta, columns, group, span, out):
        groups = span // group
        column = int64(0)
        while column < columns:
            for index in range(min(groups, (columns - column) // group)):
                multipliers = load_multipliers(meta + 32 + 8 * index)
                place = meta + 32 + 8 * groups + index // 2 * 32
                if groups == 1:
                    offsets = load_u8x16_spread(place)
                elif index % 2 == 0:
                    offsets = load_first_of_pairs_spread(place)
                else:
                    offsets = load_second_of_pairs_spread(place)
                for _ in range(group // 32):
                    columns_of_32(codes, multipliers, offsets, out)
                    codes += bytes_of_32
                    out += 512
                column += group
            prefetch_l2(meta + 1024)
            prefetch_l2(meta + 1088)
            meta += 32 + 24 * groups

    return unpack


@kernel
def multiply_span(weights, x, column, end, step, products):
    """Exact products of columns up to `end`, of one span."""
    tile_zero()
    while column < end:
        tile_load_a(x + (column >> 6) * X_CHUNK + (column & 63), 64)
        tile_load_b(weights + 16 * column, 64)
        tile_dot()
        column += step
    tile_store(products, 64)


@kernel
def tile_product(sums, weights, scales, record, columns, span, x, x_scales, x_scale_stride, products):
    """sums + 16 tokens times `columns` of one block of rows, spans in order.

    The tile unit works on the next span while the float steps of this one are done; their products lie apart.
    """
    step = min(span, int64(64))
    other = products + 1024
    column, end = int64(0), min(span, columns)
    multiply_span(weights, x, column, end, step, products)
    while column < columns:
        column = end
        if column < columns:
            end = min(column + span, columns)
            multiply_span(weights, x, column, end, step, other)
        sums = add_scaled_stored(sums, products, load_f16x16(scales), x_scales, int64(4))
        products, other = other, products
        scales += record
        x_scales += x_scale_stride
    return sums


def amx_blocks(put_at, finish, bits):
    """Two kernels for weights of so many bits.

    product(row, state, member, low, high, first, last): blocks first..last for rows low..high, multiples of 16
    gated(row, state, member, high, first, last): for rows 0..high, units first..last of gates and of ups, and
        activation(gate) * up as the activations of the ACTIVATE operation that `activates` tells
    """
    if bits < 8:
        unpack = unpacking(four_bits, 256) if bits == 4 else unpacking(six_bits, 384)

    @kernel
    def chunk_of_blocks(row, scratch, low, high, first, count, begin, columns, out, out_stride, add):
        """Columns begin..begin + columns, whole spans, of blocks first..first + count; out: of row low, block first."""
        group, span = load_i64(row + at.MATMUL_GROUP), load_i64(row + at.MATMUL_SPAN)
        record = 32 + 24 * (span // group) if bits < 8 else int64(32)
        all_columns = load_i64(row + at.MATMUL_COLUMNS)
        x_stride, x_scale_stride = load_i64(row + at.X_STRIDE), load_i64(row + at.X_SCALE_STRIDE)
        first_span = begin // span
        if bits < 8:
            for index in range(count):
                unpack(
                    block_codes(row, first + index) + begin * 2 * bits,
                    block_meta(row, first + index) + first_span * record,
                    columns,
                    group,
                    span,
                    scratch + UNPACKED + index * 16 * AMX_COLUMNS,
                )
        for token in range(low, high, X_TOKENS):
            x = load_i64(row + at.X_CODES) + token // X_TOKENS * x_stride + (begin >> 6) * X_CHUNK
            x_scales = load_i64(row + at.X_SCALES) + 4 * token + first_span * x_scale_stride
            for index in range(count):
                waiting = scratch + WAITING + ((token - low) * AMX_BLOCKS + index * X_TOKENS) * 64
                sums = zero_sums() if begin == 0 else load_sums(waiting, int64(64))
                if bits < 8:
                    weights = scratch + UNPACKED + index * 16 * AMX_COLUMNS
                else:
                    weights = block_codes(row, first + index) + begin * 16
                scales = block_meta(row, first + index) + first_span * record
                sums = tile_product(
                    sums, weights, scales, record, columns, span, x, x_scales, x_scale_stride, scratch + PRODUCTS
                )
                if begin + columns < all_columns:
                    store_sums(waiting, int64(64), sums)
                else:
                    place = out + (token - low) * out_stride + 64 * index
                    put_at(finish, row, first + index, sums, place, out_stride, add)

    @kernel
    def all_columns(row, scratch, low, high, first, count, out, out_stride, add):
        columns = load_i64(row + at.MATMUL_COLUMNS)
        for begin in range(0, columns, AMX_COLUMNS):
            width = min(columns - begin, int64(AMX_COLUMNS))
            chunk_of_blocks(row, scratch, low, high, first, count, begin, width, out, out_stride, add)

    @kernel
    def product(row, state, member, low, high, first, last):
        scratch = load_i64(state + at.STATE_SCRATCH) + member * load_i64(state + at.STATE_SCRATCH_BYTES)
        out_stride, add = load_i64(row + at.MATMUL_OUT_STRIDE), load_i64(row + at.MATMUL_ADD)
        configure(scratch + CONFIGURATION, load_i64(row + at.MATMUL_SPAN))
        for block in range(first, last, AMX_BLOCKS):
            out = load_i64(row + at.MATMUL_OUT) + low * out_stride + 64 * block
            all_columns(row, scratch, low, high, block, min(last - block, int64(AMX_BLOCKS)), out, out_stride, add)
        tile_release()

    @kernel
    def gated(row, state, member, high, first, last):
        scratch = load_i64(state + at.STATE_SCRATCH) + member * load_i64(state + at.STATE_SCRATCH_BYTES)
        after = load_i64(row + at.MATMUL_ACTIVATES)
        width, function = load_i64(after + at.ACTIVATE_WIDTH), load_i64(after + at.ACTIVATE_FUNCTION)
        gates = scratch + WAITING + 4 * UNIT * high
        ups = gates + 4 * UNIT * high
        zero = int64(0)
        configure(scratch + CONFIGURATION, load_i64(row + at.MATMUL_SPAN))
        for unit in range(first, last):
            block = unit * AMX_BLOCKS
            all_columns(row, scratch, zero, high, block, int64(AMX_BLOCKS), gates, int64(4 * UNIT), zero)
            all_columns(row, scratch, zero, high, width // 16 + block, int64(AMX_BLOCKS), ups, int64(4 * UNIT), zero)
            for token in range(high):
                place, other = gates + 4 * UNIT * token, ups + 4 * UNIT * token
                for column in range(0, 4 * UNIT, 64):
                    value = activated(function, load_f32x16(place + column)) * load_f32x16(other + column)
                    store_f32x16(place + column, value)
                put_activations(after, token, place - 4 * UNIT * unit, width, UNIT * unit, UNIT * unit + UNIT)
        tile_release()

    return product, gated
