"""A model that is ready to answer: decoder, pages, tokenizer and chat template as one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from engine.core.cpu import machine, memory, prefer_speed
from engine.core.library import Kernels
from engine.core.pages import PagePool
from engine.core.team import Team
from engine.errors import ContextOverflowError, InputError
from engine.models import decoder as models
from engine.models.batch import Batch
from engine.models.memory import plan, working_bytes
from engine.models.store import NookFile
from engine.models.streaming import StreamedWeights, least_bytes
from engine.models.weights import NO_END_NOTICE, ModelSource
from engine.runtime.events import LoadedModel, Message, Prompt, Request
from engine.runtime.guide import Guide, Thinking
from engine.runtime.sampler import Sampler
from engine.runtime.speculation import DraftModel, Lookup, Speculator
from engine.settings import EngineSettings, Sampling, checked
from engine.text.channels import CHANNEL_TOKENS, ChannelStream, Stream
from engine.text.dialect import CALL_TOKENS, Dialect, spelled_out
from engine.text.stream import TextStream
from engine.text.template import ChatTemplate, repaired
from engine.text.tokenizer import Piece, Tokenizer

if TYPE_CHECKING:
    from engine.text.grammar import Grammars

__all__ = ["MEMORY_NOTICE", "Decoder", "EncodedPrompt", "Model", "Tuning", "assembled", "is_conversation"]

_BATCH_TOKENS = 256
"""Tokens of the largest step: enough to spread the cost of reading the weights, few enough to be brief."""

MEMORY_NOTICE = (
    "the model has recurrent layers: what was read before is found again where a page of 64 tokens ended, for the "
    "latest texts; conversations are not kept on disk, and next tokens are not guessed"
)
"""What is said of a model whose sequences are more than keys and values."""

# No text has so many characters per token; what is longer than this many times the context cannot fit.
_CHARACTERS_PER_TOKEN = 8

# A template that begins the thinking itself writes its mark among the last tokens of the prompt.
_TURN_START = 8


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a team is set up. pinned: each worker stays on a core of its own."""

    threads: int
    pinned: bool


