"""Numbers put into words: sizes, times, counts."""

from __future__ import annotations

from gui.kit.i18n import tr

__all__ = [
    "count_words",
    "duration_words",
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
