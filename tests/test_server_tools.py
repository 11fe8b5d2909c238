"""Calls of tools, thinking and structured output through the server, around toy models that say what they are told."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.fakes import toy
from tests.serving import ASSISTANT, Client, serving, speaking
from tests.test_constraints import ponders, thinker
from tests.test_server import WEATHER

TIME = {"type": "function", "function": {"name": "time"}}
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "巴黎"}}\n</tool_call>'
TWO = f'Let me see.\n{ONE}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>'


def ask(client: Client, *, stream: bool, **fields: Any) -> dict[str, Any]:
    """The message of an answer and its reason; of a streamed one, put together as clients do."""
    answer = client.chat(stream=stream, **fields)
    assert answer.status == 200, answer.body
    if not stream:
        choice = answer.json["choices"][0]
        return choice["message"] | {"reason": choice["finish_reason"]}
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [], "reason": None, "reasoning": ""}
    for event in answer.events:
        choice = event["choices"][0]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls", []):
            if part["index"] == len(message["tool_calls"]):
                assert part["type"] == "function"
                assert part["id"].startswith("call_")
                message["tool_calls"].append({"id": part["id"], "function": dict(part["function"])})
            else:
                assert part["index"] == len(message["tool_calls"]) - 1
                assert set(part["function"]) == {"arguments"}
                message["tool_calls"][-1]["function"]["arguments"] += part["function"]["arguments"]
        message["reason"] = choice["finish_reason"]
    return message


def called(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or []]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_told_apart_from_words(stream: bool) -> None:
    with serving(lambda _: toy(context=800, pages=256, shape=speaking(TWO))) as client:
        tools = {"tools": [WEATHER, TIME]}
        message = ask(client, stream=stream, **tools)
        assert called(message) == [("weather", {"city": "巴黎"}), ("time", {})]
        assert (message["content"], message["reason"]) == ("Let me see.", "tool_calls")
        one = ask(client, stream=stream, parallel_tool_calls=False, **tools)
        assert called(one) == [("weather", {"city": "巴黎"})]
        assert one["reason"] == "tool_calls"
        for fields in ({}, {"tools": []}, tools | {"tool_choice": "none"}):
            plain = ask(client, stream=stream, **fields)
            assert (plain["content"], plain["reason"]) == (TWO, "stop")
            assert not plain.get("tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_talks_at_random_is_made_to_call(stream: bool) -> None:
    with serving(lambda _: toy(context=800, pages=256)) as client:
        for choice, names in (
            ("required", {"weather", "time"}),
            ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
        ):
            for seed in range(4):
                message = ask(
                    client,
                    stream=stream,
                    tools=[WEATHER, TIME],
                    tool_choice=choice,
                    seed=seed,
                    max_tokens=400,
                    temperature=1,
                )
                if message["reason"] == "length":  # a city with a long name
                    continue
                [(name, arguments)] = called(message)
                assert name in names
                assert message["reason"] == "tool_calls"
                assert not message["content"]
                if name == "weather":
                    assert list(arguments) == ["city"]
                    assert isinstance(arguments["city"], str)


@pytest.mark.parametrize("stream", [False, True])
def test_a_strict_tool_is_called_by_its_schema_or_not_at_all(stream: bool) -> None:
    """The model begins a call of its own accord and goes on at random."""
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    begins = speaking("{")

    def shape(before: list[int], row: Any) -> Any:
        return begins(before, row) if tuple(before[-len(ASSISTANT) :]) == ASSISTANT else row

    with serving(lambda _: toy(context=800, pages=256, shape=shape)) as client:
        ends = set()
        for seed in range(5):
            fields = {"seed": seed, "max_tokens": 400, "temperature": 1}
            message = ask(client, stream=stream, tools=[strict, TIME], **fields)
            ends.add(message["reason"])
            if message["reason"] == "length":
                continue
            [(name, arguments)] = called(message)
            if name == "weather":
                assert list(arguments) == ["city"]
            free = ask(client, stream=stream, tools=[WEATHER, TIME], **fields)
            assert not free.get("tool_calls")
        assert "tool_calls" in ends
    with serving(lambda _: toy(context=800, pages=256, shape=speaking("Just words."))) as client:
        message = ask(client, stream=stream, tools=[strict])
        assert (message["content"], message["reason"]) == ("Just words.", "stop")


def test_calls_written_as_elements_become_json() -> None:
    text = (
        "<tool_call>\n<function=weather>\n<parameter=city>\nBad Ems\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    function = {"name": "weather", "parameters": {"properties": {"days": {"type": "integer"}}}}
    with serving(lambda _: toy(context=800, pages=256, shape=speaking(text))) as client:
        for stream in (False, True):
            message = ask(client, stream=stream, tools=[{"type": "function", "function": function}])
            assert called(message) == [("weather", {"city": "Bad Ems", "days": 3})]


def test_results_go_back_to_the_model() -> None:
    seen: list[str] = []

    def shape(before: list[int], row: Any) -> Any:
        seen.append(bytes(token for token in before if token < 256).decode("utf-8", "replace"))
        return speaking("It is sunny.")(before, row)

    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    turns = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "21 degrees"},
    ]
    with serving(lambda _: toy(context=800, pages=256, shape=shape)) as client:
        body = {"messages": turns, "tools": [WEATHER]}
        assert client.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"] == "It is sunny."
        assert "Weather of a city" in seen[0]
        assert '{"name": "weather", "arguments": {"city": "Oslo"}}' in seen[0]
        assert "21 degrees" in seen[0]
        call["function"]["arguments"] = "{"  # type: ignore[index]
        answer = client.post("/v1/chat/completions", body)
        assert (answer.status, answer.error["param"]) == (400, "messages[1].tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_holds(stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    forms = [
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
            '{"a": true}{"a": false}',
        ),
        ({"type": "regex", "pattern": "[ab]"}, "ab"),
        ({"type": "grammar", "grammar": 'start: "a" | "b"'}, "ab"),
    ]
    with serving(lambda _: toy(context=800, pages=256)) as client:
        for form, allowed in forms:
            message = ask(client, stream=stream, response_format=form)
            assert message["content"] in allowed
            assert message["reason"] == "stop"
        text = client.post(
            "/v1/completions", {"prompt": "x", "response_format": {"type": "regex", "pattern": "[0-9]{4}"}}
        ).json["choices"][0]["text"]
        assert len(text) == 4
        assert text.isdigit()
        bad = client.chat(
            response_format={"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}, stream=stream
        )
        assert bad.status == 400
        assert "objekt" in bad.error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_apart_and_has_a_budget(stream: bool) -> None:
    with serving(lambda _: _thinking()) as client:
        message = ask(client, stream=stream, thinking_budget=9)
        assert message["content"] == "ok"
        assert message.get("reasoning_content", message.get("reasoning")) == "m" * 9
        brief = ask(client, stream=stream, reasoning_effort="minimal")
        assert brief["content"] == "ok"
        assert len(brief.get("reasoning_content", brief.get("reasoning", ""))) == 128
        held = ask(client, stream=stream, thinking_budget=3, response_format={"type": "regex", "pattern": "z{2}"})
        assert held["content"] == "zz"
        usage = client.chat(thinking_budget=9).json["usage"]
        assert 9 <= usage["completion_tokens_details"]["reasoning_tokens"] <= 11


def _thinking() -> Any:

    model = thinker(ponders)
    return replace(model, info=replace(model.info, think=("<think>", "</think>")))
