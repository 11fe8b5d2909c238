"""Weights of a `.nook` file larger than the memory: layers are read from disk while others compute.

What fits is read once and kept; the other layers, spread evenly among those,
take turns in a few slots, read ahead by a thread of their own:

    layers   0  1  2  3  4  5  6  7  8        kept: 1 2 4 5 7 8
    slots    a        b        c     ...      in turn: 0 3 6 in a, b, c

A step waits for a layer, computes it and gives it back, whereupon its slot is
filled with the next layer that belongs there. Reading goes past the system's
cache where the system allows it: a file that is read in circles and does not
fit would only push out everything else, and would never be found there.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.core.memory import Buffer
from engine.errors import FileDamagedError, ResourceError
from engine.models.store import HEADER_BYTES, NookFile
from engine.models.weights import Tensor

__all__ = ["StreamedWeights", "least_bytes"]

Bytes = NDArray[np.uint8]

_SLOTS = 3
"""One is computed, one waits, one is being read."""
# Layers begin on such a multiple in the file; reads past the cache are in whole ones.
_BLOCK = 4096
_STEP = 8 << 20
_MEASURED_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Bytes of the file that are read together; `room` is their number in whole blocks."""

    offset: int
    bytes: int

    @property
    def room(self) -> int:
        return -(-self.bytes // _BLOCK) * _BLOCK


def _stretches(file: NookFile) -> tuple[list[_Stretch], _Stretch]:
    """Of the layers in order, and of the head.

    An embedding that is no head is left where it lies in the mapping: a token needs one row.
    """
    spec = file.manifest.spec
    ends: dict[str, tuple[int, int]] = {}
    for tensor in file.manifest.tensors:
        part = ".".join(tensor.name.split(".")[:2]) if tensor.name.startswith("layers.") else tensor.name
        first, last = ends.get(part, (tensor.offset, 0))
        ends[part] = min(first, tensor.offset), max(last, tensor.offset + tensor.bytes)
    head = ends["embedding" if spec.tied_head else "head"]
    layers = [ends[f"layers.{number}"] for number in range(len(spec.layers))]
    return [_Stretch(first, last - first) for first, last in layers], _Stretch(head[0], head[1] - head[0])


def least_bytes(file: NookFile) -> int:
    """Memory without which nothing runs: the head, and slots for the largest layers."""
    layers, head = _stretches(file)
    return head.room + _ring_bytes(layers)


def _ring_bytes(layers: Sequence[_Stretch]) -> int:
    return min(_SLOTS, len(layers)) * max((layer.room for layer in layers), default=0)


def _in_turn(layers: Sequence[_Stretch], room: int) -> list[int]:
    """The fewest layers, spread evenly, without which the others fit beside the slots; ascending."""
    total = sum(layer.room for layer in layers)
    if total <= room:
        return []
    for count in range(1, len(layers) + 1):
        found = [index * len(layers) // count for index in range(count)]
        turning = [layers[number] for number in found]
        if total - sum(layer.room for layer in turning) + _ring_bytes(turning) <= room:
            return found
    raise ResourceError(f"the model's layers need {_ring_bytes(layers) / 1e9:.2f} GB and {room / 1e9:.2f} GB are free")


class StreamedWeights:
    """All tensors of a file, of which a layer's are in memory between `take` and `give_back`.

    One thread computes; it alone calls `begin`, `take` and `give_back`. A
    tensor's `data` is the mapping's, for whoever looks at a weight while a
    model is lowered; kernels find it at `address`.
    """

    def __init__(self, file: NookFile, room: int) -> None:
        """Read the head, and begin reading layers.

        room: bytes that weights may take; at least `least_bytes(file)`

        Raises:
            ResourceError: they do not fit, or the file cannot be read
            FileDamagedError: the file is another one by now
        """
        self._file = file
        layers, whole = _stretches(file)
        self._layers, self._whole = layers, whole
        turning = _in_turn(layers, room - whole.room)
        self._turning = frozenset(turning)
        kept = [number for number in range(len(layers)) if number not in self._turning]
        # Layers in turn share the first few slots; each of the others has its own.
        slots = min(_SLOTS, len(turning))
        self._firsts = turning[:slots]
        self._slot_of = {number: index % slots for index, number in enumerate(turning)}
        self._slot_of |= {number: slots + index for index, number in enumerate(kept)}
        sizes = [max((layers[number].room for number in turning), default=0)] * slots
        sizes += [*(layers[number].room for number in kept), whole.room]
        rooms: list[Bytes] = np.split(Buffer(sum(sizes), "the weights").view, np.cumsum(sizes)[:-1])
        *self._rooms, self._head = rooms
        self._holders: list[int | None] = [None] * len(self._rooms)
        self._there: set[int] = set()
        self._next = 0
        self._error: Exception | None = None
        self._closing = False
        self._read_bytes, self._read_s = 0, 0.0
        self._changed = threading.Condition()
        self._disk = _Disk(file)
        for _ in self._disk.read(whole, self._head):
            pass
        self._reader = threading.Thread(target=self._read_on, name="layers", daemon=True)
        self._reader.start()

    # ------------------------------------------------------------ as weights

    @property
    def names(self) -> tuple[str, ...]:
        """Tensors in the order of the file."""
        return self._file.names

    @property
    def total_bytes(self) -> int:
        """Bytes of all packed tensors."""
        return self._file.total_bytes

    @property
    def held_bytes(self) -> int:
        """Memory that they take."""
        return sum(room.nbytes for room in (*self._rooms, self._head))

    @property
    def step_bytes(self) -> int:
        """What every step reads from disk."""
        return sum(self._layers[number].bytes for number in self._turning)

    def tensor(self, name: str) -> Tensor:
        """One of them; KeyError when there is none of that name."""
        tensor, offset = self._file.tensor(name), self._file.offset(name)
        if name.startswith("layers."):
            number = int(name.split(".")[1])
            part, room = self._layers[number], self._rooms[self._slot_of[number]]
        elif offset == self._whole.offset:
            part, room = self._whole, self._head
        else:
            return tensor
        return replace(tensor, place=int(room.ctypes.data) + offset - part.offset)

    # ------------------------------------------------------------ as layers

    def begin(self) -> None:
        """A step begins at the first layer, whether the one before came to its end or not."""
        with self._changed:
            self._next = 0
            for slot, first in enumerate(self._firsts):
                if self._holders[slot] != first:
                    self._free(slot)
            self._changed.notify_all()

    def take(self, layer: int, timeout_s: float) -> bool:
        """Wait until a layer is there, but not for ever; False when it is not there yet.

        Raises:
            ResourceError, FileDamagedError: it cannot be read
        """
        with self._changed:
            self._next = layer
            self._changed.notify_all()
            self._changed.wait_for(lambda: layer in self._there or self._error is not None, timeout_s)
            if layer not in self._there and self._error is not None:
                raise self._error
            return layer in self._there

    def give_back(self, layer: int) -> None:
        """A layer is computed; another may take its place."""
        with self._changed:
            self._next = (layer + 1) % len(self._layers)
            if layer in self._turning:
                self._free(self._slot_of[layer])
            self._changed.notify_all()

    def rate(self) -> float:
        """Bytes per second that the disk gives, from what was read so far; waits until that is enough to tell.

        Raises:
            ResourceError, FileDamagedError: nothing can be read
        """
        enough = min(_MEASURED_BYTES, sum(layer.bytes for layer in self._layers[:_SLOTS]))
        with self._changed:
            self._changed.wait_for(lambda: self._read_bytes >= enough or self._error is not None or self._closing)
            if self._error is not None:
                raise self._error
            return self._read_bytes / self._read_s if self._read_s > 0 else 0.0

    def close(self) -> None:
        """End the reading. Nobody computes any more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._reader.join()
        self._disk.close()

    def _free(self, slot: int) -> None:
        holder, self._holders[slot] = self._holders[slot], None
        self._there.discard(-1 if holder is None else holder)

    # ------------------------------------------------------------ the reader's thread

    def _read_on(self) -> None:
        try:
            while (layer := self._wait_for_room()) is not None:
                self._read(layer)
        except Exception as error:  # noqa: BLE001 - raised where somebody waits for the layer
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _wait_for_room(self) -> int | None:
        """The layer to read next, its slot taken for it; None at the end."""
        with self._changed:
            while not self._closing:
                for distance in range(len(self._layers)):
                    layer = (self._next + distance) % len(self._layers)
                    slot = self._slot_of[layer]
                    if self._holders[slot] is None:
                        self._holders[slot] = layer
                        return layer
                self._changed.wait()
        return None

    def _read(self, layer: int) -> None:
        slot = self._slot_of[layer]
        for got, seconds in self._disk.read(self._layers[layer], self._rooms[slot]):
            with self._changed:
                self._read_bytes += got
                self._read_s += seconds
                if self._closing or self._holders[slot] != layer:
                    return  # a step was broken off: other layers come first now
        with self._changed:
            if self._holders[slot] == layer:
                self._there.add(layer)
            self._changed.notify_all()


class _Disk:
    """A file that is read past the system's cache where that can be done."""

    def __init__(self, file: NookFile) -> None:
        self._name = file.path.name
        block = Buffer(_BLOCK).view
        try:
            try:
                self._file = _opened(file.path, getattr(os, "O_DIRECT", 0), block)
                self._is_direct = hasattr(os, "O_DIRECT")
            except OSError:  # not on every file system
                self._file, self._is_direct = _opened(file.path, 0, block), False
        except OSError as error:
            raise ResourceError(f"{file.path} cannot be read: {error.strerror or error}") from None
        if block[:HEADER_BYTES].tobytes() != file.beginning:
            self._file.close()
            raise FileDamagedError(f"{self._name} was replaced while it was being opened; load it again")

    def read(self, part: _Stretch, place: Bytes) -> Iterator[tuple[int, float]]:
        """Read into a place of whole blocks; gives the bytes of each piece as it comes, and the seconds it took.

        Raises:
            ResourceError, FileDamagedError: it cannot be read any more
        """
        done = 0
        while done < part.bytes:
            piece = place[done : min(done + _STEP, part.room)]
            # Memory that nobody has touched yet would be got page by page during the read, at a tenth of its speed.
            piece[::_BLOCK] = 0
            begin_s = time.perf_counter()
            try:
                self._file.seek(part.offset + done)
                got = self._file.readinto(piece.data)
            except OSError as error:
                raise ResourceError(f"{self._name} cannot be read any more: {error.strerror or error}") from None
            if not got:
                raise FileDamagedError(f"{self._name} became shorter while it was in use; copy it again")
            if not self._is_direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._file.fileno(), part.offset + done, got, os.POSIX_FADV_DONTNEED)
            done += got
            yield got, time.perf_counter() - begin_s

    def close(self) -> None:
        """Nothing is read any more."""
        self._file.close()


def _opened(path: Path, past_cache: int, block: Bytes) -> FileIO:
    """The file, its first block read as proof that it can be read so."""
    file = FileIO(path, "rb", opener=lambda name, flags: os.open(name, flags | past_cache))
    try:
        file.readinto(block.data)
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(file.fileno(), fcntl.F_NOCACHE, 1)
    except OSError:
        file.close()
        raise
    return file
