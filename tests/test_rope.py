"""Rotary frequencies against transformers' own numbers and the plain formulas."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.models.rope import inverse_frequencies
from engine.models.spec import RopeScaling, RopeSpec
from tests import naive

CASES = json.loads((Path(__file__).parent / "data" / "rope.json").read_text())
# Two roundings of the power (transformers' own is good to one unit) reach the mixed kinds twice.
UNITS = {"default": 1, "linear": 1, "llama3": 1, "longrope": 1, "yarn": 2, "dynamic": 2}


def spec_of(case):
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in case["scaling"].items()}
    kind = values.pop("rope_type")
    values.pop("original_max_position_embeddings", None)
    scaling = None
    if kind != "default":
        scaling = RopeScaling(kind=kind, original_context=case["original_context"], **values)
    return RopeSpec(theta=case["theta"], dim=case["dim"], scaling=scaling)


def name_of(case):
    return f"{case['scaling']['rope_type']}-{case['dim']}-{case['length']}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_transformers(case):
    values, factor = inverse_frequencies(spec_of(case), case["length"])
    want = np.array(case["float32_bits"], np.uint32)
    assert values.dtype == np.float32
    assert values.shape == (case["dim"] // 2,)
    off = np.abs(values.view(np.int32).astype(np.int64) - want.astype(np.int64))
    assert off.max() <= UNITS[case["scaling"]["rope_type"]]
    assert factor == pytest.approx(case["attention_factor"], rel=1e-15)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_follows_the_formula(case):
    values, factor = inverse_frequencies(spec_of(case), case["length"])
    want, want_factor = naive.inverse_frequencies(spec_of(case), case["length"])
    # The exponent 2i / dim is rounded to float32, which a base of 1e6 turns into 14 * 2**-24 of the power.
    np.testing.assert_allclose(values, want, rtol=2e-6)
    assert factor == pytest.approx(want_factor, rel=1e-14)


def test_the_length_changes_only_what_depends_on_it():
    for kind in ("linear", "llama3", "yarn"):
        spec = RopeSpec(1e4, 64, scaling=RopeScaling(kind, 4.0, 4096))
        assert np.array_equal(inverse_frequencies(spec)[0], inverse_frequencies(spec, 100_000)[0])
    dynamic = RopeSpec(1e4, 64, scaling=RopeScaling("dynamic", 4.0, 4096))
    plain = inverse_frequencies(RopeSpec(1e4, 64))[0]
    assert np.array_equal(inverse_frequencies(dynamic, 4096)[0], plain)
    assert (inverse_frequencies(dynamic, 4097)[0][1:] < plain[1:]).all()


def test_no_instruction_set_changes_a_bit():
    """numpy chooses its loops by the CPU; with all of them off the bits stay."""
    script = """
import hashlib
from engine.models.rope import inverse_frequencies
from tests.test_rope import CASES, spec_of
frequencies = b"".join(inverse_frequencies(spec_of(case), case["length"])[0].tobytes() for case in CASES)
print(hashlib.sha256(frequencies).hexdigest())
"""
    root = Path(__file__).parent.parent
    answers = []
    for disabled in ("", "AVX512F AVX512CD AVX512_SKX AVX2 FMA3", "X86_V3 X86_V4"):
        environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": disabled, "PYTHONWARNINGS": "ignore"}
        run = subprocess.run(
            [sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True, check=False
        )
        if run.returncode == 0:  # otherwise this numpy has other names for its features
            answers.append(run.stdout)
    assert answers
    assert len(set(answers)) == 1
