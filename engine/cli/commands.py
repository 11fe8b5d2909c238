"""The commands. Each turns arguments into one call of the engine's face and its result into text or JSON."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from engine import __version__, api
from engine.api import ModelReport
from engine.cli.flags import whole_number, with_settings
from engine.cli.output import count_text, follow, note, size_text, table, write, write_json
from engine.cli.talk import Session, answer_once, argument_text, converse, read_prompt
from engine.errors import InputError, ResourceError
from engine.settings import Conversion, EngineSettings, Sampling, ServerSettings

__all__ = ["app"]

Json = Annotated[
    bool, Parameter(name="--json", negative=(), show_default=False, help="Print one JSON object instead of text.")
]
ModelName = Annotated[
    str,
    Parameter(help="A .nook file, a name of the library, a GGUF file, a Hugging Face folder, or `starter`."),
]


_OF_MANY = ("max_batch_size", "scheduling", "prompt_slice_ms", "most_requests", "most_of_client")
"""Settings that mean something where several requests meet only."""
_OF_ANSWERS = ("speculation", "draft", "draft_tokens", "snapshot_mb", "most_request_tokens")

OnOverflow = Annotated[
    api.Overflow,
    Parameter(
        name="--overflow",
        help="What happens to a conversation longer than the context: stop refuses it and ends a full answer, rolling "
        "leaves out the oldest turns, middle the middle, summarise puts a summary in their place.",
    ),
]


def _no_mistyped_option(_hint: Any, prompt: str) -> None:
    if re.fullmatch(r"--?[A-Za-z][\w-]*(=.*)?", prompt):
        raise ValueError("It looks like an option; a prompt like that can come by standard input (-).")


app = App(
    name="inglenook",
    help="Chat with language models on this computer, without a graphics card or a network. "
    "Without arguments the window opens.",
    version=f"inglenook {__version__}",
    version_flags=["--version"],
    default_parameter=Parameter(negative_iterable=()),
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
)
library = App(name="models", help="List the converted models in the library, remove one, or show where one lies.")
app.command(library)


@app.command
def inspect(
    path: Annotated[str, Parameter(help="A model folder, a GGUF file or a .nook file.")],
    /,
    *,
    tensors: Annotated[bool, Parameter(negative=(), show_default=False, help="List every tensor too.")] = False,
    as_json: Json = False,
) -> int:
    """Say what a model is, what converting it costs and what is wrong with it, without reading its weights."""
    report = api.inspect(path, tensors=tensors)
    if as_json:
        write_json(report.to_json())
    else:
        write(_report_text(report))
    return 0 if report.usable else InputError.exit_code


@app.command
@with_settings()
def convert(
    source: Annotated[str, Parameter(help="A Hugging Face folder or a GGUF file; it is only read.")],
    /,
    *,
    out: Annotated[str, Parameter(name=["--out", "-o"], help="The .nook file to make.")],
    resume: Annotated[
        bool, Parameter(negative=(), show_default=False, help="Go on where an interrupted conversion stopped.")
    ] = False,
    as_json: Json = False,
    conversion: Conversion,
) -> None:
    """Convert a model folder into one .nook file."""
    began_s = time.monotonic()
    follow(api.convert(source, out, conversion, resume=resume))
    report = api.inspect(out)
    seconds = time.monotonic() - began_s
    notices = [problem.sentence for problem in report.problems]
    if as_json:
        write_json(
            {
                "path": str(report.path),
                "bytes": report.disk_bytes,
                "format": report.source_dtype,
                "seconds": round(seconds, 3),
                "notices": notices,
            }
        )
    else:
        write(f"{out}: {report.name}, {report.source_dtype}, {size_text(report.disk_bytes)}, made in {seconds:.0f} s\n")
    for notice in notices:
        note(notice)


@app.command
def verify(
    file: Annotated[str, Parameter(help="A .nook file.")],
    /,
    *,
    as_json: Json = False,
) -> None:
    """Check every byte of a .nook file; a damaged tensor is named."""
    follow(api.verify(file))
    if as_json:
        write_json({"path": file, "intact": True})
    else:
        write(f"{file}: every byte is as it was written\n")


@app.command
def split(
    model: Annotated[str, Parameter(help="A .nook file, a name of the library, a GGUF file or a model folder.")],
    /,
    *,
    out: Annotated[str, Parameter(name=["--out", "-o"], help="The folder for the parts, on a stick for example.")],
    part_mb: Annotated[
        int, Parameter(converter=whole_number, help="The most a part may have, in millions of bytes.")
    ] = 4000,
    as_json: Json = False,
) -> None:
    """Cut a model into parts that fit on a FAT32 stick. Started again after an interruption, it goes on."""
    made = follow(api.split(model, out, part_mb=part_mb))
    if as_json:
        write_json({"path": str(made)})
    else:
        write(f"{made}: join the parts with `inglenook join {out}`\n")


@app.command
def join(
    parts: Annotated[str, Parameter(help="The folder of the parts.")],
    /,
    *,
    out: Annotated[
        str | None, Parameter(name=["--out", "-o"], help="A folder or a new path; the library without it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a model of its parts, checking each. Started again, also when further parts have come, it goes on."""
    made = follow(api.join(parts, out))
    if as_json:
        write_json({"path": str(made)})
    else:
        write(f"{made}: every part is as it was written\n")


