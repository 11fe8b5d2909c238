"""What the next token of one answer may be: the end of thinking that took too long, then a grammar.

The sampler asks for a mask before each draw and is told nothing else; the
loop says what was drawn. Nothing here looks at logits.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Grammar", "Guide", "Thinking"]


class Grammar(Protocol):
    """`engine.text.grammar.Grammar`."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Bool (vocab_size,), at least one."""

    def take(self, token: int) -> None:
        """Go on by a token that was allowed."""

    @property
    def complete(self) -> bool:
        """Nothing more can come."""


class Thinking:
    """Where an answer is in its thinking.

    begin, end: the tokens of its marks. inside: the prompt ends in it.
    most: tokens after which it is ended; None lets it run.
    """

    def __init__(self, begin: int, end: int, *, inside: bool, most: int | None) -> None:
        self.begin, self.end = begin, end
        self.state: str = "inside" if inside else "before"
        self._left = most

    @property
    def used_up(self) -> bool:
        """It must end now."""
        return self.state == "inside" and self._left is not None and self._left <= 0

    def take(self, token: int) -> bool:
        """Go on by a token; whether it is part of the thinking, marks included."""
        match self.state:
            case "before" if token == self.begin:
                self.state = "inside"
            case "inside" if token == self.end:
                self.state = "after"
            case "inside":
                if self._left is not None:
                    self._left -= 1
            case _:
                self.state = "after"
                return False
        return True


class Guide:
    """Both together: a grammar holds for what comes after the thinking."""

    def __init__(self, vocab_size: int, thinking: Thinking | None, grammar: Grammar | None) -> None:
        self._vocab_size = vocab_size
        self._thinking = thinking
        self._grammar = grammar

    def allowed(self) -> npt.NDArray[np.bool_] | None:
        """Bool (vocab_size,): what may be drawn next; None when anything may.

        Raises:
            InputError: the grammar became too complex to follow
        """
        thinking = self._thinking
        if thinking is not None and thinking.state == "inside":
            if not thinking.used_up:
                return None
            only: npt.NDArray[np.bool_] = np.zeros(self._vocab_size, np.bool_)
            only[thinking.end] = True
            return only
        if self._grammar is None:
            return None
        allowed = self._grammar.allowed()
        if thinking is not None and thinking.state == "before":
            allowed[thinking.begin] = True
        return allowed

    def take(self, token: int) -> None:
        """Go on by the token that was drawn."""
        if self._thinking is not None and self._thinking.take(token):
            return
        if self._grammar is not None:
            self._grammar.take(token)

    @property
    def complete(self) -> bool:
        """The grammar has come to its end; the answer is over."""
        return self._grammar is not None and self._grammar.complete
