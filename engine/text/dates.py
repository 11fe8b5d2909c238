"""Dates as the C library writes them in English, on every system and whatever language the program speaks.

`datetime.strftime` follows the process's locale, which a window toolkit sets,
and what Windows does not know fails there; a prompt must not depend on either.
"""

from __future__ import annotations

import re
from datetime import datetime

__all__ = ["formatted"]

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
_NUMERIC = "dfgGHIjmMSuUVwWyYzZ"
_COMPOSED = {
    "c": "%a %b %e %H:%M:%S %Y",
    "D": "%m/%d/%y",
    "F": "%Y-%m-%d",
    "h": "%b",
    "r": "%I:%M:%S %p",
    "R": "%H:%M",
    "T": "%H:%M:%S",
    "x": "%m/%d/%y",
    "X": "%H:%M:%S",
}


def formatted(moment: datetime, pattern: str) -> str:
    """`moment` by a strftime pattern, with the flags `-`, `_`, `0` and `^`; unknown directives stay as they are."""
    return re.sub(r"%([-_0^]?)([a-zA-Z%])", lambda match: _directive(moment, match), pattern)


def _directive(moment: datetime, match: re.Match[str]) -> str:
    flag, letter = match.groups()
    if letter in _COMPOSED:
        text = formatted(moment, _COMPOSED[letter])
    elif letter in _NUMERIC:
        text = moment.strftime(f"%{letter}")
    else:
        day, month = _DAYS[moment.weekday()], _MONTHS[moment.month - 1]
        half = "AM" if moment.hour < 12 else "PM"
        others = {
            "%": "%",
            "a": day[:3],
            "A": day,
            "b": month[:3],
            "B": month,
            "C": f"{moment.year // 100:02}",
            "e": f"{moment.day:2}",
            "k": f"{moment.hour:2}",
            "l": f"{(moment.hour + 11) % 12 + 1:2}",
            "n": "\n",
            "p": half,
            "P": half.lower(),
            "s": str(int(moment.timestamp())),
            "t": "\t",
        }
        text = others.get(letter, match[0])
    if flag == "^":
        return text.upper()
    if flag and text.strip().isdigit():
        number = text.strip().lstrip("0") or "0"
        return number if flag == "-" else number.rjust(len(text), " " if flag == "_" else "0")
    return text
