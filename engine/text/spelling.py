"""How the tokens of a vocabulary spell text: the decoder of a tokenizer as one function from token to bytes.

Decoders in use differ in four things only: a byte alphabet, a sign for the
space, tokens that are one byte, and a space that is taken off the front. With
these written down, a token's bytes depend on nothing but the token, so that an
answer can be decoded as it grows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import UnsupportedModelError

__all__ = ["BYTE_ALPHABET", "SPACE_SIGN", "Spelling", "spelling_of"]

SPACE_SIGN = "▁"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Printable character -> byte, the table that byte-level vocabularies are written in."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


BYTE_ALPHABET: Mapping[str, int] = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class Spelling:
    """What a decoder does.

    byte_level: tokens are written in `BYTE_ALPHABET`; one that is not stands for itself.
    replacements: (sign, text) pairs, applied to each token in order.
    byte_fallback: `<0xE4>` is the byte E4.
    first_loses: sign that the first token loses wherever it stands in it; "" for none.
    front: how many leading `front_sign` the whole text loses at most.
    """

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    first_loses: str = ""
    front: int = 0
    front_sign: str = " "

    def bytes_of(self, token: str) -> bytes:
        """The bytes that a token adds to the text when it is not the first."""
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for sign, text in self.replacements:
            token = token.replace(sign, text)
        if self.byte_level:
            try:
                return bytes(map(BYTE_ALPHABET.__getitem__, token))
            except KeyError:
                pass
        return token.encode()

    def first_bytes_of(self, token: str) -> bytes:
        """The bytes that a token adds at the beginning of the text, `front` apart."""
        return self.bytes_of(token.replace(self.first_loses, "") if self.first_loses else token)


def spelling_of(decoder: Mapping[str, Any] | None, *, byte_level: bool) -> Spelling:
    """Read `decoder` of a tokenizer.json.

    byte_level: whether the pre-tokenizer writes bytes, which is what counts
    when the file names no decoder.

    Raises:
        UnsupportedModelError: a step that is not one of those above, by name
    """
    if decoder is None:
        if not byte_level:
            raise UnsupportedModelError("tokenizer.json names no decoder, so ids cannot be turned into text")
        return Spelling(byte_level=True)
    spelling, joined = Spelling(), False
    for step in _steps(decoder):
        kind = step.get("type")
        if kind == "ByteLevel" and not joined:
            spelling, joined = replace(spelling, byte_level=True), True
        elif kind == "Fuse":
            joined = True
        elif kind == "ByteFallback" and not joined:
            spelling = replace(spelling, byte_fallback=True)
        elif kind == "Replace" and not joined and "String" in step["pattern"]:
            pair = (step["pattern"]["String"], step["content"])
            spelling = replace(spelling, replacements=(*spelling.replacements, pair))
        elif kind == "Metaspace" and not joined:
            sign = step["replacement"]
            loses = "" if step.get("prepend_scheme") == "never" else sign
            pairs = (*spelling.replacements, (sign, " "))
            spelling = replace(spelling, replacements=pairs, first_loses=loses)
        elif kind == "Strip" and joined and step["stop"] == 0:
            spelling = replace(spelling, front=step["start"], front_sign=step["content"])
        else:
            raise UnsupportedModelError(
                f"tokenizer.json asks for the decoder step {kind} in a way that Inglenook does not follow"
            )
    return spelling


def _steps(component: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if component.get("type") == "Sequence":
        for inner in component["decoders"]:
            yield from _steps(inner)
    else:
        yield component
