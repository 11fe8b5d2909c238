"""A tokenizer.model: a SentencePiece vocabulary, used as the reference's slow Llama tokenizer uses it.

Text between added tokens is encoded by the library, which puts a space before
each such part ("legacy"), or before the first only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import sentencepiece

from engine.errors import InputError, ModelFolderError
from engine.text.added import Added, Declared, Finder, size_and_gaps, swallowed
from engine.text.files import LARGEST_FILE
from engine.text.spelling import SPACE_SIGN, Spelling

__all__ = ["SentencePieceModel"]

# ModelProto.normalizer_spec (field 3) with add_dummy_prefix (its field 3) false: a message that is appended to another
# of its kind is merged into it.
_NO_PREFIX = bytes([3 << 3 | 2, 2, 3 << 3 | 0, 0])


class SentencePieceModel:
    """The vocabulary and encoders of one tokenizer.model; the same face as `Pipeline`.

    end_ids: what the model itself calls the end of a text.
    """

    def __init__(
        self, model: bytes, declared: Sequence[Declared], is_control: Callable[[Added], bool], *, legacy: bool
    ) -> None:
        """Load `model`; tokens for which `is_control` holds are not met in `plain`.

        legacy: a space is put before every part of a text, not only the first.

        Raises:
            ModelFolderError: the file is damaged
        """
        if len(model) > LARGEST_FILE:
            raise ModelFolderError(f"tokenizer.model has {len(model) >> 20} MB; no tokenizer is that large")
        try:
            self._prefixing = sentencepiece.SentencePieceProcessor(model_proto=model)
            self._bare = sentencepiece.SentencePieceProcessor(model_proto=model + _NO_PREFIX)
        except RuntimeError:
            raise ModelFolderError("tokenizer.model is no SentencePiece model: fetch it again") from None
        self._legacy = legacy
        begun = self._prefixing.encode("a") != self._bare.encode("a")
        self._prefix = SPACE_SIGN if begun else ""
        count = self._bare.get_piece_size()
        pieces = [self._bare.id_to_piece(i) for i in range(count)]
        self._pieces: dict[int, str] = dict(enumerate(pieces))
        self._ids = {piece: i for i, piece in reversed(self._pieces.items())}
        self.unk_id: int | None = self._bare.unk_id()
        bos, eos = self._bare.bos_id(), self._bare.eos_id()
        self.around: tuple[tuple[int, ...], tuple[int, ...]] = ((bos,) if bos >= 0 else (), ())
        self.end_ids = frozenset([eos] if eos >= 0 else [])
        self.added = self._all_added(declared)
        for token in self.added:
            self._pieces[token.id] = token.content
            self._ids.setdefault(token.content, token.id)
        self.vocab_size, self.missing_ids = size_and_gaps(self._pieces, "tokenizer.model")
        self.spelling = Spelling(replacements=((SPACE_SIGN, " "),), byte_fallback=True, front=int(begun))
        self._everything = Finder(self.added)
        self._words = Finder(token for token in self.added if not is_control(token))

    def raw(self, text: str) -> list[int]:
        """Ids of `text`; added tokens in it are recognised."""
        return self._between(self._everything, text, at_start=True)

    def plain(self, text: str, *, at_start: bool) -> list[int]:
        """Ids of a part of a text in which no control token is recognised."""
        return self._between(self._words, text, at_start=at_start)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of an id."""
        return self._pieces.get(token_id)

    def id_of(self, token: str) -> int | None:
        """The id of a token in the vocabulary's spelling."""
        return self._ids.get(token)

    def merged(self, spelling: str) -> list[int]:
        """What the model alone makes of a string in the vocabulary's spelling."""
        ids: list[int] = self._bare.encode(spelling)
        return ids

    def _all_added(self, declared: Sequence[Declared]) -> tuple[Added, ...]:
        found: dict[int, Added] = {}
        for token_id, piece in self._pieces.items():
            if self._bare.is_control(token_id) or self._bare.is_unknown(token_id):
                found[token_id] = Added(token_id, piece)
        following = max([len(self._pieces), *(1 + token.id for token in declared if token.id is not None)])
        for token in declared:
            wanted = self._ids.get(token.content, token.id)
            if wanted is None or self._taken(found, wanted) not in {None, token.content}:
                wanted, following = following, following + 1
            flags = token.flags or Added(wanted, token.content)
            special = token.special or (wanted in found and found[wanted].special)
            found[wanted] = replace(flags, id=wanted, special=special)
        return tuple(found[token_id] for token_id in sorted(found))

    def _taken(self, found: Mapping[int, Added], token_id: int) -> str | None:
        return found[token_id].content if token_id in found else self._pieces.get(token_id)

    def _between(self, finder: Finder, text: str, *, at_start: bool) -> list[int]:
        ids: list[int] = []
        position = 0
        for start, stop, token in finder.find(text, 0, len(text)):
            if start < position:
                continue
            left, right = swallowed(text, start, stop, token, position)
            ids += self._part(text[position:left], first=at_start and position == 0)
            ids.append(token.id)
            position = right
        return ids + self._part(text[position:], first=at_start and position == 0)

    def _part(self, text: str, *, first: bool) -> list[int]:
        if not text:
            return []
        try:
            if self._legacy:
                ids: list[int] = self._prefixing.encode(text)
            else:
                ids = self._bare.encode(self._prefix + text if first else text)
        except RuntimeError as error:
            raise InputError(f"the tokenizer cannot split this text ({error})") from None
        return ids
