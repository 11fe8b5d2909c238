"""What every page owes to everybody: names, room for its words, a way through by keyboard, text in any direction."""

from __future__ import annotations

import socket

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QAccessible, QFontMetrics, QInputMethodEvent, QTextDocument
from PySide6.QtTest import QTest
from PySide6.QtWidgets import (
    QAbstractButton,
    QApplication,
    QDialog,
    QLabel,
    QLineEdit,
    QPlainTextEdit,
    QPushButton,
    QToolButton,
    QWidget,
)

from engine.settings import ServerSettings
from gui.chat.markdown import write_markdown, write_plain
from gui.kit.controls import Elided

PAGES = ("chat", "models", "diagnostics", "server", "settings")
VIEWS = (*PAGES, "report", "quality", "conversion", "comparison", "measured")


def walk(driver, view):
    """Every widget that can be seen of a page, or of something that one does there; and the rail."""
    match view:
        case "report" | "quality" | "conversion":
            driver.drop(driver.folder)
            driver.until(lambda: driver.has("convert"))
            if view == "quality":
                driver.click("chooseQuality")
            elif view == "conversion":
                driver.click("convert")
                driver.until(lambda: driver.has("chatWith"))
        case "comparison":
            driver.script.add_model("Another", 1000)
            driver.click("pageModels")
            driver.until(lambda: len(driver.session.models) > 1)
            driver.click("compareModels")
            driver.until(lambda: driver.has("compareStart"))
            driver.find("compareMessage", QPlainTextEdit).setPlainText("Which is it?")
            driver.click("compareStart")
            driver.until(lambda: driver.has("voteFirst"))
        case "measured":
            driver.session.preferences.change(bandwidth_gb=11.2)
            driver.click("pageDiagnostics")
            driver.click("benchmark")
            driver.until(lambda: driver.has("layerColumns"))
        case _:
            driver.window.show_page(view)
    driver.qtbot.wait(60)
    return [widget for widget in driver.window.findChildren(QWidget) if widget.isVisible()]


@pytest.mark.parametrize("language", ["en", "zh_CN"])
@pytest.mark.parametrize("text_size", [100, 150])
def test_words_have_room(open_window, language, text_size):
    driver = open_window(language=language, text_size=text_size)
    driver.ask("Hello?")
    driver.window.resize(1500, 900)
    short = []
    for page in VIEWS:
        for widget in walk(driver, page):
            if isinstance(widget, Elided) or not isinstance(widget, QLabel | QPushButton | QToolButton):
                continue
            text = widget.text().replace("&", "")
            shows_text = not isinstance(widget, QToolButton) or (
                widget.toolButtonStyle() != Qt.ToolButtonStyle.ToolButtonIconOnly
            )
            wraps = isinstance(widget, QLabel) and (widget.wordWrap() or widget.objectName() == "answerFacts")
            if not text or not shows_text or wraps:
                continue
            wide = max(QFontMetrics(widget.font()).horizontalAdvance(line) for line in text.split("\n"))
            if wide > widget.width() + 1 and widget.property("role") != "suggestion":
                short.append((page, widget.objectName(), text, wide, widget.width()))
    assert short == []


def test_screen_readers_get_a_name_and_a_kind_for_everything_that_takes_the_focus(open_window):
    driver = open_window()
    driver.script.tokens = ["<think>hm</think>Here:\n\n```py\nx = 1\n```\n"]
    driver.ask("Hello?")
    for page in VIEWS:
        for widget in walk(driver, page):
            if widget.focusPolicy() == Qt.FocusPolicy.NoFocus or widget.objectName().startswith("qt_"):
                continue
            if widget.metaObject().className() in {"QScrollArea", "QStackedWidget"}:
                continue
            interface = QAccessible.queryAccessibleInterface(widget)
            assert interface is not None, (page, widget)
            name = interface.text(QAccessible.Text.Name) or widget.accessibleName()
            assert name or widget.inherits("QScrollArea"), (page, widget, widget.objectName())
            assert interface.role() != QAccessible.Role.NoRole, (page, widget.objectName())


@pytest.mark.parametrize("page", VIEWS)
def test_the_tab_key_goes_through_a_page_and_comes_back(open_window, page):
    driver = open_window()
    driver.ask("Hello?")
    seen_all = walk(driver, page)
    first = QApplication.focusWidget()
    assert first is not None
    seen = []
    for _ in range(150):
        QTest.keyClick(QApplication.focusWidget(), Qt.Key.Key_Tab)
        now = QApplication.focusWidget()
        if now is first and seen:
            break
        seen.append(now)
    assert QApplication.focusWidget() is first, "the focus never came back"
    buttons = {
        widget.objectName()
        for widget in seen_all
        if isinstance(widget, QPushButton) and widget.isEnabled() and widget.objectName()
    }
    assert buttons <= {widget.objectName() for widget in (first, *seen)}


def test_dialogs_name_their_fields_and_leave_enter_to_the_input_method(open_window):
    driver = open_window()
    driver.click("keepPreset")
    dialog = driver.window.findChild(QDialog, "askText")
    line = dialog.findChild(QLineEdit, "askTextLine")
    assert line.accessibleName()
    QApplication.sendEvent(line, QInputMethodEvent("ming", []))
    QTest.keyClick(line, Qt.Key.Key_Return)
    assert dialog.isVisible()
    event = QInputMethodEvent("", [])
    event.setCommitString("名")
    QApplication.sendEvent(line, event)
    QTest.keyClick(line, Qt.Key.Key_Return)
    assert driver.session.preferences.values.presets.keys() == {"名"}


@pytest.mark.parametrize(
    ("text", "direction"),
    [
        ("مرحبا بالعالم.", Qt.LayoutDirection.RightToLeft),
        ("שלום world 123.", Qt.LayoutDirection.RightToLeft),
        ("Hello שלום.", Qt.LayoutDirection.LeftToRight),
        ("你好", Qt.LayoutDirection.LeftToRight),
    ],
)
def test_each_paragraph_has_its_own_direction(qapp, text, direction):
    """Case G14."""
    for write in (write_markdown, write_plain):
        document = QTextDocument()
        write(document, text)
        assert document.firstBlock().textDirection() == direction


def test_code_stays_left_to_right(open_window):
    driver = open_window()
    driver.script.tokens = ["```py\nשלום = 1\n```"]
    driver.ask("Hello?")
    driver.qtbot.wait(80)
    code = driver.find("codeBlock").findChild(QPlainTextEdit)
    assert code.document().firstBlock().layout().textOption().textDirection() == Qt.LayoutDirection.LeftToRight


def test_a_port_that_is_taken_is_said(open_window):
    """Case G13."""
    driver = open_window()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        driver.session.preferences.change(server=ServerSettings(port=port))
        driver.click("pageServer")
        driver.click("startServer")
        driver.until(lambda: driver.session.serving.state.kind == "failed", 20_000)
    assert str(port) in driver.texts("serverState")[0]
    assert driver.has("startServer")


def test_a_model_that_wants_more_memory_can_be_loaded_anyway(open_window):
    driver = open_window()
    driver.script.load_failure, driver.script.load_kind = "The model needs 9 GB, and 4 GB are free.", "ResourceError"
    driver.session.reload_model()
    driver.until(lambda: driver.has("loadAnyway"))
    driver.script.load_failure = ""
    driver.find("loadAnyway", QAbstractButton).click()
    driver.until(lambda: driver.session.state.kind == "ready")
    assert driver.script.loads[-1][1].context == 1024
    assert driver.session.preferences.values.engine.context == 0
