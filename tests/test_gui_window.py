"""The window as a person drives it, by object names, over a scripted engine."""

from __future__ import annotations

import json
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from PySide6.QtCore import QMimeData, QPoint, QPointF, Qt, QTimer, QUrl
from PySide6.QtGui import QAccessible, QColor, QDragEnterEvent, QDropEvent, QInputMethodEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import (
    QAbstractButton,
    QApplication,
    QCheckBox,
    QComboBox,
    QDoubleSpinBox,
    QFileDialog,
    QLabel,
    QLineEdit,
    QMenu,
    QSlider,
    QSpinBox,
    QWidget,
)

from engine import api
from engine.settings import Sampling
from gui.bridge import WorkFailed
from gui.data.preferences import PreferencesFile
from gui.data.store import Message, Store
from gui.kit.theme import DARK, LIGHT, look
from tests.scripted import ScriptedApi, report


def contents(driver):
    return [(turn.message.role, turn.message.content) for turn in driver.session.chat.turns]


# ---- chat


def test_a_conversation(open_window):
    driver = open_window()
    assert driver.ask("Hello?") == "Hello, world."
    assert "Hello, world." in driver.transcript.visible_text()
    driver.script.tokens = ["And", " again."]
    driver.ask("More!")
    asked = driver.script.requests[-1]
    assert [(message.role, message.content) for message in asked.prompt] == [
        ("user", "Hello?"),
        ("assistant", "Hello, world."),
        ("user", "More!"),
    ]
    assert driver.titles() == ["Hello?"]
    assert "tokens/s" in driver.find("statusSpeed", QLabel).text()
    gauge = driver.find("contextGauge")
    assert (gauge.value(), gauge.maximum()) == (57 + 2, 4096)


def test_history_is_there_after_a_restart(open_window):
    driver = open_window()
    driver.ask("Hello?")
    again = driver.reopen()
    assert again.titles() == ["Hello?"]
    again.session.open(again.session.store.conversations()[0].id)
    assert contents(again) == [("user", "Hello?"), ("assistant", "Hello, world.")]
    assert "Hello, world." in again.transcript.visible_text()
    again.ask("Go on")
    assert [message.content for message in again.script.requests[-1].prompt] == ["Hello?", "Hello, world.", "Go on"]
    again.close()


def test_the_message_is_stored_before_the_answer_is_asked_for(open_window):
    driver = open_window()
    driver.script.hold.clear()
    seen = []
    engine = driver.script.engine
    submit = engine.submit

    def watching(request, sink):
        other = Store(driver.folder / "copy.sqlite")
        other.close()
        reader = driver.session.store._reader
        seen.append(reader.execute("SELECT content, state FROM message ORDER BY number").fetchall())
        submit(request, sink)

    engine.submit = watching
    driver.send("keep me")
    driver.until(lambda: seen)
    assert seen == [[("keep me", "done"), ("", "growing")]]
    driver.script.hold.set()
    driver.until(lambda: not driver.session.running)


def test_text_appears_while_it_is_written_and_is_stored_every_second(open_window):
    driver = open_window()
    driver.script.tokens = ["piece "] * 400
    driver.script.token_s = 0.005
    driver.send("go")
    driver.until(lambda: "piece piece" in driver.transcript.visible_text())
    assert driver.has("stop")
    assert not driver.has("send")
    driver.until(lambda: driver.session.store._read("SELECT count(*) FROM piece", ())[0][0] >= 1)
    driver.click("stop")
    driver.until(lambda: not driver.session.running)
    assert driver.session.store._read("SELECT count(*) FROM piece", ())[0][0] == 0


def test_stop_keeps_what_is_written(open_window):
    driver = open_window()
    driver.script.tokens = ["word "] * 1000
    driver.script.token_s = 0.004
    driver.send("go")
    driver.until(lambda: "word" in driver.transcript.visible_text())
    QTest.keyClick(driver.window, Qt.Key.Key_Escape)
    driver.until(lambda: not driver.session.running, 1000)
    last = driver.session.chat.turns[-1].message
    assert last.reason == "cancelled"
    assert "word word" in last.content
    assert driver.texts("answerEnding") == ["Stopped."]
    assert driver.has("send")


def test_stop_during_the_prompt(open_window):
    driver = open_window()
    driver.script.prefill_steps, driver.script.step_s = 100, 0.05
    driver.send("go")
    driver.until(lambda: driver.window.findChild(QWidget, "answerStatus") is not None)
    driver.until(lambda: "of 12,800 tokens" in driver.find("answerStatus").accessibleName())
    driver.click("stop")
    driver.until(lambda: not driver.session.running, 1000)
    assert driver.session.chat.turns[-1].message.content == ""


def test_regenerate_keeps_the_old_answer_as_a_version(open_window):
    driver = open_window()
    driver.ask("Hello?")
    driver.script.tokens = ["Another"]
    driver.click("regenerate")
    driver.until(lambda: not driver.session.running)
    assert contents(driver) == [("user", "Hello?"), ("assistant", "Another")]
    assert [message.content for message in driver.script.requests[-1].prompt] == ["Hello?"]
    assert len(driver.session.store.versions(driver.session.chat.turns[-1].message)) == 2


def test_regenerate_by_key(open_window):
    driver = open_window()
    driver.ask("Hello?")
    QTest.keyClick(driver.window, Qt.Key.Key_R, Qt.KeyboardModifier.ControlModifier)
    driver.until(lambda: len(driver.script.requests) == 2 and not driver.session.running)


