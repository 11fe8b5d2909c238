"""The window's language: `tr("English sentence")`; a language is one JSON file in `assets/i18n`.

The English sentence is the key, so the source reads as it looks. Adding a
language means adding a file; a test finds missing and unused sentences.
"""

from __future__ import annotations

import json

from PySide6.QtCore import QLocale

from gui.kit.theme import ASSETS

__all__ = ["LANGUAGES", "language", "set_language", "tr"]

LANGUAGES = {"en": "English", "zh_CN": "简体中文"}

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
