"""The models page: a folder is dropped, looked at, converted; below it the library."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QRectF, QSize, Qt, QUrl, Signal
from PySide6.QtGui import (
    QCursor,
    QDesktopServices,
    QDragEnterEvent,
    QDragLeaveEvent,
    QDropEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QResizeEvent,
)
from PySide6.QtWidgets import (
    QAbstractButton,
    QButtonGroup,
    QComboBox,
    QFileDialog,
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QMenu,
    QProgressBar,
    QScrollArea,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)
from typing_extensions import override

from engine.settings import Conversion
from gui.bridge import Converted, Converting, Inspected, ModelEntry
from gui.data.drop import Drop, accepts, read_drop, read_paths
from gui.kit.controls import Elided, IconButton, button, label, small_icon
from gui.kit.dialogs import confirm
from gui.kit.i18n import tr
from gui.kit.icons import paint_icon
from gui.kit.theme import look
from gui.kit.words import count_words, duration_words, parameter_words, size_words
from gui.session import Session

if TYPE_CHECKING:
    from engine import api

__all__ = ["DropZone", "ModelsPage", "reveal_path"]

_WIDTH = 820
_SMALL_CONTEXT = 4096
_MEASURED_SHARE = 0.03  # how much must be done before a forecast is worth saying


class ModelsPage(QScrollArea):
    """One card that goes through the steps of adding a model, and the library."""

    chat_asked = Signal(Path)
    dropped = Signal(object)  # a Drop, from the zone or the dialog

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.setObjectName("modelsPage")
        self._session = session
        self._report: api.ModelReport | None = None
        self._inspecting: Path | None = None
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        outer = QWidget()
        self.setWidget(outer)
        row = QHBoxLayout(outer)
        row.setContentsMargins(32, 30, 32, 30)
        row.addStretch(1)
        inner = QWidget()
        inner.setMaximumWidth(look().px(_WIDTH))
        row.addWidget(inner, 100)
        row.addStretch(1)
        column = QVBoxLayout(inner)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(16)
        column.addWidget(label(tr("Models"), "title"))
        self.drop_zone = DropZone()
        self.drop_zone.clicked.connect(self._ask_what)
        self.drop_zone.dropped.connect(self.dropped, Qt.ConnectionType.QueuedConnection)
        column.addWidget(self.drop_zone)
        self._card = QVBoxLayout()
        column.addLayout(self._card)
        column.addSpacing(10)
        self._library_heading = label(tr("Library"), "heading")
        column.addWidget(self._library_heading)
        self._library = QVBoxLayout()
        self._library.setSpacing(10)
        column.addLayout(self._library)
        column.addStretch(1)
        session.bridge.event.connect(self._apply)
        session.library_changed.connect(self._show_library)
        session.model_changed.connect(self._show_use)
        self._show_library()

    # ---- adding a model

    def open_model(self, path: Path) -> None:
        """Look at a folder or file that was dropped or chosen."""
        if self._session.bridge.converting:
            self._session.notice.emit(tr("One conversion at a time: wait for this one, or cancel it."), "warning")
            return
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
                        event.sentence, tr("Drop another folder, or click to choose one."), tone="danger"
                    )
                else:
                    self._report = event.report
                    self._show_card(_ReportCard(event.report, self._start, self._chat, self._dismiss))
            case Converting(progress=progress):
                card = self._current_card()
                if isinstance(card, _ProgressCard):
                    card.show_progress(progress)
            case Converted():
                self._converted(event)

    def _start(self, conversion: Conversion) -> None:
        assert self._report is not None
        self._show_card(_ProgressCard(self._report.name, self._session.bridge.cancel_conversion))
        self._session.bridge.convert(self._report, conversion)

    def _converted(self, event: Converted) -> None:
        report = self._report
        if report is None:
            return
        if event.out is not None:
            self._show_card(_DoneCard(report.name, event.out, self._chat, self._dismiss))
            return
        said = event.sentence or tr("Cancelled; nothing was written.")
        card = _ReportCard(report, self._start, self._chat, self._dismiss)
        card.say(said, serious=bool(event.sentence))
        self._show_card(card)

    def _chat(self, path: Path) -> None:
        self._dismiss()
        self.chat_asked.emit(path)

    def _dismiss(self) -> None:
        self._report = None
        self._clear_card()
        self.drop_zone.show_idle()

    def _show_card(self, card: QWidget) -> None:
        self._clear_card()
        self.drop_zone.hide()
        self._card.addWidget(card)

    def _current_card(self) -> QWidget | None:
        return self._card.itemAt(0).widget() if self._card.count() else None

    def _clear_card(self) -> None:
        _empty(self._card)
        self.drop_zone.show()

    # ---- the library

    def _show_library(self) -> None:
        _empty(self._library)
        for entry in self._session.models:
            self._library.addWidget(_LibraryRow(entry, self.chat_asked.emit, self._ask_remove))
        if not self._session.models:
            self._library.addWidget(label(tr("Models you convert are kept here."), "muted"))
        self._show_use()

    def _show_use(self) -> None:
        for index in range(self._library.count()):
            row = self._library.itemAt(index).widget()
            if isinstance(row, _LibraryRow):
                row.show_use(in_use=row.entry.path == self._session.state.path and self._session.state.kind == "ready")

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


class DropZone(QAbstractButton):
    """Where a model's folder is dropped; a click or Enter opens a dialog instead."""

    dropped = Signal(object)

    def __init__(self) -> None:
        super().__init__()
        self.setObjectName("dropZone")
        self.setAcceptDrops(True)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self._hot = False
        self._tone = "text"
        self._detail = ""
        self.show_idle()

    def show_idle(self) -> None:
        """Say what can be dropped."""
        self.show_words(
            tr("Drop a model's folder here"),
            tr("A folder from Hugging Face or ModelScope, a GGUF file or a .nook file. Click to choose one."),
        )

    def show_words(self, text: str, detail: str, tone: str = "text") -> None:
        """Say something else."""
        self.setText(text)
        self._detail, self._tone = detail, tone
        self.setAccessibleName(text)
        self.setAccessibleDescription(detail)
        self.update()

    def _show_hot(self, hot: bool) -> None:  # noqa: FBT001 (a state)
        self._hot = hot
        self.update()

    @override
    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        if accepts(event.mimeData()):
            event.acceptProposedAction()
            self._show_hot(True)

    @override
    def dragLeaveEvent(self, event: QDragLeaveEvent) -> None:
        self._show_hot(False)

    @override
    def dropEvent(self, event: QDropEvent) -> None:
        self._show_hot(False)
        event.acceptProposedAction()
        self.dropped.emit(read_drop(event.mimeData()))

    @override
    def sizeHint(self) -> QSize:
        return QSize(300, look().px(14) * 6 + 100)

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        rect = QRectF(self.rect()).adjusted(1.5, 1.5, -1.5, -1.5)
        hot = self._hot or self.hasFocus() or self.underMouse()
        pen = QPen(look().color("accent" if hot else "faint"), 1.6)
        pen.setDashPattern([5, 4])
        painter.setPen(pen)
        painter.setBrush(look().color("accent_soft" if self._hot or self.underMouse() else "surface"))
        painter.drawRoundedRect(rect, 16, 16)
        size = look().px(34)
        top = self.height() / 2 - size - look().px(14)
        paint_icon(painter, "drop", QRectF(self.width() / 2 - size / 2, top, size, size), "accent")
        words = QRectF(24, top + size + 12, self.width() - 48, look().px(16) * 3)
        flags = Qt.AlignmentFlag.AlignHCenter | Qt.AlignmentFlag.AlignTop | Qt.TextFlag.TextWordWrap
        painter.setFont(look().font(16, bold=True))
        painter.setPen(look().color(self._tone))
        used = painter.boundingRect(words, int(flags), self.text())
        painter.drawText(words, int(flags), self.text())
        painter.setFont(look().font(13))
        painter.setPen(look().color("muted"))
        painter.drawText(words.translated(0, used.height() + 6), int(flags), self._detail)


