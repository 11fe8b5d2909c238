"""Timers in one line."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, Qt, QTimer

__all__ = ["timer"]


def timer(parent: QObject, interval_ms: int, do: Callable[[], object], *, once: bool = False) -> QTimer:
    """A timer that is not started yet; exact to the millisecond below 100 ms."""
    made = QTimer(parent)
    made.setInterval(interval_ms)
    made.setSingleShot(once)
    if interval_ms < 100:
        made.setTimerType(Qt.TimerType.PreciseTimer)
    made.timeout.connect(do)
    return made
