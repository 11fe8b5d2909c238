"""Every family against transformers in float32, over 300 positions, beyond windows and original rotary lengths.

Goldens: `tests/goldens/families.py`. The figures are the same on every computer, so `docs/models.md`, which
lists them, can be compared word for word; `python -m tests.models_table` writes it.
"""

from __future__ import annotations

import pytest

from engine.convert.load import open_model
from engine.convert.recipe import conversion_for
from engine.models.families import families, recognise
from engine.progress import finish
from tests import models_table
from tests.goldens import families as goldens
from tests.test_decoder import runner  # noqa: F401 - a fixture
from tests.workbench import same_bits

CASES = goldens.cases()


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """`opened(case)`: the model of a golden, unquantised."""
    made = {}

    def load(case):
        if case not in made:
            folder = goldens.write(tmp_path_factory.mktemp(case), case)
            made[case] = finish(open_model(folder, conversion_for("f32")))
        return made[case]

    return load


@pytest.fixture(scope="module")
def parities(compiled_kernels):
    """Case -> what was measured."""
    return {case: models_table.measure(case) for case in (*models_table.TINY, *CASES)}


@pytest.mark.parametrize("case", CASES)
def test_parity_with_transformers(parities, case):
    parity = parities[case]
    assert parity.difference <= models_table.TOLERANCE * parity.deviation
    assert parity.agreeing == parity.clear > 290


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("compiled_kernels")
def test_pieces_give_the_bits_of_one_pass(opened, runner, case):  # noqa: F811
    """Prompt in slices, then token by token, across pages and windows; quantised keys and values."""
    ids = goldens.golden(case)[0]["ids"][:150]
    whole = runner(opened(case)).logits(ids, [150])
    assert same_bits(runner(opened(case), threads=1, seed=1).logits(ids, [70, 51, 1]), whole)


@pytest.mark.parametrize("case", CASES)
def test_both_spellings_of_a_configuration_are_one_model(case):
    """What transformers 5 writes again says the same as the published `config.json`."""
    _, meta = goldens.golden(case)
    spec = recognise(meta["config"]).spec
    if meta["resaved"] is not None:
        again = {key: value for key, value in meta["resaved"].items() if value is not None}
        assert recognise(again | {"architectures": meta["config"]["architectures"]}).spec == spec
    assert type(spec).from_json(spec.to_json()) == spec


def test_every_family_has_a_golden():
    tested = {models_table.architecture(case) for case in (*models_table.TINY, *CASES)}
    assert not [together for together in families() if not tested & set(together)]


def test_the_table_of_models_is_what_was_measured(parities):
    written = models_table.DOCS.read_text(encoding="utf-8")
    assert written == models_table.text(parities), "run python -m tests.models_table"
