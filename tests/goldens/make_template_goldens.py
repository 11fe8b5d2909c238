"""Writes `templates.json`: what transformers makes of conversations by published chat templates.

    python -m tests.goldens.make_template_goldens FOLDER tests/goldens

FOLDER holds `*.jinja` files (`models/templates` of llama.cpp). Needs transformers. Long prompts are kept as hashes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now> & here, in °C",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Zürich"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
CHAT = [
    {"role": "user", "content": "Hello  <b>there</b>"},
    {"role": "assistant", "content": "Hi! \n"},
    {"role": "user", "content": "How are you? 你好"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}, *CHAT]
TOOLS = [
    {"role": "user", "content": "Weather in Zürich?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": '{"t": 7}'},
]
# name -> (messages, add_generation_prompt, further variables)
CASES: dict[str, tuple[list[dict[str, Any]], bool, dict[str, Any]]] = {
    "chat": (CHAT, True, {}),
    "history": (CHAT[:2], False, {}),
    "system": (SYSTEM, True, {}),
    "thinking": (CHAT, True, {"enable_thinking": True}),
    "no thinking": (CHAT, True, {"enable_thinking": False}),
    "tools": (TOOLS, True, {"tools": [TOOL]}),
    "tools offered": (CHAT, True, {"tools": [TOOL]}),
    "documents": (CHAT, True, {"documents": [{"title": "T", "text": "Some text", "content": "Some text"}]}),
}
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
DATE = "2026-11-30T12:00:00"


def kept(text: str) -> str:
    """A prompt as it is stored: short ones whole, others by hash and length."""
    return text if len(text) < 60 else f"{len(text)} {hashlib.sha256(text.encode()).hexdigest()[:24]}"


def main(folder: Path, out: Path) -> None:
    """Ask the reference for every template and case; null where it refuses."""
    from datetime import datetime

    from transformers.utils import chat_template_utils

    class Fixed(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.fromisoformat(DATE)

    chat_template_utils.datetime = Fixed
    found: dict[str, dict[str, str | None]] = {}
    for file in sorted(folder.glob("*.jinja")):
        source = file.read_text(encoding="utf-8")
        results: dict[str, str | None] = {}
        for case, (messages, prompt, variables) in CASES.items():
            try:
                (text,), _ = chat_template_utils.render_jinja_template(
                    conversations=[messages],
                    chat_template=source,
                    add_generation_prompt=prompt,
                    tools=variables.get("tools"),
                    documents=variables.get("documents"),
                    **VARIABLES,
                    **{name: value for name, value in variables.items() if name not in {"tools", "documents"}},
                )
                results[case] = kept(text)
            except Exception:  # noqa: BLE001 - a template refuses as it likes
                results[case] = None
        found[file.name] = results
    (out / "templates.json").write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
