"""Answers requests with one model, a step at a time; events go to each request's sink.

Owned by one thread, which calls `add`, `cancel` and `step` in turn. A request
ends in exactly one `Done` or `Failed`; whatever goes wrong with one, the loop
and the others go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.errors import ContextOverflowError, InglenookError, InputError, InternalError, SettingError
from engine.progress import Progress
from engine.runtime.cache import Cache
from engine.runtime.events import (
    Delta,
    Done,
    EngineStatus,
    Event,
    Failed,
    FinishReason,
    Message,
    PromptToken,
    Request,
    Started,
    TokenLogprob,
    Usage,
)
from engine.runtime.guide import Guide
from engine.runtime.model import Model
from engine.runtime.prefix import PrefixIndex
from engine.runtime.sampler import Draw, Sampler, fresh_seed
from engine.runtime.scheduler import Plan, Scheduler, Span
from engine.runtime.sequence import Sequence, State
from engine.runtime.speculation import Confidence, Wish
from engine.text.stream import TextStream

__all__ = ["Loop", "Sink", "failure"]

Sink = Callable[[Event], None]
Ids = npt.NDArray[np.int32]

log = logging.getLogger(__name__)
_MOST_ALTERNATIVES = 100


@dataclass(slots=True, eq=False)
class _Answer:
    """A request on its way. `sent_tokens` of its tokens went out in deltas.

    thinking: the prompt ends where the model is already thinking.
    """

    request: Request
    sink: Sink
    sequence: Sequence
    stream: TextStream
    guide: Guide | None
    thinking: bool
    seed: int
    notices: tuple[str, ...]
    added_s: float
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    drawn: int = 0
    steps: int = 0
    guessed: int = 0
    accepted: int = 0
    confidence: Confidence | None = None
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    sent_tokens: int = 0

    def usage(self, now_s: float) -> Usage:
        started_s = now_s if self.started_s is None else self.started_s
        first_s = now_s if self.first_token_s is None else self.first_token_s
        return Usage(
            prompt_tokens=self.sequence.prompt,
            cached_tokens=self.sequence.cached,
            completion_tokens=self.drawn,
            queue_s=started_s - self.added_s,
            prefill_s=first_s - started_s,
            decode_s=self.last_token_s - first_s if self.drawn else 0.0,
            decode_steps=self.steps,
            guessed_tokens=self.guessed,
            accepted_tokens=self.accepted,
        )


class Loop:
    """The requests of one model.

    slice_tokens: prompt tokens of a step; None adapts to the machine.
    """

    def __init__(
        self, model: Model, *, slice_tokens: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._model = model
        self._clock = clock
        self._scheduler = Scheduler(
            Cache(model.pages, PrefixIndex(model.pages, model.identity)),
            context=model.context,
            most_running=model.most_running,
            batch_tokens=model.batch_tokens,
            slice_tokens=slice_tokens,
            company_s=model.settings.prompt_slice_ms / 1000,
            policy=model.settings.scheduling,
        )
        self._speculator = None if model.speculator is None else model.speculator()
        self._sampler = Sampler(model.vocab_size, missing=model.missing_ids, unpenalised=model.end_ids)
        self._answers: dict[str, _Answer] = {}
        self._of: dict[Sequence, _Answer] = {}

    @property
    def idle(self) -> bool:
        """No request is on its way."""
        return not self._answers

    @property
    def status(self) -> EngineStatus:
        """What is going on."""
        running, waiting, pages = self._scheduler.running, self._scheduler.waiting, self._model.pages
        return EngineStatus(len(running), len(waiting), pages.count, pages.available)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._answers

    # ------------------------------------------------------------ in and out

    def add(self, request: Request, sink: Sink) -> None:
        """Queue a request; one that can never be answered fails at once."""
        try:
            answer = self._prepared(request, sink)
        except InglenookError as error:
            _send(sink, failure(request.id, error))
        except Exception as error:
            log.exception("request %s could not be prepared", request.id)
            _send(sink, failure(request.id, error))
        else:
            self._answers[request.id] = self._of[answer.sequence] = answer
            self._scheduler.add(answer.sequence)

    def cancel(self, request_id: str) -> None:
        """End a request in whatever state; an unknown one is ignored."""
        answer = self._answers.get(request_id)
        if answer is not None:
            self._stop(answer)

    def cancel_all(self, notice: str) -> None:
        """End every request; `notice` says why."""
        for answer in tuple(self._answers.values()):
            answer.notices += (notice,)
            self._stop(answer)

    def fail_all(self, error: Exception) -> None:
        """End every request with an error that is nobody's own."""
        for answer in tuple(self._answers.values()):
            self._fail(answer, error)

    def count_tokens(self, messages: tuple[Message, ...]) -> int:
        """Tokens of the conversation as it would be given to the model.

        Raises:
            InputError: it cannot be rendered
        """
        return self._model.encode(messages).ids.size

    def prompt_tokens(self, request: Request) -> tuple[PromptToken, ...]:
        """The prompt of a request token by token, as the model would be given it.

        Raises:
            InputError: it cannot be rendered
        """
        tokenizer = self._model.tokenizer
        ids = self._model.encode(request.prompt, request.started, request.template, request.begin).ids.tolist()
        return tuple(PromptToken(token, tokenizer.token_bytes(token), token in tokenizer.control_ids) for token in ids)

    # ------------------------------------------------------------ one step

    def step(self) -> bool:
        """Compute one step; False when there is nothing left to do."""
        plan = self._scheduler.plan(None if self._speculator is None else self._guesses)
        if plan is None:
            return False
        begin_s = self._clock()
        for answer in self._of_plan(plan):
            self._start(answer, begin_s)
        try:
            logits = self._model.decoder.forward(plan.batch)
        except Exception as error:
            log.exception("a step failed")
            for answer in self._of_plan(plan):
                self._fail(answer, error)
            return not self.idle
        if self._model.decoder.cancelled:
            return True  # nothing is lost: what it computed in part is computed again
        self._scheduler.computed(plan)
        self._observe(plan, begin_s)
        first = 0
        for span in plan.spans:
            rows = logits[first : first + span.rows]
            first += span.rows
            if span.sequence in self._of:
                self._advance(self._of[span.sequence], span, rows)
        return not self.idle

    def _guesses(self, answering: list[Sequence]) -> dict[Sequence, Ids]:
        """Guesses of the next tokens of these, as many as their answers' confidence and the step allow."""
        assert self._speculator is not None
        share = self._model.guess_rows // len(answering)
        wishes: dict[Sequence, Wish] = {}
        for sequence in answering:
            answer = self._of[sequence]
            if answer.confidence is None:
                answer.confidence = Confidence(self._speculator.cost)
            # The last token of an answer needs no guess after it.
            most = min(share, answer.confidence.most(), sequence.capacity - sequence.length - 1)
            if most > 0:
                wishes[sequence] = Wish(most, answer.request.sampling, answer.seed)
            else:
                answer.confidence.saw(0, 0)
        try:
            return self._speculator.guess(wishes) if wishes else {}
        except Exception:
            log.exception("guessing failed and is switched off; answers go on without it")
            self._speculator = None
            return {}

    def _of_plan(self, plan: Plan) -> Iterator[_Answer]:
        """The answers that a step computes, but for those that a sink has ended meanwhile."""
        return (self._of[span.sequence] for span in plan.spans if span.sequence in self._of)

    def _observe(self, plan: Plan, begin_s: float) -> None:
        if any(span.count > 1 for span in plan.spans):
            self._scheduler.pace.observe(int(plan.batch.ids.size), self._clock() - begin_s)

    def _advance(self, answer: _Answer, span: Span, rows: npt.NDArray[np.float32]) -> None:
        """One sequence's share of a computed step: progress of its prompt, tokens of its answer."""
        try:
            if span.count > 1 or span.start < span.sequence.prompt:
                self._report(answer, span)
            if len(rows) and span.sequence.state is State.RUNNING:
                self._draw_all(answer, span.guess, rows)
        except InglenookError as error:
            self._fail(answer, error)
        except Exception as error:
            log.exception("request %s failed", answer.request.id)
            self._fail(answer, error)

    # ------------------------------------------------------------ one request

    def _prepared(self, request: Request, sink: Sink) -> _Answer:
        if request.id in self._answers:
            raise InputError(f"a request with the id {request.id} is being answered already")
        if request.logprobs is not None and not 0 <= request.logprobs <= _MOST_ALTERNATIVES:
            raise SettingError(f"logprobs must be between 0 and {_MOST_ALTERNATIVES}, not {request.logprobs}")
        added_s = self._clock()
        prompt = self._model.encode(request.prompt, request.started, request.template, request.begin)
        self._scheduler.check(prompt.ids.size)
        sampling = request.sampling
        return _Answer(
            request=request,
            sink=sink,
            sequence=Sequence(prompt.ids, prompt.ids.size + sampling.max_tokens),
            stream=TextStream(self._model.tokenizer, sampling.stop, self._model.shown_ids(request)),
            guide=self._model.guide(request, prompt),
            thinking=self._model.thinks(prompt),
            seed=fresh_seed() if sampling.seed < 0 else sampling.seed,
            notices=prompt.notices,
            added_s=added_s,
        )

    def _start(self, answer: _Answer, now_s: float) -> None:
        if answer.started_s is None:
            answer.started_s = now_s
            self._emit(
                answer, Started(answer.request.id, answer.sequence.prompt, answer.sequence.cached, answer.thinking)
            )

    def _report(self, answer: _Answer, span: Span) -> None:
        done, total = span.start + span.count, span.sequence.length
        eta_s = self._scheduler.pace.seconds(total - done)
        self._emit(answer, Progress("prefill", done, total, "tokens", request_id=answer.request.id, eta_s=eta_s))

    def _draw_all(self, answer: _Answer, guess: Ids, rows: npt.NDArray[np.float32]) -> None:
        """Draw from the first row, and from each further one as long as the guess that it follows was drawn."""
        answer.steps += 1
        answer.guessed += guess.size
        right = 0
        for row, guessed in zip(rows, (*guess.tolist(), None), strict=True):
            drawn = self._draw(answer, row)
            if drawn is None or drawn != guessed:
                break
            right += 1
            answer.accepted += 1
            self._scheduler.guessed_right(answer.sequence)
        if answer.confidence is not None and guess.size:
            answer.confidence.saw(guess.size, right)

    def _draw(self, answer: _Answer, row: npt.NDArray[np.float32]) -> int | None:
        """Draw one token; None when the answer ended with it."""
        request, sequence, guide = answer.request, answer.sequence, answer.guide
        draw = self._sampler.draw(
            row,
            request.sampling,
            seed=answer.seed,
            history=sequence.ids,
            alternatives=request.logprobs,
            bias=request.logit_bias,
            allowed=None if guide is None else guide.allowed(),
        )
        answer.drawn += 1
        answer.last_token_s = self._clock()
        if answer.first_token_s is None:
            answer.first_token_s = answer.last_token_s
        if draw.token in self._model.end_ids:
            self._done(answer, "stop")
            return None
        sequence.append(draw.token)
        if guide is not None:
            guide.take(draw.token)
        if request.logprobs is not None:
            answer.logprobs.append(self._logprob(draw))
        self._say(answer, answer.stream.push(draw.token))
        if answer.stream.stopped or (guide is not None and guide.complete):
            self._done(answer, "stop")
        elif sequence.generated >= request.sampling.max_tokens:
            self._done(answer, "length")
        elif self._scheduler.full(sequence):
            self._done(answer, "context")
        return draw.token if sequence in self._of else None

    def _logprob(self, draw: Draw) -> TokenLogprob:
        spelling = self._model.tokenizer.token_bytes
        rivals = tuple((token, spelling(token), logprob) for token, logprob in draw.alternatives)
        return TokenLogprob(draw.token, spelling(draw.token), draw.logprob, rivals)

    def _say(self, answer: _Answer, text: str) -> None:
        if not text:
            return
        answer.text.append(text)
        if answer.request.stream:
            first, sequence = answer.sent_tokens, answer.sequence
            answer.sent_tokens = sequence.generated
            ids = tuple(sequence.ids[sequence.prompt + first :].tolist())
            self._emit(answer, Delta(answer.request.id, text, ids, tuple(answer.logprobs[first:])))

    def _stop(self, answer: _Answer) -> None:
        try:
            self._done(answer, "cancelled")
        except Exception as error:
            log.exception("request %s could not be ended", answer.request.id)
            self._fail(answer, error)

    def _done(self, answer: _Answer, reason: FinishReason) -> None:
        self._say(answer, answer.stream.finish())
        if not self._forget(answer):
            return
        sequence = answer.sequence
        done = Done(
            answer.request.id,
            reason,
            "".join(answer.text),
            answer.usage(self._clock()),
            tuple(sequence.ids[sequence.prompt :].tolist()),
            answer.notices,
            tuple(answer.logprobs),
        )
        _send(answer.sink, done)

    def _fail(self, answer: _Answer, error: Exception) -> None:
        if self._forget(answer):
            _send(answer.sink, failure(answer.request.id, error, "".join(answer.text)))

    def _forget(self, answer: _Answer) -> bool:
        """Give up what the answer holds; False when it has ended already, by its sink's doing for example."""
        if self._of.pop(answer.sequence, None) is None:
            return False
        del self._answers[answer.request.id]
        self._scheduler.finish(answer.sequence)
        if self._speculator is not None:
            self._speculator.forget(answer.sequence)
        return True

    def _emit(self, answer: _Answer, event: Event) -> None:
        """Tell an answer that goes on; a sink that raises ends it."""
        if answer.sequence in self._of and not _send(answer.sink, event):
            self._forget(answer)


def _send(sink: Sink, event: Event) -> bool:
    """Hand an event over; False when the receiver raised, which is its own fault and ends its request only."""
    try:
        sink(event)
    except Exception:
        log.exception("the receiver of %s failed", type(event).__name__)
        return False
    return True


def failure(request_id: str | None, error: Exception, text: str = "") -> Failed:
    """The event that an exception becomes."""
    if isinstance(error, ContextOverflowError):
        numbers = (error.needed_tokens, error.context_tokens)
        return Failed(request_id, str(error), ContextOverflowError.__name__, text, *numbers)
    if isinstance(error, InglenookError):
        return Failed(request_id, str(error), type(error).__name__, text)
    return Failed(request_id, f"the engine made a mistake ({error}); the log says more", InternalError.__name__, text)