@app.command
def fidelity(
    file: Annotated[str, Parameter(help="A .nook file.")],
    /,
    *,
    against: Annotated[str, Parameter(help="The folder or GGUF file that it was made from.")],
    text: Annotated[str, Parameter(show_default=False, help="A UTF-8 text file to compare by; one is built in.")] = "",
    keep: Annotated[bool, Parameter(help="Also write the result into the file.")] = True,
    as_json: Json = False,
) -> None:
    """Measure how much of its source a .nook file still is, and give it a grade from A to D."""
    result = follow(api.fidelity(file, against, text=text, keep=keep)) or {}
    if as_json:
        write_json(result)
    else:
        write(_fidelity_text(result))


@app.command
@with_settings(without=[*_OF_MANY, *_OF_ANSWERS])
def perplexity(
    model: ModelName,
    text: Annotated[str, Parameter(help="A UTF-8 text file.")],
    /,
    *,
    context: Annotated[
        int | None,
        Parameter(converter=whole_number, help="Tokens the model sees at a time: 512 or the model's context."),
    ] = None,
    as_json: Json = False,
    engine: EngineSettings,
) -> None:
    """Measure how well a model foresees a text; lower is better."""
    result = follow(api.perplexity(model, _read_text(text), context=context, settings=engine)) or {}
    if as_json:
        write_json(result)
    else:
        write(f"perplexity {result['perplexity']:.4f} over {result['tokens']:,} tokens\n")
        if left_out := result["tokens_left_out"]:
            note(f"the last {left_out:,} tokens of the text fill no window of {result['context']:,} and were left out")


@app.command
@with_settings(without=_OF_MANY)
def run(
    model: ModelName,
    prompt: Annotated[
        str,
        Parameter(
            help="What to ask; - reads standard input.", allow_leading_hyphen=True, validator=_no_mistyped_option
        ),
    ],
    /,
    *,
    raw: Annotated[
        bool, Parameter(negative=(), show_default=False, help="Give the prompt to the model without its chat template.")
    ] = False,
    system: Annotated[str | None, Parameter(help="Instruction before the prompt.")] = None,
    stream: Annotated[bool, Parameter(name="--stream", show_default=False, help="Write the text as it comes.")] = True,
    overflow: OnOverflow = "stop",
    as_json: Json = False,
    sampling: Sampling,
    engine: EngineSettings,
) -> None:
    """Answer one prompt."""
    question = read_prompt(prompt)
    instruction = None if system is None else argument_text(system)
    with Session(model, engine, overflow) as session:
        answer_once(session, question, sampling, raw=raw, system=instruction, stream=stream, as_json=as_json)


@app.command
@with_settings(without=_OF_MANY)
def chat(
    model: ModelName,
    /,
    *,
    system: Annotated[str | None, Parameter(help="Instruction before the conversation.")] = None,
    overflow: OnOverflow = "rolling",
    sampling: Sampling,
    engine: EngineSettings,
) -> None:
    """Talk with a model, line by line. /help lists what else can be typed."""
    with Session(model, engine, overflow) as session:
        converse(session, sampling, system=None if system is None else argument_text(system))


