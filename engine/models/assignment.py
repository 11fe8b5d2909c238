"""Which tensors of a model's files fill which of ours: every one of theirs used once, every one of ours filled."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.errors import ModelFolderError, UnsupportedModelError
from engine.models.families import Blueprint, Names
from engine.models.hf_config import listed
from engine.models.spec import ModelSpec, TensorSpec

__all__ = ["Assignment", "Assignments", "assign", "is_optional"]

# Buffers that old exports carry beside the weights; all can be computed from the configuration.
_IGNORED = re.compile(r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|position_ids)$")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Assignment:
    """One tensor of ours and the tensors of theirs that fill it, stacked in this order."""

    tensor: TensorSpec
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Assignments:
    """Where every tensor comes from.

    redundant: a stored head of a model whose head is its embedding: (theirs,
    the name of what is used instead). The reader of weights says when they differ.
    """

    tensors: tuple[Assignment, ...]
    redundant: tuple[tuple[str, str], ...]
    notices: tuple[str, ...]


def assign(blueprint: Blueprint, shapes: Mapping[str, Sequence[int]]) -> Assignments:
    """Prove that tensors of these shapes are the blueprint's, each used once and each of ours filled.

    Raises:
        ModelFolderError: tensors are missing, or have other shapes than the
            configuration asks for; named
        UnsupportedModelError: there are tensors that the family does not use; named
    """
    spec = blueprint.spec
    tensors = tuple(Assignment(tensor, _sources(blueprint.names, tensor.name)) for tensor in spec.tensors())
    used = {source for assignment in tensors for source in assignment.sources}
    missing = [source for assignment in tensors for source in assignment.sources if source not in shapes]
    if missing:
        raise ModelFolderError(f"the model files lack {listed(missing)}, which {spec.family} needs")
    redundant: list[tuple[str, str]] = []
    extra_layers: set[int] = set()
    unknown: list[str] = []
    for name in shapes:
        if name in used or _IGNORED.search(name):
            continue
        layer = _LAYER.search(name)
        if layer and int(layer[2][:9]) >= len(spec.layers):
            extra_layers.add(int(layer[2][:9]))
        elif spec.tied_head and (name,) == blueprint.names["head"]:
            redundant.append((name, blueprint.names["embedding"][0]))
        else:
            unknown.append(name)
    if unknown:
        raise UnsupportedModelError(
            f"the model files hold {listed(sorted(unknown))}, which {spec.family} as configured does not use"
        )
    for assignment in tensors:
        _check_shapes(assignment, shapes)
    notices = []
    if extra_layers:
        named = listed([str(number) for number in sorted(extra_layers)])
        notices.append(f"layer {named} of the files is beyond the {len(spec.layers)} configured layers and is left out")
    return Assignments(tensors, tuple(redundant), tuple(notices))


def is_optional(name: str, spec: ModelSpec) -> bool:
    """Whether a model can do without a tensor of theirs: a buffer, or part of a layer beyond the configured ones."""
    layer = _LAYER.search(name)
    return bool(_IGNORED.search(name)) or (layer is not None and int(layer[2][:9]) >= len(spec.layers))


def _sources(names: Names, name: str) -> tuple[str, ...]:
    number = re.match(r"layers\.(\d+)\.", name)
    if number is None:
        return names[name]
    pattern = "layers.{n}." + name[number.end() :]
    return tuple(source.replace("{n}", number[1]) for source in names[pattern])


def _check_shapes(assignment: Assignment, shapes: Mapping[str, Sequence[int]]) -> None:
    tensor = assignment.tensor
    # A single source may hold all parts already stacked.
    parts = tensor.parts if len(assignment.sources) == len(tensor.parts) else (sum(tensor.parts),)
    for source, part in zip(assignment.sources, parts, strict=True):
        wanted = (part,) if tensor.role == "vector" else (part, tensor.cols)
        shape = tuple(shapes[source])
        if shape != wanted:
            raise ModelFolderError(
                f"{source} is {_times(shape)}, but the configuration asks for {_times(wanted)}: "
                "the weights belong to another configuration"
            )


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a single number"
