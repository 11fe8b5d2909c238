"""Which format each tensor of a model gets, from a few settings; and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

from engine.core.quant import FORMATS
from engine.errors import SettingError
from engine.models.spec import ModelSpec
from engine.models.weights import VECTOR, tensor_bytes
from engine.settings import Conversion

__all__ = [
    "Recipe",
    "calibrated",
    "conversion_for",
    "group_for",
    "recipe",
    "recipe_bytes",
    "repeats",
    "searched",
    "spare_bytes",
]

# Our tensor -> (format, group).
Recipe = Mapping[str, tuple[str, int]]

_BY_BITS = {4: "q4", 8: "q8"}
_LEVELS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "small": ("q4", ()),
    "balanced": ("q4", ()),
    "best": ("q6", ("embedding=q8", "head=q8")),
    "attention": ("q4", ("*.attention.*=q8",)),
}
"""Level -> the format of matrices in groups of 32, and exceptions as in `Conversion.keep`."""
_LEVEL_GROUP = 32
_BALANCED_SHARE = 0.25
"""Of the layers' weights get 6 bits instead of 4, where they do the most good."""
_MOST_BITS = 64
"""Budgets beyond are bytes."""


def calibrated(conversion: Conversion) -> bool:
    """Whether a text goes through the model before its weights are rounded."""
    return conversion.level != "plain" or bool(conversion.calibrate) or searched(conversion)


def searched(conversion: Conversion) -> bool:
    """Whether it is measured which matrices deserve more bits."""
    return conversion.level == "balanced" or conversion.budget > 0


def spare_bytes(spec: ModelSpec, formats: Recipe, conversion: Conversion) -> int:
    """Bytes that a search may add to all matrices in the formats that they have without it.

    Raises:
        SettingError: they are larger than the budget already
    """
    least = recipe_bytes(spec, formats)
    if not conversion.budget:
        linear = sum(tensor.parameters for tensor in spec.tensors() if tensor.role == "linear")
        return int(
            _BALANCED_SHARE * linear * (FORMATS["q6"].bits_per_weight(32) - FORMATS["q4"].bits_per_weight(32)) / 8
        )
    most = conversion.budget if conversion.budget > _MOST_BITS else conversion.budget * spec.parameters / 8
    if most < least:
        raise SettingError(
            f"the model takes at least {least} bytes ({8 * least / spec.parameters:.3f} bits per weight); "
            "raise the budget"
        )
    return int(most) - least


def recipe(
    spec: ModelSpec,
    conversion: Conversion,
    kept: Mapping[str, str],
    codings: Mapping[str, tuple[str, int]],
    chosen: Mapping[str, str] = MappingProxyType({}),
) -> Recipe:
    """The format of every tensor.

    Matrices get the bits asked for, or those of the level. Embedding and head are never below 6 bits:
    most of the error of rare tokens comes from there. Routers of experts stay
    as they are, norms and biases float32. What the source has in int4 already
    stays as it is, wherever it is. Then the exceptions, the last match wins.

    kept: our tensor -> the format that holds the source's values exactly
    codings: our tensor -> ("q4" or "q8", columns that share a scale), of those the source has as whole numbers
    chosen: our tensor -> format, where a search found that it deserves another

    Raises:
        SettingError: an exception is malformed, or matches nothing; named. Or settings contradict each other.
    """
    usual, rules, wanted_group = _plan(conversion)
    formats: dict[str, tuple[str, int]] = {}
    for tensor in spec.tensors():
        if tensor.role == "vector":
            formats[tensor.name] = (VECTOR, 0)
        elif not usual or tensor.role == "router":
            formats[tensor.name] = (kept[tensor.name], 0)
        else:
            levels, group = codings.get(tensor.name, ("", 0))
            name = chosen.get(tensor.name, usual)
            if tensor.role in {"embedding", "head"} and name == "q4" and levels != "q4":
                name = "q6"
            name = _exact(name, levels)
            formats[tensor.name] = (name, group_for(name, wanted_group, levels, group))
    for rule in (*rules, *conversion.keep):
        pattern, equals, name = rule.rpartition("=")
        if not equals or name not in FORMATS:
            raise SettingError(f'"{rule}" is no exception: write PATTERN=FORMAT with one of {", ".join(FORMATS)}')
        matching = [known for known in formats if fnmatchcase(known, pattern)]
        if not matching and rule in rules:
            continue  # a level's own exceptions are for all models, some of which have no head
        if not matching:
            raise SettingError(f'"{pattern}" matches no tensor of the model; `inspect --tensors` lists them')
        matrices = [known for known in matching if formats[known][0] != VECTOR]
        if not matrices:
            raise SettingError(f'"{pattern}" matches only norms and biases, which stay float32 in any case')
        for known in matrices:
            levels, theirs = codings.get(known, ("", 0))
            exact = _exact(name, levels)
            group = group_for(exact, wanted_group, levels, theirs)
            formats[known] = (exact, FORMATS[exact].group_for(group))
    return formats


def _plan(conversion: Conversion) -> tuple[str, tuple[str, ...], int]:
    """The usual format of matrices ("": the source's own), the level's exceptions, and the group size."""
    if conversion.level == "plain":
        if conversion.calibrate and conversion.bits != 4:
            raise SettingError(f"a sample text fits weights of 4 bits, not of {conversion.bits}; leave calibrate out")
        if conversion.budget and (conversion.bits, conversion.group_size) != (4, _LEVEL_GROUP):
            raise SettingError("a budget decides bits and group size; leave bits and group size out")
        return _BY_BITS.get(conversion.bits, ""), (), conversion.group_size
    if conversion.budget and conversion.level not in {"small", "balanced"}:
        raise SettingError(f"level {conversion.level} decides the size; leave the budget out")
    if (conversion.bits, conversion.group_size) != (4, _LEVEL_GROUP):
        raise SettingError(f"level {conversion.level} decides bits and group size; leave bits and group size out")
    return *_LEVELS[conversion.level], _LEVEL_GROUP


def repeats(name: str, levels: str) -> bool:
    """Whether format `name` can hold whole numbers of these levels ("q4", "q8") just as they are."""
    return (name, levels) in {("q4g", "q4"), ("q8", "q8"), ("q8", "q4")}


def _exact(name: str, levels: str) -> str:
    """The format of that name in which whole numbers of these levels keep a scale of their own for each group."""
    return "q4g" if name == levels == "q4" else name


def group_for(name: str, wanted: int, levels: str, group: int) -> int:
    """The group size that is wanted, or the source's where that is smaller and can be kept."""
    return group if repeats(name, levels) and group in FORMATS[name].groups and group < wanted else wanted


def recipe_bytes(spec: ModelSpec, formats: Recipe) -> int:
    """Bytes of all tensors in these formats."""
    return sum(tensor_bytes(tensor, *formats[tensor.name]) for tensor in spec.tensors())


def conversion_for(dtype: str) -> Conversion:
    """The conversion that a short name asks for: "auto", "q4", "q8", "f16" (the source's own precision) or "f32".

    Raises:
        SettingError: another name
    """
    known = {
        "auto": Conversion(),
        "q4": Conversion(bits=4),
        "q8": Conversion(bits=8, group_size=128),
        "f16": Conversion(bits=16),
        "f32": Conversion(bits=16, keep=("*=f32",)),
    }
    if dtype not in known:
        raise SettingError(f'dtype must be one of {", ".join(known)}, not "{dtype}"')
    return known[dtype]
