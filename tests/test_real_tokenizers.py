"""Published tokenizers in every form they are handed out in, against the libraries that they were made for.

They are looked for in the folder `tokenizers` of INGLENOOK_TEST_MODELS; where from, is in tests/goldens/README.md.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from engine.convert.gguf_file import read_gguf
from engine.convert.gguf_tokenizer import tokenizer_files
from engine.text.tokenizer import Tokenizer
from tests.goldens.make_tokenizer_goldens import rank_file, ranks_of

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "tokenizers.json").read_text(encoding="utf-8"))
SAMPLES = GOLDENS["samples"]
# Of llama.cpp's test vocabularies, those that say how they cut text.
VOCABULARIES = (
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt"),
    *("phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)


def folder(*names):
    given = os.environ.get("INGLENOOK_TEST_MODELS")
    if not given:
        pytest.skip("INGLENOOK_TEST_MODELS names no folder with real models")
    path = Path(given, "tokenizers", *names)
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


def check(tokenizer, name):
    """Ids as the reference has them, and the text back; special tokens in the samples are text to the reference.

    Normalisation changes some texts, and SentencePiece's prefix stands beside special tokens.
    """
    for text, ids in zip(SAMPLES, GOLDENS["ids"][name], strict=True):
        assert tokenizer._ordinary(text, at_start=True) == ids, text
    for text in SAMPLES:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if not any(sign in text for sign in ("\u0301", "ﬁ", "\u2126", "<s>")):
            assert tokenizer.decode(ids, skip_special=False) == text


def test_ranks_of_llama_3():
    data = rank_file(ranks_of(folder("llama3") / "tokenizer.json"))
    tokenizer = Tokenizer.from_files({"tokenizer.model": data})
    check(tokenizer, "llama3 ranks")
    assert tokenizer.encode("a<|eot_id|>") == [128000, 64, 128009]
    reference = Tokenizer.from_files({"tokenizer.json": (folder("llama3") / "tokenizer.json").read_bytes()})
    assert tokenizer.vocab_size == reference.vocab_size
    for text in SAMPLES:
        plain = reference.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == plain


def test_ranks_of_qwen():
    data = rank_file(ranks_of(folder("qwen3") / "tokenizer.json"))
    config = json.dumps({"tokenizer_class": "QWenTokenizer"}).encode()
    tokenizer = Tokenizer.from_files({"qwen.tiktoken": data, "tokenizer_config.json": config})
    check(tokenizer, "qwen3 ranks")
    assert tokenizer.encode("<|im_start|>a<|extra_204|>") == [151644, 64, 151850]


def test_tekken():
    data = (folder("mistral") / "tekken_240911.json").read_bytes()
    tokenizer = Tokenizer.from_files({"tekken.json": data})
    check(tokenizer, "tekken")
    assert tokenizer.encode("[INST]a[/INST]")[0:2] == [1, 3]
    assert (tokenizer.bos_id, tokenizer.vocab_size) == (1, 131072)


@pytest.mark.parametrize("name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def test_sentencepiece(name):
    tokenizer = Tokenizer.from_files({"tokenizer.model": (folder("mistral") / name).read_bytes()})
    check(tokenizer, name)
    assert tokenizer.bos_id == 1
    assert tokenizer.end_ids == {2}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_vocabularies_of_gguf_files(name):
    path = folder("gguf", f"ggml-vocab-{name}.gguf")
    tokenizer = Tokenizer.from_files(tokenizer_files(read_gguf(path).metadata, path.name))
    texts = re.split("\n__ggml_vocab_test__\n", Path(f"{path}.inp").read_text(encoding="utf-8"))
    lines = Path(f"{path}.out").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 40
    for text, line in zip(texts, lines, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False) == [int(number) for number in line.split()], text


@pytest.mark.parametrize("name", ["llama2", "llama3", "qwen3", "gemma3", "deepseek_v3", "gptoss"])
def test_tokenizers_in_the_reference_form(name):
    path = folder(name)
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    tokenizer = Tokenizer.from_files(files)
    library = pytest.importorskip("tokenizers").Tokenizer.from_file(str(path / "tokenizer.json"))
    for text in SAMPLES:
        ids = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
