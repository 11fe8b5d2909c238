"""Inglenook never opens a socket on its own: proved with Python's audit events, in processes of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import factory

ROOT = Path(__file__).resolve().parent.parent

# Runs main.py with the arguments that follow; any socket event ends the process at once.
WATCHED = """
import os, runpy, sys
def refuse(event, arguments):
    if event.startswith("socket."):
        os.write(2, f"SOCKET: {event} {arguments}\\n".encode())
        os._exit(77)
sys.addaudithook(refuse)
sys.argv = ["main.py", *sys.argv[1:]]
"""
PROGRAM = WATCHED + "runpy.run_path('main.py', run_name='__main__')"
# The window stays open until a second after its engine arrived.
WINDOW = (
    WATCHED
    + """
from PySide6.QtCore import QTimer
from gui import app
application = app.create_application([])
def look():
    if "engine.api" in sys.modules:
        watch.stop()
        QTimer.singleShot(1000, application.closeAllWindows)
watch = QTimer()
watch.timeout.connect(look)
watch.start(50)
sys.exit(app.main([]))
"""
)


def watched(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=110,
    )


def test_the_watch_itself_notices_sockets() -> None:
    result = watched(WATCHED + "import socket; socket.socket()")
    assert result.returncode == 77
    assert "SOCKET: socket.__new__" in result.stderr


def test_tests_cannot_reach_the_network() -> None:
    with socket.socket() as client, pytest.raises(AssertionError, match="tried to reach"):
        client.connect(("192.0.2.1", 80))


@pytest.mark.usefixtures("compiled_kernels")
def test_command_line_opens_no_socket(tmp_path: Path) -> None:
    folder = factory.make(tmp_path / "toy")
    file = tmp_path / "toy.nook"
    for arguments in (
        ["convert", str(folder), "-o", str(file)],
        ["inspect", str(file)],
        ["verify", str(file)],
        ["run", str(file), "hello", "--max-tokens", "4", "--threads", "1"],
    ):
        result = watched(PROGRAM, *arguments)
        assert result.returncode == 0, result.stderr


def test_window_opens_no_socket(tmp_path: Path) -> None:
    result = watched(WINDOW, XDG_DATA_HOME=str(tmp_path), QT_QPA_PLATFORM="offscreen")
    assert result.returncode == 0, result.stderr