def test_without_streaming_the_answer_appears_whole(open_window):
    driver = open_window()
    driver.script.tokens = ["first ", "second ", "third"]
    driver.script.token_s = 0.15
    driver.find("streaming", QCheckBox).click()
    driver.send("go")
    seen = []
    driver.until(lambda: (seen.append(driver.transcript.visible_text()), not driver.session.running)[1])
    assert not any("first" in text for text in seen[:-3])
    assert "first second third" in driver.transcript.visible_text()
    stored = driver.session.store
    assert stored.branch(stored.conversations()[0])[-1].content == "first second third"


def test_a_failed_answer_says_why_and_the_chat_goes_on(open_window):
    driver = open_window()
    driver.script.failure = "The context holds 4,096 tokens; this needs 5,000."
    driver.ask("Hello?")
    assert driver.texts("answerEnding") == [driver.script.failure]
    driver.script.failure = ""
    assert driver.ask("Again") == "Hello, world."


def test_questions_without_answers_are_asked_together(open_window):
    driver = open_window()
    driver.script.tokens = []
    driver.ask("one")
    driver.script.tokens = ["fine"]
    driver.ask("two")
    assert [(message.role, message.content) for message in driver.script.requests[-1].prompt] == [
        ("user", "one\n\ntwo")
    ]


def test_answers_go_on_in_the_background(open_window):
    driver = open_window()
    driver.script.hold.clear()
    driver.send("first")
    driver.click("newChat")
    assert contents(driver) == []
    driver.send("second")
    assert len(driver.session.running) == 2
    driver.script.hold.set()
    driver.until(lambda: not driver.session.running)
    for title in ("first", "second"):
        identity = next(known.id for known in driver.session.store.conversations() if known.title == title)
        driver.session.open(identity)
        assert contents(driver) == [("user", title), ("assistant", "Hello, world.")]


def test_brackets_go_through_unchanged(open_window):
    text = "<smirk> hi <b>x</b> &lt; vector<int>"
    driver = open_window()
    driver.script.tokens = [text]
    assert driver.ask(text) == text
    assert driver.transcript.visible_text().count("<smirk> hi <b>x</b>") == 2
    assert driver.transcript.toPlainText() == f"{text}\n\n{text}"


@pytest.mark.parametrize("text", ["half \ud83d pair", "nul \0 byte", "\u202eoverride", "a" * 100_000])
def test_odd_messages(open_window, text):
    driver = open_window()
    driver.script.tokens = [text]
    driver.send(text)
    driver.until(lambda: not driver.session.running)
    store = driver.session.store
    assert len(store.branch(store.conversations()[0])) == 2


def test_an_empty_message_is_not_sent(open_window):
    driver = open_window()
    driver.write("  \n ")
    assert not driver.find("send").isEnabled()
    QTest.keyClick(driver.composer, Qt.Key.Key_Return)
    assert driver.script.requests == []


def test_enter_sends_from_the_window(open_window):
    driver = open_window()
    QTest.keyClicks(driver.composer, "hello")
    QTest.keyClick(driver.composer, Qt.Key.Key_Return)
    driver.until(lambda: len(driver.script.requests) == 1)
    assert driver.composer.toPlainText() == ""


def test_closing_while_an_input_method_is_open(open_window):
    driver = open_window()
    QApplication.sendEvent(driver.composer, QInputMethodEvent("nihao", []))
    assert driver.close() < 3
    assert driver.script.requests == []


# ---- conversations


def test_drafts_are_kept_per_conversation(open_window):
    driver = open_window()
    driver.ask("one")
    driver.write("half a thou")
    driver.until(lambda: driver.session.draft == "half a thou")
    driver.click("newChat")
    assert driver.composer.toPlainText() == ""
    driver.write("new draft")
    driver.until(lambda: driver.session.draft == "new draft")
    driver.session.open(driver.session.store.conversations()[0].id)
    assert driver.composer.toPlainText() == "half a thou"
    driver.write("half a thought")
    again = driver.reopen()
    assert again.composer.toPlainText() == "new draft"
    again.session.open(again.session.store.conversations()[0].id)
    assert again.composer.toPlainText() == "half a thought"
    again.close()


def fill(driver):
    for identity, text in (("a", "烟囱为什么会排烟"), ("b", "a question about chimneys"), ("c", "something else")):
        driver.session.store.create(identity, f"Title {identity}")
        driver.session.store.add(Message(f"m{identity}", identity, None, "user", text))
    driver.window.chat_page.sidebar.refresh()


def test_search_finds_text_in_chinese_too(open_window):
    driver = open_window()
    fill(driver)
    QTest.keyClick(driver.window, Qt.Key.Key_F, Qt.KeyboardModifier.ControlModifier)
    search = driver.find("chatSearch", QLineEdit)
    search.setText("排烟")
    driver.until(lambda: driver.titles() == ["Title a"])
    search.setText("chimney")
    driver.until(lambda: driver.titles() == ["Title b"])
    search.setText("nothing like it")
    driver.until(lambda: driver.titles() == [])
    search.setText("")
    driver.until(lambda: len(driver.titles()) == 3)


def test_a_click_opens_a_conversation(open_window):
    driver = open_window()
    fill(driver)
    view = driver.find("chatList")
    driver.qtbot.mouseClick(
        view.viewport(), Qt.MouseButton.LeftButton, pos=view.visualRect(view.model().index(1)).center()
    )
    assert contents(driver) == [("user", "a question about chimneys")]


