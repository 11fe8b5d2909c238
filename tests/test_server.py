"""The HTTP server: OpenAI's protocol as its clients rely on it, around a toy model."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import api
from engine.errors import BusyError, InputError, ResourceError
from engine.server.hub import named_models
from engine.settings import EngineSettings, Sampling
from tests import factory
from tests.fakes import END, saying, toy
from tests.serving import Client, ToyEngine, eventually, request_bytes, serving, speaking, status_of

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A server whose model says things at random."""
    with serving(lambda _: toy(context=512, pages=256)) as running:
        yield running


@pytest.fixture(scope="module")
def talker() -> Iterator[Client]:
    """A server whose model says Grüße, 世界 😀!"""
    with serving(lambda _: toy(context=512, pages=256, shape=speaking("Grüße, 世界 😀!"))) as running:
        yield running


# The threads of a module's server outlive its first test.
pytestmark = pytest.mark.usefixtures("client", "talker")


# ---------------------------------------------------------------- answers (cases H03, R01)


def test_a_whole_answer(talker: Client) -> None:
    answer = talker.chat()
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    value = answer.json
    assert value["object"] == "chat.completion"
    assert value["model"] == "toy"
    assert value["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Grüße, 世界 😀!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    usage = value["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == len("Grüße, 世界 😀!".encode()) + 1


@pytest.mark.parametrize("include_usage", [None, False, True])
def test_a_streamed_answer_has_the_order_that_clients_depend_on(talker: Client, include_usage: bool | None) -> None:
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    answer = talker.chat(stream=True, **options)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.events
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    if include_usage:
        assert events[-1]["choices"] == []
        assert events.pop()["usage"]["completion_tokens"] > 0
    assert all(event.get("usage") is None for event in events)
    deltas = [event["choices"][0] for event in events]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert deltas[-1]["delta"] == {}
    assert [delta["finish_reason"] for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert all("role" not in delta["delta"] for delta in deltas[1:])
    assert "".join(delta["delta"].get("content", "") for delta in deltas) == "Grüße, 世界 😀!"


def test_a_reader_of_single_bytes_gets_the_same(talker: Client) -> None:
    with talker.open_stream() as connection:
        data = b""
        while byte := connection.recv(1):
            data += byte
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"content-length" not in head.lower()
    assert body.count(b"data: [DONE]") == 1


@pytest.mark.parametrize(
    ("fields", "reason", "text"),
    [
        ({"max_tokens": 3}, "length", "Gr"),  # half of ü is not shown
        ({"max_completion_tokens": 2, "max_tokens": 9}, "length", "Gr"),
        ({"max_tokens": 10**9}, "stop", "Grüße, 世界 😀!"),
        ({"stop": "世"}, "stop", "Grüße, "),
        ({"stop": ["nothing", "ß"]}, "stop", "Grü"),
        ({"stop": []}, "stop", "Grüße, 世界 😀!"),
        ({"stop": None, "seed": None, "max_tokens": None}, "stop", "Grüße, 世界 😀!"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_ends(talker: Client, fields: dict[str, Any], reason: str, text: str, stream: bool) -> None:
    answer = talker.chat(stream=stream, **fields)
    if stream:
        events = answer.events
        assert events[-1]["choices"][0]["finish_reason"] == reason
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text
    else:
        choice = answer.json["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == (reason, text)


def test_a_context_that_is_full_ends_with_length() -> None:
    with serving(lambda _: toy(context=64, shape=speaking("x" * 500))) as running:
        choice = running.chat(max_tokens=10**9).json["choices"][0]
    assert choice["finish_reason"] == "length"
    assert 0 < len(choice["message"]["content"]) < 64


def test_a_conversation_beyond_the_context_is_refused_with_numbers(client: Client) -> None:
    for stream in (False, True):
        answer = client.chat("x" * 2000, stream=stream)
        assert answer.status == 400
        assert answer.error["code"] == "context_length_exceeded"
        assert "512" in answer.error["message"]
    turns = [{"role": "user", "content": ""}] * 100_000
    began_s = time.process_time()  # the server is in this process; how busy the computer is does not count
    answer = client.post("/v1/chat/completions", {"messages": turns})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert time.process_time() - began_s < 5


def test_a_seed_repeats_and_choices_differ(client: Client) -> None:
    first, again = (client.chat(seed=5, n=3, max_tokens=12, temperature=2).json for _ in range(2))
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert texts == [choice["message"]["content"] for choice in again["choices"]]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    alone = client.chat(seed=5, max_tokens=12, temperature=2).json
    assert alone["choices"][0]["message"]["content"] == texts[0]
    assert first["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]  # counted once


def test_choices_share_the_pages_of_their_prompt() -> None:
    with serving(lambda _: toy(pages=40, page_tokens=4, context=160, most_running=8)) as running:
        answer = running.chat("p" * 90, n=8, max_tokens=4)
        assert answer.status == 200
        assert len(answer.json["choices"]) == 8
        status = running.metric("cache_pages_free")
    assert list(status.values()) == [40]


def test_streamed_choices_are_told_apart(client: Client) -> None:
    whole = client.chat(seed=1, n=2, max_tokens=8, temperature=1).json
    events = client.chat(seed=1, n=2, max_tokens=8, temperature=1, stream=True).events
    for index in (0, 1):
        mine = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert (
            "".join(choice["delta"].get("content", "") for choice in mine)
            == whole["choices"][index]["message"]["content"]
        )
        assert mine[-1]["finish_reason"] is not None


# ---------------------------------------------------------------- logprobs (case H08)


def test_logprobs_carry_the_bytes_of_tokens_that_are_no_characters(talker: Client) -> None:
    for stream in (False, True):
        answer = talker.chat(logprobs=True, top_logprobs=5, stream=stream)
        if stream:
            told = [
                entry for event in answer.events for entry in (event["choices"][0]["logprobs"] or {}).get("content", [])
            ]
        else:
            told = answer.json["choices"][0]["logprobs"]["content"]
        assert bytes(itertools.chain(*(entry["bytes"] for entry in told))).decode() == "Grüße, 世界 😀!"
        for entry in told:
            assert entry["token"] == bytes(entry["bytes"]).decode("utf-8", "replace")
            rivals = [rival["logprob"] for rival in entry["top_logprobs"]]
            assert len(rivals) == 5
            assert rivals == sorted(rivals, reverse=True)
            assert entry["logprob"] in rivals


def test_what_a_stop_text_cuts_is_not_in_the_logprobs(talker: Client) -> None:
    choice = talker.chat(logprobs=True, stop="ße").json["choices"][0]
    assert choice["message"]["content"] == "Grü"
    assert bytes(itertools.chain(*(e["bytes"] for e in choice["logprobs"]["content"]))).decode() == "Grü"


def test_a_token_that_cannot_come_has_a_number_that_clients_parse() -> None:
    def shape(before: list[int], row: Any) -> Any:
        row = np.full_like(row, -np.inf)
        row[END if before[-1] == ord("a") else ord("a")] = 0.0
        return row

    with serving(lambda _: toy(shape=shape)) as running:
        told = running.chat(logprobs=True, top_logprobs=3).json["choices"][0]["logprobs"]["content"]
    assert told[0]["logprob"] == 0.0
    assert [rival["logprob"] for rival in told[0]["top_logprobs"]] == [0.0, -9999.0, -9999.0]


# ---------------------------------------------------------------- completions


def complete(client: Client, **fields: Any) -> Any:
    answer = client.post("/v1/completions", fields)
    assert answer.status == 200, answer.body
    return answer.json


def test_a_text_goes_on() -> None:
    with serving(lambda _: toy(shape=saying(list(b"abcdefghijklmnopqrstuvwxyz"), after=3))) as running:
        value = complete(running, prompt="xyz")
        assert value["object"] == "text_completion"
        assert value["choices"] == [
            {"index": 0, "text": "abcdefghijklmnop", "logprobs": None, "finish_reason": "length"}
        ]
        assert complete(running, prompt=list(b"xyz"), max_tokens=2, echo=True)["choices"][0]["text"] == "xyzab"
        told = complete(running, prompt="xyz", max_tokens=2, logprobs=1)["choices"][0]["logprobs"]
        assert (told["tokens"], told["text_offset"]) == (["a", "b"], [0, 1])
        assert [list(each) for each in told["top_logprobs"]] == [["a"], ["b"]]
        events = running.post(
            "/v1/completions", {"prompt": "xyz", "max_tokens": 2, "stream": True, "echo": True}
        ).events
        assert "".join(event["choices"][0]["text"] for event in events) == "xyzab"
        assert {event["object"] for event in events} == {"text_completion"}


def test_several_prompts_and_choices(client: Client) -> None:
    value = complete(client, prompt=["one", "two!", "three"], n=2, max_tokens=3, seed=1, temperature=1)
    assert [choice["index"] for choice in value["choices"]] == list(range(6))
    assert value["usage"]["prompt_tokens"] == 3 + 4 + 5
    alone = complete(client, prompt="two!", n=2, max_tokens=3, seed=1, temperature=1)
    assert [c["text"] for c in value["choices"][2:4]] == [c["text"] for c in alone["choices"]]
    assert len(complete(client, prompt=[[1, 2], [3]], max_tokens=1)["choices"]) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "logprobs"),
        ({"prompt": 7}, "prompt"),
        ({}, "prompt"),
    ],
)
def test_completions_refuse_by_name(client: Client, fields: dict[str, Any], param: str) -> None:
    answer = client.post("/v1/completions", fields)
    assert answer.status == 400
    assert answer.error["param"] == param


def test_an_id_that_is_none_is_refused(client: Client) -> None:
    assert client.post("/v1/completions", {"prompt": [10**6]}).status == 400
    assert client.post("/v1/completions", {"prompt": [-1]}).status == 400
    assert client.post("/v1/completions", {"prompt": [2**70]}).status == 400
    assert client.chat(logit_bias={"100000": 1}).status == 400


# ---------------------------------------------------------------- parameters (cases H02, S01, S02)

OPTIONAL = {
    "model": [7, ["toy"]],
    "stream": ["true", 1],
    "stream_options": ["x", []],
    "n": [0, -1, 1.0, "1", True, 10**6],
    "max_tokens": [0, -1, 1.0, "1", True],
    "max_completion_tokens": [0, 1.5, "a"],
    "stop": [7, [7], {"a": 1}, ["x"] * 17],
    "seed": [1.5, "a", -2, 2**64, True],
    "temperature": [-1, "1", True, 1e6, 2.1, [1]],
    "top_p": [-1, 2, "x"],
    "top_k": [-1, 1.5, 10**9],
    "min_p": [-1, 2],
    "typical_p": [0, 2],
    "presence_penalty": [-3, 3, "a"],
    "frequency_penalty": [-3, 3],
    "repetition_penalty": [-1, 0, 1e-9, 1e9],
    "repetition_window": [-1, 1.5],
    "logit_bias": [[1], {"a": 1}, {"1": "x"}, {"1": 101}, {"1": 1e400}],
    "response_format": ["json", {"type": "xml"}, {"type": "json_schema"}, {"type": "regex"}, {}],
    "logprobs": [1, "yes"],
    "top_logprobs": [-1, 21, 1.5, True],
    "tools": [{}, [1], [{"type": "function"}], [{"type": "function", "function": {"name": "a b"}}]],
    "tool_choice": ["always", 1, "required", {"type": "function", "function": {"name": "x"}}],
    "parallel_tool_calls": ["no"],
    "reasoning_effort": ["extreme", 1],
    "thinking_budget": [-1, "1"],
    "chat_template_kwargs": [[], {"messages": 1}, {"a": {}}, {"a b": 1}],
    "functions": [[]],
    "modalities": [["audio"]],
    "audio": [{"voice": "x"}],
}


@pytest.mark.parametrize("name", sorted(OPTIONAL))
def test_null_is_absent_and_the_wrong_type_is_refused_by_name(client: Client, name: str) -> None:
    assert client.chat(max_tokens=1, **{name: None} if name != "max_tokens" else {}).status == 200
    for value in OPTIONAL[name]:
        body = {"messages": [{"role": "user", "content": "hi"}], name: value}
        text = json.dumps(body).replace("Infinity", "1e400")
        answer = client.post("/v1/chat/completions", text.encode())
        assert answer.status == 400, (name, value, answer.body)
        assert answer.error["param"] is None or answer.error["param"].startswith(name), answer.error
        assert answer.error["type"] == "invalid_request_error"


def test_unknown_fields_are_ignored(client: Client) -> None:
    answer = client.chat(max_tokens=1, user="me", metadata={"a": 1}, store=False, service_tier="auto", mirostat=2)
    assert answer.status == 200


def test_senseless_sampling_never_kills_the_engine(client: Client) -> None:
    """Every combination of extremes is answered or refused, and a normal request works afterwards."""
    values = {
        "temperature": [-1, 0, 1e-9, 2, 1e6, None],
        "top_p": [-1, 0, 1e-9, 1, 2],
        "top_k": [-1, 0, 1, 10**9],
        "min_p": [0, 1],
        "repetition_penalty": [0, 0.5, 1, 1e9],
        "seed": [-1, 0, 2**63, 2**64],
    }
    allowed = {
        "temperature": {0, 1e-9, 2, None},
        "top_p": {0, 1e-9, 1},
        "top_k": {0, 1},
        "min_p": {0, 1},
        "repetition_penalty": {0.5, 1},
        "seed": {-1, 0},
    }
    random = np.random.default_rng(1)
    for _ in range(250):
        fields = {name: choices[random.integers(len(choices))] for name, choices in values.items()}
        right = all(value in allowed[name] for name, value in fields.items())
        answer = client.chat(max_tokens=2, **fields)
        assert answer.status == (200 if right else 400), (fields, answer.body)
    assert client.chat(max_tokens=2).status == 200


def test_greedy_and_warm_answers_side_by_side(client: Client) -> None:
    """Temperature 0, almost 0 and 1 in one batch: the first two are the same, whatever the third."""
    texts = {}
    for temperature in (0, 1e-6, 1.0):
        answer = client.chat("same", temperature=temperature, seed=int(temperature), max_tokens=6, n=2)
        texts[temperature] = {choice["message"]["content"] for choice in answer.json["choices"]}
    assert len(texts[0]) == 1
    assert texts[0] == texts[1e-6]


def test_logit_bias_forbids_and_forces(client: Client) -> None:
    text = client.chat(temperature=0, logit_bias={str(ord("Z")): 100}, max_tokens=4, repetition_penalty=1).json
    assert text["choices"][0]["message"]["content"] == "ZZZZ"
    plain = client.chat(temperature=0, max_tokens=1, logprobs=True).json["choices"][0]["logprobs"]["content"][0]
    other = client.chat(temperature=0, max_tokens=1, logit_bias={str(plain["bytes"][0]): -100}, logprobs=True).json[
        "choices"
    ][0]["logprobs"]["content"]
    assert not other or other[0]["bytes"] != plain["bytes"]


def test_a_row_that_is_not_numbers_ends_that_request_only() -> None:
    def shape(before: list[int], row: Any) -> Any:
        return np.full_like(row, np.nan) if ord("N") in before else row

    with serving(lambda _: toy(shape=shape)) as running:
        answer = running.chat("NaN", max_tokens=2)
        assert answer.status == 500
        assert answer.error["type"] == "server_error"
        assert running.chat("ok", max_tokens=2).status == 200
        body = running.chat("NaN", max_tokens=2, stream=True).body
    assert b"[DONE]" not in body


# ---------------------------------------------------------------- messages (case H06)


def test_content_parts_and_roles(client: Client) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts, "name": "me"}]
    assert client.post("/v1/chat/completions", {"messages": turns, "max_tokens": 1}).status == 200
    image = [{"type": "image_url", "image_url": {"url": "data:x"}}]
    answer = client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": image}]})
    assert (answer.status, answer.error["param"]) == (400, "messages[0].content[0]")
    for turns in ([], [{}], [{"role": "robot", "content": "x"}], "x", [{"role": "user", "content": 7}]):
        assert client.post("/v1/chat/completions", {"messages": turns}).status == 400
    assert client.post("/v1/chat/completions", {}).error["code"] == "missing_required_parameter"


@pytest.mark.parametrize("text", ["\\ud83d", "\\udc00a", "a\\u0000b", "\\uD83D\\uD83D"])
def test_half_characters_go_in_and_valid_json_comes_out(client: Client, text: str) -> None:
    for body in (
        '{"messages": [{"role": "user", "content": "%s"}], "max_tokens": 2}',
        '{"messages": [{"role": "system", "content": "%s"}, {"role": "user", "content": "x"}], "max_tokens": 2}',
        '{"messages": [{"role": "user", "content": "x"}], "stop": ["%s"], "max_tokens": 2}',
    ):
        answer = client.post("/v1/chat/completions", (body % text).encode())
        assert answer.status == 200, answer.body
        assert answer.json
    for body in (
        '{"messages": [{"role": "user", "content": "x"}], "model": "%s"}',
        '{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "%s"}}]}',
        '{"messages": [{"role": "%s", "content": "x"}]}',
    ):
        answer = client.post("/v1/chat/completions", (body % text).encode())
        assert answer.status in (400, 404)
        assert answer.error["message"]


def test_bytes_that_are_no_utf_8_come_out_as_valid_json() -> None:
    with serving(lambda _: toy(shape=speaking(bytes([0xFF, 0xFE, 0xC0, 0x80, ord("a")])))) as running:
        message = running.chat(logprobs=True).json["choices"][0]
        assert message["message"]["content"].endswith("a")
        assert "\N{REPLACEMENT CHARACTER}" in message["message"]["content"]
        assert running.chat(stream=True).events


# ---------------------------------------------------------------- bodies (case H05)

GOOD = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'"x"', 400),
        (b"null", 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 100_000, 400),
        (b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}", 400),
        (b'{"max_tokens": ' + b"1" * 5000 + b"}", 400),
        (b'{"temperature": NaN}', 400),
        ("{“messages”: []}".encode(), 400),
        ('{"messages": [{"role": "user", "content": "你好"}]}'.encode("gbk"), 400),
        ('{"messages": []}'.encode("utf-16"), 400),
        (b"\xef\xbb\xbf" + GOOD, 400),
        (GOOD.replace(b'"max_tokens"', b'"max_tokens": 2, "max_tokens"'), 200),
        (b'{"messages": [' + b'{"role": "user", "content": ""},' * 1000 + b'{"role": "user", "content": ""}]}', 400),
    ],
    ids=str,
)
def test_bodies_that_are_wrong(client: Client, body: bytes, status: int) -> None:
    answer = client.post("/v1/chat/completions", body)
    assert answer.status == status, answer.body
    if status != 200:
        assert answer.error["message"]


