"""How long requests will take, from how long the last ones took."""

from __future__ import annotations

from collections.abc import Iterable

from engine.runtime.scheduler import Pace
from engine.runtime.sequence import Sequence

__all__ = ["Estimate"]


class Estimate:
    """Learns the time of a step and the length of an answer. pace: knows how fast prompts are read."""

    _WEIGHT = 0.1
    _USUAL_TOKENS = 256.0
    _FIRST_PER_S = 50.0  # prompt tokens, before the first was measured
    _FIRST_STEP_S = 0.2

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._step_s: float | None = None
        self._tokens = self._USUAL_TOKENS

    def stepped(self, seconds: float) -> None:
        """A step that only drew tokens took so long."""
        self._step_s = seconds if self._step_s is None else self._step_s + self._WEIGHT * (seconds - self._step_s)

    def answered(self, tokens: int) -> None:
        """An answer came to its end after so many tokens."""
        self._tokens += self._WEIGHT * (tokens - self._tokens)

    def left_s(self, sequence: Sequence) -> float:
        """Seconds until a sequence ends once it runs, if its answer becomes as long as they usually are."""
        most = sequence.capacity - sequence.length
        # One that is longer than usual already is taken to be half way.
        answer = min(most, max(self._tokens - sequence.generated, sequence.generated / 2))
        step_s = self._FIRST_STEP_S if self._step_s is None else self._step_s
        prompt = max(0, sequence.remaining - 1)
        prompt_s = self._pace.seconds(prompt)
        return (prompt / self._FIRST_PER_S if prompt_s is None else prompt_s) + answer * step_s

    def wait_s(self, ahead: Iterable[Sequence], lanes: int) -> float:
        """Seconds until the sequences ahead have ended, `lanes` of them being computed together."""
        return sum(map(self.left_s, ahead)) / max(1, lanes)