def test_renaming_in_place(open_window):
    driver = open_window()
    fill(driver)
    view = driver.find("chatList")
    view.setCurrentIndex(view.model().index(0))
    view.edit(view.model().index(0))
    editor = view.findChild(QLineEdit)
    editor.setText("")
    QApplication.sendEvent(editor, QInputMethodEvent("xin", []))
    QTest.keyClick(editor, Qt.Key.Key_Return)
    assert driver.titles()[0] == "Title c"  # the Enter was the input method's
    event = QInputMethodEvent("", [])
    event.setCommitString("新名字")
    QApplication.sendEvent(editor, event)
    QTest.keyClick(editor, Qt.Key.Key_Return)
    driver.until(lambda: driver.titles()[0] == "新名字")


def test_deleting_asks_first(open_window):
    driver = open_window()
    fill(driver)
    view = driver.find("chatList")
    view.setCurrentIndex(view.model().index(0))
    for name, left in (("Cancel", 3), ("Delete", 2)):
        QTest.keyClick(view, Qt.Key.Key_Delete)
        box = driver.window.findChild(QWidget, "confirm")
        next(made for made in box.findChildren(QAbstractButton) if made.text().replace("&", "") == name).click()
        driver.until(lambda left=left: len(driver.titles()) == left)
        driver.qtbot.wait(20)


def test_deleting_a_conversation_that_is_being_answered(open_window):
    driver = open_window()
    driver.script.hold.clear()
    driver.send("go")
    driver.session.remove(driver.session.current.id)
    driver.script.hold.set()
    driver.until(lambda: driver.titles() == [])
    assert driver.ask("next") == "Hello, world."


def test_a_half_answer_is_recovered_after_a_crash(open_window):
    driver = open_window(show=False)
    store = driver.session.store
    store.create("c", "crash")
    store.add(Message("q", "c", None, "user", "question"))
    store.add(Message("a", "c", "q", "assistant", "", "growing"))
    store.grow("a", "half an answer")
    store.flush()
    driver.session.shut_down = lambda: None
    again = driver.reopen(wait=False)
    again.until(lambda: again.session.engine_ready)
    assert again.session.state.kind == "none"  # whatever ended it may end it again
    assert "in the middle of an answer" in again.banners()[0]
    again.session.open("c")
    driver.qtbot.wait(20)
    assert "half an answer" in again.transcript.visible_text()
    assert again.texts("answerEnding")[0].startswith("Interrupted")
    again.session.choose_model(again.session.models[0].path)
    again.until(lambda: again.session.state.kind == "ready")
    again.click("continueAnswer")
    again.until(lambda: not again.session.running)
    assert again.script.requests[-1].begin == "half an answer"
    assert contents(again)[-1] == ("assistant", "half an answerHello, world.")
    again.close()


# ---- controls


def test_controls_reach_the_request(open_window):
    driver = open_window()
    driver.find("temperature", QDoubleSpinBox).setValue(1.25)
    driver.find("topK", QSpinBox).setValue(7)
    driver.find("topP", QDoubleSpinBox).setValue(0.5)
    driver.find("minP", QDoubleSpinBox).setValue(0.1)
    driver.find("repetitionPenalty", QDoubleSpinBox).setValue(1.2)
    driver.find("maxTokens", QSpinBox).setValue(99)
    driver.find("seed", QSpinBox).setValue(42)
    driver.ask("go")
    assert driver.script.requests[-1].sampling == Sampling(
        temperature=1.25, top_k=7, top_p=0.5, min_p=0.1, repetition_penalty=1.2, max_tokens=99, seed=42
    )


def test_the_model_gives_the_defaults_and_choices_outlive_it(open_window):
    driver = open_window()
    assert driver.find("temperature").value() == 0.6
    assert driver.find("topK").value() == 20
    driver.find("topK").setValue(5)
    kept = {}
    driver.until(lambda: kept.update(json.loads((driver.folder / "settings.json").read_text())) or kept.get("sampling"))
    assert kept["sampling"] == {"top_k": 5}
    again = driver.reopen()
    assert again.find("topK").value() == 5
    assert again.find("temperature").value() == 0.6
    again.click("resetSampling")
    assert again.find("topK").value() == 20
    again.close()


def test_sliders_and_numbers_move_together(open_window):
    driver = open_window()
    slider, box = driver.find("temperatureSlider", QSlider), driver.find("temperature", QDoubleSpinBox)
    slider.setValue(30)
    assert box.value() == 1.5
    box.setValue(0.33)
    assert box.value() == 0.33
    assert slider.value() == 7
    tokens = driver.find("maxTokensSlider", QSlider)
    values = []
    for position in range(tokens.minimum(), tokens.maximum() + 1):
        tokens.setValue(position)
        values.append(driver.find("maxTokens", QSpinBox).value())
    assert values == sorted(values)
    assert (values[0], values[-1]) == (1, 1_000_000)


def test_every_control_shows_the_range_of_its_setting(open_window):
    driver = open_window()
    schema = Sampling.model_json_schema()["properties"]
    for name, setting in (
        ("temperature", "temperature"),
        ("topK", "top_k"),
        ("maxTokens", "max_tokens"),
        ("seed", "seed"),
    ):
        box = driver.find(name)
        assert box.minimum() == schema[setting]["minimum"]
        assert box.maximum() == min(schema[setting]["maximum"], 2**31 - 1)
        assert box.accessibleName() == schema[setting]["title"]


# ---- the model


