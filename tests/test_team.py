"""The thread team: every step right however many members there are, stops when told to, sleeps when idle, ends.

Programs here are chains of products with permutations: what one member writes, all read after the next barrier,
so a member that runs ahead, lags behind or does a share twice leaves wrong numbers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from engine.core.control import CONTROL
from engine.core.operations import STATE, STATE_WORDS, Opcode, Program
from engine.core.team import Crowding, Team, waited_ns
from tests.workbench import Weights, address, packer

ROWS = 64
"""Four blocks: up to four members have a share of each product."""


@pytest.fixture
def team(kernels):
    """`team(members, ...)`, all of whom take part however crowded the machine is; closed after the test."""
    teams = []

    def build(members, **how):
        teams.append(Team(kernels(), members, **how))
        teams[-1]._crowding = Crowding(members, waited=lambda _thread: None)
        return teams[-1]

    yield build
    for made in teams:
        made.close()


class Chain:
    """x[k + 1] = P x[k] for k = 0 .. length - 1, P a permutation; the rows of `x` are NaN until written."""

    def __init__(self, length, seed=0):
        order = np.random.default_rng(seed).permutation(ROWS)
        matrix = np.zeros((ROWS, ROWS), np.float32)
        matrix[np.arange(ROWS), order] = 1
        self.weights = Weights.packed(matrix, "f32", 0, packer())
        self.x = np.full((length + 1, ROWS), np.nan, np.float32)
        program = Program()
        for row in range(length):
            program.add(
                Opcode.MATMUL,
                x_span=0,
                x_group=0,
                x_codes=address(self.x[row]),
                x_stride=0,
                x_scales=0,
                x_sums=0,
                x_scale_stride=0,
                x_columns=ROWS,
                rows=0,
                **self.weights.fields(),
                bias=0,
                out=address(self.x[row + 1]),
                out_stride=0,
                add=0,
                activates=0,
            )
        self.program = program.table()
        self.state = np.zeros(STATE_WORDS, np.int64)
        self.state[STATE.index("tokens")] = 1
        self.order = [np.arange(ROWS)]
        for _ in range(length):
            self.order.append(self.order[-1][order])

    def start(self, number):
        """Forget results; begin from numbers of its own."""
        self.x[1:] = np.nan
        self.x[0] = np.arange(number, number + ROWS, dtype=np.float32)

    @property
    def done(self):
        """Operations that all members finished, and that nobody began after."""
        written = ~np.isnan(self.x)
        complete = written.all(axis=1)
        return int(np.argmin(complete)) if not complete.all() else len(complete)

    def right(self):
        """Whether every row is the one before, permuted."""
        want = self.x[0][np.array(self.order)]
        return np.array_equal(self.x, want)


@pytest.mark.parametrize("members", [1, 2, 3, 4])
def test_thousands_of_steps(team, members):
    """Of 12 operations each: 36 thousand barriers, also with more members than cores."""
    threads, chain = team(members), Chain(12, seed=members)
    for number in range(3000 if members <= 2 else 1000):
        chain.start(number)
        assert threads.run(chain.program, chain.state)
        assert chain.right(), number


def test_steps_after_pauses(team):
    """Workers that went to sleep between steps are woken, whatever they were doing when the step came."""
    threads, chain, rng = team(3), Chain(5), np.random.default_rng(0)
    for number in range(150):
        chain.start(number)
        assert threads.run(chain.program, chain.state)
        assert chain.right(), number
        time.sleep(rng.choice([0, 0, 1e-5, 1e-4, 1e-3, 5e-3]))


def test_accumulated_steps(team):
    """out += W x, 2000 times: a share done twice, or left out, changes the count."""
    threads, count = team(4), 2000
    weights = Weights.packed(np.eye(ROWS, dtype=np.float32), "f32", 0, packer())
    x, out = np.arange(ROWS, dtype=np.float32), np.zeros(ROWS, np.float32)
    program = Program()
    for _ in range(2):
        program.add(
            Opcode.MATMUL,
            x_span=0,
            x_group=0,
            x_codes=address(x),
            x_stride=0,
            x_scales=0,
            x_sums=0,
            x_scale_stride=0,
            x_columns=ROWS,
            rows=0,
            **weights.fields(),
            bias=0,
            out=address(out),
            out_stride=0,
            add=1,
            activates=0,
        )
    table, state = program.table(), np.zeros(STATE_WORDS, np.int64)
    state[STATE.index("tokens")] = 1
    for _ in range(count):
        assert threads.run(table, state)
    assert np.array_equal(out, 2 * count * x)  # exact: below 2**24


# ---------------------------------------------------------------- stopping


@pytest.mark.parametrize("members", [1, 2, 4])
def test_cancelled_at_random_moments(team, members):
    """Ends after the operation it is at, or the next; in 250 ms; and the next step is right.

    The time is judged by the median: a moment without a core is not the team's doing. The operations are counted.
    """
    # Long enough to be met on the way; four members on two cores are slow.
    threads, chain, rng = team(members), Chain(20_000 // members**2), np.random.default_rng(members)
    next_step, step_s = Chain(7), np.inf
    for _ in range(3):
        began = time.perf_counter()
        assert threads.run(chain.program, chain.state)
        step_s = min(step_s, time.perf_counter() - began)
    waited, stopped = [], 0
    for number in range(12):
        chain.start(number)
        told = {}

        def cancel(delay_s, told=told):
            time.sleep(delay_s)
            threads.cancel()
            told["at"], told["done"] = time.perf_counter(), chain.done

        canceller = threading.Thread(target=cancel, args=(rng.random() * 0.8 * step_s,))
        canceller.start()
        finished = threads.run(chain.program, chain.state)
        returned = time.perf_counter()
        canceller.join()
        assert threads.cancelled != finished
        if not finished:
            stopped += 1
            assert chain.done <= told["done"] + 2
            waited.append(returned - told["at"])
            # Whatever was done until then is right, and nothing lies beyond.
            done = chain.done
            assert np.array_equal(chain.x[:done], chain.x[0][np.array(chain.order[:done])])
            assert np.isnan(chain.x[done:]).all()
        threads.clear_cancel()
        next_step.start(number)
        assert threads.run(next_step.program, next_step.state)
        assert not threads.cancelled
        assert next_step.right()
    assert stopped >= 3
    assert sorted(waited)[len(waited) // 2] < 0.25


@pytest.mark.parametrize("members", [1, 3])
def test_cancelled_before_it_begins(team, members):
    """The next run ends after its first operation, and so does every run until the flag is cleared."""
    threads, chain = team(members), Chain(30)
    threads.cancel()
    for number in range(200):
        chain.start(number)
        assert not threads.run(chain.program, chain.state)
        assert threads.cancelled
        assert chain.done == 2  # the start, and one operation
    threads.clear_cancel()
    chain.start(0)
    assert threads.run(chain.program, chain.state)
    assert chain.right()
    assert not threads.cancelled


# ---------------------------------------------------------------- beginning and end


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kernel-")]


@pytest.mark.parametrize("members", [1, 2, 4])
@pytest.mark.parametrize("steps", [0, 1, 50])
def test_close_joins_everybody(team, members, steps):
    before = len(workers())
    for _ in range(5):
        threads, chain = team(members), Chain(3)
        assert len(workers()) == before + members - 1
        for number in range(steps):
            chain.start(number)
            assert threads.run(chain.program, chain.state)
            assert chain.right()
        threads.close()
        assert len(workers()) == before
        threads.close()  # again: nothing to do


def test_close_after_cancel(team):
    threads, chain = team(3), Chain(10)
    threads.cancel()
    chain.start(0)
    threads.run(chain.program, chain.state)
    began = time.perf_counter()
    threads.close()
    assert time.perf_counter() - began < 5
    assert not workers()


def test_two_teams_do_not_meet(team):
    """Two engines in one process, each led by a thread of its own."""
    chains, wrong = [Chain(6, seed) for seed in (1, 2)], []

    def lead(threads, chain):
        for number in range(300):
            chain.start(number)
            if not (threads.run(chain.program, chain.state) and chain.right()):
                wrong.append(number)

    leaders = [threading.Thread(target=lead, args=(team(2), chain)) for chain in chains]
    for leader in leaders:
        leader.start()
    for leader in leaders:
        leader.join()
    assert not wrong


def test_a_step_may_be_led_by_another_thread(team):
    """Who loads a model need not be who runs it."""
    threads, chain, results = team(2), Chain(5), []
    for number in range(5):
        chain.start(number)
        leader = threading.Thread(target=lambda: results.append(threads.run(chain.program, chain.state)))
        leader.start()
        leader.join()
        assert chain.right()
    assert results == [True] * 5


@pytest.mark.parametrize("members", [0, 257, -1])
def test_senseless_numbers_of_members_are_refused(kernels, members):
    with pytest.raises(ValueError, match="1 to 256 members"):
        Team(kernels(), members)


# ---------------------------------------------------------------- how many take part


def test_any_number_of_members_in_any_step(team):
    """Members drop out and come back between steps, awake or asleep, some for long, some for one step."""
    threads, rng = team(4), np.random.default_rng(0)
    chain = Chain(6)
    for number in range(3000):
        threads._crowding.active = int(rng.integers(1, 5))
        chain.start(number)
        assert threads.run(chain.program, chain.state)
        assert chain.right(), number
        if rng.random() < 0.02:
            time.sleep(rng.choice([1e-4, 3e-3, 2e-2]))


@pytest.mark.parametrize("active", [1, 2])
def test_who_takes_no_part_sleeps(team, active):
    threads, chain = team(3), Chain(5)
    threads._crowding.active = active
    begin_s, used_s = time.perf_counter(), None
    while time.perf_counter() - begin_s < 0.4:
        chain.start(0)
        assert threads.run(chain.program, chain.state)
        if used_s is None:
            time.sleep(0.05)  # until those who rest have noticed
            used_s = [_cpu_seconds(thread.native_id) for thread in workers()]
    rested_s = [_cpu_seconds(thread.native_id) - before for thread, before in zip(workers(), used_s, strict=True)]
    assert max(rested_s[active - 1 :]) < 0.02
    assert chain.right()


def _cpu_seconds(thread):
    clock = ~thread << 3 | 6  # how Linux numbers the clock of a thread
    try:
        return time.clock_gettime(clock)
    except (AttributeError, OSError):
        pytest.skip("this system does not tell a thread's time")


class Waits:
    """Threads that wait for a core for a given share of the time."""

    def __init__(self, crowding_most, shares):
        self.shares, self.now_ns = shares, 0
        self.total = dict.fromkeys(range(crowding_most), 0.0)
        self.crowding = Crowding(crowding_most, waited=lambda thread: int(self.total[thread]))

    def compute(self, seconds):
        """Steps of 10 ms; the active numbers after each."""
        seen = []
        for _ in range(round(seconds * 100)):
            self.now_ns += 10_000_000
            active = self.crowding.active
            for thread in range(active):
                self.total[thread] += 1e7 * self.shares(active)
            self.crowding.computed(10_000_000, lambda active=active: list(range(active)), self.now_ns)
            seen.append(self.crowding.active)
        return seen


def test_one_core_short_is_one_member_less():
    waits = Waits(8, lambda active: 1.0 / 8 if active == 8 else 0.0)
    seen = waits.compute(20)
    assert min(seen) == 7
    assert seen.count(8) < 0.1 * len(seen)  # it is tried again now and then


def test_on_a_crowded_machine_one_remains():
    seen = Waits(4, lambda _active: 0.9).compute(10)
    assert seen[-1] == 1
    assert seen.index(1) < 30


def test_all_come_back_when_the_cores_are_free_again():
    crowd = {"share": 0.4}
    waits = Waits(4, lambda active: crowd["share"] if active > 2 else 0.0)
    assert waits.compute(3)[-1] == 2
    crowd["share"] = 0.0
    assert waits.compute(8)[-1] == 4
    assert set(waits.compute(3)) == {4}


def test_a_quiet_machine_changes_nothing():
    assert set(Waits(4, lambda _active: 0.04).compute(5)) == {4}
    unknown = Crowding(4, waited=lambda _thread: None)
    for number in range(100):
        unknown.computed(10_000_000, lambda: range(4), number * 10_000_000)
    assert unknown.active == 4


def test_linux_tells_how_long_a_thread_waited():
    if sys.platform != "linux" or not Path("/proc/self/schedstat").exists():
        pytest.skip("this system does not tell")
    assert waited_ns(threading.get_native_id()) >= 0
    assert waited_ns(2**22 + 1) is None


# ---------------------------------------------------------------- forks, stops


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


@needs_fork
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_gets_workers_of_its_own(team):
    threads, chain = team(3), Chain(5)
    chain.start(0)
    assert threads.run(chain.program, chain.state)
    child = os.fork()
    if child == 0:
        right = True
        for number in range(50):
            chain.start(number)
            right &= threads.run(chain.program, chain.state) and chain.right()
        threads.close()
        os._exit(0 if right else 1)
    deadline_s = time.monotonic() + 20
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended or time.monotonic() > deadline_s:
            break
        time.sleep(0.01)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended
    assert os.waitstatus_to_exitcode(status) == 0
    chain.start(1)
    assert threads.run(chain.program, chain.state)
    assert chain.right()


@needs_fork
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_may_close_what_it_never_used(team):
    threads = team(2)
    child = os.fork()
    if child == 0:
        threads.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


STOPPED = """
import sys, numpy as np
sys.path.insert(0, sys.argv[1])
from tests.test_team import Chain
from tests.conftest import load_kernels
from engine.core.team import Team
threads, chain = Team(load_kernels(), 3), Chain(12)
print("ready", flush=True)
for number in range(int(sys.argv[2])):
    chain.start(number)
    assert threads.run(chain.program, chain.state) and chain.right(), number
