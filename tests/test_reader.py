"""Taking answers apart: the same parts however the text is cut."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.dialect import CallStyle, Dialect, spelled_out
from engine.text.reader import AnswerReader
from engine.text.tokenizer import Tokenizer
from tests.factory import tok_json

THINK = ("<think>", "</think>")
CALL = '{"name": "weather", "arguments": {"city": "Pa}r\\"is", "days": [1, {"a": 2}]}}'
ARGUMENTS = {"city": 'Pa}r"is', "days": [1, {"a": 2}]}

TOOLS: dict[str, Any] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}}},
    "time": None,
}

Parts = list[tuple[str, str, int]]


def read(text: str, cuts: list[int], *, tools: Mapping[str, Any] = TOOLS, thinking: bool = False) -> Parts:
    """The parts of a text that comes in pieces, neighbours of one kind put together."""
    reader = AnswerReader(tools, THINK, thinking=thinking)
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    parts = [part for a, b in pairwise(places) for part in reader.push(text[a:b])]
    parts += reader.finish()
    assert reader.finish() == []
    return [
        (kind, "".join(part.text for part in group), call)
        for (kind, call), group in groupby(parts, key=lambda part: (part.kind, part.call))
    ]


CASES: dict[str, tuple[str, Parts]] = {
    "plain": ("Hello.\n\nBye\n", [("content", "Hello.\n\nBye\n", -1)]),
    "thinking": ("<think>\nhm\n</think>\n\nYes.", [("reasoning", "hm", -1), ("content", "Yes.", -1)]),
    "hermes": (f"<tool_call>\n{CALL}\n</tool_call>", [("call", "weather", 0), ("arguments", "", 0)]),
    "words before": (
        f"Let me see.\n<tool_call>{CALL}</tool_call>",
        [("content", "Let me see.", -1), ("call", "weather", 0), ("arguments", "", 0)],
    ),
    "two": (
        f'<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "time", "arguments": {{}}}}</tool_call>',
        [("call", "weather", 0), ("arguments", "", 0), ("call", "time", 1), ("arguments", "{}", 1)],
    ),
    "thinking, then a call": (
        f"<think>I could call.</think>\n<tool_call>{CALL}</tool_call>",
        [("reasoning", "I could call.", -1), ("call", "weather", 0), ("arguments", "", 0)],
    ),
    "mistral": (
        f'[TOOL_CALLS][{CALL}, {{"name": "time", "arguments": {{}}}}]',
        [("call", "weather", 0), ("arguments", "", 0), ("call", "time", 1), ("arguments", "{}", 1)],
    ),
    "mistral, later": (
        '[TOOL_CALLS]time[ARGS]{"a": 1}[TOOL_CALLS]weather[ARGS]{}',
        [("call", "time", 0), ("arguments", '{"a": 1}', 0), ("call", "weather", 1), ("arguments", "{}", 1)],
    ),
    "llama": (
        '<|python_tag|>{"type": "function", "name": "time", "parameters": {"a": 1}}',
        [("call", "time", 0), ("arguments", '{"a": 1}', 0)],
    ),
    "llama, as python": (
        "[weather(city='Pa}r\"is', days=[1, {'a': 2}]), time()]",
        [("call", "weather", 0), ("arguments", "", 0), ("call", "time", 1), ("arguments", "{}", 1)],
    ),
    "python in a list of its own": (
        "<function_calls>time(a=1)\ntime(a=None)</function_calls>",
        [("call", "time", 0), ("arguments", '{"a": 1}', 0), ("call", "time", 1), ("arguments", '{"a": null}', 1)],
    ),
    "python that computes": ("[time(a=open('x'))]", [("content", "[time(a=open('x'))]", -1)]),
    "a link": ("[about(this)](there)", [("content", "[about(this)](there)", -1)]),
    "qwen coder": (
        (
            "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\n07\n</parameter>\n"
            "<parameter=days>\n3\n</parameter>\n"
            "<parameter=other>\na < b\n\n</parameter>\n</function>\n</tool_call>"
        ),
        [
            ("content", "I look.", -1),
            ("call", "weather", 0),
            ("arguments", '{"city": "07", "days": 3, "other": "a < b\\n"}', 0),
        ],
    ),
    "qwen coder without the outer mark": (
        "<function=time>\n</function>\n</tool_call>\nDone",
        [("call", "time", 0), ("arguments", "{}", 0), ("content", "Done", -1)],
    ),
    "qwen coder, two, one of them not closed": (
        "<tool_call><function=time><parameter=a>1</function></tool_call><tool_call><function=time></function></tool_call>",
        [("call", "time", 0), ("arguments", '{"a": 1}', 0), ("call", "time", 1), ("arguments", "{}", 1)],
    ),
    "an element of no tool": ("<function=f>\n</function>", [("content", "<function=f>\n</function>", -1)]),
    "seed": (
        "<seed:tool_call>\n<function=weather>\n<parameter=tags>[1, 2]</parameter>\n</function>\n</seed:tool_call>",
        [("call", "weather", 0), ("arguments", '{"tags": [1, 2]}', 0)],
    ),
    "minimax": (
        (
            '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Zürich</parameter>\n</invoke>\n'
            '<invoke name="time">\n</invoke>\n</minimax:tool_call>'
        ),
        [("call", "weather", 0), ("arguments", '{"city": "Zürich"}', 0), ("call", "time", 1), ("arguments", "{}", 1)],
    ),
    "glm 4.5": (
        (
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call><tool_call>time</tool_call>"
        ),
        [
            ("call", "weather", 0),
            ("arguments", '{"city": "Paris", "days": 2}', 0),
            ("call", "time", 1),
            ("arguments", "{}", 1),
        ],
    ),
    "glm 4": ('weather\n{"city": "Paris"}', [("call", "weather", 0), ("arguments", '{"city": "Paris"}', 0)]),
    "a name that begins an answer": ("time\nand again", [("content", "time\nand again", -1)]),
    "deepseek": (
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜>"
        ),
        [("call", "time", 0), ("arguments", "{}", 0), ("call", "time", 1), ("arguments", '{"a": 1}', 1)],
    ),
    "kimi": (
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.time:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>"
        ),
        [("call", "time", 0), ("arguments", "{}", 0)],
    ),
    "cohere": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "time", "parameters": {"a": 1}}\n]<|END_ACTION|>',
        [("call", "time", 0), ("arguments", '{"a": 1}', 0)],
    ),
    "cut in an element": (
        "<tool_call><function=weather><parameter=days>3</parameter><parameter=city>Par",
        [("call", "weather", 0), ("arguments", '{"days": 3', 0)],
    ),
    "bare": (CALL, [("call", "weather", 0), ("arguments", "", 0)]),
    "fenced": (f"```json\n{CALL}\n```", [("call", "weather", 0), ("arguments", "", 0)]),
    "arguments first": (
        '{"arguments": {"a": 1}, "name": "time"}',
        [("call", "time", 0), ("arguments", '{"a": 1}', 0)],
    ),
    "arguments as a string": (
        '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>',
        [("call", "time", 0), ("arguments", '{"a": 1}', 0)],
    ),
    "nested in function": (
        '{"type": "function", "function": {"name": "time", "arguments": {}}}',
        [("call", "time", 0), ("arguments", "{}", 0)],
    ),
    "json that is no call": ('{"name": "Bob", "arguments": {}}', [("content", '{"name": "Bob", "arguments": {}}', -1)]),
    "json of another kind": ('{"a": {"b": 1}} done', [("content", '{"a": {"b": 1}} done', -1)]),
    "a mark in words": ("Write <tool_call> and stop.", [("content", "Write <tool_call> and stop.", -1)]),
    "no json": ("<tool_call>{weather}</tool_call>", [("content", "<tool_call>{weather}</tool_call>", -1)]),
    "a code fence": ("```python\nprint()\n```", [("content", "```python\nprint()\n```", -1)]),
    "cut in a call": ('<tool_call>{"name": "ti', [("content", '<tool_call>{"name": "ti', -1)]),
    "cut in arguments": (
        '<tool_call>{"name": "time", "arguments": {"a": "b',
        [("call", "time", 0), ("arguments", '{"a": "b', 0)],
    ),
    "cut in thinking": ("<think>so", [("reasoning", "so", -1)]),
    "nothing": ("", []),
    "white space": (" \n ", [("content", " \n ", -1)]),
}


def same(found: Parts, wanted: Parts) -> bool:
    """An empty text of arguments stands for `ARGUMENTS`, however they are written."""
    if [(kind, call) for kind, _, call in found] != [(kind, call) for kind, _, call in wanted]:
        return False
    return all(
        json.loads(text) == ARGUMENTS if kind == "arguments" and not expected else text == expected
        for (kind, text, _), (_, expected, _) in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("name", CASES)
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_the_parts_of_an_answer(name: str, cuts: list[int]) -> None:
    text, wanted = CASES[name]
    found = read(text, cuts)
    assert same(found, wanted), found


@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_thinking_that_the_prompt_began(cuts: list[int]) -> None:
    assert read("so\n\nso</think>\n\nYes", cuts, thinking=True) == [
        ("reasoning", "so\n\nso", -1),
        ("content", "Yes", -1),
    ]


@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_without_tools_calls_are_text(cuts: list[int]) -> None:
    text = f"<tool_call>{CALL}</tool_call>"
    assert read(text, cuts, tools={}) == [("content", text, -1)]


MARKS = [
    "<tool_call>",
    "<function=time>",
    "<parameter=a>",
    "</parameter>",
    "</function>",
    "time",
    "[time(",
    ")",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<think>",
    "</think>",
    CALL,
    "{",
    "}",
    "a",
    "\n",
]


@given(st.lists(st.sampled_from([*MARKS, '"', "\\", "[", "]", "name", "[ARGS]", "```json\n"]), max_size=14), st.data())
def test_nothing_said_is_lost_and_cuts_change_nothing(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = data.draw(st.lists(st.integers(0, 200), max_size=6))
    whole = read(text, [])
    assert read(text, cuts) == whole
    assert read(text, list(range(len(text)))) == whole
    if "<think>" not in text and not any(kind == "call" for kind, _, _ in whole):
        assert "".join(part for _, part, _ in whole) == text


def test_text_is_given_out_as_it_comes() -> None:
    reader = AnswerReader(TOOLS, THINK)
    assert [part.text for part in reader.push("Hello wor")] == ["Hello wor"]
    assert reader.push(" <tool") == [("content", " ", -1)]
    assert reader.push("box>") == [("content", "<toolbox>", -1)]
    reader.push("<tool_call>")
    assert reader.push('{"name": "weather", "arguments": {"ci') == [("call", "weather", 0), ("arguments", '{"ci', 0)]
    assert reader.push('ty": 1') == [("arguments", 'ty": 1', 0)]


def test_a_long_answer_takes_time_in_proportion() -> None:

    def seconds(count: int) -> float:
        reader = AnswerReader(TOOLS, THINK)
        began_s = time.perf_counter()
        for _ in range(count):
            reader.push("<tool_ word { \n")
        return time.perf_counter() - began_s

    seconds(100)
    assert seconds(8000) < 40 * seconds(1000)


# ---------------------------------------------------------------- dialects


def dialect(template: str, *extra: str) -> Dialect:
    files = {"tokenizer.json": json.dumps(tok_json(("<s>", "</s>", *extra))).encode()}
    return Dialect.found([template], Tokenizer.from_files(files))


def test_dialects_are_found() -> None:
    assert dialect("{{ messages }}") == Dialect()
    hermes = dialect("{% if tools %}<tool_call>{% endif %}", "<tool_call>", "</tool_call>", "<think>", "</think>")
    assert hermes.knows_tools
    assert hermes.call == CallStyle("<tool_call>\n", closing="\n</tool_call>")
    assert hermes.think == THINK
    assert dialect("tools [TOOL_CALLS]", "[TOOL_CALLS]").call == CallStyle("[TOOL_CALLS][", closing="]")
    assert dialect('tools "parameters"').call.name == ('{"name": "', '", "parameters": ')
    coder = dialect("tools <tool_call> <function= <parameter=").call
    assert coder.parameter == ("<parameter=", ">\n", "\n</parameter>\n")
    assert dialect("content.split('</think>')").think == THINK


def test_tools_in_words() -> None:
    tool = {"type": "function", "function": {"name": "time", "parameters": {}}}
    called = {"function": {"name": "time", "arguments": {"a": 1}}}
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "noon", "name": "time"},
    ]
    plain = spelled_out(turns, [tool])
    assert plain[0]["content"].startswith("Be brief.\n\nYou can call")
    assert '"name": "time"' in plain[0]["content"]
    assert plain[2] == {"role": "assistant", "content": '{"name": "time", "arguments": {"a": 1}}'}
    assert plain[3] == {"role": "user", "content": "time returned: noon"}
    assert spelled_out(turns[1:2], [tool])[0]["role"] == "system"
    assert spelled_out(turns[:2], []) == turns[:2]
