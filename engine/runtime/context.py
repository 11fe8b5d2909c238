"""What is left out of a conversation that is longer than the context, by the policy the request names.

Nothing is ever left out silently: `Fitted.cut` says what, and becomes an event,
a notice and a part of `Done`. Messages go in whole turns (a question and all
that answers it); instructions, pinned messages and the latest question stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.errors import ContextOverflowError
from engine.runtime.events import ContextCut, Message, Overflow

__all__ = ["SUMMARY_TOKENS", "Fitted", "fit", "summary_message", "summary_question", "too_long"]

Measure = Callable[[tuple[Message, ...]], int]
"""Tokens of a conversation; may stop counting, and raise a ContextOverflowError, far beyond the context."""

SUMMARY_TOKENS = 256
_GAP = "\n[...]\n"


@dataclass(frozen=True, slots=True)
class Fitted:
    """The messages that stay, those that go, and the report of it."""

    messages: tuple[Message, ...]
    gone: tuple[Message, ...]
    cut: ContextCut


def fit(
    messages: Sequence[Message], policy: Overflow, measure: Measure, *, most: int, wanted: int, request_id: str
) -> Fitted:
    """Leave out as little as needed to come down to `wanted` tokens, or if that cannot be, to `most`.

    rolling and summarise leave out the oldest turns first; middle keeps the
    first turn, and cuts the longest message in its middle if turns do not do.

    Raises:
        ContextOverflowError: what must stay exceeds `most` tokens
    """
    told = tuple(messages)
    droppable = _droppable(told)
    if policy == "middle" and len(droppable) > 1:
        droppable = [*droppable[1:], droppable[0]]
    before = _count(measure, told)

    def without(turns: int) -> tuple[Message, ...]:
        gone = {index for turn in droppable[:turns] for index in turn}
        return tuple(message for index, message in enumerate(told) if index not in gone)

    low, high = (0 if policy == "middle" else 1), len(droppable)  # the fewest turns that are enough
    while low < high:
        middle = (low + high) // 2
        if _count(measure, without(middle)) <= wanted:
            high = middle
        else:
            low = middle + 1
    turns = min(low, len(droppable))
    kept = without(turns)
    cut_message: int | None = None
    after = _count(measure, kept)
    if after > most and policy == "middle":
        longest = max(range(len(kept)), key=lambda index: len(kept[index].content))
        kept, after = _cut_middle(kept, longest, measure, wanted)
        cut_message = told.index(told[_place(told, droppable[:turns], longest)])
    if after > most:
        raise too_long(before if turns == 0 else after, most + 1)
    dropped = tuple(sorted(index for turn in droppable[:turns] for index in turn))
    cut = ContextCut(request_id, policy, dropped, cut_message, before, after)
    return Fitted(kept, tuple(told[index] for index in dropped), cut)


def too_long(tokens: int, limit: int) -> ContextOverflowError:
    """The error for a conversation of so many tokens where `limit` tokens are the whole context."""
    return ContextOverflowError(
        f"the conversation has {tokens} tokens and the context holds {limit}, of which the answer needs at least one; "
        "shorten it or load the model with a longer context",
        needed_tokens=tokens + 1,
        context_tokens=limit,
    )


def summary_question(gone: Sequence[Message]) -> str:
    """What the model is asked to do with the turns that go."""
    told = "\n\n".join(f"{message.role}: {message.content}" for message in gone)
    return (
        "Summarise this part of a conversation in a few sentences. Keep names, numbers, decisions and open questions. "
        f"Write the summary only.\n\n{told}"
    )


def summary_message(text: str) -> Message:
    """The summary, as it stands in the conversation from now on."""
    return Message("system", f"Summary of the conversation so far: {text.strip()}")


def _droppable(messages: tuple[Message, ...]) -> list[list[int]]:
    """Turns that may go, oldest first, as indices; never the last question and what follows it."""
    turns: list[list[int]] = []
    for index, message in enumerate(messages):
        if message.role == "user" or not turns:
            turns.append([])
        turns[-1].append(index)
    free = [
        [index for index in turn if messages[index].role != "system" and not messages[index].pinned]
        for turn in turns[:-1]
    ]
    return [turn for turn in free if turn]


def _place(messages: tuple[Message, ...], gone: list[list[int]], kept_index: int) -> int:
    """Where the message that is number `kept_index` of those that stay stands among all."""
    left_out = {index for turn in gone for index in turn}
    return [index for index in range(len(messages)) if index not in left_out][kept_index]


def _cut_middle(
    messages: tuple[Message, ...], index: int, measure: Measure, wanted: int
) -> tuple[tuple[Message, ...], int]:
    """The messages with the middle of one cut out, down to `wanted` tokens if that is possible; their tokens."""
    text = messages[index].content

    def with_only(characters: int) -> tuple[Message, ...]:
        half = characters // 2
        shorter = f"{text[: characters - half]}{_GAP}{text[len(text) - half :]}"
        return (*messages[:index], replace(messages[index], content=shorter), *messages[index + 1 :])

    low, high = 0, len(text)  # the most characters that fit
    while low < high:
        middle = (low + high + 1) // 2
        if _count(measure, with_only(middle)) <= wanted:
            low = middle
        else:
            high = middle - 1
    return with_only(low), _count(measure, with_only(low))


def _count(measure: Measure, messages: tuple[Message, ...]) -> int:
    try:
        return measure(messages)
    except ContextOverflowError as error:
        return error.needed_tokens
