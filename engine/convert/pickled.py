"""Reads the tensors of `pytorch_model.bin` without executing anything that is in it.

Such a file is a pickle: a program for a small machine that can call any
function of Python. Here the program is read, not run: a machine of our own
knows the few instructions that describe tensors, every function it may name
is one of a short list that only describes, and anything else ends with the
name of what was asked for. Nothing of Python's `pickle` is used.

Both kinds of file are read: the zip archive of today, and the one file of
pickles with numbers behind them that PyTorch wrote until 2020. Tensors are
places in the file, checked against its size; no number is read here.
"""

from __future__ import annotations

import pickletools
import struct
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any

from engine.convert.entry import NUMPY_TYPES, Entry
from engine.convert.files import open_for_reading, what_it_is_instead
from engine.errors import ModelFolderError, UnsupportedModelError

__all__ = ["read_pickled"]

_STORAGES = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "DoubleStorage": "F64",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
# Everything a pickle may name. What is called is only ever one of these, and calling them describes a tensor.
_NAMES = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    *(f"torch {name}" for name in _STORAGES),
}
_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_VERSION = 1001
_LARGEST_PROGRAM = 64 << 20
# A tensor takes some thirty instructions; no model has 100,000 tensors.
_MOST_STEPS = 3_000_000
_MOST_SIDES = 8


# What reading nonsense as a description raises, here and in the standard library's readers of zip files and opcodes.
_UNREADABLE = (
    *(ValueError, IndexError, TypeError, KeyError, AttributeError, EOFError, OverflowError),
    *(RecursionError, MemoryError, StopIteration, struct.error),
)


@dataclass(frozen=True, slots=True)
class _Name:
    """A function or class that the program named; nothing is looked up."""

    text: str


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    key: str
    count: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Mark:
    """Where a list of arguments begins on the machine's stack."""


