"""Characters to ids and back, whatever kind of files a model's tokenizer comes in.

Content, that is what people and documents say, never becomes a control token,
while a chat template's own text does. Knows vocabularies, not models.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.errors import ModelFolderError, UnsupportedModelError
from engine.text.added import Added, Control, Declared, Finder, declared_tokens, swallowed
from engine.text.files import Files, chat_templates, json_object, special_tokens, text_of
from engine.text.pipeline import Pipeline, byte_level_document
from engine.text.ranks import RANK_FILES, has_ranks, ranked_document, tekken_document
from engine.text.sentencepiece_model import SentencePieceModel
from engine.text.spelling import Spelling
from engine.text.words import WORDS

__all__ = ["TOKENIZER_FILES", "Detokenizer", "Piece", "Tokenizer"]

# How the reference classes split text whose folder has vocab.json and merges.txt only.
_BYTE_LEVEL_CLASSES = {"GPT2Tokenizer": "gpt-2", "GPTNeoXTokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}

# Special tokens that ChatGLM2's and 3's own program appends to the vocabulary.
_CHATGLM_TOKENS = (
    *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)
TOKENIZER_FILES = ("tokenizer.json", *RANK_FILES, "tekken.json", "spiece.model", "vocab.json")
"""Files that a vocabulary can be made of; the first that is there is taken."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a prompt. `is_content`: somebody said it; otherwise the template wrote it."""

    text: str
    is_content: bool


class _Vocabulary(Protocol):
    """What a kind of tokenizer file offers; see `Pipeline` and `SentencePieceModel`."""

    added: tuple[Added, ...]
    spelling: Spelling
    vocab_size: int
    missing_ids: tuple[int, ...]
    unk_id: int | None
    around: tuple[tuple[int, ...], tuple[int, ...]]
    end_ids: frozenset[int]

    def raw(self, text: str) -> list[int]: ...
    def plain(self, text: str, *, at_start: bool) -> list[int]: ...
    def token(self, token_id: int) -> str | None: ...
    def id_of(self, token: str) -> int | None: ...
    def merged(self, spelling: str) -> list[int]: ...


