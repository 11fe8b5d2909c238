"""Conversations in one SQLite file; knows no window and no engine.

Messages form a tree: each names its parent, and a conversation names the leaf
(`head`) that is shown. Every write is a transaction of its own on one writer
thread, so the window never waits for the disk; reads wait for the writes
before them. While an answer grows, only its new text is appended (`piece`);
finishing it folds the pieces. What is still growing when the file is opened
was cut off by a crash, and becomes an interrupted message.

    conversation 1 --- n message (parent -> message)      message 1 --- n piece (while it grows)
    message_text: full-text index over finished messages, three-character grams, so Chinese is found too
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal
from uuid import uuid4

__all__ = ["SCHEMA", "Conversation", "Message", "State", "Store", "StoreError", "new_id"]

_log = logging.getLogger(__name__)

SCHEMA = 1
MEMORY = ":memory:"  # the path of a store that is not kept
_APPLICATION_ID = 0x494E474C  # "INGL"
_BUSY_S = 2.0

State = Literal["done", "growing", "interrupted", "failed"]

_TABLES = """
CREATE TABLE conversation (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    title TEXT NOT NULL DEFAULT '',
    head TEXT,
    draft TEXT NOT NULL DEFAULT '',
    system TEXT NOT NULL DEFAULT '',
    pinned INTEGER NOT NULL DEFAULT 0,
    created_s REAL NOT NULL,
    changed_s REAL NOT NULL
) STRICT;
CREATE TABLE message (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    conversation TEXT NOT NULL REFERENCES conversation (id) ON DELETE CASCADE,
    parent TEXT REFERENCES message (id) ON DELETE CASCADE,
    role TEXT NOT NULL,
    content TEXT NOT NULL DEFAULT '',
    state TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '',
    model TEXT NOT NULL DEFAULT '',
    facts TEXT NOT NULL DEFAULT '{}',
    created_s REAL NOT NULL
) STRICT;
CREATE INDEX message_of_conversation ON message (conversation);
CREATE INDEX message_of_parent ON message (parent);
CREATE TABLE piece (
    number INTEGER PRIMARY KEY,
    message TEXT NOT NULL REFERENCES message (id) ON DELETE CASCADE,
    content TEXT NOT NULL
) STRICT;
CREATE INDEX piece_of_message ON piece (message);
CREATE VIRTUAL TABLE message_text USING fts5 (content, content='message', content_rowid='number', tokenize='trigram');
"""


class StoreError(Exception):
    """The conversations cannot be opened or written; one sentence for the user."""


def new_id() -> str:
    """An identity for a conversation, a message or a request."""
    return uuid4().hex


@dataclass(frozen=True, slots=True)
class Conversation:
    """One entry of the list. `snippet` is filled by a search."""

    id: str
    title: str = ""
    head: str | None = None
    draft: str = ""
    pinned: bool = False
    changed_s: float = 0.0
    snippet: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `reason` says why an answer ended; `facts` are its measurements (plain JSON values)."""

    id: str
    conversation: str
    parent: str | None
    role: str
    content: str
    state: State = "done"
    reason: str = ""
    model: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


