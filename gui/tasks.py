"""Long work beside answering: each a generator that runs on a thread of its own and yields what the window hears."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import InglenookError
from engine.folders import choose_library
from engine.settings import EngineSettings
from gui.kit.i18n import tr
from gui.kit.words import error_words

__all__ = [
    "Diagnosed",
    "Graded",
    "Measured",
    "Moved",
    "Tuned",
    "Verified",
    "diagnose",
    "grade",
    "measure",
    "move_library",
    "tune",
    "verify",
]


@dataclass(frozen=True, slots=True)
class Verified:
    """A file is checked: how far (0..1), and at the end what was wrong with it, "" when nothing."""

    path: Path
    share: float = 0.0
    done: bool = False
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class Graded:
    """A file is compared with its source: how far (0..1), and at the end what was found or why nothing."""

    path: Path
    share: float = 0.0
    done: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosed:
    """What the engine says of this computer; `bandwidth`: with the speed of its memory."""

    facts: dict[str, Any] = field(default_factory=dict)
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """A model's speed is measured: how far (0..1), and at the end the figures or why there are none."""

    path: Path
    share: float = 0.0
    done: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best number of threads is looked for: how far (0..1), and at the end what it is."""

    share: float = 0.0
    done: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class Moved:
    """The library is moved: how far (0..1), and at the end why it was not, "" when it was."""

    share: float = 0.0
    done: bool = False
    sentence: str = ""


_PIECE = 8 << 20


def _said(error: InglenookError) -> str:
    """What was wrong, in the window's language."""
    return error_words(type(error).__name__, str(error))


def diagnose(api: Any, _stop: threading.Event, *, benchmark: bool) -> Iterator[Diagnosed]:
    """Ask the engine what this computer offers."""
    try:
        yield Diagnosed(api.diagnose(benchmark=benchmark))
    except InglenookError as error:
        yield Diagnosed(sentence=_said(error))


def verify(api: Any, stop: threading.Event, path: Path) -> Iterator[Verified]:
    """Check every byte of a file."""
    yield Verified(path)
    try:
        for progress in api.verify(path):
            if stop.is_set():
                return
            yield Verified(path, progress.done / progress.total if progress.total else 0.0)
    except InglenookError as error:
        yield Verified(path, 1.0, done=True, sentence=_said(error))
    else:
        yield Verified(path, 1.0, done=True)


def grade(api: Any, stop: threading.Event, path: Path, source: Path) -> Iterator[Graded]:
    """Measure how much of its source a file still is; the result is kept in the file."""
    yield Graded(path)
    try:
        for step in api.fidelity(path, source):
            if stop.is_set():
                yield Graded(path, 1.0, done=True)
                return
            if isinstance(step, dict):
                yield Graded(path, 1.0, done=True, facts=step)
            else:
                yield Graded(path, step.done / step.total if step.total else 0.0)
    except InglenookError as error:
        yield Graded(path, 1.0, done=True, sentence=_said(error))


def measure(api: Any, stop: threading.Event, path: Path, settings: EngineSettings) -> Iterator[Measured]:
    """Measure a model's speed, shortly."""
    yield Measured(path)
    try:
        steps = api.bench(
            path, settings=settings, prompt_tokens=256, gen_tokens=48, depth=32, batch=2, repeat=1, profile=True
        )
        for step in steps:
            if stop.is_set():
                return
            if isinstance(step, dict):
                yield Measured(path, 1.0, done=True, facts=step)
            else:
                yield Measured(path, step.done / step.total if step.total else 0.0)
    except InglenookError as error:
        yield Measured(path, 1.0, done=True, sentence=_said(error))


def move_library(api: Any, stop: threading.Event, target: Path) -> Iterator[Moved]:
    """Move every model into another folder: copied, compared, and only then deleted where it was."""
    yield Moved()
    try:
        files = sorted(api.library_folder().glob("*.nook"))
        total, done = sum(file.stat().st_size for file in files) or 1, 0
        target.mkdir(parents=True, exist_ok=True)
        for file in files:
            copy = target / file.name
            if copy.exists():
                yield Moved(1.0, done=True, sentence=tr("{name} is there already.", name=copy))
                return
            fresh = copy.with_name(copy.name + ".moving")
            try:
                for count in _copied(file, fresh):
                    if stop.is_set():
                        return
                    yield Moved((done + count) / total)
                fresh.replace(copy)
            finally:
                fresh.unlink(missing_ok=True)
            done += file.stat().st_size
        choose_library(target)
        for file in files:
            file.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        yield Moved(1.0, done=True, sentence=tr("The models could not be moved: {reason}.", reason=reason))
    else:
        yield Moved(1.0, done=True)


def _copied(source: Path, target: Path) -> Iterator[int]:
    """Copy a file to the disk and read it back; how many bytes are done after each piece."""
    written, done = hashlib.sha256(), 0
    with source.open("rb") as reading, target.open("wb") as writing:
        while piece := reading.read(_PIECE):
            writing.write(piece)
            written.update(piece)
            done += len(piece)
            yield done
        writing.flush()
        os.fsync(writing.fileno())
    with target.open("rb") as reading:
        if hashlib.file_digest(reading, "sha256").digest() != written.digest():
            raise OSError(tr("what was written to {name} is not what is read there", name=target))


def tune(api: Any, stop: threading.Event, path: Path, settings: EngineSettings) -> Iterator[Tuned]:
    """Find the number of threads that suits this computer."""
    yield Tuned()
    try:
        for step in api.autotune(path, settings=settings):
            if stop.is_set():
                return
            if isinstance(step, dict):
                yield Tuned(1.0, done=True, facts=step)
            else:
                yield Tuned(step.done / step.total if step.total else 0.0)
    except InglenookError as error:
        yield Tuned(1.0, done=True, sentence=_said(error))
