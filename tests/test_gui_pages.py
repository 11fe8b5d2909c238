"""Library, diagnostics, server, settings, token view and first run, driven through the real window."""

from __future__ import annotations

import json
import zipfile
from urllib.request import Request, urlopen

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QKeySequence
from PySide6.QtTest import QTest
from PySide6.QtWidgets import (
    QAbstractButton,
    QComboBox,
    QKeySequenceEdit,
    QLabel,
    QLineEdit,
    QPlainTextEdit,
    QSpinBox,
    QTableWidget,
    QTextEdit,
    QWidget,
)

from engine import api, folders
from engine.settings import ServerSettings
from gui.data.machine import advice, redacted
from gui.data.preferences import PreferencesFile
from gui.models.compare import tally
from tests.scripted import ScriptedApi

PERSON = "margaret"


def test_a_file_of_the_library_is_checked(open_window):
    driver = open_window()
    driver.click("pageModels")
    row = driver.find("libraryRow")
    row.asked.emit("verify")
    driver.until(lambda: driver.texts("verifyWords") == ["Every byte is as it was written."])
    driver.script.damage = "layers.3.attention.qkv is not what was written; convert the model again."
    driver.find("libraryRow").asked.emit("verify")
    driver.until(lambda: driver.texts("verifyWords") == [driver.script.damage])


def test_a_broken_file_is_listed_with_its_problem_and_can_be_removed(open_window):
    driver = open_window()
    path = driver.folder / "models" / "broken.nook"
    path.write_bytes(b"x")
    problem = "broken.nook is cut off; convert the model again."
    driver.script.library.append(api.LibraryModel(path, "broken", "", "", 1, 0, 0, problem))
    driver.click("pageModels")
    driver.until(lambda: driver.has("brokenRow"))
    row = driver.find("brokenRow")
    assert problem in [words.text() for words in row.findChildren(QLabel)]
    row.asked.emit("remove")
    driver.window.findChild(QWidget, "confirm").findChild(QAbstractButton, "confirmYes").click()
    driver.until(lambda: not path.exists())


def test_models_say_whether_they_fit(open_window):
    driver = open_window()
    driver.script.add_model("Huge 70B", 60_000_000_000)
    driver.click("pageModels")
    driver.until(lambda: sorted(driver.texts("modelFit")) == ["fits", "larger than the memory"])


def test_diagnostics_say_what_there_is_and_what_to_do(open_window):
    driver = open_window()
    driver.click("pageDiagnostics")
    driver.until(lambda: any("Toy Processor" in words for words in driver.texts("fact")))
    driver.until(lambda: any("no avxvnni" in words for words in driver.texts("fact")))
    driver.until(lambda: driver.texts("advice") == ["This program may use 4 of 6 cores."])
    driver.click("measureMemory")
    driver.until(lambda: any("11.2 GB/s" in words for words in driver.texts("bandwidthWords")))
    driver.until(lambda: any("single module" in words for words in driver.texts("advice")))
    driver.click("benchmark")
    driver.until(lambda: any("27.4 tokens/s" in words for words in driver.texts("benchmarkWords")))
    assert "27.4" in driver.texts("benchmarkHistory")[0]
    assert "27.4" in driver.find("forecastBars").accessibleName()
    driver.click("autotune")
    driver.until(lambda: any(words.startswith("3 threads") for words in driver.texts("benchmarkWords")))
    again = driver.reopen()
    again.click("pageDiagnostics")
    assert "27.4" in again.texts("benchmarkHistory")[0]
    again.close()


def test_the_network_is_seen_to_be_unused(open_window):
    driver = open_window()
    driver.click("pageDiagnostics")
    assert "no network connection" in driver.texts("networkProof")[0]


