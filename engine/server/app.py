"""The endpoints. Each turns a body into requests to the engine and its events into an answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from engine import __version__, api
from engine.api import Constraint, Engine, LoadedModel, Prompt, Sampling
from engine.errors import ContextOverflowError, InglenookError
from engine.server.answers import Answers, ChatChoice, Choice, ClientGoneError, Frame, TextChoice, streamed, whole
from engine.server.guard import Guard
from engine.server.hub import Hub, Served
from engine.server.metrics import Metrics
from engine.server.wire import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    chat_messages,
    constraint_of,
    encoded,
    error_body,
    listed,
    offered_tools,
    parsed_json,
    sampling_of,
    template_of,
    validated,
)
from engine.settings import ServerSettings

__all__ = ["create_app"]

log = logging.getLogger(__name__)
content_log = logging.getLogger("inglenook.content")

Body = TypeVar("Body", bound=BaseModel)
Value = TypeVar("Value")

_BODY_PAUSE_S = 20.0  # a body that stands still for so long is given up
_BODY_S = 300.0
_CLIENT_GONE = 499
_MOST_PROMPTS = 64
_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


def create_app(hub: Hub, settings: ServerSettings, metrics: Metrics) -> Guard:
    """The server as an ASGI application, its guard outermost."""
    endpoints = _Endpoints(hub, settings, metrics)
    app = FastAPI(
        title="Inglenook",
        version=__version__,
        summary="Language models on this computer, in OpenAI's protocol.",
        docs_url=None,  # FastAPI's pages load their scripts from a network
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
    )
    post: dict[str, tuple[Callable[[Request], Awaitable[Response]], type[BaseModel], str]] = {
        "/v1/chat/completions": (endpoints.chat, ChatRequest, "Answer a conversation"),
        "/v1/completions": (endpoints.completions, CompletionRequest, "Go on with a text"),
        "/tokenize": (endpoints.tokenize, TokenizeRequest, "Token ids of a text or conversation"),
        "/detokenize": (endpoints.detokenize, DetokenizeRequest, "The text of token ids"),
    }
    for path, (handler, model, summary) in post.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        app.add_api_route(
            path, handler, methods=["POST"], summary=summary, response_class=Response, openapi_extra=_described(schema)
        )
    get: dict[str, tuple[Callable[..., Awaitable[Response]], str]] = {
        "/v1/models": (endpoints.models, "The models that can be asked"),
        "/v1/models/{name:path}": (endpoints.model, "One of them"),
        "/health": (endpoints.health, "Whether the server is up; needs no key"),
        "/metrics": (endpoints.measured, "Counters for Prometheus"),
        "/": (endpoints.page, "This page"),
    }
    for path, (getter, summary) in get.items():
        app.add_api_route(path, getter, methods=["GET"], summary=summary, response_class=Response)
    app.add_exception_handler(ApiError, _told)
    app.add_exception_handler(HTTPException, _told_http)
    app.add_exception_handler(ClientDisconnect, _told_nobody)
    app.add_exception_handler(Exception, _told_fault)
    return Guard(app, settings)


class _Endpoints:
    def __init__(self, hub: Hub, settings: ServerSettings, metrics: Metrics) -> None:
        self._hub = hub
        self._settings = settings
        self._metrics = metrics

    # ------------------------------------------------------------ generation

    async def chat(self, request: Request) -> Response:
        body = await self._body(request, ChatRequest)
        _refuse(body)
        tools, must_call = offered_tools(body)
        messages = chat_messages(body.messages)
        template, thinking_tokens = template_of(body, tools)
        constraint = constraint_of(body, tools, must_call=must_call)
        served = self._hub.find(body.model)
        one_call = body.parallel_tool_calls is False or must_call
        alternatives = (body.top_logprobs or 0) if body.logprobs else None
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs is for requests with logprobs", param="top_logprobs")
        count = body.n or 1
        frame = Frame("chat.completion.chunk", served.name, "messages", f"chatcmpl-{uuid.uuid4().hex}")

        def prepared(info: LoadedModel) -> tuple[list[api.Request], list[Choice]]:
            # A turn takes a token at least; rendering a hundred thousand of them would keep others waiting.
            if len(messages) > info.context:
                _too_long(len(messages), info)
            limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
            sampling = sampling_of(body, info.defaults, limit)
            requests = _requests(
                frame.id, [messages] * count, sampling, body, constraint, alternatives, template, thinking_tokens
            )
            schemas = {tool.function.name: tool.function.parameters for tool in tools}
            choices = [
                ChatChoice(
                    index,
                    logprobs=bool(body.logprobs),
                    tools=schemas,
                    think=info.think,
                    one_call=one_call and bool(schemas),
                )
                for index in range(count)
            ]
            return requests, list(choices)

        return await self._answered(request, body, served, "chat", frame, count, prepared)

    async def completions(self, request: Request) -> Response:
        body = await self._body(request, CompletionRequest)
        _refuse(body)
        prompts = _prompts(body)
        served = self._hub.find(body.model)
        count = body.n or 1
        constraint = constraint_of(body)
        frame = Frame("text_completion", served.name, "prompt", f"cmpl-{uuid.uuid4().hex}")

        async def echoes(engine: Engine) -> list[str]:
            texts = []
            for prompt in prompts:
                if isinstance(prompt, str):
                    texts.append(prompt)
                else:
                    texts.append(await _asked(partial(engine.decode, prompt)))
            return texts

        def prepared(info: LoadedModel, texts: Sequence[str] = ()) -> tuple[list[api.Request], list[Choice]]:
            sampling = sampling_of(body, info.defaults, 16 if body.max_tokens is None else body.max_tokens)
            each = [prompt for prompt in prompts for _ in range(count)]
            requests = _requests(frame.id, each, sampling, body, constraint, body.logprobs, {}, None)
            choices = [
                TextChoice(
                    index,
                    logprobs=body.logprobs is not None,
                    prompt_number=index // count,
                    echo=texts[index // count] if texts else "",
                )
                for index in range(len(each))
            ]
            return requests, list(choices)

        wanted = count * len(prompts)
        return await self._answered(
            request, body, served, "completions", frame, wanted, prepared, echoes if body.echo else None
        )

    async def _answered(  # noqa: PLR0917 - what the two endpoints differ in
        self,
        request: Request,
        body: GenerationRequest,
        served: Served,
        endpoint: str,
        frame: Frame,
        count: int,
        prepared: Callable[..., tuple[list[api.Request], list[Choice]]],
        echoes: Callable[[Engine], Awaitable[list[str]]] | None = None,
    ) -> Response:
        """Run the requests and answer whole or in chunks."""
        gone = _Gone(request.receive)
        stack = contextlib.AsyncExitStack()
        choices: list[Choice] = []
        status = 500

        async def end() -> None:
            await stack.aclose()
            gone.close()
            self._metrics.answered(served.name, endpoint, status)
            for choice in choices:
                self._metrics.computed(served.name, choice.usage)
            self._log(frame, body, choices, status)

        try:
            engine, info = await gone.unless(stack.enter_async_context(self._hub.use(served, count)))
            texts = (await echoes(engine),) if echoes is not None else ()
            requests, choices = prepared(info, *texts)
            requests = [replace(one, client=_client(request)) for one in requests]
            answers = await stack.enter_async_context(Answers(engine, requests, gone.wait, self._hub.closing))
            if not body.stream:
                value = await whole(answers, choices, frame)
                status = 200
                response = Response(encoded(value), media_type="application/json")
            else:
                usage = bool(body.stream_options and body.stream_options.include_usage)
                chunks = streamed(answers, choices, frame, include_usage=usage)
                await anext(chunks)  # a refusal is raised here, while it can still be the status
                status = 200
                return _EventStream(chunks, end)
        except ApiError as error:
            status = error.status
            await end()
            raise
        except ClientGoneError:
            status = _CLIENT_GONE
            response = Response(status_code=_CLIENT_GONE)
        except BaseException:
            await end()
            raise
        await end()
        return response

    def _log(self, frame: Frame, body: GenerationRequest, choices: Sequence[Choice], status: int) -> None:
        for choice in choices:
            usage = choice.usage
            log.info(
                "%s/%d %s %d: prompt %d (%d cached), answer %d tokens, %s; queue %.3f prefill %.3f decode %.3f s",
                frame.id,
                choice.index,
                frame.model,
                status,
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens,
                choice.reason,
                usage.queue_s,
                usage.prefill_s,
                usage.decode_s,
            )
        if self._settings.log_prompts:
            content_log.info("%s asked: %s", frame.id, body.model_dump_json(exclude_none=True))
            for choice in choices:
                content_log.info("%s answered: %s", frame.id, encoded(choice.value()).decode())

    # ------------------------------------------------------------ tokens

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request, TokenizeRequest)
        given = [value for value in (body.prompt, body.content, body.text) if value is not None]
        if len(given) + (body.messages is not None) != 1:
            raise ApiError(400, "give either a text as prompt or a conversation as messages", param="prompt")
        prompt: Prompt = given[0] if given else chat_messages(body.messages or [])
        ids: tuple[int, ...] = ()
        async with self._hub.use(self._hub.find(body.model)) as (engine, info):
            if prompt != "":  # no text has no ids; a prompt must have some
                ids = await _asked(partial(engine.encode, prompt, {}))
        return _json({"tokens": ids, "count": len(ids), "max_model_len": info.context})

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request, DetokenizeRequest)
        async with self._hub.use(self._hub.find(body.model)) as (engine, _):
            text = await _asked(partial(engine.decode, body.tokens))
        # Both names are in use among servers of this kind.
        return _json({"prompt": text, "content": text})

    # ------------------------------------------------------------ about the server

    async def models(self) -> Response:
        rows = [listed(name, served.info, self._hub.began) for name, served in self._hub.models.items()]
        return _json({"object": "list", "data": rows})

    async def model(self, name: str) -> Response:
        served = self._hub.find(name)
        return _json(listed(served.name, served.info, self._hub.began))

    async def health(self) -> Response:
        if self._hub.leaving.is_set():
            return _json({"status": "closing"}, 503)
        return _json({"status": "ok"})

    async def measured(self) -> Response:
        text = self._metrics.text(await self._hub.statuses())
        return Response(text, media_type="text/plain; version=0.0.4")

    async def page(self) -> Response:
        text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"content-security-policy": _PAGE_POLICY, "x-frame-options": "DENY"})

    async def _body(self, request: Request, model: type[Body]) -> Body:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the body must be application/json")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "a compressed body is not understood")
        return validated(model, parsed_json(await self._bytes(request)))

    async def _bytes(self, request: Request) -> bytes:
        most = self._settings.body_mb << 20
        too_large = ApiError(413, f"the body is larger than {self._settings.body_mb} MB", code="body_too_large")
        length = request.headers.get("content-length", "0")
        if length.isdigit() and int(length[:20]) > most:
            raise too_large
        parts: list[bytes] = []
        size = 0
        stream = request.stream()
        try:
            async with asyncio.timeout(_BODY_S):
                while True:
                    try:
                        part = await asyncio.wait_for(anext(stream), _BODY_PAUSE_S)
                    except StopAsyncIteration:
                        break
                    size += len(part)
                    if size > most:
                        raise too_large
                    parts.append(part)
        except TimeoutError:
            raise ApiError(408, "the body did not come in time") from None
        return b"".join(parts)


class _Gone:
    """Knows when the client has gone: one task reads its connection from the end of the body on."""

    def __init__(self, receive: Receive) -> None:
        self._task = asyncio.ensure_future(self._watch(receive))

    @staticmethod
    async def _watch(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def wait(self) -> None:
        """Until it has gone."""
        await asyncio.shield(self._task)

    async def unless(self, work: Awaitable[Value]) -> Value:
        """The result of `work`.

        Raises:
            ClientGoneError: the client went first
        """
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait((working, self._task), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
        except asyncio.CancelledError:
            await _ended(working)
            raise
        await _ended(working)
        raise ClientGoneError

    def close(self) -> None:
        """Look no longer."""
        self._task.cancel()


async def _ended(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, ApiError):
        await task


class _EventStream(Response):
    """Chunks as server-sent events. end: called once, however the stream ends."""

    def __init__(
        self, chunks: AsyncIterator[list[dict[str, Any]] | str | ApiError], end: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._end = end

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events():
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except ClientGoneError:
            return
        finally:
            await self._end()

    async def _events(self) -> AsyncIterator[bytes]:
        async for chunks in self._chunks:
            if isinstance(chunks, str):
                yield f": {chunks}\n\n".encode()
            elif isinstance(chunks, ApiError):
                yield b"event: error\ndata: " + encoded(error_body(chunks)) + b"\n\n"
                return
            else:
                yield b"".join(b"data: %b\n\n" % encoded(chunk) for chunk in chunks)
        yield b"data: [DONE]\n\n"


async def _asked(ask: Callable[[Callable[[Value | InglenookError], None]], None]) -> Value:
    """What the engine says to a question.

    Raises:
        ApiError: 400, why there is no answer
    """
    loop = asyncio.get_running_loop()
    told: asyncio.Future[Value | InglenookError] = loop.create_future()

    def tell(value: Value | InglenookError) -> None:
        if not told.done():
            told.set_result(value)

    def hear(value: Value | InglenookError) -> None:
        with contextlib.suppress(RuntimeError):  # the server is gone
            loop.call_soon_threadsafe(tell, value)

    ask(hear)
    value = await told
    if isinstance(value, ContextOverflowError):
        raise ApiError(400, str(value), code="context_length_exceeded")
    if isinstance(value, InglenookError):
        raise ApiError(400, str(value))
    return value


def _requests(  # noqa: PLR0917 - what the two endpoints differ in
    name: str,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    body: GenerationRequest,
    constraint: Constraint | None,
    alternatives: int | None,
    template: Mapping[str, Any],
    thinking_tokens: int | None,
) -> list[api.Request]:
    """One request per answer; further answers to a prompt get seeds of their own."""
    bias = _bias(body)
    count = body.n or 1
    return [
        api.Request(
            id=f"{name}/{index}",
            prompt=prompt,
            sampling=sampling
            if sampling.seed < 0 or index % count == 0
            else sampling.model_copy(update={"seed": (sampling.seed + index % count) % 2**63}),
            logprobs=alternatives,
            template=template,
            constraint=constraint,
            thinking_tokens=thinking_tokens,
            logit_bias=bias,
        )
        for index, prompt in enumerate(prompts)
    ]


def _client(request: Request) -> str:
    """Who asks, so that the engine can let clients take turns: an address and a key that cannot be read off it."""
    key = request.headers.get("authorization", "").encode()
    return f"{request.client.host if request.client else 'here'}/{sha256(key).hexdigest()[:12]}"


def _bias(body: GenerationRequest) -> tuple[tuple[int, float], ...]:
    pairs = []
    for token, added in (body.logit_bias or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 10 and -100 <= added <= 100):
            raise ApiError(
                400,
                "logit_bias maps token ids to numbers between -100 and 100",
                param="logit_bias",
                code="invalid_value",
            )
        pairs.append((int(token), added))
    return tuple(pairs)


def _refuse(body: ChatRequest | CompletionRequest) -> None:
    """What would change the answer and is not done here, by name rather than in silence."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is for requests with stream", param="stream_options")
    unsupported: dict[str, bool] = {}
    if isinstance(body, CompletionRequest):
        unsupported = {
            "suffix": bool(body.suffix),
            "best_of": body.best_of is not None and body.best_of != (body.n or 1),
            "logprobs": body.logprobs is not None and bool(body.echo),
        }
    else:
        unsupported = {
            "modalities": any(kind != "text" for kind in body.modalities or ()),
            "audio": body.audio is not None,
        }
    for name, given in unsupported.items():
        if given:
            echo = " together with echo" if name == "logprobs" else ""
            raise ApiError(400, f"{name}{echo} is not supported", param=name, code="unsupported_parameter")


