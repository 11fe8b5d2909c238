"""Takes an answer apart while it grows: thinking, calls of tools, and what is said.

Reads the ways in which the common families write calls, whichever model wrote
them, because small models mix them up:

    <tool_call>{"name": "f", "arguments": {...}}</tool_call>       Hermes, Qwen
    [TOOL_CALLS][{"name": "f", "arguments": {...}}]                Mistral
    [TOOL_CALLS]f[ARGS]{...}                                       Mistral, later
    <|python_tag|>{"name": "f", "parameters": {...}}               Llama 3
    {"name": "f", "arguments": {...}}                              as the whole answer, also in a fence

A mark that turns out to introduce no call is given out as the text it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

__all__ = ["AnswerReader", "Part"]

PartKind = Literal["content", "reasoning", "call", "arguments"]

_MARKS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
_CERTAIN = ("<tool_call>", "[TOOL_CALLS]")  # whatever name comes, it is meant as a call
_BETWEEN = ("</tool_call>", "</s>", "<|eom_id|>", "```", ",", "]", ";")
# What may stand before a call that is the whole answer, and what may become that.
_FENCE = r"(?:```(?:json|tool_call|tool_code)?[ \t]*\n\s*)?"
_BARE = re.compile(rf"{_FENCE}(?=\{{|\[\s*\{{)")
_BARE_SO_FAR = re.compile(rf"`{{0,2}}|```[a-z_]{{0,9}}[ \t]*|{_FENCE}(?:\[\s*)?")
_STRING = r'"((?:[^"\\\x00-\x1f]|\\.)*)"'
_HEAD = re.compile(
    rf'\s*\[?\s*\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*{_STRING}\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
_NAMED = re.compile(r"\s*([\w.-]{1,64})(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(?=\{)")
_NAMED_SO_FAR = re.compile(r"\s*[\w.-]{0,64}[\w\[\]-]*\s*\Z")
_LONGEST_CALL = 1 << 16  # characters of one that is collected before it is understood


class Part(NamedTuple):
    """A piece of an answer. call: the number of the call that "call" (text is the name) and "arguments" belong to."""

    kind: PartKind
    text: str
    call: int = -1


class AnswerReader:
    """Text in, parts out; all parts' texts, in order, are the answer but for the marks.

    tools: names of functions that may be called; without any, calls are text.
    think: what thinking begins and ends with. thinking: the answer begins inside it.
    calls: how many calls there were so far.
    """

    def __init__(
        self, tools: Collection[str] = (), think: tuple[str, str] | None = None, *, thinking: bool = False
    ) -> None:
        self.calls = 0
        self._tools = frozenset(tools)
        self._think = think
        self._text = ""  # not given out yet
        self._parts: list[Part] = []
        self._last = False  # nothing more comes
        self._after_mark = thinking  # blank lines are not part of what comes
        self._certain = False  # the mark is used for calls only, whatever name comes
        self._state: Literal["start", "thinking", "text", "call", "arguments", "rest", "between"] = "start"
        self._mark = ""  # what introduced the present call
        self._named = False  # the present call is a name and its arguments, without an object around both
        self._value = _Value()
        if thinking and think is not None:
            self._state = "thinking"

    def push(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        self._text += text
        return self._read()

    def finish(self) -> list[Part]:
        """The parts that are left at the end of the answer."""
        self._last = True
        return self._read()

    def _read(self) -> list[Part]:
        if self._after_mark:
            self._text = self._text.lstrip("\n")
            self._after_mark = not self._text
        while self._STEPS[self._state](self):
            pass
        parts, self._parts = self._parts, []
        return [part for part in parts if part.text or part.kind == "call"]

    # Each returns whether the state changed and there may be more to read.

    def _in_start(self) -> bool:
        """Before the first word: thinking, a call that is the whole answer, or text."""
        bare = self._text.lstrip()
        if self._think is not None:
            opening = self._think[0]
            if bare.startswith(opening):
                self._text, self._state = bare[len(opening) :], "thinking"
                return self._skip_blank_lines()
            if opening.startswith(bare) and not self._last:
                return False
        if self._tools:
            before = _BARE.match(bare)
            if before is not None:
                end = len(self._text) - len(bare) + before.end()
                self._begin_call(self._text[:end], self._text[end:])
                return True
            if _BARE_SO_FAR.fullmatch(bare) and not self._last:
                return False
        self._state = "text"
        return True

    def _in_thinking(self) -> bool:
        assert self._think is not None
        thought, found, rest = self._text.partition(self._think[1])
        if found:
            self._parts.append(Part("reasoning", thought.rstrip("\n")))
            self._text, self._state, self._think = rest, "start", None
            return self._skip_blank_lines()
        self._give("reasoning", [self._think[1]])
        return False

    def _in_text(self) -> bool:
        marks = _MARKS if self._tools else ()
        places = [(place, mark) for mark in marks if (place := self._text.find(mark)) >= 0]
        if places:
            place, mark = min(places)
            # The blank lines before a call belong to its mark.
            said = self._text[:place].rstrip("\n")
            self._parts.append(Part("content", said))
            self._begin_call(self._text[len(said) : place + len(mark)], self._text[place + len(mark) :])
            return True
        self._give("content", marks)
        return False

    def _skip_blank_lines(self) -> bool:
        """What a mark is followed by; True when there is more to read."""
        self._text = self._text.lstrip("\n")
        self._after_mark = not self._text
        return bool(self._text) or self._last

    def _give(self, kind: PartKind, marks: Collection[str]) -> None:
        """Give out the text but for an end that may become a mark, with the blank lines before it."""
        certain = self._text
        if marks and not self._last:
            certain = certain[: len(certain) - max(_overlap(certain, mark) for mark in marks)].rstrip("\n")
        self._parts.append(Part(kind, certain))
        self._text = self._text[len(certain) :]

    def _begin_call(self, mark: str, text: str) -> None:
        self._mark, self._text, self._state = mark, text, "call"
        self._certain = mark.strip() in _CERTAIN or (self._certain and not mark)

    def _in_call(self) -> bool:
        """After a mark: find the name; what is no call goes back to the text."""
        head = _HEAD.match(self._text) or (_NAMED.match(self._text) if self._mark.endswith("[TOOL_CALLS]") else None)
        if head is not None and head.end() < len(self._text):
            name = _unescaped(head[1])
            if name not in self._tools and not self._certain:
                return self._no_call()
            if self._text[head.end()] == "{":
                self._parts.append(Part("call", name, self.calls))
                self._named = not self._text.lstrip().startswith(("{", "["))
                self._text = self._text[head.end() :]
                self._value = _Value()
                self._state = "arguments"
                return True
        whole = _whole_value(self._text.lstrip())
        if whole is not None:
            calls = [_call_of(item) for item in (whole[0] if isinstance(whole[0], list) else [whole[0]])]
            if not calls or any(call is None or not (self._certain or call[0] in self._tools) for call in calls):
                return self._no_call()
            for call in filter(None, calls):
                self._parts += (Part("call", call[0], self.calls), Part("arguments", call[1], self.calls))
                self.calls += 1
            self._text = whole[1]
            self._state = "between"
            return True
        begun = self._text.lstrip()[:1] in ("", "{", "[")
        may_be_named = self._mark.endswith("[TOOL_CALLS]") and _NAMED_SO_FAR.match(self._text) is not None
        if self._last or not (begun or may_be_named) or len(self._text) > _LONGEST_CALL:
            return self._no_call()
        return False

    def _no_call(self) -> bool:
        """Give the mark and what may be its first character out as text."""
        self._parts.append(Part("content", self._mark + self._text[:1]))
        self._text = self._text[1:]
        self._state = "text"
        return True

    def _in_arguments(self) -> bool:
        end = self._value.end_of(self._text)
        taken = len(self._text) if end is None else end
        self._parts.append(Part("arguments", self._text[:taken], self.calls))
        self._text = self._text[taken:]
        if end is None and not self._last:
            return False
        self.calls += 1
        self._state = "between" if self._named else "rest"
        return True

    def _in_rest(self) -> bool:
        """Behind the arguments: the brace that closes the call."""
        _, found, rest = self._text.partition("}")
        self._text = rest if found else ""
        if found:
            self._state = "between"
        return bool(found)

    def _in_between(self) -> bool:
        """Behind a call: its closing mark, another call, or text."""
        self._text = self._text.lstrip()
        for sign in _BETWEEN:
            if self._text.startswith(sign):
                self._text = self._text[len(sign) :]
                return True
        for mark in _MARKS:
            if self._text.startswith(mark):
                self._begin_call(mark, self._text[len(mark) :])
                return True
        if self._text.startswith("{"):
            self._begin_call("", self._text)
            return True
        if not self._last and any(sign.startswith(self._text) for sign in (*_BETWEEN, *_MARKS)):
            return False
        self._state = "text"
        return True

    _STEPS: ClassVar[Mapping[str, Callable[[AnswerReader], bool]]] = {
        "start": _in_start,
        "thinking": _in_thinking,
        "text": _in_text,
        "call": _in_call,
        "arguments": _in_arguments,
        "rest": _in_rest,
        "between": _in_between,
    }


class _Value:
    """Finds the end of a JSON object that comes bit by bit."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end_of(self, text: str) -> int | None:
        """Where in `text`, which goes on from the last one, the object ends; None if it does not."""
        for place, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return None


def _overlap(text: str, mark: str) -> int:
    """How many of the text's last characters may be the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def _whole_value(text: str) -> tuple[Any, str] | None:
    """The JSON value that `text` begins with and what follows it; None while there is none."""
    if text[:1] not in ("{", "["):
        return None
    end = _Value().end_of(text)
    if end is None:
        return None
    try:
        return json.loads(text[:end]), text[end:]
    except (ValueError, RecursionError):
        return {}, text[end:]  # balanced, but no JSON: no call


def _call_of(value: Any) -> tuple[str, str] | None:
    """(name, arguments as JSON) of an object that describes a call."""
    inner = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        return None
    arguments = inner.get("arguments", inner.get("parameters"))
    if isinstance(arguments, str):
        return inner["name"], arguments
    return (inner["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _unescaped(text: str) -> str:
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        return text
