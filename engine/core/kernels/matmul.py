"""Products of packed weights with the batch's activations.

Weights lie in blocks of 16 rows (`engine.core.quant`), so one vector holds one
column, or four, of 16 output rows: no sum ever crosses lanes. A tile of tokens
shares each loaded line of weights. The order of float operations for one
output is fixed and does not depend on the tile: spans in order for integer
weights, four chains of columns for floats.
"""

from engine.core.kernels import amx
from engine.core.kernels import fields as at
from engine.core.kernels.common import batch_rows, block_codes, block_meta, load_float, share_first
from engine.core.kernels.simd import (
    BYTES_START,
    HAS_AMX,
    HAS_VNNI,
    HAS_VNNI512,
    atomic_add,
    high_nibbles,
    int64,
    kernel,
    load_bf16x16,
    load_f16x16,
    load_f32x16,
    load_i8x64,
    load_i64,
    load_multipliers,
    load_u8x16_as_pairs,
    load_u8x32_as_i16,
    low_nibbles,
    multiplied_codes,
    prefetch_l2,
    splat_f32,
    tiles,
    with_high_bits,
)
from engine.core.operations import AMX_BLOCKS, AMX_UNIT, X_CHUNK, X_TOKENS, WeightKind

Q4, Q6, Q8, F16, BF16, F32 = (int(kind) for kind in WeightKind)
AHEAD, META_AHEAD = 8192, 1024
"""Bytes between a line of weights, or a span's record, and the one asked for in advance; measured on DRAM.

Not every machine fetches ahead by itself: without these, a product of one token takes half as long again."""


X_TOKEN, X_WORD = int64(64), int64(4)
"""Bytes from one token of a tile of activations to the next: of its codes, of its scales and sums."""


@kernel
def x_place(x, column):
    """Where a column's codes begin in a tile of activations."""
    return x + (column >> 6) * X_CHUNK + (column & 63)


