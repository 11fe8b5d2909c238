"""What every test stands on: no network, folders of its own, nothing left running."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from engine.core.library import Kernels
    from engine.settings import Tier

# How fast the computer is, and how busy, is no property of the code. A failing example is printed with what repeats it.
hypothesis.settings.register_profile(
    "inglenook", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("inglenook")

# Before anything imports Qt. An explicit QT_QPA_PLATFORM runs the same tests on a real screen.
os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")


def pytest_configure(config: pytest.Config) -> None:
    """Keep a person's models, conversations and settings out of reach.

    The cache outlives the run, under `.pytest_cache`: it holds the compiled
    kernels, which are found by a hash of their sources.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's background job ignores Ctrl+C; the ones that tests send must arrive.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cache = config.cache
    assert cache is not None
    for kind in ("CACHE", "CONFIG", "DATA", "STATE"):
        os.environ[f"XDG_{kind}_HOME"] = str(cache.mkdir(f"inglenook-{kind.lower()}"))


def _is_local(address: Any) -> bool:
    if not isinstance(address, tuple):
        return True  # a path: AF_UNIX
    if address[0] == "localhost":
        return True
    try:
        return ipaddress.ip_address(address[0]).is_loopback
    except ValueError:
        return False


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Connections beyond this computer fail the test that tries them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            original = getattr(socket.socket, name)

            def guarded(self: socket.socket, address: Any, original: Any = original) -> Any:
                if not _is_local(address):
                    raise AssertionError(f"a test tried to reach {address}")
                return original(self, address)

            patch.setattr(socket.socket, name, guarded)
        yield


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """A thread that a test starts must end with it."""
    before = set(threading.enumerate())
    yield
    deadline_s = time.monotonic() + 3
    while (left := _own_threads() - before) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not left, f"threads left running: {left}"


def load_kernels(tier: Tier | None = None) -> Kernels:
    """The kernels of a tier, of the best one without an argument, from the cache or compiled."""
    from engine.core.library import prepared_kernels
    from engine.progress import finish

    return finish(prepared_kernels(tier))


@pytest.fixture(scope="session")
def kernels() -> Callable[..., Kernels]:
    """`kernels(tier)`: the kernels of a tier, of the best one without an argument.

    Compiled once, kept in the cache. A tier that this processor lacks skips the test.
    """
    from engine.core.cpu import machine

    here = machine()
    loaded: dict[Tier, Kernels] = {}

    def ready(tier: Tier | None = None) -> Kernels:
        best = here.tiers[-1]
        wanted = tier or best
        if wanted not in here.tiers:
            pytest.skip(f"{here.name} has not the instructions of tier {wanted}")
        if wanted not in loaded:
            # Who asks for one that is not the best asks for all, and a compilation keeps one core busy for a minute.
            missing = [wanted] if wanted == best else [other for other in here.tiers if other not in loaded]
            with ThreadPoolExecutor(here.default_threads) as pool:
                loaded.update(zip(missing, pool.map(load_kernels, missing), strict=True))
        return loaded[wanted]

    return ready


@pytest.fixture(scope="session")
def compiled_kernels(kernels: Callable[..., Kernels]) -> None:
    """The kernels of this processor are in the cache: for tests that give a process little time."""
    kernels()


def _own_threads() -> set[threading.Thread]:
    # A dummy is Python's note that a foreign thread, one of Qt's, once called it; it never ends.
    return {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}


@pytest.fixture
def open_window(qtbot: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open the program's window over a scripted engine; opened again, it finds what the one before left.

    Gives `tests.driver.Driver`s. A window that is still open at the end is closed, and must close in time.
    """
    from tests.driver import Driver

    drivers: list[Driver] = []

    def opened(**arguments: Any) -> Driver:
        driver = Driver(qtbot, tmp_path, **arguments)
        drivers.append(driver)
        return driver

    yield opened
    for driver in drivers:
        driver.close()
