"""Numbers put into words: sizes, times, counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gui.kit.i18n import language, tr, translated

__all__ = [
    "count_words",
    "duration_words",
    "engine_words",
    "error_words",
    "joined",
    "parameter_words",
    "size_words",
]


def joined(sentences: Iterable[str]) -> str:
    """Sentences one after the other; Chinese puts no space between them."""
    return ("" if language() == "zh_CN" else " ").join(sentences)


def size_words(count: float) -> str:
    """Bytes as people read them: 1.2 GB (decimal, as disks are sold)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5 or unit == "GB":
            return f"{count:.0f} {unit}" if unit in {"B", "kB"} or abs(count) >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def parameter_words(count: int) -> str:
    """Parameters of a model: 494 million, 1.5 billion."""
    if count >= 1_000_000_000:
        return tr("{count} billion parameters", count=f"{count / 1e9:.1f}")
    return tr("{count} million parameters", count=f"{count / 1e6:.{0 if count >= 10_000_000 else 1}f}")


def duration_words(seconds: float) -> str:
    """A time to wait, as coarse as it is uncertain."""
    if seconds < 60:
        return tr("{count} s", count=max(1, round(seconds)))
    if seconds < 5400:
        return tr("{count} min", count=round(seconds / 60))
    return tr("{count} h", count=f"{seconds / 3600:.1f}")


def count_words(count: int) -> str:
    """A number with separators."""
    return f"{count:,}"


def engine_words(sentence: str) -> str:
    """What the engine says, in the window's language where its pattern is known, else as it is."""
    return translated(sentence) or sentence


def error_words(kind: str, sentence: str, facts: Mapping[str, Any] | None = None) -> str:
    """An error of the engine in the window's language.

    kind: its class in `engine.errors`. sentence: what the engine said, in English; where its translation is not known,
        the kind is said in the window's language and the sentence follows for whoever can use it.
    facts: {"needed_tokens", "context_tokens"} of a conversation that does not fit
    """
    if facts and facts.get("needed_tokens"):
        return tr(
            "This needs {needed} tokens, and the context holds {context}: shorten it, begin a new chat, or load the"
            " model with a longer context.",
            needed=count_words(int(facts["needed_tokens"])),
            context=count_words(int(facts["context_tokens"])),
        )
    known = translated(sentence)
    if known is not None:
        return known
    said = {
        "ContextOverflowError": tr("The conversation is longer than the context."),
        "FileDamagedError": tr("The model's file is damaged."),
        "ModelFolderError": tr("The model's folder is incomplete or damaged."),
        "UnsupportedModelError": tr("Inglenook does not know this kind of model."),
        "TemplateError": tr("The model's chat template refuses this conversation."),
        "SettingError": tr("A setting is outside its range."),
        "OutOfSpaceError": tr("There is not enough room on the disk."),
        "ResourceError": tr("This computer lacks something that is needed, mostly memory."),
        "InputError": tr("What was given cannot be used."),
        "InternalError": tr("Something went wrong inside Inglenook; the log says more."),
    }.get(kind, "")
    return f"{said} ({sentence})" if said else sentence
