"""Which machine this is: processor, cores, what of them this program may use, memory.

Knows nothing of kernels or models; imports no numba. Everything is asked anew
by `detect`, through a `Reader` that tests replace by a dictionary of files;
`machine` remembers the answer. Linux answers from /proc, /sys and cgroups,
Windows from its documented calls and CPUID, macOS from sysctl.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import psutil

from engine.core import cpuid
from engine.errors import SettingError
from engine.settings import Tier

__all__ = [
    "TIER_FEATURES",
    "Core",
    "Machine",
    "Memory",
    "Reader",
    "detect",
    "linux",
    "machine",
    "macos",
    "memory",
    "prefer_speed",
    "request_amx",
    "windows_cores",
]

Reader = Callable[[str], str | None]
"""The text of a file, or None when there is no such file or it cannot be read."""

_AVX2: Final = frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_AVX512: Final = _AVX2 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl", "avx512_vnni"}

TIER_FEATURES: Final[dict[Tier, frozenset[str]]] = {
    "generic": frozenset(),
    "avx2": _AVX2,
    "avxvnni": _AVX2 | {"avx_vnni"},
    "avx512vnni": _AVX512,
    "amx": _AVX512 | {"amx_int8", "amx_tile"},
}
"""What each tier's code may use, slowest tier first, named as in /proc/cpuinfo. On ARM64 there is only `generic`."""

# A core that reaches less than this share of the fastest core's speed makes the others wait at every barrier.
_SLOW = 0.75


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core, as far as this program may use it.

    Attributes:
        cpus: numbers of its logical CPUs within the affinity mask, ascending
        fast: False for efficiency cores
        node: the NUMA node whose memory is near
    """

    cpus: tuple[int, ...]
    fast: bool = True
    node: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """What a program needs to know to choose its code and its threads.

    Attributes:
        name: the processor's own name
        architecture: "x86-64", "arm64", or what Python calls another one
        features: instruction set extensions, named as in /proc/cpuinfo
        cores: physical cores that the affinity mask allows, in order of their first CPU
        physical_cores: all of the machine's, allowed or not
        quota: CPUs' worth of time that the container grants, None without a limit
        nodes: NUMA nodes of the machine
    """

    name: str
    architecture: str
    features: frozenset[str]
    cores: tuple[Core, ...]
    physical_cores: int
    quota: float | None
    nodes: int

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The instruction tiers that run here, the best last."""
        if self.architecture != "x86-64":
            return ("generic",)
        return tuple(tier for tier, needed in TIER_FEATURES.items() if needed <= self.features)

    @property
    def tier_reason(self) -> str:
        """Why the best tier is the best, for people."""
        best = self.tiers[-1]
        if self.architecture != "x86-64":
            return f"generic is the tier for {self.architecture}"
        better = list(TIER_FEATURES)[list(TIER_FEATURES).index(best) + 1 :]
        if not better:
            return f"{best} is the fastest tier there is"
        return f"{best} is the fastest tier here; {better[0]} needs {self._missing(better[0])}"

    def choose_tier(self, wanted: Tier | None = None) -> Tier:
        """`wanted` if it runs here; the best when None.

        Raises:
            SettingError: this processor lacks something the tier needs
        """
        if wanted is None or wanted in self.tiers:
            return wanted or self.tiers[-1]
        needs = self._missing(wanted) if self.architecture == "x86-64" else "an x86-64 processor"
        raise SettingError(f"tier {wanted} needs {needs}, which this computer lacks; the best here is {self.tiers[-1]}")

    @property
    def default_threads(self) -> int:
        """Allowed fast cores, no more than the quota rounded down, at least 1.

        One thread a physical core: the second logical CPU of a core shares its
        arithmetic units and its cache. Efficiency cores are left out because
        all threads wait for the slowest; they count when nothing else is allowed.
        """
        fast = sum(core.fast for core in self.cores) or len(self.cores)
        return max(1, fast if self.quota is None else min(fast, int(self.quota)))

    @property
    def most_threads(self) -> int:
        """The logical CPUs allowed; more threads than these would wait for each other's turn."""
        return max(1, sum(len(core.cpus) for core in self.cores))

    def threads(self, wanted: int = 0, spare: int = 0) -> int:
        """`wanted`, at most `most_threads`; when 0 the default, less the cores that shall stay free."""
        if wanted > 0:
            return min(wanted, self.most_threads)
        left = len(self.cores) if self.quota is None else min(len(self.cores), int(self.quota))
        return max(1, min(self.default_threads, left - spare))

    def placement(self, threads: int) -> tuple[int, ...]:
        """The CPU for each of so many threads: cores of their own first, fast before slow, node by node.

        The node with most fast cores comes first, so that a team that fits into one shares its memory and cache.
        """
        fast_of = Counter(core.node for core in self.cores if core.fast)
        ordered = sorted(self.cores, key=lambda core: (not core.fast, -fast_of[core.node], core.node, core.cpus))
        turns = max((len(core.cpus) for core in ordered), default=0)
        cpus = [core.cpus[turn] for turn in range(turns) for core in ordered if turn < len(core.cpus)]
        return tuple(cpus[:threads])

    def describe(self) -> dict[str, Any]:
        """Plain values for `diagnose`."""
        return {
            "name": self.name,
            "architecture": self.architecture,
            "features": sorted(self.features & frozenset().union(*TIER_FEATURES.values())),
            "tiers": list(self.tiers),
            "tier_reason": self.tier_reason,
            "physical_cores": self.physical_cores,
            "allowed_cores": len(self.cores),
            "fast_cores": sum(core.fast for core in self.cores),
            "allowed_cpus": sum(len(core.cpus) for core in self.cores),
            "cpu_quota": self.quota,
            "numa_nodes": self.nodes,
            "default_threads": self.default_threads,
        }

    def _missing(self, tier: Tier) -> str:
        return ", ".join(sorted(TIER_FEATURES[tier] - self.features))


