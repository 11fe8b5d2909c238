"""What a configuration says about rotary positions, in all the spellings that models have come with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelFolderError, UnsupportedModelError
from engine.models.hf_config import LARGEST, HfConfig, all_of, shown
from engine.models.spec import RopeScaling, RopeSpec

__all__ = ["ropes"]


def ropes(
    config: HfConfig,
    head_dim: int,
    context: int,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    interleaved: bool = False,
    sliding_theta: float | None = None,
    read_elsewhere: Sequence[str] = (),
) -> tuple[Callable[[str], RopeSpec], int]:
    """Rotary embedding by kind of layer, and how many tokens the model reaches.

    The parameters come as `rope_scaling` (old), as `rope_parameters` (new), as
    both with the same content, or one set for each kind of layer.

    theta, partial, interleaved: the family's base, share of the head that turns
        (None: all of it, whatever is written), and pairing, where the configuration says nothing.
    read_elsewhere: parameters that somebody else reads.
    sliding_theta: of families whose layers with a window have a base of their
        own, and no scaling, unless the parameters come by kind of layer.
    """
    if partial is None:
        config.must("partial_rotary_factor", 1.0)
    else:
        partial = config.number("partial_rotary_factor", partial)
    given_theta = config.number_or_none("rope_theta")
    original = config.size_or_none("original_max_position_embeddings", absent=None)
    sets = [given for given in (config.nested("rope_parameters"), config.nested("rope_scaling")) if given is not None]
    merged: dict[str, Any] = {}
    for given in sets:
        values = _one_name_for_type(given)
        for key in merged.keys() & values.keys():
            if merged[key] != values[key]:
                raise ModelFolderError(f"rope_parameters and rope_scaling ({config.where}) disagree on {key}")
        merged |= values
    where = sets[0].where if sets else config.where
    family = _Family(config, head_dim, context, given_theta, theta, partial, interleaved, original, read_elsewhere)
    kinds = merged.keys() & {"full_attention", "sliding_attention"}
    if not kinds:
        rope, reach = _rope(family, HfConfig(merged, where))
        sliding = rope if sliding_theta is None else RopeSpec(sliding_theta, rope.dim, interleaved)
        reach = reach if sliding_theta is None else min(reach, context)
        return lambda kind: sliding if kind == "sliding_attention" else rope, reach
    if merged.keys() - kinds:
        raise ModelFolderError(f"{where} mixes parameters for all layers with parameters for some")
    by_kind: dict[str, tuple[RopeSpec, int]] = {}
    for kind in sorted(kinds):
        own = HfConfig(merged, where).nested(kind)
        if own is not None:
            by_kind[kind] = _rope(family, HfConfig(_one_name_for_type(own), own.where))

    def rope_of(kind: str) -> RopeSpec:
        if kind not in by_kind:
            raise ModelFolderError(f"{where} has no parameters for {kind} layers, which the model has")
        return by_kind[kind][0]

    return rope_of, min((reach for _, reach in by_kind.values()), default=context)


def _one_name_for_type(given: HfConfig) -> dict[str, Any]:
    """`type` is the old name of `rope_type`, and "su" of "longrope"."""
    values = dict(given.values)
    old, new = values.pop("type", None), values.pop("rope_type", None)
    names = ["longrope" if name == "su" else name for name in (new, old) if name is not None]
    if len(names) > 1 and names[0] != names[1]:
        raise ModelFolderError(f"{given.where} gives both type = {shown(old)} and rope_type = {shown(new)}")
    return {**values, "rope_type": names[0]} if names else values


@dataclass(frozen=True, slots=True)
class _Family:
    """What holds for all kinds of layers."""

    config: HfConfig
    head_dim: int
    context: int
    theta: float | None
    usual_theta: float
    partial: float | None
    interleaved: bool
    original: int | None
    read_elsewhere: Sequence[str]


def _rope(family: _Family, parameters: HfConfig) -> tuple[RopeSpec, int]:
    config, theta = family.config, family.theta
    own_theta = parameters.number_or_none("rope_theta")
    if own_theta is not None and theta is not None and own_theta != theta:
        config.notices.append(f"{parameters.where} gives rope_theta = {own_theta:g}; {theta:g} beside it is not used")
    theta = own_theta or theta or family.usual_theta
    dim = family.head_dim
    kind = parameters.text("rope_type") or "default"
    if kind == "proportional":
        pass  # all of the head has frequencies, of which some are 0
    elif family.partial is None:
        parameters.must("partial_rotary_factor", 1.0)
    else:
        dim = int(dim * parameters.number("partial_rotary_factor", family.partial))
    if dim % 2 or not 0 < dim <= family.head_dim:
        raise UnsupportedModelError(
            f"{dim} of the {family.head_dim} numbers of a head turn ({config.where}); rotary positions need pairs"
        )
    if kind not in _ROPE_KINDS:
        raise UnsupportedModelError(
            f"rope type {shown(kind)} ({parameters.where}) is not supported; {all_of(sorted(_ROPE_KINDS))} are"
        )
    scaling, reach = _ROPE_KINDS[kind](config, parameters, family.context, family.original)
    if scaling is not None and scaling.kind == "longrope":
        for key, factors in (("short_factor", scaling.short_factor), ("long_factor", scaling.long_factor)):
            if len(factors) != dim // 2:
                raise ModelFolderError(f"{key} ({parameters.where}) has {len(factors)} entries for {dim // 2} pairs")
    parameters.close(f'rope type "{kind}"', {"finetuned", "original_max_position_embeddings", *family.read_elsewhere})
    return RopeSpec(theta, dim, family.interleaved, scaling), reach


_Scaled = tuple[RopeScaling | None, int]


def _rope_default(_config: HfConfig, parameters: HfConfig, context: int, _original: int | None) -> _Scaled:
    parameters.must("factor", 1.0)
    return None, context


def _rope_linear(_config: HfConfig, parameters: HfConfig, context: int, _original: int | None) -> _Scaled:
    factor = _factor(parameters)
    return RopeScaling("linear", factor, context), min(int(context * factor), LARGEST)


def _rope_dynamic(config: HfConfig, parameters: HfConfig, context: int, _original: int | None) -> _Scaled:
    alpha = parameters.number_or_none("alpha")
    if alpha is not None:
        # Hunyuan stretches the base by a fixed factor, whatever the length.
        for key in ("factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
            parameters.number_or_none(key)
        return RopeScaling("ntk", alpha, context), context
    # Beyond the trained length every frequency would depend on how long the text has become, so that keys cached
    # earlier no longer fit. Up to it the scaling does nothing; the model ends there.
    config.notices.append(
        f'rope type "dynamic" ({parameters.where}) changes positions beyond {context} tokens; '
        "the model is used up to that length"
    )
    return RopeScaling("dynamic", _factor(parameters), context), context


def _rope_llama3(config: HfConfig, parameters: HfConfig, context: int, original: int | None) -> _Scaled:
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if high <= low:
        raise ModelFolderError(f"high_freq_factor must be above low_freq_factor ({parameters.where}), not {high:g}")
    trained = _trained_length(config, parameters, context, original)
    return RopeScaling("llama3", _factor(parameters), trained, low_freq_factor=low, high_freq_factor=high), context


def _rope_yarn(config: HfConfig, parameters: HfConfig, context: int, original: int | None) -> _Scaled:
    trained = _trained_length(config, parameters, context, original)
    factor = _factor(parameters, context / trained)
    scaling = RopeScaling(
        "yarn",
        factor,
        trained,
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        attention_factor=parameters.number_or_none("attention_factor"),
        mscale=parameters.number_or_none("mscale"),
        mscale_all_dim=parameters.number_or_none("mscale_all_dim"),
        truncate=parameters.flag("truncate", default=True),
    )
    return scaling, min(max(context, int(trained * factor)), LARGEST)


def _rope_longrope(config: HfConfig, parameters: HfConfig, context: int, original: int | None) -> _Scaled:
    trained = _trained_length(config, parameters, context, original)
    short, long = parameters.numbers("short_factor"), parameters.numbers("long_factor")
    if short is None or long is None:
        raise ModelFolderError(f"{parameters.where} does not say short_factor and long_factor")
    config.notices.append(
        f"the model turns positions by other factors where a conversation may be longer than {trained} tokens; "
        "the context that it is opened with decides"
    )
    scaling = RopeScaling(
        "longrope",
        _factor(parameters, max(context / trained, 1.0)),
        trained,
        attention_factor=parameters.number_or_none("attention_factor"),
        short_factor=short,
        long_factor=long,
    )
    return scaling, context


def _rope_proportional(_config: HfConfig, parameters: HfConfig, context: int, _original: int | None) -> _Scaled:
    parameters.must("factor", 1.0)
    return RopeScaling("proportional", parameters.number("partial_rotary_factor", 1.0), context), context


_ROPE_KINDS: dict[str, Callable[[HfConfig, HfConfig, int, int | None], _Scaled]] = {
    "default": _rope_default,
    "linear": _rope_linear,
    "dynamic": _rope_dynamic,
    "llama3": _rope_llama3,
    "yarn": _rope_yarn,
    "longrope": _rope_longrope,
    "proportional": _rope_proportional,
}


def _factor(parameters: HfConfig, default: float | None = None) -> float:
    factor = parameters.number("factor", default)
    if factor < 1:
        raise ModelFolderError(f"factor = {factor:g} ({parameters.where}) must be at least 1")
    return factor


def _trained_length(config: HfConfig, parameters: HfConfig, context: int, original: int | None) -> int:
    own = parameters.size_or_none("original_max_position_embeddings", absent=None)
    if original is None and own is None:
        config.notices.append(
            f"{parameters.where} does not say original_max_position_embeddings; the model's {context} tokens are taken"
        )
    return original or own or context
