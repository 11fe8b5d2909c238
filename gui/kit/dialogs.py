"""Questions the window asks; none of them blocks it."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QMessageBox, QWidget

from gui.kit.i18n import tr

__all__ = ["confirm"]


def confirm(parent: QWidget, question: str, detail: str, yes: str, do: Callable[[], object]) -> QMessageBox:
    """Ask before something that cannot be taken back; Escape and closing mean no."""
    box = QMessageBox(parent)
    box.setObjectName("confirm")
    box.setWindowTitle("Inglenook")
    box.setTextFormat(Qt.TextFormat.PlainText)
    box.setText(question)
    box.setInformativeText(detail)
    agree = box.addButton(yes, QMessageBox.ButtonRole.DestructiveRole)
    agree.setObjectName("confirmYes")
    agree.setProperty("role", "danger")
    cancel = box.addButton(tr("Cancel"), QMessageBox.ButtonRole.RejectRole)
    box.setDefaultButton(cancel)
    box.setEscapeButton(cancel)
    agree.clicked.connect(do)
    box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    box.open()
    return box
