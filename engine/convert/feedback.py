"""Rounds weights such that products keep their values, not the weights theirs.

What a column's rounding does to a product depends on the inputs it meets, and a
later column whose inputs go along with it can make good for it. From the second
moments of the inputs, H = X' X, columns are rounded one by one and each error is
taken off the columns that are still to come (Frantar et al., "GPTQ", 2023; with
the inverse's Cholesky factor U, column k gets -error * U[j, k] / U[j, j]). The
error that remains of column j then counts 1 / U[j, j]^2, which is the weight that
the compiled search for scales, multipliers and offsets of each span is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.core.library import Kernels
from engine.core.quant import FORMATS, Codes, Layout

__all__ = ["HEADROOM", "Feedback", "Moments", "has_feedback", "rounded"]

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

# Columns whose errors are made good for by each other; those farther apart are taken to have nothing in common, which
# keeps the moments of wide inputs, and the time for their inverse, small.
_BLOCK = 2048
# Added to the diagonal, as a share of its mean: what few tokens say of so many columns is not taken at its word.
_DAMPING = 0.01
# Columns whose errors reach each other at once; those behind them get all of these together, in one product.
_STEP = 16
_SMALL = 64
# How far feedback may carry a weight beyond the largest there was.
HEADROOM = 2.0


class Moments:
    """Second moments of a product's inputs, in blocks of columns along the diagonal; or (alone) of each column only."""

    def __init__(self, columns: int, *, alone: bool = False) -> None:
        self.columns = columns
        self.rows = 0
        self._squares = np.zeros(columns, np.float64)
        firsts = () if alone else range(0, columns, _BLOCK)
        self._blocks = [(first, np.zeros((min(_BLOCK, columns - first),) * 2, np.float32)) for first in firsts]

    def add(self, x: Float32) -> None:
        """Inputs, float32 (rows, columns)."""
        self.rows += len(x)
        self._squares += np.einsum("ij,ij->j", x, x)
        for first, block in self._blocks:
            part = x[:, first : first + len(block)]
            np.add(block, part.T @ part, out=block)

    @property
    def mean_squares(self) -> Float32:
        """float32 (columns,)."""
        return (self._squares / max(1, self.rows)).astype(np.float32)

    def feedback(self) -> Feedback:
        """What `rounded` wants to know of them."""
        return Feedback(tuple((first, _factor(block)) for first, block in self._blocks))


@dataclass(frozen=True, slots=True)
class Feedback:
    """factors: (first column, upper Cholesky factor of the inverse of the moments) of each block of columns."""

    factors: tuple[tuple[int, Float32], ...]

    @property
    def importance(self) -> Float32:
        """float32 (columns,): what each column's squared error costs, about 1 on average."""
        costs = np.concatenate([factor.diagonal() ** -2.0 for _, factor in self.factors])
        return np.asarray(costs / costs.mean(), np.float32)


def _factor(moments: Float32) -> Float32:
    """U, upper triangular, with U' U the inverse of the damped moments: the inverse of R in R R' = moments."""
    held: Float64 = moments.astype(np.float64)
    mean = float(held.diagonal().mean())
    if not mean > 0:
        return np.eye(len(held), dtype=np.float32)
    held[np.diag_indices(len(held))] += _DAMPING * mean
    held /= mean
    lower = np.asarray(np.linalg.cholesky(held[::-1, ::-1]), np.float64)
    return _inverse(lower[::-1, ::-1]).astype(np.float32, order="C")


def _inverse(upper: Float64) -> Float64:
    """Of a triangular matrix, by halves: a third of the work of any matrix's."""
    size = len(upper)
    if size <= _SMALL:
        return np.triu(np.linalg.inv(upper))
    half = size // 2
    out = np.zeros_like(upper)
    first, last = _inverse(upper[:half, :half]), _inverse(upper[half:, half:])
    out[:half, :half], out[half:, half:] = first, last
    out[:half, half:] = -(first @ upper[:half, half:]) @ last
    return out


def has_feedback(name: str) -> bool:
    """Whether weights in the format `name` are rounded coarsely enough for errors to matter."""
    return name in FORMATS and FORMATS[name].steps > 0


def rounded(weights: Float32, feedback: Feedback, layout: Layout, exponent: int, kernels: Kernels) -> Codes:
    """The codes of some rows of a matrix, float32 (rows, cols); rows are independent of each other.

    layout: of these rows, in a format that `has_feedback`. exponent: as for weights HEADROOM times as large.
    """
    rows, cols = weights.shape
    span = layout.span
    importance = feedback.importance
    limit = np.abs(weights).max() * np.float32(HEADROOM)
    left = np.ascontiguousarray(weights.T)  # (cols, rows): what is still to be rounded, errors taken off
    codes = np.empty((cols, rows), np.uint8)
    spans: list[Codes] = []
    for first, factor in feedback.factors:
        for begin in range(0, len(factor), span):
            end = min(begin + span, len(factor))
            here = slice(first + begin, first + end)
            np.clip(left[here], -limit, limit, out=left[here])
            grid = _grid(left[here], importance[here], layout, exponent, kernels)
            errors = _rounded_span(left[here], factor[begin:end, begin:end], grid, layout, exponent, codes[here])
            left[first + end : first + len(factor)] -= factor[begin:end, end:].T @ errors
            spans.append(grid)
    parts = [(one.scales, one.multipliers, one.offsets) for one in spans]
    scales, multipliers, offsets = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    return Codes(np.ascontiguousarray(codes.T), scales, multipliers, offsets)


def _grid(span: Float32, importance: Float32, layout: Layout, exponent: int, kernels: Kernels) -> Codes:
    """Scale, multipliers and offsets that suit a span, float32 (columns, rows), best."""
    own = FORMATS[layout.format.name].layout(span.shape[1], span.shape[0], layout.group)
    buffer = own.empty()
    own.pack_rows(np.ascontiguousarray(span.T), 0, buffer, exponent, kernels, importance)
    return own.codes(buffer)


def _rounded_span(  # noqa: PLR0917 - one step of `rounded`
    left: Float32, factor: Float32, grid: Codes, layout: Layout, exponent: int, codes: NDArray[np.uint8]
) -> Float32:
    """Round a span column by column; leaves codes, returns errors over U[j, j], both (columns, rows)."""
    assert grid.multipliers is not None
    assert grid.offsets is not None
    scale = grid.scales[:, 0].astype(np.float32) * np.float32(2.0) ** np.float32(exponent)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    steps = (grid.multipliers.astype(np.float32) * scale[:, None]).T.copy()  # (groups, rows): weight of a code's step
    lowest = (grid.offsets.astype(np.float32) * scale[:, None]).T.copy()
    codes_per_weight = (inverse[:, None] / grid.multipliers.astype(np.float32)).T.copy()
    places = (grid.offsets.astype(np.float32) / grid.multipliers.astype(np.float32)).T.copy()
    group, top = layout.group, np.float32(layout.format.steps)
    errors = np.empty_like(left)
    count = len(left)
    for begin in range(0, count, _STEP):
        end = min(begin + _STEP, count)
        for column in range(begin, end):
            index = column // group
            code = left[column] * codes_per_weight[index]
            code += places[index]
            np.rint(code, out=code)
            np.clip(code, 0, top, out=code)
            codes[column] = code
            error = errors[column]
            np.multiply(code, steps[index], out=error)
            error -= lowest[index]
            np.subtract(left[column], error, out=error)
            error /= factor[column, column]
            left[column + 1 : end] -= factor[column, column + 1 : end, None] * error
        left[end:] -= factor[begin:end, end:].T @ errors[begin:end]
    return errors
