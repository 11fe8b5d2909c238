"""The steps of adding a model, and which of them one is at."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QWidget
from typing_extensions import override

from gui.kit.i18n import tr
from gui.kit.icons import paint_icon
from gui.kit.theme import look

__all__ = ["CONVERSION", "MODEL", "QUALITY", "RESULT", "Steps"]

MODEL: Final = 0
QUALITY: Final = 1
CONVERSION: Final = 2
RESULT: Final = 3


class Steps(QWidget):
    """A line of numbered steps: those that are done are ticked, the present one is filled."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.setObjectName("wizardSteps")
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self._names = (tr("Model"), tr("Quality"), tr("Conversion"), tr("Result"))
        self._at = -1
        self.show_step(at)

    def show_step(self, at: int) -> None:
        """Which step one is at, from 0."""
        if at != self._at:
            self._at = at
            name = tr("Step {number} of {count}: {name}", number=at + 1, count=len(self._names), name=self._names[at])
            self.setAccessibleName(name)
            self.setToolTip(name)
            self.update()

    @override
    def sizeHint(self) -> QSize:
        return QSize(240, look().px(13) + 14)

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        size = look().px(20)
        font, bold = look().font(13), look().font(13, bold=True)
        painter.setFont(bold)
        widths = [painter.fontMetrics().horizontalAdvance(name) for name in self._names]
        between = (self.width() - sum(widths) - len(widths) * (size + 8)) / (len(widths) - 1)
        named = between >= 24  # else there is room for the present step's name only
        if not named:
            between = (self.width() - widths[self._at] - len(widths) * size - 8) / (len(widths) - 1)
        x = 0.0
        for number, (name, width) in enumerate(zip(self._names, widths, strict=True)):
            disc = QRectF(x + 0.5, (self.height() - size) / 2 + 0.5, size - 1, size - 1)
            self._paint_disc(painter, disc, number)
            x += size
            if named or number == self._at:
                painter.setFont(bold if number == self._at else font)
                painter.setPen(look().color("text" if number == self._at else "muted"))
                words = QRectF(x + 8, 0, width + 4, self.height())
                painter.drawText(words, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, name)
                x += 8 + width
            if number + 1 < len(self._names) and between > 16:
                painter.setPen(QPen(look().color("accent" if number < self._at else "line"), 1.4))
                painter.drawLine(round(x + 8), self.height() // 2, round(x + between - 8), self.height() // 2)
            x += between

    def _paint_disc(self, painter: QPainter, disc: QRectF, number: int) -> None:
        done, here = number < self._at, number == self._at
        painter.setPen(QPen(look().color("accent" if done or here else "line"), 1.4))
        painter.setBrush(look().color("accent" if here else "accent_soft" if done else "surface"))
        painter.drawEllipse(disc)
        if done:
            paint_icon(painter, "check", disc.adjusted(3, 3, -3, -3), "accent")
            return
        painter.setFont(look().font(11, bold=True))
        painter.setPen(look().color("on_accent" if here else "muted"))
        painter.drawText(disc, Qt.AlignmentFlag.AlignCenter, str(number + 1))
