"""What lies at a path, for people: read within two seconds, without weights, and never failing on a bad model.

A model that cannot be used still gets a report: as much as is known, and the
problem in one sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from engine.convert.folder import Found, describe, find_model, model_name
from engine.convert.recipe import calibrated, recipe, recipe_bytes, searched, spare_bytes
from engine.convert.source import NO_TOKENIZER_NOTICE, Source, check_tokenizer, open_source
from engine.convert.values import ModelReport, Problem, SizeChoice, TensorInfo
from engine.core.cpu import machine
from engine.errors import InputError
from engine.models.families import recognise
from engine.models.memory import needed_bytes
from engine.models.spec import ModelSpec
from engine.models.store import NookFile
from engine.models.weights import VECTOR, format_label
from engine.settings import Conversion
from engine.text.files import chat_templates
from engine.text.template import ChatTemplate

__all__ = ["inspect"]

_CHOICES = (
    *(Conversion(bits=4, group_size=group) for group in (32, 64, 128, 256)),
    Conversion(bits=8, group_size=128),
    Conversion(bits=16),
    *(Conversion(level=level) for level in ("small", "balanced", "best")),
)
# Weights that one core of a usual laptop rounds in a second, by bits; bytes that a usual disk reads or writes.
_WEIGHTS_PER_CORE_S = {4: 50e6, 8: 150e6, 16: 150e6}
_FITTED_PER_CORE_S = 1.5e6  # weights that are fitted to a sample text
_DISK_BYTES_S = 500e6
_CONTEXTS = (2048, 4096, 8192, 16384, 32768)


def inspect(path: Path, *, tensors: bool = False) -> ModelReport:
    """What is known of the model at `path`, problems included.

    tensors: list them all.

    Raises:
        InputError: there is no model at all, or more than one
    """
    found = find_model(path)
    report = _of_nook(found.path, tensors=tensors) if found.kind == "nook" else _of_source(found, tensors=tensors)
    notices = tuple(Problem(False, notice) for notice in found.notices if notice not in _sentences(report))
    return replace(report, problems=report.problems + notices)


def _of_nook(path: Path, *, tensors: bool) -> ModelReport:
    disk_bytes = path.stat().st_size
    try:
        file = NookFile.open(path)
    except InputError as error:
        return ModelReport(path, "nook", path.stem, disk_bytes=disk_bytes, problems=(Problem(True, str(error)),))
    manifest, spec = file.manifest, file.manifest.spec
    formats = {at.name: (at.format, at.group) for at in manifest.tensors}
    report = ModelReport(
        path,
        "nook",
        manifest.name,
        source_dtype=format_label(spec, formats),
        chat_template=not ChatTemplate.from_files(file.files()).completion,
        licence=manifest.licence,
        disk_bytes=disk_bytes,
        memory_bytes=_memory(spec, file.total_bytes),
        problems=tuple(Problem(False, notice) for notice in manifest.notices),
        fidelity=manifest.fidelity,
    )
    if tensors:
        listed = tuple(
            TensorInfo(
                at.name,
                "float32" if at.format == VECTOR else f"{at.format}, group {at.group}" if at.group else at.format,
                (at.cols,) if at.format == VECTOR else (at.rows, at.cols),
                at.bytes,
            )
            for at in manifest.tensors
        )
        report = replace(report, tensors=listed)
    return _with_spec(report, spec)


def _of_source(found: Found, *, tensors: bool) -> ModelReport:
    path = found.path
    if found.kind == "folder":
        report = ModelReport(path, "folder", model_name(path), disk_bytes=_disk_bytes(path.iterdir()))
    else:
        report = ModelReport(path, "gguf", path.stem, disk_bytes=_disk_bytes([path]))
    try:
        source = open_source(path)
    except InputError as error:
        return replace(_as_far_as_possible(report), problems=(Problem(True, str(error)),))
    spec = source.spec
    sizes = _worthwhile([_size(source, conversion) for conversion in _CHOICES])
    report = replace(
        report,
        source_dtype=_dtype(source),
        chat_template=not ChatTemplate.from_files(source.files).completion,
        licence=source.licence,
        sizes=sizes,
        memory_bytes=_memory(spec, recipe_bytes(spec, recipe(spec, Conversion(), *source.formats))),
        problems=tuple(Problem(False, notice) for notice in source.notices),
    )
    try:
        check_tokenizer(path, source.files)
    except InputError as error:
        others = tuple(problem for problem in report.problems if problem.sentence != NO_TOKENIZER_NOTICE)
        report = replace(report, problems=(Problem(True, str(error)), *others))
    if tensors:
        report = replace(report, tensors=_source_tensors(source))
    return _with_spec(report, spec)


def _as_far_as_possible(report: ModelReport) -> ModelReport:
    """What a folder says of itself although something in it is wrong."""
    if report.kind != "folder":
        return report
    try:
        description = describe(report.path)
        report = replace(
            report,
            licence=description.licence,
            chat_template=bool(chat_templates(description.files)),
            family=", ".join(_architectures(description.config)),
        )
        return _with_spec(report, recognise(description.config).spec)
    except InputError:
        return report


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [name[:80] for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _with_spec(report: ModelReport, spec: ModelSpec) -> ModelReport:
    return replace(
        report,
        family=spec.family,
        parameters=spec.parameters,
        context=spec.context,
        vocab_size=spec.vocab_size,
        layers=len(spec.layers),
        hidden=spec.hidden,
    )


def _worthwhile(choices: Sequence[SizeChoice]) -> tuple[SizeChoice, ...]:
    """Without larger groups that save nothing: where they do not divide the columns, padding eats the gain."""
    kept: list[SizeChoice] = []
    for choice in choices:
        same_bits = [other.file_bytes for other in kept if other.conversion.bits == choice.conversion.bits]
        if choice.conversion.level != "plain" or not same_bits or choice.file_bytes < min(same_bits):
            kept.append(choice)
    return tuple(kept)


def _size(source: Source, conversion: Conversion) -> SizeChoice:
    formats = recipe(source.spec, conversion, *source.formats)
    size = recipe_bytes(source.spec, formats)
    if searched(conversion):
        size += spare_bytes(source.spec, formats, conversion)
    files = sum(map(len, source.files.values()))
    label = format_label(source.spec, formats)
    return SizeChoice(
        label if conversion.level == "plain" else f"{conversion.level} ({label})",
        conversion,
        size + files,
        8 * size / source.spec.parameters,
        _seconds(source, conversion, size),
    )


def _seconds(source: Source, conversion: Conversion, written_bytes: int) -> float:
    """Rounding keeps all cores busy; the disk reads and writes meanwhile."""
    rate = _FITTED_PER_CORE_S if calibrated(conversion) else _WEIGHTS_PER_CORE_S[conversion.bits]
    read_bytes = sum(source.bytes(assignment) for assignment in source.assignments)
    rounding_s = source.spec.parameters / (rate * min(machine().default_threads, 16))
    return max(rounding_s, (read_bytes + written_bytes) / _DISK_BYTES_S)


def _memory(spec: ModelSpec, weight_bytes: int) -> dict[int, int]:
    contexts = sorted({context for context in _CONTEXTS if context < spec.context} | {min(spec.context, _CONTEXTS[-1])})
    return {context: needed_bytes(spec, weight_bytes, context) for context in contexts}


def _dtype(source: Source) -> str:
    """What most weights of the source are stored as."""
    totals: dict[str, int] = {}
    shapes = source.reader.shapes
    for assignment in source.assignments:
        for name in assignment.sources:
            dtype = source.reader.dtype(name)
            totals[dtype] = totals.get(dtype, 0) + prod(shapes[name])
    return max(totals, key=lambda dtype: totals[dtype])


def _source_tensors(source: Source) -> tuple[TensorInfo, ...]:
    listed = []
    for assignment in source.assignments:
        tensor = assignment.tensor
        dtypes = dict.fromkeys(source.reader.dtype(name) for name in assignment.sources)
        shape = (tensor.cols,) if tensor.role == "vector" else (tensor.rows, tensor.cols)
        listed.append(TensorInfo(tensor.name, ", ".join(dtypes), shape, source.bytes(assignment)))
    return tuple(listed)


def _disk_bytes(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files if file.is_file())


def _sentences(report: ModelReport) -> set[str]:
    return {problem.sentence for problem in report.problems}
