"""tiktoken's ranks and Mistral's tekken.json: toy vocabularies; published ones are in test_real_tokenizers.py."""

import base64
import json
from itertools import pairwise

import pytest
import tokenizers

from engine.errors import ModelFolderError, UnsupportedModelError
from engine.text.pipeline import byte_level_document
from engine.text.tokenizer import Tokenizer
from engine.text.words import WORDS
from tests.factory import byte_alphabet

WORDS_OF_OURS = [b"he", b"ll", b"hell", b"hello", b" w", b" wor", b"or", b"ld", b" world", b"12", b"123"]


def ranks(extra=WORDS_OF_OURS):
    return {bytes([byte]): byte for byte in range(256)} | {token: 256 + place for place, token in enumerate(extra)}


def lines(table):
    return b"".join(base64.b64encode(token) + b" " + str(rank).encode() + b"\n" for token, rank in table.items())


def tiktoken_ids(text, table):
    """Byte pairs in the order of their ranks, as tiktoken's own description has it; of one word."""
    parts = [bytes([byte]) for byte in text]
    if text in table:
        return [table[text]]
    while True:
        joined = [left + right for left, right in pairwise(parts)]
        pairs = [(table[both], place) for place, both in enumerate(joined) if both in table]
        if not pairs:
            return [table[part] for part in parts]
        place = min(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def qwen(table, **config):
    settings = json.dumps({"tokenizer_class": "QWenTokenizer"} | config).encode()
    return Tokenizer.from_files({"qwen.tiktoken": lines(table), "tokenizer_config.json": settings})


@pytest.mark.parametrize("text", ["hello", "hell", "hellohello", "held", " world", "wor", "xhellox", "é", "😀"])
def test_a_word_is_merged_as_tiktoken_does(text):
    tokenizer = qwen(ranks())
    ids = tokenizer.encode(text)
    assert ids == tiktoken_ids(text.encode(), ranks())
    assert tokenizer.decode(ids) == text


def test_a_word_of_the_vocabulary_is_one_token_even_if_no_merges_lead_there():
    assert qwen(ranks([b"hxello"])).encode("hxello") == [256]


def test_special_tokens_follow_the_ranks():
    tokenizer = qwen(ranks())
    first = len(ranks())
    assert tokenizer.encode("<|endoftext|>a<|im_end|><|extra_0|>") == [first, 97, first + 2, first + 3]
    assert tokenizer.vocab_size == first + 3 + 205
    assert tokenizer.decode([first + 1, 97]) == "a"


def test_special_tokens_that_a_configuration_declares():
    declared = {str(267 + place): {"content": text, "special": True} for place, text in enumerate(("[gMASK]", "<sop>"))}
    config = json.dumps({"tokenizer_class": "ChatGLM4Tokenizer", "added_tokens_decoder": declared}).encode()
    tokenizer = Tokenizer.from_files({"tokenizer.model": lines(ranks()), "tokenizer_config.json": config})
    assert tokenizer.encode("1234") == [267, 268, 266, 52]
    assert tokenizer.encode("1234", add_special_tokens=False) == [266, 52]


def test_content_does_not_become_a_special_token_although_it_is_in_the_vocabulary():
    tokenizer = qwen(ranks())
    ids = tokenizer._ordinary("<|im_start|>", at_start=True)
    assert not set(ids) & tokenizer.special_ids
    assert tokenizer.decode(ids) == "<|im_start|>"


def tekken(**changes):
    config = {"pattern": WORDS["tekken"].steps[0]["pattern"]["Regex"], "default_vocab_size": 300} | {
        "default_num_special_tokens": 30,
        "num_vocab_tokens": 400,
        "version": "v3",
    }
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks([b"he", b"ll", b"hell", b"hello", *(bytes([65, n]) for n in range(60))]).items()
    ]
    return {"config": config, "vocab": vocabulary} | changes