@dataclass(frozen=True, slots=True)
class Memory:
    """RAM in bytes, the container's limit counted.

    Attributes:
        total: what this program could have at most
        free: what it can take now without pushing others out
        limit: the container's limit, None without one
    """

    total: int
    free: int
    limit: int | None


@cache
def machine() -> Machine:
    """This machine, asked once."""
    return detect()


def detect() -> Machine:
    """This machine, asked anew. Asks for the use of AMX where the processor has it (see `request_amx`)."""
    if sys.platform == "linux":
        found = linux(_read, os.sched_getaffinity(os.getpid()), platform.machine())
    elif sys.platform == "win32":
        found = _windows()
    elif sys.platform == "darwin":
        found = macos(_sysctl, platform.machine())
    else:
        found = _elsewhere()
    if "amx_tile" in found.features and not request_amx():
        features = frozenset(feature for feature in found.features if not feature.startswith("amx"))
        found = replace(found, features=features)
    return found


def memory(read: Reader | None = None) -> Memory:
    """RAM as it is now. `read` is for tests; the host's figures always come from the system."""
    host = psutil.virtual_memory()
    total, free = int(host.total), int(host.available)
    limits = _memory_limits(read or _read) if sys.platform == "linux" or read else []
    for limit, in_use in limits:
        total, free = min(total, limit), min(free, max(0, limit - in_use))
    return Memory(total, free, min((limit for limit, _ in limits if limit < host.total), default=None))


