"""How pages are laid out: one centred column, cards in it."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLayout, QScrollArea, QVBoxLayout, QWidget

from gui.kit.controls import label
from gui.kit.theme import look

__all__ = ["Page", "card", "centre", "clear", "line"]


def centre(parent: QWidget, inner: QWidget, width: int, margins: tuple[int, int, int, int]) -> None:
    """Put `inner` in the middle of `parent`, no wider than a width of the design."""
    row = QHBoxLayout(parent)
    row.setContentsMargins(*margins)
    row.addStretch(1)
    inner.setMaximumWidth(look().px(width))
    row.addWidget(inner, 100)
    row.addStretch(1)


class Page(QScrollArea):
    """A page that scrolls: a title, and below it whatever is added to `column`."""

    def __init__(self, name: str, title: str, width: int) -> None:
        super().__init__()
        self.setObjectName(name)
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        outer, inner = QWidget(), QWidget()
        self.setWidget(outer)
        centre(outer, inner, width, (32, 30, 32, 30))
        self.column = QVBoxLayout(inner)
        self.column.setContentsMargins(0, 0, 0, 0)
        self.column.setSpacing(16)
        self.heading = QHBoxLayout()
        self.heading.setSpacing(10)
        self.heading.addWidget(label(title, "title"), 1)
        self.column.addLayout(self.heading)


def card(title: str = "") -> tuple[QFrame, QVBoxLayout]:
    """A card with a heading, and the column its content goes into."""
    made = QFrame()
    made.setProperty("role", "card")
    column = QVBoxLayout(made)
    column.setContentsMargins(24, 18, 24, 20)
    column.setSpacing(14)
    if title:
        column.addWidget(label(title, "heading", wrap=True))
    return made, column


def line() -> QFrame:
    """A thin line between two parts."""
    made = QFrame()
    made.setProperty("role", "line")
    return made


def clear(layout: QLayout) -> None:
    """Take everything out of a layout."""
    while layout.count():
        item: Any = layout.takeAt(0)
        if item.widget() is not None:
            item.widget().hide()
            item.widget().deleteLater()
        elif item.layout() is not None:
            clear(item.layout())
