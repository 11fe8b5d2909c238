"""The token view: how likely each token of an answer was, what else there was, and the exact prompt.

The text of the answer is coloured by how unsure the model was; a click on a
token lists its rivals, and the answer can go on from one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QColor, QMouseEvent, QTextCharFormat, QTextCursor
from PySide6.QtWidgets import (
    QDialog,
    QHBoxLayout,
    QHeaderView,
    QTableWidget,
    QTableWidgetItem,
    QTabWidget,
    QTextEdit,
    QVBoxLayout,
    QWidget,
)
from typing_extensions import override

from gui.bridge import PromptShown
from gui.chat.turns import Turn
from gui.kit.controls import button, label
from gui.kit.i18n import tr
from gui.kit.theme import code_font, look
from gui.kit.words import count_words
from gui.session import Session

__all__ = ["TokenView"]

_UNSURE = 4.0  # nats of surprise that are shown in the strongest colour
_SHOWN = 20_000  # tokens


@dataclass(frozen=True, slots=True)
class _Token:
    id: int
    data: bytes
    logprob: float
    rivals: tuple[tuple[int, bytes, float], ...]


class TokenView(QDialog):
    """The tokens of one answer."""

    def __init__(self, session: Session, turn: Turn, parent: QWidget) -> None:
        super().__init__(parent)
        self.setObjectName("tokenView")
        self.setWindowTitle(tr("Token view"))
        self.resize(940, 620)
        self._session = session
        self._message = turn.message.id
        self._tokens = _read(session.trace(turn.message.id))
        self._chosen = -1
        column = QVBoxLayout(self)
        column.setContentsMargins(20, 18, 20, 18)
        column.setSpacing(12)
        tabs = QTabWidget()
        tabs.setObjectName("tokenTabs")
        tabs.addTab(self._make_answer(), tr("Answer"))
        tabs.addTab(self._make_prompt(), tr("Prompt"))
        column.addWidget(tabs)
        session.prompt_shown.connect(self._show_prompt)
        session.show_prompt(turn.message.id)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)

    # ---- the answer

    def _make_answer(self) -> QWidget:
        page = QWidget()
        column = QVBoxLayout(page)
        column.setContentsMargins(0, 12, 0, 0)
        column.setSpacing(10)
        if not self._tokens:
            words = tr("The probabilities of this answer were not kept. Switch on “Keep token probabilities” in the"
                       " settings; the answers after that have them.")  # fmt: skip
            nothing = label(words, "muted", wrap=True)
            nothing.setObjectName("noTokens")
            column.addWidget(nothing)
            column.addStretch(1)
            return page
        surprise = sum(-token.logprob for token in self._tokens) / len(self._tokens)
        words = tr(
            "{count} tokens; perplexity {perplexity}. The stronger the colour, the less likely the token was.",
            count=count_words(len(self._tokens)),
            perplexity=f"{math.exp(surprise):.2f}",
        )
        summary = label(words, "muted", wrap=True)
        summary.setObjectName("tokenSummary")
        column.addWidget(summary)
        row = QHBoxLayout()
        row.setSpacing(14)
        self._text = _TokenText(self._tokens)
        self._text.chosen.connect(self.choose)
        row.addWidget(self._text, 3)
        row.addLayout(self._make_rivals(), 2)
        column.addLayout(row, 1)
        return page

    def _make_rivals(self) -> QVBoxLayout:
        column = QVBoxLayout()
        column.setSpacing(8)
        self._which = label(tr("Click a token to see what else there was."), "strong", wrap=True)
        self._which.setObjectName("tokenWords")
        column.addWidget(self._which)
        self._rivals = QTableWidget(0, 3)
        self._rivals.setObjectName("tokenRivals")
        self._rivals.setAccessibleName(tr("Tokens that could have stood here"))
        self._rivals.setHorizontalHeaderLabels([tr("Token"), tr("Probability"), tr("Number")])
        self._rivals.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Stretch)
        self._rivals.verticalHeader().hide()
        self._rivals.setShowGrid(False)
        self._rivals.setEditTriggers(QTableWidget.EditTrigger.NoEditTriggers)
        self._rivals.setSelectionBehavior(QTableWidget.SelectionBehavior.SelectRows)
        self._rivals.setTabKeyNavigation(False)
        self._rivals.itemSelectionChanged.connect(self._show_branch)
        column.addWidget(self._rivals, 1)
        self._branch = button(tr("Go on from this token"), "primary")
        self._branch.setObjectName("branchToken")
        self._branch.setEnabled(False)
        self._branch.clicked.connect(self._go_on)
        column.addWidget(self._branch)
        return column

    def choose(self, number: int) -> None:
        """Show what could have stood in a token's place."""
        self._chosen = number
        token = self._tokens[number]
        self._which.setText(
            tr("“{token}” had {share}", token=_shown(token.data), share=f"{math.exp(token.logprob):.1%}")
        )
        rivals = {token.id: (token.data, token.logprob)}
        rivals |= {identity: (data, logprob) for identity, data, logprob in token.rivals}
        rows = sorted(rivals.items(), key=lambda item: -item[1][1])
        self._rivals.setRowCount(len(rows))
        for row, (identity, (data, logprob)) in enumerate(rows):
            for place, words in enumerate((_shown(data), f"{math.exp(logprob):.2%}", str(identity))):
                item = QTableWidgetItem(words)
                item.setData(Qt.ItemDataRole.UserRole, data)
                self._rivals.setItem(row, place, item)
        self._rivals.clearSelection()
        self._show_branch()

    def _beginning(self) -> str | None:
        """The answer up to the chosen token, with the chosen rival in its place; None where that is no text."""
        items = self._rivals.selectedItems()
        if self._chosen < 0 or not items:
            return None
        rival: bytes = items[0].data(Qt.ItemDataRole.UserRole)
        try:
            return b"".join((*(token.data for token in self._tokens[: self._chosen]), rival)).decode()
        except UnicodeDecodeError:
            return None

    def _show_branch(self) -> None:
        self._branch.setEnabled(self._beginning() is not None and self._session.can_answer)

    def _go_on(self) -> None:
        beginning = self._beginning()
        if beginning is not None:
            self._session.continue_answer(self._message, instead=beginning)
            self.accept()

    # ---- the prompt

    def _make_prompt(self) -> QWidget:
        page = QWidget()
        column = QVBoxLayout(page)
        column.setContentsMargins(0, 12, 0, 0)
        self._prompt_words = label(tr("One moment…"), "muted", wrap=True)
        self._prompt_words.setObjectName("promptWords")
        column.addWidget(self._prompt_words)
        self._prompt = QTextEdit()
        self._prompt.setObjectName("promptText")
        self._prompt.setAccessibleName(tr("The exact prompt"))
        self._prompt.setReadOnly(True)
        self._prompt.setTabChangesFocus(True)
        self._prompt.setFont(code_font(13))
        column.addWidget(self._prompt, 1)
        return page

    def _show_prompt(self, event: PromptShown) -> None:
        if event.message != self._message:
            return
        if not event.tokens:
            self._prompt_words.setText(tr("The prompt can be shown while a model is loaded."))
            return
        control = sum(token.control for token in event.tokens)
        self._prompt_words.setText(
            tr(
                "{count} tokens, {control} of which steer the model (coloured).",
                count=count_words(len(event.tokens)),
                control=count_words(control),
            )
        )
        self._prompt.clear()
        cursor = QTextCursor(self._prompt.document())
        cursor.beginEditBlock()
        plain, coloured = QTextCharFormat(), QTextCharFormat()
        coloured.setForeground(look().color("accent"))
        coloured.setBackground(look().color("accent_soft"))
        run, kind = b"", False
        for token in (*event.tokens[:_SHOWN], None):
            if token is None or token.control != kind:
                cursor.insertText(run.decode("utf-8", "replace"), coloured if kind else plain)
                run, kind = b"", token.control if token is not None else False
            run += token.token_bytes if token is not None else b""
        cursor.endEditBlock()


