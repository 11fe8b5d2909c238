"""Our speed beside that of other engines on this machine, measured in turns.

    python -m tests.bench.peers MODEL.nook --llama-bench PATH --gguf FILE [--gguf FILE ...]
                                [--openvino FOLDER] [--rounds N] [--threads N] [--tier TIER] [--json]

Every round runs all engines one after the other, each in a process of its own,
so that whatever else the machine does meets all of them; medians of the rounds
are compared. llama.cpp's attention is measured both with `-fa on` and `off`, and its
batches by the `llama-batched-bench` that lies beside `llama-bench`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from engine.core.cpu import machine
from tests.bench.report import ROOT, bench, run, table

Speeds = dict[str, float]
"""Tokens a second, by what was measured."""

MEASURES = ("decode", "prefill 512", "prefill 2048", "depth 4096", "batch 8")
"""128 tokens after 32; prompts; 24 tokens after 4,096; 64 tokens of 8 answers each after 32, counted together."""


def ours(model: Path, threads: int, tier: str | None) -> Speeds:
    """`inglenook bench`."""
    common = {"threads": threads, "tier": tier, "repeat": 1}
    short = bench(model, **common, prompt_tokens=512, depth=32, gen_tokens=128, batch=1)
    long = bench(model, **common, prompt_tokens=2048, depth=4096, gen_tokens=24, batch=1)
    together = bench(model, **common, prompt_tokens=32, depth=32, gen_tokens=64, batch=8)
    return {
        "decode": short["decode_tps"],
        "prefill 512": short["prefill_tps"],
        "prefill 2048": long["prefill_tps"],
        "depth 4096": long["decode_tps"],
        "batch 8": together["batch_tps"],
    }


def llama(program: Path, gguf: Path, threads: int) -> Speeds:
    """llama.cpp's two programs; the better attention counts, for every measure."""
    batched = program.with_name("llama-batched-bench" + program.suffix)
    speeds: Speeds = {}
    for attention in ("on", "off"):
        common = [program, "-m", gguf, "-t", str(threads), "-r", "1", "-fa", attention, "-o", "jsonl"]
        runs = {
            "decode": ("-p", "0", "-n", "128", "-d", "32"),
            "prefill 512": ("-p", "512", "-n", "0"),
            "prefill 2048": ("-p", "2048", "-n", "0"),
            "depth 4096": ("-p", "0", "-n", "24", "-d", "4096"),
        }
        for name, flags in runs.items():
            speed = float(_last_object(run([*common, *flags]))["avg_ts"])
            speeds[name] = max(speeds.get(name, 0.0), speed)
        flags = ("-c", "1024", "-npp", "32", "-ntg", "64", "-npl", "8", "--output-format", "jsonl", "-fa", attention)
        text = run([batched, "-m", gguf, "-t", str(threads), *flags])
        speeds["batch 8"] = max(speeds.get("batch 8", 0.0), float(_last_object(text)["speed_tg"]))
    return speeds


def openvino(folder: Path, threads: int) -> Speeds:
    """OpenVINO GenAI."""
    text = run([sys.executable, "-P", ROOT / "tests/bench/openvino_speed.py", folder, "--threads", str(threads)])
    return {name: float(speed) for name, speed in _last_object(text).items()}


def _last_object(text: str) -> dict[str, float]:
    """The last line that is a JSON object; the programs say other things as well."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(f"no result in what the program wrote: {text[-200:]!r}")
    found: dict[str, float] = json.loads(lines[-1])
    return found


def engines(options: argparse.Namespace) -> dict[str, Callable[[], Speeds]]:
    """Who is measured, by name; ends the program with a sentence when something is missing."""
    found: dict[str, Callable[[], Speeds]] = {
        "Inglenook": lambda: ours(options.model, options.threads, options.tier),
    }
    if options.gguf and options.llama_bench is None:
        sys.exit("--gguf needs --llama-bench, the path of llama.cpp's program llama-bench")
    if options.llama_bench is not None and not options.gguf:
        sys.exit("--llama-bench needs at least one --gguf, the same model for llama.cpp")
    if options.llama_bench is not None:
        for program in ("llama-bench", "llama-batched-bench"):
            path = options.llama_bench.with_name(program + options.llama_bench.suffix)
            if not path.is_file():
                sys.exit(f"{path} is missing; build llama.cpp with the targets llama-bench and llama-batched-bench")
    for path in (options.model, *options.gguf, *([options.openvino] if options.openvino else [])):
        if not path.exists():
            sys.exit(f"{path} is missing")
    for gguf in options.gguf:
        found[f"llama.cpp {gguf.stem}"] = lambda gguf=gguf: llama(options.llama_bench, gguf, options.threads)
    if options.openvino is not None:
        if importlib.util.find_spec("openvino_genai") is None:
            sys.exit("OpenVINO GenAI is not installed; pip install openvino-genai, or leave --openvino out")
        found["OpenVINO"] = lambda: openvino(options.openvino, options.threads)
    return found


def compared(found: dict[str, Callable[[], Speeds]], rounds: int) -> dict[str, Speeds]:
    """Medians of the rounds."""
    taken: dict[str, list[Speeds]] = {name: [] for name in found}
    for number in range(rounds):
        for name, measure in found.items():
            sys.stderr.write(f"round {number + 1} of {rounds}: {name}\n")
            taken[name].append(measure())
    return {name: {one: median(speeds[one] for speeds in all_) for one in MEASURES} for name, all_ in taken.items()}


def comparison(medians: dict[str, Speeds]) -> str:
    """A table: tokens a second, and how many times the peer's speed ours is."""
    mine, *peers = medians
    heading = ("tokens/s", *medians, *(f"to {peer}" for peer in peers))
    rows: list[Sequence[str]] = []
    for name in MEASURES:
        speeds = [medians[engine][name] for engine in medians]
        ratios = [f"{medians[mine][name] / medians[peer][name]:.2f}" for peer in peers]
        rows.append((name, *(f"{speed:.1f}" for speed in speeds), *ratios))
    return table(heading, rows)


def main(arguments: list[str] | None = None) -> None:
    """Measure in turns and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description="Our speed beside others'.")
    parser.add_argument("model", type=Path, metavar="MODEL.nook", help="a converted model")
    parser.add_argument("--llama-bench", type=Path, metavar="PATH", help="llama.cpp's program")
    parser.add_argument("--gguf", type=Path, action="append", default=[], metavar="FILE", help="its file of the model")
    parser.add_argument("--openvino", type=Path, metavar="FOLDER", help="the model as OpenVINO exported it")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; medians are compared")
    parser.add_argument("--threads", type=int, default=machine().default_threads, help="of every engine")
    parser.add_argument("--tier", choices=machine().tiers, help="our instructions; the best without it")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    medians = compared(engines(options), options.rounds)
    if options.json:
        ratios = {
            peer: {name: medians["Inglenook"][name] / speed for name, speed in speeds.items()}
            for peer, speeds in medians.items()
            if peer != "Inglenook"
        }
        facts = {"processor": machine().name, "threads": options.threads, "rounds": options.rounds}
        sys.stdout.write(json.dumps(facts | {"medians": medians, "ratios": ratios}) + "\n")
    else:
        sys.stdout.write(comparison(medians))


if __name__ == "__main__":
    main()
