"""The tables of the conversations' file: made, checked, brought up to date; knows nothing of who reads them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

__all__ = ["MEMORY", "SCHEMA", "DamagedError", "StoreError", "decoded", "is_damage", "opened", "transaction"]

SCHEMA = 2
MEMORY = ":memory:"  # the path of a store that is not kept
BUSY_S = 2.0
_APPLICATION_ID = 0x494E474C  # "INGL"

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
    changed_s REAL NOT NULL,
    folder TEXT NOT NULL DEFAULT '',
    settings TEXT NOT NULL DEFAULT '{}'
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
    created_s REAL NOT NULL,
    attached TEXT NOT NULL DEFAULT '[]'
) STRICT;
CREATE INDEX message_of_conversation ON message (conversation);
CREATE INDEX message_of_parent ON message (parent);
CREATE TABLE piece (
    number INTEGER PRIMARY KEY,
    message TEXT NOT NULL REFERENCES message (id) ON DELETE CASCADE,
    content TEXT NOT NULL
) STRICT;
CREATE INDEX piece_of_message ON piece (message);
CREATE TABLE trace (
    message TEXT PRIMARY KEY REFERENCES message (id) ON DELETE CASCADE,
    tokens TEXT NOT NULL
) STRICT;
CREATE VIRTUAL TABLE message_text USING fts5 (content, content='message', content_rowid='number', tokenize='trigram');
"""

# What makes a file of a version one of the next.
_UPGRADES = {
    1: """
ALTER TABLE conversation ADD COLUMN folder TEXT NOT NULL DEFAULT '';
ALTER TABLE conversation ADD COLUMN settings TEXT NOT NULL DEFAULT '{}';
ALTER TABLE message ADD COLUMN attached TEXT NOT NULL DEFAULT '[]';
CREATE TABLE trace (
    message TEXT PRIMARY KEY REFERENCES message (id) ON DELETE CASCADE,
    tokens TEXT NOT NULL
) STRICT
""",
}


class StoreError(Exception):
    """The conversations cannot be opened or written; one sentence for the user."""


class DamagedError(sqlite3.DatabaseError):
    """`PRAGMA quick_check` found something, or a table is missing."""


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file itself is at fault, not its lock or its folder."""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, DamagedError) or code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def opened(path: Path) -> tuple[sqlite3.Connection, sqlite3.Connection, int]:
    """A connection for the writer thread and one for reading, on a checked and current file; answers cut by a crash.

    Raises:
        sqlite3.DatabaseError: it cannot be opened; see `is_damage`
        StoreError: it is not ours, or of a newer version
    """
    writer = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        version = _version(writer, path)
        # In memory mode and on some network shares there is no WAL; the rollback journal is as safe.
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("PRAGMA synchronous = FULL")  # a message that is said to be kept survives a power cut
        writer.execute("PRAGMA foreign_keys = ON")
        if version == 0:
            _run(writer, _TABLES, SCHEMA)
            writer.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        else:
            _check(writer)
            for step in range(version, SCHEMA):
                _run(writer, _UPGRADES[step], step + 1)
        cut_off = _recover(writer)
        if str(path) == MEMORY:
            return writer, writer, 0
        reader = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        reader.execute("PRAGMA query_only = ON")
    except BaseException:
        writer.close()
        raise
    return writer, reader, cut_off


def _version(database: sqlite3.Connection, path: Path) -> int:
    """The version of the file's tables, 0 while there are none; refuses one that is not ours to write."""
    version = int(database.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA:
        raise StoreError(
            f"{path} was written by a newer version of Inglenook (its format is {version}; this one knows {SCHEMA});"
            " install that version to see these conversations."
        )
    if version == 0 and database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise StoreError(f"{path} is a database of another program; move it away.")
    return version


def _run(database: sqlite3.Connection, statements: str, version: int) -> None:
    """Change the tables, all or nothing."""
    with transaction(database):
        for statement in statements.split(";\n"):
            database.execute(statement)
        database.execute(f"PRAGMA user_version = {version}")


def _check(database: sqlite3.Connection) -> None:
    found = database.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise DamagedError(found)
    tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not {"conversation", "message", "piece", "message_text"} <= tables:
        raise DamagedError("a table is missing")


def _recover(database: sqlite3.Connection) -> int:
    """Answers that a crash cut off keep what was saved of them and are marked; how many these are."""
    rows = database.execute(
        "SELECT number, id, content || coalesce((SELECT group_concat(content, '') FROM (SELECT content FROM piece"
        " WHERE message = m.id ORDER BY number)), '') FROM message m WHERE state = 'growing'"
    ).fetchall()
    if not rows:
        return 0
    with transaction(database):
        for number, identity, content in rows:
            database.execute(
                "UPDATE message SET content = ?, state = 'interrupted', reason = 'crash' WHERE number = ?",
                (content, number),
            )
            database.execute("DELETE FROM piece WHERE message = ?", (identity,))
            database.execute("INSERT INTO message_text (rowid, content) VALUES (?, ?)", (number, content))
    return len(rows)


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """All that is written within, or nothing."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with closing(database.cursor()) as cursor:
            if database.in_transaction:
                cursor.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def decoded(text: str) -> object:
    """JSON of a column; whatever cannot be read is as if nothing had been kept."""
    try:
        return json.loads(text)
    except ValueError:
        return None
