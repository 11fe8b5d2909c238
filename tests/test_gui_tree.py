"""Conversations as trees, what goes with a message, parameters per chat; driven through the real window."""

from __future__ import annotations

import json

import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import (
    QAbstractButton,
    QComboBox,
    QDoubleSpinBox,
    QLabel,
    QLineEdit,
    QMenu,
    QPlainTextEdit,
    QWidget,
)

from gui.data.archive import ArchiveError, line_of, read_conversations, to_html, to_json, to_markdown
from gui.data.store import Attached, Message


def contents(driver):
    return [turn.message.content for turn in driver.session.chat.turns]


def settle(driver):
    driver.until(lambda: not driver.session.running)
    driver.qtbot.wait(80)


def choose(driver, menu, words):
    """Trigger an entry of an open menu."""
    found = [made for made in driver.window.findChildren(QMenu, menu) if made.isVisible()][-1]
    entry = next(action for action in found.actions() if action.text() == words)
    assert entry.isEnabled(), words
    entry.trigger()
    found.close()


def test_an_edited_question_is_answered_anew_and_both_versions_stay(open_window):
    driver = open_window()
    driver.ask("First question")
    driver.script.tokens = ["Second answer"]
    driver.ask("Then")
    message = driver.session.chat.turns[0].message.id
    driver.transcript.act("edit", message)
    assert driver.composer.toPlainText() == "First question"
    driver.send("Better question")
    settle(driver)
    assert contents(driver) == ["Better question", "Second answer"]
    assert driver.texts("versionWords") == ["2/2"]
    driver.click("olderVersion")
    assert contents(driver) == ["First question", "Hello, world.", "Then", "Second answer"]
    assert driver.session.store.branch(driver.session.store.conversations()[0])[0].content == "First question"


def test_giving_up_an_edit_brings_the_draft_back(open_window):
    driver = open_window()
    driver.ask("Question")
    driver.write("a draft")
    driver.qtbot.wait(600)
    driver.transcript.act("edit", driver.session.chat.turns[0].message.id)
    driver.write("half an edit")
    QTest.keyClick(driver.window, Qt.Key.Key_Escape)
    assert driver.composer.toPlainText() == "a draft"
    assert contents(driver) == ["Question", "Hello, world."]


def test_an_edited_answer_is_a_version_that_can_go_on(open_window):
    driver = open_window()
    driver.ask("Question")
    driver.transcript.act("edit", driver.session.chat.turns[1].message.id)
    driver.send("My own words")
    settle(driver)
    assert contents(driver) == ["Question", "My own words"]
    assert driver.texts("versionWords") == ["2/2"]
    driver.script.tokens = [" and more"]
    driver.click("continueAnswer")
    settle(driver)
    assert contents(driver)[-1] == "My own words and more"
    assert driver.script.requests[-1].begin == "My own words"


def test_versions_of_an_answer(open_window):
    driver = open_window()
    driver.ask("Question")
    for number in range(2):
        driver.script.tokens = [f"Version {number}"]
        driver.click("regenerate")
        settle(driver)
    assert driver.texts("versionWords") == ["3/3"]
    driver.click("olderVersion")
    driver.qtbot.wait(80)
    assert contents(driver)[-1] == "Version 0"
    driver.click("olderVersion")
    driver.qtbot.wait(80)
    assert contents(driver)[-1] == "Hello, world."
    assert not driver.find("olderVersion").isEnabled()
    again = driver.reopen()
    again.session.open(again.session.store.conversations()[0].id)
    assert contents(again)[-1] == "Hello, world."
    again.close()


def test_a_branch_is_a_conversation_of_its_own(open_window):
    driver = open_window()
    driver.ask("One")
    driver.ask("Two")
    driver.transcript.act("branch", driver.session.chat.turns[1].message.id)
    assert contents(driver) == ["One", "Hello, world."]
    driver.ask("Other")
    assert len(driver.session.store.conversations()) == 2
    driver.session.open(next(known.id for known in driver.session.store.conversations() if known.title == "One"))
    assert contents(driver) == ["One", "Hello, world.", "Two", "Hello, world."]


