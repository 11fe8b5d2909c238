"""The manual in the window's language, shown without a browser or a network."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QDialog, QHBoxLayout, QTextBrowser, QVBoxLayout, QWidget

from gui.kit.controls import button
from gui.kit.i18n import language, tr
from gui.kit.theme import ASSETS, look

__all__ = ["Manual"]


class Manual(QDialog):
    """A window of its own, so that one can read and do."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.setObjectName("manual")
        self.setWindowTitle(tr("Manual"))
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.resize(look().gap(720), look().gap(720))
        column = QVBoxLayout(self)
        self.text = QTextBrowser()
        self.text.setObjectName("manualText")
        self.text.setAccessibleName(tr("Manual"))
        self.text.setOpenLinks(False)
        self.text.document().setDefaultFont(look().font())
        self.text.document().setDocumentMargin(look().gap(20))
        self.text.setMarkdown((ASSETS / "manual" / f"{language()}.md").read_text("utf-8"))
        column.addWidget(self.text)
        row = QHBoxLayout()
        row.addStretch(1)
        close = button(tr("Close"))
        close.clicked.connect(self.close)
        row.addWidget(close)
        column.addLayout(row)
