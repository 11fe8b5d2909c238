"""How much of the source a converted file still is: both read the same text, layer by layer.

The source is read as it is stored, one layer in memory at a time; the file runs
as in use. Of every token the two distributions of the next one are compared,
of every layer the hidden states, of every tensor the weights, each column by the
size of the inputs it meets.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from engine.convert.calibration import Sample, cut
from engine.convert.feedback import Moments
from engine.convert.layerwise import Float32, FloatModel, PackedModel, layer_of
from engine.convert.sensitivity import divergence, log_probabilities
from engine.convert.source import Source, open_source
from engine.core.cpu import machine
from engine.core.library import prepared_kernels
from engine.core.quant import FORMATS
from engine.core.team import Team
from engine.errors import InputError
from engine.models.spec import ModelSpec
from engine.models.store import open_nook
from engine.models.weights import VECTOR, Tensor
from engine.models.writer import keep_fidelity
from engine.progress import Progress
from engine.settings import KvDtype

__all__ = ["GRADES", "Fidelity", "LayerFidelity", "fidelity"]

GRADES: Mapping[str, tuple[float, str]] = {
    "A": (0.03, "hardly to be told from the original"),
    "B": (0.1, "words differ now and then, what is said stays the same"),
    "C": (0.4, "weaker than the original; choose a higher level if there is room"),
    "D": (math.inf, "no longer the model it was made from; convert it again at a higher level"),
}
"""Grade -> the largest mean divergence in nats, and what it means."""

_WINDOWS, _TOKENS = 6, 512
_BLOCK_ROWS = 2048
# Of what a tensor's products are: beyond this they have lost the tensor's meaning. Plain int4 loses a tenth.
_DAMAGED = 0.5
# Times what tensors of the same format lose.
_OUTLYING = 4.0
_WORST = 5


@dataclass(frozen=True, slots=True)
class LayerFidelity:
    """One layer. states: error of the hidden states after it; weights: of the products of its worst tensor.

    Both are relative root mean squares; that of states includes what came from the layers before.
    """

    states: float
    weights: float
    worst: str


@dataclass(frozen=True, slots=True)
class Fidelity:
    """What was measured. `kl_*` in nats; `damaged` tensors have lost far more than their format explains."""

    kl_mean: float
    kl_99: float
    top1_agreement: float
    perplexity: float
    perplexity_source: float
    grade: str
    meaning: str
    tokens: int
    text: str
    kv: str
    layers: tuple[LayerFidelity, ...]
    worst_layers: tuple[int, ...]
    damaged: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def fidelity(
    file: Path, against: Path, text: Sample, *, kv: KvDtype = "int8", keep: bool = True
) -> Generator[Progress, None, Fidelity]:
    """Compare a `.nook` file with the folder or GGUF file it was made from; every Progress is a place to stop.

    keep: write the result into the file, in the room that is kept for it; all other bytes stay.

    Raises:
        InputError: one of the two cannot be used, or they are different models
        ResourceError: the result cannot be written
    """
    yield Progress("measure", 0, 0, "layers", "reading the models' descriptions")
    packed, source = open_nook(file), open_source(against)
    _check_same(packed.spec, source.spec, file, against)
    windows = cut(source, text.text, most=_WINDOWS, tokens=_TOKENS)
    kernels = yield from prepared_kernels()
    most = max(map(len, windows))
    rows = most - most // 2
    team = Team(kernels, machine().default_threads)
    try:
        original = FloatModel(source, kernels, team, most, head_rows=rows)
        converted = PackedModel(packed.spec, packed.weights, team, most, head_rows=rows, kv=kv)
        expected, found = original.embedded(windows), converted.embedded(windows)
        losses = _Losses(source, packed.weights.tensor)
        states: list[float] = []
        tokens_seen = _Tokens()
        last = len(source.spec.layers) - 1
        for number in range(last + 1):
            yield Progress("measure", number, last + 2, "layers", f"layer {number}")
            original.load(number)
            converted.load(number)
            if number == last:
                for window, x, y in zip(windows, expected, found, strict=True):
                    first = len(window) // 2
                    wanted = log_probabilities(original.logits(x, first))[:-1]
                    tokens_seen.add(wanted, log_probabilities(converted.logits(y, first))[:-1], window[first + 1 :])
                    yield Progress("measure", number, last + 2, "layers", "comparing next words")
            moments: dict[str, Moments] = {}

            def observe(name: str, x: Float32, _expert: int, into: dict[str, Moments] = moments) -> None:
                into.setdefault(name, Moments(x.shape[1], alone=True)).add(x)

            error = size = 0.0
            for place, (x, y) in enumerate(zip(expected, found, strict=True)):
                expected[place], found[place] = original.run(x, observe), converted.run(y)
                error += float(np.square(found[place] - expected[place], dtype=np.float64).sum())
                size += float(np.square(expected[place], dtype=np.float64).sum())
                yield Progress("measure", number, last + 2, "layers", f"layer {number}")
            states.append(_ratio(error, size))
            for _ in losses.measure(number, original, moments):
                yield Progress("measure", number, last + 2, "layers", f"layer {number}: weights")
        yield Progress("measure", last + 1, last + 2, "layers", "comparing embedding and norm")
        for _ in losses.measure(None, original, {}):
            yield Progress("measure", last + 1, last + 2, "layers", "comparing embedding and norm")
    finally:
        team.close()
    result = _judged(tokens_seen, states, losses, text.name, kv)
    if keep:
        keep_fidelity(file, _kept(result))
    yield Progress("measure", last + 2, last + 2, "layers")
    return result


class _Tokens:
    """What was expected of the next token, by both."""

    def __init__(self) -> None:
        self.divergences: list[Float32] = []
        self.agreeing = self.count = 0
        self.surprise = self.surprise_source = 0.0

    def add(self, wanted: Float32, given: Float32, following: np.ndarray[Any, Any]) -> None:
        """Log-probabilities (rows, vocab_size) of source and file, and the tokens that followed (rows,)."""
        rows = np.arange(len(following))
        sound = np.nan_to_num(given, nan=-np.inf, posinf=0.0)
        with np.errstate(invalid="ignore"):
            self.divergences.append(np.nan_to_num(divergence(wanted, np.maximum(sound, -1e4)), nan=1e4))
        self.agreeing += int((wanted.argmax(axis=1) == sound.argmax(axis=1)).sum())
        self.count += len(following)
        self.surprise -= float(np.maximum(sound, -1e4)[rows, following].sum(dtype=np.float64))
        self.surprise_source -= float(wanted[rows, following].sum(dtype=np.float64))


class _Losses:
    """What each tensor's products have lost: tensor -> relative root mean square error."""

    def __init__(self, source: Source, tensor: Any) -> None:
        self.by_name: dict[str, float] = {}
        self.formats: dict[str, str] = {}
        self._source, self._tensor = source, tensor

    def measure(self, layer: int | None, original: FloatModel, moments: Mapping[str, Moments]) -> Generator[None]:
        """Tensors of a layer, or (None) those outside; every yield is a place to stop."""
        for assignment in self._source.assignments:
            spec = assignment.tensor
            if layer_of(spec.name) != layer:
                continue
            held: Tensor = self._tensor(spec.name)
            self.formats[spec.name] = held.format
            seen = moments.get(spec.name)
            importance = np.ones(spec.cols, np.float32) if seen is None or not seen.rows else seen.mean_squares
            error = size = 0.0
            if held.format == VECTOR:
                values = self._source.rows(assignment, 0, 1)[0]
                error, size = _squares(held.vector()[None], values[None], np.ones(spec.cols, np.float32))
            else:
                layout = FORMATS[held.format].layout(held.rows, held.cols, held.group)
                for first in range(0, spec.rows, _BLOCK_ROWS):
                    count = min(_BLOCK_ROWS, spec.rows - first)
                    known = original.weights.get(spec.name) if layer is not None else None
                    values = (
                        self._source.rows(assignment, first, count) if known is None else known[first : first + count]
                    )
                    ours = layout.unpack_rows(held.data, held.exponent, first, count)
                    part, whole = _squares(ours, values, importance)
                    error, size = error + part, size + whole
                    yield
            self.by_name[spec.name] = _ratio(error, size)

    @property
    def damaged(self) -> tuple[str, ...]:
        """Tensors that lost far more than others of their format, or what they mean."""
        usual: dict[str, list[float]] = {}
        for name, loss in self.by_name.items():
            usual.setdefault(self.formats[name], []).append(loss)
        return tuple(
            name
            for name, loss in self.by_name.items()
            if not loss <= _DAMAGED or (loss > 0.01 and loss > _OUTLYING * median(usual[self.formats[name]]))
        )


