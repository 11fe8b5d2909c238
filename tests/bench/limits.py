"""What this machine could do at most: bytes read a second, integer products a second.

    python -m tests.bench.limits [--threads N] [--tier TIER] [--megabytes N]

Kernels are judged by their share of these. Every figure is the best of many
short samples: on a computer that does other work as well, that is the sample
nobody disturbed. A pair of threads on cores that are both free reaches twice
the figure of one only where the memory allows it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from engine.core import build
from engine.core.cpu import machine
from engine.core.library import Kernels, prepared_kernels
from engine.core.memory import Buffer, aligned
from engine.progress import finish

_ROOT = Path(__file__).parents[2]
_SAMPLE_BYTES = 64 << 20
_LINES = 16  # cache lines of 64 bytes that one round of the product loop reads


def best_together(work: Callable[[int, int], object], threads: int, samples: int) -> float:
    """Seconds from the first start to the last end of `work(member, sample)`, all together; the best of the samples.

    work must release the GIL and should take a few milliseconds. Threads are
    pinned to cores of their own where the system allows it.
    """
    places = machine().placement(threads)
    barrier = threading.Barrier(threads)
    spans = [[(0.0, 0.0)] * threads for _ in range(samples)]

    def run(member: int) -> None:
        if threads > 1 and hasattr(os, "sched_setaffinity") and len(places) == threads:
            os.sched_setaffinity(threading.get_native_id(), {places[member]})
        for sample in range(samples):
            barrier.wait()
            start = time.perf_counter()
            work(member, sample)
            spans[sample][member] = start, time.perf_counter()

    members = [threading.Thread(target=run, args=(member,)) for member in range(threads)]
    for thread in members:
        thread.start()
    for thread in members:
        thread.join()
    return min(max(end for _, end in span) - min(start for start, _ in span) for span in spans)


def read_bandwidth(kernels: Kernels, threads: int, size: int = 1 << 30, samples: int = 100) -> float:
    """Bytes a second that `threads` together read of a buffer of `size` bytes, each its own part from front to back.

    The size decides what is measured: a cache that holds it, or the memory.
    Like weights, the buffer lies on huge pages and is read with prefetching.
    """
    part = size // threads // 256 * 256
    buffer = Buffer(part * threads, "the bandwidth measurement")
    buffer.view[:] = 1
    out = aligned((threads, 16), "float32")
    results = [int(row.ctypes.data) for row in out]
    # One sample reads a piece of the part, or a small part several times; the next sample goes on behind it.
    piece = min(part, _SAMPLE_BYTES // threads // 256 * 256)
    pieces, turns = part // piece, max(1, _SAMPLE_BYTES // size)

    def read(member: int, sample: int) -> None:
        place = buffer.address + member * part + sample % pieces * piece
        for _ in range(turns):
            kernels.read(place, piece, results[member])

    return piece * threads * turns / best_together(read, threads, samples)


def dot_peak(tier: str, threads: int) -> float:
    """Operations a second (a product and a sum count as two) of the tier's integer products, from the L1 cache.

    On AMX int8 tiles times int8 tiles that stay in registers, else 4-bit by 8-bit products of vectors.
    Compiled and run in a process of its own: one process serves one tier.
    """
    cpu, features = build.TARGETS[tier] if machine().architecture == "x86-64" else ("generic", "")
    environment = os.environ | {"INGLENOOK_TIER": tier, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    command = [sys.executable, "-m", "tests.bench.limits", "--peak", "--threads", str(threads)]
    run = subprocess.run(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(run.stdout)


def _tile_peak_here(threads: int, samples: int = 30) -> float:
    """`dot_peak` of the AMX unit: four sums in turn, of two left and two right tiles."""
    from engine.core.kernels import simd

    sums = [simd.tile_registers(number, 4 + number // 2, 6 + number % 2) for number in range(4)]
    zero_0, zero_1, zero_2, zero_3 = [one.zero for one in sums]
    dot_0, dot_1, dot_2, dot_3 = [one.dot for one in sums]
    load_left_0, load_left_1 = sums[0].load_left, sums[2].load_left
    load_right_0, load_right_1 = sums[0].load_right, sums[1].load_right
    store = sums[3].store

    @simd.kernel  # type: ignore[untyped-decorator]
    def loop(shapes, rounds, tile):  # type: ignore[no-untyped-def]
        simd.tile_configure(shapes)
        load_left_0(tile, 64)
        load_left_1(tile, 64)
        load_right_0(tile, 64)
        load_right_1(tile, 64)
        zero_0()
        zero_1()
        zero_2()
        zero_3()
        for _ in range(rounds):
            dot_0()
            dot_1()
            dot_2()
            dot_3()
        store(tile, 64)
        simd.tile_release()

    # Palette 1; bytes per row of the eight tiles from byte 16, rows of each from byte 48.
    shapes = aligned(64, "uint8")
    shapes[:] = 0
    shapes[0], shapes[16:32:2], shapes[48:56] = 1, 64, 16
    tiles = aligned((threads, 1024), "int8")
    tiles[:] = 5
    rounds = 20_000
    where, places = int(shapes.ctypes.data), [int(tile.ctypes.data) for tile in tiles]
    loop(where, 1, places[0])
    seconds = best_together(lambda member, _: loop(where, rounds, places[member]), threads, samples)
    return threads * rounds * len(sums) * 2 * 16 * 16 * 64 / seconds


def _peak_here(threads: int, samples: int = 30) -> float:
    """`dot_peak` of the tier that this process was started for, without AMX."""
    from numba import types
    from numba.extending import intrinsic

    from engine.core.kernels import simd

    accumulators = 8
    tile = simd.Tile(simd.code_sum, accumulators)

    @intrinsic  # type: ignore[untyped-decorator]
    def dots(_context, total, address):  # type: ignore[no-untyped-def]
        """Eight independent sums, each given the products of one line with fixed codes."""

        def code(_context, builder, _signature, values):  # type: ignore[no-untyped-def]
            total, address = values
            codes = simd._constant(simd.i8x64.llvm, 3)
            for index in range(accumulators):
                place = simd._pointer(builder, builder.add(address, simd.I64(64 * index)))
                line = builder.load(place, typ=simd.i8x64.llvm, align=1)
                one = simd._dot_codes(builder, builder.extract_value(total, index), codes, line)
                total = builder.insert_value(total, one, index)
            return total

        return tile(tile, types.int64), code

    @intrinsic  # type: ignore[untyped-decorator]
    def nothing(_context):  # type: ignore[no-untyped-def]
        def code(_context, _builder, _signature, _values):  # type: ignore[no-untyped-def]
            zero = simd._constant(simd.code_sum.llvm, 0)
            return simd.ir.Constant(tile.llvm, [zero] * accumulators)

        return tile(), code

    @intrinsic  # type: ignore[untyped-decorator]
    def keep(_context, address, total):  # type: ignore[no-untyped-def]
        """Store the sums, so that nobody finds them useless."""

        def code(context, builder, _signature, values):  # type: ignore[no-untyped-def]
            builder.store(values[1], simd._pointer(builder, values[0]), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, tile), code

    @simd.kernel  # type: ignore[untyped-decorator]
    def loop(address, rounds, out):  # type: ignore[no-untyped-def]
        total = nothing()
        for index in range(rounds):
            total = dots(total, address + (index & 1) * 512)
        keep(out, total)

    lines, out = aligned((threads, _LINES * 64), "int8"), aligned((threads, accumulators * 64), "int8")
    lines[:] = 5
    rounds = 50_000
    loop(int(lines.ctypes.data), 1, int(out.ctypes.data))
    addresses = [(int(lines[i].ctypes.data), int(out[i].ctypes.data)) for i in range(threads)]
    seconds = best_together(
        lambda member, _: loop(addresses[member][0], rounds, addresses[member][1]), threads, samples
    )
    return threads * rounds * accumulators * 64 * 2 / seconds


def main() -> None:
    """Print the limits of this machine."""
    parser = argparse.ArgumentParser(description="Limits of this machine.")
    parser.add_argument("--threads", type=int, default=machine().default_threads)
    parser.add_argument("--tier", default=machine().choose_tier())
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        peak = _tile_peak_here if os.environ["INGLENOOK_TIER"] == "amx" else _peak_here
        sys.stdout.write(f"{peak(options.threads)}\n")
        return
    kernels = finish(prepared_kernels(options.tier))
    for threads in range(1, options.threads + 1):
        for size in (1 << 20, options.megabytes << 20):
            rate = read_bandwidth(kernels, threads, size)
            sys.stdout.write(f"read {size >> 20:5d} MB, {threads} threads: {rate / 1e9:6.1f} GB/s\n")
    for tier in machine().tiers:
        rates = [f"{dot_peak(tier, threads) / 1e12:6.3f}" for threads in range(1, options.threads + 1)]
        sys.stdout.write(f"int dot {tier:10s} with 1..{options.threads} threads: {' '.join(rates)} TOPS\n")


if __name__ == "__main__":
    main()
