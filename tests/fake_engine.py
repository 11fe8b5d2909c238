"""A scripted engine behind the real public face, for testing what faces do with its events.

`install()` puts it in place; run as a program it is the command line with that
engine: `python -m tests.fake_engine run toy hello`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from engine import api
from engine.api import (
    Delta,
    Done,
    Failed,
    LibraryModel,
    Loaded,
    LoadedModel,
    ModelReport,
    Problem,
    Progress,
    Request,
    Sink,
    SizeChoice,
    Started,
    TensorInfo,
    Usage,
)
from engine.errors import FileDamagedError, InputError
from engine.settings import Conversion, EngineSettings, Sampling

__all__ = ["DEFAULTS", "FakeEngine", "install"]

DEFAULTS = Sampling(temperature=0.6, top_k=20, max_tokens=99)


class FakeEngine:
    """Answers with the last message in capitals, a word at a time.

    The words "fail" and "overflow" in it make the answer fail, "forever" makes
    it go on until it is cancelled, "cut" ends it for its length.
    """

    requests: ClassVar[list[Request]] = []
    loads: ClassVar[list[tuple[str, EngineSettings]]] = []
    closed: ClassVar[int] = 0

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._cancelled = threading.Event()

    def load(self, path: Path | str, settings: EngineSettings, sink: Callable[[Any], None]) -> None:
        FakeEngine.loads.append((str(path), settings))
        sink(Progress("load", 1, 2, "bytes"))
        if "broken" in str(path):
            sink(Failed(None, f"{path} is broken", "ModelFolderError"))
            return
        model = LoadedModel(
            path=Path(path),
            name="Toy",
            family="LlamaForCausalLM",
            format="int4, group 32",
            context=256,
            model_context=256,
            chat_template=True,
            defaults=DEFAULTS,
            weight_bytes=1,
            kv_bytes=1,
            tier="generic",
            threads=1,
            notices=("a notice on loading",) if "notice" in str(path) else (),
        )
        sink(Loaded(model))

    def submit(self, request: Request, sink: Sink) -> None:
        FakeEngine.requests.append(request)
        self._cancelled.clear()
        thread = threading.Thread(target=self._answer, args=(request, sink))
        self._threads.append(thread)
        thread.start()

    def cancel(self, request_id: str) -> None:
        self._cancelled.set()

    def close(self) -> None:
        FakeEngine.closed += 1
        self._cancelled.set()
        for thread in self._threads:
            thread.join()

    def _answer(self, request: Request, sink: Sink) -> None:
        question = request.prompt if isinstance(request.prompt, str) else request.prompt[-1].content
        sink(Started(request.id, 7, 2))
        sink(Progress("prefill", 7, 7, "tokens"))
        if "overflow" in question:
            sink(Failed(request.id, "the prompt needs 900 tokens, the context holds 256", "ContextOverflowError"))
            return
        if "fail" in question:
            sink(Failed(request.id, "the engine tripped", "InternalError"))
            return
        text = ""
        for piece in self._pieces(question):
            text += piece
            if request.stream:
                sink(Delta(request.id, piece, (1,)))
        reason = "cancelled" if self._cancelled.is_set() else "length" if "cut" in question else "stop"
        usage = Usage(prompt_tokens=7, cached_tokens=2, completion_tokens=3, prefill_s=0.5, decode_s=0.25)
        sink(Done(request.id, reason, text, usage, (1, 2, 3)))

    def _pieces(self, question: str) -> Iterator[str]:
        if "forever" not in question:
            yield from question.upper().split(" ")
            return
        yield "again"
        while not self._cancelled.wait(0.005):
            yield " and again"


def _inspect(path: Path | str, *, tensors: bool = False) -> ModelReport:
    if "missing" in str(path):
        raise InputError(f"{path} does not exist")
    return ModelReport(
        path=Path(path),
        kind="folder",
        name="Toy",
        family="LlamaForCausalLM",
        parameters=1_543_714_304,
        context=32768,
        vocab_size=151936,
        layers=2,
        hidden=64,
        source_dtype="bfloat16",
        chat_template=True,
        licence="apache-2.0",
        disk_bytes=3_087_000_000,
        sizes=(SizeChoice("int4, group 32", Conversion(), 986_000_000, 5.0),),
        memory_bytes={4096: 1_200_000_000},
        problems=(Problem(fatal=True, sentence="shard 2 of 3 is missing"),) if "bad" in str(path) else (),
        tensors=(TensorInfo("norm", "F32", (64,), 256),) if tensors else (),
    )


def _convert(
    source: Path | str, out: Path | str, conversion: Conversion = Conversion(), *, resume: bool = False
) -> Iterator[Progress]:
    partial = Path(f"{out}.partial")
    partial.touch()
    try:
        yield Progress("convert", 1, 2, "bytes", note=f"{source} {conversion.bits} {conversion.keep} {resume}")
        if "interrupt" in str(source):
            raise KeyboardInterrupt
        if "full" in str(source):
            raise OSError(28, "No space left on device")
        yield Progress("convert", 2, 2, "bytes")
        Path(out).touch()
    finally:
        partial.unlink()


def _verify(path: Path | str) -> Iterator[Progress]:
    yield Progress("verify", 1, 1, "bytes")
    if "damaged" in str(path):
        raise FileDamagedError(f"{path}: tensor layers.0.feed_forward.down is not what was written; convert again")


def _perplexity(
    model: str, text: str, *, context: int | None = None, settings: EngineSettings = EngineSettings()
) -> Iterator[Progress | dict[str, Any]]:
    yield Progress("measure", 1, 1, "tokens")
    yield {
        "perplexity": 12.5,
        "tokens_left_out": 5,
        "context": context or 512,
        "tokens": len(text),
        "seen": [model, context, settings.threads],
    }


def _bench(model: str, *, settings: EngineSettings, **sizes: int | None) -> Iterator[Progress | dict[str, Any]]:
    yield Progress("measure", 1, 1)
    yield {
        "decode_tps": 30.0,
        "prefill_tps": 300.0,
        "ttft_s": 0.5,
        "load_s": 1.0,
        "peak_rss_bytes": 10**9,
        "batch_tps": 90.0,
        "tier": settings.tier or "avx2",
        "threads": settings.threads,
        "kv_dtype": settings.kv,
        "prompt_tokens": 512,
        "gen_tokens": 128,
        "depth": 32,
        **{name: size for name, size in sizes.items() if size is not None},
    }


def _diagnose(*, benchmark: bool = False) -> dict[str, Any]:
    return {
        "cpu": "Toy processor",
        "tiers": ["generic", "avx2"],
        "memory": {"total_bytes": 16_000_000_000, "quota": None},
        "bandwidth": 21.5 if benchmark else None,
        "mask": True,
    }


def install(library: Path | None = None) -> None:
    """Put the fakes in place of the engine; `library` holds the models that the library lists."""
    FakeEngine.requests.clear()
    FakeEngine.loads.clear()
    FakeEngine.closed = 0

    def library_models(*, broken: bool = False) -> tuple[LibraryModel, ...]:
        assert broken, "a broken file can be removed, too"
        paths = sorted(library.glob("*.nook")) if library else []
        return tuple(
            LibraryModel(path, path.stem, "LlamaForCausalLM", "int4, group 32", path.stat().st_size, 1000, 256)
            for path in paths
        )

    fakes: dict[str, Any] = {
        "Engine": FakeEngine,
        "inspect": _inspect,
        "convert": _convert,
        "verify": _verify,
        "perplexity": _perplexity,
        "bench": _bench,
        "diagnose": _diagnose,
        "resolve_model": Path,
        "library_models": library_models,
        "library_folder": lambda: library,
    }
    for name, fake in fakes.items():
        setattr(api, name, fake)


if __name__ == "__main__":
    from engine.cli import main

    install()
    sys.exit(main())
