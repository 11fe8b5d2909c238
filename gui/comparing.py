"""One message answered by two models, one after the other, for somebody who is not told which is which."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import InglenookError
from engine.settings import EngineSettings, Sampling
from gui.kit.words import error_words

__all__ = ["Answer", "Compared", "Question", "compare"]

_LOOK_S = 0.1  # how soon a wish to stop is seen


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, of which models in which order."""

    paths: tuple[Path, ...]
    message: str
    sampling: Sampling
    settings: EngineSettings


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said, and how fast."""

    path: Path
    text: str
    decode_tps: float


@dataclass(frozen=True, slots=True)
class Compared:
    """How far it is: which answer is being written, and its tokens so far; at the end both, or why there are none."""

    number: int = 0
    tokens: int = 0
    answers: tuple[Answer, ...] = ()
    done: bool = False
    sentence: str = ""


def compare(api: Any, stop: threading.Event, question: Question) -> Iterator[Compared]:
    """Let each model answer; only one is in memory at a time."""
    answers = []
    try:
        for number in range(len(question.paths)):
            answer = yield from _answered(api, stop, question, number)
            if answer is None:
                yield Compared(done=True)
                return
            answers.append(answer)
    except InglenookError as error:
        yield Compared(done=True, sentence=error_words(type(error).__name__, str(error)))
    else:
        yield Compared(answers=tuple(answers), done=True)


def _answered(
    api: Any, stop: threading.Event, question: Question, number: int
) -> Generator[Compared, None, Answer | None]:
    """The answer of one model; None when it was stopped."""
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    path, tokens = question.paths[number], 0
    yield Compared(number)
    engine = api.Engine()
    try:
        engine.load(path, question.settings, events.put)
        while not stop.is_set():
            try:
                event = events.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            match event:
                case api.Loaded():
                    prompt = (api.Message("user", question.message),)
                    engine.submit(api.Request(f"compare-{number}", prompt, question.sampling), events.put)
                case api.Delta():
                    tokens += max(1, len(event.token_ids))
                    yield Compared(number, tokens)
                case api.Done():
                    return Answer(path, event.text, event.usage.decode_tps)
                case api.Failed():
                    raise InglenookError(error_words(event.kind, event.message))
        return None
    finally:
        engine.close()
