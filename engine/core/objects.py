"""Files of compiled kernels: what they are called, which sources they are made of, whether they are whole.

Compiles nothing and loads nothing. A file is code (object code in the cache, a
shared library in a packaged program), then the key of the sources it was made
of, then the SHA-256 of all that. Linkers and loaders look at the front only.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from pathlib import Path
from typing import Final

__all__ = ["SYSTEM", "compiler_key", "has_sources", "library_name", "seal", "source_key", "unseal"]

SYSTEM: Final = platform.system().lower()
"""This operating system, as kernels are compiled for it: linux, windows, darwin."""

_KEY_BYTES: Final = 20
_SEAL_BYTES: Final = 32


def library_name(tier: str, system: str = SYSTEM) -> str:
    """What the shared library of a tier is called in a packaged program."""
    return f"kernels-{tier}{'.dll' if system == 'windows' else '.so'}"


def has_sources() -> bool:
    """Whether the kernels' sources are here, as they are not in a packaged program."""
    return (Path(__file__).parent / "kernels" / "entry.py").is_file()


def source_key(tier: str, system: str = SYSTEM) -> str:
    """A hash of what decides what kernels do: their sources, tier, system and the processor's architecture."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    others = [root / f"{name}.py" for name in ("build", "control", "operations")]
    for path in sorted([*(root / "kernels").glob("*.py"), *others]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    architecture = platform.machine().lower().replace("amd64", "x86_64")
    digest.update(f"{tier} {system} {architecture}".encode())
    return digest.hexdigest()[:_KEY_BYTES]


def compiler_key(tier: str) -> str:
    """`source_key` and the compiler's version: another compiler makes other code of the same sources.

    Raises:
        PackageNotFoundError: there is no compiler
    """
    digest = hashlib.sha256(source_key(tier).encode())
    for package in ("numba", "llvmlite"):
        digest.update(importlib.metadata.version(package).encode() + b"\0")
    return digest.hexdigest()[:_KEY_BYTES]


def seal(code: bytes, key: str) -> bytes:
    """A file's content: the code, its key, and the SHA-256 that tells whether it is whole."""
    data = code + key.encode()
    return data + hashlib.sha256(data).digest()


def unseal(path: Path) -> tuple[bytes, str] | None:
    """The code and its key, or None when the file is missing, cannot be read or is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    body, digest = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if len(body) <= _KEY_BYTES or hashlib.sha256(body).digest() != digest:
        return None
    return body[:-_KEY_BYTES], body[-_KEY_BYTES:].decode("ascii", "replace")
