"""Published chat templates against transformers: some seventy, with systems, tools, thinking and documents.

They are looked for in `tokenizers/templates` of INGLENOOK_TEST_MODELS; where from, is in tests/goldens/README.md.
"""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path

import pytest

from engine.errors import TemplateError
from engine.text.template import ChatTemplate
from tests.goldens.make_template_goldens import CASES, DATE, VARIABLES, kept

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "templates.json").read_text(encoding="utf-8"))
# `"..."|safe + text` makes the reference escape the text for web pages, which no model was trained on.
ESCAPED = {("meetkai-functionary-medium-v3.1.jinja", case) for case in ("tools", "tools offered")}


@pytest.mark.parametrize("name", GOLDENS)
def test_prompts_are_those_of_the_reference(name):
    given = os.environ.get("INGLENOOK_TEST_MODELS")
    path = Path(given or "", "tokenizers", "templates", name)
    if not given or not path.is_file():
        pytest.skip("INGLENOOK_TEST_MODELS holds no such template")
    source = path.read_text(encoding="utf-8")
    expected = GOLDENS[name]
    try:
        # One that wants tools is only ever used beside one that does not.
        template = ChatTemplate({"default": source}, VARIABLES)
    except TemplateError:
        assert expected["chat"] is None
        return
    started = datetime.fromisoformat(DATE)
    for case, (messages, prompt, variables) in CASES.items():
        try:
            text = kept(template.apply(messages, prompt, started=started, **variables))
        except TemplateError:
            text = None
        assert text == expected[case] or (name, case) in ESCAPED, case
