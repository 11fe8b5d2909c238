"""The whole path through the real window and engine: a dropped folder, converted, answers, and is remembered."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QDoubleSpinBox

from engine import api
from tests import factory

WAIT_MS = 60_000  # a busy machine, not a slow program


@pytest.fixture
def real_engine(compiled_kernels, monkeypatch, tmp_path):
    """The engine as people have it, with a library of its own and no starter."""
    monkeypatch.setattr(api, "library_folder", lambda: tmp_path / "models")
    monkeypatch.setattr(api, "starter_path", lambda: None)
    return lambda: api


@pytest.fixture
def folder(tmp_path):
    """A tiny model that babbles without end: no end token ever wins."""
    config = factory.cfg(max_position_embeddings=8192)
    weights = factory.weights(config)
    weights["model.norm.weight"][:] = 4
    weights["lm_head.weight"][256:] = 0  # control tokens and padding
    weights["lm_head.weight"][ord("a") : ord("z")] *= 3
    return factory.make(tmp_path / "模型 folder", config, weights)


def test_drop_convert_chat_stop_restart(open_window, real_engine, folder):
    driver = open_window(model=False, script=real_engine)
    driver.drop(folder)
    driver.until(lambda: driver.has("convert"), WAIT_MS)
    driver.click("convert")
    driver.until(lambda: driver.has("chatWith"), WAIT_MS)
    [file] = (driver.folder / "models").glob("*.nook")
    driver.click("chatWith")
    driver.until(lambda: driver.session.state.kind == "ready", WAIT_MS)
    driver.find("temperature", QDoubleSpinBox).setValue(0)

    driver.find("maxTokens").setValue(24)
    first = driver.ask("Hello, 你好", WAIT_MS)
    assert len(first) > 3
    assert driver.transcript.visible_text().count(first.strip()[:3]) >= 1
    assert "tokens/s" in driver.texts("statusSpeed")[0]

    driver.find("maxTokens").setValue(4096)
    driver.send("go on")
    driver.until(lambda: len(driver.session.chat.turns[-1].message.content) > 20, WAIT_MS)
    QTest.keyClick(driver.window, Qt.Key.Key_Escape)
    driver.until(lambda: not driver.session.running, 2000)
    stopped = driver.session.chat.turns[-1].message
    assert stopped.reason == "cancelled"
    assert driver.texts("answerEnding")[-1] == "Stopped."

    again = driver.reopen(model=False)
    again.until(lambda: again.session.state.kind == "ready", WAIT_MS)
    assert again.session.state.model.path == file
    again.find("chatList").setCurrentIndex(again.find("chatList").model().index(0))
    QTest.keyClick(again.find("chatList"), Qt.Key.Key_Return)
    again.until(lambda: len(again.session.chat.turns) == 4, WAIT_MS)
    contents = [turn.message.content for turn in again.session.chat.turns]
    assert contents == ["Hello, 你好", first, "go on", stopped.content]
    again.close()


def test_closing_during_a_real_answer(open_window, real_engine, folder):
    driver = open_window(model=False, script=real_engine)
    driver.drop(folder)
    driver.until(lambda: driver.has("convert"), WAIT_MS)
    driver.click("convert")
    driver.until(lambda: driver.has("chatWith"), WAIT_MS)
    driver.click("chatWith")
    driver.until(lambda: driver.session.state.kind == "ready", WAIT_MS)
    driver.find("temperature", QDoubleSpinBox).setValue(0)
    driver.send("go")
    driver.until(lambda: driver.session.chat.turns[-1].message.content, WAIT_MS)
    assert driver.close() < 3
