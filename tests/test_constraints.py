"""Answers that are held to a schema, an expression or a grammar, and thinking that is held to its length."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.core.math import exp
from engine.runtime.events import Constraint, Message, Request
from engine.runtime.guide import Guide, Thinking
from engine.runtime.loop import Loop
from engine.runtime.model import Model
from engine.runtime.sampler import Sampler
from engine.settings import Sampling
from engine.text.dialect import _STYLES, CallStyle, Dialect
from engine.text.grammar import Grammar, Grammars
from engine.text.reader import AnswerReader
from engine.text.tokenizer import Tokenizer
from tests.factory import tok_json
from tests.fakes import END, VOCAB, Ear, saying, tokenizer_files, toy

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "people": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["town", "村"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "people", "kind", "tags"],
    "additionalProperties": False,
}


def answer(model: Model, constraint: Constraint | None = None, **fields: Any) -> Any:
    ear = Ear()
    loop = Loop(model)
    sampling = fields.pop("sampling", Sampling(temperature=1.0, top_k=0, top_p=1, min_p=0, seed=1, max_tokens=200))
    prompt = fields.pop("prompt", (Message("user", "hi"),))
    loop.add(Request("r", prompt, sampling, constraint=constraint, **fields), ear)
    while loop.step():
        pass
    return ear.events[-1]


@pytest.mark.parametrize("seed", range(12))
def test_a_model_that_talks_at_random_keeps_to_the_schema(seed: int) -> None:
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1, min_p=0, seed=seed, max_tokens=200)
    done = answer(toy(context=400, pages=128), Constraint("json_schema", json.dumps(SCHEMA)), sampling=sampling)
    assert done.reason == "stop", done
    value = json.loads(done.text)
    assert list(value) == ["city", "people", "kind", "tags"]
    assert len(value["city"]) <= 8
    assert 0 <= value["people"] <= 99
    assert value["kind"] in ("town", "村")
    assert all(isinstance(tag, bool) for tag in value["tags"])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("constraint", "wanted"),
    [
        (Constraint("regex", r"[A-C]{3}-\d{2}"), r"[A-C]{3}-[0-9]{2}"),
        (Constraint("grammar", 'start: "yes" | "no" " thanks"?'), "yes|no( thanks)?"),
        (Constraint("grammar", 'root ::= ("a" | "b") "c"'), "(a|b)c"),
    ],
)
def test_expressions_and_grammars(constraint: Constraint, wanted: str, seed: int) -> None:
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1, min_p=0, seed=seed)
    done = answer(toy(), constraint, sampling=sampling)
    assert done.reason == "stop"
    assert re.fullmatch(wanted, done.text), done.text


def test_an_object_of_any_kind_is_json() -> None:
    done = answer(toy(context=600, pages=256), Constraint("json_object"), sampling=Sampling(seed=3, max_tokens=400))
    assert done.text.startswith("{")
    if done.reason == "stop":
        assert isinstance(json.loads(done.text), dict)


def test_greedy_and_filters_choose_among_what_is_allowed() -> None:
    """The likeliest tokens by far are not allowed; none of the filters may let them through, nor leave nothing."""
    model = toy(shape=lambda _ids, row: np.where(np.arange(VOCAB) == ord("!"), 1000.0, row).astype(np.float32))
    for sampling in (
        Sampling(temperature=0.0),
        Sampling(top_k=1, temperature=0.0001),
        Sampling(top_p=0.0, min_p=1.0),
        Sampling(typical_p=0.01),
    ):
        assert answer(model, Constraint("regex", "[a-c]{4}"), sampling=sampling).text.strip("abc") == ""


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("regex", "("),
        Constraint("regex", "a{100000}{100000}"),
        Constraint("grammar", "start: nothing"),
        Constraint("grammar", ""),
        Constraint("json_schema", "{"),
        Constraint("json_schema", '{"type": "objekt"}'),
        Constraint("json_schema", '{"not": {"type": "string"}}'),
        Constraint("json_schema", '{"$ref": "#/nowhere"}'),
        Constraint("json_schema", '{"$ref": "https://example.org/schema"}'),
        Constraint("json_schema", '{"type": "string", "pattern": "("}'),
        Constraint("json_schema", '{"type": "integer", "minimum": 5, "maximum": 1}'),
    ],
    ids=str,
)
def test_what_cannot_be_enforced_is_refused_and_others_go_on(constraint: Constraint) -> None:
    failed = answer(toy(), constraint)
    assert failed.kind == "InputError", failed
    assert len(failed.message) < 500


def test_a_model_without_an_end_cannot_be_constrained() -> None:
    failed = answer(toy(end_ids=()), Constraint("json_object"))
    assert "no token that ends" in failed.message


def test_the_constraint_holds_across_pauses_and_company() -> None:
    """With too few pages for all, answers are paused and computed again; each keeps to its own grammar."""
    loop = Loop(toy(pages=20, page_tokens=4, context=64))
    ears = [Ear() for _ in range(6)]
    for number, ear in enumerate(ears):
        wanted = Constraint("regex", f"[{'abcdef'[number]}]{{24}}")
        loop.add(Request(f"r{number}", (Message("user", "x" * 8),), Sampling(seed=number), constraint=wanted), ear)
    while loop.step():
        pass
    assert [ear.done.text for ear in ears] == [letter * 24 for letter in "abcdef"]


def test_a_constrained_answer_is_the_same_alone_and_in_company() -> None:
    wanted = Constraint("json_schema", json.dumps(SCHEMA))
    request = Request("r", (Message("user", "hi"),), Sampling(seed=9, max_tokens=200), constraint=wanted)
    texts = []
    for others in (0, 5):
        loop, ear = Loop(toy(context=400, pages=256)), Ear()
        for number in range(others):
            loop.add(Request(f"o{number}", (Message("user", "other"),), Sampling(seed=number, max_tokens=30)), Ear())
        loop.add(request, ear)
        while loop.step():
            pass
        texts.append(ear.done.text)
    assert texts[0] == texts[1]


# ---------------------------------------------------------------- tokens and masks


def grammars(*, extra: Sequence[str] = (), dialect: Dialect | None = None) -> Grammars:
    files = tokenizer_files() | {"tokenizer.json": json.dumps(tok_json(("<s>", "</s>", *extra))).encode()}
    tokenizer = Tokenizer.from_files(files)
    found = dialect or Dialect.found(["tools <tool_call>"], tokenizer)
    return Grammars(tokenizer, VOCAB, frozenset({257}), found)


def test_masks_are_exact() -> None:
    grammar = grammars().grammar("regex", "a[bc]?")
    assert np.flatnonzero(grammar.allowed()).tolist() == [ord("a")]
    grammar.take(ord("a"))
    assert np.flatnonzero(grammar.allowed()).tolist() == [ord("b"), ord("c"), 257]
    grammar.take(ord("c"))
    assert grammar.complete


def test_control_tokens_and_ids_without_a_token_are_never_text() -> None:
    allowed = grammars().grammar("regex", "(?s:.)*").allowed()
    assert not allowed[[256, *range(258, VOCAB)]].any()
    assert allowed[:0x80].all()


def wanted(parameters: Any, *, required: bool = True, instead: Any = None) -> str:
    """A constraint of the kind "tools"; one of them, time."""
    tools = [{"name": "time", "parameters": parameters}]
    return json.dumps({"tools": tools, "required": required, "instead": instead})


def test_a_call_is_written_in_the_familys_way() -> None:
    tools = wanted({"type": "object", "properties": {"z": {"type": "integer"}}})
    marked = grammars(extra=("<tool_call>", "</tool_call>")).grammar("tools", tools)
    assert np.flatnonzero(marked.allowed()).tolist() == [258]  # the token, not its letters
    marked.take(258)
    spelt = '\n{"name": "time", "arguments": {"z": 1}}\n'
    for byte in spelt.encode():
        assert marked.allowed()[byte], spelt
        marked.take(byte)
    assert np.flatnonzero(marked.allowed()).tolist() == [259]
    lettered = grammars().grammar("tools", tools)
    assert np.flatnonzero(lettered.allowed()).tolist() == [ord("<")]
    named = CallStyle(name=('{"name": "', '", "parameters": '))
    plain = grammars(dialect=Dialect(call=named)).grammar("tools", tools)
    for byte in b'{"name": "time", "parameters": {}}':
        assert plain.allowed()[byte]
        plain.take(byte)
    assert plain.complete


ZONE = {
    "type": "object",
    "properties": {
        "zone": {"type": "string"},
        "kind": {"type": "string", "enum": ["long", "short"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "also": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["zone", "kind"],
}


def written(style: CallStyle, **arguments: Any) -> str:
    """A call of time as a family writes it."""
    if style.parameter is None:
        told = json.dumps(arguments)
    else:
        before, between, behind = style.parameter
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        told = "".join(before + key + between + text + behind for key, text in texts.items())
    return style.opening + "time".join(style.name) + told + style.end + style.closing


def kept_to(grammar: Grammar, text: str) -> str:
    """As much of a text as a grammar lets be said."""
    said = b""
    for byte in text.encode():
        if not grammar.allowed()[byte]:
            break
        grammar.take(byte)
        said += bytes([byte])
    return said.decode(errors="ignore")


def read_calls(text: str) -> tuple[str, list[Any]]:
    """What is said in a text, and the arguments of the calls of time in it."""
    reader = AnswerReader({"time": ZONE})
    parts = [*reader.push(text), *reader.finish()]
    assert all(part.text == "time" for part in parts if part.kind == "call")
    arguments = ["".join(p.text for p in parts if (p.kind, p.call) == ("arguments", n)) for n in range(reader.calls)]
    return "".join(part.text for part in parts if part.kind == "content"), [json.loads(text) for text in arguments]


STYLES = pytest.mark.parametrize(
    "style", [CallStyle(), *(style for _, style in _STYLES)], ids=["plain", *(sign for sign, _ in _STYLES)]
)
GOOD: dict[str, Any] = {"zone": "a < b\nc", "kind": "short", "days": 7, "also": [True, False]}


@STYLES
def test_each_familys_calls_are_written_and_read(style: CallStyle) -> None:
    made = grammars(dialect=Dialect(knows_tools=True, call=style))
    required, free = (
        Constraint("tools", wanted(ZONE)),
        Constraint("tools", wanted(ZONE, required=False)),
    )
    for arguments in (GOOD, {"zone": "", "kind": "long"}):
        call = written(style, **arguments)
        grammar = made.grammar(required.kind, required.text)
        assert kept_to(grammar, call) == call
        assert grammar.allowed()[257] or grammar.complete
        assert read_calls(call) == ("", [arguments])
        # Left free, it may call, too, and where the family marks calls say something before.
        words = "Let me see.\n" if style.opening else ""
        grammar = made.grammar(free.kind, free.text)
        assert kept_to(grammar, words + call) == words + call
        assert grammar.allowed()[257] or grammar.complete
        assert read_calls(words + call) == (words.strip("\n"), [arguments])
    for words in ("Nothing [to] <do> {here}.", "```python\nprint({})\n```", ""):
        grammar = made.grammar(free.kind, free.text)
        assert kept_to(grammar, words) == words
        assert grammar.allowed()[257]
    for arguments, may_be in ((GOOD, True), ({}, False)):
        bare = written(CallStyle(), **arguments)
        for unmarked in (bare, f"```json\n{bare}\n```"):
            assert (kept_to(made.grammar(free.kind, free.text), unmarked) == unmarked) is may_be
    assert not kept_to(made.grammar(free.kind, free.text), "[time()]").endswith("(")


@STYLES
def test_a_call_that_breaks_the_schema_cannot_be_written(style: CallStyle) -> None:
    made = grammars(dialect=Dialect(knows_tools=True, call=style))
    for arguments in (GOOD | {"kind": "shy"}, GOOD | {"days": "x"}, {"kind": "long"}, GOOD | {"more": 1}):
        call = written(style, **arguments)
        for required in (True, False):
            assert kept_to(made.grammar("tools", wanted(ZONE, required=required)), call) != call


@STYLES
def test_what_no_schema_describes_can_be_anything(style: CallStyle) -> None:
    made = grammars(dialect=Dialect(knows_tools=True, call=style))
    call = written(style, any="thing", at=[1])
    assert kept_to(made.grammar("tools", wanted(None, required=False)), call) == call
    assert read_calls(call) == ("", [{"any": "thing", "at": [1]}])


@STYLES
def test_a_call_or_else_what_a_schema_describes(style: CallStyle) -> None:
    made = grammars(dialect=Dialect(knows_tools=True, call=style))
    instead = {"kind": "json_schema", "text": json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})}
    constraint = wanted(ZONE, required=False, instead=instead)
    for text in (written(style, **GOOD), '{"a": 1}'):
        assert kept_to(made.grammar("tools", constraint), text) == text
    assert not kept_to(made.grammar("tools", constraint), "Words")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_sampler_draws_only_what_is_allowed_and_in_proportion(temperature: float) -> None:
    sampler = Sampler(4)
    row = np.array([5, 1, 2, 3], np.float32)
    allowed = np.array([False, True, True, False])
    settings = Sampling(temperature=temperature, top_k=0, top_p=1, min_p=0, repetition_penalty=1)
    draws = [
        sampler.draw(row, settings, seed=seed, history=np.zeros(1, np.int64), allowed=allowed).token
        for seed in range(2000)
    ]
    share = draws.count(2) / len(draws)
    wanted = 1.0 if temperature == 0 else float(1 / (1 + exp(np.array([-1.0]))[0]))
    assert set(draws) <= {1, 2}
    assert abs(share - wanted) < 0.04
    assert row.tolist() == [5, 1, 2, 3]


def test_bias_is_added_before_the_draw_and_not_reported() -> None:
    sampler = Sampler(3)
    row = np.array([1, 2, 3], np.float32)
    settings = Sampling(temperature=0.0)
    history = np.zeros(1, np.int64)
    assert sampler.draw(row, settings, seed=0, history=history, bias=((0, 50.0),)).token == 0
    draw = sampler.draw(row, settings, seed=0, history=history, bias=((2, -100.0),), alternatives=1)
    assert draw.token == 1
    assert draw.alternatives[0][0] == 2


def test_a_damaged_row_is_an_error_under_a_constraint_too() -> None:
    def shape(_ids: list[int], row: Any) -> Any:
        row[5] = np.nan
        return row

    assert answer(toy(shape=shape), Constraint("regex", "a+")).kind == "InternalError"


# ---------------------------------------------------------------- thinking

BEGIN, CLOSE = 260, 261


def thinker(shape: Any, template: str | None = None) -> Model:
    """A model with <think> and </think> as tokens 260 and 261."""
    extra = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
    files = tokenizer_files() | {"tokenizer.json": json.dumps(tok_json(extra, special=False)).encode()}
    tokenizer = Tokenizer.from_files(files)
    dialect = Dialect.found(["<think> </think>"], tokenizer)
    assert (dialect.tokens["<think>"], dialect.tokens["</think>"]) == (BEGIN, CLOSE)
    return replace(toy(shape=shape, context=400, pages=128), tokenizer=tokenizer, dialect=dialect)


def ponders(before: list[int], row: Any) -> Any:
    """Thinks for ever unless it is made to stop, then says ok."""
    row = np.full_like(row, -10.0)
    after = before[len(before) - before[::-1].index(CLOSE) :] if CLOSE in before else None
    if after is not None:
        row[b"ok"[len(after)] if len(after) < 2 else END] = 10.0
    else:
        row[ord("m") if BEGIN in before else BEGIN] = 10.0
    return row


@pytest.mark.parametrize("budget", [0, 1, 17])
def test_thinking_ends_after_its_budget(budget: int) -> None:
    done = answer(thinker(ponders), thinking_tokens=budget)
    assert done.text == f"<think>{'m' * budget}</think>ok"


def test_without_a_budget_it_goes_on() -> None:
    done = answer(thinker(ponders), sampling=Sampling(temperature=0.0, max_tokens=50))
    assert done.text == "<think>" + "m" * 49


def test_a_constraint_holds_for_what_follows_the_thinking() -> None:
    done = answer(thinker(ponders), Constraint("regex", "[xyz]{3}"), thinking_tokens=5)
    assert re.fullmatch("<think>m{5}</think>[xyz]{3}", done.text)
    plain = answer(thinker(saying(list(b"xxx"), after=28)), Constraint("regex", "[xyz]{3}"))
    assert re.fullmatch("[xyz]{3}", plain.text)


def test_a_prompt_that_ends_in_thinking_is_known() -> None:
    model = thinker(ponders)
    ids = (*b"question", BEGIN, ord("\n"))
    done = answer(model, prompt=ids, thinking_tokens=3)
    assert done.text == "mmm</think>ok"
    closed = (*ids, CLOSE, ord("\n"))
    assert not model.thinks(model.encode(closed))
    assert model.thinks(model.encode(ids))


def test_a_guide_says_nothing_where_everything_is_allowed() -> None:
    guide = Guide(10, Thinking(1, 2, inside=True, most=1), None)
    assert guide.allowed() is None
    guide.take(5)
    assert np.flatnonzero(guide.allowed()).tolist() == [2]  # type: ignore[arg-type]
    guide.take(2)
    assert guide.allowed() is None
    assert not guide.complete