class Decoder(Protocol):
    """What computes logits; `engine.models.decoder.Decoder`."""

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        """float32 (wanted, vocab_size), valid until the next call; meaningless if `cancelled`."""

    def timed(self, batch: Batch) -> list[models.OperationTime]:
        """As `forward`, an operation at a time."""

    @property
    def cancelled(self) -> bool:
        """Whether the last `forward` was stopped on the way."""

    def cancel(self) -> None:
        """Stop the present step, or the next; from any thread."""

    def clear_cancel(self) -> None:
        """Let steps run again."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPrompt:
    """ids: int32 (tokens,). notices: what was changed so that the template takes the conversation."""

    ids: npt.NDArray[np.int32]
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Model:
    """Everything a loop needs of a model.

    identity: equal for equal keys and values of equal tokens.
    vocab_size: columns of the logits. end_ids: tokens that end an answer.
    context: tokens a sequence may have. most_running: sequences of a step.
    batch_tokens: tokens of a step. release: gives threads and memory back.
    speculator: makes guesses of next tokens; None guesses nothing.
    guess_rows: guesses of one step, of all sequences together.
    memories: places of what recurrent layers keep of sequences; None for a model without such layers.
    """

    decoder: Decoder
    pages: PagePool
    tokenizer: Tokenizer
    template: ChatTemplate
    identity: bytes
    vocab_size: int
    end_ids: frozenset[int]
    context: int
    most_running: int
    batch_tokens: int
    info: LoadedModel
    release: Callable[[], None]
    dialect: Dialect = field(default_factory=Dialect)
    settings: EngineSettings = EngineSettings()
    speculator: Callable[[], Speculator] | None = None
    guess_rows: int = 0
    memories: PagePool | None = None

    @property
    def missing_ids(self) -> npt.NDArray[np.int64]:
        """Ids of the logits that stand for no token, ascending."""
        return _missing_ids(self.tokenizer, self.vocab_size, known=self.vocab_size)

    @cached_property
    def grammars(self) -> Grammars:
        """What makes grammars for constrained answers."""
        from engine.text.grammar import Grammars  # wants a library of 8 MB that few answers need

        return Grammars(self.tokenizer, self.vocab_size, self.end_ids, self.dialect)

    def guide(self, request: Request, prompt: EncodedPrompt) -> Guide | None:
        """What holds the answer to its constraint and its thinking to its length; None when nothing does.

        Raises:
            InputError: the constraint or a token id cannot be used; says why
        """
        for token, _ in request.logit_bias:
            if not 0 <= token < self.vocab_size:
                raise InputError(f"logit_bias names the id {token}, and the model knows 0 to {self.vocab_size - 1}")
        constraint = request.constraint
        if constraint is None and request.thinking_tokens is None:
            return None
        if constraint is not None and not self.end_ids:
            raise InputError("the model has no token that ends an answer, so it cannot be held to a constraint")
        marks = self._think_ids
        thinking = None
        if marks is not None:
            thinking = Thinking(*marks, inside=self.thinks(prompt), most=request.thinking_tokens)
        grammar = None if constraint is None else self.grammars.grammar(constraint.kind, constraint.text)
        return Guide(self.vocab_size, thinking, grammar) if thinking or grammar else None

    def thinks(self, prompt: EncodedPrompt) -> bool:
        """The prompt ends where the model is already thinking."""
        if self._think_ids is None:
            return False
        begin, end = self._think_ids
        last = [token for token in prompt.ids[-_TURN_START:].tolist() if token in (begin, end)]
        return last[-1:] == [begin]

    @property
    def _think_ids(self) -> tuple[int, int] | None:
        ids = [self.dialect.tokens.get(mark) for mark in self.dialect.think or ()]
        return (ids[0], ids[1]) if len(ids) == 2 and ids[0] is not None and ids[1] is not None else None

    def stream(self, request: Request) -> Stream:
        """What makes text of an answer's tokens. Marks of thinking are part of it, and of calls if there are tools."""
        dialect = self.dialect
        marks = (
            *(dialect.think or ()),
            *(CALL_TOKENS if request.template.get("tools") else ()),
            *(CHANNEL_TOKENS if dialect.channels else ()),
        )
        shown = [dialect.tokens[mark] for mark in marks if mark in dialect.tokens]
        stream = TextStream(self.tokenizer, request.sampling.stop, shown)
        return ChannelStream(stream) if dialect.channels else stream

    def encode(
        self,
        prompt: Prompt,
        started: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
        begin: str = "",
    ) -> EncodedPrompt:
        """The prompt as token ids, at least one.

        started: when the conversation began, for templates that write the date. Without it they are told the
        present hour, so that the next prompts of a conversation mostly begin like this one.
        variables: more for the chat template. Tools are put in words for one that knows nothing of them.
        begin: text of the answer that is there already.

        Raises:
            InputError: it is empty, or has ids that are no tokens
            TemplateError: the template refuses the conversation in every arrangement
            ContextOverflowError: it is so long that this is certain before it is encoded
        """
        notices: tuple[str, ...] = ()
        ids: Sequence[int]
        if isinstance(prompt, str):
            prompt += begin
            self._refuse_hopeless([Piece(prompt, is_content=False)])
            bos = self.tokenizer.bos_id
            begun = bos is not None and self.tokenizer.leading_control(prompt) == bos
            ids = self.tokenizer.encode(prompt, add_special_tokens=not begun) if prompt else []
        elif is_conversation(prompt):
            started = started or datetime.now().astimezone().replace(minute=0, second=0, microsecond=0)
            turns = [{**message.more, "role": message.role, "content": message.content} for message in prompt]
            given = dict(variables or {})
            if not self.dialect.knows_tools and (given.get("tools") or any(len(turn) > 2 for turn in turns)):
                turns = spelled_out(turns, given.pop("tools", ()))
            taken, notices = repaired(turns, self.template)
            pieces = self.template.render(taken, started=started, **given)
            pieces += [Piece(begin, is_content=True)] if begin else []
            self._refuse_hopeless(pieces)
            ids = self.tokenizer.encode_pieces(pieces, add_special_tokens=self.template.completion)
        else:
            ids = cast("tuple[int, ...]", prompt)
            ids = [*ids, *self.tokenizer.encode(begin, add_special_tokens=False)] if begin else ids
        if not ids:
            raise InputError("the prompt is empty")
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise InputError(f"the prompt has the id {token}, and the model knows 0 to {self.vocab_size - 1}")
        return EncodedPrompt(np.array(ids, np.int32), notices)

    def _refuse_hopeless(self, pieces: Sequence[Piece]) -> None:
        """Encoding ten megabytes takes seconds, in which nobody gets a token; a beginning of them tells enough."""
        most = _CHARACTERS_PER_TOKEN * self.context
        if sum(len(piece.text) for piece in pieces) <= most:
            return
        beginning, left = [], most
        for piece in pieces:
            beginning.append(Piece(piece.text[:left], piece.is_content))
            left -= len(beginning[-1].text)
        count = len(self.tokenizer.encode_pieces(beginning))
        if count > self.context:
            raise ContextOverflowError(
                f"the conversation has more than {count} tokens and the context holds {self.context}; "
                "shorten it or load the model with a longer context",
                needed_tokens=count,
                context_tokens=self.context,
            )


