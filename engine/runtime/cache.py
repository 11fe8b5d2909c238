"""What sequences hold of a page pool: whole prefixes that others computed, fresh pages, pages given to others.

Knows nothing of who runs when; a sequence's pages are only ever changed here.
"""

from __future__ import annotations

from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from engine.core.pages import PagePool
from engine.runtime.memories import Memories
from engine.runtime.prefix import PrefixIndex, PublishedPage
from engine.runtime.sequence import Sequence
from engine.runtime.snapshots import Snapshots

__all__ = ["Cache"]


class Cache:
    """The pages of one pool and the index of what they hold.

    snapshots: pages on disk, if any are kept. memories: of a model with recurrent layers, whose pages are of use
    only together with a memory of what came before.
    """

    def __init__(
        self,
        pages: PagePool,
        prefix: PrefixIndex,
        snapshots: Snapshots | None = None,
        memories: PagePool | None = None,
    ) -> None:
        assert snapshots is None or memories is None, "memories are not kept on disk"
        self._memories = None if memories is None else Memories(memories)
        self.pages = pages
        self.prefix = prefix
        self._snapshots = snapshots
        self._saved: WeakSet[PublishedPage] = WeakSet()  # written once; what the limit deletes is not written again
        self.page_tokens = pages.layout.tokens

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_tokens)

    def found(self, sequence: Sequence) -> list[PublishedPage]:
        """Published pages that continue what the sequence has; never its last token, whose logits are wanted."""
        if sequence.computed != sequence.published * self.page_tokens:
            return []
        found = self.prefix.find(sequence.last_published, sequence.ids[sequence.computed : -1])
        while self._memories is not None and found and found[-1] not in self._memories:
            found.pop()
        return found

    def slice_end(self, start: int, end: int) -> int:
        """Where a slice of a prompt ends that may go up to `end`: where a memory can be found again, if any."""
        boundary = end // self.page_tokens * self.page_tokens
        return boundary if self._memories is not None and boundary > start else end

    def memories(self, sequences: list[Sequence]) -> npt.NDArray[np.int32] | None:
        """`Batch.memories` of a step of these."""
        if self._memories is None:
            return None
        places = [(-1 if one.memory is None else one.memory, one.next_memory) for one in sequences]
        return np.array(places, np.int32)

    def restore(self, sequence: Sequence) -> None:
        """Bring the pages that continue what the pool has of a sequence back from disk, as far as there is room."""
        if self._snapshots is None:
            return
        found = self.found(sequence)
        for published in found:  # so that no page is taken from under them
            self.pages.share(published.page)
        held = [published.page for published in found]
        before = found[-1] if found else sequence.last_published
        first = sequence.computed + len(found) * self.page_tokens
        while first + self.page_tokens < sequence.length and self.pages.available:
            ids = sequence.ids[first : first + self.page_tokens]
            name, content = self.prefix.name_of(before, ids)
            if name not in self._snapshots:
                break
            page = self.pages.take()
            held.append(page)
            if not self._snapshots.load(name, content, self.pages.memory[page]):
                break
            restored = self.prefix.publish(before, ids, page)
            if restored is None or restored.page != page:
                break
            before = restored
            first += self.page_tokens
        for page in reversed(held):
            self.pages.release(page)

    def save_one(self) -> bool:
        """Write one page that nobody holds and that is not on disk; False when there is none."""
        if self._snapshots is None:
            return False
        for published in self.prefix.idle_pages():
            if published not in self._saved and published.name not in self._snapshots:
                self._saved.add(published)
                self._snapshots.save(published, self.pages.memory[published.page])
                return True
        return False

    def begin(self, sequence: Sequence, found: list[PublishedPage], fresh: int) -> None:
        """Hold the `found` pages and as many fresh ones."""
        for published in found:
            self.pages.share(published.page)
            sequence.pages.append(published.page)
        if self._memories is not None:
            sequence.next_memory = self._memories.pool.take()
        self._link(sequence, found)
        sequence.pages.extend(self.pages.take() for _ in range(fresh))

    def adopt(self, sequence: Sequence) -> None:
        """Go on with pages that others computed meanwhile instead of one's own, still empty ones."""
        found = self.found(sequence)
        for index, published in enumerate(found, start=sequence.published):
            self._replace(sequence, index, published.page)
        self._link(sequence, found)

    def next_page(self, sequence: Sequence) -> tuple[int, bytes] | None:
        """What the sequence's first unpublished page will hold, equal for equal pages; None if it cannot be adopted."""
        first = sequence.published * self.page_tokens
        if first + self.page_tokens >= sequence.length:
            return None
        return id(sequence.last_published), sequence.ids[first : first + self.page_tokens].tobytes()

    def reach(self, sequence: Sequence, tokens: int) -> bool:
        """Take pages until the sequence has room for so many tokens; False when there are none left."""
        while len(sequence.pages) < self.pages_for(tokens):
            if not self.pages.available:
                return False
            sequence.pages.append(self.pages.take())
        return True

    def remember(self, sequence: Sequence) -> None:
        """A step left a memory of the sequence: it is the one that counts now."""
        if self._memories is None:
            return
        pool = self._memories.pool
        if sequence.memory is not None:
            pool.release(sequence.memory)
        sequence.memory, sequence.next_memory = sequence.next_memory, pool.take()

    def publish(self, sequence: Sequence) -> None:
        """Let others find the pages that are full of computed tokens."""
        while (sequence.published + 1) * self.page_tokens <= sequence.computed:
            index = sequence.published
            ids = sequence.ids[index * self.page_tokens : (index + 1) * self.page_tokens]
            published = self.prefix.publish(sequence.last_published, ids, sequence.pages[index])
            if published is None:
                return
            if published.page != sequence.pages[index]:
                self._replace(sequence, index, published.page)  # the same bits, held once
            sequence.last_published = published
            sequence.published += 1
        last, whole = sequence.last_published, sequence.computed == sequence.published * self.page_tokens
        if self._memories is not None and last is not None and whole and sequence.memory is not None:
            self._memories.keep(last, sequence.memory)

    def give_up(self, sequence: Sequence) -> None:
        """Release all pages; the full ones stay findable until somebody takes them."""
        # The last page goes first and so is idle for longest: a prefix outlives what hangs on it.
        for page in reversed(sequence.pages):
            self.pages.release(page)
        sequence.pages.clear()
        for place in (sequence.memory, sequence.next_memory):
            if place is not None and self._memories is not None:
                self._memories.pool.release(place)
        sequence.memory = sequence.next_memory = None
        sequence.computed = sequence.published = 0
        sequence.last_published = None

    def _replace(self, sequence: Sequence, index: int, page: int) -> None:
        self.pages.share(page)
        self.pages.release(sequence.pages[index])
        sequence.pages[index] = page

    def _link(self, sequence: Sequence, found: list[PublishedPage]) -> None:
        if found:
            sequence.last_published = found[-1]
            sequence.published += len(found)
            sequence.computed = sequence.published * self.page_tokens
            if self._memories is not None:
                if sequence.memory is not None:
                    self._memories.pool.release(sequence.memory)
                sequence.memory = self._memories.after(found[-1])
            if not sequence.pauses:
                sequence.cached += len(found) * self.page_tokens
