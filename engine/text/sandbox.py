"""Runs a stranger's Jinja template: what it can reach, how long it may run, how much it may write.

On top of jinja2's immutable sandbox, every step that could run long or grow is
counted, and text that people wrote keeps its mark (`provenance.py`) through
all that a template does. Where that cannot be followed, the result counts as
content: a template may lose a control token that way, nobody can forge one.
"""

from __future__ import annotations

import json
import operator
import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup

from engine.text.dates import formatted
from engine.text.provenance import Text, joined, spans_of

__all__ = ["ExhaustedError", "RaisedError", "Sandbox"]

# Seconds of the processor's time, and of waiting for it while other programs run. Some templates look back over all
# messages at each one: a thousand take two seconds then.
_MOST_CPU_S = 1.0
_MOST_CPU_PER_MESSAGE_S = 0.006
_MOST_CPU_PER_CHARACTER_S = 4e-6
_MOST_WAIT = 3
_STEPS_PER_CHECK = 32
# Characters of one string, and of all strings made in one rendering, besides what the conversation itself holds.
_MOST_CHARACTERS = 1 << 20
_MOST_WORK = 1 << 26
_MOST_ITEMS = 1 << 20
_MOST_BITS = 4096
_SEQUENCES = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)
# What shows nothing but itself, or what `_walk` finds in it.
_TRANSPARENT = (
    *(type(None), bool, int, float, range, jinja2.Undefined),
    *(*_SEQUENCES, Mapping, jinja2.utils.Namespace),
)
# What jinja2 itself passes to filters.
_PASSED = (Context, nodes.EvalContext, jinja2.Environment)
# Bytes that one object in a list takes, in the currency of characters.
_OBJECT_COST = 64

# Methods and filters whose result can be far longer than what they are given. A number among their arguments is a
# width; for the rest the product of text and number is the bound.
_GROWING_METHODS = {"center", "expandtabs", "ljust", "rjust", "translate", "zfill"}
_GROWING_FILTERS = {"batch", "center", "indent", "slice", "wordwrap"}
# Widths of four digits and more, in a pattern for str.format and for the operator %.
_WIDE_FORMAT = re.compile(r"\{[^{}]*(\{|:[^{}]*\d{4})")
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-+ #0]*\d*\.?(\d{4}|\*)")
# Filters that look into containers without writing them out; their results are what was in there.
_LOOKING_FILTERS = {
    "attr",
    "batch",
    "count",
    "d",
    "default",
    "dictsort",
    "each",
    "first",
    "groupby",
    "items",
    "last",
    "length",
    "list",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "reverse",
    "select",
    "selectattr",
    "slice",
    "sort",
    "sum",
    "unique",
}
# Comparing and hashing follow containers as deep as they go: one that holds another twice, sixty times, never ends.
_COMPARING_FILTERS = {"dictsort", "groupby", "max", "min", "sort", "unique"}
_COMPARING_TESTS = (
    *("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lt", "ne"),
)
# Filters that are one method of `Text`, or ours, so that their results are marked exactly.
_FOLLOWED_FILTERS = {"capitalize", "format", "join", "lower", "replace", "safe", "string", "trim", "upper"}
# Without use in a prompt, and a risk to time or determinism.
_REMOVED_FILTERS = ("filesizeformat", "pprint", "random", "urlize", "xmlattr")
_REMOVED_GLOBALS = ("lipsum",)


class RaisedError(jinja2.TemplateError):
    """The template called raise_exception."""


class ExhaustedError(Exception):
    """The template took more time or made more text than any prompt needs."""