def is_conversation(prompt: Prompt) -> TypeGuard[tuple[Message, ...]]:
    """Whether a prompt is messages."""
    return bool(prompt) and isinstance(prompt[0], Message)


def assembled(
    source: ModelSource,
    settings: EngineSettings,
    kernels: Kernels,
    *,
    draft: ModelSource | None = None,
    tuning: Tuning | None = None,
    most_wanted: int = 0,
) -> Model:
    """Plan the memory, take it, start the threads, lower the model.

    draft: a smaller model that guesses, when `settings.speculation` asks for one.
    tuning: what is known to suit this machine; counts when the settings leave the threads open.
    most_wanted: rows of logits of the largest step; at least one per parallel answer and guess.

    Raises:
        InputError, ResourceError: the model's files or this computer do not allow it; says why
    """
    spec = source.spec
    file = source.weights if settings.load == "stream" and isinstance(source.weights, NookFile) else None
    here = machine()
    threads = here.threads(settings.threads, settings.free_cores)
    # Unless cores differ, the system's scheduler places threads at least as well.
    pinned = here.nodes > 1 or not all(core.fast for core in here.cores)
    if tuning is not None and settings.threads == 0:
        threads, pinned = tuning.threads, tuning.pinned
    tokenizer = Tokenizer.from_files(source.files)
    template = ChatTemplate.from_files(source.files)
    dialect = Dialect.found(template.sources, tokenizer)
    unread = _unread_bytes(source, settings) if file is None else least_bytes(file)
    companion_bytes = 0
    if draft is not None:
        _check_draft(draft, tokenizer, source.name)
        unread += _unread_bytes(draft, settings) + working_bytes(draft.spec, sequences=settings.max_batch_size)
        companion_bytes = models.page_layout(draft.spec, settings.kv).page_bytes
    planned = plan(
        spec,
        unread,
        settings,
        memory(),
        threads=threads,
        batch_tokens=_BATCH_TOKENS,
        companion_bytes=companion_bytes,
    )
    # What the template writes after an answer begins with a token that ends it, whether the files say so or not.
    turn_end = tokenizer.leading_control(template.after_answer)
    # In an answer of several messages it only ends one of them.
    turn_ends = frozenset() if turn_end is None or dialect.channels else frozenset({turn_end})
    ends = source.end_ids | tokenizer.end_ids | turn_ends
    end_ids = frozenset(token for token in ends if token < spec.vocab_size)
    kept = models.memory_layout(spec)
    memories = None if kept is None else PagePool(planned.memories, kept)
    # A guess that is wrong could not be taken back out of a memory.
    guesses = memories is None and settings.speculation != "off"
    guess_rows = settings.draft_tokens if guesses else 0
    stream = None if file is None else StreamedWeights(file, least_bytes(file) + planned.spare_bytes)
    if stream is not None:
        source = replace(source, weights=stream)
    prefer_speed()
    team = Team(kernels, threads, here.placement(threads) if pinned else ())

    def release() -> None:
        team.close()
        if stream is not None:
            stream.close()

    def decoder_of(model: ModelSource, context: int, wanted: int) -> tuple[models.Decoder, PagePool]:
        pool = PagePool(planned.pages, models.page_layout(model.spec, settings.kv))
        decoder = models.Decoder(
            model.spec,
            model.weights,
            pool,
            team,
            context=context,
            kv=settings.kv,
            max_tokens=_BATCH_TOKENS,
            max_sequences=settings.max_batch_size,
            max_wanted=wanted,
            memories=memories if model is source else None,
        )
        return decoder, pool

    try:
        decoder, pool = decoder_of(source, planned.context, max(most_wanted, settings.max_batch_size + guess_rows))
        speculator: Callable[[], Speculator] | None = None
        if guesses and settings.speculation == "ngram":
            speculator = Lookup
        if guesses and draft is not None:
            context = min(planned.context, draft.spec.context)
            small, small_pool = decoder_of(draft, context, settings.max_batch_size)
            missing = _missing_ids(tokenizer, draft.spec.vocab_size, known=spec.vocab_size)
            share = draft.weights.total_bytes / source.weights.total_bytes

            def speculator() -> Speculator:
                return DraftModel(
                    small,
                    small_pool,
                    Sampler(draft.spec.vocab_size, missing=missing, unpenalised=end_ids),
                    _identity(draft, settings, context),
                    context=context,
                    batch_tokens=_BATCH_TOKENS,
                    share=share,
                )

        disk_rate = stream.rate() if stream is not None and stream.step_bytes else 0.0
    except BaseException:
        release()
        raise
    # Whether an answer has an end is decided here; an older file may say otherwise.
    said = dict.fromkeys((*source.notices, *template.notices))
    notices = tuple(notice for notice in said if notice != NO_END_NOTICE)
    if kernels.notice:
        notices += (kernels.notice,)
    if settings.threads > threads:
        notices += (f"{settings.threads} threads were asked for, but this computer has room for {threads}",)
    if memories is not None:
        notices += (MEMORY_NOTICE,)
    if not end_ids:
        notices += (NO_END_NOTICE,)
    if stream is not None and stream.step_bytes:
        notices += (_forecast(stream, disk_rate),)
    return Model(
        decoder=decoder,
        pages=pool,
        tokenizer=tokenizer,
        template=template,
        identity=_identity(source, settings, planned.context),
        vocab_size=spec.vocab_size,
        end_ids=end_ids,
        context=planned.context,
        most_running=settings.max_batch_size,
        batch_tokens=_BATCH_TOKENS,
        info=LoadedModel(
            path=source.path,
            name=source.name,
            family=spec.family,
            format=source.label,
            context=planned.context,
            model_context=spec.context,
            chat_template=not template.completion,
            defaults=checked(Sampling, dict(source.defaults)),
            weight_bytes=source.weights.total_bytes if stream is None else stream.held_bytes,
            kv_bytes=planned.kv_bytes + planned.memory_bytes,
            tier=kernels.tier,
            threads=threads,
            notices=notices,
            think=dialect.think,
            step_disk_bytes=0 if stream is None else stream.step_bytes,
            disk_rate=disk_rate,
        ),
        release=release,
        dialect=dialect,
        settings=settings,
        speculator=speculator,
        guess_rows=guess_rows,
        memories=memories,
    )


