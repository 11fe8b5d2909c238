"""A tokenizer.json, executed by the `tokenizers` library as it stands, and what else there is to know of it.

The file comes from strangers: it is bounded in size and growth, a step that is
not known is refused by name, and a failure of the library is one sentence.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import tokenizers

from engine.errors import InputError, ModelFolderError, UnsupportedModelError
from engine.text.added import Added, Declared, size_and_gaps
from engine.text.files import LARGEST_FILE
from engine.text.spelling import SPACE_SIGN, Spelling, spelling_of
from engine.text.words import Words

__all__ = ["Pipeline", "byte_level_document", "spaced_document"]

# One text at a time needs no second thread; the library's pool of threads would also complain in every forked process.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Every kind of component that the library, or `spelling_of`, can name.
_KNOWN_STEPS = frozenset(
    """
    BPE Unigram WordLevel WordPiece
    BertNormalizer Lowercase NFC NFD NFKC NFKD Nmt Precompiled Prepend Replace Strip StripAccents
    BertPreTokenizer ByteLevel CharDelimiterSplit Digits FixedLength Metaspace Punctuation Sequence Split
    UnicodeScripts Whitespace WhitespaceSplit
    BertProcessing RobertaProcessing TemplateProcessing
    BPEDecoder ByteFallback CTC Fuse
    """.split()  # noqa: SIM905 - a list would fill the page
)
# A normaliser that makes a text longer than this many times is no normaliser.
_MOST_GROWTH = 4096
_MOST_TOKENS_AROUND_TEXT = 64
# A sound pattern splits any of these in microseconds; one that backtracks without end takes the library's full
# patience, a tenth of a second.
_REGEX_TRIALS = tuple(sign * 40 + tail for sign in "aA1 .\n" for tail in ("", "!", "z"))
_REGEX_PATIENCE_S = 0.05


class Pipeline:
    """The vocabulary and encoders of one tokenizer.json.

    added: every added token, those of the files beside tokenizer.json merged in.
    spelling: how its tokens spell text.
    vocab_size, missing_ids: as in `Tokenizer`.
    unk_id: what the model writes for a character it does not know; None for no such token.
    around: ids that belong before and after a text of its own.
    """

    end_ids: frozenset[int] = frozenset()  # a tokenizer.json names none

    def __init__(self, document: bytes, declared: Sequence[Declared], is_control: Callable[[Added], bool]) -> None:
        """Load `document`, the bytes of a tokenizer.json; tokens for which `is_control` holds are not met in `plain`.

        Raises:
            ModelFolderError: the file is damaged or contradicts itself
            UnsupportedModelError: it asks for something that Inglenook does not do
        """
        library = self._library = _with_all_tokens(document, declared)
        library.no_truncation()
        library.no_padding()
        if isinstance(library.model, tokenizers.models.BPE):
            library.model.dropout = None  # chance belongs to training
        normalizer, pre_tokenizer = _state(library.normalizer), _state(library.pre_tokenizer)
        _check_growth(normalizer)
        self.spelling: Spelling = spelling_of(
            _state(library.decoder),
            byte_level=any(step["type"] == "ByteLevel" for step in _steps(pre_tokenizer)),
        )
        self.added = tuple(_added(i, token) for i, token in sorted(library.get_added_tokens_decoder().items()))
        ids = library.get_vocab(with_added_tokens=True).values()
        self.vocab_size, self.missing_ids = size_and_gaps(ids, "tokenizer.json")
        unknown = getattr(library.model, "unk_token", None)
        self.unk_id = library.model.token_to_id(unknown) if unknown is not None else self._unigram_unk(document)
        self.around = self._around()
        self._plain_ids: dict[int, int] = {}
        words = [token for token in self.added if not is_control(token)]
        self._at_start = self._without_control(words, pre_tokenizer)
        later = _never_first(pre_tokenizer)
        self._later = self._at_start if later == pre_tokenizer else self._without_control(words, later)
        if any("Regex" in json.dumps(part) for part in (normalizer, pre_tokenizer)):
            self._try_patterns()

    def raw(self, text: str) -> list[int]:
        """Ids of `text` exactly as the reference makes them; added tokens in it are recognised."""
        with _one_sentence(InputError, "the tokenizer cannot split this text"):
            # The batch call lets other threads run meanwhile: a megabyte takes more than a second.
            ids: list[int] = self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def plain(self, text: str, *, at_start: bool) -> list[int]:
        """Ids of a part of a text in which no control token is recognised.

        at_start: whether nothing stands before it, on which a prefix space may depend.
        """
        encoder = self._at_start if at_start else self._later
        with _one_sentence(InputError, "the tokenizer cannot split this text"):
            ids = encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return [self._plain_ids.get(i, i) for i in ids] if self._plain_ids else ids

    def token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of an id."""
        return self._library.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def id_of(self, token: str) -> int | None:
        """The id of a token in the vocabulary's spelling."""
        return self._library.token_to_id(token)

    def merged(self, spelling: str) -> list[int]:
        """What the model alone makes of a string in the vocabulary's spelling."""
        return [token.id for token in self._library.model.tokenize(spelling)]

    def _without_control(self, words: Sequence[Added], pre_tokenizer: Mapping[str, Any] | None) -> tokenizers.Tokenizer:
        """An encoder around the same model whose only added tokens are `words`."""
        encoder = tokenizers.Tokenizer(self._library.model)
        if self._library.normalizer is not None:
            encoder.normalizer = self._library.normalizer
        if pre_tokenizer is not None:
            encoder.pre_tokenizer = _component("pre_tokenizer", pre_tokenizer)
        encoder.add_tokens([_for_library(word) for word in words])
        for word in words:
            given = encoder.token_to_id(word.content)
            if given is not None and given != word.id:
                self._plain_ids[given] = word.id
        return encoder

    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        library = self._library
        if library.num_special_tokens_to_add(is_pair=False) > _MOST_TOKENS_AROUND_TEXT:
            raise UnsupportedModelError("tokenizer.json puts more special tokens around a text than any model wants")
        with _one_sentence(UnsupportedModelError, "the post-processor of tokenizer.json cannot be used"):
            inner, whole = library.encode("a", add_special_tokens=False).ids, library.encode("a").ids
        for start in range(len(whole) - len(inner) + 1):
            stop = start + len(inner)
            if whole[start:stop] == inner:
                return tuple(whole[:start]), tuple(whole[stop:])
        raise UnsupportedModelError(
            "the post-processor of tokenizer.json changes the text itself, which is not followed"
        )

    def _unigram_unk(self, document: bytes) -> int | None:
        if not isinstance(self._library.model, tokenizers.models.Unigram):
            return None
        found = re.search(rb'"unk_id"\s*:\s*(\d+)', document)
        return int(found[1]) if found else None

    def _try_patterns(self) -> None:
        for trial in _REGEX_TRIALS:
            started_s = time.thread_time()
            with _one_sentence(UnsupportedModelError, "tokenizer.json splits text by a pattern that never ends"):
                self._at_start.encode(trial)
            if time.thread_time() - started_s > _REGEX_PATIENCE_S:
                raise UnsupportedModelError("tokenizer.json splits text by a pattern that takes endless time")


