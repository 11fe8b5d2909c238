"""The one forward pass: lowers a spec and its weights to a table of operations, once, and runs it per step.

Knows no family and no file: what differs between models is in `ModelSpec`.
Python does nothing per layer; a step is a few small arrays and one compiled
call, inside which the whole team of threads walks the table.
"""

from __future__ import annotations

import ctypes
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from engine.core.math import exp
from engine.core.operations import (
    AMX_BLOCKS,
    AMX_COLUMNS,
    AMX_UNIT,
    CHUNK_TOKENS,
    FIELDS,
    KV_F16,
    KV_F32,
    KV_INT8,
    PAGE_TOKENS,
    PARTIAL_HEAD,
    ROW_WORDS,
    STATE,
    STATE_WORDS,
    TILE_ROWS,
    X_CHUNK,
    X_TOKENS,
    Activation,
    Norm,
    Opcode,
    Program,
    Routing,
    RowSet,
    WeightKind,
)
from engine.core.pages import PageLayout, PagePool
from engine.core.quant import FORMATS
from engine.core.team import Team
from engine.errors import UnsupportedModelError
from engine.models.batch import Batch
from engine.models.rope import inverse_frequencies, logarithm, power
from engine.models.spec import (
    AttentionSpec,
    ConvolutionSpec,
    DeltaSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    QueryGrowth,
    RopeSpec,
)
from engine.models.streaming import StreamedWeights
from engine.models.weights import Tensor, Weights
from engine.settings import KvDtype

__all__ = [
    "Decoder",
    "OperationTime",
    "Product",
    "activation_columns",
    "check_shapes",
    "kv_group",
    "memory_layout",
    "mixed_columns",
    "own_columns",
    "page_layout",
    "scratch_bytes",
]

Product = Callable[[str, NDArray[np.float32], int], NDArray[np.float32]]
"""(weights' name without its layer, inputs (rows, cols), which expert's) -> outputs (rows, weights' rows)."""

_COUNTS = {RowSet.TOKENS: "tokens", RowSet.WANTED: "wanted", RowSet.ROUTED: "routed", RowSet.GATHERED: "routed"}
"""Words of the state that say how many rows there are."""

_KINDS = {
    "q4": WeightKind.Q4,
    "q4g": WeightKind.Q4,
    "q6": WeightKind.Q6,
    "q8": WeightKind.Q8,
    "f16": WeightKind.F16,
    "bf16": WeightKind.BF16,
    "f32": WeightKind.F32,
}
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_tanh": Activation.GELU_TANH,
    "relu2": Activation.RELU2,
    "swiglu_clamped": Activation.SWIGLU_CLAMPED,
}
_ROUTINGS = {"softmax": Routing.SOFTMAX, "sigmoid": Routing.SIGMOID, "chosen": Routing.CHOSEN}
_NORMS = {"rms": Norm.RMS, "layer": Norm.LAYER}
_RUN_NORMS = {"width": Norm.RMS, "each": Norm.LAYER}
"""Norms of queries and keys that are not of every head alike."""
_NO_NORM: dict[str, int | float] = {"norm": int(Norm.NONE), "weight": 0, "bias": 0, "epsilon": 0.0}
_UNIT_EPSILON = 1e-6
"""Added to the squared length of what is made a unit vector, in delta nets."""
_CANCEL_S = 0.05
"""How long a cancelled step may go on waiting for a layer."""


@dataclass(frozen=True, slots=True)
class _Room:
    """Memory for the inputs of products: rows for all of the batch, as wide as the widest."""

    codes: int
    scales: int
    sums: int
    row_bytes: int
    scale_row_bytes: int


@dataclass(frozen=True, slots=True)
class _Routed:
    """Memory of layers with experts, for pairs of a token and an expert chosen for it; addresses, and buffers.

    normed (tokens, hidden); logits, of routers, and gates of shared blocks; experts, weights, places
    (tokens, chosen); firsts (experts + 1,); tokens (pairs,); wide (pairs, gates and ups); out (pairs,
    hidden); shared (tokens, hidden); room: inputs of the pairs' products.
    """

    normed: NDArray[np.float32]
    logits: NDArray[np.float32]
    gates: NDArray[np.float32]
    experts: int
    weights: int
    places: int
    firsts: int
    tokens: int
    wide: NDArray[np.float32]
    out: NDArray[np.float32]
    shared: NDArray[np.float32]
    room: _Room


@dataclass(frozen=True, slots=True)
class _Activations:
    """Where a product finds its input: int8 codes with scales by span and sums by group, or float32."""

    span: int
    group: int
    codes: int
    stride: int
    scales: int
    sums: int
    scale_stride: int
    columns: int

    def fields(self) -> dict[str, int]:
        return {
            "x_span": self.span,
            "x_group": self.group,
            "x_codes": self.codes,
            "x_stride": self.stride,
            "x_scales": self.scales,
            "x_sums": self.sums,
            "x_scale_stride": self.scale_stride,
            "x_columns": self.columns,
        }


def kv_group(head_dim: int) -> int:
    """Dimensions that share an int8 scale."""
    return next(group for group in (64, 32, 16) if head_dim % group == 0)


