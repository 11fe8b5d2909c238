"""Takes an answer apart while it grows: thinking, calls of tools, and what is said.

Reads the ways in which the common families write calls, whichever model wrote
them, because small models mix them up. Behind one of the marks, or as the
whole answer, also in a fence:

    {"name": "f", "arguments": {...}}     Hermes, Qwen, Llama ("parameters"), Cohere ("tool_name"), many more; or a list
    f[ARGS]{...}                          Mistral, with a name and an object behind it; so do DeepSeek, Kimi, GLM 4
    <function=f><parameter=k>v</parameter></function>                  Qwen Coder, Seed
    <invoke name="f"><parameter name="k">v</parameter></invoke>        MiniMax, DeepSeek
    f<arg_key>k</arg_key><arg_value>v</arg_value>                      GLM 4.5
    [f(k=v), ...]                                                      Llama 4, LFM2, Olmo

A mark that turns out to introduce no call is given out as the text it is.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

__all__ = ["AnswerReader", "Part", "overlap"]

PartKind = Literal["content", "reasoning", "call", "arguments"]
_State = Literal["start", "thinking", "text", "call", "arguments", "parameters", "rest", "between"]

# Used for calls only: whatever name comes, it is meant as one.
_CERTAIN = (
    "<tool_call>",
    "<tool_calls>",
    "<function_calls>",
    "<TOOLCALL>",
    "<seed:tool_call>",
    "<minimax:tool_call>",
    "<｜DSML｜function_calls>",
    "<｜tool▁calls▁begin｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_start|>",
    "<|tool_call|>",
    "<|START_ACTION|>",
    "<|action_start|>",
    "[TOOL_CALLS]",
)
# Calls of their own, if they name a tool.
_ELEMENTS = ("<function=", "<function name=", "<invoke name=")
_MARKS = (*_CERTAIN, "<|python_tag|>", *_ELEMENTS)
# Further marks between one of these and the call.
_INNER = ("<tool_call>", "<｜tool▁call▁begin｜>", "<|tool_call_begin|>", "<|plugin|>")
_BETWEEN = (
    "</tool_call>",
    "</tool_calls>",
    "</function>",
    "</function_calls>",
    "</TOOLCALL>",
    "</invoke>",
    "</seed:tool_call>",
    "</minimax:tool_call>",
    "</｜DSML｜invoke>",
    "</｜DSML｜function_calls>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "<|/tool_call|>",
    "<|END_ACTION|>",
    "<|action_end|>",
    "</s>",
    "<|eom_id|>",
    "```",
    ",",
    "]",
    ";",
)
# What may stand before a call that is the whole answer, and what may become that.
_FENCE = r"(?:```(?:json|tool_call|tool_code)?[ \t]*\n\s*)?"
_BARE = re.compile(rf"{_FENCE}(?=\{{|\[\s*\{{|\[\s*[\w.-]{{1,64}}\()")
_BARE_SO_FAR = re.compile(rf"`{{0,2}}|```[a-z_]{{0,9}}[ \t]*|{_FENCE}(?:\[\s*(?:[\w.-]{{0,64}})?)?")
_STRING = r'"((?:[^"\\\x00-\x1f]|\\.)*)"'
_HEAD = re.compile(
    rf'\s*\[?\s*\{{\s*(?:"(?:type|id|tool_call_id)"\s*:\s*"[\w.-]*"\s*,\s*)*'
    rf'"(?:name|tool_name)"\s*:\s*{_STRING}\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
_NAME = r"([\w.-]{1,64})"
_SPACE = r"(?:\w+:|｜DSML｜)?"  # of names of elements
_ELEMENT = rf'<{_SPACE}(?:function|invoke)(?:=| name=)"?{_NAME}"?>\s*'
_OBJECT_BEHIND = r"\s*(?:```json\s*)?(?=\{)"
# A name, and an object of arguments behind it.
_NAMED = re.compile(
    rf"\s*(?:{_ELEMENT}(?=\{{)"
    rf"|(?:function<｜tool▁sep｜>|functions\.)?{_NAME}(?::\d+)?(?:\[CALL_ID\][\w-]*)?"
    rf"(?:\[ARGS\]|<｜tool▁sep｜>|<\|tool_call_argument_begin\|>)?{_OBJECT_BEHIND})"
)
# A name, and an element for each argument behind it.
_LISTED = re.compile(rf"\s*(?:{_ELEMENT}(?=<)|{_NAME}\s*(?=<arg_key>|</tool_call>))")
_PARAMETER = re.compile(
    rf'\s*(?:<{_SPACE}param(?:eter)?(?:=| name=)"?([\w.-]{{1,64}})"?(?: string="(?:true|false)")?>'
    r"|<arg_key>([^<]{1,64})</arg_key>\s*<arg_value>)"
)
_PARAMETER_END = re.compile(rf"</{_SPACE}param(?:eter)?>|</arg_value>|(?=</{_SPACE}(?:function|invoke)>)")
_LISTED_END = re.compile(rf"\s*(?:</{_SPACE}(?:function|invoke)>|(?=</tool_call>))")
_PYTHON = re.compile(rf"\s*\[?\s*{_NAME}\(")
_LONGEST_HEAD = 200  # characters between a mark and the arguments
_LONGEST_CALL = 1 << 16  # characters of one that is collected before it is understood


class Part(NamedTuple):
    """A piece of an answer. call: the number of the call that "call" (text is the name) and "arguments" belong to."""

    kind: PartKind
    text: str
    call: int = -1


class AnswerReader:
    """Text in, parts out; all parts' texts, in order, are the answer but for the marks.

    tools: functions that may be called, with the schemas of their parameters; without any, calls are text.
    think: what thinking begins and ends with. thinking: the answer begins inside it.
    calls: how many calls there were so far.
    """

    def __init__(
        self,
        tools: Mapping[str, Mapping[str, Any] | None] = MappingProxyType({}),
        think: tuple[str, str] | None = None,
        *,
        thinking: bool = False,
    ) -> None:
        self.calls = 0
        self._tools = tools
        self._think = think
        self._text = ""  # not given out yet
        self._parts: list[Part] = []
        self._last = False  # nothing more comes
        self._after_mark = thinking  # blank lines are not part of what comes
        self._certain = False  # the mark is used for calls only, whatever name comes
        self._state: _State = "start"
        self._mark = ""  # what introduced the present call
        self._named = False  # the present call is a name and its arguments, without an object around both
        self._python = False  # the present call is written as in Python
        self._name = ""  # of the present call
        self._given = 0  # arguments of the present call that were given out, where they come one by one
        self._value = _Extent()
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
                self._begin_call(self._text[:end], self._text[end:], certain=False)
                return True
            name, line_end, behind = bare.partition("\n")
            if name in self._tools and behind.lstrip().startswith("{"):
                self._begin_call("", self._text, certain=False)
                return True
            named = not behind.strip() and any(
                name == tool if line_end else tool.startswith(name) for tool in self._tools
            )
            if (named or _BARE_SO_FAR.fullmatch(bare)) and not self._last:
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
            self._begin_marked(mark, place, self._text[len(said) : place])
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
            certain = certain[: len(certain) - max(overlap(certain, mark) for mark in marks)].rstrip("\n")
        self._parts.append(Part(kind, certain))
        self._text = self._text[len(certain) :]

    def _begin_marked(self, mark: str, place: int, before: str = "") -> None:
        """A mark was found; `before` is the white space that belongs to it."""
        end = place if mark in _ELEMENTS else place + len(mark)
        self._begin_call(before + self._text[place:end], self._text[end:], certain=mark in _CERTAIN)

    def _begin_call(self, mark: str, text: str, *, certain: bool) -> None:
        self._mark, self._text, self._certain, self._state = mark, text, certain, "call"
        self._python = False

    def _in_call(self) -> bool:
        """After a mark: find the name; what is no call goes back to the text."""
        for mark in _INNER:
            if self._text.lstrip().startswith(mark):
                place = self._text.index(mark) + len(mark)
                self._mark, self._text = self._mark + self._text[:place], self._text[place:]
                return True
        head, named = _HEAD.match(self._text), False
        if head is None:
            head, named = _NAMED.match(self._text), True
        if head is not None and head.end() < len(self._text):
            name = _unescaped(head[head.lastindex or 1])
            if name not in self._tools and not self._certain:
                return self._no_call()
            if self._text[head.end()] == "{":
                self._parts.append(Part("call", name, self.calls))
                self._named = named
                self._text = self._text[head.end() :]
                self._value = _Extent()
                self._state = "arguments"
                return True
        listed = _LISTED.match(self._text)
        if listed is not None:
            name = listed[listed.lastindex or 1]
            if name not in self._tools and not self._certain:
                return self._no_call()
            self._parts.append(Part("call", name, self.calls))
            self._text, self._name, self._given = self._text[listed.end() :], name, 0
            self._state = "parameters"
            return True
        python = _PYTHON.match(self._text)
        self._python = python is not None
        if python is not None and python[1] not in self._tools and not self._certain:
            return self._no_call()
        whole = _whole_value(self._text.lstrip()) if python is None else _whole_python(self._text, python)
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
        begun = python is not None or self._text.lstrip()[:1] in ("", "{", "[")
        if self._last or len(self._text) > (_LONGEST_CALL if begun else _LONGEST_HEAD):
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

    def _in_parameters(self) -> bool:
        """Arguments that come as an element each; given out as the JSON object that they are."""
        begin = _PARAMETER.match(self._text)
        if begin is not None:
            end = _PARAMETER_END.search(self._text, begin.end())
            if end is not None:
                key = begin[begin.lastindex or 1]
                told = self._text[begin.end() : end.start()].removeprefix("\n").removesuffix("\n")
                self._give_argument(key, _typed(told, _schema_of(self._tools.get(self._name), key)))
                self._text = self._text[end.end() :]
                return True
            if not self._last and len(self._text) <= _LONGEST_CALL:
                return False
        closed = _LISTED_END.match(self._text)
        if closed is None and not self._last and len(self._text) <= _LONGEST_HEAD:
            return False
        if closed is not None:
            self._text = self._text[closed.end() :]
        # An answer that was cut in the middle of a call leaves its JSON cut, too.
        if closed is not None or not self._last:
            self._parts.append(Part("arguments", "}" if self._given else "{}", self.calls))
        else:
            self._text = ""
        self.calls += 1
        self._state = "between"
        return True

    def _give_argument(self, key: str, value: Any) -> None:
        before = ", " if self._given else "{"
        self._given += 1
        told = f"{before}{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        self._parts.append(Part("arguments", told, self.calls))

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
                self._begin_marked(mark, 0)
                return True
        if self._text.startswith(("{", *_INNER)) or (self._python and _PYTHON.match(self._text)):
            self._begin_call("", self._text, certain=self._certain)
            return True
        if self._python and not self._last and re.fullmatch(_NAME, self._text):
            return False
        if not self._last and any(sign.startswith(self._text) for sign in (*_BETWEEN, *_MARKS, *_INNER)):
            return False
        self._state = "text"
        return True

    _STEPS: ClassVar[Mapping[str, Callable[[AnswerReader], bool]]] = {
        "start": _in_start,
        "thinking": _in_thinking,
        "text": _in_text,
        "call": _in_call,
        "arguments": _in_arguments,
        "parameters": _in_parameters,
        "rest": _in_rest,
        "between": _in_between,
    }


class _Extent:
    """Finds the end of an object, a list or a call that comes bit by bit. quotes: what strings stand in."""

    def __init__(self, quotes: str = '"') -> None:
        self._quotes = quotes
        self._depth = 0
        self._quote = ""  # of the string that is open
        self._escaped = False

    def end_of(self, text: str) -> int | None:
        """Where in `text`, which goes on from the last one, the object ends; None if it does not."""
        for place, character in enumerate(text):
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in self._quotes:
                self._quote = character
            elif character in "{[(":
                self._depth += 1
            elif character in "}])":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return None


def overlap(text: str, mark: str) -> int:
    """How many of the text's last characters may be the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def _whole_value(text: str) -> tuple[Any, str] | None:
    """The JSON value that `text` begins with and what follows it; None while there is none."""
    if text[:1] not in ("{", "["):
        return None
    end = _Extent().end_of(text)
    if end is None:
        return None
    try:
        return json.loads(text[:end]), text[end:]
    except (ValueError, RecursionError):
        return {}, text[end:]  # balanced, but no JSON: no call


