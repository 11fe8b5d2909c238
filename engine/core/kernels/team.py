"""A team of threads that executes a table of operations, meeting at a barrier after each.

Every member sits in one call for the life of the engine. Between steps the
workers spin briefly, then sleep on a word of the control block; at a barrier a
member spins, then sleeps, so a partner that lost its core costs no spinning.
The leader says with each step how many members take part: where other programs
want the cores, fewer are faster. The others rest, on a word of their own, and
are not woken before they are wanted.

Control block, int64 words a cache line (8 words) apart, so that members do not
disturb one another; see `CONTROL`.
"""

from engine.core.control import CONTROL, LEAD, STEP_UNIT, WORK
from engine.core.kernels import attention, experts, matmul, recurrent, rows
from engine.core.kernels.simd import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_address,
    int64,
    kernel,
    load_i64,
    pause,
    set_rounding,
    store_i64,
)
from engine.core.operations import ROW_WORDS, Opcode

ARRIVED, GENERATION, BARRIER_SLEEPERS = (8 * CONTROL[n] for n in ("arrived", "generation", "barrier_sleepers"))
TAKEN = 8 * CONTROL["taken"]
SEQUENCE, SLEEPERS, REST, COMMAND = (8 * CONTROL[n] for n in ("sequence", "sleepers", "rest", "command"))
PROGRAM, OPERATIONS, STATE, ACTIVE = (8 * CONTROL[n] for n in ("program", "operations", "state", "active"))
CANCEL, STOP_AT = 8 * CONTROL["cancel"], 8 * CONTROL["stop_at"]
WAIT, WAKE, SYSTEM, NUMBER = (8 * CONTROL[n] for n in ("wait", "wake", "system", "number"))
EXPECTED, ROUNDING = 8 * CONTROL["expected"], 8 * CONTROL["rounding"]

SOON = 4
"""How many operations ahead a product is looked for while others are waited for."""

SPINS_AT_BARRIER = 2000
SPINS_BETWEEN_STEPS = 20000

EMBED, ANGLES, NORM, QUANTISE, ACTIVATE, MATMUL, ROTATE, ATTEND, MERGE, PREPARE, RESIDUAL, SOFTCAP = (
    int(opcode) for opcode in list(Opcode)[:12]
)
ROUTE, DISPATCH, EXPERTS, COMBINE = (int(opcode) for opcode in list(Opcode)[12:16])
MOVE, CONVOLVE, DECAY, DELTA, GATE = (int(opcode) for opcode in list(Opcode)[16:])


@kernel
def sleep_while(control, word, value, member):
    """Sleep while the low half of the int64 at `word` is `value`; may wake early."""
    system, wait = load_i64(control + SYSTEM), load_i64(control + WAIT)
    if system == 0:  # Linux: futex(word, FUTEX_WAIT_PRIVATE, value)
        call_address(wait, load_i64(control + NUMBER), word, 128, value, 0, 0, 0)
    elif system == 1:  # Windows: WaitOnAddress(word, &value, 4 bytes, no limit)
        expected = control + EXPECTED + 64 * member
        store_i64(expected, value)
        call_address(wait, word, expected, 4, 0xFFFFFFFF, 0, 0, 0)
    else:  # usleep(100)
        call_address(wait, 100, 0, 0, 0, 0, 0, 0)


@kernel
def wake_all(control, word):
    system, wake = load_i64(control + SYSTEM), load_i64(control + WAKE)
    if system == 0:  # futex(word, FUTEX_WAKE_PRIVATE, everyone)
        call_address(wake, load_i64(control + NUMBER), word, 129, 1 << 30, 0, 0, 0)
    elif system == 1:  # WakeByAddressAll(word)
        call_address(wake, word, 0, 0, 0, 0, 0, 0)


@kernel
def barrier(control, member, members, row, end):
    """Wait until every member is here; meanwhile ask for what it will read first: `row` is of the next operation."""
    if members == 1:
        return
    generation = atomic_load(control + GENERATION)
    if atomic_add(control + ARRIVED, 1) == members - 1:
        atomic_store(control + ARRIVED, 0)
        atomic_store(control + TAKEN, 0)
        # Sequentially consistent, so it is ordered before the look at the sleepers.
        atomic_add(control + GENERATION, 1)
        if atomic_load(control + BARRIER_SLEEPERS) > 0:
            wake_all(control, control + GENERATION)
        return
    end = min(end, row + SOON * 8 * ROW_WORDS)
    while row < end:
        if load_i64(row) == MATMUL:
            matmul.ask_first(row, member, members)
            break
        row += 8 * ROW_WORDS
    spins = 0
    while atomic_load(control + GENERATION) == generation:
        spins += 1
        if spins < SPINS_AT_BARRIER:
            pause()
        else:
            atomic_add(control + BARRIER_SLEEPERS, 1)
            sleep_while(control, control + GENERATION, generation, member)
            atomic_add(control + BARRIER_SLEEPERS, -1)


