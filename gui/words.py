"""Facts put into words: what an answer is doing, how it ended, sizes and times."""

from __future__ import annotations

from gui.chat import Turn
from gui.i18n import tr

__all__ = [
    "activity_words",
    "answer_facts",
    "count_words",
    "duration_words",
    "ending_words",
    "parameter_words",
    "size_words",
]


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


def activity_words(turn: Turn | None) -> tuple[str, float | None]:
    """What a running answer is doing, and how far it is (0..1) where that is known."""
    activity = turn.activity if turn is not None else None
    if activity is None or activity.stage == "queue":
        return tr("Waiting its turn…"), None
    share = min(1.0, activity.done / activity.total) if activity.total > 0 else None
    match activity.stage:
        case "model":
            return tr("Waiting for the model…"), None
        case "prefill":
            if share is None or activity.total < 256:
                return tr("Reading…"), None
            words = tr(
                "Reading {done} of {total} tokens", done=count_words(activity.done), total=count_words(activity.total)
            )
            if activity.eta_s is not None and activity.eta_s >= 2:
                words += " · " + tr("about {time} left", time=duration_words(activity.eta_s))
            return words, share
        case _:
            if turn is not None and turn.tokens:
                return tr("Writing… {count} tokens so far", count=count_words(turn.tokens)), None
            return tr("Writing…"), None


def ending_words(turn: Turn) -> tuple[str, bool]:
    """How an answer ended when that needs saying, and whether it is a problem. "" when it just ended."""
    message = turn.message
    said = ""
    serious = False
    if message.state == "interrupted":
        said = tr("Interrupted: Inglenook ended while this was being written.")
    elif message.state == "failed":
        said, serious = message.reason, True
    elif message.reason == "length":
        said = tr("Ended at the longest answer allowed ({count} tokens); the limit is among the controls.",
                  count=count_words(int(message.facts.get("completion_tokens", 0))))  # fmt: skip
    elif message.reason == "context":
        said = tr("Ended because the context is full.")
    elif message.reason == "cancelled":
        said = tr("Stopped.")
    return "\n".join(filter(None, (said, *turn.notices))), serious


def answer_facts(turn: Turn) -> str:
    """Tokens, speed and waiting time of a finished answer."""
    facts = turn.message.facts
    tokens = int(facts.get("completion_tokens", 0))
    if not tokens:
        return ""
    said = [tr("{count} tokens", count=count_words(tokens))]
    if facts.get("decode_tps"):
        said.append(tr("{speed} tokens/s", speed=f"{facts['decode_tps']:.1f}"))
    if "first_s" in facts:
        said.append(tr("first after {time} s", time=f"{facts['first_s']:.1f}"))
    return " · ".join(said)
