"""Kernels that work on one token's row at a time: embedding, norms, activation functions, angles."""

from engine.core.kernels import fields as at
from engine.core.kernels.common import batch_rows, load_float, put_activations, share_first, source_row
from engine.core.kernels.simd import (
    HAS_AMX,
    absolute,
    exp,
    float32,
    float64,
    fma,
    int32,
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
    maximum,
    minimum,
    reciprocal,
    splat_f32,
    square_root,
    store_f32,
    store_f32x16,
    sum_lanes,
)
from engine.core.operations import X_TOKENS, Activation, Norm, WeightKind

Q4, _, Q8, F16, BF16, _ = (int(kind) for kind in WeightKind)
SILU, GELU_TANH, GELU = int(Activation.SILU), int(Activation.GELU_TANH), int(Activation.GELU)
SWIGLU_CLAMPED = int(Activation.SWIGLU_CLAMPED)
RMS, LAYER = int(Norm.RMS), int(Norm.LAYER)
PIECE = 1024
"""Columns of one piece of a row: a multiple of every span, small enough to share one row among threads."""


@kernel
def weight(kind, panels, meta, columns, group, span, row, column):
    """One weight as float32, without the tensor's power of two."""
    block, lane = row // 16, row % 16
    spans = (columns + span - 1) // span if span > 0 else int64(0)
    if kind < Q8:
        record = 32 + 24 * (span // group)
        place = meta + (block * spans + column // span) * record
        number, groups = column % span // group, span // group
        nibbles = load_u8(place + 32 + 8 * number + lane // 2)
        multiplier = (nibbles >> 4 if lane % 2 else nibbles & 15) + 1
        offsets = place + 32 + 8 * groups
        if groups == 1:
            offset = load_u8(offsets + lane)
        else:
            offset = load_u8(offsets + 32 * (number // 2) + 2 * lane + number % 2)
        return float32(code_at(kind, panels, block, columns, lane, column) * multiplier - offset) * load_f16(
            place + 2 * lane
        )
    if kind == Q8:
        line = panels + (block * (columns // 4) + column // 4) * 64
        scale = load_f16(meta + ((block * spans + column // span) * 16 + lane) * 2)
        return float32(load_i8(line + 4 * lane + column % 4)) * scale
    index = (block * columns + column) * 16 + lane
    if kind == F16:
        return load_f16(panels + 2 * index)
    if kind == BF16:
        return load_bf16(panels + 2 * index)
    return load_f32(panels + 4 * index)


@kernel
def code_at(kind, panels, block, columns, lane, column):
    """The int4 or 6-bit code of one weight."""
    byte = 4 * lane + column % 4
    if kind == Q4:
        line = panels + (block * (columns // 8) + column // 8) * 64
        code = load_u8(line + byte)
        return code >> 4 if column % 8 >= 4 else code & 15
    lines = panels + (block * (columns // 16) + column // 16) * 192
    code = load_u8(lines + column % 16 // 8 * 64 + byte)
    low = code >> 4 if column % 8 >= 4 else code & 15
    return low | (load_u8(lines + 128 + byte) >> int32(column % 16 // 4 * 2) & 3) << 4


@kernel
def embed(row, state, member, members):
    """out[t] = scale * weights[ids[t]], or out[t] += scale * weights[positions[t]]"""
    tokens = load_i64(state + at.STATE_TOKENS)
    by_position = load_i64(row + at.EMBED_BY_POSITION)
    ids = load_i64(state + at.STATE_POSITIONS) if by_position else load_i64(state + at.STATE_IDS)
    kind = load_i64(row + at.EMBED_KIND)
    panels, meta = load_i64(row + at.EMBED_PANELS), load_i64(row + at.EMBED_META)
    columns, group = load_i64(row + at.EMBED_COLUMNS), load_i64(row + at.EMBED_GROUP)
    span = load_i64(row + at.EMBED_SPAN)
    width = load_i64(row + at.EMBED_WIDTH)
    factor = load_float(row + at.EMBED_FACTOR) * load_float(row + at.EMBED_SCALE)
    for token in range(share_first(tokens, member, members), share_first(tokens, member + 1, members)):
        out = load_i64(row + at.EMBED_OUT) + token * load_i64(row + at.EMBED_OUT_STRIDE)
        index = int64(load_i32(ids + 4 * token))
        for column in range(width):
            value = weight(kind, panels, meta, columns, group, span, index, column) * factor
            store_f32(out + 4 * column, load_f32(out + 4 * column) + value if by_position else value)


@kernel
def norm(row, state, member, members):
    """The norm of a row, as activations."""
    rows = batch_rows(row, state)
    source_stride = load_i64(row + at.NORM_SOURCE_STRIDE)
    width, kind = load_i64(row + at.NORM_WIDTH), load_i64(row + at.NORM_NORM)
    weights, bias = load_i64(row + at.NORM_WEIGHT), load_i64(row + at.NORM_BIAS)
    epsilon = load_float(row + at.NORM_EPSILON)
    scratch = load_i64(state + at.STATE_SCRATCH) + member * load_i64(state + at.STATE_SCRATCH_BYTES)
    for index in range(share_first(rows, member, members), share_first(rows, member + 1, members)):
        source = load_i64(row + at.NORM_SOURCE) + source_row(row, state, index) * source_stride
        normed(kind, source, width, weights, bias, epsilon, scratch)
        put_activations(row, index, scratch, width, 0, load_i64(row + at.X_COLUMNS))


@kernel
def residual(row, state, member, members):
    """out[t] += source[t], or the norm of it."""
    tokens = load_i64(state + at.STATE_TOKENS)
    width, kind = load_i64(row + at.RESIDUAL_WIDTH), load_i64(row + at.RESIDUAL_NORM)
    weights, bias = load_i64(row + at.RESIDUAL_WEIGHT), load_i64(row + at.RESIDUAL_BIAS)
    epsilon = load_float(row + at.RESIDUAL_EPSILON)
    for token in range(share_first(tokens, member, members), share_first(tokens, member + 1, members)):
        source = load_i64(row + at.RESIDUAL_SOURCE) + token * load_i64(row + at.RESIDUAL_SOURCE_STRIDE)
        out = load_i64(row + at.RESIDUAL_OUT) + token * load_i64(row + at.RESIDUAL_OUT_STRIDE)
        normed(kind, source, width, weights, bias, epsilon, source)
        for column in range(0, width, 16):
            store_f32x16(out + 4 * column, load_f32x16(out + 4 * column) + load_f32x16(source + 4 * column))


@kernel
def normed(kind, source, width, weights, bias, epsilon, out):
    """out = the norm of this kind of source, times weights plus bias (addresses, 0 for none); may be in place."""
    if kind == RMS:
        normalise(source, width, weights, epsilon, out)
    elif kind == LAYER:
        centre_and_normalise(source, width, weights, bias, epsilon, out)


@kernel
def normalise(source, width, weights, epsilon, out):
    """Root mean square norm (Zhang, Sennrich 2019): out = source / sqrt(mean(source ** 2) + epsilon) * weights."""
    squares = splat_f32(float32(0.0))
    for column in range(0, width, 16):
        x = load_f32x16(source + 4 * column)
        squares = fma(x, x, squares)
    mean = sum_lanes(squares) / float32(width)
    factor = splat_f32(float32(1.0) / square_root(mean + epsilon))
    for column in range(0, width, 16):
        store_f32x16(out + 4 * column, (load_f32x16(source + 4 * column) * factor) * load_f32x16(weights + 4 * column))


@kernel
def centre_and_normalise(source, width, weights, bias, epsilon, out):
    """Layer norm (Ba et al. 2016): (source - mean) / sqrt(variance + epsilon), times weights, plus bias."""
    total, squares = splat_f32(float32(0.0)), splat_f32(float32(0.0))
    for column in range(0, width, 16):
        total = total + load_f32x16(source + 4 * column)
    mean = splat_f32(sum_lanes(total) / float32(width))
    for column in range(0, width, 16):
        x = load_f32x16(source + 4 * column) - mean
        store_f32x16(out + 4 * column, x)
        squares = fma(x, x, squares)
    factor = splat_f32(float32(1.0) / square_root(sum_lanes(squares) / float32(width) + epsilon))
    for column in range(0, width, 16):
        x = load_f32x16(out + 4 * column) * factor
        if weights != 0:
            x = x * load_f32x16(weights + 4 * column)
        if bias != 0:
            x = x + load_f32x16(bias + 4 * column)
        store_f32x16(out + 4 * column, x)


@kernel
def prepare(row, state, member, members):
    """What comes before rotation, in place: q, k, v are clipped, runs of q and k normed, q grown with its position.

    q_norm, k_norm  float32, as wide as all heads of q, of k: every run has weights of its own
    growth          float32 factors, one for every `growth_period` positions
    """
    tokens, positions = load_i64(state + at.STATE_TOKENS), load_i64(state + at.STATE_POSITIONS)
    head_dim, kind = load_i64(row + at.PREPARE_HEAD_DIM), load_i64(row + at.PREPARE_NORM)
    heads, kv_heads = load_i64(row + at.PREPARE_HEADS), load_i64(row + at.PREPARE_KV_HEADS)
    q, kv = heads * head_dim, kv_heads * head_dim
    clip, growth = load_float(row + at.PREPARE_CLIP), load_i64(row + at.PREPARE_GROWTH)
    epsilon = load_float(row + at.PREPARE_EPSILON)
    run = load_i64(row + at.PREPARE_RUN)
    for token in range(share_first(tokens, member, members), share_first(tokens, member + 1, members)):
        source = load_i64(row + at.PREPARE_SOURCE) + token * load_i64(row + at.PREPARE_SOURCE_STRIDE)
        if clip > float32(0.0):
            most, least = splat_f32(clip), splat_f32(-clip)
            for column in range(0, q + 2 * kv, 16):
                store_f32x16(source + 4 * column, minimum(maximum(load_f32x16(source + 4 * column), least), most))
        if kind != 0:
            norm_runs(kind, source, q, run, load_i64(row + at.PREPARE_Q_NORM), epsilon)
            norm_runs(kind, source + 4 * q, kv, run, load_i64(row + at.PREPARE_K_NORM), epsilon)
        if growth != 0:
            period = int64(load_i32(positions + 4 * token)) // load_i64(row + at.PREPARE_GROWTH_PERIOD)
            factor = splat_f32(load_f32(growth + 4 * period))
            for column in range(0, q, 16):
                store_f32x16(source + 4 * column, load_f32x16(source + 4 * column) * factor)


@kernel
def norm_runs(kind, vector, width, run, weights, epsilon):
    """Norm each `run` columns of a vector (0: all of them together), with the weights beside them."""
    step = width if run == 0 else run
    for index in range(width // step):
        offset = 4 * index * step
        normed(kind, vector + offset, step, weights + offset, int64(0), epsilon, vector + offset)


@kernel
def softcap(row, state, member, members):
    """source[r] = size * tanh(source[r] / size), for the rows of logits."""
    rows, width = load_i64(state + at.STATE_WANTED), load_i64(row + at.SOFTCAP_WIDTH)
    size = splat_f32(load_float(row + at.SOFTCAP_SIZE))
    pieces = (width + PIECE - 1) // PIECE
    units = rows * pieces
    for unit in range(share_first(units, member, members), share_first(units, member + 1, members)):
        source = load_i64(row + at.SOFTCAP_SOURCE) + unit // pieces * load_i64(row + at.SOFTCAP_SOURCE_STRIDE)
        first = unit % pieces * PIECE
        for column in range(first, min(first + PIECE, width), 16):
            store_f32x16(source + 4 * column, capped(load_f32x16(source + 4 * column), size))


@kernel
def capped(x, size):
    """size * tanh(x / size), with tanh(y) = 1 - 2 / (exp(2 y) + 1)."""
    one, two = splat_f32(float32(1.0)), splat_f32(float32(2.0))
    return (one - two / (exp((x / size) * two) + one)) * size


@kernel
def move(row, state, member, members):
    """Runs of columns to other places: run i of `width` goes from source + i * source_step to out + i * out_step.

    Times `scale`. Steps are in bytes; a source step of 0 gives every place the same run. Source and out are the same
    run, or do not overlap.
    """
    tokens, width = load_i64(state + at.STATE_TOKENS), load_i64(row + at.MOVE_WIDTH)
    count, scale = load_i64(row + at.MOVE_COUNT), splat_f32(load_float(row + at.MOVE_SCALE))
    units = tokens * count
    for unit in range(share_first(units, member, members), share_first(units, member + 1, members)):
        token, run = unit // count, unit % count
        source = load_i64(row + at.MOVE_SOURCE) + token * load_i64(row + at.MOVE_SOURCE_STRIDE)
        out = load_i64(row + at.MOVE_OUT) + token * load_i64(row + at.MOVE_OUT_STRIDE)
        source += run * load_i64(row + at.MOVE_SOURCE_STEP)
        out += run * load_i64(row + at.MOVE_OUT_STEP)
        for column in range(0, width, 16):
            store_f32x16(out + 4 * column, load_f32x16(source + 4 * column) * scale)


@kernel
def gate(row, state, member, members):
    """source *= sigmoid(gates), or source = norm(source) * silu(gates), head by head, in place.

    weight  float32 (head_dim,)   of the root mean square norm; 0 for none
    """
    tokens, heads = load_i64(state + at.STATE_TOKENS), load_i64(row + at.GATE_HEADS)
    head_dim, weights = load_i64(row + at.GATE_HEAD_DIM), load_i64(row + at.GATE_WEIGHT)
    epsilon, silu = load_float(row + at.GATE_EPSILON), load_i64(row + at.GATE_SILU)
    zero, one = splat_f32(float32(0.0)), splat_f32(float32(1.0))
    units = tokens * heads
    for unit in range(share_first(units, member, members), share_first(units, member + 1, members)):
        token, place = unit // heads, unit % heads * head_dim * 4
        source = load_i64(row + at.GATE_SOURCE) + token * load_i64(row + at.GATE_SOURCE_STRIDE) + place
        gates = load_i64(row + at.GATE_GATES) + token * load_i64(row + at.GATE_GATES_STRIDE) + place
        if weights != 0:
            normalise(source, head_dim, weights, epsilon, source)
        for column in range(0, head_dim, 16):
            x = load_f32x16(gates + 4 * column)
            share = reciprocal(one + exp(zero - x))
            if silu:
                share = x * share
            store_f32x16(source + 4 * column, load_f32x16(source + 4 * column) * share)


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
    """activation(gate) * up as activations; a source row is `width` gates, then `width` ups if `gated`."""
    width, columns = load_i64(row + at.ACTIVATE_WIDTH), load_i64(row + at.X_COLUMNS)
    function, gated = load_i64(row + at.ACTIVATE_FUNCTION), load_i64(row + at.ACTIVATE_GATED)
    scratch = load_i64(state + at.STATE_SCRATCH) + member * load_i64(state + at.STATE_SCRATCH_BYTES)
    pieces = (columns + PIECE - 1) // PIECE
    rows, done = batch_rows(row, state), int64(0)
    if HAS_AMX and load_i64(row + at.ACTIVATE_FROM_TILES):
        done = rows // X_TOKENS * X_TOKENS  # by the product before
    units = (rows - done) * pieces
    for unit in range(share_first(units, member, members), share_first(units, member + 1, members)):
        index, first = done + unit // pieces, unit % pieces * PIECE
        last = min(first + PIECE, columns)
        gates = load_i64(row + at.ACTIVATE_SOURCE) + source_row(row, state, index) * load_i64(
            row + at.ACTIVATE_SOURCE_STRIDE
        )
        for column in range(first, min(last, width), 16):
            gate = load_f32x16(gates + 4 * column)
            if function == SWIGLU_CLAMPED:
                value = swiglu_clamped(gate, load_f32x16(gates + 4 * (width + column)))
            else:
                value = activated(function, gate)
            if gated and function != SWIGLU_CLAMPED:
                value = value * load_f32x16(gates + 4 * (width + column))
            store_f32x16(scratch + 4 * column, value)
        put_activations(row, index, scratch, width, first, last)


@kernel
def swiglu_clamped(gate, up):
    """gate / (1 + exp(-1.702 gate)) * (up + 1), gate at most 7, up within 7 (gpt-oss)."""
    limit, one = splat_f32(float32(7.0)), splat_f32(float32(1.0))
    gate = minimum(gate, limit)
    up = minimum(maximum(up, splat_f32(float32(-7.0))), limit)
    return gate / (one + exp(gate * splat_f32(float32(-1.702)))) * (up + one)


@kernel
def activated(function, x):
    """The non-linearity of 16 numbers."""
    zero, one = splat_f32(float32(0.0)), splat_f32(float32(1.0))
    if function == SILU:
        return x * reciprocal(one + exp(zero - x))
    if function == GELU_TANH:
        return gelu_tanh(x)
    if function == GELU:
        return gelu(x)
    positive = maximum(x, zero)
    return positive * positive


@kernel
def gelu(x):
    """x times the normal distribution's integral up to x: max(x, 0) - |x| * erfc(|x| / sqrt 2) / 2.

    erfc by Abramowitz and Stegun 7.1.26, whose error is below 1.5e-7.
    """
    size = absolute(x)
    y = size * splat_f32(float32(0.70710678118654752))
    one = splat_f32(float32(1.0))
    t = one / fma(y, splat_f32(float32(0.3275911)), one)
    sum_ = fma(t, splat_f32(float32(1.061405429)), splat_f32(float32(-1.453152027)))
    sum_ = fma(t, sum_, splat_f32(float32(1.421413741)))
    sum_ = fma(t, sum_, splat_f32(float32(-0.284496736)))
    sum_ = fma(t, sum_, splat_f32(float32(0.254829592)))
    tail = (t * sum_) * exp(splat_f32(float32(0.0)) - y * y)
    return maximum(x, splat_f32(float32(0.0))) - size * (tail * splat_f32(float32(0.5)))


@kernel
def gelu_tanh(x):
    """x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x ** 3))): gelu by its tanh form (Hendrycks, Gimpel 2016)."""
    cube = x * x * x
    inner = fma(cube, splat_f32(float32(0.044715)), x) * splat_f32(float32(-1.5957691216057308))
    return x * reciprocal(splat_f32(float32(1.0)) + exp(inner))


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
