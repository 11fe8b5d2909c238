"""LoRA adapters: a small folder that changes another model's weights, put into them while they are read.

W' = W + B A * scale          and, with DoRA, each row of W' brought to the length that the adapter says
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.convert.entry import FLOATS, Entry, read_rows
from engine.convert.files import plain_name, read_json, within
from engine.convert.pickled import read_pickled
from engine.convert.quantised import Coded, Plain, StoredTensor
from engine.convert.safetensors import read_header
from engine.errors import ModelFolderError, UnsupportedModelError

__all__ = ["CONFIGURATION", "WEIGHTS", "adapted", "base_folder", "base_name"]

CONFIGURATION = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

Rows = NDArray[np.float32]

_PREFIX = "base_model.model."
# Settings that change the arithmetic, and the values that are followed.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (None,),
    "bias": (None, "none", "all", "lora_only"),
    "layer_replication": (None,),
    "lora_bias": (None, False),
    "megatron_config": (None,),
    "trainable_token_indices": (None,),
    "use_qalora": (None, False),
}
_PART = re.compile(
    r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(\.default)?(\.weight)?"
)


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """What is added to one matrix. down: (rank, columns); up: (rows, rank); lengths: of the rows, with DoRA."""

    down: Rows
    up: Rows
    scale: np.float32
    lengths: Rows | None


@dataclass(frozen=True, slots=True, eq=False)
class _Adapted:
    """A matrix of the base with its change."""

    base: StoredTensor
    change: _Change
    coding: None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def kept(self) -> str:
        return self.base.kept

    @property
    def bytes(self) -> int:
        return self.base.bytes

    @property
    def dtype(self) -> str:
        return self.base.dtype

    def rows(self, first: int, count: int) -> Rows:
        change = self.change
        rows = self.base.rows(first, count) + _product(change.up[first : first + count], change.down) * change.scale
        if change.lengths is not None:
            rows *= (change.lengths[first : first + count] / np.linalg.norm(rows, axis=1))[:, None]
        return rows

    def coded(self, first: int, count: int) -> Coded:
        raise NotImplementedError


def base_name(folder: Path) -> str:
    """The model that the adapter belongs to, as its makers call it; "" when they do not say."""
    name = read_json(within(folder, CONFIGURATION)).get("base_model_name_or_path")
    return name[:200] if isinstance(name, str) else ""


def base_folder(folder: Path) -> Path:
    """Where the adapter's base model lies on this computer.

    Looked for at the place its makers had it, beside the adapter's folder or inside it under its last name, and in
    the hub cache.

    Raises:
        UnsupportedModelError: it is not there; names it
    """
    name = base_name(folder)
    for candidate in _places(folder, name):
        if (candidate / "config.json").is_file() and candidate.resolve() != folder.resolve():
            return candidate
    whose = f"for {name}" if name else "for another model, which it does not name"
    last = plain_name(re.split(r"[/\\]", name)[-1]) or "base"
    raise UnsupportedModelError(
        f"{folder.name} is a LoRA adapter {whose}, not a whole model; put that model's folder beside it, named {last}"
    )


def adapted(tensors: Mapping[str, StoredTensor], folder: Path) -> dict[str, StoredTensor]:
    """The base's tensors, changed as the adapter in `folder` says.

    Raises:
        ModelFolderError: the adapter is damaged, or made for another model
        UnsupportedModelError: it changes the model in a way that is not followed; named
    """
    settings = read_json(within(folder, CONFIGURATION))
    kind = settings.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedModelError(f"{folder.name} is an adapter of the kind {str(kind)[:40]}; only LORA is merged")
    for key, known in _NEUTRAL.items():
        if (settings.get(key) or None) not in known:
            raise UnsupportedModelError(f"{folder.name} is an adapter with {key}, which is not merged")
    parts: dict[str, dict[str, Entry]] = {}
    changed = dict(tensors)
    for name, entry in _stored(folder).items():
        plain = name.removeprefix(_PREFIX)
        match = _PART.fullmatch(plain)
        if entry.dtype not in FLOATS:
            raise UnsupportedModelError(
                f"{name[:100]} ({folder.name}) is stored as {entry.dtype}, which is no plain weight"
            )
        if match:
            parts.setdefault(match[1], {})[match[2]] = entry
        else:
            whole = _theirs(plain.replace(".modules_to_save.default.", ".").replace(".base_layer.", "."), tensors)
            changed[whole] = Plain(entry)
    for stem, found in parts.items():
        name = _theirs(f"{stem}.weight", tensors)
        changed[name] = _Adapted(changed[name], _change(stem, found, settings, changed[name].shape))
    return changed


def _places(folder: Path, name: str) -> Iterator[Path]:
    if not name or name.startswith(("\\\\", "//")):  # asking for a share of another computer would tell it who asks
        return
    literal = Path(name)
    if literal.is_absolute():
        yield literal
    last = plain_name(re.split(r"[/\\]", name)[-1])
    if last:
        yield folder / last
        yield folder.absolute().parent / last
    repository = plain_name("models--" + name.replace("/", "--"))
    if repository:
        home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
        for around in (folder.absolute().parent, Path(os.environ.get("HF_HUB_CACHE") or home / "hub")):
            snapshots = around / repository / "snapshots"
            revision = around / repository / "refs" / "main"
            current = plain_name(revision.read_text(errors="replace").strip()) if revision.is_file() else None
            if current:
                yield snapshots / current
            if snapshots.is_dir():
                yield from sorted(snapshots.iterdir())


def _stored(folder: Path) -> Mapping[str, Entry]:
    for name, read in zip(WEIGHTS, (read_header, read_pickled), strict=True):
        path = folder / name
        if path.is_file() or path.is_symlink():
            return read(within(folder, name))
    raise ModelFolderError(f"{' or '.join(WEIGHTS)} is missing in {folder}: the download is incomplete")


def _theirs(name: str, tensors: Mapping[str, StoredTensor]) -> str:
    if name not in tensors:
        raise ModelFolderError(
            f"the adapter changes {name[:100]}, which its base model has not: it is for another model"
        )
    return name


def _change(stem: str, found: Mapping[str, Entry], settings: Mapping[str, Any], shape: tuple[int, ...]) -> _Change:
    names = {"lora_embedding_A", "lora_embedding_B"} if "lora_embedding_A" in found else {"lora_A", "lora_B"}
    if found.keys() - {"lora_magnitude_vector"} != names:
        raise ModelFolderError(f"the adapter has only a part of the change of {stem[:100]}: it is damaged")
    first, second = (_matrix(found[name]) for name in sorted(names))
    # An embedding's table is the transpose of the matrix that the adapter thinks of.
    down, up = (second.T, first.T) if "lora_embedding_A" in names else (first, second)
    rank = down.shape[0]
    if up.shape != (shape[0], rank) or down.shape[1:] != shape[1:]:
        raise ModelFolderError(f"the adapter's change of {stem[:100]} has another shape: it is for another model")
    alpha = _pattern(settings, "alpha_pattern", stem, settings.get("lora_alpha", rank))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ModelFolderError(f"lora_alpha ({CONFIGURATION}) is no number")
    scale = alpha / (sqrt(rank) if settings.get("use_rslora") else rank)
    lengths = found.get("lora_magnitude_vector")
    vector = None if lengths is None else read_rows(lengths, 0, lengths.shape[0] if len(lengths.shape) == 2 else 1)
    if vector is not None and vector.size != shape[0]:
        raise ModelFolderError(f"the adapter's lengths of {stem[:100]} are not one for each row: it is damaged")
    if (settings.get("use_dora") or False) != (vector is not None):
        raise ModelFolderError(f"use_dora ({CONFIGURATION}) contradicts the adapter's tensors")
    return _Change(down, up, np.float32(scale), None if vector is None else vector.reshape(-1))


def _matrix(entry: Entry) -> Rows:
    if len(entry.shape) != 2 or 0 in entry.shape:
        raise ModelFolderError(f"{entry.path.name} holds a change that is no matrix: it is damaged")
    return read_rows(entry, 0, entry.shape[0])


def _pattern(settings: Mapping[str, Any], key: str, stem: str, default: Any) -> Any:
    """A value by the end of a module's name, as adapters give exceptions."""
    patterns = settings.get(key)
    for end, value in patterns.items() if isinstance(patterns, dict) else ():
        if stem == end or stem.endswith(f".{end}"):
            return value
    return default


def _product(left: Rows, right: Rows) -> Rows:
    """Left (rows, rank) @ right (rank, columns), summed in order: the same on every processor."""
    total = np.zeros((left.shape[0], right.shape[1]), np.float32)
    for number in range(left.shape[1]):
        total += left[:, number, None] * right[number]
    return total