def test_a_body_beyond_the_limit_is_refused_while_it_comes() -> None:
    with serving(body_mb=1) as running:
        told = request_bytes("/v1/chat/completions", b"", "Content-Length: 200000000")
        assert status_of(running.raw(told)) == 413
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        chunked = request_bytes("/v1/chat/completions", b"", "Transfer-Encoding: chunked")
        assert status_of(running.raw(chunked + chunk * 17)) == 413
        assert running.chat(max_tokens=1).status == 200


def test_lengths_and_chunks_that_lie(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.app._BODY_PAUSE_S", 0.3)
    partial = request_bytes("/v1/chat/completions", b"", "Content-Length: 10") + b"{    "
    assert status_of(client.raw(partial)) == 408
    bad = request_bytes("/v1/chat/completions", b"", "Transfer-Encoding: chunked") + b"zz\r\n{}\r\n0\r\n\r\n"
    assert client.raw(bad)[:12] in (b"HTTP/1.1 400", b"")
    right = request_bytes("/v1/chat/completions", b"", "Transfer-Encoding: chunked")
    right += b"%x\r\n" % len(GOOD) + GOOD + b"\r\n0\r\n\r\n"
    assert status_of(client.raw(right)) == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "application/jsonx"]
)
def test_only_json_is_taken(client: Client, kind: str) -> None:
    answer = client.send("POST", "/v1/chat/completions", GOOD, {"Content-Type": kind} if kind else {})
    assert answer.status == 415
    assert answer.error["message"]
    right = client.send("POST", "/v1/chat/completions", GOOD, {"Content-Type": "Application/JSON; charset=utf-8"})
    assert right.status == 200
    packed = client.post("/v1/chat/completions", GOOD, **{"Content-Encoding": "gzip"})
    assert packed.status == 415