def _unread_bytes(source: ModelSource, settings: EngineSettings) -> int:
    return source.weights.total_bytes if source.kind == "nook" and settings.load != "resident" else 0


def _forecast(stream: StreamedWeights, rate: float) -> str:
    """What to expect of a model that waits for the disk."""
    return (
        f"{stream.step_bytes / 1e9:.2f} of {stream.total_bytes / 1e9:.2f} GB of weights do not fit into memory and are "
        f"read from disk for every token; it gives {rate / 1e9:.2f} GB a second, so expect at most "
        f"{rate / stream.step_bytes:.2g} tokens a second"
    )


def _identity(source: ModelSource, settings: EngineSettings, context: int) -> bytes:
    """Equal for equal keys and values of equal tokens."""
    return sha256(f"{source.identity} {settings.kv} {context}".encode()).digest()


def _missing_ids(tokenizer: Tokenizer, vocab_size: int, known: int) -> npt.NDArray[np.int64]:
    """Ids below `vocab_size` that stand for no token, or are not below `known`; ascending."""
    known = min(tokenizer.vocab_size, vocab_size, known)
    missing = [token for token in tokenizer.missing_ids if token < known]
    return np.concatenate([np.array(missing, np.int64), np.arange(known, vocab_size)])


def _check_draft(draft: ModelSource, tokenizer: Tokenizer, name: str) -> None:
    """Refuse a draft model whose ids mean other tokens.

    Raises:
        InputError: names the first id that differs
    """
    if draft.spec.is_recurrent:
        raise InputError(f"{draft.name} cannot guess for {name}: what its recurrent layers keep cannot be taken back")
    other = Tokenizer.from_files(draft.files)
    for token in range(min(tokenizer.vocab_size, draft.spec.vocab_size)):
        if tokenizer.token(token) != other.token(token):
            raise InputError(
                f"{draft.name} cannot guess for {name}: token {token} is {other.token(token)!r} there and "
                f"{tokenizer.token(token)!r} here; take a draft model of the same family"
            )
