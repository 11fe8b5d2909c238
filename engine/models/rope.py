"""Rotary frequencies of a `RopeSpec`: the same numbers, to the bit, on every machine.

Knows the scaling rules, not positions or kernels. Follows the steps of
transformers' `modeling_rope_utils` in float32, in their order, so that both
agree to one unit in the last place (two where yarn mixes and where "dynamic"
stretches); powers and logarithms come from Python's `decimal`, never from a C
library, whose last digit differs between systems.
"""

from __future__ import annotations

from decimal import Context, Decimal
from math import ceil, floor, pi, sqrt

import numpy as np
from numpy.typing import NDArray

from engine.models.spec import RopeScaling, RopeSpec

__all__ = ["inverse_frequencies", "logarithm", "power"]

Float32 = NDArray[np.float32]
_DECIMAL = Context(prec=40)


def inverse_frequencies(rope: RopeSpec, length: int = 0) -> tuple[Float32, float]:
    """(float32 (dim / 2,): radians per position of each pair, factor on cos and sin).

    length: tokens that the sequence reaches. Only two kinds look at it:
    "dynamic" stretches the base as soon as it exceeds `original_context`, and
    "longrope" changes from its short to its long factors there. Keys that were
    rotated for another length do not fit, so whoever caches keys must choose
    one length for a sequence's whole life.
    """
    scaling = rope.scaling
    if scaling is None:
        return _over(1, _powers(np.float32(rope.theta), rope.dim)), 1.0
    match scaling.kind:
        case "linear":
            return _over(1, _powers(np.float32(rope.theta), rope.dim)) / np.float32(scaling.factor), 1.0
        case "dynamic":
            return _over(1, _powers(_stretched_base(rope, scaling, length), rope.dim)), 1.0
        case "ntk":
            base = np.float32(rope.theta * float(power(scaling.factor, rope.dim / (rope.dim - 2))))
            return _over(1, _powers(base, rope.dim)), 1.0
        case "llama3":
            return _llama3(rope, scaling), 1.0
        case "yarn":
            return _yarn(rope, scaling), _yarn_attention_factor(scaling)
        case "proportional":
            turning = int(scaling.factor * rope.dim // 2)
            frequencies = _over(1, _powers(np.float32(rope.theta), rope.dim))
            frequencies[turning:] = 0
            return frequencies, 1.0
        case "longrope":
            chosen = scaling.long_factor if length > scaling.original_context else scaling.short_factor
            powers = _powers(np.float32(rope.theta), rope.dim)
            return _over(1, np.array(chosen, np.float32) * powers), _longrope_attention_factor(scaling)


def _stretched_base(rope: RopeSpec, scaling: RopeScaling, length: int) -> np.float32:
    """NTK: the base that makes the slowest pair turn over `length` as it did over the original context."""
    length = max(length, scaling.original_context)
    stretch = np.float32(scaling.factor) * np.float32(length) / np.float32(scaling.original_context)
    stretch -= np.float32(scaling.factor - 1)
    return np.float32(rope.theta) * power(float(stretch), rope.dim / (rope.dim - 2))


def _llama3(rope: RopeSpec, scaling: RopeScaling) -> Float32:
    """Short wavelengths stay, long ones are divided by the factor, between both are mixed."""
    plain = _over(1, _powers(np.float32(rope.theta), rope.dim))
    factor, context = np.float32(scaling.factor), scaling.original_context
    wavelength = _over(2 * pi, plain)
    longest, shortest = context / scaling.low_freq_factor, context / scaling.high_freq_factor
    share = _over(context, wavelength) - np.float32(scaling.low_freq_factor)
    share /= np.float32(scaling.high_freq_factor - scaling.low_freq_factor)
    mixed = (np.float32(1) - share) * plain / factor + share * plain
    slow = np.where(wavelength > np.float32(longest), plain / factor, mixed)
    return np.where(wavelength < np.float32(shortest), plain, slow)


def _yarn(rope: RopeSpec, scaling: RopeScaling) -> Float32:
    """Pairs that turn often keep their frequency, pairs that hardly turn are divided, a ramp between."""
    powers = _powers(np.float32(rope.theta), rope.dim)

    def pair_with(rotations: float) -> float:
        """The (fractional) pair that makes this many turns over the original context."""
        turns = scaling.original_context / (rotations * 2 * pi)
        return rope.dim * logarithm(turns) / (2 * logarithm(rope.theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # as transformers does; a step instead of a division by zero
    ramp = (np.arange(rope.dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept: Float32 = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    divided = _over(1, np.float32(scaling.factor) * powers)
    mixed: Float32 = divided * (np.float32(1) - kept) + _over(1, powers) * kept
    return mixed


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * logarithm(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)


def _longrope_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    return sqrt(1 + logarithm(scaling.factor) / logarithm(scaling.original_context))


def _powers(base: np.float32, dim: int) -> Float32:
    """The powers base ** (2i / dim), one for each pair i: float32 (dim / 2,)."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.array([power(float(base), float(exponent)) for exponent in exponents], np.float32)


def power(base: float, exponent: float) -> np.float32:
    """One power, rounded once."""
    return np.float32(float(_DECIMAL.power(Decimal(base), Decimal(exponent))))


def logarithm(value: float) -> float:
    """The natural logarithm, rounded once."""
    return float(_DECIMAL.ln(Decimal(value)))


def _over(numerator: float, values: Float32) -> Float32:
    """A quotient by way of the reciprocal: the two roundings that torch makes."""
    reciprocal: Float32 = np.float32(1) / values
    return reciprocal * np.float32(numerator)
