"""Compiling in a child process: it can be stopped at any moment, and says why it failed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from engine.core import build
from engine.errors import InternalError


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


def test_the_latest_line_is_repeated_until_the_next() -> None:
    code = "import time\nfor line in ('0/1 a', '1/1 b'):\n    print(line, flush=True)\n    time.sleep(0.35)\n"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        lines = list(build._repeated(child))
    assert [*dict.fromkeys(line for line in lines if line)] == ["0/1 a", "1/1 b"]
    assert 2 <= lines.count("0/1 a") <= 6
    assert child.returncode == 0


def test_compiling_can_be_stopped_at_once(tmp_path: Path) -> None:
    steps = build.compile_tier("generic", tmp_path / "kernels.o")
    next(steps)
    assert len(children()) == 1
    begin_s = time.monotonic()
    steps.close()  # type: ignore[attr-defined]
    assert time.monotonic() - begin_s < 0.5
    assert not children()
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_fails_gives_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_target", lambda _tier: ("x86-64", ""))
    with pytest.raises(InternalError, match=r"kernels for abacus could not be compiled \(exit code 1\): \w+"):
        list(build.compile_tier("abacus", tmp_path / "kernels.o"))