def read_pickled(path: Path) -> dict[str, Entry]:
    """The tensors of a file by name.

    Raises:
        ModelFolderError: the file is damaged or cut short
        UnsupportedModelError: it asks for anything but tensors; what, is named
    """
    with open_for_reading(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        start = file.read(4)
        file.seek(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of odd texts, which are refused or harmless
                if start[:2] == b"PK":
                    root, places = _archive(path, file, size)
                elif start[:1] == b"\x80":
                    root, places = _legacy(path, file, size)
                else:
                    raise ModelFolderError(what_it_is_instead(path) or f"{path.name} is no file of PyTorch weights")
        except _UNREADABLE:
            raise _damaged(path, "its description of tensors cannot be read") from None
    return {name: _entry(path, name, tensor, places) for name, tensor in _named(path, root).items()}


def _archive(path: Path, file: BufferedReader, size: int) -> tuple[Any, Mapping[str, tuple[int, int]]]:
    """The zip archive: `NAME/data.pkl`, and each storage as a file `NAME/data/KEY` that is not compressed."""
    try:
        members = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError, struct.error):
        raise ModelFolderError(
            f"{path.name} is no whole archive: the download looks incomplete, fetch it again"
        ) from None
    programs = [member for member in members if member.filename.rpartition("/")[2] == "data.pkl"]
    if len(programs) != 1:
        raise _damaged(path, "it has no data.pkl")
    folder = programs[0].filename.removesuffix("data.pkl")
    places: dict[str, tuple[int, int]] = {}
    for member in members:
        name = member.filename.removeprefix(folder)
        if member.filename != folder + name or not (name in {"data.pkl", "byteorder"} or name.startswith("data/")):
            continue
        file.seek(min(max(member.header_offset, 0), size))
        header = file.read(30)
        if member.compress_type != zipfile.ZIP_STORED or header[:4] != b"PK\x03\x04" or member.flag_bits & 1:
            raise _damaged(path, f"{name[:80]} in it is compressed or encrypted")
        begin = member.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
        if member.header_offset < 0 or begin + member.file_size > size:
            raise _damaged(path, f"{name[:80]} in it goes beyond its ends")
        places[name] = (begin, begin + member.file_size)
    if "byteorder" in places and _read(file, *places["byteorder"]) != b"little":
        raise UnsupportedModelError(f"{path.name} was written on a big-endian computer, which is not read")
    program = BytesIO(_read(file, *places["data.pkl"]))
    root = _Machine(path).run(program)
    return root, {name.removeprefix("data/"): place for name, place in places.items() if name.startswith("data/")}


def _legacy(path: Path, file: BufferedReader, size: int) -> tuple[Any, Mapping[str, tuple[int, int]]]:
    """Three pickles that say what this is, the description, the storages' keys, then each one's length and bytes."""
    program = BytesIO(file.read(min(size, _LARGEST_PROGRAM)))
    magic = _Machine(path).run(program)
    if magic != _MAGIC or _Machine(path).run(program) != _LEGACY_VERSION:
        raise ModelFolderError(f"{path.name} is a pickle, but no file of PyTorch weights")
    system = _Machine(path).run(program)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise UnsupportedModelError(f"{path.name} was written on a big-endian computer, which is not read")
    machine = _Machine(path)
    root = machine.run(program)
    keys = _Machine(path).run(program)
    at = program.tell()
    places: dict[str, tuple[int, int]] = {}
    for key in keys:
        storage = machine.storages[str(key) if isinstance(key, int) else key]
        width = NUMPY_TYPES[storage.dtype].itemsize
        if _read(file, at, at + 8) != struct.pack("<q", storage.count):
            raise _damaged(path, "the length of a storage contradicts its description")
        places[key] = (at + 8, at + 8 + storage.count * width)
        at = places[key][1]
        if at > size:
            raise ModelFolderError(
                f"{path.name} ends {at - size} bytes too early: the download looks incomplete, fetch it again"
            )
    return root, places


def _read(file: BufferedReader, begin: int, end: int) -> bytes:
    if end - begin > _LARGEST_PROGRAM:
        raise ValueError("a description longer than any model's")
    file.seek(begin)
    data = file.read(end - begin)
    if len(data) != end - begin:
        raise EOFError
    return data


class _Machine:
    """Follows one pickle. storages: those it mentioned, by key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self.storages: dict[str, _Storage] = {}

    def run(self, program: BytesIO) -> Any:
        """The value that the program describes; what follows it stays unread."""
        for step, (opcode, argument, _) in enumerate(pickletools.genops(program)):
            if opcode.name == "STOP":
                (value,) = self._stack
                return value
            if step > _MOST_STEPS:
                break
            self._step(opcode.name, argument)
        raise EOFError

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                stack.append(_Mark())
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8" | "SHORT_BINSTRING" | "BINSTRING":
                stack.append(argument)
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "LONG4" | "BINFLOAT":
                stack.append(argument)
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(name == "NEWTRUE")
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE":
                stack.append(tuple(self._since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL":
                stack.append(self._name(argument))
            case "STACK_GLOBAL":
                function, module = stack.pop(), stack.pop()
                stack.append(self._name(f"{module} {function}"))
            case "BINPERSID":
                stack.append(self._storage(stack.pop()))
            case "REDUCE":
                arguments, called = stack.pop(), stack.pop()
                stack.append(self._described(called, arguments))
            case "APPEND":
                item = stack.pop()
                self._of(list).append(item)
            case "APPENDS":
                items = self._since_mark()
                self._of(list).extend(items)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                self._of(dict).update(_dictionary([(key, value)]))
            case "SETITEMS":
                items = self._since_mark()
                self._of(dict).update(_dictionary(zip(items[::2], items[1::2], strict=True)))
            case "BUILD":
                stack.pop()  # `_metadata` of a state_dict, which says nothing of its tensors
                self._of(dict)
            case _:
                raise self._refused(f"the instruction {name}")

    def _since_mark(self) -> list[Any]:
        place = next(i for i in range(len(self._stack) - 1, -1, -1) if isinstance(self._stack[i], _Mark))
        items = self._stack[place + 1 :]
        del self._stack[place:]
        return items

    def _of(self, kind: type) -> Any:
        if not isinstance(self._stack[-1], kind):
            raise TypeError
        return self._stack[-1]

    def _name(self, text: str) -> _Name:
        if text not in _NAMES:
            raise self._refused(".".join(text.split(" ")))
        return _Name(text)

    def _refused(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._path.name} asks for {what[:100]}, which is no part of weights and may be an attack; "
            "nothing was run: get the model's safetensors files"
        )

    def _storage(self, identity: Any) -> _Storage:
        kind, name, key, _, count, *view = identity
        if kind != "storage" or not isinstance(name, _Name) or not isinstance(key, str) or (view and view[0]):
            raise ValueError("an unknown kind of storage")
        storage = _Storage(_STORAGES[name.text.rpartition(" ")[2]], key, _natural(count))
        return self.storages.setdefault(key, storage)

    def _described(self, called: Any, arguments: tuple[Any, ...]) -> Any:
        """What a call describes: a tensor, the tensor in it, or an empty dictionary."""
        match called, arguments:
            case _Name("collections OrderedDict"), ():
                return {}
            case _Name("collections OrderedDict"), ([*pairs],):
                return _dictionary(pairs)
            case _Name("torch._utils _rebuild_parameter"), (_Tensor() as tensor, _, _):
                return tensor
            case _Name("torch._utils _rebuild_tensor" | "torch._utils _rebuild_tensor_v2"), (
                _Storage() as storage,
                offset,
                tuple() as shape,
                tuple() as strides,
                *_,
            ):
                sides = tuple(_natural(side) for side in shape)
                steps = tuple(_natural(step) for step in strides)
                if len(sides) != len(steps) or len(sides) > _MOST_SIDES:
                    raise ValueError("a tensor without a shape")
                return _Tensor(storage, _natural(offset), sides, steps)
        raise TypeError


def _dictionary(pairs: Iterable[Any]) -> dict[str, Any]:
    """Only texts are keys: the hash of other things can take for ever."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str):
            raise TypeError("a name that is no text")
        found[key] = value
    return found


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 48:
        raise ValueError("no size")
    return value


def _named(path: Path, root: Any) -> dict[str, _Tensor]:
    """The tensors of a dictionary, or of the one in it that trainers keep weights in."""
    for around in ("state_dict", "model_state_dict"):
        if isinstance(root, dict) and isinstance(root.get(around), dict):
            root = root[around]
    if not isinstance(root, dict):
        raise _damaged(path, "it does not hold tensors by name")
    return {name: value for name, value in root.items() if isinstance(value, _Tensor)}


def _entry(path: Path, name: str, tensor: _Tensor, places: Mapping[str, tuple[int, int]]) -> Entry:
    """The tensor as a place in the file, proven to lie within its storage, and that within the file."""
    storage = tensor.storage
    begin, end = places.get(storage.key, (0, 0))
    width = NUMPY_TYPES[storage.dtype].itemsize
    reach = 0
    if 0 not in tensor.shape:
        reach = 1 + sum((side - 1) * step for side, step in zip(tensor.shape, tensor.strides, strict=True))
    if tensor.offset + reach > storage.count or storage.count * width > end - begin:
        raise _damaged(path, f"{name[:100]} goes beyond the bytes that belong to it")
    first = begin + tensor.offset * width
    plain, step = [], 1
    for side in reversed(tensor.shape):
        plain.append(step)
        step *= side
    # Where a side is 1, its step says nothing.
    steps = zip(tensor.shape, tensor.strides, reversed(plain), strict=True)
    strides = None if not reach or all(side == 1 or own == usual for side, own, usual in steps) else tensor.strides
    if strides is not None and len(strides) > 2:
        raise UnsupportedModelError(f"{name[:100]} ({path.name}) lies in the file in an order that is not read")
    return Entry(path, storage.dtype, tensor.shape, first, first + reach * width, strides)


def _damaged(path: Path, what: str) -> ModelFolderError:
    return ModelFolderError(f"{path.name} is damaged: {what}; fetch it again")
