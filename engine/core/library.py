"""Loads compiled kernels by address: from the program's own shared libraries, else from object code in the cache.

Does not import numba. Objects are named after everything that decides their
content (kernel sources, numba's version, tier, machine), so an edited kernel
or another CPU never meets an old object; a damaged one is compiled again.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import platform
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final

from engine.core import build
from engine.core.cpu import machine
from engine.errors import InternalError, ResourceError
from engine.folders import cache_folder
from engine.progress import Progress
from engine.settings import Tier

__all__ = ["Kernels", "load_kernels", "prepared_kernels"]

_SIGNATURES: Final = {"enter": 3, "pack": 3, "read": 3}


class Kernels:
    """The entry points of one tier, callable with int64 arguments; the GIL is released meanwhile.

    notice: why the next start compiles again, else "".
    """

    def __init__(self, tier: str, addresses: dict[str, int], owner: Any) -> None:
        self.tier = tier
        self.notice = ""
        self._owner = owner  # keeps the code mapped
        for name, count in _SIGNATURES.items():
            setattr(self, name, ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)(addresses[name]))

    enter: Any
    pack: Any
    read: Any


def load_kernels(tier: str, cache: Path, shipped: Path | None = None) -> Iterator[str | Kernels]:
    """Yields lines of progress while compiling (none when compiled before), then the `Kernels`.

    Args:
        tier: instruction tier, one of `build.TARGETS`
        cache: folder for object code, made when missing
        shipped: folder of the packaged program's shared libraries

    Raises:
        InternalError: the kernels can be neither found nor compiled
        ResourceError: neither the cache nor a temporary folder can be written
    """
    if shipped is not None:
        path = shipped / f"kernels-{tier}{'.dll' if sys.platform == 'win32' else '.so'}"
        library = ctypes.CDLL(str(path))
        addresses = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _SIGNATURES}
        yield Kernels(tier, addresses, library)
        return
    path = cache / "kernels" / f"{tier}-{_key(tier)}.o"
    code, notice = _unsealed(path), ""
    if code is None:
        try:
            code, notice = yield from _compiled(tier, path)
        except OSError as error:
            message = (
                f"the kernels could not be compiled into {path.parent} nor into a temporary folder "
                f"({error.strerror or error}); see that one of them can be written and that there is room"
            )
            raise ResourceError(message) from error
    kernels = _loaded(tier, code)
    kernels.notice = notice
    yield kernels


def prepared_kernels(tier: Tier | None = None, cache: Path | None = None) -> Generator[Progress, None, Kernels]:
    """The kernels of the tier that is asked for, compiled when they are not in `cache` (the user's, by default).

    Raises:
        SettingError: this computer has not that tier
        InternalError: they cannot be compiled
    """
    for step in load_kernels(machine().choose_tier(tier), cache or cache_folder()):
        if isinstance(step, Kernels):
            return step
        done, total, name = _compile_step(step)
        yield Progress("compile", done, total, "steps", name)
    raise AssertionError("load_kernels ends with the kernels")


def _compile_step(line: str) -> tuple[int, int, str]:
    """Take "2/5 name" apart: (2, 5, "name")."""
    counts, _, name = line.partition(" ")
    done, _, total = counts.partition("/")
    return (int(done), int(total), name) if done.isdigit() and total.isdigit() else (0, 0, line)


def _compiled(tier: str, path: Path) -> Generator[str, None, tuple[bytes, str]]:
    """Object code, kept at `path` where that is possible; else a notice says why it is not."""
    folder, notice = path.parent, ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Another process may compile the same: each works on its own file, the last rename wins.
        own = tempfile.TemporaryDirectory(prefix="compiling-", dir=folder)
    except OSError as error:
        notice = _not_kept(folder, error)
        own = tempfile.TemporaryDirectory(prefix="inglenook-")
    with own as place:
        fresh = Path(place) / "kernels.o"
        yield from build.compile_tier(tier, fresh)
        code = fresh.read_bytes()
        if not notice:
            try:
                fresh.write_bytes(code + hashlib.sha256(code).digest())
                fresh.replace(path)
            except OSError as error:
                return code, _not_kept(folder, error)
            sealed = _unsealed(path)
            if sealed is None:
                message = f"the compiled kernels in {path} cannot be read back; is the disk sound?"
                raise InternalError(message)
            code = sealed
    return code, notice


def _not_kept(folder: Path, error: OSError) -> str:
    return (
        f"{folder} cannot be written ({error.strerror or error}), so the engine is prepared anew at every start; "
        "make it writable to spare the wait"
    )


def _key(tier: str) -> str:
    """A hash of all that decides the object code."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    others = [root / f"{name}.py" for name in ("build", "control", "operations")]
    for path in sorted([*(root / "kernels").glob("*.py"), *others]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for package in ("numba", "llvmlite"):
        digest.update(importlib.metadata.version(package).encode() + b"\0")
    digest.update(f"{tier} {sys.platform} {platform.machine()}".encode())
    return digest.hexdigest()[:20]


def _unsealed(path: Path) -> bytes | None:
    """The object without the SHA-256 that ends the file, or None when it is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data[:-32] if len(data) > 32 and hashlib.sha256(data[:-32]).digest() == data[-32:] else None


def _loaded(tier: str, code: bytes) -> Kernels:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    engine = llvm.create_mcjit_compiler(
        llvm.parse_assembly(""), llvm.Target.from_default_triple().create_target_machine()
    )
    engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return Kernels(tier, {name: engine.get_function_address(name) for name in _SIGNATURES}, engine)
