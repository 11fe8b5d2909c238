"""Logits of every position of a text: for comparison with a reference, and for perplexity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ContextOverflowError, InputError, ResourceError
from engine.models.batch import Batch
from engine.progress import Progress
from engine.runtime.memories import Alternation
from engine.runtime.model import Model

__all__ = ["logits", "perplexity"]

Ids = npt.NDArray[np.int32]


def logits(
    model: Model, ids: Sequence[int] | npt.NDArray[np.integer[Any]], first: int = 0, *, most_rows: int
) -> Iterator[npt.NDArray[np.float32]]:
    """Rows of logits of the positions first, first + 1, ..., in blocks; row i of all foresees token first + i + 1.

    most_rows: how many rows the decoder gives at once. A block is valid until
    the next is asked for. The pages are held until the iterator ends or is closed.

    Raises:
        InputError: an id is none of the model's
        ContextOverflowError: there are more ids than the context holds
        ResourceError: too many pages are in use by answers on their way
    """
    tokens = np.asarray(ids, np.int64)
    if tokens.size and (tokens.min() < 0 or tokens.max() >= model.vocab_size):
        raise InputError(f"ids must be between 0 and {model.vocab_size - 1}")
    if tokens.size > model.context:
        raise ContextOverflowError(
            f"the text has {tokens.size} tokens and the context holds {model.context}",
            needed_tokens=tokens.size,
            context_tokens=model.context,
        )
    size = model.pages.layout.tokens
    needed = -(-tokens.size // size)
    if model.pages.available < needed or (model.memories is not None and model.memories.available < 2):
        raise ResourceError("the memory for texts is taken by answers on their way; try again when they have ended")
    pages = [model.pages.take() for _ in range(needed)]
    memory = Alternation(model.memories)
    try:
        table = np.array([pages], np.int32)
        start = 0
        while start < tokens.size:
            end = min(tokens.size, start + model.batch_tokens)
            if end > first:
                # Before `first` nothing is wanted, so whole batches go through; from there on most_rows at a time.
                end = first if start < first else min(end, start + most_rows)
            wanted = np.arange(end - start if start >= first else 0, dtype=np.int32)
            block = model.decoder.forward(_batch(tokens, start, end, table, wanted, memory.step()))
            if model.decoder.cancelled:  # meant for an answer in whose company this is not
                model.decoder.clear_cancel()
                continue
            memory.stepped()
            if wanted.size:
                yield block
            start = end
    finally:
        memory.release()
        for page in reversed(pages):
            model.pages.release(page)


def _batch(  # noqa: PLR0917 - the parts of a batch
    tokens: npt.NDArray[np.int64], start: int, end: int, table: Ids, wanted: Ids, memories: Ids | None
) -> Batch:
    return Batch(
        ids=tokens[start:end].astype(np.int32),
        positions=np.arange(start, end, dtype=np.int32),
        sequence_of=np.zeros(end - start, np.int32),
        tables=table,
        lengths=np.array([end], np.int32),
        wanted=wanted,
        memories=memories,
    )


def perplexity(
    model: Model, text: str, context: int, *, most_windows: int | None = None, most_rows: int
) -> Iterator[Progress | dict[str, float | int]]:
    """How well the model foresees a text, by the method of llama.cpp's `llama-perplexity`.

    The text's tokens are cut into windows of `context`; what does not fill one
    is left out. In each window the tokens of the second half are scored, all
    but its first, so that every one has at least half a window before it. A
    model that begins texts with a token of its own has it in the place of each
    window's first. The result, after the last Progress, is the exponential of
    the mean negative log-likelihood, how many tokens were scored, and how many
    at the end of the text filled no window.
    most_windows: to be content with the beginning of a long text.

    Raises:
        InputError: the text is shorter than one window, or the window senseless
    """
    if context < 4:
        raise InputError(f"the context must have at least 4 tokens, not {context}")
    tokenizer = model.tokenizer
    begins = [token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_id]
    ids = np.array(begins + tokenizer.encode(text, add_special_tokens=False), np.int32)
    windows = ids.size // context
    if not windows:
        raise InputError(f"the text has {ids.size} tokens; a window of {context} needs at least as many")
    if most_windows is not None:
        windows = min(windows, max(1, most_windows))
    middle = context // 2
    total, count = 0.0, 0
    for window in range(windows):
        yield Progress("measure", window, windows, "steps", _so_far(total, count))
        tokens = ids[window * context : (window + 1) * context].copy()
        tokens[: len(begins)] = begins
        place = middle
        for rows in logits(model, tokens[:-1], middle, most_rows=most_rows):
            total -= _log_likelihood(rows, tokens[place + 1 : place + 1 + len(rows)])
            place += len(rows)
        count += context - 1 - middle
    yield Progress("measure", windows, windows, "steps", _so_far(total, count))
    yield {
        "perplexity": math.exp(total / count),
        "tokens": count,
        "context": context,
        "windows": windows,
        "tokens_left_out": int(ids.size) - windows * context,
    }


def _so_far(total: float, count: int) -> str:
    return f"perplexity {math.exp(total / count):.4f}" if count else ""


def _log_likelihood(rows: npt.NDArray[np.float32], tokens: Ids) -> float:
    """Sum of the log-probabilities of `tokens` (n,) by their rows (n, vocab)."""
    shifted = rows - rows.max(axis=1, keepdims=True)
    totals = np.exp(shifted).sum(axis=1, dtype=np.float64)
    return float((shifted[np.arange(tokens.size), tokens] - np.log(totals)).sum())
