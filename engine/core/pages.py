"""The pool of key/value pages: who holds which, and the memory they lie in.

Knows numbers only: a page is an index. What tokens a page stands for is the
prefix index's business (`engine/runtime/prefix.py`), how keys and values lie
inside a page the kernels'.

    free ----take----> held (1) --share--> held (n) --release--> held (n - 1)
      ^                   |  ^
      |                   |  +------------share---------+
      +----release--------+--release, if kept--> idle --+--take, longest idle--> held (1), forgotten
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from engine.core.memory import LINE, Buffer

__all__ = ["PageLayout", "PagePool"]


@dataclass(frozen=True, slots=True)
class PageLayout:
    """How one page is cut up: layer after layer, each from the beginning of a cache line.

    tokens: positions a page holds. layer_bytes: keys and values of all heads
    of a layer for that many positions.
    """

    tokens: int
    layer_bytes: tuple[int, ...]

    @property
    def layer_offsets(self) -> tuple[int, ...]:
        """Where each layer begins inside a page, in bytes."""
        return tuple(accumulate((_lines(size) for size in self.layer_bytes[:-1]), initial=0))

    @property
    def page_bytes(self) -> int:
        """From one page to the next."""
        return sum(_lines(size) for size in self.layer_bytes)


class PagePool:
    """`count` pages, each free, held by one or more sequences, or idle.

    An idle page is held by nobody but keeps its contents until it is taken
    again; the page idle for longest goes first.

    memory     uint8 (count, page_bytes), zero at birth, aligned to cache lines;
               the operating system provides it as it is touched
    on_evict   called with each idle page whose contents are given up
    """

    def __init__(self, count: int, layout: PageLayout) -> None:
        """Reserve the memory.

        Raises:
            ResourceError: the system has no room for it
        """
        self.count = count
        self.layout = layout
        self.on_evict: Callable[[int], None] | None = None
        room = Buffer(count * layout.page_bytes, "the key/value cache")
        self.memory: npt.NDArray[np.uint8] = room.view.reshape(count, layout.page_bytes)
        self._holders = [0] * count
        self._kept = [False] * count
        self._free = list(range(count - 1, -1, -1))  # the last one is taken first: low pages stay warm
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest idle first

    @property
    def available(self) -> int:
        """How many times `take` can be called now."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Pages that nobody holds and that still have contents."""
        return len(self._idle)

    def holders(self, page: int) -> int:
        """How often the page is held."""
        return self._holders[page]

    def take(self) -> int:
        """A page of one's own; its old contents mean nothing. Needs `available > 0`."""
        if self._free:
            page = self._free.pop()
        else:
            # The longest-idle page goes first: its prefix is the least likely to be asked for again.
            page, _ = self._idle.popitem(last=False)
            self._kept[page] = False
            if self.on_evict is not None:
                self.on_evict(page)
        self._holders[page] = 1
        return page

    def keep(self, page: int) -> None:
        """The held page's contents are worth keeping when nobody holds it any more."""
        assert self._holders[page] > 0, f"page {page} is not held"
        self._kept[page] = True

    def share(self, page: int) -> None:
        """Hold a page that is held already, or idle."""
        if self._holders[page] == 0:
            del self._idle[page]
        self._holders[page] += 1

    def release(self, page: int) -> None:
        """Give up one hold; the last one makes the page idle if it is kept, else free."""
        assert self._holders[page] > 0, f"page {page} is not held"
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if self._kept[page]:
            self._idle[page] = None
        else:
            self._free.append(page)

    def drop_idle(self) -> None:
        """Forget the contents of every idle page."""
        while self._idle:
            page, _ = self._idle.popitem(last=False)
            self._kept[page] = False
            if self.on_evict is not None:
                self.on_evict(page)
            self._free.append(page)


def _lines(size: int) -> int:
    """`size` bytes in whole cache lines."""
    return -(-size // LINE) * LINE
