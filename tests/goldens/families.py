"""One tiny model of every family, written by the recipe that its golden holds. Needs numpy only.

A golden `family-CASE.npz` says, in its `meta`, what `config.json` the model
has, the names and shapes of its tensors, and how they are filled; the numbers
in them come from `tiny_folder.normal`, by tensor name. Weights: linear layers
N(0, 1 / inputs), norm weights near what leaves things as they are, biases
N(0, 0.05**2), the embedding N(0, 1) or, where it is also the head, N(0, 1 / hidden).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.goldens import tiny_folder

GOLDENS = Path(__file__).parent
VOCAB, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 512, 64, 96, 4, 4, 2, 16, 512

Values = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]


def cases() -> list[str]:
    """All that there are, sorted."""
    return sorted(path.stem.removeprefix("family-") for path in GOLDENS.glob("family-*.npz"))


def golden(case: str) -> tuple[dict[str, NDArray[Any]], Values]:
    """The arrays of a golden, and its meta."""
    with np.load(GOLDENS / f"family-{case}.npz") as file:
        arrays = {name: file[name] for name in file.files if name != "meta"}
        return arrays, json.loads(str(file["meta"]))


def tensors(shapes: Shapes, *, tied: bool, zero_centred: bool) -> dict[str, NDArray[np.float32]]:
    """Values by tensor name. zero_centred: norm weights are stored less 1."""
    return {name: _filled(name, tuple(shape), tied=tied, zero_centred=zero_centred) for name, shape in shapes.items()}


def _filled(name: str, shape: tuple[int, ...], *, tied: bool, zero_centred: bool) -> NDArray[np.float32]:
    values = tiny_folder.normal(f"0:{name}", math.prod(shape)).reshape(shape)
    kind = name.rsplit(".", 1)[-1]
    if kind == "weight" and ("norm" in name or ".ln_" in name):
        values = (0.0 if zero_centred and "linear_attn" not in name else 1.0) + 0.1 * values
    elif kind == "layer_scalar":
        values = 1.0 + 0.1 * values
    elif kind == "A_log":
        values -= 2.0
    elif len(shape) == 1 or kind.endswith("bias"):
        values = values * (0.5 if "sinks" in name else 0.05)
    elif any(word in name for word in ("embed_tokens", "word_embeddings", "embed_in", "wte", "tok_embeddings")):
        values = values * (shape[1] ** -0.5 if tied else 1.0)
    elif "wpe" not in name:
        # GPT-2, and gpt-oss its experts, store matrices the other way round.
        inputs = shape[-2] if (".c_" in name and ".h." in name) or kind in {"gate_up_proj", "down_proj"} else shape[-1]
        values = values * inputs**-0.5
    return tiny_folder.round_weight(values)


def write(folder: Path, case: str) -> Path:
    """The folder of a case: config.json and model.safetensors."""
    _, meta = golden(case)
    write_model(folder, meta["config"], meta["shapes"], zero_centred=meta["zero_centred"])
    return folder


def write_model(folder: Path, config: Values, shapes: Shapes, *, zero_centred: bool) -> None:
    """A model of these shapes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    text = config.get("text_config", config)
    filled = tensors(shapes, tied=text.get("tie_word_embeddings", False), zero_centred=zero_centred)
    tiny_folder.save_safetensors(folder / "model.safetensors", filled, "f32")
