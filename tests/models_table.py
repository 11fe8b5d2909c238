"""The table of model families in docs/models.md: what each was measured to differ from its reference.

python -m tests.models_table        measures all families and writes docs/models.md
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import engine
from engine.models.families import families
from tests import factory
from tests.goldens import families as goldens
from tests.goldens import tiny_folder

TOLERANCE = 1e-4
DOCS = Path(__file__).resolve().parent.parent / "docs" / "models.md"
TINY = {
    "llama-yarn": "LlamaForCausalLM",
    "mistral-swa64": "MistralForCausalLM",
    "qwen2-swa64": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Goldens of the first four families, of which `tests/test_decoder.py` tests many more."""

_HEAD = """# Models that run

What counts is the name under `architectures` in a model's `config.json`. Each family below is compared with
`transformers` in float32, on a small model with random weights, over 300 positions that go beyond its sliding window
and its original rotary length. "Largest difference" is that of any logit (their deviation is about 1); "same token"
says at how many of the 300 positions the likeliest token is the same, of those where rounding leaves no choice. The
figures are the same on every computer. This file is written by `python -m tests.models_table`, and a test compares it.

| Architecture | Also | Reference | Largest difference | Same token |
|---|---|---|---|---|
"""
_TAIL = """
Other architectures are refused by name, as is every setting in `config.json` that would change the result and is not
read. Of models that also see pictures (`...ForConditionalGeneration`), the text part runs.

Latent attention (DeepSeek, GLM-4.7-Flash, MiniCPM3) keeps keys and values for every head, padded to one size, not in
their compressed form; the memory plan counts what that takes. Short convolutions and delta nets (LFM2, Qwen3-Next,
Qwen3.5) keep a memory of a sequence beside its pages: two for each answer that runs, which the plan counts, too, and as
many for beginnings of texts as a quarter of the pages' memory holds, at least four.
"""


@dataclass(frozen=True)
class Parity:
    """difference: largest of any stored logit. agreeing, clear: positions with the same token, of those to be told."""

    reference: str
    deviation: float
    difference: float
    agreeing: int
    clear: int


def measure(case: str) -> Parity:
    """The product's own way from a folder to logits, unquantised."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        if case in TINY:
            tiny_folder.write_folder(folder, case)
            with np.load(goldens.GOLDENS / f"tiny-{case}.npz") as file:
                arrays = {name: file[name] for name in file.files}
            meta: dict[str, Any] = json.loads(str(arrays.pop("meta"))) | {"reference": TINY[case]}
        else:
            arrays, meta = goldens.golden(case)
            goldens.write(folder, case)
        (folder / "tokenizer.json").write_text(json.dumps(factory.tok_json()), encoding="utf-8")
        with engine.AutoModel.from_pretrained(folder, max_seq_len=512, dtype="f32") as model:
            logits = model.logits(arrays["ids"])
    difference, agreeing, clear = compared(logits, arrays)
    return Parity(meta["reference"], meta["logits_std"], difference, agreeing, clear)


def compared(logits: NDArray[np.float32], arrays: Mapping[str, NDArray[Any]]) -> tuple[float, int, int]:
    """(largest difference, positions with the same token, positions where it can be told)."""
    differences = (
        logits[:, arrays["columns"]] - arrays["logits"],
        logits[-1] - arrays["last_logits"],
        logits.max(axis=1) - arrays["max"],
    )
    clear = arrays["margin"] > 2 * TOLERANCE
    same = logits.argmax(axis=1) == arrays["argmax"]
    return max(float(np.abs(part).max()) for part in differences), int(same[clear].sum()), int(clear.sum())


def architecture(case: str) -> str:
    """Whose golden it is."""
    if case in TINY:
        return TINY[case]
    name: str = goldens.golden(case)[1]["config"]["architectures"][0]
    return name


def text(parities: Mapping[str, Parity]) -> str:
    """docs/models.md: a row for each family, its worst case counts."""
    rows = []
    for together in families():
        own = [parity for case, parity in parities.items() if architecture(case) in together]
        first = next(architecture(case) for case in parities if architecture(case) in together)
        others = ", ".join(name for name in together if name != first)
        references = " and ".join(dict.fromkeys(parity.reference for parity in own))
        worst = max(parity.difference for parity in own)
        same = min(parity.agreeing for parity in own)
        clear = min(parity.clear for parity in own)
        rows.append(f"| {first} | {others} | {references} | {worst:.0e} | {same} of {clear} |\n")
    return _HEAD + "".join(sorted(rows, key=str.lower)) + _TAIL


if __name__ == "__main__":
    DOCS.parent.mkdir(exist_ok=True)
    DOCS.write_text(text({case: measure(case) for case in (*TINY, *goldens.cases())}), encoding="utf-8")