def request_amx() -> bool:
    """Ask the system to let this process use AMX; True when it may. Threads started later inherit it."""
    allowed = False
    if sys.platform == "linux":
        if platform.machine() == "x86_64":
            system_call = ctypes.CDLL(None, use_errno=True).syscall
            # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
            allowed = system_call(ctypes.c_long(158), ctypes.c_long(0x1023), ctypes.c_long(18)) == 0
    elif sys.platform == "win32":
        enable = getattr(ctypes.WinDLL("kernel32"), "EnableProcessOptionalXStateFeatures", None)
        if enable is not None:
            enable.argtypes = [ctypes.c_uint64]
            allowed = bool(enable(1 << 18))  # XSTATE_MASK_AMX_TILE_DATA
    return allowed


def prefer_speed() -> None:
    """Keep Windows from moving this process to slow cores while its window is in the background."""
    if sys.platform == "win32":
        kernel = ctypes.WinDLL("kernel32")
        kernel.GetCurrentProcess.restype = ctypes.c_void_p
        kernel.SetProcessInformation.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32]
        # PROCESS_POWER_THROTTLING_STATE: version 1, we decide execution speed, and it is never throttled
        state = (ctypes.c_uint32 * 3)(1, 1, 0)
        kernel.SetProcessInformation(kernel.GetCurrentProcess(), 4, state, ctypes.sizeof(state))


# ---------------------------------------------------------------- Linux


