"""Small controls of the window."""

from __future__ import annotations

from typing import Literal

from PySide6.QtCore import QPointF, QRectF, QSize, Qt, QVariantAnimation, Signal
from PySide6.QtGui import QColor, QInputMethodEvent, QKeyEvent, QMouseEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import (
    QCheckBox,
    QFrame,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QProgressBar,
    QPushButton,
    QSizePolicy,
    QToolButton,
    QWidget,
)
from typing_extensions import override

from gui.kit.i18n import tr
from gui.kit.icons import icon, paint_icon, set_icon
from gui.kit.theme import look
from gui.kit.words import count_words

__all__ = [
    "Banner",
    "ContextGauge",
    "Elided",
    "IconButton",
    "LineEdit",
    "Switch",
    "button",
    "label",
    "small_icon",
]


def label(text: str, role: str = "", *, wrap: bool = False, parent: QWidget | None = None) -> QLabel:
    """A text in one of the roles of the style sheet; never markup."""
    made = QLabel(text, parent)
    made.setTextFormat(Qt.TextFormat.PlainText)
    made.setProperty("role", role)
    made.setWordWrap(wrap)
    if wrap:
        made.setMinimumWidth(60)  # Qt's own guess keeps pages from becoming narrow
    return made


def button(text: str, role: str = "", icon_name: str = "", tone: str = "text") -> QPushButton:
    """A push button in one of the roles of the style sheet."""
    made = QPushButton(text)
    made.setProperty("role", role)
    made.setCursor(Qt.CursorShape.PointingHandCursor)
    if icon_name:
        set_icon(made, icon_name, tone, 18)
    return made


class IconButton(QToolButton):
    """A button that is an icon; its name is its tooltip and what a screen reader says."""

    def __init__(self, icon_name: str, name: str, parent: QWidget | None = None, size: int = 20) -> None:
        super().__init__(parent)
        self._size = size
        self.setAutoRaise(True)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.call(name)
        self.show_icon(icon_name)

    def call(self, name: str, tooltip: str = "") -> None:
        """What the button is called; the tooltip may say more."""
        self.setAccessibleName(name)
        self.setToolTip(tooltip or name)

    def show_icon(self, icon_name: str, tone: str = "muted") -> None:
        """Show another icon."""
        set_icon(self, icon_name, tone, self._size)


