"""Colours, type scale and style sheet of the window; knows no widget of ours.

Every colour is a named token of a `Theme`; widgets and `assets/style.qss` ask
for tokens, never for values. There is one accent colour.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from string import Template

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtGui import QColor, QFont, QFontDatabase, QGuiApplication, QPalette
from PySide6.QtWidgets import QApplication

__all__ = ["ASSETS", "CONTRAST", "DARK", "LIGHT", "Look", "Theme", "code_font", "look"]

ASSETS = Path(__file__).resolve().parent.parent.parent / "assets"


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours of one appearance. Text tokens reach a contrast of 4.5 on `window`, `side` and `surface`."""

    window: str  # behind the conversation
    side: str  # rail, lists
    surface: str  # cards, fields
    hover: str
    pressed: str
    line: str
    text: str
    muted: str
    faint: str  # icons at rest, hints
    accent: str
    accent_hover: str
    on_accent: str
    accent_soft: str
    bubble: str
    code: str
    selection: str
    danger: str
    danger_soft: str
    warning: str
    warning_soft: str
    good: str
    keyword: str
    string: str
    comment: str
    number: str
    function: str
    type: str
    dark: bool


LIGHT = Theme(
    window="#fcfbf9",
    side="#f4f1ec",
    surface="#ffffff",
    hover="#ebe6de",
    pressed="#e2dbd0",
    line="#e5dfd6",
    text="#26221d",
    muted="#6a6258",
    faint="#8d8478",
    accent="#b5471b",
    accent_hover="#9c3c15",
    on_accent="#ffffff",
    accent_soft="#f8e8de",
    bubble="#f2ede5",
    code="#f6f3ee",
    selection="#f3cfba",
    danger="#b3261e",
    danger_soft="#fbe9e7",
    warning="#855600",
    warning_soft="#fbf0da",
    good="#2c7a4b",
    keyword="#8f3a86",
    string="#2f7446",
    comment="#716a5f",
    number="#985a00",
    function="#2a5fa5",
    type="#1b717b",
    dark=False,
)

DARK = Theme(
    window="#1d1b19",
    side="#171513",
    surface="#272421",
    hover="#302c28",
    pressed="#3a352f",
    line="#39342e",
    text="#ece7df",
    muted="#aca498",
    faint="#8b8378",
    accent="#ea8f58",
    accent_hover="#f2a271",
    on_accent="#26140a",
    accent_soft="#3d2b20",
    bubble="#2c2824",
    code="#242120",
    selection="#6d4128",
    danger="#f38d83",
    danger_soft="#43231f",
    warning="#e6b969",
    warning_soft="#3b3020",
    good="#7fc899",
    keyword="#d6a0cc",
    string="#97c78d",
    comment="#918a80",
    number="#e0b273",
    function="#8fb8ea",
    type="#7fc6cd",
    dark=True,
)

CONTRAST = replace(
    DARK,
    window="#000000",
    side="#000000",
    surface="#000000",
    hover="#2a2a2a",
    pressed="#444444",
    line="#ffffff",
    text="#ffffff",
    muted="#f0f0f0",
    faint="#d0d0d0",
    accent="#ffd21f",
    accent_hover="#ffe37a",
    on_accent="#000000",
    accent_soft="#3a3000",
    bubble="#1c1c1c",
    code="#101010",
    selection="#005fcc",
    danger="#ff9c94",
    danger_soft="#3a0f0c",
    warning="#ffd21f",
    warning_soft="#332a00",
    good="#7dff9b",
    comment="#d0d0d0",
)

# Taken before the desktop's own choice only where that is a bare fallback face.
_TEXT_FAMILIES = ("Inter", "Noto Sans", "Cantarell", "Ubuntu", "Open Sans")
_CJK_FAMILIES = (
    "Microsoft YaHei UI",
    "PingFang SC",
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
)
_CODE_FAMILIES = (
    "Cascadia Mono",
    "SF Mono",
    "JetBrains Mono",
    "Menlo",
    "Consolas",
    "Noto Sans Mono",
    "DejaVu Sans Mono",
)
_BARE_FAMILIES = {"Sans Serif", "Sans", "DejaVu Sans", ""}


