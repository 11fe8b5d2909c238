"""Answers in channels, as gpt-oss writes them, told in the marks that the rest of the program knows.

    <|channel|>analysis<|message|>THOUGHT<|end|>                            <think>THOUGHT</think>
    <|start|>assistant<|channel|>final<|message|>TEXT<|return|>             TEXT
    <|channel|>commentary to=functions.F <|constrain|>json<|message|>{...}<|call|>
                                               <tool_call>{"name": "F", "arguments": {...}}</tool_call>

An answer that begins without a channel is text.
"""

from __future__ import annotations

import re
from typing import Protocol

from engine.text.reader import overlap

__all__ = ["CHANNEL_TOKENS", "ChannelStream", "Stream"]

_BEGIN = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
CHANNEL_TOKENS = (_BEGIN, "<|constrain|>", *_ENDS)
"""Marks of channels; a vocabulary that has them all is of a model that may write so."""

_STARTS = ("<|", "to=", "assistant")  # of headers
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]{1,64})")
_THOUGHT = re.compile(r"<\|channel\|>\s*analysis")
_LONGEST_HEADER = 300


class Stream(Protocol):
    """`engine.text.stream.TextStream`."""

    @property
    def stopped(self) -> bool:
        """A stop string was found; more ids change nothing."""

    def push(self, token_id: int) -> str:
        """Take a token; the text that it makes safe."""

    def finish(self) -> str:
        """The text that was held back."""


class ChannelStream:
    """Around a stream of text in which the marks of channels are shown."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._text = ""  # not told yet
        self._header = True  # before a message; else within one
        self._closing = ""  # what the present message is closed with

    @property
    def stopped(self) -> bool:
        """A stop string was found; more ids change nothing."""
        return self._stream.stopped

    def push(self, token_id: int) -> str:
        """Take a token; the text that it makes safe, often none."""
        return self._told(self._stream.push(token_id), last=False)

    def finish(self) -> str:
        """End the answer; the text that was held back."""
        told = self._told(self._stream.finish(), last=True)
        # The token that ends a call ends the answer, too, and is not seen here.
        return told + (self._closing if self._closing.endswith("</tool_call>") and not self._header else "")

    def _told(self, text: str, *, last: bool) -> str:
        self._text += text
        told = []
        while self._text:
            piece = self._of_header(last=last) if self._header else self._of_message(last=last)
            if piece is None:
                break
            told.append(piece)
        return "".join(told)

    def _of_header(self, *, last: bool) -> str | None:
        """What a header that is whole becomes; None while it is not."""
        header, found, rest = self._text.partition(_BEGIN)
        if found:
            self._text, self._header = rest, False
            return self._begun(header)
        opening = self._text.lstrip()
        begun = any(opening.startswith(start) or start.startswith(opening) for start in _STARTS)
        if begun and not last and len(opening) < _LONGEST_HEADER:
            return None
        if last and opening.startswith("<|"):  # cut within a header
            self._text = ""
        self._header, self._closing = False, ""
        return ""

    def _begun(self, header: str) -> str:
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            self._closing = "}</tool_call>"
            return f'<tool_call>{{"name": "{recipient[1]}", "arguments": '
        thinks = _THOUGHT.search(header) is not None
        self._closing = "</think>" if thinks else ""
        return "<think>" if thinks else ""

    def _of_message(self, *, last: bool) -> str | None:
        """The message as far as it is certain, closed where it ends; None when there is nothing to tell."""
        places = [(place, end) for end in _ENDS if (place := self._text.find(end)) >= 0]
        if places:
            place, end = min(places)
            told = self._text[:place] + self._closing
            # A mark that begins the next header is part of it.
            self._text = self._text[place if end in ("<|start|>", "<|channel|>") else place + len(end) :]
            self._header, self._closing = True, ""
            return told
        held = 0 if last else max(overlap(self._text, end) for end in _ENDS)
        certain = self._text[: len(self._text) - held]
        self._text = self._text[len(certain) :]
        return certain or None