def test_wrong_methods_and_addresses(client: Client) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        answer = client.get(path)
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
        assert answer.error["message"]
        assert client.send("HEAD", path, None, {}).status == 405
    assert client.get("/v1/nothing").status == 404
    assert client.get("/docs").error["message"]
    assert client.get("/v1/models/nothing").error["code"] == "model_not_found"
    assert client.get("/v1/chat/completions/").status == 404


# ---------------------------------------------------------------- who may ask (cases H01, H09)

HOSTS = {
    "localhost": True,
    "LOCALHOST:1": True,
    "localhost.": True,
    "127.0.0.1:8080": True,
    "127.1.2.3": True,
    "[::1]:1": True,
    "[::ffff:127.0.0.1]": True,
    "evil.example:8080": False,
    "127.0.0.1.evil.example": False,
    "localhost.evil.example": False,
    "0.0.0.0": False,
    "192.168.1.5": False,
    "[::]": False,
    "": False,
    "localhost:x": False,
    "[::1": False,
    "a@localhost": False,
}


@pytest.mark.parametrize("host", HOSTS)
def test_host_names(client: Client, host: str) -> None:
    reply = client.raw(request_bytes("/v1/models", b"", method="GET", host=host))
    assert status_of(reply) == (200 if HOSTS[host] else 403), reply


