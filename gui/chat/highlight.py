"""Colours of code: pygments' tokens laid over a text document, a slice at a time so that the window stays quick."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QObject
from PySide6.QtGui import QFont, QTextBlock, QTextCharFormat, QTextDocument, QTextLayout

from gui.kit.theme import look
from gui.kit.timing import timer

if TYPE_CHECKING:
    from pygments.lexer import Lexer

__all__ = ["Highlighter", "language_name"]

_SLICE = 400  # tokens per turn of the event loop: about two milliseconds
_LIMIT = 200_000  # characters; more is shown in one colour

# The first family of a tone's type that is listed here colours it.
_TOKENS = {
    "Keyword": "keyword",
    "Operator.Word": "keyword",
    "Name.Tag": "keyword",
    "Name.Function": "function",
    "Name.Attribute": "function",
    "Name.Class": "type",
    "Name.Namespace": "type",
    "Name.Decorator": "type",
    "Name.Builtin": "type",
    "Name.Exception": "type",
    "Keyword.Type": "type",
    "Literal.String": "string",
    "Literal.Number": "number",
    "Name.Constant": "number",
    "Comment": "comment",
    "Generic.Deleted": "danger",
    "Generic.Inserted": "good",
    "Generic.Heading": "keyword",
}


@cache
def _lexer(language: str) -> Lexer | None:
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None


def language_name(language: str) -> str:
    """How a language is called in a heading: "Python" for "py"; what the answer said when it is unknown."""
    lexer = _lexer(language.lower()) if language else None
    return str(lexer.name) if lexer is not None else language


class Highlighter(QObject):
    """Colours one document; `begin` anew after each change of its text."""

    def __init__(self, document: QTextDocument) -> None:
        super().__init__(document)
        self._document = document
        self._timer = timer(self, 0, self._turn)
        self._tokens: Iterator[tuple[str, str]] = iter(())
        self._block = QTextBlock()
        self._ranges: list[QTextLayout.FormatRange] = []
        self._column = 0

    def begin(self, language: str, code: str) -> None:
        """Colour the document, which shows `code`; the first slice at once, so that short code never flashes."""
        self._timer.stop()
        lexer = _lexer(language.lower()) if language and len(code) <= _LIMIT else None
        if lexer is None:
            return
        self._tokens = ((_family(str(kind)), value) for kind, value in lexer.get_tokens(code))
        self._block = self._document.begin()
        self._ranges = []
        self._column = 0
        self._timer.start()
        self._turn()

    def _turn(self) -> None:
        count = 0
        for tone, value in islice(self._tokens, _SLICE):
            count += 1
            for number, line in enumerate(value.split("\n")):
                if number:
                    self._next_line()
                width = len(line.encode("utf-16-le")) // 2
                if tone and width:
                    self._ranges.append(_range(self._column, width, _format(tone, look().theme.dark)))
                self._column += width
        if count < _SLICE:
            self._next_line()
            self._timer.stop()

    def _next_line(self) -> None:
        if not self._block.isValid():
            return
        self._block.layout().setFormats(self._ranges)
        self._document.markContentsDirty(self._block.position(), self._block.length())
        self._block = self._block.next()
        self._ranges = []
        self._column = 0


@cache
def _family(kind: str) -> str:
    """The theme's tone for a pygments type such as "Token.Literal.String.Doc"; "" for plain text."""
    path = kind.removeprefix("Token.").split(".")
    for length in range(len(path), 0, -1):
        tone = _TOKENS.get(".".join(path[:length]))
        if tone:
            return tone
    return ""


@cache
def _format(tone: str, dark: bool) -> QTextCharFormat:  # noqa: FBT001 (part of the key: the colour differs)
    del dark
    form = QTextCharFormat()
    form.setForeground(look().color(tone))
    if tone == "comment":
        form.setFontItalic(True)
    if tone == "keyword":
        form.setFontWeight(QFont.Weight.Medium)
    return form


def _range(start: int, length: int, form: QTextCharFormat) -> QTextLayout.FormatRange:
    made: Any = QTextLayout.FormatRange()  # its attributes are missing from Qt's type information
    made.start, made.length, made.format = start, length, form
    ranged: QTextLayout.FormatRange = made
    return ranged
