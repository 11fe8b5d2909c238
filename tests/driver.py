"""Drives the real window by the object names that people's tests rely on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from PySide6.QtCore import QMimeData, QObject, QPoint, QPointF, Qt, QUrl
from PySide6.QtGui import QDragEnterEvent, QDropEvent
from PySide6.QtWidgets import QAbstractButton, QApplication, QLabel, QPlainTextEdit, QWidget

from gui.app import Folders, create_application, create_window, finish
from gui.chat.transcript import Transcript
from gui.data.preferences import PreferencesFile
from gui.data.store import Conversation
from tests.scripted import ScriptedApi

__all__ = ["Driver"]

Kind = TypeVar("Kind", bound=QObject)


class Driver:
    """One window over a scripted engine.

    model: a model lies in the library and was used last, so it is loaded at the start
    script: an engine that was prepared, for example one that is slow
    """

    def __init__(
        self,
        qtbot: Any,
        folder: Path,
        *,
        model: bool = True,
        script: ScriptedApi | None = None,
        wait: bool = True,
        show: bool = True,
        **preferences: Any,
    ) -> None:
        create_application([])
        (folder / "models").mkdir(exist_ok=True)
        self.qtbot = qtbot
        self.folder = folder
        self.script = script or ScriptedApi(folder / "models")
        if model and not self.script.library:
            preferences.setdefault("model", str(self.script.add_model("SmolLM2 135M")))
        if not (folder / "settings.json").exists():
            file = PreferencesFile(folder / "settings.json")
            file.change(**{"language": "en", "theme": "light", "greeted": True, **preferences})
            file.save()
        self.window = create_window(engine_factory=self.script, folders=Folders(folder))
        self.session = self.window.session
        self.closed = False
        if show:
            self.window.resize(1280, 800)
            self.window.show()
            self.window.activateWindow()  # shortcuts belong to the active window
            if wait:
                self.until(lambda: self.session.engine_ready)
                if model:
                    self.until(lambda: self.session.state.kind == "ready")

    # ---- finding

    def find(self, name: str, kind: type[Kind] = QWidget) -> Kind:  # type: ignore[assignment]
        found = self.window.findChildren(kind, name)
        assert found, f"no {name}"
        visible = [widget for widget in found if isinstance(widget, QWidget) and widget.isVisible()]
        return (visible or found)[-1]

    def has(self, name: str) -> bool:
        return any(widget.isVisible() for widget in self.window.findChildren(QWidget, name))

    @property
    def transcript(self) -> Transcript:
        return self.find("transcript", Transcript)

    @property
    def composer(self) -> QPlainTextEdit:
        return self.find("composer", QPlainTextEdit)

    def texts(self, name: str) -> list[str]:
        return [made.text() for made in self.window.findChildren(QLabel, name) if made.isVisible()]

    def banners(self) -> list[str]:
        return [banner.text.text() for banner in self.window.findChildren(QWidget, "banner") if banner.isVisible()]

    def titles(self) -> list[str]:
        model = self.find("chatList").model()
        return [row.title for row in model.rows if isinstance(row, Conversation)]

    # ---- doing

    def until(self, test: Callable[[], Any], timeout: int = 5000) -> None:
        self.qtbot.waitUntil(lambda: bool(test()), timeout=timeout)

    def click(self, name: str) -> None:
        made = self.find(name, QAbstractButton)
        assert made.isEnabled(), f"{name} is disabled"
        assert made.isVisible(), f"{name} is hidden"
        self.qtbot.mouseClick(made, Qt.MouseButton.LeftButton)

    def write(self, text: str) -> None:
        self.composer.setPlainText(text)

    def send(self, text: str) -> None:
        self.write(text)
        self.click("send")

    def ask(self, text: str, timeout: int = 5000) -> str:
        """Send and wait for the whole answer."""
        self.send(text)
        self.until(lambda: not self.session.running, timeout)
        return self.session.chat.turns[-1].message.content

    def drop(self, *paths: Path | str) -> None:
        mime = QMimeData()
        mime.setUrls([QUrl(path) if isinstance(path, str) else QUrl.fromLocalFile(str(path)) for path in paths])
        self.drop_mime(mime)

    def drop_mime(self, mime: QMimeData) -> None:
        copy, left, none = Qt.DropAction.CopyAction, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
        QApplication.sendEvent(self.window, QDragEnterEvent(QPoint(300, 300), copy, mime, left, none))
        QApplication.sendEvent(self.window, QDropEvent(QPointF(300, 300), copy, mime, left, none))
        self.qtbot.wait(20)

    def reopen(self, **arguments: Any) -> Driver:
        """Close, and open again over the same folder and script."""
        self.close()
        return Driver(self.qtbot, self.folder, script=self.script, **arguments)

    def close(self) -> float:
        """Close the window; the seconds until everything behind it had ended."""
        if self.closed:
            return 0.0
        self.closed = True
        begin = time.monotonic()
        self.window.close()
        assert finish(self.window), "a thread did not end in time"
        seconds = time.monotonic() - begin
        self.window.deleteLater()
        self.qtbot.wait(1)
        return seconds