def test_a_support_bundle_holds_no_names_and_no_conversations(open_window, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", f"/home/{PERSON}")
    driver = open_window()
    driver.ask("a private question")
    driver.session.preferences.change(server=ServerSettings(api_key=("nook-secret",)), system="private prompt")
    driver.window.diagnostics_page.save_bundle(tmp_path / "bundle.zip")
    with zipfile.ZipFile(tmp_path / "bundle.zip") as archive:
        text = "".join(archive.read(name).decode() for name in archive.namelist())
    for secret in ("private", "nook-secret", PERSON):
        assert secret not in text


@pytest.mark.parametrize(
    "text",
    [
        f"/home/{PERSON}/x",
        f"C:\\Users\\{PERSON}\\x",
        f'api_key": ["{PERSON}"]',
        f"Authorization: Bearer {PERSON}",
        f"api_key={PERSON}",
    ],
)
def test_what_is_redacted(text):
    assert PERSON not in redacted(text)


def test_advice_in_words():
    old = {"cpu": {"architecture": "x86-64", "tiers": ["generic"], "cpu_quota": 1.5}, "memory": {"free_bytes": 10**9}}
    said = " ".join(advice(old))
    assert "AVX2" in said
    assert "1.5 cores" in said
    assert "1.0 GB of memory are free" in said


def test_the_server_starts_answers_and_stops(open_window):
    driver = open_window()
    driver.session.preferences.change(server=ServerSettings(port=0, shutdown_s=1))
    driver.click("pageServer")
    driver.click("newKey")
    key = driver.find("serverKey", QLineEdit).text()
    driver.click("startServer")
    driver.until(lambda: driver.session.serving.state.kind == "on", 20_000)
    address = driver.find("serverAddress", QLineEdit).text()
    assert address in driver.find("snippet", QPlainTextEdit).toPlainText()
    assert key in driver.find("snippet", QPlainTextEdit).toPlainText()
    request = Request(f"{address}/models", headers={"Authorization": f"Bearer {key}"})  # noqa: S310 (our own server)
    with urlopen(request, timeout=10) as answer:  # noqa: S310
        assert json.load(answer)["data"][0]["id"] == "SmolLM2 135M"
    driver.click("stopServer")
    driver.until(lambda: driver.session.serving.state.kind == "off", 10_000)
    assert driver.has("startServer")


def test_a_server_beyond_this_computer_wants_a_key(open_window):
    driver = open_window()
    driver.session.preferences.change(server=ServerSettings(host="0.0.0.0", port=0))
    driver.click("pageServer")
    driver.click("startServer")
    driver.until(lambda: driver.session.serving.state.kind == "failed", 20_000)
    assert "key" in driver.texts("serverState")[0]


def test_closing_stops_the_server(open_window):
    driver = open_window()
    driver.session.preferences.change(server=ServerSettings(port=0, shutdown_s=1))
    driver.click("pageServer")
    driver.click("startServer")
    driver.until(lambda: driver.session.serving.state.kind == "on", 20_000)
    assert driver.close() < 3


def test_shortcuts_can_be_changed_and_clashes_are_said(open_window):
    driver = open_window()
    driver.click("pageSettings")
    edit = driver.find("keys_new_chat", QKeySequenceEdit)
    edit.setKeySequence(QKeySequence("Ctrl+F"))
    edit.editingFinished.emit()
    assert "already means: Search" in driver.texts("shortcutClash")[0]
    edit.setKeySequence(QKeySequence("Ctrl+J"))
    edit.editingFinished.emit()
    QTest.keyClick(driver.window, Qt.Key.Key_J, Qt.KeyboardModifier.ControlModifier)
    assert driver.window.pages.currentWidget().objectName() == "chatPage"
    again = driver.reopen()
    assert again.session.preferences.values.shortcuts == {"new_chat": "Ctrl+J"}
    again.close()


def test_text_grows_by_keys(open_window):
    driver = open_window()
    QTest.keyClick(driver.window, Qt.Key.Key_Plus, Qt.KeyboardModifier.ControlModifier)
    assert driver.session.preferences.values.text_size == 110


def test_an_administrator_decides(qapp, tmp_path):
    policy = tmp_path / "policy.json"
    policy.write_text('{"theme": "dark", "hidden_pages": ["server"]}')
    file = PreferencesFile(tmp_path / "settings.json", policy)
    file.change(theme="light", text_size=120)
    assert (file.values.theme, file.values.text_size) == ("dark", 120)
    assert file.locked == {"theme"}
    assert file.hidden_pages == {"server"}
    file.save()
    assert PreferencesFile(tmp_path / "settings.json").values.theme == "light"
    for text in ("{", "[]", '{"theme": "pink"}'):
        policy.write_text(text)
        assert PreferencesFile(tmp_path / "settings.json", policy).policy_notice == str(policy)


def test_the_token_view_shows_probabilities_and_branches(open_window):
    driver = open_window(keep_probabilities=True)
    driver.ask("Hello?")
    assert driver.script.requests[-1].logprobs == 5
    driver.transcript.act("tokens", driver.session.chat.turns[-1].message.id)
    view = driver.window.findChild(QWidget, "tokenView")
    assert view.findChild(QTextEdit, "tokenText").toPlainText() == "Hello, world."
    driver.until(lambda: "steer the model" in view.findChild(QLabel, "promptWords").text())
    assert view.findChild(QTextEdit, "promptText").toPlainText() == "<|im_start|>Hello? "
    view.choose(2)
    rivals = view.findChild(QTableWidget, "tokenRivals")
    assert rivals.rowCount() == 2
    rivals.selectRow(1)
    driver.script.tokens = [" end"]
    view.findChild(QAbstractButton, "branchToken").click()
    driver.until(lambda: not driver.session.running)
    assert driver.script.requests[-1].begin == "Hello,  other"
    assert driver.session.chat.turns[-1].message.content == "Hello,  other end"
    assert driver.session.chat.turns[-1].versions == 2


def test_without_probabilities_the_token_view_says_how_to_get_them(open_window):
    driver = open_window()
    driver.ask("Hello?")
    assert driver.script.requests[-1].logprobs is None
    driver.transcript.act("tokens", driver.session.chat.turns[-1].message.id)
    view = driver.window.findChild(QWidget, "tokenView")
    assert "were not kept" in view.findChild(QLabel, "noTokens").text()
    view.close()


def test_errors_are_said_in_the_windows_language(open_window):
    driver = open_window(language="zh_CN")
    driver.script.failure = "the engine tripped"
    driver.ask("还好吗？")
    assert driver.texts("answerEnding")[0].startswith("Inglenook 内部出错")
    assert "the engine tripped" in driver.texts("answerEnding")[0]


def test_high_contrast(open_window):
    driver = open_window()
    driver.click("pageSettings")
    box = driver.find("theme", QComboBox)
    box.setCurrentIndex(box.findData("contrast"))
    assert driver.window.grab().toImage().pixelColor(2, 300).name() == "#000000"


def test_the_first_start_says_what_the_computer_can_do(open_window, tmp_path):
    (tmp_path / "models").mkdir()
    script = ScriptedApi(tmp_path / "models")
    script.starter = tmp_path / "SmolLM2.gguf"
    script.starter.touch()
    script.load_failure = "no memory"
    driver = open_window(model=False, script=script, greeted=False)
    driver.until(lambda: any("4 cores" in words for words in driver.texts("firstHardware")))
    assert "billion parameters fit" in driver.texts("firstHardware")[0]
    driver.until(lambda: driver.session.state.kind == "failed")
    script.load_failure = ""
    driver.click("startStarter")
    driver.until(lambda: driver.session.state.kind == "ready")
    driver.until(lambda: "tokens/s here" in driver.texts("firstHardware")[0])
    driver.click("language_zh_CN")
    driver.until(lambda: driver.find("pageChat", QAbstractButton).text() == "对话")
    driver.ask("你好")
    driver.click("newChat")
    assert not driver.has("firstHardware")


def test_the_library_moves_with_all_its_models(open_window, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "data_folder", lambda: tmp_path)
    driver = open_window()
    driver.script.library_folder = lambda: tmp_path / "models"
    other = driver.script.add_model("Other")
    driver.click("pageSettings")
    target = tmp_path / "elsewhere"
    driver.window.settings_page.move_library(target)
    driver.until(lambda: "The models were moved." in driver.texts("moveWords"))
    assert sorted(file.name for file in target.iterdir()) == ["Other.nook", "SmolLM2 135M.nook"]
    assert (target / "Other.nook").read_bytes() == b"nook"
    assert not other.exists()
    assert folders.library_folder() == target
    target.rename(tmp_path / "unplugged")
    assert folders.library_folder() != target


def test_models_are_not_moved_over_others(open_window, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "data_folder", lambda: tmp_path)
    driver = open_window()
    driver.script.library_folder = lambda: tmp_path / "models"
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "SmolLM2 135M.nook").write_bytes(b"another")
    driver.click("pageSettings")
    driver.window.settings_page.move_library(target)
    driver.until(lambda: any("is there already" in words for words in driver.texts("moveWords")))
    assert (tmp_path / "models" / "SmolLM2 135M.nook").exists()
    assert (target / "SmolLM2 135M.nook").read_bytes() == b"another"


