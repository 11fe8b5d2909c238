"""The diagnostics page: what this computer offers, how fast it is, advice, and proof that no network is used."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import (
    QComboBox,
    QFileDialog,
    QGridLayout,
    QHBoxLayout,
    QPlainTextEdit,
    QProgressBar,
    QVBoxLayout,
    QWidget,
)
from typing_extensions import override

from engine.folders import log_folder
from gui.data.machine import BYTES_PER_PARAMETER, advice, connections, sample, write_bundle
from gui.kit.controls import button, label, small_icon
from gui.kit.i18n import tr
from gui.kit.layout import Page, card, clear
from gui.kit.plots import Bars, Columns, Plot, Roofline
from gui.kit.theme import code_font
from gui.kit.timing import timer
from gui.kit.words import count_words, engine_words, parameter_words, size_words
from gui.models.library import forecast_tps, reveal_path
from gui.session import Session
from gui.tasks import Diagnosed, Measured, Tuned, diagnose, measure, tune

__all__ = ["DiagnosticsPage"]

_WIDTH = 860
_LOOK_MS = 1000
_KEPT = 40  # measurements
_LOG_LINES = 200
_OPERATIONS = 8  # that take most of the time
_SIZES_BILLIONS = (0.5, 1.5, 3, 7, 14)


class DiagnosticsPage(Page):
    """Facts, plots and measurements."""

    def __init__(self, session: Session) -> None:
        super().__init__("diagnosticsPage", tr("Diagnostics"), _WIDTH)
        self._session = session
        self._facts: dict[str, Any] = {}
        self._make_computer()
        self._make_live()
        self._make_speed()
        self._make_network()
        self._make_logs()
        self.column.addStretch(1)
        self._timer = timer(self, _LOOK_MS, self._look)
        session.bridge.event.connect(self._apply)
        session.library_changed.connect(self._show_models)
        self._show_models()
        self._show_history()

    # ---- parts

    def _make_computer(self) -> None:
        made, column = card(tr("This computer"))
        self._grid = QGridLayout()
        self._grid.setHorizontalSpacing(20)
        self._grid.setVerticalSpacing(8)
        self._grid.setColumnStretch(1, 1)
        column.addLayout(self._grid)
        self._advice = QVBoxLayout()
        self._advice.setSpacing(8)
        column.addLayout(self._advice)
        self.column.addWidget(made)

    def _make_live(self) -> None:
        made, column = card(tr("Now"))
        row = QHBoxLayout()
        row.setSpacing(20)
        self._cpu = Plot("cpuPlot", tr("Processor"))
        self._memory = Plot("memoryPlot", tr("Memory"))
        row.addWidget(self._cpu)
        row.addWidget(self._memory)
        column.addLayout(row)
        column.addWidget(label(tr("Coloured: Inglenook. Grey line: the whole computer."), "caption"))
        self.column.addWidget(made)

    def _make_speed(self) -> None:
        made, column = card(tr("Speed"))
        row = QHBoxLayout()
        row.setSpacing(10)
        self._bandwidth = button(tr("Measure the memory"))
        self._bandwidth.setObjectName("measureMemory")
        self._bandwidth.clicked.connect(self.measure_memory)
        row.addWidget(self._bandwidth)
        self._tune = button(tr("Find the best number of threads"))
        self._tune.setObjectName("autotune")
        self._tune.clicked.connect(self.tune_threads)
        row.addWidget(self._tune)
        row.addStretch(1)
        column.addLayout(row)
        self._speed_words = label("", "muted", wrap=True)
        self._speed_words.setObjectName("bandwidthWords")
        column.addWidget(self._speed_words)
        below = QHBoxLayout()
        below.setSpacing(10)
        self._model = QComboBox()
        self._model.setObjectName("benchmarkModel")
        self._model.setAccessibleName(tr("Model to measure"))
        below.addWidget(self._model, 1)
        self._measure = button(tr("Measure this model"), "primary")
        self._measure.setObjectName("benchmark")
        self._measure.clicked.connect(lambda: self.measure_model(Path(self._model.currentData() or "")))
        below.addWidget(self._measure)
        column.addLayout(below)
        self._progress = QProgressBar()
        self._progress.setAccessibleName(tr("Progress of the measurement"))
        self._progress.setTextVisible(False)
        self._progress.setRange(0, 1000)
        self._progress.hide()
        column.addWidget(self._progress)
        self._said = label("", "muted", wrap=True)
        self._said.setObjectName("benchmarkWords")
        self._said.hide()
        column.addWidget(self._said)
        self._bars = Bars("forecastBars")
        column.addWidget(self._bars)
        self._bars_words = label(
            tr("Pale: what the memory's speed allows. Strong: what was measured."), "caption", wrap=True
        )
        column.addWidget(self._bars_words)
        self._roofline = Roofline("roofline")
        column.addWidget(self._roofline)
        self._roofline_words = label(
            tr(
                "Slanted: what the memory's speed allows, by how much is computed with each byte read. Dashed: the most"
                " that was computed here. Writing one token is bound by the memory, reading a prompt by the cores."
            ),
            "caption",
            wrap=True,
        )
        column.addWidget(self._roofline_words)
        self._make_profile(column)
        self._history = label("", "caption", wrap=True)
        self._history.setObjectName("benchmarkHistory")
        column.addWidget(self._history)
        self.column.addWidget(made)

    def _make_profile(self, column: QVBoxLayout) -> None:
        self._profile = QWidget()
        inside = QVBoxLayout(self._profile)
        inside.setContentsMargins(0, 6, 0, 0)
        inside.setSpacing(10)
        self._profile_title = label("", "strong", wrap=True)
        inside.addWidget(self._profile_title)
        self._operations = Bars("operationBars")
        inside.addWidget(self._operations)
        words = tr("By kind of operation. Strong: share of the time of writing a token. Pale: of reading a prompt.")
        inside.addWidget(label(words, "caption", wrap=True))
        self._layers = Columns("layerColumns", tr("Milliseconds in each layer, writing one token"))
        inside.addWidget(self._layers)
        self._profile.hide()
        column.addWidget(self._profile)

    def _make_network(self) -> None:
        made, column = card(tr("Network"))
        row = QHBoxLayout()
        row.setSpacing(10)
        row.addWidget(small_icon("shield", "good", 20), 0, Qt.AlignmentFlag.AlignTop)
        self._network = label("", wrap=True)
        self._network.setObjectName("networkProof")
        self._network.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        row.addWidget(self._network, 1)
        column.addLayout(row)
        self.column.addWidget(made)

    def _make_logs(self) -> None:
        made, column = card(tr("Logs"))
        self._log = QPlainTextEdit()
        self._log.setObjectName("logText")
        self._log.setAccessibleName(tr("The latest lines of the log"))
        self._log.setReadOnly(True)
        self._log.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self._log.setTabChangesFocus(True)
        self._log.setFixedHeight(170)
        column.addWidget(self._log)
        row = QHBoxLayout()
        row.setSpacing(10)
        again = button(tr("Read again"))
        again.clicked.connect(self._show_log)
        row.addWidget(again)
        show = button(tr("Show the folder"))
        show.setObjectName("revealLogs")
        show.clicked.connect(lambda: reveal_path(log_folder()))
        row.addWidget(show)
        bundle = button(tr("Save a support bundle…"))
        bundle.setObjectName("supportBundle")
        bundle.clicked.connect(self._browse_bundle)
        row.addWidget(bundle)
        row.addStretch(1)
        column.addLayout(row)
        words = tr(
            "The bundle holds logs, settings and facts of this computer; names and keys are removed,"
            " conversations are not part of it."
        )
        column.addWidget(label(words, "caption", wrap=True))
        self.column.addWidget(made)

    # ---- what happens

    def arrive(self) -> None:
        """The page comes into view."""
        if not self._facts:
            self._session.bridge.task("diagnose", lambda api, stop: diagnose(api, stop, benchmark=False))
        self._show_log()

    def measure_memory(self) -> None:
        """Measure how fast memory is read."""
        self._bandwidth.setEnabled(False)
        self._speed_words.setText(tr("Measuring…"))
        self._session.bridge.task("diagnose", lambda api, stop: diagnose(api, stop, benchmark=True))

    def measure_model(self, path: Path) -> None:
        """Measure a model's speed."""
        if not path.name:
            return
        settings = self._session.preferences.values.engine
        self._measure.setEnabled(False)
        self._session.bridge.task("measure", lambda api, stop: measure(api, stop, path, settings))

    def tune_threads(self) -> None:
        """Find the number of threads that suits this computer, with the model that is chosen."""
        path = Path(self._model.currentData() or "")
        if not path.name:
            return
        settings = self._session.preferences.values.engine
        self._tune.setEnabled(False)
        self._session.bridge.task("tune", lambda api, stop: tune(api, stop, path, settings))

    def _apply(self, event: object) -> None:
        match event:
            case Diagnosed():
                self._diagnosed(event)
            case Measured():
                self._show_progress(event.share, done=event.done)
                self._measure.setEnabled(event.done)
                if event.done:
                    self._measured(event)
            case Tuned():
                self._show_progress(event.share, done=event.done)
                self._tune.setEnabled(event.done)
                if event.done:
                    self._say(
                        event.sentence
                        or tr(
                            "{count} threads are the fastest here; models are loaded with them from now on.",
                            count=str(event.facts.get("threads", "")),
                        )
                    )

    def _diagnosed(self, event: Diagnosed) -> None:
        self._bandwidth.setEnabled(True)
        if event.sentence:
            self._speed_words.setText(event.sentence)
            return
        self._facts = {**self._facts, **event.facts}
        self._show_facts()
        self._show_forecast()

    def _measured(self, event: Measured) -> None:
        if event.sentence:
            self._say(event.sentence)
            return
        name = event.path.stem
        facts = {key: value for key, value in event.facts.items() if key != "profile"}
        row = {"model": name, "at_s": time.time(), **facts}
        kept = [*self._session.preferences.values.benchmarks, row][-_KEPT:]
        self._session.preferences.change(benchmarks=kept)
        self._say(
            tr(
                "{name} writes {decode} tokens/s and reads {prefill} tokens/s.",
                name=name,
                decode=f"{event.facts['decode_tps']:.1f}",
                prefill=f"{event.facts['prefill_tps']:.0f}",
            )
        )
        self._show_history()
        self._show_forecast()
        self._show_profile(name, event.facts.get("profile", {}))

    def _say(self, words: str) -> None:
        self._said.setText(words)
        self._said.show()

    def _show_progress(self, share: float, *, done: bool) -> None:
        self._progress.setVisible(not done)
        self._progress.setValue(round(1000 * share))

    # ---- what is to be seen

    def _show_facts(self) -> None:
        clear(self._grid)
        for number, (title, value) in enumerate(_fact_rows(self._facts)):
            self._grid.addWidget(label(title, "muted"), number, 0, Qt.AlignmentFlag.AlignTop)
            said = label(value, wrap=True)
            said.setObjectName("fact")
            said.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
            self._grid.addWidget(said, number, 1)
        clear(self._advice)
        for sentence in advice(self._facts):
            row = QHBoxLayout()
            row.setSpacing(10)
            row.addWidget(small_icon("info", "warning", 18), 0, Qt.AlignmentFlag.AlignTop)
            words = label(sentence, wrap=True)
            words.setObjectName("advice")
            row.addWidget(words, 1)
            self._advice.addLayout(row)

    def _show_forecast(self) -> None:
        rate = self._session.preferences.values.bandwidth_gb
        if rate:
            allowed = " · ".join(
                f"{parameter_words(round(billions * 1e9))}: {rate / (billions * BYTES_PER_PARAMETER):.0f}"
                for billions in _SIZES_BILLIONS
            )
            self._speed_words.setText(
                tr(
                    "Memory is read at {rate} GB/s. At 4 bits that allows, in tokens/s: {list}",
                    rate=f"{rate:.1f}",
                    list=allowed,
                )
            )
        measured = {row["model"]: float(row["decode_tps"]) for row in self._session.preferences.values.benchmarks}
        rows = []
        for entry in self._session.models:
            expected, seen = forecast_tps(entry, rate), measured.get(entry.path.stem, 0.0)
            if expected or seen:
                said = [tr("{speed} tokens/s", speed=f"{seen:.1f}")] if seen else []
                said += [tr("up to {speed}", speed=f"{expected:.0f}")] if expected else []
                rows.append((entry.name, expected, seen, ", ".join(said)))
        self._bars.show_rows(rows)
        self._bars.setVisible(bool(rows))
        self._bars_words.setVisible(bool(rows))
        points = self._roofline_points()
        self._roofline.show_points(rate * 1e9, points)
        self._roofline.setVisible(bool(rate and points))
        self._roofline_words.setVisible(bool(rate and points))

    def _roofline_points(self) -> list[tuple[str, float, float]]:
        """(name, operations per byte of weights, operations per second) of what was measured last of each model."""
        entries = {entry.path.stem: entry for entry in self._session.models if entry.parameters and entry.disk_bytes}
        latest = {row["model"]: row for row in self._session.preferences.values.benchmarks}
        points = []
        for name, row in latest.items():
            entry = entries.get(name)
            if entry is None:
                continue
            operations = 2 * entry.parameters  # a product and a sum for each weight
            for tokens, speed in ((1, row.get("decode_tps")), (row.get("prompt_tokens"), row.get("prefill_tps"))):
                if tokens and speed:
                    points.append((entry.name, operations * tokens / entry.disk_bytes, operations * float(speed)))
        return points

    def _show_profile(self, name: str, profile: Mapping[str, Any]) -> None:
        """Where the time of a step of this model goes."""
        self._profile.setVisible(bool(profile))
        if not profile:
            return
        self._profile_title.setText(tr("Where the time goes: {name}", name=name))
        shares = {step: _shares(rows) for step, rows in profile.items()}
        decode, prefill = shares["decode"], shares["prefill"]
        most = sorted(decode, key=lambda operation: -decode[operation])[:_OPERATIONS]
        self._operations.show_rows(
            [
                (operation, prefill.get(operation, 0.0), decode[operation],
                 f"{decode[operation]:.0%} · {prefill.get(operation, 0.0):.0%}")
                for operation in most
            ]
        )  # fmt: skip
        of_layer: dict[int, float] = {}
        for row in profile["decode"]:
            if row["layer"] is not None:
                of_layer[row["layer"]] = of_layer.get(row["layer"], 0.0) + row["seconds"] * 1000
        self._layers.show_values([of_layer[layer] for layer in sorted(of_layer)])

    def _show_history(self) -> None:
        lines = []
        for row in self._session.preferences.values.benchmarks[-6:][::-1]:
            day = time.strftime("%Y-%m-%d %H:%M", time.localtime(float(row.get("at_s", 0))))
            lines.append(
                f"{day}  {row.get('model', '')}  "
                + tr(
                    "{decode} tokens/s, reading {prefill}, {threads} threads, {tier}",
                    decode=f"{float(row.get('decode_tps', 0)):.1f}",
                    prefill=f"{float(row.get('prefill_tps', 0)):.0f}",
                    threads=str(row.get("threads", "")),
                    tier=str(row.get("tier", "")),
                )
            )
        self._history.setText("\n".join(lines))
        self._history.setVisible(bool(lines))

    def _show_models(self) -> None:
        chosen = self._model.currentData()
        self._model.clear()
        for entry in self._session.models:
            self._model.addItem(entry.name, str(entry.path))
        self._model.setCurrentIndex(max(0, self._model.findData(chosen)))
        self._measure.setEnabled(self._model.count() > 0)
        self._tune.setEnabled(self._model.count() > 0)
        self._show_forecast()

    def _look(self) -> None:
        now = sample()
        self._cpu.add(now.own_cpu, now.all_cpu, f"{now.own_cpu:.0%} / {now.all_cpu:.0%}")
        self._memory.add(
            now.own_bytes / now.total_bytes,
            now.used_bytes / now.total_bytes,
            f"{size_words(now.own_bytes)} / {size_words(now.used_bytes)} / {size_words(now.total_bytes)}",
        )
        found = connections()
        self._network.setText(
            "\n".join(found)
            if found
            else tr("Inglenook has no network connection open: nothing you write can leave this computer.")
        )

    def _show_log(self) -> None:
        self._log.setFont(code_font(12))
        try:
            text = (log_folder() / "window.log").read_text("utf-8", errors="replace")
        except OSError:
            text = tr("Nothing was logged yet.")
        self._log.setPlainText("\n".join(text.splitlines()[-_LOG_LINES:]))
        self._log.verticalScrollBar().setValue(self._log.verticalScrollBar().maximum())

    def _browse_bundle(self) -> None:
        dialog = QFileDialog(self, tr("Save a support bundle…"))
        dialog.setAcceptMode(QFileDialog.AcceptMode.AcceptSave)
        dialog.setDefaultSuffix("zip")
        dialog.selectFile("inglenook-support.zip")
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.fileSelected.connect(lambda name: self.save_bundle(Path(name)))
        dialog.open()

    def save_bundle(self, path: Path) -> None:
        """Write the support bundle."""
        preferences = self._session.preferences.values.model_dump(mode="json")
        try:
            write_bundle(path, self._facts, preferences, log_folder())
        except OSError as error:
            self._session.notice.emit(
                tr("{name} cannot be written: {reason}.", name=path.name, reason=error.strerror), "problem"
            )

    # ---- Qt

    @override
    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._look()
        self._timer.start()

    @override
    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._timer.stop()


