"""Sends bodies that nobody should send, by the thousand: python -m tests.http_fuzz [--bodies 20000] [--seed 1]

A body is a right one that was damaged: values swapped for others of every
kind, fields taken from other endpoints, bytes flipped, cut or doubled. The
server must answer each with 200 or an error of the client's in OpenAI's shape;
a 500, a dropped connection or a traceback in the log is a failure.
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import random
import sys
from collections import Counter
from typing import Any

from tests.fakes import toy
from tests.serving import Client, serving

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")

_RIGHT: dict[str, Any] = {
    "model": "toy",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "r", "name": "f"},
    ],
    "prompt": "hi",
    "tokens": [1, 2],
    "content": "x",
    "max_tokens": 2,
    "max_completion_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "typical_p": 0.9,
    "seed": 1,
    "stop": ["a", "b"],
    "n": 1,
    "stream": False,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"1": 5},
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "repetition_window": 64,
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning_effort": "low",
    "thinking_budget": 3,
    "chat_template_kwargs": {"enable_thinking": False},
    "echo": False,
    "suffix": None,
    "best_of": 1,
    "functions": None,
}
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 1.0, 1.5, -0.0, 1e308, 10**18, 2**63, 2**64, -(2**70), 10**400),
    *(
        "",
        "a",
        "toy",
        "\0",
        "\ud83d",
        "a\udc00",
        "é" * 50,
        "x" * 3000,
        "<|im_start|>",
        "{{ messages }}",
        "../..",
        "auto",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        [{}],
        {"": None},
        {"type": "text"},
        {"type": "json_object"},
        {"type": "regex", "pattern": "["},
    ),
    *(
        {"type": "regex", "pattern": "(a+)+$"},
        {"type": "grammar", "grammar": "start: x"},
        {"type": "function"},
        ["x"] * 40,
    ),
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"schema": {"allOf": [{"type": "string"}, {"pattern": "\\"}]}}},
)


def body(chance: random.Random) -> bytes:
    """A damaged body."""
    value = {name: _RIGHT[name] for name in chance.sample(sorted(_RIGHT), chance.choice([0, 1, 2, 4, 8]))}
    if chance.random() < 0.85:
        value |= {name: _RIGHT[name] for name in ("messages", "prompt", "max_tokens") if chance.random() < 0.9}
    for _ in range(chance.choice([0, 0, 1, 1, 2, 3])):
        value = _swapped(value, chance, 0)
    data = json.dumps(value, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    match chance.randrange(24):
        case 0:
            data = data[: chance.randrange(len(data) + 1)]
        case 1:
            place = chance.randrange(len(data) + 1)
            data = data[:place] + chance.randbytes(chance.randint(1, 4)) + data[place + 1 :]
        case 2:
            data = data + data[: chance.randrange(len(data) + 1)]
        case 3:
            data = data.decode("utf-8", "replace").encode(chance.choice(["utf-16", "utf-8-sig", "gbk"]), "replace")
    return data


def _swapped(value: Any, chance: random.Random, depth: int) -> Any:
    """The value with something in it, or all of it, exchanged."""
    if depth and chance.random() < 0.3:
        return chance.choice(_ODD)
    if isinstance(value, dict) and value:
        name = chance.choice(sorted(value))
        if chance.random() < 0.1:
            return {**value, chance.choice(["", "extra", "\ud800", name * 3]): chance.choice(_ODD)}
        return {**value, name: _swapped(value[name], chance, depth + 1)}
    if isinstance(value, list) and value:
        place = chance.randrange(len(value))
        return [*value[:place], _swapped(value[place], chance, depth + 1), *value[place + 1 :]]
    return chance.choice(_ODD)


def fuzz(client: Client, bodies: int, seed: int) -> Counter[int]:
    """Send them over one connection that is kept; how often each status came.

    Raises:
        AssertionError: an answer is not what a client may expect; says for which body
    """
    chance = random.Random(seed)
    statuses: Counter[int] = Counter()
    connection = http.client.HTTPConnection(*client.address, timeout=600)
    for number in range(bodies):
        data, path = body(chance), chance.choice(PATHS)
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        statuses[response.status] += 1
        where = f"body {number} of seed {seed} to {path}: {data[:2000]!r} -> {response.status} {answer[:500]!r}"
        assert response.status in (200, 400, 404, 413), where
        if response.status != 200:
            error = json.loads(answer)["error"]
            assert set(error) == {"message", "type", "param", "code"}, where
            assert isinstance(error["message"], str), where
            assert len(answer) < 2000, where
        elif response.getheader("content-type", "").startswith("text/event-stream"):
            assert answer.rstrip().endswith((b"data: [DONE]", b"}}")), where
        else:
            json.loads(answer)
    connection.close()
    return statuses


class Traces(logging.Handler):
    """Keeps what was logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    traces = Traces()
    logging.getLogger().addHandler(traces)
    with serving(lambda _: toy(context=1024, pages=512)) as client:
        statuses = fuzz(client, arguments.bodies, arguments.seed)
        assert client.chat(max_tokens=1).status == 200
    assert not traces.found, traces.found[:3]
    sys.stdout.write(f"{arguments.bodies} bodies: {dict(statuses)}\n")


if __name__ == "__main__":
    main()
