"""Markdown of answers: cut into parts while it grows, and written into text documents.

Nothing here parses HTML: tags an answer contains are shown as they were
written, and an image becomes its description and address, never a request.
Documents are built with cursors, so no text can turn into markup.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from PySide6.QtCore import Qt
from PySide6.QtGui import (
    QBrush,
    QFont,
    QTextBlockFormat,
    QTextCharFormat,
    QTextCursor,
    QTextDocument,
    QTextFormat,
    QTextFrameFormat,
    QTextLength,
    QTextList,
    QTextListFormat,
    QTextTableCellFormat,
    QTextTableFormat,
)

from gui.chat.formula import readable
from gui.kit.theme import code_font, look

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token

__all__ = ["Part", "Splitter", "plain_parts", "write_markdown", "write_plain"]

# Upper limits in characters. A part is what is laid out anew when it changes, so its size bounds the work per update.
_PROSE_LIMIT = 1500
_BLOCK_LIMIT = 4000
_TABLE_LIMIT = 20_000
_WINDOW = 24_000
# More levels than anybody reads; the parser would drop what is nested deeper than it follows.
_TOO_DEEP = re.compile(r"^[ \t]*(?:(?:>|[-*+]|\d{1,9}[.)])[ \t]*){40,}", re.MULTILINE)
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*([^`\n]*)")

LINE_SEPARATOR = "\u2028"  # a line break within a paragraph


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer that is laid out by itself.

    prose: `text` is Markdown source; code: `text` is the code, without fences; plain: nothing is markup.
    """

    kind: Literal["prose", "code", "plain"]
    text: str
    language: str = ""


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    options = {"html": False, "maxNesting": 100}
    made = MarkdownIt("commonmark", options).enable(["table", "strikethrough"])
    made.inline.ruler.before("escape", "formula", _formula)
    return made


_INLINE_FORMULA = re.compile(
    r"\\\((?P<round>.+?)\\\)|\\\[(?P<square>.+?)\\\](?!\()|\$\$(?P<double>.+?)\$\$"
    r"|\$(?=[^\s$\d]|\d[\d.]*[a-zA-Z\\^_=+*/<>-])(?P<single>[^$\n]*?[^\s$\\])\$(?!\d)",
    re.DOTALL,
)


def _formula(state: StateInline, silent: bool) -> bool:  # noqa: FBT001 - called by the parser
    r"""Take `\( ... \)`, `\[ ... \]`, `$ ... $` and `$$ ... $$` out of Markdown's hands; one not ended stays text."""
    begin = state.src[state.pos]
    if begin not in "\\$":
        return False
    found = _INLINE_FORMULA.match(state.src, state.pos, state.posMax)
    if found is None:
        if state.src[state.pos : state.pos + 2] == r"\(":  # still being written; Markdown would drop the backslash
            if not silent:
                state.pending += r"\("
            state.pos += 2
            return True
        return False
    if not silent:
        token = state.push("formula", "", 0)
        token.content = found[found.lastgroup or 0]
        token.markup = found[0]
    state.pos = found.end()
    return True


