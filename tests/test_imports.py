"""The architecture as a table that fails: who may import whom, and what loads what."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import factory

ROOT = Path(__file__).resolve().parent.parent
OURS = ("engine", "gui", "main")


def _table(heading: str) -> dict[str, set[str]]:
    """The two-column table under a heading or sentence of ARCHITECTURE.md: first cell -> names in the second."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text[text.index(heading) :]
    rows = re.search(r"\|---\|---\|\n((?:\|.*\|\n)+)", section)
    assert rows is not None
    names = [[re.findall(r"`([\w.]+)`", cell) for cell in row.strip("|\n").split("|")] for row in rows[1].splitlines()]
    return {first[0]: set(second) for first, second in names}


MAY_IMPORT = _table("## Who may import whom")
CORNERS = _table("Libraries that stay in their corner")


def _sources() -> dict[str, Path]:
    """Module name -> file, of everything that ships."""
    files = [ROOT / "main.py", *(ROOT / "engine").rglob("*.py"), *(ROOT / "gui").rglob("*.py")]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


SOURCES = _sources()
MODULES = pytest.mark.parametrize("module", sorted(SOURCES))


def _tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def _imports(module: str) -> Iterator[str]:
    """What a module imports, wherever in it, as full module names."""
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in SOURCES:
                    yield inner
                elif (node.module, alias.name) != ("engine", "__version__"):  # a plain string, free to all
                    yield node.module


def _within(module: str, part: str) -> bool:
    return module == part or module.startswith(f"{part}.")


def _part(module: str) -> str:
    """The most specific row of the table that a module belongs to."""
    parts = [part for part in MAY_IMPORT if _within(module, part)]
    assert parts, f"{module} is missing from the table in ARCHITECTURE.md"
    part = max(parts, key=len)
    assert part != "engine" or module == "engine", f"{module} is missing from the table in ARCHITECTURE.md"
    return part


@MODULES
def test_imports_run_downwards_only(module: str) -> None:
    part = _part(module)
    for imported in _imports(module):
        if imported.split(".")[0] in OURS:
            target = _part(imported)
            allowed = [part, *MAY_IMPORT[part]] if part != "engine" else MAY_IMPORT[part]
            assert any(_within(target, name) for name in allowed), f"{module} must not import {imported}"


@MODULES
def test_libraries_stay_in_their_corner(module: str) -> None:
    for imported in _imports(module):
        corner = CORNERS.get(imported.split(".")[0])
        assert corner is None or any(_within(module, name) for name in corner), f"{module} must not import {imported}"


def test_the_table_names_only_what_exists() -> None:
    named = {*MAY_IMPORT, *(name for row in MAY_IMPORT.values() for name in row)}
    named |= {name for row in CORNERS.values() for name in row}
    assert named <= set(SOURCES)


@MODULES
def test_all_is_complete(module: str) -> None:
    if module.startswith("engine.core.kernels"):
        pytest.skip("kernels are reached by address")
    tree = _tree(module)
    defined: set[str] = set()
    public: set[str] = set()
    exported: list[str] | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            defined |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    for node in tree.body:
        match node:
            case (
                ast.FunctionDef(name=name, decorator_list=decorators)
                | ast.AsyncFunctionDef(name=name, decorator_list=decorators)
                | ast.ClassDef(name=name, decorator_list=decorators)
            ):
                defined.add(name)
                registered = (
                    isinstance(node, ast.FunctionDef) and decorators
                )  # a command or a family: found by its registry
                if not name.startswith("_") and not registered:
                    public.add(name)
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                exported = ast.literal_eval(value)
            case ast.Assign(targets=targets):
                defined |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                defined.add(name)
    if not public and exported is None:
        return
    assert exported is not None, f"{module} has no __all__"
    assert len(exported) == len(set(exported))
    assert public <= set(exported), f"{module}.__all__ lacks {sorted(public - set(exported))}"
    assert set(exported) <= defined, f"{module}.__all__ names {sorted(set(exported) - defined)}, which is not there"


MACHINERY = ["numpy", "numba", "llvmlite", "tokenizers", "sentencepiece", "jinja2", "gguf", "torch", "transformers"]
MACHINERY += ["engine.core", "engine.models", "engine.text", "engine.runtime.loop"]
MACHINERY += ["fastapi", "uvicorn", "llguidance", "asyncio"]


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("main", ["engine", "gui"]),
        ("engine.api", [*MACHINERY, "PySide6", "cyclopts", "rich"]),
        ("engine.cli", [*MACHINERY, "PySide6"]),
        ("gui.app", [*MACHINERY, "cyclopts", "rich"]),  # the window is painted before the engine is loaded
    ],
)
def test_importing_loads_only_what_is_needed(module: str, unwanted: list[str]) -> None:
    code = f"import sys, {module}; print(*(name for name in {unwanted!r} if name in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=False, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_the_running_engine_never_imports_numba(tmp_path: Path, compiled_kernels: None) -> None:
    code = (
        "import sys, engine\n"
        "with engine.AutoModel.from_pretrained(sys.argv[1], max_seq_len=64) as model:\n"
        "    model('hello', max_new_tokens=2)\n"
        "print([name for name in ('numba', 'torch', 'transformers') if name in sys.modules])"
    )
    folder = factory.make(tmp_path / "toy")
    result = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=ROOT, check=False, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[]\n"


def test_nothing_points_at_the_machine_it_was_written_on() -> None:
    absolute = re.compile(r"(?<![\w./])/(?:home|root|work|Users|tmp)/[\w.]+|[A-Z]:\\+Users\\+\w+")
    kept = {".ci", ".github", ".gitignore"}
    made = {ROOT / "build", ROOT / "dist"}  # by packaging
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if (name[0] != "." or name in kept)
            and not Path(folder, name, "pyvenv.cfg").exists()
            and Path(folder, name) not in made
        ]
        for file in (Path(folder, name) for name in names if name[0] != "." or name in kept):
            if file.suffix in {".py", ".toml", ".md", ".json", ".txt", ".qss", ".svg", ""}:
                found = absolute.search(file.read_text(encoding="utf-8"))
                assert found is None, f"{file.relative_to(ROOT)} mentions {found[0] if found else ''}"
