"""A stranger's model, opened and proven complete, without reading its weights.

Folders and GGUF files become the same `Source`: a spec, the text layer's
files, and rows of float32 for every tensor of ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.convert.adapter import adapted, base_folder
from engine.convert.files import open_for_reading
from engine.convert.folder import (
    Description,
    Stored,
    describe,
    find_model,
    is_adapter,
    model_files,
    model_name,
    stored_tensors,
    text_files,
)
from engine.convert.quantised import Coded, StoredTensor, check_scheme, is_reordered, plain_tensors
from engine.errors import InputError, ModelFolderError, SettingError, UnsupportedModelError
from engine.models.assignment import Assignment, assign, is_optional
from engine.models.decoder import check_shapes
from engine.models.families import Blueprint, recognise
from engine.models.spec import ModelSpec
from engine.models.store import SourceFile
from engine.models.weights import NO_END_NOTICE
from engine.settings import Sampling, checked
from engine.text.fallback import fallback_for
from engine.text.files import chat_templates
from engine.text.template import ChatTemplate
from engine.text.tokenizer import TOKENIZER_FILES, Tokenizer

__all__ = [
    "NO_TOKENIZER_NOTICE",
    "Source",
    "TensorReader",
    "check_tokenizer",
    "check_vocabulary",
    "defaults_from",
    "end_ids_from",
    "fingerprint",
    "open_source",
    "stamps",
    "with_template",
]

# Of the embedding's rows that tokens have; the rest is padding.
_LEAST_SHARE = 0.75
_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")

REORDERED_NOTICE = (
    "the model was quantised with its columns in the order of importance (g_idx), which is not kept: "
    "at 4 bits they are rounded a second time, at 8 bits hardly"
)
NO_TOKENIZER_NOTICE = "there is no tokenizer, so the model takes and gives token ids, not text"

Rows = NDArray[np.float32]


class TensorReader(Protocol):
    """Tensors of a source under the names of the Hugging Face layout."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """All there are."""

    def kept(self, name: str) -> str:
        """The smallest format that holds the tensor's values as they are: "bf16", "f16" or "f32"."""

    def bytes(self, name: str) -> int:
        """Bytes in the file."""

    def dtype(self, name: str) -> str:
        """The type in the file, for people: "bfloat16", "Q4_1"."""

    def rows(self, name: str, first: int, count: int) -> Rows:
        """Float32 (count, columns); a vector is one row."""

    def coding(self, name: str) -> tuple[str, int] | None:
        """("q4" or "q8", columns that share a scale) of a tensor that is stored as whole numbers."""

    def coded(self, name: str, first: int, count: int) -> Coded:
        """Rows as they are stored, of a tensor that has a coding."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Everything that conversion needs. `assignments` cover every tensor of ours exactly once.

    redundant: (theirs, ours) stored head that repeats the embedding, if the model is honest.
    stamps: size and time of change (ns) of the files, from before they were read.
    """

    path: Path
    kind: Literal["folder", "gguf"]
    name: str
    spec: ModelSpec
    assignments: tuple[Assignment, ...]
    redundant: tuple[tuple[str, str], ...]
    reader: TensorReader = field(repr=False)
    files: Mapping[str, bytes] = field(repr=False)
    end_ids: frozenset[int]
    defaults: Mapping[str, float | int]
    licence: str
    licence_text: str = field(repr=False)
    fingerprints: tuple[SourceFile, ...]
    stamps: Mapping[Path, tuple[int, int]]
    notices: tuple[str, ...]

    @property
    def stamp(self) -> str:
        """Differs when the files were changed, even to the same sizes."""
        return " ".join(f"{file.name}:{size}:{time_ns}" for file, (size, time_ns) in self.stamps.items())

    def check_unchanged(self) -> None:
        """What was read so far is of one version.

        Raises:
            ModelFolderError: names the file that was written to meanwhile, or is gone
        """
        now = stamps(self.stamps)
        for file, known in self.stamps.items():
            if now.get(file) != known:
                raise ModelFolderError(f"{file} was changed while it was read; start again when nothing writes to it")

    def kept(self, assignment: Assignment) -> str:
        """The format that holds a tensor of ours exactly: what all its parts are in, else float32."""
        kinds = {"f32" if part.unit else self.reader.kept(part.name) for part in assignment.parts}
        return kinds.pop() if len(kinds) == 1 else "f32"

    def bytes(self, assignment: Assignment) -> int:
        """Bytes that will be read for it."""
        return sum(self.reader.bytes(source) for source in assignment.sources)

    def rows(self, assignment: Assignment, first: int, count: int) -> Rows:
        """Rows of the stacked tensor, float32 (count, cols); a vector is one row of all its parts."""
        columns = assignment.tensor.cols
        spans = assignment.spans()
        if assignment.tensor.role == "vector":
            values = np.concatenate([part.vector(self.reader, end - begin) for part, begin, end in spans])
            return values.reshape(1, -1)
        pieces = []
        for part, begin, end in spans:
            low, high = max(first, begin), min(first + count, end)
            if low < high:
                pieces.append(part.read(self.reader, low - begin, high - low, columns))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    @property
    def formats(self) -> tuple[Mapping[str, str], Mapping[str, tuple[str, int]]]:
        """What `recipe` wants to know: the kept format of every tensor of ours, and the coding of those with one."""
        kept = {assignment.tensor.name: self.kept(assignment) for assignment in self.assignments}
        codings = {assignment.tensor.name: self.coding(assignment) for assignment in self.assignments}
        return kept, {name: coding for name, coding in codings.items() if coding is not None}

    def coding(self, assignment: Assignment) -> tuple[str, int] | None:
        """("q4" or "q8", columns that share a scale) when all parts are stored as such whole numbers."""
        codings = [self.reader.coding(part.name) if part.is_rows else None for part in assignment.parts]
        known = [coding for coding in codings if coding is not None]
        group = min((group for _, group in known), default=0)
        whole = [theirs % group for _, theirs in known if theirs < assignment.tensor.cols]
        if len(known) < len(codings) or len({levels for levels, _ in known}) > 1 or any(whole):
            return None
        return known[0][0], group

    def coded(self, assignment: Assignment, first: int, count: int, group: int) -> Coded:
        """Rows of the stacked tensor as they are stored, with a scale for each `group` of columns."""
        pieces = []
        for part, begin, end in assignment.spans():
            low, high = max(first, begin), min(first + count, end)
            if low < high:
                coding = self.reader.coding(part.name)
                assert coding is not None
                begins, length, rows = part.span(low - begin, high - low)
                piece = self.reader.coded(part.name, begins, length)
                times, groups = -(-coding[1] // group), -(-assignment.tensor.cols // group)
                scales, zeros = (
                    None if grid is None else np.repeat(grid, times, axis=1)[rows, :groups] for grid in piece[1:]
                )
                assert scales is not None
                pieces.append(Coded(piece.codes[rows], scales, zeros))
        zeros = None if pieces[0].zeros is None else np.concatenate([piece.zeros for piece in pieces])
        return Coded(
            np.concatenate([piece.codes for piece in pieces]), np.concatenate([piece.scales for piece in pieces]), zeros
        )

    def name_at(self, assignment: Assignment, row: int) -> str:
        """Their name of the tensor that one of our rows comes from."""
        for part, begin, end in assignment.spans():
            if begin <= row < end:
                return part.name
        return assignment.parts[0].name


def open_source(path: Path) -> Source:
    """A folder or GGUF file, understood and checked as far as is possible without reading weights.

    Raises:
        InputError: and its kinds, each one sentence that names the file and the reason
    """
    found = find_model(path)
    if found.kind == "gguf":
        from engine.convert.gguf import open_gguf

        source = open_gguf(found.path, found.notices)
        check_shapes(source.spec)
        return source
    if found.kind != "folder":
        raise InputError(f"{found.path} is a .nook file already")
    adapter = found.path if is_adapter(found.path) else None
    folder = found.path if adapter is None else base_folder(adapter)
    before = stamps(file for around in {folder, found.path} for file in model_files(around))
    description = describe(folder)
    check_scheme(description.quantisation)
    blueprint = recognise(description.config)
    check_shapes(blueprint.spec)
    source = _open_folder(folder, description, blueprint, stored_tensors(folder), before=before, adapter=adapter)
    return _with_tokenizer(replace(source, notices=(*found.notices, *source.notices)))


def _open_folder(
    folder: Path,
    description: Description,
    blueprint: Blueprint,
    stored: Stored,
    *,
    before: Mapping[Path, tuple[int, int]],
    adapter: Path | None,
) -> Source:
    """The source that a folder's description and tensors make together, and perhaps an adapter's folder.

    Raises:
        ModelFolderError, UnsupportedModelError: they do not belong together, or are not plain weights
    """
    spec = blueprint.spec
    lacking = sorted({file for name, file in stored.absent.items() if not is_optional(name, blueprint)})
    if lacking:
        raise ModelFolderError(f"{', '.join(lacking)} of {folder.name} is missing: the download is incomplete")
    tensors = plain_tensors(stored.entries, description.quantisation)
    if adapter is not None:
        tensors = adapted(tensors, adapter)
    assignments = assign(blueprint, {name: tensor.shape for name, tensor in tensors.items()})
    for assignment in assignments.tensors:
        for name in assignment.sources:
            if not tensors[name].kept:
                raise UnsupportedModelError(
                    f"{name[:100]} is stored as {tensors[name].dtype}, which is no weight; "
                    "get the model's BF16 or FP16 folder"
                )
    absent = sorted({f"{file} is not there; it holds only layers that are not used" for file in stored.absent.values()})
    end_ids, end_notices = end_ids_from(
        {
            "config.json": description.config.get("eos_token_id"),
            "generation_config.json": description.generation.get("eos_token_id"),
        },
        spec.vocab_size,
    )
    defaults, default_notices = defaults_from(description.generation)
    used = [folder / "config.json", *sorted({entry.path for entry in stored.entries.values()})]
    used += [] if adapter is None else model_files(adapter)
    reordered = (REORDERED_NOTICE,) if any(map(is_reordered, tensors.values())) else ()
    merged = () if adapter is None else (f"{model_name(adapter)} was put into {folder}, the model it changes",)
    return Source(
        path=adapter or folder,
        kind="folder",
        name=model_name(adapter or folder),
        spec=spec,
        assignments=assignments.tensors,
        redundant=assignments.redundant,
        reader=_FolderReader(tensors),
        files={**description.files, **({} if adapter is None else text_files(adapter))},
        end_ids=end_ids,
        defaults=defaults,
        licence=description.licence,
        licence_text=description.licence_text,
        fingerprints=tuple(fingerprint(file) for file in used),
        stamps={file: before.get(file, (0, 0)) for file in used},
        notices=(
            *merged,
            *reordered,
            *blueprint.notices,
            *stored.notices,
            *assignments.notices,
            *absent,
            *end_notices,
            *default_notices,
        ),
    )


def end_ids_from(sources: Mapping[str, Any], vocab_size: int) -> tuple[frozenset[int], list[str]]:
    """The union of end tokens that several files name (a number, a list, or null), and notices on what was dropped."""
    found: set[int] = set()
    notices: list[str] = []
    for where, value in sources.items():
        good: list[int] = []
        wrong: list[Any] = []
        for entry in value if isinstance(value, list) else [value]:
            if entry is not None:
                (good if type(entry) is int and 0 <= entry < vocab_size else wrong).append(entry)
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            shown = str(wrong[0])[:40]
            notices.append(f"{where} names the end token {shown}{more}, which is no token of the model; it is ignored")
        found.update(good)
    return frozenset(found), notices


def defaults_from(generation: Mapping[str, Any]) -> tuple[dict[str, float | int], list[str]]:
    """Sampling settings of a `generation_config.json` under our names, and notices on those we cannot follow."""
    defaults: dict[str, float | int] = {}
    notices: list[str] = []
    for key in _SAMPLING_KEYS:
        value = generation.get(key)
        if value is None:
            continue
        try:
            defaults[key] = getattr(checked(Sampling, {key: value}, "generation_config.json"), key)
        except SettingError as error:
            notices.append(f"{error}; the usual setting is taken")
    if generation.get("do_sample") is False:
        # Says that the author wants the likeliest token, whatever else is written beside it.
        defaults["temperature"] = 0.0
    return defaults, notices


def fingerprint(file: Path) -> SourceFile:
    """What a source file is known by: its length, and a hash of its first 64 kB, where every header begins."""
    with open_for_reading(file) as opened:
        digest = hashlib.sha256(opened.read(1 << 16)).hexdigest()
        return SourceFile(file.name, opened.seek(0, 2), digest)


def stamps(files: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Size and time of change (ns) of the files that are there; one of both changes when a file is written to."""
    found = {}
    for file in files:
        with suppress(OSError):
            status = file.stat()
            found[file] = (status.st_size, status.st_mtime_ns)
    return found


def check_tokenizer(path: Path, files: Mapping[str, bytes]) -> None:
    """A model that is to be kept must have something to read text with.

    Raises:
        ModelFolderError: it has not
    """
    if not _has_tokenizer(files):
        raise ModelFolderError(
            f"{path} has no tokenizer (tokenizer.json or tokenizer.model), so nobody can chat with it; "
            "copy it there from the model that was trained"
        )


def _has_tokenizer(files: Mapping[str, bytes]) -> bool:
    return any(name in files for name in TOKENIZER_FILES)


def check_vocabulary(rows: int, tokens: Mapping[int, str]) -> None:
    """Every token must have a row of the embedding; rows without a token are common padding.

    tokens: text of those beyond the rows, by id

    Raises:
        ModelFolderError: names some
    """
    if tokens:
        named = ", ".join(f"{text[:40]} = {number}" for number, text in sorted(tokens.items())[:5])
        more = f" and {len(tokens) - 5} more" if len(tokens) > 5 else ""
        raise ModelFolderError(
            f"the tokenizer has tokens ({named}{more}) beyond the {rows} rows of the model's embedding: "
            "tokenizer and weights are of different versions"
        )


def _with_tokenizer(source: Source) -> Source:
    """The source with the tokenizer's end tokens, both vocabularies proven to fit each other."""
    if not _has_tokenizer(source.files):
        return replace(source, notices=(*source.notices, NO_TOKENIZER_NOTICE))
    tokenizer = Tokenizer.from_files(source.files)
    rows = source.spec.vocab_size
    beyond = ((number, tokenizer.token(number)) for number in range(rows, tokenizer.vocab_size))
    check_vocabulary(rows, {number: token for number, token in beyond if token is not None})
    if tokenizer.vocab_size < _LEAST_SHARE * rows:
        said = f"the tokenizer has {tokenizer.vocab_size} tokens for a model of {rows}: it may be another model's"
        source = replace(source, notices=(*source.notices, said))
    source = with_template(replace(source, end_ids=source.end_ids | tokenizer.end_ids), tokenizer.token_to_id)
    template = ChatTemplate.from_files(source.files)
    if template.completion and chat_templates(source.files):
        source = replace(source, notices=(*source.notices, *template.notices))
    # What the template writes after an answer ends it, too.
    if not source.end_ids and tokenizer.leading_control(template.after_answer) is None:
        source = replace(source, notices=(*source.notices, NO_END_NOTICE))
    return source


def with_template(source: Source, id_of: Callable[[str], int | None]) -> Source:
    """The source with a chat template that suits it, if it was trained to chat and its own is missing or broken.

    id_of: the id of a token, None for a text that is none
    """
    own = ChatTemplate.from_files(source.files)
    if not own.completion:
        return source
    fallback = fallback_for(
        source.name,
        source.spec.family,
        lambda token: id_of(token) is not None,
        lambda token: id_of(token) in source.end_ids,
    )
    if fallback is None:
        return source
    broken = own.notices if chat_templates(source.files) else ()
    said = f"this model came without a usable chat template; the one of {fallback.name} is taken, after its tokens"
    files = {**source.files, "chat_template.jinja": fallback.template.encode()}
    return replace(source, files=files, notices=(*source.notices, *broken, said))


class _FolderReader:
    """The tensors of a folder."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def kept(self, name: str) -> str:
        return self._tensors[name].kept

    def bytes(self, name: str) -> int:
        return self._tensors[name].bytes

    def dtype(self, name: str) -> str:
        return self._tensors[name].dtype

    def rows(self, name: str, first: int, count: int) -> Rows:
        return self._tensors[name].rows(first, count)

    def coding(self, name: str) -> tuple[str, int] | None:
        return self._tensors[name].coding

    def coded(self, name: str, first: int, count: int) -> Coded:
        return self._tensors[name].coded(first, count)
