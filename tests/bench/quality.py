"""What files of a model lose against their source, ours beside other engines', by the same windows of the same texts.

    python -m tests.bench.quality FOLDER --text FILE [--text FILE ...] NAME=FILE [NAME=FILE ...]
                                  [--context N] [--windows N] [--write] [--json]
    python -m tests.bench.quality FOLDER --control OUT

FOLDER is the source; each FILE a `.nook` or GGUF file made of it. All go through
the texts together, a layer at a time. `.nook` files run as in use, with quantised
activations and int8 keys and values; of GGUF files the weights are compared, in
float32, which spares them the error of their own engine's activations.

--control makes a copy of a folder whose weights have 0.1 % noise, which is too little to hide the grid of a source
that was quantised before. --write puts the table into docs/quality.md.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from engine.convert.calibration import cut
from engine.convert.layerwise import Float32, FloatModel, PackedModel
from engine.convert.sensitivity import divergence, log_probabilities
from engine.convert.source import Source, open_source
from engine.core.cpu import machine
from engine.core.library import prepared_kernels
from engine.core.team import Team
from engine.models.store import open_nook
from engine.progress import finish
from tests.bench.report import ROOT

DOCUMENT = ROOT / "docs" / "quality.md"
NOISE = 0.001
TITLE = """# What quantised files lose

Divergence (KL, in nats) of the next token's distribution from the unquantised source's, and how often the likeliest
token is the same, over the second halves of windows. Written by `python -m tests.bench.quality`, which says how the
files are compared. The sources were made of published GGUF files in Q4_1 (SmolLM2) and Q4_K_M (Qwen2.5-Coder), whose
grids favour formats of the same kind, our int4 among them: plain int4 loses 3 % of such weights, 7 % of others.
"""


@dataclass
class Row:
    """One file: sums over tokens, then what is told of them."""

    name: str
    bytes: int = 0
    bits_per_weight: float = 0.0
    kl_mean: float = 0.0
    kl_99: float = 0.0
    top1_agreement: float = 0.0
    perplexity: float = 0.0


def measure(folder: Path, files: dict[str, Path], texts: Sequence[Path], context: int, most: int) -> list[Row]:
    """The source's row, then one for every file."""
    source = open_source(folder)
    windows = [window for text in texts for window in cut(source, text.read_text("utf-8"), most=most, tokens=context)]
    kernels = finish(prepared_kernels())
    team = Team(kernels, machine().default_threads)
    rows = context - context // 2
    original = FloatModel(source, kernels, team, context, head_rows=rows)
    models: list[FloatModel | PackedModel] = [original]
    for path in files.values():
        if path.suffix == ".nook":
            nook = open_nook(path)
            models.append(PackedModel(nook.spec, nook.weights, team, context, head_rows=rows))
        else:
            models.append(FloatModel(open_source(path), kernels, team, context, head_rows=rows))
    states = [model.embedded(windows) for model in models]
    last = len(source.spec.layers) - 1
    for number in range(last):
        sys.stderr.write(f"layer {number} of {last + 1}\n")
        for model, held in zip(models, states, strict=True):
            model.load(number)
            held[:] = [model.run(x) for x in held]
    expected: list[Float32] = []
    table = []
    for (name, path), model, held in zip({"source": folder, **files}.items(), models, states, strict=True):
        model.load(last)
        divergences, agreeing, surprise, count = [], 0, 0.0, 0
        for place, (window, x) in enumerate(zip(windows, held, strict=True)):
            first = len(window) // 2
            found = log_probabilities(model.logits(x, first))[:-1]
            if model is original:
                expected.append(found)
            divergences.append(divergence(expected[place], found))
            agreeing += int((found.argmax(axis=1) == expected[place].argmax(axis=1)).sum())
            surprise -= float(found[np.arange(len(found)), window[first + 1 :]].sum(dtype=np.float64))
            count += len(found)
        joined = np.concatenate(divergences)
        size = path.stat().st_size if path.is_file() else sum(map(source.bytes, source.assignments))
        row = Row(name, size, 8 * size / source.spec.parameters, float(joined.mean()), float(np.quantile(joined, 0.99)))
        row.top1_agreement, row.perplexity = agreeing / count, math.exp(surprise / count)
        table.append(row)
    team.close()
    return table


def section(folder: Path, rows: Sequence[Row], texts: Sequence[Path], context: int) -> str:
    """The rows as a part of the document."""
    named = ", ".join(text.name for text in texts)
    lines = [
        f"## {folder.name}",
        "",
        f"Windows of {context} tokens of {named}.",
        "",
        "| file | MB | bits per weight | KL mean | KL 99 % | same likeliest token | perplexity |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.name} | {row.bytes / 1e6:.1f} | {row.bits_per_weight:.2f} | {row.kl_mean:.4f} | {row.kl_99:.3f} "
        f"| {100 * row.top1_agreement:.1f} % | {row.perplexity:.3f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def write(text: str) -> None:
    """Put a section into the document, in the place of the one of the same heading."""
    document = DOCUMENT.read_text("utf-8") if DOCUMENT.exists() else TITLE
    parts = re.split(r"(?m)^(?=## )", document)
    heading = text.split("\n", 1)[0]
    kept = [part.rstrip("\n") + "\n" for part in parts if not part.startswith(heading + "\n")]
    DOCUMENT.write_text("\n".join([*kept, text]), "utf-8")


def control(folder: Path, out: Path) -> None:
    """A copy of a folder in float32 whose matrices have normally distributed noise of 0.1 % of their own size."""
    source = open_source(folder)
    out.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy(file, out / file.name)
    (out / "model.safetensors").write_bytes(b"".join(_noisy(source)))


def _noisy(source: Source) -> Iterator[bytes]:
    random, reader = np.random.default_rng(0), source.reader
    entries, end = {}, 0
    for name, shape in reader.shapes.items():
        size = 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    yield len(header).to_bytes(8, "little") + header
    for name, shape in reader.shapes.items():
        values = reader.rows(name, 0, shape[0] if len(shape) > 1 else 1)
        if len(shape) > 1:
            noise = random.standard_normal(values.shape, np.float32)
            values = values + noise * np.float32(NOISE * math.sqrt(float(np.square(values).mean())))
        yield values.astype("<f4").tobytes()


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", metavar="NAME=FILE")
    parser.add_argument("--text", type=Path, action="append", default=[])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=8, help="of each text, at most")
    parser.add_argument("--control", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_intermixed_args()
    if given.control:
        control(given.folder, given.control)
        return 0
    files = {name: Path(path) for name, _, path in (one.partition("=") for one in given.files)}
    rows = measure(given.folder, files, given.text, given.context, given.windows)
    if given.json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows]) + "\n")
    text = section(given.folder, rows, given.text, given.context)
    if given.write:
        write(text)
    elif not given.json:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