def _shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The share of each kind of operation in the time of a step."""
    total = sum(row["seconds"] for row in rows) or 1.0
    found: dict[str, float] = {}
    for row in rows:
        found[row["operation"]] = found.get(row["operation"], 0.0) + row["seconds"] / total
    return found


def _fact_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    cpu, memory = facts.get("cpu", {}), facts.get("memory", {})
    tiers = cpu.get("tiers", [])
    rows = [
        (tr("Processor"), f"{cpu.get('name', '')} ({cpu.get('architecture', '')})"),
        (tr("Instructions"), f"{tiers[-1] if tiers else ''} – {engine_words(str(cpu.get('tier_reason', '')))}"),
        (
            tr("Cores"),
            tr(
                "{physical} physical, {fast} fast, {allowed} may be used; {threads} threads by default",
                physical=str(cpu.get("physical_cores", "")),
                fast=str(cpu.get("fast_cores", "")),
                allowed=str(cpu.get("allowed_cores", "")),
                threads=str(cpu.get("default_threads", "")),
            ),
        ),
        (tr("Quota"), f"{cpu['cpu_quota']:.1f}" if cpu.get("cpu_quota") else tr("none")),
        (tr("Memory nodes"), count_words(int(cpu.get("numa_nodes") or 1))),
        (
            tr("Memory"),
            tr(
                "{free} free of {total}",
                free=size_words(int(memory.get("free_bytes") or 0)),
                total=size_words(int(memory.get("total_bytes") or 0)),
            ),
        ),
        (tr("Memory limit"), size_words(int(memory["limit_bytes"])) if memory.get("limit_bytes") else tr("none")),
        (tr("System"), f"{facts.get('system', '')}, Python {facts.get('python', '')}"),
    ]
    return [(title, value) for title, value in rows if value.strip(" –()")]