class _TokenText(QTextEdit):
    """The answer, each token in the colour of its surprise; a click or the arrow keys choose one."""

    chosen = Signal(int)

    def __init__(self, tokens: list[_Token]) -> None:
        super().__init__()
        self.setObjectName("tokenText")
        self.setAccessibleName(tr("Answer, token by token"))
        self.setReadOnly(True)
        self.setTabChangesFocus(True)
        self.setTextInteractionFlags(
            Qt.TextInteractionFlag.TextSelectableByMouse | Qt.TextInteractionFlag.TextSelectableByKeyboard
        )
        self._ends: list[int] = []
        cursor = QTextCursor(self.document())
        cursor.beginEditBlock()
        pending = b""
        for token in tokens[:_SHOWN]:
            pending += token.data
            try:
                text, pending = pending.decode(), b""
            except UnicodeDecodeError:
                text = ""  # a letter that the next token completes
            form = QTextCharFormat()
            form.setBackground(_heat(-token.logprob))
            cursor.insertText(text, form)
            self._ends.append(cursor.position())
        cursor.endEditBlock()

    def _choose_at(self, position: int) -> None:
        number = next((number for number, end in enumerate(self._ends) if end > position), len(self._ends) - 1)
        if number >= 0:
            self.chosen.emit(number)

    @override
    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        super().mouseReleaseEvent(event)
        if not self.textCursor().hasSelection():
            place = event.position().toPoint()
            position = self.cursorForPosition(place).position()
            if self.cursorRect(self.cursorForPosition(place)).left() > place.x() and position > 0:
                position -= 1  # the click was on the left half of the next gap
            self._choose_at(position)


def _heat(surprise: float) -> QColor:
    color = look().color("accent")
    color.setAlphaF(min(0.75, 0.75 * surprise / _UNSURE))
    return color


def _shown(data: bytes) -> str:
    """The text of a token with its spaces and line ends to be seen."""
    return data.decode("utf-8", "backslashreplace").replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")


def _read(trace: Any) -> list[_Token]:
    """What the store kept; nothing where it is not of the form that is written."""
    try:
        return [
            _Token(
                int(identity),
                bytes.fromhex(data),
                float(logprob),
                tuple((int(other), bytes.fromhex(name), float(its)) for other, name, its in rivals),
            )
            for identity, data, logprob, rivals in trace or []
        ]
    except (TypeError, ValueError):
        return []
