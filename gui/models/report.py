"""The first steps of adding a model: what it is and needs, and the choice of quality."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent, QPen, QResizeEvent
from PySide6.QtWidgets import (
    QAbstractButton,
    QButtonGroup,
    QComboBox,
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)
from typing_extensions import override

from engine.settings import Conversion
from gui.kit.controls import Elided, IconButton, LineEdit, button, label, small_icon
from gui.kit.i18n import tr
from gui.kit.theme import look
from gui.kit.words import count_words, duration_words, engine_words, joined, parameter_words, size_words
from gui.models.steps import MODEL, QUALITY, Steps

if TYPE_CHECKING:
    from engine import api

__all__ = ["ReportCard"]

_SMALL_CONTEXT = 4096


class ReportCard(QFrame):
    """The first two steps of adding a model: what it is, and the choice of quality.

    bandwidth_gb: what this computer reads of its memory in a second, for a forecast; 0 when not measured
    """

    def __init__(
        self,
        report: api.ModelReport,
        start: Callable[[Conversion], None],
        chat: Callable[[Path], None],
        dismiss: Callable[[], None],
        *,
        bandwidth_gb: float = 0.0,
    ) -> None:
        super().__init__()
        self.setProperty("role", "card")
        self.setObjectName("reportCard")
        self._report = report
        self._bandwidth = bandwidth_gb
        self.column = QVBoxLayout(self)
        self.column.setContentsMargins(24, 20, 24, 22)
        self.column.setSpacing(14)
        head = QHBoxLayout()
        name = label(report.name, "name", wrap=True)
        name.setObjectName("reportName")
        head.addWidget(name, 1)
        close = IconButton("close", tr("Close"), size=18)
        close.setObjectName("dismissReport")
        close.clicked.connect(dismiss)
        head.addWidget(close, 0, Qt.AlignmentFlag.AlignTop)
        self.column.addLayout(head)
        self._converts = report.usable and bool(report.sizes)
        self._pages = (self._make_model(), self._make_quality()) if self._converts else (self._make_model(),)
        if self._converts:
            self._steps = Steps(MODEL)
            self.column.addWidget(self._steps)
        for page in self._pages:
            self.column.addWidget(page)
        row = QHBoxLayout()
        row.setSpacing(10)
        if self._converts:
            self._add_ways(row, start)
        elif report.usable:
            go = button(tr("Chat with it"), "primary", "chat", "on_accent")
            go.setObjectName("chatWith")
            go.clicked.connect(lambda: chat(report.path))
            row.addWidget(go)
            row.addStretch(1)
        self.column.addLayout(row)
        if self._converts:
            self._show_choice()
            self._show_page(MODEL)

    # ---- the steps

    def _add_ways(self, row: QHBoxLayout, start: Callable[[Conversion], None]) -> None:
        self._go = button(tr("Convert"), "primary")
        self._go.setObjectName("convert")
        self._go.clicked.connect(lambda: start(self._conversion()))
        row.addWidget(self._go)
        self._choose = button(tr("Choose the quality…"))
        self._choose.setObjectName("chooseQuality")
        self._choose.clicked.connect(lambda: self._show_page(QUALITY))
        row.addWidget(self._choose)
        self._back = button(tr("Back"))
        self._back.setObjectName("backToModel")
        self._back.clicked.connect(lambda: self._show_page(MODEL))
        row.addWidget(self._back)
        self._brief = Elided("caption")
        self._brief.setObjectName("reportBrief")
        row.addWidget(self._brief)
        row.addStretch(1)

    def _show_page(self, step: int) -> None:
        had_focus = self._choose.hasFocus() or self._back.hasFocus()
        self._steps.show_step(step)
        for number, page in enumerate(self._pages):
            page.setVisible(number == step)
        self._choose.setVisible(step == MODEL)
        self._back.setVisible(step == QUALITY)
        self._brief.setVisible(step == MODEL)
        if had_focus:
            (self._qualities.checkedButton() if step == QUALITY else self._choose).setFocus()

    def _make_model(self) -> QWidget:
        """What the model is, and whether it can be used."""
        report = self._report
        page = QWidget()
        column = QVBoxLayout(page)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(14)
        column.addWidget(_Facts(report))
        said = QVBoxLayout()
        said.setSpacing(8)
        if not report.usable:
            verdict = tr("It cannot be used like this:")
        elif not report.sizes:
            verdict = tr("It is ready to be used.")
        elif report.problems:
            verdict = tr("It can be converted. Worth knowing:")
        else:
            verdict = tr("Nothing is missing: it can be converted.")
        said.addWidget(label(verdict, "strong", wrap=True))
        said.itemAt(0).widget().setObjectName("reportVerdict")
        for problem in report.problems:
            said.addLayout(_finding(engine_words(problem.sentence), serious=problem.fatal))
        column.addLayout(said)
        return page

    def _make_quality(self) -> QWidget:
        """The choice of quality, with what each costs."""
        page = QWidget()
        column = QVBoxLayout(page)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(12)
        self._qualities = QButtonGroup(self)
        kinds = list(dict.fromkeys(_kind(size.conversion) for size in self._report.sizes))
        for levels in (False, True):
            row = QHBoxLayout()
            row.setSpacing(10)
            for kind in kinds:
                if kind.isdecimal() != levels:
                    choice = _QualityButton(kind)
                    self._qualities.addButton(choice, kinds.index(kind))
                    row.addWidget(choice, 1)
            if levels and row.count():
                words = tr(
                    "Fitted to a sample text in several languages: more faithful at the same size, but slower to make."
                )
                column.addWidget(label(words, "caption", wrap=True))
            column.addLayout(row)
        line_of_group = QHBoxLayout()
        line_of_group.setSpacing(10)
        self._group_label = label(tr("Weights per scale"))
        line_of_group.addWidget(self._group_label)
        self._group = QComboBox()
        self._group.setObjectName("groupSize")
        self._group.setAccessibleName(tr("Weights per scale"))
        conversions = [size.conversion for size in self._report.sizes]
        for group in sorted({conversion.group_size for conversion in conversions if _grouped(conversion)}):
            self._group.addItem(str(group), group)
        line_of_group.addWidget(self._group)
        self._group_help = label(tr("Fewer is more exact and larger."), "caption", wrap=True)
        line_of_group.addWidget(self._group_help, 1)
        column.addLayout(line_of_group)
        rules = QHBoxLayout()
        rules.setSpacing(10)
        rules.addWidget(label(tr("Exceptions")))
        self._rules = LineEdit()
        self._rules.setObjectName("keepRules")
        self._rules.setAccessibleName(tr("Exceptions"))
        self._rules.setPlaceholderText("head=q8 *.attention.*=f16")
        help_text = tr("Tensors that keep another format, as name=format; the last rule that fits counts.")
        self._rules.setToolTip(help_text)
        self._rules.setAccessibleDescription(help_text)
        rules.addWidget(self._rules, 1)
        column.addLayout(rules)
        self._need = label("", "muted", wrap=True)
        self._need.setObjectName("reportNeed")
        column.addWidget(self._need)
        self._qualities.buttons()[0].setChecked(True)
        self._group.setCurrentIndex(max(0, self._group.findData(Conversion().group_size)))
        self._qualities.idToggled.connect(lambda _identity, _on: self._show_choice())
        self._group.currentIndexChanged.connect(lambda _index: self._show_choice())
        return page

    # ---- the choice

    def _size(self, kind: str) -> api.SizeChoice:
        """The size for this quality, with the group that is chosen where there is a choice."""
        sizes = [size for size in self._report.sizes if _kind(size.conversion) == kind]
        return next((size for size in sizes if size.conversion.group_size == self._group.currentData()), sizes[0])

    def _chosen(self) -> api.SizeChoice:
        chosen = self._qualities.checkedButton()
        assert isinstance(chosen, _QualityButton)
        return self._size(chosen.kind)

    def _conversion(self) -> Conversion:
        return self._chosen().conversion.model_copy(update={"keep": tuple(self._rules.text().split())})

    def _show_choice(self) -> None:
        for choice in self._qualities.buttons():
            assert isinstance(choice, _QualityButton)
            size = self._size(choice.kind)
            choice.show_size(size.file_bytes, size.seconds)
        chosen = self._chosen()
        for widget in (self._group_label, self._group, self._group_help):
            widget.setVisible(_grouped(chosen.conversion) and self._group.count() > 1)
        takes = size_words(chosen.file_bytes)
        brief = [self._qualities.checkedButton().text(), takes]
        said = [tr("The new file takes {size}.", size=takes)]
        if chosen.seconds:
            time = duration_words(chosen.seconds)
            brief.append(tr("about {time}", time=time))
            said.append(tr("Making it takes about {time}.", time=time))
        self._brief.show_text(" · ".join(brief))
        memory = self._report.memory_bytes
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
        if self._bandwidth:
            speed = self._bandwidth * 1e9 / chosen.file_bytes
            said.append(tr("It can write up to {speed} tokens/s here.", speed=f"{speed:.0f}"))
        self._need.setText(joined(said))


def _kind(conversion: Conversion) -> str:
    """What a quality is called among the choices: its level, or its bits."""
    return str(conversion.bits) if conversion.level == "plain" else conversion.level


def _grouped(conversion: Conversion) -> bool:
    """Whether the number of weights that share a scale can be chosen."""
    return conversion.level == "plain" and conversion.bits != 16


def _finding(sentence: str, *, serious: bool) -> QHBoxLayout:
    """A line about something found."""
    row = QHBoxLayout()
    row.setSpacing(10)
    sign = small_icon("error" if serious else "warning", "danger" if serious else "warning")
    row.addWidget(sign, 0, Qt.AlignmentFlag.AlignTop)
    text = label(sentence, wrap=True)
    text.setObjectName("reportProblem")
    text.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    row.addWidget(text, 1)
    return row


class _QualityButton(QAbstractButton):
    """One quality: what it is good for and how large it becomes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.setObjectName(f"quality{kind.capitalize()}")
        self.setCheckable(True)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        titles = {"small": tr("Small"), "balanced": tr("Balanced"), "best": tr("Best")}
        self.setText(titles.get(kind) or tr("{bits} bits", bits=kind))
        words = {
            "4": tr("Smallest and fastest"),
            "8": tr("Nearly lossless"),
            "16": tr("As the source, slowest"),
            "small": tr("4 bits"),
            "balanced": tr("More bits where it matters"),
            "best": tr("6 bits"),
        }
        self._words = words[kind]
        self._size = ""

    def show_size(self, count: int, seconds: float) -> None:
        """Show how large the file becomes, and how long that takes where known."""
        self._size = size_words(count)
        if seconds:
            self._size += " · " + tr("about {time}", time=duration_words(seconds))
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
