"""Runs a model one layer at a time, so that only one layer's weights are in memory.

What calibration, the search for sensitive tensors and the measurement of
fidelity share. A text is windows of tokens, each a matrix of hidden states that
goes through layer after layer. Every layer is a decoder of its own, of that
layer alone, whose embedding is the hidden states: the arithmetic is that of the
one forward pass. A source's float weights meet their inputs in numpy's product,
where they can be looked at and replaced; packed weights in the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.convert.source import Source
from engine.core.library import Kernels
from engine.core.memory import Buffer
from engine.core.operations import PAGE_TOKENS
from engine.core.pages import PagePool
from engine.core.quant import BLOCK_ROWS, FORMATS
from engine.core.team import Team
from engine.errors import UnsupportedModelError
from engine.models.assignment import Assignment
from engine.models.batch import Batch
from engine.models.decoder import Decoder, Product, page_layout
from engine.models.spec import ModelSpec, TensorSpec
from engine.models.weights import VECTOR, MemoryWeights, Tensor, Weights
from engine.settings import KvDtype

__all__ = ["Float32", "FloatModel", "LayerModel", "PackedModel", "check_layerwise", "layer_of", "layer_tensors"]

Float32 = NDArray[np.float32]
Observer = Callable[[str, Float32, int], None]

_READ_BYTES = 32 << 20
_NO_HEAD = 16


class LayerModel(Protocol):
    """A model whose layers can be run one after the other."""

    spec: ModelSpec

    def embedded(self, windows: Sequence[NDArray[np.int32]]) -> list[Float32]:
        """What the first layer gets, float32 (tokens, hidden) for each window."""

    def load(self, number: int) -> None:
        """Make a layer the present one; the one before is given up. The last one brings norm and head along."""

    def run(self, x: Float32) -> Float32:
        """A window's hidden states after the present layer, float32 (tokens, hidden)."""

    def logits(self, x: Float32, first: int) -> Float32:
        """As `run` for the last layer, but of positions `first` and later the logits, float32 (rows, vocab_size)."""


def check_layerwise(spec: ModelSpec) -> None:
    """See that a layer needs nothing but what the one before gives.

    Raises:
        UnsupportedModelError: it needs more
    """
    if spec.is_recurrent or spec.layer_inputs is not None or any(each.keys_of is not None for each in spec.attentions):
        raise UnsupportedModelError(
            f"{spec.family} cannot be run layer by layer, as fitting to a text does; "
            "convert it with the level plain and without a text"
        )


def layer_tensors(spec: ModelSpec, number: int) -> list[TensorSpec]:
    """The tensors of one layer."""
    return [tensor for tensor in spec.tensors() if tensor.name.startswith(f"layers.{number}.")]


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "layers" else None


