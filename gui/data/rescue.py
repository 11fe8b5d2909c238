"""A copy of the conversations beside their file, and what is saved from a damaged one.

The copy is made at the start and at the end of the window. A damaged file is
put aside, never deleted; the copy takes its place, and every row that can
still be read in the damaged file is added to it.
"""

from __future__ import annotations

import logging
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from gui.data.schema import transaction

__all__ = ["copy_of", "keep_copy", "put_aside", "restore", "salvage"]

_log = logging.getLogger(__name__)

_PAGES = 256  # copied at a time: the writer waits no longer than these take
_CHUNK = 64  # rows read at a time from a damaged file


class _StoppedError(Exception):
    pass


def copy_of(path: Path) -> Path:
    """Where the copy lies."""
    return path.with_name(f"{path.stem}.copy{path.suffix}")


def keep_copy(path: Path, go_on: Callable[[], bool]) -> bool:
    """Bring the copy up to date; False when `go_on` said no before it was whole. The old copy stays until then."""
    target = copy_of(path)
    fresh = target.with_name(target.name + ".new")

    def step(_status: int, _remaining: int, _total: int) -> None:
        if not go_on():
            raise _StoppedError

    try:
        with suppress(FileNotFoundError):
            fresh.unlink()
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(fresh)) as copy:
            source.backup(copy, pages=_PAGES, progress=step, sleep=0.001)
        fresh.replace(target)
    except _StoppedError:
        with suppress(OSError):
            fresh.unlink()
        return False
    except (OSError, sqlite3.Error):
        _log.exception("copying the conversations")
        return False
    return True


def put_aside(path: Path) -> Path:
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


def restore(path: Path) -> bool:
    """Put the copy in the place of a file that is gone; False when there is none that can be used."""
    copy = copy_of(path)
    try:
        if not copy.is_file():
            return False
        with closing(sqlite3.connect(copy)) as database:
            if database.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                return False
        shutil.copy2(copy, path)
    except (OSError, sqlite3.Error):
        _log.exception("restoring the conversations")
        return False
    return True


def salvage(damaged: Path, database: sqlite3.Connection) -> int:
    """Add to `database` what can be read of a damaged file; how many messages these are."""
    found = 0
    try:
        source = sqlite3.connect(f"{damaged.as_uri()}?mode=ro", uri=True)
    except sqlite3.Error:
        return 0
    with closing(source), transaction(database):
        for table in ("conversation", "message"):
            wanted = [row[1] for row in database.execute(f"PRAGMA table_info({table})") if row[1] != "number"]
            for values in _readable(source, table, wanted):
                names = ", ".join(values)
                marks = ", ".join("?" for _ in values)
                with suppress(sqlite3.IntegrityError):  # known from the copy, or its conversation is lost
                    added = database.execute(
                        f"INSERT INTO {table} ({names}) VALUES ({marks})",  # noqa: S608 (names of our own columns)
                        tuple(values.values()),
                    )
                    found += table == "message"
                    if table == "message":
                        database.execute(
                            "INSERT INTO message_text (rowid, content) VALUES (?, ?)",
                            (added.lastrowid, values["content"]),
                        )
        # An answer that was growing has no more than was folded into it.
        database.execute("UPDATE message SET state = 'interrupted', reason = 'crash' WHERE state = 'growing'")
        database.execute(
            "UPDATE conversation SET head = (SELECT id FROM message m WHERE m.conversation = conversation.id"
            " ORDER BY number DESC LIMIT 1) WHERE head IS NULL OR head NOT IN (SELECT id FROM message)"
        )
    return found


def _readable(source: sqlite3.Connection, table: str, wanted: list[str]) -> Iterator[dict[str, object]]:
    """Rows of a table, as far as they can be read: a damaged page costs the rows on it."""
    try:
        known = [row[1] for row in source.execute(f"PRAGMA table_info({table})") if row[1] in wanted]
        last = source.execute(f"SELECT max(number) FROM {table}").fetchone()[0] or 0  # noqa: S608 (our table)
    except sqlite3.Error:
        return
    if not known:
        return
    select = f"SELECT {', '.join(known)} FROM {table} WHERE number BETWEEN ? AND ?"  # noqa: S608 (our columns)
    for first in range(1, last + 1, _CHUNK):
        spans = [(first, first + _CHUNK - 1)]
        while spans:
            low, high = spans.pop()
            try:
                rows = source.execute(select, (low, high)).fetchall()
            except sqlite3.Error:
                if low < high:
                    middle = (low + high) // 2
                    spans += [(middle + 1, high), (low, middle)]
                continue
            for row in rows:
                yield dict(zip(known, row, strict=True))
