"""Object code of the kernels: found when it is right, made again when it is anything else, never by the running engine.

No test here compiles: `compiler` stands in for the compiler and hands out a good object.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engine import folders
from engine.core import build, library, objects
from engine.core.cpu import machine
from engine.core.library import Kernels, load_kernels
from engine.errors import InternalError, ResourceError
from engine.folders import cache_folder
from tests import factory
from tests.goldens import tiny_folder
from tests.workbench import Weights, Workbench, product, same_bits

TIER = machine().tiers[-1]


@pytest.fixture(scope="module")
def good(kernels):
    """The object code of this processor's best tier, without its seal."""
    kernels()
    return object_code(TIER)


def object_code(tier):
    """What was compiled for a tier, without its seal."""
    code = library._kept(object_file(cache_folder(), tier))
    assert code is not None
    return code


class Compiler:
    """In the place of `build.compile_tier`."""

    def __init__(self, code):
        self.code = code
        self.calls = []

    def __call__(self, tier, out, *, dll=False):
        self.calls.append(tier)
        yield "0/2 first"
        yield "1/2 second"
        if isinstance(self.code, Exception):
            raise self.code
        out.write_bytes(self.code)
        yield "2/2 done"


@pytest.fixture
def compiler(good, monkeypatch):
    stand_in = Compiler(good)
    monkeypatch.setattr(build, "compile_tier", stand_in)
    return stand_in


def object_file(cache, tier=TIER):
    return cache / "kernels" / f"{tier}-{objects.compiler_key(tier)}.o"


def load(cache):
    *lines, kernels = load_kernels(TIER, cache)
    assert isinstance(kernels, Kernels)
    assert all(isinstance(line, str) for line in lines)
    return lines, kernels


def computes(kernels):
    """Whether a product comes out right."""
    bench = Workbench(kernels)
    try:
        weights = Weights.packed(np.eye(16, dtype=np.float32), "f32", 0, kernels)
        x = np.arange(32, dtype=np.float32).reshape(2, 16)
        return same_bits(product(bench, weights, x, members=2), x)
    finally:
        bench.close()


# ---------------------------------------------------------------- found and made (case R14)


def test_compiled_once(compiler, tmp_path):
    lines, kernels = load(tmp_path / "cache")
    assert lines == ["0/2 first", "1/2 second", "2/2 done"]
    assert kernels.tier == TIER
    assert computes(kernels)
    lines, kernels = load(tmp_path / "cache")
    assert lines == []
    assert computes(kernels)
    assert compiler.calls == [TIER]
    assert [path.name for path in (tmp_path / "cache" / "kernels").iterdir()] == [object_file(tmp_path / "cache").name]


def damage_flip(data):
    place = len(data) // 2
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


