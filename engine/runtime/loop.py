"""Answers requests with one model, a step at a time; events go to each request's sink.

Owned by one thread, which calls `add`, `cancel` and `step` in turn. A request
ends in exactly one `Done` or `Failed`; whatever goes wrong with one, the loop
and the others go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from engine.errors import BusyError, ContextOverflowError, InglenookError, InputError, InternalError, SettingError
from engine.progress import Progress
from engine.runtime.cache import Cache
from engine.runtime.context import SUMMARY_TOKENS, Fitted, fit, summary_message, summary_question, too_long
from engine.runtime.estimate import Estimate
from engine.runtime.events import (
    ContextCut,
    Delta,
    Done,
    EngineStatus,
    Event,
    Failed,
    FinishReason,
    Message,
    Prompt,
    PromptToken,
    Request,
    Started,
    TokenLogprob,
    Usage,
)
from engine.runtime.guide import Guide
from engine.runtime.model import EncodedPrompt, Model, is_conversation
from engine.runtime.prefix import PrefixIndex
from engine.runtime.repetition import repeats
from engine.runtime.sampler import Draw, Sampler, fresh_seed
from engine.runtime.scheduler import Plan, Scheduler, Span
from engine.runtime.sequence import Sequence, State
from engine.runtime.snapshots import Snapshots
from engine.runtime.speculation import Confidence, Wish
from engine.settings import Sampling
from engine.text.channels import Stream

__all__ = ["Loop", "Sink", "failure"]

Sink = Callable[[Event], None]
Ids = npt.NDArray[np.int32]

log = logging.getLogger(__name__)
_MOST_ALTERNATIVES = 100
_HEARTBEAT_S = 1.0  # nobody hears nothing for longer
_LOOK_S = 0.2
_LONGEST_STEP_S = 5.0  # more between two steps, and the computer slept
_PATIENCE = 2.0
_LEAST_PATIENCE_S = 30.0
_LOOP_EVERY = 16
_SUMMARY = " (summary)"


@dataclass(slots=True, eq=False)
class _Answer:
    """A request on its way. `sent_tokens` of its tokens went out in deltas.

    messages: what is left of a conversation. thinking: the prompt ends where
    the model is already thinking. due_s: when it is looked at whether it gets
    on, on the clock of the loop's waking time; done_then: how far it was at the
    last look.
    """

    request: Request
    sink: Sink
    sequence: Sequence
    stream: Stream
    guide: Guide | None
    thinking: bool
    seed: int
    notices: tuple[str, ...]
    messages: tuple[Message, ...]
    cuts: tuple[ContextCut, ...]
    added_s: float
    due_s: float = 0.0
    done_then: int = -1
    heard_s: float = 0.0
    ahead: int = -1
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


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A request that waits for the summary of what goes."""

    request: Request
    sink: Sink
    fitted: Fitted


