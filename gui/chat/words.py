"""What an answer is doing and how it ended, in words."""

from __future__ import annotations

from gui.chat.turns import Turn
from gui.data.history import thought_of
from gui.kit.i18n import tr
from gui.kit.words import count_words, duration_words, engine_words, error_words

__all__ = ["activity_words", "answer_facts", "answer_table", "can_continue", "ending_words", "thought_words"]


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
        said, serious = error_words(str(message.facts.get("error", "")), message.reason, message.facts), True
    elif message.reason == "length":
        said = tr("Ended at the longest answer allowed ({count} tokens); the limit is among the controls.",
                  count=count_words(int(message.facts.get("completion_tokens", 0))))  # fmt: skip
    elif message.reason == "context":
        said = tr("Ended because the context is full.")
    elif message.reason == "loop" and not turn.notices:
        said = tr("Ended because it had begun to repeat itself.")
    elif message.reason == "deadline" and not turn.notices:
        said = tr("Ended because it took too long.")
    elif message.reason == "cancelled":
        said = tr("Stopped.")
    elif message.reason == "edited":
        said = tr("Edited by you.")
    return "\n".join(filter(None, (said, *map(engine_words, turn.notices)))), serious


def can_continue(turn: Turn) -> bool:
    """Whether an answer ended before its end."""
    message = turn.message
    if not message.content or turn.growing:
        return False
    return message.state in {"interrupted", "failed"} or message.reason in {"length", "cancelled", "edited", "deadline"}


def thought_words(turn: Turn) -> str:
    """How long the model thought, or that it is thinking."""
    thought = thought_of(turn.message.content)
    if thought is not None and thought.open and turn.growing:
        return tr("Thinking… {count} tokens so far", count=count_words(turn.tokens))
    seconds = turn.message.facts.get("thought_s")
    return tr("Thought for {time}", time=duration_words(float(seconds))) if seconds else tr("Thoughts")


def answer_facts(turn: Turn, *, last: bool) -> str:
    """What a finished answer took. The speed of the last one stands below the message box already."""
    facts = turn.message.facts
    tokens = int(facts.get("completion_tokens", 0))
    if not tokens:
        return ""
    said = [tr("{count} tokens", count=count_words(tokens))]
    if facts.get("decode_tps") and not last:
        said.append(tr("{speed} tokens/s", speed=f"{facts['decode_tps']:.1f}"))
    if facts.get("prefill_tps"):
        said.append(tr("read {count} at {speed} tokens/s",
                       count=count_words(int(facts["prompt_tokens"]) - int(facts.get("cached_tokens", 0))),
                       speed=f"{facts['prefill_tps']:.0f}"))  # fmt: skip
    if "first_s" in facts:
        said.append(tr("first after {time} s", time=f"{facts['first_s']:.1f}"))
    return " · ".join(said)


def answer_table(turn: Turn) -> str:
    """Everything that was measured of an answer, line by line."""
    facts = turn.message.facts
    if not facts.get("completion_tokens"):
        return ""
    reasons = {
        "stop": tr("the model ended it"),
        "length": tr("the longest answer allowed"),
        "context": tr("the context was full"),
        "cancelled": tr("stopped by you"),
        "loop": tr("it repeated itself"),
        "deadline": tr("it took too long"),
    }
    lines = [tr("Tokens written: {count}", count=count_words(int(facts["completion_tokens"])))]
    if "prompt_tokens" in facts:
        lines.append(
            tr(
                "Tokens read: {count}, of which {cached} were known from before",
                count=count_words(int(facts["prompt_tokens"])),
                cached=count_words(int(facts.get("cached_tokens", 0))),
            )
        )
    if facts.get("prefill_tps"):
        lines.append(tr("Speed of reading: {speed} tokens/s", speed=f"{facts['prefill_tps']:.1f}"))
    if facts.get("decode_tps"):
        lines.append(tr("Speed of writing: {speed} tokens/s", speed=f"{facts['decode_tps']:.1f}"))
    if "first_s" in facts:
        lines.append(tr("First text after: {time} s", time=f"{facts['first_s']:.2f}"))
    if turn.message.reason in reasons:
        lines.append(tr("Why it ended: {reason}", reason=reasons[turn.message.reason]))
    return "\n".join(lines)