def test_a_message_written_while_the_model_loads_waits_for_it(open_window):
    driver = open_window(wait=False)
    driver.script.step_s = 0.3
    driver.until(lambda: driver.session.state.kind == "loading")
    driver.send("early")
    assert contents(driver)[0] == ("user", "early")
    driver.until(lambda: not driver.session.running)
    assert contents(driver)[-1] == ("assistant", "Hello, world.")
    assert driver.session.chat.turns[-1].message.model == "SmolLM2 135M Instruct"


def test_loading_can_be_cancelled(open_window):
    driver = open_window(wait=False)
    driver.script.step_s = 5
    driver.until(lambda: driver.session.state.kind == "loading")
    driver.until(lambda: driver.has("cancelLoad"))
    driver.send("waiting")
    driver.click("cancelLoad")
    driver.until(lambda: driver.session.state.kind == "none", 1500)
    assert driver.session.chat.turns[-1].message.state == "failed"
    assert not driver.session.running


def test_choosing_another_model_while_one_loads(open_window):
    driver = open_window(wait=False)
    driver.script.step_s = 0.5
    other = driver.script.add_model("Other")
    driver.until(lambda: driver.session.state.kind == "loading")
    driver.send("early")
    driver.until(lambda: len(driver.script.loads) == 1)
    driver.session.choose_model(other)
    driver.until(lambda: driver.session.state.kind == "ready")
    assert driver.session.state.path == other
    driver.until(lambda: not driver.session.running)
    assert contents(driver)[-1] == ("assistant", "Hello, world.")


def test_a_model_that_cannot_be_loaded_is_said_in_words(open_window):
    driver = open_window(wait=False)
    driver.script.load_failure = "SmolLM2.nook is truncated; convert the model again."
    driver.until(lambda: driver.session.state.kind == "failed")
    assert driver.find("welcomeWords", QLabel).text() == driver.script.load_failure
    assert not driver.session.can_send
    driver.script.load_failure = ""
    driver.session.reload_model()
    driver.until(lambda: driver.session.state.kind == "ready")


def test_choosing_another_model_keeps_the_conversation(open_window):
    driver = open_window()
    other = driver.script.add_model("Other")
    driver.session.bridge.refresh_library()
    driver.until(lambda: len(driver.session.models) == 2)
    driver.ask("Hello?")
    picker = driver.find("modelPicker", QComboBox)
    picker.setCurrentIndex(picker.findData(str(other)))
    driver.until(lambda: len(driver.script.loads) == 2 and driver.session.state.kind == "ready")
    assert driver.script.loads[-1][0] == other
    assert len(contents(driver)) == 2
    driver.ask("And now?")
    assert len(driver.script.requests[-1].prompt) == 3


def test_the_last_model_is_loaded_at_the_start(open_window):
    driver = open_window()
    assert [path.stem for path, _settings in driver.script.loads] == ["SmolLM2 135M"]


def test_a_window_closed_in_loading_loads_again(open_window):
    driver = open_window(wait=False)
    driver.script.step_s, driver.script.load_steps = 0.05, 200
    driver.until(lambda: driver.session.state.kind == "loading")
    assert driver.session.preferences.values.loading
    driver.script.load_steps = 2
    again = driver.reopen()
    assert again.session.state.kind == "ready"
    assert again.banners() == []
    again.close()


def test_no_model_is_loaded_by_itself_after_a_crash_in_loading(open_window):
    driver = open_window(wait=False, loading="/models/huge.nook")
    driver.until(lambda: driver.session.engine_ready)
    driver.qtbot.wait(50)
    assert driver.script.loads == []
    assert "huge.nook" in driver.banners()[0]
    driver.session.choose_model(driver.session.models[0].path)
    driver.until(lambda: driver.session.state.kind == "ready")
    assert PreferencesFile(driver.folder / "settings.json").values.loading == ""


def test_first_run_with_the_starter_offers_a_chat_at_once(open_window, tmp_path):
    script = ScriptedApi(tmp_path / "models")
    script.starter = tmp_path / "SmolLM2-135M-Instruct.gguf"
    script.starter.touch()
    driver = open_window(model=False, script=script)
    driver.until(lambda: driver.session.state.kind == "ready")
    assert driver.script.loads[0][0] == script.starter
    assert "very small model" in driver.texts("welcomeWords")[0]
    assert driver.ask("Hello?") == "Hello, world."


def test_first_run_without_a_model_says_what_to_do(open_window):
    driver = open_window(model=False)
    driver.qtbot.wait(20)
    assert "folder" in driver.find("welcomeWords", QLabel).text()
    assert not driver.find("send").isEnabled()
    driver.click("welcomeAdd")
    assert driver.find("pageModels", QAbstractButton).isChecked()
    assert driver.find("dropZone").isVisible()


def test_an_engine_that_cannot_start_is_said(open_window):
    driver = open_window(wait=False)

    def broken(**_arguments):
        raise OSError("no libgomp")

    driver.session.bridge._factory = broken
    driver.until(driver.banners)
    assert "no libgomp" in driver.banners()[0]


# ---- adding models


