"""The engine's mathematics written to be read: numpy, one formula after another, no cleverness.

Two kinds of twins. Plain functions compute in float64 what a result means;
kernels may differ from them by float32 rounding. `canonical_*` functions make
exactly the float32 roundings, in exactly the order, that every kernel must
make; kernels must equal them to the bit.

Imports no kernel. W (rows, cols) are weights, x (cols,) or (tokens, cols)
activations; everything is row-major and unpadded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.quant import Codes
from engine.models.spec import (
    Activation,
    AttentionSpec,
    ConvolutionSpec,
    DeltaSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
)
from engine.settings import KvDtype

Array = NDArray[Any]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Quantised:
    """A weight matrix as codes; W = (code * multiplier - offset) * scale * 2**exponent.

    `group` columns share multiplier and offset, `span` columns the scale; codes alone without multipliers.
    """

    codes: Codes
    exponent: int
    group: int
    span: int

    def integers(self) -> NDArray[np.int64]:
        """W in units of the scale (rows, cols)."""
        rows, cols = self.codes.codes.shape
        numbers = self.codes.codes.astype(np.int64)
        if self.codes.multipliers is None:
            return numbers
        assert self.codes.offsets is not None
        for row in range(rows):
            for start in range(0, cols, self.group):
                part, index = slice(start, start + self.group), start // self.group
                numbers[row, part] *= int(self.codes.multipliers[row, index])
                numbers[row, part] -= int(self.codes.offsets[row, index])
        return numbers

    def weights(self) -> Float64:
        """W, exactly."""
        scales = np.repeat(self.codes.scales.astype(np.float64), self.span, axis=1)[:, : self.codes.codes.shape[1]]
        return self.integers() * scales * 2.0**self.exponent


# ---------------------------------------------------------------- products


def quantise_activations(x: Float32, group: int) -> tuple[NDArray[np.int8], Float32]:
    """One token's x (cols,) as (int8 (cols,), float32 scales (groups,)).

    Canonical: largest / 127 and 127 / largest are float32 divisions, the product
    with the latter is rounded to nearest even. A group of zeros, or of numbers
    so small that 127 / largest overflows, counts as zeros.
    """
    groups = -(-x.size // group)
    codes = np.zeros(groups * group, np.int8)
    scales = np.zeros(groups, np.float32)
    for index in range(groups):
        part = x[index * group : (index + 1) * group].astype(np.float32)
        largest = np.abs(part).max()
        if largest < np.float32(2.0**-100):
            continue
        scales[index] = largest / np.float32(127)
        codes[index * group : index * group + part.size] = np.rint(part * (np.float32(127) / largest))
    return codes[: x.size], scales


def linear(W: Array | Quantised, x: Array) -> Float64:
    """W @ x for each token, (tokens, rows) from x (tokens, cols).

    Quantised weights meet quantised activations, as in the engine; the sums
    themselves are float64.
    """
    if not isinstance(W, Quantised):
        return x.astype(np.float64) @ np.asarray(W, np.float64).T
    dense = W.weights()
    return np.stack([dense @ dequantised_activations(token.astype(np.float32), W.span) for token in x])


def dequantised_activations(x: Float32, group: int) -> Float64:
    """What is left of x (cols,) after quantisation."""
    codes, scales = quantise_activations(x, group)
    return codes.astype(np.float64) * np.repeat(scales.astype(np.float64), group)[: x.size]


def canonical_quantised_matvec(W: Quantised, x: Float32) -> Float32:
    """The float32 numbers (rows,) that every kernel of integer weights returns for one token."""
    codes, scales = quantise_activations(x, W.span)
    integers = W.integers()
    total = np.zeros(len(integers), np.float32)
    for index in range(scales.size):
        part = slice(index * W.span, min((index + 1) * W.span, x.size))
        dot = integers[:, part] @ codes[part].astype(np.int64)
        scale = W.codes.scales[:, index].astype(np.float32) * scales[index]
        total = fma(dot.astype(np.float32), scale, total)
    return total * np.float32(2.0**W.exponent)


def canonical_float_matvec(W: Float32, x: Float32) -> Float32:
    """The float32 numbers (rows,) that every f16, bf16 and f32 kernel returns for one token; W as unpacked."""
    chains = [np.zeros(W.shape[0], np.float32) for _ in range(4)]
    for column in range(W.shape[1]):
        chains[column % 4] = fma(W[:, column], x[column], chains[column % 4])
    return (chains[0] + chains[1]) + (chains[2] + chains[3])


def fma(a: Array, b: Array, c: Array) -> Float32:
    """a * b + c of float32 numbers, rounded to float32 once.

    The product is exact in float64. The sum is made odd where it is not exact
    (its last bit says "there was more"), which keeps the second rounding, to
    float32, from being a wrong one.
    """
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    addend = np.asarray(c, np.float64)
    total = np.asarray(product + addend)
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    step = np.where((lost > 0) == (total > 0), 1, -1)
    odd = np.where((lost != 0) & (bits & 1 == 0), bits + step, bits)
    with np.errstate(over="ignore"):
        return odd.view(np.float64).astype(np.float32)


# ---------------------------------------------------------------- how weights become codes


def canonical_packed_codes(W: Float32, exponent: int, group: int, span: int, steps: int, most: int) -> Codes:
    """The codes (rows, cols) of a two-level format that every kernel chooses; cols a multiple of the group.

    Candidates as `kernels/packing.py` lists them, in its order, and the first of the best is kept; all importance 1.
    steps: the largest code; most: the largest multiplier
    """
    W = W * np.float32(2.0**-exponent)
    rows, cols = W.shape
    codes = np.zeros((rows, cols), np.uint8)
    scales = np.zeros((rows, -(-cols // span)), np.float16)
    multipliers, offsets = np.zeros((2, rows, cols // group), np.uint8)
    for row in range(rows):
        for start in range(0, cols, span):
            part, groups = slice(start, start + span), slice(start // group, (start + span) // group)
            parts = W[row, part].reshape(-1, group)
            scale, chosen = _packed_span(parts, steps, most)
            scales[row, start // span] = scale
            multipliers[row, groups], offsets[row, groups] = chosen.T
            codes[row, part] = np.ravel([_codes(w, scale, *each, steps) for w, each in zip(parts, chosen, strict=True)])
    return Codes(codes, scales, multipliers, offsets)


def _packed_span(parts: Float32, steps: int, most: int) -> tuple[np.float32, Float32]:
    """(scale, (multiplier, offset) of each group (groups, 2)) for the groups of one row's span (groups, group)."""
    low, high = np.minimum(parts.min(axis=1), 0), np.maximum(parts.max(axis=1), 0)
    smallest = max(
        (high * np.float32(1 / 127)).max(),
        (low * np.float32(-1 / 128)).max(),
        ((high - low) * (np.float32(1) / np.float32(steps * most))).max(),
    )
    least, best = np.float32(np.inf), (np.float32(0), np.zeros((len(parts), 2), np.float32))
    for factor in (1.0, 0.94, 0.88, 1.08, 1.18):
        scale = _half_above(smallest * np.float32(factor))
        error, chosen = np.float32(0), []
        for w in parts:
            lost, *each = _packed_group(w * _inverse(scale), steps, most)
            error += lost
            chosen.append(each)
        error = error * scale * scale
        if error < least:
            least, best = error, (scale, np.array(chosen, np.float32))
    return best


