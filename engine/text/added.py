"""Added tokens: the ones that are found in text before the model's own splitting. Knows no vocabulary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ModelFolderError, UnsupportedModelError
from engine.text.files import Files, json_object, special_tokens, token_content

__all__ = ["Added", "Control", "Declared", "Finder", "declared_tokens", "size_and_gaps", "swallowed"]

# The largest vocabulary in use has some 262,000 tokens; tables as long as the highest id are built.
_MOST_IDS = 1 << 22

# Unicode's White_Space, which is what lstrip and rstrip mean in the reference; str.isspace() knows four more.
_SPACE = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | set(map(chr, range(0x2000, 0x200B)))
_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True, slots=True)
class Added:
    """An added token as it is matched.

    lstrip, rstrip: it swallows the white space before it, or after it.
    single_word: it counts only where no word character touches it.
    normalized: the reference looks for it after the text was normalised.
    """

    id: int
    content: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True, slots=True)
class Declared:
    """An added token as a file beside tokenizer.json declares it.

    id: None when the file gives the text only.
    flags: the token with all its flags (its id meaning nothing) when the file gives them; they overrule tokenizer.json.
    """

    content: str
    id: int | None
    special: bool
    flags: Added | None = None


def declared_tokens(files: Files) -> list[Declared]:
    """Added tokens from all places but tokenizer.json, each text once, those with ids first and in their order.

    Raises:
        ModelFolderError: an id is no id
    """
    found: dict[str, Declared] = {}
    config = json_object(files, "tokenizer_config.json")
    decoder = config.get("added_tokens_decoder")
    for key, value in decoder.items() if isinstance(decoder, dict) else ():
        content = token_content(value)
        if content is not None:
            found.setdefault(content, _with_flags(content, _checked_id(key, content), value))
    for content, token_id in json_object(files, "added_tokens.json").items():
        if content:
            found.setdefault(content, Declared(content, _checked_id(token_id, content), special=False))
    for content in [*special_tokens(files).values(), *_listed(config)]:
        known = found.get(content, Declared(content, None, special=True))
        found[content] = replace(known, special=True)
    return sorted(found.values(), key=lambda token: _MOST_IDS if token.id is None else token.id)


def _listed(config: dict[str, Any]) -> Iterator[str]:
    """Special tokens without a role; newer files give lists, or objects from name to token."""
    for name in _LISTS:
        values = config.get(name)
        for value in values.values() if isinstance(values, dict) else values if isinstance(values, list) else ():
            if (content := token_content(value)) is not None:
                yield content


def _with_flags(content: str, token_id: int, value: Any) -> Declared:
    if not isinstance(value, dict):
        return Declared(content, token_id, special=True)
    special = bool(value.get("special"))
    flags = {name: bool(value.get(name)) for name in ("lstrip", "rstrip", "single_word")}
    normalized = bool(value.get("normalized", not special))
    return Declared(content, token_id, special, Added(token_id, content, special, **flags, normalized=normalized))


def _checked_id(value: Any, content: str) -> int:
    try:
        token_id = int(value)
    except (TypeError, ValueError, OverflowError):
        token_id = -1
    if not 0 <= token_id < _MOST_IDS:
        raise ModelFolderError(f"the added token {content[:40]!r} has the id {str(value)[:40]}, which cannot be")
    return token_id


@dataclass(frozen=True, slots=True)
class Control:
    """Tells control tokens, which only a template may write, from added tokens that are ordinary vocabulary.

    A control token is special, or is written like `<|...|>`, or is mark-up
    that the chat template writes itself, as Qwen3's does with `<think>`. All
    others, such as Gemma's runs of line breaks and `<table>`, are words of the
    language and are recognised everywhere.
    """

    template_text: str

    def __call__(self, token: Added) -> bool:
        """Whether content must not become `token`."""
        content = token.content
        if token.special or re.fullmatch(r"<[|｜].*[|｜]>", content, re.DOTALL):
            return True
        return not content[0].isalnum() and not content.isspace() and content in self.template_text


class Finder:
    """Finds added tokens in text: the leftmost, and of those the longest."""

    def __init__(self, tokens: Iterable[Added]) -> None:
        self._by_content = {token.content: token for token in tokens}
        self._lengths: dict[str, list[int]] = {}
        for content in sorted(self._by_content, key=len, reverse=True):
            lengths = self._lengths.setdefault(content[0], [])
            if len(content) not in lengths:
                lengths.append(len(content))
        starts = "".join(map(re.escape, self._lengths))
        self._start = re.compile(f"[{starts}]" if starts else "(?!)")

    def find(self, text: str, begin: int, end: int) -> Iterator[tuple[int, int, Added]]:
        """(start, stop, token) for each match that lies in text[begin:end], without the space it swallows."""
        position = begin
        while match := self._start.search(text, position, end):
            start = match.start()
            token = self._longest_at(text, start, end)
            if token is None:
                position = start + 1
                continue
            position = start + len(token.content)
            if not (token.single_word and _touches_word(text, start, position)):
                yield start, position, token

    def _longest_at(self, text: str, start: int, end: int) -> Added | None:
        for length in self._lengths[text[start]]:
            if start + length <= end and (token := self._by_content.get(text[start : start + length])):
                return token
        return None


def swallowed(text: str, start: int, stop: int, token: Added, since: int) -> tuple[int, int]:
    """(start, stop) of a match with the white space that `token` swallows, none of it before `since`."""
    while token.lstrip and start > since and text[start - 1] in _SPACE:
        start -= 1
    while token.rstrip and stop < len(text) and text[stop] in _SPACE:
        stop += 1
    return start, stop


def size_and_gaps(ids: Iterable[int], file: str) -> tuple[int, tuple[int, ...]]:
    """(highest id + 1, ids below it without a token) of a vocabulary.

    Raises:
        UnsupportedModelError: the highest id is beyond reason
    """
    present = frozenset(ids)
    size = max(present, default=-1) + 1
    if size > _MOST_IDS:
        raise UnsupportedModelError(f"{file} has the token id {size - 1}, beyond any vocabulary")
    return size, () if len(present) == size else tuple(i for i in range(size) if i not in present)


def _touches_word(text: str, start: int, stop: int) -> bool:
    return bool((start > 0 and re.match(r"\w", text[start - 1])) or re.match(r"\w", text[stop : stop + 1]))
