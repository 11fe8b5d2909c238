"""Rebuilds the tokenizer's files from what a GGUF file says of it, so that the text layer needs no further format."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelFolderError, UnsupportedModelError
from engine.text.added import Added
from engine.text.pipeline import byte_level_document, spaced_document
from engine.text.words import WORDS, Words

__all__ = ["CONTROL", "END_TEXTS", "tokenizer_files"]

# Values of tokenizer.ggml.token_type.
CONTROL = 3
_UNKNOWN, _USER_DEFINED, _UNUSED, _BYTE = 2, 4, 5, 6

# Texts of control tokens that end an answer, in every model that has them.
END_TEXTS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>", "</s>"}
)

# Ways of cutting text whose models begin every text with a token, unless their metadata say otherwise.
_BEGINNING = {"falcon3", "llama-bpe", "llama-v3", "llama3", "midm-2.0", "pixtral", "tekken"}
# Field numbers of SentencePiece's ModelProto and its parts.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK, _UNKNOWN_PIECE, _BOS_PIECE, _EOS_PIECE, _PAD_PIECE = 3, 35, 45, 46, 47, 48
_ADD_PREFIX, _REMOVE_SPACES, _ESCAPE_SPACES = 3, 4, 5
_BPE = 2


def tokenizer_files(metadata: Mapping[str, Any], name: str) -> dict[str, bytes]:
    """The tokenizer's file as its makers wrote it, and `tokenizer_config.json` with the chat template.

    name: the file, for errors

    Raises:
        UnsupportedModelError: a kind of tokenizer that is not rebuilt; named
        ModelFolderError: its lists are missing or contradict each other
    """
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    tokens = _texts(metadata, "tokens")
    types = _numbers(metadata.get("tokenizer.ggml.token_type"), int, len(tokens))
    if not tokens or not types:
        raise ModelFolderError(f"{name} has no complete tokenizer (tokens and token_type of tokenizer.ggml)")
    vocabulary = _Vocabulary(name, metadata, tokens, types)
    if model == "gpt2" and isinstance(pre, str) and pre in WORDS:
        adds_bos = metadata.get("tokenizer.ggml.add_bos_token", pre in _BEGINNING) is True
        files = {"tokenizer.json": vocabulary.byte_level(WORDS[pre], adds_bos=adds_bos)}
    elif model == "gemma4":
        adds_bos = metadata.get("tokenizer.ggml.add_bos_token", True) is True
        files = {"tokenizer.json": vocabulary.spaced(adds_bos=adds_bos)}
    elif model == "llama":
        adds_bos = metadata.get("tokenizer.ggml.add_bos_token", True) is True
        files = {"tokenizer.model": vocabulary.sentencepiece()}
    else:
        kind = pre if model == "gpt2" else model
        raise UnsupportedModelError(
            f'{name} has a tokenizer of the kind "{str(kind)[:80]}", which is not rebuilt from GGUF; '
            "use the model's Hugging Face folder"
        )
    config = _config(metadata, tokens, adds_bos=adds_bos)
    return files | {"tokenizer_config.json": json.dumps(config, ensure_ascii=False).encode()}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The lists of a file, of equal length; types as llama.cpp numbers them, which is as SentencePiece does."""

    name: str
    metadata: Mapping[str, Any]
    tokens: list[str]
    types: list[int]

    def byte_level(self, words: Words, *, adds_bos: bool) -> bytes:
        """`tokenizer.json` of a byte-level BPE."""
        return byte_level_document(
            self._ids(), self._merges(), words, added=self._added(), begins_with=self._bos(adds_bos)
        )

    def spaced(self, *, adds_bos: bool) -> bytes:
        """`tokenizer.json` of Gemma's kind of BPE."""
        unknown = _token(self.metadata, "unknown", self.tokens) or "<unk>"
        return spaced_document(
            self._ids(), self._merges(), unknown=unknown, added=self._added(), begins_with=self._bos(adds_bos)
        )

    def sentencepiece(self) -> bytes:
        """`tokenizer.model`, as SentencePiece's own trainer would have written it."""
        scores = _numbers(self.metadata.get("tokenizer.ggml.scores"), float, len(self.tokens))
        if not scores:
            raise ModelFolderError(f"{self.name} has no complete tokenizer (scores of tokenizer.ggml)")
        unknown = _token(self.metadata, "unknown", self.tokens) or "<unk>"
        if unknown not in self.tokens:
            raise UnsupportedModelError(f"{self.name} has a tokenizer without a token for what is unknown")
        pieces = []
        for token, score, kind in zip(self.tokens, scores, self.types, strict=True):
            # Padding is marked as unknown too, of which there can be only one.
            own = _UNKNOWN if token == unknown else _UNUSED if kind == _UNKNOWN else kind
            pieces.append(_field(_PIECES, _field(1, token.encode()) + _float(2, score) + _field(3, own)))
        trainer = _field(_MODEL_TYPE, _BPE) + _field(_BYTE_FALLBACK, int(_BYTE in self.types))
        roles = ((_UNKNOWN_PIECE, unknown), (_BOS_PIECE, "bos"), (_EOS_PIECE, "eos"), (_PAD_PIECE, "padding"))
        for number, role in roles:
            piece = unknown if number == _UNKNOWN_PIECE else _token(self.metadata, role, self.tokens)
            trainer += _field(number, (piece or "").encode())
        prefix = self.metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
        squeeze = self.metadata.get("tokenizer.ggml.remove_extra_whitespaces") is True
        normalizer = _field(_ADD_PREFIX, int(prefix)) + _field(_REMOVE_SPACES, int(squeeze)) + _field(_ESCAPE_SPACES, 1)
        return b"".join([*pieces, _field(_TRAINER, trainer), _field(_NORMALIZER, normalizer)])

    def _ids(self) -> dict[str, int]:
        rows = zip(self.tokens, self.types, strict=True)
        return {token: number for number, (token, kind) in enumerate(rows) if kind != _UNUSED}

    def _added(self) -> list[Added]:
        rows = zip(self.tokens, self.types, strict=True)
        return [
            Added(number, token, special=kind == CONTROL)
            for number, (token, kind) in enumerate(rows)
            if kind in {CONTROL, _USER_DEFINED} and token
        ]

    def _merges(self) -> list[list[str]]:
        merges = [merge.split(" ", 1) for merge in _texts(self.metadata, "merges")]
        if not merges or any(len(pair) < 2 for pair in merges):
            raise ModelFolderError(f"{self.name} has no complete tokenizer (merges of tokenizer.ggml)")
        return merges

    def _bos(self, adds_bos: bool) -> list[str]:  # noqa: FBT001 - whether, not how
        bos = _token(self.metadata, "bos", self.tokens)
        return [bos] if adds_bos and bos is not None else []