def test_two_hosts_and_none(client: Client) -> None:
    assert status_of(client.raw(request_bytes("/v1/models", b"", "Host: localhost", method="GET"))) in (400, 403)
    assert status_of(client.raw(request_bytes("/v1/models", b"", method="GET", host=None))) in (400, 403)
    assert status_of(client.raw(b"GET /v1/models HTTP/1.0\r\n\r\n")) in (400, 403)


ORIGINS = [
    "null",
    "https://evil.example",
    "http://localhost.evil",
    "http://localhost:3000",
    "http://",
    "x",
    "http://[",
    "",
]


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_pages_of_others_are_refused(client: Client, origin: str, method: str) -> None:
    path, body = ("/v1/models", None) if method == "GET" else ("/v1/chat/completions", GOOD)
    answer = client.send(method, path, body, {"Origin": origin, "Content-Type": "application/json"})
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers


def test_what_a_page_loads_without_saying_its_origin_is_refused(client: Client) -> None:
    for site in ("cross-site", "same-site"):
        assert client.get("/v1/models", **{"Sec-Fetch-Site": site}).status == 403
    assert client.get("/", **{"Sec-Fetch-Site": "none"}).status == 200


def test_our_own_page_may_ask(client: Client) -> None:
    own = client.server.url
    assert client.post("/v1/chat/completions", GOOD, Origin=own, **{"Sec-Fetch-Site": "same-origin"}).status == 200