def test_an_answer_cut_by_its_limit_goes_on_where_it_ended(open_window):
    driver = open_window()
    driver.script.reason = "length"
    driver.ask("Question")
    driver.script.reason = "stop"
    driver.script.tokens = [" And", " on."]
    driver.qtbot.wait(80)
    driver.click("continueAnswer")
    settle(driver)
    assert contents(driver) == ["Question", "Hello, world. And on."]
    last = driver.session.chat.turns[-1].message
    assert last.facts["completion_tokens"] == 6
    assert driver.session.store.search("world. And on.")
    assert not driver.has("continueAnswer")


def test_the_answer_begins_as_was_written(open_window):
    driver = open_window()
    driver.window.chat_page.box.ask_begin()
    driver.find("beginAnswer", QLineEdit).setText("Sure: ")
    driver.ask("Question")
    assert driver.script.requests[-1].begin == "Sure: "
    assert contents(driver)[-1] == "Sure: Hello, world."
    assert not driver.has("beginAnswer")


def test_messages_written_meanwhile_wait_their_turn(open_window):
    driver = open_window()
    driver.script.hold.clear()
    driver.send("one")
    driver.send("two")
    driver.send("three")
    assert driver.has("waitingMessages")
    driver.find("chipRemove")
    driver.session.drop_waiting(1)
    driver.script.hold.set()
    driver.until(lambda: len(driver.session.chat.turns) == 4 and not driver.session.running)
    assert contents(driver)[2] == "two"
    assert not driver.has("waitingMessages")


def test_stopping_puts_what_waits_back_into_the_box(open_window):
    driver = open_window()
    driver.script.hold.clear()
    driver.send("one")
    driver.send("two")
    driver.write("typing")
    driver.click("stop")
    settle(driver)
    assert driver.composer.toPlainText() == "two\n\ntyping"
    driver.script.hold.set()


def test_thoughts_are_folded_and_timed(open_window):
    driver = open_window()
    driver.script.tokens = ["<think>", "hmm", " well", "</think>", "\n\nThe ", "answer."]
    driver.script.token_s = 0.05
    driver.ask("Question")
    driver.qtbot.wait(80)
    assert "hmm" not in driver.transcript.visible_text()
    assert "The answer." in driver.transcript.visible_text()
    thought = driver.find("thought", QAbstractButton)
    assert thought.text().startswith("Thought for")
    thought.click()
    assert "hmm well" in driver.transcript.visible_text()


def test_parameters_and_system_prompt_belong_to_a_chat(open_window):
    driver = open_window()
    driver.find("systemPrompt", QPlainTextEdit).setPlainText("Be brief.")
    driver.qtbot.wait(500)
    driver.ask("One")
    assert driver.script.requests[-1].prompt[0].role == "system"
    driver.find("temperature", QDoubleSpinBox).setValue(0.1)
    driver.click("newChat")
    assert driver.find("systemPrompt", QPlainTextEdit).toPlainText() == ""
    driver.ask("Two")
    request = driver.script.requests[-1]
    assert request.prompt[0].role == "user"
    assert request.sampling.temperature == 0.6
    driver.session.open(next(known.id for known in driver.session.store.conversations() if known.title == "One"))
    assert driver.find("systemPrompt", QPlainTextEdit).toPlainText() == "Be brief."
    assert driver.find("temperature", QDoubleSpinBox).value() == 0.1


