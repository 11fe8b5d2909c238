"""Answers in channels become text with the marks that everybody reads."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.channels import CHANNEL_TOKENS, ChannelStream
from engine.text.dialect import Dialect
from engine.text.tokenizer import Tokenizer
from tests.factory import tok_json


class Pieces:
    """A stream whose tokens are pieces of a text."""

    def __init__(self, pieces: list[str]) -> None:
        self.stopped = False
        self._pieces = pieces

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def finish(self) -> str:
        return ""


CASES = {
    "thought and text": (
        "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant<|channel|>final<|message|>Yes < no.",
        "<think>Hm <b>.</think>Yes < no.",
    ),
    "a call": (
        (
            "<|channel|>analysis<|message|>I call.<|end|><|start|>assistant<|channel|>commentary to=functions.time "
            '<|constrain|>json<|message|>{"zone": "x"}'
        ),
        '<think>I call.</think><tool_call>{"name": "time", "arguments": {"zone": "x"}}</tool_call>',
    ),
    "a call whose end is told": (
        ' to=functions.time<|channel|>commentary json<|message|>{"zone": "x"}<|call|>',
        '<tool_call>{"name": "time", "arguments": {"zone": "x"}}</tool_call>',
    ),
    "words before a call": (
        (
            "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant to=functions.time"
            "<|channel|>commentary<|message|>{}"
        ),
        'Let me see.<tool_call>{"name": "time", "arguments": {}}</tool_call>',
    ),
    "without channels": ('{"a": 1}', '{"a": 1}'),
    "the word that a header begins with": ("assistants help.", "assistants help."),
    "cut in a thought": ("<|channel|>analysis<|message|>Hm", "<think>Hm"),
    "cut in a header": ("<|channel|>analysis<|message|>Hm<|end|><|start|>assi", "<think>Hm</think>"),
    "nothing": ("", ""),
}


@pytest.mark.parametrize("name", CASES)
@given(cuts=st.lists(st.integers(0, 300), max_size=12))
def test_channels_become_marks_however_the_text_is_cut(name: str, cuts: list[int]) -> None:
    text, wanted = CASES[name]
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    stream = ChannelStream(Pieces(pieces))
    assert "".join(stream.push(place) for place in range(len(pieces))) + stream.finish() == wanted


def test_a_long_answer_is_told_as_it_comes() -> None:
    stream = ChannelStream(Pieces(["<|channel|>", "final", "<|message|>", "One", " two <", "|", "b"]))
    assert [stream.push(place) for place in range(7)] == ["", "", "", "One", " two ", "", "<|b"]


def test_the_dialect_is_known_by_its_marks_and_its_template() -> None:
    tokens = {"tokenizer.json": json.dumps(tok_json(("<s>", "</s>", *CHANNEL_TOKENS))).encode()}
    tokenizer = Tokenizer.from_files(tokens)
    found = Dialect.found(["{{ messages }}<|channel|>"], tokenizer)
    assert found.channels
    assert found.think == ("<think>", "</think>")
    assert not Dialect.found(["{{ messages }}"], tokenizer).channels
