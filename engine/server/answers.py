"""From the engine's events to what clients read: one value at the end, or chunks as the text comes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

from typing_extensions import override

from engine import api
from engine.api import Delta, Done, Engine, Event, Failed, Progress, Request, Started, TokenLogprob, Usage
from engine.server.wire import ApiError, api_error, now

__all__ = ["Answers", "ChatChoice", "Choice", "ClientGoneError", "Frame", "TextChoice", "streamed", "whole"]

# Without an event for so long, a stream says that it is alive.
_HEARTBEAT_S = 5.0
_REMARK_S = 1.0
_FINISH = {"length": "length", "context": "length", "loop": "length", "deadline": "length"}
# How long a refusal is waited for before a stream begins: afterwards it can only be told inside it.
_FIRST_EVENT_S = 3.0


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What all parts of one answer carry. prompt: the field of the request that holds it."""

    object: str
    model: str
    prompt: str
    id: str = ""
    created: int = field(default_factory=now)

    def head(self, kind: str) -> dict[str, Any]:
        """The first fields of a value or chunk."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class Answers:
    """Submit requests to an engine and hear their events; leaving the block ends those that go on.

    gone: awaited until the client has gone. closing: set when the server is being stopped.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        gone: Callable[[], Any],
        closing: asyncio.Event,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[int, Event]] = deque()  # filled by the engine's thread, emptied by the loop's
        self._called = False  # the loop's thread will look at them
        self._arrived = asyncio.Event()
        self._open = set(range(len(requests)))
        self._gone, self._closing = asyncio.ensure_future(gone()), asyncio.ensure_future(closing.wait())
        for watch in (self._gone, self._closing):
            watch.add_done_callback(lambda _: self._arrived.set())

    async def __aenter__(self) -> Self:
        for index, request in enumerate(self._requests):
            self._engine.submit(request, partial(self._hear, index))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for index in self._open:
            self.cancel(index)
        self._gone.cancel()
        self._closing.cancel()

    def cancel(self, index: int) -> None:
        """End one of the requests."""
        self._engine.cancel(self._requests[index].id)

    async def some(self, timeout_s: float) -> list[tuple[int, Event]]:
        """All events that have come; none when none came in time, or all requests have ended.

        Raises:
            ClientGoneError: nobody waits for it
            ApiError: 503, the server is being stopped
        """
        if not self._open:
            return []
        self._arrived.clear()
        if not (self._events or self._gone.done() or self._closing.done()):
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
        if self._gone.done():
            raise ClientGoneError
        if self._closing.done() and not self._events:
            raise ApiError(503, "the answer was stopped because the server is being stopped", retry_s=5)
        heard = [self._events.popleft() for _ in range(len(self._events))]
        self._open -= {index for index, event in heard if isinstance(event, Done | Failed)}
        return heard

    @property
    def ended(self) -> bool:
        """All requests have ended."""
        return not self._open

    def _hear(self, index: int, event: Event) -> None:
        """On the engine's thread. A loop that is called and has not come yet finds further events, too."""
        self._events.append((index, event))
        if not self._called:
            self._called = True
            with suppress(RuntimeError):  # the server is gone
                self._loop.call_soon_threadsafe(self._come)

    def _come(self) -> None:
        self._called = False
        self._arrived.set()


