"""The engine's public face: values in, events out. Faces import this and nothing deeper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.folders import cache_folder, data_folder, library_folder, log_folder
from engine.runtime.events import (
    Delta,
    Done,
    Event,
    Failed,
    FinishReason,
    Loaded,
    LoadedModel,
    Message,
    Progress,
    Request,
    Started,
    TokenLogprob,
    Usage,
)
from engine.settings import Conversion, EngineSettings, Sampling

__all__ = [
    "AutoModel",
    "Conversion",
    "Delta",
    "Done",
    "Engine",
    "EngineSettings",
    "Event",
    "Failed",
    "FinishReason",
    "LibraryModel",
    "Loaded",
    "LoadedModel",
    "Message",
    "ModelReport",
    "Problem",
    "Progress",
    "Request",
    "Sampling",
    "Sink",
    "SizeChoice",
    "Started",
    "TensorInfo",
    "TokenLogprob",
    "Usage",
    "bench",
    "cache_folder",
    "convert",
    "data_folder",
    "diagnose",
    "inspect",
    "library_folder",
    "library_models",
    "log_folder",
    "perplexity",
    "resolve_model",
    "starter_path",
    "verify",
]

Sink = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class SizeChoice:
    """What one conversion would cost."""

    label: str
    conversion: Conversion
    file_bytes: int
    bits_per_weight: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Something the check of a model found. `fatal` ones prevent conversion."""

    fatal: bool
    sentence: str


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a model, as the file names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What `inspect` says of a folder, GGUF or `.nook` file, without reading weights.

    family: "Qwen2ForCausalLM", "" when unknown. source_dtype: "bfloat16", or
    "int4, group 32" for a `.nook` file. sizes: empty for a `.nook` file.
    memory_bytes: context -> RAM needed to run (int4 for sources).
    """

    path: Path
    kind: str
    name: str
    family: str
    parameters: int
    context: int
    vocab_size: int
    layers: int
    hidden: int
    source_dtype: str
    chat_template: bool
    licence: str
    disk_bytes: int
    sizes: tuple[SizeChoice, ...]
    memory_bytes: dict[int, int]
    problems: tuple[Problem, ...]
    tensors: tuple[TensorInfo, ...] = ()

    @property
    def usable(self) -> bool:
        """No problem prevents conversion or loading."""
        return not any(problem.fatal for problem in self.problems)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        sizes = [{**asdict(size), "conversion": size.conversion.model_dump(mode="json")} for size in self.sizes]
        return {**asdict(self), "path": str(self.path), "sizes": sizes, "usable": self.usable}


@dataclass(frozen=True, slots=True)
class LibraryModel:
    """A converted model in the library."""

    path: Path
    name: str
    family: str
    format: str
    disk_bytes: int
    parameters: int
    context: int


class Engine:
    """The one thread that owns a model and calls kernels.

    Every method may be called from any thread and returns at once; sinks are
    called on the engine's thread, in order. After `close()` nothing is called.
    """

    def load(self, path: Path | str, settings: EngineSettings, sink: Callable[[Event | Loaded], None]) -> None:
        """Load, replacing the present model: Progress(stage="compile" | "load") ..., then Loaded or Failed."""
        raise NotImplementedError

    def cancel_load(self) -> None:
        """The load ends with Failed(kind="Cancelled"); nothing is loaded then."""
        raise NotImplementedError

    def unload(self) -> None:
        """Give the model's memory back; running answers end as cancelled."""
        raise NotImplementedError

    def submit(self, request: Request, sink: Sink) -> None:
        """Started, Progress(stage="prefill") ..., Delta ..., then exactly one of Done or Failed."""
        raise NotImplementedError

    def cancel(self, request_id: str) -> None:
        """The request ends with Done(reason="cancelled") within 250 ms; unknown ids are ignored."""
        raise NotImplementedError

    def count_tokens(self, messages: Sequence[Message], sink: Callable[[int], None]) -> None:
        """How many tokens the rendered conversation takes, for the context gauge."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop everything and join the thread (< 3 s)."""
        raise NotImplementedError


class AutoModel:
    """A model to call from Python."""


def inspect(path: Path | str, *, tensors: bool = False) -> ModelReport:
    """What lies at `path`, read without its weights."""
    raise NotImplementedError


def convert(
    source: Path | str, out: Path | str, conversion: Conversion = Conversion(), *, resume: bool = False
) -> Iterator[Progress]:
    """Each Progress is a place to stop: closing the generator cancels and leaves no file (resumable partial only)."""
    raise NotImplementedError


def verify(path: Path | str) -> Iterator[Progress]:
    """Ends normally when every byte is right; raises FileDamagedError naming the tensor."""
    raise NotImplementedError


def perplexity(
    model: str, text: str, *, context: int = 512, settings: EngineSettings = EngineSettings()
) -> Iterator[Progress | dict[str, Any]]:
    """How well the model foresees a text; the last value is {"perplexity", "tokens"}."""
    raise NotImplementedError


def bench(
    model: str,
    *,
    settings: EngineSettings = EngineSettings(),
    prompt_tokens: int = 512,
    gen_tokens: int = 128,
    depth: int = 32,
    batch: int = 8,
    repeat: int = 3,
) -> Iterator[Progress | dict[str, Any]]:
    """Speed of a model here; the last value is the dictionary of medians."""
    raise NotImplementedError


def diagnose(*, benchmark: bool = False) -> dict[str, Any]:
    """CPU, instruction tiers, cores, quota and memory as the engine sees them."""
    raise NotImplementedError


def library_models() -> tuple[LibraryModel, ...]:
    """Converted models in the library, by name."""
    raise NotImplementedError


def resolve_model(name: str) -> Path:
    """A path as it stands, else a library model by name, else `starter`."""
    raise NotImplementedError


def starter_path() -> Path | None:
    """The starter model's source when the extra is installed, else None."""
    raise NotImplementedError
