"""The `.nook` file: one self-describing file that is mapped into memory and used where it lies.

    0        header   magic, version, where the manifest is, the file's length, SHA-256 of the manifest
    128      files    tokenizer and template files, byte for byte, each on a multiple of 64
    ...      tensors  each on a multiple of 64, each layer on one of 4096, as `core/quant.py` packs them
    ...      manifest JSON, then spaces: room for a fidelity report that changes no other byte
    end-64   footer   magic, the file's length, SHA-256 of the header

Bytes between these are zero, so every byte is vouched for. Header and footer
are written last: a file that was cut short, or never finished, shows it at
once. `writer.py`
writes such files; nothing here knows where weights come from.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import sys
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter

from engine.core.memory import Buffer
from engine.core.quant import ALIGNMENT
from engine.errors import FileDamagedError, InputError, ResourceError
from engine.models.spec import ModelSpec
from engine.models.weights import VECTOR, ModelSource, Tensor, format_label, tensor_bytes
from engine.progress import Progress

__all__ = [
    "FOOTER_BYTES",
    "HEADER_BYTES",
    "Manifest",
    "NookFile",
    "SourceFile",
    "StoredFile",
    "StoredTensor",
    "blocks",
    "copied_nook",
    "footer",
    "header",
    "manifest_room",
    "open_nook",
    "verify",
]

_MAGIC = b"\x89NOOK\r\n\x1a"
_FOOTER_MAGIC = b"NOOKEND\n"
_VERSION = 2
# magic, version, unused, manifest offset, manifest bytes, file bytes, SHA-256 of the manifest
_HEADER = struct.Struct("<8sIIQQQ32s")
HEADER_BYTES = 128
# magic, file bytes, SHA-256 of the header
_FOOTER = struct.Struct("<8sQ32s16x")
FOOTER_BYTES = _FOOTER.size
_LARGEST_MANIFEST = 256 << 20
_STEP = 8 << 20

Bytes = NDArray[np.uint8]
_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Offset = Annotated[int, Field(ge=0, le=1 << 62)]
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_ABSENT = "0" * 64


# --- the manifest ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in the file."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    format: str
    group: Annotated[int, Field(ge=0, le=1 << 20)]
    rows: Annotated[int, Field(ge=1, le=1 << 50)]
    cols: Annotated[int, Field(ge=1, le=1 << 50)]
    exponent: Annotated[int, Field(ge=-126, le=127)]
    offset: _Offset
    bytes: _Offset
    sha256: _Sha256 = _ABSENT


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file kept byte for byte."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: Annotated[str, Field(min_length=1, max_length=255)]
    offset: _Offset
    bytes: _Offset
    sha256: _Sha256


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that the model was made from. sha256: of all of it, or of a weight file's header."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    bytes: _Offset
    sha256: _Sha256


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the file says of itself. `fidelity` is filled in later, into room kept for it."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    spec: ModelSpec
    recipe: dict[str, str | int | float | list[str]]
    end_ids: tuple[Annotated[int, Field(ge=0, le=1 << 24)], ...]
    defaults: dict[str, float | int]
    licence: str
    licence_text: str
    notices: tuple[str, ...]
    source_kind: Literal["folder", "gguf"]
    source: tuple[SourceFile, ...]
    files: tuple[StoredFile, ...]
    tensors: tuple[StoredTensor, ...]
    fidelity: dict[str, Any] | None = field(default=None)

    @property
    def pieces(self) -> list[StoredFile | StoredTensor]:
        """All that lies between header and manifest, in the order of the offsets."""
        return sorted([*self.files, *self.tensors], key=lambda piece: (piece.offset, piece.bytes))

    def to_json(self) -> bytes:
        """As it stands in the file."""
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":")).encode()


@cache
def _manifest_adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


# --- reading --------------------------------------------------------------------------------------------------------


class NookFile:
    """An open `.nook` file: its manifest, and its tensors where they lie in the mapping.

    Opening takes the same time whatever the size: it checks the header, the
    footer, the manifest's hash and every number in the manifest. The tensors'
    own bytes are vouched for by `verify`.
    """

    def __init__(self, path: Path, manifest: Manifest, identity: str, memory: Bytes) -> None:
        self.path = path
        self.manifest = manifest
        self.identity = identity
        self._memory = memory
        self._tensors = {tensor.name: tensor for tensor in manifest.tensors}

    @classmethod
    def open(cls, path: Path) -> NookFile:
        """Map the file read-only.

        Raises:
            InputError: it cannot be opened, or is no `.nook` file
            FileDamagedError: it is cut short, altered, hostile or of another version
        """
        with _opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = _read_header(path, file, size)
            raw = _read_manifest(path, file, head)
            manifest = _checked_manifest(path, raw, head)
            memory = _mapped(path, file, size)
        return cls(path, manifest, head.manifest_sha256.hex(), memory)

    def copy_into_memory(self) -> Iterator[Progress]:
        """Copy what is mapped into memory on huge pages and use that from then on; each Progress is a place to stop.

        A product walks through all weights for every token: on a file's pages of 4 KB, it waits for the address
        cache a third of the time.

        Raises:
            ResourceError: there is no room
        """
        size = self._memory.size
        copy = Buffer(size, self.path.name).view
        slices = [slice(first, min(first + _STEP, size)) for first in range(0, size, _STEP)]
        pool = ThreadPoolExecutor(2)  # one core copies half as fast as the memory can
        try:
            for done, _ in zip(slices, pool.map(lambda at: np.copyto(copy[at], self._memory[at]), slices), strict=True):
                yield Progress("load", done.stop, size, "bytes", self.path.name)
        finally:
            pool.shutdown(cancel_futures=True)
        self._memory = copy

    @property
    def names(self) -> tuple[str, ...]:
        """Tensors in the order of the file."""
        return tuple(self._tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes of all packed tensors."""
        return sum(tensor.bytes for tensor in self.manifest.tensors)

    @property
    def beginning(self) -> bytes:
        """The header, by which another opening of the path knows that it is this file."""
        return self._memory[:HEADER_BYTES].tobytes()

    def offset(self, name: str) -> int:
        """Where a tensor begins in the file."""
        return self._tensors[name].offset

    def tensor(self, name: str) -> Tensor:
        """One of them; KeyError when there is none of that name."""
        at = self._tensors[name]
        data = self._memory[at.offset : at.offset + at.bytes]
        return Tensor(name, at.format, at.group, at.rows, at.cols, at.exponent, data)

    def files(self) -> dict[str, bytes]:
        """Tokenizer and template files, byte for byte."""
        return {
            file.name: self._memory[file.offset : file.offset + file.bytes].tobytes() for file in self.manifest.files
        }


