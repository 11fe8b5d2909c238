"""The command line: what it asks of the engine, what it writes where, how it ends."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App
from pydantic import BaseModel

from engine import api
from engine.cli import main
from engine.cli.commands import _OF_MANY, app
from engine.cli.flags import overlay
from engine.cli.output import ProgressView, count_text, size_text, table
from engine.progress import Progress
from engine.settings import Conversion, EngineSettings, Sampling
from tests import fake_engine
from tests.fake_engine import DEFAULTS, FakeEngine

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.out.count("\n") == 1, "one object, one line"
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "模型 library"
    folder.mkdir()
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], library: Path) -> Run:
    """Run the command line in this process with the scripted engine."""
    for name in api.__all__:
        monkeypatch.setattr(api, name, getattr(api, name))  # remembers it: whatever is put in its place is undone
    fake_engine.install(library)
    monkeypatch.setattr(api, "log_folder", lambda: library)

    def call(*arguments: str, stdin: str | bytes = "") -> Result:
        raw = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        code = main(arguments)
        return Result(code, *capfd.readouterr())

    return call


def program(
    *arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[bytes]:
    """Run the command line with the scripted engine as a program of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tests.fake_engine", *arguments],
        cwd=ROOT,
        check=False,
        input=stdin,
        capture_output=True,
        timeout=60,
        env={**os.environ, **(env or {})},
        **options,
    )


# --- settings become flags ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "model"), [("run", Sampling), ("run", EngineSettings), ("chat", Sampling), ("convert", Conversion)]
)
def test_every_setting_is_a_flag_with_its_description(run: Run, command: str, model: type[BaseModel]) -> None:
    shown = re.sub(r"[\s│]+", " ", run(command, "--help").out)
    for name, field in model.model_fields.items():
        if name in _OF_MANY:
            assert f"--{name.replace('_', '-')}" not in shown  # one answer at a time here
            continue
        assert f"--{name.replace('_', '-')}" in shown
        assert str(field.description).replace("`", "") in shown


def test_only_the_flags_given_reach_the_engine(run: Run) -> None:
    assert run("run", "toy", "hello", "--top-p", "0.5", "--seed", "-1", "--stop", "a", "--stop", "b").code == 0
    (request,) = FakeEngine.requests
    assert request.sampling == overlay(DEFAULTS, Sampling(top_p=0.5, seed=-1, stop=("a", "b")))
    assert request.sampling.temperature == DEFAULTS.temperature


def test_engine_settings_reach_the_engine(run: Run) -> None:
    flags = ["--threads", "2", "--context", "128", "--kv", "f16", "--tier", "generic", "--load", "resident"]
    assert run("run", "toy", "hello", *flags).code == 0
    expected = EngineSettings(threads=2, context=128, kv="f16", tier="generic", load="resident")
    assert FakeEngine.loads == [("toy", expected)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "toy", "hi", "--temperature", "2.5"], "temperature must be between 0 and 2, not 2.5"),
        (["run", "toy", "hi", "--temperature", "nan"], "temperature must be between 0 and 2, not nan"),
        (["run", "toy", "hi", "--top-k", "3.5"], "3.5 is not a whole number"),
        (["run", "toy", "hi", "--top-k", "-3"], "top_k must be between 0 and 1000, not -3"),
        (["run", "toy", "hi", "--kv", "f8"], "--kv"),
        (["run", "toy", "hi", "--temperatur", "1"], "Did you mean --temperature?"),
        (["run", "toy", "hi", "there"], "nothing expects there"),
        (["run", "toy"], "PROMPT"),
        (["run", "toy", "--temperatur", "1"], "looks like an option"),
        (["run", "toy", "--jsn"], "looks like an option"),
        (["run", "toy", "hi", "--max-batch-size", "2"], "--max-batch-size"),
        (["run", "toy", "hi", "--raw", "--system", "s"], "--raw"),
        (["convert", "toy"], "--out"),
        (["convert", "toy", "-o", "x", "--bits", "5"], "Choose from: 4, 8, 16"),
        (["convert", "toy", "-o", "x", "--group-size", "48"], "--group-size"),
        (["bench", "toy", "--repeat", "1.5"], "1.5 is not a whole number"),
        (["rum", "toy", "hi"], 'Did you mean "run"?'),
        (["models", "forget"], "forget"),
    ],
)
def test_bad_usage_ends_with_2_and_one_sentence(run: Run, arguments: list[str], sentence: str) -> None:
    result = run(*arguments)
    assert result.code == 2
    assert sentence in result.err
    assert result.err.startswith("inglenook: ")
    assert result.err.count("\n") == 1
    assert result.out == ""
    assert not FakeEngine.requests


# --- run ---------------------------------------------------------------------------------------------------------


