"""Conversations as files: written as Markdown, JSON or HTML, and read again from any of them.

JSON holds everything, all versions included. Markdown and HTML hold what is
in view, to be read by people; marks that are not shown let them be read again.
"""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gui.data.attachments import decode_text
from gui.data.store import Attached, Conversation, Message, new_id
from gui.kit.i18n import tr

__all__ = ["ArchiveError", "line_of", "read_conversations", "to_html", "to_json", "to_markdown"]

_FORMAT = "inglenook-conversation"
_VERSION = 1
_ROLES = {"system", "user", "assistant", "tool"}
_STATES = {"done", "interrupted", "failed"}
_MARK = re.compile(r"^<!-- inglenook (\{.*?\}) -->\n", re.MULTILINE)
_EMBEDDED = re.compile(r'<script type="application/json" id="inglenook">(.*?)</script>', re.DOTALL)
_MOST_BYTES = 300_000_000


class ArchiveError(Exception):
    """A file holds no conversation that can be read; one sentence for the user."""


def line_of(conversation: Conversation, messages: Sequence[Message]) -> list[Message]:
    """The messages in view, out of all versions."""
    by_id = {message.id: message for message in messages}
    line: list[Message] = []
    identity = conversation.head
    while identity is not None and identity in by_id:
        line.append(by_id.pop(identity))
        identity = line[-1].parent
    return line[::-1]


def to_json(conversation: Conversation, messages: Sequence[Message]) -> str:
    """Everything there is of a conversation."""
    return json.dumps(_packed(conversation, messages), ensure_ascii=False, indent=1)


def _packed(conversation: Conversation, messages: Sequence[Message]) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "title": conversation.title,
        "system": conversation.system,
        "settings": conversation.settings,
        "folder": conversation.folder,
        "head": conversation.head,
        "messages": [
            {
                key: value
                for key, value in asdict(message).items()
                if key != "conversation" and value not in ("", [], {})
            }
            for message in messages
        ],
    }


def to_markdown(conversation: Conversation, messages: Sequence[Message]) -> str:
    """The messages in view, to be read by people."""
    parts = [f"# {conversation.title}\n"]
    if conversation.system:
        parts.append(_mark(role="system") + conversation.system + "\n")
    for message in messages:
        parts.append(_mark(role=message.role, model=message.model) + f"## {_speaker(message)}\n")
        parts += [f"> {file.name}\n" for file in message.attached]
        parts.append(message.content + "\n")
    return "\n".join(parts)


def _mark(**values: str) -> str:
    return f"<!-- inglenook {json.dumps({key: value for key, value in values.items() if value})} -->\n"


def _speaker(message: Message) -> str:
    return tr("You") if message.role == "user" else message.model or tr("Answer")


