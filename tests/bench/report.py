"""What the measurements share: our own `bench` in a process of its own, and tables for people."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(command: Sequence[str | Path]) -> str:
    """What a program writes to its standard output; ends this one with its last words when it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, check=False, capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        sys.exit(f"{Path(words[0]).name} ended with code {done.returncode}: {said}")
    return done.stdout


def bench(model: Path, **flags: Any) -> dict[str, Any]:
    """`inglenook bench` of a model; flags by their names with `_`, those that are None left out."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value is not None]
    found: dict[str, Any] = json.loads(run([sys.executable, ROOT / "main.py", "bench", model, *words, "--json"]))
    return found


def table(heading: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table, padded to be read as it stands: `left` columns to the left, all others to the right."""
    widths = [max(len(row[column]) for row in (heading, *rows)) for column in range(len(heading))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(cells)} |"

    rule = "|".join("-" * (width + 1) + ("-" if column < left else ":") for column, width in enumerate(widths))
    return "\n".join([line(heading), f"|{rule}|", *map(line, rows)]) + "\n"


def percent(share: float | None) -> str:
    """A share for a table; a dash when there is none."""
    return "-" if share is None else f"{100 * share:.0f} %"
