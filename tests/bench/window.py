"""Measures the window: `python -m tests.bench.window [MODEL...]` prints frame gaps, opening times, shares of a core.

Without a model a scripted engine writes faster than any real one; with models
the real engine answers, too, and competes for the cores. The share of an answer
is that of the window's own thread, so the engine's work is not in it.
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
from gui.session import Session
from gui.window import Window
from tests.scripted import ScriptedApi

FRAME_MS = 16
PARAGRAPH = "A sentence about the fire, with **some** words and `code` in it. "


def wait(test: object, limit_s: float) -> None:
    """Let the window work until `test()` is true."""
    loop = QEventLoop()
    until_s = time.monotonic() + limit_s
    while not test() and time.monotonic() < until_s:  # type: ignore[operator]
        QTimer.singleShot(50, loop.quit)  # seldom: looking costs time, too
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


def opened(folder: Path, factory: ScriptedApi | None, model: Path) -> Window:
    """The window, with a model loaded."""
    file = PreferencesFile(folder / "settings.json")
    file.change(language="en", greeted=True, model=str(model))
    file.save()
    window = create_window(engine_factory=factory, folders=Folders(folder))
    window.resize(1280, 800)
    window.show()
    wait(lambda: window.session.state.kind in {"ready", "failed"}, 120)
    if window.session.state.kind != "ready":
        raise SystemExit(window.session.state.sentence or "the model was not loaded in time")
    return window


def closed(window: Window) -> None:
    """Close it and wait for what is behind it."""
    window.close()
    finish(window)


def idle(seconds: float = 3.0) -> float:
    """The share of a core that the whole program takes while nothing is asked of it."""
    wait(lambda: False, 2)  # what was written is being stored
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    loop = QEventLoop()
    QTimer.singleShot(round(seconds * 1000), loop.quit)
    loop.exec()
    return round((time.process_time() - begin_cpu_s) / (time.perf_counter() - begin_s), 4)


def long_conversation(session: Session, window: Window) -> int:
    """Milliseconds until a conversation of a thousand messages is on the screen."""
    parent = None
    session.store.create("long", "A thousand messages")
    for number in range(1000):
        role = "assistant" if number % 2 else "user"
        session.store.add(Message(f"m{number}", "long", parent, role, PARAGRAPH * (10 if number % 2 else 2)))
        parent = f"m{number}"
    session.store.flush(60)
    begin_s = time.perf_counter()
    session.open("long")
    window.repaint()
    return round((time.perf_counter() - begin_s) * 1000)


def answer(session: Session, question: str, limit_s: float) -> dict[str, object]:
    """Frame gaps and the share of a core of the window's own thread while an answer is written."""
    session.new_chat()
    gaps, begin_s, begin_cpu_s = Gaps(), time.perf_counter(), time.thread_time()
    session.send(question)
    wait(lambda: not session.running, limit_s)
    seconds, cpu_s = time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s
    facts = session.chat.turns[-1].message.facts
    count = int(facts.get("completion_tokens", 0))
    return {
        "tokens": count,
        "tokens_per_s": round(count / seconds, 1),
        "share_of_a_core": round(cpu_s / seconds, 3),
        "share_at_30_tokens_per_s": round(cpu_s / max(1, count) * 30, 4),
        "frames": gaps.end(),
    }


def scripted(folder: Path) -> dict[str, object]:
    """Figures of the window alone: the engine is a script that writes faster than any real one."""
    (folder / "models").mkdir(parents=True)
    script = ScriptedApi(folder / "models")
    window = opened(folder, script, script.add_model())
    count = 20_000
    script.tokens = [PARAGRAPH[at % 60 : at % 60 + 4] + ("\n\n" if at % 40 == 0 else "") for at in range(count)]
    script.token_s = 0.001
    found: dict[str, object] = {
        "open_1000_messages_ms": long_conversation(window.session, window),
        "long_answer": answer(window.session, "Write a long answer.", 300),
        "idle_share_of_a_core": idle(),
    }
    closed(window)
    return found


def real(folder: Path, model: Path) -> dict[str, object]:
    """Figures beside the real engine, which wants all cores for itself."""
    folder.mkdir(parents=True)
    window = opened(folder, None, model)
    window.session.preferences.change(sampling={"max_tokens": 400, "temperature": 0.0})
    found = {
        "long_answer": answer(window.session, "Tell a long story about a lighthouse keeper.", 300),
        "idle_share_of_a_core": idle(),
    }
    closed(window)
    return found


def main() -> None:
    """Measure, and print one JSON object."""
    create_application(["bench"])
    with tempfile.TemporaryDirectory() as name:
        found = {"window_alone": scripted(Path(name) / "scripted")}
        for number, model in enumerate(sys.argv[1:]):
            found[f"with {Path(model).stem}"] = real(Path(name) / str(number), Path(model).resolve())
    print(json.dumps(found, indent=1))  # noqa: T201 (what the command is for)


if __name__ == "__main__":
    main()
