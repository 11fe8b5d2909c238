"""Conversations on disk: found again, searched, and never lost, whatever happens to the file (case G05)."""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from gui.data import schema
from gui.data.rescue import copy_of
from gui.data.store import SCHEMA, Message, Store, StoreError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def path(tmp_path):
    return tmp_path / "conversations.sqlite"


@pytest.fixture
def store(path):
    made = Store(path)
    yield made
    made.close()


def talk(store, identity="c", *texts):
    """A conversation of alternating messages."""
    store.create(identity, f"about {identity}")
    parent = None
    for number, text in enumerate(texts):
        role = "assistant" if number % 2 else "user"
        message = Message(f"{identity}{number}", identity, parent, role, text)
        store.add(message)
        parent = message.id
    return store.conversation(identity)


def contents(store, identity="c"):
    return [message.content for message in store.branch(store.conversation(identity))]


def test_a_conversation_is_found_again(path):
    store = Store(path)
    talk(store, "c", "hello", "good day", "how are you?")
    store.change("c", draft="and n")
    store.close()
    again = Store(path)
    assert contents(again) == ["hello", "good day", "how are you?"]
    assert again.conversation("c").draft == "and n"
    again.close()


def test_answers_to_one_message_are_versions_of_each_other(store):
    talk(store, "c", "question", "first")
    store.add(Message("second", "c", "c0", "assistant", "second answer", facts={"decode_tps": 3.5}))
    assert contents(store) == ["question", "second answer"]
    shown = store.branch(store.conversation("c"))[-1]
    assert store.versions(shown) == ["c1", "second"]
    assert shown.facts == {"decode_tps": 3.5}


def test_the_latest_conversation_comes_first(store):
    talk(store, "a", "one")
    talk(store, "b", "two")
    assert [known.id for known in store.conversations()] == ["b", "a"]
    store.add(Message("more", "a", "a0", "assistant", "answer"))
    assert [known.id for known in store.conversations()] == ["a", "b"]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("smoke", ["english"]),
        ("SMOKE rises", ["english"]),
        ("oke", ["english"]),
        ("smoke 天气", []),
        ("天气", ["chinese"]),
        ("今天天气", ["chinese"]),
        ("气", ["chinese"]),
        ("about", ["chinese", "english"]),
        ("100%", ["english"]),
        ("0%", ["english"]),
        ('say "so"', ["english"]),
        ("_", []),
        ("OR", []),
        ("NEAR(", []),
        ("   ", ["chinese", "english"]),
    ],
)
def test_search(store, query, found):
    talk(store, "english", "Why?", 'Because 100% of the smoke rises, they say "so".')
    talk(store, "chinese", "今天天气怎么样？", "今天天气很好。")
    assert [known.id for known in store.search(query)] == found


def test_a_found_conversation_shows_where(store):
    talk(store, "c", "x " * 200 + "the needle is here " + "y " * 200)
    snippet = store.search("needle")[0].snippet
    assert "needle" in snippet
    assert len(snippet) < 80


def test_deleted_text_is_not_found(store):
    talk(store, "c", "needle", "haystack")
    store.remove("c")
    assert store.search("needle") == []
    assert store.search("haystack") == []
    assert store.conversations() == []


def test_text_that_is_not_unicode_is_kept_as_far_as_it_goes(store):
    talk(store, "c", "half \ud83d pair", "a\0b", "<b> &amp; \u202etxt")
    assert contents(store) == ["half ? pair", "a\0b", "<b> &amp; \u202etxt"]


def test_a_growing_answer_is_not_searched_and_then_is(store):
    talk(store, "c", "question")
    growing = Message("g", "c", "c0", "assistant", "", "growing")
    store.add(growing)
    store.grow("g", "the needle")
    assert store.search("needle") == []
    store.finish(Message("g", "c", "c0", "assistant", "the needle is found", "done"))
    assert [known.id for known in store.search("needle")] == ["c"]
    assert contents(store) == ["question", "the needle is found"]


def test_growing_writes_what_is_new_only(store, path):
    talk(store, "c", "question")
    store.add(Message("g", "c", "c0", "assistant", "", "growing"))
    for _ in range(500):
        store.grow("g", "x" * 400)
    store.flush()
    size = sum(file.stat().st_size for file in path.parent.iterdir())
    assert size < 500 * 400 * 30  # each page is written a few times, not each text anew


