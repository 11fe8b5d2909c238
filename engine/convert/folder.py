"""A Hugging Face model folder as a value: what it describes, and which tensors its files hold.

The folder is only ever read. Nothing in it is ever run, and no name inside a
file leads out of the folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.convert.adapter import CONFIGURATION, WEIGHTS
from engine.convert.entry import Entry
from engine.convert.files import plain_name, read_bytes, read_json, what_it_is_instead, within
from engine.convert.pickled import read_pickled
from engine.convert.safetensors import read_header
from engine.errors import InputError, ModelFolderError, UnsupportedModelError
from engine.text.tokenizer import TOKENIZER_FILES

__all__ = [
    "Description",
    "Found",
    "Stored",
    "describe",
    "find_model",
    "is_adapter",
    "model_files",
    "model_name",
    "stored_tensors",
    "text_files",
]

# What the text layer may need, kept byte for byte in our file.
_TEXT_FILES = (
    *TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# Weights in forms that are not read: whole programs' memory, other frameworks' files.
_OTHER_WEIGHTS = (".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".onnx", ".npz", ".tflite")
# Folders of other programs, by a file that only they have.
_OTHER_FOLDERS = {
    "model_index.json": "a pipeline that makes images or sound, no language model",
    "params.json": "a model in its makers' own layout; get its Hugging Face folder",
    "mlc-chat-config.json": "a model compiled for another program; get its Hugging Face folder",
}
_ARCHIVES = (b"PK\x03\x04", b"\x1f\x8b", b"7z\xbc\xaf\x27", b"\x28\xb5\x2f\xfd", b"Rar!", b"\xfd7zXZ", b"BZh")
_LICENCE_FILE = re.compile(r"(licen[cs]e|copying|notice)([-_.].*)?", re.IGNORECASE)
_LONGEST_LICENCE = 1 << 20
_MOST_SUBFOLDERS = 1000


@dataclass(frozen=True, slots=True)
class _Kind:
    """One way to store weights: the single file, the index of several, all that may be such files, who reads them."""

    single: str
    index: str
    file: re.Pattern[str]
    read: Callable[[Path], dict[str, Entry]]


# The first that is there is taken. Trainers leave pickles of another sort beside the weights; these are never opened.
_KINDS = (
    _Kind("model.safetensors", "model.safetensors.index.json", re.compile(r".*\.safetensors"), read_header),
    _Kind(
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        re.compile(r"(pytorch_model.*|adapter_model)\.bin"),
        read_pickled,
    ),
)
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin)")


@dataclass(frozen=True, slots=True)
class Found:
    """Where the model is that a path means. kind: "folder", "gguf" or "nook"."""

    kind: str
    path: Path
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Description:
    """Everything in a folder but the weights.

    quantisation: what the configuration says of a quantiser that the weights have been through.
    files: tokenizer and chat template files by name, byte for byte.
    licence: its name as the README's front matter gives it, else "".
    """

    config: Mapping[str, Any]
    quantisation: Mapping[str, Any]
    generation: Mapping[str, Any]
    files: Mapping[str, bytes]
    licence: str
    licence_text: str


@dataclass(frozen=True, slots=True)
class Stored:
    """The tensors of a folder's files.

    absent: tensors that the index puts into a file that is not there: name -> file.
    """

    entries: Mapping[str, Entry]
    absent: Mapping[str, str]
    notices: tuple[str, ...]


def find_model(path: Path) -> Found:
    """Understand what a person pointed at: the folder, a file in it, or the folder around it.

    Raises:
        InputError: there is no model, or more than one; says what to choose
    """
    if not path.exists():
        what = "is a link to something that is not there" if path.is_symlink() else "does not exist"
        raise InputError(f"{path} {what}")
    return _find_in_folder(path) if path.is_dir() else _find_by_file(path)


def model_name(folder: Path) -> str:
    """What to call the model of a folder: its name, or the repository's in a hub cache."""
    folder = folder.absolute()
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return _readable(folder.parent.parent.name.split("--")[-1])
    return _readable(folder.name)


def _readable(name: str) -> str:
    """A file name as text: bytes that are no UTF-8 become replacement signs."""
    return os.fsencode(name).decode("utf-8", "replace")


def describe(folder: Path) -> Description:
    """Configuration, tokenizer files and licence.

    Raises:
        ModelFolderError: a file is damaged, a link to nothing, or not what its name says
    """
    generation = "generation_config.json"
    config = read_json(within(folder, "config.json"))
    keys = ("quantization_config", "compression_config", "quantization")  # the last is MLX's
    quantisation = [_settings(config.pop(key, None), key) for key in keys]
    return Description(
        config=config,
        quantisation=next(filter(None, quantisation), {}),
        generation=read_json(within(folder, generation)) if _is_there(folder, generation) else {},
        files=text_files(folder),
        licence=_licence_name(folder),
        licence_text=_licence_text(folder),
    )


