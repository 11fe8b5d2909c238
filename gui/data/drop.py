"""What was dropped onto the window: a model, a text for the message box, or something to refuse in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import QMimeData, QUrl

from gui.data.attachments import AttachmentError, can_attach, read_attachment
from gui.kit.i18n import tr

__all__ = ["Drop", "accepts", "read_drop", "read_paths"]

_MODEL_FILES = {".nook", ".gguf"}
_PARTS_OF_MODELS = {".safetensors", ".json", ".bin", ".model", ".jinja"}
_TEXTS = {".txt", ".md"}
_INSERTED_BYTES = 8_000  # a longer text is attached


@dataclass(frozen=True, slots=True)
class Drop:
    """One of these is set: a model's folder or file, a text, files to attach, or a sentence why none was found."""

    model: Path | None = None
    text: str = ""
    files: tuple[Path, ...] = ()
    refusal: str = ""


def accepts(mime: QMimeData) -> bool:
    """Worth showing the drop sign for."""
    return mime.hasUrls() or mime.hasText()


def read_drop(mime: QMimeData) -> Drop:
    """Decide what a drop means. Addresses are decoded once, by Qt; nothing is fetched."""
    if not mime.hasUrls():
        return Drop(text=mime.text()) if mime.hasText() else Drop(refusal=tr("There is nothing in this drop to open."))
    urls = mime.urls()
    if not urls:
        return Drop(refusal=tr("There is nothing in this drop to open."))
    if not all(url.isLocalFile() for url in urls):
        return Drop(refusal=tr("Inglenook opens no addresses; drop a folder or file of this computer."))
    return read_paths([_path(url) for url in urls])


def read_paths(paths: Sequence[Path]) -> Drop:
    """The same for paths, as a file dialog gives them."""
    missing = next((path for path in paths if not path.exists()), None)
    if missing is not None:
        return Drop(refusal=tr("{name} does not exist.", name=missing.name or missing))
    # Several files of one model folder mean that folder.
    models = list(dict.fromkeys(found for path in paths if (found := _model_of(path)) is not None))
    if len(models) > 1:
        return Drop(refusal=tr("Drop one model at a time; these are {count}.", count=len(models)))
    if models:
        return Drop(model=models[0])
    path = paths[0]
    if len(paths) == 1 and path.suffix.lower() in _TEXTS:
        return _read_text(path)
    strange = next((path for path in paths if not can_attach(path)), None)
    if strange is None:
        return Drop(files=tuple(paths))
    return Drop(refusal=tr("{name} is not a model Inglenook knows; drop the model's folder.", name=strange.name))


def _path(url: QUrl) -> Path:
    return Path(url.toLocalFile())


def _model_of(path: Path) -> Path | None:
    """The folder or file that a dropped item stands for."""
    for item in (path, path.resolve()):  # a hub cache keeps links to files whose names say nothing
        if item.suffix.lower() in _PARTS_OF_MODELS and not item.is_dir() and (item.parent / "config.json").is_file():
            return item.parent
    path = path.resolve() if path.is_symlink() else path
    return path if path.is_dir() or path.suffix.lower() in _MODEL_FILES else None


def _read_text(path: Path) -> Drop:
    """A short text is put into the message box as it is."""
    try:
        if path.stat().st_size > _INSERTED_BYTES:
            return Drop(files=(path,))
        return Drop(text=read_attachment(path).text)
    except AttachmentError as error:
        return Drop(refusal=str(error))
    except OSError as error:
        return Drop(refusal=tr("{name} cannot be read: {reason}.", name=path.name, reason=error.strerror))
