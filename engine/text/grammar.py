"""Which tokens may come next, so that an answer keeps to a JSON schema, a regular expression or a grammar.

The parsing is llguidance's; here are our tokenizer as it wants it, our errors,
and how each kind of constraint becomes a grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance.gbnf_to_lark import any_to_lark

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions
    from llguidance._tokenizer import TokenizerWrapper

from engine.errors import InputError, InternalError
from engine.text.dialect import CallStyle, Dialect
from engine.text.tokenizer import Tokenizer

__all__ = ["Grammar", "Grammars"]

Value = TypeVar("Value")

# Free white space lets a small model write blank lines for ever.
_SPACING: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LIMITS = llguidance.LLParserLimits(max_grammar_size=100_000, max_lexer_states=50_000, verbose_errors=False)
_LONGEST_REASON = 300
# Anything but a call without its mark, which would be read as one and kept to nothing.
_UNMARKED = r"\s*(```(json|tool_call|tool_code)?[ \t]*\n\s*)?(\[\s*)?(\{|[\w.-]+\(|<function=)"
_BARE_RULES = (
    rf"WORDS: /(?s:.*)/ & ~/{_UNMARKED}(?s:.*)/",
    r'bare: plain | FENCE plain "\n```"',
    r"FENCE: /```(json|tool_call|tool_code)?\n/",
)


class Grammars:
    """Makes grammars for one tokenizer; made at the first constrained request, as it takes a fraction of a second.

    vocab_size: columns of the logits. end_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int], dialect: Dialect) -> None:
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._dialect = dialect
        self._tokenizer = llguidance.LLTokenizer(
            cast("TokenizerWrapper", _Wrapped(tokenizer, vocab_size, end_ids)), eos_token=sorted(end_ids)
        )

    def grammar(self, kind: str, text: str) -> Grammar:
        """The beginning of an answer under a constraint; `engine.runtime.events.Constraint` says what there is.

        Raises:
            InputError: the schema, expression or grammar is wrong, too large, or says what cannot be enforced
        """
        source = _called(lambda: json.dumps({"grammars": self._grammars(kind, text)}))
        matcher = _called(lambda: llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS))
        if matcher.is_error():
            raise InputError(f"the {_NAMES[kind]} cannot be used: {_short(matcher.get_error())}")
        return Grammar(matcher, self._vocab_size, self._end_ids)

    def _grammars(self, kind: str, text: str) -> list[dict[str, Any]]:
        """As llguidance takes them; the first is that of the answer."""
        match kind:
            case "json_object":
                return _of_schema({"type": "object"})
            case "json_schema":
                return _of_schema(text)
            case "regex":
                # \\d means 0-9, as in JSON Schema; the library's own digits are those of every script.
                return [{"lark_grammar": f"start: /{llguidance.regex_to_lark(text, 'd')}/"}]
            case "grammar":
                return [{"lark_grammar": _lark(text)}]
            case _:
                return self._calls(json.loads(text))

    def _calls(self, wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Grammars of calls of tools, written as the model's family writes them; see `Constraint` for `wanted`."""
        style = self._dialect.call
        rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(wanted['tools'])))}"]
        for number, tool in enumerate(wanted["tools"]):
            rules += self._call(f"call_{number}", tool["name"], tool.get("parameters") or {}, style)
        others: list[dict[str, Any]] = []
        if wanted.get("required"):
            rules.insert(0, f"start: {self._mark(style.opening)} call {self._mark(style.closing)}")
        elif (instead := wanted.get("instead")) is not None:
            rules.insert(0, f"start: ({self._mark(style.opening)} call {self._mark(style.closing)})+ | @instead")
            others = [part | {"name": "instead"} for part in self._grammars(instead["kind"], instead["text"])]
        else:
            rules = [*self._words_or_calls(), *rules]
            # Whatever the family's way, small models often write a bare call.
            rules.append(f"plain: {' | '.join(f'plain_{number}' for number in range(len(wanted['tools'])))}")
            for number, tool in enumerate(wanted["tools"]):
                rules += self._call(f"plain_{number}", tool["name"], tool.get("parameters") or {}, CallStyle())
        return [{"name": "answer", "lark_grammar": "\n".join(rules)}, *others]

    def _words_or_calls(self) -> list[str]:
        """Rules of an answer in words in which each mark of a call is followed by one."""
        style = self._dialect.call
        opening = style.opening or style.name[0]
        before = re.split(f"({_alternatives(self._dialect.tokens)})", opening)[0] if self._dialect.tokens else opening
        called = f"call {self._mark(style.closing)}"
        if not style.opening:
            # Without a mark, a call is the whole answer.
            return [f"start: {called} | bare | WORDS", *_BARE_RULES]
        if not before:  # the mark begins with a token that is no text
            return [f"start: (WORDS {self._mark(opening)} {called})* WORDS | bare", *_BARE_RULES]
        sign = opening.split("\n")[0]
        return [
            f"start: (sign {self._mark(opening.removeprefix(sign))} {called})* rest | bare",
            "rest: WORDS",
            f"sign[lazy]: WORDS {json.dumps(sign)}",
            *_BARE_RULES,
        ]

    def _call(self, rule: str, name: str, parameters: Mapping[str, Any], style: CallStyle) -> list[str]:
        """Rules of a call of one tool."""
        schema = {"type": "object", **parameters}
        properties = schema.get("properties")
        if properties is not None:
            schema.setdefault("additionalProperties", False)  # a small model would invent some
        head, end = style.name[0] + name + style.name[1], style.end
        if head.startswith("{"):
            # One schema for all of it: beside another one, letters that both begin with must be of the same pieces.
            frame = json.loads(f"{head}{{}}{end}")
            schema = {
                "type": "object",
                "properties": {key: {"const": value} if value else schema for key, value in frame.items()},
                "required": list(frame),
                "additionalProperties": False,
            }
            head = end = ""
        head, end = self._mark(head), self._mark(end)
        if style.parameter is None:
            return [f"{rule}: {head} %json {json.dumps(schema | {'x-guidance': _SPACING})} {end}"]
        required = schema.get("required") or ()
        rules: list[str] = []
        parts: list[str] = []
        if properties is None:
            value, rules = self._value(f"{rule}_any", None, style.parameter[2])
            before, between = self._mark(style.parameter[0]), self._mark(style.parameter[1])
            rules = [f"{rule}_any: {before} /[\\w.-]{{1,64}}/ {between} {value}", *rules]
            parts = [f"{rule}_any*"]
        for number, (key, wanted) in enumerate((properties or {}).items()):
            before = self._mark(style.parameter[0] + key + style.parameter[1])
            value, further = self._value(f"{rule}_{number}", wanted, style.parameter[2])
            parts.append(f"{rule}_{number}" + ("" if key in required else "?"))
            rules += [f"{rule}_{number}: {before} {value}", *further]
        return [f"{rule}: {' '.join((head, *parts, end))}", *rules]

    def _value(self, rule: str, schema: Any, end: str) -> tuple[str, list[str]]:
        """An argument that stands on its own, `end` included, and rules that it needs: strings are bare text."""
        kinds = schema.get("type") if isinstance(schema, Mapping) else None
        if kinds == "string" and isinstance(schema.get("enum"), list):
            choices = " | ".join(json.dumps(str(choice)) for choice in schema["enum"])
            return f"({choices}) {self._mark(end)}", []
        if kinds in ("integer", "number", "boolean", "array", "object", "null"):
            return f"%json {json.dumps({**schema, 'x-guidance': _SPACING})} {self._mark(end)}", []
        if any(mark in end for mark in self._dialect.tokens):
            return f"{rule}_text {self._mark(end)}", [f"{rule}_text: /(?s:.*)/"]
        return f"{rule}_text", [f"{rule}_text[suffix={json.dumps(end)}]: /(?s:.*)/"]

    def _mark(self, text: str) -> str:
        """Marks in Lark's notation: control tokens by their ids, anything else letter by letter."""
        ids = self._dialect.tokens
        parts = re.split(f"({_alternatives(ids)})", text) if ids else [text]
        return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part)


