"""What an x86-64 processor says of itself, for systems that do not pass it on in a file.

Knows the CPUID and XGETBV instructions and what their bits mean; features bear
the names of Linux's /proc/cpuinfo. Python cannot execute an instruction, so a
dozen bytes of machine code are placed in executable memory for the question.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["Registers", "ask", "brand", "features"]


class Registers(NamedTuple):
    """The answer to one CPUID question."""

    eax: int
    ebx: int
    ecx: int
    edx: int


Cpuid = Callable[[int, int], Registers]

# Arguments: leaf, subleaf, address of four uint32; Windows and the other systems pass them in different registers.
_ARGUMENTS = (
    bytes.fromhex("89c8 89d1")  # mov eax, ecx; mov ecx, edx; the address is in r8
    if sys.platform == "win32"
    else bytes.fromhex("4989d0 89f8 89f1")  # mov r8, rdx; mov eax, edi; mov ecx, esi
)
_CPUID = (
    b"\x53"  # push rbx
    + _ARGUMENTS
    + bytes.fromhex("0fa2")  # cpuid
    + bytes.fromhex("418900 41895804 41894808 4189500c")  # mov [r8], eax; ... ebx; ... ecx; ... edx
    + bytes.fromhex("5bc3")  # pop rbx; ret
)
_XGETBV = bytes.fromhex("31c9 0f01d0 48c1e220 4809d0 c3")  # xor ecx, ecx; xgetbv; rax |= rdx << 32; ret

_OSXSAVE = 1 << 27  # leaf 1 ecx: the system saves extended registers, so XGETBV may be asked
# Register bits that the system must save before a feature's registers may be used.
_AVX_STATE, _AVX512_STATE, _AMX_STATE = 0b110, 0b1110_0110, 0b11 << 17

# leaf, subleaf, register, bit, name, state
_BITS: tuple[tuple[int, int, str, int, str, int], ...] = (
    (1, 0, "ecx", 12, "fma", _AVX_STATE),
    (1, 0, "ecx", 22, "movbe", 0),
    (1, 0, "ecx", 23, "popcnt", 0),
    (1, 0, "ecx", 28, "avx", _AVX_STATE),
    (1, 0, "ecx", 29, "f16c", _AVX_STATE),
    (7, 0, "ebx", 3, "bmi1", 0),
    (7, 0, "ebx", 5, "avx2", _AVX_STATE),
    (7, 0, "ebx", 8, "bmi2", 0),
    (7, 0, "ebx", 16, "avx512f", _AVX512_STATE),
    (7, 0, "ebx", 17, "avx512dq", _AVX512_STATE),
    (7, 0, "ebx", 28, "avx512cd", _AVX512_STATE),
    (7, 0, "ebx", 30, "avx512bw", _AVX512_STATE),
    (7, 0, "ebx", 31, "avx512vl", _AVX512_STATE),
    (7, 0, "ecx", 11, "avx512_vnni", _AVX512_STATE),
    (7, 0, "edx", 22, "amx_bf16", _AMX_STATE),
    (7, 0, "edx", 24, "amx_tile", _AMX_STATE),
    (7, 0, "edx", 25, "amx_int8", _AMX_STATE),
    (7, 1, "eax", 4, "avx_vnni", _AVX_STATE),
    (0x8000_0001, 0, "ecx", 5, "abm", 0),
)


def features(cpuid: Cpuid, saved_state: int) -> frozenset[str]:
    """The features that both the processor has and the system lets programs use.

    saved_state: what XGETBV says; 0 when the system saves no extended registers
    """
    highest = {0: cpuid(0, 0).eax, 0x8000_0000: cpuid(0x8000_0000, 0).eax}
    highest_subleaf = {7: cpuid(7, 0).eax if highest[0] >= 7 else 0}
    return frozenset(
        name
        for leaf, subleaf, register, bit, name, state in _BITS
        if leaf <= highest[leaf & 0x8000_0000]
        and subleaf <= highest_subleaf.get(leaf, 0)
        and getattr(cpuid(leaf, subleaf), register) >> bit & 1
        and saved_state & state == state
    )


def brand(cpuid: Cpuid) -> str:
    """The processor's name, "" when it has none."""
    if cpuid(0x8000_0000, 0).eax < 0x8000_0004:
        return ""
    text = b"".join(
        value.to_bytes(4, "little") for leaf in (0x8000_0002, 0x8000_0003, 0x8000_0004) for value in cpuid(leaf, 0)
    )
    return " ".join(text.split(b"\0")[0].decode("ascii", "replace").split())


def ask() -> tuple[str, frozenset[str]]:
    """(name, features) of the processor this thread runs on; x86-64 only.

    Raises:
        OSError: the system does not hand out executable memory
    """
    answer = (ctypes.c_uint32 * 4)()
    with _executable(_CPUID + _XGETBV) as address:
        run = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)(address)
        state = ctypes.CFUNCTYPE(ctypes.c_uint64)(address + len(_CPUID))

        def cpuid(leaf: int, subleaf: int) -> Registers:
            run(leaf, subleaf, ctypes.addressof(answer))
            return Registers(*answer)

        saved = state() if cpuid(1, 0).ecx & _OSXSAVE else 0
        return brand(cpuid), features(cpuid, saved)


@contextmanager
def _executable(code: bytes) -> Iterator[int]:
    """The address of `code` in memory that may be executed."""
    if sys.platform == "win32":
        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel.VirtualAlloc.restype = ctypes.c_void_p
        kernel.VirtualAlloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_uint32]
        kernel.VirtualFree.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32]
        address = kernel.VirtualAlloc(None, len(code), 0x3000, 0x40)  # MEM_COMMIT | MEM_RESERVE, PAGE_EXECUTE_READWRITE
        if not address:
            raise ctypes.WinError(ctypes.get_last_error())
        ctypes.memmove(address, code, len(code))
        try:
            yield address
        finally:
            kernel.VirtualFree(address, 0, 0x8000)  # MEM_RELEASE
    else:
        with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as room:
            room.write(code)
            first = ctypes.c_char.from_buffer(room)
            try:
                yield ctypes.addressof(first)
            finally:
                del first  # the mapping cannot close while something points into it
