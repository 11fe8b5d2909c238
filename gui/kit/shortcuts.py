"""The window's shortcuts: what each does, its keys, and the user's own keys in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from PySide6.QtGui import QKeySequence, QShortcut
from PySide6.QtWidgets import QWidget

from gui.kit.i18n import tr

__all__ = ["ACTIONS", "Action", "Shortcuts", "action_words"]


@dataclass(frozen=True, slots=True)
class Action:
    """Something that keys do: its name, and the keys it has from the start."""

    name: str
    keys: str


ACTIONS = (
    Action("new_chat", "Ctrl+N"),
    Action("temporary_chat", "Ctrl+Shift+N"),
    Action("search", "Ctrl+F"),
    Action("search_too", "Ctrl+K"),
    Action("stop", "Esc"),
    Action("regenerate", "Ctrl+R"),
    Action("continue", "Alt+Return"),
    Action("edit_last", "Ctrl+Up"),
    Action("copy_last", "Ctrl+Shift+C"),
    Action("attach", "Ctrl+O"),
    Action("pick_model", "Ctrl+L"),
    Action("sidebar", "Ctrl+B"),
    Action("controls", "Ctrl+Shift+B"),
    Action("larger", "Ctrl++"),
    Action("smaller", "Ctrl+-"),
    Action("shortcuts", "Ctrl+/"),
    Action("manual", "F1"),
    Action("chat_page", "Alt+1"),
    Action("models_page", "Alt+2"),
    Action("diagnostics_page", "Alt+3"),
    Action("server_page", "Alt+4"),
    Action("settings_page", "Ctrl+,"),
    Action("quit", "Ctrl+Q"),
)


def action_words(name: str) -> str:
    """What an action does, in words."""
    return {
        "new_chat": tr("New chat"),
        "temporary_chat": tr("New temporary chat"),
        "search": tr("Search conversations"),
        "search_too": tr("Search conversations (other keys)"),
        "stop": tr("Stop, or end what was begun"),
        "regenerate": tr("Regenerate the answer"),
        "continue": tr("Continue the answer"),
        "edit_last": tr("Edit your last message"),
        "copy_last": tr("Copy the last answer"),
        "attach": tr("Attach files"),
        "pick_model": tr("Choose a model"),
        "sidebar": tr("Show or hide the conversations"),
        "controls": tr("Show or hide the controls"),
        "larger": tr("Larger text"),
        "smaller": tr("Smaller text"),
        "shortcuts": tr("List of shortcuts"),
        "manual": tr("Manual"),
        "chat_page": tr("Chat"),
        "models_page": tr("Models"),
        "diagnostics_page": tr("Diagnostics"),
        "server_page": tr("Server"),
        "settings_page": tr("Settings"),
        "quit": tr("Quit"),
    }[name]


class Shortcuts:
    """The shortcuts of a window."""

    def __init__(self, parent: QWidget, do: Mapping[str, Callable[[], object]]) -> None:
        self._made = {action.name: QShortcut(parent) for action in ACTIONS}
        for name, shortcut in self._made.items():
            shortcut.activated.connect(do[name])

    def apply(self, own: Mapping[str, str]) -> None:
        """Set the keys: the user's own where there are some; "" takes an action's keys away."""
        for action in ACTIONS:
            self._made[action.name].setKey(QKeySequence(own.get(action.name, action.keys)))