class _Stage:
    """A decoder of one layer, fed with hidden states in place of an embedding."""

    def __init__(
        self,
        spec: ModelSpec,
        number: int,
        tensors: Mapping[str, Tensor],
        team: Team,
        tokens: int,
        *,
        kv: KvDtype,
        wanted: int,
    ) -> None:
        """tensors: of the layer under their own names; with `wanted` also "norm", "head" and their biases."""
        has_head = wanted > 0
        self._spec = replace(
            spec,
            layers=(spec.layers[number],),
            vocab_size=spec.vocab_size if has_head else _NO_HEAD,
            embedding_scale=1.0,
            learned_positions=False,
            tied_head=False,
            head_bias=spec.head_bias and has_head,
        )
        size = FORMATS["f32"].packed_bytes(tokens, spec.hidden, 0)
        self._states = Buffer(size, "hidden states").view
        held = [Tensor("embedding", "f32", 0, tokens, spec.hidden, 0, self._states)]
        prefix = f"layers.{number}."
        for name, tensor in tensors.items():
            held.append(replace(tensor, name=f"layers.0.{name.removeprefix(prefix)}" if prefix in name else name))
        if not has_head:
            held += [_vector("norm", spec.hidden), _vector("norm.bias", spec.hidden)]
            held.append(_unread(TensorSpec("head", "head", (_NO_HEAD,), spec.hidden)))
        pages = -(-tokens // PAGE_TOKENS)
        self._table = np.arange(pages, dtype=np.int32)[None]
        self.decoder = Decoder(
            self._spec,
            MemoryWeights(held),
            PagePool(pages, page_layout(self._spec, kv)),
            team,
            context=tokens,
            kv=kv,
            max_tokens=tokens,
            max_sequences=1,
            max_wanted=max(wanted, 1),
        )
        self._tokens, self._wanted = tokens, wanted

    def batch(self, x: Float32, first: int | None = None) -> Batch:
        """All tokens of a window, whose hidden states are put in place; logits are wanted from `first` on."""
        tokens = len(x)
        padded = np.zeros((-(-tokens // BLOCK_ROWS), BLOCK_ROWS, x.shape[1]), np.float32)
        padded.reshape(-1, x.shape[1])[:tokens] = x
        values = padded.transpose(0, 2, 1).reshape(-1)
        self._states[: values.nbytes].view(np.float32)[:] = values
        return Batch(
            ids=np.arange(tokens, dtype=np.int32),
            positions=np.arange(tokens, dtype=np.int32),
            sequence_of=np.zeros(tokens, np.int32),
            tables=self._table,
            lengths=np.array([tokens], np.int32),
            wanted=np.arange(tokens if first is None else first, tokens, dtype=np.int32),
        )

    def states(self, tokens: int) -> Float32:
        """The hidden states that the last batch left."""
        return self.decoder.states[:tokens].copy()


class FloatModel:
    """A source, its weights read as float32 when their layer comes.

    tokens: of the longest window; head_rows: logits of the largest block.
    """

    def __init__(self, source: Source, kernels: Kernels, team: Team, tokens: int, *, head_rows: int = 0) -> None:
        check_layerwise(source.spec)
        self.spec, self.source = source.spec, source
        self._kernels, self._team, self._tokens, self._head_rows = kernels, team, tokens, head_rows
        self._assignments = {assignment.tensor.name: assignment for assignment in source.assignments}
        self._stage: _Stage | None = None
        self._number, self._prefix = -1, ""
        self.weights: dict[str, Float32] = {}
        """The present layer's matrices under their full names; what stands here is what `run` multiplies by."""

    def embedded(self, windows: Sequence[NDArray[np.int32]]) -> list[Float32]:
        """What the first layer gets, float32 (tokens, hidden) for each window."""
        table = self._rows_of("embedding", np.concatenate(windows)) * np.float32(self.spec.embedding_scale)
        if self.spec.learned_positions:
            table += self._rows_of("positions", np.concatenate([np.arange(len(window)) for window in windows]))
        ends = np.cumsum([len(window) for window in windows])
        return np.split(table, ends[:-1])

    def load(self, number: int) -> None:
        """Read a layer; the last one brings norm and head along where logits are wanted."""
        self._stage = None
        self.weights = {}
        wanted = self._head_rows if number == len(self.spec.layers) - 1 else 0
        names = [tensor.name for tensor in layer_tensors(self.spec, number)]
        head = "embedding" if self.spec.tied_head else "head"
        if wanted:
            names += [name for name in ("norm", "norm.bias", "head.bias", head) if name in self._assignments]
        tensors: dict[str, Tensor] = {}
        for name in names:
            assignment = self._assignments[name]
            here = "head" if name == head else name
            if assignment.tensor.role == "vector":
                tensors[here] = _vector(here, assignment.tensor.cols, self.source.rows(assignment, 0, 1)[0])
            else:
                self.weights[here] = self.matrix(assignment)
                tensors[here] = _unread(replace(assignment.tensor, name=here))
        self._number, self._prefix = number, f"layers.{number}."
        self._stage = _Stage(self.spec, number, tensors, self._team, self._tokens, kv="f32", wanted=wanted)

    def matrix(self, assignment: Assignment) -> Float32:
        """A whole tensor, float32 (rows, cols)."""
        tensor = assignment.tensor
        whole = np.empty((tensor.rows, tensor.cols), np.float32)
        step = max(1, _READ_BYTES // (4 * tensor.cols))
        for first in range(0, tensor.rows, step):
            count = min(step, tensor.rows - first)
            whole[first : first + count] = self.source.rows(assignment, first, count)
        return whole

    def run(
        self, x: Float32, observe: Observer | None = None, instead: Mapping[str, Float32] = MappingProxyType({})
    ) -> Float32:
        """A window's hidden states after the present layer.

        observe: gets every product's weights by full name, its inputs, and which expert's they are.
        instead: weights that replace those of the source.
        """
        assert self._stage is not None
        self._stage.decoder.forward_with(self._stage.batch(x), self._product(observe, instead))
        return self._stage.states(len(x))

    def logits(self, x: Float32, first: int, instead: Mapping[str, Float32] = MappingProxyType({})) -> Float32:
        """The last layer, norm and head, float32 (len(x) - first, vocab_size); valid until the next call."""
        assert self._stage is not None
        return self._stage.decoder.forward_with(self._stage.batch(x, first), self._product(None, instead))

    def _product(self, observe: Observer | None, instead: Mapping[str, Float32]) -> Product:
        def product(name: str, x: Float32, expert: int) -> Float32:
            full = name if name == "head" else self._prefix + name
            if observe is not None:
                observe(full, x, expert)
            whole = instead.get(full, self.weights.get(full))
            assert whole is not None
            rows = len(whole)
            if ".experts." in name:
                experts = self.spec.layers[self._number].feed_forward.experts
                assert experts is not None
                rows //= experts.count
            return x @ whole[expert * rows : (expert + 1) * rows].T

        return product

    def _rows_of(self, name: str, ids: NDArray[np.integer]) -> Float32:
        """Some rows of a table, which is read in pieces."""
        assignment = self._assignments[name]
        tensor = assignment.tensor
        out = np.empty((len(ids), tensor.cols), np.float32)
        step = max(1, _READ_BYTES // (4 * tensor.cols))
        for first in range(0, tensor.rows, step):
            here = np.flatnonzero((ids >= first) & (ids < first + step))
            if here.size:
                rows = self.source.rows(assignment, first, min(step, tensor.rows - first))
                out[here] = rows[ids[here] - first]
        return out


class PackedModel:
    """Packed weights, each layer run by the kernels as in use."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, team: Team, tokens: int, *, head_rows: int = 0, kv: KvDtype = "int8"
    ) -> None:
        check_layerwise(spec)
        self.spec, self.weights = spec, weights
        self._team, self._tokens, self._head_rows, self._kv = team, tokens, head_rows, kv
        self._stage: _Stage | None = None

    def embedded(self, windows: Sequence[NDArray[np.int32]]) -> list[Float32]:
        """What the first layer gets, float32 (tokens, hidden) for each window."""
        states = []
        for window in windows:
            x = np.concatenate([self._row("embedding", int(token)) for token in window])
            x *= np.float32(self.spec.embedding_scale)
            if self.spec.learned_positions:
                x += np.concatenate([self._row("positions", place) for place in range(len(window))])
            states.append(x)
        return states

    def load(self, number: int) -> None:
        """Map a layer; the last one brings norm and head along where logits are wanted."""
        wanted = self._head_rows if number == len(self.spec.layers) - 1 else 0
        tensors = {tensor.name: self.weights.tensor(tensor.name) for tensor in layer_tensors(self.spec, number)}
        if wanted:
            extra = [name for name in ("norm", "norm.bias", "head.bias") if name in self.weights.names]
            tensors |= {name: self.weights.tensor(name) for name in extra}
            head = self.weights.tensor("embedding" if self.spec.tied_head else "head")
            tensors["head"] = replace(head, name="head")
        self._stage = _Stage(self.spec, number, tensors, self._team, self._tokens, kv=self._kv, wanted=wanted)

    def run(self, x: Float32) -> Float32:
        """A window's hidden states after the present layer."""
        assert self._stage is not None
        self._stage.decoder.forward(self._stage.batch(x))
        return self._stage.states(len(x))

    def logits(self, x: Float32, first: int) -> Float32:
        """The last layer, norm and head, float32 (len(x) - first, vocab_size); valid until the next call."""
        assert self._stage is not None
        return self._stage.decoder.forward(self._stage.batch(x, first))

    def _row(self, name: str, row: int) -> Float32:
        tensor = self.weights.tensor(name)
        layout = FORMATS[tensor.format].layout(tensor.rows, tensor.cols, tensor.group)
        return layout.unpack_rows(tensor.data, tensor.exponent, row, 1)


def _unread(tensor: TensorSpec) -> Tensor:
    """A matrix of which the decoder needs the shape only."""
    return Tensor(tensor.name, "f32", 0, tensor.rows, tensor.cols, 0, np.zeros(64, np.uint8))


def _vector(name: str, size: int, values: Float32 | None = None) -> Tensor:
    held = np.zeros(size, np.float32) if values is None else np.ascontiguousarray(values, np.float32)
    return Tensor(name, VECTOR, 0, 1, size, 0, held.view(np.uint8))
