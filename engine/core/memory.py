"""Memory that kernels read and write by address: aligned, zeroed, on huge pages where there are any.

Read-only mappings of files are not made here but where files are opened.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from engine.errors import ResourceError

__all__ = ["LINE", "Buffer", "aligned"]

LINE = 64
"""Bytes of a cache line; everything here begins on one."""

_HUGE_PAGE = 2 << 20


def aligned(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """A small zeroed array that begins on a cache line. Large ones are better off in a `Buffer`."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    room = np.zeros(size + LINE, np.uint8)
    start = -room.ctypes.data % LINE
    return room[start : start + size].view(kind).reshape(shape)


class Buffer:
    """A private block of zeroed memory for weights, pages or scratch.

    Pages come from the system when they are first written, so an untouched
    part costs nothing. Walking through gigabytes on pages of 4 KB misses the
    address cache at every one; hence huge pages, which need a private mapping
    and a beginning on 2 MB.

    Attributes:
        address: of the first byte
        view: uint8 (size,); a view of it keeps the memory alive beyond `close`
    """

    def __init__(self, size: int, what: str = "a buffer") -> None:
        """Reserve `size` bytes; `what` names them in the error.

        Raises:
            ResourceError: the system has no room for it
        """
        huge = size >= _HUGE_PAGE
        room = size + _HUGE_PAGE if huge else max(size, 1)
        try:
            if sys.platform == "win32":
                mapping = mmap.mmap(-1, room)
            else:
                mapping = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, MemoryError, OverflowError):
            message = f"{size / 1e9:.2f} GB of memory for {what} could not be had; close other programs or choose less"
            raise ResourceError(message) from None
        everything = np.frombuffer(mapping, np.uint8)
        start = -everything.ctypes.data % _HUGE_PAGE if huge else 0
        if huge and sys.platform == "linux":
            with suppress(OSError):  # a kernel without huge pages: slower, not wrong
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self.view: NDArray[np.uint8] = everything[start : start + size]
        self.address = int(self.view.ctypes.data)
        self.size = size

    def lock(self) -> bool:
        """Keep the memory from being swapped out; False when the system does not allow it."""
        if sys.platform == "win32":
            kernel = ctypes.WinDLL("kernel32")
            kernel.VirtualLock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
            locked = kernel.VirtualLock(self.address, self.size) != 0
        else:
            locked = ctypes.CDLL(None).mlock(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size)) == 0
        return bool(locked)

    def close(self) -> None:
        """Give the memory back, as soon as no view of it is left. Kernels must not use the address any more."""
        self.view = self.view[:0].copy()
        self.address = 0
