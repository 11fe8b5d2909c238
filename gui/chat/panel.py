"""The right side of the chat page: the system prompt, presets, and the sampler's values of this conversation."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QComboBox, QFrame, QHBoxLayout, QPlainTextEdit, QScrollArea, QVBoxLayout, QWidget

from engine.settings import Sampling
from gui.data.preferences import Preferences
from gui.data.presets import BUILT_IN, matching
from gui.kit.controls import button, label
from gui.kit.dialogs import ask_text
from gui.kit.forms import Form
from gui.kit.i18n import tr
from gui.kit.layout import line
from gui.kit.theme import look
from gui.kit.timing import timer
from gui.session import Session

__all__ = ["ADVANCED", "CONTROLS", "Panel"]

CONTROLS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "seed")
ADVANCED = ("typical_p", "repetition_window", "presence_penalty", "frequency_penalty")
_WIDTH = 292
_OTHER = "other"


class Panel(QFrame):
    """How answers of the conversation in view are drawn, made from the settings models."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.setObjectName("controls")
        self.setFixedWidth(look().gap(_WIDTH))
        self._session = session
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        area = QScrollArea()
        area.setWidgetResizable(True)
        area.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        column.addWidget(area)
        inner = QWidget()
        area.setWidget(inner)
        self._rows = QVBoxLayout(inner)
        self._rows.setContentsMargins(18, 16, 16, 18)
        self._rows.setSpacing(16)
        self._rows.addWidget(label(tr("This chat"), "heading"))
        self._add_system()
        self.streaming = Form(Preferences, ["streaming"])
        self.streaming.changed.connect(lambda name, value: session.preferences.change(**{name: value}))
        self._rows.addWidget(self.streaming)
        self._rows.addWidget(line())
        self._add_presets()
        self.sampling = Form(Sampling, CONTROLS, nothing={"seed": tr("random")})
        self.sampling.changed.connect(session.choose_sampling)
        self._rows.addWidget(self.sampling)
        self._more = button(tr("More values"), "tiny")
        self._more.setObjectName("moreValues")
        self._more.setCheckable(True)
        self._rows.addWidget(self._more, 0, Qt.AlignmentFlag.AlignLeft)
        self.advanced = Form(Sampling, ADVANCED)
        self.advanced.changed.connect(session.choose_sampling)
        self.advanced.hide()
        self._more.toggled.connect(self.advanced.setVisible)
        self._rows.addWidget(self.advanced)
        self._rows.addStretch(1)
        session.parameters_changed.connect(self.show_values)
        session.model_changed.connect(self.show_values)
        session.preferences.changed.connect(self.show_values)
        self.show_values()

    def _add_system(self) -> None:
        self._rows.addWidget(label(tr("System prompt"), "field"))
        self.system = QPlainTextEdit()
        self.system.setObjectName("systemPrompt")
        self.system.setAccessibleName(tr("System prompt"))
        self.system.setPlaceholderText(tr("What the model should know and how it should answer"))
        self.system.setTabChangesFocus(True)
        self.system.setFixedHeight(look().px(14) * 5 + 24)
        self._later = timer(self, 400, self._keep_system, once=True)
        self.system.textChanged.connect(self._later.start)
        self._rows.addWidget(self.system)
        self._default = button(tr("Use for all new chats"), "tiny")
        self._default.setObjectName("systemDefault")
        self._default.clicked.connect(self._make_default)
        self._rows.addWidget(self._default, 0, Qt.AlignmentFlag.AlignLeft)

    def _add_presets(self) -> None:
        row = QHBoxLayout()
        row.setSpacing(6)
        self.preset = QComboBox()
        self.preset.setObjectName("preset")
        self.preset.setAccessibleName(tr("Preset"))
        self.preset.activated.connect(self._chosen)
        row.addWidget(self.preset, 1)
        self._forget = button(tr("Remove"), "tiny")
        self._forget.setObjectName("removePreset")
        self._forget.clicked.connect(lambda: self._session.remove_preset(self.preset.currentData()))
        row.addWidget(self._forget)
        self._rows.addWidget(label(tr("Preset"), "field"))
        self._rows.addLayout(row)
        below = QHBoxLayout()
        below.setSpacing(2)
        neutral = tr("Every value where it does nothing: the model's bare probabilities")
        for words, name, help_text, do in (
            (tr("Reset all"), "resetSampling", "", self._session.reset_sampling),
            (tr("Neutral"), "neutralise", neutral, self._session.neutralise),
            (tr("Keep as…"), "keepPreset", "", self._ask_name),
        ):
            made = button(words, "tiny")
            made.setObjectName(name)
            made.setToolTip(help_text)
            made.clicked.connect(lambda _on=False, do=do: do())
            below.addWidget(made)
        below.addStretch(1)
        self._rows.addLayout(below)

    def _ask_name(self) -> None:
        ask_text(self, tr("Keep as a preset"), tr("Name of the preset"), self._session.keep_preset)

    def _chosen(self, index: int) -> None:
        name = self.preset.itemData(index)
        if name != _OTHER:
            self._session.choose_preset(name)

    def _keep_system(self) -> None:
        self._session.set_system(self.system.toPlainText())

    def _make_default(self) -> None:
        self._keep_system()
        self._session.preferences.change(system=self._session.system)

    def keep_typed(self) -> None:
        """Take over what is being typed now."""
        if self._later.isActive():
            self._later.stop()
            self._keep_system()

    def show_values(self, _before: object = None) -> None:
        """Show what is in force."""
        session = self._session
        self.streaming.show_values(session.preferences.values)
        self.sampling.show_values(session.sampling, session.sampling_defaults)
        self.advanced.show_values(session.sampling, session.sampling_defaults)
        if not self._later.isActive() and self.system.toPlainText() != session.system:
            self.system.blockSignals(True)
            self.system.setPlainText(session.system)
            self.system.blockSignals(False)
        self._default.setVisible(session.system != session.preferences.values.system)
        self._show_presets()

    def _show_presets(self) -> None:
        session = self._session
        own = session.preferences.values.presets
        names = {
            "model": tr("The model's own values"),
            "precise": tr("Precise"),
            "balanced": tr("Balanced"),
            "creative": tr("Creative"),
        }
        found = matching(session.choices, own, session.sampling_defaults)
        self.preset.blockSignals(True)
        self.preset.clear()
        for name in BUILT_IN:
            self.preset.addItem(names[name], name)
        for name in sorted(own):
            self.preset.addItem(name, name)
        if found is None:
            self.preset.addItem(tr("Values of my own"), _OTHER)
        self.preset.setCurrentIndex(self.preset.findData(_OTHER if found is None else found))
        self.preset.blockSignals(False)
        self._forget.setVisible(found in own)
