"""Compiles the kernels to object code, one instruction tier a process; links it to libraries for packaging.

    python -m engine.core.build TIER OUT.o
    python -m engine.core.build --all FOLDER [--system linux|windows]

The second form writes the shared libraries of all tiers that a packaged program
brings along: no tier needs a processor that has it, and Windows needs no Windows.

Only this module and the kernels import numba; the running engine loads what
this writes (`library.py`). A process serves one tier, because numba takes its
target from the environment at import and because LLVM aborts the process on an
instruction that the target lacks.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Final

from engine.core.objects import SYSTEM, library_name, seal, source_key
from engine.errors import InglenookError, InternalError, ResourceError

__all__ = ["TARGETS", "build_libraries", "compile_tier", "link"]

TARGETS: Final[dict[str, tuple[str, str]]] = {
    "generic": ("x86-64", ""),
    "avx2": ("x86-64-v3", ""),
    "avxvnni": ("x86-64-v3", "+avxvnni"),
    "avx512vnni": ("x86-64-v4", "+avx512vnni"),
    "amx": ("x86-64-v4", "+avx512vnni,+amx-tile,+amx-int8"),
}
"""LLVM's CPU name and extra features of each tier on x86-64; elsewhere the one tier is `generic` for any CPU."""


_BEAT_S: Final = 0.1


_STEPS: Final = 220
"""Steps of progress: the functions numba compiles, about 165, are three quarters of the wait."""


_WINDOWS: Final = "x86_64-w64-windows-gnu"
"""LLVM's name for a system with Win64's calling convention whose objects `ziglang` links without Microsoft's files."""


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def _target(tier: str) -> tuple[str, str]:
    return TARGETS[tier] if _is_x86() else ("generic", "")


def compile_tier(tier: str, out: Path, *, dll: bool = False) -> Iterator[str]:
    """Compile in a child process, for this system's loader or for a DLL of Windows; writes `out` last.

    Yields its lines of progress ("done/total name"), each again and again
    until the next one comes: every yield is a place to stop, and closing the
    generator ends the child.

    Raises:
        InternalError: the compiler failed; its last words are in the message
    """
    cpu, features = _target(tier)
    # NUMBA_OPT=0: the code is optimised once, as a whole, in `_write`; doing it twice doubles the wait.
    environment = dict(os.environ, INGLENOOK_TIER=tier, NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=features, NUMBA_OPT="0")
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "engine.core.build", tier, str(out), *(["--dll"] if dll else [])]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints,
        subprocess.Popen(  # noqa: S603 - this very module
            command, env=environment, stdout=subprocess.PIPE, stderr=complaints, text=True, encoding="utf-8"
        ) as child,
    ):
        try:
            yield from _repeated(child)
        finally:
            child.kill()  # of no effect on one that has ended
        child.wait()
        complaints.seek(0)
        trouble = complaints.read()
    if child.returncode != 0:
        last = trouble.strip().splitlines()[-1:] or ["no message"]
        message = f"the kernels for {tier} could not be compiled (exit code {child.returncode}): {last[0]}"
        raise InternalError(message)


def _repeated(child: subprocess.Popen[str]) -> Iterator[str]:
    """The lines a process writes until it ends, the latest one again whenever none has come for a while."""
    assert child.stdout is not None
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_forward, args=(child.stdout, lines), name="compiler-output", daemon=True)
    reader.start()
    latest = ""
    try:
        while True:
            try:
                line = lines.get(timeout=_BEAT_S)
            except queue.Empty:
                line = latest
            if line is None:
                break
            latest = line
            yield latest
    except BaseException:
        child.kill()
        raise
    finally:
        reader.join()  # before anybody closes what it reads
    child.wait()