def _squares(ours: Float32, values: Float32, importance: Float32) -> tuple[float, float]:
    """Sums of squared errors and of squared weights, by column's importance."""
    with np.errstate(over="ignore", invalid="ignore"):
        error = np.square(ours.astype(np.float64) - values) @ importance
        return float(error.sum()), float((np.square(values, dtype=np.float64) @ importance).sum())


def _ratio(error: float, size: float) -> float:
    if not math.isfinite(error):
        return math.inf
    return math.sqrt(error / size) if size else (0.0 if not error else math.inf)


def _judged(tokens: _Tokens, states: list[float], losses: _Losses, text: str, kv: str) -> Fidelity:
    divergences = np.concatenate(tokens.divergences)
    mean, damaged = float(divergences.mean()), losses.damaged
    grade = next(grade for grade, (most, _) in GRADES.items() if mean <= most)
    if damaged:  # whatever the text noticed of it
        grade = {"A": "C", "B": "C"}.get(grade, "D")
    meaning = f"damaged: {', '.join(damaged[:3])}; convert it again" if damaged else GRADES[grade][1]
    layers = []
    for number, error in enumerate(states):
        own = {name: loss for name, loss in losses.by_name.items() if layer_of(name) == number}
        worst = max(own, key=own.__getitem__)
        layers.append(LayerFidelity(error, own[worst], worst))
    order = sorted(range(len(layers)), key=lambda number: -layers[number].weights)
    return Fidelity(
        kl_mean=mean,
        kl_99=float(np.quantile(divergences, 0.99)),
        top1_agreement=tokens.agreeing / tokens.count,
        perplexity=math.exp(min(tokens.surprise / tokens.count, 700.0)),
        perplexity_source=math.exp(tokens.surprise_source / tokens.count),
        grade=grade,
        meaning=meaning,
        tokens=tokens.count,
        text=text,
        kv=kv,
        layers=tuple(layers),
        worst_layers=tuple(order[:_WORST]),
        damaged=damaged,
    )


def _kept(result: Fidelity) -> dict[str, Any]:
    """The result as it goes into the manifest: short numbers, layers as two rows of them."""

    def short(value: float) -> float:
        return float(f"{min(value, 1e9):.4g}")

    numbers = ("kl_mean", "kl_99", "top1_agreement", "perplexity", "perplexity_source")
    values = result.to_json()
    return {
        **{name: short(values[name]) for name in numbers},
        **{name: values[name] for name in ("grade", "meaning", "tokens", "text", "kv")},
        "states": [short(layer.states) for layer in result.layers],
        "weights": [short(layer.weights) for layer in result.layers],
        "worst_layers": list(result.worst_layers),
        "damaged": list(result.damaged[:_WORST]),
    }


def _check_same(ours: ModelSpec, theirs: ModelSpec, file: Path, against: Path) -> None:
    if ours != theirs:
        raise InputError(f"{file.name} was not made from {against}: the two are different models")
