"""The team of threads: Python threads that live inside one compiled call each.

Results do not depend on how many members take part in a step, so their number
follows the machine: where other programs want the cores, members wait for a
core while all others wait for them, and fewer are faster. Linux tells how long
each thread stood in line; elsewhere all members take part always.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from engine.core.control import CONTROL, CONTROL_WORDS, DISMISS, LEAD, MOST_MEMBERS, WORK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.core.library import Kernels

__all__ = ["Crowding", "Team", "waited_ns"]


def waited_ns(thread: int) -> int | None:
    """How long a thread of this process (by its system's id) was ready to run and had no core, in all; None: unknown.

    The second number of Linux's schedstat.
    """
    try:
        with open(f"/proc/self/task/{thread}/schedstat", "rb", buffering=0) as file:  # noqa: PTH123 - Path is slow
            return int(file.read(64).split()[1])
    except (OSError, IndexError, ValueError):
        return None


class Crowding:
    """How many members a team should have, from how long they waited for a core.

    most: members there are. Looks at every `_WINDOW_NS` of computing. Where
    members lacked cores for `_CROWDED` of the time together, twice in a row, as
    many are left out as cores were lacking; one more is tried after a while,
    which doubles up to `_LONGEST_NS` each time it turns out that there is no
    core for it.
    """

    _WINDOW_NS = 50_000_000
    _CROWDED = 0.35
    _SHORTEST_NS = 250_000_000
    _LONGEST_NS = 16_000_000_000

    def __init__(self, most: int, waited: Callable[[int], int | None] = waited_ns) -> None:
        self.active = most
        self._most = most
        self._waited = waited
        self._busy_ns = 0
        self._before: dict[int, int] = {}
        self._patience_ns = self._SHORTEST_NS
        self._crowded_before = False
        self._raised = False
        self._next_try_ns = 0

    def computed(self, nanoseconds: int, threads: Callable[[], Sequence[int]], now_ns: int) -> None:
        """A step took so long. threads: ids of those who took part; asked for now and then only."""
        self._busy_ns += nanoseconds
        if self._busy_ns < self._WINDOW_NS or self._most == 1:
            return
        waits = {thread: wait for thread in threads() if (wait := self._waited(thread)) is not None}
        if not waits:
            self._busy_ns = 0
            return  # the system does not tell
        lacking = sum(wait - self._before.get(thread, wait) for thread, wait in waits.items()) / self._busy_ns
        self._before, self._busy_ns = waits, 0
        crowded, before = lacking >= self._CROWDED, self._crowded_before
        self._crowded_before = crowded
        if crowded and self.active > 1:
            if not before and not self._raised:
                return
            if self._raised:
                self._patience_ns = min(2 * self._patience_ns, self._LONGEST_NS)
            self.active = max(1, self.active - max(1, round(lacking)))
            self._raised = False
            self._next_try_ns = now_ns + self._patience_ns
        elif self.active < self._most and now_ns >= self._next_try_ns:
            self.active += 1
            self._raised = True
            self._next_try_ns = now_ns + self._SHORTEST_NS
        elif self.active == self._most:
            self._patience_ns = self._SHORTEST_NS


class Team:
    """`members` threads that execute operation tables together; the calling thread is one of them.

    Only one thread may call `run`. `cancel` may come from any.
    """

    def __init__(self, kernels: Kernels, members: int, cores: tuple[int, ...] = ()) -> None:
        """Start the workers.

        Args:
            kernels: compiled entry points
            members: how many threads, the caller included
            cores: logical cores to pin to, one a member (the caller is not pinned); empty pins nobody
        """
        if not 1 <= members <= MOST_MEMBERS:
            message = f"a team has 1 to 256 members, not {members}"
            raise ValueError(message)
        self.members = members
        self._kernels = kernels
        self._cores = cores
        self._memory = np.zeros(CONTROL_WORDS + 8, np.int64)
        skip = -self._memory.ctypes.data % 64 // 8
        self._words = self._memory[skip : skip + CONTROL_WORDS]
        self._control = int(self._words.ctypes.data)
        self._threads: list[threading.Thread] = []
        self._start()

    def _start(self) -> None:
        """Set the control block up and let the workers in."""
        self._process = os.getpid()
        self._crowding = Crowding(self.members)
        self._words[:] = 0
        self._words[CONTROL["active"]] = self.members
        self._words[CONTROL["stop_at"]] = -1
        self._words[CONTROL["rounding"]] = 0x1F80
        self._words[CONTROL["wait"]], self._words[CONTROL["wake"]] = self._system_calls()
        self._threads = [
            threading.Thread(target=self._work, args=(member, self._cores), name=f"kernel-{member}", daemon=True)
            for member in range(1, self.members)
        ]
        for thread in self._threads:
            thread.start()

    def _system_calls(self) -> tuple[int, int]:
        """Addresses of the functions by which a thread waits and wakes others; sets the kind of system."""

        def address(function: object) -> int:
            return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]

        system = platform.system()
        if system == "Linux":
            self._words[CONTROL["system"]] = 0
            self._words[CONTROL["number"]] = 202 if platform.machine() == "x86_64" else 98  # futex
            call = address(ctypes.CDLL(None).syscall)
            return call, call
        if system == "Windows":
            self._words[CONTROL["system"]] = 1
            library = ctypes.CDLL("api-ms-win-core-synch-l1-2-0.dll")
            return address(library.WaitOnAddress), address(library.WakeByAddressAll)
        self._words[CONTROL["system"]] = 2
        call = address(ctypes.CDLL(None).usleep)
        return call, call

    def _work(self, member: int, cores: tuple[int, ...]) -> None:
        if cores and hasattr(os, "sched_setaffinity"):
            # A core may have been taken from us since it was listed; an unpinned member is merely slower.
            with suppress(OSError):
                os.sched_setaffinity(threading.get_native_id(), {cores[member % len(cores)]})
        self._kernels.enter(WORK, member, self._control)

    def run(self, program: NDArray[np.int64], state: NDArray[np.int64]) -> bool:
        """Execute all operations; False when cancelled on the way.

        program  int64 (operations, ROW_WORDS), C-contiguous
        state    int64 (STATE_WORDS,)
        """
        self.run_at(int(program.ctypes.data), len(program), int(state.ctypes.data))
        return not self.cancelled

    def run_at(self, program: int, operations: int, state: int) -> None:
        """As `run`, by addresses looked up before (numpy takes a microsecond to tell one)."""
        if self._process != os.getpid():
            self._start()  # a fork takes only the thread that called it along
        words = self._words
        words[CONTROL["program"]] = program
        words[CONTROL["operations"]] = operations
        words[CONTROL["state"]] = state
        words[CONTROL["active"]] = self._crowding.active
        begin_ns = time.perf_counter_ns()
        self._kernels.enter(LEAD, 0, self._control)
        end_ns = time.perf_counter_ns()
        self._crowding.computed(end_ns - begin_ns, self._taking_part, end_ns)

    def _taking_part(self) -> list[int]:
        """The system's ids of the threads that took part in the last step."""
        workers = (thread.native_id for thread in self._threads[: self._crowding.active - 1])
        return [threading.get_native_id(), *(worker for worker in workers if worker is not None)]

    @property
    def active(self) -> int:
        """How many members take part in the next step."""
        return self._crowding.active

    @property
    def cancelled(self) -> bool:
        """Whether the last run stopped early."""
        return bool(self._words[CONTROL["stop_at"]] >= 0)

    @property
    def cancelling(self) -> bool:
        """Whether the run that goes on, or the next one, is to stop."""
        return bool(self._words[CONTROL["cancel"]])

    def cancel(self) -> None:
        """Stop the run that goes on, or the next one, after its present operation."""
        self._words[CONTROL["cancel"]] = 1

    def clear_cancel(self) -> None:
        """Let runs go on again."""
        self._words[CONTROL["cancel"]] = 0

    def close(self) -> None:
        """Send the workers home and wait for them."""
        if self._threads and self._process == os.getpid():
            self._kernels.enter(DISMISS, 0, self._control)
            for thread in self._threads:
                thread.join()
        self._threads = []
