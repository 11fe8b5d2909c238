"""The settings page: forms made from the settings models."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFrame, QHBoxLayout, QScrollArea, QVBoxLayout, QWidget

from engine.settings import EngineSettings
from gui.data.preferences import Preferences
from gui.kit.controls import button, label
from gui.kit.forms import Form
from gui.kit.i18n import tr
from gui.kit.theme import look
from gui.models.library import reveal_path
from gui.session import Session

__all__ = ["ENGINE", "GENERAL", "SettingsPage"]

GENERAL = ("language", "theme", "text_size", "send_on_enter")
ENGINE = ("threads", "context", "kv", "load")


class SettingsPage(QScrollArea):
    """What the user can set once for all conversations."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.setObjectName("settingsPage")
        self._session = session
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        outer = QWidget()
        self.setWidget(outer)
        row = QHBoxLayout(outer)
        row.setContentsMargins(32, 30, 32, 30)
        row.addStretch(1)
        inner = QWidget()
        inner.setMaximumWidth(look().px(640))
        row.addWidget(inner, 100)
        row.addStretch(1)
        column = QVBoxLayout(inner)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(16)
        column.addWidget(label(tr("Settings"), "title"))

        self._general = Form(Preferences, GENERAL, spacing=20)
        self._general.changed.connect(lambda name, value: session.preferences.change(**{name: value}))
        column.addWidget(_card(tr("Window"), self._general))

        automatic = tr("automatic")
        self._engine = Form(EngineSettings, ENGINE, spacing=20, nothing={"threads": automatic, "context": automatic})
        self._engine.changed.connect(self._engine_changed)
        engine = _card(tr("Engine"), self._engine)
        again = QHBoxLayout()
        again.addWidget(label(tr("Takes effect when a model is loaded."), "caption", wrap=True), 1)
        self._again = button(tr("Load the model again"))
        self._again.setObjectName("reloadModel")
        self._again.clicked.connect(session.reload_model)
        again.addWidget(self._again)
        layout = engine.layout()
        assert isinstance(layout, QVBoxLayout)
        layout.addLayout(again)
        column.addWidget(engine)

        place = QWidget()
        line = QHBoxLayout(place)
        line.setContentsMargins(0, 0, 0, 0)
        folder = session.store.path.parent
        where = label(str(folder), "muted", wrap=True)
        where.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        line.addWidget(where, 1)
        show = button(tr("Show"))
        show.setAccessibleName(tr("Show the folder of conversations and settings"))
        show.clicked.connect(lambda: reveal_path(folder))
        line.addWidget(show)
        column.addWidget(_card(tr("Conversations and settings are kept in"), place))
        column.addStretch(1)
        session.preferences.changed.connect(self._show)
        session.model_changed.connect(self._show)
        self._show()

    def _show(self, _before: object = None) -> None:
        values = self._session.preferences.values
        self._general.show_values(values, Preferences())
        self._engine.show_values(values.engine, EngineSettings())
        self._again.setEnabled(self._session.state.kind in {"ready", "failed"} and self._session.state.path is not None)

    def _engine_changed(self, name: str, value: Any) -> None:
        engine = self._session.preferences.values.engine.model_copy(update={name: value})
        self._session.preferences.change(engine=engine)


def _card(title: str, content: QWidget) -> QFrame:
    card = QFrame()
    card.setProperty("role", "card")
    column = QVBoxLayout(card)
    column.setContentsMargins(24, 18, 24, 20)
    column.setSpacing(16)
    column.addWidget(label(title, "heading", wrap=True))
    column.addWidget(content)
    return card
