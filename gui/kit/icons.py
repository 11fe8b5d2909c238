"""Our own icons (`assets/icons`, drawn in `currentColor`), painted crisp in the theme's colours."""

from __future__ import annotations

from functools import cache
from weakref import WeakKeyDictionary

import shiboken6
from PySide6.QtCore import QByteArray, QRectF, QSize, Qt
from PySide6.QtGui import QGuiApplication, QIcon, QPainter, QPixmap
from PySide6.QtSvg import QSvgRenderer
from PySide6.QtWidgets import QAbstractButton

from gui.kit.theme import ASSETS, look

__all__ = ["app_icon", "icon", "paint_icon", "refresh_icons", "set_icon"]

_bound: WeakKeyDictionary[QAbstractButton, tuple[str, str]] = WeakKeyDictionary()


@cache
def _source(name: str) -> str:
    return (ASSETS / "icons" / f"{name}.svg").read_text("utf-8")


@cache
def _renderer(name: str, color: str) -> QSvgRenderer:
    return QSvgRenderer(QByteArray(_source(name).replace("currentColor", color).encode()))


def paint_icon(painter: QPainter, name: str, rect: QRectF, tone: str) -> None:
    """Paint one icon in a colour of the theme."""
    _renderer(name, getattr(look().theme, tone)).render(painter, rect)


@cache
def _pixmap(name: str, color: str, size: int, ratio: float) -> QPixmap:
    pixmap = QPixmap(QSize(round(size * ratio), round(size * ratio)))
    pixmap.setDevicePixelRatio(ratio)
    pixmap.fill(Qt.GlobalColor.transparent)
    painter = QPainter(pixmap)
    _renderer(name, color).render(painter, QRectF(0, 0, size, size))
    painter.end()
    return pixmap


def icon(name: str, tone: str = "muted", size: int = 20) -> QIcon:
    """An icon at rest in `tone`'s colour, faint when disabled, sharp on every screen there is."""
    theme = look().theme
    made = QIcon()
    for ratio in sorted({1.0, *(screen.devicePixelRatio() for screen in QGuiApplication.screens())}):
        made.addPixmap(_pixmap(name, getattr(theme, tone), size, ratio), QIcon.Mode.Normal, QIcon.State.Off)
        made.addPixmap(_pixmap(name, theme.accent, size, ratio), QIcon.Mode.Normal, QIcon.State.On)
        made.addPixmap(_pixmap(name, theme.pressed, size, ratio), QIcon.Mode.Disabled, QIcon.State.Off)
    return made


def set_icon(button: QAbstractButton, name: str, tone: str = "muted", size: int = 20) -> None:
    """Give a button an icon that follows the theme."""
    _bound[button] = (name, tone)
    button.setIconSize(QSize(size, size))
    button.setIcon(icon(name, tone, size))


def refresh_icons() -> None:
    """Paint every button's icon anew: the theme has changed."""
    for button, (name, tone) in list(_bound.items()):
        if shiboken6.isValid(button):
            button.setIcon(icon(name, tone, button.iconSize().width()))


@cache
def app_icon() -> QIcon:
    """The program's mark."""
    return QIcon(str(ASSETS / "icons" / "inglenook.svg"))
