"""An engine that plays a script: what `engine.api` offers to faces, without a model.

`ScriptedApi()` stands in for the module `engine.api`. Its attributes say what
the next load, answer, inspection and conversion do; `requests` keeps what was
asked. Like the real engine it has one thread, an inbox, and calls sinks there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from engine import api
from engine.errors import FileDamagedError, InputError
from engine.settings import Conversion, EngineSettings, Sampling

MIB = 1 << 20

MODEL = api.LoadedModel(
    path=Path("SmolLM2.nook"),
    name="SmolLM2 135M Instruct",
    family="LlamaForCausalLM",
    format="int4, group 32",
    context=4096,
    model_context=8192,
    chat_template=True,
    defaults=Sampling(temperature=0.6, top_k=20),
    weight_bytes=90 * MIB,
    kv_bytes=40 * MIB,
    tier="avx2",
    threads=2,
)


_TIMES = {  # of the operations of a layer, in seconds
    "decode": (("norm", 2e-5), ("attention.qkv", 2e-4), ("attend", 1e-4), ("feed_forward.gate_up", 7e-4),
               ("feed_forward.down", 4e-4)),
    "prefill": (("norm", 1e-4), ("attention.qkv", 3e-3), ("attend", 4e-3), ("feed_forward.gate_up", 9e-3),
                ("feed_forward.down", 5e-3)),
}  # fmt: skip


def report(path: Path, **changes: Any) -> api.ModelReport:
    """A report of a sound Qwen2 folder, with changes."""
    sizes = tuple(
        api.SizeChoice(label, Conversion(bits=bits, group_size=group), size, bits + 0.6, size / 30e6)
        for label, bits, group, size in (
            ("int4, group 32", 4, 32, 318_000_000),
            ("int4, group 64", 4, 64, 296_000_000),
            ("int4, group 128", 4, 128, 286_000_000),
            ("int8, group 32", 8, 32, 560_000_000),
            ("int8, group 128", 8, 128, 528_000_000),
            ("16 bit", 16, 32, 988_000_000),
        )
    )
    sizes += tuple(
        api.SizeChoice(f"{level} (int4, group 32)", Conversion(level=level), size, 8 * size / 494e6, 210.0)
        for level, size in (("small", 318_000_000), ("balanced", 346_000_000), ("best", 441_000_000))
    )
    values: dict[str, Any] = {
        "path": path,
        "kind": "folder",
        "name": "Qwen2.5 Coder 0.5B Instruct",
        "family": "Qwen2ForCausalLM",
        "parameters": 494_032_768,
        "context": 32_768,
        "vocab_size": 151_936,
        "layers": 24,
        "hidden": 896,
        "source_dtype": "bfloat16",
        "chat_template": True,
        "licence": "Apache-2.0",
        "disk_bytes": 988_100_000,
        "sizes": sizes,
        "memory_bytes": {4096: 420_000_000, 32_768: 640_000_000},
        "problems": (),
    }
    return api.ModelReport(**{**values, **changes})


class ScriptedApi:
    """Stands in for the module `engine.api`."""

    Delta, Done, Failed, Loaded, Message, Progress, Request, Started = (
        api.Delta,
        api.Done,
        api.Failed,
        api.Loaded,
        api.Message,
        api.Progress,
        api.Request,
        api.Started,
    )

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokens: Sequence[str] = ("Hello", ", ", "world", ".")
        self.token_s = 0.0  # between tokens
        self.prefill_steps = 0  # of 128 tokens and `step_s` each
        self.load_steps = 2
        self.step_s = 0.0
        self.prompt_tokens = 57
        self.reason: api.FinishReason = "stop"
        self.failure = ""  # of the next answer
        self.load_failure = ""
        self.load_kind = "FileDamagedError"
        self.model = MODEL
        self.starter: Path | None = None
        self.library: list[api.LibraryModel] = []
        self.reports: Callable[[Path], api.ModelReport] = report
        self.convert_steps = 10
        self.convert_failure = ""
        self.import_s = 0.0
        self.dropped: tuple[int, ...] = ()  # messages that do not fit the context
        self.damage = ""  # what `verify` finds
        self.benches: list[Path] = []
        self.compared: list[tuple[Path, Path]] = []
        self.requests: list[api.Request] = []
        self.loads: list[tuple[Path, EngineSettings]] = []
        self.conversions: list[tuple[Path, Path, Conversion, bool]] = []
        self.hold = threading.Event()  # cleared: answers wait before their first token
        self.hold.set()
        self.engine: ScriptedEngine | None = None

    def __call__(self) -> ScriptedApi:
        """As the factory of a window."""
        time.sleep(self.import_s)
        return self

    def Engine(self) -> ScriptedEngine:  # noqa: N802 (a class in the real module)
        self.engine = ScriptedEngine(self)
        return self.engine

    def library_models(self, *, broken: bool = False) -> tuple[api.LibraryModel, ...]:
        return tuple(model for model in self.library if model.path.exists() and (broken or not model.problem))

    def library_folder(self) -> Path:
        return self.folder

    def starter_path(self) -> Path | None:
        return self.starter

    def add_model(self, name: str = "Qwen2.5 Coder 0.5B Instruct", size: int = 318_000_000) -> Path:
        path = self.folder / f"{name}.nook"
        path.write_bytes(b"nook")
        self.library.append(
            api.LibraryModel(path, name, "Qwen2ForCausalLM", "int4, group 32", size, 494_032_768, 32_768)
        )
        return path

    def diagnose(self, *, benchmark: bool = False) -> dict[str, Any]:
        """A computer with one thing to say about each fact."""
        facts: dict[str, Any] = {
            "system": "Linux 6.1",
            "python": "3.11.7",
            "cpu": {
                "name": "Toy Processor 5600",
                "architecture": "x86-64",
                "tiers": ["generic", "avx2"],
                "tier_reason": "this processor has no avxvnni",
                "physical_cores": 6,
                "allowed_cores": 4,
                "fast_cores": 6,
                "cpu_quota": None,
                "numa_nodes": 1,
                "default_threads": 4,
            },
            "memory": {"total_bytes": 16_000_000_000, "free_bytes": 9_000_000_000, "limit_bytes": None},
        }
        if benchmark:
            facts["benchmark"] = {
                "read_bandwidth_gb_per_s": 11.2,
                "forecast_tps": {"1.5 billion parameters, int4": 13.3, "7 billion parameters, int4": 2.8},
            }
        return facts

    def verify(self, path: Path) -> Iterator[api.Progress]:
        for step in range(4):
            yield api.Progress("verify", step, 4, "bytes")
        if self.damage:
            raise FileDamagedError(self.damage)

    def bench(self, path: Path, **_sizes: Any) -> Iterator[api.Progress | dict[str, Any]]:
        self.benches.append(path)
        yield api.Progress("measure", 1, 2)
        profile = {
            step: [
                {"operation": operation, "layer": layer, "seconds": seconds * (1 + layer % 5 / 9)}
                for layer in range(24)
                for operation, seconds in times
            ]
            for step, times in _TIMES.items()
        }
        yield {"decode_tps": 27.4, "prefill_tps": 210.0, "ttft_s": 0.4, "threads": 4, "tier": "avx2",
               "prompt_tokens": 256, "profile": profile}  # fmt: skip

    def fidelity(self, path: Path, against: Path) -> Iterator[api.Progress | dict[str, Any]]:
        self.compared.append((path, against))
        yield api.Progress("measure", 1, 2, "layers")
        if self.damage:
            raise FileDamagedError(self.damage)
        self.library = [replace(model, grade="B") if model.path == path else model for model in self.library]
        yield {"grade": "B", "meaning": "words differ now and then, what is said stays the same", "kl_mean": 0.052,
               "kl_99": 0.9, "top1_agreement": 0.914, "perplexity": 21.4, "perplexity_source": 20.79,
               "layers": [{"states": 0.02 + number / 400, "weights": 0.05, "worst": "attention.out"}
                          for number in range(24)]}  # fmt: skip

    def autotune(self, _path: Path, **_settings: Any) -> Iterator[api.Progress | dict[str, Any]]:
        yield api.Progress("measure", 1, 2)
        yield {"threads": 3, "pinned": True}

    def inspect(self, path: Path | str, *, tensors: bool = False) -> api.ModelReport:
        del tensors
        if not Path(path).exists():
            raise InputError(f"{path} does not exist")
        return self.reports(Path(path))

    def convert(
        self, source: Path, out: Path, conversion: Conversion, *, resume: bool = False
    ) -> Iterator[api.Progress]:
        self.conversions.append((source, out, conversion, resume))
        total = 988_100_000
        for step in range(self.convert_steps):
            done = total * step // self.convert_steps
            eta = (self.convert_steps - step) * self.step_s
            yield api.Progress("convert", done, total, "bytes", eta_s=eta)
            time.sleep(self.step_s)
            if self.convert_failure and step > 1:
                raise InputError(self.convert_failure)
        out.write_bytes(b"nook")
        self.library.append(
            api.LibraryModel(out, out.stem, "Qwen2ForCausalLM", "int4, group 32", 318_000_000, 494_032_768, 32_768)
        )


def _logprobs(number: int, token: str) -> tuple[api.TokenLogprob, ...]:
    """The token, likely or not so likely by turns, and a rival."""
    own = -0.05 - 0.7 * (number % 4)
    return (api.TokenLogprob(number, token.encode(), own, ((number, token.encode(), own), (99, b" other", own - 0.4))),)


class ScriptedEngine:
    """Stands in for `engine.api.Engine`."""

    def __init__(self, script: ScriptedApi) -> None:
        self._script = script
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._running: dict[str, Iterator[None]] = {}
        self._cancelled: set[str] = set()
        self._load_cancelled = threading.Event()
        self.closed = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def load(self, path: Path | str, settings: EngineSettings, sink: Callable[[Any], None]) -> None:
        self._script.loads.append((Path(path), settings))
        self._load_cancelled.set()  # the load before ends as cancelled
        cancelled = self._load_cancelled = threading.Event()

        def job() -> None:
            script = self._script
            for step in range(script.load_steps):
                sink(api.Progress("load", step * 100 // script.load_steps, 100, "bytes"))
                if cancelled.wait(script.step_s) or self.closed:
                    sink(api.Failed(None, "Loading was cancelled.", "Cancelled"))
                    return
            if script.load_failure:
                sink(api.Failed(None, script.load_failure, script.load_kind))
            else:
                sink(api.Loaded(script.model))

        self._inbox.put(job)

    def cancel_load(self) -> None:
        self._load_cancelled.set()

    def unload(self) -> None:
        self._inbox.put(lambda: None)

    def submit(self, request: api.Request, sink: Callable[[Any], None]) -> None:
        self._script.requests.append(request)
        self._inbox.put(lambda: self._running.update({request.id: self._answer(request, sink)}))

    def cancel(self, request_id: str) -> None:
        self._cancelled.add(request_id)

    def prompt_tokens(self, request: api.Request, sink: Callable[[tuple[api.PromptToken, ...]], None]) -> None:
        assert not isinstance(request.prompt, str)
        words = [api.PromptToken(1, b"<|im_start|>", control=True)]
        for message in request.prompt:
            assert isinstance(message, api.Message)
            words += [api.PromptToken(2, f"{word} ".encode(), control=False) for word in message.content.split()]
        self._inbox.put(lambda: sink(tuple(words)))

    def count_tokens(self, messages: Sequence[api.Message], sink: Callable[[int], None]) -> None:
        self._inbox.put(lambda: sink(sum(len(message.content) // 4 + 5 for message in messages)))

    def close(self) -> None:
        self.closed = True
        self._load_cancelled.set()
        self._inbox.put(None)
        self._thread.join(3)

    def _answer(self, request: api.Request, sink: Callable[[Any], None]) -> Iterator[None]:
        script = self._script
        identity = request.id
        total = max(script.prompt_tokens, script.prefill_steps * 128)
        begin = time.monotonic()
        sink(api.Started(identity, total, 0))
        said: list[str] = []

        def done(reason: api.FinishReason) -> None:
            decode_s = time.monotonic() - begin
            usage = api.Usage(total, 0, len(said), 0.0, 0.1, decode_s)
            sink(api.Done(identity, reason, "".join(said), usage))

        if script.dropped and request.overflow != "stop":
            sink(api.ContextCut(identity, request.overflow, script.dropped))
        for step in range(script.prefill_steps):
            eta = (script.prefill_steps - step) * script.step_s
            sink(api.Progress("prefill", step * 128, total, "tokens", "", identity, eta))
            yield from self._wait(identity, script.step_s)
            if identity in self._cancelled:
                done("cancelled")
                return
        while not script.hold.is_set() and identity not in self._cancelled:
            yield from self._wait(identity, 0.005)
        begin = time.monotonic()
        for number, token in enumerate(script.tokens):
            if identity in self._cancelled:
                done("cancelled")
                return
            if script.failure and number == len(script.tokens) // 2:
                sink(api.Failed(identity, script.failure, "InternalError"))
                return
            said.append(token)
            sink(api.Delta(identity, token, (number,), _logprobs(number, token) if request.logprobs else ()))
            yield from self._wait(identity, script.token_s)
        done("cancelled" if identity in self._cancelled else script.reason)

    def _wait(self, identity: str, seconds: float) -> Iterator[None]:
        until = time.monotonic() + seconds
        while time.monotonic() < until and identity not in self._cancelled:
            yield
            time.sleep(min(0.002, seconds))
        yield

    def _work(self) -> None:
        while not self.closed:
            try:
                job = self._inbox.get(timeout=None if not self._running else 0.0001)
            except Empty:
                job = lambda: None  # noqa: E731
            if job is None:
                return
            job()
            for identity, answer in list(self._running.items()):
                if next(answer, ...) is ...:
                    self._running.pop(identity)