class _Budget:
    """What one rendering may still spend."""

    def __init__(self, characters: int = 0, messages: int = 0) -> None:
        """`characters` in `messages` go in.

        Templates that put the prompt together in a variable write it anew several times per message.
        """
        self._longest = _MOST_CHARACTERS + 8 * characters
        self._work = _MOST_WORK + (64 + 4 * messages) * characters
        self._cpu_s = _MOST_CPU_S + _MOST_CPU_PER_MESSAGE_S * messages + _MOST_CPU_PER_CHARACTER_S * characters
        self._cpu_began_s = time.thread_time()
        self._began_s = time.monotonic()
        self._unchecked = 0

    def check(self) -> None:
        """To be called in every step."""
        # Reading the clocks takes longer than most steps.
        self._unchecked += 1
        if self._unchecked < _STEPS_PER_CHECK:
            return
        self._unchecked = 0
        cpu_s = time.thread_time() - self._cpu_began_s
        wait_s = time.monotonic() - self._began_s
        if cpu_s > self._cpu_s or (4 * cpu_s > self._cpu_s and wait_s > _MOST_WAIT * self._cpu_s):
            raise ExhaustedError("it runs longer than any prompt needs")

    def write(self, characters: int) -> None:
        """Before, or after, a string of that length is made."""
        self.spend(characters)
        self.fit(characters)

    def spend(self, work: int) -> None:
        """For anything else that is made, in the currency of characters."""
        self._work -= work
        if self._work < 0:
            raise ExhaustedError("it makes more text than any prompt needs")

    def fit(self, characters: int) -> None:
        """While a string grows that has this length by now."""
        self._unchecked += characters >> 12
        self.check()
        if characters > self._longest:
            raise ExhaustedError("it makes more text than any prompt needs")

    def size(self, value: Any) -> int:
        """Characters that a value would take when written out, roughly; refuses beyond the longest allowed."""
        total = 0
        for item in _walk(value):
            total += 1 + (len(item) if isinstance(item, (str, bytes)) else 0)
            if total > self._longest:
                raise ExhaustedError("it makes more text than any prompt needs")
        return total


