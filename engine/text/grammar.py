"""Which tokens may come next, so that an answer keeps to a JSON schema, a regular expression or a grammar.

The parsing is llguidance's; here are our tokenizer as it wants it, our errors,
and how each kind of constraint becomes a grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance.gbnf_to_lark import any_to_lark

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions
    from llguidance._tokenizer import TokenizerWrapper

from engine.errors import InputError, InternalError
from engine.text.dialect import Dialect
from engine.text.tokenizer import Tokenizer

__all__ = ["Grammar", "Grammars"]

Value = TypeVar("Value")

# Free white space lets a small model write blank lines for ever.
_SPACING: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LIMITS = llguidance.LLParserLimits(max_grammar_size=100_000, max_lexer_states=50_000, verbose_errors=False)
_LONGEST_REASON = 300


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
        source = _called(lambda: self._source(kind, text))
        matcher = _called(lambda: llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS))
        if matcher.is_error():
            raise InputError(f"the {_NAMES[kind]} cannot be used: {_short(matcher.get_error())}")
        return Grammar(matcher, self._vocab_size, self._end_ids)

    def _source(self, kind: str, text: str) -> str:
        from_schema = llguidance.LLMatcher.grammar_from_json_schema
        match kind:
            case "json_object":
                return from_schema({"type": "object"}, overrides=_SPACING)
            case "json_schema":
                return from_schema(text, overrides=_SPACING)
            case "regex":
                # \\d means 0-9, as in JSON Schema; the library's own digits are those of every script.
                return llguidance.LLMatcher.grammar_from_lark(f"start: /{llguidance.regex_to_lark(text, 'd')}/")
            case "grammar":
                return llguidance.LLMatcher.grammar_from_lark(_lark(text))
            case _:
                return llguidance.LLMatcher.grammar_from_lark(self._calls(json.loads(text)))

    def _calls(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """A Lark grammar of one call of one of the tools, written as the model's family writes it."""
        opening, closing = self._dialect.call_marks
        arguments = self._dialect.arguments_key
        any_call = " | ".join(f"call_{number}" for number in range(len(tools)))
        rules = [f"start: {self._mark(opening)} ({any_call}) {self._mark(closing)}"]
        for number, tool in enumerate(tools):
            wanted = {"type": "object", **(tool.get("parameters") or {})}
            if "properties" in wanted:
                wanted.setdefault("additionalProperties", False)  # a small model would invent some
            schema = {
                "type": "object",
                "properties": {"name": {"const": tool["name"]}, arguments: wanted},
                "required": ["name", arguments],
                "additionalProperties": False,
                "x-guidance": _SPACING,
            }
            rules.append(f"call_{number}: %json {json.dumps(schema)}")
        return "\n".join(rules)

    def _mark(self, text: str) -> str:
        """Marks in Lark's notation: control tokens by their ids, anything else letter by letter."""
        names = "|".join(re.escape(name) for name in self._dialect.tokens)
        parts = re.split(f"({names})", text) if names else [text]
        ids = self._dialect.tokens
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
