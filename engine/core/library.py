"""Loads compiled kernels by address: from the program's own shared libraries, else from object code in the cache.

Does not import numba; of shared libraries not llvmlite either. Objects in the
cache are named after everything that decides their content (kernel sources,
numba's version, tier, system, processor), so an edited kernel or another
machine never meets an old object; a damaged one is compiled again. A library
is taken when it is whole and made of the sources that are here, if any are.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import shutil
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from engine.core import build
from engine.core.cpu import machine
from engine.core.objects import compiler_key, has_sources, library_name, seal, source_key, unseal
from engine.errors import InternalError, ResourceError
from engine.folders import cache_folder, kernels_folder
from engine.progress import Progress
from engine.settings import Tier

__all__ = ["Kernels", "load_kernels", "prepared_kernels"]

_SIGNATURES: Final = {"enter": 3, "pack": 3, "read": 3}

_KEPT: Final = 3
"""Objects of one tier that stay in the cache: of this version and of two others, for who goes to and fro."""

_ABANDONED_S: Final = 24 * 3600.0
"""A folder in which something was compiled so long ago belongs to a process that was killed."""


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
        shipped: folder of the packaged program's shared libraries; may be missing where the sources are

    Raises:
        InternalError: the kernels can be neither found nor compiled
        ResourceError: neither the cache nor a temporary folder can be written; or a packaged program lacks its library
    """
    if shipped is not None and (kernels := _shipped(tier, shipped / library_name(tier))) is not None:
        yield kernels
        return
    try:
        path = cache / "kernels" / f"{tier}-{compiler_key(tier)}.o"
    except importlib.metadata.PackageNotFoundError as error:
        message = f"the kernels for {tier} must be compiled, which takes the package {error.name}; install it with pip"
        raise ResourceError(message) from None
    code, notice = _kept(path), ""
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


def _shipped(tier: str, path: Path) -> Kernels | None:
    """The kernels of a shared library; None when it is not there, damaged or older than the sources that are here."""
    found = unseal(path)
    if has_sources():
        if found is None or found[1] != source_key(tier):
            return None
    elif found is None:
        state = "is damaged" if path.exists() else "is missing"
        message = (
            f"{path} {state}, without which tier {tier} does not run; install Inglenook again or choose another tier"
        )
        raise ResourceError(message)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        message = f"{path} cannot be loaded ({error}); install the Inglenook that is made for this system"
        raise ResourceError(message) from error
    addresses = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _SIGNATURES}
    return Kernels(tier, addresses, library)


def prepared_kernels(tier: Tier | None = None, cache: Path | None = None) -> Generator[Progress, None, Kernels]:
    """The kernels of the tier that is asked for: beside the program, in `cache` (the user's, by default), or compiled.

    Raises:
        SettingError: this computer has not that tier
        InternalError: they cannot be compiled
        ResourceError: as `load_kernels`
    """
    for step in load_kernels(machine().choose_tier(tier), cache or cache_folder(), kernels_folder()):
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
                fresh.write_bytes(seal(code, _key_in(path)))
                fresh.replace(path)
            except OSError as error:
                return code, _not_kept(folder, error)
            kept = _kept(path)
            if kept is None:
                message = f"the compiled kernels in {path} cannot be read back; is the disk sound?"
                raise InternalError(message)
            code = kept
            _tidy(path, tier)
    return code, notice


def _not_kept(folder: Path, error: OSError) -> str:
    return (
        f"{folder} cannot be written ({error.strerror or error}), so the engine is prepared anew at every start; "
        "make it writable to spare the wait"
    )


def _key_in(path: Path) -> str:
    """The key in an object's name."""
    return path.stem.rpartition("-")[2]


def _kept(path: Path) -> bytes | None:
    """The object in a file of the cache; None when it is missing, damaged or another's under this name."""
    found = unseal(path)
    return found[0] if found is not None and found[1] == _key_in(path) else None


def _tidy(written: Path, tier: str) -> None:
    """Let go what older versions, and processes that were killed, left beside a new object."""
    older = sorted(written.parent.glob(f"{tier}-*.o"), key=_age_s)
    abandoned = [path for path in written.parent.glob("compiling-*") if _age_s(path) > _ABANDONED_S]
    for path in [*older[_KEPT:], *abandoned]:
        # Another process may do the same, or, on Windows, hold a file open: then it goes the next time.
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path != written:
            with suppress(OSError):
                path.unlink()


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:  # it is gone meanwhile
        return 0.0


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
