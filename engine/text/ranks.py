"""Vocabularies given as ranks of byte strings: tiktoken's files, and Mistral's tekken.json.

Such a file says which bytes are one token and which come first; how text is
cut into words, and the special tokens, are in the program that it was written
for. Those programs are known here by the name of their class. The result is a
tokenizer.json, so that one engine runs them all.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ModelFolderError, UnsupportedModelError
from engine.text.added import Added, Declared
from engine.text.files import LARGEST_FILE, Files, json_object
from engine.text.pipeline import byte_level_document
from engine.text.spelling import BYTE_ALPHABET
from engine.text.words import WORDS, Words

__all__ = ["RANK_FILES", "has_ranks", "ranked_document", "tekken_document"]

# Files of tiktoken's form by their usual names; tokenizer.model may be one, too.
RANK_FILES = ("tokenizer.model", "qwen.tiktoken", "tiktoken.model")

_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) (\d{1,9})\r?\n?")
_LETTERS = {byte: letter for letter, byte in BYTE_ALPHABET.items()}
_MOST_RANKS = 1 << 21
_LONGEST_TOKEN = 1024

_TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


@dataclass(frozen=True, slots=True)
class _Program:
    """What a program adds to its ranks. special: by id, counted from the last rank; begins: before every text."""

    words: Words
    special: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()


def _reserved(first: int, end: int) -> tuple[str, ...]:
    return tuple(f"<|reserved_special_token_{number}|>" for number in range(first, end))


_LLAMA3 = _Program(
    WORDS["llama3"],
    (
        *("<|begin_of_text|>", "<|end_of_text|>", *_reserved(0, 4), "<|start_header_id|>", "<|end_header_id|>"),
        *(*_reserved(4, 5), "<|eot_id|>", *_reserved(5, 251)),
    ),
    ("<|begin_of_text|>",),
)
_PROGRAMS: Mapping[str, _Program] = {
    "QWenTokenizer": _Program(
        WORDS["qwen2"],
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))),
    ),
    # Its special tokens, and those of the next, are in tokenizer_config.json.
    "ChatGLM4Tokenizer": _Program(WORDS["glm4"], begins=("[gMASK]", "<sop>")),
    "TikTokenTokenizer": _Program(WORDS["kimi-k2"]),
}
_LLAMA3_RANKS = 128_000


def has_ranks(data: bytes) -> bool:
    """Whether a tokenizer.model is a file of ranks."""
    return _LINE.match(data) is not None


def ranked_document(files: Files, name: str, declared: Sequence[Declared]) -> bytes:
    """A tokenizer.json for the ranks in file `name`, with the tokens that other files declare.

    Raises:
        ModelFolderError: the file is damaged
        UnsupportedModelError: for another program than those known
    """
    ranks = _ranks(files[name], name)
    kind = str(json_object(files, "tokenizer_config.json").get("tokenizer_class")).removesuffix("Fast")
    program = _PROGRAMS.get(kind, _LLAMA3 if len(ranks) == _LLAMA3_RANKS else None)
    if program is None:
        raise UnsupportedModelError(
            f"{name} is a tiktoken vocabulary, which does not say how text is split; "
            "put the model's tokenizer.json beside it"
        )
    first = max(ranks.values()) + 1
    special = {content: first + number for number, content in enumerate(program.special)}
    # The same ids under other names are a later version's.
    given = {token.content: token.id for token in declared if token.id is not None}
    special = {content: number for content, number in special.items() if number not in given.values()} | given
    added = [Added(number, content) for content, number in special.items()]
    return _document(ranks, program.words, added, [content for content in program.begins if content in special])


def tekken_document(files: Files) -> bytes:
    """A tokenizer.json for Mistral's tekken.json.

    Raises:
        ModelFolderError: the file is damaged
    """
    values = json_object(files, "tekken.json")
    config, vocabulary = values.get("config"), values.get("vocab")
    if not isinstance(config, dict) or not isinstance(vocabulary, list):
        raise _damaged("tekken.json")
    size = _natural(config.get("default_vocab_size"), _MOST_RANKS)
    special = _natural(config.get("default_num_special_tokens"), size)
    pattern = config.get("pattern")
    if not isinstance(pattern, str):
        raise _damaged("tekken.json")
    names = {number: f"<SPECIAL_{number}>" for number in range(special)} | dict(enumerate(_TEKKEN_SPECIAL[:special]))
    own = values.get("special_tokens") or []
    if not isinstance(own, list):
        raise _damaged("tekken.json")
    for token in own:
        number, content = (token.get("rank"), token.get("token_str")) if isinstance(token, dict) else (None, None)
        if not isinstance(content, str) or not content:
            raise _damaged("tekken.json")
        names[_natural(number, special)] = content
    ranks: dict[bytes, int] = {}
    for token in vocabulary[: size - special]:
        text, number = (token.get("token_bytes"), token.get("rank")) if isinstance(token, dict) else (None, None)
        if not isinstance(text, str):
            raise _damaged("tekken.json")
        ranks[_bytes(text.encode(errors="replace"), "tekken.json")] = special + _natural(number, size - special)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    added = [Added(number, content) for number, content in sorted(names.items())]
    return _document(ranks, Words((split,), whole=True), added, (names[1],) if special > 1 else ())


def _ranks(data: bytes, name: str) -> dict[bytes, int]:
    if len(data) > LARGEST_FILE:
        raise ModelFolderError(f"{name} has {len(data) >> 20} MB; no tokenizer is that large")
    ranks: dict[bytes, int] = {}
    for line in data.splitlines():
        match = _LINE.fullmatch(line)
        if match is None and line.strip():
            raise _damaged(name)
        if match is not None:
            ranks[_bytes(match[1], name)] = int(match[2])
    if not ranks or max(ranks.values()) >= _MOST_RANKS:
        raise _damaged(name)
    return ranks


def _document(ranks: Mapping[bytes, int], words: Words, added: Sequence[Added], begins: Sequence[str]) -> bytes:
    special = {token.content: token.id for token in added}
    vocabulary = {_spelt(token): number for token, number in ranks.items()} | special
    # tiktoken merges nothing in a word that it has whole.
    whole = replace(words, whole=True)
    return byte_level_document(vocabulary, _merges(ranks), whole, added=added, begins_with=begins)


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Every way to put a token together of two others, in the order of the tokens' ranks."""
    merges: list[tuple[str, str]] = []
    spelt = {token: _spelt(token) for token in ranks}
    for token in sorted(ranks, key=lambda token: ranks[token]):
        pairs = [
            (ranks[left], ranks[right], left, right)
            for place in range(1, len(token))
            if (left := token[:place]) in ranks and (right := token[place:]) in ranks
        ]
        merges += [(spelt[left], spelt[right]) for *_, left, right in sorted(pairs)]
    return merges


def _spelt(token: bytes) -> str:
    return "".join(map(_LETTERS.__getitem__, token))


def _bytes(text: bytes, name: str) -> bytes:
    try:
        token = base64.b64decode(text, validate=True)
    except binascii.Error:
        raise _damaged(name) from None
    if not 0 < len(token) <= _LONGEST_TOKEN:
        raise _damaged(name)
    return token


def _natural(value: Any, below: int) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise _damaged("tekken.json")
    return value


def _damaged(name: str) -> ModelFolderError:
    return ModelFolderError(f"{name} is no table from bytes to token ids: fetch it again")
