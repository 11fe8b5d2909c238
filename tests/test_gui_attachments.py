"""Text out of files of every kind and encoding; hostile ones end in a sentence."""

from __future__ import annotations

import io
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openpyxl import Workbook
from pypdf import PdfWriter

from gui.data.attachments import AttachmentError, decode_text, read_attachment
from gui.kit.i18n import set_language

TEXT = "你好，世界。\r\nSecond line – with “quotes”.\n"


@pytest.fixture(autouse=True)
def english():
    set_language("en")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "gb18030"])
def test_texts_in_the_usual_encodings(tmp_path, encoding):
    text = "plain words in a row, " * 20 + TEXT if encoding.startswith("utf-16-") else TEXT
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    assert read_attachment(tmp_path / "a.txt").text == text.replace("\r\n", "\n")


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data):
    text = decode_text(data)
    assert text is None or "\0" not in text


def document(*paragraphs):
    space = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    inner = "".join(f"<w:p><w:r><w:t>{words}</w:t></w:r></w:p>" for words in paragraphs)
    cells = "".join(f"<w:tc><w:p><w:r><w:t>{words}</w:t></w:r></w:p></w:tc>" for words in "ab")
    table = f"<w:tbl><w:tr>{cells}</w:tr></w:tbl>"
    return f'<?xml version="1.0"?><w:document xmlns:w="{space}"><w:body>{inner}{table}</w:body></w:document>'


def packed(**files):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name.replace("__", "/").replace("_xml", ".xml"), content)
    return data.getvalue()


def test_a_word_document(tmp_path):
    (tmp_path / "a.docx").write_bytes(packed(word__document_xml=document("Heading", "第二段")))
    assert read_attachment(tmp_path / "a.docx").text == "Heading\n第二段\n| a | b |"


def test_a_table(tmp_path):
    book = Workbook()
    book.active.title = "Sales"
    book.active.append(["month", "sum"])
    book.active.append(["May, early", 12.5])
    book.save(tmp_path / "a.xlsx")
    assert read_attachment(tmp_path / "a.xlsx").text == '# Sales\nmonth,sum\n"May, early",12.5'


def test_a_pdf_without_text_says_so(tmp_path):
    writer = PdfWriter()
    writer.add_blank_page(100, 100)
    writer.write(tmp_path / "a.pdf")
    with pytest.raises(AttachmentError, match="pictures cannot be read"):
        read_attachment(tmp_path / "a.pdf")


def test_a_protected_pdf_says_so(tmp_path):
    writer = PdfWriter()
    writer.add_blank_page(100, 100)
    writer.encrypt("secret", algorithm="RC4-128")
    writer.write(tmp_path / "a.pdf")
    with pytest.raises(AttachmentError, match="password"):
        read_attachment(tmp_path / "a.pdf")


BOMB = '<!DOCTYPE a [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;">]><a>&b;</a>'


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.pdf", b""),
        ("a.pdf", b"%PDF-1.7\n1 0 obj << /Type /Catalog /Pages 1 0 R >> endobj trailer << /Root 1 0 R >>"),
        ("a.docx", b"PK\3\4 nothing"),
        ("a.docx", packed(word__document_xml=BOMB)),
        ("a.docx", packed(word__document_xml=" " * 400_000_000)),
        ("a.docx", packed(other_xml="<a/>")),
        ("a.xlsx", packed(xl__workbook_xml=BOMB)),
        ("a.xlsx", b"\xff" * 100),
        ("a.txt", bytes(range(32)) * 100),
        ("a.txt", b""),
        ("a.py", b"\x00\x01\x02\x03" * 400),
    ],
)
def test_hostile_files_end_in_a_sentence(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(AttachmentError) as caught:
        read_attachment(tmp_path / name)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(AttachmentError, match="no file"):
        read_attachment(tmp_path)


def test_a_name_cannot_be_made_to_look_like_another(tmp_path):
    file = tmp_path / "report\u202excod.txt"
    file.write_text("hello")
    assert read_attachment(file).name == "report\ufffdxcod.txt"
