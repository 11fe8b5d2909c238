"""Makes the screenshots of the window with a scripted engine: `python tests/screens.py FOLDER [NAME...]`.

Those in `docs/screens` are made anew by `python tests/screens.py docs/screens` followed by the names that lie there.

Needs a screen (or `xvfb-run -s "-screen 0 2200x1500x24"`); pictures are taken of the window itself.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from PySide6.QtCore import QEventLoop, QMimeData, QPoint, Qt, QTimer, QUrl
from PySide6.QtGui import QDragEnterEvent
from PySide6.QtWidgets import QApplication, QDialog

from engine.settings import ServerSettings
from gui.app import Folders, create_application, create_window, finish
from gui.data.preferences import PreferencesFile
from gui.window import Window
from tests.scripted import ScriptedApi, api, report

SMALL = Path(__file__).resolve().parent.parent / "docs" / "screens"

ANSWER = '''Two words share a prefix as far as their letters agree, so it is enough \
to compare the **smallest** and the **largest** word of the list:

```python
def longest_common_prefix(words: list[str]) -> str:
    """The longest text that every word begins with."""
    if not words:
        return ""
    low, high = min(words), max(words)  # every other word lies between these
    for index, letter in enumerate(low):
        if letter != high[index]:
            return low[:index]
    return low
```

Some examples:

| words | prefix |
|:------|:-------|
| `flower`, `flow`, `flight` | `fl` |
| `dog`, `racecar` | *(empty)* |
| `inn`, `inner`, `inglenook` | `in` |

It takes time proportional to the number of words, because `min` and `max` look at each word once:

1. Sorting is not needed.
2. Nothing is copied but the result.
   - For *very long* words the loop ends at the first difference.
   - An empty list gives an empty prefix.

> A prefix tree is worth building only when many such questions are asked of the same words.
'''

CHINESE = '''壁炉里的烟靠**热空气上升**来带走。可以分成三步来看：

1. 火焰加热空气，热空气变轻；
2. 烟囱里的热气柱产生向上的吸力（“烟囱效应”）；
3. 房间里的新鲜空气从炉口补充进来，把烟一起带走。

```python
def 抽力(高度: float, 室内: float, 室外: float) -> float:
    """压差，单位帕。温度为开尔文。"""
    return 3460 * 高度 * (1 / 室外 - 1 / 室内)
```

> 烟囱越高、温差越大，抽力就越强。
'''

TITLES = (
    (
        "How a fireplace draws",
        "Explain how a fireplace draws its smoke.",
        "Warm air is light, so it rises up the flue.",
    ),
    ("Moving Thursday's meeting", "Help me move a meeting.", "Of course: here is a short and friendly mail."),
    ("壁炉为什么能排烟？", "壁炉为什么能排烟？", CHINESE),
    ("Regular expression for dates", "A regex for ISO dates, please.", "`\\d{4}-\\d{2}-\\d{2}` is a good start."),
    ("Names for a cat", "Ten names for a grey cat.", "Ash, Cinder, Ember, Smoke, Slate …"),
    ("周报润色", "帮我润色这段周报。", "好的，这是润色后的版本。"),
)


def wait(ms: int) -> None:
    """Let the window work."""
    loop = QEventLoop()
    QTimer.singleShot(ms, loop.quit)
    loop.exec()


def until(test: Callable[[], bool], ms: int = 5000) -> None:
    """Let the window work until something is so."""
    for _ in range(ms // 20):
        if test():
            wait(60)
            return
        wait(20)
    raise TimeoutError


class Studio:
    """One window with a script, in a folder of its own."""

    def __init__(self, *, model: bool = True, **preferences: object) -> None:
        self.temporary = tempfile.TemporaryDirectory()
        folder = Path(self.temporary.name)
        (folder / "models").mkdir()
        self.script = ScriptedApi(folder / "models")
        if model:
            self.script.add_model("Qwen2.5 Coder 1.5B Instruct", 1_020_000_000)
            first = self.script.add_model("SmolLM2 135M Instruct", 92_000_000)
            preferences = {"model": str(first), **preferences}
        file = PreferencesFile(folder / "settings.json")
        file.change(**{"language": "en", "theme": "light", "greeted": True, **preferences})
        file.save()
        self.window: Window = create_window(engine_factory=self.script, folders=Folders(folder))
        self.window.resize(1320, 840)
        self.session = self.window.session

    def fill(self) -> None:
        """Some earlier conversations."""
        from gui.data.store import Message

        for number, (title, question, answer) in reversed(list(enumerate(TITLES))):
            self.session.store.create(f"c{number}", title)
            self.session.store.add(Message(f"q{number}", f"c{number}", None, "user", question))
            facts = {"completion_tokens": 212, "decode_tps": 31.4, "first_s": 0.4}
            self.session.store.add(
                Message(
                    f"a{number}", f"c{number}", f"q{number}", "assistant", answer, model="SmolLM2 135M", facts=facts
                )
            )
        self.window.chat_page.sidebar.refresh()

    def show(self, *, ready: bool = True) -> None:
        self.window.show()
        until(lambda: self.session.engine_ready)
        if ready:
            until(lambda: self.session.state.kind in {"ready", "failed"})

    def ask(self, text: str, answer: str, *, complete: bool = True, token_s: float = 0.0) -> None:
        self.script.tokens = [answer[at : at + 4] for at in range(0, len(answer), 4)]
        self.script.token_s = token_s
        self.window.chat_page.box.composer.setPlainText(text)
        self.window.chat_page.box.send.click()
        if complete:
            until(lambda: not self.session.running, 20000)

    def close(self) -> None:
        self.window.close()
        finish(self.window)
        self.window.deleteLater()
        wait(20)
        self.temporary.cleanup()


def first_run(studio: Studio) -> None:
    studio.show(ready=False)
    wait(400)


def welcome(studio: Studio) -> None:
    studio.fill()
    studio.show()


def loading(studio: Studio) -> None:
    studio.script.step_s, studio.script.load_steps = 2.0, 7
    studio.fill()
    studio.show(ready=False)
    until(lambda: studio.session.state.share is not None)
    wait(2100)


def chat(studio: Studio) -> None:
    studio.fill()
    studio.show()
    studio.ask("Write a Python function that finds the longest common prefix of some words.", ANSWER, token_s=0.004)
    wait(400)
    studio.window.chat_page.transcript.verticalScrollBar().setValue(0)
    wait(200)


def chat_end(studio: Studio) -> None:
    chat(studio)
    studio.window.chat_page.transcript.go_to_end()
    wait(200)


def streaming(studio: Studio) -> None:
    studio.fill()
    studio.show()
    studio.ask("Write a Python function that finds the longest common prefix.", ANSWER, complete=False, token_s=0.012)
    wait(1900)


def prefill(studio: Studio) -> None:
    studio.fill()
    studio.show()
    studio.script.prefill_steps, studio.script.step_s = 24, 0.9
    studio.ask(
        "Summarise this report.\n\n" + "The kiln was lit at dawn and kept at a steady glow. " * 12,
        ANSWER,
        complete=False,
    )
    wait(5200)


def stopped(studio: Studio) -> None:
    studio.fill()
    studio.show()
    studio.ask("Tell me about chimneys.", ANSWER, complete=False, token_s=0.02)
    wait(900)
    studio.window.chat_page.box.stop.click()
    until(lambda: not studio.session.running)
    wait(300)


def failed(studio: Studio) -> None:
    studio.fill()
    studio.show()
    studio.script.failure = (
        "The answer needs 5,210 tokens, but the context holds 4,096; start a new chat or load the model with a longer"
        " context."
    )
    studio.ask("Tell me about chimneys.", "A chimney is a long story. " * 4)
    wait(300)


def search(studio: Studio) -> None:
    studio.fill()
    studio.show()
    studio.session.open("c2")
    studio.window.chat_page.sidebar.search.setText("烟")
    wait(500)


def dragging(studio: Studio) -> None:
    studio.fill()
    studio.show()
    mime = QMimeData()
    mime.setUrls([QUrl.fromLocalFile("/tmp")])
    event = QDragEnterEvent(
        QPoint(300, 300), Qt.DropAction.CopyAction, mime, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
    )
    QApplication.sendEvent(studio.window, event)
    wait(200)


def models(studio: Studio) -> None:
    studio.show()
    studio.window.show_page("models")
    wait(300)


def models_empty(studio: Studio) -> None:
    studio.show(ready=False)
    studio.window.show_page("models")
    wait(300)


def model_report(studio: Studio) -> None:
    studio.script.reports = lambda path: report(
        path, problems=(api.Problem(False, "The folder holds no LICENSE file; the licence is taken from README.md."),)
    )
    models(studio)
    folder = Path(studio.temporary.name) / "Qwen2.5-Coder-0.5B-Instruct"
    folder.mkdir()
    studio.window.models_page.open_model(folder)
    wait(400)


def model_quality(studio: Studio) -> None:
    studio.session.preferences.change(bandwidth_gb=18.4)
    model_report(studio)
    studio.window.findChild(object, "chooseQuality").click()
    wait(300)


def model_problem(studio: Studio) -> None:
    sentence = (
        "model-00002-of-00003.safetensors is missing; model.safetensors.index.json names it for 96 tensors."
        " Download it again."
    )
    studio.script.reports = lambda path: report(path, problems=(api.Problem(True, sentence),))
    models(studio)
    studio.window.models_page.open_model(Path(studio.temporary.name))
    wait(400)


def converting(studio: Studio) -> None:
    studio.script.step_s, studio.script.convert_steps = 0.6, 40
    model_report(studio)
    studio.window.findChild(object, "convert").click()
    wait(9500)


def converted(studio: Studio) -> None:
    model_report(studio)
    studio.window.findChild(object, "convert").click()
    wait(900)


def diagnostics(studio: Studio) -> None:
    studio.show()
    rows = [{"model": "SmolLM2 135M Instruct", "at_s": 1_790_000_000, "decode_tps": 96.1, "prefill_tps": 840.0,
             "threads": 4, "tier": "avx2"}]  # fmt: skip
    studio.session.preferences.change(benchmarks=rows)
    studio.window.show_page("diagnostics")
    studio.window.diagnostics_page.measure_memory()
    wait(3400)


def graded(studio: Studio) -> None:
    converted(studio)
    studio.window.findChild(object, "measureFidelity").click()
    until(lambda: studio.window.findChild(object, "fidelityGrade").isVisible(), 20_000)


def measured(studio: Studio) -> None:
    studio.show()
    studio.session.preferences.change(bandwidth_gb=18.4)
    page = studio.window.diagnostics_page
    studio.window.show_page("diagnostics")
    for entry in studio.session.models:
        page.measure_model(entry.path)
        wait(300)
    page.ensureWidgetVisible(page.findChild(object, "layerColumns"), 0, 40)
    wait(300)


def comparing(studio: Studio) -> None:
    studio.show()
    studio.window.show_page("models")
    studio.window.models_page.open_comparison()
    studio.window.findChild(object, "compareMessage").setPlainText("Why does a chimney draw? Answer in one sentence.")
    studio.script.tokens = ("Warm air is lighter than the cold air outside", ", so it rises up the flue", ".")
    studio.window.findChild(object, "compareStart").click()
    until(lambda: studio.window.findChild(object, "voteFirst").isVisible(), 20_000)


def compared(studio: Studio) -> None:
    comparing(studio)
    studio.window.findChild(object, "voteFirst").click()
    wait(300)


def diagnostics_end(studio: Studio) -> None:
    diagnostics(studio)
    studio.window.diagnostics_page.verticalScrollBar().setValue(10_000)
    wait(300)


def server(studio: Studio) -> None:
    studio.show()
    studio.session.preferences.change(server=ServerSettings(port=0))
    studio.window.show_page("server")
    studio.window.findChild(object, "newKey").click()
    studio.window.findChild(object, "startServer").click()
    until(lambda: studio.session.serving.state.kind == "on", 20_000)
    wait(300)


def server_end(studio: Studio) -> None:
    server(studio)
    studio.window.server_page.verticalScrollBar().setValue(10_000)
    wait(300)


def thinking(studio: Studio) -> None:
    studio.fill()
    studio.show()
    thought = "<think>\nThe user wants a short answer.\nWarm air rises, so the flue draws.\n</think>\n\n"
    studio.ask(
        "Why does a chimney draw?", thought + "Because **warm air rises**: $$\\Delta p = \\rho g h$$", token_s=0.02
    )
    studio.window.chat_page.transcript.act("unfold", studio.session.chat.turns[-1].message.id)
    wait(300)


def tree(studio: Studio) -> None:
    from gui.data.store import Attached

    studio.fill()
    studio.session.pin("c1", pinned=True)
    studio.session.move("c2", "Fireplaces")
    studio.session.move("c4", "Fireplaces")
    studio.show()
    studio.ask("Summarise the attached notes.", "They say that the kiln was lit at dawn.")
    studio.window.chat_page.box.composer.clear()
    box = studio.window.chat_page.box
    studio.session.regenerate()
    until(lambda: not studio.session.running)
    box._files[:] = [Attached("kiln-notes.docx", "text " * 900), Attached("temperatures.xlsx", "1,2\n" * 400)]
    for file in box._files:
        studio.session.count_file(file.name, file)
    box._show_files()
    studio.script.hold.clear()
    studio.session.regenerate()
    studio.session.send("And then tell me what to do next time.")
    studio.script.hold.set()
    box.composer.setPlainText("Compare both files, please.")
    wait(600)


def tokens(studio: Studio) -> None:
    studio.fill()
    studio.session.preferences.change(keep_probabilities=True)
    studio.show()
    studio.ask("Why does a chimney draw?", "Because warm air is lighter than cold air, it rises up the flue.")
    studio.window.chat_page.transcript.act("tokens", studio.session.chat.turns[-1].message.id)
    wait(500)


def settings(studio: Studio) -> None:
    studio.show()
    studio.window.show_page("settings")
    wait(300)


def narrow(studio: Studio) -> None:
    studio.window.resize(560, 720)
    chat(studio)


def chat_chinese(studio: Studio) -> None:
    studio.fill()
    studio.show()
    studio.ask("壁炉为什么能排烟？请简单说明，并给出一个计算抽力的函数。", CHINESE)
    wait(400)


SCENES: dict[str, tuple[Callable[[Studio], None], dict[str, object]]] = {
    "first-run": (first_run, {"model": False, "greeted": False}),
    "welcome": (welcome, {}),
    "welcome-dark": (welcome, {"theme": "dark"}),
    "loading": (loading, {}),
    "chat": (chat, {}),
    "chat-dark": (chat, {"theme": "dark"}),
    "chat-end": (chat_end, {}),
    "streaming-dark": (streaming, {"theme": "dark"}),
    "prefill": (prefill, {}),
    "stopped": (stopped, {}),
    "failed-dark": (failed, {"theme": "dark"}),
    "search": (search, {}),
    "dragging": (dragging, {}),
    "models": (models, {}),
    "models-empty": (models_empty, {"model": False}),
    "model-report": (model_report, {}),
    "model-quality": (model_quality, {}),
    "model-quality-dark": (model_quality, {"theme": "dark"}),
    "model-quality-chinese": (model_quality, {"language": "zh_CN"}),
    "model-report-dark": (model_report, {"theme": "dark"}),
    "model-problem": (model_problem, {}),
    "converting": (converting, {}),
    "converting-dark": (converting, {"theme": "dark"}),
    "converted": (converted, {}),
    "diagnostics": (diagnostics, {}),
    "diagnostics-dark": (diagnostics, {"theme": "dark"}),
    "diagnostics-end": (diagnostics_end, {}),
    "graded": (graded, {}),
    "graded-chinese-dark": (graded, {"language": "zh_CN", "theme": "dark"}),
    "diagnostics-measured": (measured, {}),
    "diagnostics-measured-dark": (measured, {"theme": "dark"}),
    "comparing": (comparing, {}),
    "compared-dark": (compared, {"theme": "dark"}),
    "comparing-chinese": (comparing, {"language": "zh_CN"}),
    "diagnostics-chinese": (diagnostics, {"language": "zh_CN"}),
    "server": (server, {}),
    "server-dark": (server, {"theme": "dark"}),
    "server-end-chinese": (server_end, {"language": "zh_CN"}),
    "thinking": (thinking, {}),
    "tree": (tree, {}),
    "tree-dark": (tree, {"theme": "dark"}),
    "tokens": (tokens, {}),
    "tokens-dark": (tokens, {"theme": "dark"}),
    "contrast": (chat, {"theme": "contrast"}),
    "settings": (settings, {}),
    "settings-dark": (settings, {"theme": "dark"}),
    "narrow": (narrow, {}),
    "chat-chinese": (chat_chinese, {"language": "zh_CN"}),
    "chat-chinese-dark": (chat_chinese, {"language": "zh_CN", "theme": "dark"}),
    "model-report-chinese": (model_report, {"language": "zh_CN"}),
    "settings-chinese": (settings, {"language": "zh_CN"}),
    "first-run-chinese": (first_run, {"language": "zh_CN", "model": False, "greeted": False}),
    "large-text": (chat, {"text_size": 140}),
}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    create_application(["screens"])
    for name in sys.argv[2:] or SCENES:
        scene, preferences = SCENES[name]
        studio = Studio(**preferences)
        scene(studio)
        picture = studio.window.grab()
        if folder.name == SMALL.name:  # what is kept with the sources stays small
            picture = picture.scaledToWidth(760, Qt.TransformationMode.SmoothTransformation)
        picture.save(str(folder / f"{name}.png"))
        for dialog in studio.window.findChildren(QDialog):
            dialog.grab().save(str(folder / f"{name}-dialog.png"))
        print(name, flush=True)  # noqa: T201 (tells how far it is)
        studio.close()


if __name__ == "__main__":
    main()