def test_two_models_are_compared_blindly(open_window):
    driver = open_window()
    driver.script.add_model("Another", 1000)
    driver.click("pageModels")
    driver.until(lambda: len(driver.session.models) == 2)
    driver.click("compareModels")
    driver.until(lambda: driver.has("compareStart"))
    boxes = [driver.find(name, QComboBox) for name in ("compareFirst", "compareSecond")]
    assert boxes[0].currentData() != boxes[1].currentData()
    start = driver.find("compareStart", QAbstractButton)
    assert not start.isEnabled()
    driver.find("compareMessage", QPlainTextEdit).setPlainText("Which is it?")
    boxes[1].setCurrentIndex(boxes[0].currentIndex())
    assert not start.isEnabled()  # a model is not compared with itself
    boxes[1].setCurrentIndex(1 - boxes[0].currentIndex())
    loads = len(driver.script.loads)
    driver.click("compareStart")
    driver.until(lambda: driver.has("voteFirst"))
    order = [path for path, _settings in driver.script.loads[loads:]]
    assert {str(path) for path in order} == {box.currentData() for box in boxes}
    assert driver.script.requests[-1].sampling.seed == driver.script.requests[-2].sampling.seed
    assert [driver.find(f"answer{number}", QPlainTextEdit).toPlainText() for number in (1, 2)] == ["Hello, world."] * 2
    assert [driver.texts(f"answerName{number}")[0] for number in (1, 2)] == ["Answer 1", "Answer 2"]  # nobody knows yet
    driver.click("voteFirst")
    assert driver.texts("answerName1")[0].startswith(order[0].stem)
    assert not driver.find("voteSecond", QAbstractButton).isEnabled()  # one vote for each question
    votes = driver.session.preferences.values.comparisons
    assert [vote["better"] for vote in votes] == [order[0].stem]
    assert tally(votes, order[0].stem, order[1].stem) == (1, 0, 0)
    assert driver.texts("compareTally")[0].startswith("So far: ")
    assert driver.session.state.kind == "ready"  # the model of the chats stays


