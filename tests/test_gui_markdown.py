"""Answers are Markdown and nothing else.

No text vanishes, no tag acts (case G02), no image is fetched (case G03), nothing takes long.
"""

from __future__ import annotations

import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtCore import Qt, QUrl
from PySide6.QtGui import QTextDocument, QTextFormat, QTextList

from gui.chat.formula import readable
from gui.chat.highlight import Highlighter, language_name
from gui.chat.markdown import Part, Splitter, plain_parts, write_markdown, write_plain

pytestmark = pytest.mark.usefixtures("qapp")

BITS = st.sampled_from(
    ["a", "word ", "`", "```", "```py\n", "~~~\n", "\n", "\n\n", "- ", "1. ", "> ", "# ", "|", "| a | b |\n|---|---|\n",
     "    ", "*", "**", "_", "[x](y)", "<b>", "中文", "😀", "\r\n", "\\", "&lt;", "---\n", "===\n"]
)  # fmt: skip
TEXTS = st.lists(BITS, max_size=120).map("".join)


def shown(source):
    document = QTextDocument()
    write_markdown(document, source)
    return document.toPlainText().replace("\u2028", "\n")


def feed(text, cuts):
    splitter, at = Splitter(), 0
    parts = splitter.feed("")
    for cut in cuts:
        at = min(len(text), at + cut)
        parts = splitter.feed(text[:at])
    return splitter.feed(text) if at < len(text) else parts


@given(TEXTS, st.lists(st.integers(1, 40), max_size=200))
def test_a_growing_text_gives_the_parts_of_the_whole(text, cuts):
    assert feed(text, cuts) == Splitter().feed(text)


@given(TEXTS)
def test_parts_before_the_last_are_final(text):
    splitter = Splitter()
    before: list[Part] = []
    for end in range(len(text) + 1):
        parts = splitter.feed(text[:end])
        final = splitter._parts[: len(before)]
        assert final == before
        before = list(splitter._parts)
        assert parts[: len(before)] == before


@given(st.text(alphabet="abc <>&;/!-=\"'[]()*_`#|\n", max_size=300))
def test_no_letter_vanishes(text):
    letters = [letter for part in Splitter().feed(text) for letter in _shown(part) if letter in "abc&;"]
    wanted = [letter for letter in text if letter in "abc&;"]
    if "`" in text or "~" in text or "[" in text:  # fence languages and link targets are not text
        assert len(letters) <= len(wanted)
    else:
        assert letters == wanted


def _shown(part):
    return part.text if part.kind == "code" else shown(part.text)


@pytest.mark.parametrize(
    "text",
    ["<smirk> hi", "a<b and c>d; vector<int> x;", "<table><tr><td>", "</div>", "<!-- x -->",
     "<style>*{display:none}</style>", "<b>bold</b> <img src=x>", "<script>alert(1)</script>", "<a href='x'>y</a>"],
)  # fmt: skip
def test_tags_are_shown_as_they_were_written(text):
    assert shown(text) == text
    document = QTextDocument()
    write_plain(document, text)
    assert document.toPlainText() == text


def test_what_the_user_wrote_is_plain():
    text = "**not bold** <b>&lt;</b> [x](y) `code`\n# no heading\n\n    kept   spaces"
    document = QTextDocument()
    write_plain(document, text)
    assert document.toPlainText() == text