class _Card(QFrame):
    def __init__(self) -> None:
        super().__init__()
        self.setProperty("role", "card")
        self.column = QVBoxLayout(self)
        self.column.setContentsMargins(24, 20, 24, 22)
        self.column.setSpacing(14)


class _ReportCard(_Card):
    """What a model is, what it will need, and the choice of quality."""

    def __init__(
        self,
        report: api.ModelReport,
        start: Callable[[Conversion], None],
        chat: Callable[[Path], None],
        dismiss: Callable[[], None],
    ) -> None:
        super().__init__()
        self.setObjectName("reportCard")
        self._report = report
        head = QHBoxLayout()
        name = label(report.name, "name", wrap=True)
        name.setObjectName("reportName")
        head.addWidget(name, 1)
        close = IconButton("close", tr("Close"), size=18)
        close.setObjectName("dismissReport")
        close.clicked.connect(dismiss)
        head.addWidget(close, 0, Qt.AlignmentFlag.AlignTop)
        self.column.addLayout(head)
        self.column.addWidget(_Facts(report))
        self._said = QVBoxLayout()
        self._said.setSpacing(8)
        self.column.addLayout(self._said)
        for problem in report.problems:
            self.say(problem.sentence, serious=problem.fatal)
        self._qualities = QButtonGroup(self)
        self._group = QComboBox()
        row = QHBoxLayout()
        if report.usable and report.sizes:
            self._add_choices()
            go = button(tr("Convert"), "primary")
            go.setObjectName("convert")
            go.clicked.connect(lambda: start(self._chosen().conversion))
            row.addWidget(go)
        elif report.usable:
            go = button(tr("Chat with it"), "primary", "chat", "on_accent")
            go.setObjectName("chatWith")
            go.clicked.connect(lambda: chat(report.path))
            row.addWidget(go)
        row.addStretch(1)
        self.column.addLayout(row)

    def say(self, sentence: str, *, serious: bool) -> None:
        """Add a line about something found."""
        row = QHBoxLayout()
        row.setSpacing(10)
        sign = small_icon("error" if serious else "warning", "danger" if serious else "warning")
        row.addWidget(sign, 0, Qt.AlignmentFlag.AlignTop)
        text = label(sentence, wrap=True)
        text.setObjectName("reportProblem")
        text.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        row.addWidget(text, 1)
        self._said.addLayout(row)

    def _add_choices(self) -> None:
        line = QFrame()
        line.setProperty("role", "line")
        self.column.addWidget(line)
        self.column.addWidget(label(tr("Quality"), "heading"))
        row = QHBoxLayout()
        row.setSpacing(10)
        for bits in dict.fromkeys(size.conversion.bits for size in self._report.sizes):
            choice = _QualityButton(bits)
            self._qualities.addButton(choice, bits)
            row.addWidget(choice, 1)
        self.column.addLayout(row)
        line_of_group = QHBoxLayout()
        line_of_group.setSpacing(10)
        self._group_label = label(tr("Weights per scale"))
        line_of_group.addWidget(self._group_label)
        self._group.setObjectName("groupSize")
        self._group.setAccessibleName(tr("Weights per scale"))
        for group in sorted({size.conversion.group_size for size in self._report.sizes if size.conversion.bits != 16}):
            self._group.addItem(str(group), group)
        line_of_group.addWidget(self._group)
        self._group_help = label(tr("Fewer is more exact and larger."), "caption", wrap=True)
        line_of_group.addWidget(self._group_help, 1)
        self.column.addLayout(line_of_group)
        self._need = label("", "muted", wrap=True)
        self._need.setObjectName("reportNeed")
        self.column.addWidget(self._need)
        self._qualities.idToggled.connect(lambda _identity, _on: self._show_choice())
        self._group.currentIndexChanged.connect(lambda _index: self._show_choice())
        self._qualities.buttons()[0].setChecked(True)
        self._group.setCurrentIndex(max(0, self._group.findData(Conversion().group_size)))
        self._show_choice()

    def _size(self, bits: int) -> api.SizeChoice:
        """The size for these bits with the group that is chosen."""
        sizes = [size for size in self._report.sizes if size.conversion.bits == bits]
        return next((size for size in sizes if size.conversion.group_size == self._group.currentData()), sizes[0])

    def _chosen(self) -> api.SizeChoice:
        return self._size(self._qualities.checkedId())

    def _show_choice(self) -> None:
        for choice in self._qualities.buttons():
            assert isinstance(choice, _QualityButton)
            choice.show_size(self._size(choice.bits).file_bytes)
        chosen = self._chosen()
        for widget in (self._group_label, self._group, self._group_help):
            widget.setVisible(chosen.conversion.bits != 16 and self._group.count() > 1)
        memory = self._report.memory_bytes
        said = [tr("The new file takes {size}.", size=size_words(chosen.file_bytes))]
        if memory:
            context = min(memory, key=lambda tokens: abs(tokens - _SMALL_CONTEXT))
            sizes = self._report.sizes
            planned = next((size for size in sizes if size.conversion == Conversion()), sizes[0])
            needed = memory[context] - planned.file_bytes + chosen.file_bytes
            free = _free_memory()
            said.append(
                tr(
                    "With {context} tokens of context it needs about {needed} of memory; {free} are free now.",
                    context=count_words(context),
                    needed=size_words(needed),
                    free=size_words(free),
                )
            )
            if needed > free:
                said.append(tr("That is more than is free: choose a smaller format, or close other programs."))
        self._need.setText(" ".join(said))


