"""Inglenook's two faces: without arguments the window, with arguments the command line."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> int:
    """Start the face that the arguments ask for; returns the exit code."""
    try:
        if len(sys.argv) > 1:
            from engine.cli import main as command_line

            return command_line()
        return _window()
    except KeyboardInterrupt:  # while the above is imported; later the faces see to it
        return 130


def _window() -> int:
    """The window, or one sentence about what it lacks: Qt itself would abort the process."""
    if sys.platform == "linux" and not any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"))):
        return _refuse("there is no screen here; `inglenook --help` lists what works in a terminal")
    try:
        from gui.app import main as window
    except ImportError as error:
        return _refuse(f"the window cannot start ({error}); `python3 installer/setup.py` installs what it needs")
    return window()


def _refuse(sentence: str) -> int:
    sys.stderr.write(f"inglenook: {sentence}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
