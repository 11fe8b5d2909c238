"""Writing a message: Enter that belongs to an input method never sends (case G01)."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QEvent, QMimeData, Qt
from PySide6.QtGui import QFocusEvent, QInputMethodEvent, QTextCursor
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication

from gui.chat.composer import Composer

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


ONE_LINE = "".join(chr(ord("a") + at % 26) for at in range(30_000))


@pytest.mark.parametrize(
    "text", [ONE_LINE, "ab " * 9000, "\U0001f525" * 3000, "short\n\n" + ONE_LINE + "\nend\n", "*" * 20_000]
)
def test_long_lines_are_held_in_pieces_that_nobody_meets(box, text):
    for fill in (box.setPlainText, lambda text: (box.clear(), box.insertPlainText(text))):
        fill(text)
        block, longest = box.document().begin(), 0
        while block.isValid():
            longest, block = max(longest, block.length()), block.next()
        assert longest < 5000
        assert box.text() == box.toPlainText() == text
        box.selectAll()
        assert box.createMimeDataFromSelection().text() == text


def test_many_short_pastes_into_one_line_are_cut_too(box):
    text = ""
    for at in range(40):
        box.insertPlainText(str(at % 10) * 1500)
        text += str(at % 10) * 1500
    assert box.text() == text
    box.moveCursor(QTextCursor.MoveOperation.Start)
    for _ in range(6):
        box.insertPlainText("\U0001f525" * 700)
    assert box.text() == "\U0001f525" * 4200 + text
    block = box.document().begin()
    while block.isValid():
        assert block.length() < 6000
        block = block.next()


def test_backspace_and_delete_at_a_piece_s_end_take_one_character(box):
    for key, place in ((Qt.Key.Key_Backspace, -1), (Qt.Key.Key_Delete, 0)):
        box.setPlainText(ONE_LINE)
        second = box.document().findBlockByNumber(1).position()
        at = len(box.document().findBlockByNumber(0).text()) - 1
        cursor = box.textCursor()
        cursor.setPosition(second if place else second - 2)
        box.setTextCursor(cursor)
        QTest.keyClick(box, key)
        assert box.text() == ONE_LINE[: at + place] + ONE_LINE[at + place + 1 :]


def test_a_paste_beyond_all_measure_is_refused_and_the_text_stays(box):
    said = []
    box.refused.connect(said.append)
    box.setPlainText("mine")
    paste = QMimeData()
    paste.setText("y" * 10_000_000)
    box.insertFromMimeData(paste)
    assert box.text() == "mine"
    assert said == ["This text is too long for a message (10,000,000 characters)."]
    paste.setText("y\n" * 300_000)  # every line costs time
    box.insertFromMimeData(paste)
    assert box.text() == "mine"
    assert len(said) == 2
    paste.setText("y" * 1_000_000)
    box.insertFromMimeData(paste)
    assert box.text() == "y" * 1_000_000 + "mine"


@pytest.mark.parametrize(("text", "direction"), [("שלום world.", "RightToLeft"), ("Hello שלום.", "LeftToRight")])
def test_what_is_written_has_its_own_direction(box, text, direction):
    box.setPlainText(text)
    assert box.document().firstBlock().textDirection() == Qt.LayoutDirection[direction]
