"""How byte-level vocabularies cut text into words before they merge bytes: one entry for each way in use.

A tokenizer.json says it itself. This is for files that name their way, or the
class of program it belongs to: GGUF files, tiktoken ranks, vocab.json with
merges.txt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["WORDS", "Words"]

Step = Mapping[str, Any]

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


@dataclass(frozen=True, slots=True)
class Words:
    """steps: pre-tokenizers as tokenizer.json writes them, in order.

    gpt2: GPT-2's own pattern cuts last.
    normalizer: "NFC" or None.
    whole: a word that the vocabulary has is one token, whatever the merges say.
    """

    steps: tuple[Step, ...] = ()
    gpt2: bool = False
    normalizer: str | None = None
    whole: bool = False


def _split(pattern: str) -> Step:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _general(letters: str, digits: str, signs: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*", tail: str = _TAIL) -> Words:
    """The pattern that GPT-4 made common, in its variations."""
    return Words((_split(f"{letters}|{digits}|{signs}|{tail}"),))


def _cased(ending: str, *, without: str = "") -> str:
    """Letters where a capital begins a new word. without: a class of letters that are not meant."""
    upper, lower = f"[{_UPPER}{without}]", f"[{_LOWER}{without}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}"


_DIGITS: Step = {"type": "Digits", "individual_digits": True}
_LETTERS = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_GPT2 = Words(gpt2=True)
_GPT2_DIGITS = Words((_DIGITS,), gpt2=True)
_QWEN2 = replace(_general(_LETTERS, r"\p{N}"), normalizer="NFC")
_GPT4 = _general(_LETTERS, r"\p{N}{1,3}")
_LLAMA3 = replace(_GPT4, whole=True)
_GPT4O = replace(
    _general(_cased(f"{_CONTRACTION}?"), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    whole=True,
)
_DEEPSEEK3 = Words(
    (
        _split(r"\p{N}{1,3}"),
        _split("[一-龥\u3040-ゟ゠-ヿ]+"),
        _split(
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
        ),
    )
)
_HAN_OR_HANGUL = _split("[一-龥ࠀ-一가-\ud7ff]+")
_LATIN_GREEK_CYRILLIC = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-\u1f15\u1f18-\u1f1d\u1f20-"
    "\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    "\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113"
    "\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214eↃↄⰀ-ⱻⱾ-"
    "ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_BLOOM = Words((_split(r" ?[^(\s|.,!?…。，、।۔،)]+"),))

# By the name that GGUF files give a way (tokenizer.ggml.pre).
WORDS: Mapping[str, Words] = {
    **dict.fromkeys(("gpt-2", "phi-2", "jais", "trillion", "granite-docling", "mellum", "exaone4", "a.x-4.0"), _GPT2),
    **dict.fromkeys(("mpt", "olmo"), replace(_GPT2, normalizer="NFC")),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), _GPT2_DIGITS),
    "command-r": replace(_GPT2_DIGITS, normalizer="NFC"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "hunyuan", "stablelm2", "solar-open"), _QWEN2),
    "grok-2": replace(_QWEN2, normalizer=None),
    "qwen35": _general(_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _GPT4),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "glm4"), _LLAMA3
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    "tekken": replace(_general(_cased(""), r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"), whole=True),
    "kimi-k2": replace(
        _general(r"[\p{Han}]+|" + _cased(f"{_CONTRACTION}?", without=r"&&[^\p{Han}]"), r"\p{N}{1,3}"), whole=True
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "deepseek-coder": Words(
        (_split("[\r\n]"), _split(r"\s?\p{L}+"), _split(r"\s?\p{P}+"), _HAN_OR_HANGUL, _DIGITS),
    ),
    "deepseek-llm": Words(
        (
            *(_split("[\r\n]"), _split(rf"\s?[{_LATIN_GREEK_CYRILLIC}]+")),
            *(_split(r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"), _split(r"\s+$"), _HAN_OR_HANGUL, _DIGITS),
        )
    ),
    "falcon": Words(
        (
            {"type": "Punctuation", "behavior": "Contiguous"},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            {"type": "Digits", "individual_digits": False},
            _split("[0-9][0-9][0-9]"),
        )
    ),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _BLOOM),
    "viking": Words((*_BLOOM.steps, _DIGITS)),
    "bailingmoe": _general(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]++[\r\n]*",
        r"\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "seed-coder": _general(_LETTERS, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+"),
    "superbpe": Words((_split(r"\p{N}+"), _split(r"(?=(\d{3})+(?!\d))"))),
}
