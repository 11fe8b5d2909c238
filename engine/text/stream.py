"""The text of an answer while it grows: no half character, and nothing of a stop string, is ever given out."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from engine.text.tokenizer import Tokenizer

__all__ = ["TextStream"]


class TextStream:
    """Token ids in, text that is safe to show out.

        ids    The|quick|br|own|fo|x|es          stop = ["own fox"]
        push   The|quick|br|   |  |             stopped

    All that `push` and `finish` return, put together, is `Tokenizer.decode` of
    the ids, cut where the first stop string begins: the one that begins
    earliest in the whole text. An end that may still become a stop string is
    held back, and nothing else. The work per token does not grow with the text.

    stopped: a stop string was found; more ids change nothing.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), shown: Collection[int] = ()) -> None:
        """Begin an answer. Empty stop strings are ignored. shown: special tokens that are part of the text."""
        self.stopped = False
        self._detokenizer = tokenizer.detokenizer(shown=shown)
        self._matchers = [_Matcher(text) for text in dict.fromkeys(stop) if text]
        self._held: deque[str] = deque()  # characters not given out
        self._seen = 0  # characters of the text so far, held ones included
        self._cut: int | None = None  # where the earliest stop string found so far begins

    def push(self, token_id: int) -> str:
        """Take a token; the text that it makes safe, often none."""
        if self.stopped:
            return ""
        text = self._detokenizer.feed((token_id,))
        return self._after(text) if self._matchers else text

    def finish(self) -> str:
        """End the answer; the text that was held back. Half a character is left out."""
        if self.stopped:
            return ""
        self.stopped = self._cut is not None
        return self._release(self._seen if self._cut is None else self._cut)

    def _after(self, text: str) -> str:
        for character in text:
            self._held.append(character)
            self._seen += 1
            for matcher in self._matchers:
                if matcher.take(character):
                    start = self._seen - len(matcher.text)
                    self._cut = start if self._cut is None else min(start, self._cut)
            # A longer stop string that began earlier may be under way: then its outcome is awaited.
            if self._cut is not None and self._cut <= self._open():
                self.stopped = True
                return self._release(self._cut)
        return self._release(self._open() if self._cut is None else min(self._cut, self._open()))

    def _open(self) -> int:
        """Where the earliest unfinished stop string begins; the end of the text when none does."""
        return self._seen - max(matcher.matched for matcher in self._matchers)

    def _release(self, end: int) -> str:
        begin = self._seen - len(self._held)
        text = "".join([self._held.popleft() for _ in range(end - begin)])
        if self.stopped:
            self._held.clear()
        return text


class _Matcher:
    """How much of one stop string the text ends with (Knuth, Morris and Pratt's automaton).

    matched: the length of the longest end of the text so far that the stop string begins with.
    """

    __slots__ = ("_shorter", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._shorter = [0] * len(text)  # for a matched length n > 0, the next shorter one is at n - 1
        length = 0
        for position in range(1, len(text)):
            while length and text[position] != text[length]:
                length = self._shorter[length - 1]
            length += text[position] == text[length]
            self._shorter[position] = length

    def take(self, character: str) -> bool:
        """Go on by one character; whether it completes the stop string."""
        if self.matched == len(self.text):
            self.matched = 0  # another match of the same string would begin later, and only the first counts
        while self.matched and self.text[self.matched] != character:
            self.matched = self._shorter[self.matched - 1]
        self.matched += self.text[self.matched] == character
        return self.matched == len(self.text)
