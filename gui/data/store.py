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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal
from uuid import uuid4

from gui.data.rescue import copy_of, keep_copy, put_aside, restore, salvage
from gui.data.schema import MEMORY, SCHEMA, StoreError, decoded, is_damage, opened, transaction

__all__ = [
    "MEMORY",
    "SCHEMA",
    "Attached",
    "Conversation",
    "Message",
    "State",
    "Store",
    "StoreError",
    "new_id",
]

_log = logging.getLogger(__name__)

_CLOSING_S = 1.5  # the copy made at the end takes no longer

State = Literal["done", "growing", "interrupted", "failed"]

_CONVERSATION = "c.id, c.title, c.head, c.draft, c.pinned, c.changed_s, c.folder, c.system, c.settings"
_MESSAGE = (
    "m.id, m.conversation, m.parent, m.role, m.content, m.state, m.reason, m.model, m.facts, m.created_s, m.attached"
)
_CONVERSATIONS = f"SELECT {_CONVERSATION} FROM conversation c"  # noqa: S608 (our own columns)
_MESSAGES = f"SELECT {_MESSAGE} FROM"
_LINE_UP = (
    "WITH RECURSIVE line (id, depth) AS (SELECT ?, 0 UNION ALL"
    " SELECT m.parent, depth + 1 FROM message m JOIN line ON m.id = line.id WHERE m.parent IS NOT NULL)"
)
_COLUMNS = {"title", "head", "draft", "pinned", "folder", "system", "settings"}


def new_id() -> str:
    """An identity for a conversation, a message or a request."""
    return uuid4().hex


@dataclass(frozen=True, slots=True)
class Conversation:
    """One entry of the list.

    settings: what was chosen for this conversation (plain JSON values). snippet is filled by a search.
    temporary: it lives in memory alone.
    """

    id: str
    title: str = ""
    head: str | None = None
    draft: str = ""
    pinned: bool = False
    changed_s: float = 0.0
    folder: str = ""
    system: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    snippet: str = ""
    temporary: bool = False


@dataclass(frozen=True, slots=True)
class Attached:
    """A file's text that goes with a message."""

    name: str
    text: str


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
    created_s: float = 0.0
    attached: tuple[Attached, ...] = ()


