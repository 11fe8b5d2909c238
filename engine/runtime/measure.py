"""How fast a model, and this computer, are."""

from __future__ import annotations

import platform
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from engine.core.cpu import machine, memory
from engine.core.library import Kernels, prepared_kernels
from engine.core.memory import Buffer, aligned
from engine.errors import ContextOverflowError, InternalError, SettingError
from engine.progress import Progress
from engine.runtime.events import Done, Event, Failed, Message, Prompt, Request
from engine.runtime.loop import Loop
from engine.runtime.model import Model
from engine.runtime.profile import profile
from engine.settings import Sampling

__all__ = ["Sizes", "bench", "diagnose"]

_BANDWIDTH_BYTES = 256 << 20
_BANDWIDTH_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Sizes:
    """What to measure: lengths in tokens, answers together, runs."""

    prompt_tokens: int = 512
    gen_tokens: int = 128
    depth: int = 32
    batch: int = 8
    repeat: int = 3

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            SettingError: names the number
        """
        least = {"prompt_tokens": 1, "gen_tokens": 2, "depth": 1, "batch": 1, "repeat": 1}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise SettingError(f"{name} must be at least {smallest}, not {getattr(self, name)}")

    @property
    def context(self) -> int:
        """Tokens that the longest of the answers needs."""
        return max(self.prompt_tokens + 2, self.depth + self.gen_tokens)

    def within(self, context: int, fixed: Collection[str]) -> Sizes:
        """As much as a context holds; the lengths whose names are in `fixed` stay.

        Raises:
            ContextOverflowError: those are too long
        """
        before = self.depth if "depth" in fixed else min(self.depth, max(1, context // 4))
        most = {"prompt_tokens": context - 2, "gen_tokens": max(2, context - before)}
        gen_tokens = self.gen_tokens if "gen_tokens" in fixed else min(self.gen_tokens, most["gen_tokens"])
        most["depth"] = context - gen_tokens
        shorter = {name: max(1, min(getattr(self, name), most[name])) for name in most if name not in fixed}
        sizes = replace(self, **shorter)
        if sizes.context > context:
            raise ContextOverflowError(
                f"the measurement needs {sizes.context} tokens and the model's context has {context}; "
                "ask for fewer prompt, generated or earlier tokens",
                needed_tokens=sizes.context,
                context_tokens=context,
            )
        return sizes


def bench(
    opened: Callable[[], Generator[Progress, None, Model]],
    sizes: Sizes,
    fixed: Collection[str],
    kv_dtype: str,
    *,
    profiled: bool = False,
) -> Generator[Progress | dict[str, Any], None, None]:
    """Measure a model; the last value is the dictionary of medians.

    Everything goes the way that answers go, sampling and text included. Prompts
    are random tokens, new ones each time, so that nothing is found in the cache.
    fixed: names of the lengths that are not cut to the model's context.

    decode_tps    tokens per second of one answer, with `depth` tokens before it
    prefill_tps   tokens of a prompt of `prompt_tokens` per second
    ttft_s        from that prompt's submission to its first token
    batch_tps     tokens per second of `batch` answers together
    load_s        from the path to the first step, kernels compiled before

    With speculation, the above are measured without it (random tokens make the
    answer a repetition, which flatters), and then an answer that copies a text:

    copy_tps, copy_plain_tps   tokens per second with and without guesses
    copy_tokens_per_step       with guesses

    Where layers are read from disk, also:

    step_disk_bytes, disk_bytes_per_s   what every step reads, and how fast the disk gave it while loading

    profiled: also "profile", the times of `engine.runtime.profile.profile`.
    """
    begin_s = time.perf_counter()
    steps = opened()
    while True:
        try:
            progress = next(steps)
        except StopIteration as finished:
            model: Model = finished.value
            break
        yield progress
        if progress.stage == "compile":
            begin_s = time.perf_counter()
    load_s = time.perf_counter() - begin_s
    rows: list[dict[str, float]] = []
    try:
        sizes = sizes.within(model.context, fixed)
        endless = replace(model, end_ids=frozenset())
        plain = replace(endless, speculator=None)
        random = np.random.default_rng(0)
        for run in range(sizes.repeat):
            yield Progress("measure", run, sizes.repeat, "steps", "answers")
            rows.append(_measured(plain, sizes, random))
            if model.speculator is not None:
                rows[-1] |= _copied(endless, plain, sizes)
        yield Progress("measure", sizes.repeat, sizes.repeat, "steps")
        times: dict[str, Any] = {}
        if profiled:
            times["profile"] = yield from profile(model, depth=sizes.depth, prompt_tokens=sizes.prompt_tokens)
    finally:
        model.release()
    disk = {}
    if model.info.step_disk_bytes:
        disk = {"step_disk_bytes": model.info.step_disk_bytes, "disk_bytes_per_s": model.info.disk_rate}
    medians = {name: median(row[name] for row in rows) for name in rows[0]}
    yield {
        **medians,
        "load_s": load_s,
        "peak_rss_bytes": _peak_rss_bytes(),
        "tier": model.info.tier,
        "threads": model.info.threads,
        "kv_dtype": kv_dtype,
        "prompt_tokens": sizes.prompt_tokens,
        "gen_tokens": sizes.gen_tokens,
        "depth": sizes.depth,
        **disk,
        **times,
    }


def _measured(model: Model, sizes: Sizes, random: np.random.Generator) -> dict[str, float]:
    allowed = np.setdiff1d(np.arange(model.vocab_size), model.missing_ids)

    def prompt(tokens: int) -> tuple[int, ...]:
        return tuple(random.choice(allowed, tokens).tolist())

    (first,), _ = _answers(model, [prompt(sizes.prompt_tokens)], 1)
    (single,), _ = _answers(model, [prompt(sizes.depth)], sizes.gen_tokens)
    _, batch_tps = _answers(model, [prompt(sizes.depth) for _ in range(sizes.batch)], sizes.gen_tokens)
    return {
        "decode_tps": single.usage.decode_tps,
        "prefill_tps": first.usage.prefill_tps,
        "ttft_s": first.usage.queue_s + first.usage.prefill_s,
        "batch_tps": batch_tps,
    }


_COPIED = (
    "The lighthouse keeper counted nineteen ships, four gulls and one very small boat with a red sail. "
    "Every morning at six he wrote the numbers into a blue book, and every evening he read them aloud to the cat. "
)


def _copied(guessing: Model, plain: Model, sizes: Sizes) -> dict[str, float]:
    """An answer that mostly repeats its prompt, with and without guesses."""
    prompt = (Message("user", f"Repeat this text word by word:\n{_COPIED * 2}"),)
    room = guessing.context - guessing.encode(prompt).ids.size
    if room < 2:
        raise SettingError("measuring speculation needs a context of some 150 tokens")
    tokens = min(sizes.gen_tokens, room)
    (fast,), _ = _answers(guessing, [prompt], tokens)
    (slow,), _ = _answers(plain, [prompt], tokens)
    return {
        "copy_tps": fast.usage.decode_tps,
        "copy_plain_tps": slow.usage.decode_tps,
        "copy_tokens_per_step": fast.usage.tokens_per_step,
    }


def _answers(model: Model, prompts: Sequence[Prompt], tokens: int) -> tuple[list[Done], float]:
    """The answers, and how many tokens a second all made together once every prompt was read."""
    loop = Loop(model)
    sampling = Sampling(temperature=0.0, repetition_penalty=1.0, max_tokens=tokens, loop_limit=0)
    ended: list[Done] = []
    reading = set(range(len(prompts)))
    drawn = 0

    def sink(event: Event) -> None:
        nonlocal drawn
        if isinstance(event, Failed):
            raise InternalError(event.message)
        if isinstance(event, Progress) and event.done == event.total:
            reading.discard(int(event.request_id or 0))
        if isinstance(event, Done):
            ended.append(event)

    for number, prompt in enumerate(prompts):
        loop.add(Request(str(number), prompt, sampling), sink)
    while reading:
        drawn += len(prompts) - len(reading)
        loop.step()
    drawn += len(prompts)
    begin_s = time.perf_counter()
    while loop.step():
        pass
    seconds = time.perf_counter() - begin_s
    model.pages.drop_idle()
    return ended, (len(prompts) * tokens - drawn) / seconds if seconds > 0 else 0.0


def _peak_rss_bytes() -> int:
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def diagnose(cache: Path, *, benchmark: bool) -> dict[str, Any]:
    """What this computer offers the engine, as plain values.

    benchmark: also measure how fast all threads together read memory. A token of an answer reads all weights once,
    so that divided by a model's size bounds its speed.
    """
    here, ram = machine(), memory()
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "cpu": here.describe(),
        "memory": {"total_bytes": ram.total, "free_bytes": ram.free, "limit_bytes": ram.limit},
    }
    if benchmark:
        rate = _read_bandwidth(cache)
        found["benchmark"] = {
            "read_bandwidth_gb_per_s": round(rate / 1e9, 2),
            "forecast_tps": {
                f"{billions} billion parameters, int4": round(rate / (billions * 1e9 * 4.5 / 8), 1)
                for billions in (0.5, 1.5, 3, 7, 14)
            },
        }
    return found


def _read_bandwidth(cache: Path) -> float:
    """Bytes per second that the default number of threads reads of memory, the best of some samples."""
    kernels = _kernels(cache)
    threads = machine().default_threads
    part = _BANDWIDTH_BYTES // threads // 256 * 256
    buffer = Buffer(part * threads, "the bandwidth measurement")
    buffer.view[:] = 1
    out = aligned((threads, 16), np.float32)
    results = [int(row.ctypes.data) for row in out]

    def sample() -> float:
        members = [
            threading.Thread(target=kernels.read, args=(buffer.address + member * part, part, results[member]))
            for member in range(threads)
        ]
        begin_s = time.perf_counter()
        for member in members:
            member.start()
        for member in members:
            member.join()
        return time.perf_counter() - begin_s

    return part * threads / min(sample() for _ in range(_BANDWIDTH_SAMPLES))


def _kernels(cache: Path) -> Kernels:
    steps = prepared_kernels(cache=cache)
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            kernels: Kernels = finished.value
            return kernels
