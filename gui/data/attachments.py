"""Text out of files: plain text in any usual encoding, PDF, Word and Excel; knows no widget.

Files come from anywhere. Nothing in them is executed or fetched; what they
unpack to is bounded; whatever is wrong with one ends in a sentence.
"""

from __future__ import annotations

import codecs
import csv
import io
import logging
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from gui.data.store import Attached
from gui.kit.i18n import tr
from gui.kit.words import size_words

__all__ = ["PATTERNS", "AttachmentError", "can_attach", "decode_text", "read_attachment"]

_log = logging.getLogger(__name__)

_MOST_BYTES = 100_000_000
_MOST_CHARACTERS = 2_000_000  # far beyond any context
_MOST_UNPACKED = 300_000_000
_MOST_S = 60.0
_MOST_ROWS = 50_000

# Marks that turn the direction of text: with them, "exe.txt" could be made to look like "txt.exe".
_TURNING = dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F), "\ufffd")

_TEXTS = (
    *("txt", "md", "markdown", "rst", "tex", "log", "csv", "tsv", "json", "jsonl", "yaml", "yml", "toml", "ini", "cfg"),
    *("xml", "html", "htm", "css", "svg", "py", "pyi", "js", "ts", "jsx", "tsx", "java", "kt", "c", "h", "cpp", "hpp"),
    *("cc", "cs", "go", "rs", "rb", "php", "swift", "m", "r", "jl", "lua", "pl", "sh", "bash", "ps1", "bat", "sql"),
    *("scala", "hs", "ml", "ex", "erl", "clj", "vue", "svelte", "diff", "patch", "srt", "vtt", "bib", "properties"),
)
_DOCUMENTS = ("pdf", "docx", "xlsx")
PATTERNS = " ".join(f"*.{ending}" for ending in (*_TEXTS, *_DOCUMENTS))
"""For a file dialog."""


class AttachmentError(Exception):
    """A file cannot be attached; one sentence for the user."""


def can_attach(path: Path) -> bool:
    """Whether a file's ending is one of those that are read."""
    return path.suffix.lower().removeprefix(".") in {*_TEXTS, *_DOCUMENTS}


def read_attachment(path: Path) -> Attached:
    """The text of a file.

    Raises:
        AttachmentError: it cannot be read, is too large, damaged, protected, or holds no text
    """
    name = path.name.translate(_TURNING)
    try:
        if not path.is_file():
            raise AttachmentError(tr("{name} is no file.", name=name))
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise AttachmentError(tr("{name} is too large to attach ({size}).", name=name, size=size_words(size)))
        data = path.read_bytes()
    except OSError as error:
        raise AttachmentError(tr("{name} cannot be read: {reason}.", name=name, reason=error.strerror)) from error
    readers: dict[str, Callable[[bytes], Iterator[str]]] = {".pdf": _pdf, ".docx": _docx, ".xlsx": _xlsx}
    reader = readers.get(path.suffix.lower())
    try:
        text = decode_text(data) if reader is None else _gathered(reader(data))
    except AttachmentError:
        raise
    except Exception as error:
        _log.warning("attaching %s: %r", name, error)
        raise AttachmentError(tr("{name} is damaged, or is not what its ending says.", name=name)) from error
    if text is None:
        raise AttachmentError(tr("{name} is not a text Inglenook can read.", name=name))
    if not text.strip():
        raise AttachmentError(
            tr("{name} holds no text; pages that are pictures cannot be read.", name=name)
            if path.suffix.lower() == ".pdf"
            else tr("{name} holds no text.", name=name)
        )
    if len(text) > _MOST_CHARACTERS:
        raise AttachmentError(tr("{name} is too long for a message.", name=name))
    return Attached(name, text)


