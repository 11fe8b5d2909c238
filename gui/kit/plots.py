"""Small pictures of numbers, drawn in the theme's colours."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPainterPath, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QWidget
from typing_extensions import override

from gui.kit.theme import look

__all__ = ["Bars", "Plot"]

_SAMPLES = 90


class Plot(QWidget):
    """Two shares (0..1) over the last minute and a half: one as an area, one as a line above it."""

    def __init__(self, name: str, title: str) -> None:
        super().__init__()
        self.setObjectName(name)
        self._title = title
        self._words = ""
        self._values: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName(title)

    def add(self, own: float, everything: float, words: str) -> None:
        """One more sample, and what it is in words."""
        self._values.append((own, everything))
        self._words = words
        self.setAccessibleDescription(words)
        self.update()

    @override
    def sizeHint(self) -> QSize:
        return QSize(240, look().gap(120))

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        head = look().px(13) + 10
        painter.setFont(look().font(13))
        painter.setPen(look().color("text"))
        top = self.rect().adjusted(0, 0, 0, head - self.height())
        painter.drawText(top, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, self._title)
        painter.setPen(look().color("muted"))
        painter.drawText(top, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, self._words)
        area = QRectF(self.rect()).adjusted(0.5, head + 2, -0.5, -0.5)
        shape = QPainterPath()
        shape.addRoundedRect(area, 10, 10)
        painter.setPen(look().color("line"))
        painter.setBrush(look().color("window"))
        painter.drawPath(shape)
        painter.setClipPath(shape)
        for part in (0.25, 0.5, 0.75):
            y = area.bottom() - part * area.height()
            painter.drawLine(QPointF(area.left(), y), QPointF(area.right(), y))
        self._paint_series(painter, area, 1, look().color("faint"), fill=False)
        self._paint_series(painter, area, 0, look().color("accent"), fill=True)

    def _paint_series(self, painter: QPainter, area: QRectF, which: int, color: QColor, *, fill: bool) -> None:
        if len(self._values) < 2:
            return
        step = area.width() / (_SAMPLES - 1)
        first = area.right() - step * (len(self._values) - 1)
        path = QPainterPath()
        for number, values in enumerate(self._values):
            place = QPointF(first + number * step, area.bottom() - min(1.0, values[which]) * (area.height() - 2) - 1)
            path.lineTo(place) if number else path.moveTo(place)
        painter.setBrush(Qt.BrushStyle.NoBrush)
        painter.setPen(QPen(color, 1.8))
        painter.drawPath(path)
        if fill:
            path.lineTo(area.right(), area.bottom())
            path.lineTo(first, area.bottom())
            color.setAlphaF(0.16)
            painter.fillPath(path, color)


class Bars(QWidget):
    """Named numbers as bars: what was expected as an outline, what was measured filled."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.setObjectName(name)
        self._rows: Sequence[tuple[str, float, float, str]] = ()
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def show_rows(self, rows: Sequence[tuple[str, float, float, str]]) -> None:
        """(name, expected, measured, words); 0 is not known."""
        self._rows = rows
        self.setAccessibleName("; ".join(f"{name}: {words}" for name, _expected, _measured, words in rows))
        self.updateGeometry()
        self.update()

    @override
    def sizeHint(self) -> QSize:
        return QSize(240, len(self._rows) * (look().px(13) + 22))

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        height = look().px(13) + 22
        most = max((max(expected, measured) for _name, expected, measured, _words in self._rows), default=0) or 1
        for number, (name, expected, measured, words) in enumerate(self._rows):
            top = number * height
            line = QRectF(0, top, self.width(), look().px(13) + 8)
            painter.setFont(look().font(13))
            painter.setPen(look().color("muted"))
            painter.drawText(line, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, words)
            room = self.width() - painter.fontMetrics().horizontalAdvance(words) - 16
            painter.setPen(look().color("text"))
            said = painter.fontMetrics().elidedText(name, Qt.TextElideMode.ElideMiddle, room)
            painter.drawText(line, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, said)
            track = QRectF(0.5, line.bottom(), self.width() - 1, 7)
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(look().color("accent_soft"))
            painter.drawRoundedRect(QRectF(track.left(), track.top(), track.width() * expected / most, 7), 3.5, 3.5)
            painter.setBrush(look().color("accent"))
            painter.drawRoundedRect(QRectF(track.left(), track.top(), track.width() * measured / most, 7), 3.5, 3.5)
