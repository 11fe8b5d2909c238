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


def engine_sentences() -> set[str]:
    """Every text in the engine's source, with "{}" for what is put into it."""
    found = set()
    for file in (GUI.parent / "engine").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


@pytest.mark.parametrize("file", sorted((FOLDER / "engine").glob("*.json")), ids=lambda file: file.stem)
def test_what_the_engine_says_is_translated_as_it_says_it(file):
    """A pattern is a sentence of the source, or one of the forms that a sentence with much text of its own takes."""
    said = engine_sentences()
    telling = [
        re.compile(".+".join(map(re.escape, sentence.split("{}"))))
        for sentence in said
        if 0 < sentence.count("{}") < 4 and len(sentence.replace("{}", "")) >= 20
    ]
    for sentence, translation in json.loads(file.read_text("utf-8")).items():
        plain = re.sub(r"{\w+}", "{}", sentence)
        assert plain in said or any(form.fullmatch(plain) for form in telling), sentence
        assert set(re.findall(r"{(\w+)}", sentence)) == set(re.findall(r"{(\w+)}", translation)), sentence


def test_every_language_translates_the_engine():
    assert {file.stem for file in (FOLDER / "engine").glob("*.json")} == set(i18n.LANGUAGES) - {"en"}


@pytest.mark.parametrize(
    ("sentence", "said"),
    [
        (
            "model-00002-of-00003.safetensors (and 2 more) is missing: the download is incomplete",
            "缺少 model-00002-of-00003.safetensors (and 2 more)：下载不完整",
        ),
        (
            "a.safetensors is damaged: its header is not a JSON object; fetch it again",
            "a.safetensors 已损坏：文件头不是 JSON 对象；请重新获取",
        ),
        (
            "3 earlier messages were left out so that the conversation fits the context",
            "为使对话适合上下文，略去了3 条较早的消息",
        ),
        (
            "a context of 9000 tokens is more than the 4096 that the model was made for",
            "9000 个词元的上下文超过了该模型设计的 4096 个",
        ),
    ],
)
def test_a_sentence_of_the_engine_in_chinese(sentence, said):
    i18n.set_language("zh_CN")
    assert i18n.translated(sentence) == said
    i18n.set_language("en")
    assert i18n.translated(sentence) == sentence


def test_names_that_look_like_patterns_are_names():
    i18n.set_language("zh_CN")
    assert i18n.translated("{0.__class__}.nook is a .nook file already") == "{0.__class__}.nook 已经是 .nook 文件"
    assert i18n.translated("something the catalogue does not know") is None
    i18n.set_language("en")


def test_an_unknown_language_is_english():
    i18n.set_language("zh_CN")
    assert i18n.tr("Chat") == "对话"
    i18n.set_language("tlh")
    assert i18n.tr("Chat") == "Chat"
