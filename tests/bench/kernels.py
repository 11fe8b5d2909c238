"""Every kernel's speed on one core, as a share of what that core could do at most.

    python -m tests.bench.kernels [--tier TIER] [--quick] [--json]

Decoders of random weights are lowered as any model's; of their tables, the
operations of one kind are run alone, one layer's after the other's, so that
weights and pages come from where a model's would. Next to every sample the
same memory is merely read (entry point `read`), and the integer peak of the
tier is measured once: these are the limits. Times are the thread's own
(processor time), medians of several samples.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.cpu import machine
from engine.core.library import Kernels, prepared_kernels
from engine.core.memory import Buffer, aligned
from engine.core.operations import FIELDS, PAGE_TOKENS, Opcode
from engine.core.pages import PagePool
from engine.core.quant import FORMATS
from engine.core.team import Team
from engine.models.batch import Batch
from engine.models.decoder import Decoder, page_layout
from engine.models.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, RopeSpec, TensorSpec
from engine.models.weights import VECTOR, MemoryWeights, Tensor
from engine.progress import finish
from tests.bench.limits import dot_peak
from tests.bench.report import percent, table

_FORMATS = {"q4": 32, "q6": 32, "q8": 128, "f16": 0}
_TOKENS = (1, 8, 16, 256)
_MOST_TOKENS = max(_TOKENS)
_DEPTH = 4096
_PREFILL_DEPTH = 2048
_CONTEXT = _DEPTH + PAGE_TOKENS
_HOT_BYTES = 512 << 10
"""Norms and activations read what was just written; they are compared with reading so much from a cache."""
_SAMPLE_S = 0.02
_CLOCK = time.thread_time if time.get_clock_info("thread_time").resolution < 1e-4 else time.perf_counter


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model that decide how its kernels fare."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    def spec(self, layers: int) -> ModelSpec:
        """A Qwen2 of these sizes with a vocabulary of next to nothing."""
        rope = RopeSpec(10000.0, self.head_dim)
        attention = AttentionSpec(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5, rope)
        layer = LayerSpec(attention, FeedForwardSpec(self.intermediate))
        return ModelSpec("bench", self.hidden, 64, _CONTEXT, 1e-6, (layer,) * layers, tied_head=True)


_MODELS = (Shape("0.5B", 896, 4864, 14, 2, 64), Shape("1.5B", 1536, 8960, 12, 2, 128))
_HEADS = tuple(
    Shape(f"D={head_dim} GQA {share}", 64, 64, 2 * share, 2, head_dim) for head_dim in (64, 128) for share in (7, 4)
)


@dataclass(frozen=True, slots=True)
class Figure:
    """How one kernel fared; rates per core.

    of_read: share of the rate at which the same memory is merely read. of_peak:
    share of the tier's integer peak, None for kernels that calculate with floats
    or hardly at all.
    """

    kernel: str
    case: str
    tokens: int
    microseconds: float
    gb_per_s: float
    tops: float
    of_read: float
    of_peak: float | None


@dataclass(frozen=True, slots=True)
class _Work:
    """Operations of one kind: what each reads, what each calculates, and the memory all of them read."""

    kernel: str
    rows: list[int]
    bytes_each: float
    operations_each: float
    memory: int
    integer: bool


def synthetic(spec: ModelSpec, format_name: str, group: int, kernels: Kernels) -> MemoryWeights:
    """Random weights: 16 rows of each kind of matrix are packed and repeated; those of all layers lie in a row."""
    random = np.random.default_rng(0)
    kinds: dict[str, list[TensorSpec]] = {}
    for tensor in spec.tensors():
        kinds.setdefault(_kind(tensor.name), []).append(tensor)
    made: list[Tensor] = []
    for tensors in kinds.values():
        rows, cols = tensors[0].rows, tensors[0].cols
        if tensors[0].role == "vector":
            ones = aligned(cols, np.float32)
            ones[:] = 1
            made += [Tensor(tensor.name, VECTOR, 0, 1, cols, 0, ones.view(np.uint8)) for tensor in tensors]
            continue
        form = FORMATS[format_name]
        layout, sample = form.layout(rows, cols, group), form.layout(16, cols, group)
        packed = form.pack(random.normal(0, cols**-0.5, (16, cols)).astype(np.float32), group, kernels)
        room = Buffer(layout.bytes * len(tensors), "random weights").view.reshape(len(tensors), layout.bytes)
        for part, piece in zip(layout.parts, sample.parts, strict=True):
            block = packed.buffer[piece.offset : piece.offset + piece.bytes]
            room[:, part.offset : part.offset + part.bytes] = np.resize(block, part.bytes)
        made += [
            Tensor(tensor.name, format_name, group, rows, cols, packed.exponent, data)
            for tensor, data in zip(tensors, room, strict=True)
        ]
    return MemoryWeights(made)


def _kind(name: str) -> str:
    return re.sub(r"^layers\.\d+\.", "", name)


class Bench:
    """Takes the samples, for one tier."""

    def __init__(self, kernels: Kernels, samples: int) -> None:
        self.peak = dot_peak(kernels.tier, 1)
        self._kernels, self._samples = kernels, samples
        self._team = Team(kernels, 1)
        self._hot = Buffer(_HOT_BYTES)
        self._hot.view[:] = 1
        self._out = aligned(16, np.float32)

    def close(self) -> None:
        """End the team."""
        self._team.close()

    def products(self, shape: Shape, format_name: str, layers: int) -> Iterator[Figure]:
        """Products of a format, and what prepares their inputs."""
        group, spec = _FORMATS[format_name], shape.spec(layers)
        weights = synthetic(spec, format_name, group, self._kernels)
        pool = PagePool(-(-_MOST_TOKENS // PAGE_TOKENS), page_layout(spec, "int8"))
        decoder = Decoder(spec, weights, pool, self._team, context=_CONTEXT, max_tokens=_MOST_TOKENS)
        case = f"{shape.name} {format_name}" + (f" g{group}" if group else "")

        def works(program: NDArray[np.int64], tokens: int) -> Iterator[_Work]:
            for kind in ("attention.qkv", "attention.out", "feed_forward.gate_up", "feed_forward.down"):
                one = weights.tensor(f"layers.0.{kind}")
                rows = [row for row, name in decoder._products.items() if name == kind]
                operations = 2.0 * one.rows * one.cols * tokens
                yield _Work(kind, rows, one.bytes, operations, one.address, integer=bool(group))
            # Alike for all formats but in what they write; shown for each, as they quantise.
            for opcode, width in ((Opcode.NORM, shape.hidden), (Opcode.ACTIVATE, 2 * shape.intermediate)):
                rows = _rows(program, opcode)
                yield _Work(opcode.name.lower(), rows, 4.0 * width * tokens, 0, self._hot.address, integer=False)

        for tokens in _TOKENS:
            yield from self._figures(decoder, case, tokens, 0, works)

    def attention(self, shape: Shape, kv: str, tokens: int, depth: int, layers: int) -> Iterator[Figure]:
        """Attention of `tokens` with `depth` before them."""
        spec = shape.spec(layers)
        pool = PagePool(-(-(depth + tokens) // PAGE_TOKENS), page_layout(spec, kv))
        weights = synthetic(spec, "q8", 64, self._kernels)
        decoder = Decoder(spec, weights, pool, self._team, context=_CONTEXT, kv=kv, max_tokens=_MOST_TOKENS)
        # Keys and values of four pages, again and again.
        filled = min(_MOST_TOKENS, depth)
        decoder.forward(_batch(filled, 0))
        pages = filled // PAGE_TOKENS
        for page in range(pages, pool.count):
            pool.memory[page] = pool.memory[page % pages]
        seen = tokens * depth + tokens * (tokens + 1) / 2
        bytes_each = pool.layout.layer_bytes[0] / PAGE_TOKENS * (depth + tokens)

        def works(program: NDArray[np.int64], _tokens: int) -> Iterator[_Work]:
            operations = 4.0 * shape.heads * shape.head_dim * seen
            where = int(pool.memory.ctypes.data)
            rows = _rows(program, Opcode.ATTEND)
            yield _Work("attend", rows, bytes_each, operations, where, integer=kv == "int8")

        yield from self._figures(decoder, f"{shape.name} {kv} depth {depth}", tokens, depth, works)

    def _figures(
        self,
        decoder: Decoder,
        case: str,
        tokens: int,
        depth: int,
        works: Callable[[NDArray[np.int64], int], Iterator[_Work]],
    ) -> list[Figure]:
        """Run one step of the decoder, and in its place the works, while the step's state is there."""
        figures: list[Figure] = []

        def instead(program: NDArray[np.int64], state: NDArray[np.int64]) -> bool:
            self._team.run(program, state)
            figures.extend(self._figure(work, case, tokens, program, state) for work in works(program, tokens))
            return True

        decoder._execute = instead
        decoder.forward(_batch(tokens, depth))
        decoder._execute = self._team.run
        return figures

    def _figure(
        self, work: _Work, case: str, tokens: int, program: NDArray[np.int64], state: NDArray[np.int64]
    ) -> Figure:
        table = np.ascontiguousarray(program[work.rows])
        address, step, where = int(table.ctypes.data), table.strides[0], int(state.ctypes.data)
        first = self._seconds(lambda: self._team.run_at(address, 1, where))
        at_once = max(1, min(len(table), int(_SAMPLE_S / max(first, 1e-7))))
        turns = max(1, min(100, int(_SAMPLE_S / 4 / max(first * at_once, 1e-7))))
        hot = work.memory == self._hot.address
        size = _HOT_BYTES if hot else int(work.bytes_each * at_once) // 256 * 256
        out = int(self._out.ctypes.data)
        times, reads = [], []
        for sample in range(self._samples):
            # Several turns only where all operations take part, else the weights would be met in the cache.
            begin = address + sample * at_once % (len(table) - at_once + 1) * step
            times.append(self._seconds(lambda begin=begin: self._team.run_at(begin, at_once, where), turns))
            reads.append(self._seconds(lambda: self._kernels.read(work.memory, size, out), 20 if hot else turns))
        each = median(times) / at_once
        gb_per_s, tops = work.bytes_each / each / 1e9, work.operations_each / each / 1e12
        of_peak = tops * 1e12 / self.peak if work.integer else None
        of_read = gb_per_s * 1e9 / (size / median(reads))
        return Figure(work.kernel, case, tokens, 1e6 * each, gb_per_s, tops, of_read, of_peak)

    @staticmethod
    def _seconds(work: Callable[[], object], turns: int = 1) -> float:
        """Of one turn."""
        begin_s = _CLOCK()
        for _ in range(turns):
            work()
        return (_CLOCK() - begin_s) / turns


