"""What the check of a model says, as plain values; importing it loads nothing else."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.settings import Conversion

__all__ = ["ModelReport", "Problem", "SizeChoice", "TensorInfo"]


@dataclass(frozen=True, slots=True)
class SizeChoice:
    """What one conversion would cost.

    file_bytes: within a few hundred kB. bits_per_weight: over all tensors.
    seconds: on this computer, roughly: from the bytes to read and write and the weights to round.
    """

    label: str
    conversion: Conversion
    file_bytes: int
    bits_per_weight: float
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Problem:
    """Something the check of a model found. `fatal` ones prevent conversion."""

    fatal: bool
    sentence: str


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a model: our name, what it is stored as, (rows, cols) or (entries,)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What `inspect` says of a folder, GGUF or `.nook` file, without reading weights.

    family: "Qwen2ForCausalLM", "" when unknown. source_dtype: "bfloat16", or
    "int4, group 32" for a `.nook` file. sizes: empty for a `.nook` file.
    memory_bytes: context -> RAM needed to run (int4 for sources). fidelity: of a `.nook` file, once it was measured:
    as `api.fidelity` gives it, but for layers, which are two lists, "states" and "weights".
    """

    path: Path
    kind: Literal["folder", "gguf", "nook"]
    name: str
    family: str = ""
    parameters: int = 0
    context: int = 0
    vocab_size: int = 0
    layers: int = 0
    hidden: int = 0
    source_dtype: str = ""
    chat_template: bool = False
    licence: str = ""
    disk_bytes: int = 0
    sizes: tuple[SizeChoice, ...] = ()
    memory_bytes: dict[int, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    tensors: tuple[TensorInfo, ...] = ()
    fidelity: dict[str, Any] | None = None

    @property
    def usable(self) -> bool:
        """No problem prevents conversion or loading."""
        return not any(problem.fatal for problem in self.problems)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        sizes = [{**asdict(size), "conversion": size.conversion.model_dump(mode="json")} for size in self.sizes]
        return {**asdict(self), "path": str(self.path), "sizes": sizes, "usable": self.usable}