def to_html(conversation: Conversation, messages: Sequence[Message]) -> str:
    """The messages in view as one page that asks for nothing else; scripts and addresses in them are plain text."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    parser.disable("image")  # it would be a request to somebody's server
    said = []
    for message in messages:
        files = "".join(f"<p class=file>{html.escape(file.name)}</p>" for file in message.attached)
        body = (
            parser.render(message.content)
            if message.role == "assistant"
            else f"<p class=plain>{html.escape(message.content)}</p>"
        )
        said.append(f"<section class={message.role}><h2>{html.escape(_speaker(message))}</h2>{files}{body}</section>")
    packed = json.dumps(_packed(conversation, messages), ensure_ascii=False).replace("<", "\\u003c")
    return _PAGE.format(title=html.escape(conversation.title), body="\n".join(said), packed=packed)


_PAGE = """<!doctype html>
<html><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body {{ font: 16px/1.6 system-ui, sans-serif; max-width: 46em; margin: 3em auto; padding: 0 1em; color: #26221d; }}
h2 {{ font-size: 0.85em; color: #6a6258; margin: 2em 0 0.4em; }}
section.user {{ background: #f2ede5; border-radius: 1em; padding: 0.1em 1.2em 0.6em; }}
.plain {{ white-space: pre-wrap; }} .file {{ color: #b5471b; }}
pre {{ background: #f6f3ee; border: 1px solid #e5dfd6; border-radius: 0.7em; padding: 0.8em; overflow-x: auto; }}
table {{ border-collapse: collapse; }} td, th {{ border-bottom: 1px solid #e5dfd6; padding: 0.3em 0.8em; }}
</style></head><body><h1>{title}</h1>
{body}
<script type="application/json" id="inglenook">{packed}</script></body></html>
"""


def read_conversations(path: Path) -> list[tuple[Conversation, list[Message]]]:
    """The conversations in a file, with new identities; nothing in it is trusted.

    Raises:
        ArchiveError: there is none
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ArchiveError(tr("{name} is too large to be a conversation.", name=path.name))
        text = decode_text(path.read_bytes())
    except OSError as error:
        raise ArchiveError(tr("{name} cannot be read: {reason}.", name=path.name, reason=error.strerror)) from error
    found: list[tuple[Conversation, list[Message]]] = []
    if text is not None:
        embedded = _EMBEDDED.search(text)
        if text.lstrip()[:1] in {"{", "["} or embedded is not None:
            found = _from_json(embedded[1] if embedded is not None else text)
        else:
            found = _from_markdown(text, path.stem)
    if not found:
        raise ArchiveError(tr("{name} holds no conversation that Inglenook can read.", name=path.name))
    return found


def _from_json(text: str) -> list[tuple[Conversation, list[Message]]]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [
        _unpacked(value)
        for value in (values if isinstance(values, list) else [values])
        if isinstance(value, dict) and value.get("format") == _FORMAT and isinstance(value.get("messages"), list)
    ]


def _unpacked(values: Mapping[str, Any]) -> tuple[Conversation, list[Message]]:
    conversation = new_id()
    known: dict[str, str] = {}
    messages: list[Message] = []
    for value in values["messages"]:
        if (
            not isinstance(value, dict)
            or value.get("role") not in _ROLES
            or not isinstance(value.get("content", ""), str)
        ):
            continue
        parent = known.get(str(value.get("parent")))
        state = value.get("state")
        facts = value.get("facts")
        created = value.get("created_s")
        attached = [
            Attached(str(file["name"]), str(file["text"]))
            for file in _list(value.get("attached"))
            if isinstance(file, dict) and {"name", "text"} <= set(file)
        ]
        message = Message(
            new_id(),
            conversation,
            parent,
            value["role"],
            value.get("content", ""),
            state if state in _STATES else "done",
            str(value.get("reason", "")),
            str(value.get("model", "")),
            {str(key): fact for key, fact in facts.items() if isinstance(fact, str | int | float)}
            if isinstance(facts, dict)
            else {},
            float(created) if isinstance(created, int | float) else time.time(),
            tuple(attached),
        )
        known[str(value.get("id"))] = message.id
        messages.append(message)
    settings = values.get("settings")
    sampling = settings.get("sampling") if isinstance(settings, dict) else None
    head = known.get(str(values.get("head"))) or (messages[-1].id if messages else None)
    return (
        Conversation(
            conversation,
            str(values.get("title") or tr("Imported chat"))[:80],
            head,
            system=str(values.get("system") or ""),
            folder=str(values.get("folder") or "")[:80],
            settings={"sampling": sampling} if isinstance(sampling, dict) else {},
        ),
        messages,
    )


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _from_markdown(text: str, name: str) -> list[tuple[Conversation, list[Message]]]:
    marks = list(_MARK.finditer(text))
    if not marks:
        return []
    heading = text[: marks[0].start()].strip().removeprefix("# ").strip()
    conversation = Conversation(new_id(), (heading or name)[:80])
    messages: list[Message] = []
    for number, mark in enumerate(marks):
        body = text[mark.end() : marks[number + 1].start() if number + 1 < len(marks) else len(text)]
        try:
            values = json.loads(mark[1])
        except ValueError:
            continue
        if values.get("role") == "system":
            conversation = replace(conversation, system=body.strip())
        elif values.get("role") in _ROLES:
            lines = body.split("\n", 1)  # the first says who speaks
            content = (lines[1] if len(lines) > 1 else "").strip("\n")
            parent = messages[-1].id if messages else None
            messages.append(
                Message(
                    new_id(),
                    conversation.id,
                    parent,
                    values["role"],
                    content,
                    model=str(values.get("model", "")),
                    created_s=time.time(),
                )
            )
    return [(replace(conversation, head=messages[-1].id), messages)] if messages else []