def test_drop_look_convert_chat(open_window):
    driver = open_window(model=False)
    folder = driver.folder / "Qwen 模型 #1"
    folder.mkdir()
    driver.drop(folder)
    driver.until(lambda: driver.has("convert"))
    assert driver.texts("reportName") == ["Qwen2.5 Coder 0.5B Instruct"]
    assert driver.texts("reportVerdict") == ["Nothing is missing: it can be converted."]
    assert driver.find("wizardSteps", QWidget).accessibleName() == "Step 1 of 4: Model"
    assert not driver.has("quality8")
    driver.click("chooseQuality")
    assert driver.find("wizardSteps", QWidget).accessibleName() == "Step 2 of 4: Quality"
    assert "about 420 MB of memory" in driver.texts("reportNeed")[0]  # the report's plan is for the usual int4
    driver.click("quality8")
    group = driver.find("groupSize", QComboBox)
    group.setCurrentIndex(group.findData(128))
    assert "takes 528 MB" in driver.texts("reportNeed")[0]
    assert "about 630 MB of memory" in driver.texts("reportNeed")[0]
    driver.click("convert")
    driver.until(lambda: driver.has("chatWith"))
    source, out, conversion, _resume = driver.script.conversions[0]
    assert (source, conversion.bits, conversion.group_size) == (folder, 8, 128)
    assert out == driver.folder / "models" / "Qwen2.5 Coder 0.5B Instruct-int8-g128.nook"
    driver.click("chatWith")
    driver.until(lambda: driver.session.state.kind == "ready")
    assert driver.script.loads[-1][0] == out
    assert driver.find("pageChat", QAbstractButton).isChecked()
    assert driver.ask("Hello?") == "Hello, world."


def test_a_new_file_is_compared_with_its_source(open_window):
    driver = open_window(model=False)
    driver.drop(driver.folder)
    driver.until(lambda: driver.has("convert"))
    driver.click("convert")
    driver.until(lambda: driver.has("measureFidelity"))
    driver.click("measureFidelity")
    driver.until(lambda: driver.has("fidelityGrade"))
    assert driver.texts("fidelityGrade") == ["B"]
    assert "The same next word in 91.4% of the cases" in driver.texts("fidelityWords")[0]
    assert driver.find("fidelityLayers").accessibleDescription().startswith("0: 2.00, 1: 2.25")
    assert driver.script.compared == [(driver.script.conversions[0][1], driver.folder)]
    driver.until(lambda: driver.texts("modelGrade") == ["fidelity B"])  # from now on the file says so itself


def test_a_model_of_the_library_is_compared_with_its_source(open_window):
    driver = open_window()
    driver.click("pageModels")
    (entry,) = driver.session.models
    driver.window.models_page.open_fidelity(entry, driver.folder)
    driver.until(lambda: driver.has("measureFidelity"))
    assert not driver.has("dropZone")
    driver.click("measureFidelity")
    driver.until(lambda: driver.texts("modelGrade") == ["fidelity B"])
    assert driver.texts("fidelityGrade") == ["B"]
    driver.click("dismissFidelity")
    driver.until(lambda: driver.has("dropZone"))


def test_a_comparison_with_the_source_that_fails_says_why(open_window):
    driver = open_window(model=False)
    driver.drop(driver.folder)
    driver.until(lambda: driver.has("convert"))
    driver.click("convert")
    driver.until(lambda: driver.has("measureFidelity"))
    driver.script.damage = "a.nook and b are different models"
    driver.click("measureFidelity")
    driver.until(lambda: driver.texts("fidelityWords") == [driver.script.damage])
    assert driver.has("measureFidelity")


def test_a_level_of_quality_is_chosen(open_window):
    driver = open_window(model=False)
    driver.drop(driver.folder)
    driver.until(lambda: driver.has("convert"))
    driver.click("chooseQuality")
    assert driver.has("groupSize")
    driver.click("qualityBalanced")
    assert not driver.has("groupSize")  # the level decides it
    assert "takes 346 MB" in driver.texts("reportNeed")[0]
    assert "about 4 min" in driver.texts("reportNeed")[0]
    driver.find("keepRules", QLineEdit).setText("head=q8  *.down=f16")
    driver.click("convert")
    driver.until(lambda: driver.has("chatWith"))
    _source, out, conversion, _resume = driver.script.conversions[0]
    assert (conversion.level, conversion.keep) == ("balanced", ("head=q8", "*.down=f16"))
    assert out.name == "Qwen2.5 Coder 0.5B Instruct-balanced.nook"


def test_a_conversion_is_cancelled_and_made_later(open_window):
    driver = open_window(model=False)
    driver.script.step_s, driver.script.convert_steps = 0.05, 200
    driver.drop(driver.folder)
    driver.until(lambda: driver.has("convert"))
    driver.click("convert")
    driver.until(lambda: " of 988 MB" in "".join(driver.texts("conversionWords")))
    assert "left" in driver.texts("conversionWords")[0]
    driver.click("cancelConversion")
    driver.until(lambda: driver.has("resumeConversion"), 1500)
    assert list((driver.folder / "models").iterdir()) == []
    assert "Cancelled at" in driver.texts("conversionWords")[0]
    driver.script.convert_steps = 3
    driver.click("resumeConversion")
    driver.until(lambda: driver.has("chatWith"))
    (first, second) = driver.script.conversions
    assert first == second
    assert second[3]  # resumed


def test_what_a_cancelled_conversion_wrote_is_discarded(open_window):
    driver = open_window(model=False)
    driver.script.step_s, driver.script.convert_steps = 0.05, 200
    driver.drop(driver.folder)
    driver.until(lambda: driver.has("convert"))
    driver.click("convert")
    driver.until(lambda: driver.has("cancelConversion"))
    driver.click("cancelConversion")
    driver.until(lambda: driver.has("forgetConversion"))
    driver.click("forgetConversion")
    driver.until(lambda: len(driver.script.conversions) == 2)
    assert not driver.script.conversions[1][3]
    assert not driver.session.conversions.jobs