def _packed_group(w: Float32, steps: int, most: int) -> tuple[np.float32, np.float32, np.float32]:
    """(squared error, multiplier, offset) of a group (cols,) in units of the scale."""
    low, high = min(w.min(), np.float32(0)), max(w.max(), np.float32(0))
    nominal = np.rint((high - low) * (np.float32(1) / np.float32(steps)))
    best = (np.float32(np.inf), np.float32(0), np.float32(0))
    for change in (-1, 0, 1):
        multiplier = np.float32(np.clip(nominal + np.float32(change), 1, most))
        reach = np.float32(steps) * multiplier
        for wanted in ((-low + (reach - high)) * np.float32(0.5), -low, reach - high):
            offset = np.float32(np.clip(np.rint(wanted), max(reach - 127, 0), 128))
            moved = w + offset
            code = np.clip(np.rint(moved * (np.float32(1) / multiplier)), 0, steps)
            off = code * multiplier - moved
            error = np.add.accumulate(off * off)[-1]  # one column after another
            if error < best[0]:
                best = (error, multiplier, offset)
    return best


def _codes(w: Float32, scale: np.float32, multiplier: np.float32, offset: np.float32, steps: int) -> Float32:
    moved = w * _inverse(scale) + offset
    return np.clip(np.rint(moved * (np.float32(1) / multiplier)), 0, steps)


def _inverse(scale: np.float32) -> np.float32:
    return np.float32(1) / scale if scale else scale


def _half_above(value: np.float32) -> np.float32:
    """The smallest number of half precision that is not below this one."""
    near = np.float16(value)
    return np.float32(near if near >= value else np.nextafter(near, np.float16(np.inf)))


# ---------------------------------------------------------------- norms and activations


def rms_norm(x: Array, weight: Array, epsilon: float) -> Float64:
    """x / root mean square * weight over the last axis."""
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight


def canonical_rms_norm(x: Float32, weight: Float32, epsilon: float) -> Float32:
    """The float32 numbers (cols,) that every kernel returns for one token."""
    lanes = np.zeros(16, np.float32)
    for start in range(0, x.size, 16):
        part = x[start : start + 16]
        lanes[: part.size] = fma(part, part, lanes[: part.size])
    for half in (8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half : 2 * half]
    mean = lanes[0] / np.float32(x.size) + np.float32(epsilon)
    return (x * (np.float32(1) / np.sqrt(mean))) * weight


def layer_norm(x: Array, weight: Any = 1.0, bias: Any = 0.0, epsilon: float = 0.0) -> Float64:
    """(x - mean) / standard deviation * weight + bias over the last axis."""
    x = x.astype(np.float64)
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + epsilon) * weight + bias


def canonical_layer_norm(x: Float32, weight: Float32 | None, bias: Float32 | None, epsilon: float) -> Float32:
    """The float32 numbers (cols,) that every kernel returns for one token; cols a multiple of 16."""
    centred = x - _sum_of_lanes(x.reshape(-1, 16)) / np.float32(x.size)
    squares = np.zeros(16, np.float32)
    for part in centred.reshape(-1, 16):
        squares = fma(part, part, squares)
    variance = _tree(squares) / np.float32(x.size)
    y = centred * (np.float32(1) / np.sqrt(variance + np.float32(epsilon)))
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


def _sum_of_lanes(parts: Float32) -> np.float32:
    total = np.zeros(16, np.float32)
    for part in parts:
        total = total + part
    return _tree(total)


def _tree(lanes: Float32) -> np.float32:
    for half in (8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half : 2 * half]
    return np.float32(lanes[0])


def activate(kind: Activation, x: Array) -> Float64:
    """The nonlinearity of a feed-forward layer."""
    x = x.astype(np.float64)
    match kind:
        case "silu":
            return x / (1 + np.exp(-x))
        case "gelu":
            return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        case "gelu_tanh":
            return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        case "relu2":
            return np.maximum(x, 0) ** 2
        case "swiglu_clamped":
            raise ValueError("takes gate and up together: see feed_forward")


def canonical_reciprocal(x: Float32) -> Float32:
    """1 / x for x >= 1 as every kernel computes it: a guess from the exponent, three steps of Newton's."""
    x = np.minimum(x, np.float32(2.0**125))
    y = (np.int32(0x7EF127EA) - x.view(np.int32)).view(np.float32)
    for _ in range(3):
        y = fma(y, fma(-x, y, np.float32(1)), y)
    return y


