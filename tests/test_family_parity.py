"""Every family against transformers in float32, over 300 positions, beyond windows and original rotary lengths.

Goldens: `tests/goldens/families.py`. The figures are the same on every computer, so `docs/models.md`, which
lists them, can be compared word for word; `python -m tests.models_table` writes it.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine.convert.load import open_model
from engine.convert.recipe import conversion_for
from engine.core.quant import FORMATS
from engine.models.families import families, recognise
from engine.progress import finish
from tests import factory, models_table, naive
from tests.goldens import families as goldens
from tests.test_decoder import runner  # noqa: F401 - a fixture
from tests.workbench import same_bits

CASES = goldens.cases()
IDS = np.arange(3, 53, dtype=np.int32)


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
    assert same_bits(runner(opened(case), threads=1, seed=1).logits(ids, [70, 51, 1], again=True), whole)


@pytest.mark.parametrize("case", CASES)
def test_the_twin_written_to_be_read_agrees(opened, case):
    """Float64 and no kernel, from the very tensors that the decoder runs."""
    model, (arrays, _) = opened(case), goldens.golden(case)
    weights = {}
    for tensor in model.spec.tensors():
        held = model.weights.tensor(tensor.name)
        if tensor.role == "vector":
            weights[tensor.name] = held.vector()
        else:
            layout = FORMATS[held.format].layout(held.rows, held.cols, held.group)
            weights[tensor.name] = layout.unpack_rows(held.data, held.exponent, 0, held.rows)
    logits = naive.forward(model.spec, weights, arrays["ids"][:100], rope_length=512)
    assert np.abs(logits[:, arrays["columns"]] - arrays["logits"][:100]).max() <= models_table.TOLERANCE


@pytest.mark.usefixtures("compiled_kernels")
def test_experts_in_four_bit_floats_are_the_same_model(tmp_path, runner):  # noqa: F811
    """gpt-oss as it is published, MXFP4 blocks with their rows in place, and as transformers writes it, transposed."""
    _, meta = goldens.golden("gpt_oss")
    shapes = {name: tuple(shape) for name, shape in meta["shapes"].items()}
    random = np.random.default_rng(0)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    plain = goldens.tensors(shapes, tied=False, zero_centred=False)
    packed = dict(plain)
    for name in [name for name in shapes if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = shapes[name]
        codes = random.integers(0, 16, (experts, rows, columns // 32, 32)).astype(np.uint8)
        scales = random.integers(122, 126, (experts, rows, columns // 32)).astype(np.uint8)
        dense = values[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
        plain[name] = np.ascontiguousarray(dense.reshape(experts, rows, columns).swapaxes(1, 2))
        del packed[name]
        for end, stored in (("blocks", codes[..., ::2] | codes[..., 1::2] << 4), ("scales", scales)):
            packed[f"{name}_{end}"] = ("U8", stored.shape, stored.tobytes())
    logits = []
    for kind, tensors in (("plain", plain), ("packed", packed)):
        config = meta["config"] | ({"quantization_config": {"quant_method": "mxfp4"}} if kind == "packed" else {})
        folder = factory.make(tmp_path / kind, config, tensors)
        logits.append(runner(finish(open_model(folder, conversion_for("f32"))), kv="f32").logits(IDS, [50]))
    assert same_bits(*logits)


@pytest.mark.parametrize("case", CASES)
def test_both_spellings_of_a_configuration_are_one_model(case):
    """What transformers 5 writes again says the same as the published `config.json`."""
    _, meta = goldens.golden(case)
    spec = recognise(meta["config"]).spec
    if meta["resaved"] is not None:
        # A null that the published file has, too, says something: no inner vector of queries, for example.
        again = {key: value for key, value in meta["resaved"].items() if value is not None or key in meta["config"]}
        assert recognise(again | {"architectures": meta["config"]["architectures"]}).spec == spec
    assert type(spec).from_json(spec.to_json()) == spec


def test_every_family_has_a_golden():
    tested = {models_table.architecture(case) for case in (*models_table.TINY, *CASES)}
    assert not [together for together in families() if not tested & set(together)]


def test_the_table_of_models_is_what_was_measured(parities):
    written = models_table.DOCS.read_text(encoding="utf-8")
    assert written == models_table.text(parities), "run python -m tests.models_table"