def test_conversions_wait_in_line(open_window):
    driver = open_window(model=False)
    driver.script.step_s = 0.05
    for number in range(2):
        folder = driver.folder / f"source {number}"
        folder.mkdir()
        driver.drop(folder)
        driver.until(lambda: driver.has("convert"))
        driver.click("convert")
    assert [job.state for job in driver.session.conversions.jobs] == ["running", "waiting"]
    driver.until(lambda: len(driver.session.models) == 2)
    assert [out.name for _source, out, *_rest in driver.script.conversions] == [
        "Qwen2.5 Coder 0.5B Instruct-int4-g32.nook",
        "Qwen2.5 Coder 0.5B Instruct-int4-g32 (2).nook",
    ]


def test_a_drop_beside_a_report_is_refused_in_words(open_window):
    driver = open_window(model=False)
    driver.drop(driver.folder)
    driver.until(lambda: driver.has("convert"))
    driver.drop(driver.folder / "gone")
    driver.until(driver.banners)
    assert driver.banners() == ["gone does not exist."]
    assert driver.has("convert")


def test_a_conversion_that_fails_says_why(open_window):
    driver = open_window(model=False)
    driver.script.convert_failure = "The disk is full: 318 MB are needed in /models."
    driver.drop(driver.folder)
    driver.until(lambda: driver.has("convert"))
    driver.click("convert")
    driver.until(lambda: driver.texts("conversionWords") == [driver.script.convert_failure])
    assert driver.has("resumeConversion")


def test_chatting_goes_on_while_a_model_is_converted(open_window):
    driver = open_window()
    driver.script.step_s = 0.1
    driver.drop(driver.folder)
    driver.until(lambda: driver.has("convert"))
    driver.click("convert")
    driver.click("pageChat")
    assert driver.ask("Hello?") == "Hello, world."
    driver.click("pageModels")
    driver.click("cancelConversion")
    driver.until(lambda: not driver.session.conversions.busy)


def test_a_folder_that_cannot_be_converted_offers_no_conversion(open_window):
    driver = open_window(model=False)
    sentence = "model-00002-of-00003.safetensors is missing; download it again."
    driver.script.reports = lambda path: report(path, problems=(api.Problem(True, sentence),))
    driver.drop(driver.folder)
    driver.until(lambda: driver.has("dismissReport"))
    assert driver.texts("reportProblem") == [sentence]
    assert not driver.has("convert")
    driver.click("dismissReport")
    driver.until(lambda: driver.has("dropZone"))


def test_a_converted_file_is_used_as_it_is(open_window):
    driver = open_window(model=False)
    file = driver.folder / "friend.nook"
    file.touch()
    driver.script.reports = lambda path: report(path, kind="nook", sizes=(), source_dtype="int4, group 32")
    driver.drop(file)
    driver.until(lambda: driver.has("chatWith"))
    driver.click("chatWith")
    driver.until(lambda: driver.session.state.kind == "ready")
    assert driver.script.loads[-1][0] == file
    assert driver.find("modelPicker", QComboBox).currentData() == str(file)


def test_refused_drops_are_said_on_the_models_page(open_window):
    driver = open_window(model=False)
    driver.drop("https://huggingface.co/x/y")
    assert driver.find("pageModels", QAbstractButton).isChecked()
    assert "opens no addresses" in driver.find("dropZone", QAbstractButton).text()


def test_dropped_text_lands_in_the_composer(open_window):
    driver = open_window()
    driver.write("before ")
    driver.composer.moveCursor(driver.composer.textCursor().MoveOperation.End)
    mime = QMimeData()
    mime.setText("<b>dropped</b>")
    driver.drop_mime(mime)
    assert driver.composer.toPlainText() == "before <b>dropped</b>"


def test_the_drop_sign_comes_and_goes(open_window):
    driver = open_window()
    mime = QMimeData()
    mime.setText("x")
    event = QDragEnterEvent(
        QPoint(9, 9), Qt.DropAction.CopyAction, mime, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
    )
    QApplication.sendEvent(driver.window, event)
    assert event.isAccepted()
    assert driver.window._sign.isVisible()
    driver.drop_mime(mime)
    assert not driver.window._sign.isVisible()


def test_a_click_on_the_drop_zone_offers_folders_and_files(open_window):
    driver = open_window(model=False)
    driver.click("pageModels")
    for row, mode in enumerate((QFileDialog.FileMode.Directory, QFileDialog.FileMode.ExistingFile)):
        driver.click("dropZone")
        menu = driver.find("browseMenu", QMenu)
        menu.actions()[row].trigger()
        menu.close()
        (dialog,) = (found for found in driver.window.findChildren(QFileDialog) if found.isVisible())
        assert dialog.fileMode() == mode
        dialog.close()
        driver.until(lambda: not driver.window.findChildren(QFileDialog))


def test_the_drop_zone_takes_drops_itself(open_window):
    driver = open_window(model=False)
    driver.click("pageModels")
    zone = driver.find("dropZone")
    mime = QMimeData()
    mime.setUrls([QUrl.fromLocalFile(str(driver.folder))])
    copy, left, none = Qt.DropAction.CopyAction, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
    QApplication.sendEvent(zone, QDragEnterEvent(QPoint(9, 9), copy, mime, left, none))
    QApplication.sendEvent(zone, QDropEvent(QPointF(9, 9), copy, mime, left, none))
    driver.until(lambda: driver.has("convert"))


def test_a_slow_folder_keeps_nothing_waiting(open_window):
    driver = open_window()
    looked = threading.Event()
    report = driver.script.reports
    driver.script.reports = lambda path: looked.wait(20) and report(path)
    driver.drop(driver.folder)
    driver.script.tokens, driver.script.token_s = ["word "] * 1000, 0.01
    driver.click("pageChat")
    driver.send("go")
    driver.until(lambda: "word" in driver.transcript.visible_text())
    driver.click("stop")
    driver.until(lambda: not driver.session.running, 1500)
    looked.set()


