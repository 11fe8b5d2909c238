"""The window's language: `tr("English sentence")`; a language is one JSON file in `assets/i18n`.

The English sentence is the key, so the source reads as it looks. Adding a
language means adding a file; a test finds missing and unused sentences.

What the engine says is English. Its usual sentences are translated by their
pattern, from a second file of the language in `assets/i18n/engine`, whose
`{names}` stand for whatever the engine put there; a test compares the patterns
with the engine's source.
"""

from __future__ import annotations

import json
import re
from functools import cache

from PySide6.QtCore import QLocale

from gui.kit.theme import ASSETS

__all__ = ["LANGUAGES", "language", "set_language", "tr", "translated"]

LANGUAGES = {"en": "English", "zh_CN": "简体中文"}

_LONGEST = 2000  # characters of an engine's sentence; what a hostile file puts there must not keep the window busy

_sentences: dict[str, str] = {}
_language = ["en"]


def language() -> str:
    """The language in force: a key of `LANGUAGES`."""
    return _language[0]


def set_language(wish: str) -> None:
    """Speak `wish` from now on; "system" takes the desktop's language where there is a translation."""
    if wish == "system":
        wish = "zh_CN" if QLocale.system().language() == QLocale.Language.Chinese else "en"
    _language[0] = wish if wish in LANGUAGES else "en"
    _sentences.clear()
    file = ASSETS / "i18n" / f"{_language[0]}.json"
    if file.is_file():
        _sentences.update(json.loads(file.read_text("utf-8")))


def tr(sentence: str, **values: object) -> str:
    """The sentence in the language in force, its `{names}` filled with `values`."""
    said = _sentences.get(sentence, sentence)
    return said.format(**values) if values else said


@cache
def _patterns(spoken: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    """What engine sentences look like and what they are in a language, the most telling first."""
    file = ASSETS / "i18n" / "engine" / f"{spoken}.json"
    if not file.is_file():
        return ()
    sentences: dict[str, str] = json.loads(file.read_text("utf-8"))
    most_telling = sorted(sentences, key=lambda sentence: -len(re.sub(r"{\w+}", "", sentence)))
    made = []
    for sentence in most_telling:
        pieces = re.split(r"{(\w+)}", sentence)  # words and names by turns
        form = "".join(f"(?P<{piece}>.*?)" if at % 2 else re.escape(piece) for at, piece in enumerate(pieces))
        made.append((re.compile(form, re.DOTALL), sentences[sentence]))
    return tuple(made)


def translated(sentence: str) -> str | None:
    """A sentence of the engine in the language in force; None where that is not known."""
    if _language[0] == "en":
        return sentence
    if len(sentence) > _LONGEST:
        return None
    for pattern, said in _patterns(_language[0]):
        found = pattern.fullmatch(sentence)
        if found is not None:
            # what was put in may be a sentence itself: "... is damaged: its header is not a JSON object"
            return said.format(**{name: translated(value) or value for name, value in found.groupdict().items()})
    return None
