"""The conversions that wait, run and have ended; one runs at a time. Knows no widget."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from PySide6.QtCore import QObject, Signal

from engine.errors import InglenookError
from engine.settings import Conversion
from gui.bridge import Bridge
from gui.kit.i18n import tr
from gui.kit.words import error_words

if TYPE_CHECKING:
    from engine import api

__all__ = ["Conversions", "Job"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """One conversion. out: the file it makes, once it has begun. sentence: why it failed."""

    number: int
    report: api.ModelReport
    conversion: Conversion
    state: Literal["waiting", "running", "stopping", "stopped", "failed", "done"] = "waiting"
    out: Path | None = None
    progress: api.Progress | None = None
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class _Step:
    """A conversion's thread speaks."""

    number: int
    state: Literal["running", "stopped", "failed", "done"]
    out: Path | None = None
    progress: api.Progress | None = None
    sentence: str = ""


class Conversions(QObject):
    """What becomes of sources that were taken in. `changed` says a job's number; 0 when jobs came or went."""

    changed = Signal(int)

    def __init__(self, bridge: Bridge) -> None:
        super().__init__()
        self.jobs: list[Job] = []
        self._bridge = bridge
        self._count = 0
        self._stop: threading.Event | None = None
        bridge.event.connect(self._apply)

    def add(self, report: api.ModelReport, conversion: Conversion) -> None:
        """Convert a source when those before it are done."""
        self._count += 1
        self.jobs.append(Job(self._count, report, conversion))
        self.changed.emit(0)
        self._next()

    @property
    def busy(self) -> bool:
        """A conversion runs or waits."""
        return any(job.state in {"running", "stopping", "waiting"} for job in self.jobs)

    def stop(self, number: int) -> None:
        """Stop a conversion at its next step; it can go on from there. One that waits is forgotten."""
        job = self._find(number)
        if job is None:
            return
        if job.state == "waiting":
            self.forget(number)
        elif job.state == "running" and self._stop is not None:
            self._put(replace(job, state="stopping"))
            self._stop.set()

    def resume(self, number: int) -> None:
        """Go on with a conversion that was stopped or failed."""
        job = self._find(number)
        if job is not None and job.state in {"stopped", "failed"}:
            self._put(replace(job, state="waiting", sentence=""))
            self._next()

    def forget(self, number: int) -> None:
        """Take a job off the list; what a stopped one has written is deleted."""
        job = self._find(number)
        if job is None or job.state in {"running", "stopping"}:
            return
        self.jobs.remove(job)
        if job.out is not None and job.state in {"stopped", "failed"}:
            self._bridge.task("discard", lambda api, _stop: _discard(api, job))
        self.changed.emit(0)

    def _find(self, number: int) -> Job | None:
        return next((job for job in self.jobs if job.number == number), None)

    def _put(self, job: Job) -> None:
        self.jobs = [job if known.number == job.number else known for known in self.jobs]
        self.changed.emit(job.number)

    def _next(self) -> None:
        if any(job.state in {"running", "stopping"} for job in self.jobs):
            return
        job = next((job for job in self.jobs if job.state == "waiting"), None)
        if job is not None:
            self._put(replace(job, state="running"))
            self._stop = self._bridge.task("convert", lambda api, stop: _convert(api, stop, job))

    def _apply(self, event: object) -> None:
        if not isinstance(event, _Step):
            return
        job = self._find(event.number)
        if job is None:
            return
        if event.state == "running":
            self._put(replace(job, progress=event.progress or job.progress, out=event.out or job.out))
            return
        self._stop = None
        self._put(replace(job, state=event.state, sentence=event.sentence))
        if event.state == "done":
            self._bridge.refresh_library()
        self._next()


def _convert(api: Any, stop: threading.Event, job: Job) -> Iterator[_Step]:
    number = job.number
    try:
        out = job.out or _target(api.library_folder(), job.report.name, job.conversion)
        yield _Step(number, "running", out)
        steps = api.convert(job.report.path, out, job.conversion, resume=True)
        try:
            for progress in steps:
                if stop.is_set():
                    yield _Step(number, "stopped")
                    return
                yield _Step(number, "running", progress=progress)
        finally:
            steps.close()
    except InglenookError as error:
        yield _Step(number, "failed", sentence=error_words(type(error).__name__, str(error)))
    except Exception:  # noqa: BLE001 (a fault ends this job; it is logged)
        _log.exception("converting %s", job.report.path)
        yield _Step(number, "failed", sentence=tr("The conversion failed inside Inglenook; the log says more."))
    else:
        yield _Step(number, "done")


def _discard(api: Any, job: Job) -> Iterator[object]:
    """Begin anew without resuming, which forgets what there was, and leave it at that."""
    steps = api.convert(job.report.path, job.out, job.conversion)
    try:
        next(steps, None)
    except InglenookError:
        _log.info("nothing of %s was left to discard", job.out)
    finally:
        steps.close()
    yield from ()


def _target(folder: Path, name: str, conversion: Conversion) -> Path:
    """A free file name in the library, readable on every system."""
    safe = "".join(letter if letter.isalnum() or letter in " ._-()" else "-" for letter in name).strip(" .")[:80]
    quality = "f16" if conversion.bits == 16 else f"int{conversion.bits}-g{conversion.group_size}"
    stem = f"{safe or 'model'}-{quality if conversion.level == 'plain' else conversion.level}"
    target = folder / f"{stem}.nook"
    count = 1
    while target.exists():
        count += 1
        target = folder / f"{stem} ({count}).nook"
    return target
