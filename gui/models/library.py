"""A model of the library: what it is, how fast it will be here, and what can be done with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PySide6.QtCore import QPoint, Qt, QUrl, Signal
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QFrame, QHBoxLayout, QMenu, QProgressBar, QVBoxLayout

from gui.bridge import ModelEntry
from gui.data.preferences import Preferences
from gui.kit.controls import Elided, IconButton, button, label
from gui.kit.i18n import tr
from gui.kit.words import count_words, parameter_words, size_words
from gui.models.fidelity import grade_tone
from gui.tasks import Verified

__all__ = ["LibraryRow", "fit_words", "forecast_tps", "reveal_path", "speed_words"]

_ROOM_BYTES = 700_000_000  # program, cache of a short conversation, working memory


def forecast_tps(entry: ModelEntry, bandwidth_gb: float) -> float:
    """Tokens per second that the memory's speed allows: each token reads all weights once."""
    return bandwidth_gb * 1e9 / entry.disk_bytes if entry.disk_bytes and bandwidth_gb else 0.0


def speed_words(entry: ModelEntry, preferences: Preferences) -> str:
    """What is known of a model's speed here: what was measured last, else what the memory allows."""
    for row in reversed(preferences.benchmarks):
        if row.get("model") == entry.path.stem:
            return tr("{speed} tokens/s measured here", speed=f"{float(row['decode_tps']):.0f}")
    forecast = forecast_tps(entry, preferences.bandwidth_gb)
    return tr("up to {speed} tokens/s here", speed=f"{forecast:.0f}") if forecast else ""


def fit_words(entry: ModelEntry, memory: Mapping[str, Any]) -> tuple[str, str]:
    """Whether a model fits the memory of this computer, and the tone that says it."""
    if not entry.disk_bytes or not memory:
        return "", "muted"
    total = int(memory.get("limit_bytes") or memory.get("total_bytes") or 0)
    free = int(memory.get("free_bytes") or 0)
    needed = entry.disk_bytes + _ROOM_BYTES
    if needed <= free:
        return tr("fits"), "good"
    if needed <= total:
        return tr("fits when other programs are closed"), "warning"
    return tr("larger than the memory"), "danger"


class LibraryRow(QFrame):
    """A model; `asked` says what is wanted of it: "chat", "verify", "measure", "grade", "reveal" or "remove".

    speed: what is known of its speed here, in words
    """

    asked = Signal(str)

    def __init__(self, entry: ModelEntry, computer: Mapping[str, Any], speed: str = "") -> None:
        super().__init__()
        self.entry = entry
        self.setProperty("role", "card")
        self.setObjectName("brokenRow" if entry.problem else "libraryRow")
        row = QHBoxLayout(self)
        row.setContentsMargins(18, 12, 12, 12)
        row.setSpacing(8)
        words = QVBoxLayout()
        words.setSpacing(3)
        head = QHBoxLayout()
        head.setSpacing(10)
        head.addWidget(Elided("strong", entry.name))
        self._chip = label(tr("in use"), "chip")
        head.addWidget(self._chip)
        fit, tone = fit_words(entry, computer.get("memory", {}))
        if fit and not entry.problem:
            chip = label(fit, "fit")
            chip.setProperty("tone", tone)
            chip.setObjectName("modelFit")
            head.addWidget(chip)
        if entry.grade:
            grade = label(tr("fidelity {grade}", grade=entry.grade), "fit")
            grade.setProperty("tone", grade_tone(entry.grade))
            grade.setObjectName("modelGrade")
            head.addWidget(grade)
        head.addStretch(1)
        words.addLayout(head)
        words.addWidget(label(entry.problem or " · ".join(filter(None, (*self._facts(), speed))),
                              "bad" if entry.problem else "caption", wrap=True))  # fmt: skip
        self._bar = QProgressBar()
        self._bar.setAccessibleName(tr("Checking"))
        self._bar.setTextVisible(False)
        self._bar.setRange(0, 1000)
        self._bar.hide()
        words.addWidget(self._bar)
        self._said = label("", "caption", wrap=True)
        self._said.setObjectName("verifyWords")
        self._said.hide()
        words.addWidget(self._said)
        row.addLayout(words, 1)
        if not entry.problem:
            go = button(tr("Chat"))
            go.setObjectName("chatWithModel")
            go.setAccessibleName(tr("Chat with {name}", name=entry.name))
            go.clicked.connect(lambda: self.asked.emit("chat"))
            row.addWidget(go, 0, Qt.AlignmentFlag.AlignTop)
        if not entry.starter:
            more = IconButton("more", tr("More about {name}", name=entry.name))
            more.setObjectName("modelMore")
            more.clicked.connect(lambda: self._show_menu(more.mapToGlobal(more.rect().bottomLeft())))
            row.addWidget(more, 0, Qt.AlignmentFlag.AlignTop)
            away = IconButton("trash", tr("Remove {name}…", name=entry.name))
            away.setObjectName("removeModel")
            away.clicked.connect(lambda: self.asked.emit("remove"))
            row.addWidget(away, 0, Qt.AlignmentFlag.AlignTop)

    def _facts(self) -> list[str]:
        entry = self.entry
        facts = [entry.detail]
        if entry.disk_bytes:
            facts.append(size_words(entry.disk_bytes))
        if entry.parameters:
            facts.append(parameter_words(entry.parameters))
        if entry.context:
            facts.append(tr("{count} tokens of context", count=count_words(entry.context)))
        if entry.licence:
            facts.append(entry.licence)
        return facts

    def _show_menu(self, place: QPoint) -> None:
        menu = QMenu(self)
        menu.setObjectName("modelMenu")
        entries = [("reveal", tr("Show in its folder"))]
        if not self.entry.problem:
            entries += [
                ("verify", tr("Check every byte")),
                ("measure", tr("Measure its speed")),
                ("grade", tr("Compare it with the original…")),
            ]
        for action, words in entries:
            menu.addAction(words).triggered.connect(lambda _on=False, action=action: self.asked.emit(action))
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(place)

    def show_use(self, *, in_use: bool) -> None:
        """Whether this model answers now."""
        self._chip.setVisible(in_use)

    def show_verified(self, event: Verified) -> None:
        """How far the check of the file is, and what it found."""
        self._bar.setVisible(not event.done)
        self._bar.setValue(round(1000 * event.share))
        self._said.setVisible(event.done)
        self._said.setText(event.sentence or tr("Every byte is as it was written."))
        self._said.setProperty("role", "bad" if event.sentence else "good")
        self._said.style().unpolish(self._said)
        self._said.style().polish(self._said)


def reveal_path(path: Path) -> None:
    """Open the folder of a file in the desktop's file manager."""
    QDesktopServices.openUrl(QUrl.fromLocalFile(str(path if path.is_dir() else path.parent)))
