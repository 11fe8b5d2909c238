"""Cuts a model into parts for sticks and disks that hold no large files, and joins them again; knows no model format.

    NAME.parts/
        parts.json      the model's files and the parts in order, each with size, the parts with SHA-256
        NAME.001        bytes of all the files, one after the other
        NAME.002 ...

Both ways can be interrupted and gone on with. Parts may arrive one stick at a
time: joining takes what is there and says which one comes next.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from engine.errors import FileDamagedError, InputError, OutOfSpaceError, ResourceError
from engine.progress import Progress

__all__ = ["MOST_PART_MB", "join", "split"]

MOST_PART_MB: Final = 4294
"""FAT32 holds files of less than 4 GiB, which are 4,294.97 million bytes."""

_MEGABYTE: Final = 1_000_000
_LIST: Final = "parts.json"
_FORMAT: Final = 1
_BLOCK: Final = 4 << 20
_LONGEST_LIST: Final = 8 << 20
_MOST: Final = 20_000
_PARTIAL: Final = ".joining"
# What no system takes as a name, or what means another place there.
_UNSAFE = re.compile(r'[\x00-\x1f<>:"|?*\\]|^\.{1,2}$|[. ]$|^(con|prn|aux|nul|com\d|lpt\d)(\.|$)', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _File:
    path: str  # within the model, with /
    bytes: int


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class _List:
    """What `parts.json` says. folder: the model is one, named `name`; else it is the one file of that name."""

    name: str
    folder: bool
    files: tuple[_File, ...]
    parts: tuple[_Part, ...]

    @property
    def total(self) -> int:
        return sum(file.bytes for file in self.files)


class _Stream:
    """Files, one after the other, as one row of bytes. root: the folder they lie in, or the one file itself."""

    def __init__(self, root: Path, files: tuple[_File, ...], *, folder: bool) -> None:
        self._places: list[tuple[int, int, Path]] = []
        start = 0
        for file in files:
            self._places.append((start, file.bytes, root / file.path if folder else root))
            start += file.bytes

    def _within(self, offset: int, size: int) -> Iterator[tuple[Path, int, int]]:
        """(file, place in it, bytes there) of a range."""
        for start, length, path in self._places:
            low, high = max(offset, start), min(offset + size, start + length)
            if low < high:
                yield path, low - start, high - low

    def read(self, offset: int, size: int) -> Iterator[bytes]:
        """The bytes of a range in blocks; ends early where a file does."""
        for path, place, length in self._within(offset, size):
            with path.open("rb") as file:
                file.seek(place)
                left = length
                while left and (block := file.read(min(_BLOCK, left))):
                    yield block
                    left -= len(block)
            if left:
                return

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes where they belong."""
        done = 0
        for path, place, length in self._within(offset, len(data)):
            with path.open("r+b") as file:
                file.seek(place)
                file.write(data[done : done + length])
            done += length

    def make(self) -> None:
        """Make the files that are not there, empty ones among them."""
        for _start, _length, path in self._places:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def settle(self) -> None:
        """Have everything on the disk, each file as long as it must be."""
        for _start, length, path in self._places:
            with path.open("r+b") as file:
                file.truncate(length)
                os.fsync(file.fileno())


