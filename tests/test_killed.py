"""A conversion that is killed, at any time, goes on to the same bytes (F17)."""

import hashlib
import subprocess
import sys

import pytest

from engine.convert.convert import convert
from engine.progress import finish
from engine.settings import Conversion
from tests.factory import cfg, make

# Kills itself, as a power cut would, after so many reports of progress; without a number it ends by itself.
PROGRAM = """
import os, signal, sys
from pathlib import Path
from engine.convert.convert import convert
from engine.settings import Conversion
folder, out, stop = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
for count, _ in enumerate(convert(folder, out, Conversion(), resume=True)):
    if count == stop:
        os.kill(os.getpid(), signal.SIGKILL)
print(count)
"""


def run(folder, out, stop):
    command = [sys.executable, "-c", PROGRAM, str(folder), str(out), str(stop)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signal")
def test_killed_again_and_again_it_ends_with_the_same_bytes(tmp_path):
    folder = make(tmp_path / "m", cfg(num_hidden_layers=3))
    finish(convert(folder, tmp_path / "clean.nook", Conversion()))
    expected = digest(tmp_path / "clean.nook")
    steps = sum(1 for _ in convert(folder, tmp_path / "again.nook", Conversion()))
    assert digest(tmp_path / "again.nook") == expected
    out = tmp_path / "killed.nook"
    killed = 0
    for stop in range(1, steps, max(1, steps // 6)):
        result = run(folder, out, stop)
        if result.returncode == 0:
            break  # what was finished before is not made again, so a later one may end first
        killed += 1
        assert not out.exists()
        assert result.returncode == -9, result.stderr
    assert killed > 2
    if not out.exists():
        assert run(folder, out, -1).returncode == 0
    assert digest(out) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.nook", "clean.nook", "killed.nook", "m"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signal")
def test_killed_once(tmp_path):
    folder = make(tmp_path / "m")
    finish(convert(folder, tmp_path / "clean.nook", Conversion()))
    expected = digest(tmp_path / "clean.nook")
    steps = sum(1 for _ in convert(folder, tmp_path / "again.nook", Conversion()))
    for stop in range(0, steps, max(1, steps // 5)):
        out = tmp_path / f"{stop}.nook"
        assert run(folder, out, stop).returncode == -9
        assert run(folder, out, -1).returncode == 0
        assert digest(out) == expected