def _field(number: int, value: int | bytes) -> bytes:
    """A field of a protocol buffer message: a number, or bytes with their length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def _numbers(values: Any, kind: type, count: int) -> list[Any]:
    """A list of so many numbers; empty when it is anything else."""
    fits = isinstance(values, list) and len(values) == count and all(isinstance(value, kind) for value in values)
    return values if fits else []


def _config(metadata: Mapping[str, Any], tokens: list[str], *, adds_bos: bool) -> dict[str, Any]:
    template = metadata.get("tokenizer.chat_template")
    named = {
        key.removeprefix("tokenizer.chat_template."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.chat_template.") and isinstance(value, str)
    }
    templates: Any = template if isinstance(template, str) else None
    if templates is not None and named:
        templates = [{"name": key, "template": value} for key, value in {"default": templates, **named}.items()]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos,
        "bos_token": _token(metadata, "bos", tokens),
        "eos_token": _token(metadata, "eos", tokens),
        "pad_token": _token(metadata, "padding", tokens),
        "clean_up_tokenization_spaces": False,
    } | ({} if templates is None else {"chat_template": templates})


def _token(metadata: Mapping[str, Any], role: str, tokens: list[str]) -> str | None:
    number = metadata.get(f"tokenizer.ggml.{role}_token_id")
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(tokens):
        return None
    return tokens[number]


def _texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    """A list of texts, empty when it is anything else."""
    values = metadata.get(f"tokenizer.ggml.{key}")
    return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else []
