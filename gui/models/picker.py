"""Which model answers: a list of the library, and how far loading is."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QModelIndex, QPersistentModelIndex, QRect, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QFontMetrics, QKeyEvent, QPainter, QPainterPath, QPaintEvent, QWheelEvent
from PySide6.QtWidgets import (
    QComboBox,
    QListView,
    QSizePolicy,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QWidget,
)
from typing_extensions import override

from gui.bridge import ModelEntry
from gui.kit.i18n import tr
from gui.kit.icons import paint_icon
from gui.kit.theme import look
from gui.kit.words import size_words
from gui.session import ModelState

__all__ = ["ModelPicker"]

Index = QModelIndex | QPersistentModelIndex

_MORE = "more"
_DETAIL = Qt.ItemDataRole.UserRole + 1


class _Row(QStyledItemDelegate):
    """A model in the list: its name above what it is."""

    @override
    def sizeHint(self, option: QStyleOptionViewItem, index: Index) -> QSize:
        return QSize(240, look().px(14) + look().px(12) + 22 if index.data(_DETAIL) else look().px(14) + 22)

    @override
    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        rect = QRect(option.rect).adjusted(2, 1, -2, -1)  # type: ignore[attr-defined]
        if option.state & (QStyle.StateFlag.State_Selected | QStyle.StateFlag.State_MouseOver):  # type: ignore[attr-defined]
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(look().color("hover"))
            painter.drawRoundedRect(rect, 8, 8)
        more = index.data(Qt.ItemDataRole.UserRole) == _MORE
        detail = index.data(_DETAIL)
        inner = rect.adjusted(12, 0, -10, 0)
        left = Qt.AlignmentFlag.AlignLeft
        painter.setFont(look().font(14))
        painter.setPen(look().color("accent" if more else "text"))
        title = inner.adjusted(0, 7, 0, 0) if detail else inner
        name = painter.fontMetrics().elidedText(index.data(), Qt.TextElideMode.ElideRight, inner.width())
        painter.drawText(title, left | (Qt.AlignmentFlag.AlignTop if detail else Qt.AlignmentFlag.AlignVCenter), name)
        if detail:
            painter.setFont(look().font(12))
            painter.setPen(look().color("muted"))
            painter.drawText(inner.adjusted(0, 0, 0, -7), left | Qt.AlignmentFlag.AlignBottom, detail)
        painter.restore()


class ModelPicker(QComboBox):
    """Chooses the model; shows the state of the one in use."""

    chosen = Signal(Path)
    more_asked = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("modelPicker")
        self.setAccessibleName(tr("Model"))
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        rows = QListView(self)
        rows.setMouseTracking(True)
        rows.setMinimumWidth(look().px(280))
        self.setView(rows)
        self.setItemDelegate(_Row(self))
        self.setMaxVisibleItems(12)
        self._state = ModelState()
        self._filling = False
        self.currentIndexChanged.connect(self._pick)
        self.activated.connect(self._pick)

    def show_models(self, models: tuple[ModelEntry, ...], state: ModelState) -> None:
        """Show what can be chosen and what is in use."""
        self._filling = True
        self.clear()
        paths = [entry.path for entry in models]
        for entry in models:
            self.addItem(entry.name, str(entry.path))
            sizes = [entry.detail, size_words(entry.disk_bytes) if entry.disk_bytes else ""]
            self.setItemData(self.count() - 1, " · ".join(filter(None, sizes)), _DETAIL)
        if state.path is not None and state.path not in paths:
            self.addItem(state.name, str(state.path))
            self.setItemData(self.count() - 1, str(state.path.parent), _DETAIL)
        self.addItem(tr("Add a model…"), _MORE)
        self._state = state
        self.setCurrentIndex(-1 if state.path is None else self.findData(str(state.path)))
        self._filling = False
        self.show_state(state)

    def show_state(self, state: ModelState) -> None:
        """Show how far the model in use is."""
        self._state = state
        self.setToolTip(state.sentence if state.kind == "failed" else "")
        self.setAccessibleDescription(self._words())
        self.updateGeometry()
        self.update()

    def _words(self) -> str:
        state = self._state
        match state.kind:
            case "loading":
                stage = (
                    tr("Preparing the processor's code")
                    if state.stage == "compile"
                    else tr("Loading {name}", name=state.name)
                )
                return f"{stage} · {state.share:.0%}" if state.share is not None else f"{stage}…"
            case "ready" | "failed":
                return state.name
        return tr("Choose a model")

    def _pick(self, index: int) -> None:
        if self._filling or index < 0:
            return
        data = self.itemData(index)
        if data == _MORE:
            self._filling = True
            self.setCurrentIndex(-1 if self._state.path is None else self.findData(str(self._state.path)))
            self._filling = False
            self.more_asked.emit()
        elif Path(data) != self._state.path or self._state.kind in {"none", "failed"}:
            self.chosen.emit(Path(data))

    @override
    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in {Qt.Key.Key_Up, Qt.Key.Key_Down, Qt.Key.Key_Return, Qt.Key.Key_Enter}:
            self.showPopup()  # moving through a closed list would load every model on the way
        else:
            super().keyPressEvent(event)

    @override
    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()

    @override
    def sizeHint(self) -> QSize:
        width = QFontMetrics(look().font(13.5)).horizontalAdvance(self._words()) + 70
        return QSize(max(190, min(420, width)), look().px(14) + 22)

    @override
    def minimumSizeHint(self) -> QSize:
        return QSize(120, look().px(14) + 22)

    @override
    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        rect = QRectF(self.rect()).adjusted(0.5, 0.5, -0.5, -0.5)
        shape = QPainterPath()
        shape.addRoundedRect(rect, 11, 11)
        painter.setPen(look().color("accent" if self.hasFocus() else "line"))
        painter.setBrush(look().color("hover" if self.underMouse() else "surface"))
        painter.drawPath(shape)
        state = self._state
        if state.kind == "loading" and state.share is not None:
            painter.save()
            painter.setClipPath(shape)
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(look().color("accent_soft"))
            painter.drawRect(QRectF(rect.left(), rect.top(), rect.width() * state.share, rect.height()))
            painter.setBrush(look().color("accent"))
            painter.drawRect(QRectF(rect.left(), rect.bottom() - 2, rect.width() * state.share, 3))
            painter.restore()
        dot = {"ready": "good", "loading": "accent", "failed": "danger", "none": "faint"}[state.kind]
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(look().color(dot))
        painter.drawEllipse(QRectF(14, self.height() / 2 - 3.5, 7, 7))
        painter.setFont(look().font(13.5))
        painter.setPen(look().color("muted" if state.kind == "none" else "text"))
        inner = self.rect().adjusted(30, 0, -32, 0)
        words = painter.fontMetrics().elidedText(self._words(), Qt.TextElideMode.ElideMiddle, inner.width())
        painter.drawText(inner, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, words)
        paint_icon(painter, "chevron-down", QRectF(self.width() - 26, self.height() / 2 - 8, 16, 16), "faint")