def test_an_answer_cut_off_by_a_crash_is_interrupted(path):
    store = Store(path)
    talk(store, "c", "question")
    store.add(Message("g", "c", "c0", "assistant", "", "growing", model="m"))
    store.grow("g", "half an ")
    store.grow("g", "answer")
    store.close()
    again = Store(path)
    last = again.branch(again.conversation("c"))[-1]
    assert (last.content, last.state, last.model) == ("half an answer", "interrupted", "m")
    assert [known.id for known in again.search("half")] == ["c"]
    again.close()


WRITER = """
    import sys, time
    from pathlib import Path
    from gui.data.store import Message, Store
    store = Store(Path(sys.argv[1]))
    turn = sys.argv[2]
    store.create(turn, turn)
    store.add(Message(turn + "q", turn, None, "user", "question " + turn)).result()
    print("sent", flush=True)
    store.add(Message(turn + "a", turn, turn + "q", "assistant", "", "growing"))
    for number in range(10_000):
        store.grow(turn + "a", f"{number} ").result()
        print(number, flush=True)
        time.sleep(0.001)
"""


def test_killing_the_program_loses_nothing_that_was_kept(path):
    """SIGKILL at random moments: each sent message is there, each kept piece is there, the file is sound."""
    chance = random.Random(7)
    script = textwrap.dedent(WRITER)
    for turn in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(path), f"t{turn}"], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "sent\n"
        time.sleep(chance.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        kept = [int(line) for line in process.stdout.read().split()]
        process.wait()
        process.stdout.close()
        store = Store(path)
        question, *answer = store.branch(store.conversation(f"t{turn}"))
        assert question.content == f"question t{turn}"
        numbers = [int(word) for message in answer for word in message.content.split()]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= len(kept)
        assert all(message.state == "interrupted" for message in answer)
        assert len(store.conversations()) == turn + 1
        store.close()
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_newer_file_is_refused_and_left_alone(path):
    Store(path).close()
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="newer version of Inglenook"):
        Store(path)
    assert path.read_bytes() == before


def test_a_file_of_another_program_is_refused(path):
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE bookmarks (address TEXT)")
    with pytest.raises(StoreError, match="another program"):
        Store(path)