class Grammar:
    """How far an answer has got, and what may come next."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_ids = sorted(end_ids)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next: bool (vocab_size,), at least one.

        Raises:
            InputError: the grammar became too complex to follow
        """
        bits = np.frombuffer(_called(self._matcher.compute_bitmask), np.uint8)
        self._check()
        allowed: npt.NDArray[np.bool_] = np.zeros(self._vocab_size, np.bool_)
        known = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        allowed[: known.size] = known
        allowed[self._end_ids] = self._matcher.is_accepting()
        return allowed

    def take(self, token: int) -> None:
        """Go on by a token that was allowed."""
        if token not in self._end_ids:
            _called(lambda: self._matcher.consume_token(token))
            self._check()

    @property
    def complete(self) -> bool:
        """Nothing more can come."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InputError(f"the answer could not be kept to its grammar: {_short(self._matcher.get_error())}")


_NAMES = {
    "json_object": "JSON grammar",
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "grammar": "grammar",
    "tools": "schema of a tool's parameters",
}


class _Wrapped:
    """A tokenizer as llguidance asks for it: its TokenizerWrapper, which wants a callable it can try out."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]) -> None:
        known = min(tokenizer.vocab_size, vocab_size)
        self.tokens = [tokenizer.token_bytes(token) for token in range(known)] + [b""] * (vocab_size - known)
        # An id without a spelling must not look like one that spells nothing: a name of its own keeps it out.
        self.tokens = [spelt or f"<no token {token}>".encode() for token, spelt in enumerate(self.tokens)]
        missing = {token for token in tokenizer.missing_ids if token < known} | set(range(known, vocab_size))
        self.special_token_ids = sorted({t for t in tokenizer.control_ids if t < vocab_size} | missing | end_ids)
        self.eos_token_id = min(end_ids, default=0)
        self.bos_token_id = tokenizer.bos_id
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, add_special_tokens=False)


def _of_schema(schema: str | dict[str, Any]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = json.loads(llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_SPACING))[
        "grammars"
    ]
    return made


def _alternatives(marks: Iterable[str]) -> str:
    """An expression for any of these; where one begins another, the longer."""
    return "|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True))


def _called(work: Callable[[], Value]) -> Value:
    """What `work` returns; a fault of the library's, which is no Exception when its own code trips, ends one request.

    Raises:
        InputError: it does not take what it was given
        InternalError: it tripped
    """
    try:
        return work()
    except (KeyboardInterrupt, SystemExit, InputError):
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"the constraint cannot be used: {_short(str(error))}") from None
    except BaseException as error:
        raise InternalError(f"the constraint could not be followed ({type(error).__name__})") from error


def _lark(text: str) -> str:
    """A grammar in Lark's notation, made of GBNF if need be.

    Raises:
        InputError: it is neither
    """
    try:
        return any_to_lark(text)
    except Exception as error:  # noqa: BLE001 - that is what it raises
        raise InputError(f"the grammar is neither Lark's notation nor GBNF: {_short(str(error))}") from None


def _short(reason: str) -> str:
    return " ".join(reason.split())[:_LONGEST_REASON]
