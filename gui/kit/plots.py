"""Small pictures of numbers, drawn in the theme's colours."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPainterPath, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QWidget
from typing_extensions import override

from gui.kit.i18n import tr
from gui.kit.theme import look

__all__ = ["Bars", "Columns", "Plot", "Roofline"]

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


class Columns(QWidget):
    """Numbers side by side, such as one for each layer."""

    def __init__(self, name: str, title: str) -> None:
        super().__init__()
        self.setObjectName(name)
        self.setAccessibleName(title)
        self._title = title
        self._values: Sequence[float] = ()
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def show_values(self, values: Sequence[float]) -> None:
        """What there is, in order."""
        self._values = values
        said = ", ".join(f"{number}: {value:.2f}" for number, value in enumerate(values))
        self.setAccessibleDescription(said)
        self.setToolTip(said)
        self.update()

    @override
    def sizeHint(self) -> QSize:
        return QSize(240, look().gap(100))

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        head = look().px(12) + 8
        painter.setFont(look().font(12))
        painter.setPen(look().color("muted"))
        top = self.rect().adjusted(0, 0, 0, head - self.height())
        painter.drawText(top, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, self._title)
        if not self._values:
            return
        most = max(self._values) or 1
        painter.drawText(top, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, f"{most:.2f}")
        area = QRectF(self.rect()).adjusted(0.5, head, -0.5, -0.5)
        step = area.width() / len(self._values)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(look().color("accent"))
        for number, value in enumerate(self._values):
            height = area.height() * value / most
            painter.drawRect(QRectF(area.left() + number * step, area.bottom() - height, max(1.0, step - 2), height))


class Roofline(QWidget):
    """How fast is computed, over how much is computed with each byte that is read; both in powers of ten."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.setObjectName(name)
        self._bytes_per_s = 0.0
        self._points: Sequence[tuple[str, float, float]] = ()
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName(tr("Speed below the limits of this computer"))

    def show_points(self, bytes_per_s: float, points: Sequence[tuple[str, float, float]]) -> None:
        """(name, operations per byte, operations per second), and what the memory gives in a second."""
        self._bytes_per_s, self._points = bytes_per_s, points
        said = [
            tr("{name}: {rate} billion operations/s, {share} of what the memory allows",
               name=name, rate=f"{rate / 1e9:.0f}", share=f"{rate / (intensity * bytes_per_s):.0%}")
            for name, intensity, rate in points
            if bytes_per_s
        ]  # fmt: skip
        self.setAccessibleDescription("; ".join(said))
        self.setToolTip("\n".join(said))
        self.update()

    @override
    def sizeHint(self) -> QSize:
        return QSize(240, look().gap(220))

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        if not self._points or not self._bytes_per_s:
            return
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setFont(look().font(12))
        ceiling = max(rate for _name, _intensity, rate in self._points)
        intensities = [intensity for _name, intensity, _rate in self._points]
        left, right = math.floor(math.log10(min(intensities)) - 0.1), math.ceil(math.log10(max(intensities)) + 0.1)
        low = math.floor(math.log10(min(rate for _name, _intensity, rate in self._points)) - 0.1)
        high = math.ceil(math.log10(ceiling) + 0.2)
        line = look().px(12) + 8
        side = painter.fontMetrics().horizontalAdvance("100 GOPS") + 12
        area = QRectF(side, line / 2, self.width() - side - 24, self.height() - 2.5 * line)

        def place(intensity: float, rate: float) -> QPointF:
            x = (math.log10(intensity) - left) / (right - left)
            y = (math.log10(rate) - low) / (high - low)
            return QPointF(area.left() + x * area.width(), area.bottom() - y * area.height())

        painter.setPen(look().color("line"))
        painter.setBrush(look().color("window"))
        painter.drawRect(area)
        for power in range(low, high + 1):
            y = place(1, 10.0**power).y()
            painter.setPen(look().color("line"))
            painter.drawLine(QPointF(area.left(), y), QPointF(area.right(), y))
            painter.setPen(look().color("muted"))
            words = f"{10 ** (power - 12)} TOPS" if power >= 12 else f"{10.0 ** (power - 9):g} GOPS"
            where = QRectF(0, y - 10, side - 6, 20)
            painter.drawText(where, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, words)
        for power in range(left, right + 1):
            x = place(10.0**power, 10.0**low).x()
            painter.setPen(look().color("line"))
            painter.drawLine(QPointF(x, area.top()), QPointF(x, area.bottom()))
            painter.setPen(look().color("muted"))
            where = QRectF(x - 40, area.bottom() + 2, 80, line)
            painter.drawText(where, Qt.AlignmentFlag.AlignHCenter | Qt.AlignmentFlag.AlignTop, f"{10.0**power:g}")
        title = QRectF(area.left(), area.bottom() + line, area.width(), line)
        painter.drawText(title, Qt.AlignmentFlag.AlignHCenter, tr("operations per byte read"))
        painter.save()
        painter.setClipRect(area)
        painter.setPen(QPen(look().color("accent"), 2))
        ends = (10.0**left, 10.0**right)
        painter.drawLine(*(place(intensity, intensity * self._bytes_per_s) for intensity in ends))
        painter.setPen(QPen(look().color("accent"), 1.6, Qt.PenStyle.DashLine))
        painter.drawLine(*(place(intensity, ceiling) for intensity in ends))
        painter.restore()
        painter.setBrush(look().color("accent"))
        painter.setPen(QPen(look().color("surface"), 1.4))
        for _name, intensity, rate in self._points:
            painter.drawEllipse(place(intensity, rate), 5, 5)
        painter.setPen(look().color("text"))
        taken: list[QRectF] = []
        for name, intensity, rate in self._points:
            width = painter.fontMetrics().horizontalAdvance(name) + 2
            spot = place(intensity, rate)
            ways = [  # right or left of the point, below or above it
                QRectF(x, spot.y() + y, width, line)
                for y in (0.0, float(-line))
                for x in (spot.x() + 9, spot.x() - width - 9)
            ]
            free = [way for way in ways if area.contains(way) and not any(way.intersects(other) for other in taken)]
            if free:
                taken.append(free[0])
                painter.drawText(free[0], Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, name)