class Store:
    """The open file.

    aside: where a damaged file was put. rescued: conversations came back from its copy or from itself.
    cut_off: how many answers a crash had cut off.
    on_failure: called on the writer thread with one sentence when a write fails
    """

    def __init__(self, path: Path, on_failure: Callable[[str], None] = _log.error) -> None:
        """Open or create.

        Raises:
            StoreError: the file is of a newer version, locked, or cannot be written; it is left as it is.
        """
        self.path = path
        self.aside: Path | None = None
        self.rescued = False
        self._on_failure = on_failure
        self._kept = str(path) != MEMORY
        earlier = self._kept and path.is_file() and path.stat().st_size > 0
        self._writer, self._reader, self.cut_off = self._open(path)
        self._changed = False
        self._stop = threading.Event()
        self._copying: threading.Thread | None = None
        self._jobs: SimpleQueue[tuple[Callable[[sqlite3.Connection], Any], Future[Any]] | None] = SimpleQueue()
        self._last: Future[Any] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="store", daemon=True)
        self._thread.start()
        if earlier and _is_newer(path, copy_of(path)):
            self._copying = threading.Thread(
                target=keep_copy, args=(path, lambda: not self._stop.is_set()), name="store copy", daemon=True
            )
            self._copying.start()

    # ---- conversations

    def conversations(self, limit: int = 100_000) -> list[Conversation]:
        """All of them, pinned first, then the latest first."""
        rows = self._read(
            f"{_CONVERSATIONS} ORDER BY pinned DESC, changed_s DESC, number DESC LIMIT ?",
            (limit,),
        )
        return [_conversation(row) for row in rows]

    def conversation(self, identity: str) -> Conversation | None:
        """One of them, or None."""
        rows = self._read(f"{_CONVERSATIONS} WHERE id = ?", (identity,))
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
            f" SELECT {_CONVERSATION}, (SELECT content FROM message WHERE number = hit.number)"
            " FROM conversation c LEFT JOIN hit ON hit.conversation = c.id"
            f" WHERE hit.number IS NOT NULL OR ({title_test}) ORDER BY c.changed_s DESC LIMIT ?",
            (*values, *likes, limit),
        )
        return [_conversation(row, _snippet(row[-1] or "", words)) for row in rows]

    def create(self, identity: str, title: str = "", **values: Any) -> Future[Any]:
        """A new, empty conversation; `values` as for `change`."""
        now = time.time()

        def job(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT INTO conversation (id, title, created_s, changed_s) VALUES (?, ?, ?, ?)",
                (identity, _storable(title), now, now),
            )
            _change(db, identity, values)

        return self._write(job)

    def change(self, identity: str, **values: Any) -> Future[Any]:
        """Change title, head, draft, pinned, folder, system or settings of a conversation."""
        return self._write(lambda db: _change(db, identity, values))

    def remove(self, identity: str) -> Future[Any]:
        """Delete a conversation with all its messages."""

        def job(db: sqlite3.Connection) -> None:
            _forget_text(db, "conversation = ?", (identity,))
            db.execute("DELETE FROM conversation WHERE id = ?", (identity,))

        return self._write(job)

    def insert(self, conversation: Conversation, messages: Sequence[Message]) -> Future[Any]:
        """A whole conversation at once: a copy, or one that was read from a file. Parents come before children."""
        now = time.time()

        def job(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT INTO conversation (id, title, created_s, changed_s) VALUES (?, ?, ?, ?)",
                (conversation.id, _storable(conversation.title), now, conversation.changed_s or now),
            )
            for message in messages:
                _add(db, message, message.created_s or now)
            names = ("head", "draft", "pinned", "folder", "system", "settings")
            _change(db, conversation.id, {name: getattr(conversation, name) for name in names})

        return self._write(job)

    # ---- messages

    def branch(self, conversation: Conversation) -> list[Message]:
        """The messages from the root to the head, in order."""
        rows = self._read(
            f"{_LINE_UP} {_MESSAGES} line JOIN message m ON m.id = line.id ORDER BY depth DESC",
            (conversation.head,),
        )
        return [_message(row) for row in rows]

    def tree(self, conversation: str) -> list[Message]:
        """All messages of a conversation, parents before children."""
        rows = self._read(f"{_MESSAGES} message m WHERE conversation = ? ORDER BY number", (conversation,))
        return [_message(row) for row in rows]

    def siblings(self, conversation: str) -> dict[tuple[str | None, str], list[str]]:
        """The ids of messages of one role that follow the same parent, oldest first: versions of each other."""
        found: dict[tuple[str | None, str], list[str]] = {}
        for identity, parent, role in self._read(
            "SELECT id, parent, role FROM message WHERE conversation = ? ORDER BY number", (conversation,)
        ):
            found.setdefault((parent, role), []).append(identity)
        return found

    def versions(self, message: Message) -> list[str]:
        """The ids of all messages that answer the same parent, oldest first."""
        rows = self._read(
            "SELECT id FROM message WHERE conversation = ? AND parent IS ? AND role = ? ORDER BY number",
            (message.conversation, message.parent, message.role),
        )
        return [row[0] for row in rows]

    def leaf_below(self, identity: str) -> str:
        """The end of the latest line of messages that goes through a message."""
        rows = self._read(
            "WITH RECURSIVE line (id, depth) AS (SELECT ?, 0 UNION ALL"
            " SELECT (SELECT m.id FROM message m WHERE m.parent = line.id ORDER BY m.number DESC LIMIT 1), depth + 1"
            " FROM line WHERE line.id IS NOT NULL)"
            " SELECT id FROM line WHERE id IS NOT NULL ORDER BY depth DESC LIMIT 1",
            (identity,),
        )
        return str(rows[0][0]) if rows else identity

    def add(self, message: Message) -> Future[Any]:
        """Add a message and make it the head of its conversation.

        A growing message (`state="growing"`) starts with what its content is; `grow` and `finish` follow.
        """
        now = time.time()

        def job(db: sqlite3.Connection) -> None:
            _add(db, message, now)
            db.execute(
                "UPDATE conversation SET head = ?, changed_s = ? WHERE id = ?", (message.id, now, message.conversation)
            )

        return self._write(job)

    def resume(self, message: Message) -> Future[Any]:
        """A finished message grows again."""

        def job(db: sqlite3.Connection) -> None:
            _forget_text(db, "id = ?", (message.id,))
            db.execute("UPDATE message SET state = 'growing' WHERE id = ?", (message.id,))

        return self._write(job)

    def grow(self, identity: str, text: str) -> Future[Any]:
        """Append new text to a growing message."""
        return self._write(
            lambda db: db.execute("INSERT INTO piece (message, content) VALUES (?, ?)", (identity, _storable(text)))
        )

    def finish(self, message: Message) -> Future[Any]:
        """A growing message has its final content and state."""
        return self._write(lambda db: _finish(db, message))

    def remove_message(self, identity: str) -> Future[Any]:
        """Delete a message and all that follows it; the head goes to what stood before it."""

        def job(db: sqlite3.Connection) -> None:
            row = db.execute("SELECT conversation, parent FROM message WHERE id = ?", (identity,)).fetchone()
            if row is None:
                return
            below = (
                "id IN (WITH RECURSIVE below (id) AS (SELECT ? UNION ALL"
                " SELECT m.id FROM message m JOIN below ON m.parent = below.id) SELECT id FROM below)"
            )
            _forget_text(db, below, (identity,))
            db.execute("DELETE FROM message WHERE id = ?", (identity,))
            db.execute("UPDATE conversation SET head = ? WHERE id = ?", (row[1], row[0]))

        return self._write(job)

    def keep_facts(self, message: Message) -> Future[Any]:
        """Keep what is noted of a message."""
        facts = json.dumps(message.facts)
        return self._write(lambda db: db.execute("UPDATE message SET facts = ? WHERE id = ?", (facts, message.id)))

    def keep_trace(self, identity: str, tokens: str) -> Future[Any]:
        """Keep the probabilities of an answer's tokens (JSON)."""
        return self._write(
            lambda db: db.execute("INSERT OR REPLACE INTO trace (message, tokens) VALUES (?, ?)", (identity, tokens))
        )

    def trace(self, identity: str) -> Any:
        """What `keep_trace` kept, read; None when there is nothing."""
        rows = self._read("SELECT tokens FROM trace WHERE message = ?", (identity,))
        return decoded(rows[0][0]) if rows else None

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
        """Write what is waiting, bring the copy up to date and close the file."""
        if self._closed:
            return
        self._closed = True
        self._stop.set()
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._copying is not None:
            self._copying.join(timeout_s)
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
                with transaction(database):
                    job(database)
            except sqlite3.Error as error:
                _log.exception("writing conversations")
                self._on_failure(str(error))
                result.set_exception(StoreError(str(error)))
            else:
                self._changed = True
                result.set_result(None)
        try:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            database.execute("PRAGMA optimize")
        except sqlite3.Error:
            _log.exception("closing conversations")
        database.close()
        if self._changed and self._kept:
            until_s = time.monotonic() + _CLOSING_S
            keep_copy(self.path, lambda: time.monotonic() < until_s)

    def _open(self, path: Path) -> tuple[sqlite3.Connection, sqlite3.Connection, int]:
        if self._kept and path.is_file() and path.stat().st_size == 0 and restore(path):
            self.rescued = True
        try:
            return opened(path)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise StoreError(f"{path} cannot be opened ({error}).") from error
        self.aside = put_aside(path)
        self.rescued = restore(path)
        try:
            writer, reader, cut_off = opened(path)
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{path} cannot be opened ({error}).") from error
        try:
            self.rescued = salvage(self.aside, writer) > 0 or self.rescued
        except sqlite3.Error:
            _log.exception("reading the damaged conversations")
        return writer, reader, cut_off


