"""Opens strangers' files with care, and says in words what a file is when it is not what its name says."""

from __future__ import annotations

import json
import re
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, Literal, overload

from engine.errors import ModelFolderError

__all__ = ["open_for_reading", "parse_json", "plain_name", "read_bytes", "read_json", "what_it_is_instead", "within"]

_LARGEST_TEXT = 256 << 20
_BEGINNING = 512
# Integers longer than this are no sizes or ids; they become floats, which every reader refuses by name.
_LONGEST_INTEGER = 30
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


@overload
def open_for_reading(path: Path, *, buffered: Literal[True] = True) -> BufferedReader: ...
@overload
def open_for_reading(path: Path, *, buffered: Literal[False]) -> FileIO: ...
def open_for_reading(path: Path, *, buffered: bool = True) -> BufferedReader | FileIO:
    """The file, opened; one sentence when that is impossible.

    buffered: whether reads go by way of a buffer, which many short ones far apart are faster without.

    Raises:
        ModelFolderError: it is missing, a link to nothing, or not readable
    """
    try:
        return path.open("rb") if buffered else path.open("rb", buffering=0)
    except FileNotFoundError:
        if path.is_symlink():
            raise ModelFolderError(
                f"{path.name} is a link to a file that is not there: the download is incomplete, fetch the model again"
            ) from None
        raise ModelFolderError(f"{path.name} is missing in {path.parent}") from None
    except PermissionError:
        raise ModelFolderError(f"{path} may not be read by this user") from None
    except OSError as error:
        raise ModelFolderError(f"{path} cannot be read: {error.strerror or error}") from None


def read_bytes(path: Path) -> bytes:
    """A text-like file whole; refuses what cannot be one.

    Raises:
        ModelFolderError: it cannot be read, is far too large, or is a git-LFS
            pointer or a web page
    """
    with open_for_reading(path) as file:
        data = file.read(_LARGEST_TEXT + 1)
    if len(data) > _LARGEST_TEXT:
        raise ModelFolderError(f"{path.name} is larger than {_LARGEST_TEXT >> 20} MB, so it is not what its name says")
    instead = _instead(path.name, data[:_BEGINNING], len(data))
    if instead is not None:
        raise ModelFolderError(instead)
    return data


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; see `parse_json`."""
    return parse_json(read_bytes(path), path.name)


def parse_json(data: bytes, name: str) -> dict[str, Any]:
    """A JSON object, read as tolerantly as is safe: byte order marks, NaN and long integers pass.

    Raises:
        ModelFolderError: it is not JSON, not an object, nested absurdly deep,
            or says one key twice with different values
    """
    try:
        text = data.decode("utf-16" if data[:2] in {b"\xff\xfe", b"\xfe\xff"} else "utf-8-sig")
        values = json.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except RecursionError:
        raise ModelFolderError(f"{name} is nested too deep to be a model's file") from None
    except _DuplicateKeyError as error:
        raise ModelFolderError(f"{name} says {error} twice, with different values") from None
    except ValueError as error:
        raise ModelFolderError(f"{name} is not valid JSON ({error}): the download may be incomplete") from None
    if not isinstance(values, dict):
        raise ModelFolderError(f"{name} is not a JSON object")
    return values


def what_it_is_instead(path: Path) -> str | None:
    """A sentence when the file's beginning shows that it is no model file at all, else None."""
    with open_for_reading(path) as file:
        return _instead(path.name, file.read(_BEGINNING), file.seek(0, 2))


def plain_name(name: Any) -> str | None:
    """`name` when it can only mean a file in the folder itself, on every system; else None."""
    if not isinstance(name, str) or not 0 < len(name) <= 255:
        return None
    if name.strip(" .") != name or re.search(r'[/\\:*?"<>|\x00-\x1f\x7f]', name) or _DEVICES.fullmatch(name):
        return None
    return name


def within(folder: Path, name: str) -> Path:
    """The path of a file of the folder; links may lead to the hub cache's blobs, but nowhere else.

    Raises:
        ModelFolderError: the file is a link out of the folder
    """
    path = folder / name
    real, root = path.resolve(), folder.resolve()
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(allowed) for allowed in roots):
        raise ModelFolderError(f"{name} is a link out of the model's folder; put the file itself there")
    return path


def _instead(name: str, start: bytes, size: int) -> str | None:
    if size == 0:
        return f"{name} is empty: the download looks incomplete, fetch it again"
    if start.startswith(b"version https://git-lfs.github.com"):
        return f"{name} is a git-LFS pointer, not the file itself; run `git lfs pull` in the model's folder"
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return f"{name} is a web page, not a model's file; the download went wrong, fetch it again"
    if not start.strip(b"\0"):
        return f"{name} begins with nothing but zeros: the download looks incomplete, fetch it again"
    return None


class _DuplicateKeyError(Exception):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        for key, value in pairs:
            if values[key] != value:
                raise _DuplicateKeyError(key[:80])
    return values


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _LONGEST_INTEGER else float(digits)