def byte_level_document(
    vocabulary: Mapping[str, int],
    merges: Sequence[Sequence[str]],
    words: Words,
    *,
    added: Sequence[Added] = (),
    begins_with: Sequence[str] = (),
) -> bytes:
    """A tokenizer.json for a byte-level BPE whose files have another form.

    begins_with: special tokens that go before every text.
    """
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": words.gpt2}
    # Falcon goes on cutting after bytes were written as characters.
    steps = words.steps if any(step["type"] == "ByteLevel" for step in words.steps) else [*words.steps, last]
    model = {"byte_fallback": False, "unk_token": None, "fuse_unk": False, "ignore_merges": words.whole}
    return _document(
        model | {"vocab": dict(vocabulary), "merges": [list(pair) for pair in merges]},
        normalizer={"type": words.normalizer} if words.normalizer else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*steps]},
        decoder=last,
        added=added,
        begins_with=begins_with,
    )


def spaced_document(
    vocabulary: Mapping[str, int],
    merges: Sequence[Sequence[str]],
    *,
    unknown: str,
    added: Sequence[Added] = (),
    begins_with: Sequence[str] = (),
) -> bytes:
    """A tokenizer.json for a BPE over characters in which `SPACE_SIGN` stands for the space, as Gemma has it."""
    model = {"byte_fallback": True, "unk_token": unknown, "fuse_unk": True, "ignore_merges": False}
    return _document(
        model | {"vocab": dict(vocabulary), "merges": [list(pair) for pair in merges]},
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": SPACE_SIGN},
        pre_tokenizer=None,
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE_SIGN}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        added=added,
        begins_with=begins_with,
    )