class Store:
    """The open file.

    notice: what had to be said at opening ("" when nothing): a damaged file was set aside, or
        the file cannot be used and this session's conversations live in memory only.
    aside: where a damaged file was put
    on_failure: called on the writer thread with one sentence when a write fails
    """

    def __init__(self, path: Path, on_failure: Callable[[str], None] = _log.error) -> None:
        """Open or create.

        Raises:
            StoreError: the file is of a newer version, locked, or cannot be written; it is left as it is.
        """
        self.path = path
        self.aside: Path | None = None
        self._on_failure = on_failure
        self._writer, self._reader = self._open(path)
        self._jobs: SimpleQueue[tuple[Callable[[sqlite3.Connection], Any], Future[Any]] | None] = SimpleQueue()
        self._last: Future[Any] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="store", daemon=True)
        self._thread.start()

    # ---- conversations

    def conversations(self, limit: int = 100_000) -> list[Conversation]:
        """All of them, pinned first, then the latest first."""
        rows = self._read(
            "SELECT id, title, head, draft, pinned, changed_s FROM conversation"
            " ORDER BY pinned DESC, changed_s DESC, number DESC LIMIT ?",
            (limit,),
        )
        return [_conversation(row) for row in rows]

    def conversation(self, identity: str) -> Conversation | None:
        """One of them, or None."""
        rows = self._read(
            "SELECT id, title, head, draft, pinned, changed_s FROM conversation WHERE id = ?", (identity,)
        )
        return _conversation(rows[0]) if rows else None

    def search(self, query: str, limit: int = 200) -> list[Conversation]:
        """Conversations that hold every word of `query` in one message or in the title; latest first, with a snippet.

        Words of three characters and more use the index; shorter ones (天气) are looked for in the text.
        """
        words = query.split()
        if not words:
            return self.conversations(limit)
        likes = [f"%{_escaped(word)}%" for word in words]
        title_test = " AND ".join("c.title LIKE ? ESCAPE '\\'" for _ in words)
        long = [word for word in words if len(word) >= 3]
        short = [like for word, like in zip(words, likes, strict=True) if len(word) < 3]
        tests = ["m.content LIKE ? ESCAPE '\\'" for _ in short]
        source = "message m"
        values: list[Any] = list(short)
        if long:
            source = "message_text t JOIN message m ON m.number = t.rowid"
            tests.insert(0, "message_text MATCH ?")
            values.insert(0, " AND ".join('"' + word.replace('"', '""') + '"' for word in long))
        rows = self._read(
            # No value is in the text; only how many words there are.
            f"WITH hit AS MATERIALIZED (SELECT m.conversation, max(m.number) AS number FROM {source}"  # noqa: S608
            f" WHERE m.state != 'growing' AND {' AND '.join(tests)} GROUP BY m.conversation)"
            " SELECT c.id, c.title, c.head, c.draft, c.pinned, c.changed_s,"
            " (SELECT content FROM message WHERE number = hit.number)"
            " FROM conversation c LEFT JOIN hit ON hit.conversation = c.id"
            f" WHERE hit.number IS NOT NULL OR ({title_test}) ORDER BY c.changed_s DESC LIMIT ?",
            (*values, *likes, limit),
        )
        return [_conversation(row, _snippet(row[6] or "", words)) for row in rows]

    def create(self, identity: str, title: str = "") -> Future[Any]:
        """A new, empty conversation."""
        now = time.time()
        return self._write(
            lambda db: db.execute(
                "INSERT INTO conversation (id, title, created_s, changed_s) VALUES (?, ?, ?, ?)",
                (identity, _storable(title), now, now),
            )
        )

    def rename(self, identity: str, title: str) -> Future[Any]:
        """Give a conversation another title."""
        return self._write(
            lambda db: db.execute("UPDATE conversation SET title = ? WHERE id = ?", (_storable(title), identity))
        )

    def keep_draft(self, identity: str, draft: str) -> Future[Any]:
        """Keep what was typed and not sent."""
        return self._write(
            lambda db: db.execute("UPDATE conversation SET draft = ? WHERE id = ?", (_storable(draft), identity))
        )

    def remove(self, identity: str) -> Future[Any]:
        """Delete a conversation with all its messages."""

        def job(db: sqlite3.Connection) -> None:
            rows = db.execute(
                "SELECT number, content FROM message WHERE conversation = ? AND state != 'growing'", (identity,)
            )
            for number, content in rows.fetchall():
                db.execute(
                    "INSERT INTO message_text (message_text, rowid, content) VALUES ('delete', ?, ?)", (number, content)
                )
            db.execute("DELETE FROM conversation WHERE id = ?", (identity,))

        return self._write(job)

    # ---- messages

    def branch(self, conversation: Conversation) -> list[Message]:
        """The messages from the root to the head, in order."""
        rows = self._read(
            "WITH RECURSIVE line (id, depth) AS (SELECT ?, 0 UNION ALL"
            " SELECT m.parent, depth + 1 FROM message m JOIN line ON m.id = line.id WHERE m.parent IS NOT NULL)"
            " SELECT m.id, m.conversation, m.parent, m.role, m.content, m.state, m.reason, m.model, m.facts"
            " FROM line JOIN message m ON m.id = line.id ORDER BY depth DESC",
            (conversation.head,),
        )
        return [_message(row) for row in rows]

    def versions(self, message: Message) -> list[str]:
        """The ids of all messages that answer the same parent, oldest first."""
        rows = self._read(
            "SELECT id FROM message WHERE conversation = ? AND parent IS ? AND role = ? ORDER BY number",
            (message.conversation, message.parent, message.role),
        )
        return [row[0] for row in rows]

    def add(self, message: Message) -> Future[Any]:
        """Add a message and make it the head of its conversation.

        A growing message (`state="growing"`) starts empty; `grow` and `finish` follow.
        """
        now = time.time()

        def job(db: sqlite3.Connection) -> None:
            content = _storable(message.content)
            number = db.execute(
                "INSERT INTO message (id, conversation, parent, role, content, state, reason, model, facts, created_s)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    message.id,
                    message.conversation,
                    message.parent,
                    message.role,
                    content,
                    message.state,
                    message.reason,
                    message.model,
                    json.dumps(message.facts),
                    now,
                ),
            ).lastrowid
            if message.state != "growing":
                db.execute("INSERT INTO message_text (rowid, content) VALUES (?, ?)", (number, content))
            db.execute(
                "UPDATE conversation SET head = ?, changed_s = ? WHERE id = ?", (message.id, now, message.conversation)
            )

        return self._write(job)

    def grow(self, identity: str, text: str) -> Future[Any]:
        """Append new text to a growing message."""
        return self._write(
            lambda db: db.execute("INSERT INTO piece (message, content) VALUES (?, ?)", (identity, _storable(text)))
        )

    def finish(self, message: Message) -> Future[Any]:
        """A growing message has its final content and state."""
        return self._write(lambda db: _finish(db, message))

    # ---- the file

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything written so far is on disk; False when that takes too long."""
        last = self._last
        if last is None:
            return True
        try:
            last.exception(timeout_s)
        except TimeoutError:
            return False
        return True

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is waiting and close the file."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        self._reader.close()

    def _read(self, sql: str, values: tuple[Any, ...]) -> list[Any]:
        self.flush()
        try:
            return self._reader.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            _log.exception("reading conversations")
            self._on_failure(f"{self.path.name} cannot be read ({error}).")
            return []

    def _write(self, job: Callable[[sqlite3.Connection], Any]) -> Future[Any]:
        result: Future[Any] = Future()
        if self._closed:
            result.set_exception(StoreError("the conversations are closed"))
            return result
        self._last = result
        self._jobs.put((job, result))
        return result

    def _work(self) -> None:
        database = self._writer
        while (entry := self._jobs.get()) is not None:
            job, result = entry
            try:
                with _transaction(database):
                    job(database)
            except sqlite3.Error as error:
                _log.exception("writing conversations")
                self._on_failure(str(error))
                result.set_exception(StoreError(str(error)))
            else:
                result.set_result(None)
        try:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            database.execute("PRAGMA optimize")
        except sqlite3.Error:
            _log.exception("closing conversations")
        database.close()

    def _open(self, path: Path) -> tuple[sqlite3.Connection, sqlite3.Connection]:
        try:
            return _opened(path)
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise StoreError(f"{path} cannot be opened ({error}).") from error
        self.aside = _put_aside(path)
        try:
            return _opened(path)
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{path} cannot be opened ({error}).") from error


class _DamagedError(sqlite3.DatabaseError):
    """`PRAGMA quick_check` found something."""


def _is_damage(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, _DamagedError) or code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def _put_aside(path: Path) -> Path:
    """Rename a damaged file (with its journal) to a free name beside it."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = path.with_name(f"{path.stem}.damaged-{stamp}{path.suffix}")
    count = 1
    while aside.exists():
        count += 1
        aside = path.with_name(f"{path.stem}.damaged-{stamp}-{count}{path.suffix}")
    for ending in ("", "-wal", "-shm"):
        file = path.with_name(path.name + ending)
        if file.exists():
            file.replace(aside.with_name(aside.name + ending))
    return aside


