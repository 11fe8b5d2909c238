"""Tensors that are ready for kernels, and a model opened for use, wherever it came from.

Knows nothing of files: `store.py` serves tensors out of a mapped `.nook` file,
`engine/convert` packs others in memory; the decoder cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.core.quant import FORMATS
from engine.errors import InputError, InternalError
from engine.models.spec import ModelSpec, TensorSpec

__all__ = [
    "NO_END_NOTICE",
    "VECTOR",
    "MemoryWeights",
    "ModelSource",
    "Tensor",
    "Weights",
    "format_label",
    "tensor_bytes",
]

NO_END_NOTICE = "no file names a token that ends an answer; answers end only at their greatest length"
"""What is said of a model whose files, chat template included, name no end token."""

# Norms and biases: float32, one after the other.
VECTOR = "f32v"

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor ready for kernels.

    W is (rows, cols); a vector has one row and the format `VECTOR`.
    data: uint8 (bytes,), packed as `FORMATS[format]` says, on a multiple of 64
    bytes; it keeps the memory alive, so hold the tensor while kernels use its address.
    place: where kernels find the bytes while they compute, if not in `data`.
    """

    name: str
    format: str
    group: int
    rows: int
    cols: int
    exponent: int
    data: Bytes
    place: int = 0

    @property
    def address(self) -> int:
        """Where kernels find the packed bytes. Costs a microsecond: ask once."""
        return self.place or int(self.data.ctypes.data)

    @property
    def bytes(self) -> int:
        """Bytes of the packed tensor."""
        return self.data.nbytes

    def vector(self) -> NDArray[np.float32]:
        """The float32 values (cols,) of a vector, in place."""
        if self.format != VECTOR:
            raise InternalError(f"{self.name} is no vector")
        return self.data.view(np.float32)


class Weights(Protocol):
    """All tensors of a model, wherever they lie."""

    @property
    def names(self) -> Sequence[str]:
        """In the order of `ModelSpec.tensors`."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all packed tensors."""

    def tensor(self, name: str) -> Tensor:
        """One of them; KeyError when there is none of that name."""


class MemoryWeights:
    """Tensors that were packed in memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}

    @property
    def names(self) -> tuple[str, ...]:
        """In the order given."""
        return tuple(self._tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes of all packed tensors."""
        return sum(tensor.bytes for tensor in self._tensors.values())

    def tensor(self, name: str) -> Tensor:
        """One of them; KeyError when there is none of that name."""
        return self._tensors[name]


@dataclass(frozen=True, slots=True, eq=False)
class ModelSource:
    """A model opened for use; the same whether it came from a folder, a GGUF or a `.nook` file.

    kind: "folder", "gguf" or "nook".
    label: what the weights are, for people: "int4, group 32".
    files: tokenizer and chat template files by name, byte for byte.
    end_ids: tokens that end an answer, from every source that names any.
    defaults: sampling settings that the model's author recommends, by our
        names and within our ranges.
    identity: equal for equal weights; goes into the keys of cached prefixes.
    notices: sentences a person should see once.
    """

    path: Path
    kind: Literal["folder", "gguf", "nook"]
    name: str
    label: str
    spec: ModelSpec
    weights: Weights = field(repr=False)
    files: Mapping[str, bytes] = field(repr=False)
    end_ids: frozenset[int]
    defaults: Mapping[str, float | int]
    licence: str
    licence_text: str = field(repr=False)
    identity: str
    notices: tuple[str, ...] = ()


def tensor_bytes(tensor: TensorSpec, name: str, group: int) -> int:
    """Bytes of a tensor in the format `name`.

    Raises:
        InputError: there is no such format or group
    """
    if name == VECTOR:
        return 4 * tensor.cols
    if name not in FORMATS:
        raise InputError(f'there is no weight format "{name}"; there are {", ".join(FORMATS)}')
    return FORMATS[name].packed_bytes(tensor.rows, tensor.cols, group)


def format_label(spec: ModelSpec, formats: Mapping[str, tuple[str, int]]) -> str:
    """What most weights of the layers are in, in words: "int4, group 32".

    formats: tensor -> (format, group)
    """
    totals: dict[tuple[str, int], int] = {}
    for tensor in spec.tensors():
        if tensor.role == "linear":
            key = formats[tensor.name]
            totals[key] = totals.get(key, 0) + tensor.parameters
    name, group = max(totals, key=lambda key: totals[key])
    words = {
        "q4": "int4",
        "q4g": "int4",
        "q6": "int6",
        "q8": "int8",
        "f16": "float16",
        "bf16": "bfloat16",
        "f32": "float32",
    }[name]
    return f"{words}, group {group}" if group else words
