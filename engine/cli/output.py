"""Writes for people and programs: results to standard output, everything else to standard error.

Text comes from models and strangers' files: it is written as UTF-8 on any
locale, and control characters never reach a terminal.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from engine.api import Progress

__all__ = ["ProgressView", "count_text", "follow", "note", "size_text", "table", "write", "write_json"]

Value = TypeVar("Value")

_STAGES = {
    "compile": "Preparing for this processor",
    "load": "Loading",
    "queue": "Waiting",
    "prefill": "Reading the prompt",
    "decode": "Answering",
    "convert": "Converting",
    "verify": "Verifying",
    "measure": "Measuring",
    "batch": "Answering",
    "copy": "Copying",
}
_USUALLY_BRIEF = {"load", "queue", "prefill", "decode"}
_BRIEF_S = 0.5

# Escape sequences could move the cursor, set the clipboard or retitle the window.
_CONTROLS: dict[int, str | None] = {
    code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
} | {ord("\r"): None}


def write(text: str) -> None:
    """Results, as they come."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_json(values: dict[str, Any]) -> None:
    """One JSON object on one line. Numbers that JSON cannot hold become null."""
    text = json.dumps(_plain(values), ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, from an undecodable file name or a model
        text = json.dumps(_plain(values), allow_nan=False)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def note(sentence: str) -> None:
    """A sentence beside the result."""
    sys.stderr.write((sentence.translate(_CONTROLS) if sys.stderr.isatty() else sentence) + "\n")
    sys.stderr.flush()


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned lines; Chinese characters count as the two columns they fill."""
    columns = max(map(len, rows), default=0)
    widths = [max(cell_len(row[column]) for row in rows if column < len(row)) for column in range(columns)]
    lines = (
        "  ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=False))
        for row in rows
    )
    return "".join(line.rstrip() + "\n" for line in lines)


def size_text(size_bytes: float) -> str:
    """Bytes as a person reads them, in powers of ten as disks are sold: `1.23 GB`."""
    return _scaled(size_bytes, ("bytes", "kB", "MB", "GB", "TB"))


def count_text(count: float) -> str:
    """A large count as a person reads it: `1.54 billion`."""
    return _scaled(count, ("", "thousand", "million", "billion", "trillion"))


def follow(work: Iterator[Progress | Value]) -> Value | None:
    """Run long work to its end while showing how far it is; returns the last value that is not progress.

    On the way out, also when a person interrupts, the work is closed: it
    removes what is half made.
    """
    result: Value | None = None
    try:
        with ProgressView() as view:
            for step in work:
                if isinstance(step, Progress):
                    view.show(step)
                else:
                    result = step
    finally:
        if isinstance(work, Generator):
            work.close()
    return result


class ProgressView:
    """Shows progress on standard error: a bar on a terminal, now and then a line elsewhere."""

    def __init__(self) -> None:
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._stage: str | None = None
        self._stage_began_s = 0.0
        self._line_at_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def show(self, progress: Progress) -> None:
        """Show `progress` in place of what was shown before."""
        now_s = time.monotonic()
        if progress.stage != self._stage:
            self._stage, self._stage_began_s, self._line_at_s = progress.stage, now_s, 0.0
            if self._bars is not None and self._task is not None:
                self._bars.remove_task(self._task)
            self._task = None
        if progress.stage in _USUALLY_BRIEF and now_s - self._stage_began_s < _BRIEF_S:
            return
        if sys.stderr.isatty():
            self._bar(progress)
        else:
            self._line(progress, now_s)

    def clear(self) -> None:
        """Take the bar off the terminal, so that results can be written."""
        if self._bars is not None:
            self._bars.stop()
        self._bars = self._task = self._stage = None

    def _bar(self, progress: Progress) -> None:
        if self._bars is None:
            self._bars = Bars(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=Console(file=sys.stderr),
                transient=True,
            )
            self._bars.start()
        total = progress.total or None
        note_text = progress.note.translate(_CONTROLS)
        if self._task is None:
            self._task = self._bars.add_task(_STAGES[progress.stage], total=total, note=note_text)
        self._bars.update(self._task, completed=progress.done, total=total, note=note_text)

    def _line(self, progress: Progress, now_s: float) -> None:
        """The first line at once, then one per five seconds."""
        if self._line_at_s and now_s - self._line_at_s < 5:
            return
        self._line_at_s = now_s
        percent = f" {100 * progress.done // progress.total} %" if progress.total else ""
        note(f"{_STAGES[progress.stage]}{percent}{f' ({progress.note})' if progress.note else ''}")


def _scaled(value: float, units: Sequence[str]) -> str:
    rank = 0
    while value >= 999.5 and rank < len(units) - 1:
        value, rank = value / 1000, rank + 1
    digits = f"{value:.0f}" if rank == 0 or value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    return f"{digits} {units[rank]}".rstrip()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