def open_nook(path: Path) -> ModelSource:
    """A `.nook` file as the runtime wants it, mapped.

    Raises:
        InputError, FileDamagedError: as `NookFile.open`
    """
    return _source_of(NookFile.open(path))


def copied_nook(path: Path) -> Generator[Progress, None, ModelSource]:
    """A `.nook` file as the runtime wants it, copied into memory.

    Raises:
        InputError, FileDamagedError: as `NookFile.open`
        ResourceError: there is no room
    """
    file = NookFile.open(path)
    yield from file.copy_into_memory()
    return _source_of(file)


def _source_of(file: NookFile) -> ModelSource:
    manifest = file.manifest
    return ModelSource(
        path=file.path,
        kind="nook",
        name=manifest.name,
        label=format_label(manifest.spec, {at.name: (at.format, at.group) for at in manifest.tensors}),
        spec=manifest.spec,
        weights=file,
        files=file.files(),
        end_ids=frozenset(manifest.end_ids),
        defaults=manifest.defaults,
        licence=manifest.licence,
        licence_text=manifest.licence_text,
        identity=file.identity,
        notices=manifest.notices,
    )


def verify(path: Path) -> Iterator[Progress]:
    """Check every byte; each Progress is a place to stop. Ends normally when all are right.

    Raises:
        InputError: it cannot be opened, or is no `.nook` file
        FileDamagedError: names the tensor, file or part that is damaged
    """
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = _read_header(path, file, size)
        manifest = _checked_manifest(path, _read_manifest(path, file, head), head)
        file.seek(0)
        beginning = file.read(HEADER_BYTES)
        file.seek(size - FOOTER_BYTES)
        if file.read() != footer(beginning, size):
            raise FileDamagedError(f"{path.name} is damaged: its header or footer was altered; convert the model again")
        end = HEADER_BYTES
        for piece in manifest.pieces:
            yield Progress("verify", end, size, "bytes", piece.name)
            _check_zero(path, file, end, piece.offset, f"before {piece.name}")
            digest = hashlib.sha256()
            for done, block in blocks(file, piece.offset, piece.bytes):
                digest.update(block)
                if done < piece.bytes:
                    yield Progress("verify", piece.offset + done, size, "bytes", piece.name)
            if digest.hexdigest() != piece.sha256:
                raise FileDamagedError(f"{path.name} is damaged: {piece.name} was altered; convert the model again")
            end = piece.offset + piece.bytes
        _check_zero(path, file, end, head.manifest_offset, "before the manifest")
        _check_zero(path, file, head.manifest_offset + head.manifest_bytes, size - FOOTER_BYTES, "before the footer")
    yield Progress("verify", size, size, "bytes")


