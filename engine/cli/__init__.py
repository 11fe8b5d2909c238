"""The command line: the engine's public face, spoken in a terminal."""

from __future__ import annotations

from engine.cli.program import main

__all__ = ["main"]