def test_presets_are_chosen_kept_and_removed(open_window):
    driver = open_window()
    preset = driver.find("preset", QComboBox)
    assert preset.currentData() == "model"
    preset.setCurrentIndex(preset.findData("precise"))
    preset.activated.emit(preset.currentIndex())
    assert driver.find("temperature", QDoubleSpinBox).value() == 0.2
    driver.click("neutralise")
    driver.ask("Go")
    sampling = driver.script.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    driver.session.keep_preset("Mine")
    assert preset.currentText() == "Mine"
    driver.click("resetSampling")
    assert preset.currentData() == "model"
    driver.session.choose_preset("Mine")
    driver.click("removePreset")
    assert preset.findText("Mine") < 0


def test_a_temporary_chat_leaves_nothing(open_window):
    driver = open_window()
    driver.session.new_chat(temporary=True)
    assert driver.has("temporaryChip")
    driver.ask("secret")
    assert driver.titles() == []
    driver.ask("more")
    assert contents(driver) == ["secret", "Hello, world.", "more", "Hello, world."]
    driver.click("newChat")
    assert not driver.has("temporaryChip")
    driver.session.store.flush()
    assert all(b"secret" not in file.read_bytes() for file in driver.folder.glob("conversations*"))


def test_pinned_first_then_folders_then_dates(open_window):
    driver = open_window()
    for name in "abc":
        driver.session.store.create(name, f"Title {name}")
    driver.session.pin("a", pinned=True)
    driver.session.move("b", "Work")
    model = driver.find("chatList").model()
    assert driver.titles() == ["Title a", "Title b", "Title c"]
    assert [model.headings[row].text for row in range(3)] == ["Pinned", "Work", "Today"]
    view = driver.find("chatList")
    place = view.visualRect(model.index(1)).topLeft() + QPoint(20, 8)
    driver.qtbot.mouseClick(view.viewport(), Qt.MouseButton.LeftButton, pos=place)
    assert driver.titles() == ["Title a", "Title c"]
    assert driver.session.current is None
    assert [model.index(row).data() for row in range(3)] == ["Title a", "Work", "Title c"]
    driver.qtbot.mouseClick(view.viewport(), Qt.MouseButton.LeftButton, pos=view.visualRect(model.index(1)).center())
    assert driver.titles() == ["Title a", "Title b", "Title c"]
    driver.session.preferences.change(closed_folders=["Work"])
    again = driver.reopen()
    assert again.titles() == ["Title a", "Title c"]
    again.close()


def test_files_go_with_a_message_and_their_tokens_are_said_first(open_window, tmp_path):
    driver = open_window()
    (tmp_path / "notes.txt").write_bytes(("笔记：" + "很长的内容。" * 2000).encode("gb18030"))
    driver.drop(tmp_path / "notes.txt")
    driver.until(lambda: any("tokens" in words for words in driver.texts("chipText")))
    driver.ask("Summarise")
    asked = driver.script.requests[-1].prompt[-1].content
    assert asked.startswith("[File: notes.txt]\n笔记：")
    assert asked.endswith("Summarise")
    assert driver.session.chat.turns[0].message.content == "Summarise"
    assert not driver.has("attachments")
    again = driver.reopen()
    again.session.open(again.session.store.conversations()[0].id)
    assert again.session.chat.turns[0].message.attached[0].name == "notes.txt"
    again.close()


def test_a_file_that_cannot_be_read_is_said(open_window, tmp_path):
    driver = open_window()
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.7 nothing")
    driver.drop(tmp_path / "broken.pdf")
    driver.until(driver.banners)
    assert "broken.pdf" in driver.banners()[0]


def test_a_message_beyond_the_context_asks_first(open_window):
    driver = open_window()
    driver.write("x" * 40_000)
    driver.until(lambda: "too long" in driver.find("sendHint", QLabel).text())
    driver.click("send")
    box = driver.window.findChild(QWidget, "confirm")
    assert not driver.script.requests
    box.findChild(QAbstractButton, "overflowSend").click()
    driver.until(lambda: driver.script.requests)
    settle(driver)


