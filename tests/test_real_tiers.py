"""Published models, quantised: the same logits to the bit on every tier, in any company, cut anyhow, with any threads.

The starter is checked everywhere. INGLENOOK_TEST_NOOK names a converted model to check as well;
INGLENOOK_TEST_EXAMPLES says how many examples of each are drawn (their prompts are longer then), instead of a few.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine import api
from engine.convert.convert import convert
from engine.core.cpu import machine
from engine.models.batch import Batch
from engine.progress import finish
from engine.runtime.model import Model
from engine.settings import Conversion, EngineSettings

EXAMPLES = int(os.environ.get("INGLENOOK_TEST_EXAMPLES", "0"))
KINDS = {"starter int4": (4, "int8"), "starter int8": (8, "f16"), "given": (None, "int8")}
CONTEXT = 640
OBSERVED = 20
"""The last tokens of each prompt, whose logits are compared; they depend on all before them."""

Opened = dict[tuple[str, int], Model]


@pytest.fixture(scope="module", params=KINDS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kernels: Any) -> Iterator[Opened]:
    """The model, opened for every (tier, threads)."""
    bits, kv = KINDS[request.param]
    if bits is None:
        if "INGLENOOK_TEST_NOOK" not in os.environ:
            pytest.skip("INGLENOOK_TEST_NOOK names no converted model")
        file = Path(os.environ["INGLENOOK_TEST_NOOK"])
    else:
        source = api.starter_path()
        if source is None:
            pytest.skip("the starter package is not installed")
        file = tmp_path_factory.mktemp("starter") / "starter.nook"
        finish(convert(source, file, Conversion(bits=bits)))
    models: Opened = {}
    for tier in machine().tiers:
        kernels(tier)
        for threads in (1, 2, 3):
            chosen = {"tier": tier, "threads": threads, "kv": kv, "context": CONTEXT, "max_batch_size": 4}
            opening = api._opened(file, EngineSettings(**chosen), most_wanted=3 * OBSERVED)
            models[tier, threads] = finish(opening)
    yield models
    for model in models.values():
        model.release()


def logits(model: Model, prompts: list[list[int]], cuts: list[list[int]]) -> list[bytes]:
    """The bits of the logits of the last tokens of every prompt.

    cuts: how many tokens of each prompt every step takes; a prompt that is through is in company no more.
    """
    size, done = model.pages.layout.tokens, [0] * len(prompts)
    tables = np.zeros((len(prompts), CONTEXT // size), np.int32)
    taken = [[model.pages.take() for _ in range(-(-len(prompt) // size))] for prompt in prompts]
    for table, pages in zip(tables, taken, strict=True):
        table[: len(pages)] = pages
    rows: list[list[bytes]] = [[] for _ in prompts]
    try:
        for step in zip(*cuts, strict=True):
            parts = [(n, done[n], min(done[n] + take, len(prompts[n]))) for n, take in enumerate(step)]
            parts = [(n, start, end) for n, start, end in parts if end > start]
            places = [(row, n, place) for row, (n, start, end) in enumerate(parts) for place in range(start, end)]
            if not places:
                continue
            seen = [index for index, (_, n, place) in enumerate(places) if place >= len(prompts[n]) - OBSERVED]
            out = model.decoder.forward(
                Batch(
                    ids=np.array([prompts[n][place] for _, n, place in places], np.int32),
                    positions=np.array([place for _, _, place in places], np.int32),
                    sequence_of=np.array([row for row, _, _ in places], np.int32),
                    tables=tables[[n for n, _, _ in parts]],
                    lengths=np.array([end for _, _, end in parts], np.int32),
                    wanted=np.array(seen, np.int32),
                )
            )
            assert np.isfinite(out).all()
            for index, row in zip(seen, out, strict=True):
                rows[places[index][1]].append(row.tobytes())
            for n, _, end in parts:
                done[n] = end
    finally:
        for pages in taken:
            for page in reversed(pages):
                model.pages.release(page)
    assert done == [len(prompt) for prompt in prompts]
    return [b"".join(each) for each in rows]


def cut(data: st.DataObject, length: int, most: int) -> list[int]:
    """Nothing for up to two steps, then 1 to `most` tokens a step until there are `length`."""
    pieces = [0] * data.draw(st.integers(0, 2))
    while sum(pieces) < length:
        pieces.append(data.draw(st.integers(1, most)))
    return pieces


@settings(max_examples=EXAMPLES or 4, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.data())
def test_every_tier_says_the_same(opened: Opened, data: st.DataObject) -> None:
    tiers = machine().tiers
    best = opened[tiers[-1], 1]
    lengths = st.integers(1, 20)
    if EXAMPLES:  # over the end of a page, over the end of a chunk of attention
        lengths = st.one_of(st.integers(1, 40), st.integers(60, 140), st.integers(505, 530))
    prompts = [
        data.draw(st.lists(st.integers(0, best.vocab_size - 1), min_size=length, max_size=length))
        for length in data.draw(st.lists(lengths, min_size=1, max_size=3))
    ]
    # Alone, one thread, in slices as large as a step takes.
    slices = [[best.batch_tokens] * -(-len(prompt) // best.batch_tokens) for prompt in prompts]
    expected = [logits(best, [prompt], [whole])[0] for prompt, whole in zip(prompts, slices, strict=True)]
    for tier in tiers:
        threads = data.draw(st.integers(1, 3), label=f"threads of {tier}")
        most = data.draw(st.sampled_from((1, 5, 16, 85)) if max(map(len, prompts)) < 50 else st.just(85))
        cuts = [cut(data, len(prompt), most) for prompt in prompts]
        steps = max(map(len, cuts))
        rows = logits(opened[tier, threads], prompts, [[*each, *[0] * (steps - len(each))] for each in cuts])
        same = [got == want for got, want in zip(rows, expected, strict=True)]
        assert all(same), (tier, threads, cuts, same)
    sys.stdout.write(f"{len(prompts)} prompts, {sum(map(len, prompts))} tokens, {len(tiers)} tiers: the same\n")
