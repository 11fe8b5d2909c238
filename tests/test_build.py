"""Object code of the kernels: found when it is right, made again when it is anything else, never by the running engine.

No test here compiles: `compiler` stands in for the compiler and hands out a good object.
"""

from __future__ import annotations

import ast
import importlib.metadata
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
from engine.core import build, library
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
    code = library._unsealed(object_file(cache_folder()))
    assert code is not None
    return code


class Compiler:
    """In the place of `build.compile_tier`."""

    def __init__(self, code):
        self.code = code
        self.calls = []

    def __call__(self, tier, out):
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
    return cache / "kernels" / f"{tier}-{library._key(tier)}.o"


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


# ---------------------------------------------------------------- found and made


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
    monkeypatch.setattr(library, "__file__", str(copy / "library.py"))
    return copy


def test_an_edited_source_changes_the_key(sources):
    key = library._key(TIER)
    seen = {key}
    files = sorted(sources.rglob("*.py"))
    assert len(files) > 10
    for path in files:
        before = path.read_bytes()
        path.write_bytes(before + b"\n")
        changed = library._key(TIER)
        assert changed not in seen, path.name
        seen.add(changed)
        path.write_bytes(before)
        assert library._key(TIER) == key
    (sources / "kernels" / "new.py").write_bytes(b"")
    assert library._key(TIER) not in seen


def test_the_key_is_that_of_the_sources_alone(sources):
    """Not of their place or age: an installed program finds what was compiled before an update of the clock."""
    key = library._key(TIER)
    os.utime(sources / "build.py", (0, 0))
    assert library._key(TIER) == key


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
    key, version = library._key(TIER), importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version(name) + ".1" * (name == package))
    assert library._key(TIER) != key


def test_every_tier_has_its_key():
    assert len({library._key(tier) for tier in build.TARGETS}) == len(build.TARGETS)


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


def test_a_shipped_library_is_used_as_it_is(good, tmp_path, compiler):
    """The packaged program has no compiler: shared libraries, made when it was packaged."""
    linker = shutil.which("cc") or shutil.which("gcc")
    if linker is None or sys.platform != "linux":
        pytest.skip("there is no linker to make a shared library with")
    (tmp_path / "kernels.o").write_bytes(good)
    made = tmp_path / f"kernels-{TIER}.so"
    subprocess.run([linker, "-shared", "-nostdlib", "-o", str(made), str(tmp_path / "kernels.o")], check=True)
    *lines, kernels = load_kernels(TIER, tmp_path / "cache", shipped=tmp_path)
    assert lines == []
    assert computes(kernels)
    assert compiler.calls == []
    assert not (tmp_path / "cache").exists()


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
