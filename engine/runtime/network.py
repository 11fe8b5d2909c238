"""Whether this program reaches for a network: what sockets its processes hold, and what it tries while it works.

Two witnesses that do not rely on each other: the operating system's list of
sockets, which code compiled into libraries cannot evade, and the interpreter's
audit events, which tell of attempts that came to nothing, too.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import psutil

__all__ = ["attempts", "sockets"]

_TELLING: Final = {"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo"}

_watchers: list[list[str]] = []


def sockets() -> list[dict[str, Any]]:
    """Every internet socket of this program's processes: {"pid", "local", "remote", "leaves"}.

    leaves: whether another computer is at the other end, or may be: it is connected to one, or waits for any.
    """
    found = []
    for process in _own_processes():
        try:
            entries = process.net_connections(kind="inet")
        except psutil.Error:  # it ended meanwhile, or belongs to somebody else
            continue
        for entry in entries:
            address: Any = entry.raddr
            if not address:  # an empty tuple: nothing is at the other end yet
                address = entry.laddr
            found.append(
                {
                    "pid": process.pid,
                    "local": _words(entry.laddr),
                    "remote": _words(entry.raddr),
                    "leaves": bool(address) and not ipaddress.ip_address(address.ip.split("%")[0]).is_loopback,
                }
            )
    return found


@contextmanager
def attempts() -> Iterator[list[str]]:
    """What code of Python's tries with addresses within the block, one line an attempt, as it comes."""
    _listen()
    seen: list[str] = []
    _watchers.append(seen)
    try:
        yield seen
    finally:
        _watchers.remove(seen)


@cache
def _listen() -> None:
    sys.addaudithook(_heard)  # cannot be taken back; it does nothing while nobody watches


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _TELLING:
        for seen in _watchers:
            seen.append(f"{event} {arguments[:2] if event == 'socket.getaddrinfo' else arguments[1]}")


def _own_processes() -> list[psutil.Process]:
    """This process and all others of the same packaged program; from source, its children."""
    own = psutil.Process()
    if not getattr(sys, "frozen", False):
        return [own, *own.children(recursive=True)]
    return [process for process in psutil.process_iter(["exe"]) if process.info["exe"] == own.exe()]


def _words(address: Any) -> str:
    return f"{address.ip}:{address.port}" if address else ""