DAMAGE = {
    "one bit": damage_flip,
    "last byte": lambda data: data[:-1] + bytes([data[-1] ^ 0x80]),
    "truncated": lambda data: data[: len(data) // 3],
    "seal lost": lambda data: data[:-32],
    "only a seal": lambda data: data[-32:],
    "another key": lambda data: objects.seal(data[:-52], "0" * 20),
    "nothing, sealed": lambda data: objects.seal(b"", data[-52:-32].decode()),
    "empty": lambda _data: b"",
    "longer": lambda data: data + b"\0",
    "zeros": lambda data: bytes(len(data)),
    "foreign": lambda _data: b"\x7fELF" + b"not ours" * 1000,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_object_is_made_again(compiler, tmp_path, kind):
    load(tmp_path)
    path = object_file(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(DAMAGE[kind](whole))
    lines, kernels = load(tmp_path)
    assert len(lines) == 3
    assert computes(kernels)
    assert path.read_bytes() == whole
    assert compiler.calls == [TIER, TIER]


def test_an_object_of_another_name_is_not_looked_at(compiler, tmp_path):
    """Older sources, or another tier: its seal is right, and still it is not ours."""
    load(tmp_path)
    path = object_file(tmp_path)
    path.rename(path.with_name(f"{TIER}-{'0' * 20}.o"))
    lines, _ = load(tmp_path)
    assert len(lines) == 3


def test_old_objects_go_when_a_new_one_is_written(compiler, tmp_path):
    """Of this tier, but the latest two, and what killed processes left; another tier's are not looked at."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    old = [folder / f"{TIER}-{number:020d}.o" for number in range(5)]
    other = folder / f"other{TIER}-{0:020d}.o"
    now = time.time()
    for age_s, path in enumerate([*old, other], start=100):
        path.write_bytes(b"old")
        os.utime(path, (now - age_s, now - age_s))
    fresh, abandoned = folder / "compiling-now", folder / "compiling-then"
    for place in (fresh, abandoned):
        place.mkdir()
        (place / "kernels.o").write_bytes(b"half")
    os.utime(abandoned, (now - 100_000, now - 100_000))
    load(tmp_path)
    assert set(folder.iterdir()) == {object_file(tmp_path), *old[:2], other, fresh}
    old[0].unlink()
    load(tmp_path)
    assert set(folder.iterdir()) == {object_file(tmp_path), old[1], other, fresh}
    assert compiler.calls == [TIER]


def test_a_compilation_that_fails_leaves_nothing(compiler, tmp_path):
    compiler.code = InternalError("the kernels could not be compiled: no room")
    with pytest.raises(InternalError, match="no room"):
        load(tmp_path)
    assert list((tmp_path / "kernels").iterdir()) == []


def test_a_compilation_that_is_stopped_leaves_nothing(compiler, tmp_path):
    work = load_kernels(TIER, tmp_path)
    assert next(work) == "0/2 first"
    work.close()
    assert list((tmp_path / "kernels").iterdir()) == []
    assert computes(load(tmp_path)[1])


def test_two_at_once(compiler, tmp_path):
    """Two processes that need the same object make it beside each other; each gets a good one."""
    first, second = load_kernels(TIER, tmp_path), load_kernels(TIER, tmp_path)
    assert next(first) == next(second) == "0/2 first"
    assert all(computes(list(work)[-1]) for work in (first, second))
    assert compiler.calls == [TIER, TIER]
    assert list((tmp_path / "kernels").iterdir()) == [object_file(tmp_path)]


def test_without_a_cache_the_kernels_are_made_in_a_temporary_folder(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    blocked = tmp_path / "cache"
    blocked.write_text("a file where a folder should be", encoding="utf-8")
    lines, kernels = load(blocked)
    assert len(lines) == 3
    assert computes(kernels)
    assert str(blocked / "kernels") in kernels.notice
    assert list((tmp_path / "temporary").iterdir()) == []
    assert load(tmp_path / "other")[1].notice == ""


def test_a_cache_that_cannot_be_written_is_named(compiler, tmp_path, monkeypatch):
    blocked = tmp_path / "cache"
    blocked.write_text("a file where a folder should be", encoding="utf-8")
    monkeypatch.setattr(tempfile, "tempdir", str(blocked))
    with pytest.raises(ResourceError, match=r"cache/kernels.* writ"):
        load(blocked)


def test_a_cache_folder_that_cannot_be_made_is_named_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(folders, "program_folder", lambda: tmp_path / "nowhere")
    monkeypatch.setattr(folders, "_DIRS", SimpleNamespace(user_cache_path=tmp_path / "file" / "cache"))
    assert cache_folder() == tmp_path / "file" / "cache"


# ---------------------------------------------------------------- what decides the object


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A copy of what the key is made of, looked at in the place of the real files."""
    root = Path(library.__file__).parent
    copy = tmp_path / "core"
    shutil.copytree(root / "kernels", copy / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("build", "control", "operations"):
        shutil.copy(root / f"{name}.py", copy)
    monkeypatch.setattr(objects, "__file__", str(copy / "objects.py"))
    return copy


def test_an_edited_source_changes_the_key(sources):
    key = objects.compiler_key(TIER)
    seen = {key}
    files = sorted(sources.rglob("*.py"))
    assert len(files) > 10
    for path in files:
        before = path.read_bytes()
        path.write_bytes(before + b"\n")
        changed = objects.compiler_key(TIER)
        assert changed not in seen, path.name
        seen.add(changed)
        path.write_bytes(before)
        assert objects.compiler_key(TIER) == key
    (sources / "kernels" / "new.py").write_bytes(b"")
    assert objects.compiler_key(TIER) not in seen


def test_the_key_is_that_of_the_sources_alone(sources):
    """Not of their place or age: an installed program finds what was compiled before an update of the clock."""
    key = objects.compiler_key(TIER)
    os.utime(sources / "build.py", (0, 0))
    assert objects.compiler_key(TIER) == key


def test_what_the_kernels_import_is_in_the_key():
    """A module that kernels are made of, but that the key leaves out, would let an old object pass for a new one."""
    core = Path(library.__file__).parent
    in_key = [*(core / "kernels").glob("*.py"), core / "control.py", core / "operations.py"]
    names = {"engine.core." + ".".join(path.relative_to(core).with_suffix("").parts) for path in in_key}
    packages = {"engine.core.kernels"}
    for path in in_key:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not [alias.name for alias in node.names if alias.name.startswith("engine")], path.name
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("engine"):
                wanted = {f"{node.module}.{alias.name}" for alias in node.names}
                assert node.module in names - packages or wanted <= names, (path.name, node.module)


@pytest.mark.parametrize("package", ["numba", "llvmlite"])
def test_another_compiler_changes_the_key(monkeypatch, package):
    key, version = objects.compiler_key(TIER), importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version(name) + ".1" * (name == package))
    assert objects.compiler_key(TIER) != key


def test_every_tier_has_its_key():
    assert len({objects.compiler_key(tier) for tier in build.TARGETS}) == len(build.TARGETS)


# ---------------------------------------------------------------- the compiler's process


@pytest.fixture
def child(monkeypatch, tmp_path):
    """`child(code)`: a Python program in the place of the compiler's process; its argument is the file to write."""

    def prepare(code):
        program = tmp_path / "child.py"
        program.write_text(code, encoding="utf-8")
        starter = tmp_path / "python"
        starter.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{program}" "$4"\n', encoding="utf-8")
        starter.chmod(0o755)
        monkeypatch.setattr(build.sys, "executable", str(starter))

    if sys.platform == "win32":
        pytest.skip("the stand-in is a shell script")
    return prepare


def test_lines_of_the_compiler_are_progress(child, tmp_path):
    child("import sys, pathlib; print('1/2 half'); print('2/2 done'); pathlib.Path(sys.argv[1]).write_bytes(b'code')")
    lines = list(build.compile_tier(TIER, tmp_path / "out.o"))
    assert [line for line, before in zip(lines, ["", *lines], strict=False) if line not in ("", before)] == [
        "1/2 half",
        "2/2 done",
    ]
    assert (tmp_path / "out.o").read_bytes() == b"code"


def test_a_compiler_that_fails_says_why(child, tmp_path):
    child("import sys; sys.stderr.write('first\\nMemoryError: no room\\n'); sys.exit(3)")
    with pytest.raises(InternalError, match=rf"{TIER} could not be compiled \(exit code 3\): MemoryError: no room"):
        list(build.compile_tier(TIER, tmp_path / "out.o"))


def test_a_talkative_compiler_does_not_hang(child, tmp_path):
    """A megabyte of warnings fills every pipe; who waits for the other's lines must not wait for ever."""
    child("import sys; sys.stderr.write('warning ' * 150_000); print('1/1 done')")
    assert list(build.compile_tier(TIER, tmp_path / "out.o"))[-1] == "1/1 done"


def test_stopping_ends_the_compiler(child, tmp_path):
    child(
        "import os, sys, time, pathlib\n"
        "pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\n"
        "print('0/1 begun', flush=True)\n"
        "time.sleep(300)\n"
    )
    work = build.compile_tier(TIER, tmp_path / "out.o")
    while next(work) != "0/1 begun":
        pass
    process = int((tmp_path / "out.o").read_text(encoding="utf-8"))
    os.kill(process, 0)  # it lives
    began = time.monotonic()
    work.close()
    assert time.monotonic() - began < 30
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "compiler-output"]


# ---------------------------------------------------------------- the running engine


@pytest.fixture
def shipped(kernels, monkeypatch, tmp_path):
    """`shipped(tiers)`: a folder of libraries as `build_libraries` makes them, of objects compiled before."""
    if sys.platform != "linux" or not (shutil.which("ld") or importlib.util.find_spec("ziglang")):
        pytest.skip("there is no linker to make a shared library with")

    def compiled(tier, out, *, dll):
        assert not dll
        out.write_bytes(object_code(tier))
        yield "1/1 done"

    def made(tiers=(TIER,)):
        for tier in tiers:
            kernels(tier)
        with monkeypatch.context() as patch:
            patch.setattr(build, "compile_tier", compiled)
            patch.setattr(build, "TARGETS", tiers)
            folder = tmp_path / "kernels"
            assert build.build_libraries(folder) == [folder / f"kernels-{tier}.so" for tier in tiers]
        return folder

    return made


def test_shipped_libraries_are_used_as_they_are(shipped, tmp_path, compiler):
    """The packaged program has no compiler: shared libraries, made when it was packaged."""
    folder = shipped(machine().tiers)
    assert len(list(folder.iterdir())) == len(machine().tiers)
    for tier in machine().tiers:
        *lines, kernels = load_kernels(tier, tmp_path / "cache", folder)
        assert lines == []
        assert kernels.tier == tier
        assert computes(kernels)
    assert compiler.calls == []
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("kind", [*DAMAGE, "missing"])
def test_a_damaged_library_is_not_loaded(shipped, tmp_path, compiler, monkeypatch, kind):
    """From source, the kernels are compiled instead; a packaged program says what is wrong with it."""
    folder = shipped()
    path = folder / f"kernels-{TIER}.so"
    if kind == "missing":
        path.unlink()
    else:
        path.write_bytes(DAMAGE[kind](path.read_bytes()))
    assert computes(list(load_kernels(TIER, tmp_path / "cache", folder))[-1])
    assert compiler.calls == [TIER]
    monkeypatch.setattr(library, "has_sources", lambda: False)
    if kind == "another key":  # there is nothing to compare it with
        assert computes(list(load_kernels(TIER, tmp_path / "empty", folder))[-1])
    else:
        with pytest.raises(ResourceError, match=rf"kernels-{TIER}\.so (is|cannot).* install"):
            list(load_kernels(TIER, tmp_path / "empty", folder))
    assert compiler.calls == [TIER]


def test_a_library_of_other_sources_is_not_loaded(shipped, tmp_path, compiler, sources):
    folder = shipped()
    (sources / "kernels" / "rows.py").write_bytes((sources / "kernels" / "rows.py").read_bytes() + b"\n")
    *lines, kernels = load_kernels(TIER, tmp_path / "cache", folder)
    assert len(lines) == 3
    assert computes(kernels)
    shutil.rmtree(sources / "kernels")
    assert not objects.has_sources()
    assert list(load_kernels(TIER, tmp_path / "empty", folder))[:-1] == []
    assert compiler.calls == [TIER]


def test_without_a_compiler_nothing_can_be_compiled(tmp_path, monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ResourceError, match="takes the package numba; install it"):
        list(load_kernels(TIER, tmp_path, tmp_path))


PACKAGED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numba", "llvmlite"):
            raise ModuleNotFoundError(f"{name} is not packaged", name=name)

sys.meta_path.insert(0, Blocked())
sys.frozen, sys.executable, folder, tier = True, *sys.argv[1:]
import engine
from engine.settings import EngineSettings

with engine.AutoModel.from_pretrained(folder, max_seq_len=64, settings=EngineSettings(tier=tier)) as model:
    print(model.generate("ab", max_new_tokens=8, temperature=0.0).encode())
    print(model.logits([5, 6, 7]).tobytes().hex())
"""


def test_a_packaged_program_needs_no_compiler(shipped, tmp_path):
    """The whole engine, with neither numba nor llvmlite, on what lies beside the executable: on every tier the same."""
    tiers = machine().tiers
    shipped(tiers)
    folder = tmp_path / "model"
    tiny_folder.write_folder(folder, "llama")
    (folder / "tokenizer.json").write_text(json.dumps(factory.tok_json()), encoding="utf-8")
    environment = dict(os.environ, XDG_CACHE_HOME=str(tmp_path / "empty"))
    program = str(tmp_path / "inglenook")
    root = Path(library.__file__).parents[2]
    said = {
        subprocess.run(
            [sys.executable, "-c", PACKAGED, program, str(folder), tier],
            cwd=root,
            env=environment,
            check=True,
            capture_output=True,
        ).stdout
        for tier in tiers
    }
    assert len(said) == 1
    assert len(said.pop()) > 3 * 1024 * 8
    assert not list((tmp_path / "empty").rglob("*.o"))


# ---------------------------------------------------------------- libraries for Windows


def portable_executable(data):
    """(machine, DLL or not, exported names, imported libraries) of a file of Windows."""

    def number(place, size):
        return int.from_bytes(data[place : place + size], "little")

    def text(place):
        return data[place : data.index(b"\0", place)].decode("ascii")

    header = number(0x3C, 4)
    assert data[:2] == b"MZ"
    assert data[header : header + 4] == b"PE\0\0"
    machine_type, count, optional_size, flags = (number(header + at, 2) for at in (4, 6, 20, 22))
    optional = header + 24
    sections = [optional + optional_size + 40 * index for index in range(count)]

    def place(address):
        for section in sections:
            start, size = number(section + 12, 4), number(section + 16, 4)
            if start <= address < start + size:
                return address - start + number(section + 20, 4)
        raise AssertionError(f"{address:x} lies in no section")

    exports, imports = number(optional + 112, 4), number(optional + 120, 4)
    names = []
    if exports:
        table = place(exports)
        first = place(number(table + 32, 4))
        names = [text(place(number(first + 4 * index, 4))) for index in range(number(table + 24, 4))]
    libraries = []
    row = place(imports) if imports else 0
    while row and number(row + 12, 4):
        libraries.append(text(place(number(row + 12, 4))))
        row += 20
    return machine_type, bool(flags & 0x2000), names, libraries


def test_libraries_for_windows(tmp_path):
    """All tiers: three entry points, and nothing that Windows would have to find elsewhere."""
    pytest.importorskip("ziglang")
    if "INGLENOOK_TEST_WINDOWS" not in os.environ:
        pytest.skip("INGLENOOK_TEST_WINDOWS asks for ten minutes of compiling")
    written = build.build_libraries(tmp_path, "windows")
    assert [path.name for path in written] == [f"kernels-{tier}.dll" for tier in build.TARGETS]
    assert sorted(tmp_path.iterdir()) == sorted(written)
    for path, tier in zip(written, build.TARGETS, strict=True):
        code, key = objects.unseal(path)
        assert key == objects.source_key(tier, "windows") != objects.source_key(tier, "linux")
        assert portable_executable(code) == (0x8664, True, ["enter", "pack", "read"], [])


def test_a_linker_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    for system in ("linux", "windows"):
        with pytest.raises(ResourceError, match=f"links kernels for {system}; install the package ziglang"):
            build.link(tmp_path / "kernels.o", tmp_path / "kernels.so", system)


def test_a_linker_that_fails_says_why(tmp_path):
    if sys.platform != "linux" or shutil.which("ld") is None:
        pytest.skip("there is no ld")
    (tmp_path / "kernels.o").write_bytes(b"no object")
    with pytest.raises(InternalError, match=r"kernels\.o could not be linked for linux \(exit code 1\): ld:"):
        build.link(tmp_path / "kernels.o", tmp_path / "kernels.so", "linux")


def test_where_a_packaged_program_has_its_kernels(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "Inglenook"))
    assert folders.kernels_folder() == tmp_path / "kernels"


# ---------------------------------------------------------------- never the compiler


@pytest.mark.usefixtures("compiled_kernels")
def test_the_running_engine_never_imports_the_compiler(tmp_path):
    """Importing numba costs a second and 100 MB; with the object in the cache nothing needs it."""
    folder = tmp_path / "model"
    tiny_folder.write_folder(folder, "llama")
    (folder / "tokenizer.json").write_text(json.dumps(factory.tok_json()), encoding="utf-8")
    code = (
        "import sys, engine\n"
        f"model = engine.AutoModel.from_pretrained({str(folder)!r}, max_seq_len=64)\n"
        "assert model.logits([5, 6, 7]).shape == (3, 1024)\n"
        "assert model.generate('ab', max_new_tokens=3, temperature=0.0) is not None\n"
        "model.close()\n"
        "print([name for name in ('numba', 'torch', 'transformers') if name in sys.modules])\n"
    )
    root = Path(library.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
