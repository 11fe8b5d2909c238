"""Guesses of the next tokens, so that one step may yield several; knows no text and draws nothing for an answer.

A guess is computed together with the token it follows. Whoever draws compares:
a guess is kept where it is the very token that plain decoding draws from the
same logits with the same random number, so guesses change how soon an answer
comes and nothing else.

Two guessers: `continuation` looks for the last few tokens earlier in the same
sequence and says what followed there (prompt lookup decoding, Saxena 2023);
`DraftModel` asks a smaller model of the same vocabulary, which draws with the
answer's own settings and random numbers and so agrees as often as it can.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.core.pages import PagePool
from engine.models.batch import Batch
from engine.runtime.cache import Cache
from engine.runtime.prefix import PrefixIndex
from engine.runtime.sampler import Sampler
from engine.runtime.sequence import Sequence
from engine.settings import Sampling

__all__ = ["Confidence", "DraftDecoder", "DraftModel", "Lookup", "Speculator", "Wish", "continuation"]

Ids = npt.NDArray[np.int32]

# What one more row adds to a step that reads all weights anyway; measured on steps of 1 to 16 rows.
_ROW_COST = 0.09
_LEAST_MATCH = 2
_MOST_MATCH = 8


def continuation(ids: Ids, most: int) -> Ids:
    """What followed the latest place where the last tokens of `ids` stood before, at most `most` tokens.

    The place with the longest match counts, up to 8 tokens and no less than 2; of several the latest. A match that
    overlaps the end is a repetition, and goes on for as long as is asked.
    """
    end = ids.size - 1
    places = np.flatnonzero(ids[:end] == ids[end])
    matched = 1
    while matched < _MOST_MATCH:
        earlier = places[places >= matched]
        earlier = earlier[ids[earlier - matched] == ids[end - matched]]
        if not earlier.size:
            break
        places = earlier
        matched += 1
    if matched < _LEAST_MATCH or not most:
        return ids[:0]
    first = int(places[-1]) + 1
    return ids[first + np.arange(most) % (end + 1 - first)]


class Confidence:
    """How far guesses for one answer may be trusted, learnt from how many came true.

    cost: of a guess, as a share of a step. The n-th is worth making when all n
    come true with at least that probability. Guesses that never come true
    therefore soon cost nothing: one is tried again after some dozen tokens.
    """

    _START = 0.6
    _WEIGHT = 0.25
    _RECOVERY = 0.01

    def __init__(self, cost: float) -> None:
        self._log_cost = math.log(cost)
        self._cost = cost
        self._share = self._START

    def most(self) -> int:
        """How many guesses are worth making now."""
        if self._share >= 0.99:
            return 1 << 10
        return int(self._log_cost / math.log(self._share)) if self._share > self._cost else 0

    def saw(self, guessed: int, right: int) -> None:
        """Of so many guesses, the first so many came true; a wrong one says nothing of those after it."""
        if not guessed:
            self._share += self._RECOVERY * (self._START - self._share)
            return
        for _ in range(right):
            self._share += self._WEIGHT / 2 * (1.0 - self._share)
        if right < guessed:
            self._share -= self._WEIGHT * self._share


@dataclass(frozen=True, slots=True)
class Wish:
    """What a guesser needs to know of an answer. most: guesses wanted. seed: of its random numbers."""

    most: int
    sampling: Sampling
    seed: int


class Speculator(Protocol):
    """Guesses for the answers of a loop.

    cost: of one guess, as a share of a step of the model that answers.
    """

    cost: float

    def guess(self, wishes: Mapping[Sequence, Wish]) -> dict[Sequence, Ids]:
        """What each sequence may draw next; those without a guess are left out."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""


class Lookup:
    """Guesses by looking back in the sequence itself."""

    cost = _ROW_COST

    def guess(self, wishes: Mapping[Sequence, Wish]) -> dict[Sequence, Ids]:
        """What each sequence may draw next."""
        return {sequence: continuation(sequence.ids, wish.most) for sequence, wish in wishes.items()}

    def forget(self, sequence: Sequence) -> None:
        """Nothing is remembered."""


class DraftDecoder(Protocol):
    """What computes the small model's logits; `engine.models.decoder.Decoder`."""

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        """float32 (wanted, vocab_size), valid until the next call; meaningless if `cancelled`."""

    @property
    def cancelled(self) -> bool:
        """Whether the last `forward` was stopped on the way."""


