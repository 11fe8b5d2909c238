"""The window is on the screen before the engine is imported; closing it in any state ends everything (case G07).

One window at a time, whatever a killed one left behind (case G13).
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gui.claim import Claim
from gui.data.store import Store

ROOT = Path(__file__).resolve().parent.parent


def run(script, *arguments, timeout=30):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "QT_QPA_PLATFORM": "offscreen"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_importing_the_window_imports_no_engine():
    done = run("""
        import sys
        import gui.app
        heavy = ("engine.core", "engine.models", "engine.text", "numba", "numpy", "llvmlite", "tokenizers", "jinja2")
        print([name for name in sys.modules if name.startswith(heavy)])
    """)
    assert done.stdout == "[]\n", done.stderr


def test_the_window_is_painted_before_the_engine_is_asked_for(tmp_path):
    done = run(
        """
        import sys, threading
        from pathlib import Path
        from PySide6.QtCore import QTimer
        from gui.app import Folders, create_application, create_window, finish
        from tests.scripted import ScriptedApi

        application = create_application([])
        told = []
        def factory():
            told.append(("engine", threading.current_thread() is threading.main_thread()))
            return ScriptedApi(Path(sys.argv[1]))
        window = create_window(engine_factory=factory, folders=Folders(Path(sys.argv[1])))
        window.painted.connect(lambda: told.append(("painted", window.isVisible())))
        assert told == []
        window.show()
        QTimer.singleShot(800, window.close)
        application.exec()
        finish(window)
        print(told)
        """,
        tmp_path,
    )
    assert done.stdout == "[('painted', True), ('engine', False)]\n", done.stderr


@pytest.mark.parametrize(
    "state", ["starting", "importing", "loading", "prefill", "decode", "convert", "inspect", "idle"]
)
def test_closing_in_any_state_is_quick(open_window, state):
    from tests.scripted import ScriptedApi

    slow = state in {"starting", "importing", "loading"}
    if state == "importing":
        folder = open_window(show=False).folder  # a folder with a model in it
        script = ScriptedApi(folder / "models")
        script.add_model("SmolLM2 135M")
        script.import_s = 1.0
        driver = open_window(script=script, wait=False)
        driver.qtbot.wait(50)
    else:
        driver = open_window(wait=not slow)
    script = driver.script
    if state == "loading":
        script.step_s = 10
        driver.until(lambda: driver.session.state.kind == "loading")
    elif state == "prefill":
        script.prefill_steps, script.step_s = 1000, 0.1
        driver.send("go")
        driver.until(lambda: driver.session.answer and driver.session.answer.turn.activity.stage == "prefill")
    elif state == "decode":
        script.tokens, script.token_s = ["word "] * 100_000, 0.002
        driver.send("go")
        driver.until(lambda: "word" in driver.transcript.visible_text())
    elif state == "convert":
        script.step_s, script.convert_steps = 0.2, 1000
        driver.drop(driver.folder)
        driver.until(lambda: driver.has("convert"))
        driver.click("convert")
        driver.until(lambda: driver.script.conversions)
    elif state == "inspect":
        script.reports = lambda path: time.sleep(0.5)
        driver.drop(driver.folder)
    assert driver.close() < 3
    store = Store(driver.folder / "conversations.sqlite")
    for conversation in store.conversations():
        question, answer = store.branch(conversation)
        assert question.content == "go"
        assert answer.state == "interrupted"
        assert bool(answer.content) == (state == "decode")
    store.close()


PROGRAM = """
    import sys, threading, time
    from pathlib import Path
    from PySide6.QtCore import QTimer
    from PySide6.QtWidgets import QApplication
    from gui import app
    from tests.scripted import ScriptedApi

    folder, state = Path(sys.argv[1]), sys.argv[2]
    (folder / "models").mkdir()
    script = ScriptedApi(folder / "models")
    script.starter = script.add_model("m")
    script.tokens, script.token_s = ["word "] * 100_000, 0.002
    if state == "stuck":
        script.Engine = type("Stuck", (), {"load": lambda *a: None, "close": lambda self: time.sleep(1000)})

    def window():
        return next(known for known in QApplication.topLevelWidgets() if known.objectName() == "window")

    def begin():
        shown = window()
        if state == "answering":
            shown.chat_page.box.composer.setPlainText("go")
            shown.chat_page.box.send.click()
        QTimer.singleShot(700, close)

    def close():
        print("closing", flush=True)
        window().close()

    app.create_application([])
    QTimer.singleShot(1500, begin)
    code = app.main([], engine_factory=lambda: script, folders=app.Folders(folder))
    print("ended", flush=True)
    raise SystemExit(code)
