"""The box where a message is written; knows when Enter belongs to an input method.

The time Qt takes to lay out a line grows with the square of its length, and a
paste may be one line of a million characters. The document therefore holds long
lines in pieces, each ended by a mark no text contains; `text`, copying and
dragging give what was written.
"""

from __future__ import annotations

import math
from pathlib import Path

from PySide6.QtCore import QEvent, QMimeData, Qt, Signal
from PySide6.QtGui import QInputMethodEvent, QKeyEvent, QResizeEvent, QTextBlock, QTextCursor
from PySide6.QtWidgets import QFrame, QPlainTextEdit, QWidget
from typing_extensions import override

from gui.kit.i18n import tr
from gui.kit.theme import look

__all__ = ["Composer"]

_MOST_LINES = 9
_MOST_CHARACTERS = 4_000_000  # no model reads more, and more would stop the window
_LINE_COST = 20  # a line takes as long as so many characters
_PIECE = 2000  # characters of a line that are laid out together
_MARK = "\ufff8"  # never assigned, never drawn
_BREAK = _MARK + "\n"


class Composer(QPlainTextEdit):
    """Grows with its text. `sent` means: send what is here; `refused` says why a text was not taken.

    files_pasted: files were copied elsewhere and pasted here
    """

    sent = Signal()
    refused = Signal(str)
    files_pasted = Signal(list)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("composer")
        self.setAccessibleName(tr("Message"))
        self.setPlaceholderText(tr("Write a message"))
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setTabChangesFocus(True)
        self.setAcceptDrops(False)  # the window decides what a drop means
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.document().setDocumentMargin(0)
        self.send_on_enter = True
        self._composing = False
        self.textChanged.connect(self._fit)
        look().changed.connect(self._fit)
        self._fit()

    def text(self) -> str:
        """What is written."""
        return _joined(super().toPlainText())

    @override
    def toPlainText(self) -> str:
        return self.text()

    @override
    def setPlainText(self, text: str) -> None:
        super().setPlainText(_in_pieces(text))

    @override
    def insertPlainText(self, text: str) -> None:
        """Put `text` in place of the selection; a text beyond all measure is refused, and what is here stays."""
        lines = text.count("\n") + self.document().blockCount()
        if len(text) + self.document().characterCount() + _LINE_COST * lines > _MOST_CHARACTERS:
            self.refused.emit(tr("This text is too long for a message ({count} characters).", count=f"{len(text):,}"))
            return
        cursor = self.textCursor()
        cursor.beginEditBlock()
        first = self.document().findBlock(cursor.selectionStart()).blockNumber()
        cursor.insertText(_in_pieces(text))
        for block in (cursor.block(), self.document().findBlockByNumber(first)):
            _cut_block(block)
        cursor.endEditBlock()
        self.setTextCursor(cursor)
        self.ensureCursorVisible()

    @override
    def insertFromMimeData(self, source: QMimeData) -> None:
        files = [Path(url.toLocalFile()) for url in source.urls() if url.isLocalFile()] if source.hasUrls() else []
        if files and all(path.is_file() for path in files):
            self.files_pasted.emit(files)
            return
        self.insertPlainText(source.text().replace("\r\n", "\n").replace("\r", "\n"))

    @override
    def createMimeDataFromSelection(self) -> QMimeData:
        made = QMimeData()
        made.setText(_joined(self.textCursor().selection().toPlainText()))
        return made

    @override
    def inputMethodEvent(self, event: QInputMethodEvent) -> None:
        self._composing = bool(event.preeditString())
        super().inputMethodEvent(event)

    @override
    def focusOutEvent(self, event: object) -> None:
        super().focusOutEvent(event)  # type: ignore[arg-type]
        self._composing = False

    @override
    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() not in {Qt.Key.Key_Return, Qt.Key.Key_Enter} or self._composing:
            if self._composing and event.key() in {Qt.Key.Key_Return, Qt.Key.Key_Enter}:
                return  # this Enter picks a word, it ends no message
            self._step_over_break(event.key())
            super().keyPressEvent(event)
            return
        held = event.modifiers() & ~Qt.KeyboardModifier.KeypadModifier
        wanted = Qt.KeyboardModifier.NoModifier if self.send_on_enter else Qt.KeyboardModifier.ControlModifier
        if held in {wanted, Qt.KeyboardModifier.ControlModifier}:
            self.sent.emit()
        else:
            self.insertPlainText("\n")
            self.ensureCursorVisible()

    def _step_over_break(self, key: int) -> None:
        """Backspace and Delete beside a piece's end mean the character beyond it."""
        cursor = self.textCursor()
        if cursor.hasSelection():
            return
        if key == Qt.Key.Key_Backspace and cursor.atBlockStart() and cursor.block().previous().text().endswith(_MARK):
            cursor.setPosition(cursor.position() - len(_BREAK))
        elif key == Qt.Key.Key_Delete and cursor.block().text()[cursor.positionInBlock() :] == _MARK:
            cursor.setPosition(cursor.position() + len(_BREAK))
        else:
            return
        self.setTextCursor(cursor)

    @override
    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    @override
    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.FontChange:
            self._fit()

    def _fit(self) -> None:
        line = self.fontMetrics().lineSpacing()
        lines = max(1, round(self.document().size().height()))  # a plain text document measures itself in lines
        bars = Qt.ScrollBarPolicy
        self.setVerticalScrollBarPolicy(bars.ScrollBarAsNeeded if lines > _MOST_LINES else bars.ScrollBarAlwaysOff)
        self.setFixedHeight(math.ceil(min(lines, _MOST_LINES) * line) + 6)


def _joined(shown: str) -> str:
    """The text that the document's text stands for."""
    return shown.replace(_BREAK, "").replace(_MARK, "") if _MARK in shown else shown


def _in_pieces(text: str) -> str:
    """The text as the document holds it; pieces end between words where there is a space near."""
    text = _joined(text)
    if len(text) <= _PIECE:
        return text
    pieces = []
    for line in text.split("\n"):
        begin = 0
        while len(line) - begin > _PIECE:
            end = begin + _PIECE
            space = line.rfind(" ", end - _PIECE // 4, end)
            end = end if space < 0 else space + 1
            pieces += [line[begin:end], _BREAK]
            begin = end
        pieces += [line[begin:], "\n"]
    return "".join(pieces[:-1])


def _cut_block(block: QTextBlock) -> None:
    """Cut a line of the document that grew by several insertions."""
    if block.length() <= 2 * _PIECE:
        return
    text = block.text()
    units = text.encode("utf-16-le", "surrogatepass")
    cursor = QTextCursor(block)
    for place in range(block.length() // _PIECE * _PIECE, 0, -_PIECE):
        if place >= block.length() - len(_BREAK):
            continue
        low = 0xDC <= units[2 * place + 1] <= 0xDF  # the second half of a pair
        cursor.setPosition(block.position() + place - low)
        cursor.insertText(_BREAK)