def _forward(source: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in source:
        lines.put(line.strip())
    lines.put(None)


def _module_of(function: Any, name: str, arguments: int) -> Any:
    """`function` as an LLVM module that exports it under `name` with C calling convention."""
    import llvmlite.binding as llvm
    from numba import cfunc, types

    names = ", ".join(f"a{i}" for i in range(arguments))
    scope: dict[str, Any] = {"function": function}
    exec(f"def entry({names}):\n    function({names})", scope)  # noqa: S102 - cfunc takes no varargs
    compiled: Any = cfunc(types.void(*[types.int64] * arguments), error_model="numpy")(scope["entry"])
    module = llvm.parse_assembly(compiled._library.get_llvm_str())  # noqa: SLF001 - the linked module has no public name
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != compiled.native_name:
            value.linkage = llvm.Linkage.internal
    exported = module.get_function(compiled.native_name)
    exported.name, exported.linkage = name, llvm.Linkage.external
    return module


def _report_functions() -> None:
    """Print a line of progress for every function that numba finishes."""
    from numba.core import event

    finished = 0

    class Reporter(event.Listener):
        def on_start(self, event: Any) -> None:
            """Nothing is finished yet."""

        def on_end(self, event: Any) -> None:  # noqa: ARG002 - numba's signature
            nonlocal finished
            finished += 1
            # What follows the functions, optimising them as a whole, takes the last quarter.
            sys.stdout.write(f"{min(finished, 3 * _STEPS // 4)}/{_STEPS} kernels\n")
            sys.stdout.flush()

    event.register("numba:compile", Reporter())  # type: ignore[no-untyped-call]


def _write(tier: str, out: Path, *, dll: bool) -> None:
    import llvmlite.binding as llvm

    from engine.core.kernels.entry import ENTRY_POINTS

    cpu, features = _target(tier)
    merged = None
    _report_functions()
    for name, (function, arguments) in ENTRY_POINTS.items():
        module = _module_of(function, name, arguments)
        if merged is None:
            merged = module
        else:
            merged.link_in(module)
    assert merged is not None
    target = llvm.Target.from_triple(_WINDOWS if dll else llvm.get_process_triple())
    machine = target.create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic", codemodel="small")
    if dll:
        # What numba wrote for this system does as well for Windows: the kernels call no library, and what leaves
        # them are functions of int64.
        merged.triple, merged.data_layout = target.triple, str(machine.target_data)
        for name in ENTRY_POINTS:
            merged.get_function(name).storage_class = llvm.StorageClass.dllexport
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(merged, builder)
    foreign = [f.name for f in merged.functions if f.is_declaration and not f.name.startswith("llvm.")]
    unknown = [name for name in foreign if name not in ("memset", "memcpy", "memmove")]
    if unknown:
        message = f"the kernels for {tier} call {', '.join(unknown)}, which the running engine does not have"
        raise InternalError(message)
    out.write_bytes(machine.emit_object(merged))
    sys.stdout.write(f"{_STEPS}/{_STEPS} done\n")


def link(code: Path, out: Path, system: str = SYSTEM) -> None:
    """Make a shared library of object code, with this system's `ld` where it can, else with the package `ziglang`.

    Raises:
        ResourceError: there is no linker
        InternalError: it failed; its last words are in the message
    """
    if system == "linux" and shutil.which("ld"):
        command = ["ld", "-shared", "-o", str(out), str(code)]
    elif importlib.util.find_spec("ziglang") is not None:
        command = [sys.executable, "-m", "ziglang", "cc", "-shared", "-nostdlib", "-Wl,-s", "-o", str(out), str(code)]
        if system == "windows":
            # There is nothing to do when it is loaded, so it needs no C library.
            command += ["-target", "x86_64-windows-gnu", "-Wl,--no-entry"]
    else:
        message = f"nothing here links kernels for {system}; install the package ziglang (pip install ziglang)"
        raise ResourceError(message)
    done = subprocess.run(command, capture_output=True, check=False, text=True, errors="replace")  # noqa: S603 - ours
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        message = f"{code} could not be linked for {system} (exit code {done.returncode}): {last[0]}"
        raise InternalError(message)


def build_libraries(folder: Path, system: str = SYSTEM) -> list[Path]:
    """Write the shared libraries of all tiers that `load_kernels` takes from a packaged program.

    Raises:
        InternalError: compiling or linking failed; says why
        ResourceError: there is no linker
    """
    folder.mkdir(parents=True, exist_ok=True)

    def made(tier: str) -> Path:
        out, key = folder / library_name(tier, system), source_key(tier, system)
        with tempfile.TemporaryDirectory(prefix="linking-", dir=folder) as place:
            code, library = Path(place, "kernels.o"), Path(place, out.name)
            for _ in compile_tier(tier, code, dll=system == "windows"):
                pass
            link(code, library, system)
            library.write_bytes(seal(library.read_bytes(), key))
            library.replace(out)
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(made, TARGETS if _is_x86() else ("generic",)))


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.core.build", description="Compile the kernels.")
    parser.add_argument("tier", nargs="?", choices=TARGETS, help="one instruction tier")
    parser.add_argument("out", nargs="?", type=Path, help="the object file to write for it")
    parser.add_argument("--dll", action="store_true", help="make it for a DLL of Windows")
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="write the shared libraries of all tiers there")
    parser.add_argument("--system", choices=sorted({SYSTEM, "windows"}), default=SYSTEM, help="default: this one")
    given = parser.parse_args()
    if given.all is None and given.out is not None:
        _write(given.tier, given.out, dll=given.dll)
    elif given.all is not None and given.tier is None:
        try:
            written = build_libraries(given.all, given.system)
        except InglenookError as error:
            sys.exit(str(error))
        sys.stdout.writelines(f"{path} {path.stat().st_size}\n" for path in written)
    else:
        parser.error("either TIER and OUT, or --all FOLDER")


if __name__ == "__main__":
    _main()