def _is_newer(path: Path, copy: Path) -> bool:
    """Whether the file was written after its copy was made."""
    try:
        return not copy.exists() or path.stat().st_mtime > copy.stat().st_mtime + 1
    except OSError:
        return False


def _change(database: sqlite3.Connection, identity: str, values: dict[str, Any]) -> None:
    for name, value in values.items():
        assert name in _COLUMNS, name
        kept = json.dumps(value) if isinstance(value, dict) else _storable(value) if isinstance(value, str) else value
        database.execute(f"UPDATE conversation SET {name} = ? WHERE id = ?", (kept, identity))  # noqa: S608 (checked)


def _add(database: sqlite3.Connection, message: Message, created_s: float) -> None:
    content = _storable(message.content)
    number = database.execute(
        "INSERT INTO message"
        " (id, conversation, parent, role, content, state, reason, model, facts, created_s, attached)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
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
            created_s,
            json.dumps([asdict(file) for file in message.attached]),
        ),
    ).lastrowid
    if message.state != "growing":
        database.execute("INSERT INTO message_text (rowid, content) VALUES (?, ?)", (number, content))


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


def _forget_text(database: sqlite3.Connection, test: str, values: Iterable[Any]) -> None:
    """Take messages out of the full-text index, before they go or grow."""
    rows = database.execute(
        f"SELECT number, content FROM message WHERE {test} AND state != 'growing'",  # noqa: S608 (one of our tests)
        tuple(values),
    ).fetchall()
    database.executemany("INSERT INTO message_text (message_text, rowid, content) VALUES ('delete', ?, ?)", rows)


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
    identity, title, head, draft, pinned, changed_s, folder, system, settings = row[:9]
    chosen = decoded(settings)
    return Conversation(
        identity,
        title,
        head,
        draft,
        bool(pinned),
        changed_s,
        folder,
        system,
        chosen if isinstance(chosen, dict) else {},
        snippet,
    )


def _message(row: tuple[Any, ...]) -> Message:
    identity, conversation, parent, role, content, state, reason, model, facts, created_s, attached = row
    known = decoded(facts)
    files = decoded(attached)
    return Message(
        identity,
        conversation,
        parent,
        role,
        content,
        state,
        reason,
        model,
        known if isinstance(known, dict) else {},
        created_s,
        tuple(Attached(file["name"], file["text"]) for file in files) if isinstance(files, list) else (),
    )
