"""How a model's family marks thinking and calls of tools, and what a model without such marks is told instead."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.text.tokenizer import Tokenizer

__all__ = ["CALL_TOKENS", "THINK_MARKS", "Dialect", "spelled_out"]

THINK_MARKS = (("<think>", "</think>"), ("<|START_THINKING|>", "<|END_THINKING|>"), ("[THINK]", "[/THINK]"))
CALL_TOKENS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")

Turn = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dialect:
    """What is found in a chat template and a vocabulary.

    knows_tools: the template writes tools and their calls down itself.
    call_marks: what stands around a call that the model is made to write.
    arguments_key: what the family calls the arguments in a call's JSON.
    think: what thinking begins and ends with; None if the template and the vocabulary have no such marks.
    tokens: the marks that are one token, with their ids.
    """

    knows_tools: bool = False
    call_marks: tuple[str, str] = ("", "")
    arguments_key: str = "arguments"
    think: tuple[str, str] | None = None
    tokens: Mapping[str, int] = field(default_factory=dict, hash=False)

    @classmethod
    def found(cls, templates: Sequence[str], tokenizer: Tokenizer) -> Dialect:
        """The dialect of a model with these chat templates."""
        source = "\n".join(templates)
        marks = [*CALL_TOKENS, *(mark for pair in THINK_MARKS for mark in pair)]
        ids = {mark: token for mark in marks if (token := tokenizer.token_to_id(mark)) is not None}
        think = next(
            (pair for pair in THINK_MARKS if pair[1] in source or all(mark in ids for mark in pair)),
            None,
        )
        knows_tools = "tools" in source
        if not knows_tools:
            return cls(think=think, tokens=ids)
        if "<tool_call>" in source:
            return cls(
                knows_tools=True,
                call_marks=("<tool_call>\n", "\n</tool_call>"),
                arguments_key="arguments",
                think=think,
                tokens=ids,
            )
        if "[TOOL_CALLS]" in source:
            return cls(
                knows_tools=True, call_marks=("[TOOL_CALLS][", "]"), arguments_key="arguments", think=think, tokens=ids
            )
        if "<|python_tag|>" in ids or '"parameters"' in source:
            return cls(knows_tools=True, call_marks=("", ""), arguments_key="parameters", think=think, tokens=ids)
        return cls(knows_tools=True, think=think, tokens=ids)


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
