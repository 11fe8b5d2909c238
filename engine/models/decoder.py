"""The one forward pass: lowers a spec and its weights to a table of operations, once, and runs it per step.

Knows no family and no file: what differs between models is in `ModelSpec`.
Python does nothing per layer; a step is a few small arrays and one compiled
call, inside which the whole team of threads walks the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.core.operations import (
    CHUNK_TOKENS,
    KV_F16,
    KV_F32,
    KV_INT8,
    PAGE_TOKENS,
    PARTIAL_HEAD,
    STATE,
    STATE_WORDS,
    TILE_ROWS,
    Activation,
    Opcode,
    Program,
    RowSet,
    WeightKind,
)
from engine.core.pages import PageLayout, PagePool
from engine.core.quant import FORMATS
from engine.core.team import Team
from engine.errors import UnsupportedModelError
from engine.models.batch import Batch
from engine.models.rope import inverse_frequencies
from engine.models.spec import AttentionSpec, LayerSpec, ModelSpec, RopeSpec
from engine.models.weights import Tensor, Weights
from engine.settings import KvDtype

__all__ = ["Decoder", "check_shapes", "page_layout", "scratch_bytes"]

_KINDS = {
    "q4": WeightKind.Q4,
    "q8": WeightKind.Q8,
    "f16": WeightKind.F16,
    "bf16": WeightKind.BF16,
    "f32": WeightKind.F32,
}
_ACTIVATIONS = {"silu": Activation.SILU, "gelu_tanh": Activation.GELU_TANH}


@dataclass(frozen=True, slots=True)
class _Activations:
    """Where a product finds its input: int8 codes with scales and sums by group, or float32."""

    group: int
    codes: int
    stride: int
    scales: int
    sums: int
    scale_stride: int
    columns: int

    def fields(self) -> dict[str, int]:
        return {
            "x_group": self.group,
            "x_codes": self.codes,
            "x_stride": self.stride,
            "x_scales": self.scales,
            "x_sums": self.sums,
            "x_scale_stride": self.scale_stride,
            "x_columns": self.columns,
        }


def _kv_group(head_dim: int) -> int:
    """Dimensions that share an int8 scale."""
    return 32 if head_dim % 32 == 0 else 16


def _head_bytes(head_dim: int, kv: KvDtype) -> int:
    """Keys and values of one head for the positions of one page."""
    if kv != "int8":
        return 2 * {"f16": 2, "f32": 4}[kv] * head_dim * PAGE_TOKENS
    return 2 * (head_dim * PAGE_TOKENS + head_dim // _kv_group(head_dim) * PAGE_TOKENS * 2)


def page_layout(spec: ModelSpec, kv: KvDtype) -> PageLayout:
    """How a page of the KV cache of this model is cut up."""
    attentions = [layer.attention for layer in spec.layers]
    return PageLayout(PAGE_TOKENS, tuple(a.kv_heads * _head_bytes(a.head_dim, kv) for a in attentions))


def check_shapes(spec: ModelSpec) -> None:
    """What the kernels ask of the shapes.

    Raises:
        UnsupportedModelError: names the number that does not fit
    """
    sizes = {"hidden size": spec.hidden}
    for layer in spec.layers:
        sizes["head_dim"] = layer.attention.head_dim
        sizes["intermediate size"] = layer.feed_forward.intermediate
        for name, size in sizes.items():
            if size % 16:
                message = f"{spec.family} with {name} = {size} is not supported; multiples of 16 are"
                raise UnsupportedModelError(message)
        if layer.attention.head_dim > 512:
            message = f"{spec.family} with head_dim = {layer.attention.head_dim} is not supported; up to 512 is"
            raise UnsupportedModelError(message)
        if layer.feed_forward.activation not in _ACTIVATIONS:
            message = f"{spec.family} with activation {layer.feed_forward.activation} is not supported"
            raise UnsupportedModelError(message)


def scratch_bytes(spec: ModelSpec) -> int:
    """Working memory of one thread, a multiple of 64."""
    inputs = [layer.feed_forward.intermediate for layer in spec.layers]
    inputs += [layer.attention.heads * layer.attention.head_dim for layer in spec.layers]
    widest = max(spec.hidden, *inputs)
    most = 16 * (widest + 256) + 4096  # a block of weights as int8 and what goes with it; a row of floats is less
    for layer in spec.layers:
        attention = layer.attention
        rows = max(TILE_ROWS, attention.heads // attention.kv_heads)
        part = 4 * (PARTIAL_HEAD + attention.head_dim)
        most = max(most, 512 + rows * (4 + 4 * attention.head_dim + 128 + 6 * CHUNK_TOKENS + 2 * part))
    return -(-most // 4096) * 4096


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

        Raises:
            UnsupportedModelError: a shape that the kernels do not take
        """
        check_shapes(spec)
        self.spec = spec
        self.context = context
        self.max_tokens, self.max_sequences, self.max_wanted = max_tokens, max_sequences, max_wanted
        self._weights, self._pool, self._team, self._kv = weights, pool, team, kv
        self._buffers: list[NDArray[np.uint8]] = []
        self._tensors: dict[str, Tensor] = {}
        self._padded_vocab = -(-spec.vocab_size // 16) * 16
        self._logits = self._floats(max_wanted, self._padded_vocab)
        self._program = self._lowered().table()
        self._state = np.zeros(STATE_WORDS, np.int64)
        words = {name: index for index, name in enumerate(STATE)}
        bytes_per_thread = scratch_bytes(spec)
        self._state[words["scratch"]] = self._room(bytes_per_thread * team.members).ctypes.data
        self._state[words["scratch_bytes"]] = bytes_per_thread
        self._words = words
        self._segments = np.zeros((max_sequences, 4), np.int64)
        self._state[words["segment_table"]] = self._segments.ctypes.data

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
        tables = np.ascontiguousarray(batch.tables, np.int32)
        rows_of_tables: NDArray[np.int64] = tables.ctypes.data + batch.sequence_of.astype(np.int64) * tables.strides[0]
        starts = np.flatnonzero(np.diff(batch.sequence_of, prepend=-1))
        segments = self._segments[: len(starts)]
        segments[:, 0] = starts
        segments[:, 1] = np.diff(starts, append=tokens)
        segments[:, 2] = batch.positions[starts]
        segments[:, 3] = rows_of_tables[starts]
        arrays: dict[str, NDArray[np.int32] | NDArray[np.int64]] = {
            "ids": np.ascontiguousarray(batch.ids, np.int32),
            "positions": np.ascontiguousarray(batch.positions, np.int32),
            "wanted_rows": np.ascontiguousarray(batch.wanted, np.int32),
            "token_tables": rows_of_tables,
        }
        state, words = self._state, self._words
        for name, array in arrays.items():
            state[words[name]] = array.ctypes.data
        state[words["tokens"]], state[words["wanted"]], state[words["segments"]] = tokens, wanted, len(starts)
        self._team.run(self._program, state)
        return self._logits[:wanted, : self.spec.vocab_size]

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

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            self._tensors[name] = self._weights.tensor(name)
        return self._tensors[name]

    def _vector(self, name: str, size: int | None = None) -> int:
        """Address of a float32 vector, zero-padded to `size`."""
        tensor = self._tensor(name)
        if size is None or size == tensor.cols:
            return tensor.address
        padded = self._floats(1, size)
        padded[0, : tensor.cols] = tensor.vector()
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
            "factor": 2.0**tensor.exponent * scale,
        }

    def _lowered(self) -> Program:
        spec, program = self.spec, Program()
        self._x = self._floats(self.max_tokens, spec.hidden)
        widest = max(
            max(
                (a := layer.attention).head_dim * (a.heads + 2 * a.kv_heads),
                2 * layer.feed_forward.intermediate,
            )
            for layer in spec.layers
        )
        self._wide = self._floats(self.max_tokens, -(-widest // 16) * 16)
        self._attended = self._floats(
            self.max_tokens, max(layer.attention.heads * layer.attention.head_dim for layer in spec.layers)
        )
        self._activations = self._activation_rooms()
        angles = self._lower_angles(program)
        embedding = self._tensor("embedding")
        program.add(
            Opcode.EMBED,
            **self._weight_fields(embedding),
            out=self._x.ctypes.data,
            out_stride=self._x.strides[0],
            width=spec.hidden,
            scale=float(spec.embedding_scale),
        )
        rooms = self._attention_rooms()
        offsets = self._pool.layout.layer_offsets
        for number, layer in enumerate(spec.layers):
            self._lower_attention(program, number, layer.attention, angles, rooms, offsets[number])
            self._lower_feed_forward(program, number, layer)
        head = self._tensor("embedding" if spec.tied_head else "head")
        self._lower_norm(program, "norm", head, RowSet.WANTED)
        self._lower_product(program, head, self._logits, RowSet.WANTED, scale=spec.logit_scale)
        return program

    def _lower_angles(self, program: Program) -> dict[RopeSpec, int]:
        """One operation per kind of rotation; where its angles will lie."""
        places: dict[RopeSpec, int] = {}
        for layer in self.spec.layers:
            rope = layer.attention.rope
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

    def _activation_rooms(self) -> tuple[int, int, int, int, int]:
        """Memory for the widest input of any product: (codes, scales, sums, row bytes, scale row bytes)."""
        inputs = [layer.feed_forward.intermediate for layer in self.spec.layers]
        inputs += [layer.attention.heads * layer.attention.head_dim for layer in self.spec.layers]
        columns = -(-max(self.spec.hidden, *inputs) // 256) * 256
        groups = columns // 16
        codes = self._floats(self.max_tokens, columns)
        scales, sums = self._floats(self.max_tokens, groups), self._floats(self.max_tokens, groups)
        return codes.ctypes.data, scales.ctypes.data, sums.ctypes.data, 4 * columns, 4 * groups

    def _input_of(self, tensor: Tensor) -> _Activations:
        codes, scales, sums, row_bytes, scale_row_bytes = self._activations
        columns = FORMATS[tensor.format].layout(tensor.rows, tensor.cols, tensor.group).padded_cols
        # One cache line more than the columns: rows a power of two apart would share a few lines of the cache.
        stride = columns + 64 if tensor.group else row_bytes
        return _Activations(tensor.group, codes, stride, scales, sums, scale_row_bytes, columns)

    def _lower_norm(self, program: Program, name: str, consumer: Tensor, rows: RowSet = RowSet.TOKENS) -> None:
        program.add(
            Opcode.NORM,
            **self._input_of(consumer).fields(),
            rows=int(rows),
            source=self._x.ctypes.data,
            source_stride=self._x.strides[0],
            width=self.spec.hidden,
            weight=self._vector(name),
            epsilon=float(self.spec.norm_epsilon),
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
    ) -> None:
        padded = FORMATS[tensor.format].layout(tensor.rows, tensor.cols, tensor.group).padded_rows
        program.add(
            Opcode.MATMUL,
            **self._input_of(tensor).fields(),
            rows=int(rows),
            **self._weight_fields(tensor, scale),
            bias=0 if bias is None else self._vector(bias, padded),
            out=out.ctypes.data,
            out_stride=out.strides[0],
            add=int(add),
        )

    def _attention_rooms(self) -> tuple[int, int, int, int]:
        """Queries, their scales, partial results, and chunks of the longest sequence."""
        attentions = [layer.attention for layer in self.spec.layers]
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
        attention: AttentionSpec,
        angles: dict[RopeSpec, int],
        rooms: tuple[int, int, int, int],
        offset: int,
    ) -> None:
        prefix = f"layers.{number}.attention"
        qkv = self._tensor(f"{prefix}.qkv")
        self._lower_norm(program, f"{prefix}.norm", qkv)
        self._lower_product(program, qkv, self._wide, bias=f"{prefix}.qkv.bias" if attention.qkv_bias else None)
        queries, scales, partials, chunks = rooms
        pages = {
            "kv_kind": {"int8": KV_INT8, "f16": KV_F16, "f32": KV_F32}[self._kv],
            "kv_group": _kv_group(attention.head_dim),
            "pool": self._pool.memory.ctypes.data + offset,
            "page_bytes": self._pool.layout.page_bytes,
            "head_bytes": _head_bytes(attention.head_dim, self._kv),
            "queries": queries,
            "query_scales": scales,
        }
        heads = {"heads": attention.heads, "kv_heads": attention.kv_heads, "head_dim": attention.head_dim}
        program.add(
            Opcode.ROTATE,
            source=self._wide.ctypes.data,
            source_stride=self._wide.strides[0],
            **heads,
            rotary_dim=attention.rope.dim if attention.rope else 0,
            interleaved=int(attention.rope.interleaved) if attention.rope else 0,
            angles=angles[attention.rope] if attention.rope else 0,
            q_norm=self._vector(f"{prefix}.q_norm") if attention.qk_norm else 0,
            k_norm=self._vector(f"{prefix}.k_norm") if attention.qk_norm else 0,
            epsilon=float(self.spec.norm_epsilon),
            balance=self._key_balance(prefix, attention) if self._kv == "int8" else 0,
            scale=float(attention.scale),
            **pages,
        )
        out = {"out": self._attended.ctypes.data, "out_stride": self._attended.strides[0]}
        parts = {"window": attention.window or 0, "partials": partials, "partial_chunks": chunks}
        program.add(Opcode.ATTEND, **heads, **pages, **out, **parts)
        program.add(Opcode.MERGE, heads=attention.heads, head_dim=attention.head_dim, **out, **parts)
        product = self._tensor(f"{prefix}.out")
        program.add(
            Opcode.QUANTISE,
            **self._input_of(product).fields(),
            rows=int(RowSet.TOKENS),
            source=self._attended.ctypes.data,
            source_stride=self._attended.strides[0],
            width=attention.heads * attention.head_dim,
        )
        bias = f"{prefix}.out.bias" if attention.out_bias else None
        self._lower_product(program, product, self._x, bias=bias, add=True)

    def _key_balance(self, prefix: str, attention: AttentionSpec) -> int:
        """Address of powers of two that even out the dimensions of keys, for int8; 0 when nothing is known of them.

        Some families have keys of which a few dimensions are a hundred times the others (a large bias
        in Qwen2, uneven norm weights in Qwen3): with one int8 scale for all, the small ones drown. What
        a dimension is like is read off the weights; both of a rotated pair get the same factor.
        Returns float32 (2, kv_heads, head_dim): factors for keys, then for queries.
        """
        kv_heads, head_dim = attention.kv_heads, attention.head_dim
        if attention.qk_norm:
            sizes = np.tile(np.abs(self._tensor(f"{prefix}.k_norm").vector()[:head_dim]), (kv_heads, 1))
            squares = sizes.astype(np.float64) ** 2
        elif attention.qkv_bias:
            first = attention.heads * head_dim
            bias = self._tensor(f"{prefix}.qkv.bias").vector()[first : first + kv_heads * head_dim]
            squares = bias.astype(np.float64).reshape(kv_heads, head_dim) ** 2 + self._key_variance(prefix, first)
        else:
            return 0
        rope = attention.rope
        if rope is not None:
            rotated = np.arange(rope.dim)
            pairs = rotated.reshape(-1, 2) if rope.interleaved else rotated.reshape(2, -1).T
            squares[:, pairs] = squares[:, pairs].mean(axis=2, keepdims=True)
        _, exponents = np.frexp(np.sqrt(np.maximum(squares, 2.0**-60)))
        factors = self._floats(2, kv_heads * head_dim).reshape(2, kv_heads, head_dim)
        factors[0] = np.ldexp(1.0, -exponents)
        factors[1] = np.ldexp(1.0, exponents)
        return int(factors.ctypes.data)

    def _key_variance(self, prefix: str, first: int) -> float:
        """Mean square of what the weights add to a key's bias, from 16 of its rows.

        The normed input has mean square 1, so a row's output has the sum of its squared weights. Summed
        exactly: the result must not depend on how this computer adds.
        """
        tensor = self._tensor(f"{prefix}.qkv")
        layout = FORMATS[tensor.format].layout(tensor.rows, tensor.cols, tensor.group)
        start = first // 16 * 16
        rows = layout.unpack_rows(tensor.data, tensor.exponent, start, 16)
        weights = rows.astype(np.float64) * self._tensor(f"{prefix}.norm").vector()
        return math.fsum((weights**2).ravel().tolist()) / len(rows)

    def _lower_feed_forward(self, program: Program, number: int, layer: LayerSpec) -> None:
        prefix = f"layers.{number}.feed_forward"
        feed_forward = layer.feed_forward
        gate_up, down = self._tensor(f"{prefix}.gate_up"), self._tensor(f"{prefix}.down")
        self._lower_norm(program, f"{prefix}.norm", gate_up)
        bias = f"{prefix}.gate_up.bias" if feed_forward.bias else None
        self._lower_product(program, gate_up, self._wide, bias=bias)
        program.add(
            Opcode.ACTIVATE,
            **self._input_of(down).fields(),
            rows=int(RowSet.TOKENS),
            source=self._wide.ctypes.data,
            source_stride=self._wide.strides[0],
            width=feed_forward.intermediate,
            function=int(_ACTIVATIONS[feed_forward.activation]),
        )
        self._lower_product(program, down, self._x, bias=f"{prefix}.down.bias" if feed_forward.bias else None, add=True)