"""


@pytest.mark.parametrize("state", ["answering", "idle", "stuck"])
def test_the_program_ends_with_zero(tmp_path, state):
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), state],
        cwd=ROOT,
        env={**os.environ, "QT_QPA_PLATFORM": "offscreen"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    while process.stdout.readline() != "closing\n":
        assert time.monotonic() - begin < 60, process.stderr.read()
    begin = time.monotonic()
    errors = process.communicate(timeout=20)[1]
    assert process.returncode == 0, errors
    assert time.monotonic() - begin < 4  # three, and the end of the interpreter on a busy machine
    assert "Destroyed" not in errors
    assert "Traceback" not in errors


def test_the_text_of_a_killed_window_is_there(tmp_path):
    """SIGKILL while an answer streams: all but the last second and a half of it is found again."""
    done = run(
        """
        import os, signal, sys, time
        from pathlib import Path
        from PySide6.QtCore import QTimer
        from gui.app import Folders, create_application, create_window
        from tests.scripted import ScriptedApi

        folder = Path(sys.argv[1])
        (folder / "models").mkdir()
        script = ScriptedApi(folder / "models")
        script.starter = script.add_model("m")
        script.tokens, script.token_s = [f"{number} " for number in range(100_000)], 0.005
        application = create_application([])
        window = create_window(engine_factory=script, folders=Folders(folder))
        window.show()

        def ask():
            if window.session.state.kind != "ready":
                QTimer.singleShot(50, ask)
                return
            window.session.send("count")
            QTimer.singleShot(3300, die)

        def die():
            print(window.session.answer.turn.message.content, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        ask()
        application.exec()
        """,
        tmp_path,
    )
    assert done.returncode == -9, done.stderr
    shown = done.stdout.split()
    store = Store(tmp_path / "conversations.sqlite")
    question, answer = store.branch(store.conversations()[0])
    store.close()
    kept = answer.content.split()
    assert question.content == "count"
    assert answer.state == "interrupted"
    assert kept == shown[: len(kept)]
    assert len(kept) >= len(shown) / 3.3 * 1.5  # of 3.3 s, at least the first 1.5 on a machine that is behind


def test_qt_keeps_its_hands_off_none(qapp):
    """PySide6 6.12 on Python 3.11 drops a reference to None at every call that returns nothing, and dies of it."""
    from PySide6.QtCore import QObject

    made = QObject()
    before = sys.getrefcount(None)
    for _ in range(2000):
        made.setObjectName("a")
    assert abs(sys.getrefcount(None) - before) < 500


TWICE = """
    import sys, time
    from pathlib import Path
    from PySide6.QtCore import QTimer
    from PySide6.QtWidgets import QApplication
    from gui import app
    from tests.scripted import ScriptedApi

    folder = Path(sys.argv[1])
    (folder / "models").mkdir(exist_ok=True)
    application = app.create_application([])

    def window():
        return next(known for known in QApplication.topLevelWidgets() if known.objectName() == "window")

    def minimise():
        window().showMinimized()
        print("open", flush=True)
        look.start(20)

    def see():
        if not window().isMinimized():
            look.stop()
            print("forward", flush=True)
            window().close()

    look = QTimer()
    look.timeout.connect(see)
    QTimer.singleShot(800, minimise)
    raise SystemExit(app.main([], engine_factory=lambda: ScriptedApi(folder), folders=app.Folders(folder)))
"""


def open_twice(folder):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TWICE), str(folder)],
        cwd=ROOT,
        env={**os.environ, "QT_QPA_PLATFORM": "offscreen"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_second_start_brings_the_first_window_forward_and_ends(tmp_path):
    first = open_twice(tmp_path)
    assert first.stdout.readline() == "open\n"
    second = open_twice(tmp_path)
    said, errors = second.communicate(timeout=30)
    assert (said, second.returncode) == ("", 0)
    assert "inglenook: Inglenook is already open; its window was brought forward.\n" in errors
    assert first.communicate(timeout=30)[0] == "forward\n"
    assert first.returncode == 0
    assert not list(tmp_path.glob("window.*"))


def test_a_killed_window_does_not_keep_the_next_from_opening(tmp_path):
    first = open_twice(tmp_path)
    assert first.stdout.readline() == "open\n"
    first.kill()
    first.communicate()
    assert (tmp_path / "window.lock").exists()
    second = open_twice(tmp_path)
    assert second.stdout.readline() == "open\n"
    second.kill()
    second.communicate()


def test_a_lock_nobody_answers_for_is_taken_over(qapp, tmp_path):
    held, later, last = Claim(tmp_path), Claim(tmp_path), Claim(tmp_path)
    assert held.take()
    begin = time.monotonic()
    assert later.take(answer_s=0.3)
    assert time.monotonic() - begin >= 0.3
    later.release()
    begin = time.monotonic()
    assert last.take()  # nothing is left of the one that was gone
    assert time.monotonic() - begin < 1
    last.release()


def test_a_folder_that_cannot_hold_a_lock_still_opens(tmp_path):
    assert Claim(tmp_path / "missing").take()
