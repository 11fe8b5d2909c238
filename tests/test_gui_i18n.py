"""Every sentence of the window is translated, and nothing else is."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from engine.settings import EngineSettings, Sampling, ServerSettings
from gui.chat import panel
from gui.data.preferences import Preferences
from gui.kit import i18n
from gui.pages import server as server_page
from gui.pages import settings as settings_page

GUI = Path(i18n.__file__).parent.parent
FOLDER = GUI.parent / "assets" / "i18n"


def literal_sentences() -> set[str]:
    """First arguments of `tr(...)`; each must be a literal, or this test could not see it."""
    found = set()
    for file in GUI.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "tr":
                argument = node.args[0]
                if isinstance(argument, ast.Constant):
                    found.add(argument.value)
                else:
                    assert file.name == "forms.py", f"{file.name}:{node.lineno}: tr() of something computed"
    return found


def setting_sentences() -> set[str]:
    found = set()
    for model, names in (
        (Preferences, (*settings_page.GENERAL, "streaming")),
        (EngineSettings, settings_page.ENGINE),
        (ServerSettings, server_page.SERVER),
        (Sampling, (*panel.CONTROLS, *panel.ADVANCED)),
    ):
        properties = model.model_json_schema()["properties"]
        for name in names:
            found |= {properties[name]["title"], properties[name]["description"]}
            found |= set(properties[name].get("labels", {}).values())
    return found


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_no_sentence_is_missing_or_unused(file):
    translated = json.loads(file.read_text("utf-8"))
    used = literal_sentences() | setting_sentences()
    own_names = set(i18n.LANGUAGES.values())
    assert used - own_names - set(translated) == set()
    assert set(translated) - used == set()


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_the_same_values_are_filled_in(file):
    for sentence, said in json.loads(file.read_text("utf-8")).items():
        assert set(re.findall(r"{(\w+)}", sentence)) == set(re.findall(r"{(\w+)}", said)), sentence
        assert said.strip(), sentence


def test_every_language_has_a_file_and_a_name():
    assert {file.stem for file in FOLDER.glob("*.json")} == set(i18n.LANGUAGES) - {"en"}


def test_an_unknown_language_is_english():
    i18n.set_language("zh_CN")
    assert i18n.tr("Chat") == "对话"
    i18n.set_language("tlh")
    assert i18n.tr("Chat") == "Chat"
