"""Questions the window asks; none of them blocks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QDialog, QHBoxLayout, QMessageBox, QVBoxLayout, QWidget

from gui.kit.controls import LineEdit, button, label
from gui.kit.i18n import tr

__all__ = ["ask_text", "choose", "confirm"]


def confirm(parent: QWidget, question: str, detail: str, yes: str, do: Callable[[], object]) -> QMessageBox:
    """Ask before something that cannot be taken back; Escape and closing mean no."""
    return choose(parent, question, detail, [(yes, "confirmYes", "danger", do)])


def choose(
    parent: QWidget, question: str, detail: str, ways: Sequence[tuple[str, str, str, Callable[[], object]]]
) -> QMessageBox:
    """Ask which way to go: (words, object name, role of the style sheet, what to do); Escape and closing mean none."""
    box = QMessageBox(parent)
    box.setObjectName("confirm")
    box.setWindowTitle("Inglenook")
    box.setTextFormat(Qt.TextFormat.PlainText)
    box.setText(question)
    box.setInformativeText(detail)
    for words, name, role, do in ways:
        agree = box.addButton(words, QMessageBox.ButtonRole.DestructiveRole)
        agree.setObjectName(name)
        agree.setProperty("role", role)
        agree.clicked.connect(do)
    cancel = box.addButton(tr("Cancel"), QMessageBox.ButtonRole.RejectRole)
    cancel.setObjectName("confirmNo")
    box.setDefaultButton(cancel)
    box.setEscapeButton(cancel)
    box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    box.open()
    return box


def ask_text(parent: QWidget, title: str, name: str, do: Callable[[str], object]) -> QDialog:
    """Ask for a line of text; an empty one changes nothing."""
    dialog = QDialog(parent)
    dialog.setObjectName("askText")
    dialog.setWindowTitle(title)
    dialog.setMinimumWidth(340)
    column = QVBoxLayout(dialog)
    column.setContentsMargins(22, 20, 22, 18)
    column.setSpacing(12)
    column.addWidget(label(title, "heading"))
    line = LineEdit()
    line.setObjectName("askTextLine")
    line.setAccessibleName(name)
    line.setPlaceholderText(name)
    column.addWidget(line)
    row = QHBoxLayout()
    row.addStretch(1)
    cancel = button(tr("Cancel"))
    cancel.clicked.connect(dialog.reject)
    row.addWidget(cancel)
    agree = button(tr("OK"), "primary")
    agree.setObjectName("askTextYes")
    agree.setDefault(True)
    agree.clicked.connect(dialog.accept)
    row.addWidget(agree)
    column.addLayout(row)
    dialog.accepted.connect(lambda: do(line.text().strip()) if line.text().strip() else None)
    dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    dialog.open()
    line.setFocus()
    return dialog
