"""Writing a message: Enter that belongs to an input method never sends."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QEvent, Qt
from PySide6.QtGui import QFocusEvent, QInputMethodEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication

from gui.composer import Composer

RETURN, CONTROL, SHIFT = Qt.Key.Key_Return, Qt.KeyboardModifier.ControlModifier, Qt.KeyboardModifier.ShiftModifier


@pytest.fixture
def box(qtbot):
    made = Composer()
    qtbot.addWidget(made)
    made.resize(400, 40)
    made.show()
    made.messages = []
    made.sent.connect(lambda: (made.messages.append(made.text()), made.clear()))
    return made


def compose(box, preedit):
    QApplication.sendEvent(box, QInputMethodEvent(preedit, []))


def commit(box, text):
    event = QInputMethodEvent("", [])
    event.setCommitString(text)
    QApplication.sendEvent(box, event)


def test_enter_sends(box):
    QTest.keyClicks(box, "hello")
    QTest.keyClick(box, RETURN)
    assert box.messages == ["hello"]
    QTest.keyClicks(box, "pad")
    QTest.keyClick(box, Qt.Key.Key_Enter, Qt.KeyboardModifier.KeypadModifier)
    assert box.messages == ["hello", "pad"]


def test_shift_and_enter_starts_a_line(box):
    QTest.keyClicks(box, "one")
    QTest.keyClick(box, RETURN, SHIFT)
    QTest.keyClicks(box, "two")
    assert box.text() == "one\ntwo"
    assert box.messages == []


def test_enter_within_an_input_method_sends_nothing(box):
    QTest.keyClicks(box, "before ")
    compose(box, "nihao")
    QTest.keyClick(box, RETURN)
    QTest.keyClick(box, Qt.Key.Key_Enter)
    assert box.messages == []
    assert box.text() == "before "
    commit(box, "你好")
    QTest.keyClick(box, RETURN)
    assert box.messages == ["before 你好"]


def test_commit_and_enter_in_one_turn_send_once(box):
    compose(box, "ni")
    commit(box, "你好")
    QTest.keyClick(box, RETURN)
    QTest.keyClick(box, RETURN)
    assert [message for message in box.messages if message] == ["你好"]


def test_a_composition_that_is_given_up_frees_enter(box):
    QTest.keyClicks(box, "a")
    compose(box, "ni")
    compose(box, "")
    QTest.keyClick(box, RETURN)
    assert box.messages == ["a"]


def test_a_composition_that_loses_the_focus_frees_enter(box):
    QTest.keyClicks(box, "a")
    compose(box, "ni")
    QApplication.sendEvent(box, QFocusEvent(QEvent.Type.FocusOut))
    commit(box, "")
    QTest.keyClick(box, RETURN)
    assert len(box.messages) == 1


def test_a_dead_key_is_no_message(box):
    compose(box, "´")
    QTest.keyClick(box, RETURN)
    commit(box, "é")
    assert box.messages == []
    assert box.text() == "é"


def test_control_and_enter_can_be_what_sends(box):
    box.send_on_enter = False
    QTest.keyClicks(box, "one")
    QTest.keyClick(box, RETURN)
    assert box.messages == []
    assert box.text() == "one\n"
    QTest.keyClick(box, RETURN, CONTROL)
    assert box.messages == ["one\n"]


def test_the_box_grows_with_its_text_up_to_a_point(box):
    heights = []
    for lines in (1, 2, 5, 50, 1):
        box.setPlainText("\n".join(["line"] * lines))
        heights.append(box.height())
    assert heights[0] < heights[1] < heights[2] < heights[3] < 300
    assert heights[4] == heights[0]