class _QualityButton(QAbstractButton):
    """One quality: what it is good for and how large it becomes."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self.setObjectName(f"quality{bits}")
        self.setCheckable(True)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setText(tr("{bits} bits", bits=bits))
        words = {
            4: tr("Smallest and fastest"),
            8: tr("Nearly lossless"),
            16: tr("As the source, slowest"),
        }
        self._words = words[bits]
        self._size = ""

    def show_size(self, count: int) -> None:
        """Show how large the file becomes."""
        self._size = size_words(count)
        self.setAccessibleName(f"{self.text()}, {self._size}, {self._words}")
        self.setToolTip(self._words)
        self.update()

    @override
    def sizeHint(self) -> QSize:
        return QSize(150, look().px(14) * 2 + look().px(12) + 44)

    @override
    def minimumSizeHint(self) -> QSize:
        return QSize(80, self.sizeHint().height())

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        rect = QRectF(self.rect()).adjusted(1, 1, -1, -1)
        on = self.isChecked()
        painter.setPen(QPen(look().color("accent" if on or self.hasFocus() else "line"), 1.6 if on else 1))
        painter.setBrush(look().color("accent_soft" if on else ("hover" if self.underMouse() else "surface")))
        painter.drawRoundedRect(rect, 12, 12)
        inner = self.rect().adjusted(16, 12, -14, -12)
        left = Qt.AlignmentFlag.AlignLeft
        painter.setFont(look().font(14, bold=True))
        painter.setPen(look().color("text"))
        painter.drawText(inner, left | Qt.AlignmentFlag.AlignTop, self.text())
        painter.setFont(look().font(14))
        painter.drawText(inner, left | Qt.AlignmentFlag.AlignVCenter, self._size)
        painter.setFont(look().font(12))
        painter.setPen(look().color("muted"))
        words = painter.fontMetrics().elidedText(self._words, Qt.TextElideMode.ElideRight, inner.width())
        painter.drawText(inner, left | Qt.AlignmentFlag.AlignBottom, words)


class _ProgressCard(_Card):
    """A conversion under way."""

    def __init__(self, name: str, cancel: Callable[[], None]) -> None:
        super().__init__()
        self.setObjectName("progressCard")
        self.column.addWidget(label(tr("Converting {name}", name=name), "name", wrap=True))
        self._bar = QProgressBar()
        self._bar.setObjectName("conversionProgress")
        self._bar.setAccessibleName(tr("Progress of the conversion"))
        self._bar.setTextVisible(False)
        self._bar.setRange(0, 1000)
        self.column.addWidget(self._bar)
        self._words = label(tr("Getting ready…"), "muted")
        self._words.setObjectName("conversionWords")
        self.column.addWidget(self._words)
        self._note = label(
            tr("You can go on chatting meanwhile. The source folder is only read."), "caption", wrap=True
        )
        self.column.addWidget(self._note)
        row = QHBoxLayout()
        self._stop = button(tr("Cancel"))
        self._stop.setObjectName("cancelConversion")
        self._stop.clicked.connect(self._cancel)
        self._cancel_now = cancel
        self._begin_s = time.monotonic()
        row.addWidget(self._stop)
        row.addStretch(1)
        self.column.addLayout(row)

    def _cancel(self) -> None:
        self._stop.setEnabled(False)
        self._words.setText(tr("Cancelling…"))
        self._cancel_now()

    def show_progress(self, progress: api.Progress) -> None:
        """Show how far it is."""
        if not self._stop.isEnabled():
            return
        share = progress.done / progress.total if progress.total else 0.0
        self._bar.setValue(round(1000 * share))
        left_s = progress.eta_s
        if left_s is None and share > _MEASURED_SHARE:
            left_s = (time.monotonic() - self._begin_s) * (1 - share) / share
        if progress.unit == "bytes" and progress.total:
            words = tr("{done} of {total}", done=size_words(progress.done), total=size_words(progress.total))
        else:
            words = f"{progress.done / progress.total:.0%}" if progress.total else ""
        if progress.stage == "verify":
            words = tr("Checking") + " · " + words
        if left_s is not None and share < 1:
            words += " · " + tr("about {time} left", time=duration_words(left_s))
        self._words.setText(words)


class _DoneCard(_Card):
    """A conversion that ended well."""

    def __init__(self, name: str, out: Path, chat: Callable[[Path], None], dismiss: Callable[[], None]) -> None:
        super().__init__()
        self.setObjectName("doneCard")
        row = QHBoxLayout()
        row.setSpacing(12)
        row.addWidget(small_icon("check", "good", 24))
        row.addWidget(label(tr("{name} is ready", name=name), "name", wrap=True), 1)
        self.column.addLayout(row)
        self.column.addWidget(
            label(tr("{file}, {size}", file=out.name, size=size_words(_size_of(out))), "muted", wrap=True)
        )
        buttons = QHBoxLayout()
        buttons.setSpacing(10)
        go = button(tr("Chat with it"), "primary", "chat", "on_accent")
        go.setObjectName("chatWith")
        go.clicked.connect(lambda: chat(out))
        buttons.addWidget(go)
        more = button(tr("Add another"))
        more.setObjectName("addAnother")
        more.clicked.connect(dismiss)
        buttons.addWidget(more)
        buttons.addStretch(1)
        self.column.addLayout(buttons)


class _LibraryRow(QFrame):
    """A model of the library."""

    def __init__(self, entry: ModelEntry, chat: Callable[[Path], None], remove: Callable[[ModelEntry], None]) -> None:
        super().__init__()
        self.entry = entry
        self.setProperty("role", "card")
        self.setObjectName("libraryRow")
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
        head.addStretch(1)
        words.addLayout(head)
        facts = [entry.detail]
        if entry.disk_bytes:
            facts.append(size_words(entry.disk_bytes))
        if entry.parameters:
            facts.append(parameter_words(entry.parameters))
        if entry.context:
            facts.append(tr("{count} tokens of context", count=count_words(entry.context)))
        words.addWidget(label(" · ".join(facts), "caption", wrap=True))
        row.addLayout(words, 1)
        go = button(tr("Chat"))
        go.setAccessibleName(tr("Chat with {name}", name=entry.name))
        go.clicked.connect(lambda: chat(entry.path))
        row.addWidget(go)
        if not entry.starter:
            reveal = IconButton("folder", tr("Show {name} in its folder", name=entry.name))
            reveal.clicked.connect(lambda: reveal_path(entry.path))
            row.addWidget(reveal)
            away = IconButton("trash", tr("Remove {name}…", name=entry.name))
            away.setObjectName("removeModel")
            away.clicked.connect(lambda: remove(entry))
            row.addWidget(away)

    def show_use(self, *, in_use: bool) -> None:
        """Whether this model answers now."""
        self._chip.setVisible(in_use)


def reveal_path(path: Path) -> None:
    """Open the folder of a file in the desktop's file manager."""
    QDesktopServices.openUrl(QUrl.fromLocalFile(str(path if path.is_dir() else path.parent)))