class Tokenizer:
    """A model's tokenizer.

    bos_id: the token that begins a text; None when the files name none.
    end_ids: tokens that the files declare to end a text.
    special_ids: tokens that are not shown.
    control_ids: tokens that content never becomes; see `Control`. All special ones are among them.
    vocab_size: the highest id plus one.
    missing_ids: ids below `vocab_size` without a token.
    """

    def __init__(self, vocabulary: _Vocabulary, files: Files, control: Control) -> None:
        """Use `from_files`."""
        self._vocabulary = vocabulary
        named = special_tokens(files)
        config = json_object(files, "tokenizer_config.json")
        before, after = vocabulary.around
        bos, eos = vocabulary.id_of(named.get("bos_token", "")), vocabulary.id_of(named.get("eos_token", ""))
        self.bos_id: int | None = bos if bos is not None else next(iter(before), None)
        self.end_ids: frozenset[int] = vocabulary.end_ids if eos is None else frozenset([eos])
        adds_bos = config.get("add_bos_token")
        if adds_bos is True and self.bos_id is not None and self.bos_id not in before:
            before = (self.bos_id, *before)
        elif adds_bos is False:
            before = tuple(token_id for token_id in before if token_id != self.bos_id)
        self._before, self._after = before, after
        self._control = Finder(token for token in vocabulary.added if control(token))
        self.control_ids: frozenset[int] = frozenset(token.id for token in vocabulary.added if control(token))
        self.special_ids: frozenset[int] = frozenset(token.id for token in vocabulary.added if token.special)
        self._forbidden = self.control_ids - {vocabulary.unk_id}
        self.vocab_size: int = vocabulary.vocab_size
        self.missing_ids: tuple[int, ...] = vocabulary.missing_ids
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_files(cls, files: Files) -> Tokenizer:
        """The tokenizer that `files`, bytes by name, describe.

        The first of `TOKENIZER_FILES` that is there is taken; vocab.json wants
        merges.txt beside it. tokenizer_config.json, special_tokens_map.json,
        added_tokens.json and the chat template complete each of them and may
        all be absent.

        Raises:
            ModelFolderError: a file is missing or damaged
            UnsupportedModelError: it asks for something that Inglenook does not do, which is named
        """
        control = Control("\0".join(chat_templates(files).values()))
        declared = declared_tokens(files)
        name = next((name for name in TOKENIZER_FILES if name in files), None)
        vocabulary: _Vocabulary
        if name == "tokenizer.json":
            vocabulary = Pipeline(files[name], declared, control)
        elif name == "tekken.json":
            vocabulary = Pipeline(tekken_document(files), declared, control)
        elif name in RANK_FILES and has_ranks(files[name]):
            vocabulary = Pipeline(ranked_document(files, name, declared), declared, control)
        elif name == "vocab.json" and "merges.txt" in files:
            vocabulary = Pipeline(_document_from_merges(files), declared, control)
        elif name in {"tokenizer.model", "spiece.model"}:
            vocabulary = _sentencepiece(files, name, declared, control)
        else:
            raise ModelFolderError(
                "the tokenizer is missing: tokenizer.json, tokenizer.model, or vocab.json and merges.txt must be there"
            )
        return cls(vocabulary, files, control)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: FBT001, FBT002 - the reference's signature
        """Ids of a text as it stands: control tokens written in it are recognised.

        add_special_tokens: put around it what the post-processor of
        tokenizer.json puts there; `add_bos_token` has the last word on the
        beginning token. (`add_eos_token` is for training: nobody goes on with
        a text that has ended.)
        """
        ids = self._vocabulary.raw(_sound(text))
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def encode_pieces(self, pieces: Iterable[Piece], *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a prompt made of template text and content.

        The ids are those of the joined text, except that no control token is
        recognised where content takes part in its characters: those are
        encoded as the ordinary text they are. Added tokens that are no
        control tokens (see `Control`) are recognised everywhere.
        """
        sound = [Piece(_sound(piece.text), piece.is_content) for piece in pieces]
        text = "".join(piece.text for piece in sound)
        ids = list(self._before) if add_special_tokens else []
        position = 0
        for begin, end in _template_runs(sound):
            for start, stop, token in self._control.find(text, begin, end):
                if start < position:
                    continue  # swallowed by the one before
                left, right = swallowed(text, start, stop, token, position)
                ids += self._ordinary(text[position:left], at_start=position == 0)
                ids.append(token.id)
                position = right
        ids += self._ordinary(text[position:], at_start=position == 0)
        return [*ids, *self._after] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:  # noqa: FBT001, FBT002 - the reference's signature
        """The text of `ids`; special tokens are left out unless `skip_special` is false.

        Bytes that are no UTF-8 become U+FFFD, but a character that is cut off
        by the end is left out: it may still be coming. Ids without a token
        have no text.
        """
        return self.detokenizer(skip_special=skip_special).feed(ids)

    def detokenizer(self, *, skip_special: bool = True, shown: Collection[int] = ()) -> Detokenizer:
        """A decoder for one text that comes bit by bit. shown: special tokens that are not left out."""
        skipped = self.special_ids.difference(shown) if skip_special else frozenset[int]()
        return Detokenizer(self._vocabulary, self.token_bytes, skipped)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; those of its name for a special token, none for an unknown id.

        The first token of a text may add less: Llama's vocabulary writes the
        space before a word, and the first space is not shown.
        """
        known = self._bytes.get(token_id)
        if known is None:
            token = self._vocabulary.token(token_id)
            known = self._bytes[token_id] = b"" if token is None else self._vocabulary.spelling.bytes_of(token)
        return known

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it (`Ġworld`, `▁world`); None for an id without one."""
        return self._vocabulary.token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it; None when there is none."""
        return self._vocabulary.id_of(token)

    def leading_control(self, text: str) -> int | None:
        """The id of the control token that `text`, white space apart, begins with; None for other text."""
        start = len(text) - len(text.lstrip())
        first = next(self._control.find(text, start, len(text)), None)
        return first[2].id if first and first[0] == start else None

    def _ordinary(self, text: str, *, at_start: bool) -> list[int]:
        """Ids of a text without control tokens, even if the model's own vocabulary could spell one."""
        if not text:
            return []
        ids = self._vocabulary.plain(text, at_start=at_start)
        if self._forbidden.isdisjoint(ids):
            return ids
        spelt: list[int] = []
        for token_id in ids:
            spelt += self._in_parts(token_id) if token_id in self._forbidden else [token_id]
        return spelt

    def _in_parts(self, token_id: int) -> list[int]:
        """Ids that spell the same characters as a control token without being one."""
        token = self._vocabulary.token(token_id) or ""
        if len(token) < 2:
            spelt = [self._vocabulary.id_of(f"<0x{byte:02X}>") for byte in self.token_bytes(token_id)]
            return [i for i in spelt if i is not None] or [i for i in [self._vocabulary.unk_id] if i is not None]
        ids: list[int] = []
        middle = len(token) // 2
        for half in (token[:middle], token[middle:]):
            for part in self._vocabulary.merged(half):
                ids += self._in_parts(part) if part in self._forbidden else [part]
        return ids


class Detokenizer:
    """Ids to text, bit by bit; however the ids are cut, the text is that of `Tokenizer.decode`.

    Costs the same per token at the end of a long answer as at its beginning.
    """

    def __init__(self, vocabulary: _Vocabulary, bytes_of: Callable[[int], bytes], skipped: frozenset[int]) -> None:
        """Use `Tokenizer.detokenizer`."""
        self._vocabulary = vocabulary
        self._bytes_of = bytes_of
        self._skipped = skipped
        self._characters: Any = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._front = vocabulary.spelling.front
        self._is_first = True

    def feed(self, ids: Iterable[int]) -> str:
        """The text that `ids` add; half a character waits for its other half."""
        parts: list[bytes] = []
        for token_id in ids:
            if token_id in self._skipped:
                continue
            if self._is_first and (token := self._vocabulary.token(token_id)) is not None:
                self._is_first = False
                parts.append(self._vocabulary.spelling.first_bytes_of(token))
            else:
                parts.append(self._bytes_of(token_id))
        text: str = self._characters.decode(b"".join(parts))
        while self._front and text:
            if text[0] == self._vocabulary.spelling.front_sign:
                self._front -= 1
                text = text[1:]
            else:
                self._front = 0
        return text


def _template_runs(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """(begin, end) of each stretch of the joined text that only the template wrote."""
    runs: list[tuple[int, int]] = []
    position = 0
    for piece in pieces:
        end = position + len(piece.text)
        if piece.text and not piece.is_content:
            if runs and runs[-1][1] == position:
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((position, end))
        position = end
    return runs


def _sound(text: str) -> str:
    """The text without lone surrogates, which UTF-8 cannot hold and clients send nevertheless."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _sentencepiece(files: Files, name: str, declared: list[Declared], control: Control) -> SentencePieceModel:
    config = json_object(files, "tokenizer_config.json")
    known = {token.content for token in declared}
    if config.get("tokenizer_class") == "ChatGLMTokenizer":
        declared = [*declared, *(Declared(content, None, True) for content in _CHATGLM_TOKENS if content not in known)]
    return SentencePieceModel(files[name], declared, control, legacy=config.get("legacy") is not False)


def _document_from_merges(files: Files) -> bytes:
    """A tokenizer.json made of vocab.json and merges.txt, for the classes whose way of splitting text is known."""
    name = json_object(files, "tokenizer_config.json").get("tokenizer_class")
    kind = str(name).removesuffix("Fast")
    if kind not in _BYTE_LEVEL_CLASSES:
        raise UnsupportedModelError(
            f"vocab.json and merges.txt do not say how {name or 'the tokenizer'} splits text; "
            "put the model's tokenizer.json beside them"
        )
    vocabulary = json_object(files, "vocab.json")
    if not vocabulary or not all(isinstance(token_id, int) for token_id in vocabulary.values()):
        raise ModelFolderError("vocab.json is no table from token to id: fetch it again")
    merges: list[tuple[str, str]] = []
    for line in text_of(files, "merges.txt").splitlines():
        left, space, right = line.partition(" ")
        if space and not line.startswith("#version"):
            merges.append((left, right))
    return byte_level_document(vocabulary, merges, WORDS[_BYTE_LEVEL_CLASSES[kind]])
