"""How a model's family marks thinking and calls of tools, and what a model without such marks is told instead."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.text.channels import CHANNEL_TOKENS
from engine.text.tokenizer import Tokenizer

__all__ = ["CALL_TOKENS", "THINK_MARKS", "CallStyle", "Dialect", "spelled_out"]

THINK_MARKS = (
    ("<think>", "</think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)

Turn = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a call is written.

        opening  name[0] NAME name[1]  ARGUMENTS  end  closing

    ARGUMENTS are a JSON object or, with `parameter`, each of them in turn:

        parameter[0] KEY parameter[1] VALUE parameter[2]

    where strings stand as they are and other values as JSON.
    """

    opening: str = ""
    name: tuple[str, str] = ('{"name": "', '", "arguments": ')
    end: str = "}"
    closing: str = ""
    parameter: tuple[str, str, str] | None = None


# By what a chat template contains; the first that fits counts.
_STYLES: tuple[tuple[str, CallStyle], ...] = (
    (
        "<seed:tool_call>",
        CallStyle(
            "<seed:tool_call>\n",
            ("<function=", ">\n"),
            "</function>",
            "\n</seed:tool_call>",
            ("<parameter=", ">", "</parameter>\n"),
        ),
    ),
    (
        "<minimax:tool_call>",
        CallStyle(
            "<minimax:tool_call>\n",
            ('<invoke name="', '">\n'),
            "</invoke>",
            "\n</minimax:tool_call>",
            ('<parameter name="', '">', "</parameter>\n"),
        ),
    ),
    (
        "<arg_key>",
        CallStyle(
            "<tool_call>", ("", "\n"), "", "</tool_call>", ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
        ),
    ),
    (
        "<parameter=",
        CallStyle(
            "<tool_call>\n",
            ("<function=", ">\n"),
            "</function>",
            "\n</tool_call>",
            ("<parameter=", ">\n", "\n</parameter>\n"),
        ),
    ),
    ("<function=", CallStyle("", ("<function=", ">"), "</function>")),
    (
        "<|tool_call_argument_begin|>",
        CallStyle(
            "<|tool_calls_section_begin|><|tool_call_begin|>",
            ("functions.", ":0<|tool_call_argument_begin|>"),
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
    ),
    (
        "<｜tool▁sep｜>",
        CallStyle(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
            ("", "<｜tool▁sep｜>"),
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    (
        "<|START_ACTION|>",
        CallStyle(
            "<|START_ACTION|>[", ('{"tool_call_id": "0", "tool_name": "', '", "parameters": '), "}", "]<|END_ACTION|>"
        ),
    ),
    ("<tool_calls>", CallStyle("<tool_calls>[", closing="]</tool_calls>")),
    ("<TOOLCALL>", CallStyle("<TOOLCALL>[", closing="]</TOOLCALL>")),
    ("<tool_call>", CallStyle("<tool_call>\n", closing="\n</tool_call>")),
    ("<|tool_call|>", CallStyle("<|tool_call|>[", closing="]")),
    ("[ARGS]", CallStyle("[TOOL_CALLS]", ("", "[ARGS]"), "")),
    ("[TOOL_CALLS]", CallStyle("[TOOL_CALLS][", closing="]")),
    ('"parameters"', CallStyle(name=('{"name": "', '", "parameters": '))),
)

CALL_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_calls>",
    "</tool_calls>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_start|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<TOOLCALL>",
    "</TOOLCALL>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    "<|python_tag|>",
)
"""Marks of calls that are one token in some vocabulary."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """What is found in a chat template and a vocabulary.

    knows_tools: the template writes tools and their calls down itself.
    call: how the model is made to write a call.
    think: what thinking begins and ends with; None if the template and the vocabulary have no such marks.
    channels: answers are messages in channels; see `engine.text.channels`.
    tokens: the marks that are one token, with their ids.
    """

    knows_tools: bool = False
    call: CallStyle = CallStyle()
    think: tuple[str, str] | None = None
    channels: bool = False
    tokens: Mapping[str, int] = field(default_factory=dict, hash=False)

    @classmethod
    def found(cls, templates: Sequence[str], tokenizer: Tokenizer) -> Dialect:
        """The dialect of a model with these chat templates."""
        source = "\n".join(templates)
        marks = [*CALL_TOKENS, *CHANNEL_TOKENS, *(mark for pair in THINK_MARKS for mark in pair)]
        ids = {mark: token for mark in marks if (token := tokenizer.token_to_id(mark)) is not None}
        channels = all(mark in ids for mark in CHANNEL_TOKENS) and "<|channel|>" in source
        think = next(
            (pair for pair in THINK_MARKS if channels or pair[1] in source or all(mark in ids for mark in pair)),
            None,
        )
        if "tools" not in source:
            return cls(think=think, channels=channels, tokens=ids)
        style = next((style for sign, style in _STYLES if sign in source), CallStyle())
        return cls(knows_tools=True, call=style, think=think, channels=channels, tokens=ids)


def spelled_out(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """A conversation with tools as plain text, for a template that knows nothing of them."""
    plain = [_plain(turn) for turn in turns]
    if not tools:
        return plain
    described = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    told = (
        "You can call these functions:\n"
        f"{described}\n"
        'To call one, answer with nothing but {"name": "<its name>", "arguments": {<its arguments>}}. '
        "Otherwise answer in words."
    )
    if plain and plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{told}"}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _plain(turn: Turn) -> Turn:
    if turn["role"] == "tool":
        name = turn.get("name")
        return {"role": "user", "content": f"{name or 'The function'} returned: {turn['content']}"}
    calls = [
        json.dumps({"name": f.get("name"), "arguments": f.get("arguments")}, ensure_ascii=False)
        for call in turn.get("tool_calls") or ()
        for f in (call.get("function", call),)
    ]
    return {"role": turn["role"], "content": "\n".join(filter(None, (turn["content"], *calls)))}