@app.command
@with_settings(without=[*_OF_MANY, "snapshot_mb", "most_request_tokens"])
def bench(
    model: ModelName,
    /,
    *,
    prompt_tokens: Annotated[
        int | None, Parameter(converter=whole_number, help="Length of the prompt that is timed (512 if they fit).")
    ] = None,
    gen_tokens: Annotated[
        int | None, Parameter(converter=whole_number, help="Tokens generated after it (128 if they fit).")
    ] = None,
    depth: Annotated[
        int | None,
        Parameter(
            converter=whole_number, help="Tokens already in the context when decoding is timed (32 if they fit)."
        ),
    ] = None,
    batch: Annotated[int, Parameter(converter=whole_number, help="Answers computed together for the batch speed.")] = 8,
    repeat: Annotated[int, Parameter(converter=whole_number, help="Runs; the median is reported.")] = 3,
    profile: Annotated[
        bool, Parameter(negative=(), show_default=False, help="Also time every operation and layer of a step.")
    ] = False,
    as_json: Json = False,
    engine: EngineSettings,
) -> None:
    """Measure the speed of a model on this computer."""
    work = api.bench(
        model,
        settings=engine,
        prompt_tokens=prompt_tokens,
        gen_tokens=gen_tokens,
        depth=depth,
        batch=batch,
        repeat=repeat,
        profile=profile,
    )
    result = follow(work) or {}
    if as_json:
        write_json(result)
    else:
        write(_bench_text(result))
        for step, times in result.get("profile", {}).items():
            write(f"\n{step}\n" + _profile_text(times))


@app.command
@with_settings()
def serve(
    *models: Annotated[
        str, Parameter(help="What to serve, each as NAME=MODEL or a MODEL by its own name; nothing serves the library.")
    ],
    server: ServerSettings,
    engine: EngineSettings,
) -> None:
    """Answer over HTTP in OpenAI's protocol until Ctrl+C. Models after the first are loaded when first asked for."""
    from engine.server.hub import named_models
    from engine.server.serve import Server

    names = models or tuple(str(model.path) for model in api.library_models())
    if not names:
        raise InputError("there is no model to serve; name one, or convert one into the library")
    serving = Server(named_models(names), engine, server)
    note(f"Loading {next(iter(serving.models))}")
    serving.run(lambda: note(f"Serving {', '.join(serving.models)} at {serving.url}/v1 (Ctrl+C stops)"), note)


@app.command
@with_settings()
def batch(
    file: Annotated[str, Parameter(help="Requests, one JSON object a line, as OpenAI's batch files have them.")],
    /,
    *,
    model: Annotated[str | None, Parameter(help="Answers all of them; without it, each names its own.")] = None,
    out: Annotated[
        str | None, Parameter(name=["--out", "-o"], help="Where the answers go: FILE with .answers before its ending.")
    ] = None,
    as_json: Json = False,
    engine: EngineSettings,
) -> None:
    """Answer a file of requests together. Started again after an interruption, it goes on."""
    from engine.server.batch import BatchResult, run_batch

    source = Path(file)
    target = source.with_name(f"{source.stem}.answers{source.suffix}") if out is None else Path(out)
    result = follow(run_batch(source, target, model=model, settings=engine, warn=note))
    assert isinstance(result, BatchResult)
    if as_json:
        write_json({"out": str(result.out), "lines": result.lines, "failed": result.failed, "kept": result.kept})
        return
    write(f"{result.out}: {result.lines} answers, {result.kept} of them from before\n")
    if result.failed:
        note(f"{result.failed} requests could not be answered; their lines say why")


@app.command
def diagnose(
    *,
    benchmark: Annotated[
        bool, Parameter(negative=(), show_default=False, help="Measure the memory bandwidth too; takes seconds.")
    ] = False,
    autotune: Annotated[
        bool,
        Parameter(negative=(), show_default=False, help="Find and remember the best number of threads; ten seconds."),
    ] = False,
    network: Annotated[
        bool,
        Parameter(
            negative=(),
            show_default=False,
            help="Let a model answer and watch for network connections; exit code 1 if anything leaves this computer.",
        ),
    ] = False,
    model: Annotated[str, Parameter(help="The model that --autotune and --network work with.")] = api.STARTER,
    as_json: Json = False,
) -> int:
    """Say what this computer offers the engine."""
    findings = api.diagnose(benchmark=benchmark)
    if network:
        findings["network"] = follow(api.network(model)) or {}
    if autotune:
        findings["autotune"] = follow(api.autotune(model)) or {}
    if as_json:
        write_json(findings)
    else:
        write(table(list(_flat(findings))))
    return 0 if findings.get("network", {}).get("offline", True) else ResourceError.exit_code