def canonical_exp(x: Float32) -> Float32:
    """e ** x as every kernel computes it: 0 below -87, as at 88 above it.

    x = n ln 2 + r with |r| <= ln 2 / 2, e ** r by a polynomial of degree 5 (Cephes `expf`).
    """
    held = np.minimum(np.maximum(x, np.float32(-87)), np.float32(88))
    exponent = np.rint(held * np.float32(1.4426950408889634))
    rest = fma(exponent, np.float32(-0.693359375), held)
    rest = fma(exponent, np.float32(2.12194440e-4), rest)
    value = np.full(x.shape, 1.9875691500e-4, np.float32)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        value = fma(value, rest, np.float32(coefficient))
    value = fma(value, rest * rest, rest) + np.float32(1)
    power = np.ldexp(np.float32(1), exponent.astype(np.int32))
    return np.where(x < -87, np.float32(0), value * power)


def canonical_activate(kind: Activation, gate: Float32, up: Float32 | None = None) -> Float32:
    """activation(gate) * up as every kernel computes it; without a gate, what would be the gate is all."""
    if kind == "swiglu_clamped":
        assert up is not None
        one, limit = np.float32(1), np.float32(7)
        gate, up = np.minimum(gate, limit), np.minimum(np.maximum(up, -limit), limit)
        return gate / (one + canonical_exp(gate * np.float32(-1.702))) * (up + one)
    value = _canonical_activation(kind, gate)
    return value if up is None else value * up


def _canonical_activation(kind: Activation, x: Float32) -> Float32:
    zero, one = np.float32(0), np.float32(1)
    match kind:
        case "silu":
            return x * canonical_reciprocal(one + canonical_exp(zero - x))
        case "gelu_tanh":
            inner = fma(x * x * x, np.float32(0.044715), x) * np.float32(-1.5957691216057308)
            return x * canonical_reciprocal(one + canonical_exp(inner))
        case "relu2":
            positive = np.maximum(x, zero)
            return positive * positive
        case "gelu":
            y = np.abs(x) * np.float32(0.70710678118654752)
            t = one / fma(y, np.float32(0.3275911), np.full(x.shape, one))
            total = fma(t, np.float32(1.061405429), np.full(x.shape, np.float32(-1.453152027)))
            for coefficient in (1.421413741, -0.284496736, 0.254829592):
                total = fma(t, total, np.float32(coefficient))
            tail = t * total * canonical_exp(zero - y * y)
            return np.maximum(x, zero) - np.abs(x) * (tail * np.float32(0.5))


def canonical_softcap(x: Float32, size: float) -> Float32:
    """size * tanh(x / size) as every kernel computes it."""
    cap, one, two = np.float32(size), np.float32(1), np.float32(2)
    return (one - two / (canonical_exp(x / cap * two) + one)) * cap


# ---------------------------------------------------------------- rotary positions


