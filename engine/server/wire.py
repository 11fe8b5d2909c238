"""What clients send, as checked values, and errors as clients of OpenAI's protocol read them.

Null means absent, unknown fields are ignored, a field of the wrong type or
range is refused by name. Nothing a client sent is repeated in an error unless
it is short and harmless.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.api import Constraint, Failed, LoadedModel, Message, Sampling
from engine.errors import SettingError
from engine.settings import checked

__all__ = [
    "ApiError",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationRequest",
    "TokenizeRequest",
    "Tool",
    "api_error",
    "chat_messages",
    "constraint_of",
    "encoded",
    "error_body",
    "listed",
    "now",
    "offered_tools",
    "parsed_json",
    "sampling_of",
    "template_of",
    "validated",
]

Value = TypeVar("Value", bound=BaseModel)
Number = float | None
Text = str | None

_HALF_CHARACTER = re.compile(r"[\ud800-\udfff]")
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_DEEPEST = 64
_MOST_CHOICES = 16
_MOST_LOGPROBS = 20
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"}
_TYPES |= {404: "invalid_request_error", 408: "timeout_error", 429: "rate_limit_error"}
# What templates are told by the engine, or could be misled by.
_RESERVED = {"messages", "add_generation_prompt", "started", "tools", "documents", "self"}


class ApiError(Exception):
    """An answer that is an error. retry_s: when to come back."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_s = status, message, param, code, retry_s
        self.headers = {} if retry_s is None else {"retry-after": str(retry_s)}
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"
        if allow is not None:
            self.headers["allow"] = allow


def error_body(error: ApiError) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = _TYPES.get(error.status, default)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def api_error(failed: Failed, prompt: str) -> ApiError:
    """What a client is told of a request that the engine refused or failed. prompt: the field that held it."""
    match failed.kind:
        case "ContextOverflowError":
            return ApiError(400, failed.message, param=prompt, code="context_length_exceeded")
        case "BusyError":
            return ApiError(429, failed.message, code="queue_full", retry_s=max(1, math.ceil(failed.retry_s)))
        case "InternalError":
            return ApiError(500, failed.message)
        case "ResourceError" | "OutOfSpaceError" | "Cancelled":
            return ApiError(503, failed.message, retry_s=30)
        case _:
            return ApiError(400, failed.message)


def encoded(value: Any) -> bytes:
    """JSON as it goes out."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


# ---------------------------------------------------------------- bodies


def parsed_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        ApiError: 400, it is none, or one that no client would send
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON number")

    try:
        value = json.loads(body.decode("utf-8"), parse_constant=refuse)
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deep") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON ({error.msg}, at character {error.pos})") from None
    except ValueError:
        raise ApiError(400, "the body is not valid JSON (a number that is none)") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    if _depth_exceeds(value, _DEEPEST):
        raise ApiError(400, f"the body is nested deeper than {_DEEPEST}")
    whole: dict[str, Any] = _sound(value) if _ESCAPED_HALF.search(body) else value
    return whole


def _depth_exceeds(value: Any, most: int) -> bool:
    level: list[Any] = [value]
    for _ in range(most):
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


def _sound(value: Any) -> Any:
    """Halves of surrogate pairs, which UTF-8 cannot hold, become U+FFFD."""
    if isinstance(value, str):
        return _HALF_CHARACTER.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, dict):
        return {_sound(key): _sound(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_sound(item) for item in value]
    return value


def validated(model: type[Value], body: Mapping[str, Any]) -> Value:
    """`model(**body)`.

    Raises:
        ApiError: 400, names the field
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _field_error(error) from None


def _field_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    # Of a union, the place names the alternatives as well; a client knows fields and numbers only.
    place = [part for part in first["loc"] if isinstance(part, int) or re.fullmatch(r"[a-z_]{1,40}", str(part))]
    place = [part for part in place if part not in ("str", "int", "float", "bool", "list", "dict")]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".") or None
    if first["type"] == "missing":
        return ApiError(400, f"you must provide {param}", param=param, code="missing_required_parameter")
    kind = "invalid_value" if first["type"] in _VALUE_FAULTS else "invalid_type"
    reason = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param or 'the body'}: {reason[:1].lower()}{reason[1:]}", param=param, code=kind)


_VALUE_FAULTS = ("value_error", "literal_error", "greater_than_equal", "less_than_equal", "too_short", "too_long")


class _Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class _Function(_Wire):
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$")]
    description: Text = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[bool | None, Field(description="The arguments must keep to the schema.")] = None


class Tool(_Wire):
    """A function that the model may call."""

    type: Literal["function"] = "function"
    function: _Function


class _CalledFunction(_Wire):
    name: str
    arguments: str = "{}"


class _ToolCall(_Wire):
    id: Text = None
    type: Literal["function"] = "function"
    function: _CalledFunction


