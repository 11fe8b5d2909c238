"""Small controls of the window, and forms made from the settings models.

A setting is declared once (`engine/settings.py`, `gui/preferences.py`); its
title, range, step, unit and help arrive here through the model's JSON schema.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel
from PySide6.QtCore import QPointF, QRectF, QSize, Qt, QVariantAnimation, Signal
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QPen, QWheelEvent
from PySide6.QtWidgets import (
    QAbstractSpinBox,
    QCheckBox,
    QComboBox,
    QDoubleSpinBox,
    QFrame,
    QHBoxLayout,
    QLabel,
    QProgressBar,
    QPushButton,
    QSizePolicy,
    QSlider,
    QSpinBox,
    QToolButton,
    QVBoxLayout,
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
    "Field",
    "Form",
    "IconButton",
    "Switch",
    "button",
    "camel",
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


def camel(name: str) -> str:
    """The object name of a setting: `repetition_penalty` -> `repetitionPenalty`."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


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
    """How much of the context the conversation takes: a ring and the numbers."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("contextGauge")
        self.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        self.show_use(0, 0)

    def show_use(self, used: int, context: int) -> None:
        """`used` tokens of `context`; nothing is known when `context` is 0."""
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
        painter.setFont(look().font(12))
        painter.setPen(look().color("muted"))
        painter.drawText(self.rect().adjusted(24, 0, 0, 0), Qt.AlignmentFlag.AlignVCenter, self.format())


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


class _Calm:
    """Wheels scroll the page, not the value under the pointer, until the field has the focus."""

    def wheelEvent(self, event: QWheelEvent) -> None:
        """Leave the wheel to the page."""
        if self.hasFocus():  # type: ignore[attr-defined]
            super().wheelEvent(event)  # type: ignore[misc]
        else:
            event.ignore()


class _WholeBox(_Calm, QSpinBox):
    pass


class _FractionBox(_Calm, QDoubleSpinBox):
    pass


class _ChoiceBox(_Calm, QComboBox):
    pass


class _Slider(_Calm, QSlider):
    pass


class Field(QWidget):
    """One setting: title, value, slider where it has a range and a step, help, reset."""

    changed = Signal(object)

    def __init__(self, name: str, schema: Mapping[str, Any], default: Any, *, nothing: str = "") -> None:
        super().__init__()
        self.name = name
        self._schema = schema
        self._default = default
        self._silent = False
        title = tr(schema["title"])
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(2)
        row = QHBoxLayout()
        row.setSpacing(4)
        row.addWidget(label(title, "field"))
        self.reset = IconButton("reset", tr("Reset {name}", name=title), size=14)
        self.reset.setFixedSize(24, 24)
        self.reset.clicked.connect(lambda: self._set(self._default))
        hold = self.reset.sizePolicy()
        hold.setRetainSizeWhenHidden(True)
        self.reset.setSizePolicy(hold)
        row.addWidget(self.reset)
        row.addStretch(1)
        self.editor, self.slider = self._make_editor(nothing)
        self.editor.setObjectName(camel(name))
        self.editor.setAccessibleName(title)
        row.addWidget(self.editor)
        column.addLayout(row)
        if self.slider is not None:
            self.slider.setObjectName(camel(name) + "Slider")
            self.slider.setAccessibleName(title)
            column.addWidget(self.slider)
        help_text = label(tr(schema["description"]), "caption", wrap=True)
        column.addWidget(help_text)
        self.editor.setAccessibleDescription(help_text.text())
        self.show_value(default)

    def value(self) -> Any:
        """What is set."""
        if isinstance(self.editor, QCheckBox):
            return self.editor.isChecked()
        if isinstance(self.editor, QComboBox):
            return self.editor.currentData()
        if isinstance(self.editor, QDoubleSpinBox):
            return round(self.editor.value(), self.editor.decimals())
        assert isinstance(self.editor, QSpinBox)
        return self.editor.value()

    def show_value(self, value: Any, default: Any = ...) -> None:
        """Show a value without telling anybody; another default when given."""
        if default is not ...:
            self._default = default
        self._silent = True
        self._set(value)
        self._silent = False
        self._moved()

    def _set(self, value: Any) -> None:
        if isinstance(self.editor, QCheckBox):
            self.editor.setChecked(value)
        elif isinstance(self.editor, QComboBox):
            self.editor.setCurrentIndex(max(0, self.editor.findData(value)))
        elif isinstance(self.editor, QDoubleSpinBox):
            self.editor.setValue(value)
        elif isinstance(self.editor, QSpinBox):
            self.editor.setValue(min(value, self.editor.maximum()))

    def _make_editor(self, nothing: str) -> tuple[QWidget, QSlider | None]:
        schema = self._schema
        if schema.get("type") == "boolean":
            switch = Switch(schema["title"])
            switch.toggled.connect(self._moved)
            return switch, None
        if "enum" in schema:
            box = _ChoiceBox()
            labels = schema.get("labels", {})
            for choice in schema["enum"]:
                box.addItem(tr(labels[choice]) if choice in labels else str(choice), choice)
            box.currentIndexChanged.connect(self._moved)
            return box, None
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        high = schema.get("maximum", 2**31 - 1)
        step = schema.get("step")
        editor: QSpinBox | QDoubleSpinBox
        if schema["type"] == "integer":
            editor = _WholeBox()
            editor.setRange(int(low), int(min(high, 2**31 - 1)))  # Qt's whole numbers have 32 bits
            editor.setSingleStep(int(step or 1))
        else:
            editor = _FractionBox()
            editor.setDecimals(2)
            editor.setRange(low, high)
            editor.setSingleStep(step or 0.01)
        editor.setButtonSymbols(QAbstractSpinBox.ButtonSymbols.NoButtons)
        editor.setAlignment(Qt.AlignmentFlag.AlignRight)
        editor.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        if nothing:
            editor.setSpecialValueText(nothing)
        if schema.get("unit") == "%":
            editor.setSuffix(" %")
        editor.valueChanged.connect(self._moved)
        if step is not None and high < 2**31:
            return editor, self._make_slider(editor, float(low), float(high), float(step))
        return editor, None

    def _make_slider(self, editor: QSpinBox | QDoubleSpinBox, low: float, high: float, step: float) -> QSlider:
        """A slider in steps; a logarithmic one where the range spans more than three powers of ten."""
        slider = _Slider(Qt.Orientation.Horizontal)
        slider.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        logarithmic = low > 0 and high / low > 1000
        count = 300 if logarithmic else round((high - low) / step)
        slider.setRange(0, count)
        slider.setPageStep(max(1, count // 10))

        def to_value(position: int) -> float:
            if not logarithmic:
                return low + position * step
            value = math.exp(math.log(low) + math.log(high / low) * position / count)
            return max(low, round(value / step) * step) if value > 2 * step else round(value)

        def to_position(value: float) -> int:
            if not logarithmic:
                return round((value - low) / step)
            return round(count * math.log(max(low, value) / low) / math.log(high / low))

        def from_slider(position: int) -> None:
            if to_position(editor.value()) != position:
                self._set(int(to_value(position)) if isinstance(editor, QSpinBox) else to_value(position))

        def from_editor(value: float) -> None:
            slider.blockSignals(True)
            slider.setValue(to_position(value))
            slider.blockSignals(False)

        slider.valueChanged.connect(from_slider)
        editor.valueChanged.connect(from_editor)
        from_editor(editor.value())
        return slider

    def _moved(self, *_values: object) -> None:
        self.reset.setVisible(self.value() != self._default)
        if not self._silent:
            self.changed.emit(self.value())


@cache
def _properties(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of each field of a settings model."""
    properties: dict[str, Any] = model.model_json_schema()["properties"]
    return properties


class Form(QWidget):
    """The named fields of a settings model, one below the other. `changed` says a field's name and value."""

    changed = Signal(str, object)

    def __init__(
        self,
        model: type[BaseModel],
        names: Sequence[str],
        *,
        spacing: int = 16,
        nothing: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        properties = _properties(model)
        defaults = model()
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(spacing)
        self.fields: dict[str, Field] = {}
        for name in names:
            made = Field(name, properties[name], getattr(defaults, name), nothing=(nothing or {}).get(name, ""))
            made.changed.connect(lambda value, name=name: self.changed.emit(name, value))
            self.fields[name] = made
            column.addWidget(made)

    def show_values(self, values: BaseModel, defaults: BaseModel | None = None) -> None:
        """Show what is set, and what a reset goes back to."""
        for name, made in self.fields.items():
            made.show_value(getattr(values, name), ... if defaults is None else getattr(defaults, name))


def small_icon(name: str, tone: str, size: int = 18) -> QLabel:
    """An icon as a label, painted in a colour of the theme when it is made."""
    made = QLabel()
    made.setPixmap(icon(name, tone, size).pixmap(size, size))
    made.setFixedSize(size, size)
    return made
