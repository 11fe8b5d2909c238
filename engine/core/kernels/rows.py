"""Kernels that work on one token's row at a time: embedding, norm, activation function, angles."""

from engine.core.kernels import fields as at
from engine.core.kernels.common import batch_rows, load_float, put_activations, share_first, source_row
from engine.core.kernels.simd import (
    exp,
    float32,
    float64,
    fma,
    int64,
    kernel,
    load_bf16,
    load_f16,
    load_f32,
    load_f32x16,
    load_i8,
    load_i32,
    load_i64,
    load_u8,
    splat_f32,
    square_root,
    store_f32,
    store_f32x16,
    sum_lanes,
)
from engine.core.operations import Activation, WeightKind

Q4, Q8, F16, BF16 = int(WeightKind.Q4), int(WeightKind.Q8), int(WeightKind.F16), int(WeightKind.BF16)
SILU = int(Activation.SILU)
PIECE = 1024
"""Columns of one piece of a row: a multiple of every group size, small enough to share one row among threads."""


@kernel
def weight(kind, panels, meta, columns, group, row, column):
    """One weight as float32, without the tensor's power of two."""
    block, lane = row // 16, row % 16
    if kind == Q4:
        line = panels + (block * (columns // 8) + column // 8) * 64
        byte = load_u8(line + 4 * lane + column % 4)
        code = byte >> 4 if column % 8 >= 4 else byte & 15
        record = meta + (block * (columns // group) + column // group) * 40
        zeros = load_u8(record + 32 + lane // 2)
        zero = zeros >> 4 if lane % 2 else zeros & 15
        return float32(code - zero) * load_f16(record + 2 * lane)
    if kind == Q8:
        line = panels + (block * (columns // 4) + column // 4) * 64
        scale = load_f16(meta + ((block * (columns // group) + column // group) * 16 + lane) * 2)
        return float32(load_i8(line + 4 * lane + column % 4)) * scale
    index = (block * columns + column) * 16 + lane
    if kind == F16:
        return load_f16(panels + 2 * index)
    if kind == BF16:
        return load_bf16(panels + 2 * index)
    return load_f32(panels + 4 * index)


@kernel
def embed(row, state, member, members):
    """out[t] = scale * weights[ids[t]]"""
    tokens = load_i64(state + at.STATE_TOKENS)
    ids = load_i64(state + at.STATE_IDS)
    kind = load_i64(row + at.EMBED_KIND)
    panels, meta = load_i64(row + at.EMBED_PANELS), load_i64(row + at.EMBED_META)
    columns, group = load_i64(row + at.EMBED_COLUMNS), load_i64(row + at.EMBED_GROUP)
    width = load_i64(row + at.EMBED_WIDTH)
    factor = load_float(row + at.EMBED_FACTOR) * load_float(row + at.EMBED_SCALE)
    for token in range(share_first(tokens, member, members), share_first(tokens, member + 1, members)):
        out = load_i64(row + at.EMBED_OUT) + token * load_i64(row + at.EMBED_OUT_STRIDE)
        index = int64(load_i32(ids + 4 * token))
        for column in range(width):
            store_f32(out + 4 * column, weight(kind, panels, meta, columns, group, index, column) * factor)


@kernel
def norm(row, state, member, members):
    """Root mean square norm (Zhang, Sennrich 2019) of a row, as activations: x / rms(x) * weight."""
    rows = batch_rows(row, state)
    source_stride = load_i64(row + at.NORM_SOURCE_STRIDE)
    width = load_i64(row + at.NORM_WIDTH)
    weights = load_i64(row + at.NORM_WEIGHT)
    scratch = load_i64(state + at.STATE_SCRATCH) + member * load_i64(state + at.STATE_SCRATCH_BYTES)
    for index in range(share_first(rows, member, members), share_first(rows, member + 1, members)):
        source = load_i64(row + at.NORM_SOURCE) + source_row(row, state, index) * source_stride
        normalise(source, width, weights, load_float(row + at.NORM_EPSILON), scratch)
        put_activations(row, index, scratch, width, 0, load_i64(row + at.X_COLUMNS))


@kernel
def normalise(source, width, weights, epsilon, out):
    """out = source / sqrt(mean(source ** 2) + epsilon) * weights; may be in place."""
    squares = splat_f32(float32(0.0))
    for column in range(0, width, 16):
        x = load_f32x16(source + 4 * column)
        squares = fma(x, x, squares)
    mean = sum_lanes(squares) / float32(width)
    factor = splat_f32(float32(1.0) / square_root(mean + epsilon))
    for column in range(0, width, 16):
        store_f32x16(out + 4 * column, (load_f32x16(source + 4 * column) * factor) * load_f32x16(weights + 4 * column))


@kernel
def quantise(row, state, member, members):
    """A row as activations, as it is."""
    width, columns = load_i64(row + at.QUANTISE_WIDTH), load_i64(row + at.X_COLUMNS)
    pieces = (columns + PIECE - 1) // PIECE
    units = batch_rows(row, state) * pieces
    for unit in range(share_first(units, member, members), share_first(units, member + 1, members)):
        index, first = unit // pieces, unit % pieces * PIECE
        source = load_i64(row + at.QUANTISE_SOURCE) + source_row(row, state, index) * load_i64(
            row + at.QUANTISE_SOURCE_STRIDE
        )
        put_activations(row, index, source, width, first, min(first + PIECE, columns))


@kernel
def activate(row, state, member, members):
    """activation(gate) * up as activations; a source row is `width` gates, then `width` ups."""
    width, columns = load_i64(row + at.ACTIVATE_WIDTH), load_i64(row + at.X_COLUMNS)
    function = load_i64(row + at.ACTIVATE_FUNCTION)
    scratch = load_i64(state + at.STATE_SCRATCH) + member * load_i64(state + at.STATE_SCRATCH_BYTES)
    pieces = (columns + PIECE - 1) // PIECE
    units = batch_rows(row, state) * pieces
    one = splat_f32(float32(1.0))
    for unit in range(share_first(units, member, members), share_first(units, member + 1, members)):
        index, first = unit // pieces, unit % pieces * PIECE
        last = min(first + PIECE, columns)
        gates = load_i64(row + at.ACTIVATE_SOURCE) + source_row(row, state, index) * load_i64(
            row + at.ACTIVATE_SOURCE_STRIDE
        )
        for column in range(first, min(last, width), 16):
            gate = load_f32x16(gates + 4 * column)
            up = load_f32x16(gates + 4 * (width + column))
            if function == SILU:
                value = gate / (one + exp(splat_f32(float32(0.0)) - gate))
            else:
                value = gelu_tanh(gate)
            store_f32x16(scratch + 4 * column, value * up)
        put_activations(row, index, scratch, width, first, last)


@kernel
def gelu_tanh(x):
    """x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x ** 3))): gelu by its tanh form (Hendrycks, Gimpel 2016)."""
    cube = x * x * x
    inner = fma(cube, splat_f32(float32(0.044715)), x) * splat_f32(float32(-1.5957691216057308))
    return x / (splat_f32(float32(1.0)) + exp(inner))


# fdlibm's kernels of sine and cosine on [-pi/4, pi/4] in float64; error below one float64 unit.
_S1, _S2, _S3 = -1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04
_S4, _S5, _S6 = 2.75573137070700676789e-06, -2.50507602534068634195e-08, 1.58969099521155010221e-10
_C1, _C2, _C3 = 4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05
_C4, _C5, _C6 = -2.75573143513906633035e-07, 2.08757232129817482790e-09, -1.13596475577881948265e-11
# pi / 2 in three parts of 33 bits, so that k * part is exact for k < 2**20.
_P1, _P2, _P3 = 1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624871116645580e-21
_TO_INTEGER = 6755399441055744.0  # 1.5 * 2**52


@kernel
def angles(row, state, member, members):
    """cos and sin of position * frequency, times the attention factor.

    frequencies  float32 (count,)
    out          float32 (tokens, 2, count)   cosines, then sines

    The angle is a float32 product, as in the reference; its cosine is computed
    in float64 with plain sums and products, and rounded once.
    """
    tokens, positions = load_i64(state + at.STATE_TOKENS), load_i64(state + at.STATE_POSITIONS)
    count, frequencies = load_i64(row + at.ANGLES_COUNT), load_i64(row + at.ANGLES_FREQUENCIES)
    factor = load_float(row + at.ANGLES_ATTENTION_FACTOR)
    for token in range(share_first(tokens, member, members), share_first(tokens, member + 1, members)):
        out = load_i64(row + at.ANGLES_OUT) + token * 8 * count
        position = float32(load_i32(positions + 4 * token))
        for index in range(count):
            angle = float64(position * load_f32(frequencies + 4 * index))
            turns = (angle * 0.63661977236758134308 + _TO_INTEGER) - _TO_INTEGER
            x = ((angle - turns * _P1) - turns * _P2) - turns * _P3
            z = x * x
            sine = x + x * z * (_S1 + z * (_S2 + z * (_S3 + z * (_S4 + z * (_S5 + z * _S6)))))
            cosine = 1.0 - (0.5 * z - z * z * (_C1 + z * (_C2 + z * (_C3 + z * (_C4 + z * (_C5 + z * _C6))))))
            quadrant = int64(turns) & 3
            if quadrant & 1:
                sine, cosine = cosine, -sine
            if quadrant & 2:
                sine, cosine = -sine, -cosine
            store_f32(out + 4 * index, float32(cosine) * factor)
            store_f32(out + 4 * (count + index), float32(sine) * factor)
