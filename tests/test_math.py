"""Our own exp and log against extended precision, and to the bit where bits are promised."""

from __future__ import annotations

import decimal
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.core.math import exp, log

decimal.getcontext().prec = 40


@given(st.floats(-708, 709))
def test_exp_is_within_its_error(x: float) -> None:
    exact = decimal.Decimal(x).exp()
    assert abs(decimal.Decimal(float(exp(np.array([x]))[0])) - exact) <= exact * decimal.Decimal("4e-16")


def test_exp_at_its_ends() -> None:
    x = np.array([0.0, -0.0, -708.1, -np.inf, 709.5, np.inf, np.nan])
    assert np.array_equal(exp(x), [1.0, 1.0, 0.0, 0.0, np.inf, np.inf, np.nan], equal_nan=True)


def test_exp_does_not_depend_on_the_company_of_a_number() -> None:
    x = np.random.default_rng(1).uniform(-700, 700, 20_000)
    whole = exp(x)
    assert [float(exp(x[i : i + 1])[0]) for i in range(0, x.size, 97)] == whole[::97].tolist()
    assert np.array_equal(exp(x[::-3]), whole[::-3])


def test_exp_never_decreases() -> None:
    x = np.sort(np.random.default_rng(2).uniform(-50, 50, 100_000))
    assert np.all(np.diff(exp(x)) >= 0)


@given(st.floats(1e-300, 1e300))
def test_log_is_within_its_error(x: float) -> None:
    exact = decimal.Decimal(x).ln()
    error = abs(decimal.Decimal(log(x)) - exact)
    assert error <= max(abs(exact) * decimal.Decimal("4e-16"), decimal.Decimal("2e-16"))


def test_bits_are_pinned() -> None:
    """Changing one bit here changes answers that people asked to be repeatable."""
    x = np.array([-37.25, -1.0, -0.1, 0.3, 1.0, 20.5])
    assert [value.hex() for value in exp(x).tolist()] == PINNED_EXP
    assert [log(value).hex() for value in (1e-9, 0.7, 2.0, 10.0)] == PINNED_LOG
    assert log(1.0) == 0.0
    assert math.isclose(log(2.0), math.log(2.0), rel_tol=1e-15)


PINNED_EXP = [
    "0x1.3278bcd70e981p-54",
    "0x1.78b56362cef38p-2",
    "0x1.cf46d99d52b3ap-1",
    "0x1.599058c8c1a96p+0",
    "0x1.5bf0a8b14576ap+1",
    "0x1.7d6c4f0bcdd5cp+29",
]
PINNED_LOG = [
    "-0x1.4b927f32bffb8p+4",
    "-0x1.6d3c324e13f50p-2",
    "0x1.62e42fefa39efp-1",
    "0x1.26bb1bbb55516p+1",
]
