"""Writes `.nook` files: atomically, resumably, and with the drive's room checked first."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from io import BufferedRandom
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import numpy as np
from numpy.typing import NDArray

from engine.core.quant import ALIGNMENT
from engine.errors import InglenookError, InputError, OutOfSpaceError, ResourceError
from engine.models.store import (
    FOOTER_BYTES,
    HEADER_BYTES,
    Manifest,
    NookFile,
    StoredFile,
    StoredTensor,
    blocks,
    footer,
    header,
    manifest_room,
)

__all__ = ["NookWriter", "clean_partials", "keep_fidelity"]

_PARTIAL, _JOURNAL = ".partial", ".partial.journal"
_LAYER_ALIGNMENT = 4096
_MANIFEST_ROOM = 4096
_STEP = 8 << 20
_SYNC_BYTES = 64 << 20
_PATIENCE_S = 0.05
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Bytes = NDArray[np.uint8]


class NookWriter:
    """Writes one file; nothing has the final name before `commit`.

        with NookWriter(out, manifest, files) as writer:
            for _ in writer.recover(): ...
            for tensor in writer.remaining:
                writer.write(tensor, 0, packed)                 # in pieces, in any order
                for _ in writer.finish(tensor, exponent): ...
            for _ in writer.commit(): ...

    Iterators do long work: every step is a place to stop. Leaving the block
    before the end of `commit` removes everything, unless `keep_partial` was called: then
    the same call with `resume=True` goes on after the last finished tensor and
    ends in the identical bytes.

    manifest: offsets, hashes and exponents are filled in here; the rest is as it will be.
    """

    def __init__(
        self, out: Path, manifest: Manifest, files: Mapping[str, bytes], *, stamp: str = "", resume: bool = False
    ) -> None:
        """Open the partial file beside `out`.

        stamp: changes when the source does, so that nobody resumes on other weights

        Raises:
            InputError: `out` cannot be such a file
            OutOfSpaceError: the drive has not the room; nothing is written
            ResourceError: the folder may not be written, or another conversion writes this file
        """
        _check_name(out)
        self.out = out
        self.manifest = _laid_out(manifest, files)
        self._partial = out.with_name(out.name + _PARTIAL)
        self._journal_path = out.with_name(out.name + _JOURNAL)
        self._manifest_offset = _round_up(_end(self.manifest), ALIGNMENT)
        # Exponents are not known yet: up to "-126" in place of "0".
        exponents = 3 * len(self.manifest.tensors)
        room = _round_up(len(self.manifest.to_json()) + exponents + _MANIFEST_ROOM, ALIGNMENT)
        self.file_bytes = self._manifest_offset + room + FOOTER_BYTES
        self._job = hashlib.sha256(self.manifest.to_json() + stamp.encode()).hexdigest()
        self._done: dict[str, StoredTensor] = {}
        self._keep = self._committed = False
        self._unsynced = 0
        self._flush: Future[None] | None = None
        clean_partials(out.parent, but=out)
        self._file = self._open()
        try:
            self._claimed = self._read_journal() if resume else []
            _check_room(out.parent, self.file_bytes - sum(tensor.bytes for tensor in self._claimed))
            self._journal = self._begin(files, resume=resume)
        except (OSError, InglenookError) as error:
            self._file.close()
            self._remove()
            if isinstance(error, OSError):
                raise self._failed(error) from None
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._journal.close()
        if not self._committed and not self._keep:
            self._remove()

    @property
    def remaining(self) -> tuple[StoredTensor, ...]:
        """Tensors not written yet, in order."""
        return tuple(tensor for tensor in self.manifest.tensors if tensor.name not in self._done)

    def recover(self) -> Iterator[None]:
        """Believe a stopped run's journal as far as the bytes on disk bear it out."""
        for tensor in self._claimed:
            digest = hashlib.sha256()
            for block in self._read_back(tensor):
                digest.update(block)
                yield
            if digest.hexdigest() == tensor.sha256:
                self._finished(tensor)
            else:
                for start in range(0, tensor.bytes, _STEP):
                    self._write(tensor.offset + start, bytes(min(_STEP, tensor.bytes - start)))
                    yield

    def write(self, tensor: StoredTensor, offset: int, data: Bytes) -> None:
        """Write a piece of a tensor, `offset` bytes from its beginning. Pieces may come in any order.

        Raises:
            OutOfSpaceError: the drive is full
        """
        assert offset >= 0
        assert offset + data.nbytes <= tensor.bytes
        self._write(tensor.offset + offset, data.data)

    def finish(self, tensor: StoredTensor, exponent: int) -> Iterator[None]:
        """All pieces of a tensor are written; read it back for its hash."""
        digest = hashlib.sha256()
        for block in self._read_back(tensor):
            digest.update(block)
            yield
        self._finished(replace(tensor, exponent=exponent, sha256=digest.hexdigest()))
        self._unsynced += tensor.bytes
        if self._unsynced >= _SYNC_BYTES and (self._flush is None or self._flush.done()):
            # Little by little, so that the disk's whole backlog does not have to be waited for at the end.
            self._start_flush()

    def keep_partial(self) -> None:
        """From now on, stopping leaves the partial file for a later `resume`."""
        self._keep = True

    def commit(self) -> Iterator[None]:
        """Write manifest, footer and header, wait for the disk, then give the file its name.

        Raises:
            OutOfSpaceError, ResourceError: nothing has the final name; a file that had it before still does
        """
        tensors = tuple(self._done[tensor.name] for tensor in self.manifest.tensors)
        self.manifest = replace(self.manifest, tensors=tensors)
        manifest = self.manifest.to_json()
        room = self.file_bytes - FOOTER_BYTES - self._manifest_offset
        manifest += b" " * (room - len(manifest))
        beginning = header(self._manifest_offset, manifest, self.file_bytes)
        self._write(self._manifest_offset, manifest)
        self._write(self.file_bytes - FOOTER_BYTES, footer(beginning, self.file_bytes))
        self._write(0, beginning)
        yield from self._flushed()
        self._start_flush()
        yield from self._flushed()
        try:
            if sys.platform == "win32":  # an open file cannot be renamed there; elsewhere the lock lasts to the end
                self._file.close()
            self._partial.replace(self.out)
        except OSError as error:
            raise self._failed(error) from None
        self._committed = True
        self._journal.close()
        self._journal_path.unlink(missing_ok=True)
        _sync_folder(self.out.parent)

    def _open(self) -> BufferedRandom:
        try:
            file = self._partial.open("r+b" if self._partial.exists() else "x+b")
        except OSError as error:
            raise self._failed(error) from None
        if not _lock(file):
            file.close()
            raise ResourceError(f"another conversion is writing {self.out.name} right now")
        return file

    def _read_journal(self) -> list[StoredTensor]:
        """The tensors that a stopped run of the same job says it has finished."""
        claimed: list[StoredTensor] = []
        by_name = {tensor.name: tensor for tensor in self.manifest.tensors}
        # A missing journal, or a line cut off by a crash: what is not vouched for is made again.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            lines = self._journal_path.read_text(encoding="utf-8").splitlines()
            if json.loads(lines[0])["job"] == self._job:
                for line in lines[1:]:
                    entry = json.loads(line)
                    tensor = by_name.pop(entry["name"])
                    claimed.append(replace(tensor, exponent=entry["exponent"], sha256=entry["sha256"]))
        return claimed

    def _begin(self, files: Mapping[str, bytes], *, resume: bool) -> TextIO:
        """Bring the partial file to its full length, and start its journal."""
        # Tensors are finished in order: whatever lies behind the last one becomes zero again.
        self._file.truncate(max((tensor.offset + tensor.bytes for tensor in self._claimed), default=0))
        self._file.truncate(self.file_bytes)
        for stored in self.manifest.files:
            self._write(stored.offset, files[stored.name])
        journal = self._journal_path.open("w", encoding="utf-8")
        journal.write(json.dumps({"job": self._job, "resumable": resume}) + "\n")
        journal.flush()
        return journal

    def _finished(self, tensor: StoredTensor) -> None:
        self._done[tensor.name] = tensor
        entry = {"name": tensor.name, "exponent": tensor.exponent, "sha256": tensor.sha256}
        try:
            self._journal.write(json.dumps(entry) + "\n")
            self._journal.flush()
        except OSError as error:
            raise self._failed(error) from None

    def _write(self, offset: int, data: bytes | memoryview) -> None:
        try:
            self._file.seek(offset)
            self._file.write(data)
        except OSError as error:
            raise self._failed(error) from None

    def _read_back(self, tensor: StoredTensor) -> Iterator[bytes]:
        try:
            self._file.flush()
            for _, block in blocks(self._file, tensor.offset, tensor.bytes):
                yield block
        except OSError as error:
            raise self._failed(error) from None

    def _start_flush(self) -> None:
        """Have the disk take what is written so far, on a thread of its own: it may take seconds."""
        try:
            self._file.flush()
            handle = os.dup(self._file.fileno())  # outlives the file when the work is stopped meanwhile
        except OSError as error:
            raise self._failed(error) from None
        done: Future[None] = Future()
        self._flush, self._unsynced = done, 0
        threading.Thread(target=_flush, args=(handle, done), name="flush").start()

    def _flushed(self) -> Iterator[None]:
        while self._flush is not None and not self._flush.done():
            with contextlib.suppress(TimeoutError):
                self._flush.result(_PATIENCE_S)
            yield
        try:
            if self._flush is not None:
                self._flush.result()
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: OSError) -> InglenookError:
        if error.errno == errno.ENAMETOOLONG:
            return _too_long(self.out)
        if error.errno in _NO_SPACE:
            return OutOfSpaceError(
                f"the drive of {self.out.parent} became full while {self.out.name} was written; nothing was kept of it"
            )
        return ResourceError(f"{self.out} cannot be written: {error.strerror or error}")

    def _remove(self) -> None:
        for path in (self._partial, self._journal_path):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def keep_fidelity(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report on fidelity into the room that a finished file keeps for it; no tensor's byte changes.

    Raises:
        InputError, FileDamagedError: as `NookFile.open`; or the report is longer than the room
        ResourceError: the file cannot be written
    """
    manifest = replace(NookFile.open(path).manifest, fidelity=dict(report)).to_json()
    try:
        with path.open("r+b") as file:
            place, room, size = manifest_room(file.read(HEADER_BYTES))
            if len(manifest) > room:
                raise InputError(f"{path.name} has no room for a report of {len(report)} entries")
            manifest += b" " * (room - len(manifest))
            beginning = header(place, manifest, size)
            for offset, data in ((place, manifest), (size - FOOTER_BYTES, footer(beginning, size)), (0, beginning)):
                file.seek(offset)
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ResourceError(f"{path} cannot be written: {error.strerror or error}") from None


def _check_name(out: Path) -> None:
    if out.suffix.lower() != ".nook":
        raise InputError(f"{out} cannot be written: the name of a converted model ends in .nook")
    try:
        if out.is_dir():
            raise InputError(f"{out} cannot be written: it is a folder; name a file")
        if not out.parent.is_dir():
            what = "is a file, no folder" if out.parent.exists() else "does not exist"
            raise InputError(f"{out} cannot be written: {out.parent} {what}; name a folder that is there")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise _too_long(out) from None
        raise InputError(f"{out} cannot be written: {error.strerror or error}") from None


def _too_long(out: Path) -> InputError:
    return InputError(f"{str(out)[:80]}... cannot be written: the name is too long; choose a shorter one")


def _flush(handle: int, done: Future[None]) -> None:
    try:
        os.fsync(handle)
    except OSError as error:
        done.set_exception(error)
    else:
        done.set_result(None)
    finally:
        os.close(handle)


def clean_partials(folder: Path, but: Path | None = None) -> None:
    """Remove what conversions left that were killed: partial files nobody writes and nobody wants to resume.

    but: leave the partial of this file alone
    """
    for partial in folder.glob("*.nook" + _PARTIAL):
        name = partial.name.removesuffix(_PARTIAL)
        if but is not None and name == but.name:
            continue
        journal = folder / (name + _JOURNAL)
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            if json.loads(journal.read_text(encoding="utf-8").split("\n", 1)[0])["resumable"]:
                continue
        with contextlib.suppress(OSError):
            with partial.open("r+b") as file:
                if not _lock(file):
                    continue
            partial.unlink()
            journal.unlink(missing_ok=True)


def _laid_out(manifest: Manifest, files: Mapping[str, bytes]) -> Manifest:
    """Give every file and tensor its place."""
    end = HEADER_BYTES
    stored_files = []
    for name, data in files.items():
        start = _round_up(end, ALIGNMENT)
        stored_files.append(StoredFile(name, start, len(data), hashlib.sha256(data).hexdigest()))
        end = start + len(data)
    tensors, layer = [], ""
    for tensor in manifest.tensors:
        here = ".".join(tensor.name.split(".")[:2])
        start = _round_up(end, ALIGNMENT if here == layer else _LAYER_ALIGNMENT)
        tensors.append(replace(tensor, offset=start))
        end, layer = start + tensor.bytes, here
    return replace(manifest, files=tuple(stored_files), tensors=tuple(tensors))


def _end(manifest: Manifest) -> int:
    last = manifest.pieces[-1]
    return last.offset + last.bytes


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OutOfSpaceError(
            f"the model needs {needed / 1e9:.2f} GB on the drive of {folder}, which has {free / 1e9:.2f} GB free"
        )


def _lock(file: BufferedRandom) -> bool:
    """Claim a file for this process until it is closed; False when another has it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    """Make the rename last; Windows needs and knows nothing of the kind."""
    if sys.platform != "win32":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
