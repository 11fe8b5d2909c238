"""What recurrent layers keep of sequences, and of the beginnings of texts that may be asked for again.

A step reads one place and writes another, so nothing is ever copied: what a
sequence was at the end of a full page simply stays where it is, under the name
of that page, until its place is wanted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.core.pages import PagePool
from engine.runtime.prefix import PublishedPage

__all__ = ["Alternation", "Memories"]


class Memories:
    """The places of one pool: two for each sequence that runs; idle ones hold what texts were at a page's end."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._after: dict[PublishedPage, int] = {}
        self._of: dict[int, PublishedPage] = {}
        pool.drop_idle()  # an index of an earlier loop is told that its places are gone
        pool.on_evict = self._forget

    def __contains__(self, page: object) -> bool:
        return page in self._after

    def after(self, page: PublishedPage) -> int:
        """Where the memory of a text that ends with this page is; held once more."""
        place = self._after[page]
        self.pool.share(place)
        return place

    def keep(self, page: PublishedPage, place: int) -> None:
        """The held place tells what a text is that ends with this page."""
        if page not in self._after:
            self._after[page], self._of[place] = place, page
            self.pool.keep(place)

    def _forget(self, place: int) -> None:
        del self._after[self._of.pop(place)]


class Alternation:
    """Two places for one text that is read by itself, step after step; nothing for a model that needs none."""

    def __init__(self, pool: PagePool | None) -> None:
        self._pool = pool
        self._places = [] if pool is None else [pool.take(), pool.take()]
        self._begun = False

    def step(self) -> npt.NDArray[np.int32] | None:
        """`Batch.memories` of the next step."""
        if not self._places:
            return None
        before, after = self._places
        return np.array([[before if self._begun else -1, after]], np.int32)

    def stepped(self) -> None:
        """The step was computed."""
        self._places.reverse()
        self._begun = True

    def begin(self) -> None:
        """Forget the text."""
        self._begun = False

    def release(self) -> None:
        """Give the places back."""
        for place in self._places:
            assert self._pool is not None
            self._pool.release(place)