@pytest.mark.parametrize("damage", ["zeros", "garbage", "truncated", "empty middle", "no header"])
def test_a_damaged_file_is_set_aside_never_deleted(path, damage):
    store = Store(path)
    for number in range(40):
        talk(store, f"c{number}", "words " * 200, "answer " * 200)
    store.close()
    whole = path.read_bytes()
    hurt = {
        "zeros": bytes(len(whole)),
        "garbage": random.Random(1).randbytes(len(whole)),
        "truncated": whole[: len(whole) // 2],
        "empty middle": whole[:8192] + bytes(len(whole) - 8192),
        "no header": bytes(100) + whole[100:],
    }[damage]
    path.write_bytes(hurt)
    again = Store(path)
    assert again.aside is not None
    assert again.aside.read_bytes() == hurt
    talk(again, "new", "it goes on")
    assert contents(again, "new") == ["it goes on"]
    again.close()


def test_an_empty_file_is_a_new_one(path):
    path.write_bytes(b"")
    store = Store(path)
    assert store.aside is None
    talk(store, "c", "hello")
    assert contents(store) == ["hello"]
    store.close()


def test_a_locked_file_is_not_taken_for_a_damaged_one(path):
    Store(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match="locked"):
            Store(path)
        other.execute("ROLLBACK")
    assert path.exists()
    store = Store(path)
    assert store.aside is None
    store.close()


def test_a_folder_in_the_way_is_said(path):
    path.mkdir()
    with pytest.raises(StoreError, match="cannot be opened"):
        Store(path)


def test_a_failing_write_is_told_and_the_next_one_tried(path):
    told = threading.Event()
    sentences = []
    store = Store(path, lambda sentence: (sentences.append(sentence), told.set()))
    talk(store, "c", "hello")
    assert store.add(Message("c0", "c", None, "user", "the same identity")).exception(5) is not None
    assert told.wait(5)
    assert len(sentences) == 1
    assert store.add(Message("other", "c", "c0", "assistant", "fine")).exception(5) is None
    store.close()


def test_a_full_disk_costs_the_new_text_only(path):
    store = Store(path, lambda _sentence: None)
    talk(store, "c", "hello")
    store.flush()
    pages = store._writer.execute("PRAGMA page_count").fetchone()[0]
    store._writer.execute(f"PRAGMA max_page_count = {pages + 2}")
    assert store.add(Message("big", "c", "c0", "assistant", "x" * 1_000_000)).exception(5) is not None
    assert contents(store) == ["hello"]
    store.close()
    again = Store(path)
    assert contents(again) == ["hello"]
    again.close()


def test_writing_after_the_end_is_refused_not_lost_in_silence(path):
    store = Store(path)
    store.close()
    assert isinstance(store.create("c").exception(1), StoreError)


def test_ten_thousand_conversations_are_listed_and_searched_at_once(store):
    store._writer.execute("PRAGMA synchronous = OFF")
    for number in range(10_000):
        store.create(f"c{number}", f"title {number}")
        store.add(Message(f"m{number}", f"c{number}", None, "user", f"今天天气很好 number {number}"))
    assert store.flush(100)
    begin = time.perf_counter()
    assert len(store.conversations()) == 10_000
    assert len(store.search("天气")) == 200
    assert [known.id for known in store.search("number 9999")] == ["c9999"]
    assert time.perf_counter() - begin < 1.0


# ---- what comes back


def test_a_file_of_the_first_version_is_brought_up_to_date(path):
    first = schema._TABLES.replace(
        ",\n    folder TEXT NOT NULL DEFAULT '',\n    settings TEXT NOT NULL DEFAULT '{}'", ""
    )
    first = first.replace(",\n    attached TEXT NOT NULL DEFAULT '[]'", "")
    first = first.replace(first[first.index("CREATE TABLE trace") : first.index("CREATE VIRTUAL")], "")
    with closing(sqlite3.connect(path)) as database:
        for statement in first.split(";\n"):
            database.execute(statement)
        database.execute(
            "INSERT INTO conversation (id, title, head, created_s, changed_s) VALUES ('c', 'old', 'm', 1, 1)"
        )
        database.execute(
            "INSERT INTO message (id, conversation, role, content, state, created_s)"
            " VALUES ('m', 'c', 'user', 'hello', 'done', 1)"
        )
        database.execute("INSERT INTO message_text (rowid, content) VALUES (1, 'hello')")
        database.execute("PRAGMA user_version = 1")
        database.commit()
    store = Store(path)
    assert contents(store) == ["hello"]
    store.change("c", folder="Work", settings={"sampling": {"temperature": 0.5}})
    assert store.conversation("c").settings == {"sampling": {"temperature": 0.5}}
    assert [known.id for known in store.search("hello")] == ["c"]
    store.close()


@pytest.mark.parametrize("damage", ["zeros", "truncated", "nothing"])
def test_earlier_conversations_come_back_from_the_copy(path, damage):
    store = Store(path)
    for number in range(30):
        talk(store, f"c{number}", f"question {number}", "answer")
    store.close()
    whole = path.read_bytes()
    path.write_bytes({"zeros": bytes(len(whole)), "truncated": whole[: len(whole) // 3], "nothing": b""}[damage])
    again = Store(path)
    assert again.rescued
    assert len(again.conversations()) == 30
    assert contents(again, "c7") == ["question 7", "answer"]
    assert [known.id for known in again.search("question 29")] == ["c29"]
    again.close()


def test_what_can_be_read_of_a_damaged_file_is_added_to_the_copy(path):
    store = Store(path)
    talk(store, "old", "an old question", "an answer")
    store.close()
    copy = copy_of(path).read_bytes()
    store = Store(path)
    for number in range(60):
        talk(store, f"new{number}", "words " * 300, "more words " * 300)
    store.close()
    copy_of(path).write_bytes(copy)  # as if the program had been killed before it made the next one
    whole = bytearray(path.read_bytes())
    middle = len(whole) // 2 // 4096 * 4096
    whole[middle : middle + 3 * 4096] = bytes(3 * 4096)
    path.write_bytes(whole)
    again = Store(path)
    assert again.aside is not None
    known = {conversation.id for conversation in again.conversations()}
    assert "old" in known
    assert len(known) > 30
    assert again.flush()
    assert again._reader.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    again.close()


def test_a_resumed_answer_keeps_both_halves_through_a_crash(path):
    store = Store(path)
    store.create("c", "t")
    store.add(Message("q", "c", None, "user", "question"))
    store.add(Message("a", "c", "q", "assistant", "first half", reason="length"))
    store.resume(Message("a", "c", "q", "assistant", "first half"))
    store.grow("a", " second")
    store.flush()
    assert store.search("first half") == []
    other = path.with_name("other.sqlite")
    shutil.copy(path, other)
    shutil.copy(f"{path}-wal", f"{other}-wal")
    crashed = Store(other)
    assert contents(crashed)[-1] == "first half second"
    assert crashed.cut_off == 1
    assert crashed.search("half second")
    crashed.close()
    store.close()


def test_a_removed_message_takes_what_follows_along(store):
    talk(store, "c", "one", "two", "three")
    store.remove_message("c1")
    assert contents(store) == ["one"]
    assert store.search("three") == []
