"""The values that cross the engine's border: requests go in, events come out.

All are frozen and made of plain values, so any thread may hold them. A face
never sees a tensor, a page or a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from engine.progress import Progress
from engine.settings import Sampling

__all__ = [
    "Constraint",
    "ConstraintKind",
    "ContextCut",
    "Delta",
    "Done",
    "EngineStatus",
    "Event",
    "Failed",
    "FinishReason",
    "Loaded",
    "LoadedModel",
    "Message",
    "Overflow",
    "Progress",
    "Prompt",
    "PromptToken",
    "Request",
    "Role",
    "Started",
    "TokenLogprob",
    "Usage",
]

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "context", "cancelled", "loop", "deadline", "prefilled"]
"""Why an answer ended: by itself or a stop text; as long as allowed; the context is full; somebody stopped it; it
repeated itself; it took too long; only its prompt was wanted."""
Overflow = Literal["stop", "rolling", "middle", "summarise"]
"""What happens to a conversation longer than the context: refuse it and end full answers; leave out the oldest turns;
leave out the middle; put a summary in the place of the oldest turns."""
ConstraintKind = Literal["json_object", "json_schema", "regex", "grammar", "tools"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation, as a person or client wrote it.

    more: what else the chat template is told of it, such as `tool_calls` (with arguments as objects), `tool_call_id`
        or `name`; plain data.
    pinned: never left out of a conversation that is too long, as system messages are not.
    """

    role: Role
    content: str
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)
    pinned: bool = False


