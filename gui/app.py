"""Starts the window. It is on the screen before the engine is imported, and closing it ends everything in time."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from logging.handlers import TimedRotatingFileHandler
from pathlib import Path
from types import TracebackType

from PySide6.QtWidgets import QApplication

from engine.folders import data_folder, log_folder, policy_file
from gui.bridge import Bridge, EngineFactory, WorkFailed
from gui.claim import Claim
from gui.data.preferences import PreferencesFile
from gui.data.store import MEMORY, Store, StoreError
from gui.kit.i18n import set_language, tr
from gui.kit.theme import look
from gui.session import Session
from gui.window import Window

__all__ = ["Folders", "create_application", "create_window", "finish", "main"]

_log = logging.getLogger(__name__)

_CLOSING_S = 2.5


@dataclass(frozen=True, slots=True)
class Folders:
    """Where the window keeps things. missing: the folder that could not be made, in whose place `data` is for now."""

    data: Path
    missing: Path | None = None


def create_application(arguments: Sequence[str]) -> QApplication:
    """The Qt application in our looks; the one that exists, when there is one."""
    application = QApplication.instance() or QApplication(list(arguments))
    assert isinstance(application, QApplication)
    application.setApplicationName("Inglenook")
    application.setApplicationDisplayName("Inglenook")
    application.setDesktopFileName("inglenook")
    application.setStyle("Fusion")
    look().watch_system()
    return application


def create_window(*, engine_factory: EngineFactory | None = None, folders: Folders | None = None) -> Window:
    """The window with everything behind it, not shown yet; the engine starts when the window is painted.

    engine_factory: gives what `engine.api` offers; the real one when None
    """
    folders = folders or Folders(data_folder())
    preferences = PreferencesFile(folders.data / "settings.json", policy_file())
    set_language(preferences.values.language)
    look().choose(preferences.values.theme, preferences.values.text_size)
    bridge = Bridge(engine_factory)
    notices: list[str] = []
    store = _open_store(folders.data / "conversations.sqlite", bridge, notices)
    window = Window(Session(store, bridge, preferences))
    if preferences.notice:
        window.say(
            tr("The settings could not be read; they were put aside as {path}.", path=preferences.notice), "warning"
        )
    if preferences.policy_notice:
        window.say(
            tr(
                "The administrator's policy ({path}) cannot be read and is not in force.",
                path=preferences.policy_notice,
            ),
            "warning",
        )
    if folders.missing is not None:
        notices.append(
            tr("{path} cannot be written.", path=folders.missing)
            + " "
            + tr("Conversations of this session are not kept.")
        )
    for sentence in notices:
        window.say(sentence, "problem")
    window.painted.connect(bridge.start)
    return window


def _folders() -> Folders:
    """The user's folders; temporary ones for who has no home that can be written."""
    try:
        return Folders(data_folder())
    except OSError as error:
        return Folders(Path(tempfile.mkdtemp(prefix="inglenook-")), Path(error.filename or Path.home()))


def _open_store(path: Path, bridge: Bridge, notices: list[str]) -> Store:
    """The conversations; in memory, and said so, when the file cannot be used."""

    def failed(reason: str) -> None:
        bridge.post(WorkFailed(tr("Conversations cannot be saved now ({reason}).", reason=reason)))

    try:
        store = Store(path, failed)
    except StoreError as error:
        notices.append(f"{error} " + tr("Conversations of this session are not kept."))
        return Store(Path(MEMORY), failed)
    if store.aside is not None:
        notices.append(
            tr(
                "The file of conversations was damaged; it was put aside as {path} and a new one begun.",
                path=store.aside,
            )
            + (" " + tr("Earlier conversations were brought back from its copy.") if store.rescued else "")
        )
    return store


def finish(window: Window, timeout_s: float = _CLOSING_S) -> bool:
    """Wait for everything behind a closed window to end; False when something did not."""
    ended = window.session.bridge.join(timeout_s)
    window.session.store.close()
    return ended


def main(
    arguments: Sequence[str] | None = None,
    *,
    engine_factory: EngineFactory | None = None,
    folders: Folders | None = None,
) -> int:
    """Run the window until it is closed; the exit code.

    Where a window is open over the same data, that one comes forward and this start ends.
    """
    folders = folders or _folders()
    claim = Claim(folders.data)
    if not claim.take():
        if sys.stderr is not None:  # a packaged program on Windows has none
            sys.stderr.write("inglenook: Inglenook is already open; its window was brought forward.\n")
        return 0
    _write_log()
    application = create_application(sys.argv if arguments is None else arguments)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Qt's loop would never look at Python's handler
    window = create_window(engine_factory=engine_factory, folders=folders)
    claim.watch(window, window.come_forward)
    window.show()
    code = application.exec()
    ended = finish(window)
    claim.release()
    if not ended:
        _log.warning("a thread did not end in time")
        logging.shutdown()
        os._exit(code)  # everything is stored; a stuck thread must not keep the program alive
    return code


def _write_log() -> None:
    handlers: list[logging.Handler] = []
    try:
        file = TimedRotatingFileHandler(
            log_folder() / "window.log", when="midnight", backupCount=7, encoding="utf-8", delay=True
        )
        handlers.append(file)
    except OSError:
        handlers.append(logging.StreamHandler())
    logging.basicConfig(
        level=logging.INFO, handlers=handlers, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    sys.excepthook = _log_exception


def _log_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A fault in a slot ends that slot, not the program."""
    _log.error("unexpected", exc_info=(kind, error, trace))