def _whole_python(text: str, head: re.Match[str]) -> tuple[Any, str] | None:
    """The call, written as in Python, that `text` begins with, and what follows it; None while it is not all there.

    Nothing is evaluated but constants. What is no call with constants by name becomes an object that is none.
    """
    begin = head.end() - 1
    end = _Extent("\"'").end_of(text[begin:])
    if end is None:
        return None
    rest = text[begin + end :]
    try:
        call = ast.parse(f"f{text[begin : begin + end]}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return {}, rest
        arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg is not None}
        json.dumps(arguments, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return {}, rest
    return {"name": head[1], "arguments": arguments}, rest


def _schema_of(parameters: Mapping[str, Any] | None, key: str) -> Any:
    properties = (parameters or {}).get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def _kinds(schema: Any) -> set[str]:
    """JSON types that a schema names; empty when it says nothing simple."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type", [])
    kinds = {named} if isinstance(named, str) else {kind for kind in named if isinstance(kind, str)}
    if isinstance(schema.get("enum"), list):
        kinds |= {_KIND_OF.get(type(value), "null") for value in schema["enum"]}
    for choice in ("anyOf", "oneOf"):
        if isinstance(schema.get(choice), list):
            kinds |= {kind for one in schema[choice] for kind in _kinds({**one, choice: None}) if isinstance(one, dict)}
    return kinds


_KIND_OF = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}


def _typed(told: str, schema: Any) -> Any:
    """An argument that was written as bare text, as the value that its schema wants."""
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return told
    try:
        value = json.loads({"True": "true", "False": "false", "None": "null"}.get(told, told), parse_constant=_refused)
    except (ValueError, RecursionError):
        return told
    kind = _KIND_OF.get(type(value), "null")
    fits = not kinds or kind in kinds or (kind in ("integer", "number") and kinds & {"integer", "number"})
    return value if fits else told


def _refused(constant: str) -> None:
    raise ValueError(constant)


def _call_of(value: Any) -> tuple[str, str] | None:
    """(name, arguments as JSON) of an object that describes a call."""
    inner = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(inner, dict):
        return None
    name = inner.get("name", inner.get("tool_name"))
    arguments = inner.get("arguments", inner.get("parameters"))
    if not isinstance(name, str) or not isinstance(arguments, str | dict):
        return None
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _unescaped(text: str) -> str:
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        return text
