"""Opens any model for use: a `.nook` file, a folder or a GGUF file, all as one `ModelSource`."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

from engine.convert.convert import quantised_in_memory
from engine.convert.folder import find_model
from engine.convert.source import open_source
from engine.errors import InputError
from engine.models.store import copied_nook, open_nook
from engine.models.weights import ModelSource
from engine.progress import Progress
from engine.settings import Conversion, LoadMode

__all__ = ["open_model"]


def open_model(
    path: Path, conversion: Conversion = Conversion(), *, load: LoadMode = "mmap"
) -> Generator[Progress, None, ModelSource]:
    """The model that a path means; every Progress is a place to stop.

    conversion: how a folder or GGUF file is packed in memory; a `.nook` file
        is what it was made as.
    load: "resident" copies a `.nook` file into memory instead of mapping it.

    Raises:
        InputError: and its kinds, each one sentence
        ResourceError: there is not the memory
    """
    found = find_model(path)
    if found.kind == "nook":
        return (yield from copied_nook(found.path)) if load == "resident" else open_nook(found.path)
    if load == "stream":
        raise InputError(
            f"{path} has to be converted before its layers can be read from disk: "
            f"inglenook convert {path} -o {found.path.stem}.nook"
        )
    return (yield from quantised_in_memory(open_source(path), conversion))