def test_run_writes_the_answer_alone_to_stdout(run: Run) -> None:
    result = run("run", "toy", "a b c")
    assert (result.code, result.out) == (0, "ABC\n")
    assert FakeEngine.closed == 1
    assert FakeEngine.requests[0].prompt == (api.Message("user", "a b c"),)


def test_streamed_and_whole_answers_are_equal(run: Run) -> None:
    streamed, whole = run("run", "toy", "a b c"), run("run", "toy", "a b c", "--no-stream")
    assert streamed.out == whole.out
    assert [request.stream for request in FakeEngine.requests] == [True, False]


def test_run_raw_sends_the_text_itself(run: Run) -> None:
    assert run("run", "toy", "a\n", "--raw").out == "A\n"
    assert FakeEngine.requests[0].prompt == "a\n"


def test_run_with_a_system_message(run: Run) -> None:
    run("run", "toy", "hi", "--system", "be brief")
    assert FakeEngine.requests[0].prompt == (api.Message("system", "be brief"), api.Message("user", "hi"))


@pytest.mark.parametrize("stdin", ["早上好\n", b"\xef\xbb\xbf" + "早上好\n".encode()])
def test_run_reads_the_prompt_from_standard_input(run: Run, stdin: str | bytes) -> None:
    assert run("run", "toy", "-", stdin=stdin).code == 0
    assert FakeEngine.requests[0].prompt == (api.Message("user", "早上好\n"),)


def test_input_that_is_not_utf8_is_refused(run: Run) -> None:
    result = run("run", "toy", "-", stdin="早上好".encode("gbk"))
    assert result.code == 2
    assert "not UTF-8" in result.err


def test_a_prompt_may_begin_with_a_hyphen(run: Run) -> None:
    assert run("run", "toy", "- a\n- b").out == "-A\n-B\n"
    assert run("run", "toy", "-5 + 3").out == "-5+3\n"
    assert run("run", "toy", "--", "--help me").out == "--HELPME\n"


def test_run_json_is_one_object(run: Run) -> None:
    answer = run("run", "toy", "a b", "--json").json
    assert answer["text"] == "AB"
    assert answer["finish_reason"] == "stop"
    assert answer["token_ids"] == [1, 2, 3]
    assert answer["usage"]["decode_tps"] == pytest.approx(8.0)
    assert answer["usage"]["prefill_tps"] == pytest.approx(10.0)


def test_notices_go_to_stderr(run: Run) -> None:
    result = run("run", "notice", "hi")
    assert result.out == "HI\n"
    assert "a notice on loading" in result.err


@pytest.mark.parametrize(
    ("model", "prompt", "code", "sentence"),
    [
        ("broken", "hi", 2, "broken is broken"),
        ("toy", "overflow", 2, "needs 900 tokens"),
        ("toy", "fail", 1, "the engine tripped"),
    ],
)
def test_failures_of_the_engine_end_the_command(run: Run, model: str, prompt: str, code: int, sentence: str) -> None:
    result = run("run", model, prompt)
    assert result.code == code
    assert sentence in result.err
    assert "Traceback" not in result.err
    assert FakeEngine.closed == 1


# --- chat --------------------------------------------------------------------------------------------------------


def test_chat_keeps_the_history_until_it_is_reset(run: Run) -> None:
    lines = "one\n\ntwo\n/reset\nthree\n/system be brief\nfour\n/exit\nfive\n"
    result = run("chat", "toy", "--system", "hello", stdin=lines)
    assert (result.code, result.out) == (0, "ONE\nTWO\nTHREE\nFOUR\n")
    prompts = [[message.content for message in request.prompt] for request in FakeEngine.requests]  # type: ignore[union-attr]
    assert prompts == [
        ["hello", "one"],
        ["hello", "one", "ONE", "two"],
        ["hello", "three"],
        ["be brief", "four"],
    ]


def test_chat_goes_on_after_an_input_that_does_not_fit(run: Run) -> None:
    result = run("chat", "toy", stdin="one\noverflow\ntwo\n")
    assert (result.code, result.out) == (0, "ONE\nTWO\n")
    assert "needs 900 tokens" in result.err
    assert [message.content for message in FakeEngine.requests[-1].prompt] == ["one", "ONE", "two"]  # type: ignore[union-attr]


def test_chat_joins_lines_that_end_with_a_backslash(run: Run) -> None:
    run("chat", "toy", stdin="one\\\ntwo\n")
    assert FakeEngine.requests[0].prompt == (api.Message("user", "one\ntwo"),)


