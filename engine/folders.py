"""Where Inglenook keeps its files; knows no file format.

Everything lies where the operating system expects it, or under `data/` beside
the program when a file named `portable` lies there (a USB stick, a shared PC).
"""

from __future__ import annotations

import sys
from pathlib import Path

from platformdirs import PlatformDirs

__all__ = [
    "cache_folder",
    "choose_library",
    "data_folder",
    "kernels_folder",
    "library_folder",
    "log_folder",
    "policy_file",
    "program_folder",
    "starter_folder",
]

_DIRS = PlatformDirs("Inglenook", appauthor=False, roaming=False)


def program_folder() -> Path:
    """The folder that holds the program: `main.py` from source, the executable when packaged."""
    if getattr(sys, "frozen", False):
        return Path(sys.executable).resolve().parent
    return Path(__file__).resolve().parent.parent


def data_folder() -> Path:
    """Conversations and settings. Created when missing."""
    return _made("", _DIRS.user_data_path)


def cache_folder() -> Path:
    """What can be made again: compiled kernels, snapshots. Created when missing, if it can be."""
    return _made_if_possible("cache", _DIRS.user_cache_path)


def kernels_folder() -> Path:
    """The compiled kernels that a packaged program brings along; from source it is mostly not there."""
    return program_folder() / "kernels"


def starter_folder() -> Path:
    """The converted starter model that a packaged program brings along; from source it is mostly not there."""
    return program_folder() / "models"


def log_folder() -> Path:
    """Daily logs. Created when missing."""
    return _made("logs", _DIRS.user_log_path)


def policy_file() -> Path:
    """What an administrator decides for everybody on this computer; mostly it is not there."""
    program = program_folder()
    return program / "policy.json" if (program / "portable").is_file() else _DIRS.site_config_path / "policy.json"


def library_folder() -> Path:
    """Converted models: where `choose_library` said, as long as that can be reached.

    Created when missing, if it can be: without a home there are no models in it, and the starter is used all the same.
    """
    try:
        chosen = Path(_choice().read_text("utf-8").strip())
        if chosen.is_absolute() and chosen.is_dir():
            return chosen
    except (OSError, ValueError):  # nothing was chosen, or what is there is no path
        pass
    return _made_if_possible("models", _DIRS.user_data_path / "models")


def choose_library(folder: Path) -> None:
    """Keep converted models in `folder` from now on; moving them there is the caller's."""
    _choice().write_text(str(folder.resolve()), "utf-8")


def _choice() -> Path:
    return data_folder() / "library.txt"


def _made(name: str, usual: Path) -> Path:
    folder = _folder(name, usual)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _made_if_possible(name: str, usual: Path) -> Path:
    """The folder, there or not: whoever writes into one that is not there says so, or does without."""
    try:
        return _made(name, usual)
    except OSError:
        return _folder(name, usual)


def _folder(name: str, usual: Path) -> Path:
    program = program_folder()
    return program / "data" / name if (program / "portable").is_file() else usual