def linux(read: Reader, allowed: Iterable[int], kind: str) -> Machine:
    """The machine that these files describe, for a process that may use the CPUs in `allowed`.

    kind: the architecture, as `platform.machine` calls it
    """
    information = _first_processor(read("/proc/cpuinfo") or "")
    architecture = _architecture(kind)
    features = frozenset((information.get("flags") or information.get("Features") or "").split())
    all_cpus = _cpu_list(read("/sys/devices/system/cpu/online")) or sorted(allowed)
    mask = sorted(set(allowed))
    siblings = {cpu: _siblings(read, cpu) for cpu in {*all_cpus, *mask}}
    nodes = _cpu_list(read("/sys/devices/system/node/online")) or [0]
    node_of = {cpu: node for node in nodes for cpu in _cpu_list(read(f"/sys/devices/system/node/node{node}/cpulist"))}
    slow = _slow_cpus(read, mask)
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in mask:
        cores.setdefault(siblings[cpu], []).append(cpu)
    return Machine(
        name=information.get("model name") or (read("/proc/device-tree/model") or architecture).strip("\0\n "),
        architecture=architecture,
        features=features,
        cores=tuple(Core(tuple(cpus), cpus[0] not in slow, node_of.get(cpus[0], 0)) for cpus in cores.values()),
        physical_cores=len(set(siblings.values())),
        quota=_cpu_quota(read),
        nodes=len(nodes),
    )


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _first_processor(cpuinfo: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in cpuinfo.split("\n\n", maxsplit=1)[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _siblings(read: Reader, cpu: int) -> tuple[int, ...]:
    """The logical CPUs of this one's core; itself alone when the system does not say."""
    topology = f"/sys/devices/system/cpu/cpu{cpu}/topology"
    named = _cpu_list(read(f"{topology}/core_cpus_list")) or _cpu_list(read(f"{topology}/thread_siblings_list"))
    return tuple(named) if cpu in named else (cpu,)


def _slow_cpus(read: Reader, cpus: Iterable[int]) -> set[int]:
    """Efficiency cores: named as such (Intel), of less capacity (ARM), or of a lower top frequency."""
    named = _cpu_list(read("/sys/devices/cpu_atom/cpus"))
    if named:
        return set(named)
    for file in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        speeds = {cpu: _integer(read(f"/sys/devices/system/cpu/cpu{cpu}/{file}")) for cpu in cpus}
        known = [speed for speed in speeds.values() if speed]
        if len(known) == len(speeds) and known and min(known) < _SLOW * max(known):
            return {cpu for cpu, speed in speeds.items() if speed is not None and speed < _SLOW * max(known)}
    return set()


def _cpu_quota(read: Reader) -> float | None:
    """The smallest CPU limit of this process's control groups, in CPUs."""
    limits = []
    for folder in _groups(read, "cpu"):
        quota, _, period = (read(f"{folder}/cpu.max") or "").strip().partition(" ")  # version 2
        if not quota:
            quota = (read(f"{folder}/cpu.cfs_quota_us") or "").strip()
            period = (read(f"{folder}/cpu.cfs_period_us") or "").strip()
        # "max" and -1 mean no limit; what is no number limits nothing
        granted, per = _integer(quota), _integer(period)
        if granted and per and granted > 0 and per > 0:
            limits.append(granted / per)
    return min(limits, default=None)


def _memory_limits(read: Reader) -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be dropped) of each control group that has a limit."""
    found = []
    for folder in _groups(read, "memory"):
        for limit_file, usage_file, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, usage = _integer(read(f"{folder}/{limit_file}")), _integer(read(f"{folder}/{usage_file}"))
            if limit is None or limit >= 1 << 60:  # version 1 says "none" with a huge number
                continue
            statistics = dict(line.split()[:2] for line in (read(f"{folder}/memory.stat") or "").splitlines())
            # Pages of files go as soon as somebody needs room; the rest stays.
            droppable = sum(_integer(statistics.get(f"{prefix}{kind}_file")) or 0 for kind in ("active", "inactive"))
            found.append((limit, max(0, (usage or 0) - droppable)))
    return found


def _groups(read: Reader, controller: str) -> list[str]:
    """The folders of this process's control group and all above it, in both versions.

    Inside a container the path may be the host's, which does not exist there;
    the mounted root, which is always in the list, is then the container's own.
    """
    folders = []
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        root = f"/sys/fs/cgroup/{controller}" if controllers else "/sys/fs/cgroup"
        parts = [part for part in path.split("/") if part]
        folders += ["/".join([root, *parts[:count]]) for count in range(len(parts) + 1)]
    return folders or ["/sys/fs/cgroup", f"/sys/fs/cgroup/{controller}"]


def _cpu_list(text: str | None) -> list[int]:
    """Numbers of "0-3,8,10-11"; none when the text says nothing."""
    numbers: list[int] = []
    for part in (text or "").strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last.isdecimal() or not last):
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def _integer(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None


def _architecture(name: str) -> str:
    return {"x86_64": "x86-64", "amd64": "x86-64", "aarch64": "arm64"}.get(name.lower(), name.lower())


# ---------------------------------------------------------------- Windows


def windows_cores(cores: bytes, nodes: bytes, allowed: set[int] | None = None) -> tuple[tuple[Core, ...], int, int]:
    """(allowed cores, all physical cores, NUMA nodes) from GetLogicalProcessorInformationEx.

    cores, nodes: what it writes for RelationProcessorCore and RelationNumaNode
    allowed: CPU numbers, 64 to a processor group; None for all
    """
    node_of = {cpu: number for number, cpus in _windows_records(nodes, 1) for cpu in cpus}
    found = _windows_records(cores, 0)
    best = max((efficiency for efficiency, _ in found), default=0)
    within = [
        (efficiency, tuple(cpu for cpu in cpus if allowed is None or cpu in allowed)) for efficiency, cpus in found
    ]
    usable = tuple(
        Core(cpus, efficiency == best, node_of.get(cpus[0], 0))
        for efficiency, cpus in sorted(within, key=_cpus)
        if cpus
    )
    return usable, len(found), max(1, len(set(node_of.values())))


def _cpus(record: tuple[int, tuple[int, ...]]) -> tuple[int, ...]:
    return record[1]


def _windows_records(data: bytes, relation: int) -> list[tuple[int, tuple[int, ...]]]:
    """(efficiency class or node number, CPUs) of each SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX."""
    records = []
    at = 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from("<II", data, at)
        if kind == relation == 0:  # PROCESSOR_RELATIONSHIP: flags, class, 20 reserved, group count, masks
            number, count = data[at + 9], struct.unpack_from("<H", data, at + 30)[0]
        else:  # NUMA_NODE_RELATIONSHIP: number, 18 reserved, group count (0 on older systems: one), masks
            number, count = struct.unpack_from("<I", data, at + 8)[0], struct.unpack_from("<H", data, at + 30)[0]
        cpus: list[int] = []
        for index in range(max(1, count)):  # GROUP_AFFINITY: mask, group, 6 reserved
            mask, group = struct.unpack_from("<QH", data, at + 32 + 16 * index)
            cpus += [64 * group + bit for bit in range(64) if mask >> bit & 1]
        if kind == relation:
            records.append((number, tuple(cpus)))
        at += max(size, 8)
    return records


if sys.platform == "win32":

    def _windows() -> Machine:
        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel.GetActiveProcessorGroupCount.restype = ctypes.c_uint16

        def ask(relation: int) -> bytes:
            size = ctypes.c_uint32(0)
            kernel.GetLogicalProcessorInformationEx(relation, None, ctypes.byref(size))
            buffer = ctypes.create_string_buffer(size.value)
            if not kernel.GetLogicalProcessorInformationEx(relation, buffer, ctypes.byref(size)):
                raise ctypes.WinError(ctypes.get_last_error())
            return buffer.raw[: size.value]

        # A mask speaks of one processor group; with several groups the system itself uses them all.
        one_group = kernel.GetActiveProcessorGroupCount() == 1
        mask = set(psutil.Process().cpu_affinity()) if one_group else None
        cores, physical, nodes = windows_cores(ask(0), ask(1), mask)
        architecture = _architecture(platform.machine())
        name, features = cpuid.ask() if architecture == "x86-64" else ("", frozenset[str]())
        return Machine(name or platform.processor(), architecture, features, cores, physical, None, nodes)


# ---------------------------------------------------------------- macOS and others

# macOS spells features in capitals and in its own words.
_MACOS_NAMES = {"AVX1.0": "avx", "AVX512VNNI": "avx512_vnni", "LZCNT": "abm"}


def macos(sysctl: Reader, kind: str) -> Machine:
    """The machine that these sysctl values describe; `kind` as for `linux`."""
    architecture = _architecture(kind)
    words = " ".join(
        sysctl(f"machdep.cpu.{group}") or "" for group in ("features", "leaf7_features", "extfeatures")
    ).split()
    logical = _integer(sysctl("hw.logicalcpu")) or os.cpu_count() or 1
    physical = _integer(sysctl("hw.physicalcpu")) or logical
    fast = _integer(sysctl("hw.perflevel0.physicalcpu")) or physical
    threads = max(1, logical // physical)
    # CPU numbers are ours: macOS neither tells them nor lets threads be pinned.
    cores = tuple(Core(tuple(range(i * threads, (i + 1) * threads)), i < fast) for i in range(physical))
    features = frozenset(_MACOS_NAMES.get(word, word.lower()) for word in words)
    return Machine(sysctl("machdep.cpu.brand_string") or architecture, architecture, features, cores, physical, None, 1)


def _sysctl(name: str) -> str | None:
    """A sysctl value as text; numbers as decimals."""
    ask = ctypes.CDLL(None).sysctlbyname
    size = ctypes.c_size_t(0)
    if ask(name.encode(), None, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    buffer = ctypes.create_string_buffer(size.value)
    if ask(name.encode(), buffer, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    raw = buffer.raw[: size.value]
    if name.startswith("hw."):
        return str(int.from_bytes(raw, "little"))
    return raw.rstrip(b"\0").decode("utf-8", "replace")


def _elsewhere() -> Machine:
    """A system we know nothing special of."""
    logical = os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or logical
    architecture = _architecture(platform.machine())
    cores = tuple(Core((cpu,)) for cpu in range(physical))
    return Machine(platform.processor() or architecture, architecture, frozenset(), cores, physical, None, 1)