def test_chat_explains_unknown_commands_and_sends_paths(run: Run) -> None:
    result = run("chat", "toy", stdin="/helpme\n/help\n/etc/hosts is a file\n")
    assert "/helpme is not a command" in result.err
    assert "/reset" in result.err
    assert [request.prompt[-1].content for request in FakeEngine.requests] == ["/etc/hosts is a file"]  # type: ignore[union-attr]


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(run: Run) -> None:
    def interrupt() -> None:
        while not FakeEngine.requests:
            time.sleep(0.005)
        time.sleep(0.05)
        signal.raise_signal(signal.SIGINT)

    # The handler of SIGINT runs in the main thread, which waits for the engine then.
    other = threading.Thread(target=interrupt)
    other.start()
    result = run("chat", "toy", stdin="forever\ntwo\n")
    other.join()
    assert result.code == 0
    assert "(stopped)" in result.err
    assert result.out.endswith("\nTWO\n")
    history = [message.content for message in FakeEngine.requests[-1].prompt]  # type: ignore[union-attr]
    assert history[0] == "forever"
    assert history[1].startswith("again")
    assert history[2] == "two"


# --- the other commands ------------------------------------------------------------------------------------------


def test_inspect(run: Run) -> None:
    result = run("inspect", "toy")
    assert result.code == 0
    for fact in ("LlamaForCausalLM", "1.54 billion", "32,768", "int4, group 32", "986 MB", "apache-2.0"):
        assert fact in result.out
    assert "norm" not in result.out
    assert "norm" in run("inspect", "toy", "--tensors").out
    assert run("inspect", "toy", "--json").json["parameters"] == 1_543_714_304


def test_inspect_of_what_cannot_be_used_ends_with_2(run: Run) -> None:
    result = run("inspect", "bad")
    assert result.code == 2
    assert "shard 2 of 3 is missing" in result.out
    assert run("inspect", "bad", "--json").json["usable"] is False
    missing = run("inspect", "missing")
    assert (missing.code, missing.out) == (2, "")
    assert missing.err == "inglenook: missing does not exist\n"