def split(source: Path, out: Path, part_mb: int) -> Generator[Progress, None, list[Path]]:
    """Write the parts of a model's file or folder into `out`, made when missing; what is there already is kept.

    part_mb: the most a part may have, in millions of bytes
    Returns what was written, the list last.

    Raises:
        InputError: there is nothing to split, or `part_mb` is senseless
        OutOfSpaceError, ResourceError: the parts cannot be written
    """
    if not 1 <= part_mb <= MOST_PART_MB:
        raise InputError(f"part_mb must be between 1 and {MOST_PART_MB}, not {part_mb}")
    folder = source.is_dir()
    try:
        files = tuple(_files(source)) if folder else (_File(source.name, source.stat().st_size),)
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror or error}") from None
    stream, total = _Stream(source, files, folder=folder), sum(file.bytes for file in files)
    if not total:
        raise InputError(f"{source} is empty")
    size = part_mb * _MEGABYTE
    names = [f"{source.name}.{number + 1:03}" for number in range(-(-total // size))]
    if len(names) > _MOST:
        raise InputError(f"{source} would be {len(names)} parts; let them be larger")
    parts: list[_Part] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        kept = sum(path.stat().st_size for name in names if (path := out / name).is_file())
        _check_room(out, total - kept)
        for number, name in enumerate(names):
            start = number * size
            length = min(size, total - start)
            parts.append((yield from _cut(stream, start, _Part(name, length, ""), out, total)))
        listed = _List(source.name, folder, files, tuple(parts))
        _write_whole(out / _LIST, json.dumps({"format": _FORMAT, **asdict(listed)}, ensure_ascii=False, indent=1))
    except OSError as error:
        raise ResourceError(f"{error.filename or out} cannot be written: {error.strerror or error}") from None
    return [out / part.name for part in parts] + [out / _LIST]


def _cut(stream: _Stream, start: int, part: _Part, out: Path, total: int) -> Generator[Progress, None, _Part]:
    """Write one part, unless it is there as it must be."""
    path = out / part.name
    there = path.is_file() and path.stat().st_size == part.bytes
    partial = path.with_name(path.name + ".partial")
    digest, done = hashlib.sha256(), 0
    with partial.open("wb") if not there else path.open("rb") as file:
        for block in stream.read(start, part.bytes):
            digest.update(block)
            done += len(block)
            if there:
                there = file.read(len(block)) == block
            elif file.writable():
                file.write(block)
            yield Progress("copy", start + done, total, "bytes", part.name)
        if done != part.bytes:
            raise InputError("the model became shorter while it was read; try again when nobody writes it")
        if file.writable():
            file.flush()
            os.fsync(file.fileno())
    if partial.exists():
        partial.replace(path)
    elif not there:  # what was there is another model's
        path.unlink()
        return (yield from _cut(stream, start, part, out, total))
    return _Part(part.name, part.bytes, digest.hexdigest())


def join(parts: Path, out: Path) -> Generator[Progress, None, Path]:
    """Make the model of its parts: into the folder `out` under its own name, or as `out` if that is no folder.

    Every part's hash is checked. Started again, it goes on. Returns the model's path.

    Raises:
        InputError: there are no parts, one is missing (it names which), or something stands in the way
        FileDamagedError: a part, or the list, is damaged; it names which
        OutOfSpaceError, ResourceError: the model cannot be written
    """
    folder = parts.parent if parts.name == _LIST else parts
    listed = _read_list(folder / _LIST)
    target = out / listed.name if out.is_dir() else out
    if target.exists():
        raise InputError(f"{target} is there already; remove it or give another path")
    partial = target.with_name(target.name + _PARTIAL)
    stream = _Stream(partial, listed.files, folder=listed.folder)
    try:
        stream.make()
        start = number = 0
        for number, part in enumerate(listed.parts):  # noqa: B007 - how far an earlier call came
            if not (yield from _is_joined(stream, start, part, listed.total)):
                break
            start += part.bytes
        else:
            number = len(listed.parts)
        _check_room(partial.parent, listed.total - start)
        for part in listed.parts[number:]:
            yield from _append(stream, start, folder / part.name, part, listed)
            start += part.bytes
        stream.settle()
        partial.replace(target)
    except OSError as error:
        raise ResourceError(f"{error.filename or target} cannot be written: {error.strerror or error}") from None
    return target


def _is_joined(stream: _Stream, start: int, part: _Part, total: int) -> Generator[Progress, None, bool]:
    """Whether a part's bytes are in their place already."""
    digest, done = hashlib.sha256(), 0
    for block in stream.read(start, part.bytes):
        digest.update(block)
        done += len(block)
        yield Progress("verify", start + done, total, "bytes", part.name)
    return done == part.bytes and digest.hexdigest() == part.sha256


def _append(stream: _Stream, start: int, path: Path, part: _Part, listed: _List) -> Generator[Progress, None, None]:
    """Put a part's bytes in their place."""
    place = listed.parts.index(part) + 1
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror or error}): it is part {place} of {len(listed.parts)}; bring it"
            " and run the same command again, which goes on from there"
        ) from None
    digest, done = hashlib.sha256(), 0
    with file:
        while block := file.read(_BLOCK):
            done += len(block)
            if done > part.bytes:
                break
            digest.update(block)
            stream.write(start + done - len(block), block)
            yield Progress("copy", start + done, listed.total, "bytes", part.name)
    if done != part.bytes or digest.hexdigest() != part.sha256:
        raise FileDamagedError(f"{path} is not as it was written; copy it again and run the same command")


def _files(folder: Path) -> Iterator[_File]:
    """The files of a model's folder in order of their names, but for what lies in hidden places."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not any(part.startswith(".") for part in name.split("/")):
            if any(_UNSAFE.search(part) for part in name.split("/")):
                raise InputError(f"{path} has a name that not every system can have; rename it")
            yield _File(name, path.stat().st_size)


def _read_list(path: Path) -> _List:
    """`parts.json`, of which nothing is believed before it was checked."""
    try:
        with path.open("rb") as file:
            data = file.read(_LONGEST_LIST + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}); name the folder of the parts") from None
    damaged = FileDamagedError(f"{path} is damaged; copy it again")
    try:
        value: Any = json.loads(data) if len(data) <= _LONGEST_LIST else None
    except (ValueError, RecursionError):
        raise damaged from None
    if not isinstance(value, dict):
        raise damaged
    if value.get("format") != _FORMAT:
        raise InputError(f"{path} is of another version of Inglenook; join it with that one")
    try:
        files = tuple(_File(str(file["path"]), file["bytes"]) for file in value["files"])
        parts = tuple(_Part(str(part["name"]), part["bytes"], str(part["sha256"])) for part in value["parts"])
        listed = _List(str(value["name"]), bool(value["folder"]), files, parts)
    except (KeyError, TypeError):
        raise damaged from None
    sizes = [*(file.bytes for file in files), *(part.bytes for part in parts)]
    if not all(type(size) is int and size >= 0 for size in sizes) or listed.total != sum(part.bytes for part in parts):
        raise damaged
    if not 1 <= len(parts) <= _MOST or not 1 <= len(files) <= _MOST or (not listed.folder and len(files) != 1):
        raise damaged
    names = [listed.name, *(part.name for part in parts), *(piece for file in files for piece in file.path.split("/"))]
    unsafe = next((name for name in names if not name or "/" in name or _UNSAFE.search(name)), None)
    if unsafe is not None or len({file.path.casefold() for file in files}) != len(files):
        raise FileDamagedError(f"{path} names files that cannot be written ({unsafe!r}); it was not made by Inglenook")
    return listed


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OutOfSpaceError(
            f"{needed / 1e9:.2f} GB are needed on the drive of {folder}, which has {free / 1e9:.2f} GB free"
        )


def _write_whole(path: Path, text: str) -> None:
    """A file that is there as a whole or not at all."""
    fresh = path.with_name(path.name + ".partial")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
