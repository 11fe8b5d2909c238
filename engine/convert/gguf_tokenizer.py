"""Rebuilds the tokenizer's files from what a GGUF file says of it, so that the text layer needs no second format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import ModelFolderError, UnsupportedModelError

__all__ = ["CONTROL", "END_TEXTS", "tokenizer_files"]

# Values of tokenizer.ggml.token_type.
CONTROL = 3
_USER_DEFINED, _UNUSED = 4, 5

# Texts of control tokens that end an answer, in every model that has them.
END_TEXTS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>", "</s>"}
)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN_SPLIT = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*, use_regex: bool, trim_offsets: bool, add_prefix_space: bool = False) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": trim_offsets,
        "use_regex": use_regex,
    }


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            _byte_level(use_regex=False, trim_offsets=False),
        ],
    }


def _smollm() -> dict[str, Any]:
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                _byte_level(use_regex=True, trim_offsets=True),
            ],
        },
        "decoder": _byte_level(use_regex=True, trim_offsets=True, add_prefix_space=True),
        "ignore_merges": False,
    }


def _qwen2() -> dict[str, Any]:
    return {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": _split(_QWEN_SPLIT),
        "decoder": _byte_level(use_regex=False, trim_offsets=False),
        "ignore_merges": False,
    }


def _llama3() -> dict[str, Any]:
    return {
        "normalizer": None,
        "pre_tokenizer": _split(_LLAMA3_SPLIT),
        "decoder": _byte_level(use_regex=True, trim_offsets=True, add_prefix_space=True),
        "ignore_merges": True,
    }


# `tokenizer.ggml.pre` -> how text is cut before the merges, and whether a beginning-of-text token is the rule.
_SCHEMES: dict[str, tuple[Callable[[], dict[str, Any]], bool]] = {
    "smollm": (_smollm, False),
    "qwen2": (_qwen2, False),
    "llama-bpe": (_llama3, True),
}


def tokenizer_files(metadata: Mapping[str, Any], name: str) -> dict[str, bytes]:
    """`tokenizer.json` and `tokenizer_config.json` with the chat template.

    name: the file, for errors

    Raises:
        UnsupportedModelError: a kind of tokenizer that is not rebuilt; named
        ModelFolderError: its lists are missing or contradict each other
    """
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in _SCHEMES:
        kind = f'"{model}"' if model != "gpt2" else f'"{pre}"'
        raise UnsupportedModelError(
            f"{name} has a tokenizer of the kind {kind[:80]}, which is not rebuilt from GGUF; "
            "use the model's Hugging Face folder"
        )
    tokens, merges = _texts(metadata, "tokens"), _texts(metadata, "merges")
    types = metadata.get("tokenizer.ggml.token_type")
    if not tokens or not merges or not isinstance(types, list) or len(types) != len(tokens):
        raise ModelFolderError(f"{name} has no complete tokenizer (tokens, token_type and merges of tokenizer.ggml)")
    scheme, adds_bos = _SCHEMES[pre]
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_bos) is True
    bos = _token(metadata, "bos", tokens)
    files = {
        "tokenizer.json": _tokenizer(tokens, types, merges, scheme(), bos if adds_bos else None),
        "tokenizer_config.json": _config(metadata, tokens, adds_bos=adds_bos),
    }
    return {file: json.dumps(values, ensure_ascii=False).encode() for file, values in files.items()}


def _tokenizer(
    tokens: list[str], types: list[int], merges: list[str], scheme: dict[str, Any], bos: str | None
) -> dict[str, Any]:
    added = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in {CONTROL, _USER_DEFINED}
    ]
    ignore_merges = scheme.pop("ignore_merges")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **scheme,
        "post_processor": None if bos is None else _begins_with(bos, tokens.index(bos)),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": {
                token: number for number, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED
            },
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def _begins_with(token: str, number: int) -> dict[str, Any]:
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            special,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": token, "type_id": 1}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


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
