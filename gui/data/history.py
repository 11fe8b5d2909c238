"""What the model is given of a conversation, and what is thought rather than said in an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gui.data.store import Message

__all__ = ["Thought", "alternating", "prompt_text", "thought_of"]

_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Thought:
    """The parts of an answer. open: it is still thinking."""

    text: str
    answer: str
    open: bool = False


def thought_of(content: str) -> Thought | None:
    """The thinking that an answer begins with; None when it has none.

    Some templates write the opening mark themselves, so that the answer holds the closing one alone.
    """
    begin = content.lstrip()
    if begin.startswith(_OPEN):
        inner = begin[len(_OPEN) :]
        thought, mark, answer = inner.partition(_CLOSE)
        return Thought(thought.strip("\n"), answer.lstrip("\n"), open=not mark)
    if begin and _OPEN.startswith(begin):  # the mark is just being written
        return Thought("", "", open=True)
    thought, mark, answer = content.partition(_CLOSE)
    if mark and _OPEN not in thought:
        return Thought(thought.strip("\n"), answer.lstrip("\n"))
    return None


def prompt_text(message: Message) -> str:
    """A message with the files that were attached to it, in the words the model reads."""
    if not message.attached:
        return message.content
    files = [f"[File: {file.name}]\n{file.text.rstrip()}\n[End of {file.name}]" for file in message.attached]
    return "\n\n".join((*files, message.content)).rstrip()


def alternating(messages: Sequence[Message], system: str = "") -> tuple[Message, ...]:
    """The messages as a template takes them: without answers that came to nothing, questions then joined."""
    kept: list[Message] = []
    if system.strip():
        kept.append(Message("", "", None, "system", system))
    for message in messages:
        if message.role == "assistant" and not message.content:
            continue
        content = prompt_text(message)
        if kept and kept[-1].role == message.role == "user":
            kept[-1] = replace(kept[-1], content=f"{kept[-1].content}\n\n{content}")
        else:
            kept.append(replace(message, content=content, attached=()))
    return tuple(kept)
