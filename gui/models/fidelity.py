"""How much of its source a model still is: measured when asked for, shown as a grade, numbers and a picture."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QVBoxLayout, QWidget

from gui.bridge import Bridge
from gui.kit.controls import button, label
from gui.kit.i18n import tr
from gui.kit.plots import Columns
from gui.kit.words import engine_words
from gui.tasks import Graded, grade

__all__ = ["FidelityPart", "grade_tone"]


def grade_tone(found: str) -> str:
    """The colour that says a grade."""
    return {"A": "good", "B": "good", "C": "warning"}.get(found, "danger")


class FidelityPart(QWidget):
    """A button that has a file compared with its source, and what came out."""

    def __init__(self, bridge: Bridge, path: Path, source: Path) -> None:
        super().__init__()
        self._bridge = bridge
        self._path = path
        self._source = source
        self._stop: threading.Event | None = None
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(10)
        head = QHBoxLayout()
        head.setSpacing(10)
        self._go = button(tr("Compare it with the original"))
        self._go.setObjectName("measureFidelity")
        self._go.clicked.connect(self._start)
        head.addWidget(self._go)
        self._cancel = button(tr("Cancel"))
        self._cancel.setObjectName("cancelFidelity")
        self._cancel.clicked.connect(self.stop)
        head.addWidget(self._cancel)
        self._grade = label("", "name")
        self._grade.setObjectName("fidelityGrade")
        head.addWidget(self._grade, 0, Qt.AlignmentFlag.AlignTop)
        self._said = label(
            tr("Both read the same text; it takes minutes and says how faithful the new file is."), "caption", wrap=True
        )
        self._said.setObjectName("fidelityWords")
        head.addWidget(self._said, 1)
        column.addLayout(head)
        self._bar = QProgressBar()
        self._bar.setAccessibleName(tr("Progress of the comparison"))
        self._bar.setTextVisible(False)
        self._bar.setRange(0, 1000)
        column.addWidget(self._bar)
        self._layers = Columns("fidelityLayers", tr("Difference from the original after each layer, in per cent"))
        column.addWidget(self._layers)
        self._show(busy=False)
        bridge.event.connect(self._apply)

    def _start(self) -> None:
        path, source = self._path, self._source
        self._stop = self._bridge.task("grade", lambda api, stop: grade(api, stop, path, source))
        self._bar.setValue(0)
        self._show(busy=True)

    def stop(self) -> None:
        """End the comparison at its next step."""
        if self._stop is not None:
            self._stop.set()

    def _apply(self, event: object) -> None:
        if not isinstance(event, Graded) or event.path != self._path or self._stop is None:
            return
        self._bar.setValue(round(1000 * event.share))
        if not event.done:
            return
        self._stop = None
        self._show(busy=False)
        if event.sentence:
            self._said.setText(event.sentence)
        elif event.facts:
            self._show_facts(event.facts)

    def _show(self, *, busy: bool) -> None:
        self._go.setVisible(not busy)
        self._cancel.setVisible(busy)
        self._bar.setVisible(busy)
        self._grade.hide()
        self._layers.hide()

    def _show_facts(self, facts: Mapping[str, Any]) -> None:
        self._go.hide()
        self._grade.setText(str(facts["grade"]))
        self._grade.setProperty("tone", grade_tone(str(facts["grade"])))
        self._grade.style().unpolish(self._grade)
        self._grade.style().polish(self._grade)
        self._grade.show()
        meaning = engine_words(str(facts["meaning"]))
        self._said.setText(
            f"{meaning[:1].upper()}{meaning[1:]}\n"
            + tr(
                "The same next word in {share} of the cases; perplexity {ours}, of the original {theirs}; mean"
                " divergence {divergence} nats.",
                share=f"{float(facts['top1_agreement']):.1%}",
                ours=f"{float(facts['perplexity']):.2f}",
                theirs=f"{float(facts['perplexity_source']):.2f}",
                divergence=f"{float(facts['kl_mean']):.3f}",
            )
        )
        self._layers.show_values([100 * float(layer["states"]) for layer in facts["layers"]])
        self._layers.show()
