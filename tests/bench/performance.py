"""How speed grows with a model's size, with the context and with threads, against the limits of the machine.

    python -m tests.bench.performance MODEL.nook ... [--quick]

Writes docs/performance.md and docs/performance.svg.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import __version__
from engine.convert.load import open_model
from engine.core.cpu import machine, memory
from engine.core.library import prepared_kernels
from engine.core.operations import PAGE_TOKENS
from engine.models.decoder import page_layout
from engine.models.spec import ModelSpec
from engine.models.weights import Weights
from engine.progress import finish
from tests.bench.limits import dot_peak, read_bandwidth
from tests.bench.report import ROOT, bench, percent, table
from tests.bench.svg import Point, Roof, roofline

_STEP_TOKENS = 256
"""Tokens of a prompt in one step of the engine, for which weights are read once."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    threads: tuple[int, ...]
    gen_tokens: int
    repeat: int

    @classmethod
    def full(cls) -> Plan:
        """Minutes for each model."""
        most = machine().default_threads
        threads = sorted({min(most, count) for count in (1, 2, 4, 8, 16, 32, most)})
        return cls((32, 512, 2048, 4096), (1, 2, 4, 8), tuple(threads), 64, 3)

    @classmethod
    def quick(cls) -> Plan:
        """Seconds for each model."""
        return cls((32, 512), (1, 8), tuple(sorted({1, machine().default_threads})), 16, 1)


