"""What sequences hold of a page pool: whole prefixes that others computed, fresh pages, pages given to others.

Knows nothing of who runs when; a sequence's pages are only ever changed here.
"""

from __future__ import annotations

from weakref import WeakSet

from engine.core.pages import PagePool
from engine.runtime.prefix import PrefixIndex, PublishedPage
from engine.runtime.sequence import Sequence
from engine.runtime.snapshots import Snapshots

__all__ = ["Cache"]


class Cache:
    """The pages of one pool and the index of what they hold. snapshots: pages on disk, if any are kept."""

    def __init__(self, pages: PagePool, prefix: PrefixIndex, snapshots: Snapshots | None = None) -> None:
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
        return self.prefix.find(sequence.last_published, sequence.ids[sequence.computed : -1])

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

    def give_up(self, sequence: Sequence) -> None:
        """Release all pages; the full ones stay findable until somebody takes them."""
        # The last page goes first and so is idle for longest: a prefix outlives what hangs on it.
        for page in reversed(sequence.pages):
            self.pages.release(page)
        sequence.pages.clear()
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
            if not sequence.pauses:
                sequence.cached += len(found) * self.page_tokens