def test_convert(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "a b.nook"
    result = run(
        "convert", "toy", "-o", str(out), "--bits", "8", "--keep", "head=f16", "--keep", "norm=f32", "--resume"
    )
    assert result.code == 0
    assert out.exists()
    assert "Converting 50 %" in result.err
    assert "toy 8 ('head=f16', 'norm=f32') True" in result.err
    assert run("convert", "toy", "-o", str(out), "--json").json["path"] == str(out)


def test_interrupted_conversion_leaves_nothing(run: Run, tmp_path: Path) -> None:
    result = run("convert", "interrupt", "-o", str(tmp_path / "out.nook"))
    assert result.code == 130
    assert list(tmp_path.glob("out*")) == []


def test_a_full_disk_is_one_sentence(run: Run, tmp_path: Path) -> None:
    result = run("convert", "full", "-o", str(tmp_path / "out.nook"))
    assert result.code == 1
    assert "No space left on device" in result.err
    assert "Traceback" not in result.err


def test_the_log_has_the_traceback_of_our_own_faults(run: Run, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> dict[str, Any]:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(api, "diagnose", broken)
    result = run("diagnose")
    log = library / "command-line.log"
    assert result.code == 1
    assert "a fault of ours" in result.err
    assert str(log) in result.err
    assert "Traceback" not in result.err
    assert "Traceback" in log.read_text(encoding="utf-8")


def test_verify(run: Run) -> None:
    assert run("verify", "toy").code == 0
    assert run("verify", "toy", "--json").json == {"path": "toy", "intact": True}
    damaged = run("verify", "damaged")
    assert damaged.code == 2
    assert "layers.0.feed_forward.down" in damaged.err


def test_perplexity(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "文本.txt"
    text.write_text("你好 world", encoding="utf-8")
    result = run("perplexity", "toy", str(text), "--context", "64", "--threads", "3", "--json")
    assert result.json == {"perplexity": 12.5, "tokens": 8, "tokens_left_out": 5, "context": 64, "seen": ["toy", 64, 3]}
    spoken = run("perplexity", "toy", str(text))
    assert "12.5" in spoken.out
    assert "the last 5 tokens of the text fill no window of 512 and were left out" in spoken.err
    text.write_bytes("你好".encode("gbk"))
    assert run("perplexity", "toy", str(text)).code == 2
    assert run("perplexity", "toy", str(tmp_path / "none")).code == 2


def test_bench(run: Run) -> None:
    result = run("bench", "toy", "--threads", "2", "--gen-tokens", "8", "--json").json
    assert (result["threads"], result["gen_tokens"], result["prompt_tokens"]) == (2, 8, 512)
    assert "30.0 tokens per second" in run("bench", "toy").out


def test_diagnose(run: Run) -> None:
    text = run("diagnose", "--benchmark").out
    for line in ("cpu                 Toy processor", "tiers               generic, avx2", "16.0 GB", "21.50"):
        assert line in text
    assert re.search(r"memory\.quota\s+none", text)
    assert re.search(r"mask\s+yes", text)
    assert run("diagnose", "--json").json["bandwidth"] is None


def test_models(run: Run, library: Path) -> None:
    assert run("models").err.startswith("No model in")
    (library / "toy.nook").write_bytes(bytes(1234))
    for arguments in (["models"], ["models", "list"]):
        assert "toy" in run(*arguments).out
    assert run("models", "--json").json["models"][0]["disk_bytes"] == 1234
    assert run("models", "reveal", "toy").out == f"{library / 'toy.nook'}\n"
    assert run("models", "reveal").out == f"{library}\n"
    assert run("models", "remove", "other").code == 2
    assert run("models", "remove", "toy").code == 2, "nobody can be asked"
    assert (library / "toy.nook").exists()
    assert run("models", "remove", "toy", "--yes").code == 0
    assert not (library / "toy.nook").exists()


# --- as a program ------------------------------------------------------------------------------------------------


def test_version() -> None:
    version = program("--version")
    assert version.returncode == 0
    assert re.fullmatch(rb"inglenook \d+\.\d+\.\d+\n", version.stdout)


def test_every_command_has_help(run: Run) -> None:
    for command in _commands(app):
        shown = run(*command, "--help")
        assert shown.code == 0
        assert shown.out.startswith("Usage: inglenook")


def _commands(parent: App, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name in parent:
        if not name.startswith("-"):
            yield from _commands(parent[name], (*path, name))


def test_output_is_utf8_on_any_locale() -> None:
    for locale in ({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, {"LC_ALL": "C.UTF-8"}):
        result = program("run", "toy", "早 \N{GRINNING FACE}", env=locale)
        assert result.stdout.decode() == "早\N{GRINNING FACE}\n", result.stderr
        assert program("chat", "toy", stdin="晚\n".encode(), env=locale).stdout.decode() == "晚\n"


def test_half_characters_do_no_harm() -> None:
    broken = os.fsdecode(b"a\xff")
    assert program("run", "toy", broken).stdout == b"A?\n"
    answer = program("run", "toy", broken, "--json")
    assert json.loads(answer.stdout)["text"] == "A?"
    assert program("inspect", broken).returncode == 0
    assert json.loads(program("inspect", broken, "--json").stdout)["path"] == broken


def test_a_reader_that_leaves_ends_the_program_quietly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fake_engine", "run", "toy", "forever"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        assert process.stdout.read(5) == b"again"
        process.stdout.close()
        assert process.wait(timeout=30) == 141
        assert process.stderr.read() == b""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_program_cleanly(number: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fake_engine", "run", "toy", "forever"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process:
        assert process.stdout.read(5) == b"again"
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert b"Traceback" not in errors


def test_a_closed_output_is_no_fault() -> None:
    closed = program("run", "toy", "hi", preexec_fn=lambda: os.close(1)) if hasattr(os, "fork") else None
    assert closed is None or closed.returncode == 0, closed.stderr


def test_the_window_needs_a_screen() -> None:
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM")
    }
    result = subprocess.run(
        [sys.executable, "main.py"], cwd=ROOT, env=env, check=False, capture_output=True, timeout=60
    )
    if sys.platform == "linux":
        assert result.returncode == 1
        assert result.stderr.startswith(b"inglenook: there is no screen here")


# --- small pieces ------------------------------------------------------------------------------------------------


def test_sizes_and_counts() -> None:
    assert [size_text(size) for size in (0, 999, 1000, 12_345, 999_499, 999_600, 5_300_000_000)] == [
        "0 bytes",
        "999 bytes",
        "1.00 kB",
        "12.3 kB",
        "999 kB",
        "1.00 MB",
        "5.30 GB",
    ]
    assert [count_text(count) for count in (12, 134_515_008, 1_543_714_304)] == ["12", "135 million", "1.54 billion"]


def test_tables_align_wide_characters() -> None:
    assert table([("名", "x"), ("abcd", "y"), ("e",)]) == "名    x\nabcd  y\ne\n"
    assert table([]) == ""


def test_progress_on_a_terminal_is_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressView() as view:
        view.show(Progress("load", 1, 2, "bytes"))
        assert terminal.getvalue() == "", "brief work shows nothing"
        view.show(Progress("convert", 1, 2, "bytes", note="[bold]\x1b]0;title\x07"))
        view.show(Progress("verify", 1, 2, "bytes"))
    assert "Converting" in terminal.getvalue()
    assert "Verifying" in terminal.getvalue()
    assert "\x1b]0;" not in terminal.getvalue()
    assert "[bold]" in terminal.getvalue()


def test_commands_in_the_readme_parse() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^inglenook +([^# ].*)$", text, re.MULTILINE)
    for line in lines:
        app.parse_args(shlex.split(line, comments=True))
    assert len(lines) >= 12