def _document(
    model: Mapping[str, Any],
    *,
    added: Sequence[Added],
    begins_with: Sequence[str],
    **components: Mapping[str, Any] | None,
) -> bytes:
    ids: Mapping[str, int] = model["vocab"]
    tokens = [
        {
            name: getattr(token, name)
            for name in ("id", "content", "single_word", "lstrip", "rstrip", "normalized", "special")
        }
        for token in added
    ]
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens, **components}
    if begins_with:
        known = {token.content: token.id for token in added} | dict(ids)
        before = [{"SpecialToken": {"id": content, "type_id": 0}} for content in begins_with]
        sequences = [{"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB")]
        whole["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [*before, sequences[0]],
            "pair": [*before, *sequences],
            "special_tokens": {
                content: {"id": content, "ids": [known[content]], "tokens": [content]}
                for content in begins_with
                if content in known
            },
        }
    empty = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return json.dumps(whole | {"model": {"type": "BPE", **empty, **model}}, ensure_ascii=False).encode()


@contextmanager
def _one_sentence(kind: type[InputError], beginning: str) -> Iterator[None]:
    """Turn whatever the library raises into one error; its panics do not derive from Exception."""
    try:
        yield
    except InputError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise kind(f"{beginning} ({reason})") from None


def _load(document: bytes) -> tokenizers.Tokenizer:
    if len(document) > LARGEST_FILE:
        raise ModelFolderError(f"tokenizer.json has {len(document) >> 20} MB; no tokenizer is that large")
    document = document.removeprefix(b"\xef\xbb\xbf")
    try:
        with _one_sentence(ModelFolderError, "tokenizer.json cannot be used"):
            return tokenizers.Tokenizer.from_buffer(document)
    except ModelFolderError:
        # The library does not say which step it does not know.
        for kind in re.findall(rb'"type"\s*:\s*"(\w{1,80})"', document):
            if kind.decode() not in _KNOWN_STEPS:
                raise UnsupportedModelError(
                    f"tokenizer.json asks for the step {kind.decode()}, which Inglenook does not know"
                ) from None
        raise


def _with_all_tokens(document: bytes, declared: Sequence[Declared]) -> tokenizers.Tokenizer:
    """The library with the added tokens of all files, each under its declared id unless another token has that."""
    library = _load(document)
    _add(library, declared)
    ids = _ids_of_added(document) | {token.content: token.id for token in declared if token.id is not None}
    ids = {content: i for content, i in ids.items() if library.model.id_to_token(i) in {None, content}}
    if all(library.token_to_id(content) == i for content, i in ids.items()) and _is_unambiguous(library):
        return library
    # The library numbers added tokens as they come, even over those of the vocabulary; only the ids of the vocabulary
    # itself are as written, so all are written there.
    values = json.loads(document.decode("utf-8-sig"))
    vocabulary = values["model"]["vocab"]
    if isinstance(vocabulary, dict):
        contents = [token["content"] for token in values.get("added_tokens") or ()] + [
            token.content for token in declared
        ]
        following = 1 + max([*vocabulary.values(), *ids.values()], default=-1)
        for content in dict.fromkeys(contents):
            if content not in vocabulary:
                vocabulary[content] = ids.get(content, following)
                following = max(following, vocabulary[content] + 1)
        library = _load(json.dumps(values).encode())
        _add(library, declared)
    return library