class _ContentPart(_Wire):
    type: str
    text: Text = None


class _ChatMessage(_Wire):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_ContentPart] | None = None
    name: Text = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: Text = None
    reasoning_content: Text = None


class _JsonSchema(_Wire):
    name: Text = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class _ResponseFormat(_Wire):
    """text, json_object, json_schema as OpenAI has them; beside these a regular expression or a grammar."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: _JsonSchema | None = None
    pattern: Text = None
    grammar: Text = None


class _ChosenFunction(_Wire):
    name: str


class _ChosenTool(_Wire):
    type: Literal["function"] = "function"
    function: _ChosenFunction


class _StreamOptions(_Wire):
    include_usage: bool | None = None


class GenerationRequest(_Wire):
    """What chat and completions have in common."""

    model: Annotated[Text, Field(description="A name that /v1/models lists; without it, the first one.")] = None
    stream: Annotated[bool | None, Field(description="Send the text as it comes.")] = None
    stream_options: _StreamOptions | None = None
    n: Annotated[int | None, Field(ge=1, le=_MOST_CHOICES, description="How many answers.")] = None
    max_tokens: Annotated[int | None, Field(ge=1, description="Of the answer; cut to what the context holds.")] = None
    stop: Annotated[str | list[str] | None, Field(description="The answer ends before any of these texts.")] = None
    seed: Annotated[int | None, Field(description="The same seed gives the same answer.")] = None
    temperature: Annotated[Number, Field(description="0 always takes the likeliest token.")] = None
    top_p: Number = None
    top_k: int | None = None
    min_p: Number = None
    typical_p: Number = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    repetition_penalty: Number = None
    repetition_window: int | None = None
    logit_bias: Annotated[dict[str, float] | None, Field(description="Token id -> what is added to its logit.")] = None
    response_format: Annotated[_ResponseFormat | None, Field(description="What the answer must look like.")] = None


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[_ChatMessage], Field(min_length=1, description="The conversation.")]
    max_completion_tokens: Annotated[int | None, Field(ge=1, description="The later name of max_tokens.")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=_MOST_LOGPROBS)] = None
    tools: Annotated[list[Tool] | None, Field(max_length=128, description="Functions that may be called.")] = None
    tool_choice: Literal["none", "auto", "required"] | _ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None,
        Field(description="none switches thinking off where the model can; minimal to medium limit it."),
    ] = None
    thinking_budget: Annotated[int | None, Field(ge=0, description="Tokens after which thinking is ended.")] = None
    chat_template_kwargs: Annotated[
        dict[str, bool | int | float | str | None] | None,
        Field(description="Variables for the model's chat template, such as enable_thinking."),
    ] = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: Annotated[
        str | list[str] | list[int] | list[list[int]],
        Field(description="A text, token ids, or a list of either; continued as it stands."),
    ]
    logprobs: Annotated[int | None, Field(ge=0, le=_MOST_LOGPROBS)] = None
    echo: Annotated[bool | None, Field(description="Put the prompt before its answer.")] = None
    suffix: Text = None
    best_of: int | None = None


class TokenizeRequest(_Wire):
    """Body of /tokenize: a text as `prompt` (or `content`, or `text`), or a conversation as `messages`."""

    model: Text = None
    prompt: Text = None
    content: Text = None
    text: Text = None
    messages: list[_ChatMessage] | None = None


class DetokenizeRequest(_Wire):
    """Body of /detokenize."""

    model: Text = None
    tokens: list[int]


# ---------------------------------------------------------------- what the engine wants


def chat_messages(messages: list[_ChatMessage]) -> tuple[Message, ...]:
    """The conversation for the engine.

    Raises:
        ApiError: 400, a part is no text, or a call's arguments are no JSON object
    """
    return tuple(_message(number, message) for number, message in enumerate(messages))


def _message(number: int, message: _ChatMessage) -> Message:
    content = message.content
    if isinstance(content, list):
        for place, part in enumerate(content):
            if part.type not in ("text", "input_text", "refusal") or part.text is None:
                where = f"messages[{number}].content[{place}]"
                raise ApiError(400, f"{where}: only parts of the type text are understood", param=where)
        content = "".join(part.text or "" for part in content)
    more: dict[str, Any] = {}
    if message.tool_calls:
        more["tool_calls"] = [_called(number, call) for call in message.tool_calls]
    for name in ("tool_call_id", "name", "reasoning_content"):
        if (given := getattr(message, name)) is not None:
            more[name] = given
    role = "system" if message.role == "developer" else message.role
    return Message(role, content or "", more)


def _called(number: int, call: _ToolCall) -> dict[str, Any]:
    """A call as chat templates expect it, with its arguments as an object."""
    where = f"messages[{number}].tool_calls"
    try:
        arguments = parsed_json(call.function.arguments.encode() or b"{}")
    except ApiError as error:
        raise ApiError(400, f"{where}: arguments: {error.message}", param=where) from None
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def sampling_of(request: GenerationRequest, defaults: Sampling, max_tokens: int | None) -> Sampling:
    """The model's own settings with what the request says.

    Raises:
        ApiError: 400, names the field
    """
    fields: tuple[str, ...] = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "typical_p",
        "presence_penalty",
        "frequency_penalty",
    )
    fields += ("repetition_penalty", "repetition_window", "seed")
    given: dict[str, Any] = {name: value for name in fields if (value := getattr(request, name)) is not None}
    if request.stop is not None:
        given["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    # More than the context holds is what the context holds.
    given["max_tokens"] = _MOST_TOKENS if max_tokens is None else min(max_tokens, _MOST_TOKENS)
    for name, value in given.items():
        try:
            checked(Sampling, {name: value})
        except SettingError as error:
            raise ApiError(400, str(error), param=name, code="invalid_value") from None
    return defaults.model_copy(update=given)


_MOST_TOKENS = 1_000_000


def offered_tools(request: ChatRequest) -> tuple[list[Tool], bool]:
    """The tools that the model is told of, and whether it must call one of them.

    Raises:
        ApiError: 400, the choice does not fit the tools
    """
    tools, choice = request.tools or [], request.tool_choice
    if request.functions is not None or request.function_call is not None:
        raise ApiError(400, "functions are given as tools here", param="functions", code="unsupported_parameter")
    if choice is not None and choice != "none" and not tools:
        raise ApiError(400, "tool_choice is for requests with tools", param="tool_choice")
    if isinstance(choice, _ChosenTool):
        chosen = [tool for tool in tools if tool.function.name == choice.function.name]
        if not chosen:
            raise ApiError(400, "tool_choice names a function that is not among the tools", param="tool_choice")
        return chosen, True
    return ([], False) if choice == "none" else (tools, choice == "required")


def constraint_of(
    request: GenerationRequest, tools: Sequence[Tool] = (), *, must_call: bool = False
) -> Constraint | None:
    """What the answer is held to. tools: that may be called; must_call: one of them must be.

    Raises:
        ApiError: 400, the format lacks what it needs
    """
    form = _form_of(request)
    if not tools or not (must_call or form is not None or any(tool.function.strict for tool in tools)):
        return form
    described = [
        {
            "name": tool.function.name,
            # What nobody asked to be kept to is not enforced, except where the model would not call at all.
            "parameters": tool.function.parameters if must_call or tool.function.strict else None,
        }
        for tool in tools
    ]
    instead = None if form is None else {"kind": form.kind, "text": form.text}
    return Constraint("tools", json.dumps({"tools": described, "required": must_call, "instead": instead}))


def _form_of(request: GenerationRequest) -> Constraint | None:
    """The form that the answer's words must have.

    Raises:
        ApiError: 400, it lacks what it needs
    """
    wanted = request.response_format
    match wanted and wanted.type:
        case "json_object":
            return Constraint("json_object")
        case "json_schema":
            assert wanted is not None
            if wanted.json_schema is None or wanted.json_schema.schema_ is None:
                where = "response_format.json_schema"
                raise ApiError(400, f"{where} must hold a schema", param=where, code="missing_required_parameter")
            return Constraint("json_schema", json.dumps(wanted.json_schema.schema_))
        case "regex" | "grammar" as kind:
            assert wanted is not None
            text = wanted.pattern if kind == "regex" else wanted.grammar
            if not text:
                where = f"response_format.{'pattern' if kind == 'regex' else 'grammar'}"
                raise ApiError(400, f"you must provide {where}", param=where, code="missing_required_parameter")
            return Constraint(kind, text)
        case _:
            return None


def template_of(request: ChatRequest, tools: list[Tool]) -> tuple[dict[str, Any], int | None]:
    """Variables for the chat template, and the tokens that thinking may take.

    Raises:
        ApiError: 400, a variable is not a client's to set
    """
    variables: dict[str, Any] = dict(request.chat_template_kwargs or {})
    for name in variables:
        if name in _RESERVED or not name.isidentifier():
            raise ApiError(
                400, "chat_template_kwargs has a name that is not yours to set", param="chat_template_kwargs"
            )
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    if tools:
        variables["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    efforts = {"none": 0, "minimal": 128, "low": 512, "medium": 2048}
    budget = request.thinking_budget
    return variables, efforts.get(request.reasoning_effort or "") if budget is None else budget


def listed(name: str, info: LoadedModel | None, began: float) -> dict[str, Any]:
    """A row of /v1/models."""
    row: dict[str, Any] = {"id": name, "object": "model", "created": int(began), "owned_by": "inglenook"}
    if info is not None:
        row |= {"max_model_len": info.context, "format": info.format}
    return row


def now() -> int:
    """Seconds since 1970, as OpenAI stamps answers."""
    return int(time.time())
