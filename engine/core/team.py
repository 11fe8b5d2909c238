"""The team of threads: Python threads that live inside one compiled call each."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from engine.core.control import CONTROL, CONTROL_WORDS, DISMISS, LEAD, WORK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.core.library import Kernels

__all__ = ["Team"]


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
        if not 1 <= members <= 256:
            message = f"a team has 1 to 256 members, not {members}"
            raise ValueError(message)
        self.members = members
        self._kernels = kernels
        self._memory = np.zeros(CONTROL_WORDS + 8, np.int64)
        skip = -self._memory.ctypes.data % 64 // 8
        self._words = self._memory[skip : skip + CONTROL_WORDS]
        self._control = int(self._words.ctypes.data)
        self._words[CONTROL["members"]] = members
        self._words[CONTROL["stop_at"]] = -1
        self._words[CONTROL["rounding"]] = 0x1F80
        self._words[CONTROL["wait"]], self._words[CONTROL["wake"]] = self._system_calls()
        self._threads = [
            threading.Thread(target=self._work, args=(member, cores), name=f"kernel-{member}", daemon=True)
            for member in range(1, members)
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
        words = self._words
        words[CONTROL["program"]] = program
        words[CONTROL["operations"]] = operations
        words[CONTROL["state"]] = state
        self._kernels.enter(LEAD, 0, self._control)

    @property
    def cancelled(self) -> bool:
        """Whether the last run stopped early."""
        return bool(self._words[CONTROL["stop_at"]] >= 0)

    def cancel(self) -> None:
        """Stop the run that goes on, or the next one, after its present operation."""
        self._words[CONTROL["cancel"]] = 1

    def clear_cancel(self) -> None:
        """Let runs go on again."""
        self._words[CONTROL["cancel"]] = 0

    def close(self) -> None:
        """Send the workers home and wait for them."""
        if self._threads:
            self._kernels.enter(DISMISS, 0, self._control)
            for thread in self._threads:
                thread.join()
            self._threads = []