@library.default
@library.command(name="list")
def list_models(*, as_json: Json = False) -> None:
    """List the converted models in the library."""
    files = api.library_models(broken=True)
    models = [model for model in files if not model.problem]
    broken = [model for model in files if model.problem]
    if as_json:
        write_json(
            {
                "folder": str(api.library_folder()),
                "models": [
                    {
                        "name": model.name,
                        "path": str(model.path),
                        "family": model.family,
                        "format": model.format,
                        "parameters": model.parameters,
                        "context": model.context,
                        "disk_bytes": model.disk_bytes,
                    }
                    for model in models
                ],
                "broken": [{"name": model.name, "path": str(model.path), "problem": model.problem} for model in broken],
            }
        )
        return
    if models:
        rows = [("name", "format", "size", "context", "file")]
        rows += [
            (model.name, model.format, size_text(model.disk_bytes), f"{model.context:,}", str(model.path))
            for model in models
        ]
        write(table(rows))
    elif not broken:
        folder = api.library_folder()
        note(f"No model in {folder} yet: `inglenook convert FOLDER -o {folder / 'NAME.nook'}`")
    for model in broken:
        note(f"{model.name} cannot be used: {model.problem}; `inglenook models remove` deletes it")


@library.command(name="remove")
def remove_model(
    name: Annotated[str, Parameter(help="A name that `inglenook models` lists.")],
    /,
    *,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative=(), show_default=False, help="Do not ask.")] = False,
) -> int:
    """Delete a model of the library from disk. The folder it was made from stays."""
    model = _library_file(name)
    path = model.path
    if not yes:
        if not sys.stdin.isatty():
            raise InputError(f"removing {name} needs --yes when nobody can be asked")
        note(f"Delete {path} ({size_text(model.disk_bytes)})? [y/N]")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            note("Kept.")
            return 1
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ResourceError(f"{path} cannot be deleted: {error.strerror or error}") from None
    write(f"{path} removed\n")
    return 0


@library.command(name="reveal")
def reveal_model(
    name: Annotated[
        str | None, Parameter(help="A name that `inglenook models` lists; without it, the library.")
    ] = None,
    /,
) -> None:
    """Print where a model lies, and show it in the file manager when there is a screen."""
    path = api.library_folder() if name is None else _library_file(name).path
    write(f"{path}\n")
    _show_in_file_manager(path)


def _library_file(name: str) -> api.LibraryModel:
    known = {model.name: model for model in api.library_models(broken=True)}
    if name not in known:
        names = ", ".join(sorted(known)) or "it is empty"
        raise InputError(f"{name} is not in the library ({names})")
    return known[name]


def _show_in_file_manager(path: Path) -> None:
    folder = path if path.is_dir() else path.parent
    match sys.platform:
        case "win32":
            command = ["explorer", str(path) if path.is_dir() else f"/select,{path}"]
        case "darwin":
            command = ["open", str(path)] if path.is_dir() else ["open", "-R", str(path)]
        case _:
            command = ["xdg-open", str(folder)]
    if sys.stdout.isatty():
        # The path is printed; a machine without a file manager has nothing more to offer.
        with suppress(OSError):
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)  # noqa: S603


