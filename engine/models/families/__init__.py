"""Model families as data: what each `config.json` means, and what its tensors are called.

To add a family: a reader with `@family` in one of these modules, with names
where they differ from Llama's; then a case in `tests/goldens/families.py`.
"""

from engine.models.blueprint import Blueprint, families, recognise
from engine.models.families import experts, gemma, glm, latent, layer_norm, llama, recurrent

__all__ = [
    "Blueprint",
    "experts",
    "families",
    "gemma",
    "glm",
    "latent",
    "layer_norm",
    "llama",
    "recognise",
    "recurrent",
]