class _Generation(Extension):
    """`{% generation %}` marks, for training, what the model said; here it only has a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 wants it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _CodeGenerator(CodeGenerator):
    """Sends `a ~ b`, and what is compared or becomes a key, through the environment."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja2's name
        self.write("environment.chain((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        self.write("(")
        self._bounded(node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:  # noqa: N802
        self.write(f" {operators[node.op]} ")
        self._bounded(node.expr, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("{")
        for pair in node.items:
            self._bounded(pair.key, frame)
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("}")

    def _bounded(self, node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.bounded(")
        self.visit(node, frame)
        self.write(")")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as chat templates are rendered by the reference, with bounds. One rendering at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _CodeGenerator

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,  # folding constants would run the template's operations while it is compiled
            finalize=_finalize,
        )
        self.budget = _Budget()
        self.started = datetime.now().astimezone()
        self.concat = self.chain  # type: ignore[method-assign]
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        for name in _REMOVED_GLOBALS:
            del self.globals[name]
        self.filters |= {
            "each": self._each,
            "format": self._format,
            "join": _join,
            "replace": self._replace,
            "safe": self.text,
            "sum": _sum,
            "tojson": self._tojson,
        }
        for name, function in list(self.filters.items()):
            self.filters[name] = self._guarded(name, function)
        self.tests = {**self.tests, **{name: self._bounding(self.tests[name]) for name in _COMPARING_TESTS}}
        self.globals |= {"raise_exception": self._raise_exception, "strftime_now": self._strftime_now}

    def render(self, template: jinja2.Template, variables: Mapping[str, Any], started: datetime) -> Text:
        """The rendered text. Strings in `variables` that people wrote are `Text`; all others count as the template's.

        Raises:
            ExhaustedError: it runs too long or writes too much
            RaisedError: it refuses, in its own words
            Exception: whatever else goes wrong in it
        """
        characters = sum(len(item) for item in _walk(variables) if isinstance(item, str))
        self.budget = _Budget(characters, len(variables["messages"]))
        self.started = started
        return self.chain(template.root_render_func(template.new_context(dict(variables))))

    def chain(self, parts: Iterable[Any]) -> Text:
        """Values written one after the other: the output of a block, or `a ~ b`."""
        texts: list[str] = []
        total = 0
        for part in parts:
            texts.append(self.text(part))
            total += len(texts[-1])
            self.budget.fit(total)
        self.budget.write(total)
        return joined(texts)

    def text(self, value: Any) -> str:
        """A value written out; marked as content if there is content in it."""
        if isinstance(value, str):
            return value
        if value is None or isinstance(value, (bool, int, float, jinja2.Undefined)):
            return str(value)
        self.budget.size(value)
        written = str(value)
        return Text(written) if _has_content(value) else written

    def bounded(self, value: Any) -> Any:
        """`value`, which is to be compared or hashed; refuses what that takes for ever with."""
        if isinstance(value, (*_SEQUENCES, Mapping)):
            self.budget.size(value)
        return value

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`obj.attribute`; methods of a plain string are those of `Text`, so that arguments keep their mark."""
        return super().getattr(Text(obj, ()) if type(obj) is str else obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]`."""
        self.bounded(argument)
        return super().getitem(Text(obj, ()) if type(obj) is str else obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, macro or method; one of a string is bounded, and its result marked."""
        self.budget.check()
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        name = method.__name__ if isinstance(owner, str) else ""
        if isinstance(owner, str):
            self._bound(name, owner, args, kwargs)
        elif owner is not None or isinstance(obj, type):
            # What holds the method is looked through by some; all may compare, or hash, what they are given.
            for value in (owner, *args) if isinstance(owner, (list, tuple)) else args:
                self.bounded(value)
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(owner, (dict, list, tuple)):
            return result  # what it holds carries its own mark
        if isinstance(result, str):
            self.budget.write(len(result))
            if not isinstance(result, Text) or name in {"format", "format_map"}:
                return _marked(result, (owner if name else None, args, kwargs))
        elif isinstance(result, list) and not name:
            self.budget.spend(_OBJECT_COST * len(result))
        elif isinstance(result, (bytes, bytearray)):
            raise jinja2.exceptions.SecurityError("bytes are of no use in a prompt")
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`+`, `*`, `**` and `%`, of which each can make a little thing huge."""
        self.budget.check()
        if operator == "%" and isinstance(left, str):
            return self._percent(left, right)
        self.bound_operation(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, str):
            self.budget.write(len(result))
        return result

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,  # noqa: FBT001, FBT002 - jinja2's signature
    ) -> str:
        for modifier in source.find_all(nodes.EvalContextModifier):
            # Escaped text would be of a class of its own, which forgets what is content.
            raise jinja2.TemplateSyntaxError("prompts are not escaped, so autoescape has no meaning", modifier.lineno)
        for loop in list(source.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "each", [], [], None, None, lineno=loop.lineno)
        return super()._generate(source, name, filename, defer_init)

    def _each(self, items: Iterable[Any]) -> Iterator[Any]:
        """What every loop of a template runs over."""
        for item in items:
            self.budget.check()
            yield item

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.budget.check()
            data = [argument for argument in args if not isinstance(argument, _PASSED)]
            if name in _COMPARING_FILTERS:
                self.budget.size(data)
            if name in _GROWING_FILTERS:
                self._bound_product(data, kwargs)
            if name not in _LOOKING_FILTERS:
                self.budget.size([argument for argument in data if not isinstance(argument, str)])
            result = function(*args, **kwargs)
            if isinstance(result, Markup):
                result = str.__str__(result)
            if isinstance(result, str) and name not in _LOOKING_FILTERS:
                self.budget.write(len(result))
                if name not in _FOLLOWED_FILTERS or not isinstance(result, Text):
                    return _marked(result, (data, kwargs))
            elif isinstance(result, list):
                self.budget.spend(_OBJECT_COST * len(result))
            return result

        return guarded

    def _bounding(self, test: Any) -> Callable[..., Any]:
        @wraps(test)
        def bounding(*args: Any) -> Any:
            return test(*map(self.bounded, args))

        return bounding

    def _bound(self, name: str, owner: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            self.budget.write(len(owner) + owner.count(args[0]) * len(args[1]))
        elif name == "join" and args:
            size = self.budget.size(args[0]) if isinstance(args[0], (list, tuple, set, Mapping, str)) else 0
            self.budget.write(size * (1 + len(owner)))
        elif name in {"format", "format_map"}:
            self._bound_format(_WIDE_FORMAT, owner, owner.count("{"), (args, kwargs))
        elif name in {"split", "rsplit", "splitlines"}:
            self.budget.spend(_OBJECT_COST * (owner.count(args[0]) if args and args[0] else len(owner) // 2))
        elif name in _GROWING_METHODS:
            self._bound_product([owner, *args], kwargs)

    def _bound_product(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        sizes = [
            abs(value) if isinstance(value, int) else self.budget.size(value) for value in (*args, *kwargs.values())
        ]
        largest = max(sizes, default=0)
        self.budget.write((largest + 1) * (sum(sizes) - largest + 1))

    def _bound_format(self, wide: re.Pattern[str], pattern: str, fields: int, values: Any) -> None:
        if wide.search(pattern):
            raise ExhaustedError("it formats with a width that no prompt needs")
        self.budget.write(len(pattern) + fields * (1000 + self.budget.size(values)))

    def bound_operation(self, operator: str, left: Any, right: Any) -> None:
        """Refuse `left operator right` when the result would be huge."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length()
            if bits > _MOST_BITS:
                raise ExhaustedError("it computes with numbers that no prompt needs")
        elif operator == "*":
            sequence, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(sequence, str) and isinstance(times, int):
                self.budget.write(len(sequence) * max(0, times))
            elif isinstance(sequence, (list, tuple)) and isinstance(times, int):
                self._bound_items(len(sequence) * max(0, times))
        elif operator == "+" and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            self._bound_items(len(left) + len(right))

    def _bound_items(self, count: int) -> None:
        if count > _MOST_ITEMS:
            raise ExhaustedError("it makes longer lists than any prompt needs")
        self.budget.spend(count * 8)

    def _percent(self, pattern: str, values: Any) -> str:
        """`pattern % values`; content is followed through `%s`, which is all that templates use."""
        self._bound_format(_WIDE_PERCENT, pattern, pattern.count("%"), values)
        parts = re.split("(%[s%])", str.__str__(pattern))
        given = list(values) if isinstance(values, tuple) else [values]
        if spans_of(pattern) or any("%" in part for part in parts[::2]) or parts.count("%s") != len(given):
            return _marked(operator.mod(pattern, values), (pattern, values))
        supply = iter(given)
        return self.chain(next(supply) if part == "%s" else part.replace("%%", "%") for part in parts)

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        return self._percent(self.text(value), kwargs or args)

    def _replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = self.text(value), self.text(old), self.text(new)
        self._bound("replace", text, (old, new), {})
        return Text(text, spans_of(text)).replace(old, new, -1 if count is None else count)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the reference's signature
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,  # noqa: FBT001, FBT002
    ) -> str:
        width = len(indent) if isinstance(indent, str) else abs(indent or 0)
        if width > 16 or sum(map(len, separators or ())) > 16:
            raise ExhaustedError("it writes JSON wider than any prompt needs")
        self.budget.write(self.budget.size(value) * (1 + width))
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def _raise_exception(self, message: Any = "") -> None:
        raise RaisedError(self.text(message))

    def _strftime_now(self, pattern: str) -> str:
        if len(pattern) > 1000:
            raise ExhaustedError("it asks for a date longer than any prompt needs")
        return formatted(self.started, pattern)


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> str:
    """Every value that a template writes passes here."""
    environment = context.environment
    assert isinstance(environment, Sandbox)
    return environment.text(value)


@jinja2.pass_environment
def _join(environment: Sandbox, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    separator = environment.text(d)
    parts: list[Any] = []
    for item in value:
        parts += (separator, item)
        environment.budget.write(len(separator))
    return environment.chain(parts[1:])


@jinja2.pass_environment
def _sum(environment: Sandbox, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    if attribute is not None:
        iterable = map(make_attrgetter(environment, attribute), iterable)
    for item in iterable:
        environment.budget.check()
        environment.bound_operation("+", start, item)
        start += item
    return start


def _marked(result: str, origin: Any) -> str:
    """`result` of an operation that was not followed: content if there was any content in what it was made of."""
    if _has_content(origin):
        return Text(result)
    return Text(result, ()) if isinstance(result, Text) else result


def _has_content(value: Any) -> bool:
    """Whether there is content in `value`; an object that may show anything counts as if."""
    for count, item in enumerate(_walk(value)):
        if isinstance(item, str):
            if spans_of(item):
                return True
        elif count > _MOST_ITEMS or not isinstance(item, _TRANSPARENT):
            return True
    return False


def _walk(value: Any) -> Iterator[Any]:
    """A value and everything in the containers that a template can make or be given."""
    pending = [value]
    while pending:
        item = pending.pop()
        yield item
        if isinstance(item, jinja2.utils.Namespace):
            item = item._Namespace__attrs  # noqa: SLF001 - the only way in
        if isinstance(item, Mapping):
            pending += item.keys()
            pending += item.values()
        elif isinstance(item, _SEQUENCES):
            pending += item
