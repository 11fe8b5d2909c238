"""Published models in float32 against transformers: logits, greedy answers, token ids, prompts, perplexity.

SmolLM2 comes with the starter package, as the GGUF file that the reference's weights were made from, so it is
checked everywhere. The others run where INGLENOOK_TEST_MODELS names a folder that holds them (tests/goldens/README.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import sys
from pathlib import Path

import numpy as np
import pytest

import engine
from engine.api import Done, Failed, Message, Request, Sampling, starter_path
from engine.convert.convert import convert
from engine.progress import finish
from engine.runtime import scoring
from engine.settings import Conversion, EngineSettings
from engine.text.tokenizer import Piece

GOLDENS = Path(__file__).parent / "goldens"
MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
TOLERANCE = 2e-3
"""The contract. Float32's own noise in these models (transformers against itself) is 1e-5 to 6e-5."""

pytestmark = pytest.mark.usefixtures("compiled_kernels")


def golden(kind, name):
    path = GOLDENS / f"{kind}-{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def models_folder():
    """Where real models lie."""
    given = os.environ.get("INGLENOOK_TEST_MODELS")
    if not given:
        pytest.skip("INGLENOOK_TEST_MODELS names no folder with real models")
    return Path(given)


@pytest.fixture(scope="module", params=["starter", *MODELS])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def path(name, tmp_path_factory):
    """What is loaded: a folder, or the starter's GGUF file converted with the reference's rounding to bfloat16."""
    if name != "starter":
        folder = models_folder() / name
        if not folder.is_dir():
            pytest.skip(f"{folder} is not there")
        return folder
    source = starter_path()
    if source is None:
        pytest.skip("the starter package is not installed")
    file = tmp_path_factory.mktemp("starter") / "starter.nook"
    finish(convert(source, file, Conversion(bits=16, keep=("*=bf16",))))
    return file


@pytest.fixture(scope="module")
def golden_name(name):
    return MODELS[0] if name == "starter" else name


@pytest.fixture(scope="module")
def model(name, path, compiled_kernels):
    if name == "starter":
        settings = EngineSettings(kv="f32")
        loaded = engine.AutoModel.from_pretrained(path, max_seq_len=512, settings=settings)
    else:
        loaded = engine.AutoModel.from_pretrained(path, max_seq_len=512, dtype="f32")
    yield loaded
    loaded.close()


def answer(model, prompt, **sampling):
    """The greedy answer, as its `Done`."""
    events = queue.SimpleQueue()
    request = Request("test", prompt, Sampling(temperature=0.0, repetition_penalty=1.0, **sampling))
    model._service.submit(request, events.put)
    while not isinstance(event := events.get(timeout=300), Done | Failed):
        pass
    assert isinstance(event, Done), event
    return event


# ---------------------------------------------------------------- against the reference


@pytest.mark.parametrize("which", MODELS)
def test_the_folder_is_the_one_that_the_reference_saw(which):
    """Another rounding, or a newer release, would be another model: then the goldens say nothing about it."""
    folder = models_folder() / which
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    for file, digest in golden("continue", which)["meta"]["files"].items():
        with (folder / file).open("rb") as opened:
            assert hashlib.file_digest(opened, "sha256").hexdigest() == digest, file


def test_logits(model, name, golden_name):
    """All 300 positions of a text in English, Chinese and Python: every stored logit, and every likeliest token."""
    values = np.load(GOLDENS / f"real-{golden_name}.npz")
    logits = model.logits(values["ids"])
    difference = np.abs(logits[:, values["columns"]] - values["logits"]).max()
    sys.stdout.write(f"{name}: logits differ by {difference:.1e} at most\n")
    assert difference <= TOLERANCE
    assert np.abs(logits.max(axis=1) - values["max"]).max() <= TOLERANCE
    following = logits[np.arange(299), values["ids"][1:]]
    assert np.abs(following - values["next_logit"]).max() <= TOLERANCE
    high = logits.max(axis=1).astype(np.float64)
    total = high + np.log(np.exp(logits - high[:, None]).sum(axis=1))
    assert np.abs(total - values["logsumexp"]).max() <= TOLERANCE
    assert np.array_equal(logits.argmax(axis=1), values["argmax"])


