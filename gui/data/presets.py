"""Named choices of the sampler's values; knows no widget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.settings import Sampling

__all__ = ["BUILT_IN", "NEUTRAL", "matching"]

MODEL = "model"
"""The name of the choice to change nothing: what the model's makers recommend."""

BUILT_IN: dict[str, dict[str, Any]] = {
    MODEL: {},
    "precise": {"temperature": 0.2, "top_k": 20, "top_p": 0.8, "min_p": 0.1},
    "balanced": {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
    "creative": {"temperature": 1.1, "top_k": 0, "top_p": 0.97, "min_p": 0.05},
}

NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Every value at which its step of the sampler does nothing."""


def matching(choices: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]], defaults: Sampling) -> str | None:
    """The preset whose values are in force; None when they are nobody's."""
    wanted = _laid_over(defaults, choices)
    for name, values in {**BUILT_IN, **own}.items():
        if _laid_over(defaults, values) == wanted:
            return name
    return None


def _laid_over(defaults: Sampling, values: Mapping[str, Any]) -> dict[str, Any]:
    return {**defaults.model_dump(), **values}