def _opened(path: Path) -> tuple[sqlite3.Connection, sqlite3.Connection]:
    """A connection for the writer thread and one for reading, on a checked and current file."""
    writer = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        fresh = _is_fresh(writer, path)
        # In memory mode and on some network shares there is no WAL; the rollback journal is as safe.
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("PRAGMA synchronous = FULL")  # a message that is said to be kept survives a power cut
        writer.execute("PRAGMA foreign_keys = ON")
        if fresh:
            with _transaction(writer):
                for statement in _TABLES.split(";\n"):
                    writer.execute(statement)
                writer.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                writer.execute(f"PRAGMA user_version = {SCHEMA}")
        else:
            _check(writer)
        _recover(writer)
        if str(path) == MEMORY:
            return writer, writer
        reader = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        reader.execute("PRAGMA query_only = ON")
    except BaseException:
        writer.close()
        raise
    return writer, reader


def _is_fresh(database: sqlite3.Connection, path: Path) -> bool:
    """Whether the file is still without tables; refuses one that is not ours to write."""
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA:
        raise StoreError(
            f"{path} was written by a newer version of Inglenook (its format is {version}; this one knows {SCHEMA});"
            " install that version to see these conversations."
        )
    if version == 0 and database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise StoreError(f"{path} is a database of another program; move it away.")
    return bool(version == 0)


