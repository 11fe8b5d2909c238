"""From a row of logits to one token; knows nothing of models, text or batches.

A draw is a pure function of the row, the settings, the seed and the tokens
before it: no state is carried from one draw to the next, so pausing, resuming,
company in the batch and the slicing of the prompt cannot change an answer.
Every sum runs in one written order and `exp` is our own, so that the answer
does not depend on the processor either.

Order of the chain, as `settings.Sampling` documents it:

    penalties -> temperature -> top-k -> top-p -> min-p -> typical-p -> draw
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.core.math import exp, log
from engine.errors import InternalError
from engine.settings import Sampling

__all__ = ["Draw", "Sampler", "fresh_seed"]

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.integer[Any]]

# Below this temperature even a difference of 0.001 between two logits decides with certainty.
_GREEDY_BELOW = 1e-5
_BLOCK = 64
_LEAST_WEIGHT = 1e-300  # of a candidate, the likeliest having 1; less is none at all


def fresh_seed() -> int:
    """A seed that nobody can foresee, in the range that `Sampling.seed` allows."""
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class Draw:
    """The token drawn; with `alternatives` asked for, what the raw model thought of it and its rivals."""

    token: int
    logprob: float = 0.0
    alternatives: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Draws for all requests of one model.

    vocab_size: columns of the logits. missing: ids that stand for no token
    (padded rows of the embedding); they are never drawn. unpenalised: ids that
    the penalties spare, the end tokens: an answer must stay able to end.
    """

    def __init__(
        self, vocab_size: int, *, missing: Ids | None = None, unpenalised: frozenset[int] = frozenset()
    ) -> None:
        self.vocab_size = vocab_size
        self._missing = np.zeros(0, np.int64) if missing is None else missing
        self._missing_ids = frozenset(self._missing.tolist())
        self._penalised = np.ones(vocab_size, np.bool_)
        self._penalised[[token for token in unpenalised if 0 <= token < vocab_size]] = False
        # The row is worked on in blocks: entry i belongs to block i % blocks, so that maxima are taken side by side.
        blocks = -(-vocab_size // _BLOCK)
        self._scratch = np.full(_BLOCK * blocks, -np.inf, np.float32)
        self._blocks = self._scratch.reshape(_BLOCK, blocks)
        self._maxima = np.empty(blocks, np.float32)

    def draw(
        self,
        logits: npt.NDArray[np.floating[Any]],
        sampling: Sampling,
        *,
        seed: int,
        history: Ids,
        alternatives: int | None = None,
        bias: tuple[tuple[int, float], ...] = (),
        allowed: npt.NDArray[np.bool_] | None = None,
    ) -> Draw:
        """The next token after `history`.

        logits   (vocab_size,)  read only
        history  (n,)           every token so far, prompt and answer; n is also
                                the number of the draw, so a seed never gives the
                                same random number at two positions
        alternatives            how many likeliest tokens to report with their
                                probabilities; None reports nothing
        bias                    (id, what is added to its logit) before all else
        allowed  (vocab_size,)  the tokens that may be drawn; None allows all

        Raises:
            InternalError: the row holds NaN, or nothing that can be drawn
        """
        plain = not bias and allowed is None and alternatives is None and not _penalises(sampling)
        if plain and sampling.temperature < _GREEDY_BELOW:
            token = int(logits.argmax())  # of NaN, if there is one
            if logits[token] > -np.inf and token not in self._missing_ids:
                return Draw(token)
        row = self._scratch[: self.vocab_size]
        with np.errstate(over="ignore"):  # a float64 or penalised logit beyond float32 becomes infinite, and may
            row[:] = logits
            row[self._missing] = -np.inf
            raw = None if alternatives is None else self._scratch.copy()
            for token, added in bias:
                row[token] += np.float32(added)
            self._penalise(row, sampling, history)
            if allowed is not None:
                row[~allowed & ~np.isnan(row)] = -np.inf
        top = float(self._block_maxima().max())  # NaN, if there is one
        if not top > -np.inf:
            raise InternalError(
                "the model computed values that are not numbers; check its file with `inglenook verify`, "
                "or convert it again"
            )
        if sampling.temperature < _GREEDY_BELOW:
            token = int(self._largest(1)[0])
        else:
            ids, weights = self._candidates(row, top, sampling)
            token = int(ids[_pick(weights, _uniform(seed, history.size))])
        if raw is None:
            return Draw(token)
        return self._report(raw, token, alternatives or 0)

    def _penalise(self, row: npt.NDArray[np.float32], sampling: Sampling, history: Ids) -> None:
        if not _penalises(sampling):
            return
        repetition, presence, frequency = (
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        ids, counts = np.unique(history[-sampling.repetition_window :], return_counts=True)
        spared = self._penalised[ids]
        ids, counts = ids[spared], counts[spared]
        values = row[ids].astype(np.float64)
        values = np.where(values < 0, values * repetition, values / repetition)
        row[ids] = values - presence - frequency * counts

    def _candidates(self, row: npt.NDArray[np.float32], top: float, sampling: Sampling) -> tuple[Ids, Floats]:
        """Ids that can be drawn and their weights, the likeliest having 1; at least one."""
        ids: Ids
        if 0 < sampling.top_k < self.vocab_size:
            ids = self._largest(sampling.top_k)
            scaled = _scaled(row[ids], top, sampling.temperature)
        else:
            ids = np.arange(self.vocab_size)
            scaled = _scaled(row, top, sampling.temperature)
        weights = exp(scaled)
        if sampling.top_p < 1.0:
            wanted = sampling.top_p * np.cumsum(weights)[-1]
            ids, scaled, weights = self._nucleus(ids, scaled, weights, wanted)
        kept = weights >= max(sampling.min_p, _LEAST_WEIGHT)
        ids, scaled, weights = ids[kept], scaled[kept], weights[kept]
        if sampling.typical_p < 1.0:
            kept = _typical(scaled, weights, sampling.typical_p)
            ids, weights = ids[kept], weights[kept]
        return ids, weights

    def _nucleus(self, ids: Ids, scaled: Floats, weights: Floats, wanted: float) -> tuple[Ids, Floats, Floats]:
        """The fewest likeliest candidates whose weights reach `wanted`, likeliest first."""
        # Sorting a whole vocabulary costs more than all the rest; the first few hundred nearly always suffice.
        count = 256
        while True:
            order = self._largest(count) if ids.size == self.vocab_size else np.arange(ids.size)
            sums = np.cumsum(weights[order])
            if sums[-1] >= wanted or order.size == ids.size:
                order = order[: int(np.searchsorted(sums, wanted)) + 1]
                return ids[order], scaled[order], weights[order]
            count *= 16

    def _block_maxima(self) -> npt.NDArray[np.float32]:
        """The largest entry of each block of the row; of all the work, the only pass over the whole row."""
        return self._blocks.max(axis=0, out=self._maxima)

    def _largest(self, count: int) -> Ids:
        """The `count` largest entries of the row, largest first, ties by the lowest id; wants fresh maxima."""
        ids: Ids
        maxima, row = self._maxima, self._scratch
        if count < maxima.size:
            # The count-th largest of the maxima bounds the count-th largest entry from below,
            # so only blocks that reach it can hold one, and few entries are left to sort.
            bound = np.partition(maxima, maxima.size - count)[maxima.size - count]
            blocks = np.flatnonzero(maxima >= bound)
            places, chosen = np.nonzero(self._blocks[:, blocks] >= bound)
            ids = places * maxima.size + blocks[chosen]  # ascending
        else:
            ids = np.arange(self.vocab_size)
        return ids[np.argsort(-row[ids], kind="stable")[:count]]

    def _report(self, raw: npt.NDArray[np.float32], token: int, alternatives: int) -> Draw:
        self._scratch[:] = raw
        scaled = _scaled(raw[: self.vocab_size], float(self._block_maxima().max()), 1.0)
        total = log(float(np.cumsum(exp(scaled))[-1]))
        rivals = self._largest(min(alternatives, self.vocab_size)) if alternatives else np.zeros(0, np.int64)
        return Draw(token, float(scaled[token]) - total, tuple((int(i), float(scaled[i]) - total) for i in rivals))


def _penalises(sampling: Sampling) -> bool:
    """Whether tokens that have occurred are treated otherwise."""
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return sampling.repetition_window != 0 and penalties != (1.0, 0.0, 0.0)


def _scaled(row: npt.NDArray[np.float32], top: float, temperature: float) -> Floats:
    """(row - top) / temperature, where an infinite top leaves only the infinite entries."""
    if top == np.inf:
        return np.where(row == np.inf, 0.0, -np.inf)
    values: Floats = (row.astype(np.float64) - top) / temperature
    return values


def _typical(scaled: Floats, weights: Floats, share: float) -> npt.NDArray[np.bool_]:
    """The candidates whose surprise is nearest the expected one, up to `share` of the probability.

    Surprise is log Z - scaled and its expectation log Z - sum(p * scaled): log Z
    drops out of their difference, so no logarithm is needed.
    """
    total = np.cumsum(weights)[-1]
    expected = np.cumsum(weights * scaled)[-1] / total
    order = np.argsort(np.abs(scaled - expected), kind="stable")
    count = int(np.searchsorted(np.cumsum(weights[order]), share * total)) + 1
    kept = np.zeros(weights.size, np.bool_)
    kept[order[:count]] = True
    return kept


def _pick(weights: Floats, uniform: float) -> int:
    # cumsum, unlike sum, adds strictly from left to right everywhere.
    sums = np.cumsum(weights)
    return min(int(np.searchsorted(sums, uniform * sums[-1], side="right")), weights.size - 1)


def _uniform(seed: int, number: int) -> float:
    """The `number`-th random number of a seed, in [0, 1): counter-based, so none has to be drawn before it."""
    bits = np.random.Philox(key=seed, counter=number).random_raw()
    return float(int(bits) >> 11) * 2.0**-53
