"""The box where a message is written; knows when Enter belongs to an input method."""

from __future__ import annotations

import math

from PySide6.QtCore import QEvent, Qt, Signal
from PySide6.QtGui import QInputMethodEvent, QKeyEvent, QResizeEvent
from PySide6.QtWidgets import QFrame, QPlainTextEdit, QWidget
from typing_extensions import override

from gui.i18n import tr
from gui.theme import look

__all__ = ["Composer"]

_MOST_LINES = 9


class Composer(QPlainTextEdit):
    """Grows with its text. `sent` means: send what is here."""

    sent = Signal()

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
        return self.toPlainText()

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
            super().keyPressEvent(event)
            return
        held = event.modifiers() & ~Qt.KeyboardModifier.KeypadModifier
        wanted = Qt.KeyboardModifier.NoModifier if self.send_on_enter else Qt.KeyboardModifier.ControlModifier
        if held in {wanted, Qt.KeyboardModifier.ControlModifier}:
            self.sent.emit()
        else:
            self.insertPlainText("\n")
            self.ensureCursorVisible()

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