def test_a_page_that_was_let_in() -> None:
    with serving(allow_origin=("https://chat.example",), allow_host=("pc.example",), api_key=("k",)) as running:
        asked = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
        preflight = running.send("OPTIONS", "/v1/chat/completions", None, asked)
        assert preflight.status == 204
        assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        running.key = "k"
        answer = running.post(
            "/v1/chat/completions", GOOD, Origin="https://chat.example", **{"Sec-Fetch-Site": "cross-site"}
        )
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "https://chat.example")
        assert running.post("/v1/chat/completions", GOOD, Origin="https://evil.example").status == 403
        named = request_bytes("/v1/models", b"", "Authorization: Bearer k", method="GET", host="PC.example.:80")
        assert status_of(running.raw(named)) == 200


KEY = "clé-7"


@pytest.mark.parametrize(
    "shown",
    [
        b"",
        b"Authorization: Bearer ",
        b"Authorization: Bearer wrong",
        b"Authorization: bearer " + KEY.encode(),
        b"Authorization: " + KEY.encode(),
        b"Authorization: Bearer  " + KEY.encode(),
        b"Authorization: Bearer " + KEY.encode("latin-1"),
        b"Authorization: Basic " + KEY.encode(),
        b"Authorization: Bearer " + KEY.encode() + b"\r\nAuthorization: Bearer " + KEY.encode(),
        b"X-Api-Key: " + KEY.encode(),
        b"Authorization: Bearer " + b"x" * 20_000,
    ],
    ids=lambda shown: repr(shown[:60]),
)
def test_keys(shown: bytes, keyed: Client) -> None:
    for path in (b"/v1/models", b"/", b"/metrics", b"/openapi.json", b"/nowhere"):
        request = b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + shown
        reply = keyed.raw(request + (b"\r\n\r\n" if shown else b"\r\n"))
        assert status_of(reply) == 401, reply
        assert b"www-authenticate: bearer" in reply.lower()
        assert b'"invalid_api_key"' in reply


