"""Writes files as PyTorch writes them, without PyTorch: a zip archive, or one file of pickles (until 2020)."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["StoredTensor", "archive_program", "write_archive", "write_legacy"]

_STORAGES = {"float32": "FloatStorage", "float16": "HalfStorage", "uint16": "BFloat16Storage", "int64": "LongStorage"}


class StoredTensor:
    """A tensor within a storage. shape, strides, offset: in numbers; uint16 stands for bfloat16."""

    def __init__(
        self, storage: NDArray[Any], shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, count: int = -1
    ) -> None:
        self.storage, self.shape, self.strides, self.offset = storage, shape, strides, offset
        self.count = storage.size if count < 0 else count

    def __reduce__(self) -> Any:
        torch_utils = sys.modules["torch._utils"]
        arguments = (_Storage(self), self.offset, self.shape, self.strides, False, OrderedDict())
        return torch_utils._rebuild_tensor_v2, arguments


class _Storage:
    def __init__(self, tensor: StoredTensor) -> None:
        self.array, self.count = tensor.storage, tensor.count


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, storages: dict[str, NDArray[Any]], *, legacy: bool) -> None:
        super().__init__(file, 2)
        self._storages, self._legacy = storages, legacy

    def persistent_id(self, thing: Any) -> Any:
        if not isinstance(thing, _Storage):
            return None
        key = next((key for key, array in self._storages.items() if array is thing.array), str(len(self._storages)))
        self._storages[key] = thing.array
        kind = getattr(sys.modules["torch"], _STORAGES[thing.array.dtype.name])
        return ("storage", kind, key, "cpu", thing.count, *((None,) if self._legacy else ()))


@contextmanager
def _pretended() -> Iterator[None]:
    """Modules of PyTorch's names, for as long as `pickle` wants to find what it writes."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in _STORAGES.values():
        setattr(torch, name, type(name, (), {"__module__": "torch"}))

    def rebuild(*_: Any) -> None: ...

    rebuild.__module__, rebuild.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = rebuild  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in ("torch", "torch._utils")}
    sys.modules |= {"torch": torch, "torch._utils": utils}
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _described(tensors: Mapping[str, Any], *, legacy: bool) -> tuple[bytes, dict[str, NDArray[Any]]]:
    """The pickle and the storages of tensors, arrays of which get a storage of their own."""
    named: OrderedDict[str, Any] = OrderedDict()
    for name, tensor in tensors.items():
        if isinstance(tensor, np.ndarray):
            strides = tuple(step // tensor.itemsize for step in tensor.strides)
            named[name] = StoredTensor(tensor.reshape(-1), tensor.shape, strides)
        else:
            named[name] = tensor
    named._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    storages: dict[str, NDArray[Any]] = {}
    file = io.BytesIO()
    with _pretended():
        _Pickler(file, storages, legacy=legacy).dump(named)
    return file.getvalue(), storages


def write_archive(path: Path, tensors: Mapping[str, Any]) -> None:
    """The zip archive."""
    program, storages = _described(tensors, legacy=False)
    archive_program(path, program, {key: array.tobytes() for key, array in storages.items()})


def archive_program(path: Path, program: bytes, storages: Mapping[str, bytes], compression: int = 0) -> None:
    """The zip archive around any pickle."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", "little")
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)
        archive.writestr("archive/version", "3\n")


def write_legacy(path: Path, tensors: Mapping[str, Any]) -> None:
    """The one file of pickles."""
    program, storages = _described(tensors, legacy=True)
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    head = [0x1950A86A20F9469CFC6C, 1001, system]
    parts = [*(pickle.dumps(value, 2) for value in head), program, pickle.dumps(sorted(storages), 2)]
    for key in sorted(storages):
        parts += (struct.pack("<q", storages[key].size), storages[key].tobytes())
    path.write_bytes(b"".join(parts))
