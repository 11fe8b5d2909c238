"""Inglenook's engine: language models on an ordinary processor.

`import engine` is cheap; the names below are loaded when first used, so that
`engine.errors` and `engine.settings` stay importable without the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.api import AutoModel as AutoModel
    from engine.api import Engine as Engine
    from engine.api import convert as convert
    from engine.api import inspect as inspect
    from engine.api import verify as verify

__all__ = ["AutoModel", "Engine", "convert", "inspect", "verify"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in __all__:
        from engine import api

        return getattr(api, name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
