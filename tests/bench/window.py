"""Measures the window: `python tests/bench/window.py` prints frame gaps, opening times and the share of a core.

Needs no model: a scripted engine writes faster than any real one. The share is
that of the window's own thread, so the engine's work is not in it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

from PySide6.QtCore import QEventLoop, Qt, QTimer

from gui.app import Folders, create_application, create_window, finish
from gui.data.preferences import PreferencesFile
from gui.data.store import Message
from tests.scripted import ScriptedApi

FRAME_MS = 16
PARAGRAPH = "A sentence about the fire, with **some** words and `code` in it. "


def wait(test: object, limit_s: float) -> None:
    """Let the window work until `test()` is true."""
    loop = QEventLoop()
    until_s = time.monotonic() + limit_s
    while not test() and time.monotonic() < until_s:  # type: ignore[operator]
        QTimer.singleShot(5, loop.quit)
        loop.exec()


class Gaps:
    """The times between the turns of a 16 ms timer: what a person sees as stutter."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._last_s = time.perf_counter()
        self._timer = QTimer()
        self._timer.setTimerType(Qt.TimerType.PreciseTimer)
        self._timer.timeout.connect(self._tick)
        self._timer.start(FRAME_MS)

    def _tick(self) -> None:
        now_s = time.perf_counter()
        self.values.append((now_s - self._last_s) * 1000)
        self._last_s = now_s

    def end(self) -> dict[str, float]:
        """Stop; the median, the 99th percentile and the longest, in milliseconds."""
        self._timer.stop()
        ordered = sorted(self.values)
        return {
            "median_ms": round(ordered[len(ordered) // 2], 1),
            "p99_ms": round(ordered[int(len(ordered) * 0.99)], 1),
            "longest_ms": round(ordered[-1], 1),
        }


def main() -> None:
    """Measure, and print one JSON object."""
    create_application(["bench"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models").mkdir()
        script = ScriptedApi(folder / "models")
        file = PreferencesFile(folder / "settings.json")
        file.change(language="en", greeted=True, model=str(script.add_model()))
        file.save()
        window = create_window(engine_factory=script, folders=Folders(folder))
        session = window.session
        window.resize(1280, 800)
        window.show()
        wait(lambda: session.state.kind == "ready", 20)
        found: dict[str, object] = {}

        messages, parent = [], None
        for number in range(1000):
            role = "assistant" if number % 2 else "user"
            messages.append(Message(f"m{number}", "long", parent, role, PARAGRAPH * (10 if number % 2 else 2)))
            parent = f"m{number}"
        session.store.create("long", "A thousand messages")
        for message in messages:
            session.store.add(message)
        session.store.flush(60)
        begin_s = time.perf_counter()
        session.open("long")
        window.repaint()
        found["open_1000_messages_ms"] = round((time.perf_counter() - begin_s) * 1000)

        session.new_chat()
        count = 20_000
        script.tokens = [PARAGRAPH[at % 60 : at % 60 + 4] + ("\n\n" if at % 40 == 0 else "") for at in range(count)]
        script.token_s = 0.001
        gaps, begin_s, begin_cpu_s = Gaps(), time.perf_counter(), time.thread_time()
        session.send("Write a long answer.")
        wait(lambda: not session.running, 300)
        seconds, cpu_s = time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s
        found["long_answer"] = {
            "tokens": count,
            "tokens_per_s": round(count / seconds),
            "share_of_a_core": round(cpu_s / seconds, 3),
            "share_at_30_tokens_per_s": round(cpu_s / count * 30, 4),
            "frames": gaps.end(),
        }
        print(json.dumps(found, indent=1))  # noqa: T201 (what the command is for)
        window.close()
        finish(window)


if __name__ == "__main__":
    main()
