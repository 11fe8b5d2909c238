"""What an answer is doing and how it ended, in words."""

from __future__ import annotations

from gui.chat.turns import Turn
from gui.kit.i18n import tr
from gui.kit.words import count_words, duration_words

__all__ = ["activity_words", "answer_facts", "ending_words"]


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