@cache
def _text_families() -> list[str]:
    installed = set(QFontDatabase.families())
    system = QFontDatabase.systemFont(QFontDatabase.SystemFont.GeneralFont).family()
    preferred = [family for family in _TEXT_FAMILIES if family in installed][:1]
    cjk = [family for family in _CJK_FAMILIES if family in installed][:1]
    return [*preferred, system, *cjk] if system in _BARE_FAMILIES else [system, *cjk]


@cache
def _code_families() -> list[str]:
    installed = set(QFontDatabase.families())
    preferred = [family for family in _CODE_FAMILIES if family in installed][:1]
    system = QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont).family()
    return [*preferred, system, *_text_families()[-1:]]


class Look(QObject):
    """The appearance in force: theme and text size. One per program; views listen to `changed`."""

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.theme = LIGHT
        self.scale = 1.0
        self._wish = "system"

    def watch_system(self) -> None:
        """Follow the desktop's light or dark setting from now on; needs the application."""
        QGuiApplication.styleHints().colorSchemeChanged.connect(self._apply)

    def choose(self, theme: str, text_size: int) -> None:
        """Show `theme` ("system", "light", "dark" or "contrast") with text at `text_size` per cent."""
        self._wish = theme
        self.scale = text_size / 100
        self._apply()

    def px(self, size: float) -> int:
        """A text size of the design (14 is body text), scaled as the user wishes."""
        return max(8, round(size * self.scale))

    def gap(self, size: float) -> int:
        """A distance of the design that grows with the text."""
        return round(size * self.scale)

    def font(self, size: float = 14, *, bold: bool = False) -> QFont:
        """The text face at a size of the design."""
        font = QFont(_text_families())
        font.setPixelSize(self.px(size))
        if bold:
            font.setWeight(QFont.Weight.DemiBold)
        return font

    def color(self, token: str) -> QColor:
        """A token of the theme as a colour."""
        return QColor(getattr(self.theme, token))

    def _apply(self) -> None:
        dark = self._wish == "dark" or (self._wish == "system" and self._desktop_is_dark())
        self.theme = CONTRAST if self._wish == "contrast" else DARK if dark else LIGHT
        application = QApplication.instance()
        if isinstance(application, QApplication):
            application.setFont(self.font())
            application.setPalette(_palette(self.theme))
            application.setStyleSheet(self._style_sheet())
        self.changed.emit()

    def _desktop_is_dark(self) -> bool:
        return QGuiApplication.styleHints().colorScheme() == Qt.ColorScheme.Dark

    def _style_sheet(self) -> str:
        sizes = {f"px{size}": str(self.px(size)) for size in (11, 12, 13, 14, 15, 16, 20, 26)}
        icons = (ASSETS / "icons").as_posix()
        return Template((ASSETS / "style.qss").read_text("utf-8")).substitute(asdict(self.theme), **sizes, icons=icons)


@cache
def look() -> Look:
    """The one appearance of this program."""
    return Look()


def code_font(size: float = 13) -> QFont:
    """The fixed-width face at a size of the design."""
    font = QFont(_code_families())
    font.setPixelSize(look().px(size))
    font.setStyleHint(QFont.StyleHint.Monospace)
    return font


def _palette(theme: Theme) -> QPalette:
    palette = QPalette()
    role = QPalette.ColorRole
    for target, token in {
        role.Window: theme.window,
        role.WindowText: theme.text,
        role.Base: theme.surface,
        role.AlternateBase: theme.side,
        role.Text: theme.text,
        role.PlaceholderText: theme.faint,
        role.Button: theme.surface,
        role.ButtonText: theme.text,
        role.BrightText: theme.danger,
        role.ToolTipBase: theme.surface,
        role.ToolTipText: theme.text,
        role.Highlight: theme.selection,
        role.HighlightedText: theme.text,
        role.Link: theme.accent,
        role.LinkVisited: theme.accent,
        role.Light: theme.hover,
        role.Midlight: theme.hover,
        role.Mid: theme.line,
        role.Dark: theme.line,
        role.Shadow: theme.pressed,
        role.Accent: theme.accent,
    }.items():
        palette.setColor(target, QColor(token))
    for target in (role.WindowText, role.Text, role.ButtonText):
        palette.setColor(QPalette.ColorGroup.Disabled, target, QColor(theme.faint))
    return palette