class Loop:
    """The requests of one model.

    slice_tokens: prompt tokens of a step; None adapts to the machine.
    snapshots: pages on disk, if any are kept.
    """

    def __init__(
        self,
        model: Model,
        *,
        slice_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._model = model
        self._clock = clock
        self._cache = Cache(model.pages, PrefixIndex(model.pages, model.identity), snapshots, model.memories)
        self._scheduler = Scheduler(
            self._cache,
            context=model.context,
            most_running=model.most_running,
            batch_tokens=model.batch_tokens,
            # A step that waits for the disk takes as long with few tokens as with many.
            slice_tokens=model.batch_tokens if model.info.step_disk_bytes and slice_tokens is None else slice_tokens,
            company_s=model.settings.prompt_slice_ms / 1000,
            policy=model.settings.scheduling,
        )
        self._speculator = None if model.speculator is None else model.speculator()
        self._sampler = Sampler(model.vocab_size, missing=model.missing_ids, unpenalised=model.end_ids)
        self._estimate = Estimate(self._scheduler.pace)
        self._woke_s = self._looked_s = clock()
        self._awake_s = 0.0
        self._computed = 0  # tokens of all requests
        self._answers: dict[str, _Answer] = {}
        self._summaries: dict[str, _Pending] = {}  # requests that wait for a summary of their beginning
        self._of: dict[Sequence, _Answer] = {}

    @property
    def idle(self) -> bool:
        """No request is on its way."""
        return not self._answers

    def tidy(self) -> bool:
        """Write one page of a conversation to disk while nobody waits for an answer; False when there is none left."""
        return self._cache.save_one()

    @property
    def status(self) -> EngineStatus:
        """What is going on."""
        running, waiting, pages = self._scheduler.running, self._scheduler.waiting, self._model.pages
        return EngineStatus(len(running), len(waiting), pages.count, pages.available)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._answers or request_id in self._summaries

    # ------------------------------------------------------------ in and out

    def add(self, request: Request, sink: Sink) -> None:
        """Queue a request; one that can never be answered fails at once."""
        try:
            self._refuse_too_many(request)
            fitted = self._fitted(request)
            if fitted is not None and fitted.cut.policy == "summarise" and fitted.gone:
                self._summarise(request, sink, fitted)
                return
            answer = self._prepared(request, sink, fitted)
        except InglenookError as error:
            _send(sink, failure(request.id, error))
        except Exception as error:
            log.exception("request %s could not be prepared", request.id)
            _send(sink, failure(request.id, error))
        else:
            self._enter(answer)

    def _enter(self, answer: _Answer) -> None:
        self._answers[answer.request.id] = self._of[answer.sequence] = answer
        ahead = [*self._scheduler.running, *self._scheduler.waiting]
        self._scheduler.add(answer.sequence)
        own_s = self._estimate.left_s(answer.sequence)
        expected_s = own_s + self._estimate.wait_s(ahead, self._model.most_running)
        answer.due_s = self._awake_s + max(_LEAST_PATIENCE_S, _PATIENCE * expected_s)

    def _refuse_too_many(self, request: Request) -> None:
        if request.id in self:
            raise InputError(f"a request with the id {request.id} is being answered already")
        settings, present = self._model.settings, self._answers.values()
        of_client = sum(answer.request.client == request.client for answer in present)
        for count, most, whose in (
            (len(present), settings.most_requests, "are on their way"),
            (of_client, settings.most_of_client, "of this client are on their way"),
        ):
            if most and count >= most:
                left = [self._estimate.left_s(answer.sequence) for answer in present]
                raise BusyError(f"{count} requests {whose}, and {most} may be; try again later", retry_s=min(left))

    def cancel(self, request_id: str) -> None:
        """End a request in whatever state; an unknown one is ignored."""
        answer = self._answers.get(request_id)
        if answer is not None:
            self._stop(answer)
        elif request_id in self._summaries:
            self.cancel(_summary_id(request_id))

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
        self._look_around(self._clock())
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
        self._computed += int(plan.batch.ids.size)
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
        seconds = self._clock() - begin_s
        if any(span.count > 1 for span in plan.spans):
            self._scheduler.pace.observe(int(plan.batch.ids.size), seconds)
        else:
            self._estimate.stepped(seconds)

    def _look_around(self, now_s: float) -> None:
        """A few times a second: tell those who heard nothing how far they are, end those whose time is over."""
        # A computer that slept, or a process that was stopped, is no reason to end anything.
        self._awake_s += min(max(0.0, now_s - self._woke_s), _LONGEST_STEP_S)
        self._woke_s = now_s
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        for place, sequence in enumerate(self._scheduler.queue()):
            if sequence in self._of and now_s - self._of[sequence].added_s >= _LOOK_S:
                self._tell_place(self._of[sequence], place, now_s)
        for answer in tuple(self._answers.values()):
            if answer.drawn and now_s - answer.heard_s >= _HEARTBEAT_S:
                most = answer.request.sampling.max_tokens
                self._emit(answer, Progress("decode", answer.drawn, most, "tokens", request_id=answer.request.id))
            self._judge(answer, now_s)

    def _tell_place(self, answer: _Answer, place: int, now_s: float) -> None:
        """Where a request stands in the queue; again when that changes, and as a sign of life."""
        if place == answer.ahead and now_s - answer.heard_s < _HEARTBEAT_S:
            return
        answer.ahead = place
        ahead = [*self._scheduler.running, *self._scheduler.queue()[:place]]
        eta_s = self._estimate.wait_s(ahead, self._model.most_running)
        waiting = len(self._scheduler.waiting)
        note = f"{place} before this one"
        self._emit(answer, Progress("queue", waiting - place, waiting, "requests", note, answer.request.id, eta_s))

    def _judge(self, answer: _Answer, now_s: float) -> None:
        """End an answer whose time is over; without a time of its own, only if it does not get on either."""
        wanted_s = answer.request.deadline_s
        if wanted_s is not None:
            if now_s - answer.added_s > wanted_s:
                answer.notices += (f"the answer was ended after {wanted_s:g} s, as asked for",)
                self._done(answer, "deadline")
        elif self._awake_s > answer.due_s:
            waiting = answer.sequence.state is not State.RUNNING
            done = self._computed if waiting else answer.sequence.computed + answer.drawn
            if done == answer.done_then:
                answer.notices += ("the answer was ended because it did not get on in twice the time expected",)
                self._done(answer, "deadline")
                return
            answer.done_then = done
            left_s = self._estimate.left_s(answer.sequence)
            answer.due_s = self._awake_s + max(_LEAST_PATIENCE_S, _PATIENCE * left_s)

    def _advance(self, answer: _Answer, span: Span, rows: npt.NDArray[np.float32]) -> None:
        """One sequence's share of a computed step: progress of its prompt, tokens of its answer."""
        try:
            if span.count > 1 or span.start < span.sequence.prompt:
                self._report(answer, span)
            if len(rows) and span.sequence.state is State.RUNNING:
                if answer.request.prefill_only:
                    self._done(answer, "prefilled")
                else:
                    self._draw_all(answer, span.guess, rows)
        except InglenookError as error:
            self._fail(answer, error)
        except Exception as error:
            log.exception("request %s failed", answer.request.id)
            self._fail(answer, error)

    # ------------------------------------------------------------ one request

    def _fitted(self, request: Request) -> Fitted | None:
        """What is left of a conversation that does not fit; None of one that does, or is none.

        Raises:
            ContextOverflowError: it does not fit and nothing may, or can, be left out
        """
        if request.overflow == "stop" or not is_conversation(request.prompt):
            return None
        limit = self._limit

        def measure(messages: tuple[Message, ...]) -> int:
            return self._encoded(request, messages).ids.size

        with suppress(ContextOverflowError):
            if measure(request.prompt) < limit:
                return None
        return self._fit(request, request.prompt, limit - 1, generated=0)

    def _fit(self, request: Request, messages: tuple[Message, ...], most: int, generated: int) -> Fitted:
        """Leave so much out that a quarter of the context is free for the answer, if that can be."""
        limit = self._limit
        room = min(max(1, request.sampling.max_tokens - generated), limit // 4)
        room += SUMMARY_TOKENS if request.overflow == "summarise" and not generated else 0

        def measure(told: tuple[Message, ...]) -> int:
            return self._encoded(request, told).ids.size + generated

        policy = "rolling" if generated and request.overflow == "summarise" else request.overflow
        return fit(messages, policy, measure, most=most, wanted=limit - room, request_id=request.id)

    def _encoded(self, request: Request, prompt: Prompt) -> EncodedPrompt:
        """What the request's prompt, or what is left of it, becomes."""
        return self._model.encode(prompt, request.started, request.template, request.begin)

    @property
    def _limit(self) -> int:
        """Tokens that a request may have, prompt and answer together."""
        most = self._model.settings.most_request_tokens
        return min(self._scheduler.limit, most) if most else self._scheduler.limit

    def _summarise(self, request: Request, sink: Sink, fitted: Fitted) -> None:
        """Have the model summarise what goes; the request is queued when that is done."""
        gone, limit = fitted.gone, self._limit
        question = (Message("user", summary_question(gone)),)
        with suppress(ContextOverflowError):
            while self._model.encode(question).ids.size + SUMMARY_TOKENS >= limit and len(gone) > 1:
                gone = gone[1:]  # what is too long to be summarised at once keeps its later part
                question = (Message("user", summary_question(gone)),)
        sampling = Sampling(temperature=0.0, max_tokens=SUMMARY_TOKENS)
        name = _summary_id(request.id)
        self._summaries[request.id] = _Pending(request, sink, fitted)
        self.add(Request(name, question, sampling, overflow="middle", client=request.client), self._summarised)

    def _summarised(self, event: Event) -> None:
        """Listens to summaries; those who wait for one are told how far it is."""
        if event.request_id is None:
            return
        name = event.request_id.removesuffix(_SUMMARY)
        pending = self._summaries[name]
        if isinstance(event, Progress):
            _send(pending.sink, replace(event, request_id=name, stage="queue", note="summarising what came before"))
            return
        if not isinstance(event, Done | Failed):
            return
        del self._summaries[name]
        if isinstance(event, Done) and event.reason in ("cancelled", "deadline"):
            _send(pending.sink, replace(event, request_id=name, text="", token_ids=()))
            return
        text = event.text if isinstance(event, Done) else ""
        request, fitted = pending.request, pending.fitted
        try:
            if text.strip():
                fitted = self._with_summary(request, fitted, text)
            self._enter(self._prepared(request, pending.sink, fitted))
        except Exception as error:
            if not isinstance(error, InglenookError):
                log.exception("request %s could not be prepared", name)
            _send(pending.sink, failure(name, error))

    def _with_summary(self, request: Request, fitted: Fitted, text: str) -> Fitted:
        """The messages with a summary after the instructions, if there is room for it."""
        place = next((i for i, message in enumerate(fitted.messages) if message.role != "system"), 0)
        messages = (*fitted.messages[:place], summary_message(text), *fitted.messages[place:])
        tokens = self._encoded(request, messages).ids.size
        if tokens >= self._limit:
            return fitted
        return replace(fitted, messages=messages, cut=replace(fitted.cut, summary=text.strip(), tokens_after=tokens))

    def _prepared(self, request: Request, sink: Sink, fitted: Fitted | None) -> _Answer:
        if request.logprobs is not None and not 0 <= request.logprobs <= _MOST_ALTERNATIVES:
            raise SettingError(f"logprobs must be between 0 and {_MOST_ALTERNATIVES}, not {request.logprobs}")
        added_s = self._clock()
        told = request.prompt if fitted is None else fitted.messages
        prompt = self._encoded(request, told)
        cuts: tuple[ContextCut, ...] = () if fitted is None else (fitted.cut,)
        if request.overflow != "stop" and not is_conversation(told):
            prompt, cuts = self._shortened(request, prompt)
        if prompt.ids.size >= self._limit:
            raise too_long(prompt.ids.size, self._limit)
        sampling = request.sampling
        longest = prompt.ids.size + (1 if request.prefill_only else sampling.max_tokens)
        return _Answer(
            request=request,
            sink=sink,
            sequence=Sequence(prompt.ids, longest, request.client),
            stream=self._model.stream(request),
            guide=self._model.guide(request, prompt),
            thinking=self._model.thinks(prompt),
            seed=fresh_seed() if sampling.seed < 0 else sampling.seed,
            notices=prompt.notices + tuple(map(str, cuts)),
            messages=told if is_conversation(told) else (),
            cuts=cuts,
            added_s=added_s,
            heard_s=added_s,
        )

    def _shortened(self, request: Request, prompt: EncodedPrompt) -> tuple[EncodedPrompt, tuple[ContextCut, ...]]:
        """A prompt that is no conversation, cut to three quarters of the context if it is too long."""
        limit, ids = self._limit, prompt.ids
        if ids.size < limit:
            return prompt, ()
        kept = limit - min(request.sampling.max_tokens, limit // 4)
        # The first token is the one that begins a text; the models were never shown one without it.
        first = kept // 2 if request.overflow == "middle" else 1
        shorter = np.concatenate([ids[:first], ids[ids.size - (kept - first) :]])
        cut = ContextCut(request.id, request.overflow, tokens_before=ids.size, tokens_after=shorter.size)
        return replace(prompt, ids=shorter), (cut,)

    def _start(self, answer: _Answer, now_s: float) -> None:
        if answer.started_s is None:
            answer.started_s = now_s
            self._emit(
                answer, Started(answer.request.id, answer.sequence.prompt, answer.sequence.cached, answer.thinking)
            )
            for cut in answer.cuts:
                self._emit(answer, cut)

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
        elif self._goes_round(answer):
            self._done(answer, "loop")
        elif sequence.length >= self._limit and not self._make_room(answer):
            self._done(answer, "context")
        return draw.token if sequence in self._of else None

    def _goes_round(self, answer: _Answer) -> bool:
        """The answer has only repeated itself for a while; looked at now and then."""
        limit, sequence = answer.request.sampling.loop_limit, answer.sequence
        if not limit or sequence.generated < limit or sequence.generated % _LOOP_EVERY:
            return False
        if not repeats(sequence.ids[sequence.prompt :], limit):
            return False
        answer.notices += (f"the answer was ended because it had repeated itself for {limit} tokens",)
        return True

    def _make_room(self, answer: _Answer) -> bool:
        """Leave out more of the conversation, so that a full answer can go on; False when that cannot be."""
        request, old = answer.request, answer.sequence
        if request.overflow == "stop" or not answer.messages:
            return False
        try:
            fitted = self._fit(request, answer.messages, self._limit - 1, old.generated)
        except ContextOverflowError:
            return False
        if not fitted.gone and fitted.cut.cut_message is None:
            return False
        prompt = self._encoded(request, fitted.messages)
        answer.messages, answer.cuts = fitted.messages, (*answer.cuts, fitted.cut)
        answer.notices += (str(fitted.cut),)
        # The answer so far is read again behind the shorter conversation.
        said = old.ids[old.prompt :]
        new = Sequence(np.concatenate([prompt.ids, said]), prompt.ids.size + request.sampling.max_tokens, old.client)
        new.prompt = prompt.ids.size
        self._scheduler.finish(old)
        if self._speculator is not None:
            self._speculator.forget(old)
        del self._of[old]
        answer.sequence = new
        self._of[new] = answer
        self._scheduler.add(new)
        self._emit(answer, fitted.cut)
        return True

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
            answer.cuts,
        )
        if reason in ("stop", "length"):
            self._estimate.answered(answer.drawn)
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
        answer.heard_s = self._clock()
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
    if isinstance(error, BusyError):
        return Failed(request_id, str(error), BusyError.__name__, text, retry_s=error.retry_s)
    if isinstance(error, InglenookError):
        return Failed(request_id, str(error), type(error).__name__, text)
    return Failed(request_id, f"the engine made a mistake ({error}); the log says more", InternalError.__name__, text)


def _summary_id(request_id: str) -> str:
    return request_id + _SUMMARY