@pytest.fixture(scope="module")
def keyed() -> Iterator[Client]:
    with serving(api_key=(KEY, "other")) as running:
        yield running


def test_the_right_key_opens_and_health_needs_none(keyed: Client, caplog: pytest.LogCaptureFixture) -> None:
    assert keyed.get("/health").json == {"status": "ok"}
    with caplog.at_level("DEBUG"):
        for key in (KEY, "other"):
            request = request_bytes("/v1/models?key=seen", b"", method="GET")
            request = request.replace(b"\r\nConn", b"\r\nAuthorization: Bearer " + key.encode() + b"\r\nConn")
            assert status_of(keyed.raw(request)) == 200
    assert KEY not in caplog.text
    assert "seen" not in caplog.text


def test_the_engine_is_told_who_asks_but_not_the_key() -> None:
    asked: list[str] = []

    class Listening(ToyEngine):
        def submit(self, request: api.Request, sink: api.Sink) -> None:
            asked.append(request.client)
            super().submit(request, sink)

    with serving(engine=Listening, api_key=("secret-a", "secret-b")) as running:
        for key in ("secret-a", "secret-b", "secret-a"):
            running.key = key
            assert running.chat(max_tokens=1).status == 200
    assert asked[0] == asked[2] != asked[1]
    assert not any("secret" in client for client in asked)


