"""Which model answers: loading, unloading, what the library holds; knows no widget and no conversation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from PySide6.QtCore import QObject, Signal

from engine.settings import EngineSettings
from gui.bridge import Bridge, EngineReady, Library, ModelEntry
from gui.data.preferences import PreferencesFile
from gui.kit.i18n import tr
from gui.kit.words import engine_words, error_words
from gui.tasks import Diagnosed

if TYPE_CHECKING:
    from engine import api

__all__ = ["ModelDesk", "ModelState"]

_SHORT = 1024  # tokens of context


@dataclass(frozen=True, slots=True)
class ModelState:
    """The model in use: which, and how far it is.

    share: 0..1 where known. sentence: why it failed. wants_memory: it might be loaded with a shorter context
    """

    kind: Literal["none", "loading", "ready", "failed"] = "none"
    path: Path | None = None
    name: str = ""
    stage: str = ""
    share: float | None = None
    sentence: str = ""
    wants_memory: bool = False
    model: api.LoadedModel | None = None


class ModelDesk(QObject):
    """The model in use and those that could be."""

    notice = Signal(str, str)  # a sentence, and "note" | "warning" | "problem"
    model_changed = Signal()
    library_changed = Signal()

    def __init__(self, bridge: Bridge, preferences: PreferencesFile) -> None:
        super().__init__()
        self.bridge = bridge
        self.preferences = preferences
        self.state = ModelState()
        self.models: tuple[ModelEntry, ...] = ()
        self.broken: tuple[ModelEntry, ...] = ()
        self.engine_ready = False
        self.engine_failure = ""
        self.crashed = False  # the program ended in the middle of an answer

    @property
    def starter_is_loaded(self) -> bool:
        """Whether the model in use is the one that comes with the program."""
        return any(entry.starter and entry.path == self.state.path for entry in self.models)

    @property
    def context_tokens(self) -> int:
        """Tokens a conversation can hold; 0 while no model is loaded."""
        return self.state.model.context if self.state.model is not None else 0

    def choose_model(self, path: Path, settings: EngineSettings | None = None) -> None:
        """Load a model in place of the present one; conversations stay. settings: other than the chosen ones, once."""
        entry = next((known for known in self.models if known.path == path), None)
        self.state = ModelState("loading", path, entry.name if entry is not None else path.stem)
        self.preferences.change(model=str(path), loading=str(path))
        self.preferences.save()
        self.bridge.load(path, settings or self.preferences.values.engine)
        self.model_changed.emit()

    def cancel_load(self) -> None:
        """Give up loading."""
        self.bridge.cancel_load()

    def unload(self) -> None:
        """Give the model's memory back."""
        self.state = ModelState()
        self.bridge.unload()
        self._model_settled()

    def reload_model(self) -> None:
        """Load the present model again, with changed engine settings."""
        if self.state.path is not None:
            self.choose_model(self.state.path)

    def load_with_context(self, tokens: int) -> None:
        """Load the present model again with room for more."""
        engine = self.preferences.values.engine.model_copy(update={"context": tokens})
        self.preferences.change(engine=engine)
        self.reload_model()

    def _first_model(self) -> None:
        """At the start: the model used last, else whatever there is; none where that ended badly."""
        preferences = self.preferences.values
        last = Path(preferences.model) if preferences.model else None
        if preferences.loading:
            name = Path(preferences.loading).name
            self.preferences.change(loading="")
            self.notice.emit(
                tr(
                    "Inglenook ended while it was loading {name}, so that model is not loaded by itself now.", name=name
                ),
                "warning",
            )
        elif self.crashed and last is not None:
            self.notice.emit(
                tr(
                    "Inglenook ended in the middle of an answer last time; what was written is kept. {name} is not"
                    " loaded by itself now: choose it above to go on.",
                    name=last.stem,
                ),
                "warning",
            )
        elif last is not None and last.exists():
            self.choose_model(last)
        elif self.models:
            self.choose_model(self.models[0].path)

    def _model_settled(self) -> None:
        self.preferences.change(loading="")
        self.preferences.save()
        self.model_changed.emit()

    def load_anyway(self) -> None:
        """Load with the shortest useful context, mapped from the disk, whatever that does to the speed."""
        if self.state.path is not None:
            short = self.preferences.values.engine.model_copy(update={"context": _SHORT, "load": "mmap"})
            self.choose_model(self.state.path, short)

    def _model_failed(self, sentence: str, *, wants_memory: bool = False) -> None:
        self.state = replace(
            self.state, kind="failed", sentence=sentence, share=None, model=None, wants_memory=wants_memory
        )
        self._model_settled()

    def _model_ready(self) -> None:
        """A model was loaded; for who waits for one."""

    def _apply_model(self, event: object) -> bool:
        """An event about models; False when it is about something else."""
        match event:
            case EngineReady(sentence=""):
                self.engine_ready = True
                self._first_model()
                self.model_changed.emit()
            case EngineReady(sentence=sentence):
                self.engine_failure = sentence
                self.notice.emit(sentence, "problem")
                self.model_changed.emit()
            case Library(models=models, broken=broken):
                self.models = models
                self.broken = broken
                self.library_changed.emit()
            case Diagnosed(facts={"benchmark": {"read_bandwidth_gb_per_s": rate}}):
                self.preferences.change(bandwidth_gb=float(rate))
                self.library_changed.emit()
            case _:
                return self._apply_loading(event)
        return True

    def _apply_loading(self, event: object) -> bool:
        from engine import api  # loaded long since: the event came from there

        match event:
            case api.Loaded(model=model):
                path = self.state.path or model.path
                starter = next((entry.name for entry in self.models if entry.starter and entry.path == path), "")
                self.state = ModelState("ready", path, starter or model.name, model=model)
                for sentence in model.notices:
                    self.notice.emit(engine_words(sentence), "note")
                self._model_settled()
                self._model_ready()
            case api.Progress(request_id=None):
                if self.state.kind == "loading":
                    share = min(1.0, event.done / event.total) if event.total else None
                    self.state = replace(self.state, stage=event.stage, share=share)
                    self.model_changed.emit()
            case api.Failed(request_id=None):
                if event.kind == "Cancelled":
                    self.state = ModelState()
                    self._model_failed(tr("Loading was cancelled."))
                    self.state = ModelState()
                    self.model_changed.emit()
                elif self.state.kind == "loading":
                    self._model_failed(
                        error_words(event.kind, event.message), wants_memory=event.kind == "ResourceError"
                    )
                else:
                    self.notice.emit(error_words(event.kind, event.message), "problem")
            case _:
                return False
        return True