class Splitter:
    """Cuts a growing Markdown text into parts. Parts before the last never change again.

    The same text gives the same parts, whether fed at once or character by character.
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []  # final ones
        self._start = 0  # where the parts after them begin
        self._code_at = -1  # where the code of an open fence begins, or -1
        self._fence = ("", "")  # its marker and language
        self._scanned = 0  # up to where no closing fence was found

    def feed(self, text: str) -> list[Part]:
        """The parts of `text`, which begins with all that was fed before."""
        while True:
            parts = self._code(text) if self._code_at >= 0 else self._prose(text)
            if parts is not None:
                return [*self._parts, *parts]

    def _final(self, part: Part, start: int) -> None:
        self._parts.append(part)
        self._start = start

    def _code(self, text: str) -> list[Part] | None:
        """The open fence as far as it goes; None when it was closed and became final."""
        marker, language = self._fence
        closing = re.compile(rf"^ {{0,3}}{re.escape(marker[0])}{{{len(marker)},}}[ \t\r]*$", re.MULTILINE)
        found = closing.search(text, self._scanned)
        end = len(text) if found is None else max(self._code_at, found.start() - 1)
        part = Part("code", text[self._code_at : end].removesuffix("\n"), language)
        if found is None or found.end() == len(text):  # a closing line that may still grow is not final
            self._scanned = max(self._code_at, text.rfind("\n", 0, end) + 1)
            return [part]
        self._final(part, found.end() + 1)
        self._code_at = -1
        return None

    def _prose(self, text: str) -> list[Part] | None:
        """What follows the final parts; None when more became final."""
        window = text[self._start : self._start + _WINDOW]
        whole = self._start + len(window) == len(text)
        if not window.strip():
            if whole:
                return []
            self._start += len(window)
            return None
        blocks = _blocks(window)
        for index, (kind, start, end) in enumerate(blocks):
            opening = _FENCE.match(window, start) if kind == "fence" else None
            if opening is not None:
                line_end = window.find("\n", start)
                before = window[:start].strip("\n")
                if line_end < 0 and whole:  # the opening line may still turn out to be something else
                    return [Part("prose", before), Part("code", "")] if before else [Part("code", "")]
                if before:
                    self._final(Part("prose", before), self._start + start)
                    return None
                if line_end >= 0:
                    self._code_at = self._scanned = self._start + line_end + 1
                    self._fence = (opening[1], opening[2].strip().split(" ")[0])
                    return None
            if end - start > (_TABLE_LIMIT if kind == "table" else _BLOCK_LIMIT):
                cut = start if window[:start].strip() else start + _cut(window[start:end])
                self._final(Part("prose", window[:cut].strip("\n")), self._start + cut)
                return None
            if index + 1 < len(blocks) and blocks[index + 1][2] > _PROSE_LIMIT:
                self._final(Part("prose", window[:end].strip("\n")), self._start + end)
                return None
        if whole:
            return [Part("prose", window.strip("\n"))]
        self._final(Part("prose", window.strip("\n")), self._start + len(window))
        return None


def _blocks(window: str) -> list[tuple[str, int, int]]:
    """(kind, start, end) of the top-level blocks, in characters."""
    if _TOO_DEEP.search(window):
        return [("paragraph", 0, len(window))]
    lines = [0]
    for line in window.split("\n"):
        lines.append(lines[-1] + len(line) + 1)
    parser = _parser()
    tokens: list[Token] = []
    parser.block.parse(_normal(window), parser, {}, tokens)
    found = []
    for token in tokens:
        if token.level == 0 and token.map and token.nesting >= 0:
            kind = token.type.removesuffix("_open")
            found.append((kind, lines[token.map[0]], min(len(window), lines[min(token.map[1], len(lines) - 1)])))
    return found or [("paragraph", 0, len(window))]


def _normal(text: str) -> str:
    """As long as `text`, with the characters the parser would trip over replaced."""
    return text.replace("\r", " ").replace("\0", "\ufffd")


def _cut(block: str) -> int:
    """Where to cut an oversized block: at a line's end if there is one late enough, else between words."""
    head = block[:_BLOCK_LIMIT]
    for separator, least in (("\n", _BLOCK_LIMIT // 2), (" ", _BLOCK_LIMIT // 2)):
        place = head.rfind(separator)
        if place >= least:
            return place + 1
    # Never between the halves of a letter and its accent or an emoji and its joiner, as far as is cheap to see.
    cut = _BLOCK_LIMIT
    while cut > _BLOCK_LIMIT // 2 and block[cut] in "\u200d\ufe0f\u0301\u0300\u0308":
        cut -= 1
    return cut


def plain_parts(text: str) -> list[Part]:
    """A text without markup (what the user wrote), in parts of a size that is quickly laid out."""
    parts = []
    begin = 0
    while len(text) - begin > _BLOCK_LIMIT:
        cut = _cut(text[begin : begin + _BLOCK_LIMIT + 1])
        parts.append(Part("plain", text[begin : begin + cut].removesuffix("\n")))
        begin += cut
    return [*parts, Part("plain", text[begin:])]


def write_plain(document: QTextDocument, text: str) -> None:
    """Fill `document` with text as it is."""
    document.clear()
    cursor = QTextCursor(document)
    form = QTextBlockFormat()
    form.setLineHeight(look().gap(5), QTextBlockFormat.LineHeightTypes.LineDistanceHeight.value)
    cursor.setBlockFormat(form)
    cursor.insertText(text.replace("\0", "\ufffd"))


def write_markdown(document: QTextDocument, source: str) -> None:
    """Fill `document` with the Markdown `source`."""
    document.clear()
    if _TOO_DEEP.search(source):
        write_plain(document, source)
        return
    _Writer(document).write(_parser().parse(_normal(source)))


class _Writer:
    """Writes a stream of Markdown tokens at the end of a document."""

    def __init__(self, document: QTextDocument) -> None:
        self._document = document
        document.setIndentWidth(look().gap(22))
        self._cursor = QTextCursor(document)
        self._fresh = True  # the block under the cursor is empty and unused
        self._quotes = 0
        self._lists: list[QTextListFormat] = []
        self._made: dict[int, QTextList] = {}  # depth -> the list that items join
        self._item_open = False  # the next block is the first of a list item

    def write(self, tokens: Sequence[Token]) -> None:
        self._cursor.beginEditBlock()
        index = 0
        while index < len(tokens):
            token = tokens[index]
            match token.type:
                case "paragraph_open":
                    self._block(bottom=3 if token.hidden else 9)
                    self._inline(tokens[index + 1], QTextCharFormat())
                    index += 2
                case "heading_open":
                    level = int(token.tag[1])
                    self._block(top=0 if self._fresh_document() else 12, bottom=6, heading=level)
                    form = QTextCharFormat()
                    form.setFont(look().font({1: 20, 2: 16, 3: 15}.get(level, 14), bold=True))
                    self._inline(tokens[index + 1], form)
                    index += 2
                case "bullet_list_open" | "ordered_list_open":
                    self._open_list(token)
                case "bullet_list_close" | "ordered_list_close":
                    self._lists.pop()
                    if not self._lists:
                        self._margin_below(9)
                case "list_item_open":
                    self._item_open = True
                case "list_item_close":
                    self._item_open = False
                case "blockquote_open":
                    self._quotes += 1
                case "blockquote_close":
                    self._quotes -= 1
                case "fence" | "code_block":
                    self._code(token.content.removesuffix("\n"))
                case "hr":
                    self._rule()
                case "table_open":
                    index = self._table(tokens, index)
                case _:
                    pass
            index += 1
        self._finish()
        self._cursor.endEditBlock()

    # ---- blocks

    def _fresh_document(self) -> bool:
        return self._fresh and self._document.blockCount() == 1

    def _block(self, *, top: float = 0, bottom: float = 9, heading: int = 0, code: bool = False) -> None:
        """Begin a block at the end of the document."""
        form = QTextBlockFormat()
        form.setTopMargin(look().gap(top))
        form.setBottomMargin(look().gap(bottom))
        if not code:
            form.setLineHeight(look().gap(6), QTextBlockFormat.LineHeightTypes.LineDistanceHeight.value)
        if heading:
            form.setHeadingLevel(heading)
        if self._quotes:
            form.setProperty(QTextFormat.Property.BlockQuoteLevel, self._quotes)
            form.setLeftMargin(look().gap(16) * self._quotes)
        if self._lists and not self._item_open:
            form.setIndent(self._lists[-1].indent())
        blank = QTextCharFormat()
        if self._fresh:
            self._cursor.setBlockFormat(form)
            self._cursor.setBlockCharFormat(blank)
            self._fresh = False
        else:
            self._cursor.insertBlock(form, blank)
            current = self._cursor.currentList()
            if current is not None:
                current.remove(self._cursor.block())
                self._cursor.setBlockFormat(form)
        if self._lists and self._item_open:
            self._join_list()
            self._item_open = False

    def _open_list(self, token: Token) -> None:
        form = QTextListFormat()
        form.setIndent(len(self._lists) + 1)
        if token.type == "ordered_list_open":
            form.setStyle(QTextListFormat.Style.ListDecimal)
            form.setStart(int(token.attrGet("start") or 1))
        else:
            form.setStyle(QTextListFormat.Style.ListDisc)
        self._lists.append(form)
        self._made.pop(len(self._lists), None)

    def _join_list(self) -> None:
        depth = len(self._lists)
        made = self._made.get(depth)
        if made is None:
            self._made[depth] = self._cursor.createList(self._lists[-1])
        else:
            made.add(self._cursor.block())

    def _margin_below(self, size: float) -> None:
        form = self._cursor.blockFormat()
        form.setBottomMargin(look().gap(size))
        self._cursor.setBlockFormat(form)

    def _code(self, text: str) -> None:
        form = QTextCharFormat()
        form.setFont(code_font(13))
        for line in text.split("\n"):
            self._block(bottom=0, code=True)
            block = self._cursor.blockFormat()
            block.setBackground(QBrush(look().color("code")))
            block.setNonBreakableLines(False)
            self._cursor.setBlockFormat(block)
            self._cursor.insertText(line, form)
        self._margin_below(9)

    def _rule(self) -> None:
        self._block(top=4, bottom=12)
        form = self._cursor.blockFormat()
        form.setProperty(
            QTextFormat.Property.BlockTrailingHorizontalRulerWidth,
            QTextLength(QTextLength.Type.PercentageLength, 100),
        )
        form.setBackground(QBrush(look().color("line")))
        self._cursor.setBlockFormat(form)

    def _table(self, tokens: Sequence[Token], index: int) -> int:
        """Write the table that begins at `index`; the index of its last token."""
        rows: list[list[tuple[Token, str, bool]]] = []
        while tokens[index].type != "table_close":
            token = tokens[index]
            if token.type == "tr_open":
                rows.append([])
            elif token.type in {"th_open", "td_open"}:
                align = str(token.attrGet("style") or "")
                rows[-1].append((tokens[index + 1], align, token.type == "th_open"))
            index += 1
        form = QTextTableFormat()
        form.setBorder(0)
        form.setCellSpacing(0)
        form.setBorderCollapse(True)
        form.setCellPadding(look().gap(7))
        form.setTopMargin(look().gap(3))
        form.setBottomMargin(look().gap(9))
        form.setHeaderRowCount(1)
        table = self._cursor.insertTable(len(rows), max(map(len, rows)), form)
        for row, cells in enumerate(rows):
            for column, (content, align, head) in enumerate(cells):
                cell = table.cellAt(row, column)
                cursor = cell.firstCursorPosition()
                block = QTextBlockFormat()
                if "right" in align:
                    block.setAlignment(Qt.AlignmentFlag.AlignRight)
                elif "center" in align:
                    block.setAlignment(Qt.AlignmentFlag.AlignHCenter)
                cursor.setBlockFormat(block)
                style = QTextCharFormat()
                lines = QTextTableCellFormat()
                lines.setBottomBorder(1)
                lines.setBottomBorderStyle(QTextFrameFormat.BorderStyle.BorderStyle_Solid)
                lines.setBottomBorderBrush(QBrush(look().color("faint" if head else "line")))
                cell.setFormat(lines)
                if head:
                    style.setFontWeight(QFont.Weight.DemiBold)
                self._inline(content, style, cursor)
        self._cursor.movePosition(QTextCursor.MoveOperation.End)
        self._fresh = True  # Qt leaves an empty block behind a table
        return index

    def _finish(self) -> None:
        """No empty space below the last line."""
        form = self._cursor.blockFormat()
        form.setBottomMargin(0)
        if self._fresh and not self._fresh_document():
            form.setLineHeight(1, QTextBlockFormat.LineHeightTypes.FixedHeight.value)
        self._cursor.setBlockFormat(form)

    # ---- text within a block

    def _inline(self, token: Token, base: QTextCharFormat, cursor: QTextCursor | None = None) -> None:
        cursor = cursor or self._cursor
        form = QTextCharFormat(base)
        stack: list[QTextCharFormat] = []
        for child in token.children or ():
            match child.type:
                case "text":
                    cursor.insertText(child.content.replace("\n", LINE_SEPARATOR), form)
                case "softbreak" | "hardbreak":
                    cursor.insertText(LINE_SEPARATOR, form)
                case "code_inline":
                    code = QTextCharFormat(form)
                    code.setFont(code_font(13))
                    code.setBackground(QBrush(look().color("bubble")))
                    cursor.insertText(child.content, code)
                case "formula":
                    formula = QTextCharFormat(form)
                    formula.setFontItalic(True)
                    formula.setToolTip(child.markup)
                    cursor.insertText(readable(child.content).replace("\n", LINE_SEPARATOR), formula)
                case "strong_open":
                    stack.append(QTextCharFormat(form))
                    form.setFontWeight(QFont.Weight.Bold)
                case "em_open":
                    stack.append(QTextCharFormat(form))
                    form.setFontItalic(True)
                case "s_open":
                    stack.append(QTextCharFormat(form))
                    form.setFontStrikeOut(True)
                case "link_open":
                    stack.append(QTextCharFormat(form))
                    form.setAnchor(True)
                    form.setAnchorHref(str(child.attrGet("href") or ""))
                    form.setForeground(QBrush(look().color("accent")))
                case "strong_close" | "em_close" | "s_close" | "link_close":
                    form = stack.pop()
                case "image":
                    # An image would be a request to somebody's server: its description and address instead.
                    shown = QTextCharFormat(form)
                    shown.setForeground(QBrush(look().color("muted")))
                    address = str(child.attrGet("src") or "")
                    cursor.insertText(f"{child.content} ({address})" if child.content else address, shown)
                case _:
                    cursor.insertText(child.content, form)