def _read_text(path: str) -> str:
    """The whole of a text file.

    Raises:
        InputError: it cannot be read, or is not UTF-8
    """
    if not path:
        raise InputError("the path of the text is empty; name a UTF-8 text file")
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (at byte {error.start}); convert it first") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _report_text(report: ModelReport) -> str:
    facts = [
        ("family", report.family or "unknown"),
        ("parameters", f"{count_text(report.parameters)} in {report.layers} layers of width {report.hidden:,}"),
        ("context", f"{report.context:,} tokens"),
        ("vocabulary", f"{report.vocab_size:,} tokens"),
        ("stored as", f"{report.source_dtype}, {size_text(report.disk_bytes)}"),
        ("chat template", "yes" if report.chat_template else "no"),
        ("licence", report.licence or "not stated"),
    ]
    text = f"{report.name}: {report.path}\n\n{table(facts)}"
    if report.sizes:
        rows = [
            (
                size.label,
                size_text(size.file_bytes),
                f"{size.bits_per_weight:.2f}",
                f"about {max(1, round(size.seconds))} s",
            )
            for size in report.sizes
        ]
        text += "\n" + table([("converted to", "file", "bits per weight", "takes"), *rows])
    if report.memory_bytes:
        heading = f"memory to run as {report.sizes[0].label}" if report.sizes else "memory to run"
        needs = [(f"{context:,}", size_text(needed), "") for context, needed in sorted(report.memory_bytes.items())]
        text += "\n" + table([("context", heading, ""), *needs])
    if report.tensors:
        tensors = [
            (tensor.name, tensor.dtype, " x ".join(map(str, tensor.shape)), size_text(tensor.bytes))
            for tensor in report.tensors
        ]
        text += "\n" + table([("tensor", "type", "shape", "size"), *tensors])
    if report.problems:
        problems = [("ERROR" if problem.fatal else "note", problem.sentence) for problem in report.problems]
        text += "\n" + table(problems)
    return text


def _fidelity_text(result: dict[str, Any]) -> str:
    rows = [
        ("grade", f"{result['grade']}: {result['meaning']}"),
        ("divergence", f"{result['kl_mean']:.4f} nats on average, {result['kl_99']:.4f} at most in 99 % of tokens"),
        ("same likeliest word", f"{100 * result['top1_agreement']:.1f} % of {result['tokens']:,} tokens"),
        ("perplexity", f"{result['perplexity']:.3f}, of the source {result['perplexity_source']:.3f}"),
    ]
    layers = [("worst layers", "weights lost", "worst tensor", "states off")]
    for number in result["worst_layers"]:
        layer = result["layers"][number]
        layers.append(
            (str(number), f"{100 * layer['weights']:.2f} %", layer["worst"], f"{100 * layer['states']:.2f} %")
        )
    return table(rows) + "\n" + table(layers)


def _bench_text(result: dict[str, Any]) -> str:
    rows = [
        ("decode", f"{result['decode_tps']:.1f} tokens per second"),
        ("prefill", f"{result['prefill_tps']:.1f} tokens per second"),
        ("together", f"{result['batch_tps']:.1f} tokens per second"),
        ("first token", f"{result['ttft_s']:.3f} s"),
        ("load", f"{result['load_s']:.2f} s"),
        ("memory", f"{size_text(result['peak_rss_bytes'])} at most"),
        ("with", f"{result['threads']} threads, {result['tier']}, KV {result['kv_dtype']}"),
    ]
    if "copy_tps" in result:
        plain, steps = result["copy_plain_tps"], result["copy_tokens_per_step"]
        gain = f"{plain:.1f} without guesses, {steps:.2f} tokens per step"
        rows.append(("copying", f"{result['copy_tps']:.1f} tokens per second ({gain})"))
    return table(rows)


def _profile_text(times: list[dict[str, Any]]) -> str:
    """The times of a step's operations by kind, and by layer."""
    total = sum(one["seconds"] for one in times)

    def rows(key: str) -> list[tuple[str, ...]]:
        sums: dict[Any, list[float]] = {}
        for one in times:
            sums.setdefault(one[key], []).append(one["seconds"])
        named = [("outside" if name is None else str(name), spent) for name, spent in sums.items()]
        return [
            (name, f"{1e3 * sum(spent):.3f} ms", f"{100 * sum(spent) / total:.1f} %", str(len(spent)))
            for name, spent in named
        ]

    heading = ("time", "share", "operations")
    return table([("operation", *heading), *rows("operation"), ("layer", *heading), *rows("layer")])


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested findings as (dotted name, text) rows."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            rows += _flat(value, f"{name}.")
        elif key.endswith("bytes") and isinstance(value, int):
            rows.append((name, size_text(value)))
        else:
            rows.append((name, _finding_text(value)))
    return rows


def _finding_text(value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.2f}"
        case list() | tuple():
            return ", ".join(map(_finding_text, value)) or "none"
        case dict():
            return " ".join(f"{key}={_finding_text(item)}" for key, item in value.items())
        case _:
            return str(value)
