"""Inglenook's engine: language models on an ordinary processor.

`engine.convert` is the function, not the package of that name: that one's
modules are imported by their full names.
"""

from __future__ import annotations

from engine.api import AutoModel, Engine, convert, inspect, verify

__all__ = ["AutoModel", "Engine", "convert", "inspect", "verify"]

__version__ = "0.1.0"
