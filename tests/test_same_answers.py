"""The same seed gives the same answer, to the bit, whatever goes on around it (case S06): with the real kernels.

Compared are token ids and the log-probabilities of the likeliest five, which
come straight from the logits: a last bit that differs shows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from engine.runtime.events import Done, Request
from engine.runtime.loop import Loop
from engine.runtime.model import Model
from engine.settings import Conversion, Sampling
from tests import factory
from tests.fakes import Ear, ready
from tests.goldens import families as goldens

PROMPT = "In the beginning there was a fire on the hearth, and nobody had yet asked what it was for. " * 2
OTHERS = ("Once", "In the beginning there was water. " * 4, "世界 " * 20)
SAMPLING = Sampling(temperature=0.9, top_k=0, top_p=0.95, seed=3, max_tokens=40)


def _golden(case: str) -> dict[str, Any]:
    """Arguments of `factory.make` for the model of a family's golden."""
    _, meta = goldens.golden(case)
    config, shapes = meta["config"], {name: tuple(shape) for name, shape in meta["shapes"].items()}
    tied = config["tie_word_embeddings"]
    return {"config": config, "tensors": goldens.tensors(shapes, tied=tied, zero_centred=meta["zero_centred"])}


KINDS: dict[str, tuple[Callable[[], dict[str, Any]], Conversion, str]] = {
    "llama q4": (dict, Conversion(), "int8"),
    "qwen2 q8": (factory.qwen2, Conversion(bits=8), "int8"),
    "qwen3 f16 cache": (factory.qwen3, Conversion(group_size=64), "f16"),
    "short convolutions q8": (lambda: _golden("lfm2"), Conversion(bits=8), "int8"),
    "delta nets q4": (lambda: _golden("qwen3_next"), Conversion(), "int8"),
    "latent attention q8": (lambda: _golden("deepseek_v3"), Conversion(bits=8), "int8"),
    "shared keys q8": (lambda: _golden("gemma4_shared"), Conversion(bits=8), "int8"),
    "mistral f32, window": (lambda: factory.mistral(sliding_window=48), Conversion(bits=16, keep=("*=f32",)), "f32"),
}


def opened(folder: Path, kind: str, **settings: Any) -> AbstractContextManager[Model]:
    _, conversion, kv = KINDS[kind]
    return ready(folder, conversion, **({"threads": 1, "context": 256, "kv": kv, "max_batch_size": 4} | settings))


def answers(loop: Loop, prompts: tuple[str, ...], sampling: Sampling = SAMPLING, **fields: Any) -> list[Done]:
    ears = [Ear() for _ in prompts]
    for number, (prompt, ear) in enumerate(zip(prompts, ears, strict=True)):
        loop.add(Request(str(number), prompt, sampling, logprobs=5, **fields), ear)
    while loop.step():
        pass
    return [ear.done for ear in ears]


def essence(done: Done) -> tuple[Any, ...]:
    return done.token_ids, done.text, done.reason, done.logprobs


@pytest.fixture(scope="module", params=KINDS)
def toy_kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    make, _, _ = KINDS[request.param]
    return factory.make(tmp_path_factory.mktemp("toy") / "folder", **make()), request.param


@pytest.fixture(scope="module")
def expected(toy_kind: tuple[Path, str]) -> Any:
    """Alone, with one thread, the prompt in slices as large as they come."""
    with opened(*toy_kind) as model:
        (done,) = answers(Loop(model, slice_tokens=256), (PROMPT,))
    assert len(done.token_ids) == 40
    return essence(done)


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("slice_tokens", [1, 7, 64])
def test_threads_and_slices(toy_kind: tuple[Path, str], expected: Any, threads: int, slice_tokens: int) -> None:
    with opened(*toy_kind, threads=threads) as model:
        (done,) = answers(Loop(model, slice_tokens=slice_tokens), (PROMPT,))
    assert essence(done) == expected


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("place", range(4))
def test_company_caches_and_streaming(toy_kind: tuple[Path, str], expected: Any, place: int) -> None:
    prompts = (*OTHERS[:place], PROMPT, *OTHERS[place:])
    with opened(*toy_kind, threads=2) as model:
        loop = Loop(model, slice_tokens=7 + place)
        assert essence(answers(loop, prompts)[place]) == expected
        cached = answers(loop, prompts, stream=False)[place]
        assert cached.usage.cached_tokens == 128
        assert essence(cached) == expected


@pytest.mark.usefixtures("compiled_kernels")
def test_pauses(toy_kind: tuple[Path, str], expected: Any) -> None:
    """Seven pages hold the prompts of two such conversations, but not their answers."""
    with opened(*toy_kind, threads=2) as model:
        taken = [model.pages.take() for _ in range(model.pages.count - 7)]
        loop = Loop(model)
        ears = [Ear() for _ in range(3)]
        for number, ear in enumerate(ears):
            loop.add(Request(str(number), f"{'' if number == 1 else number}{PROMPT}", SAMPLING, logprobs=5), ear)
        paused = 0
        while loop.step():
            paused = max(paused, *(s.pauses for s in loop._of), 0)
        assert paused
        assert essence(ears[1].done) == expected
        for page in taken:
            model.pages.release(page)
        assert model.pages.available == model.pages.count
        assert model.memories is None or model.memories.available == model.memories.count
