"""The settings page: forms made from the settings models, shortcuts, and where things are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QKeySequence
from PySide6.QtWidgets import (
    QFileDialog,
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QKeySequenceEdit,
    QLabel,
    QVBoxLayout,
    QWidget,
)

from engine import __version__
from engine.folders import library_folder, program_folder
from engine.settings import EngineSettings
from gui.data.preferences import Preferences
from gui.kit.controls import IconButton, button, label
from gui.kit.forms import Form
from gui.kit.i18n import tr
from gui.kit.layout import Page, card
from gui.kit.shortcuts import ACTIONS, action_words
from gui.models.library import reveal_path
from gui.session import Session
from gui.tasks import Moved, move_library

__all__ = ["ENGINE", "GENERAL", "SettingsPage"]

GENERAL = ("language", "theme", "text_size", "send_on_enter", "overflow", "keep_probabilities")
ENGINE = (
    "threads",
    "free_cores",
    "context",
    "kv",
    "load",
    "max_batch_size",
    "speculation",
    "draft",
    "snapshot_mb",
)
_WIDTH = 640


class SettingsPage(Page):
    """What the user can set once for all conversations. `tune_asked`: look for the best number of threads."""

    tune_asked = Signal()

    manual_asked = Signal()

    def __init__(self, session: Session) -> None:
        super().__init__("settingsPage", tr("Settings"), _WIDTH)
        self._session = session
        locked = session.preferences.locked
        self._general = Form(Preferences, GENERAL, spacing=20)
        self._general.lock(locked)
        self._general.changed.connect(lambda name, value: session.preferences.change(**{name: value}))
        made, column = card(tr("Window"))
        column.addWidget(self._general)
        self.column.addWidget(made)

        automatic = tr("automatic")
        self._engine = Form(EngineSettings, ENGINE, spacing=20, nothing={"threads": automatic, "context": automatic})
        self._engine.lock(ENGINE if "engine" in locked else ())
        self._engine.changed.connect(self._engine_changed)
        made, column = card(tr("Engine"))
        column.addWidget(self._engine)
        again = QHBoxLayout()
        again.setSpacing(10)
        again.addWidget(label(tr("Takes effect when a model is loaded."), "caption", wrap=True), 1)
        tune = button(tr("Find the best number of threads"))
        tune.setObjectName("tuneThreads")
        tune.clicked.connect(self.tune_asked)
        again.addWidget(tune)
        self._again = button(tr("Load the model again"))
        self._again.setObjectName("reloadModel")
        self._again.clicked.connect(session.reload_model)
        again.addWidget(self._again)
        column.addLayout(again)
        self.column.addWidget(made)
        self.column.addWidget(self._make_shortcuts())
        self.column.addWidget(self._make_places())
        self.column.addWidget(self._make_about())
        self.column.addStretch(1)
        session.preferences.changed.connect(self._show)
        session.model_changed.connect(self._show)
        session.bridge.event.connect(self._apply)
        self._show()

    def _make_shortcuts(self) -> QFrame:
        made, column = card(tr("Shortcuts"))
        self.shortcuts = made
        grid = QGridLayout()
        grid.setColumnStretch(0, 1)
        grid.setVerticalSpacing(6)
        self._keys: dict[str, QKeySequenceEdit] = {}
        self._resets: dict[str, IconButton] = {}
        for row, action in enumerate(ACTIONS):
            words = action_words(action.name)
            grid.addWidget(label(words), row, 0)
            edit = QKeySequenceEdit()
            edit.setObjectName(f"keys_{action.name}")
            edit.setAccessibleName(words)
            edit.setMaximumSequenceLength(1)
            edit.setFixedWidth(150)
            edit.editingFinished.connect(lambda name=action.name: self._keys_changed(name))
            grid.addWidget(edit, row, 1)
            reset = IconButton("reset", tr("Reset {name}", name=words), size=14)
            reset.clicked.connect(lambda _on=False, name=action.name: self._reset_keys(name))
            grid.addWidget(reset, row, 2)
            self._keys[action.name], self._resets[action.name] = edit, reset
        column.addLayout(grid)
        self._clash = label("", "bad", wrap=True)
        self._clash.setObjectName("shortcutClash")
        self._clash.hide()
        column.addWidget(self._clash)
        return made

    def _make_about(self) -> QFrame:
        made, column = card(tr("Help"))
        row = QHBoxLayout()
        row.addWidget(label(f"Inglenook {__version__}", "muted"), 1)
        manual = button(tr("Manual"))
        manual.setObjectName("openManual")
        manual.clicked.connect(self.manual_asked)
        row.addWidget(manual)
        column.addLayout(row)
        return made

    def _make_places(self) -> QFrame:
        made, column = card(tr("Where things are kept"))
        self._add_place(column, tr("Conversations and settings"), self._session.store.path.parent,
                        tr("Show the folder of conversations and settings"))  # fmt: skip
        self._library = self._add_place(column, tr("Models"), library_folder(), tr("Show the folder of models"))
        move = QHBoxLayout()
        self._move = button(tr("Move the models…"), "tiny")
        self._move.setObjectName("moveLibrary")
        self._move.clicked.connect(self._browse_library)
        move.addWidget(self._move)
        self._moved = label("", "caption", wrap=True)
        self._moved.setObjectName("moveWords")
        move.addWidget(self._moved, 1)
        column.addLayout(move)
        words = (
            tr("Everything lies beside the program (portable), in the folder data.")
            if (program_folder() / "portable").is_file()
            else tr("A file named “portable” beside the program keeps everything in a folder there, for a USB stick.")
        )
        column.addWidget(label(words, "caption", wrap=True))
        if self._session.preferences.locked:
            column.addWidget(
                label(tr("Some settings are decided by the administrator of this computer."), "caption", wrap=True)
            )
        return made

    @staticmethod
    def _add_place(column: QVBoxLayout, title: str, folder: Path, name: str) -> QLabel:
        place = QWidget()
        row = QHBoxLayout(place)
        row.setContentsMargins(0, 0, 0, 0)
        words = QVBoxLayout()
        words.setSpacing(1)
        words.addWidget(label(title, "field"))
        where = label(str(folder), "muted", wrap=True)
        where.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        words.addWidget(where)
        row.addLayout(words, 1)
        show = button(tr("Show"))
        show.setAccessibleName(name)
        show.clicked.connect(lambda: reveal_path(Path(where.text())))
        row.addWidget(show)
        column.addWidget(place)
        return where

    # ---- the library's place

    def _browse_library(self) -> None:
        dialog = QFileDialog(self, tr("Move the models…"))
        dialog.setFileMode(QFileDialog.FileMode.Directory)
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.fileSelected.connect(lambda name: self.move_library(Path(name)))
        dialog.open()

    def move_library(self, folder: Path) -> None:
        """Move all converted models; the one that is loaded is unloaded first."""
        if self._session.conversions.busy:
            self._moved.setText(tr("A conversion writes there now; move the models when it is done."))
            return
        self._session.unload()
        self._move.setEnabled(False)
        self._session.bridge.task("move", lambda api, stop: move_library(api, stop, folder))

    def _apply(self, event: object) -> None:
        if not isinstance(event, Moved):
            return
        self._move.setEnabled(event.done)
        if not event.done:
            self._moved.setText(f"{event.share:.0%}")
            return
        self._moved.setText(event.sentence or tr("The models were moved."))
        self._library.setText(str(library_folder()))
        self._session.bridge.refresh_library()

    # ---- shortcuts

    def _keys_changed(self, name: str) -> None:
        keys = self._keys[name].keySequence().toString(QKeySequence.SequenceFormat.PortableText)
        own = self._session.preferences.values.shortcuts
        in_force = {action.name: own.get(action.name, action.keys) for action in ACTIONS}
        if keys == in_force[name]:
            return
        other = next((known for known, taken in in_force.items() if taken == keys and keys and known != name), None)
        self._clash.setVisible(other is not None)
        if other is not None:
            self._clash.setText(tr("{keys} already means: {name}", keys=keys, name=action_words(other)))
            self._show_keys()
            return
        default = next(action.keys for action in ACTIONS if action.name == name)
        left = {known: taken for known, taken in own.items() if known != name}
        self._session.preferences.change(shortcuts=left if keys == default else {**left, name: keys})

    def _reset_keys(self, name: str) -> None:
        own = self._session.preferences.values.shortcuts
        self._session.preferences.change(shortcuts={known: keys for known, keys in own.items() if known != name})

    def show_shortcuts(self) -> None:
        """Bring the list of shortcuts into view."""
        self.ensureWidgetVisible(self.shortcuts, 0, 0)
        next(iter(self._keys.values())).setFocus()

    # ---- what is to be seen

    def _show(self, _before: object = None) -> None:
        values = self._session.preferences.values
        self._general.show_values(values, Preferences())
        self._engine.show_values(values.engine, EngineSettings())
        self._again.setEnabled(self._session.state.kind in {"ready", "failed"} and self._session.state.path is not None)
        self._show_keys()

    def _show_keys(self) -> None:
        own = self._session.preferences.values.shortcuts
        for action in ACTIONS:
            edit = self._keys[action.name]
            keys = QKeySequence(own.get(action.name, action.keys))
            if edit.keySequence() != keys:
                edit.blockSignals(True)
                edit.setKeySequence(keys)
                edit.blockSignals(False)
            self._resets[action.name].setVisible(action.name in own)

    def _engine_changed(self, name: str, value: Any) -> None:
        engine = self._session.preferences.values.engine.model_copy(update={name: value})
        self._session.preferences.change(engine=engine)
