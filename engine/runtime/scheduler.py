"""Decides which tokens of which sequences the next step computes; knows no text and calls no kernel.

A step is one token of every sequence that is answering, then slices of the
prompts, in the order of arrival. A sequence takes all pages of its present
tokens when it is admitted, and one more each time its answer fills one. When
there is none left, the youngest running sequence is paused: it gives its pages
up (the full ones stay findable until somebody takes them), keeps its tokens and
is computed again later, to the same bits. The oldest is never paused, so there
is always progress; nothing is failed for want of pages.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.core.pages import PagePool
from engine.errors import ContextOverflowError
from engine.models.batch import Batch
from engine.runtime.prefix import PrefixIndex, PublishedPage
from engine.runtime.sequence import Sequence, State

__all__ = ["Pace", "Plan", "Scheduler", "Span"]

Ids = npt.NDArray[np.int32]

# So often may younger sequences that fit run before an older one that waits for pages.
_MOST_OVERTAKEN = 8


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a sequence that a step computes: positions start ... start + count."""

    sequence: Sequence
    start: int
    count: int

    @property
    def draws(self) -> bool:
        """The span reaches the last token, so its logits are wanted."""
        return self.start + self.count == self.sequence.length


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Row i of the logits belongs to drawing[i]."""

    batch: Batch
    spans: tuple[Span, ...]
    drawing: tuple[Sequence, ...]


class Pace:
    """How long a slice of a prompt may be, from how fast the last ones were.

    most: what the decoder takes at once. fixed: always this many, for tests.
    A slice lasts about `_ALONE_S`, so that progress is seen and the cost of
    reading the weights is spread over many tokens; about `_COMPANY_S` while
    others wait for their next token.
    """

    _ALONE_S = 1.0
    _COMPANY_S = 0.25
    _LEAST = 32
    _FIRST = 128

    def __init__(self, most: int, fixed: int | None = None) -> None:
        self._most = most
        self._fixed = fixed
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
        wanted = int(self._per_s * (self._COMPANY_S if company else self._ALONE_S))
        return min(max(wanted - wanted % self._LEAST, self._LEAST), self._most)


class Scheduler:
    """The sequences of one model, waiting or running.

    context: tokens that the model lets a sequence have. most_running: how many
    are computed together. batch_tokens: the most tokens of a step.
    """

    def __init__(
        self,
        pages: PagePool,
        prefix: PrefixIndex,
        *,
        context: int,
        most_running: int,
        batch_tokens: int,
        slice_tokens: int | None = None,
    ) -> None:
        self._pages = pages
        self._prefix = prefix
        self._page_tokens = pages.layout.tokens
        self._most_running = min(most_running, batch_tokens)
        self._batch_tokens = batch_tokens
        self.limit = min(context, pages.count * self._page_tokens)
        self.pace = Pace(batch_tokens, slice_tokens)
        self.running: list[Sequence] = []  # in order of arrival
        self.waiting: list[Sequence] = []  # in order of arrival, paused ones among them
        self._arrivals = 0
        self._tables = np.zeros((self._most_running, -(-self.limit // self._page_tokens)), np.int32)

    # ------------------------------------------------------------ in and out

    def check(self, prompt_tokens: int) -> None:
        """Refuse what can never run.

        Raises:
            ContextOverflowError: prompt and one token of answer exceed the limit
        """
        needed = prompt_tokens + 1
        if needed > self.limit:
            raise ContextOverflowError(
                f"the conversation has {prompt_tokens} tokens and the context holds {self.limit}, "
                f"of which the answer needs at least one; shorten it or load the model with a longer context",
                needed_tokens=needed,
                context_tokens=self.limit,
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that passed `check`."""
        sequence.number = self._arrivals
        self._arrivals += 1
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence in whatever state; its pages are free at once."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self._give_up_pages(sequence)
        elif sequence.state is not State.FINISHED:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED

    @property
    def idle(self) -> bool:
        """There is nothing to compute."""
        return not self.running and not self.waiting

    def full(self, sequence: Sequence) -> bool:
        """The sequence has as many tokens as it may ever have."""
        return sequence.length >= self.limit

    # ------------------------------------------------------------ one step

    def plan(self) -> Plan | None:
        """The next step, or None when there is nothing to do."""
        self._make_room_for_answers()
        self._admit()
        answering = [s for s in self.running if s.remaining == 1]
        slices = self._slices(self._batch_tokens - len(answering), company=bool(answering))
        spans = (*(Span(s, s.computed, 1) for s in answering), *slices)
        return self._plan(spans) if spans else None

    def computed(self, plan: Plan) -> None:
        """The step was computed: its tokens are in the cache, full pages can be found by others."""
        for span in plan.spans:
            sequence = span.sequence
            if sequence.state is State.RUNNING:
                sequence.computed = span.start + span.count
                self._publish(sequence)

    def _slices(self, budget: int, *, company: bool) -> list[Span]:
        """Slices of prompts, oldest first, within `budget` tokens."""
        budget = min(budget, self.pace.slice_tokens(company=company))
        spans: list[Span] = []
        for sequence in self.running:
            if budget <= 0:
                break
            if sequence.remaining == 1:
                continue
            # Somebody with the same prompt may have computed the next pages since the last step.
            self._adopt(sequence, self._found(sequence))
            start, count = sequence.computed, min(sequence.remaining, budget)
            spans.append(Span(sequence, start, count))
            budget -= count
        return spans

    def _plan(self, spans: tuple[Span, ...]) -> Plan:
        counts = [span.count for span in spans]
        starts = np.cumsum([0, *counts])
        drawing = [row for row, span in enumerate(spans) if span.draws]
        tables = self._tables[: len(spans)]
        for row, span in enumerate(spans):
            tables[row, : len(span.sequence.pages)] = span.sequence.pages
        batch = Batch(
            ids=np.concatenate([span.sequence.ids[span.start : span.start + span.count] for span in spans]),
            positions=np.concatenate(
                [np.arange(span.start, span.start + span.count, dtype=np.int32) for span in spans]
            ),
            sequence_of=np.repeat(np.arange(len(spans), dtype=np.int32), counts),
            tables=tables,
            lengths=np.array([span.start + span.count for span in spans], np.int32),
            wanted=(starts[1:][drawing] - 1).astype(np.int32),
        )
        return Plan(batch, spans, tuple(spans[row].sequence for row in drawing))

    # ------------------------------------------------------------ pages

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)

    def _make_room_for_answers(self) -> None:
        for sequence in tuple(self.running):  # oldest first: the oldest always gets its page
            while sequence.state is State.RUNNING and len(sequence.pages) < self._pages_for(sequence.length):
                if self._pages.available:
                    sequence.pages.append(self._pages.take())
                else:
                    self._pause(self.running[-1])

    def _pause(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._give_up_pages(sequence)
        sequence.state = State.PAUSED
        sequence.pauses += 1
        insort(self.waiting, sequence, key=lambda s: s.number)

    def _give_up_pages(self, sequence: Sequence) -> None:
        # The last page goes first and so is idle for longest: a prefix outlives what hangs on it.
        for page in reversed(sequence.pages):
            self._pages.release(page)
        sequence.pages.clear()
        sequence.computed = sequence.published = 0
        sequence.last_published = None

    def _admit(self) -> None:
        for sequence in tuple(self.waiting):
            if len(self.running) >= self._most_running:
                return
            found = self._found(sequence)
            fresh = self._pages_for(sequence.length) - len(found)
            available = self._pages.available - sum(self._pages.holders(p.page) == 0 for p in found)
            # One page for each that is running, so that it is not paused again at once; alone, a sequence always fits.
            if fresh + len(self.running) > available:
                if sequence.overtaken >= _MOST_OVERTAKEN:
                    return
                continue
            for older in self.waiting[: self.waiting.index(sequence)]:
                older.overtaken += 1
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=lambda s: s.number)
            self._start(sequence, found, fresh)

    def _start(self, sequence: Sequence, found: list[PublishedPage], fresh: int) -> None:
        for published in found:
            self._pages.share(published.page)
            sequence.pages.append(published.page)
        self._link(sequence, found)
        sequence.pages.extend(self._pages.take() for _ in range(fresh))
        sequence.state = State.RUNNING

    def _found(self, sequence: Sequence) -> list[PublishedPage]:
        """Published pages that continue what the sequence has; never its last token, whose logits are wanted."""
        if sequence.computed != sequence.published * self._page_tokens:
            return []
        return self._prefix.find(sequence.last_published, sequence.ids[sequence.computed : -1])

    def _adopt(self, sequence: Sequence, found: list[PublishedPage]) -> None:
        """Go on with pages that others computed instead of one's own, still empty ones."""
        for index, published in enumerate(found, start=sequence.published):
            self._replace(sequence, index, published.page)
        self._link(sequence, found)

    def _replace(self, sequence: Sequence, index: int, page: int) -> None:
        self._pages.share(page)
        self._pages.release(sequence.pages[index])
        sequence.pages[index] = page

    def _link(self, sequence: Sequence, found: list[PublishedPage]) -> None:
        if found:
            sequence.last_published = found[-1]
            sequence.published += len(found)
            sequence.computed = sequence.published * self._page_tokens
            if not sequence.pauses:
                sequence.cached += len(found) * self._page_tokens

    def _publish(self, sequence: Sequence) -> None:
        while (sequence.published + 1) * self._page_tokens <= sequence.computed:
            index = sequence.published
            ids = sequence.ids[index * self._page_tokens : (index + 1) * self._page_tokens]
            published = self._prefix.publish(sequence.last_published, ids, sequence.pages[index])
            if published is None:
                return
            if published.page != sequence.pages[index]:
                self._replace(sequence, index, published.page)  # the same bits, held once
            sequence.last_published = published
            sequence.published += 1
