"""The twins against something simpler still, and the whole twin against transformers' logits where they are at hand."""

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests import naive

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def rounded(value):
    """The float32 nearest to a Fraction, ties to even."""
    guess = np.float32(float(value))
    near = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    near = [x for x in near if np.isfinite(x)]
    return min(near, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(np.uint32)) & 1))


@given(finite, finite, finite)
def test_fma_rounds_once(a, b, c):
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if abs(exact) < Fraction(2) ** 127:
        assert naive.fma(np.float32(a), np.float32(b), np.float32(c)) == rounded(exact)


def test_fma_rounds_once_where_two_roundings_differ():
    # The product is half a unit below a tie of c, by less than float64 can say.
    a, b, c = np.float32(1 + 2**-23), np.float32(2**-24 * (1 - 2**-24)), np.float32(1)
    exact = Fraction(float(a)) * Fraction(float(b)) + 1
    assert naive.fma(a, b, c) == rounded(exact)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        a, b = rng.integers(2**23, 2**24, 2).astype(np.float32)
        c = np.float32(float(rng.integers(2**23, 2**24)) * 2.0 ** rng.integers(20, 60))
        assert naive.fma(a, b, c) == rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def test_a_window_hides_what_is_older():
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((9, 2, 4)), rng.standard_normal((9, 1, 4)), rng.standard_normal((9, 1, 4))
    full, seen = naive.attention(q, k, v, 0.5), naive.attention(q, k, v, 0.5, window=4)
    assert np.array_equal(full[:4], seen[:4])
    assert not np.allclose(full[4:], seen[4:])
    assert np.allclose(seen[8], naive.attention(q[8:], k[5:], v[5:], 0.5)[0])


def test_rotation_depends_on_distance_only():
    from engine.models.spec import RopeSpec

    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((1, 1, 8)), rng.standard_normal((1, 1, 8))
    for interleaved in (False, True):
        rope = RopeSpec(1e4, 6, interleaved)
        dots = [(naive.rotate(q, [at + 5], rope) * naive.rotate(k, [at], rope)).sum() for at in (0, 7, 1000)]
        assert np.allclose(dots, dots[0])
        assert np.array_equal(naive.rotate(q, [3], rope)[..., 6:], q[..., 6:])