def test_an_engine_with_limits_of_its_own_sends_away_with_a_time() -> None:
    class Busy(ToyEngine):
        def submit(self, request: api.Request, sink: api.Sink) -> None:
            sink(api.Failed(request.id, "too much is on its way", BusyError.__name__, retry_s=6.2))

    for stream in (False, True):
        with serving(engine=Busy) as running:
            answer = running.chat(stream=stream)
        assert (answer.status, answer.headers["retry-after"]) == (429, "7")


def test_a_header_without_end_is_refused(client: Client) -> None:
    reply = client.raw(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 20))
    assert reply == b"" or status_of(reply) in (400, 431)
    assert client.get("/health").status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_beyond_this_computer_a_key_is_wanted(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INGLENOOK_API_KEY", raising=False)
    with pytest.raises(InputError, match="API key"), serving(host=host):
        pass


def test_with_a_key_from_the_environment_everybody_may_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGLENOOK_API_KEY", "k")
    with serving(host="0.0.0.0") as running:
        address = ("127.0.0.1", running.address[1])
        for host, status in {"192.168.1.5:1": 200, "evil.example": 403, "0.0.0.0": 403, "localhost": 200}.items():
            request = request_bytes("/v1/models", b"", "Authorization: Bearer k", method="GET", host=host)
            with socket.create_connection(address, timeout=5) as connection:
                connection.sendall(request)
                assert status_of(connection.recv(65536)) == status, host


def test_a_port_that_is_taken_is_named(client: Client) -> None:
    port = client.address[1]
    with pytest.raises(InputError, match=f"127.0.0.1:{port}"), serving(port=port):
        pass


# ---------------------------------------------------------------- models


def models_of(path: Path) -> Any:
    return toy(shape=speaking(path.name))


def test_models_are_loaded_when_first_asked_for_and_named_in_the_list() -> None:
    loads: list[str] = []

    def make(path: Path) -> Any:
        loads.append(path.name)
        return models_of(path)

    with serving(make, models={"a": Path("first"), "b": Path("second")}) as running:
        assert loads == ["first"]
        listed = running.get("/v1/models").json
        assert [row["id"] for row in listed["data"]] == ["a", "b"]
        assert {row["object"] for row in listed["data"]} == {"model"}
        assert running.chat(model="b").json["choices"][0]["message"]["content"] == "second"
        assert running.chat(model="a").json["choices"][0]["message"]["content"] == "first"
        assert running.chat().json["model"] == "a"
        assert loads == ["first", "second"]
        assert running.get("/v1/models/b").json["id"] == "b"
        answer = running.chat(model="gpt-4")
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert answer.error["param"] == "model"
        assert set(running.metric("model_loaded").values()) == {1}


def test_a_model_in_the_way_of_another_is_unloaded() -> None:
    loaded: list[str] = []

    def make(path: Path) -> Any:
        if loaded:
            raise ResourceError("the model needs 9 GB of memory and 1 GB are free")
        loaded.append(path.name)
        return replace(models_of(path), release=loaded.clear)

    with serving(make, models={"a": Path("first"), "b": Path("second")}) as running:
        for name, text in (("b", "second"), ("a", "first"), ("b", "second")):
            assert running.chat(model=name).json["choices"][0]["message"]["content"] == text
        assert sorted(running.metric("model_loaded").values()) == [0, 1]


def test_a_model_that_cannot_be_loaded_is_503_and_says_why() -> None:
    def make(path: Path) -> Any:
        if path.name == "second":
            raise ResourceError("the model needs 900 GB")
        return models_of(path)

    with serving(make, models={"a": Path("first"), "b": Path("second")}) as running:
        answer = running.chat(model="b")
        assert answer.status == 503
        assert "900 GB" in answer.error["message"]
        assert running.chat(model="a").status == 200
    with pytest.raises(ResourceError, match="900 GB"), serving(make, models={"b": Path("second")}):
        pass


def test_both_models_at_once_take_turns() -> None:
    inside: list[str] = []
    seen: set[tuple[str, ...]] = set()

    def make(path: Path) -> Any:
        def step(_batch: Any) -> None:
            inside.append(path.name)
            seen.add(tuple(sorted(set(inside))))
            time.sleep(0.002)
            inside.remove(path.name)

        return toy(shape=speaking(path.name * 5), before_step=step)

    with serving(make, models={"a": Path("first"), "b": Path("second")}) as running, ThreadPoolExecutor(8) as pool:
        names = ["a", "b"] * 8
        answers = list(pool.map(lambda name: running.chat(model=name).json["choices"][0]["message"]["content"], names))
    assert answers == ["first" * 5, "second" * 5] * 8
    assert seen == {("first",), ("second",)}


def test_an_idle_model_is_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.hub._MINUTE_S", 0.1)
    with serving(idle_minutes=1) as running:
        eventually(lambda: set(running.metric("model_loaded").values()) == {0})
        assert running.chat(max_tokens=1).status == 200
        assert set(running.metric("model_loaded").values()) == {1}


def test_names(tmp_path: Path) -> None:
    folder = factory.make(tmp_path / "folder")
    file = tmp_path / "file.v1.nook"
    file.write_bytes(b"")
    odd = tmp_path / "a=b.nook"
    odd.write_bytes(b"")
    assert named_models([str(folder), str(file), f"x={file}", str(odd)]) == {
        "folder": folder,
        "file.v1": file,
        "x": file,
        "a=b": odd,
    }
    with pytest.raises(InputError, match="two models are called x"):
        named_models([f"x={file}", f"x={folder}"])
    with pytest.raises(InputError, match="neither a file"):
        named_models(["nowhere"])


# ---------------------------------------------------------------- the rest


def test_tokenize_and_back(client: Client) -> None:
    value = client.post("/tokenize", {"prompt": "Grüße"}).json
    assert value == {"tokens": list("Grüße".encode()), "count": 7, "max_model_len": 512}
    assert client.post("/tokenize", {"content": "a"}).json["tokens"] == [97]
    assert client.post("/tokenize", {"text": ""}).json["tokens"] == []
    turns = [{"role": "user", "content": "hi"}]
    assert client.post("/tokenize", {"messages": turns}).json["tokens"][0] == 258
    back = client.post("/detokenize", {"tokens": value["tokens"]}).json
    assert back == {"prompt": "Grüße", "content": "Grüße"}
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": turns}),
        ("/tokenize", {"prompt": 1}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**30]}),
    ):
        assert client.post(path, body).status == 400, body


