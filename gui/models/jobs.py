"""A conversion on the models page: waiting, running, stopped, failed or done."""

from __future__ import annotations

import time
from pathlib import Path

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QProgressBar, QVBoxLayout

from gui.bridge import Bridge
from gui.conversions import Job
from gui.kit.controls import button, label, small_icon
from gui.kit.i18n import tr
from gui.kit.words import duration_words, size_words
from gui.models.fidelity import FidelityPart
from gui.models.steps import CONVERSION, RESULT, Steps

__all__ = ["JobCard"]

_MEASURED_SHARE = 0.03  # how much must be done before a forecast is worth saying


class JobCard(QFrame):
    """One job; its buttons say what is wanted of it: "stop", "resume", "forget" or "chat"."""

    asked = Signal(str)

    def __init__(self, job: Job, bridge: Bridge) -> None:
        super().__init__()
        self._bridge = bridge
        self._fidelity: FidelityPart | None = None
        self.number = job.number
        self.job = job
        self._first: tuple[float, float] | None = None  # when progress was first seen, and how much there was
        self.setProperty("role", "card")
        column = QVBoxLayout(self)
        column.setContentsMargins(24, 18, 24, 20)
        column.setSpacing(12)
        head = QHBoxLayout()
        head.setSpacing(12)
        self._good = small_icon("check", "good", 24)
        self._bad = small_icon("error", "danger", 20)
        head.addWidget(self._good)
        head.addWidget(self._bad)
        self._name = label("", "name", wrap=True)
        head.addWidget(self._name, 1)
        column.addLayout(head)
        self._steps = Steps(CONVERSION)
        column.addWidget(self._steps)
        self._bar = QProgressBar()
        self._bar.setObjectName("conversionProgress")
        self._bar.setAccessibleName(tr("Progress of the conversion"))
        self._bar.setTextVisible(False)
        self._bar.setRange(0, 1000)
        column.addWidget(self._bar)
        self._words = label("", "muted", wrap=True)
        self._words.setObjectName("conversionWords")
        column.addWidget(self._words)
        self._column = column
        row = QHBoxLayout()
        row.setSpacing(10)
        self._buttons = {}
        for action, words, role, name in (
            ("chat", tr("Chat with it"), "primary", "chatWith"),
            ("resume", tr("Go on"), "primary", "resumeConversion"),
            ("stop", tr("Cancel"), "", "cancelConversion"),
            ("forget", tr("Discard"), "", "forgetConversion"),
        ):
            made = button(words, role)
            made.setObjectName(name)
            made.clicked.connect(lambda _on=False, action=action: self.asked.emit(action))
            self._buttons[action] = made
            row.addWidget(made)
        row.addStretch(1)
        column.addLayout(row)
        self.show_job(job)

    def show_job(self, job: Job) -> None:
        """Show how far it is."""
        self.job = job
        self.setObjectName({"done": "doneCard", "failed": "failedCard"}.get(job.state, "progressCard"))
        self._name.setText(
            tr("{name} is ready", name=job.report.name)
            if job.state == "done"
            else tr("Converting {name}", name=job.report.name)
        )
        self._steps.show_step(RESULT if job.state == "done" else CONVERSION)
        self._good.setVisible(job.state == "done")
        self._bad.setVisible(job.state == "failed")
        share = job.progress.done / job.progress.total if job.progress is not None and job.progress.total else 0.0
        self._bar.setVisible(job.state in {"running", "stopping", "stopped"})
        self._bar.setValue(round(1000 * share))
        self._words.setText(_words(job, share, self._left_s(job, share)))
        shown = {
            "waiting": {"stop"},
            "running": {"stop"},
            "stopping": {"stop"},
            "stopped": {"resume", "forget"},
            "failed": {"resume", "forget"},
            "done": {"chat", "forget"},
        }[job.state]
        for action, made in self._buttons.items():
            made.setVisible(action in shown)
        if job.state == "done" and job.out is not None and self._fidelity is None:
            self._fidelity = FidelityPart(self._bridge, job.out, job.report.path)
            self._column.insertWidget(self._column.count() - 1, self._fidelity)
        self._buttons["stop"].setEnabled(job.state != "stopping")
        self._buttons["forget"].setText(tr("Close") if job.state == "done" else tr("Discard"))

    def _left_s(self, job: Job, share: float) -> float | None:
        """The engine's forecast, or one from the time it took so far; None before there is anything to go by."""
        if job.state != "running" or job.progress is None:
            self._first = None
            return None
        now_s = time.monotonic()
        if self._first is None:
            self._first = (now_s, share)
        since_s, done = now_s - self._first[0], share - self._first[1]
        if job.progress.eta_s is not None or done < _MEASURED_SHARE:
            return job.progress.eta_s
        return since_s * (1 - share) / done


def _words(job: Job, share: float, left_s: float | None) -> str:
    progress = job.progress
    match job.state:
        case "waiting":
            return tr("Waits for the conversion before it.")
        case "stopping":
            return tr("Cancelling…")
        case "stopped":
            return tr("Cancelled at {share}; it can go on from there.", share=f"{share:.0%}")
        case "failed":
            return job.sentence
        case "done" if job.out is not None:
            return tr("{file}, {size}", file=job.out.name, size=size_words(_size_of(job.out)))
    if progress is None or not progress.total:
        return tr("Getting ready…")
    if progress.unit == "bytes":
        words = tr("{done} of {total}", done=size_words(progress.done), total=size_words(progress.total))
    else:
        words = f"{share:.0%}"
    if progress.stage == "verify":
        words = tr("Checking") + " · " + words
    if left_s is not None and share < 1:
        words += " · " + tr("about {time} left", time=duration_words(left_s))
    return words


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
