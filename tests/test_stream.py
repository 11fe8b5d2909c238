"""Answers as they grow: cases T01, T03, T04 and T10 over all ways to cut them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.text.stream import TextStream
from engine.text.tokenizer import Piece, Tokenizer
from tests.factory import tok_json
from tests.test_tokenizer import PREPENDING, llama_json

CHARACTERS = "A 世a😀👩‍👩‍👧é한국어e\u0301 \u2028"
BYTES = Tokenizer.from_files(
    {
        "tokenizer.json": json.dumps(tok_json(merges=[("a", "b"), ("ab", "c"), ("Ġ", "a"), ("c", "X")])).encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>"}).encode(),
    }
)
LLAMA = Tokenizer.from_files({"tokenizer.json": json.dumps(llama_json(**PREPENDING)).encode()})


def deltas(ids: Sequence[int], stop: Sequence[str] = (), tokenizer: Tokenizer = BYTES) -> list[str]:
    """What is given out at each token, and at the end."""
    stream = TextStream(tokenizer, stop)
    given_out = [stream.push(token_id) for token_id in ids]
    return [*given_out, stream.finish()]


def streamed(ids: Sequence[int], stop: Sequence[str] = (), tokenizer: Tokenizer = BYTES) -> str:
    return "".join(deltas(ids, stop, tokenizer))


def cut(text: str, stop: Sequence[str]) -> str:
    """The plain twin: the text up to the stop string that begins earliest in all of it."""
    starts = [text.find(one) for one in stop if one]
    return text[: min((start for start in starts if start >= 0), default=len(text))]


# T01: characters of several tokens


def test_a_character_appears_once_and_whole() -> None:
    ids = list(CHARACTERS.encode())
    for n in range(len(ids) + 1):
        given_out = deltas(ids[:n])
        whole = bytes(ids[:n]).decode(errors="ignore")
        assert "".join(given_out) == BYTES.decode(ids[:n]) == whole
        assert not any("\ufffd" in delta for delta in given_out)


def test_nothing_waits_longer_than_it_must() -> None:
    assert deltas(list("a😀b".encode())) == ["a", "", "", "", "😀", "b", ""]


TOKENS = st.one_of(
    st.integers(0, 263),
    st.sampled_from([*CHARACTERS, "abc", "\ufffd"]).map(lambda character: list(character.encode())),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(TOKENS, max_size=25))
@example([0xF0, 0x9F, 259, 0x98, 0x80])
@example([0xE4, 0xB8, 0xF0, 0x9F, 0x98])
def test_a_stream_is_the_whole_decoded(tokens: list[int | list[int]]) -> None:
    ids = [token_id for token in tokens for token_id in (token if isinstance(token, list) else [token])]
    given_out = deltas(ids)
    assert "".join(given_out) == BYTES.decode(ids)
    if "\ufffd" not in BYTES.decode(ids):
        assert not any("\ufffd" in delta for delta in given_out)
    for delta in given_out:
        delta.encode()
    assert given_out[-1] == ""
    assert "<|im_end|>" not in "".join(given_out) or b"<|im_end|>" in bytes(i for i in ids if i < 256)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 263), max_size=20), st.lists(st.integers(0, 263), max_size=20))
def test_streams_side_by_side_do_not_mix(one: list[int], other: list[int]) -> None:
    first, second = TextStream(BYTES), TextStream(BYTES)
    texts = ["", ""]
    for index in range(max(len(one), len(other))):
        for number, (stream, ids) in enumerate(((first, one), (second, other))):
            if index < len(ids):
                texts[number] += stream.push(ids[index])
    assert [texts[0] + first.finish(), texts[1] + second.finish()] == [BYTES.decode(one), BYTES.decode(other)]


# T03: the end of an answer inside a character


@pytest.mark.parametrize("ids", [[0xF0, 0x9F], [0xF0], [97, 0xE4, 0xB8], [97, 0xF0, 0x9F, 0x98]])
def test_half_a_character_at_the_end_is_left_out(ids: list[int]) -> None:
    assert streamed(ids) == BYTES.decode(ids) == "a" * ids.count(97)
    assert streamed([*ids, 259]) == "a" * ids.count(97)
    assert streamed(ids, ["stop"]) == "a" * ids.count(97)


def test_half_a_character_within_is_replaced() -> None:
    assert streamed([0xF0, 0x9F, *b"END"], ["END"]) == "\ufffd"
    assert streamed([0xF0, 0x9F, 97]) == "\ufffda"


# T04: stop strings


@pytest.mark.parametrize(
    ("text", "stop", "wanted", "stopped"),
    [
        ("The quick brown fox", ["own fox"], "The quick br", True),
        ("abcDEFGH", ["DEFGHIJ", "FG"], "abcDE", True),
        ("abcDEFGHIJ", ["DEFGHIJ", "FG"], "abc", True),
        ("aXbXX", ["XX"], "aXb", True),
        ("x世界y", ["世界"], "x", True),
        ("abc", [""], "abc", False),
        ("abc", ["", "c"], "ab", True),
        ("....", ["..."], "", True),
        ("aaab", ["aab"], "a", True),
        ("ababac", ["abac"], "ab", True),
        ("abab", ["abac", "bb"], "abab", False),
        ("abc", ["abcd"], "abc", False),
        ("a\n\nUser: b", ["\n\nUser:", "\nUser:"], "a", True),
        ("<|im_end|>x", ["<|im_end|>"], "", True),
        ("abc", [], "abc", False),
        ("aab", ["ab", "aab"], "", True),
        ("xyz", ["z", "yz", "xyz"], "", True),
    ],
)
def test_an_answer_ends_where_the_first_stop_string_begins(
    text: str, stop: list[str], wanted: str, stopped: bool
) -> None:
    for ids in (list(text.encode()), BYTES.encode_pieces([Piece(text, is_content=True)])):
        stream = TextStream(BYTES, stop)
        given_out = "".join(stream.push(token_id) for token_id in ids)
        given_out += stream.finish()
        assert given_out == wanted == cut(text, stop)
        assert stream.stopped is stopped


def test_nothing_follows_a_stop() -> None:
    stream = TextStream(BYTES, ["bc"])
    assert [stream.push(token_id) for token_id in (97, 98, 99, 100, 0xF0)] == ["a", "", "", "", ""]
    assert stream.stopped
    assert stream.finish() == ""


def test_text_after_the_stop_in_one_token_does_not_leak() -> None:
    tokenizer = BYTES
    abc = tokenizer.token_to_id("abc")
    assert abc is not None
    stream = TextStream(tokenizer, ["b"])
    assert stream.push(abc) == "a"
    assert stream.stopped


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    assert deltas(list(b"abXabc"), ["abc"]) == ["", "", "abX", "", "", "", ""]
    assert deltas(list(b"aaaab"), ["aab"]) == ["", "", "a", "a", "", ""]
    assert deltas(list(b"xab"), ["abc"]) == ["x", "", "", "ab"]
    assert deltas(list("a世b".encode()), ["世c"]) == ["a", "", "", "", "世b", ""]


PIECES = st.lists(st.sampled_from(["a", "b", "c", "abc", " a", "X", "世", "é"]), max_size=16)
STOPS = st.lists(st.text("abcX世 ", max_size=4), max_size=4)


@settings(max_examples=500, deadline=None)
@given(PIECES, STOPS, st.booleans())
@example(["a", "b", "c", "abc"], ["cabX", "ca"], False)
@example(["abc", "abc"], ["bcabX", "ca", "cab"], True)
def test_stops_are_found_however_the_text_is_cut(pieces: list[str], stop: list[str], merged: bool) -> None:
    text = "".join(pieces)
    ids = [i for piece in pieces for i in (BYTES.encode(piece) if merged else piece.encode())]
    stream = TextStream(BYTES, stop)
    given_out = ""
    for position, token_id in enumerate(ids):
        given_out += stream.push(token_id)
        so_far = BYTES.decode(ids[: position + 1])
        if stream.stopped:
            break
        assert cut(so_far, stop).startswith(given_out)
        held = so_far[len(given_out) :]
        if cut(so_far, stop) == so_far:
            assert not held or any(one.startswith(held) for one in stop), "held back for nothing"
    given_out += stream.finish()
    assert given_out == cut(text, stop)
    assert stream.stopped is (given_out != text)


# T10: words of a Llama


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from([[1], [2], [259], [260], [261], [262], [263], [3 + b for b in "世".encode()]]), max_size=12
    )
)
@example([[261], [263], [263]])
@example([[1], [261], [263]])
@example([[259], [259], [261]])
def test_spaces_of_a_llama(words: list[list[int]]) -> None:
    ids = [token_id for word in words for token_id in word]
    assert streamed(ids, tokenizer=LLAMA) == LLAMA.decode(ids)
    assert streamed(ids, ["b a"], tokenizer=LLAMA) == cut(LLAMA.decode(ids), ["b a"])


def test_a_long_answer_costs_no_more_per_token_than_a_short_one() -> None:
    def seconds(count: int, stop: list[str]) -> float:
        stream = TextStream(BYTES, stop)
        started_s = time.process_time()
        for _ in range(count):
            stream.push(97)
        return time.process_time() - started_s

    for stop in ([], ["zz"], ["a" * 10_000 + "b"]):
        short, long = seconds(5_000, stop), seconds(50_000, stop)
        assert long < 10 * short * 4 + 0.2