def inverse_frequencies(rope: RopeSpec, length: int = 0) -> tuple[Float64, float]:
    """(radians per position of each pair (dim / 2,), factor on cos and sin), by the formulas of the papers."""
    pairs = np.arange(rope.dim // 2)
    plain = rope.theta ** (-2.0 * pairs / rope.dim)
    scaling = rope.scaling
    if scaling is None:
        return plain, 1.0
    factor, context = scaling.factor, scaling.original_context
    match scaling.kind:
        case "linear":
            return plain / factor, 1.0
        case "dynamic":
            stretch = factor * max(length, context) / context - (factor - 1)
            return (rope.theta * stretch ** (rope.dim / (rope.dim - 2))) ** (-2.0 * pairs / rope.dim), 1.0
        case "ntk":
            return (rope.theta * factor ** (rope.dim / (rope.dim - 2))) ** (-2.0 * pairs / rope.dim), 1.0
        case "llama3":
            turns = context * plain / (2 * np.pi)
            keep = np.clip(
                (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1
            )
            return (1 - keep) * plain / factor + keep * plain, 1.0
        case "yarn":
            ends = [
                rope.dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
                for turns in (scaling.beta_fast, scaling.beta_slow)
            ]
            low, high = (math.floor(ends[0]), math.ceil(ends[1])) if scaling.truncate else ends
            low, high = max(low, 0), min(high, rope.dim - 1)
            keep = 1 - np.clip((pairs - low) / ((high - low) or 0.001), 0, 1)
            attention = scaling.attention_factor
            if attention is None:
                grow = [
                    0.1 * m * math.log(factor) + 1 if factor > 1 else 1
                    for m in (scaling.mscale, scaling.mscale_all_dim)
                    if m
                ]
                attention = grow[0] / grow[1] if len(grow) == 2 else (0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
            return (1 - keep) * plain / factor + keep * plain, attention
        case "proportional":
            return np.where(pairs < int(factor * rope.dim // 2), plain, 0.0), 1.0
        case "longrope":
            divide = np.array(scaling.long_factor if length > context else scaling.short_factor)
            attention = scaling.attention_factor
            if attention is None:
                attention = math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0
            return plain / divide, attention


def rotate(x: Array, positions: Array, rope: RopeSpec, length: int = 0) -> Float64:
    """Rotary embedding of x (tokens, heads, head_dim); entries from rope.dim on stay as they are."""
    frequencies, factor = inverse_frequencies(rope, length)
    angles = np.asarray(positions)[:, None, None] * frequencies
    cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
    out = x.astype(np.float64).copy()
    half = rope.dim // 2
    first, second = (
        (slice(0, rope.dim, 2), slice(1, rope.dim, 2)) if rope.interleaved else (slice(half), slice(half, rope.dim))
    )
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def canonical_angles(positions: Array, frequencies: Float32, factor: float) -> Float32:
    """float32 (tokens, 2, pairs): factor * cosines, factor * sines of position * frequency.

    The angle is a float32 product; its sine and cosine are fdlibm's polynomials in
    float64, after taking away the nearest multiple of pi / 2 in three parts.
    """
    angle = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    turns = np.rint(angle * 0.63661977236758134308)
    x = ((angle - turns * 1.57079632673412561417e00) - turns * 6.07710050630396597660e-11) - (
        turns * 2.02226624871116645580e-21
    )
    z = x * x
    sine, cosine = np.full(x.shape, 1.58969099521155010221e-10), np.full(x.shape, -1.13596475577881948265e-11)
    for coefficient in (
        -2.50507602534068634195e-08,
        2.75573137070700676789e-06,
        -1.98412698298579493134e-04,
        8.33333333332248946124e-03,
        -1.66666666666666324348e-01,
    ):
        sine = coefficient + z * sine
    for coefficient in (
        2.08757232129817482790e-09,
        -2.75573143513906633035e-07,
        2.48015872894767294178e-05,
        -1.38888888888741095749e-03,
        4.16666666666666019037e-02,
    ):
        cosine = coefficient + z * cosine
    sine, cosine = x + x * z * sine, 1.0 - (0.5 * z - z * z * cosine)
    quadrant = turns.astype(np.int64) % 4
    cosines = np.choose(quadrant, [cosine, -sine, -cosine, sine])
    sines = np.choose(quadrant, [sine, cosine, -sine, -cosine])
    return np.stack([cosines, sines], axis=1).astype(np.float32) * np.float32(factor)


def canonical_rotate(x: Float32, angles: Float32, *, interleaved: bool) -> Float32:
    """x (tokens, heads, head_dim) turned by angles (tokens, 2, pairs): two products and a sum, each rounded."""
    pairs = angles.shape[2]
    cos, sin = angles[:, None, 0], angles[:, None, 1]
    out = x.copy()
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(pairs), slice(pairs, 2 * pairs))
    )
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


# ---------------------------------------------------------------- attention over pages

_CHUNK = 512


@dataclass(frozen=True)
class Cached:
    """Keys or values of one sequence as its pages hold them, (positions, kv_heads, head_dim).

    numbers   int64 codes with float32 scales (positions, kv_heads, groups), or
              float32 values and no scales
    """

    numbers: Array
    scales: Float32 | None

    @property
    def group(self) -> int:
        """Entries that share a scale."""
        assert self.scales is not None
        return int(self.numbers.shape[2] // self.scales.shape[2])

    def meant(self) -> Float64:
        """The float64 numbers that the pages stand for."""
        if self.scales is None:
            return self.numbers.astype(np.float64)
        return self.numbers * np.repeat(self.scales.astype(np.float64), self.group, axis=2)


def canonical_cached(x: Float32, kv: KvDtype) -> Cached:
    """What is left of keys or values x (positions, kv_heads, head_dim) in pages of a kind.

    int8: groups of 32 entries (16 where head_dim is no multiple of 32), scale
    max |x| / 127 rounded to float16. f16 keeps to float16's range.
    """
    if kv == "f32":
        return Cached(x, None)
    largest_half = np.float32(65504)
    if kv == "f16":
        return Cached(np.clip(x, -largest_half, largest_half).astype(np.float16).astype(np.float32), None)
    positions, heads, dim = x.shape
    grouped = x.reshape(positions, heads, -1, next(size for size in (64, 32, 16) if dim % size == 0))
    exact = np.minimum(np.abs(grouped).max(axis=3) / np.float32(127), largest_half)
    scales = exact.astype(np.float16).astype(np.float32)
    factors = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    codes = np.rint(np.clip(grouped * factors[..., None], np.float32(-127), np.float32(127)))
    return Cached(codes.astype(np.int64).reshape(x.shape), scales)


def canonical_int16(x: Float32) -> tuple[Array, Float32]:
    """(int64 codes of 16 bits, float32 scale without the last axis) of queries or weighed probabilities."""
    size = np.abs(x).max(axis=-1)
    size = np.where(size < np.float32(2.0**-100), np.float32(0), size)
    factor = np.divide(np.float32(32767), size, out=np.zeros_like(size), where=size > 0)
    return np.rint(x * factor[..., None]).astype(np.int64), size / np.float32(32767)


def canonical_attention(
    q: Float32,
    keys: Cached,
    values: Cached,
    scale: float,
    window: int | None = None,
    *,
    softcap: float = 0.0,
    slopes: Float32 | None = None,
    sinks: Float32 | None = None,
) -> Float32:
    """The float32 (heads, head_dim) that every kernel returns for the query at the last cached position.

    q              float32 (heads, head_dim), turned already
    slopes, sinks  float32 (heads,) of ALiBi; of scores that add nothing

    Positions are taken in chunks of 512, each from scratch, folded in order.
    """
    heads, dim = q.shape
    repeats = heads // keys.numbers.shape[1]
    last = keys.numbers.shape[0] - 1
    first = 0 if window is None else max(0, last - window + 1)
    total = None
    for begin in range(first // _CHUNK * _CHUNK, last + 1, _CHUNK):
        seen = slice(max(begin, first), min(begin + _CHUNK, last + 1))
        k, v = (
            Cached(
                np.repeat(side.numbers[seen], repeats, axis=1),
                None if side.scales is None else np.repeat(side.scales[seen], repeats, axis=1),
            )
            for side in (keys, values)
        )
        scores = _canonical_scores(q, k, np.float32(scale))
        if softcap:
            scores = canonical_softcap(scores, softcap)
        if slopes is not None:
            scores = scores + np.arange(seen.start - last, seen.stop - last, dtype=np.float32) * slopes[:, None]
        top = scores.max(axis=1)
        p = np.zeros((heads, _CHUNK), np.float32)
        p[:, seen.start - begin : seen.stop - begin] = canonical_exp(scores - top[:, None])
        lanes = np.zeros((heads, 16), np.float32)
        for start in range(0, _CHUNK, 16):
            lanes = lanes + p[:, start : start + 16]
        for half in (8, 4, 2, 1):
            lanes = lanes[:, :half] + lanes[:, half : 2 * half]
        part = (top, lanes[:, 0], _canonical_outputs(p[:, seen.start - begin : seen.stop - begin], v, dim))
        total = part if total is None else _canonical_fold(total, part)
    assert total is not None
    if sinks is not None:
        top = np.maximum(total[0], sinks)
        keep, gain = canonical_exp(total[0] - top), canonical_exp(sinks - top)
        total = (top, total[1] * keep + gain, total[2] * keep[:, None])
    return total[2] * (np.float32(1) / total[1])[:, None]


def _canonical_scores(q: Float32, k: Cached, scale: np.float32) -> Float32:
    """float32 (heads, positions)"""
    heads, dim = q.shape
    total = np.zeros((heads, k.numbers.shape[0]), np.float32)
    if k.scales is None:
        scaled = q * scale
        for column in range(dim):
            total = fma(k.numbers[:, :, column].T, scaled[:, column, None], total)
        return total
    codes, sizes = canonical_int16(q.reshape(heads, -1, k.group))
    for number in range(dim // k.group):
        span = slice(number * k.group, (number + 1) * k.group)
        dots = np.einsum("phd,hd->hp", k.numbers[:, :, span], codes[:, number])
        both = k.scales[:, :, number].T * (sizes[:, number] * scale)[:, None]
        total = fma(dots.astype(np.float32), both, total)
    return total


def _canonical_outputs(p: Float32, v: Cached, dim: int) -> Float32:
    """float32 (heads, head_dim): probabilities p (heads, positions) times values, not divided yet."""
    total = np.zeros((len(p), dim), np.float32)
    if v.scales is None:
        for position in range(p.shape[1]):
            total = fma(v.numbers[position], p[:, position, None], total)
        return total
    for number in range(dim // v.group):
        span = slice(number * v.group, (number + 1) * v.group)
        codes, sizes = canonical_int16(p * v.scales[:, :, number].T)
        dots = np.einsum("phd,hp->hd", v.numbers[:, :, span], codes)
        total[:, span] = dots.astype(np.float32) * sizes[:, None]
    return total


def _canonical_fold(total: tuple[Float32, ...], part: tuple[Float32, ...]) -> tuple[Float32, ...]:
    """Two results (maximum, sum, output) as one."""
    top = np.maximum(total[0], part[0])
    keep, gain = canonical_exp(total[0] - top), canonical_exp(part[0] - top)
    output = fma(part[2], gain[:, None], total[2] * keep[:, None])
    return top, total[1] * keep + part[1] * gain, output


# ---------------------------------------------------------------- the decoder


def attention(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    window: int | None = None,
    *,
    softcap: float | None = None,
    alibi: bool = False,
    sinks: Array | None = None,
) -> Float64:
    """Causal attention: (tokens, heads, d) from q (tokens, heads, d) and k, v (keys, kv_heads, d).

    The queries are the last tokens of the keys' sequence. Query head h reads
    key head h // (heads / kv_heads). window: keys a query sees, its own
    included. sinks: (heads,)
    """
    tokens, heads, _ = q.shape
    keys, kv_heads, _ = k.shape
    out = np.empty((tokens, heads, v.shape[2]))
    slopes = alibi_slopes(heads)
    for token in range(tokens):
        last = keys - tokens + token
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(heads):
            kv = head // (heads // kv_heads)
            scores = k[first : last + 1, kv].astype(np.float64) @ q[token, head] * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            if alibi:
                scores = scores + slopes[head] * np.arange(first - last, 1)
            top = max(scores.max(), -np.inf if sinks is None else sinks[head])
            weights = np.exp(scores - top)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - top))
            out[token, head] = weights @ v[first : last + 1, kv].astype(np.float64) / total
    return out


def alibi_slopes(heads: int) -> Float64:
    """2 ** (-8 h / heads) for h = 1 .. heads; for numbers that are no power of two, as the paper's code."""
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / whole) for h in range(whole)]
    return np.array(slopes + [2 ** (-4 * (h + 1) / whole) for h in range(0, 2 * (heads - whole), 2)])


def feed_forward(block: FeedForwardSpec, first: Array) -> Float64:
    """(tokens, intermediate): activation(gate) * up of the first product, or its activation alone."""
    if not block.gated:
        return activate(block.activation, first)
    gate, up = np.split(first, 2, axis=-1)
    if block.activation == "swiglu_clamped":
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    return activate(block.activation, gate) * up


def route(logits: Array, how: ExpertsSpec, correction: Any = 0.0) -> tuple[Array, Float64]:
    """Experts (tokens, chosen) by likelihood, and their weights, from logits (tokens, count)."""
    softmax = np.exp(logits - logits.max(axis=1, keepdims=True))
    softmax /= softmax.sum(axis=1, keepdims=True)
    scores = {"softmax": softmax, "sigmoid": 1 / (1 + np.exp(-logits)), "chosen": logits}[how.routing]
    wishes = scores + correction
    if how.groups > 1:
        grouped = np.sort(wishes.reshape(len(wishes), how.groups, -1), axis=2)
        of_groups = grouped[:, :, -2:].sum(axis=2) if how.group_by == "two" else grouped[:, :, -1]
        best = np.argsort(-of_groups, axis=1)[:, : how.chosen_groups]
        allowed = np.zeros(of_groups.shape, bool)
        np.put_along_axis(allowed, best, True, axis=1)
        wishes = np.where(np.repeat(allowed, how.count // how.groups, axis=1), wishes, -np.inf)
    chosen = np.argsort(-wishes, axis=1)[:, : how.chosen]
    weights = np.take_along_axis(scores, chosen, axis=1)
    if how.routing == "chosen":
        weights = np.exp(weights - weights.max(axis=1, keepdims=True))
    if how.normalised or how.routing == "chosen":
        weights = weights / weights.sum(axis=1, keepdims=True)
    return chosen, weights * how.scale


def canonical_route(logits: Float32, how: ExpertsSpec, correction: Float32 | None = None) -> tuple[Array, Float32]:
    """The experts (chosen,) and float32 weights that every kernel finds for one token's logits (count,)."""
    one = np.float32(1)
    padded = np.full(-(-how.count // 16) * 16, -np.inf, np.float32)
    padded[: how.count] = logits
    scores = padded
    if how.routing == "softmax":
        scores = canonical_exp(padded - padded.max())
        scores = scores / _sum_of_lanes(scores.reshape(-1, 16))
    elif how.routing == "sigmoid":
        scores = one / (one + canonical_exp(np.float32(0) - padded))
    scores = scores[: how.count]
    wishes = scores if correction is None else scores + correction
    if how.groups > 1:
        ordered = -np.sort(-wishes.reshape(how.groups, -1), axis=1)
        of_groups = ordered[:, 0] + ordered[:, 1] if how.group_by == "two" else ordered[:, 0]
        best = np.argsort(-of_groups, kind="stable")[: how.chosen_groups]
        allowed = np.isin(np.arange(how.groups), best)
        wishes = np.where(np.repeat(allowed, how.count // how.groups), wishes, np.float32(-np.inf))
    chosen = np.argsort(-wishes, kind="stable")[: how.chosen]
    weights = scores[chosen]
    if how.routing == "chosen":
        weights = canonical_exp(weights - weights[0])
    total = one
    if how.normalised or how.routing == "chosen":
        total = np.float32(0)
        for weight in weights:
            total = total + weight
    return chosen, weights / total * np.float32(how.scale)


# ---------------------------------------------------------------- recurrent layers


def convolution(x: Array, weights: Array, before: Array, bias: Any = 0.0) -> Float64:
    """Each column by itself over the last rows: x (tokens, width), weights (taps, width), before (taps - 1, width)."""
    rows = np.concatenate([before, x]).astype(np.float64)
    taps, tokens = len(weights), len(x)
    return np.asarray(sum(rows[tap : tap + tokens] * weights[tap] for tap in range(taps))) + bias


def canonical_convolution(x: Float32, weights: Float32, before: Float32, bias: Float32 | None) -> Float32:
    """The float32 numbers that every kernel makes of the same."""
    rows, tokens = np.concatenate([before, x]), len(x)
    total = np.broadcast_to(np.float32(0) if bias is None else bias, x.shape)
    for tap, row in enumerate(weights):
        total = fma(rows[tap : tap + tokens], np.broadcast_to(row, x.shape), total)
    return np.asarray(total, np.float32)


def canonical_sigmoid(x: Float32) -> Float32:
    """1 / (1 + e ** -x) as every kernel computes it."""
    return canonical_reciprocal(np.float32(1) + canonical_exp(np.float32(0) - x))


def canonical_softplus(x: Float32) -> Float32:
    """ln(1 + e ** x) as every kernel computes it."""
    y = canonical_exp(np.float32(0) - np.abs(x))
    z = y / (np.float32(2) + y)
    square = z * z
    series = np.full(x.shape, np.float32(2 / 17))
    for degree in (15, 13, 11, 9, 7, 5, 3, 1):
        series = fma(series, square, np.float32(2 / degree))
    return fma(series, z, np.maximum(x, np.float32(0)))


def delta_rule(q: Array, k: Array, v: Array, beta: Array, decay: Array, state: Array) -> tuple[Float64, Float64]:
    """Outputs (tokens, heads, value_dim) and the state (heads, key_dim, value_dim) after them.

    q, k (tokens, heads, key_dim); v (tokens, heads, value_dim); beta, decay (tokens, heads)
    """
    out, state = np.zeros(v.shape), state.astype(np.float64)
    for token in range(len(q)):
        state = state * decay[token][:, None, None]
        lacking = (v[token] - np.einsum("hk,hkv->hv", k[token], state)) * beta[token][:, None]
        state = state + np.einsum("hk,hv->hkv", k[token], lacking)
        out[token] = np.einsum("hk,hkv->hv", q[token], state)
    return out, state


def canonical_delta_rule(
    q: Float32, k: Float32, v: Float32, beta: Float32, decay: Float32, state: Float32
) -> tuple[Float32, Float32]:
    """The float32 numbers that every kernel makes of the same: sums over rows in four parts."""

    def product(vector: Float32, matrix: Float32) -> Float32:
        parts = [np.zeros(v.shape[1:], np.float32) for _ in range(4)]
        for row in range(matrix.shape[1]):
            parts[row % 4] = fma(matrix[:, row], vector[:, row, None], parts[row % 4])
        return (parts[0] + parts[1]) + (parts[2] + parts[3])

    out = np.zeros(v.shape, np.float32)
    for token in range(len(q)):
        state = state * decay[token][:, None, None]
        lacking = (v[token] - product(k[token], state)) * beta[token][:, None]
        state = fma(lacking[:, None, :], k[token][:, :, None], state)
        out[token] = product(q[token], state)
    return out, state


class _Forward:
    """One pass over a prompt; see `forward`."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Any], tokens: int, rope_length: int) -> None:
        self.spec, self.weights, self.tokens, self.rope_length = spec, weights, tokens, rope_length
        self.positions = np.arange(tokens)
        self.inputs: Float64 | None = None  # (tokens, layers, size)
        self.kept: dict[int, tuple[Float64, Float64]] = {}  # keys and values of layers

    def product(self, name: str, value: Array, scale: float = 1.0) -> Float64:
        bias = np.asarray(self.weights.get(name + ".bias", 0.0), np.float64)
        return (linear(self.weights[name], value) + bias) * scale

    def norm(self, name: str, x: Array) -> Float64:
        weight, bias = self.weights.get(name, 1.0), self.weights.get(name + ".bias", 0.0)
        if self.spec.norm == "layer":
            return layer_norm(x, weight, bias, self.spec.norm_epsilon)
        return rms_norm(x, weight, self.spec.norm_epsilon)

    def head_norm(self, kind: str, x: Array, weight: Array) -> Float64:
        """Of queries or keys (tokens, heads, head_dim)."""
        epsilon = self.spec.norm_epsilon
        if kind == "head":
            return rms_norm(x, weight, epsilon)
        if kind == "each":
            return layer_norm(x, np.asarray(weight).reshape(x.shape[1:]), 0.0, epsilon)
        return rms_norm(x.reshape(self.tokens, -1), weight, epsilon).reshape(x.shape)

    def latent(self, name: str, how: AttentionSpec, latent: LatentSpec, x: Array, scale: float) -> Float64:
        """Heads of q and k have their rotary part behind the other, as in the paper; it makes no difference."""
        assert how.rope is not None
        down, rotary = self.product(name + "down", x), how.rope.dim
        inner, rotated = np.split(down, [down.shape[1] - latent.key_rank - rotary], axis=1)
        keys, rotated = np.split(rotated, [latent.key_rank], axis=1)
        if latent.query_rank is not None:
            inner = rms_norm(inner, self.weights[name + "query_norm"], latent.epsilon)
            inner = self.product(name + "query_up", inner)
        q = inner.reshape(self.tokens, how.heads, -1)
        up = self.product(name + "key_up", rms_norm(keys, self.weights[name + "key_norm"], latent.epsilon))
        k, v = np.split(up.reshape(self.tokens, how.heads, -1), [latent.plain], axis=2)
        q, q_rotated = np.split(q, [latent.plain], axis=2)
        rotated = np.broadcast_to(rotated[:, None], q_rotated.shape)
        q, k = (
            np.concatenate([plain, rotate(turned, self.positions, how.rope, self.rope_length)], axis=2)
            for plain, turned in ((q, q_rotated), (k, rotated))
        )
        mixed = attention(q, k, v, how.scale, how.window)
        return self.product(name + "out", mixed.reshape(self.tokens, -1), scale)

    def convolved(self, name: str, how: ConvolutionSpec, x: Array, scale: float) -> Float64:
        b, c, x = np.split(self.product(name + "in", x), 3, axis=1)
        kernel = np.asarray(self.weights[name + "kernel"]).reshape(how.width, how.taps).T
        mixed = c * convolution(
            b * x, kernel, np.zeros((how.taps - 1, how.width)), self.weights.get(name + "kernel.bias", 0)
        )
        return self.product(name + "out", mixed, scale)

    def corrected(self, name: str, how: DeltaSpec, x: Array, scale: float) -> Float64:
        """A gated delta net."""
        tokens, width = self.tokens, sum(how.parts)
        qkv, z = np.split(self.product(name + "in", x), [width], axis=1)
        kernel = np.asarray(self.weights[name + "kernel"]).reshape(width, how.taps).T
        qkv = activate("silu", convolution(qkv, kernel, np.zeros((how.taps - 1, width))))
        q, k, v = np.split(qkv, np.cumsum(how.parts)[:2], axis=1)
        q, k = (
            np.repeat(
                part / np.sqrt((part * part).sum(axis=2, keepdims=True) + 1e-6), how.heads // how.key_heads, axis=1
            )
            for part in (part.reshape(tokens, how.key_heads, -1) for part in (q, k))
        )
        b, a = np.split(self.product(name + "gates", x), 2, axis=1)
        rates = np.exp(np.asarray(self.weights[name + "decay"], np.float64))
        decay = np.exp(-rates * np.log1p(np.exp(a + self.weights[name + "decay.bias"])))
        state = np.zeros((how.heads, how.key_dim, how.value_dim))
        v = v.reshape(tokens, how.heads, -1)
        mixed, _ = delta_rule(q * how.key_dim**-0.5, k, v, 1 / (1 + np.exp(-b)), decay, state)
        mixed = rms_norm(mixed, self.weights[name + "out_norm"], self.spec.norm_epsilon)
        return self.product(name + "out", mixed.reshape(tokens, -1) * activate("silu", z), scale)

    def attended(self, number: int, how: AttentionSpec, x: Array, scale: float) -> Float64:
        name, weights = f"layers.{number}.attention.", self.weights
        if how.latent is not None:
            return self.latent(name, how, how.latent, x, scale)
        given = self.product(name + ("qkv" if how.keys_of is None else "q"), x)
        qkv = given.reshape(self.tokens, -1, how.head_dim)
        gate = qkv[:, how.heads + 2 * how.kv_heads :]
        if how.clip is not None:
            qkv = np.clip(qkv, -how.clip, how.clip)
        q, k, v, _ = np.split(
            qkv, np.cumsum([how.heads, how.kv_heads, how.kv_heads]), axis=1
        )  # (tokens, heads, head_dim)
        if how.keys_of is not None:
            k, v = self.kept[how.keys_of]
        if how.value_norm:
            v = rms_norm(v, 1.0, self.spec.norm_epsilon)
        if how.qk_norm is not None and not how.qk_norm_last:
            q = self.head_norm(how.qk_norm, q, weights[name + "q_norm"])
        if how.query_growth is not None:
            growth = how.query_growth
            q = q * (1 + growth.rate * np.log1p(self.positions // growth.period))[:, None, None]
        if how.rope is not None:
            q = rotate(q, self.positions, how.rope, self.rope_length)
        if how.qk_norm is not None and how.qk_norm_last:
            q = self.head_norm(how.qk_norm, q, weights[name + "q_norm"])
        if how.keys_of is None:
            if how.qk_norm is not None and not how.qk_norm_last:
                k = self.head_norm(how.qk_norm, k, weights[name + "k_norm"])
            if how.rope is not None:
                k = rotate(k, self.positions, how.rope, self.rope_length)
            if how.qk_norm is not None and how.qk_norm_last:
                k = self.head_norm(how.qk_norm, k, weights[name + "k_norm"])
            self.kept[number] = k, v
        extras = {"softcap": how.softcap, "alibi": how.alibi, "sinks": weights.get(name + "sinks")}
        mixed = attention(q, k, v, how.scale, how.window, **extras)
        if how.gated:
            mixed = mixed / (1 + np.exp(-gate))
        return self.product(name + "out", mixed.reshape(self.tokens, -1), scale)

    def experts(self, name: str, block: FeedForwardSpec, how: ExpertsSpec, x: Array) -> Float64:
        chosen, weights = route(self.product(name + "router", x), how, self.weights.get(name + "router.correction", 0))
        out = np.zeros(x.shape)
        parts = {
            end: np.asarray(self.weights[f"{name}experts.{end}"]).reshape(how.count, -1, size)
            for end, size in (("gate_up", x.shape[1]), ("down", block.intermediate))
        }
        biases = {end: np.asarray(self.weights.get(f"{name}experts.{end}.bias", np.zeros(1))) for end in parts}
        for token, (experts, shares) in enumerate(zip(chosen, weights, strict=True)):
            for expert, share in zip(experts, shares, strict=True):
                first, second = (
                    biases[end].reshape(how.count, -1)[expert] if biases[end].size > 1 else 0.0 for end in parts
                )
                inner = feed_forward(block, parts["gate_up"][expert] @ x[token] + first)
                out[token] += share * (parts["down"][expert] @ inner + second)
        if how.shared is not None:
            shared = self.product(name + "shared.down", feed_forward(block, self.product(name + "shared.gate_up", x)))
            if how.shared_gate:
                shared = shared / (1 + np.exp(-self.product(name + "shared.gate", x)))
            out = out + shared
        return out

    def fed_forward(self, name: str, block: FeedForwardSpec, x: Array, scale: float) -> Float64:
        if block.experts is not None:
            return self.experts(name, block, block.experts, x) * scale
        first = self.product(name + ("gate_up" if block.gated else "up"), x)
        return self.product(name + "down", feed_forward(block, first), scale)

    def mixed(self, number: int, layer: LayerSpec, x: Array) -> Float64:
        """What stands before the feed-forward block."""
        name, scale = f"layers.{number}.recurrence.", layer.residual_scale
        if layer.convolution is not None:
            return self.convolved(name, layer.convolution, x, scale)
        if layer.delta is not None:
            return self.corrected(name, layer.delta, x, scale)
        assert layer.attention is not None
        return self.attended(number, layer.attention, x, scale)

    def layer(self, number: int, layer: LayerSpec, x: Array) -> Float64:
        name, first = f"layers.{number}.", "recurrence" if layer.attention is None else "attention"

        def before(block: str, x: Array) -> Float64:
            block = first if layer.shared_norm else block
            return x if layer.norms == "post" else self.norm(f"{name}{block}.norm", x)

        def after(block: str, y: Array) -> Float64:
            return y if layer.norms == "pre" else self.norm(f"{name}{block}.post_norm", y)

        scale = layer.residual_scale
        attended = self.mixed(number, layer, before(first, x))
        if layer.parallel:
            fed = self.fed_forward(name + "feed_forward.", layer.feed_forward, before("feed_forward", x), scale)
            return x + attended + fed
        x = x + after("attention", attended)
        fed = self.fed_forward(name + "feed_forward.", layer.feed_forward, before("feed_forward", x), scale)
        x = x + after("feed_forward", fed)
        if self.inputs is not None:
            gate = activate(layer.feed_forward.activation, self.product(name + "input.gate", x))
            x = x + self.norm(name + "input.post_norm", self.product(name + "input.out", gate * self.inputs[:, number]))
        return x * float(self.weights[name + "scale"][0]) if layer.scaled else x


def forward(spec: ModelSpec, weights: Mapping[str, Any], ids: Any, rope_length: int = 0) -> Float64:
    """Logits (tokens, vocab_size) of a whole prompt, in float64.

    weights: name in our files -> array, or `Quantised` for a matrix whose
        activations are quantised too
    rope_length: what `inverse_frequencies` is asked for
    """

    def rows(name: str) -> Float64:
        table = weights[name]
        return table.weights() if isinstance(table, Quantised) else np.asarray(table, np.float64)

    run = _Forward(spec, weights, len(ids), rope_length)
    x = rows("embedding")[np.asarray(ids)] * spec.embedding_scale  # (tokens, hidden)
    if spec.learned_positions:
        x = x + rows("positions")[: len(ids)]
    if spec.layer_inputs is not None:
        own = rows("layer_inputs")[np.asarray(ids)] * spec.layer_inputs**0.5
        other = run.product("layer_inputs.of_embedding", x) * spec.hidden**-0.5
        own, other = (part.reshape(len(ids), len(spec.layers), -1) for part in (own, other))
        run.inputs = (rms_norm(other, weights["layer_inputs.norm"], spec.norm_epsilon) + own) / math.sqrt(2)
    for number, layer in enumerate(spec.layers):
        x = run.layer(number, layer, x)
    logits = linear(weights["embedding" if spec.tied_head else "head"], run.norm("norm", x)) * spec.logit_scale
    logits = logits + np.asarray(weights.get("head.bias", 0.0), np.float64) * spec.logit_scale
    cap = spec.logit_softcap
    return logits if cap is None else cap * np.tanh(logits / cap)