def test_stop_right_after_sending(open_window):
    driver = open_window()
    driver.script.tokens, driver.script.token_s = ["word "] * 1000, 0.01
    driver.send("go")
    driver.session.stop()
    driver.until(lambda: not driver.session.running, 1500)
    assert driver.session.chat.turns[-1].message.reason == "cancelled"


def test_a_library_that_cannot_be_read_is_said(open_window):
    script = ScriptedApi(Path())

    def broken(**_arguments):
        raise PermissionError("models")

    script.library_models = broken
    driver = open_window(model=False, script=script)
    driver.until(driver.banners)
    assert driver.session.engine_ready


def test_a_model_is_removed_after_asking(open_window):
    driver = open_window()
    driver.click("pageModels")
    path = driver.session.models[0].path
    driver.click("removeModel")
    box = driver.window.findChild(QWidget, "confirm")
    box.findChild(QAbstractButton, "confirmYes").click()
    driver.until(lambda: not driver.session.models)
    assert not path.exists()
    assert driver.session.state.kind == "none"


# ---- the window


def test_pages_by_name(open_window):
    driver = open_window()
    for button, page in (
        ("pageModels", "modelsPage"),
        ("pageDiagnostics", "diagnosticsPage"),
        ("pageServer", "serverPage"),
        ("pageSettings", "settingsPage"),
        ("pageChat", "chatPage"),
    ):
        driver.click(button)
        assert driver.window.pages.currentWidget().objectName() == page
    QTest.keyClick(driver.window, Qt.Key.Key_Comma, Qt.KeyboardModifier.ControlModifier)
    assert driver.window.pages.currentWidget().objectName() == "settingsPage"
    QTest.keyClick(driver.window, Qt.Key.Key_N, Qt.KeyboardModifier.ControlModifier)
    assert driver.window.pages.currentWidget().objectName() == "chatPage"


def test_every_control_has_a_name(open_window):
    driver = open_window()
    driver.ask("Hello?")
    for page in ("chat", "models", "diagnostics", "server", "settings"):
        driver.window.show_page(page)
        for widget in driver.window.findChildren(QWidget):
            if not widget.isVisible() or widget.focusPolicy() == Qt.FocusPolicy.NoFocus:
                continue
            if widget.objectName().startswith("qt_") or widget.metaObject().className() in {
                "QScrollArea",
                "QStackedWidget",
            }:
                continue
            interface = QAccessible.queryAccessibleInterface(widget)
            name = interface.text(QAccessible.Text.Name) if interface is not None else ""
            assert name or widget.accessibleName() or widget.inherits("QScrollArea"), (
                page,
                widget,
                widget.objectName(),
            )


def test_the_language_changes_at_once_and_stays(open_window):
    driver = open_window()
    driver.ask("Hello?")
    driver.click("pageSettings")
    box = driver.find("language", QComboBox)
    box.setCurrentIndex(box.findData("zh_CN"))
    driver.until(lambda: driver.find("pageChat", QAbstractButton).text() == "对话")
    driver.click("pageChat")
    assert "Hello, world." in driver.transcript.visible_text()
    assert driver.ask("还好吗？") == "Hello, world."
    again = driver.reopen()
    assert again.find("pageModels", QAbstractButton).text() == "模型"
    again.close()


def test_the_theme_and_the_text_size_change_at_once(open_window):
    driver = open_window()
    light = driver.window.grab().toImage().pixelColor(2, 300)
    driver.session.preferences.change(theme="dark")
    dark = driver.window.grab().toImage().pixelColor(2, 300)
    assert light.lightness() > 200
    assert dark.lightness() < 60
    before = driver.composer.fontMetrics().height()
    driver.session.preferences.change(text_size=150)
    driver.until(lambda: driver.composer.fontMetrics().height() > before * 1.3)


def test_light_and_dark_follow_the_desktop(open_window, monkeypatch):
    open_window(theme="system")
    changed = QApplication.styleHints().colorSchemeChanged
    for dark, theme in ((True, DARK), (False, LIGHT)):
        monkeypatch.setattr(look(), "_desktop_is_dark", lambda dark=dark: dark)
        changed.emit(Qt.ColorScheme.Dark if dark else Qt.ColorScheme.Light)
        assert look().theme is theme


def luminance(color):
    channels = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in QColor(color).getRgbF()[:3]]
    return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_can_be_read(theme):
    """Contrasts of the Web Content Accessibility Guidelines: 4.5 for text, 3 for signs."""

    def contrast(one, other):
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    for ground in (theme.window, theme.side, theme.surface, theme.bubble):
        assert contrast(theme.text, ground) > 7
        assert contrast(theme.muted, ground) > 4.5
        assert contrast(theme.faint, ground) > 3
        assert contrast(theme.accent, ground) > 4.5
    assert contrast(theme.on_accent, theme.accent) > 4.5
    assert contrast(theme.danger, theme.danger_soft) > 4.5
    assert contrast(theme.text, theme.warning_soft) > 4.5
    assert contrast(theme.text, theme.selection) > 4.5
    for part in (theme.keyword, theme.string, theme.comment, theme.number, theme.function, theme.type):
        assert contrast(part, theme.code) > 4.5