def _rows(program: NDArray[np.int64], opcode: Opcode) -> list[int]:
    """Where operations of this kind stand that work on all tokens (the last norm does not)."""
    rows = np.flatnonzero(program[:, 0] == int(opcode))
    if "rows" in FIELDS[opcode]:
        rows = rows[program[rows, 1 + FIELDS[opcode].index("rows")] == 0]
    return [int(row) for row in rows]


def _batch(tokens: int, first: int) -> Batch:
    """One sequence's tokens from a position on, its pages in order."""
    pages = -(-(first + tokens) // PAGE_TOKENS)
    return Batch(
        ids=np.arange(tokens, dtype=np.int32) % 64,
        positions=np.arange(first, first + tokens, dtype=np.int32),
        sequence_of=np.zeros(tokens, np.int32),
        tables=np.arange(pages, dtype=np.int32)[None],
        lengths=np.array([first + tokens], np.int32),
        wanted=np.array([tokens - 1], np.int32),
    )


def measured(tier: str | None, *, layers: int, samples: int, quick: bool) -> tuple[dict[str, Any], list[Figure]]:
    """What was measured with, and all figures; quick: one shape, one format and one attention only."""
    bench = Bench(finish(prepared_kernels(tier)), samples)
    figures: list[Figure] = []
    try:
        for shape in _MODELS[: 1 if quick else None]:
            for format_name in ("q4",) if quick else _FORMATS:
                figures += bench.products(shape, format_name, layers)
        for shape in _HEADS[: 1 if quick else None]:
            for kv in ("int8",) if quick else ("int8", "f16"):
                figures += bench.attention(shape, kv, 1, _DEPTH, layers)
                figures += bench.attention(shape, kv, _MOST_TOKENS, _PREFILL_DEPTH, layers)
    finally:
        bench.close()
    return {"tier": bench._kernels.tier, "processor": machine().name, "peak_tops": bench.peak / 1e12}, figures


def main(arguments: list[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.kernels", description="Kernels against their limits.")
    parser.add_argument("--tier", choices=machine().tiers, help="instructions to use; the best without it")
    parser.add_argument("--layers", type=int, default=8, help="layers whose weights and pages are walked through")
    parser.add_argument("--samples", type=int, default=9, help="samples; the median is reported")
    parser.add_argument("--quick", action="store_true", help="one shape, one format, one attention")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    facts, figures = measured(options.tier, layers=options.layers, samples=options.samples, quick=options.quick)
    if options.json:
        sys.stdout.write(json.dumps(facts | {"figures": [asdict(figure) for figure in figures]}) + "\n")
        return
    sys.stdout.write(f"{facts['processor']}, {facts['tier']}, one core; peak {facts['peak_tops']:.2f} TOPS\n\n")
    heading = ("kernel", "case", "tokens", "µs", "GB/s", "TOPS", "of read", "of peak")
    rows = [
        (
            one.kernel,
            one.case,
            str(one.tokens),
            f"{one.microseconds:.1f}",
            f"{one.gb_per_s:.1f}",
            f"{one.tops:.3f}",
            percent(one.of_read),
            percent(one.of_peak),
        )
        for one in figures
    ]
    sys.stdout.write(table(heading, rows, left=2))


if __name__ == "__main__":
    main()
