"""What a model's products are fed with: a short text goes through the source, layer by layer.

The built-in text (`assets/calibration`: English, Chinese, code, mathematics) or
the user's own. One layer's weights, the text's hidden states and the second
moments of that layer's inputs are all that is in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.convert.feedback import Feedback, Moments
from engine.convert.layerwise import Float32, FloatModel
from engine.convert.source import Source
from engine.core.library import Kernels
from engine.core.team import Team
from engine.errors import InputError
from engine.text.tokenizer import TOKENIZER_FILES, Tokenizer

__all__ = ["BUILT_IN", "Calibration", "Sample", "cut", "sample"]

BUILT_IN = "built-in"
WINDOW = 512
_MOST_WINDOWS = 24
_PARTS = ("english", "chinese", "code", "mathematics")
_ASSETS = Path(__file__).resolve().parent.parent.parent / "assets" / "calibration"
_UNSEEN = "unseen"
_LARGEST_TEXT = 64 << 20

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Sample:
    """A text by name, for people and for manifests. text: at most 64 MB."""

    name: str
    text: str

    @property
    def sha256(self) -> str:
        """Of the text as UTF-8."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def sample(path: str, *, unseen: bool = False) -> Sample:
    """The user's text, or the built-in one when there is no path.

    unseen: a built-in one that nothing is fitted to.

    Raises:
        InputError: there is no such file, or it is no UTF-8 text
    """
    if not path:
        parts = (_UNSEEN,) if unseen else _PARTS
        return Sample(BUILT_IN, "\n\n".join((_ASSETS / f"{part}.txt").read_text(encoding="utf-8") for part in parts))
    file = Path(path)
    try:
        with file.open("rb") as opened:
            data = opened.read(_LARGEST_TEXT + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (at byte {error.start}); convert it first") from None
    if len(data) > _LARGEST_TEXT:
        raise InputError(f"{path} is larger than 64 MB; a few pages of text are enough")
    return Sample(file.name, text)


def cut(source: Source, text: str, *, most: int, tokens: int = WINDOW) -> list[Ids]:
    """Windows of so many tokens, at most `most`, spread evenly over the text; the only one may be shorter.

    Each begins as a text does, with the model's own first token if it has one.

    Raises:
        InputError: the model has no tokenizer, or the text next to no tokens
    """
    if not any(name in source.files for name in TOKENIZER_FILES):
        raise InputError(f"{source.name} has no tokenizer, so it cannot read a text")
    tokenizer = Tokenizer.from_files(source.files)
    tokens = min(tokens, source.spec.context)
    begins = [token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_id]
    ids = [token for token in tokenizer.encode(text, add_special_tokens=False) if token < source.spec.vocab_size]
    step = tokens - len(begins)
    if len(ids) < min(step, 64):
        raise InputError(f"the text has {len(ids)} tokens; give one of a few pages")
    count = max(1, len(ids) // step)
    chosen = range(count) if count <= most else np.linspace(0, count - 1, most).astype(int).tolist()
    return [np.array(begins + ids[number * step : (number + 1) * step], np.int32) for number in chosen]


class Calibration:
    """The text on its way through the model. `advance` to a layer, then ask for what its products were fed with."""

    def __init__(self, source: Source, text: str, kernels: Kernels, team: Team) -> None:
        """Raises InputError when the model cannot read the text."""
        self.windows: Sequence[Ids] = cut(source, text, most=_MOST_WINDOWS)
        self._model = FloatModel(source, kernels, team, max(map(len, self.windows)))
        self._reached = -1
        self._moments: dict[str, Moments] = {}
        self._feedback: tuple[Moments, Feedback] | None = None

    @cached_property
    def _states(self) -> list[Float32]:
        return self._model.embedded(self.windows)

    @property
    def tokens(self) -> int:
        """How many tokens go through the model."""
        return sum(map(len, self.windows))

    def advance(self, number: int) -> Iterator[None]:
        """Send the text through the layers up to this one. Every yield is a place to stop."""
        while self._reached < number:
            self._reached += 1
            self._moments, self._feedback = {}, None
            self._model.load(self._reached)
            yield
            for place, x in enumerate(self._states):
                self._states[place] = self._model.run(x, self._observe if self._reached == number else None)
                yield

    def weights(self, name: str) -> Float32:
        """A matrix of the layer reached, float32 (rows, cols)."""
        return self._model.weights[name]

    def moments(self, name: str) -> Moments | None:
        """Of the inputs of a matrix of the layer reached; None when no token came to it."""
        return self._moments.get(name)

    def feedback(self, name: str) -> Feedback | None:
        """What `rounded` wants to know of a matrix of the layer reached; None when no token came to it."""
        moments = self._moments.get(name)
        if moments is None:
            return None
        if self._feedback is None or self._feedback[0] is not moments:
            self._feedback = (moments, moments.feedback())
        return self._feedback[1]

    def _observe(self, name: str, x: Float32, _expert: int) -> None:
        if name not in self._moments:
            self._moments[name] = Moments(x.shape[1])
        self._moments[name].add(x)