class DraftModel:
    """Guesses by a smaller model, which reads along in pages of its own.

    For every answer it keeps a mirror: the same tokens, and those it guessed. A
    step reads what the mirror lacks, at most `batch_tokens` in all, and guesses
    for those that are up to date.

    share: of the time of a step of the model that answers.
    """

    def __init__(
        self,
        decoder: DraftDecoder,
        pages: PagePool,
        sampler: Sampler,
        identity: bytes,
        *,
        context: int,
        batch_tokens: int,
        share: float,
    ) -> None:
        self.cost = min(0.9, _ROW_COST + share)
        self._decoder = decoder
        self._cache = Cache(pages, PrefixIndex(pages, identity))
        self._sampler = sampler
        self._context = context
        self._batch_tokens = batch_tokens
        self._mirrors: dict[Sequence, Sequence] = {}

    def guess(self, wishes: Mapping[Sequence, Wish]) -> dict[Sequence, Ids]:
        """What each sequence may draw next, as far as the mirrors are up to date."""
        ready: dict[Sequence, Sequence] = {}
        room = self._batch_tokens
        reading: list[tuple[Sequence, int]] = []
        for sequence, wish in wishes.items():
            mirror = self._mirror(sequence, min(sequence.length + wish.most, self._context))
            if mirror is None:
                continue
            count = min(mirror.remaining, room)
            room -= count
            if count == mirror.remaining:
                ready[sequence] = mirror
            if count:
                reading.append((mirror, count))
        while reading:
            drawing = [mirror for mirror, count in reading if count == mirror.remaining]
            logits = self._forward(reading, drawing)
            if logits is None:
                break  # whoever cancelled the step wants no guesses
            rows = dict(zip(drawing, logits, strict=True))
            reading = []
            for sequence, mirror in ready.items():
                wish = wishes[sequence]
                guessed = mirror.length - sequence.length
                if mirror not in rows or guessed >= wish.most or mirror.length >= self._context:
                    continue
                draw = self._sampler.draw(rows[mirror], wish.sampling, seed=wish.seed, history=mirror.ids)
                mirror.append(draw.token)
                if guessed + 1 < wish.most and mirror.length < self._context:
                    reading.append((mirror, 1))
        return {sequence: mirror.ids[sequence.length :].copy() for sequence, mirror in ready.items()}

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended; others may find what was read of it."""
        mirror = self._mirrors.pop(sequence, None)
        if mirror is not None:
            self._cache.give_up(mirror)

    def _mirror(self, sequence: Sequence, tokens: int) -> Sequence | None:
        """The mirror, brought up to the sequence's tokens, with room for so many; None when there is none."""
        mirror = self._mirrors.get(sequence)
        if sequence.length >= self._context:
            return None
        if mirror is None:
            mirror = Sequence(sequence.ids, max(sequence.capacity, self._context) + 1)
            found = self._cache.found(mirror)
            self._mirrors[sequence] = mirror
            self._cache.begin(mirror, found, 0)
        else:
            common = min(mirror.length, sequence.length)
            differing = np.flatnonzero(mirror.ids[mirror.prompt : common] != sequence.ids[mirror.prompt : common])
            mirror.rewind(mirror.prompt + int(differing[0]) if differing.size else common)
            for token in sequence.ids[mirror.length :].tolist():
                mirror.append(token)
        self._cache.publish(mirror)  # all its tokens are the answer's now
        return mirror if self._cache.reach(mirror, tokens) else None

    def _forward(self, reading: list[tuple[Sequence, int]], drawing: list[Sequence]) -> npt.NDArray[np.float32] | None:
        counts = [count for _, count in reading]
        tables = np.zeros((len(reading), max(len(mirror.pages) for mirror, _ in reading)), np.int32)
        for row, (mirror, _) in enumerate(reading):
            tables[row, : len(mirror.pages)] = mirror.pages
        ends = np.cumsum(counts)
        starts = [mirror.computed for mirror, _ in reading]
        batch = Batch(
            ids=np.concatenate([mirror.ids[mirror.computed : mirror.computed + count] for mirror, count in reading]),
            positions=np.concatenate(
                [np.arange(start, start + count, dtype=np.int32) for start, count in zip(starts, counts, strict=True)]
            ),
            sequence_of=np.repeat(np.arange(len(reading), dtype=np.int32), counts),
            tables=tables,
            lengths=np.array([start + count for start, count in zip(starts, counts, strict=True)], np.int32),
            wanted=np.array(
                [end - 1 for end, (mirror, _) in zip(ends, reading, strict=True) if mirror in drawing], np.int32
            ),
        )
        logits = self._decoder.forward(batch)
        if self._decoder.cancelled:
            return None
        for mirror, count in reading:
            mirror.computed += count
        return logits