class Watched(QTextDocument):
    """A document that notices when something outside it is asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def loadResource(self, kind, url):  # noqa: N802 (Qt's name)
        self.asked.append(url)
        return super().loadResource(kind, url)


def test_images_become_words_and_nothing_is_asked_for():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.2)
        host = f"http://127.0.0.1:{listener.getsockname()[1]}/x?leak=secret"
        source = (
            f"![a cat]({host}) ![]({host})\n\n![r][ref]\n\n<img src='{host}'> <link href='{host}'>\n\n<{host}>\n\n"
            f"![svg](data:image/svg+xml;base64,PHN2Zy8+)\n\n[ref]: {host}\n"
        )
        document = Watched()
        write_markdown(document, source)
        document.setTextWidth(300)
        document.size()
        assert document.asked == []
        text = document.toPlainText()
        assert f"a cat ({host})" in text
        assert f"r ({host})" in text
        assert "\ufffc" not in text  # Qt's sign for an image
        with pytest.raises(TimeoutError):
            listener.accept()


@pytest.mark.parametrize("address", ["javascript:alert(1)", "vbscript:x", "file:///etc/passwd", "data:text/html,x"])
def test_dangerous_addresses_are_no_links(address):
    document = QTextDocument()
    write_markdown(document, f"[click]({address})")
    fragments = _formats(document)
    assert not any(form.isAnchor() for _text, form in fragments)


def _formats(document):
    found = []
    block = document.begin()
    while block.isValid():
        iterator = block.begin()
        while not iterator.atEnd():
            found.append((iterator.fragment().text(), iterator.fragment().charFormat()))
            iterator += 1
        block = block.next()
    return found


def test_emphasis_code_and_links():
    document = QTextDocument()
    write_markdown(document, "**b** *i* ~~s~~ `c` [l](https://example.org/a?b=c) x")
    formats = dict(_formats(document))
    assert formats["b"].fontWeight() > formats[" x"].fontWeight()
    assert formats["i"].fontItalic()
    assert formats["s"].fontStrikeOut()
    assert formats["c"].font().families() != formats[" x"].font().families()
    assert QUrl(formats["l"].anchorHref()) == QUrl("https://example.org/a?b=c")


def test_lists_quotes_and_tables():
    source = (
        "3. three\n4. four\n   - inner\n\n   more of four\n5. five\n\n> quoted\n> > twice\n\n"
        "| a | b |\n|:--|--:|\n| 1 | 2 |\n\nend"
    )
    document = QTextDocument()
    write_markdown(document, source)
    blocks = {}
    block = document.begin()
    while block.isValid():
        blocks[block.text()] = block
        block = block.next()
    assert blocks["three"].textList().itemText(blocks["three"]) == "3."
    assert blocks["five"].textList().itemText(blocks["five"]) == "5."
    assert blocks["inner"].textList().format().style() == QTextList(document).format().style().ListDisc
    assert blocks["inner"].textList().format().indent() == 2
    assert blocks["more of four"].textList() is None
    assert blocks["more of four"].blockFormat().indent() == 1
    level = QTextFormat.Property.BlockQuoteLevel
    assert blocks["quoted"].blockFormat().intProperty(level) == 1
    assert blocks["twice"].blockFormat().intProperty(level) == 2
    assert blocks["2"].blockFormat().alignment() & Qt.AlignmentFlag.AlignRight
    assert blocks["end"].blockFormat().intProperty(level) == 0


def test_line_breaks_of_an_answer_are_kept():
    assert shown("one\ntwo") == "one\ntwo"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("\n\n  \n", []),
        ("```py\nx = 1\n```", [Part("code", "x = 1", "py")]),
        ("```py\nx = 1\n", [Part("code", "x = 1", "py")]),
        ("```py\nx = 1", [Part("code", "x = 1", "py")]),
        ("```\n", [Part("code", "")]),
        ("a\n```c\nb\n```\nd", [Part("prose", "a"), Part("code", "b", "c"), Part("prose", "d")]),
        ("````\n```\n````", [Part("code", "```")]),
        ("~~~\n```\n~~~\n", [Part("code", "```")]),
        ("- a\n\n  ```\n  b\n  ```", [Part("prose", "- a\n\n  ```\n  b\n  ```")]),
    ],
)
def test_code_is_cut_from_prose(text, parts):
    assert Splitter().feed(text) == parts


HOSTILE = {
    "one line of a million": "a" * 1_000_000,
    "a hundred thousand stars": "*" * 100_000,
    "fifty quotes": "> " * 50 + "deep",
    "a thousand bullets": "- " * 1000 + "deep",
    "growing quotes": "\n".join(">" * depth for depth in range(80)),
    "a million in a fence": "```\n" + "x" * 1_000_000,
    "open emphasis": "_a*" * 3000,
    "open brackets": "[" * 4000,
    "backticks": "`a" * 20_000,
    "a wide table": "|" + "a|" * 500 + "\n|" + "-|" * 500 + "\n" + ("|" + "b|" * 500 + "\n") * 3,
    "a long list": "".join(f"{number}. item {number}\n" for number in range(3000)),
    "nul and overrides": "a\0b\u202etxt.exe\ud83d",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_texts_take_little_time_and_lose_nothing(text):
    begin = time.perf_counter()
    parts = Splitter().feed(text)
    document = QTextDocument()
    count = 0
    for part in parts[:20]:
        if part.kind == "prose":
            write_markdown(document, part.text)
            document.setTextWidth(700)
            document.size()
            count += len(document.toPlainText())
    assert time.perf_counter() - begin < 5  # seconds, on a slow and busy machine
    assert parts
    if "deep" in text:
        assert "deep" in document.toPlainText()


def test_each_part_is_small_enough_to_lay_out_in_a_frame():
    text = "\n\n".join(f"Paragraph {number}: " + "word " * 60 for number in range(400))
    assert max(len(part.text) for part in Splitter().feed(text)) <= 2000
    assert max(len(part.text) for part in plain_parts("line of text\n" * 20_000)) <= 4000
    assert "".join(part.text + "\n" for part in plain_parts("line of text\n" * 20_000)).count("line") == 20_000


def test_code_is_coloured_by_its_language(qtbot):
    code = 'def f(x: int) -> str:\n    """Text\n    over lines 😀."""\n    return "s"  # why'
    document = QTextDocument()
    document.setPlainText(code)
    highlighter = Highlighter(document)
    highlighter.begin("py", code)
    qtbot.waitUntil(lambda: not highlighter._timer.isActive())

    def piece(line, start, length):
        block = document.findBlockByNumber(line)
        return {
            (made.format.foreground().color().name())
            for made in block.layout().formats()
            if made.start <= start and made.start + made.length >= start + length
        }

    keyword, string, comment = piece(0, 0, 3), piece(2, 4, 4), piece(3, 16, 5)
    assert len(keyword) == len(string) == len(comment) == 1
    assert len(keyword | string | comment) == 3


def test_languages_have_names():
    assert language_name("py") == "Python"
    assert language_name("no-such-language") == "no-such-language"
    assert language_name("") == ""


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (r"So \(a_1 * b_1 * c\) and \[x\] hold.", "So a₁ * b₁ * c and x hold."),
        ("Thus\n\\[\n\\frac{a}{b} \\le c\n\\]\nholds **here**.", "Thus\na/b ≤ c\nholds here."),
        (r"\[no link\](address) \(open \* star", r"[no link](address) \(open * star"),
        (r"- **Area** \(\pi r^2\)", "Area πr²"),
        ("$E = mc^2$ and $$\\sum_{i=1}^n i$$", "E = mc² and ∑ᵢ₌₁ⁿ i"),
        ("It costs $5 and then $10, or US$ 3$.", "It costs $5 and then $10, or US$ 3$."),
        ("$2x + 3$ is `$no$ formula`", "2x + 3 is $no$ formula"),
        (r"$\unknown{x}$", r"\unknown x"),
    ],
)
def test_formulas_are_readable(source, shown):
    document = QTextDocument()
    write_markdown(document, source)
    assert document.toPlainText() == shown
    assert document.blockCount() == 1


@given(st.text(alphabet="\\{}^_$ab frcsqt&'[]", max_size=60))
def test_no_formula_is_too_strange(source):
    shown = readable(source)
    assert len(shown) <= 4 * len(source) + 8
    assert readable("{" * 2000) in {"", "{" * 2000}
