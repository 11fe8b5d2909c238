"""Where a model is dropped."""

from __future__ import annotations

from PySide6.QtCore import QRectF, QSize, Qt, Signal
from PySide6.QtGui import QDragEnterEvent, QDragLeaveEvent, QDropEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QAbstractButton, QSizePolicy
from typing_extensions import override

from gui.data.drop import accepts, read_drop
from gui.kit.i18n import tr
from gui.kit.icons import paint_icon
from gui.kit.theme import look

__all__ = ["DropZone"]


class DropZone(QAbstractButton):
    """Where a model's folder is dropped; a click or Enter opens a dialog instead."""

    dropped = Signal(object)

    def __init__(self) -> None:
        super().__init__()
        self.setObjectName("dropZone")
        self.setAcceptDrops(True)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self._hot = False
        self._tone = "text"
        self._detail = ""
        self.show_idle()

    def show_idle(self) -> None:
        """Say what can be dropped."""
        self.show_words(
            tr("Drop a model's folder here"),
            tr("A folder from Hugging Face or ModelScope, a GGUF file or a .nook file. Click to choose one."),
        )

    def show_words(self, text: str, detail: str, tone: str = "text") -> None:
        """Say something else."""
        self.setText(text)
        self._detail, self._tone = detail, tone
        self.setAccessibleName(text)
        self.setAccessibleDescription(detail)
        self.update()

    def _show_hot(self, hot: bool) -> None:  # noqa: FBT001 (a state)
        self._hot = hot
        self.update()

    @override
    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        if accepts(event.mimeData()):
            event.acceptProposedAction()
            self._show_hot(True)

    @override
    def dragLeaveEvent(self, event: QDragLeaveEvent) -> None:
        self._show_hot(False)

    @override
    def dropEvent(self, event: QDropEvent) -> None:
        self._show_hot(False)
        event.acceptProposedAction()
        self.dropped.emit(read_drop(event.mimeData()))

    @override
    def sizeHint(self) -> QSize:
        return QSize(300, look().px(14) * 6 + 100)

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        rect = QRectF(self.rect()).adjusted(1.5, 1.5, -1.5, -1.5)
        hot = self._hot or self.hasFocus() or self.underMouse()
        pen = QPen(look().color("accent" if hot else "faint"), 1.6)
        pen.setDashPattern([5, 4])
        painter.setPen(pen)
        painter.setBrush(look().color("accent_soft" if self._hot or self.underMouse() else "surface"))
        painter.drawRoundedRect(rect, 16, 16)
        size = look().px(34)
        top = self.height() / 2 - size - look().px(14)
        paint_icon(painter, "drop", QRectF(self.width() / 2 - size / 2, top, size, size), "accent")
        words = QRectF(24, top + size + 12, self.width() - 48, look().px(16) * 3)
        flags = Qt.AlignmentFlag.AlignHCenter | Qt.AlignmentFlag.AlignTop | Qt.TextFlag.TextWordWrap
        painter.setFont(look().font(16, bold=True))
        painter.setPen(look().color(self._tone))
        used = painter.boundingRect(words, int(flags), self.text())
        painter.drawText(words, int(flags), self.text())
        painter.setFont(look().font(13))
        painter.setPen(look().color("muted"))
        painter.drawText(words.translated(0, used.height() + 6), int(flags), self._detail)
