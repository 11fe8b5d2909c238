"""Reads the small files beside a model that tokenizer and chat template share.

Files come as bytes by name, so that a model folder and a `.nook` file look the
same. Nothing here knows how text becomes tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from engine.errors import ModelFolderError

__all__ = ["chat_templates", "json_object", "special_tokens", "text_of", "token_content"]

Files = Mapping[str, bytes]

# The largest tokenizer.json in use (262,144 tokens) has 33 MB; reading JSON takes some twenty times its size.
LARGEST_FILE = 96 << 20
_TEMPLATE_FOLDER = "additional_chat_templates/"


def json_object(files: Files, name: str) -> dict[str, Any]:
    """The JSON object in file `name`; empty when there is no such file.

    Raises:
        ModelFolderError: it is no JSON object, too large, or nested too deep
    """
    data = files.get(name)
    if data is None:
        return {}
    if len(data) > LARGEST_FILE:
        raise ModelFolderError(f"{name} has {len(data) >> 20} MB; no such file is that large")
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise ModelFolderError(f"{name} is nested too deep to be read") from None
    except ValueError as error:
        raise ModelFolderError(f"{name} is not valid JSON ({error}): fetch it again") from None
    if not isinstance(value, dict):
        raise ModelFolderError(f"{name} is not a JSON object: fetch it again")
    return value


def text_of(files: Files, name: str) -> str:
    """File `name` as text; bytes that are not UTF-8 become U+FFFD."""
    return files[name].decode("utf-8-sig", errors="replace")


def token_content(value: Any) -> str | None:
    """The text of a token given as a string or as an object with `content`; None when it is neither, or empty."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def special_tokens(files: Files) -> dict[str, str]:
    """Tokens with a role, by the name that chat templates use: `{"bos_token": "<s>", ...}`.

    `tokenizer_config.json` decides; `special_tokens_map.json` fills in what it
    does not mention. A role that is null or absent is not in the result.
    """
    named: dict[str, Any] = json_object(files, "special_tokens_map.json") | json_object(files, "tokenizer_config.json")
    contents = {name: token_content(value) for name, value in named.items() if name.endswith("_token")}
    return {name: content for name, content in contents.items() if content}


def chat_templates(files: Files) -> dict[str, str]:
    """Every chat template by name; the ordinary one is called "default".

    For each name the first place wins: `chat_template.jinja`, the folder
    `additional_chat_templates`, `chat_template` in `tokenizer_config.json`
    (one string, or a list of named ones), `chat_template.json`. Blank templates
    count as absent.
    """
    found: dict[str, str] = {}
    for name, source in _template_places(files):
        if source.strip():
            found.setdefault(name, source)
    return found


def _template_places(files: Files) -> Iterator[tuple[str, str]]:
    if "chat_template.jinja" in files:
        yield "default", text_of(files, "chat_template.jinja")
    for path in sorted(files):
        if path.startswith(_TEMPLATE_FOLDER) and path.endswith(".jinja"):
            yield path.removeprefix(_TEMPLATE_FOLDER).removesuffix(".jinja"), text_of(files, path)
    for file in ("tokenizer_config.json", "chat_template.json"):
        declared = json_object(files, file).get("chat_template")
        if isinstance(declared, str):
            yield "default", declared
        elif isinstance(declared, dict):
            yield from ((name, source) for name, source in declared.items() if isinstance(source, str))
        elif isinstance(declared, list):
            for entry in declared:
                name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
                if isinstance(name, str) and isinstance(source, str):
                    yield name, source
