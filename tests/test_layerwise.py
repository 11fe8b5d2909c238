"""One layer at a time, with only its weights in memory, gives what the whole model gives."""

from __future__ import annotations

import numpy as np
import pytest

from engine.convert.layerwise import FloatModel, PackedModel
from engine.convert.load import open_model
from engine.convert.recipe import conversion_for
from engine.convert.source import open_source
from engine.core.library import prepared_kernels
from engine.core.team import Team
from engine.errors import UnsupportedModelError
from engine.progress import finish
from tests.goldens import families as goldens
from tests.test_decoder import runner  # noqa: F401 - a fixture
from tests.workbench import same_bits

TOKENS = 150
CASES = goldens.cases()
REFUSED = [case for case in CASES if case.startswith(("lfm2", "qwen3_5", "qwen3_next"))]
REFUSED += ["gemma4_shared", "gemma4_pictures"]
"""A layer of these wants more than what the layer before gives."""


@pytest.fixture(scope="module")
def machinery(compiled_kernels):
    kernels = finish(prepared_kernels())
    team = Team(kernels, 2)
    yield kernels, team
    team.close()


def logits(model, ids):
    (x,) = model.embedded([ids])
    for number in range(len(model.spec.layers) - 1):
        model.load(number)
        x = model.run(x)
    model.load(len(model.spec.layers) - 1)
    return model.logits(x, 0)


@pytest.mark.parametrize("case", CASES)
def test_float_layers_are_the_model(machinery, tmp_path, case):
    """Every family, by the goldens of transformers."""
    arrays, _ = goldens.golden(case)
    kernels, team = machinery
    source = open_source(goldens.write(tmp_path, case))
    if case in REFUSED:
        with pytest.raises(UnsupportedModelError, match="cannot be run layer by layer"):
            FloatModel(source, kernels, team, TOKENS, head_rows=TOKENS)
        return
    model = FloatModel(source, kernels, team, TOKENS, head_rows=TOKENS)
    found = logits(model, arrays["ids"][:TOKENS].astype(np.int32))
    expected = arrays["logits"][:TOKENS]
    assert np.abs(found[:, arrays["columns"]] - expected).max() <= 1e-3 * expected.std()


@pytest.mark.parametrize("case", ["gemma2", "qwen3_moe", "gpt2", "cohere"])
def test_packed_layers_are_the_model_to_the_bit(machinery, runner, tmp_path, case):  # noqa: F811
    _, team = machinery
    ids = goldens.golden(case)[0]["ids"][:TOKENS].astype(np.int32)
    source = finish(open_model(goldens.write(tmp_path, case), conversion_for("q4")))
    found = logits(PackedModel(source.spec, source.weights, team, TOKENS, head_rows=TOKENS), ids)
    assert same_bits(found, runner(source).logits(ids, [TOKENS]))


def test_every_product_can_be_seen_and_replaced(machinery, tmp_path):
    kernels, team = machinery
    model = FloatModel(open_source(goldens.write(tmp_path, "qwen3_moe")), kernels, team, TOKENS)
    (x,) = model.embedded([np.arange(TOKENS, dtype=np.int32)])
    model.load(1)
    seen = {}
    plain = model.run(x, observe=lambda name, inputs, _expert: seen.setdefault(name, []).append(inputs.copy()))
    assert set(seen) == set(model.weights)
    chosen = model.spec.layers[1].feed_forward.experts.chosen
    assert sum(map(len, seen["layers.1.feed_forward.experts.down"])) == TOKENS * chosen
    name = "layers.1.attention.out"
    without = model.run(x, instead={name: np.zeros_like(model.weights[name])})
    assert np.abs(without - plain).max() > 1e-3
    assert same_bits(model.run(x), plain)