@kernel
def words_of(group, span):
    """Words of activation sums for one span: two groups share one, a single group has one."""
    return max(span // group // 2, int64(1))


def q4_columns(tile, use):
    """kernel(sums, codes, x, multipliers): 32 columns of int4 codes."""

    @kernel
    def columns(sums, codes, x, multipliers):
        for _ in range(4):
            line = load_i8x64(codes)
            prefetch_l2(codes + AHEAD)
            sums = use(sums, low_nibbles(line), x, multipliers)
            sums = use(sums, high_nibbles(line), x + 4, multipliers)
            codes += 64
            x += 8
        return sums

    return columns


def q6_columns(tile, use):
    """kernel(sums, codes, x, multipliers): 32 columns of 6-bit codes."""
    first, second, third, fourth = with_high_bits

    @kernel
    def columns(sums, codes, x, multipliers):
        for _ in range(2):
            low, middle, high = load_i8x64(codes), load_i8x64(codes + 64), load_i8x64(codes + 128)
            for line in range(3):
                prefetch_l2(codes + AHEAD + 64 * line)
            sums = use(sums, first(low_nibbles(low), high), x, multipliers)
            sums = use(sums, second(high_nibbles(low), high), x + 4, multipliers)
            sums = use(sums, third(low_nibbles(middle), high), x + 8, multipliers)
            sums = use(sums, fourth(high_nibbles(middle), high), x + 12, multipliers)
            codes += 192
            x += 16
        return sums

    return columns


def coded_tile(tile, make_columns, bytes_of_32, sums_at_once):
    """Tokens of one tile times one block of coded rows: kernel(codes, meta, columns, group, span, x, ...) -> sums.

    sums_at_once: how many products of four columns int16 sums can hold, where there is no VNNI: 8 of int4 codes
    (15 * 127 * 2 each), 2 of 6-bit ones (63 * 127 * 2); every sum then is multiplied and widened.
    """
    zero_sums, zero_integers, zero_chunk = tile.zero_sums, tile.zero_integers, tile.zero_chunk
    dot, add_multiplied, add_pairs, add_scaled = (
        tile.dot_codes,
        tile.add_multiplied,
        tile.dot_halfwords,
        tile.add_scaled,
    )

    if HAS_VNNI:

        @kernel
        def use(sums, codes, x, multipliers):
            return dot(sums, multiplied_codes(codes, multipliers), x, X_TOKEN)

        columns_of_32 = make_columns(tile, use)
    elif sums_at_once >= 8:

        @kernel
        def gather(sums, codes, x, multipliers):
            return dot(sums, codes, x, X_TOKEN)

        gathered = make_columns(tile, gather)

        @kernel
        def columns_of_32(sums, codes, x, multipliers):
            return add_multiplied(sums, gathered(zero_chunk(), codes, x, multipliers), multipliers)

    else:

        @kernel
        def use(sums, codes, x, multipliers):
            return add_multiplied(sums, dot(zero_chunk(), codes, x, X_TOKEN), multipliers)

        columns_of_32 = make_columns(tile, use)

    @kernel
    def product(codes, meta, columns, group, span, x, x_scales, x_sums, x_stride):
        sums = zero_sums()
        groups, words = span // group, words_of(group, span)
        column = int64(0)
        while column < columns:
            dots = zero_integers()
            offsets = meta + 32 + 8 * groups
            for word in range(words):
                pairs = load_u8x32_as_i16(offsets + 32 * word) if groups > 1 else load_u8x16_as_pairs(offsets)
                dots = add_pairs(dots, pairs, x_sums, X_WORD)
                x_sums += x_stride
            multipliers = meta + 32
            end = min(column + span, columns)
            while column < end:
                multiplier = load_multipliers(multipliers)
                multipliers += 8
                for _ in range(group // 32):
                    dots = columns_of_32(dots, codes, x_place(x, column), multiplier)
                    codes += bytes_of_32
                    column += 32
            sums = add_scaled(sums, dots, load_f16x16(meta), x_scales, X_WORD)
            prefetch_l2(meta + META_AHEAD)
            prefetch_l2(meta + META_AHEAD + 64)
            meta += 32 + 24 * groups
            x_scales += x_stride
        return sums

    return product


def q8_tile(tile):
    """Tokens of one tile times one block of int8 rows; a span is one group."""
    zero_sums, start, dot, add_scaled = tile.zero_sums, tile.sums_times, tile.dot_bytes, tile.add_scaled

    @kernel
    def product(codes, meta, columns, group, span, x, x_scales, x_sums, x_stride):
        sums = zero_sums()
        column = int64(0)
        while column < columns:
            dots = start(BYTES_START, x_sums, X_WORD)
            for _ in range(span // 32):
                place = x_place(x, column)
                for _ in range(8):
                    prefetch_l2(codes + AHEAD)
                    dots = dot(dots, load_i8x64(codes), place, X_TOKEN)
                    codes += 64
                    place += 4
                column += 32
            sums = add_scaled(sums, dots, load_f16x16(meta), x_scales, X_WORD)
            prefetch_l2(meta + META_AHEAD)
            meta += 32
            x_scales += x_stride
            x_sums += x_stride
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


def integer_rows(make, tile):
    """All blocks of a thread for `tile.count` tokens, which lie in one tile of activations, of an integer format."""
    product, finish = make(tile), finished(tile)

    @kernel
    def rows(row, block, token):
        columns, group = load_i64(row + at.MATMUL_COLUMNS), load_i64(row + at.MATMUL_GROUP)
        span = load_i64(row + at.MATMUL_SPAN)
        codes = block_codes(row, block)
        meta = block_meta(row, block)
        x = load_i64(row + at.X_CODES) + token // X_TOKENS * load_i64(row + at.X_STRIDE) + token % X_TOKENS * X_TOKEN
        x_scales = load_i64(row + at.X_SCALES) + 4 * token
        x_sums = load_i64(row + at.X_SUMS) + 4 * token
        stride = load_i64(row + at.X_SCALE_STRIDE)
        sums = product(codes, meta, columns, group, span, x, x_scales, x_sums, stride)
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
    out_stride = load_i64(row + at.MATMUL_OUT_STRIDE)
    out = load_i64(row + at.MATMUL_OUT) + token * out_stride + block * 64
    put_at(finish, row, block, sums, out, out_stride, load_i64(row + at.MATMUL_ADD))


@kernel
def put_at(finish, row, block, sums, out, out_stride, add):
    """Store the finished tile of `block` at a place of its own."""
    bias = load_i64(row + at.MATMUL_BIAS)
    finish(
        sums,
        load_float(row + at.MATMUL_FACTOR),
        bias + block * 64 if bias != 0 else int64(0),
        out,
        out_stride,
        add,
    )


def blocks_of(make_rows, sizes):
    """kernel(row, start, tokens, first, last): blocks first..last for tokens start..tokens, in tiles of these sizes."""
    large, medium, small = (make_rows(tiles(count)) for count in sizes)
    large_count, medium_count = sizes[0], sizes[1]

    @kernel
    def product(row, start, tokens, first, last):
        for block in range(first, last):
            token = start
            while token < tokens:
                # No tile of tokens crosses from one tile of activations into the next.
                end = min(token // X_TOKENS * X_TOKENS + X_TOKENS, tokens)
                while end - token >= large_count:
                    large(row, block, token)
                    token += large_count
                while end - token >= medium_count:
                    medium(row, block, token)
                    token += medium_count
                while token < end:
                    small(row, block, token)
                    token += 1

    return product


UNIT_BYTES = 32768
"""About how many bytes of int4 codes a member takes at once of a product's common part."""

TILES = (8, 3, 1) if HAS_VNNI512 else (6, 2, 1)
"""Tokens of a tile: what the registers hold beside a line of weights; measured."""

q4_blocks = blocks_of(lambda tile: integer_rows(lambda t: coded_tile(t, q4_columns, 256, 8), tile), TILES)
q6_blocks = blocks_of(lambda tile: integer_rows(lambda t: coded_tile(t, q6_columns, 384, 2), tile), TILES)
q8_blocks = blocks_of(lambda tile: integer_rows(q8_tile, tile), TILES)
f16_blocks = blocks_of(lambda tile: float_rows(load_f16x16, 2, tile), (4, 2, 1))
bf16_blocks = blocks_of(lambda tile: float_rows(load_bf16x16, 2, tile), (4, 2, 1))
f32_blocks = blocks_of(lambda tile: float_rows(load_f32x16, 4, tile), (4, 2, 1))


if HAS_AMX:
    _finish = finished(tiles(X_TOKENS))
    (q4_amx, q4_gated), (q6_amx, q6_gated), (q8_amx, q8_gated) = (
        amx.amx_blocks(put_at, _finish, bits) for bits in (4, 6, 8)
    )


@kernel
def ask_first(row, member, members):
    """Ask for the beginning of what a member will read of a product."""
    block = share_first(own_part(load_i64(row + at.MATMUL_BLOCKS), members), member, members)
    codes, meta = block_codes(row, block), block_meta(row, block)
    for place in range(codes, codes + AHEAD, 64):
        prefetch_l2(place)
    for place in range(meta, meta + META_AHEAD, 64):
        prefetch_l2(place)


@kernel
def own_part(units, members):
    """How many of all units are divided beforehand; the others go to who is through first.

    Even where all members work alike, one may lose its core for a while.
    """
    return units - units // 8 if members > 1 else units


@kernel
def matmul(row, state, member, members, taken):
    """out[t] (+)= (weights @ x[t]) * factor + bias, for this thread's blocks of 16 rows.

    taken: address of the number of units of the common part that members have taken
    """
    tokens, begin = batch_rows(row, state), int64(0)
    units = load_i64(row + at.MATMUL_BLOCKS)
    fused = HAS_AMX and load_i64(row + at.MATMUL_ACTIVATES) != 0 and tokens >= X_TOKENS
    if fused:
        # Whole tiles of tokens go through the activation at once; the ACTIVATE that follows does the others.
        begin = tokens // X_TOKENS * X_TOKENS
        units = load_i64(load_i64(row + at.MATMUL_ACTIVATES) + at.ACTIVATE_WIDTH) // AMX_UNIT
    own = own_part(units, members)
    first, last = share_first(own, member, members), share_first(own, member + 1, members)
    at_once = max(UNIT_BYTES // (load_i64(row + at.MATMUL_COLUMNS) * 8), int64(1))
    if fused:
        at_once = int64(1)
    elif HAS_AMX and tokens >= X_TOKENS:
        at_once = int64(AMX_BLOCKS)
    while True:
        if HAS_AMX and fused:
            gated(row, state, member, begin, first, last)
        else:
            products(row, state, member, begin, tokens, first, last)
        first = units if own == units else own + atomic_add(taken, at_once)
        last = min(first + at_once, units)
        if first < units:
            continue
        if not fused or begin == tokens:
            break
        # What is left of the tokens, by vectors.
        fused = False
        own = units = load_i64(row + at.MATMUL_BLOCKS)
        first, last = share_first(units, member, members), share_first(units, member + 1, members)


@kernel
def gated(row, state, member, high, first, last):
    """Products of gates and ups, and activation(gate) * up as the next operation's activations, for rows 0..high."""
    kind = load_i64(row + at.MATMUL_KIND)
    if kind == Q4:
        q4_gated(row, state, member, high, first, last)
    elif kind == Q6:
        q6_gated(row, state, member, high, first, last)
    else:
        q8_gated(row, state, member, high, first, last)


@kernel
def products(row, state, member, begin, end, first, last):
    """Blocks first..last of a product, for rows begin..end of its activations."""
    kind = load_i64(row + at.MATMUL_KIND)
    if HAS_AMX and kind <= Q8:
        low, high = (begin + X_TOKENS - 1) // X_TOKENS * X_TOKENS, end // X_TOKENS * X_TOKENS
        if low < high:
            if kind == Q4:
                q4_amx(row, state, member, low, high, first, last)
            elif kind == Q6:
                q6_amx(row, state, member, low, high, first, last)
            else:
                q8_amx(row, state, member, low, high, first, last)
            by_vectors(row, begin, low, first, last)
            begin = high
    by_vectors(row, begin, end, first, last)


@kernel
def by_vectors(row, begin, end, first, last):
    """As `products`, by vectors."""
    kind = load_i64(row + at.MATMUL_KIND)
    if kind == Q4:
        q4_blocks(row, begin, end, first, last)
    elif kind == Q6:
        q6_blocks(row, begin, end, first, last)
    elif kind == Q8:
        q8_blocks(row, begin, end, first, last)
    elif kind == F16:
        f16_blocks(row, begin, end, first, last)
    elif kind == BF16:
        bf16_blocks(row, begin, end, first, last)
    else:
        f32_blocks(row, begin, end, first, last)
