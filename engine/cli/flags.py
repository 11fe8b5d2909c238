"""Makes command-line flags of the settings models, so that each setting is declared once.

Knows types, ranges, units and descriptions; no setting by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, TypeVar, get_type_hints

from cyclopts import Group, Parameter, Token
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from engine.settings import Conversion, EngineSettings, Sampling, ServerSettings, checked

__all__ = ["overlay", "whole_number", "with_settings"]

Result = TypeVar("Result")
Settings = TypeVar("Settings", bound=BaseModel)

_GROUPS: dict[type[BaseModel], Group] = {
    Sampling: Group(
        "Sampling", help="What is not given comes from the model's own defaults where it has any.", sort_key=1
    ),
    Conversion: Group("Conversion", sort_key=1),
    EngineSettings: Group("Engine", sort_key=2),
    ServerSettings: Group("Server", sort_key=1),
}


def with_settings(*, without: Collection[str] = ()) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorate a command: a parameter annotated with a settings model becomes one flag per field.

    The command gets the checked model with `model_fields_set` telling which
    flags were given. A field that has the name of another parameter of the
    command, or stands in `without`, gets no flag.

    Raises (when the command is called):
        SettingError: a value outside the field's range
    """

    def decorate(command: Callable[..., Result]) -> Callable[..., Result]:
        hints = get_type_hints(command, include_extras=True)
        models: dict[str, type[BaseModel]] = {}
        parameters: list[inspect.Parameter] = []
        declared = inspect.signature(command).parameters
        hidden = {*declared, *without}
        for parameter in declared.values():
            hint = hints[parameter.name]
            if isinstance(hint, type) and issubclass(hint, BaseModel):
                models[parameter.name] = hint
                fields = {name: field for name, field in hint.model_fields.items() if name not in hidden}
                parameters += [_flag(name, field, _GROUPS[hint]) for name, field in fields.items()]
            else:
                parameters.append(parameter.replace(annotation=hint))

        def call(*positional: Any, **named: Any) -> Result:
            for name, model in models.items():
                given = {
                    field: named.pop(field) for field in model.model_fields if field not in hidden and field in named
                }
                named[name] = checked(model, {field: value for field, value in given.items() if value is not None})
            return command(*positional, **named)

        call.__name__ = command.__name__
        call.__doc__ = command.__doc__
        call.__annotations__ = {}  # the signature holds them, resolved
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return call

    return decorate


def overlay(defaults: Settings, given: Settings) -> Settings:
    """`defaults` with the fields that were set in `given`."""
    return defaults.model_copy(update={name: getattr(given, name) for name in given.model_fields_set})


def whole_number(_hint: Any, tokens: Sequence[Token]) -> int:
    """Converter of integer parameters: cyclopts on its own rounds 3.5 to 4 without a word."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"{tokens[0].value} is not a whole number") from None


def _flag(name: str, field: FieldInfo, group: Group) -> inspect.Parameter:
    converter = whole_number if field.annotation is int else None
    described = Parameter(help=_help(field), group=group, negative=(), show_default=False, converter=converter)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[field.annotation | None, described],  # type: ignore[operator]
    )


def _help(field: FieldInfo) -> str:
    limits: dict[str, Any] = {}
    for item in field.metadata:
        limits |= {name: getattr(item, name) for name in ("ge", "gt", "le") if hasattr(item, name)}
    remarks = []
    if "le" in limits:
        low = limits.get("ge", limits.get("gt"))
        remarks.append(f"{'above ' if 'gt' in limits else ''}{low} to {limits['le']}")
    if field.default not in (None, ()):
        remarks.append(f"default {field.default}")
    return f"{field.description} [{', '.join(remarks)}]" if remarks else str(field.description)