def decode_text(data: bytes) -> str | None:
    """The text of some bytes: by its mark, as UTF-8, UTF-16 without a mark, GB18030, or by its letters; else None."""
    for mark, encoding in (
        (codecs.BOM_UTF8, "utf-8-sig"),
        (codecs.BOM_UTF32_LE, "utf-32"),
        (codecs.BOM_UTF32_BE, "utf-32"),
        (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"),
    ):
        if data.startswith(mark):
            return _plain(data.decode(encoding, "replace"))
    try:
        return _plain(data.decode("utf-8"))
    except UnicodeDecodeError:
        pass
    wide = _wide(data)
    if wide is not None:
        return wide
    try:
        chinese = data.decode("gb18030")
    except UnicodeDecodeError:
        chinese = ""
    if chinese and _looks_chinese(chinese):
        return _plain(chinese)
    from charset_normalizer import from_bytes

    best = from_bytes(data[:200_000]).best()
    return None if best is None else _plain(data.decode(best.encoding, "replace"))


def _plain(text: str) -> str | None:
    """With one kind of line end; None where it is no text but something binary."""
    sample = text[:4000]
    strange = sum(letter < " " and letter not in "\t\n\r\f" for letter in sample)
    if strange > len(sample) // 50:
        return None
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")


def _wide(data: bytes) -> str | None:
    """UTF-16 without a mark shows by its zeros: every other byte of Latin text."""
    sample = data[:4000]
    if len(sample) < 8 or len(data) % 2:
        return None
    low, high = sample[1::2].count(0), sample[0::2].count(0)
    if max(low, high) < len(sample) // 8 or min(low, high) > len(sample) // 32:
        return None
    try:
        return _plain(data.decode("utf-16-le" if low > high else "utf-16-be"))
    except UnicodeDecodeError:
        return None


def _looks_chinese(text: str) -> bool:
    """GB18030 reads nearly any bytes as something; common ideographs and punctuation tell a text."""
    outside = [letter for letter in text[:4000] if letter > "\x7f"]
    common = sum("\u4e00" <= letter <= "\u9fff" or "\u3000" <= letter <= "\u303f" or letter in "，。！？：；（）“”‘’—…"
                 for letter in outside)  # fmt: skip
    return common > 0.85 * len(outside)


def _gathered(pieces: Iterator[str]) -> str:
    """Text up to the limits of length and time."""
    begin_s, found, length = time.monotonic(), [], 0
    for piece in pieces:
        found.append(piece)
        length += len(piece)
        if length > _MOST_CHARACTERS or time.monotonic() - begin_s > _MOST_S:
            break
    return "\n".join(found)


def _pdf(data: bytes) -> Iterator[str]:
    from pypdf import PdfReader

    reader = PdfReader(io.BytesIO(data), strict=False)
    if reader.is_encrypted and not reader.decrypt(""):
        raise AttachmentError(tr("This PDF is protected by a password."))
    for page in reader.pages:
        yield page.extract_text()


def _archive(data: bytes) -> zipfile.ZipFile:
    archive = zipfile.ZipFile(io.BytesIO(data))
    if sum(entry.file_size for entry in archive.infolist()) > _MOST_UNPACKED:
        raise AttachmentError(tr("This file unpacks to more than can be read."))
    return archive


_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"


def _docx(data: bytes) -> Iterator[str]:
    from defusedxml import ElementTree

    with _archive(data) as archive, archive.open("word/document.xml") as document:
        root: Any = ElementTree.parse(_bounded(document)).getroot()
        yield from _word_blocks(root.find(f"{_WORD}body"))


def _word_blocks(body: Any) -> Iterator[str]:
    """Paragraphs and tables in order, tables as rows of cells."""
    for block in body if body is not None else ():
        if block.tag == f"{_WORD}p":
            yield _word_text(block)
        elif block.tag == f"{_WORD}tbl":
            for row in block.iter(f"{_WORD}tr"):
                cells = (" ".join(map(_word_text, cell.iter(f"{_WORD}p"))) for cell in row.iter(f"{_WORD}tc"))
                yield "| " + " | ".join(cells) + " |"
        elif block.tag == f"{_WORD}sdt":
            yield from _word_blocks(block.find(f"{_WORD}sdtContent"))


def _word_text(paragraph: Any) -> str:
    said = []
    for piece in paragraph.iter():
        if piece.tag == f"{_WORD}t":
            said.append(piece.text or "")
        elif piece.tag == f"{_WORD}tab":
            said.append("\t")
        elif piece.tag in {f"{_WORD}br", f"{_WORD}cr"}:
            said.append("\n")
    return "".join(said)


def _xlsx(data: bytes) -> Iterator[str]:
    from openpyxl import load_workbook

    _archive(data).close()
    book = load_workbook(io.BytesIO(data), read_only=True, data_only=True)
    try:
        for sheet in book.worksheets:
            yield f"# {sheet.title}"
            for number, row in enumerate(sheet.iter_rows(values_only=True)):
                if number >= _MOST_ROWS:
                    break
                cells = ["" if value is None else str(value) for value in row]
                if any(cells):
                    line = io.StringIO()
                    csv.writer(line, lineterminator="").writerow(cells)
                    yield line.getvalue().rstrip(",")
    finally:
        book.close()


def _bounded(file: IO[bytes]) -> IO[bytes]:
    """A part of an archive that says less of its size than it has ends here."""
    data = file.read(_MOST_UNPACKED + 1)
    if len(data) > _MOST_UNPACKED:
        raise AttachmentError(tr("This file unpacks to more than can be read."))
    return io.BytesIO(data)