class Switch(QCheckBox):
    """An on/off setting, drawn as a sliding knob."""

    def __init__(self, name: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAccessibleName(name)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self._place = 0.0
        self._slide = QVariantAnimation(self, duration=110)
        self._slide.valueChanged.connect(self._moved)
        self.toggled.connect(self._toggled)

    def _toggled(self, on: bool) -> None:  # noqa: FBT001 (a Qt slot)
        self._slide.stop()
        if not self.isVisible():
            self._place = float(on)
            return
        self._slide.setStartValue(self._place)
        self._slide.setEndValue(float(on))
        self._slide.start()

    def _moved(self, place: float) -> None:
        self._place = place
        self.update()

    @override
    def sizeHint(self) -> QSize:
        return QSize(40, 24)

    @override
    def hitButton(self, pos: object) -> bool:
        return True

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        track = QRectF(2, (self.height() - 20) / 2, 36, 20)
        painter.setPen(Qt.PenStyle.NoPen)
        on, off = look().color("accent"), look().color("pressed")
        blend = self._place
        color = QColor.fromRgbF(
            off.redF() * (1 - blend) + on.redF() * blend,
            off.greenF() * (1 - blend) + on.greenF() * blend,
            off.blueF() * (1 - blend) + on.blueF() * blend,
        )
        if not self.isEnabled():
            color.setAlphaF(0.5)
        painter.setBrush(color)
        painter.drawRoundedRect(track, 10, 10)
        painter.setBrush(Qt.GlobalColor.white)
        painter.drawEllipse(QPointF(track.left() + 10 + 16 * blend, track.center().y()), 7, 7)
        if self.hasFocus():
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.setPen(QPen(look().color("accent"), 1.5))
            painter.drawRoundedRect(track.adjusted(-1.5, -1.5, 1.5, 1.5), 11, 11)


class ContextGauge(QProgressBar):
    """How much of the context the conversation takes: a ring and the numbers. A click asks for more."""

    asked = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._more = 0
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setObjectName("contextGauge")
        self.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        self.show_use(0, 0)

    def show_use(self, used: int, context: int, more: int = 0) -> None:
        """`used` tokens of `context`, and `more` that are being written; nothing is known when `context` is 0."""
        self._more = more
        self.setRange(0, max(1, context))
        self.setValue(min(used, max(1, context)))
        self.setVisible(context > 0)
        said = tr("{used} of {context} tokens of context", used=count_words(used), context=count_words(context))
        self.setFormat(f"{count_words(used)} / {count_words(context)}")
        self.setToolTip(said)
        self.setAccessibleName(said)
        self.updateGeometry()
        self.update()

    @override
    def sizeHint(self) -> QSize:
        font = look().font(12)
        width = self.fontMetrics().horizontalAdvance(self.format()) * font.pixelSize() / max(1, look().px(14))
        return QSize(int(width) + 32, 24)

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        share = self.value() / self.maximum()
        ring = QRectF(3, self.height() / 2 - 7, 14, 14)
        painter.setPen(QPen(look().color("pressed"), 2.6))
        painter.drawEllipse(ring)
        tone = "accent" if share < 0.8 else ("warning" if share < 0.95 else "danger")
        painter.setPen(QPen(look().color(tone), 2.6, Qt.PenStyle.SolidLine, Qt.PenCapStyle.RoundCap))
        painter.drawArc(ring, 90 * 16, -round(share * 360 * 16))
        if self._more:
            added = min(1 - share, self._more / self.maximum())
            painter.setPen(QPen(look().color("warning"), 2.6, Qt.PenStyle.SolidLine, Qt.PenCapStyle.FlatCap))
            painter.drawArc(ring, round((90 - share * 360) * 16), -round(added * 360 * 16))
        if self.hasFocus():
            painter.setPen(QPen(look().color("accent"), 1))
            painter.drawRoundedRect(QRectF(self.rect()).adjusted(0.5, 0.5, -0.5, -0.5), 8, 8)
        painter.setFont(look().font(12))
        painter.setPen(look().color("muted"))
        painter.drawText(self.rect().adjusted(24, 0, 0, 0), Qt.AlignmentFlag.AlignVCenter, self.format())

    @override
    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        if self.rect().contains(event.position().toPoint()):
            self.asked.emit()

    @override
    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in {Qt.Key.Key_Space, Qt.Key.Key_Return, Qt.Key.Key_Enter}:
            self.asked.emit()
        else:
            super().keyPressEvent(event)


class Elided(QLabel):
    """A line of text that gives way when there is no room."""

    def __init__(self, role: str = "strong", text: str = "") -> None:
        super().__init__()
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setProperty("role", role)
        self.setMinimumWidth(20)
        self.show_text(text)

    def show_text(self, text: str) -> None:
        """Show a text; all of it is in the tooltip."""
        self.setText(text)
        self.setToolTip(text)

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setPen(self.palette().text().color())
        said = self.fontMetrics().elidedText(self.text(), Qt.TextElideMode.ElideRight, self.width())
        painter.drawText(self.rect(), Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, said)

    @override
    def minimumSizeHint(self) -> QSize:
        return QSize(20, super().minimumSizeHint().height())


class LineEdit(QLineEdit):
    """A line of text; Enter that picks a word of an input method does nothing else."""

    composing = False

    @override
    def inputMethodEvent(self, event: QInputMethodEvent) -> None:
        self.composing = bool(event.preeditString())
        super().inputMethodEvent(event)

    @override
    def keyPressEvent(self, event: QKeyEvent) -> None:
        if self.composing and event.key() in {Qt.Key.Key_Return, Qt.Key.Key_Enter, Qt.Key.Key_Escape}:
            event.accept()
        else:
            super().keyPressEvent(event)


class Banner(QFrame):
    """One sentence across the top of the window, until it is closed."""

    closed = Signal()

    def __init__(
        self, sentence: str, kind: Literal["note", "warning", "problem"], parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self.setProperty("kind", kind)
        self.setObjectName("banner")
        self._tone = {"note": "muted", "warning": "warning", "problem": "danger"}[kind]
        self._icon = {"note": "info", "warning": "warning", "problem": "error"}[kind]
        row = QHBoxLayout(self)
        row.setContentsMargins(40, 6, 8, 6)
        self.text = label(sentence, wrap=True)
        self.text.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        row.addWidget(self.text, 1)
        close = IconButton("close", tr("Close"), self, size=16)
        close.clicked.connect(self.closed)
        row.addWidget(close, 0, Qt.AlignmentFlag.AlignTop)

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        painter = QPainter(self)
        paint_icon(painter, self._icon, QRectF(13, self.height() / 2 - 9, 18, 18), self._tone)


def small_icon(name: str, tone: str, size: int = 18) -> QLabel:
    """An icon as a label, painted in a colour of the theme when it is made."""
    made = QLabel()
    made.setPixmap(icon(name, tone, size).pixmap(size, size))
    made.setFixedSize(size, size)
    return made