class Choice:
    """One of the answers to a request, as far as it got. prompt_number: which of several prompts it belongs to."""

    def __init__(self, index: int, *, logprobs: bool, prompt_number: int = 0) -> None:
        self.index = index
        self.prompt_number = prompt_number
        self.reason: str | None = None
        self.usage = Usage()
        self._logprobs = _Logprobs() if logprobs else None

    def hear(self, event: Event) -> list[dict[str, Any]]:
        """The pieces that an event adds, as they stand in chunks."""
        match event:
            case Started():
                return self.started(event)
            case Delta(text=text, logprobs=logprobs):
                told = self._logprobs.take(text, logprobs) if self._logprobs is not None else []
                return self.said(text, event.token_ids, told)
            case Done():
                self.usage = event.usage
                self.reason = _FINISH.get(event.reason, "stop")
                return self.ended(event)
            case _:
                return []

    def started(self, event: Started) -> list[dict[str, Any]]:
        """Before the first text."""
        raise NotImplementedError

    def said(self, text: str, ids: Sequence[int], logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
        """More text."""
        raise NotImplementedError

    def ended(self, event: Done) -> list[dict[str, Any]]:
        """The end, with the reason as `finish_reason`."""
        raise NotImplementedError

    def value(self) -> dict[str, Any]:
        """The whole choice."""
        raise NotImplementedError

    @property
    def satisfied(self) -> bool:
        """Nothing more is wanted of the answer."""
        return False

    @property
    def reasoning_tokens(self) -> int:
        """How many of the tokens were thinking."""
        return 0


class ChatChoice(Choice):
    """A message: thinking, calls of tools, what is said.

    tools: that may be called, with the schemas of their parameters. think: `LoadedModel.think`.
    one_call: the first call is all that is wanted.
    """

    def __init__(
        self,
        index: int,
        *,
        logprobs: bool,
        tools: Mapping[str, Mapping[str, Any] | None],
        think: tuple[str, str] | None,
        one_call: bool = False,
    ) -> None:
        super().__init__(index, logprobs=logprobs)
        self._tools, self._think, self._one_call = tools, think, one_call
        self._reader = api.answer_reader(tools, think)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._told: list[dict[str, Any]] = []
        self._thinking_ids = 0

    @override
    def started(self, event: Started) -> list[dict[str, Any]]:
        """The role."""
        self._reader = api.answer_reader(self._tools, self._think, thinking=event.thinking)
        return [self._chunk({"role": "assistant", "content": ""})]

    @override
    def said(self, text: str, ids: Sequence[int], logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
        """Deltas of the message."""
        parts = self._reader.push(text)
        if parts and parts[-1].kind == "reasoning":
            self._thinking_ids += len(ids)
        return self._deltas(parts, logprobs)

    @override
    def ended(self, event: Done) -> list[dict[str, Any]]:
        """What was held back, then the reason."""
        chunks = self._deltas(self._reader.finish(), [])
        if self._calls and self.reason == "stop":
            self.reason = "tool_calls"
        return [*chunks, self._chunk({}, reason=self.reason)]

    def _deltas(self, parts: Sequence[Any], logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
        deltas = [delta for part in parts if (delta := self._delta(part)) is not None]
        told = [_chat_logprob(logprob) for logprob in logprobs]
        self._told += told
        if told and not deltas:
            deltas = [{"content": ""}]
        return [
            self._chunk(delta, logprobs=told if number == 0 and self._logprobs is not None else None)
            for number, delta in enumerate(deltas)
        ]

    def _delta(self, part: Any) -> dict[str, Any] | None:
        if self._one_call and (part.call > 0 or (self._calls and part.kind == "content")):
            return None
        match part.kind:
            case "content":
                self._content.append(part.text)
                return {"content": part.text}
            case "reasoning":
                self._reasoning.append(part.text)
                return {"reasoning_content": part.text}
            case "call":
                called = {"name": part.text, "arguments": ""}
                self._calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": called})
                begun = {**self._calls[-1], "function": dict(called)}
                return {"tool_calls": [{"index": part.call, **begun}]}
            case _:
                self._calls[part.call]["function"]["arguments"] += part.text
                return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}

    def _chunk(
        self, delta: dict[str, Any], *, reason: str | None = None, logprobs: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        told = None if logprobs is None else {"content": logprobs, "refusal": None}
        return {"index": self.index, "delta": delta, "logprobs": told, "finish_reason": reason}

    @override
    def value(self) -> dict[str, Any]:
        """The message with its reason."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content), "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
            message["content"] = message["content"] or None
        told = None if self._logprobs is None else {"content": self._told, "refusal": None}
        return {"index": self.index, "message": message, "logprobs": told, "finish_reason": self.reason}

    @property
    @override
    def satisfied(self) -> bool:
        """The one call that is wanted is there."""
        return self._one_call and self._reader.calls > 0

    @property
    @override
    def reasoning_tokens(self) -> int:
        """Counted by the pieces that were thinking."""
        return self._thinking_ids


class TextChoice(Choice):
    """A text that goes on. echo: what is put before it."""

    def __init__(self, index: int, *, logprobs: bool, prompt_number: int = 0, echo: str = "") -> None:
        super().__init__(index, logprobs=logprobs, prompt_number=prompt_number)
        self._echo = echo
        self._text = [echo]
        self._offset = len(echo)
        self._told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    @override
    def started(self, event: Started) -> list[dict[str, Any]]:
        """The echo."""
        return [self._chunk(self._echo)] if self._echo else []

    @override
    def said(self, text: str, ids: Sequence[int], logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
        """The text."""
        self._text.append(text)
        told: dict[str, list[Any]] = {name: [] for name in self._told}
        for logprob in logprobs:
            spelt = _lossy(logprob.token_bytes)
            told["tokens"].append(spelt)
            told["token_logprobs"].append(_finite(logprob.logprob))
            told["top_logprobs"].append(
                {_lossy(spelling): _finite(value) for _, spelling, value in logprob.alternatives}
            )
            told["text_offset"].append(self._offset)
            self._offset += len(spelt)
        for name, values in told.items():
            self._told[name] += values
        return [self._chunk(text, logprobs=None if self._logprobs is None else told)]

    @override
    def ended(self, event: Done) -> list[dict[str, Any]]:
        """The reason."""
        return [self._chunk("", reason=self.reason)]

    def _chunk(
        self, text: str, *, reason: str | None = None, logprobs: dict[str, list[Any]] | None = None
    ) -> dict[str, Any]:
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    @override
    def value(self) -> dict[str, Any]:
        """The text with its reason."""
        return self._chunk("".join(self._text), reason=self.reason, logprobs=self._told if self._logprobs else None)


async def whole(answers: Answers, choices: Sequence[Choice], frame: Frame) -> dict[str, Any]:
    """All choices at once.

    Raises:
        ApiError: one of them failed
        ClientGoneError: nobody waits for them
    """
    while not answers.ended:
        for index, event in await answers.some(60.0):
            _hear(answers, choices, index, event, frame)
    kind = frame.object.removesuffix(".chunk")
    return {
        **frame.head(kind),
        "choices": [choice.value() for choice in choices],
        "usage": _usage(choices),
        "system_fingerprint": None,
    }


async def streamed(
    answers: Answers, choices: Sequence[Choice], frame: Frame, *, include_usage: bool
) -> AsyncIterator[list[dict[str, Any]] | str | ApiError]:
    """Chunks, as many as there are at a time; a string is a remark that keeps the connection alive.

    The first value is an empty remark, given once it is unlikely that the request is refused: until it comes, errors
    are raised, afterwards they are the last value.

    Raises:
        ApiError: the request was refused
        ClientGoneError: nobody reads
    """
    chunks: list[dict[str, Any]] = []
    for index, event in await answers.some(_FIRST_EVENT_S):
        chunks += _hear(answers, choices, index, event, frame)
    yield ""
    head = {**frame.head(frame.object), "system_fingerprint": None}
    extra = {"usage": None} if include_usage else {}
    said_s = time.monotonic()
    try:
        while True:
            if chunks:
                told, chunks = chunks, []
                yield [{**head, "choices": [chunk], **extra} for chunk in told]
            if answers.ended:
                break
            heard = await answers.some(_HEARTBEAT_S)
            for index, event in heard:
                chunks += _hear(answers, choices, index, event, frame)
            if chunks or (heard and time.monotonic() - said_s < _REMARK_S):
                continue
            said_s = time.monotonic()
            progress = heard[-1][1] if heard else None
            yield f"{progress.stage} {progress.done}/{progress.total}" if isinstance(progress, Progress) else "waiting"
    except ApiError as error:
        if chunks:  # that came together with the error
            yield [{**head, "choices": [chunk], **extra} for chunk in chunks]
        yield error
        return
    if include_usage:
        yield [{**head, "choices": [], "usage": _usage(choices)}]


def _hear(answers: Answers, choices: Sequence[Choice], index: int, event: Event, frame: Frame) -> list[dict[str, Any]]:
    if isinstance(event, Failed):
        raise api_error(event, frame.prompt)
    choice = choices[index]
    if isinstance(event, Done) and event.reason == "cancelled" and not choice.satisfied:
        raise ApiError(503, event.notices[-1] if event.notices else "the answer was stopped", retry_s=5)
    chunks = choice.hear(event)
    if choice.satisfied and not isinstance(event, Done):
        answers.cancel(index)
    return chunks


def _usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens of all choices; of several that share a prompt, it counts once for each prompt."""
    completion = sum(choice.usage.completion_tokens for choice in choices)
    prompts = {choice.prompt_number: choice.usage for choice in choices} if choices else {}
    prompt = sum(usage.prompt_tokens for usage in prompts.values())
    cached = sum(usage.cached_tokens for usage in prompts.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)},
    }


class _Logprobs:
    """Pairs tokens with the text that was given out: what a stop text cut away is not told of."""

    def __init__(self) -> None:
        self._text_bytes = 0
        self._token_bytes = 0
        self._waiting: list[TokenLogprob] = []

    def take(self, text: str, logprobs: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        """The tokens that begin within the text so far."""
        self._text_bytes += len(text.encode())
        self._waiting += logprobs
        told = []
        while self._waiting and self._token_bytes < self._text_bytes:
            told.append(self._waiting.pop(0))
            self._token_bytes += len(told[-1].token_bytes)
        return told


def _chat_logprob(logprob: TokenLogprob) -> dict[str, Any]:
    rivals = [
        {"token": _lossy(spelt), "logprob": _finite(value), "bytes": list(spelt)}
        for _, spelt, value in logprob.alternatives
    ]
    own = {"token": _lossy(logprob.token_bytes), "logprob": _finite(logprob.logprob)}
    return {**own, "bytes": list(logprob.token_bytes), "top_logprobs": rivals}


def _lossy(spelt: bytes) -> str:
    return spelt.decode("utf-8", "replace")


def _finite(value: float) -> float:
    # What clients of OpenAI get for a token that cannot come.
    return max(value, -9999.0)
