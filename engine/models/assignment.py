"""Which tensors of a model's files fill which of ours: every one of theirs used once, every one of ours filled."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from engine.errors import ModelFolderError, UnsupportedModelError
from engine.models.families import Blueprint
from engine.models.hf_config import listed
from engine.models.names import Part
from engine.models.spec import TensorSpec

__all__ = ["Assignment", "Assignments", "assign", "is_optional"]

# Buffers that old exports carry beside the weights; all can be computed from the configuration.
_IGNORED = re.compile(r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|position_ids)$")
_LAYER = re.compile(r"(^|\.)(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Assignment:
    """One tensor of ours and the parts of theirs that fill it, stacked in this order.

    A single part may hold several of those that are stacked in ours.
    """

    tensor: TensorSpec
    parts: tuple[Part, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of their tensors, each once."""
        return tuple(dict.fromkeys(part.name for part in self.parts))

    def spans(self) -> list[tuple[Part, int, int]]:
        """(part, first row, end row) in ours; entries instead of rows in a vector."""
        together = len(self.tensor.parts) // len(self.parts)
        ends = list(accumulate(self.tensor.parts))[together - 1 :: together]
        return list(zip(self.parts, [0, *ends[:-1]], ends, strict=True))


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
    body, head = _spelling(blueprint, shapes)
    tensors = tuple(
        Assignment(tensor, tuple(part.under(body, head).among(shapes) for part in _parts(blueprint, tensor.name)))
        for tensor in spec.tensors()
    )
    stored_head = [part.under(body, head).name for part in blueprint.names.get("head", ())]
    used = {source for assignment in tensors for source in assignment.sources}
    missing = [source for assignment in tensors for source in assignment.sources if source not in shapes]
    if missing:
        raise ModelFolderError(f"the model files lack {listed(missing)}, which {spec.family} needs")
    redundant: list[tuple[str, str]] = []
    extra_layers: set[int] = set()
    unknown: list[str] = []
    for name in shapes:
        if name in used or _is_unused(name, blueprint):
            continue
        layer = _LAYER.search(name)
        if layer and int(layer[2][:9]) >= len(spec.layers):
            extra_layers.add(int(layer[2][:9]))
        elif spec.tied_head and [name] == stored_head:
            redundant.append((name, tensors[0].parts[0].name))
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


def is_optional(name: str, blueprint: Blueprint) -> bool:
    """Whether a model can do without a tensor of theirs: a buffer, or part of a layer beyond the configured ones."""
    layer = _LAYER.search(name)
    beyond = layer is not None and int(layer[2][:9]) >= len(blueprint.spec.layers)
    return beyond or _is_unused(name, blueprint)


def _is_unused(name: str, blueprint: Blueprint) -> bool:
    return bool(_IGNORED.search(name) or (blueprint.ignored and re.match(blueprint.ignored, name)))


def _spelling(blueprint: Blueprint, shapes: Mapping[str, Sequence[int]]) -> tuple[str, str]:
    """What these files write for `model.` and before `lm_head`: the first of the family's ways that fits."""
    embedding = blueprint.names["embedding"][0]
    for body, head in blueprint.spellings:
        if embedding.under(body, head).name in shapes:
            return body, head
    return blueprint.spellings[0]


def _parts(blueprint: Blueprint, name: str) -> tuple[Part, ...]:
    number = re.match(r"layers\.(\d+)\.", name)
    if number is None:
        return blueprint.names[name]
    parts = blueprint.names["layers.{n}." + name[number.end() :]]
    experts = blueprint.spec.layers[int(number[1])].feed_forward.experts
    count = experts.count if experts is not None and ".experts." in name else 1
    return tuple(part.at(number[1], expert, count) for expert in range(count) for part in parts)


def _check_shapes(assignment: Assignment, shapes: Mapping[str, Sequence[int]]) -> None:
    tensor = assignment.tensor
    for part, first, end in assignment.spans():
        wanted = part.shape((end - first,) if tensor.role == "vector" else (end - first, tensor.cols))
        shape = tuple(shapes[part.name])
        if shape != wanted:
            raise ModelFolderError(
                f"{part.name} is {_times(shape)}, but the configuration asks for {_times(wanted)}: "
                "the weights belong to another configuration"
            )


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a single number"
