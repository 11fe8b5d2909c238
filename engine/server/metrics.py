"""Counts what the server does, in the text format that Prometheus reads."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil

from engine import api
from engine.api import Usage
from engine.server.hub import Served

__all__ = ["Answered", "Metrics"]

_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_LATEST = 100

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that ended: when, in seconds since 1970, and with which HTTP status."""

    at_s: float
    model: str
    endpoint: str
    status: int


class Metrics:
    """Counters since the start; gauges are read when asked."""

    def __init__(self) -> None:
        self._requests: Counter[Labels] = Counter()
        self._tokens: Counter[Labels] = Counter()
        self._first_token_s: dict[Labels, list[float]] = {}
        self._process = psutil.Process()
        self._latest: deque[Answered] = deque(maxlen=_LATEST)

    @property
    def latest(self) -> tuple[Answered, ...]:
        """The requests that ended last, the latest at the end."""
        return tuple(self._latest)

    def answered(self, model: str, endpoint: str, status: int) -> None:
        """A request ended."""
        self._latest.append(Answered(time.time(), model, endpoint, status))
        self._requests[("model", model), ("endpoint", endpoint), ("status", str(status))] += 1

    def computed(self, model: str, usage: Usage) -> None:
        """An answer ended, whole or in part."""
        for kind, count in (
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("completion", usage.completion_tokens),
        ):
            self._tokens[("model", model), ("kind", kind)] += count
        if usage.completion_tokens:
            self._first_token_s.setdefault((("model", model),), []).append(usage.queue_s + usage.prefill_s)
            self._fold((("model", model),))

    def text(self, models: Iterable[Served]) -> str:
        """All of it."""
        lines: list[str] = []
        _family(lines, "requests_total", "counter", "Requests by how they ended.", self._requests)
        _family(lines, "tokens_total", "counter", "Tokens of prompts, found in the cache, and made.", self._tokens)
        self._histogram(lines)
        gauges: dict[tuple[str, str], dict[Labels, float]] = {}
        for served in models:
            labels: Labels = (("model", served.name),)
            status = served.status
            for name, text, value in (
                ("model_loaded", "1 if the model is in memory.", float(served.engine is not None)),
                ("answers_running", "Answers that are computed now.", status.running),
                ("answers_waiting", "Answers that wait for their turn.", status.waiting),
                ("cache_pages", "Pages of the key/value cache.", status.pages),
                ("cache_pages_free", "Pages that can be taken.", status.free_pages),
            ):
                gauges.setdefault((name, text), {})[labels] = value
        for (name, text), values in gauges.items():
            _family(lines, name, "gauge", text, values)
        _, free_bytes = api.memory()
        for name, text, value in (
            ("resident_memory_bytes", "Memory of this process.", self._process.memory_info().rss),
            ("available_memory_bytes", "Memory that the computer can still give.", free_bytes),
        ):
            _family(lines, name, "gauge", text, {(): value})
        return "\n".join(lines) + "\n"

    def _fold(self, labels: Labels) -> None:
        """Keep counts per bucket, not every value: [counts ..., beyond, sum]."""
        values = self._first_token_s[labels]
        seconds = values.pop()
        if not values:
            values += [0.0] * (len(_BUCKETS_S) + 2)
        place = next((i for i, limit in enumerate(_BUCKETS_S) if seconds <= limit), len(_BUCKETS_S))
        values[place] += 1
        values[-1] += seconds

    def _histogram(self, lines: list[str]) -> None:
        name = "inglenook_first_token_seconds"
        lines += [f"# HELP {name} Time to the first token, waiting included.", f"# TYPE {name} histogram"]
        for labels, values in sorted(self._first_token_s.items()):
            below = 0.0
            for limit, count in zip([*map(str, _BUCKETS_S), "+Inf"], values, strict=False):
                below += count
                lines.append(f"{name}_bucket{_braces((*labels, ('le', limit)))} {below:g}")
            lines += [f"{name}_sum{_braces(labels)} {values[-1]:.6f}", f"{name}_count{_braces(labels)} {below:g}"]


def _family(lines: list[str], name: str, kind: str, text: str, values: Mapping[Labels, float]) -> None:
    lines += [f"# HELP inglenook_{name} {text}", f"# TYPE inglenook_{name} {kind}"]
    lines += [f"inglenook_{name}{_braces(labels)} {value:.15g}" for labels, value in sorted(values.items())]


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    inner = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
    return f"{{{inner}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