Prompt = tuple[Message, ...] | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer is made to look like.

    text: nothing for "json_object"; a JSON schema, a regular expression, or a
        grammar (Lark's notation or GBNF); for "tools" the JSON of
        `{"tools": [{"name", "parameters"}, ...], "required", "instead"}`:
        required: the answer is one call, in the model's own way. Otherwise it
        is words and calls; or, with `instead` (`{"kind", "text"}` of another
        constraint), calls or what that describes.
    """

    kind: ConstraintKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """One answer wanted.

    prompt: messages (rendered with the model's chat template), a string
        (tokenised as it stands, with the tokenizer's own BOS rule), or token ids.
    logprobs: how many alternatives per token to report; None reports nothing.
    started: when the conversation began, for chat templates that write the
        date: kept the same, its prompts begin alike and are found in the cache.
    stream: False withholds `Delta` events; the whole text comes with `Done`.
    template: variables for the chat template, such as `tools` (as OpenAI
        writes them) or `enable_thinking`; plain data.
    constraint: what the answer must look like; of an answer that begins with
        thinking, what follows that.
    thinking_tokens: thinking is ended after so many tokens; None lets it run.
    logit_bias: (token id, what is added to its logit) pairs.
    begin: how the answer begins, part of the prompt and not of the answer's
        text: to go on with an answer that was cut, or to lead it.
    client: who asks; clients take turns.
    overflow: what to do when the conversation does not fit the context.
    deadline_s: seconds after which it ends, come what may; None gives it twice
        the time it is expected to take, and more as long as it makes progress.
    prefill_only: read the prompt, so that later ones that begin like it start
        sooner; there is no answer.
    """

    id: str
    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    stream: bool = True
    logprobs: int | None = None
    started: datetime | None = None
    template: Mapping[str, Any] = field(default_factory=dict, hash=False)
    constraint: Constraint | None = None
    thinking_tokens: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    begin: str = ""
    client: str = ""
    overflow: Overflow = "stop"
    deadline_s: float | None = None
    prefill_only: bool = False


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of a prompt. control: it steers the model and is no text."""

    token_id: int
    token_bytes: bytes
    control: bool


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A drawn token and its likeliest rivals, natural logarithms of the raw model's probabilities."""

    token_id: int
    token_bytes: bytes
    logprob: float
    alternatives: tuple[tuple[int, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer took. Times in seconds on a monotonic clock.

    completion_tokens: every token drawn, the end token among them.
    decode_steps: steps in which they were drawn; guessed_tokens: of the next
    tokens, computed along in those steps; accepted_tokens: of these, the ones
    that came true and so needed no step of their own.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_steps: int = 0
    guessed_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def tokens_per_step(self) -> float:
        """1 without guesses, more where they come true; 0 before the first token."""
        return self.completion_tokens / self.decode_steps if self.decode_steps else 0.0

    @property
    def decode_tps(self) -> float:
        """Tokens per second after the first token; 0 when there is nothing to divide."""
        return (self.completion_tokens - 1) / self.decode_s if self.completion_tokens > 1 and self.decode_s > 0 else 0.0

    @property
    def prefill_tps(self) -> float:
        """Prompt tokens computed (not found in the cache) per second."""
        computed = self.prompt_tokens - self.cached_tokens
        return computed / self.prefill_s if self.prefill_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Started:
    """The request left the queue; its prompt is known in tokens.

    thinking: the prompt ends where the model is already thinking.
    """

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of an answer; never half a character, never part of a stop string."""

    request_id: str
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ContextCut:
    """A part of the conversation was left out so that the rest fits the context.

    dropped_messages: their indices in the request's prompt. cut_message: the
        index of one whose middle was cut out. summary: what stands for them.
        Of a prompt that is no conversation, tokens were left out; no index is
        named then.
    """

    request_id: str
    policy: Overflow
    dropped_messages: tuple[int, ...] = ()
    cut_message: int | None = None
    tokens_before: int = 0
    tokens_after: int = 0
    summary: str = ""

    def __str__(self) -> str:
        """One sentence for people."""
        parts = []
        if self.dropped_messages:
            count = len(self.dropped_messages)
            parts.append("an earlier message was" if count == 1 else f"{count} earlier messages were")
        if self.cut_message is not None:
            parts.append("the middle of a long message was")
        if not parts:
            parts.append(f"{self.tokens_before - self.tokens_after} tokens were")
        done = "summarised" if self.summary else "left out"
        return f"{' and '.join(parts)} {done} so that the conversation fits the context"


@dataclass(frozen=True, slots=True)
class Done:
    """An answer is complete (or cut, and `reason` says why). `text` is all of it.

    token_ids: the tokens drawn, but for the end token. logprobs: of each of
    them, when asked for. cuts: what was left out of the conversation, at the
    beginning and while the answer grew.
    """

    request_id: str
    reason: FinishReason
    text: str
    usage: Usage
    token_ids: tuple[int, ...] = ()
    notices: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    cuts: tuple[ContextCut, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """A request, or a piece of work, ended in an error; the engine goes on.

    kind: the class of `engine.errors`, or "Cancelled". text: of an answer, as
    far as it got. Both numbers come with a ContextOverflowError, retry_s (when
    to try again, in seconds) with a BusyError.
    """

    request_id: str | None
    message: str
    kind: str
    text: str = ""
    needed_tokens: int = 0
    context_tokens: int = 0
    retry_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine is doing: answers running and waiting, pages of the cache and how many can be taken."""

    running: int = 0
    waiting: int = 0
    pages: int = 0
    free_pages: int = 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a face needs to know of the model that is loaded.

    format: "int4, group 32". context: tokens a conversation can hold now;
    model_context: tokens the model was made for. defaults: the model's own
    generation settings where it has any, else ours. think: what thinking
    begins and ends with, if the model thinks aloud. step_disk_bytes: weights
    that every step reads from disk; disk_rate: bytes per second that it gave.
    """

    path: Path
    name: str
    family: str
    format: str
    context: int
    model_context: int
    chat_template: bool
    defaults: Sampling
    weight_bytes: int
    kv_bytes: int
    tier: str
    threads: int
    notices: tuple[str, ...] = ()
    think: tuple[str, str] | None = None
    step_disk_bytes: int = 0
    disk_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model is ready."""

    model: LoadedModel


Event = Started | Progress | Delta | ContextCut | Done | Failed
