"""Buffers: aligned, zeroed, huge where it counts, gone when closed."""

import gc
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from engine.core.memory import LINE, Buffer, aligned
from engine.errors import ResourceError

MEGABYTE = 1 << 20


@pytest.mark.parametrize("shape", [1, 7, (3, 5), (64, 64)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64])
def test_small_arrays_begin_on_a_line(shape, dtype):
    for _ in range(10):
        array = aligned(shape, dtype)
        assert array.ctypes.data % LINE == 0
        assert array.dtype == dtype
        assert array.shape == (shape if isinstance(shape, tuple) else (shape,))
        assert not array.any()
        array[...] = 1


@pytest.mark.parametrize("size", [0, 1, 100, 2 * MEGABYTE - 1, 2 * MEGABYTE, 5 * MEGABYTE + 3])
def test_buffers(size):
    buffer = Buffer(size)
    assert buffer.view.shape == (size,)
    assert buffer.address == buffer.view.ctypes.data
    assert buffer.address % (2 * MEGABYTE if size >= 2 * MEGABYTE else LINE) == 0
    assert not buffer.view.any()
    buffer.view[:] = 255
    assert buffer.view.all()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells how memory is mapped")
def test_large_buffers_ask_for_huge_pages():
    buffer = Buffer(8 * MEGABYTE)
    flags = ""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            within = low <= buffer.address < high
        elif within and first == "VmFlags:":
            flags = line
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        assert " hg" in flags
    assert " sh" not in flags  # a shared mapping would get none


def test_closing_gives_the_memory_back():
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    buffer = Buffer(64 * MEGABYTE)
    assert process.memory_info().rss - before < 16 * MEGABYTE  # nothing written, nothing taken
    buffer.view[:] = 1
    assert process.memory_info().rss - before > 48 * MEGABYTE
    part = buffer.view[5:10]
    buffer.close()
    assert buffer.address == 0
    assert part.tolist() == [1] * 5  # a view that is left keeps it
    del part
    gc.collect()
    assert process.memory_info().rss - before < 16 * MEGABYTE


def test_locking_says_whether_it_worked():
    assert Buffer(4096).lock() in {True, False}


def test_too_much_is_refused_in_one_sentence():
    with pytest.raises(ResourceError, match=r"^4611686018\.43 GB of memory for the KV cache could not be had"):
        Buffer(1 << 62, "the KV cache")