def text_files(folder: Path) -> dict[str, bytes]:
    """Tokenizer and chat template files by name."""
    files = {name: read_bytes(within(folder, name)) for name in _TEXT_FILES if _is_there(folder, name)}
    extra = folder / "additional_chat_templates"
    if extra.is_dir():
        for template in sorted(extra.glob("*.jinja")):
            name = f"{extra.name}/{template.name}"
            files[name] = read_bytes(within(folder, name))
    return files


def _settings(value: Any, key: str) -> Mapping[str, Any]:
    """A quantiser's settings; a bare name counts as its method."""
    if not value:
        return {}
    settings = value if isinstance(value, dict) else {"quant_method": str(value)}
    return {"quant_method": "mlx"} | settings if key == "quantization" else settings


def stored_tensors(folder: Path) -> Stored:
    """The tensors of all weight files, each header checked, index and headers compared.

    Raises:
        ModelFolderError: files are damaged or contradict each other
        UnsupportedModelError: the weights are there in a form that is not read
    """
    for kind in _KINDS:
        if _is_there(folder, kind.single):
            unused = _is_there(folder, kind.index)
            notices = (f"{kind.index} is not used, because there is a whole {kind.single}",) if unused else ()
            return Stored(kind.read(within(folder, kind.single)), {}, notices)
        if _is_there(folder, kind.index):
            return _by_index(folder, kind)
        files = [name for name in _names(folder) if kind.file.fullmatch(name) and not name.startswith("adapter_")]
        if files:
            return _without_index(folder, kind, files)
    others = [name for name in _names(folder) if name.endswith(_OTHER_WEIGHTS)]
    if others:
        raise UnsupportedModelError(
            f"the weights are stored as {others[0]}, which is not read; get the model's safetensors files"
        )
    raise ModelFolderError(f"{folder} holds no weights: there is no {_KINDS[0].single} in it")


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds a change of another model and no model of its own."""
    if not _is_there(folder, CONFIGURATION):
        return False
    own = (name for kind in _KINDS for name in _names(folder) if kind.file.fullmatch(name))
    return all(name in WEIGHTS for name in own)


def model_files(folder: Path) -> list[Path]:
    """The files that a conversion depends on: configuration and weights."""
    weights = [name for name in _names(folder) if any(kind.file.fullmatch(name) for kind in _KINDS)]
    return [folder / name for name in ("config.json", CONFIGURATION, *weights) if _is_there(folder, name)]


def _find_by_file(path: Path) -> Found:
    suffix = path.suffix.lower()
    if suffix in {".nook", ".gguf"}:
        return Found(suffix[1:], path)
    if path.is_fifo():  # opening one would wait for somebody who writes
        raise InputError(f"{path} is a pipe, no model: give a model folder, a GGUF file or a .nook file")
    try:
        with path.open("rb") as file:
            start = file.read(5)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    if start[:4] == b"GGUF":
        return Found("gguf", path)
    if start == b"\x89NOOK":
        return Found("nook", path)
    if (path.parent / "config.json").is_file():
        return Found("folder", path.parent, (f"{path.name} belongs to the model in {path.parent}, which is used",))
    if _is_there(path.parent, CONFIGURATION):
        return Found("folder", path.parent, (f"{path.name} belongs to the adapter in {path.parent}, which is used",))
    if suffix in {".safetensors", ".bin", *_OTHER_WEIGHTS}:
        instead = what_it_is_instead(path)
        if instead is not None:
            raise ModelFolderError(instead)
        raise ModelFolderError(f"{path.name} holds weights only; its config.json is missing in {path.parent}")
    if start.startswith(_ARCHIVES):
        raise InputError(f"{path} is an archive: unpack it, and give the folder that comes out")
    raise InputError(f"{path} is no model: give a model folder, a GGUF file or a .nook file")


def _find_in_folder(folder: Path) -> Found:
    if _is_there(folder, "config.json") or _is_there(folder, CONFIGURATION):
        return Found("folder", folder)
    inner = [
        inside
        for outside in _subfolders(folder)
        for inside in (_subfolders(outside) if outside.name.startswith("models--") else [outside])
        if _is_there(inside, "config.json") or _is_there(inside, CONFIGURATION)
    ]
    files = [
        entry for entry in sorted(folder.iterdir()) if entry.suffix.lower() in {".gguf", ".nook"} and not entry.is_dir()
    ]
    candidates = [Found("folder", inside) for inside in inner] + [
        Found(file.suffix[1:].lower(), file) for file in files
    ]
    if len(candidates) == 1:
        found = candidates[0]
        return Found(found.kind, found.path, (f"the model in {found.path} is used",))
    if candidates:
        names = ", ".join(str(found.path.relative_to(folder)) for found in candidates[:5])
        raise InputError(f"{folder} holds several models ({names}); choose one of them")
    names_here = [entry.name for entry in folder.iterdir()]
    if not names_here:
        raise InputError(f"{folder} is empty")
    for name, what in _OTHER_FOLDERS.items():
        if name in names_here:
            raise UnsupportedModelError(f"{folder} holds {what} ({name}), which is not read")
    if any(name.endswith((".safetensors", ".bin", *_OTHER_WEIGHTS)) for name in names_here):
        raise ModelFolderError(
            f"config.json is missing in {folder}; copy it, and the tokenizer's files, from the model that was trained"
        )
    raise InputError(f"{folder} holds no model: there is no config.json in it")


def _subfolders(folder: Path) -> Iterator[Path]:
    """Folders inside, the current snapshot first when this is a repository of the hub cache."""
    snapshots = folder / "snapshots"
    if snapshots.is_dir():
        current = folder / "refs" / "main"
        revision = plain_name(current.read_text(errors="replace").strip()) if current.is_file() else None
        if revision and (snapshots / revision).is_dir():
            yield snapshots / revision
            return
        folder = snapshots
    for number, inside in enumerate(sorted(folder.iterdir())):
        if number >= _MOST_SUBFOLDERS:
            return
        if inside.is_dir():
            yield inside


def _by_index(folder: Path, kind: _Kind) -> Stored:
    weight_map = read_json(within(folder, kind.index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFolderError(f"{kind.index} has no weight_map")
    for tensor, file in weight_map.items():
        if plain_name(file) is None or not kind.file.fullmatch(file):
            raise ModelFolderError(
                f"{kind.index} puts {tensor[:100]} into {str(file)[:100]!r}, which is no file of this folder"
            )
    files = sorted(set(weight_map.values()))
    entries: dict[str, Entry] = {}
    notices: list[str] = []
    there = [file for file in files if _is_there(folder, file)]
    for file in there:
        header = kind.read(within(folder, file))
        _add(entries, header, file)
        lacking = sorted(name for name, where in weight_map.items() if where == file and name not in header)
        if lacking:
            raise ModelFolderError(
                f"{kind.index} says that {file} holds {lacking[0][:100]}{_and_more(lacking)}, but it does not: "
                "index and weights are of different versions"
            )
        unlisted = sorted(name for name in header if name not in weight_map)
        if unlisted:
            notices.append(f"{file} holds {unlisted[0][:100]}{_and_more(unlisted)}, which {kind.index} does not list")
    absent = {name: file for name, file in weight_map.items() if file not in there}
    return Stored(entries, absent, tuple(notices))


def _without_index(folder: Path, kind: _Kind, files: list[str]) -> Stored:
    sets = {(match[1], match[3]) for name in files if (match := _SHARD.fullmatch(name))}
    if len(sets) == 1:
        stem, count = sets.pop()
        end = files[0].rpartition(".")[2]
        shards = [f"{stem}-{number:05d}-of-{count}.{end}" for number in range(1, int(count) + 1)]
        lacking = [name for name in shards if name not in files]
        if lacking:
            raise ModelFolderError(f"{lacking[0]}{_and_more(lacking)} is missing: the download is incomplete")
        files = shards
    elif len(files) > 1:
        raise ModelFolderError(
            f"{kind.index} is missing, so nobody knows how {files[0]} and {files[1]} belong together"
        )
    entries: dict[str, Entry] = {}
    for file in files:
        _add(entries, kind.read(within(folder, file)), file)
    return Stored(entries, {}, (f"there is no {kind.index}; the weights are read from {files[0]}{_and_more(files)}",))


def _add(entries: dict[str, Entry], header: Mapping[str, Entry], file: str) -> None:
    for name, entry in header.items():
        if name in entries:
            raise ModelFolderError(f"{name[:100]} is both in {entries[name].path.name} and in {file}")
        entries[name] = entry


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if _is_there(folder, entry.name))


def _is_there(folder: Path, name: str) -> bool:
    """A file, or a link that should lead to one."""
    path = folder / name
    return path.is_file() or path.is_symlink()


def _licence_name(folder: Path) -> str:
    readme = folder / "README.md"
    if not readme.is_file():
        return ""
    with readme.open("rb") as file:
        text = file.read(1 << 16).decode("utf-8-sig", "replace")
    front = re.match(r"\s*---\s*\n(.*?)\n---", text, re.DOTALL)
    if front is None:
        return ""
    found = {
        match[1]: match[2].strip("'\" ")
        for match in re.finditer(r"^(license|license_name):[ \t]*(?:\n[ \t]*-[ \t]*)?(.*)$", front[1], re.MULTILINE)
    }
    name = found.get("license", "")
    return (found.get("license_name") or name if name == "other" else name)[:100]


def _licence_text(folder: Path) -> str:
    """Licence and notice files, one after the other."""
    texts = [
        within(folder, entry.name).read_text(encoding="utf-8", errors="replace")
        for entry in sorted(folder.iterdir())
        if _LICENCE_FILE.fullmatch(entry.name) and entry.is_file() and entry.stat().st_size <= _LONGEST_LICENCE
    ]
    return "\n\n".join(texts)


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
