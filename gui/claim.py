"""One window for one data folder: a second start brings the first window forward.

The window holds `window.lock`. A second start leaves `window.request` beside it
and sees the file vanish when the window has read it. Files alone: no port is
opened. A lock whose program crashed is taken over at once; one whose number
now belongs to another program is taken over when the request stays unanswered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from PySide6.QtCore import QLockFile, QObject

from gui.kit.timing import timer

__all__ = ["Claim"]

_LOCK, _REQUEST = "window.lock", "window.request"
_LOOK_MS = 300
_ANSWER_S = 5.0  # a window that is still starting answers later than others


class Claim:
    """The right to be the window of a data folder."""

    def __init__(self, folder: Path) -> None:
        self._lock_path = folder / _LOCK
        self._request = folder / _REQUEST
        self._lock = QLockFile(str(self._lock_path))
        self._lock.setStaleLockTime(0)  # a window may stay open for weeks

    def take(self, answer_s: float = _ANSWER_S) -> bool:
        """True when this program is the window of the folder; False when another was brought forward instead.

        answer_s: how long another window has for its answer, in seconds; afterwards it counts as gone
        """
        if self._free():
            return True
        try:
            self._request.touch()
        except OSError:
            return True  # a folder that cannot be written: the window says so itself
        give_up = time.monotonic() + answer_s
        while time.monotonic() < give_up:
            if not self._request.exists():
                return False
            if self._free():  # it was just being closed
                return True
            time.sleep(0.03)
        with suppress(OSError):
            self._lock_path.unlink()
        self._free()
        return True

    def _free(self) -> bool:
        """Take the lock; False when another program holds it."""
        held = self._lock.tryLock(0)
        if held:
            self._forget_request()
        return held or self._lock.error() != QLockFile.LockError.LockFailedError

    def watch(self, parent: QObject, asked: Callable[[], object]) -> None:
        """Call `asked` whenever another start asks for this window, as long as `parent` lives."""

        def look() -> None:
            if self._request.exists():
                self._forget_request()
                asked()

        timer(parent, _LOOK_MS, look).start()

    def release(self) -> None:
        """Let the next start have the folder."""
        self._lock.unlock()

    def _forget_request(self) -> None:
        with suppress(OSError):
            self._request.unlink(missing_ok=True)
