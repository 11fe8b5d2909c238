"""Exponential and logarithm that give the same bits on every computer.

numpy's and the C library's own differ in the last bit between processors and
versions; these use only operations that IEEE 754 rounds in one way.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["exp", "log"]

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693147180369123816490  # 33 bits: its product with an exponent is exact
_LN2_LOW = 1.90821492927058770002e-10
_COEFFICIENTS = tuple(1.0 / math.factorial(n) for n in range(13, -1, -1))
_SMALLEST = -708.0  # below, the result would leave the normal numbers: it is 0
_LARGEST = 709.0
_SLICE = 8192  # numbers worked on at a time: the temporaries stay in the cache


def exp(x: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """Exponentials of a vector, float64; relative error <= 4e-16.

    x below -708 gives exactly 0, above 709 inf, NaN gives NaN.
    """
    out = np.empty(x.size, np.float64)
    for start in range(0, x.size, _SLICE):
        _exp(x[start : start + _SLICE].astype(np.float64), out[start : start + _SLICE])
    return out


def _exp(x: npt.NDArray[np.float64], out: npt.NDArray[np.float64]) -> None:
    # x = n ln 2 + r with |r| <= ln 2 / 2; e ** r by its series.
    r = np.clip(x, _SMALLEST, _LARGEST)
    n = np.rint(r * _LOG2_E)
    r -= n * _LN2_HIGH
    r -= n * _LN2_LOW
    out[:] = _COEFFICIENTS[0]
    for coefficient in _COEFFICIENTS[1:]:
        out *= r
        out += coefficient
    with np.errstate(invalid="ignore"):  # a NaN has no integer; it is put back below
        exponent = n.astype(np.int64)
    out *= ((exponent + 1023) << 52).view(np.float64)
    out[x < _SMALLEST] = 0.0
    out[x > _LARGEST] = np.inf
    out[np.isnan(x)] = np.nan


def log(x: float) -> float:
    """Natural logarithm of a positive finite number; relative error <= 4e-16 away from 1."""
    fraction, exponent = math.frexp(x)  # exact
    if fraction < math.sqrt(0.5):  # sqrt is rounded correctly everywhere
        fraction, exponent = fraction * 2.0, exponent - 1
    # log m = 2 artanh(s) = 2 (s + s^3/3 + s^5/5 + ...), |s| <= 0.1716
    s = (fraction - 1.0) / (fraction + 1.0)
    square = s * s
    series = 0.0
    for n in range(21, 1, -2):
        series = (series + 1.0 / n) * square
    return exponent * _LN2_HIGH + (2.0 * s + (2.0 * s * series + exponent * _LN2_LOW))
