"""A blind comparison: two models answer the same message, and which is which is told after the choice."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QComboBox, QFrame, QHBoxLayout, QPlainTextEdit, QProgressBar, QVBoxLayout, QWidget

from gui.bridge import ModelEntry
from gui.chat.composer import Composer
from gui.comparing import Answer, Compared, Question, compare
from gui.kit.controls import IconButton, button, label
from gui.kit.i18n import tr
from gui.kit.theme import look
from gui.kit.words import count_words
from gui.session import Session

__all__ = ["CompareCard", "tally"]

_KEPT = 1000  # votes
_MOST_TOKENS = 600  # of an answer
_CONTEXT = 2048


def tally(votes: Sequence[dict[str, object]], first: str, second: str) -> tuple[int, int, int]:
    """How often the first of two models was better, how often the second, and how often neither."""
    better = [vote.get("better") for vote in votes if set(_named(vote)) == {first, second}]
    return better.count(first), better.count(second), better.count("")


def _named(vote: dict[str, object]) -> tuple[str, ...]:
    found = vote.get("models")
    return tuple(map(str, found)) if isinstance(found, (list, tuple)) else ()


class CompareCard(QFrame):
    """Two models, a message, two answers without names, and the choice between them."""

    def __init__(self, session: Session, dismiss: Callable[[], None]) -> None:
        super().__init__()
        self._session = session
        self._stop: threading.Event | None = None
        self._answers: tuple[Answer, ...] = ()
        self.setProperty("role", "card")
        self.setObjectName("compareCard")
        self.column = QVBoxLayout(self)
        self.column.setContentsMargins(24, 20, 24, 22)
        self.column.setSpacing(14)
        head = QHBoxLayout()
        head.addWidget(label(tr("Blind comparison"), "name", wrap=True), 1)
        close = IconButton("close", tr("Close"), size=18)
        close.setObjectName("dismissCompare")
        close.clicked.connect(self.stop)
        close.clicked.connect(dismiss)
        head.addWidget(close, 0, Qt.AlignmentFlag.AlignTop)
        self.column.addLayout(head)
        words = tr("Two models answer the same message. You see which is which when you have chosen the better answer.")
        self.column.addWidget(label(words, "muted", wrap=True))
        self._make_question()
        self._make_answers()
        self._tally = label("", "muted", wrap=True)
        self._tally.setObjectName("compareTally")
        self.column.addWidget(self._tally)
        session.bridge.event.connect(self._apply)
        self.show_models(session.models)
        self._show_state()

    # ---- parts

    def _make_question(self) -> None:
        row = QHBoxLayout()
        row.setSpacing(10)
        self._models: list[QComboBox] = []
        for name, words in (("compareFirst", tr("One model")), ("compareSecond", tr("The other model"))):
            box = QComboBox()
            box.setObjectName(name)
            box.setAccessibleName(words)
            box.setMinimumContentsLength(8)
            box.currentIndexChanged.connect(lambda _index: self._show_state())
            self._models.append(box)
            row.addWidget(box, 1)
        self.column.addLayout(row)
        frame = QFrame()
        frame.setProperty("role", "box")
        inside = QVBoxLayout(frame)
        inside.setContentsMargins(12, 10, 12, 10)
        self._message = Composer()
        self._message.setObjectName("compareMessage")
        self._message.send_on_enter = self._session.preferences.values.send_on_enter
        self._message.sent.connect(self._start)
        self._message.textChanged.connect(self._show_state)
        self.setFocusProxy(self._message)
        inside.addWidget(self._message)
        self.column.addWidget(frame)
        row = QHBoxLayout()
        row.setSpacing(10)
        self._go = button(tr("Let both answer"), "primary")
        self._go.setObjectName("compareStart")
        self._go.clicked.connect(self._start)
        row.addWidget(self._go)
        self._cancel = button(tr("Cancel"))
        self._cancel.setObjectName("compareStop")
        self._cancel.clicked.connect(self.stop)
        row.addWidget(self._cancel)
        self._said = label("", "caption", wrap=True)
        self._said.setObjectName("compareWords")
        row.addWidget(self._said, 1)
        self.column.addLayout(row)
        self._bar = QProgressBar()
        self._bar.setAccessibleName(tr("Progress of the comparison"))
        self._bar.setTextVisible(False)
        self.column.addWidget(self._bar)

    def _make_answers(self) -> None:
        self._result = QWidget()
        column = QVBoxLayout(self._result)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(10)
        row = QHBoxLayout()
        row.setSpacing(12)
        self._titles = []
        self._texts = []
        for number in (1, 2):
            side = QVBoxLayout()
            side.setSpacing(6)
            title = label("", "strong", wrap=True)
            title.setObjectName(f"answerName{number}")
            side.addWidget(title)
            text = QPlainTextEdit()
            text.setObjectName(f"answer{number}")
            text.setReadOnly(True)
            text.setTabChangesFocus(True)
            text.setFixedHeight(look().gap(200))
            side.addWidget(text)
            row.addLayout(side, 1)
            self._titles.append(title)
            self._texts.append(text)
        column.addLayout(row)
        ways = QHBoxLayout()
        ways.setSpacing(10)
        self._votes = []
        for name, words in (
            ("voteFirst", tr("1 is better")),
            ("voteEqual", tr("No difference")),
            ("voteSecond", tr("2 is better")),
        ):
            made = button(words)
            made.setObjectName(name)
            made.clicked.connect(lambda _on=False, name=name: self._vote(name))
            ways.addWidget(made, 1)
            self._votes.append(made)
        column.addLayout(ways)
        self.column.addWidget(self._result)

    # ---- what happens

    def _paths(self) -> list[Path]:
        return [Path(box.currentData() or "") for box in self._models]

    def show_models(self, entries: Sequence[ModelEntry]) -> None:
        """What can be compared; what is chosen stays chosen."""
        for place, box in enumerate(self._models):
            chosen = box.currentData()
            box.blockSignals(True)
            box.clear()
            for entry in entries:
                box.addItem(f"{entry.name} · {entry.detail}", str(entry.path))
            found = box.findData(chosen)
            box.setCurrentIndex(found if found >= 0 else min(place, box.count() - 1))
            box.blockSignals(False)
        self._show_state()

    def _start(self) -> None:
        if not self._go.isEnabled():
            return
        paths = self._paths()
        random.shuffle(paths)
        message, sampling = self._message.text(), self._session.sampling
        sampling = sampling.model_copy(
            update={
                "max_tokens": min(_MOST_TOKENS, sampling.max_tokens),
                "seed": sampling.seed if sampling.seed >= 0 else time.time_ns() % 2**31,
            }
        )
        settings = self._session.preferences.values.engine.model_copy(update={"context": _CONTEXT, "max_batch_size": 1})
        self._answers = ()
        self._said.setText("")
        question = Question(tuple(paths), message, sampling, settings)
        self._stop = self._session.bridge.task("compare", lambda api, stop: compare(api, stop, question))
        self._show_state()

    def stop(self) -> None:
        """End what is being written."""
        if self._stop is not None:
            self._stop.set()

    def _apply(self, event: object) -> None:
        if not isinstance(event, Compared) or self._stop is None:
            return
        if not event.done:
            self._said.setText(
                tr("Answer {number} of 2: {count} tokens", number=event.number + 1, count=count_words(event.tokens))
                if event.tokens
                else tr("Answer {number} of 2: getting ready", number=event.number + 1)
            )
            return
        self._stop = None
        self._answers = event.answers
        self._said.setText(event.sentence)
        for text, answer in zip(self._texts, event.answers, strict=False):
            text.setPlainText(answer.text)
        self._show_names(shown=False)
        self._show_state()
        if event.answers:
            self._votes[0].setFocus()

    def _vote(self, name: str) -> None:
        names = [answer.path.stem for answer in self._answers]
        better = {"voteFirst": names[0], "voteSecond": names[1], "voteEqual": ""}[name]
        preferences = self._session.preferences
        vote = {"models": sorted(names), "better": better, "at_s": time.time()}
        preferences.change(comparisons=[*preferences.values.comparisons, vote][-_KEPT:])
        for made in self._votes:
            made.setEnabled(False)
        self._show_names(shown=True)
        self._show_state()
        self._message.setFocus()

    # ---- what is to be seen

    def _show_names(self, *, shown: bool) -> None:
        for number, title in enumerate(self._titles):
            words = tr("Answer {number}", number=number + 1)
            self._texts[number].setAccessibleName(words)
            if shown:
                answer = self._answers[number]
                words = f"{answer.path.stem} · " + tr("{speed} tokens/s", speed=f"{answer.decode_tps:.1f}")
            title.setText(words)
        for made in self._votes:
            made.setEnabled(not shown)

    def _show_state(self) -> None:
        busy = self._stop is not None
        first, second = self._paths()
        different = first != second and bool(first.name) and bool(second.name)
        self._go.setEnabled(different and not busy and bool(self._message.text().strip()))
        self._go.setToolTip("" if different else tr("Choose two different models"))
        self._cancel.setVisible(busy)
        self._bar.setVisible(busy)
        self._bar.setRange(0, 0)
        self._result.setVisible(bool(self._answers))
        for box in self._models:
            box.setEnabled(not busy)
        one, other, neither = tally(self._session.preferences.values.comparisons, first.stem, second.stem)
        self._tally.setVisible(different and bool(one + other + neither))
        self._tally.setText(
            tr(
                "So far: {first} was better {one} times, {second} {other} times, no difference {neither} times.",
                first=first.stem,
                one=one,
                second=second.stem,
                other=other,
                neither=neither,
            )
        )
