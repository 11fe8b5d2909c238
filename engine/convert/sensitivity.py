"""Which matrices deserve more bits, by measurement.

A few short windows go through the source layer by layer, and with them, for
every layer, a variant in which that layer alone was rounded to 4 bits: what the
layer costs is the divergence that its variant ends with. Within a layer the cost
is shared by how far each matrix alone moves the layer's output. With more bits
it shrinks as the matrix's own error does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from engine.convert.calibration import cut
from engine.convert.feedback import Moments
from engine.convert.layerwise import Float32, FloatModel
from engine.convert.source import Source
from engine.core.library import Kernels
from engine.core.quant import BLOCK_ROWS, FORMATS, magnitude
from engine.core.team import Team
from engine.errors import SettingError
from engine.models.spec import TensorSpec
from engine.models.weights import tensor_bytes

__all__ = ["LADDER", "Scan", "chosen_formats", "divergence", "log_probabilities"]

LADDER = ("q4", "q6", "q8")
"""Formats from small to exact."""

_WINDOWS, _TOKENS = 4, 64
# Rows by which the error of a format is judged: enough of them, from all over the matrix.
_SAMPLED_ROWS = 256


class Scan:
    """The measurement. `run` it, then `harm` says what every format costs: matrix -> format -> divergence in nats."""

    def __init__(self, source: Source, text: str, group: int, kernels: Kernels, team: Team) -> None:
        """Raises InputError when the model cannot read the text."""
        self.harm: dict[str, dict[str, float]] = {}
        self._windows = cut(source, text, most=_WINDOWS, tokens=_TOKENS)
        most = max(map(len, self._windows))
        self._model = FloatModel(source, kernels, team, most, head_rows=most)
        self._kernels, self._group = kernels, group

    def run(self) -> Iterator[None]:
        """Every yield is a place to stop."""
        model, last = self._model, len(self._model.spec.layers) - 1
        plain = model.embedded(self._windows)
        variants: list[list[Float32]] = []
        shares: list[dict[str, float]] = []
        gains: dict[str, dict[str, float]] = {}
        for number in range(last + 1):
            model.load(number)
            yield
            moments: dict[str, Moments] = {}

            def observe(name: str, x: Float32, _expert: int, into: dict[str, Moments] = moments) -> None:
                into.setdefault(name, Moments(x.shape[1], alone=True)).add(x)

            after = [model.run(x, observe) for x in plain]
            rough = {}
            for name, seen in moments.items():
                if name.endswith(".router") or name == "head":
                    continue
                rough[name] = self._rounded(model.weights[name], "q4")
                gains[name] = self._errors(model.weights[name], seen.mean_squares)
                yield
            shares.append({})
            for name, weights in rough.items():
                moved = [model.run(x, instead={name: weights}) for x in plain]
                shares[-1][name] = float(sum(np.square(a - b).sum() for a, b in zip(moved, after, strict=True)))
                yield
            if number == last:
                yield from self._finish(plain, [*variants, plain], rough, shares, gains)
                return
            for variant in variants:
                variant[:] = [model.run(x) for x in variant]
                yield
            variants.append([model.run(x, instead=rough) for x in plain])
            plain = after
            yield

    def _finish(
        self,
        plain: list[Float32],
        variants: list[list[Float32]],
        rough: Mapping[str, Float32],
        shares: list[dict[str, float]],
        gains: Mapping[str, Mapping[str, float]],
    ) -> Iterator[None]:
        """The last layer, whose own variant differs from here on, and the divergences."""
        costs = np.zeros(len(variants))
        for place, x in enumerate(plain):
            first = len(x) // 4
            expected = log_probabilities(self._model.logits(x, first))
            for number, variant in enumerate(variants):
                instead = rough if number == len(variants) - 1 else {}
                found = log_probabilities(self._model.logits(variant[place], first, instead))
                costs[number] += float(divergence(expected, found).mean()) / len(plain)
                yield
        for cost, share in zip(costs, shares, strict=True):
            total = sum(share.values()) or 1.0
            for name, part in share.items():
                own = gains[name]
                self.harm[name] = {
                    form: cost * part / total * error / (own["q4"] or 1.0) for form, error in own.items()
                }

    def _rounded(self, weights: Float32, form: str) -> Float32:
        layout = FORMATS[form].layout(weights.shape[0], weights.shape[1], self._group)
        exponent, buffer = layout.format.exponent_for(magnitude(weights)), layout.empty()
        layout.pack_rows(weights, 0, buffer, exponent, self._kernels)
        return layout.unpack(buffer, exponent)

    def _errors(self, weights: Float32, mean_squares: Float32) -> dict[str, float]:
        """Format -> error of the product, from some of the rows."""
        step = max(1, len(weights) // _SAMPLED_ROWS)
        rows = np.ascontiguousarray(weights[::step][: _SAMPLED_ROWS // BLOCK_ROWS * BLOCK_ROWS])
        return {form: float((np.square(self._rounded(rows, form) - rows) @ mean_squares).sum()) for form in LADDER}


@dataclass(frozen=True, slots=True)
class _Step:
    """One matrix, one format up."""

    worth: float
    name: str
    form: str
    bytes: int


def chosen_formats(
    tensors: Mapping[str, TensorSpec], harm: Mapping[str, Mapping[str, float]], group: int, spare: int
) -> dict[str, str]:
    """The formats that save the most divergence for at most `spare` bytes beyond all matrices in the smallest one.

    What saves most for a byte comes first. harm: of the matrices that may be chosen for.

    Raises:
        SettingError: there is not even the room for the smallest format
    """
    if spare < 0:
        raise SettingError("the budget is too small")
    chosen = dict.fromkeys(harm, LADDER[0])

    def next_step(name: str) -> _Step | None:
        place = LADDER.index(chosen[name])
        if place == len(LADDER) - 1:
            return None
        form = LADDER[place + 1]
        more = tensor_bytes(tensors[name], form, group) - tensor_bytes(tensors[name], chosen[name], group)
        return _Step((harm[name][chosen[name]] - harm[name][form]) / max(1, more), name, form, more)

    steps = {name: step for name in chosen if (step := next_step(name)) is not None}
    while steps:
        step = max(steps.values(), key=lambda one: (one.worth, one.name))
        if step.bytes > spare or step.worth <= 0:
            del steps[step.name]
            continue
        chosen[step.name], spare = step.form, spare - step.bytes
        following = next_step(step.name)
        if following is None:
            del steps[step.name]
        else:
            steps[step.name] = following
    return chosen


def log_probabilities(logits: Float32) -> Float32:
    """Of each row, float32 (rows, vocab_size)."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return np.asarray(shifted, np.float32)


def divergence(expected: Float32, found: Float32) -> Float32:
    """Kullback-Leibler divergence of each row in nats, from log-probabilities."""
    rows = (np.exp(expected) * (expected - found)).sum(axis=1, dtype=np.float64)
    return np.asarray(np.maximum(rows, 0), np.float32)
