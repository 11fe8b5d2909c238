"""One conversation's tokens and pages while an answer is being made; knows no text."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.runtime.prefix import PublishedPage

__all__ = ["Sequence", "State"]


class State(Enum):
    """WAITING -> RUNNING -> FINISHED, with PAUSED (pages given up, tokens kept) in between."""

    WAITING = auto()
    RUNNING = auto()
    PAUSED = auto()
    FINISHED = auto()


class Sequence:
    """Tokens so far and how many of them the cache holds.

    ids[0 : prompt]            the prompt
    ids[prompt : length]       the answer
    ids[0 : computed]          have keys and values in `pages`
    ids[0 : published * 64]    of which these are in pages that others may find

    capacity: tokens that it can grow to. client: who asked.
    memory: place of what recurrent layers keep of the computed tokens; next_memory: where the next step leaves it.
    """

    __slots__ = (
        "_ids",
        "cached",
        "client",
        "computed",
        "last_published",
        "length",
        "memory",
        "next_memory",
        "number",
        "overtaken",
        "pages",
        "pauses",
        "prompt",
        "published",
        "restored",
        "state",
    )

    def __init__(self, prompt: Iterable[int] | npt.NDArray[np.integer[Any]], capacity: int, client: str = "") -> None:
        start = np.asarray(prompt if isinstance(prompt, np.ndarray) else list(prompt), np.int32)
        self._ids = np.empty(capacity, np.int32)  # memory that is never reached is never taken
        self._ids[: start.size] = start
        self.client = client
        self.prompt = self.length = start.size
        self.computed = 0
        self.published = 0
        self.cached = 0  # prompt tokens that were found instead of computed; work repeated after a pause aside
        self.pages: list[int] = []
        self.memory: int | None = None
        self.next_memory: int | None = None
        self.last_published: PublishedPage | None = None
        self.state = State.WAITING
        self.number = -1  # order of arrival
        self.pauses = 0
        self.restored = False  # the disk was asked for its pages
        self.overtaken = 0  # how many younger ones ran before it

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """int32 (length,), a view: valid until the next `append`."""
        return self._ids[: self.length]

    @property
    def capacity(self) -> int:
        """Tokens that it can grow to."""
        return self._ids.size

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are still to be computed; at least 1 before each draw."""
        return self.length - self.computed

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return self.length - self.prompt

    def append(self, token: int) -> None:
        """Take a drawn token."""
        self._ids[self.length] = token
        self.length += 1

    def rewind(self, length: int) -> None:
        """Forget the tokens from `length` on; what is published stays, so `length` must not cut into it."""
        self.length = length
        self.computed = min(self.computed, length)