def test_a_conversation_goes_out_and_comes_back(open_window, tmp_path):
    driver = open_window()
    driver.ask("Question <b>\n\n```html\n</script>\n```")
    driver.script.tokens = ["Other"]
    driver.click("regenerate")
    settle(driver)
    sidebar = driver.window.chat_page.sidebar
    identity = driver.session.current.id
    for ending in ("json", "md", "html"):
        sidebar.export(identity, tmp_path / f"chat.{ending}")
    assert "<b>" not in (tmp_path / "chat.html").read_text("utf-8").split("<script")[0].split("</style>")[1]
    for ending, versions in (("json", 2), ("html", 1), ("md", 1)):
        sidebar.import_file(tmp_path / f"chat.{ending}")
        assert contents(driver) == ["Question <b>\n\n```html\n</script>\n```", "Other"], ending
        assert driver.session.chat.turns[1].versions == versions, ending
    assert len(driver.session.store.conversations()) == 4


@pytest.mark.parametrize(
    "text", ["", "{", "[1, 2]", '{"format": "inglenook-conversation"}', "# heading\n\ntext", "\0\1\2"]
)
def test_files_without_a_conversation_are_refused(tmp_path, text):
    path = tmp_path / "chat.json"
    path.write_text(text, "utf-8")
    with pytest.raises(ArchiveError, match="chat"):
        read_conversations(path)


def test_a_strange_conversation_does_no_harm(tmp_path):
    path = tmp_path / "chat.json"
    values = {
        "format": "inglenook-conversation",
        "title": 7,
        "settings": {"sampling": "hot"},
        "messages": [
            None,
            {"role": "god"},
            {"role": "user", "content": 3},
            {"role": "user", "content": "fine", "facts": []},
        ],
    }
    path.write_text(json.dumps(values), "utf-8")
    ((conversation, messages),) = read_conversations(path)
    assert [message.content for message in messages] == ["fine"]
    assert conversation.head == messages[0].id


def test_exports_hold_what_is_in_view(open_window):
    driver = open_window()
    driver.session.store.create("c", "Title", system="Be brief.")
    question = Message("q", "c", None, "user", "Hello", attached=(Attached("a.txt", "text"),))
    driver.session.store.add(question)
    driver.session.store.add(Message("a", "c", "q", "assistant", "Hi", model="Toy"))
    conversation, messages = driver.session.whole("c")
    line = line_of(conversation, messages)
    assert [message.id for message in line] == ["q", "a"]
    assert "a.txt" in to_markdown(conversation, line)
    assert "a.txt" in to_html(conversation, line)
    assert json.loads(to_json(conversation, messages))["messages"][0]["attached"] == [{"name": "a.txt", "text": "text"}]


def test_what_the_model_no_longer_reads_is_marked_and_pinned_messages_are_named(open_window):
    driver = open_window()
    driver.ask("one")
    driver.ask("two")
    pinned = driver.session.chat.turns[2].message.id
    driver.transcript.act("pin", pinned)
    driver.script.dropped = (0, 1)
    driver.write("x" * 40_000)
    driver.until(lambda: "too long" in driver.find("sendHint", QLabel).text())
    driver.click("send")
    driver.window.findChild(QWidget, "confirm").findChild(QAbstractButton, "overflowRolling").click()
    settle(driver)
    request = driver.script.requests[-1]
    assert request.overflow == "rolling"
    assert [message.pinned for message in request.prompt] == [False, False, True, False, False]
    assert [turn.unseen for turn in driver.session.chat.turns] == [True, True, False, False, False, False]
    driver.transcript.verticalScrollBar().setValue(0)
    notes = {note.accessibleName() for note in driver.window.findChildren(QWidget, "unseenNote") if note.isVisible()}
    assert notes == {"The model no longer reads this", "Pinned: the model always reads this"}
    again = driver.reopen()
    again.session.open(again.session.store.conversations()[0].id)
    assert [turn.unseen for turn in again.session.chat.turns][:3] == [True, True, False]
    assert again.session.overflow == "rolling"
    again.close()
