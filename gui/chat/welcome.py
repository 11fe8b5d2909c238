"""What stands where no conversation is yet."""

from __future__ import annotations

from PySide6.QtCore import QRectF, Qt, Signal
from PySide6.QtGui import QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QPushButton, QVBoxLayout, QWidget
from typing_extensions import override

from gui.kit.controls import button, label
from gui.kit.i18n import LANGUAGES, language, tr
from gui.kit.icons import app_icon
from gui.kit.layout import centre

__all__ = ["Mark", "Welcome", "suggestions"]


def suggestions() -> tuple[str, ...]:
    """First things to say to a model."""
    return (
        tr("Explain how a fireplace draws its smoke, in five sentences."),
        tr("Write a Python function for the longest common prefix."),
        tr("Help me write a friendly mail that moves a meeting to Thursday."),
    )


class Mark(QWidget):
    """The program's mark."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.setFixedSize(size, size)

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.SmoothPixmapTransform)
        rect = QRectF(self.rect())
        app_icon().paint(painter, rect.toRect())


class _Suggestion(QPushButton):
    """A first thing to say; shortened where there is no room for it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._text = text
        self.setProperty("role", "suggestion")
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setMinimumWidth(60)
        self.setAccessibleName(text)

    @override
    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.setText(self.fontMetrics().elidedText(self._text, Qt.TextElideMode.ElideRight, self.width() - 38))


class Welcome(QWidget):
    """What stands where no conversation is yet."""

    models_asked = Signal()
    suggested = Signal(str)
    language_asked = Signal(str)
    starter_asked = Signal()
    anyway_asked = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.setObjectName("welcome")
        inner = QWidget()
        centre(self, inner, 580, (32, 24, 32, 24))
        column = QVBoxLayout(inner)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(14)
        column.addStretch(3)
        center = Qt.AlignmentFlag.AlignHCenter
        column.addWidget(Mark(60), 0, center)
        self._heading = label("", "title", wrap=True)
        self._heading.setAlignment(center)
        column.addWidget(self._heading)
        self._words = label("", "muted", wrap=True)
        self._words.setObjectName("welcomeWords")
        self._words.setAlignment(center)
        column.addWidget(self._words)
        self._hardware = label("", "hardware", wrap=True)
        self._hardware.setObjectName("firstHardware")
        self._hardware.setAlignment(center)
        self._hardware.hide()
        column.addWidget(self._hardware)
        self._add = button(tr("Add a model"), "primary", "drop", "on_accent")
        self._add.setObjectName("welcomeAdd")
        self._add.clicked.connect(self.models_asked)
        self._starter = button("", "", "play")
        self._starter.setObjectName("startStarter")
        self._starter.clicked.connect(self.starter_asked)
        self._starter.hide()
        self._anyway = button(tr("Load anyway, with a short context"))
        self._anyway.setObjectName("loadAnyway")
        self._anyway.clicked.connect(self.anyway_asked)
        self._anyway.hide()
        column.addWidget(self._anyway, 0, center)
        column.addSpacing(6)
        column.addWidget(self._add, 0, center)
        column.addWidget(self._starter, 0, center)
        self._suggestions = QWidget()
        texts = QVBoxLayout(self._suggestions)
        texts.setContentsMargins(0, 0, 0, 0)
        texts.setSpacing(8)
        for text in suggestions():
            made = _Suggestion(text)
            made.clicked.connect(lambda _checked=False, text=text: self.suggested.emit(text))
            texts.addWidget(made)
        column.addWidget(self._suggestions)
        self._languages = QWidget()
        row = QHBoxLayout(self._languages)
        row.setContentsMargins(0, 6, 0, 0)
        row.addStretch(1)
        for code, name in LANGUAGES.items():
            choice = button(name, "tiny")
            choice.setObjectName(f"language_{code}")
            choice.setCheckable(True)
            choice.setChecked(code == language())
            choice.clicked.connect(lambda _on=False, code=code: self.language_asked.emit(code))
            row.addWidget(choice)
        row.addStretch(1)
        self._languages.hide()
        column.addWidget(self._languages)
        column.addStretch(4)

    def show_first(self, hardware: str, starter: str) -> None:
        """At the first start: the language, what this computer can do, the starter's name where it waits.

        hardware: "" shows nothing of this
        """
        self._languages.setVisible(bool(hardware))
        self._hardware.setVisible(bool(hardware))
        self._hardware.setText(hardware)
        self._starter.setVisible(bool(starter))
        self._starter.setText(tr("Start with {name}", name=starter))

    def show_greeting(self, words: str) -> None:
        """There is a model, or soon will be."""
        self._show(tr("What is on your mind?"), words, add=False, suggest=True)

    def show_first_run(self) -> None:
        """There is no model yet."""
        words = tr(
            "Inglenook runs language models on this computer's processor, without a network. Drop a model's folder"
            " anywhere in this window – as it comes from Hugging Face or ModelScope – and it is prepared for you."
        )
        self._show(tr("Bring a model in from the cold"), words, add=True, suggest=False)

    def show_trouble(self, heading: str, sentence: str, *, anyway: bool = False) -> None:
        """Something has to be done first. anyway: a shorter context might help."""
        self._show(heading, sentence, add=True, suggest=False)
        self._anyway.setVisible(anyway)

    def _show(self, heading: str, words: str, *, add: bool, suggest: bool) -> None:
        self._heading.setText(heading)
        self._words.setText(words)
        self._add.setVisible(add)
        self._suggestions.setVisible(suggest)
        self._anyway.hide()