@kernel
def execute(row, state, member, members, control):
    """One operation's share of one member."""
    opcode = load_i64(row)
    if opcode == MATMUL:
        matmul.matmul(row, state, member, members, control + TAKEN)
    elif opcode == NORM:
        rows.norm(row, state, member, members)
    elif opcode == QUANTISE:
        rows.quantise(row, state, member, members)
    elif opcode == ACTIVATE:
        rows.activate(row, state, member, members)
    elif opcode == ROTATE:
        attention.rotate(row, state, member, members)
    elif opcode == ATTEND:
        attention.attend(row, state, member, members)
    elif opcode == MERGE:
        attention.merge(row, state, member, members)
    elif opcode == EMBED:
        rows.embed(row, state, member, members)
    elif opcode == ANGLES:
        rows.angles(row, state, member, members)
    elif opcode == PREPARE:
        rows.prepare(row, state, member, members)
    elif opcode == RESIDUAL:
        rows.residual(row, state, member, members)
    elif opcode == SOFTCAP:
        rows.softcap(row, state, member, members)
    elif opcode == ROUTE:
        experts.route(row, state, member, members)
    elif opcode == DISPATCH:
        experts.dispatch(row, state, member, members)
    elif opcode == EXPERTS:
        experts.experts(row, state, member, members)
    elif opcode == COMBINE:
        experts.combine(row, state, member, members)
    elif opcode == MOVE:
        rows.move(row, state, member, members)
    elif opcode == GATE:
        rows.gate(row, state, member, members)
    elif opcode == CONVOLVE:
        recurrent.convolve(row, state, member, members)
    elif opcode == DECAY:
        recurrent.decay(row, state, member, members)
    elif opcode == DELTA:
        recurrent.delta(row, state, member, members)


@kernel
def step(member, members, control):
    """Execute the program with the first `members`; all stop after the same operation when cancelled."""
    row, state = load_i64(control + PROGRAM), load_i64(control + STATE)
    end = row + 8 * ROW_WORDS * load_i64(control + OPERATIONS)
    for index in range(load_i64(control + OPERATIONS)):
        execute(row, state, member, members, control)
        row += 8 * ROW_WORDS
        # Only the leader looks at the flag, and it names the operation after which to stop before
        # it arrives: a member still leaving the previous barrier cannot mistake it for its own.
        if member == 0 and atomic_load(control + CANCEL) != 0:
            atomic_store(control + STOP_AT, index)
        barrier(control, member, members, row, end)
        if atomic_load(control + STOP_AT) == index:
            # Nobody leaves, and the leader starts no other step, before all have read this.
            barrier(control, member, members, end, end)
            return


@kernel
def work(member, control):
    """A worker's whole life: wait for a step, execute it if it takes part, until told to leave.

    A step is not over, and the next not announced, before all who take part have been there. So whoever takes part
    sees it announced; who does not may miss any number of steps.
    """
    seen = int64(0)
    members = int64(member + 1)  # it is expected at the first step
    while True:
        spins = 0
        while atomic_load(control + SEQUENCE) == seen:
            spins += 1
            if member >= members:
                # Read before the look at the sequence: who announces a step for us changes it afterwards.
                rest = atomic_load(control + REST)
                if atomic_load(control + SEQUENCE) == seen:
                    sleep_while(control, control + REST, rest, member)
            elif spins < SPINS_BETWEEN_STEPS:
                pause()
            else:
                atomic_add(control + SLEEPERS, 1)
                sleep_while(control, control + SEQUENCE, seen, member)
                atomic_add(control + SLEEPERS, -1)
        seen = atomic_load(control + SEQUENCE)
        if atomic_load(control + COMMAND) < 0:
            return
        members = seen % STEP_UNIT
        if member < members:
            step(member, members, control)


@kernel
def announce(control, members):
    """Begin the next step, for the first `members`."""
    before = atomic_load(control + SEQUENCE)
    atomic_store(control + SEQUENCE, (before // STEP_UNIT + 1) * STEP_UNIT + members)
    # Sequentially consistent, as all these are, so it is ordered before the look at the sleepers.
    if atomic_load(control + SLEEPERS) > 0:
        wake_all(control, control + SEQUENCE)
    if members > before % STEP_UNIT:
        atomic_add(control + REST, 1)
        wake_all(control, control + REST)


@kernel
def lead(control):
    """One step, by the engine's own thread as member 0, with the workers."""
    members = load_i64(control + ACTIVE)
    atomic_store(control + STOP_AT, -1)
    atomic_store(control + TAKEN, 0)
    atomic_store(control + COMMAND, 1)
    announce(control, members)
    step(0, members, control)


@kernel
def dismiss(control):
    """Send the workers home."""
    atomic_store(control + COMMAND, -1)
    announce(control, int64(STEP_UNIT - 1))


@kernel
def enter(role, member, control):
    """The one way in: as leader for one step, as worker for life, or to dismiss the workers."""
    set_rounding(control + ROUNDING)
    if role == LEAD:
        lead(control)
    elif role == WORK:
        work(member, control)
    else:
        dismiss(control)
