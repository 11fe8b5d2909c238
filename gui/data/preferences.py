"""What the user chose, kept as JSON of what differs from the default; knows no widget.

A damaged file is set aside, never deleted, and the defaults are used.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from PySide6.QtCore import QObject, Signal

from engine.errors import InglenookError
from engine.settings import EngineSettings, Sampling, ServerSettings, checked
from gui.kit.timing import timer

__all__ = ["Preferences", "PreferencesFile"]

_log = logging.getLogger(__name__)


class Preferences(BaseModel):
    """Everything the window remembers between two starts.

    sampling: only what the user changed; the rest comes from the model.
    loading: the model being loaded; still there at the next start when loading ended in a crash.
    draft: what was typed into a conversation that does not exist yet.
    system: the system prompt that new conversations begin with.
    presets: the user's own, by name. shortcuts: those that were changed, by action.
    greeted: the first start was gone through. benchmarks: the latest measurements, oldest first.
    bandwidth_gb: what this computer reads of its memory in a second, when it was measured last; 0 before.
    comparisons: the choices of blind comparisons, oldest first.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    language: Annotated[
        Literal["system", "en", "zh_CN"],
        Field(
            title="Language",
            description="The language of this window.",
            json_schema_extra={"labels": {"system": "As the system", "en": "English", "zh_CN": "简体中文"}},
        ),
    ] = "system"
    theme: Annotated[
        Literal["system", "light", "dark", "contrast"],
        Field(
            title="Theme",
            description="Light or dark colours, or the strongest contrast.",
            json_schema_extra={
                "labels": {
                    "system": "As the system",
                    "light": "Light",
                    "dark": "Dark",
                    "contrast": "High contrast",
                }
            },
        ),
    ] = "system"
    text_size: Annotated[
        int,
        Field(
            ge=80,
            le=200,
            title="Text size",
            description="Size of all text, in per cent.",
            json_schema_extra={"step": 10, "unit": "%"},
        ),
    ] = 100
    send_on_enter: Annotated[
        bool,
        Field(
            title="Send with Enter",
            description="Enter sends, Shift+Enter starts a new line; off: Enter starts a new line, Ctrl+Enter sends.",
        ),
    ] = True
    streaming: Annotated[
        bool,
        Field(title="Streaming", description="Show the answer while it is written; off: when it is complete."),
    ] = True
    overflow: Annotated[
        Literal["ask", "rolling", "middle", "summarise"],
        Field(
            title="When a chat outgrows the context",
            description="What the model no longer reads then; pinned messages and instructions always stay.",
            json_schema_extra={
                "labels": {
                    "ask": "Ask me",
                    "rolling": "Leave out the oldest messages",
                    "middle": "Leave out the middle",
                    "summarise": "Summarise the oldest messages",
                }
            },
        ),
    ] = "ask"
    keep_probabilities: Annotated[
        bool,
        Field(
            title="Keep token probabilities",
            description="Answers remember how likely each token was, for the token view; slightly slower.",
        ),
    ] = False
    controls_open: bool = True
    sampling: dict[str, Any] = Field(default_factory=dict)
    system: str = ""
    presets: dict[str, dict[str, Any]] = Field(default_factory=dict)
    shortcuts: dict[str, str] = Field(default_factory=dict)
    closed_folders: list[str] = Field(default_factory=list)
    greeted: bool = False
    engine: EngineSettings = Field(default_factory=EngineSettings)
    server: ServerSettings = Field(default_factory=ServerSettings)
    benchmarks: list[dict[str, Any]] = Field(default_factory=list)
    bandwidth_gb: float = 0.0
    comparisons: list[dict[str, Any]] = Field(default_factory=list)
    model: str = ""
    loading: str = ""
    draft: str = ""
    geometry: str = ""

    def sampling_over(self, defaults: Sampling) -> Sampling:
        """The model's own values with the user's choices laid over them."""
        return checked(Sampling, {**defaults.model_dump(), **self.sampling})


class PreferencesFile(QObject):
    """The preferences in force and the file that keeps them. `changed` says what they were before.

    policy: a file of the same form whose values cannot be changed here, and `hidden_pages`
    locked: the names of those values. hidden_pages: pages that are not offered
    """

    changed = Signal(object)

    def __init__(self, path: Path, policy: Path | None = None) -> None:
        super().__init__()
        self.path = path
        self.notice = ""
        self.policy_notice = ""
        self.locked: frozenset[str] = frozenset()
        self.hidden_pages: frozenset[str] = frozenset()
        self._own = self._read()
        self._fixed = self._read_policy(policy) if policy is not None else {}
        self.values = self._own.model_copy(update=self._fixed)
        self._later = timer(self, 300, self.save, once=True)

    def _read_policy(self, path: Path) -> dict[str, Any]:
        try:
            values = json.loads(path.read_text("utf-8"))
            pages = values.pop("hidden_pages", []) if isinstance(values, dict) else []
            known = Preferences.model_validate_json(json.dumps(values))  # which refuses what is no object
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("the policy cannot be read: %s", error)
            self.policy_notice = str(path)
            return {}
        self.locked = frozenset(known.model_fields_set)
        self.hidden_pages = frozenset(map(str, pages)) if isinstance(pages, list) else frozenset()
        return {name: getattr(known, name) for name in self.locked}

    def change(self, **values: Any) -> None:
        """Change some preferences, keep them, tell everybody."""
        before = self.values
        self._own = self._own.model_copy(update=values)
        self.values = self._own.model_copy(update=self._fixed)
        if self.values == before:
            return
        self._later.start()  # a slider being dragged is one write
        self.changed.emit(before)

    def _read(self) -> Preferences:
        try:
            text = self.path.read_text("utf-8")
        except FileNotFoundError:
            return Preferences()
        except (OSError, UnicodeDecodeError) as error:
            return self._set_aside(error)
        try:
            return _lenient(json.loads(text))
        except (ValueError, RecursionError, InglenookError) as error:
            return self._set_aside(error)

    def _set_aside(self, error: Exception) -> Preferences:
        _log.warning("preferences cannot be read: %s", error)
        aside = self.path.with_suffix(".damaged.json")
        try:
            self.path.replace(aside)
        except OSError:
            aside = self.path
        self.notice = str(aside)
        return Preferences()

    def save(self) -> None:
        """Write the file now, whole or not at all."""
        self._later.stop()
        text = json.dumps(self._own.model_dump(mode="json", exclude_defaults=True), ensure_ascii=False, indent=2)
        temporary = self.path.with_suffix(".json.new")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError as error:
            _log.warning("preferences cannot be written: %s", error)


def _lenient(values: Any) -> Preferences:
    """Preferences of a dictionary, where one value out of range costs that value alone."""
    if not isinstance(values, dict):
        raise ValueError("not an object")  # noqa: TRY004 (one kind for every unreadable file)
    while True:
        try:
            # JSON has no tuples; strict models want them from Python, but take lists from JSON.
            chosen = Preferences.model_validate_json(json.dumps(values))
            chosen.sampling_over(Sampling())
        except ValidationError as error:
            values.pop(str(error.errors()[0]["loc"][0]))
        except InglenookError:
            values.pop("sampling")
        else:
            return chosen
