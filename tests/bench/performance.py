"""How speed grows with a model's size, with the context and with threads, against the limits of the machine.

    python -m tests.bench.performance MODEL.nook ... [--quick]

Writes docs/performance.md and docs/performance.svg.
"""

from __future__ import annotations

import argparse
import platform
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
from engine.runtime.model import _BATCH_TOKENS as STEP_TOKENS
from tests.bench.limits import dot_peak, read_bandwidth
from tests.bench.report import ROOT, bench, percent, table
from tests.bench.svg import Point, Roof, roofline


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
        """Bytes and operations of a prompt; its steps read all weights each."""
        steps = -(-tokens // STEP_TOKENS)
        seen = sum(min(tokens, (step + 1) * STEP_TOKENS) for step in range(steps))
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
    """One speed, tokens a second, and what the machine would allow.

    needs: bytes and operations of the `tokens` that are computed at a time.
    """

    model: str
    kind: str
    threads: int
    context: int
    tokens: int
    speed: float
    needs: tuple[float, float]
    limits: Limits

    @property
    def bytes_a_token(self) -> float:
        """What is read for it, its share of what is read for several."""
        return self.needs[0] / self.tokens

    @property
    def operations_a_token(self) -> float:
        """Products and sums of integers."""
        return self.needs[1] / self.tokens

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
            for context in plan.contexts:
                if context + plan.gen_tokens > model.spec.context:
                    continue
                _say(f"{model.name}, {threads} threads, {context} tokens")
                found = bench(model.path, **common, prompt_tokens=context, depth=context, batch=1)
                kv, middle = found["kv_dtype"], context + plan.gen_tokens / 2
                for kind, tokens, needs in (
                    ("decode", 1, model.decode(middle, 1, kv)),
                    ("prefill", context, model.prefill(context, kv)),
                ):
                    speed = found[f"{kind}_tps"]
                    rows.append(Row(model.name, kind, threads, context, tokens, speed, needs, limits))
            if threads != plan.threads[-1]:
                continue
            for batch in plan.batches:
                _say(f"{model.name}, {threads} threads, {batch} together")
                found = bench(model.path, **common, prompt_tokens=32, depth=32, batch=batch)
                needs = model.decode(32 + plan.gen_tokens / 2, batch, found["kv_dtype"])
                rows.append(Row(model.name, "batch", threads, 32, batch, found["batch_tps"], needs, limits))
    return rows


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def document(models: Sequence[Model], rows: Sequence[Row], plan: Plan, *, quick: bool) -> str:
    """The text of docs/performance.md."""
    here = machine()
    most = plan.threads[-1]
    samples = f"the median of {plan.repeat} runs" if plan.repeat > 1 else "one run"
    provisional = "**Provisional**: one sample each, on a machine that was doing other work, too (`--quick`).\n\n"
    return f"""# How fast it is

Made by `python -m tests.bench.performance MODEL.nook ...`, which measures anew and writes this file and its picture.

{provisional if quick else ""}![Speeds below what the machine allows](performance.svg)

## Machine

{here.name}, {here.architecture}, {len(here.cores)} cores, {memory().total / (1 << 30):.0f} GB of memory; \
{platform.system()}, Python {platform.python_version()}; tier {here.choose_tier()}; Inglenook {__version__}.

## Limits

Reading: as many bytes as the model's weights, by all threads together, with prefetching. Integer peak: products of the
tier's integers out of registers and the first cache. Both are the best of many short samples, taken in the same run as
the speeds (`tests/bench/limits.py`).

{_limits_table(rows)}
## One answer

{plan.gen_tokens} tokens after so many; {samples}. A token reads all weights, and all keys and values before it:
*of reading* is the time that merely reading these bytes takes, as a share of the token's.

{_decode_table(rows)}
## Prompts

*of peak* is the share of the integer peak, counting products of weights and of attention, a product and a sum as two.

{_prefill_table(rows)}
## Answers together

{most} threads, 32 tokens before each; the tokens of all answers are counted.

{_batch_table(rows)}
## Models

{_models_table(models)}"""


def _models_table(models: Sequence[Model]) -> str:
    return table(
        ("model", "parameters", "weights", "MB read a token"),
        [
            (one.name, f"{one.spec.parameters / 1e6:.0f} M", one.label, f"{one.weight_bytes / 1e6:.0f}")
            for one in models
        ],
    )


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
    single = {row.model: row.speed for row in batches if row.tokens == 1}
    return table(
        ("model", "together", "tokens/s", "times one", "of reading"),
        [
            (
                row.model,
                str(row.tokens),
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
    # A model that a cache holds is read faster than one that lies in memory: a roof each, where they differ.
    limits = sorted({row.model: row.limits for row in shown}.items(), key=lambda item: -item[1].bandwidth)
    ends = [limits[0]] + [limits[-1]] * (limits[-1][1].bandwidth < 0.8 * limits[0][1].bandwidth)
    roofs = [Roof(f"{one.bandwidth / 1e9:.0f} GB/s ({name})", one.bandwidth, one.peak) for name, one in ends]
    title = f"{machine().name}, {most} threads, {limits[0][1].peak / 1e12:.1f} TOPS at most"
    return roofline(title, roofs, [row.point for row in shown])


def main(arguments: list[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.performance", description="Speeds against limits.")
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL.nook", help="converted models")
    parser.add_argument("--quick", action="store_true", help="fewer contexts and batches, one sample each")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder for performance.md and performance.svg")
    options = parser.parse_args(arguments)
    plan = Plan.quick() if options.quick else Plan.full()
    models = sorted(map(Model.opened, options.models), key=lambda model: model.weight_bytes)
    rows = measured(models, plan)
    text = document(models, rows, plan, quick=options.quick)
    (options.out / "performance.md").write_text(text, encoding="utf-8")
    (options.out / "performance.svg").write_text(picture(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