def test_health_and_metrics(client: Client) -> None:
    client.chat(max_tokens=1)
    assert client.get("/health").json == {"status": "ok"}
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.body.decode().splitlines()
    assert all(line.startswith(("# HELP inglenook_", "# TYPE inglenook_", "inglenook_")) for line in lines)
    assert client.metric("cache_pages")['model="toy"'] == 256
    answered = client.metric("requests_total")['model="toy",endpoint="chat",status="200"']
    client.chat(max_tokens=1)
    assert client.metric("requests_total")['model="toy",endpoint="chat",status="200"'] == answered + 1


def test_the_page_needs_nothing_from_elsewhere(client: Client) -> None:
    page = client.get("/")
    text = page.body.decode()
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "src=" not in text
    assert "href=" not in text
    assert "http" not in text.replace("http-equiv", "")
    paths = client.get("/openapi.json").json["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/health"} <= set(paths)
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "temperature", "response_format", "tools"} <= set(body["properties"])


def test_prompts_are_in_the_log_only_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    for asked in (False, True):
        caplog.clear()
        with (
            caplog.at_level("DEBUG"),
            serving(lambda _: toy(shape=speaking("quillwort")), log_prompts=asked) as running,
        ):
            running.chat("marram")
            running.chat("marram", stream=True)
        assert ("marram" in caplog.text, "quillwort" in caplog.text) == (asked, asked)
        assert "POST /v1/chat/completions 200" in caplog.text


def test_defaults_are_the_models_own() -> None:
    made = toy()
    info = replace(made.info, defaults=Sampling(temperature=0.0, max_tokens=3))
    with serving(lambda _: replace(made, info=info)) as running:
        first, second = (running.chat(max_tokens=9).json["choices"][0]["message"]["content"] for _ in range(2))
    assert first == second  # greedy, as the model's file says


def test_the_real_engine_serves_a_folder(tmp_path: Path, compiled_kernels: None) -> None:
    folder = factory.make(tmp_path / "folder")
    settings = EngineSettings(context=128, threads=1)
    with serving(models={"x": folder}, engine=api.Engine, engine_settings=settings) as running:
        texts = [running.chat(seed=1, max_tokens=5).json["choices"][0]["message"]["content"] for _ in range(2)]
    assert texts[0] == texts[1]