def _prompts(body: CompletionRequest) -> list[str | tuple[int, ...]]:
    given = body.prompt
    prompts: list[str | tuple[int, ...]]
    if isinstance(given, str):
        prompts = [given]
    elif all(isinstance(item, int) for item in given):
        prompts = [tuple(item for item in given if isinstance(item, int))]
    else:
        prompts = [item if isinstance(item, str) else tuple(item) for item in given if not isinstance(item, int)]
    if not all(prompts):
        raise ApiError(400, "the prompt is empty", param="prompt", code="invalid_value")
    if len(prompts) > _MOST_PROMPTS:
        raise ApiError(400, f"at most {_MOST_PROMPTS} prompts are taken at once", param="prompt", code="invalid_value")
    return prompts


def _too_long(turns: int, info: LoadedModel) -> None:
    raise ApiError(
        400,
        f"the conversation has {turns} messages and the context holds {info.context} tokens; shorten it",
        param="messages",
        code="context_length_exceeded",
    )


def _json(value: Any, status: int = 200) -> Response:
    return Response(encoded(value), status, media_type="application/json")


async def _told(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(encoded(error_body(error)), error.status, error.headers, media_type="application/json")


async def _told_http(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    sentence = {404: "there is nothing at this address", 405: "this address is not for this method"}
    allow = (error.headers or {}).get("Allow")
    return await _told(request, ApiError(error.status_code, sentence.get(error.status_code, error.detail), allow=allow))


async def _told_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _told_fault(request: Request, _error: Exception) -> Response:
    """What nobody expected; the log has the trace."""
    return await _told(request, ApiError(500, "the server made a mistake; its log says more"))


def _described(schema: dict[str, Any]) -> dict[str, Any]:
    """A body's schema for the page."""
    inner = json.loads(json.dumps(schema).replace("#/components/schemas/", "#/$defs/"))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inner}}}}