def test_engine_settings_take_effect_when_loaded_again(open_window):
    driver = open_window()
    driver.click("pageSettings")
    driver.find("threads", QSpinBox).setValue(2)
    box = driver.find("kv", QComboBox)
    box.setCurrentIndex(box.findData("f16"))
    driver.click("reloadModel")
    driver.until(lambda: len(driver.script.loads) == 2)
    settings = driver.script.loads[-1][1]
    assert (settings.threads, settings.kv, settings.context) == (2, "f16", 0)


def test_a_narrow_window_gives_the_room_to_the_conversation(open_window):
    driver = open_window()
    driver.window.resize(560, 600)
    driver.qtbot.wait(20)
    assert not driver.window.chat_page.sidebar.isVisible()
    assert not driver.window.chat_page.panel.isVisible()
    driver.click("sidebarToggle")
    assert driver.window.chat_page.sidebar.isVisible()
    driver.window.resize(1300, 700)
    driver.qtbot.wait(20)
    assert driver.window.chat_page.panel.isVisible()


def test_damaged_settings_are_set_aside(open_window, tmp_path):
    (tmp_path / "settings.json").write_text("{ not json")
    driver = open_window(model=False)
    assert (tmp_path / "settings.damaged.json").read_text() == "{ not json"
    assert "settings.damaged.json" in driver.banners()[0]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"text_size": 9999, "theme": "dark"}', {"text_size": 100, "theme": "dark"}),
        ('{"sampling": {"temperature": 9}, "theme": "dark"}', {"sampling": {}, "theme": "dark"}),
        ('{"engine": {"threads": -1}, "theme": "dark"}', {"theme": "dark"}),
        ('{"unknown": 1, "theme": "dark"}', {"theme": "dark"}),
        ("[1, 2]", {"theme": "system"}),
        ("[" * 100_000, {"theme": "system"}),
    ],
)
def test_one_bad_setting_costs_that_setting_alone(qapp, tmp_path, text, kept):
    (tmp_path / "settings.json").write_text(text)
    values = PreferencesFile(tmp_path / "settings.json").values
    assert {name: getattr(values, name) for name in kept} == kept


def test_conversations_that_cannot_be_opened_do_not_block_the_start(open_window, tmp_path):
    (tmp_path / "conversations.sqlite").mkdir()
    driver = open_window()
    assert "not kept" in driver.banners()[0]
    assert driver.ask("Hello?") == "Hello, world."


def test_a_damaged_history_is_said(open_window, tmp_path):
    (tmp_path / "conversations.sqlite").write_bytes(b"rubbish" * 1000)
    driver = open_window()
    assert "put aside" in driver.banners()[0]
    assert driver.ask("Hello?") == "Hello, world."


def test_a_sentence_is_shown_once_and_can_be_closed(open_window):
    driver = open_window()
    for _ in range(3):
        driver.session.bridge.post(WorkFailed("The disk is full."))
    driver.until(lambda: driver.banners() == ["The disk is full."])
    banner = driver.window.findChild(QWidget, "banner")
    banner.closed.emit()
    driver.until(lambda: driver.banners() == [])


def test_events_from_many_threads_arrive_in_order(open_window):
    driver = open_window()
    seen = []
    driver.session.bridge.event.connect(seen.append)
    threads = [
        threading.Thread(target=lambda name=name: [driver.session.bridge.post((name, count)) for count in range(500)])
        for name in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    driver.until(lambda: len(seen) == 1000)
    for name in "ab":
        assert [count for known, count in seen if known == name] == list(range(500))


def test_text_of_one_answer_is_gathered(open_window):
    driver = open_window()
    heard = []
    driver.session.bridge.event.connect(lambda event: heard.append(event) if isinstance(event, api.Delta) else None)
    driver.script.tokens = ["x"] * 2000
    assert driver.ask("go") == "x" * 2000
    assert len(heard) < 400
    assert "".join(event.text for event in heard) == "x" * 2000
    assert sum(len(event.token_ids) for event in heard) == 2000


@pytest.mark.parametrize(("character", "count"), [("y", 1_000_000), ("*", 100_000)])
def test_a_question_without_spaces_never_stops_the_window(open_window, character, count):
    driver = open_window()
    driver.ask("hello")
    text = character * count
    driver.script.tokens = [text]
    moments = [time.monotonic()]
    beat = QTimer(driver.window)
    beat.setInterval(5)
    beat.timeout.connect(lambda: moments.append(time.monotonic()))
    beat.start()
    assert driver.ask(text) == text
    driver.until(lambda: character * 200 in driver.transcript.visible_text())
    moments.append(time.monotonic())
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    assert driver.session.chat.turns[-2].message.content == text
    assert moments[-1] - moments[0] < 3  # seconds; ten times that and more before lines were cut, half a second idle
    assert max(gaps) < 1


def test_the_title_has_the_room_of_the_bar_and_leaves_the_model_its_own(open_window):
    driver = open_window()
    question = "Which woods burn slowly and give a steady heat through a long winter night at home?"
    driver.ask(question)
    driver.qtbot.wait(20)
    title, picker = driver.find("chatTitle", QLabel), driver.find("modelPicker")
    bar = driver.find("topBar")
    taken = sum(
        w.width() for w in bar.findChildren(QWidget, options=Qt.FindChildOption.FindDirectChildrenOnly) if w.isVisible()
    )
    assert bar.width() - taken < 100  # margins and spaces
    assert picker.width() == picker.sizeHint().width()
    assert title.fontMetrics().horizontalAdvance(question[:30]) < title.width()
    driver.window.resize(700, 600)
    driver.qtbot.wait(20)
    assert picker.width() >= picker.minimumSizeHint().width()
    assert title.width() >= 20