def _head_bytes(head_dim: int, kv: KvDtype) -> int:
    """Keys and values of one head for the positions of one page."""
    if kv != "int8":
        return 2 * {"f16": 2, "f32": 4}[kv] * head_dim * PAGE_TOKENS
    return 2 * (head_dim * PAGE_TOKENS + head_dim // kv_group(head_dim) * PAGE_TOKENS * 2)


def page_layout(spec: ModelSpec, kv: KvDtype) -> PageLayout:
    """How a page of the KV cache of this model is cut up; layers without keys of their own take nothing."""
    own = [a if a is not None and a.keys_of is None else None for a in (layer.attention for layer in spec.layers)]
    return PageLayout(PAGE_TOKENS, tuple(0 if a is None else a.kv_heads * _head_bytes(a.head_dim, kv) for a in own))


def memory_layout(spec: ModelSpec) -> PageLayout | None:
    """How what recurrent layers keep of one sequence is cut up; None for a model without them."""
    if not spec.is_recurrent:
        return None
    return PageLayout(1, tuple(layer.memory_bytes for layer in spec.layers))


def check_shapes(spec: ModelSpec) -> None:
    """What the kernels ask of the shapes.

    Raises:
        UnsupportedModelError: names the number that does not fit
    """
    sizes = {"hidden size": spec.hidden, "hidden_size_per_layer_input": spec.layer_inputs or 0}
    for layer in spec.layers:
        sizes |= _mixer_sizes(layer)
        sizes["intermediate size"] = layer.feed_forward.intermediate
        if layer.feed_forward.experts is not None and layer.feed_forward.experts.shared is not None:
            sizes["intermediate size of the shared expert"] = layer.feed_forward.experts.shared
        for name, size in sizes.items():
            if size % 16:
                message = f"{spec.family} with {name} = {size} is not supported; multiples of 16 are"
                raise UnsupportedModelError(message)
        if layer.attention is not None and layer.attention.head_dim > 512:
            message = f"{spec.family} with head_dim = {layer.attention.head_dim} is not supported; up to 512 is"
            raise UnsupportedModelError(message)


def _mixer_sizes(layer: LayerSpec) -> dict[str, int]:
    """Sizes of whole vectors, as messages name them."""
    if layer.convolution is not None:
        return {"width of the convolution": layer.convolution.width}
    if layer.delta is not None:
        return {"key head size": layer.delta.key_dim, "value head size": layer.delta.value_dim}
    assert layer.attention is not None
    sizes = {"head_dim": layer.attention.head_dim}
    if layer.attention.latent is not None:
        latent = layer.attention.latent
        sizes |= {"kv_lora_rank": latent.key_rank, "qk_nope_head_dim": latent.plain, "v_head_dim": latent.values}
        sizes |= {"q_lora_rank": latent.query_rank or 0, "rotary size": layer.attention.rope.dim}  # type: ignore[union-attr]
    return sizes


def mixed_columns(layer: LayerSpec) -> tuple[int, int]:
    """What the layer's first product makes of a token, and what its last one is given, in front of the feed-forward."""
    if layer.convolution is not None:
        return 3 * layer.convolution.width, layer.convolution.width
    if layer.delta is not None:
        return sum(layer.delta.parts) + layer.delta.parts[2], layer.delta.parts[2]
    attention = layer.attention
    assert attention is not None
    heads = attention.heads * (2 if attention.gated else 1) + 2 * attention.kv_heads
    return attention.head_dim * heads, attention.head_dim * attention.heads


def own_columns(mixer: AttentionSpec | DeltaSpec) -> tuple[int, ...]:
    """Columns of the numbers that such layers hold of each token beside what all layers have.

    Latent attention: the inner vectors; q; what k and v are cut from; q, k and v. A delta net: q, k and v after the
    convolution; b and a; how much of the new is taken, and of the old kept.
    """
    if isinstance(mixer, DeltaSpec):
        heads = -(-mixer.heads // 16) * 16
        return sum(mixer.parts), 2 * heads, 2 * heads
    latent = mixer.latent
    if latent is None or mixer.rope is None:
        return ()
    queries = mixer.heads * (latent.plain + mixer.rope.dim)
    down = (latent.query_rank or queries) + latent.key_rank + mixer.rope.dim
    return down, queries, mixer.heads * (latent.plain + latent.values), 3 * mixer.heads * mixer.head_dim


def activation_columns(spec: ModelSpec) -> int:
    """Columns of the widest input of any product, as it is stored."""
    inputs = [layer.feed_forward.widest for layer in spec.layers]
    inputs += [mixed_columns(layer)[1] for layer in spec.layers]
    inputs += [max(a.latent.key_rank, a.latent.query_rank or 0) for a in spec.attentions if a.latent is not None]
    return -(-max(spec.hidden, spec.layer_inputs or 0, *inputs) // 256) * 256


def scratch_bytes(spec: ModelSpec, max_tokens: int) -> int:
    """Working memory of one thread for steps of up to `max_tokens`, a multiple of 64."""
    # A product on AMX tiles: tile shapes and products, unpacked blocks, sums that wait, gates and
    # ups. Else a row of floats.
    tiles = 4096 + AMX_BLOCKS * (16 * AMX_COLUMNS + 3 * 64 * (max_tokens + X_TOKENS))
    most = max(tiles, 4 * activation_columns(spec))
    for attention in spec.attentions:
        rows = -(-max(TILE_ROWS, attention.heads // attention.kv_heads) // 16) * 16
        part = 4 * (PARTIAL_HEAD + attention.head_dim)
        values = CHUNK_TOKENS * attention.head_dim
        most = max(most, 8192 + rows * (4 + 4 * attention.head_dim + 128 + 6 * CHUNK_TOKENS + 2 * part) + values)
    counts = [layer.feed_forward.experts.count for layer in spec.layers if layer.feed_forward.experts is not None]
    if counts:
        most += 8 * ROW_WORDS + 12 * max(counts) + 256  # the row of one expert's product; a router's numbers
    return -(-most // 4096) * 4096


def _matrix_at(address: int, rows: int, columns: int, stride: int) -> NDArray[np.float32]:
    """float32 (rows, columns) that lie in a decoder's buffers, `stride` bytes from row to row."""
    held = np.ctypeslib.as_array((ctypes.c_float * max(0, rows * (stride // 4))).from_address(address))
    return held.reshape(rows, stride // 4)[:, :columns]


@dataclass(frozen=True, slots=True)
class OperationTime:
    """How long an operation took. name: of the weights that it multiplies by, else of its kind. layer: None outside."""

    name: str
    layer: int | None
    seconds: float


class Decoder:
    """A loaded model: logits of a batch over the pages of its pool.

    One thread at a time may call `forward`; `cancel` may come from any.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        pool: PagePool,
        team: Team,
        *,
        context: int,
        kv: KvDtype = "int8",
        max_tokens: int = 256,
        max_sequences: int = 16,
        max_wanted: int = 16,
        memories: PagePool | None = None,
    ) -> None:
        """Lower the model; nothing is computed yet.

        Args:
            spec: what the model is
            weights: its tensors; held as long as the decoder lives
            pool: pages laid out by `page_layout(spec, kv)`
            team: the threads that compute
            context: positions a sequence may reach; decides rotary frequencies that depend on length
            kv: precision of keys and values
            max_tokens: rows of the largest batch
            max_sequences: sequences of the largest batch
            max_wanted: rows of logits of the largest batch
            memories: of sequences, laid out by `memory_layout(spec)`, for a model with recurrent layers

        Raises:
            UnsupportedModelError: a shape that the kernels do not take
        """
        check_shapes(spec)
        self.spec = spec
        self.context = context
        self.max_tokens, self.max_sequences, self.max_wanted = max_tokens, max_sequences, max_wanted
        self._weights, self._pool, self._team, self._kv = weights, pool, team, kv
        self._memories = memories
        assert (memories is not None) == spec.is_recurrent, "memories are for models with recurrent layers"
        self._buffers: list[NDArray[np.uint8]] = []
        self._tensors: dict[str, Tensor] = {}
        self._slopes: dict[int, int] = {}
        self._rooms: dict[AttentionSpec | DeltaSpec, tuple[NDArray[np.float32], ...]] = {}
        self._balances: dict[
            int, NDArray[np.float32] | None
        ] = {}  # layer -> what its keys and queries are multiplied by
        self._growths: dict[QueryGrowth, int] = {}
        self._layer_starts: dict[int, int | None] = {}  # operation -> the layer that begins with it
        self._products: dict[int, str] = {}  # operation -> the weights that it multiplies by
        self._execute: Callable[[NDArray[np.int64], NDArray[np.int64]], bool] = team.run
        self._padded_vocab = -(-spec.vocab_size // 16) * 16
        self._logits = self._floats(max_wanted, self._padded_vocab)
        counts = {layer.feed_forward.experts.chosen for layer in spec.layers if layer.feed_forward.experts is not None}
        if len(counts) > 1:
            raise UnsupportedModelError(f"{spec.family} with other numbers of chosen experts in other layers")
        self._chosen = counts.pop() if counts else 0
        self._program = self._lowered().table()
        self._state = np.zeros(STATE_WORDS, np.int64)
        words = {name: index for index, name in enumerate(STATE)}
        self._state[words["routed_tokens"]] = self._routed.tokens if self._chosen else 0
        bytes_per_thread = scratch_bytes(spec, max_tokens)
        self._state[words["scratch"]] = self._room(bytes_per_thread * team.members).ctypes.data
        self._state[words["scratch_bytes"]] = bytes_per_thread
        self._words = words
        # What a batch says is copied to places that the state knows: numpy takes long to tell an address.
        self._ids, self._positions = np.zeros(max_tokens, np.int32), np.zeros(max_tokens, np.int32)
        self._wanted, self._token_tables = np.zeros(max_wanted, np.int32), np.zeros(max_tokens, np.int64)
        self._pages, self._pages_at = np.zeros(0, np.int32), 0  # grow to what batches bring
        self._segments = np.zeros((max_sequences, 4), np.int64)
        self._memory_places = np.zeros((max_sequences, 2), np.int64)
        self._counting = np.arange(max_sequences)
        places: dict[str, NDArray[np.int32] | NDArray[np.int64]] = {
            "ids": self._ids,
            "positions": self._positions,
            "wanted_rows": self._wanted,
            "token_tables": self._token_tables,
            "segment_table": self._segments,
            "memories": self._memory_places,
        }
        for name, array in places.items():
            self._state[words[name]] = array.ctypes.data

    # ------------------------------------------------------------------ running

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        """Write the batch's keys and values, and compute the wanted logits.

        Returns:
            float32 (wanted, vocab_size), a view that the next call overwrites;
            meaningless when `cancelled` is true afterwards
        """
        tokens, sequences, wanted = len(batch.ids), len(batch.lengths), len(batch.wanted)
        assert tokens <= self.max_tokens, f"a batch of {tokens} tokens exceeds {self.max_tokens}"
        assert sequences <= self.max_sequences, f"a batch of {sequences} sequences exceeds {self.max_sequences}"
        assert wanted <= self.max_wanted, f"{wanted} rows of logits exceed {self.max_wanted}"
        self._ids[:tokens], self._positions[:tokens], self._wanted[:wanted] = batch.ids, batch.positions, batch.wanted
        if batch.tables.size > self._pages.size:
            self._pages = np.zeros(batch.tables.size, np.int32)
            self._pages_at = int(self._pages.ctypes.data)
        self._pages[: batch.tables.size] = batch.tables.ravel()
        table_bytes = 4 * batch.tables.shape[1]
        tables, segments = self._token_tables[:tokens], self._segments
        if tokens == sequences:  # of each sequence one
            count = tokens
            np.multiply(self._counting[:count], table_bytes, out=tables)
            tables += self._pages_at
            segments[:count, 0], segments[:count, 1] = self._counting[:count], 1
            segments[:count, 2], segments[:count, 3] = batch.positions, tables
        else:
            np.multiply(batch.sequence_of, table_bytes, out=tables)
            tables += self._pages_at
            starts = np.flatnonzero(np.diff(batch.sequence_of, prepend=-1))
            count = len(starts)
            segments[:count, 0], segments[:count, 1] = starts, np.diff(starts, append=tokens)
            segments[:count, 2], segments[:count, 3] = batch.positions[starts], tables[starts]
        if self._memories is not None:
            assert batch.memories is not None, "the model's sequences have memories"
            slots = batch.memories[batch.sequence_of[segments[:count, 0]]].astype(np.int64)
            places = self._memories.memory.ctypes.data + slots * self._memories.layout.page_bytes
            self._memory_places[:count] = np.where(slots < 0, 0, places)
        state, words = self._state, self._words
        state[words["routed"]] = tokens * self._chosen
        state[words["tokens"]], state[words["wanted"]], state[words["segments"]] = tokens, wanted, count
        self._run(state)
        return self._logits[:wanted, : self.spec.vocab_size]

    def forward_with(self, batch: Batch, product: Product) -> NDArray[np.float32]:
        """As `forward`, but for products of float weights, which `product` computes; the weights are never read.

        Without quantised inputs a product's input is float32, so whoever wants to see what the weights are multiplied
        by, or to multiply by others, finds it here. The rest is the compiled forward pass. For weights in memory only.
        """

        def run(program: NDArray[np.int64], state: NDArray[np.int64]) -> bool:
            begin = 0
            for index in [*sorted(self._products), len(program)]:
                if begin < index:
                    self._team.run(program[begin:index], state)
                begin = index + 1
                if index == len(program):
                    break
                row = program[index]
                opcode = Opcode(int(row[0]))
                field = dict(zip(FIELDS[opcode], row[1:].tolist(), strict=False))
                inputs = int(state[self._words[_COUNTS[RowSet(field["rows"])]]])
                rows, factor = 16 * field["blocks"], np.int64(field["factor"]).view(np.float64).astype(np.float32)
                x = _matrix_at(field["x_codes"], inputs, field["x_columns"], field["x_stride"])
                out = _matrix_at(field["out"], inputs, rows, field["out_stride"])
                for expert, first, end in self._parts(opcode, field, inputs):
                    values = product(self._products[index], x[first:end], expert) * factor
                    if field["bias"]:
                        address = field["bias"] + expert * field.get("bias_step", 0)
                        values += _matrix_at(address, 1, rows, 4 * rows)[:, : values.shape[1]]
                    target = out[first:end, : values.shape[1]]
                    np.add(target, values, out=target) if field["add"] else np.copyto(target, values)
            return True

        self._execute = run
        try:
            return self.forward(batch)
        finally:
            self._execute = self._team.run

    @staticmethod
    def _parts(opcode: Opcode, field: Mapping[str, int], inputs: int) -> list[tuple[int, int, int]]:
        """(expert, first, end) of the rows of a product that one expert's weights, or all of them, are for."""
        if opcode is Opcode.MATMUL:
            return [(0, 0, inputs)] if inputs else []
        firsts = np.ctypeslib.as_array((ctypes.c_int32 * (field["count"] + 1)).from_address(field["firsts"])).tolist()
        return [(expert, first, end) for expert, (first, end) in enumerate(pairwise(firsts)) if first < end]

    def timed(self, batch: Batch) -> list[OperationTime]:
        """Compute a batch an operation at a time, for its times; each has some microseconds more than in a step."""
        times: list[OperationTime] = []
        layer: int | None = None

        def run(program: NDArray[np.int64], state: NDArray[np.int64]) -> bool:
            nonlocal layer
            for index, row in enumerate(program, len(times)):
                layer = self._layer_starts.get(index, layer)
                single = np.ascontiguousarray(row[None])
                begin_s = time.perf_counter()
                self._team.run(single, state)
                seconds = time.perf_counter() - begin_s
                name = self._products.get(index) or Opcode(int(row[0])).name.lower()
                times.append(OperationTime(name, layer, seconds))
            return True

        self._execute = run
        try:
            self.forward(batch)
        finally:
            self._execute = self._team.run
        return times

    def _run(self, state: NDArray[np.int64]) -> None:
        """The whole program at once, or layer by layer as they come from disk."""
        weights = self._weights
        if not isinstance(weights, StreamedWeights):
            self._execute(self._program, state)
            return
        weights.begin()
        bounds = [0, *self._layer_starts, len(self._program)]
        for first, last in pairwise(bounds):
            layer = self._layer_starts.get(first)
            # When told to stop, the team does so at the layer's first operation: no matter what lies there by then.
            while layer is not None and not weights.take(layer, _CANCEL_S) and not self._team.cancelling:
                pass
            if not self._execute(self._program[first:last], state):
                return
            if layer is not None:
                weights.give_back(layer)

    @property
    def states(self) -> NDArray[np.float32]:
        """float32 (max_tokens, hidden): what the last layer gave for the tokens of the last batch, before the norm."""
        return self._x

    @property
    def cancelled(self) -> bool:
        """Whether the last `forward` was stopped on the way."""
        return self._team.cancelled

    def cancel(self) -> None:
        """Stop the present step (or the next) after the operation it is at."""
        self._team.cancel()

    def clear_cancel(self) -> None:
        """Let steps run again."""
        self._team.clear_cancel()

    @property
    def buffer_bytes(self) -> int:
        """Working memory besides weights and pages."""
        return sum(buffer.nbytes for buffer in self._buffers)

    # ----------------------------------------------------------------- lowering

    def _room(self, size: int) -> NDArray[np.uint8]:
        """Zeroed memory on a multiple of 64, kept for the decoder's life."""
        raw = np.zeros(size + 64, np.uint8)
        start = -raw.ctypes.data % 64
        self._buffers.append(raw)
        return raw[start : start + size]

    def _floats(self, rows: int, columns: int) -> NDArray[np.float32]:
        """float32 (rows, columns)."""
        return self._room(4 * rows * columns).view(np.float32).reshape(rows, columns)

    def _own_rooms(self, mixer: AttentionSpec | DeltaSpec) -> tuple[NDArray[np.float32], ...]:
        """What `own_columns` says; layers alike share it."""
        if mixer not in self._rooms:
            self._rooms[mixer] = tuple(self._floats(self.max_tokens, columns) for columns in own_columns(mixer))
        return self._rooms[mixer]

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            self._tensors[name] = self._weights.tensor(name)
        return self._tensors[name]

    def _vector(self, name: str, size: int | None = None, scale: float = 1.0) -> int:
        """Address of a float32 vector times `scale`, zero-padded to `size`."""
        tensor = self._tensor(name)
        if size in {None, tensor.cols} and scale == 1.0:
            return tensor.address
        padded = self._floats(1, size or tensor.cols)
        padded[0, : tensor.cols] = tensor.vector() * np.float32(scale)
        return int(padded.ctypes.data)

    def _weight_fields(self, tensor: Tensor, scale: float = 1.0) -> dict[str, int | float]:
        layout = FORMATS[tensor.format].layout(tensor.rows, tensor.cols, tensor.group)
        parts = {part.name: part.offset for part in layout.parts}
        address = tensor.address
        return {
            "kind": int(_KINDS[tensor.format]),
            "panels": address + parts.get("codes", parts.get("values", 0)),
            "meta": address + parts.get("meta", 0),
            "blocks": layout.padded_rows // 16,
            "columns": layout.padded_cols,
            "group": tensor.group,
            "span": layout.span,
            "factor": 2.0**tensor.exponent * scale,
        }

    def _lowered(self) -> Program:
        spec, program = self.spec, Program()
        self._x = self._floats(self.max_tokens, spec.hidden)
        widest = max(
            max(mixed_columns(layer)[0], (2 if layer.feed_forward.gated else 1) * layer.feed_forward.widest)
            for layer in spec.layers
        )
        self._wide = self._floats(self.max_tokens, -(-widest // 16) * 16)
        self._attended = self._floats(self.max_tokens, max(mixed_columns(layer)[1] for layer in spec.layers))
        self._activations = self._activation_room(self.max_tokens, activation_columns(spec))
        self._between = self._activation_room(self.max_tokens, max(layer.feed_forward.widest for layer in spec.layers))
        if self._chosen:
            self._routed = self._routed_rooms()
        # What a block computes, where it is not added to x at once.
        self._branch = self._x
        if spec.layer_inputs is not None or any(layer.parallel or layer.norms != "pre" for layer in spec.layers):
            self._branch = self._floats(self.max_tokens, spec.hidden)
        angles = self._lower_angles(program)
        self._lower_embedding(program, "embedding", spec.embedding_scale)
        if spec.learned_positions:
            self._lower_embedding(program, "positions", 1.0)
        if spec.layer_inputs is not None:
            self._lower_layer_inputs(program, spec.layer_inputs)
        rooms = self._attention_rooms()
        offsets = self._pool.layout.layer_offsets
        for number, layer in enumerate(spec.layers):
            self._layer_starts[len(program)] = number
            if layer.attention is not None:
                self._lower_attention(program, number, layer, layer.attention, angles, rooms, offsets)
            if layer.convolution is not None:
                self._lower_convolution(program, number, layer, layer.convolution)
            if layer.delta is not None:
                self._lower_delta(program, number, layer, layer.delta)
            self._lower_feed_forward(program, number, layer)
            if spec.layer_inputs is not None:
                self._lower_layer_input(program, number, spec.layer_inputs)
            if layer.scaled:
                scale = float(self._tensor(f"layers.{number}.scale").vector()[0])
                self._lower_move(program, self._x, self._x, spec.hidden, scale=scale)
        self._layer_starts[len(program)] = None
        head = self._tensor("embedding" if spec.tied_head else "head")
        self._lower_norm(program, "norm", head, RowSet.WANTED)
        bias = "head.bias" if spec.head_bias else None
        self._lower_product(program, head, self._logits, RowSet.WANTED, bias=bias, scale=spec.logit_scale)
        if spec.logit_softcap is not None:
            program.add(
                Opcode.SOFTCAP,
                source=self._logits.ctypes.data,
                source_stride=self._logits.strides[0],
                width=self._padded_vocab,
                size=float(spec.logit_softcap),
            )
        return program

    def _lower_embedding(
        self, program: Program, name: str, scale: float, out: NDArray[np.float32] | None = None
    ) -> None:
        out = self._x if out is None else out
        program.add(
            Opcode.EMBED,
            **self._weight_fields(self._tensor(name)),
            out=out.ctypes.data,
            out_stride=out.strides[0],
            width=out.shape[1],
            scale=float(scale),
            by_position=int(name == "positions"),
        )

    def _lower_layer_inputs(self, program: Program, size: int) -> None:
        """A vector for every layer: (norm(product of x) + the token's own) / sqrt 2."""
        width, half = size * len(self.spec.layers), 0.5**0.5
        self._inputs = self._floats(self.max_tokens, width)
        own = self._floats(self.max_tokens, width)
        self._gates = self._floats(self.max_tokens, 2 * size)
        product = self._tensor("layer_inputs.of_embedding")
        self._lower_quantise(program, self._x, self.spec.hidden, product)
        self._lower_product(program, product, self._inputs, scale=self.spec.hidden**-0.5)
        weights = self._floats(1, width)
        weights[0] = np.tile(self._tensor("layer_inputs.norm").vector(), len(self.spec.layers)) * np.float32(half)
        self._lower_run_norm(program, self._inputs, len(self.spec.layers), size, weights, self.spec.norm_epsilon)
        self._lower_embedding(program, "layer_inputs", half * size**0.5, own)
        program.add(
            Opcode.RESIDUAL,
            source=own.ctypes.data,
            source_stride=own.strides[0],
            width=width,
            **_NO_NORM,
            out=self._inputs.ctypes.data,
            out_stride=self._inputs.strides[0],
        )

    def _lower_layer_input(self, program: Program, number: int, size: int) -> None:
        """X += norm(out(activation(gate(x)) * the layer's vector))."""
        prefix = f"layers.{number}.input"
        gate, out = self._tensor(f"{prefix}.gate"), self._tensor(f"{prefix}.out")
        self._lower_quantise(program, self._x, self.spec.hidden, gate)
        self._lower_product(program, gate, self._gates)
        self._lower_move(program, self._inputs[:, number * size :], self._gates[:, size:], size)
        block = replace(self.spec.layers[number].feed_forward, gated=True, experts=None)
        self._lower_activation(program, block, self._gates, size, self._input_of(out), RowSet.TOKENS)
        self._lower_product(program, out, self._branch)
        self._lower_residual(program, self._norm_fields(f"{prefix}.post_norm"))

    def _lower_run_norm(  # noqa: PLR0917 - of what, how many, how long, how
        self,
        program: Program,
        source: NDArray[np.float32],
        runs: int,
        size: int,
        weights: NDArray[np.float32],
        epsilon: float,
    ) -> None:
        """A root mean square norm of each run of columns, in place; weights float32 (1, runs * size)."""
        program.add(
            Opcode.PREPARE,
            source=source.ctypes.data,
            source_stride=source.strides[0],
            heads=runs,
            kv_heads=0,
            head_dim=size,
            clip=0.0,
            norm=int(Norm.RMS),
            run=size,
            q_norm=weights.ctypes.data,
            k_norm=0,
            epsilon=float(epsilon),
            growth=0,
            growth_period=1,
        )

    def _lower_move(  # noqa: PLR0917 - from where, to where, how much
        self,
        program: Program,
        source: NDArray[np.float32],
        out: NDArray[np.float32],
        width: int,
        steps: tuple[int, int] = (0, 0),
        count: int = 1,
        *,
        scale: float = 1.0,
    ) -> None:
        """`count` runs of columns; steps: columns from one to the next, in source and out."""
        program.add(
            Opcode.MOVE,
            source=source.ctypes.data,
            source_stride=source.strides[0],
            source_step=4 * steps[0],
            out=out.ctypes.data,
            out_stride=out.strides[0],
            out_step=4 * steps[1],
            count=count,
            width=width,
            scale=float(scale),
        )

    def _lower_angles(self, program: Program) -> dict[RopeSpec, int]:
        """One operation per kind of rotation; where its angles will lie."""
        places: dict[RopeSpec, int] = {}
        for attention in self.spec.attentions:
            rope = attention.rope
            if rope is None or rope in places:
                continue
            frequencies, factor = inverse_frequencies(rope, self.context)
            held = self._floats(1, len(frequencies))
            held[0] = frequencies
            out = self._floats(self.max_tokens, 2 * len(frequencies))
            program.add(
                Opcode.ANGLES,
                frequencies=held.ctypes.data,
                count=len(frequencies),
                out=out.ctypes.data,
                attention_factor=float(factor),
            )
            places[rope] = int(out.ctypes.data)
        return places

    def _activation_room(self, rows: int, widest: int) -> _Room:
        """Memory for inputs of up to `widest` columns."""
        columns, rows = -(-widest // 256) * 256, -(-rows // X_TOKENS) * X_TOKENS
        codes = self._floats(rows, columns)
        # A line more than the rows: scales a power of two apart would share a few lines of the cache.
        scales, sums = (self._floats(columns // 32, rows + 16) for _ in range(2))
        return _Room(codes.ctypes.data, scales.ctypes.data, sums.ctypes.data, codes.strides[0], scales.strides[0])

    def _input_of(self, tensor: Tensor, room: _Room | None = None) -> _Activations:
        room = room or self._activations
        layout = FORMATS[tensor.format].layout(tensor.rows, tensor.cols, tensor.group)
        columns = layout.padded_cols
        stride = columns // 64 * X_CHUNK if tensor.group else room.row_bytes
        return _Activations(
            layout.span, tensor.group, room.codes, stride, room.scales, room.sums, room.scale_row_bytes, columns
        )

    def _norm_fields(self, name: str) -> dict[str, int | float]:
        spec = self.spec
        return {
            "norm": int(_NORMS[spec.norm]),
            "weight": self._vector(name) if spec.norm_weight else 0,
            "bias": self._vector(f"{name}.bias") if spec.norm_bias else 0,
            "epsilon": float(spec.norm_epsilon),
        }

    def _lower_norm(self, program: Program, name: str, consumer: Tensor, rows: RowSet = RowSet.TOKENS) -> None:
        program.add(
            Opcode.NORM,
            **self._input_of(consumer).fields(),
            rows=int(rows),
            source=self._x.ctypes.data,
            source_stride=self._x.strides[0],
            width=self.spec.hidden,
            **self._norm_fields(name),
        )

    def _lower_input(self, program: Program, name: str, norms: str, consumer: Tensor) -> None:
        """What a block reads: the norm of x, or x itself where only its output is normed."""
        if norms != "post":
            self._lower_norm(program, name, consumer)
        else:
            self._lower_quantise(program, self._x, self.spec.hidden, consumer)

    def _lower_quantise(  # noqa: PLR0917 - from where, how much, for whom, to where
        self,
        program: Program,
        source: NDArray[np.float32],
        width: int,
        consumer: Tensor,
        rows: RowSet = RowSet.TOKENS,
        room: _Room | None = None,
    ) -> None:
        program.add(
            Opcode.QUANTISE,
            **self._input_of(consumer, room).fields(),
            rows=int(rows),
            source=source.ctypes.data,
            source_stride=source.strides[0],
            width=width,
        )

    def _lower_residual(self, program: Program, norm: dict[str, int | float] | None = None) -> None:
        program.add(
            Opcode.RESIDUAL,
            source=self._branch.ctypes.data,
            source_stride=self._branch.strides[0],
            width=self.spec.hidden,
            **(norm or _NO_NORM),
            out=self._x.ctypes.data,
            out_stride=self._x.strides[0],
        )

    def _lower_product(
        self,
        program: Program,
        tensor: Tensor,
        out: NDArray[np.float32],
        rows: RowSet = RowSet.TOKENS,
        *,
        bias: str | None = None,
        add: bool = False,
        scale: float = 1.0,
        activates: int = 0,
        inputs: _Activations | None = None,
    ) -> None:
        padded = FORMATS[tensor.format].layout(tensor.rows, tensor.cols, tensor.group).padded_rows
        self._products[len(program)] = re.sub(r"^layers\.\d+\.", "", tensor.name)
        program.add(
            Opcode.MATMUL,
            **(inputs or self._input_of(tensor)).fields(),
            rows=int(rows),
            **self._weight_fields(tensor, scale),
            bias=0 if bias is None else self._vector(bias, padded, scale),
            out=out.ctypes.data,
            out_stride=out.strides[0],
            add=int(add),
            activates=activates,
        )

    def _attention_rooms(self) -> tuple[int, int, int, int]:
        """Queries, their scales, partial results, and chunks of the longest sequence."""
        attentions = self.spec.attentions
        width = max(a.heads * a.head_dim for a in attentions)
        chunks = -(-self.context // CHUNK_TOKENS)
        part = max(a.heads * (PARTIAL_HEAD + a.head_dim) for a in attentions)
        queries, scales = self._floats(self.max_tokens, width), self._floats(self.max_tokens, width // 16)
        partials = self._floats(self.max_sequences, part * chunks)
        return queries.ctypes.data, scales.ctypes.data, partials.ctypes.data, chunks

    def _lower_attention(  # noqa: PLR0917 - what the layer is, and where its memory lies
        self,
        program: Program,
        number: int,
        layer: LayerSpec,
        attention: AttentionSpec,
        angles: dict[RopeSpec, int],
        rooms: tuple[int, int, int, int],
        offsets: tuple[int, ...],
    ) -> None:
        prefix, source = f"layers.{number}.attention", self._wide
        if attention.latent is not None:
            source = self._lower_latent(program, prefix, layer, attention, attention.latent)
        else:
            qkv = self._tensor(f"{prefix}.{'qkv' if attention.keys_of is None else 'q'}")
            self._lower_input(program, f"{prefix}.norm", layer.norms, qkv)
            bias = f"{qkv.name}.bias" if attention.qkv_bias else None
            self._lower_product(program, qkv, self._wide, bias=bias)
            self._lower_preparation(program, prefix, attention)
        keys_of = number if attention.keys_of is None else attention.keys_of
        kv_heads = attention.kv_heads if attention.keys_of is None else 0  # whose keys are written
        balance = None
        if self._kv == "int8" and attention.keys_of is None:
            balance = self._balances[number] = self._key_balance(prefix, attention)
        elif attention.keys_of is not None:
            balance = self._balances.get(keys_of)
        queries, scales, partials, chunks = rooms
        pages = {
            "kv_kind": {"int8": KV_INT8, "f16": KV_F16, "f32": KV_F32}[self._kv],
            "kv_group": kv_group(attention.head_dim),
            "pool": self._pool.memory.ctypes.data + offsets[keys_of],
            "page_bytes": self._pool.layout.page_bytes,
            "head_bytes": _head_bytes(attention.head_dim, self._kv),
            "queries": queries,
            "query_scales": scales,
        }
        heads = {"heads": attention.heads, "kv_heads": attention.kv_heads, "head_dim": attention.head_dim}
        program.add(
            Opcode.ROTATE,
            source=source.ctypes.data,
            source_stride=source.strides[0],
            **heads | {"kv_heads": kv_heads},
            rotary_dim=attention.rope.dim if attention.rope else 0,
            interleaved=int(attention.rope.interleaved) if attention.rope else 0,
            angles=angles[attention.rope] if attention.rope else 0,
            q_norm=self._query_norm(prefix, attention, balance) if attention.qk_norm == "head" else 0,
            k_norm=self._vector(f"{prefix}.k_norm") if attention.qk_norm == "head" and kv_heads else 0,
            norm_last=int(attention.qk_norm_last),
            epsilon=float(self.spec.norm_epsilon),
            balance=0 if balance is None or not kv_heads else balance.ctypes.data,
            scale=float(attention.scale),
            **pages,
        )
        attended = {"out": self._attended.ctypes.data, "out_stride": self._attended.strides[0]}
        parts = {
            "window": attention.window or 0,
            "partials": partials,
            "partial_chunks": chunks,
            "sinks": self._vector(f"{prefix}.sinks") if attention.sinks else 0,
        }
        slopes = self._alibi_slopes(attention.heads) if attention.alibi else 0
        softcap = float(attention.softcap or 0.0)
        program.add(Opcode.ATTEND, **heads, **pages, **attended, **parts, softcap=softcap, slopes=slopes)
        program.add(Opcode.MERGE, heads=attention.heads, head_dim=attention.head_dim, **attended, **parts)
        product, given = self._tensor(f"{prefix}.out"), self._attended
        if attention.gated:
            first = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
            self._lower_gate(program, attention.heads, attention.head_dim, self._wide[:, first:])
        if attention.latent is not None and attention.latent.values != attention.head_dim:
            values, given = attention.latent.values, self._wide
            steps = attention.head_dim, values
            self._lower_move(program, self._attended, given, values, steps, attention.heads)
        self._lower_quantise(program, given, product.cols, product)
        bias = f"{prefix}.out.bias" if attention.out_bias else None
        apart = layer.parallel or layer.norms != "pre"
        out = self._branch if apart else self._x
        self._lower_product(program, product, out, bias=bias, add=not apart, scale=layer.residual_scale)
        if layer.norms != "pre":
            self._lower_residual(program, self._norm_fields(f"{prefix}.post_norm"))

    def _lower_latent(
        self, program: Program, prefix: str, layer: LayerSpec, attention: AttentionSpec, latent: LatentSpec
    ) -> NDArray[np.float32]:
        """q, k and v out of their inner vectors; where they lie, the rotary part of each head in front."""
        assert attention.rope is not None
        heads, size, rotary, plain = attention.heads, attention.head_dim, attention.rope.dim, latent.plain
        inner = latent.query_rank or heads * (plain + rotary)
        # What pads a head stays as it is born, 0.
        down, queries, keys, together = self._own_rooms(attention)
        first = self._tensor(f"{prefix}.down")
        self._lower_input(program, f"{prefix}.norm", layer.norms, first)
        self._lower_product(program, first, down)
        if latent.query_rank is None:
            queries = down
        else:
            up = self._tensor(f"{prefix}.query_up")
            self._lower_inner_norm(program, down, latent.query_rank, f"{prefix}.query_norm", up, latent.epsilon)
            self._lower_product(program, up, queries)
        up = self._tensor(f"{prefix}.key_up")
        self._lower_inner_norm(program, down[:, inner:], latent.key_rank, f"{prefix}.key_norm", up, latent.epsilon)
        self._lower_product(program, up, keys)
        k, v, each = together[:, heads * size :], together[:, 2 * heads * size :], plain + latent.values
        for source, out, width, step in (
            (queries[:, plain:], together, rotary, plain + rotary),
            (queries, together[:, rotary:], plain, plain + rotary),
            (down[:, inner + latent.key_rank :], k, rotary, 0),
            (keys, k[:, rotary:], plain, each),
            (keys[:, plain:], v, latent.values, each),
        ):
            self._lower_move(program, source, out, width, (step, size), heads)
        return together

    def _lower_inner_norm(  # noqa: PLR0917 - of what, how wide, how, for whom
        self, program: Program, source: NDArray[np.float32], width: int, name: str, consumer: Tensor, epsilon: float
    ) -> None:
        """A root mean square norm as the input of a product."""
        program.add(
            Opcode.NORM,
            **self._input_of(consumer).fields(),
            rows=int(RowSet.TOKENS),
            source=source.ctypes.data,
            source_stride=source.strides[0],
            width=width,
            norm=int(Norm.RMS),
            weight=self._vector(name),
            bias=0,
            epsilon=float(epsilon),
        )

    def _lower_gate(
        self, program: Program, heads: int, head_dim: int, gates: NDArray[np.float32], norm: str | None = None
    ) -> None:
        """What heads gave, times the sigmoid of its gates; with a norm: the norm of it, times silu of them."""
        program.add(
            Opcode.GATE,
            source=self._attended.ctypes.data,
            source_stride=self._attended.strides[0],
            heads=heads,
            head_dim=head_dim,
            weight=0 if norm is None else self._vector(norm),
            epsilon=float(self.spec.norm_epsilon),
            gates=gates.ctypes.data,
            gates_stride=gates.strides[0],
            silu=int(norm is not None),
        )

    def _lower_short_convolution(  # noqa: PLR0917 - from where, how, to where
        self,
        program: Program,
        number: int,
        width: int,
        taps: int,
        out: NDArray[np.float32],
        place: int,
        *,
        gated: bool,
        bias: bool = False,
    ) -> None:
        prefix = f"layers.{number}.recurrence"
        kernel = self._floats(taps, width)
        kernel[:] = self._tensor(f"{prefix}.kernel").vector().reshape(width, taps).T
        program.add(
            Opcode.CONVOLVE,
            source=self._wide.ctypes.data,
            source_stride=self._wide.strides[0],
            width=width,
            taps=taps,
            weights=kernel.ctypes.data,
            bias=self._vector(f"{prefix}.kernel.bias") if bias else 0,
            gated=int(gated),
            out=out.ctypes.data,
            out_stride=out.strides[0],
            place=place,
        )

    def _memory_place(self, number: int) -> int:
        """Where a layer's part of a sequence's memory begins."""
        assert self._memories is not None
        return self._memories.layout.layer_offsets[number]

    def _lower_convolution(self, program: Program, number: int, layer: LayerSpec, how: ConvolutionSpec) -> None:
        prefix = f"layers.{number}.recurrence"
        first, last = self._tensor(f"{prefix}.in"), self._tensor(f"{prefix}.out")
        self._lower_input(program, f"{prefix}.norm", layer.norms, first)
        self._lower_product(program, first, self._wide, bias=f"{prefix}.in.bias" if how.bias else None)
        place = self._memory_place(number)
        out = self._attended
        self._lower_short_convolution(program, number, how.width, how.taps, out, place, gated=True, bias=how.bias)
        self._lower_quantise(program, out, how.width, last)
        bias = f"{prefix}.out.bias" if how.bias else None
        self._lower_product(program, last, self._x, bias=bias, add=True, scale=layer.residual_scale)

    def _lower_delta(self, program: Program, number: int, layer: LayerSpec, how: DeltaSpec) -> None:
        prefix, width = f"layers.{number}.recurrence", sum(how.parts)
        heads = -(-how.heads // 16) * 16
        convolved, gates, kept = self._own_rooms(how)
        first, second, last = (self._tensor(f"{prefix}.{name}") for name in ("in", "gates", "out"))
        self._lower_norm(program, f"{prefix}.norm", first)
        self._lower_product(program, first, self._wide)
        self._lower_norm(program, f"{prefix}.norm", second)
        self._lower_product(program, second, gates)
        place = self._memory_place(number)
        self._lower_short_convolution(
            program, number, width, how.taps, convolved, place + how.matrix_bytes, gated=False
        )
        # q / |q| / sqrt(key_dim) and k / |k|, by way of the root of the mean square.
        weights = self._floats(1, 2 * how.parts[0])
        weights[0, : how.parts[0]] = 1 / how.key_dim
        weights[0, how.parts[0] :] = how.key_dim**-0.5
        epsilon = _UNIT_EPSILON / how.key_dim
        self._lower_run_norm(program, convolved, 2 * how.key_heads, how.key_dim, weights, epsilon)
        rates = self._floats(1, heads)
        rates[0, : how.heads] = exp(self._tensor(f"{prefix}.decay").vector())
        program.add(
            Opcode.DECAY,
            source=gates.ctypes.data,
            source_stride=gates.strides[0],
            heads=how.heads,
            rates=rates.ctypes.data,
            bias=self._vector(f"{prefix}.decay.bias", heads),
            out=kept.ctypes.data,
            out_stride=kept.strides[0],
            out_step=4 * heads,
        )
        program.add(
            Opcode.DELTA,
            source=convolved.ctypes.data,
            source_stride=convolved.strides[0],
            key_heads=how.key_heads,
            heads=how.heads,
            key_dim=how.key_dim,
            value_dim=how.value_dim,
            gates=kept.ctypes.data,
            gates_stride=kept.strides[0],
            gates_step=4 * heads,
            out=self._attended.ctypes.data,
            out_stride=self._attended.strides[0],
            place=place,
        )
        self._lower_gate(program, how.heads, how.value_dim, self._wide[:, width:], f"{prefix}.out_norm")
        self._lower_quantise(program, self._attended, how.parts[2], last)
        self._lower_product(program, last, self._x, add=True, scale=layer.residual_scale)

    def _query_norm(self, prefix: str, attention: AttentionSpec, balance: NDArray[np.float32] | None) -> int:
        """Address of the weights of a query head's norm.

        Queries of another layer's keys are multiplied here by the powers of two that those were divided by. Both of a
        rotated pair have the same, and all heads, so that this gives the bits of multiplying afterwards.
        """
        if attention.keys_of is None or balance is None:
            return self._vector(f"{prefix}.q_norm")
        weights = self._floats(1, attention.head_dim)
        weights[0] = self._tensor(f"{prefix}.q_norm").vector() * balance[1, 0]
        return int(weights.ctypes.data)

    def _lower_preparation(self, program: Program, prefix: str, attention: AttentionSpec) -> None:
        """What some families do to queries, keys and values before rotation."""
        if attention.value_norm:
            first = (attention.heads + attention.kv_heads) * attention.head_dim
            ones = self._floats(1, attention.kv_heads * attention.head_dim)
            ones[:] = 1
            epsilon = self.spec.norm_epsilon
            values = self._wide[:, first:]
            self._lower_run_norm(program, values, attention.kv_heads, attention.head_dim, ones, epsilon)
        kind = _RUN_NORMS.get(attention.qk_norm or "", Norm.NONE)
        growth = attention.query_growth
        if kind is Norm.NONE and attention.clip is None and growth is None:
            return
        program.add(
            Opcode.PREPARE,
            source=self._wide.ctypes.data,
            source_stride=self._wide.strides[0],
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            clip=float(attention.clip or 0.0),
            norm=int(kind),
            run=attention.head_dim if attention.qk_norm == "each" else 0,
            q_norm=self._vector(f"{prefix}.q_norm") if kind else 0,
            k_norm=self._vector(f"{prefix}.k_norm") if kind else 0,
            epsilon=float(self.spec.norm_epsilon),
            growth=0 if growth is None else self._growth_factors(growth),
            growth_period=1 if growth is None else growth.period,
        )

    def _alibi_slopes(self, heads: int) -> int:
        """Address of float32 (heads,): slopes 2 ** (-8 h / heads) of heads h from 1 on.

        Where the number of heads is no power of two, those beyond it take every other slope of twice as many.
        """
        if heads not in self._slopes:
            whole = 1 << (heads.bit_length() - 1)
            exponents = [8 * h / whole for h in range(1, whole + 1)]
            exponents += [8 * h / (2 * whole) for h in range(1, 2 * (heads - whole), 2)]
            slopes = self._floats(1, heads)
            slopes[0] = [power(2.0, -exponent) for exponent in exponents]
            self._slopes[heads] = int(slopes.ctypes.data)
        return self._slopes[heads]

    def _growth_factors(self, growth: QueryGrowth) -> int:
        """Address of float32 factors, one for every period of the context."""
        if growth not in self._growths:
            periods = self.context // growth.period + 1
            factors = self._floats(1, periods)
            factors[0] = [1 + growth.rate * logarithm(1 + period) for period in range(periods)]
            self._growths[growth] = int(factors.ctypes.data)
        return self._growths[growth]

    def _key_balance(self, prefix: str, attention: AttentionSpec) -> NDArray[np.float32] | None:
        """Powers of two that even out the dimensions of keys, for int8; None when nothing is known of them.

        Some families have keys of which a few dimensions are a hundred times the others (a large bias
        in Qwen2, uneven norm weights in Qwen3): with one int8 scale for all, the small ones drown. What
        a dimension is like is read off the weights; both of a rotated pair get the same factor.
        Returns float32 (2, kv_heads, head_dim): factors for keys, then for queries.
        """
        kv_heads, head_dim = attention.kv_heads, attention.head_dim
        if attention.qk_norm is not None:
            sizes = np.abs(self._tensor(f"{prefix}.k_norm").vector()).reshape(-1, head_dim)
            sizes = np.tile(sizes, (kv_heads // len(sizes), 1))
            squares = sizes.astype(np.float64) ** 2
        elif attention.qkv_bias:
            first = attention.heads * head_dim
            bias = self._tensor(f"{prefix}.qkv.bias").vector()[first : first + kv_heads * head_dim]
            squares = bias.astype(np.float64).reshape(kv_heads, head_dim) ** 2 + self._key_variance(prefix, first)
        else:
            return None
        rope = attention.rope
        if rope is not None:
            rotated = np.arange(rope.dim)
            pairs = rotated.reshape(-1, 2) if rope.interleaved else rotated.reshape(2, -1).T
            squares[:, pairs] = squares[:, pairs].mean(axis=2, keepdims=True)
        _, exponents = np.frexp(np.sqrt(np.maximum(squares, 2.0**-60)))
        factors = self._floats(2, kv_heads * head_dim).reshape(2, kv_heads, head_dim)
        factors[0] = np.ldexp(1.0, -exponents)
        factors[1] = np.ldexp(1.0, exponents)
        return factors

    def _key_variance(self, prefix: str, first: int) -> float:
        """Mean square of what the weights add to a key's bias, from 16 of its rows.

        The normed input has mean square 1, so a row's output has the sum of its squared weights. Summed
        exactly: the result must not depend on how this computer adds.
        """
        tensor = self._tensor(f"{prefix}.qkv")
        layout = FORMATS[tensor.format].layout(tensor.rows, tensor.cols, tensor.group)
        start = first // 16 * 16
        rows = layout.unpack_rows(tensor.data, tensor.exponent, start, 16)
        weights = rows.astype(np.float64)
        if f"{prefix}.norm" in self._weights.names:
            weights *= self._tensor(f"{prefix}.norm").vector()
        return math.fsum((weights**2).ravel().tolist()) / len(rows)

    def _lower_feed_forward(self, program: Program, number: int, layer: LayerSpec) -> None:
        prefix, block = f"layers.{number}.feed_forward", layer.feed_forward
        if block.experts is not None:
            self._lower_experts(program, prefix, layer, block.experts)
            return
        name = f"{prefix}.gate_up" if block.gated else f"{prefix}.up"
        norm = f"layers.{number}.attention.norm" if layer.shared_norm else f"{prefix}.norm"
        self._lower_input(program, norm, layer.norms, self._tensor(name))
        # In parallel blocks the branch holds what attention gave.
        out, add = (self._x, True) if layer.norms == "pre" and not layer.parallel else (self._branch, layer.parallel)
        self._lower_block(program, name, f"{prefix}.down", block, out, add=add, scale=layer.residual_scale)
        if layer.parallel:
            self._lower_residual(program)
        elif layer.norms != "pre":
            self._lower_residual(program, self._norm_fields(f"{prefix}.post_norm"))

    def _lower_block(
        self,
        program: Program,
        first: str,
        second: str,
        block: FeedForwardSpec,
        out: NDArray[np.float32],
        *,
        add: bool,
        scale: float = 1.0,
    ) -> None:
        """Both products of a feed-forward block and what lies between, on inputs that are there already."""
        up, down = self._tensor(first), self._tensor(second)
        # Where both are integers, the first product may go on through the activation, tile by tile of tokens: its input
        # and what it leaves for the second lie in different rooms.
        span = FORMATS[down.format].span_for(down.group)
        fused = block.gated and bool(up.group and span) and AMX_UNIT % span == 0 == block.intermediate % AMX_UNIT
        inputs = self._input_of(down, self._between if fused else None)
        activation = Program()
        self._lower_activation(activation, block, self._wide, down.cols, inputs, RowSet.TOKENS, from_tiles=fused)
        row = self._room(8 * ROW_WORDS).view(np.int64)
        row[:] = activation.table()[0]
        bias = f"{first}.bias" if block.bias else None
        self._lower_product(program, up, self._wide, bias=bias, activates=int(row.ctypes.data) if fused else 0)
        self._lower_activation(program, block, self._wide, down.cols, inputs, RowSet.TOKENS, from_tiles=fused)
        bias = f"{second}.bias" if block.bias else None
        self._lower_product(program, down, out, bias=bias, add=add, scale=scale, inputs=inputs)

    def _lower_activation(  # noqa: PLR0917 - from where, how much, to where
        self,
        program: Program,
        block: FeedForwardSpec,
        source: NDArray[np.float32],
        width: int,
        activations: _Activations,
        rows: RowSet,
        *,
        from_tiles: bool = False,
    ) -> None:
        program.add(
            Opcode.ACTIVATE,
            **activations.fields(),
            rows=int(rows),
            source=source.ctypes.data,
            source_stride=source.strides[0],
            width=width,
            function=int(_ACTIVATIONS[block.activation]),
            gated=int(block.gated),
            from_tiles=int(from_tiles),
        )

    def _routed_rooms(self) -> _Routed:
        spec, tokens = self.spec, self.max_tokens
        pairs = tokens * self._chosen
        blocks = [layer.feed_forward for layer in spec.layers if layer.feed_forward.experts is not None]
        count = max(block.experts.count for block in blocks if block.experts is not None)
        widest = max(block.intermediate for block in blocks)

        def numbers(size: int) -> int:
            return int(self._floats(1, size).ctypes.data)

        return _Routed(
            normed=self._floats(tokens, spec.hidden),
            logits=self._floats(tokens, -(-count // 16) * 16),
            gates=self._floats(tokens, 16),
            experts=numbers(pairs),
            weights=numbers(pairs),
            places=numbers(pairs),
            firsts=numbers(count + 1),
            tokens=numbers(pairs),
            wide=self._floats(pairs, -(-2 * widest // 16) * 16),
            out=self._floats(pairs, spec.hidden),
            shared=self._floats(tokens, spec.hidden),
            room=self._activation_room(pairs, max(spec.hidden, widest)),
        )

    def _lower_experts(self, program: Program, prefix: str, layer: LayerSpec, experts: ExpertsSpec) -> None:
        """The norm as floats; the router's choice; pairs by expert; their products; the sum by weight."""
        if layer.norms != "pre" or layer.parallel:
            raise UnsupportedModelError(f"{self.spec.family}: experts go with norms of what they get only")
        block, memory, hidden = layer.feed_forward, self._routed, self.spec.hidden
        normed = _Activations(0, 0, memory.normed.ctypes.data, memory.normed.strides[0], 0, 0, 0, hidden)
        program.add(
            Opcode.NORM,
            **normed.fields(),
            rows=int(RowSet.TOKENS),
            source=self._x.ctypes.data,
            source_stride=self._x.strides[0],
            width=hidden,
            **self._norm_fields(f"{prefix}.norm"),
        )
        router = self._tensor(f"{prefix}.router")
        self._lower_quantise(program, memory.normed, hidden, router)
        bias = f"{prefix}.router.bias" if experts.router_bias else None
        self._lower_product(program, router, memory.logits, bias=bias)
        padded = -(-experts.count // 16) * 16
        program.add(
            Opcode.ROUTE,
            source=memory.logits.ctypes.data,
            source_stride=memory.logits.strides[0],
            count=experts.count,
            chosen=experts.chosen,
            routing=int(_ROUTINGS[experts.routing]),
            normalised=int(experts.normalised),
            scale=float(experts.scale),
            groups=experts.groups,
            chosen_groups=experts.chosen_groups,
            two_of_group=int(experts.group_by == "two"),
            correction=self._vector(f"{prefix}.router.correction", padded) if experts.correction else 0,
            experts=memory.experts,
            weights=memory.weights,
        )
        program.add(
            Opcode.DISPATCH,
            count=experts.count,
            chosen=experts.chosen,
            experts=memory.experts,
            places=memory.places,
            firsts=memory.firsts,
        )
        gate_up, down = self._tensor(f"{prefix}.experts.gate_up"), self._tensor(f"{prefix}.experts.down")
        self._lower_quantise(program, memory.normed, hidden, gate_up, RowSet.GATHERED, memory.room)
        self._lower_pairs(program, gate_up, memory.wide, block, experts)
        inputs = self._input_of(down, memory.room)
        self._lower_activation(program, block, memory.wide, block.intermediate, inputs, RowSet.ROUTED)
        self._lower_pairs(program, down, memory.out, block, experts)
        if experts.shared is not None:
            first, second = f"{prefix}.shared.gate_up", f"{prefix}.shared.down"
            self._lower_quantise(program, memory.normed, hidden, self._tensor(first))
            self._lower_block(program, first, second, replace(block, bias=False), memory.shared, add=False)
        if experts.shared_gate:
            gate = self._tensor(f"{prefix}.shared.gate")
            self._lower_quantise(program, memory.normed, hidden, gate)
            self._lower_product(program, gate, memory.gates)
        program.add(
            Opcode.COMBINE,
            source=memory.out.ctypes.data,
            source_stride=memory.out.strides[0],
            width=hidden,
            chosen=experts.chosen,
            weights=memory.weights,
            places=memory.places,
            shared=memory.shared.ctypes.data if experts.shared is not None else 0,
            shared_stride=memory.shared.strides[0],
            shared_gate=memory.gates.ctypes.data if experts.shared_gate else 0,
            shared_gate_stride=memory.gates.strides[0],
            scale=float(layer.residual_scale),
            out=self._x.ctypes.data,
            out_stride=self._x.strides[0],
        )

    def _lower_pairs(
        self,
        program: Program,
        tensor: Tensor,
        out: NDArray[np.float32],
        block: FeedForwardSpec,
        experts: ExpertsSpec,
    ) -> None:
        """A product of each pair with its expert's part of a stacked tensor."""
        layout = FORMATS[tensor.format].layout(tensor.rows, tensor.cols, tensor.group)
        sizes = {part.name: part.bytes // experts.count for part in layout.parts}
        rows = tensor.rows // experts.count
        self._products[len(program)] = re.sub(r"^layers\.\d+\.", "", tensor.name)
        program.add(
            Opcode.EXPERTS,
            **self._input_of(tensor, self._routed.room).fields(),
            rows=int(RowSet.ROUTED),
            **self._weight_fields(tensor) | {"blocks": rows // 16},
            bias=self._vector(f"{tensor.name}.bias") if block.bias else 0,
            out=out.ctypes.data,
            out_stride=out.strides[0],
            add=0,
            activates=0,
            count=experts.count,
            firsts=self._routed.firsts,
            panels_step=sizes.get("codes", sizes.get("values", 0)),
            meta_step=sizes.get("meta", 0),
            bias_step=4 * rows,
        )
