"""The models page: a folder is dropped, looked at, converted; below it the library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QCursor
from PySide6.QtWidgets import QFileDialog, QHBoxLayout, QMenu, QVBoxLayout, QWidget

from engine.settings import Conversion
from gui.bridge import Inspected, ModelEntry
from gui.data.drop import Drop, read_paths
from gui.kit.controls import IconButton, button, label
from gui.kit.dialogs import confirm
from gui.kit.i18n import tr
from gui.kit.layout import Page, card, clear
from gui.kit.words import error_words, size_words
from gui.models.compare import CompareCard
from gui.models.drop_zone import DropZone
from gui.models.fidelity import FidelityPart
from gui.models.jobs import JobCard
from gui.models.library import LibraryRow, reveal_path, speed_words
from gui.models.report import ReportCard
from gui.session import Session
from gui.tasks import Diagnosed, Graded, Verified, diagnose, verify

if TYPE_CHECKING:
    from engine import api

__all__ = ["ModelsPage"]

_WIDTH = 820


class ModelsPage(Page):
    """One card that goes through the steps of adding a model, the conversions, and the library."""

    chat_asked = Signal(Path)
    measure_asked = Signal(Path)
    dropped = Signal(object)  # a Drop, from the zone or the dialog

    def __init__(self, session: Session) -> None:
        super().__init__("modelsPage", tr("Models"), _WIDTH)
        self._session = session
        self._report: api.ModelReport | None = None
        self._inspecting: Path | None = None
        self._computer: dict[str, Any] = {}
        self.drop_zone = DropZone()
        self.drop_zone.clicked.connect(self._ask_what)
        self.drop_zone.dropped.connect(self.dropped, Qt.ConnectionType.QueuedConnection)
        self.column.addWidget(self.drop_zone)
        self._card = QVBoxLayout()
        self.column.addLayout(self._card)
        self._jobs = QVBoxLayout()
        self._jobs.setSpacing(10)
        self.column.addLayout(self._jobs)
        self.column.addSpacing(10)
        head = QHBoxLayout()
        head.setSpacing(10)
        head.addWidget(label(tr("Library"), "heading"))
        self._total = label("", "caption")
        self._total.setObjectName("libraryTotal")
        head.addWidget(self._total, 1, Qt.AlignmentFlag.AlignBottom)
        self.column.addLayout(head)
        self._library = QVBoxLayout()
        self._library.setSpacing(10)
        self.column.addLayout(self._library)
        below = QHBoxLayout()
        below.setSpacing(10)
        folder = button(tr("Show the library's folder"), "tiny")
        folder.setObjectName("revealLibrary")
        folder.clicked.connect(self._reveal_library)
        below.addWidget(folder)
        self._compare = button(tr("Compare two models blindly…"), "tiny")
        self._compare.setObjectName("compareModels")
        self._compare.clicked.connect(self.open_comparison)
        below.addWidget(self._compare)
        below.addStretch(1)
        self.column.addLayout(below)
        self.column.addStretch(1)
        session.bridge.event.connect(self._apply)
        session.library_changed.connect(self._show_library)
        session.model_changed.connect(self._show_use)
        session.conversions.changed.connect(self._show_jobs)
        self._show_library()
        self._show_jobs(0)

    def arrive(self) -> None:
        """The page comes into view: look at the library, and once at the computer."""
        self._session.bridge.refresh_library()
        if not self._computer:
            self._session.bridge.task("diagnose", lambda api, stop: diagnose(api, stop, benchmark=False))
        self.drop_zone.setFocus()

    # ---- adding a model

    def open_model(self, path: Path) -> None:
        """Look at a folder or file that was dropped or chosen."""
        self._inspecting = path
        self._report = None
        self._clear_card()
        self.drop_zone.show_words(tr("Looking at {name}…", name=path.name), "")
        self._session.bridge.inspect(path)
        self.ensureVisible(0, 0)

    def _ask_what(self) -> None:
        """A folder or a file: no system's dialog lets one choose either."""
        menu = QMenu(self)
        menu.setObjectName("browseMenu")
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        for words, mode in (
            (tr("Choose a model's folder"), QFileDialog.FileMode.Directory),
            (tr("Choose a GGUF or .nook file"), QFileDialog.FileMode.ExistingFile),
        ):
            chosen = menu.addAction(words).triggered
            chosen.connect(lambda _on=False, words=words, mode=mode: self._browse(words, mode))
        over = self.drop_zone.underMouse()
        menu.popup(QCursor.pos() if over else self.drop_zone.mapToGlobal(self.drop_zone.rect().center()))

    def _browse(self, words: str, mode: QFileDialog.FileMode) -> None:
        dialog = QFileDialog(self, words)
        dialog.setFileMode(mode)
        if mode == QFileDialog.FileMode.ExistingFile:
            dialog.setNameFilter("*.gguf *.nook")
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.fileSelected.connect(lambda name: self.dropped.emit(read_paths([Path(name)])))
        dialog.open()

    def refuse(self, drop: Drop) -> None:
        """Say why a drop was not taken."""
        if self.drop_zone.isHidden():  # a card is in its place
            self._session.notice.emit(drop.refusal, "warning")
            return
        self.drop_zone.show_words(
            drop.refusal, tr("Drop a model's folder here, or click to choose one."), tone="danger"
        )

    def _apply(self, event: object) -> None:
        match event:
            case Inspected(path=path) if path == self._inspecting:
                self._inspecting = None
                if event.report is None:
                    self._dismiss()
                    self.drop_zone.show_words(
                        error_words(event.kind, event.sentence),
                        tr("Drop another folder, or click to choose one."),
                        tone="danger",
                    )
                else:
                    self._report = event.report
                    speed = self._session.preferences.values.bandwidth_gb
                    card = ReportCard(event.report, self._start, self._chat, self._dismiss, bandwidth_gb=speed)
                    self._show_card(card)
            case Diagnosed(facts=facts) if facts:
                self._computer = {**self._computer, **facts}
                self._show_library()
            case Graded(done=True, facts=facts) if facts:
                self._session.bridge.refresh_library()  # the grade is in the file now
            case Verified(path=path):
                for row in self._rows():
                    if row.entry.path == path:
                        row.show_verified(event)

    def _start(self, conversion: Conversion) -> None:
        assert self._report is not None
        report = self._report
        self._dismiss()
        self._session.conversions.add(report, conversion)

    def _chat(self, path: Path) -> None:
        self._dismiss()
        self.chat_asked.emit(path)

    def _dismiss(self) -> None:
        self._report = None
        self._clear_card()
        self.drop_zone.show_idle()

    def open_comparison(self) -> None:
        """Let two models answer the same message."""
        self._dismiss()
        card = CompareCard(self._session, self._dismiss)
        self._show_card(card)
        self.ensureVisible(0, 0)
        card.setFocus()

    def _show_card(self, card: QWidget) -> None:
        self._clear_card()
        self.drop_zone.hide()
        self._card.addWidget(card)

    def _clear_card(self) -> None:
        clear(self._card)
        self.drop_zone.show()

    # ---- conversions

    def _show_jobs(self, number: int) -> None:
        jobs = self._session.conversions.jobs
        if number:
            for index in range(self._jobs.count()):
                card = self._jobs.itemAt(index).widget()
                if isinstance(card, JobCard) and card.number == number:
                    card.show_job(next(job for job in jobs if job.number == number))
            return
        clear(self._jobs)
        for job in jobs:
            card = JobCard(job, self._session.bridge)
            card.asked.connect(lambda action, card=card: self._do_with_job(action, card))
            self._jobs.addWidget(card)

    def _do_with_job(self, action: str, card: JobCard) -> None:
        conversions = self._session.conversions
        match action:
            case "stop":
                conversions.stop(card.number)
            case "resume":
                conversions.resume(card.number)
            case "chat" if card.job.out is not None:
                out = card.job.out
                conversions.forget(card.number)
                self.chat_asked.emit(out)
            case "forget":
                conversions.forget(card.number)

    # ---- the library

    def _rows(self) -> list[LibraryRow]:
        widgets = (self._library.itemAt(index).widget() for index in range(self._library.count()))
        return [row for row in widgets if isinstance(row, LibraryRow)]

    def _show_library(self) -> None:
        clear(self._library)
        entries = (*self._session.models, *self._session.broken)
        for entry in entries:
            row = LibraryRow(entry, self._computer, speed_words(entry, self._session.preferences.values))
            row.asked.connect(lambda action, entry=entry: self._do_with_model(action, entry))
            self._library.addWidget(row)
        if not entries:
            self._library.addWidget(label(tr("Models you convert are kept here."), "muted"))
        total = sum(entry.disk_bytes for entry in entries)
        self._total.setText(tr("{size} on the disk", size=size_words(total)) if total else "")
        self._compare.setVisible(len(self._session.models) > 1)
        comparison: CompareCard
        for comparison in self.findChildren(CompareCard):
            comparison.show_models(self._session.models)
        self._show_use()

    def _show_use(self) -> None:
        state = self._session.state
        for row in self._rows():
            row.show_use(in_use=row.entry.path == state.path and state.kind == "ready")

    def _do_with_model(self, action: str, entry: ModelEntry) -> None:
        match action:
            case "chat":
                self.chat_asked.emit(entry.path)
            case "verify":
                self._session.bridge.task("verify", lambda api, stop: verify(api, stop, entry.path))
            case "measure":
                self.measure_asked.emit(entry.path)
            case "grade":
                self._browse_original(entry)
            case "reveal":
                reveal_path(entry.path)
            case "remove":
                self._ask_remove(entry)

    def _browse_original(self, entry: ModelEntry) -> None:
        dialog = QFileDialog(self, tr("Choose the folder that {name} was made from", name=entry.name))
        dialog.setFileMode(QFileDialog.FileMode.Directory)
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.fileSelected.connect(lambda name: self.open_fidelity(entry, Path(name)))
        dialog.open()

    def open_fidelity(self, entry: ModelEntry, source: Path) -> None:
        """Offer to compare a model with what it was made from."""
        self._dismiss()
        made, column = card()
        made.setObjectName("fidelityCard")
        head = QHBoxLayout()
        head.addWidget(label(entry.name, "name", wrap=True), 1)
        close = IconButton("close", tr("Close"), size=18)
        close.setObjectName("dismissFidelity")
        part = FidelityPart(self._session.bridge, entry.path, source)
        close.clicked.connect(part.stop)
        close.clicked.connect(self._dismiss)
        head.addWidget(close, 0, Qt.AlignmentFlag.AlignTop)
        column.addLayout(head)
        column.addWidget(part)
        self._show_card(made)
        self.ensureVisible(0, 0)

    def _reveal_library(self) -> None:
        known = next((entry for entry in (*self._session.models, *self._session.broken) if not entry.starter), None)
        reveal_path(known.path if known is not None else self._session.store.path)

    def _ask_remove(self, entry: ModelEntry) -> None:
        def do() -> None:
            if self._session.state.path == entry.path:
                self._session.unload()
            self._session.bridge.remove_model(entry.path)

        detail = tr(
            "The file {name} ({size}) is deleted from the disk.",
            name=entry.path.name,
            size=size_words(entry.disk_bytes),
        )
        confirm(self, tr("Remove {name}?", name=entry.name), detail, tr("Remove"), do)
