"""Batch jobs: what a file of requests becomes, and that a job that was killed goes on where it stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InputError, ResourceError
from engine.server.batch import BatchResult, run_batch
from engine.server.watch import watch_memory
from engine.settings import EngineSettings
from tests import factory
from tests.fakes import toy
from tests.serving import ToyEngine, speaking

ROOT = Path(__file__).resolve().parent.parent
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.nook"
    path.write_bytes(b"")
    return str(path)


def written(path: Path, *lines: Any) -> Path:
    data = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(data) + b"\n")
    return path


def run(source: Path, out: Path, model: str | None, **changes: Any) -> BatchResult:
    def engine() -> ToyEngine:
        return ToyEngine(lambda path: toy(shape=speaking(path.stem), **changes))

    last = list(run_batch(source, out, model=model, engine=engine))[-1]
    assert isinstance(last, BatchResult)
    return last


def answers(out: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert all(set(line) == {"id", "custom_id", "response", "error"} for line in lines)
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def said(answer: dict[str, Any]) -> str:
    assert answer["error"] is None
    assert answer["response"]["status_code"] == 200
    choice = answer["response"]["body"]["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def test_every_line_gets_its_answer_or_its_error(tmp_path: Path, model: str) -> None:
    full = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": HI}}
    source = written(
        tmp_path / "in.jsonl",
        full,
        {"messages": HI, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": "x", "max_tokens": 2, "logprobs": 1},
        b"",
        b"{bad",
        {"custom_id": "e", "url": "/v1/embeddings", "body": {"input": "x"}},
        {"custom_id": "m", "url": "/v1/completions", "method": "GET", "body": {"prompt": "x"}},
        {"custom_id": "n", "url": "/v1/completions"},
        {"messages": HI, "temperature": 7},
        {"messages": [{"role": "user", "content": "x" * 5000}]},
        b"[" * 10_000,
    )
    out = tmp_path / "out.jsonl"
    result = run(source, out, model)
    found = answers(out)
    assert said(found.pop("a")) == said(found.pop("line-2")) == "model"
    assert said(found.pop("line-3"))
    refused = {name: found.pop(name)["response"] for name in ("line-9", "line-10")}
    assert {response["status_code"] for response in refused.values()} == {400}
    assert refused["line-9"]["body"]["error"]["param"] == "temperature"
    assert refused["line-10"]["body"]["error"]["code"] == "context_length_exceeded"
    assert set(found) == {"line-5", "e", "m", "n", "line-11"}
    assert all(answer["error"]["message"] and answer["response"] is None for answer in found.values())
    assert (result.lines, result.failed, result.kept) == (10, 7, 0)


def test_each_line_may_name_its_model(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / f"{name}.nook").write_bytes(b"")
    lines = [
        {"model": str(tmp_path / f"{name}.nook"), "messages": HI} for name in ("first", "second", "third", "first")
    ]
    source, out = written(tmp_path / "in.jsonl", *lines, {"messages": HI}), tmp_path / "out.jsonl"
    last = list(run_batch(source, out, engine=lambda: ToyEngine(lambda p: toy(shape=speaking(p.stem)))))[-1]
    found = answers(out)
    assert [said(found[f"line-{number}"]) for number in (1, 2, 4)] == ["first", "second", "first"]
    assert "third.nook" in found["line-3"]["error"]["message"]
    assert "names no model" in found["line-5"]["error"]["message"]
    assert isinstance(last, BatchResult)
    assert last.failed == 2


def test_what_is_there_is_kept_and_the_rest_is_done(tmp_path: Path, model: str) -> None:
    source = written(tmp_path / "in.jsonl", *({"custom_id": f"r{n}", "body": {"messages": HI}} for n in range(6)))
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    written(source, *(line | {"url": "/v1/chat/completions"} for line in lines))
    out = tmp_path / "out.jsonl"
    work = run_batch(source, out, model=model, engine=lambda: ToyEngine(lambda _: toy(shape=speaking("first run"))))
    for step in work:
        if step.done == 2:  # type: ignore[union-attr]
            break
    work.close()
    assert len(answers(out)) == 2
    left = out.read_bytes()
    failed = {"id": "x", "custom_id": "r5", "response": {"status_code": 503, "body": {}}, "error": None}
    if "r5" not in answers(out):
        left += json.dumps(failed).encode() + b"\n"
    out.write_bytes(left + b'{"id": "half a li')
    result = run(source, out, model)
    found = answers(out)
    assert set(found) == {f"r{n}" for n in range(6)}
    assert sorted(said(answer) for answer in found.values()) == ["first run"] * 2 + ["model"] * 4
    assert (result.kept, result.failed) == (2, 0)
    whole = out.read_bytes()
    assert run(source, out, model).kept == 6
    assert out.read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "model.nook", "out.jsonl"]


def test_many_are_answered_together(tmp_path: Path, model: str) -> None:
    source = written(tmp_path / "in.jsonl", *({"messages": HI} for _ in range(20)))
    widest = 0

    def step(batch: Any) -> None:
        nonlocal widest
        widest = max(widest, len(batch.lengths))

    def engine() -> ToyEngine:
        return ToyEngine(lambda _: toy(before_step=step, most_running=4, shape=speaking("a longer answer")))

    settings = EngineSettings(max_batch_size=4)
    list(run_batch(source, tmp_path / "out.jsonl", model=model, settings=settings, engine=engine))
    assert widest == 4


def test_files_that_are_refused(tmp_path: Path, model: str) -> None:
    twice = written(tmp_path / "twice.jsonl", *({"custom_id": "a", "body": {}} for _ in range(2)))
    right = written(tmp_path / "right.jsonl", {"messages": HI})
    other = written(tmp_path / "other.jsonl", {"custom_id": "z", "response": None, "error": {}})
    text = written(tmp_path / "text.txt", b"my novel")
    for source, out, word in (
        (twice, tmp_path / "o", "custom_id 'a'"),
        (tmp_path / "nowhere", tmp_path / "o", "nowhere"),
        (right, other, "another batch"),
        (right, text, "no output of a batch"),
        (right, right, "no output of a batch"),
    ):
        with pytest.raises(InputError, match=word):
            run(source, out, model)
    assert text.read_bytes() == b"my novel\n"
    with pytest.raises(ResourceError, match="cannot be written"):
        run(right, tmp_path / "no" / "folder", model)


def test_a_killed_program_goes_on(tmp_path: Path, compiled_kernels: None) -> None:
    folder = factory.make(tmp_path / "toy")
    lines = [{"prompt": f"number {n}", "max_tokens": 150, "seed": n, "ignored": "x"} for n in range(12)]
    source = written(tmp_path / "in.jsonl", *lines)
    out = tmp_path / "in.answers.jsonl"
    command = [sys.executable, "main.py", "batch", str(source), "--model", str(folder), "--context", "200"]
    process = subprocess.Popen([*command, "--threads", "1"], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline_s = time.monotonic() + 60
    while not out.exists() or out.read_bytes().count(b"\n") < 1:
        assert time.monotonic() < deadline_s
        assert process.poll() is None or out.exists()
        time.sleep(0.005)
    process.send_signal(getattr(signal, "SIGKILL", signal.SIGTERM))
    process.wait(20)
    before = out.read_bytes()
    kept = before[: before.rfind(b"\n") + 1]
    result = subprocess.run(
        [*command, "--json"], cwd=ROOT, env=os.environ, check=True, capture_output=True, text=True, timeout=100
    )
    assert json.loads(result.stdout) == {"out": str(out), "lines": 12, "failed": 0, "kept": kept.count(b"\n")}
    assert out.read_bytes().startswith(kept)
    assert len(answers(out)) == 12
    again = tmp_path / "again.jsonl"
    subprocess.run([*command, "-o", str(again)], cwd=ROOT, check=True, capture_output=True, timeout=100)
    texts = [{name: said(answer) for name, answer in answers(path).items()} for path in (out, again)]
    assert texts[0] == texts[1]


# ---------------------------------------------------------------- memory


def test_a_full_memory_is_warned_of_once_until_it_is_better(caplog: pytest.LogCaptureFixture) -> None:
    states = iter([(100, 50), (100, 11), (100, 9), (100, 8), (100, 12), (100, 9), (100, 20), (100, 5), (100, 50)])
    warnings: list[str] = []

    def memory() -> tuple[int, int]:
        try:
            return next(states)
        except StopIteration:
            raise asyncio.CancelledError from None

    async def watch() -> None:
        await watch_memory(warnings.append, memory=memory, look_s=0, curve_s=0)

    with caplog.at_level("INFO"), pytest.raises(asyncio.CancelledError):
        asyncio.run(watch())
    assert [warning.split(" %")[0] for warning in warnings] == ["91", "95"]
    assert sum("in use" in record.message and record.levelname == "INFO" for record in caplog.records) == 9