threads.close()
print("right", flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="this system stops no processes")
def test_stopped_and_continued_at_random_moments(compiled_kernels):
    """As a laptop's sleep does it: at any moment, in barriers and between steps."""
    root = Path(__file__).parent.parent
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(root), "4000"], stdout=subprocess.PIPE, text=True, cwd=root
    )
    try:
        assert process.stdout.readline() == "ready\n"
        rng = np.random.default_rng(1)
        for _ in range(25):
            time.sleep(rng.random() * 0.03)
            process.send_signal(signal.SIGSTOP)
            time.sleep(rng.random() * 0.05)
            process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=60)[0] == "right\n"
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


# ---------------------------------------------------------------- cores


def test_idle_workers_sleep(team):
    """Three workers that spun would take both cores; asleep they take less than 1 % of one."""
    threads, chain = team(4), Chain(5)
    chain.start(0)
    assert threads.run(chain.program, chain.state)
    time.sleep(0.3)  # they look around for a moment first
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    time.sleep(1.0)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    assert cpu_s < 0.01 * wall_s
    chain.start(1)
    assert threads.run(chain.program, chain.state)
    assert chain.right()


needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot pin threads")


@needs_affinity
def test_workers_are_pinned_and_the_leader_is_not(team):
    allowed = os.sched_getaffinity(0)
    core = max(allowed)
    threads, chain = team(3, cores=(core,)), Chain(5)
    chain.start(0)
    assert threads.run(chain.program, chain.state)
    pinned = [os.sched_getaffinity(thread.native_id) for thread in workers()]
    assert pinned == [{core}] * 2
    assert os.sched_getaffinity(0) == allowed
    assert chain.right()


@needs_affinity
@pytest.mark.parametrize("error", [OSError(22, "Invalid argument"), PermissionError(1, "Operation not permitted")])
def test_a_worker_that_cannot_be_pinned_works(team, monkeypatch, error):
    def refuse(thread, cores):
        raise error

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    threads, chain = team(3, cores=(0, 1, 2)), Chain(5)
    for number in range(20):
        chain.start(number)
        assert threads.run(chain.program, chain.state)
        assert chain.right()
    assert len(workers()) == 2


@needs_affinity
def test_a_core_that_does_not_exist_is_no_obstacle(team):
    threads, chain = team(2, cores=(100_000, 100_001)), Chain(5)
    chain.start(0)
    assert threads.run(chain.program, chain.state)
    assert chain.right()


def test_the_control_block_is_aligned(team):
    """Fields that several threads write lie on cache lines of their own."""
    threads = team(1)
    base = address(threads._words)
    assert base % 64 == 0
    shared = [
        CONTROL[name]
        for name in ("arrived", "generation", "barrier_sleepers", "sequence", "sleepers", "rest", "cancel")
    ]
    lines = [word // 8 for word in shared]
    assert len(set(lines)) == len(lines)