def test_a_comparison_can_be_stopped_and_failures_are_said(open_window):
    driver = open_window()
    driver.script.add_model("Another", 1000)
    driver.click("pageModels")
    driver.until(lambda: len(driver.session.models) == 2)
    driver.click("compareModels")
    driver.until(lambda: driver.has("compareStart"))
    driver.find("compareMessage", QPlainTextEdit).setPlainText("Which is it?")
    driver.script.hold.clear()
    driver.click("compareStart")
    driver.until(lambda: driver.has("compareStop"))
    driver.click("compareStop")
    driver.until(lambda: not driver.has("compareStop"))
    driver.script.hold.set()
    driver.script.load_failure = "Another.nook is damaged: its header was altered; convert the model again"
    driver.click("compareStart")
    driver.until(lambda: driver.texts("compareWords") == [driver.script.load_failure])
    assert not driver.has("voteFirst")


def test_where_the_time_of_a_token_goes(open_window):
    driver = open_window()
    driver.session.preferences.change(bandwidth_gb=11.2)
    driver.click("pageDiagnostics")
    driver.click("benchmark")
    driver.until(lambda: driver.has("operationBars"))
    said = driver.find("operationBars").accessibleName()
    assert said.startswith("feed_forward.gate_up: 49% · 43%")  # the longest first
    assert driver.find("layerColumns").accessibleDescription().startswith("0: 1.42, 1: ")
    assert "of what the memory allows" in driver.find("roofline").accessibleDescription()
    assert all("profile" not in row for row in driver.session.preferences.values.benchmarks)  # settings stay small


def test_settings_offer_the_search_for_threads_snapshots_and_speculation(open_window):
    driver = open_window()
    driver.click("pageSettings")
    speculation = driver.find("speculation", QComboBox)
    speculation.setCurrentIndex(speculation.findData("off"))
    driver.find("snapshotMb", QSpinBox).setValue(512)
    assert driver.session.preferences.values.engine.speculation == "off"
    assert driver.session.preferences.values.engine.snapshot_mb == 512
    driver.click("tuneThreads")
    driver.until(lambda: driver.texts("benchmarkWords") != [])
    assert driver.texts("benchmarkWords")[0].startswith("3 threads are the fastest")