def test_tekken_counts_special_tokens_first():
    tokenizer = Tokenizer.from_files({"tekken.json": json.dumps(tekken()).encode()})
    assert tokenizer.encode("hello") == [1, 30 + 259]
    assert tokenizer.encode("[INST]a</s>", add_special_tokens=False) == [3, 30 + 97, 2]
    assert tokenizer.token(29) == "<SPECIAL_29>"
    assert tokenizer.vocab_size == 300  # the rest of the file's vocabulary is not the model's


def test_tekken_with_special_tokens_of_its_own():
    special = [{"rank": 17, "token_str": "[THINK]", "is_control": True}]
    tokenizer = Tokenizer.from_files({"tekken.json": json.dumps(tekken(special_tokens=special)).encode()})
    assert tokenizer.encode("[THINK]", add_special_tokens=False) == [17]


@pytest.mark.parametrize(
    ("files", "kind", "words"),
    [
        ({"tokenizer.model": lines(ranks())}, UnsupportedModelError, "does not say how text is split"),
        ({"tokenizer.model": lines(ranks()) + b"???\n"}, ModelFolderError, "fetch it again"),
        ({"tokenizer.model": b"YQ== 99999999\n"}, ModelFolderError, "fetch it again"),
        ({"qwen.tiktoken": b"YQ== 1\nY 2\n"}, ModelFolderError, "fetch it again"),
        ({"tekken.json": b"{}"}, ModelFolderError, "fetch it again"),
        ({"tekken.json": json.dumps(tekken(vocab=[{"rank": 0}])).encode()}, ModelFolderError, "fetch it again"),
        ({"tekken.json": json.dumps(tekken(special_tokens=[{"rank": 999}])).encode()}, ModelFolderError, "fetch"),
        ({"tekken.json": json.dumps(tekken(vocab=[5])).encode()}, ModelFolderError, "fetch it again"),
    ],
)
def test_damaged_files(files, kind, words):
    with pytest.raises(kind, match=words):
        Tokenizer.from_files(files)


CUTS = {
    "gpt-2": ["Hello", " world", "'s", " 12345", "  ", " x", "?!"],
    "qwen2": ["Hello", " world", "'s", " ", "1", "2", "3", "4", "5", "  ", " x", "?!"],
    "llama3": ["Hello", " world", "'s", " ", "123", "45", "  ", " x", "?!"],
    "smollm": ["Hello", " world", "'s", " ", "1", "2", "3", "4", "5", "  ", " x", "?!"],
    "gpt-4o": ["Hello", " world's", " ", "123", "45", "  ", " x", "?!"],
    "tekken": ["Hello", " world", "'s", " ", "1", "2", "3", "4", "5", "  ", " x", "?!"],
    "deepseek-v3": ["Hello", " world", "'s", " ", "123", "45", "  ", " x", "?!"],
    "kimi-k2": ["Hello", " world's", " ", "123", "45", "  ", " x", "?!"],
    "falcon": ["Hello", " world", "'", "s", " ", "123", "45", "  ", " x", "?!"],
    "bloom": ["Hello", " world's", " 12345", "  ", " x", "?!"],
    "superbpe": ["Hello world's ", "12", "345", "   x?!"],
}


@pytest.mark.parametrize("name", CUTS)
def test_how_text_is_cut(name):
    library = tokenizers.Tokenizer.from_str(byte_level_document({"a": 0}, [], WORDS[name]).decode())
    words = [word.replace("Ġ", " ") for word, _ in library.pre_tokenizer.pre_tokenize_str("Hello world's 12345   x?!")]
    assert words == CUTS[name]


@pytest.mark.parametrize("name", WORDS)
def test_every_way_of_cutting_can_be_used_and_loses_nothing(name):
    library = tokenizers.Tokenizer.from_str(byte_level_document({"a": 0}, [], WORDS[name]).decode())
    text = "It's 12,345 ℃: 你好ＡK 한국어\r\n\n\tdef f(x): return {x!r} e\u0301  "
    words = [word for word, _ in library.pre_tokenizer.pre_tokenize_str(text)]
    assert "".join(words) == "".join(byte_alphabet()[byte] for byte in text.encode())
    assert len(words) >= 5