class _Header(NamedTuple):
    magic: bytes
    version: int
    unused: int
    manifest_offset: int
    manifest_bytes: int
    file_bytes: int
    manifest_sha256: bytes


def _opened(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except OSError as error:
        raise InputError(f"{path} cannot be opened: {error.strerror or error}") from None


def _read_header(path: Path, file: BufferedIOBase, size: int) -> _Header:
    raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES or raw[:8] != _MAGIC:
        if raw[:4] == _MAGIC[:4]:
            raise FileDamagedError(
                f"{path.name} is damaged: its header is cut short or altered; convert the model again"
            )
        raise InputError(f"{path.name} is no .nook file: it does not begin like one")
    head = _Header(*_HEADER.unpack_from(raw))
    if head.version > _VERSION:
        raise FileDamagedError(
            f"{path.name} was written by a newer Inglenook (file version {head.version}, this one reads {_VERSION}); "
            "update Inglenook or convert the model again"
        )
    if 0 < head.version < _VERSION:
        raise FileDamagedError(
            f"{path.name} was written by an older Inglenook (file version {head.version}, this one reads {_VERSION}); "
            "convert the model again"
        )
    if head.version != _VERSION or head.unused or any(raw[_HEADER.size :]):
        raise FileDamagedError(f"{path.name} is damaged: its header was altered; convert the model again")
    if head.file_bytes != size:
        raise FileDamagedError(
            f"{path.name} is {size} bytes long, not {head.file_bytes}: it was cut short or altered; copy it again"
        )
    end = head.manifest_offset + head.manifest_bytes
    if (
        not 2 <= head.manifest_bytes <= _LARGEST_MANIFEST
        or head.manifest_offset < HEADER_BYTES
        or end > size - FOOTER_BYTES
    ):
        raise FileDamagedError(f"{path.name} is damaged: its header points outside the file; convert the model again")
    file.seek(size - FOOTER_BYTES)
    magic, file_bytes, _ = _FOOTER.unpack(file.read(FOOTER_BYTES))
    if magic != _FOOTER_MAGIC or file_bytes != size:
        raise FileDamagedError(f"{path.name} is damaged: its footer was cut off or altered; convert the model again")
    return head


def _read_manifest(path: Path, file: BufferedIOBase, head: _Header) -> bytes:
    file.seek(head.manifest_offset)
    raw = file.read(head.manifest_bytes)
    if hashlib.sha256(raw).digest() != head.manifest_sha256:
        raise FileDamagedError(f"{path.name} is damaged: its manifest was altered; convert the model again")
    return raw


def _checked_manifest(path: Path, raw: bytes, head: _Header) -> Manifest:
    """The manifest, every number proven to lie where it may before anything is read or mapped by it."""
    try:
        manifest = _manifest_adapter().validate_json(raw)
        _check_tensors(manifest)
        _check_places(manifest, head.manifest_offset)
    except (ValueError, InputError) as error:
        reason = str(error).splitlines()[0]
        raise FileDamagedError(f"{path.name} cannot be trusted: its manifest is wrong ({reason})") from None
    return manifest


def _check_tensors(manifest: Manifest) -> None:
    """The tensors are those that the spec has, in its order, with their shapes and the bytes of their format."""
    wanted = manifest.spec.tensors()
    if [tensor.name for tensor in manifest.tensors] != [tensor.name for tensor in wanted]:
        raise ValueError("its tensors are not those of its model")
    for tensor, stored in zip(wanted, manifest.tensors, strict=True):
        is_vector = tensor.role == "vector"
        if (
            (stored.rows, stored.cols) != (tensor.rows, tensor.cols)
            or is_vector is not (stored.format == VECTOR)
            or (is_vector and (stored.group or stored.exponent))
            or stored.bytes != tensor_bytes(tensor, stored.format, stored.group)
        ):
            raise ValueError(f"{stored.name[:100]} has an impossible shape, format or size")
    if any(end_id >= manifest.spec.vocab_size for end_id in manifest.end_ids):
        raise ValueError("an end token is outside the vocabulary")


def _check_places(manifest: Manifest, end: int) -> None:
    """No two pieces overlap, and all lie between header and manifest."""
    if len({file.name for file in manifest.files}) != len(manifest.files):
        raise ValueError("two files have one name")
    last, last_name = HEADER_BYTES, "the header"
    for piece in manifest.pieces:
        if piece.offset % ALIGNMENT or piece.offset < last:
            raise ValueError(f"{piece.name[:100]} overlaps {last_name[:100]}")
        last, last_name = piece.offset + piece.bytes, piece.name
    if last > end:
        raise ValueError(f"{last_name[:100]} reaches beyond the file")


def _mapped(path: Path, file: BufferedIOBase, size: int) -> Bytes:
    try:
        if sys.platform == "win32":
            mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        else:
            # Private: shared mappings get no huge pages on Linux.
            mapping = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise ResourceError(f"{path} cannot be mapped into memory: {error}") from None
    return np.frombuffer(mapping, np.uint8)


def blocks(file: BufferedIOBase, offset: int, length: int) -> Iterator[tuple[int, bytes]]:
    """(bytes so far, block) from `offset` on."""
    done = 0
    while done < length:
        file.seek(offset + done)
        block = file.read(min(_STEP, length - done))
        if not block:
            return
        done += len(block)
        yield done, block


def _check_zero(path: Path, file: BufferedIOBase, start: int, end: int, where: str) -> None:
    for _, block in blocks(file, start, end - start):
        if block.strip(b"\0"):
            raise FileDamagedError(f"{path.name} is damaged: the padding {where} was altered; convert the model again")


def header(manifest_offset: int, manifest: bytes, file_bytes: int) -> bytes:
    """The first HEADER_BYTES of a file."""
    digest = hashlib.sha256(manifest).digest()
    return _HEADER.pack(_MAGIC, _VERSION, 0, manifest_offset, len(manifest), file_bytes, digest).ljust(
        HEADER_BYTES, b"\0"
    )


def manifest_room(beginning: bytes) -> tuple[int, int, int]:
    """(offset, bytes with the room that is kept, the file's bytes) of the manifest of a file that begins so."""
    head = _Header(*_HEADER.unpack_from(beginning))
    return head.manifest_offset, head.manifest_bytes, head.file_bytes


def footer(beginning: bytes, file_bytes: int) -> bytes:
    """The last FOOTER_BYTES of a file that begins with this header."""
    return _FOOTER.pack(_FOOTER_MAGIC, file_bytes, hashlib.sha256(beginning).digest())
