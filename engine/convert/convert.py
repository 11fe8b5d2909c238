"""Turns a stranger's model into a `.nook` file, or into weights in memory, reporting as it goes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from engine.convert.calibration import Calibration, Sample, sample
from engine.convert.layerwise import layer_of
from engine.convert.packing import Packing, workers
from engine.convert.recipe import Recipe, calibrated, recipe, searched, spare_bytes
from engine.convert.sensitivity import LADDER, Scan, chosen_formats
from engine.convert.source import Source, check_tokenizer, open_source
from engine.core.cpu import machine
from engine.core.library import Kernels, prepared_kernels
from engine.core.memory import LINE, Buffer
from engine.core.team import Team
from engine.models.store import Manifest, StoredTensor
from engine.models.weights import MemoryWeights, ModelSource, Tensor, format_label, tensor_bytes
from engine.models.writer import NookWriter
from engine.progress import Progress, Stage
from engine.settings import Conversion
from engine.text.tokenizer import Tokenizer

__all__ = ["convert", "quantised_in_memory"]

_COMPARED_BYTES = 8 << 20


def convert(
    path: Path, out: Path, conversion: Conversion = Conversion(), *, resume: bool = False
) -> Generator[Progress, None, None]:
    """Convert a model folder or GGUF file into `out`, which gets its name when all is written.

    Every Progress is a place to stop. Closing the generator leaves no file;
    with `resume` it leaves a partial one that the same call goes on from, to
    the same bytes.

    Raises:
        InputError: and its kinds: the model, or a setting, cannot be used, or the model was changed meanwhile
        OutOfSpaceError: the drive has not the room, or became full
        ResourceError: the file cannot be written
    """
    yield Progress("convert", 0, 0, "bytes", "reading the model's description")
    source = open_source(path)
    check_tokenizer(path, source.files)
    if source.kind == "gguf":
        Tokenizer.from_files(source.files)  # rebuilt, and so far unproven
    formats = _recipe_for(source, conversion)
    text = sample(conversion.calibrate) if calibrated(conversion) else None
    kernels = yield from prepared_kernels()
    clock = _Clock("convert", source)
    notices = yield from _compare_redundant(source, clock)
    with ExitStack() as held:
        calibration = None
        if text is not None:
            team = Team(kernels, machine().default_threads)
            held.callback(team.close)
            calibration = Calibration(source, text.text, kernels, team)
            if searched(conversion):
                formats = yield from _searched(source, conversion, text.text, kernels, team, clock)
        manifest = _manifest(source, conversion, formats, notices, text)
        writer = held.enter_context(NookWriter(out, manifest, source.files, stamp=source.stamp, resume=resume))
        pool = held.enter_context(workers())
        try:
            for _ in writer.recover():
                yield clock.now("checking what is there already")
            remaining = {tensor.name: tensor for tensor in writer.remaining}
            for assignment in source.assignments:
                size = source.bytes(assignment)
                tensor = remaining.get(assignment.tensor.name)
                if tensor is None:
                    clock.skip(size)
                    continue
                known: dict[str, Any] = {}
                number = layer_of(tensor.name)
                if calibration is not None and number is not None and assignment.tensor.role == "linear":
                    for _ in calibration.advance(number):
                        yield clock.now(f"layer {number} reads the sample text")
                    known = {"weights": calibration.weights(tensor.name), "feedback": calibration.feedback(tensor.name)}
                packing = Packing(source, assignment, tensor.format, tensor.group, pool=pool, kernels=kernels, **known)
                for _ in packing.measure():
                    yield clock.now(tensor.name)
                written = 0
                for pieces in packing.slices():
                    for piece in pieces:
                        writer.write(tensor, piece.offset, piece.data)
                        written += piece.data.nbytes
                    yield clock.now(tensor.name, size * written // tensor.bytes)
                for _ in writer.finish(tensor, packing.exponent):
                    yield clock.now(tensor.name, size)
                clock.add(size)
            source.check_unchanged()
            for _ in writer.commit():
                yield clock.now("waiting for the disk")
        except (GeneratorExit, KeyboardInterrupt):
            if resume:
                writer.keep_partial()
            raise
    yield clock.now()


def quantised_in_memory(source: Source, conversion: Conversion) -> Generator[Progress, None, ModelSource]:
    """The model with its weights packed in memory; every Progress is a place to stop.

    Each weight is rounded by itself: fitting to a text takes minutes, which only a file is worth.

    Raises:
        ModelFolderError, SettingError: as for `convert`
        ResourceError: there is not the memory
    """
    formats = _recipe_for(source, conversion)
    kernels = yield from prepared_kernels()
    clock = _Clock("load", source)
    notices = yield from _compare_redundant(source, clock)
    sizes = [tensor_bytes(tensor, *formats[tensor.name]) for tensor in source.spec.tensors()]
    places = [0, *accumulate(-(-size // LINE) * LINE for size in sizes)]
    memory = Buffer(places[-1], "the weights").view
    tensors: list[Tensor] = []
    with workers() as pool:
        for assignment, place, size in zip(source.assignments, places, sizes, strict=False):
            spec, (name, group) = assignment.tensor, formats[assignment.tensor.name]
            packing = Packing(source, assignment, name, group, pool=pool, kernels=kernels)
            data = memory[place : place + size]
            for _ in packing.measure():
                yield clock.now(spec.name)
            for _ in packing.into(data):
                yield clock.now(spec.name)
            tensors.append(Tensor(spec.name, name, group, spec.rows, spec.cols, packing.exponent, data))
            clock.add(source.bytes(assignment))
    source.check_unchanged()
    made_of = "\n".join([source.stamp, repr(sorted(formats.items()))])
    return ModelSource(
        path=source.path,
        kind=source.kind,
        name=source.name,
        label=format_label(source.spec, formats),
        spec=source.spec,
        weights=MemoryWeights(tensors),
        files=source.files,
        end_ids=source.end_ids,
        defaults=source.defaults,
        licence=source.licence,
        licence_text=source.licence_text,
        identity=hashlib.sha256(made_of.encode()).hexdigest(),
        notices=(*source.notices, *notices),
    )


def _searched(  # noqa: PLR0917 - all that a scan needs
    source: Source, conversion: Conversion, text: str, kernels: Kernels, team: Team, clock: _Clock
) -> Generator[Progress, None, Recipe]:
    """The recipe in which matrices that need them have more bits, within the budget."""
    base = _recipe_for(source, conversion)
    free = {tensor.name: tensor for tensor in source.spec.tensors() if base[tensor.name][0] == LADDER[0]}
    spare = spare_bytes(source.spec, base, conversion)
    group = min((base[name][1] for name in free), default=32)
    scan = Scan(source, text, group, kernels, team)
    for _ in scan.run():
        yield clock.now("looking for what needs more bits")
    harm = {name: costs for name, costs in scan.harm.items() if name in free}
    return recipe(source.spec, conversion, *source.formats, chosen_formats(free, harm, group, spare))


def _recipe_for(source: Source, conversion: Conversion) -> Recipe:
    return recipe(source.spec, conversion, *source.formats)


def _manifest(
    source: Source, conversion: Conversion, formats: Recipe, notices: tuple[str, ...], text: Sample | None
) -> Manifest:
    """The manifest but for places, hashes and exponents, which the writer fills in."""
    made = conversion.model_dump(mode="json")
    if text is not None:
        made |= {"calibrate": text.name, "calibrate_sha256": text.sha256, "rounding": "error feedback"}
    tensors = tuple(
        StoredTensor(tensor.name, name, group, tensor.rows, tensor.cols, 0, 0, tensor_bytes(tensor, name, group))
        for tensor in source.spec.tensors()
        for name, group in [formats[tensor.name]]
    )
    return Manifest(
        name=source.name,
        spec=source.spec,
        recipe=made,
        end_ids=tuple(sorted(source.end_ids)),
        defaults=dict(source.defaults),
        licence=source.licence,
        licence_text=source.licence_text,
        notices=(*source.notices, *notices),
        source_kind=source.kind,
        source=source.fingerprints,
        files=(),
        tensors=tensors,
    )


def _compare_redundant(source: Source, clock: _Clock) -> Generator[Progress, None, tuple[str, ...]]:
    """A stored head beside a tied embedding should repeat it; a notice when it does not."""
    notices = []
    for name, used in source.redundant:
        rows, columns = source.reader.shapes[used]
        step = max(1, _COMPARED_BYTES // (4 * columns))
        same = source.reader.shapes[name] == (rows, columns)
        for first in range(0, rows if same else 0, step):
            count = min(step, rows - first)
            yield clock.now(name)
            if not np.array_equal(source.reader.rows(name, first, count), source.reader.rows(used, first, count)):
                same = False
                break
        if not same:
            notices.append(f"{name} differs from {used}, but tie_word_embeddings (config.json) is true; it is not used")
    return tuple(notices)


class _Clock:
    """Progress in bytes of the source, with the time left."""

    def __init__(self, stage: Stage, source: Source) -> None:
        self._stage: Stage = stage
        self._total = sum(source.bytes(assignment) for assignment in source.assignments)
        self._done = self._skipped = 0
        self._start = time.monotonic()

    def add(self, size: int) -> None:
        """Bytes that are finished."""
        self._done += size

    def skip(self, size: int) -> None:
        """Bytes that were finished before; they say nothing about speed."""
        self._done += size
        self._skipped += size

    def now(self, note: str = "", part: int = 0) -> Progress:
        """How far it is, `part` bytes into what is being worked on."""
        done = self._done + part
        fresh, elapsed = done - self._skipped, time.monotonic() - self._start
        eta = elapsed / fresh * (self._total - done) if fresh and elapsed > 1 else None
        return Progress(self._stage, done, self._total, "bytes", note, eta_s=eta)
