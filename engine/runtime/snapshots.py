"""Pages on disk: what was read of conversations, so that they go on at once after a restart.

One file is one page, named by the hash that names the page in the prefix index
(`prefix.page_name`): it stands for the model, the number format and every token
up to the page's end. The folder is named after what the bytes depend on besides
(engine version, tier-independent as all numbers are). A file that is not
exactly what was written is no page: it is deleted and its tokens are computed.

    8 bytes magic | BLAKE2b-256 of the rest | ids (little-endian int32) | keys and values
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.runtime.prefix import PublishedPage

__all__ = ["Snapshots"]

log = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]

_MAGIC = b"NOOKKV01"
_DIGEST = 32


class Snapshots:
    """The pages in one folder.

    folder: holds a folder for each model; all count towards `limit_bytes`, the
    one used least recently goes first. identity: of the model, its number
    format and the engine's version. page_bytes, ids_bytes: of one page.
    """

    def __init__(self, folder: Path, identity: bytes, *, page_bytes: int, ids_bytes: int, limit_bytes: int) -> None:
        self._root = folder
        self._folder = folder / hashlib.blake2b(identity, digest_size=16).hexdigest()
        self._ids_bytes = ids_bytes
        self._file_bytes = len(_MAGIC) + _DIGEST + ids_bytes + page_bytes
        self._limit = limit_bytes
        self._broken = False
        self._total = 0
        self._sizes: OrderedDict[Path, int] = OrderedDict()  # least recently used first
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            files = [(file.stat(), file) for file in folder.glob("*/*.page")]
        except OSError as error:
            self._give_up(error)
            return
        for status, file in sorted(files, key=lambda item: item[0].st_mtime):
            self._sizes[file] = status.st_size
        self._total = sum(self._sizes.values())
        self._make_room(0)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, bytes) and self._file(name) in self._sizes

    def save(self, published: PublishedPage, memory: Bytes) -> None:
        """Write a page unless it is there; a disk that does not take it ends the writing, with a note in the log."""
        file = self._file(published.name)
        if self._broken or file in self._sizes or self._file_bytes > self._limit:
            return
        content = published.ids + memory.tobytes()
        data = _MAGIC + hashlib.blake2b(content, digest_size=_DIGEST).digest() + content
        partial = file.with_suffix(f".{os.getpid()}")
        self._make_room(len(data))
        try:
            partial.touch(mode=0o600)
            partial.write_bytes(data)
            partial.replace(file)
        except OSError as error:
            self._give_up(error)
            partial.unlink(missing_ok=True)
            return
        self._sizes[file] = len(data)
        self._total += len(data)

    def load(self, name: bytes, ids: bytes, memory: Bytes) -> bool:
        """Fill `memory` with the page of this name, which must hold these ids; False when it cannot be had."""
        file = self._file(name)
        if file not in self._sizes:
            return False
        try:
            data = file.read_bytes()
            os.utime(file)
        except OSError as error:
            log.warning("%s cannot be read and is not used: %s", file, error)
            self._drop(file)
            return False
        head = len(_MAGIC) + _DIGEST
        content = data[head:]
        sound = len(data) == self._file_bytes and data[: len(_MAGIC)] == _MAGIC
        if not (sound and hashlib.blake2b(content, digest_size=_DIGEST).digest() == data[len(_MAGIC) : head]):
            log.warning("%s is damaged and is not used", file)
            self._drop(file)
            return False
        if content[: self._ids_bytes] != ids:
            return False
        memory[:] = np.frombuffer(content, np.uint8, offset=self._ids_bytes)
        self._sizes.move_to_end(file)
        return True

    def _file(self, name: bytes) -> Path:
        return self._folder / f"{name.hex()}.page"

    def _make_room(self, size: int) -> None:
        while self._sizes and self._total + size > self._limit:
            self._drop(next(iter(self._sizes)))

    def _drop(self, file: Path) -> None:
        self._total -= self._sizes.pop(file)
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be deleted: %s", file, error)

    def _give_up(self, error: OSError) -> None:
        log.warning("conversations are not kept on disk: %s", error)
        self._broken = True