class _Facts(QWidget):
    """What a model is: titles and values in as many columns as there is room for."""

    def __init__(self, report: api.ModelReport) -> None:
        super().__init__()
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(24)
        self._grid.setVerticalSpacing(12)
        self._cells: list[QWidget] = []
        self._columns = 0
        template = tr("yes") if report.chat_template else tr("none: it continues text")
        for title, value in (
            (tr("Family"), report.family or tr("unknown")),
            (tr("Size"), parameter_words(report.parameters) if report.parameters else ""),
            (tr("Context"), tr("{count} tokens", count=count_words(report.context)) if report.context else ""),
            (tr("Stored as"), ", ".join(filter(None, (report.source_dtype, size_words(report.disk_bytes))))),
            (tr("Chat template"), template),
            (tr("Licence"), report.licence or tr("not stated")),
        ):
            if value:
                self._cells.append(self._cell(title, value))
        self._arrange(3)

    @staticmethod
    def _cell(title: str, value: str) -> QWidget:
        cell = QWidget()
        column = QVBoxLayout(cell)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(1)
        column.addWidget(label(title, "caption"))
        said = label(value, wrap=True)
        said.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        column.addWidget(said)
        column.addStretch(1)
        return cell

    def _arrange(self, columns: int) -> None:
        if columns == self._columns:
            return
        self._columns = columns
        for number, cell in enumerate(self._cells):
            self._grid.addWidget(cell, number // columns, number % columns)
        for column in range(3):
            self._grid.setColumnStretch(column, 1 if column < columns else 0)

    @override
    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._arrange(3 if event.size().width() >= look().gap(480) else 2)


def _free_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _empty(layout: QVBoxLayout) -> None:
    while layout.count():
        widget = layout.takeAt(0).widget()
        widget.hide()
        widget.deleteLater()