def _add(library: tokenizers.Tokenizer, declared: Sequence[Declared]) -> None:
    """Give the library the tokens that only other files declare, and the flags that these overrule."""
    known = {token.content: token for token in library.get_added_tokens_decoder().values()}
    wanted = []
    for token in declared:
        present = known.get(token.content)
        flags = token.flags or (_added(0, present) if present else Added(0, token.content))
        flags = replace(flags, id=0, special=token.special or bool(present and present.special))
        if present is None or flags != _added(0, present):
            wanted.append(_for_library(flags))
    if wanted:
        with _one_sentence(ModelFolderError, "the added tokens of tokenizer_config.json cannot be used"):
            library.add_tokens(wanted)


def _ids_of_added(document: bytes) -> dict[str, int]:
    """The ids that tokenizer.json gives its added tokens; reading just these spares reading the vocabulary twice."""
    text = document.decode("utf-8-sig", errors="replace")
    found = re.search(r'"added_tokens"\s*:\s*(?=\[)', text)
    try:
        tokens, _ = json.JSONDecoder().raw_decode(text, found.end()) if found else ([], 0)
        return {token["content"]: int(token["id"]) for token in tokens}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ModelFolderError("the added tokens of tokenizer.json cannot be read: fetch it again") from None


def _is_unambiguous(library: tokenizers.Tokenizer) -> bool:
    """Whether no added token has the id of a word of the model."""
    tokens = library.get_added_tokens_decoder().items()
    return all(library.model.id_to_token(i) in {None, token.content} for i, token in tokens)


def _steps(component: Any) -> Iterator[Mapping[str, Any]]:
    """A component and all those inside it."""
    pending = [component]
    while pending:
        step = pending.pop()
        if isinstance(step, Mapping):
            yield step
            if step.get("type") == "Sequence":
                pending += [inner for value in step.values() if isinstance(value, list) for inner in value]


def _state(component: Any) -> dict[str, Any] | None:
    """A component of the library as the JSON it was read from."""
    if component is None:
        return None
    state: dict[str, Any] = json.loads(component.__getstate__())
    return state


def _component(part: str, state: Mapping[str, Any]) -> Any:
    """The inverse of `_state`: the library reads components as parts of a tokenizer only."""
    document = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}, part: state}
    return getattr(tokenizers.Tokenizer.from_str(json.dumps(document)), part)


def _check_growth(normalizer: Mapping[str, Any] | None) -> None:
    growth = 1
    for step in _steps(normalizer):
        if step["type"] == "Replace":
            growth *= max(1, len(step["content"]))
        elif step["type"] == "Prepend":
            growth *= 1 + len(step["prepend"])
        if growth > _MOST_GROWTH:
            raise UnsupportedModelError("tokenizer.json has a normaliser that makes text thousands of times longer")


def _never_first(pre_tokenizer: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The pre-tokenizer as it acts on text that is not the beginning: a prefix space for the beginning is left out."""
    if pre_tokenizer is None:
        return None
    changed = dict(pre_tokenizer)
    if changed.get("prepend_scheme") == "first":
        changed["prepend_scheme"] = "never"
    if changed["type"] == "Sequence":
        changed["pretokenizers"] = [_never_first(step) for step in changed["pretokenizers"]]
    return changed


def _for_library(token: Added) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        special=token.special,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
        normalized=token.normalized,
    )


def _added(token_id: int, token: tokenizers.AddedToken) -> Added:
    return Added(
        token_id, token.content, token.special, token.lstrip, token.rstrip, token.single_word, token.normalized
    )