@pytest.mark.parametrize("path", ["gemma3-270m", "gguf/gemma3-270m.gguf"])
def test_gemma_goes_on_with_a_text_as_the_reference_does(path, compiled_kernels):
    """A base model: norms stored less 1, windows, two rotary bases; from its folder and from the GGUF file of it."""
    found = models_folder() / path
    if not found.exists():
        pytest.skip(f"{found} is not there")
    with engine.AutoModel.from_pretrained(found, max_seq_len=512, dtype="f32") as model:
        for want in golden("continue", "gemma3-270m")["continuations"].values():
            assert model.tokenizer.encode(want["prompt"]) == want["prompt_ids"]
            done = answer(model, want["prompt"], max_tokens=len(want["ids"]))
            assert list(done.token_ids) == want["ids"][: len(done.token_ids)]
            assert len(done.token_ids) >= len(want["ids"]) - want["stopped"]


@pytest.mark.parametrize("which", ["english", "chinese", "code"])
def test_greedy_answers(model, golden_name, which):
    """64 tokens, or fewer where the model ends: the very ids, and the text."""
    want = golden("continue", golden_name)["continuations"][which]
    messages = tuple(Message(turn["role"], turn["content"]) for turn in want["messages"])
    assert model.apply_chat_template(want["messages"]) == want["prompt"]
    assert model.apply_chat_template(want["messages"], tokenize=True) == want["prompt_ids"]
    done = answer(model, messages, max_tokens=64)
    ids = want["ids"][:-1] if want["stopped"] else want["ids"]
    assert list(done.token_ids) == ids
    assert done.reason == ("stop" if want["stopped"] else "length")
    # A character that was cut off at the end is left out; the reference writes a replacement for it.
    assert done.text == want["text"].rstrip("\ufffd")


def test_token_ids(model, golden_name):
    """Awkward texts: with control tokens recognised, and as content, where they must stay text."""
    tokenizer, plain = model.tokenizer, []
    for key, want in golden("tokenizer", golden_name)["texts"].items():
        assert tokenizer.encode(want["text"], add_special_tokens=False) == want["ids"], key
        assert tokenizer.decode(want["ids"], skip_special=False) == want["decoded"], key
        content = tokenizer.encode_pieces([Piece(want["text"], is_content=True)])
        assert tokenizer.decode(content, skip_special=False) == want["decoded"], key
        assert not set(content) & tokenizer.special_ids, key
        if content != want["ids_specials_as_text"]:
            plain.append(key)
    # The reference still recognises added tokens that are not special, such as <tool_call>. We take none from content.
    assert plain == ([] if tokenizer.token_to_id("<tool_call>") is None else ["controls"])


def test_rendered_prompts(model, golden_name):
    for key, want in golden("tokenizer", golden_name)["chats"].items():
        assert model.apply_chat_template(want["messages"]) == want["prompt"], key
        assert model.apply_chat_template(want["messages"], tokenize=True) == want["ids"], key


@pytest.mark.parametrize("label", ["en", "zh"])
def test_perplexity(model, golden_name, label):
    """The first windows of a long text, by llama-perplexity's method: within 1e-4 of the reference's."""
    want = golden("ppl", f"{golden_name}-{label}")
    file = models_folder() / "eval" / want["text"]
    if not file.is_file():
        pytest.skip(f"{file} is not there")
    data = file.read_bytes()
    assert hashlib.sha256(data).hexdigest() == want["text_sha256"]
    text, windows = data.decode(), 2
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == want["tokens"]
    # So much of the text as makes two windows, and begins with the same tokens.
    count = windows * want["context"]
    beginning = text[: len(model.tokenizer.decode(ids[: count + 40]))]
    *_, result = scoring.perplexity(model._model, beginning, want["context"], most_rows=64)
    assert result["windows"] == windows
    exact = np.exp(sum(want["nll"][:windows]) / (windows * want["scored_per_chunk"]))
    assert abs(result["perplexity"] / exact - 1) < 1e-4


# ---------------------------------------------------------------- the starter, as people meet it


def test_the_starter_knows_paris():
    """The GGUF file out of its package, quantised while it is loaded, answers a plain question."""
    if starter_path() is None:
        pytest.skip("the starter package is not installed")
    with engine.AutoModel.from_pretrained("starter", max_seq_len=512) as model:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        first = model.generate(question, max_new_tokens=24, temperature=0.0)
        assert "Paris" in first
        assert model.generate(question, max_new_tokens=24, temperature=0.0) == first