def _check(database: sqlite3.Connection) -> None:
    found = database.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise _DamagedError(found)


def _recover(database: sqlite3.Connection) -> None:
    """Answers that a crash cut off keep what was saved of them and are marked."""
    rows = database.execute(
        "SELECT m.id, m.conversation, m.parent, m.role,"
        " coalesce((SELECT group_concat(content, '') FROM (SELECT content FROM piece WHERE message = m.id"
        " ORDER BY number)), ''), 'interrupted', 'crash', m.model, m.facts FROM message m WHERE m.state = 'growing'"
    ).fetchall()
    if rows:
        with _transaction(database):
            for row in rows:
                _finish(database, _message(row))


def _finish(database: sqlite3.Connection, message: Message) -> None:
    content = _storable(message.content)
    number = database.execute(
        "UPDATE message SET content = ?, state = ?, reason = ?, model = ?, facts = ?"
        " WHERE id = ? AND state = 'growing' RETURNING number",
        (content, message.state, message.reason, message.model, json.dumps(message.facts), message.id),
    ).fetchone()
    if number is None:  # deleted meanwhile
        return
    database.execute("DELETE FROM piece WHERE message = ?", (message.id,))
    database.execute("INSERT INTO message_text (rowid, content) VALUES (?, ?)", (number[0], content))
    database.execute("UPDATE conversation SET changed_s = ? WHERE id = ?", (time.time(), message.conversation))


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with closing(database.cursor()) as cursor:
            if database.in_transaction:
                cursor.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _storable(text: str) -> str:
    """Half of a surrogate pair (a broken paste) cannot be written as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


def _snippet(content: str, words: list[str], width: int = 60) -> str:
    """A line of text around the first of `words`; "" when none is in it."""
    folded = content.lower()
    places = [place for word in words if (place := folded.find(word.lower())) >= 0]
    if not places:
        return ""
    start = max(0, min(places) - width // 3)
    cut = content[start : start + width]
    return ("…" if start else "") + " ".join(cut.split()) + ("…" if start + width < len(content) else "")


def _conversation(row: tuple[Any, ...], snippet: str = "") -> Conversation:
    identity, title, head, draft, pinned, changed_s = row[:6]
    return Conversation(identity, title, head, draft, bool(pinned), changed_s, snippet)


def _message(row: tuple[Any, ...]) -> Message:
    identity, conversation, parent, role, content, state, reason, model, facts = row
    return Message(identity, conversation, parent, role, content, state, reason, model, json.loads(facts))
