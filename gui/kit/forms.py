"""Forms made from the settings models.

A setting is declared once (`engine/settings.py`, `gui/data/preferences.py`); its
title, range, step, unit and help arrive here through the model's JSON schema.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel
from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QWheelEvent
from PySide6.QtWidgets import (
    QAbstractSpinBox,
    QCheckBox,
    QComboBox,
    QDoubleSpinBox,
    QHBoxLayout,
    QLineEdit,
    QSlider,
    QSpinBox,
    QVBoxLayout,
    QWidget,
)

from gui.kit.controls import IconButton, Switch, label
from gui.kit.i18n import tr

__all__ = ["Field", "Form", "camel"]


def camel(name: str) -> str:
    """The object name of a setting: `repetition_penalty` -> `repetitionPenalty`."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


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
        if isinstance(self.editor, QLineEdit):
            return self.editor.text().strip()
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
        self._moved()
        self._silent = False

    def _set(self, value: Any) -> None:
        if isinstance(self.editor, QCheckBox):
            self.editor.setChecked(value)
        elif isinstance(self.editor, QComboBox):
            self.editor.setCurrentIndex(max(0, self.editor.findData(value)))
        elif isinstance(self.editor, QLineEdit):
            self.editor.setText(value)
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
        if schema["type"] == "string":
            words = QLineEdit()
            words.editingFinished.connect(self._moved)
            return words, None
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

    def lock(self, names: Collection[str]) -> None:
        """These cannot be changed here: an administrator decided them."""
        for name, made in self.fields.items():
            if name in names:
                made.setEnabled(False)
                made.setToolTip(tr("Decided by the administrator of this computer"))

    def show_values(self, values: BaseModel, defaults: BaseModel | None = None) -> None:
        """Show what is set, and what a reset goes back to."""
        for name, made in self.fields.items():
            made.show_value(getattr(values, name), ... if defaults is None else getattr(defaults, name))
