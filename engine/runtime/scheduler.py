"""Decides which tokens of which sequences the next step computes; knows no text and calls no kernel.

A step is one token of every sequence that is answering, with guesses of the
next ones where somebody makes them, then slices of the prompts. A sequence
takes all pages of its present tokens when it is admitted, and one more each
time its answer fills one. When there is none left, the youngest running
sequence is paused: it gives its pages up (the full ones stay findable until
somebody takes them), keeps its tokens and is computed again later, to the same
bits. The oldest is never paused, so there is always progress; nothing is failed
for want of pages.

Whose turn it is: clients take turns, one request each; a client's own requests
go in the order of arrival, or the one with the least left to do first. Whoever
was overtaken often enough goes before everybody.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.models.batch import Batch
from engine.runtime.cache import Cache
from engine.runtime.context import too_long
from engine.runtime.sequence import Sequence, State
from engine.settings import SchedulingPolicy

__all__ = ["Guesser", "Pace", "Plan", "Scheduler", "Span"]

Ids = npt.NDArray[np.int32]
Guesser = Callable[[list[Sequence]], dict[Sequence, Ids]]
"""Told which sequences draw a token next, guesses what some of them will draw, and after that."""

_NONE: Ids = np.zeros(0, np.int32)

# So often may younger sequences that fit run before an older one that waits for pages.
_MOST_OVERTAKEN = 8


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a sequence that a step computes: positions start ... start + count.

    guess: tokens that may come after the last one. They are computed with it,
    so that the logits after each are known if it is the one that is drawn.
    """

    sequence: Sequence
    start: int
    count: int
    guess: Ids = field(default_factory=lambda: _NONE)

    @property
    def tokens(self) -> int:
        """Rows of the batch."""
        return self.count + self.guess.size

    @property
    def rows(self) -> int:
        """Rows of logits wanted: of the last token, if the span reaches it, and of every guess."""
        return 1 + self.guess.size if self.start + self.count == self.sequence.length else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. The rows of logits are those of the spans, in order."""

    batch: Batch
    spans: tuple[Span, ...]


class Pace:
    """How long a slice of a prompt may be, from how fast the last ones were.

    most: what the decoder takes at once. fixed: always this many, for tests.
    A slice lasts about `_ALONE_S`, so that progress is seen and the cost of
    reading the weights is spread over many tokens; about `company_s` while
    others wait for their next token.
    """

    _ALONE_S = 1.0
    _LEAST = 32
    _FIRST = 128

    def __init__(self, most: int, fixed: int | None = None, *, company_s: float = 0.25) -> None:
        self._most = most
        self._fixed = fixed
        self._company_s = company_s
        self._per_s: float | None = None

    def observe(self, tokens: int, seconds: float) -> None:
        """A step with a slice computed so many tokens in so many seconds."""
        if tokens >= self._LEAST and seconds > 0:
            rate = tokens / seconds
            self._per_s = rate if self._per_s is None else 0.5 * (self._per_s + rate)

    def seconds(self, tokens: int) -> float | None:
        """How long so many tokens of a prompt will take; None before the first measurement."""
        return tokens / self._per_s if self._per_s else None

    def slice_tokens(self, *, company: bool) -> int:
        """Prompt tokens that the next step may compute."""
        if self._fixed is not None:
            return min(self._fixed, self._most)
        if self._per_s is None:
            return min(self._FIRST, self._most)
        wanted = int(self._per_s * (self._company_s if company else self._ALONE_S))
        return min(max(wanted - wanted % self._LEAST, self._LEAST), self._most)


class Scheduler:
    """The sequences of one model, waiting or running.

    context: tokens that the model lets a sequence have. most_running: how many
    are computed together. batch_tokens: the most tokens of a step. company_s:
    how long those who are answering wait for a slice of somebody's prompt.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        context: int,
        most_running: int,
        batch_tokens: int,
        slice_tokens: int | None = None,
        company_s: float = 0.25,
        policy: SchedulingPolicy = "first-come",
    ) -> None:
        self._cache = cache
        self._most_running = min(most_running, batch_tokens)
        self._batch_tokens = batch_tokens
        self._policy = policy
        pages = cache.pages.count
        self.limit = min(context, pages * cache.page_tokens)
        self.pace = Pace(batch_tokens, slice_tokens, company_s=company_s)
        self.running: list[Sequence] = []  # in order of arrival
        self.waiting: list[Sequence] = []  # in order of arrival, paused ones among them
        self._arrivals = 0
        self._turns: dict[str, int] = {}  # how many requests of each client have begun
        self._tables = np.zeros((self._most_running, cache.pages_for(self.limit)), np.int32)

    # ------------------------------------------------------------ in and out

    def check(self, prompt_tokens: int) -> None:
        """Refuse what can never run.

        Raises:
            ContextOverflowError: prompt and one token of answer exceed the limit
        """
        if prompt_tokens >= self.limit:
            raise too_long(prompt_tokens, self.limit)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that passed `check`."""
        sequence.number = self._arrivals
        self._arrivals += 1
        present = {other.client for other in (*self.running, *self.waiting)}
        self._turns = {client: turn for client, turn in self._turns.items() if client in present}
        # Who comes anew takes its place beside the others and is owed nothing for the time when it wanted nothing.
        self._turns.setdefault(sequence.client, min(self._turns.values(), default=0))
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence in whatever state; its pages are free at once."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self._cache.give_up(sequence)
        elif sequence.state is not State.FINISHED:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED

    @property
    def idle(self) -> bool:
        """There is nothing to compute."""
        return not self.running and not self.waiting

    def queue(self) -> list[Sequence]:
        """The waiting sequences, in the order in which their turns come.

        The k-th request of a client has its turn with the k-th of every other
        client, those that have begun counted.
        """
        turns = dict(self._turns)
        own = sorted(self.waiting, key=self._left_to_do) if self._policy == "shortest-remaining" else self.waiting
        turn_of: dict[Sequence, int] = {}
        for sequence in own:
            turn_of[sequence] = turns[sequence.client]
            turns[sequence.client] += 1
        # Sorting is stable: within a turn, the order of `own` stays.
        return sorted(own, key=lambda s: (s.overtaken < _MOST_OVERTAKEN, turn_of[s]))

    # ------------------------------------------------------------ one step

    def plan(self, guesser: Guesser | None = None) -> Plan | None:
        """The next step, or None when there is nothing to do."""
        self._make_room_for_answers()
        self._admit()
        answering = [s for s in self.running if s.remaining == 1]
        guesses = guesser(answering) if guesser is not None and answering else {}
        room = self._batch_tokens - len(answering)
        single = []
        for sequence in answering:
            guess = self._allowed(sequence, guesses.get(sequence, _NONE)[:room])
            room -= guess.size
            single.append(Span(sequence, sequence.computed, 1, guess))
        spans = (*single, *self._slices(room, company=bool(answering)))
        return self._plan(spans) if spans else None

    def computed(self, plan: Plan) -> None:
        """The step was computed: its tokens are in the cache, full pages can be found by others.

        Guesses are not: whoever draws calls `guessed_right` for each that came true, and only then is it a token.
        """
        for span in plan.spans:
            if span.sequence.state is State.RUNNING:
                span.sequence.computed = span.start + span.count
                self._cache.remember(span.sequence)
                self._cache.publish(span.sequence)

    def guessed_right(self, sequence: Sequence) -> None:
        """The token that the sequence just took was the next guess of its span."""
        sequence.computed += 1
        self._cache.publish(sequence)

    def _allowed(self, sequence: Sequence, guess: Ids) -> Ids:
        """As much of a guess as the sequence can take; nobody is paused for a guess."""
        most = min(guess.size, self.limit - sequence.length)
        while most > 0 and not self._cache.reach(sequence, sequence.length + most):
            most = len(sequence.pages) * self._cache.page_tokens - sequence.length
        return guess[:most] if most > 0 else _NONE

    def _slices(self, budget: int, *, company: bool) -> list[Span]:
        """Slices of prompts: an equal share of the budget each, and what the short ones leave goes to the long ones."""
        budget = min(budget, self.pace.slice_tokens(company=company))
        reading = [sequence for sequence in self.running if sequence.remaining > 1]
        for sequence in reading:
            # Somebody with the same prompt may have computed the next pages since the last step.
            self._cache.adopt(sequence)
        reading = self._without_doubles(reading)
        reading.sort(key=lambda s: s.remaining)
        spans: list[Span] = []
        for index, sequence in enumerate(reading):
            count = min(sequence.remaining, -(-budget // (len(reading) - index)))
            count = self._cache.slice_end(sequence.computed, sequence.computed + count) - sequence.computed
            if count > 0:
                spans.append(Span(sequence, sequence.computed, count))
                budget -= count
        return spans

    def _without_doubles(self, reading: list[Sequence]) -> list[Sequence]:
        """Those that would not begin a page which another is computing at this moment: they wait and adopt it."""
        furthest: dict[tuple[int, bytes], Sequence] = {}
        for sequence in sorted(reading, key=lambda s: -s.computed):  # stable: the oldest of equals
            page = self._cache.next_page(sequence)
            if page is not None:
                furthest.setdefault(page, sequence)
        leaders = set(furthest.values())
        return [
            sequence
            for sequence in reading
            if sequence in leaders
            or self._cache.next_page(sequence) is None
            or sequence.computed > sequence.published * self._cache.page_tokens
        ]

    def _plan(self, spans: tuple[Span, ...]) -> Plan:
        # Lists, and each made an array once: between steps, small operations of numpy cost more than the numbers.
        tables = self._tables[: len(spans)]
        ids: list[Ids] = []
        positions: list[int] = []
        sequence_of: list[int] = []
        wanted: list[int] = []
        for row, span in enumerate(spans):
            sequence, end = span.sequence, span.start + span.tokens
            tables[row, : len(sequence.pages)] = sequence.pages
            ids.append(sequence.ids[span.start : span.start + span.count])
            if span.guess.size:
                ids.append(span.guess)
            positions += range(span.start, end)
            sequence_of += [row] * span.tokens
            wanted += range(len(positions) - span.rows, len(positions))
        batch = Batch(
            ids=np.concatenate(ids),
            positions=np.array(positions, np.int32),
            sequence_of=np.array(sequence_of, np.int32),
            tables=tables,
            lengths=np.array([span.start + span.tokens for span in spans], np.int32),
            wanted=np.array(wanted, np.int32),
            memories=self._cache.memories([span.sequence for span in spans]),
        )
        return Plan(batch, spans)

    # ------------------------------------------------------------ who runs

    def _make_room_for_answers(self) -> None:
        for sequence in tuple(self.running):  # oldest first: the oldest always gets its page
            while sequence.state is State.RUNNING and not self._cache.reach(sequence, sequence.length):
                self._pause(self.running[-1])

    def _pause(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._cache.give_up(sequence)
        sequence.state = State.PAUSED
        sequence.pauses += 1
        insort(self.waiting, sequence, key=_number)

    def _admit(self) -> None:
        pages = self._cache.pages
        passed: list[Sequence] = []  # they wait for pages
        for sequence in self.queue():
            if len(self.running) >= self._most_running:
                return
            if not sequence.restored:
                sequence.restored = True
                self._cache.restore(sequence)
            found = self._cache.found(sequence)
            fresh = self._cache.pages_for(sequence.length) - len(found)
            available = pages.available - sum(pages.holders(p.page) == 0 for p in found)
            # One page for each that is running, so that it is not paused again at once; alone, a sequence always fits.
            if fresh + len(self.running) > available:
                if sequence.overtaken >= _MOST_OVERTAKEN:
                    return
                passed.append(sequence)
                continue
            for other in self.waiting:
                # Who was passed over for want of pages, or came earlier from the same client, lets this one go first.
                if other in passed or (other.client == sequence.client and other.number < sequence.number):
                    other.overtaken += 1
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_number)
            if sequence.state is State.WAITING:
                self._turns[sequence.client] += 1
            self._cache.begin(sequence, found, fresh)
            sequence.state = State.RUNNING

    @staticmethod
    def _left_to_do(sequence: Sequence) -> int:
        """Tokens still to be computed if the answer becomes as long as it may."""
        return sequence.remaining + sequence.capacity - sequence.length


def _number(sequence: Sequence) -> int:
    return sequence.number