@dataclass(frozen=True, slots=True)
class Model:
    """What steps of a model must read and calculate."""

    name: str
    path: Path
    label: str
    spec: ModelSpec
    weight_bytes: int
    products: int
    head: int

    @classmethod
    def opened(cls, path: Path) -> Model:
        """Read the file's table of contents."""
        source = finish(open_model(path))
        spec, weights = source.spec, source.weights
        used = [tensor for tensor in spec.tensors() if tensor.role != "embedding" or spec.tied_head]
        return cls(
            name=path.stem,
            path=path,
            label=source.label,
            spec=spec,
            weight_bytes=_bytes(weights, [tensor.name for tensor in used]),
            products=sum(tensor.parameters for tensor in used if tensor.role != "vector"),
            head=spec.vocab_size * spec.hidden,
        )

    def kv_bytes(self, positions: float, kv: str) -> float:
        """Keys and values of so many positions."""
        return page_layout(self.spec, kv).page_bytes / PAGE_TOKENS * positions

    def attention(self, positions: float) -> float:
        """Operations of a token that sees so many positions."""
        attentions = [layer.attention for layer in self.spec.layers]
        return sum(4.0 * a.heads * a.head_dim * min(positions, a.window or positions) for a in attentions)

    def decode(self, positions: float, batch: int, kv: str) -> tuple[float, float]:
        """Bytes and operations of a step of `batch` sequences."""
        return (
            self.weight_bytes + batch * self.kv_bytes(positions, kv),
            batch * (2.0 * self.products + self.attention(positions)),
        )

    def prefill(self, tokens: int, kv: str) -> tuple[float, float]:
        """Bytes and operations of a prompt."""
        steps = -(-tokens // _STEP_TOKENS)
        seen = sum(min(tokens, (step + 1) * _STEP_TOKENS) for step in range(steps))
        # Only the last token's logits are wanted.
        operations = tokens * (2.0 * (self.products - self.head) + self.attention(tokens / 2)) + 2.0 * self.head
        return steps * self.weight_bytes + self.kv_bytes(seen, kv), operations


def _bytes(weights: Weights, names: Sequence[str]) -> int:
    return sum(weights.tensor(name).bytes for name in names)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes a second when as much as a model's weights is read; integer operations a second."""

    bandwidth: float
    peak: float


@dataclass(frozen=True, slots=True)
class Row:
    """One speed, tokens a second, with what it needs and what the machine would allow."""

    model: str
    kind: str
    threads: int
    context: int
    batch: int
    speed: float
    bytes_a_token: float
    operations_a_token: float
    limits: Limits

    @property
    def of_bandwidth(self) -> float:
        """Share of the time that merely reading the same bytes would take."""
        return self.speed * self.bytes_a_token / self.limits.bandwidth

    @property
    def of_peak(self) -> float:
        """Share of the integer peak."""
        return self.speed * self.operations_a_token / self.limits.peak

    @property
    def point(self) -> Point:
        """Its place in the picture."""
        intensity = self.operations_a_token / self.bytes_a_token
        return Point(self.model, self.kind, intensity, self.speed * self.operations_a_token)


def measured(models: Sequence[Model], plan: Plan) -> list[Row]:
    """All rows; limits are measured before each model's speeds, for every number of threads."""
    rows: list[Row] = []
    kernels = finish(prepared_kernels())
    peaks = {threads: dot_peak(kernels.tier, threads) for threads in plan.threads}
    for model in models:
        for threads in plan.threads:
            limits = Limits(read_bandwidth(kernels, threads, max(model.weight_bytes, 1 << 20)), peaks[threads])
            common: dict[str, Any] = {"threads": threads, "repeat": plan.repeat, "gen_tokens": plan.gen_tokens}

            def row(
                kind: str,
                context: int,
                batch: int,
                speed: float,
                needs: tuple[float, float],
                tokens: int,
                where: tuple[Model, int, Limits] = (model, threads, limits),
            ) -> Row:
                of, members, bounds = where
                return Row(of.name, kind, members, context, batch, speed, needs[0] / tokens, needs[1] / tokens, bounds)

            for context in plan.contexts:
                if context + plan.gen_tokens > model.spec.context:
                    continue
                _say(f"{model.name}, {threads} threads, {context} tokens")
                found = bench(model.path, **common, prompt_tokens=context, depth=context, batch=1)
                kv, middle = found["kv_dtype"], context + plan.gen_tokens / 2
                rows.append(row("decode", context, 1, found["decode_tps"], model.decode(middle, 1, kv), 1))
                rows.append(row("prefill", context, 1, found["prefill_tps"], model.prefill(context, kv), context))
            if threads != plan.threads[-1]:
                continue
            for batch in plan.batches:
                _say(f"{model.name}, {threads} threads, {batch} together")
                found = bench(model.path, **common, prompt_tokens=32, depth=32, batch=batch)
                needs = model.decode(32 + plan.gen_tokens / 2, batch, found["kv_dtype"])
                rows.append(row("batch", 32, batch, found["batch_tps"], needs, batch))
    return rows


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def document(models: Sequence[Model], rows: Sequence[Row], plan: Plan, *, quick: bool) -> str:
    """The text of docs/performance.md."""
    here = machine()
    most = plan.threads[-1]
    parts = [
        "# How fast it is\n",
        "Made by `python -m tests.bench.performance MODEL.nook ...`, which measures and writes this file and its "
        "picture anew; do not edit them.\n",
    ]
    if quick:
        parts.append(
            "**Provisional**: a short run (`--quick`), one sample each, on a machine that was doing other work, too.\n"
        )
    parts += [
        "![Speeds below what the machine allows](performance.svg)\n",
        "## Machine\n",
        f"{here.name}, {here.architecture}, {len(here.cores)} cores, {memory().total / (1 << 30):.0f} GB of memory; "
        f"tier {here.choose_tier()}; Inglenook {__version__}.\n",
        "## Limits\n",
        "Reading: as many bytes as the model's weights, by all threads together, with prefetching (`tests/bench/"
        "limits.py`). Integer peak: the tier's products of integers out of registers and the first cache. Both are the "
        "best of many short samples, in the same run as the speeds.\n",
        _limits_table(rows),
        "## One answer\n",
        f"{plan.gen_tokens} tokens after so many; median of {plan.repeat}. A token reads all weights and the keys and "
        "values of all tokens before it: *of reading* is the time that merely reading these bytes takes, as a share of "
        "the token's.\n",
        _decode_table(rows),
        "## Prompts\n",
        "*of peak* is the share of the integer peak, counting products of weights and of attention, a product and a "
        "sum as two.\n",
        _prefill_table(rows),
        f"## Answers together\n\n{most} threads, 32 tokens before each; all answers' tokens counted.\n",
        _batch_table(rows),
        "## Models\n",
        table(
            ("model", "parameters", "weights", "MB read a token"),
            [
                (one.name, f"{one.spec.parameters / 1e6:.0f} M", one.label, f"{one.weight_bytes / 1e6:.0f}")
                for one in models
            ],
        ),
    ]
    return "\n".join(parts)


def _limits_table(rows: Sequence[Row]) -> str:
    seen = {(row.model, row.threads): row.limits for row in rows}
    return table(
        ("model", "threads", "read GB/s", "peak TOPS"),
        [
            (model, str(threads), f"{limits.bandwidth / 1e9:.1f}", f"{limits.peak / 1e12:.2f}")
            for (model, threads), limits in seen.items()
        ],
    )


def _decode_table(rows: Sequence[Row]) -> str:
    return table(
        ("model", "threads", "context", "tokens/s", "GB/s", "of reading"),
        [
            (
                row.model,
                str(row.threads),
                str(row.context),
                f"{row.speed:.1f}",
                f"{row.speed * row.bytes_a_token / 1e9:.1f}",
                percent(row.of_bandwidth),
            )
            for row in rows
            if row.kind == "decode"
        ],
    )


def _prefill_table(rows: Sequence[Row]) -> str:
    return table(
        ("model", "threads", "tokens", "tokens/s", "TOPS", "of peak"),
        [
            (
                row.model,
                str(row.threads),
                str(row.context),
                f"{row.speed:.0f}",
                f"{row.speed * row.operations_a_token / 1e12:.2f}",
                percent(row.of_peak),
            )
            for row in rows
            if row.kind == "prefill"
        ],
    )


def _batch_table(rows: Sequence[Row]) -> str:
    batches = [row for row in rows if row.kind == "batch"]
    single = {row.model: row.speed for row in batches if row.batch == 1}
    return table(
        ("model", "together", "tokens/s", "times one", "of reading"),
        [
            (
                row.model,
                str(row.batch),
                f"{row.speed:.1f}",
                f"{row.speed / single[row.model]:.2f}",
                percent(row.of_bandwidth),
            )
            for row in batches
        ],
    )


def picture(rows: Sequence[Row]) -> str:
    """The text of docs/performance.svg: every speed with all threads."""
    most = max(row.threads for row in rows)
    shown = [row for row in rows if row.threads == most]
    bounds = max((row.limits for row in shown), key=lambda limits: limits.bandwidth)
    roof = Roof(f"{bounds.peak / 1e12:.1f} TOPS, {bounds.bandwidth / 1e9:.0f} GB/s", bounds.bandwidth, bounds.peak)
    title = f"{machine().name}, {most} threads"
    return roofline(title, [roof], [row.point for row in shown])


def main(arguments: list[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.performance", description="Speeds against limits.")
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL.nook", help="converted models, smallest first")
    parser.add_argument("--quick", action="store_true", help="fewer contexts and batches, one sample each")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder for performance.md and performance.svg")
    options = parser.parse_args(arguments)
    plan = Plan.quick() if options.quick else Plan.full()
    models = [Model.opened(path) for path in options.models]
    rows = measured(models, plan)
    text = document(models, rows, plan, quick=options.quick)
    (options.out / "performance.md").write_text(text, encoding="utf-8")
    (options.out / "performance.svg").write_text(picture(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
