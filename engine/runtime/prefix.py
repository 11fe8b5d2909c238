r"""Which pages hold which tokens: finds the longest computed prefix of a new prompt.

A full page is named by a hash of its token ids and of the name of the page
before it; the first one hangs on the identity of the model and of the cache's
number format. So a name stands for everything that the page's keys and values
depend on. A hash alone is never believed: on a hit the ids and the page before
are compared, and what was evicted is forgotten at once.

    identity -> [page 0: ids 0..63] -> [page 1: ids 64..127] -> ...
                                   \-> [another page 1]
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.core.pages import PagePool

__all__ = ["PrefixIndex", "PublishedPage", "page_name"]

Ids = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PublishedPage:
    """A full page that others may read; compared by identity, as a chain is only as good as each link."""

    page: int
    name: bytes
    ids: bytes
    before: PublishedPage | None


def page_name(before: bytes, ids: bytes) -> bytes:
    """BLAKE2b-256 of the page before and the page's own ids (little-endian int32)."""
    return hashlib.blake2b(ids, digest_size=32, key=before).digest()


class PrefixIndex:
    """The published pages of one pool.

    identity: whatever else the contents depend on (model file, adapter, number
    format of the cache).
    """

    def __init__(self, pages: PagePool, identity: bytes) -> None:
        self._tokens = pages.layout.tokens
        self._root = hashlib.blake2b(identity, digest_size=32).digest()
        self._by_name: dict[bytes, PublishedPage] = {}
        self._by_page: dict[int, PublishedPage] = {}
        self._pages = pages
        pages.drop_idle()  # an index of an earlier loop is told that its pages are gone
        pages.on_evict = self._forget

    def find(self, before: PublishedPage | None, ids: Ids) -> list[PublishedPage]:
        """The published pages that continue `before` with `ids`, in order; holds none of them.

        The caller shares what it uses before anything is taken from the pool.
        """
        found: list[PublishedPage] = []
        for start in range(0, ids.size - self._tokens + 1, self._tokens):
            content = _content(ids[start : start + self._tokens])
            published = self._by_name.get(self._name(before, content))
            if published is None or published.ids != content or published.before is not before:
                break
            found.append(published)
            before = published
        return found

    def publish(self, before: PublishedPage | None, ids: Ids, page: int) -> PublishedPage | None:
        """Let others find the held, full `page`; the page now published for these ids.

        That is another page when somebody computed the same before (the caller
        then goes on with that one), and None when the name is taken by other
        ids: then this page, and all after it, stay private.
        """
        content = _content(ids)
        name = self._name(before, content)
        present = self._by_name.get(name)
        if present is not None:
            return present if present.ids == content and present.before is before else None
        published = PublishedPage(page, name, content, before)
        self._by_name[name] = self._by_page[page] = published
        self._pages.keep(page)
        return published

    def name_of(self, before: PublishedPage | None, ids: Ids) -> tuple[bytes, bytes]:
        """(name, content) that a page of these ids after `before` has."""
        content = _content(ids)
        return self._name(before, content), content

    def idle_pages(self) -> list[PublishedPage]:
        """Published pages that nobody holds."""
        return [published for page, published in self._by_page.items() if self._pages.holders(page) == 0]

    def __len__(self) -> int:
        return len(self._by_name)

    def _name(self, before: PublishedPage | None, content: bytes) -> bytes:
        return page_name(self._root if before is None else before.name, content)

    def _forget(self, page: int) -> None:
        published = self._by_page.pop(page)
        del self._by_name[published.name]


def _content(ids: Ids) -> bytes:
    return ids.astype("<i4").tobytes()
