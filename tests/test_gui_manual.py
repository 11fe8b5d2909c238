"""The manual: there in every language, opened once, with nothing that leads out."""

from __future__ import annotations

import re

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest

from gui.kit.i18n import LANGUAGES
from gui.kit.theme import ASSETS
from gui.pages.manual import Manual


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_has_a_manual_without_links(language):
    text = (ASSETS / "manual" / f"{language}.md").read_text("utf-8")
    assert len(re.findall(r"^## ", text, re.MULTILINE)) == 7
    assert not re.search(r"https?://|\]\(|!\[", text)


def test_help_opens_it_once(open_window):
    driver = open_window()
    window = driver.window
    QTest.keyClick(window, Qt.Key.Key_F1)
    window.settings_page.findChild(object, "openManual").click()
    (manual,) = window.findChildren(Manual)
    assert manual.isVisible()
    assert "starter model" in manual.text.toPlainText()
