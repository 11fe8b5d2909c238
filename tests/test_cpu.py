"""Threads, tiers and memory on machines that exist only as files."""

import json
import os
import platform
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from engine.core import cpu, cpuid
from engine.core.cpu import Core, Machine, detect, linux, machine, macos, memory, windows_cores
from engine.errors import SettingError

CPU = "/sys/devices/system/cpu"
V4 = "fma f16c movbe bmi1 bmi2 avx avx2 abm avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"


def host(cpus=8, smt=2, flags="avx2", **files):
    """Files of a machine with `cpus` logical CPUs, neighbours sharing a core."""
    made = {
        "/proc/cpuinfo": f"processor\t: 0\nmodel name\t: Toy\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t: none\n",
        f"{CPU}/online": f"0-{cpus - 1}\n",
        "/proc/self/cgroup": "0::/\n",
    }
    for number in range(cpus):
        first = number // smt * smt
        made[f"{CPU}/cpu{number}/topology/core_cpus_list"] = f"{first}-{first + smt - 1}\n" if smt > 1 else f"{first}\n"
    return made | files


def found(files, allowed=None, kind="x86_64"):
    return linux(files.get, range(8) if allowed is None else allowed, kind)


# ---------------------------------------------------------------- threads (case R08)


def test_one_thread_a_physical_core():
    assert found(host()).default_threads == 4
    assert found(host(smt=1)).default_threads == 8
    assert found(host()).cores[1] == Core((2, 3))


@pytest.mark.parametrize(
    ("text", "quota", "threads"),
    [
        ("max 100000", None, 4),
        ("50000 100000", 0.5, 1),
        ("150000 100000", 1.5, 1),
        ("250000 100000\n", 2.5, 2),
        ("800000 100000", 8, 4),
        ("rubbish", None, 4),
        ("", None, 4),
        ("100000", None, 4),
        ("100000 0", None, 4),
        ("-1 100000", None, 4),
    ],
)
def test_quota_of_version_2(text, quota, threads):
    machine = found(host(**{"/sys/fs/cgroup/cpu.max": text}))
    assert machine.quota == quota
    assert machine.default_threads == threads


@pytest.mark.parametrize(
    ("quota", "period", "threads"), [("-1", "100000", 4), ("200000", "100000", 2), ("x", "100000", 4), ("1", "", 4)]
)
def test_quota_of_version_1(quota, period, threads):
    group = "/sys/fs/cgroup/cpu/docker/abc"
    files = host(
        **{
            "/proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n",
            f"{group}/cpu.cfs_quota_us": quota + "\n",
            f"{group}/cpu.cfs_period_us": period + "\n",
            "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        }
    )
    assert found(files).default_threads == threads


def test_the_smallest_quota_above_this_group_counts():
    files = host(
        **{
            "/proc/self/cgroup": "0::/a/b\n",
            "/sys/fs/cgroup/a/b/cpu.max": "max 100000",
            "/sys/fs/cgroup/a/cpu.max": "300000 100000",
        }
    )
    assert found(files).default_threads == 3


def test_inside_a_container_the_path_is_the_hosts():
    files = host(
        **{"/proc/self/cgroup": "0::/system.slice/docker-1.scope\n", "/sys/fs/cgroup/cpu.max": "200000 100000"}
    )
    assert found(files).default_threads == 2


def test_no_files_at_all():
    machine = found({}, allowed={0, 1, 2})
    assert machine.default_threads == 3
    assert machine.quota is None
    assert machine.tiers == ("generic",)
    assert machine.nodes == 1


def test_affinity_counts_cores_not_cpus():
    machine = found(host(), allowed={0})
    assert (machine.default_threads, machine.most_threads, machine.physical_cores) == (1, 1, 4)
    machine = found(host(), allowed={0, 1, 2, 5})
    assert machine.cores == (Core((0, 1)), Core((2,)), Core((5,)))
    assert machine.default_threads == 3


def test_what_the_user_wants_is_kept_to_what_there_is():
    machine = found(host())
    assert machine.threads() == machine.threads(0) == machine.default_threads == 4
    assert machine.threads(2) == 2
    assert machine.threads(6) == 6
    assert machine.threads(99) == 8


def test_cores_left_free_are_no_threads():
    machine = found(host())
    assert [machine.threads(0, spare) for spare in (0, 1, 3, 4, 99)] == [4, 3, 1, 1, 1]
    assert machine.threads(4, 3) == 4  # who names a number gets it
    assert found(host(**{"/sys/fs/cgroup/cpu.max": "300000 100000"})).threads(0, 1) == 2
    hybrid = found(host(smt=1, **HYBRID[0]))
    assert [hybrid.threads(0, spare) for spare in (0, 4, 5)] == [4, 4, 3]  # the slow cores are free already


def test_the_node_with_most_fast_cores_comes_first():
    cores = (Core((0,), node=0), Core((1,), node=1), Core((2,), node=1), Core((3,), fast=False, node=0))
    machine = replace(found(host()), cores=cores, nodes=2)
    assert machine.placement(4) == (1, 2, 0, 3)


HYBRID = [
    {"/sys/devices/cpu_core/cpus": "0-3", "/sys/devices/cpu_atom/cpus": "4-7\n"},
    {f"{CPU}/cpu{n}/cpu_capacity": "1024" if n < 4 else "400" for n in range(8)},
    {f"{CPU}/cpu{n}/cpufreq/cpuinfo_max_freq": "5000000" if n < 4 else "3500000" for n in range(8)},
]


@pytest.mark.parametrize("files", HYBRID, ids=["named", "capacity", "frequency"])
def test_efficiency_cores_are_left_out(files):
    machine = found(host(smt=1, **files))
    assert [core.fast for core in machine.cores] == [True] * 4 + [False] * 4
    assert machine.default_threads == 4
    assert found(host(smt=1, **files), allowed={4, 5, 6}).default_threads == 3
    assert machine.placement(6) == (0, 1, 2, 3, 4, 5)


def test_favoured_cores_are_no_reason_to_leave_out_the_others():
    speeds = {f"{CPU}/cpu{n}/cpufreq/cpuinfo_max_freq": str(5_700_000 - 50_000 * n) for n in range(8)}
    assert found(host(smt=1, **speeds)).default_threads == 8
    partly = {f"{CPU}/cpu0/cpu_capacity": "1024", f"{CPU}/cpu1/cpu_capacity": "10"}
    assert found(host(smt=1, **partly)).default_threads == 8


def test_threads_are_placed_on_cores_of_their_own_node_by_node():
    node = "/sys/devices/system/node"
    files = host(**{f"{node}/online": "0-1", f"{node}/node0/cpulist": "0-1,4-5", f"{node}/node1/cpulist": "2-3,6-7"})
    machine = found(files)
    assert machine.nodes == 2
    assert [core.node for core in machine.cores] == [0, 1, 0, 1]
    assert machine.placement(8) == (0, 4, 2, 6, 1, 5, 3, 7)
    assert machine.placement(3) == (0, 4, 2)


# ---------------------------------------------------------------- tiers (case R14)


@pytest.mark.parametrize(
    ("flags", "tiers"),
    [
        ("sse4_2", ["generic"]),
        ("avx avx2 fma", ["generic"]),
        ("fma f16c movbe bmi1 bmi2 avx avx2 abm", ["generic", "avx2"]),
        ("fma f16c movbe bmi1 bmi2 avx avx2 abm avx_vnni", ["generic", "avx2", "avxvnni"]),
        (V4.replace(" avx512_vnni", ""), ["generic", "avx2"]),
        (V4, ["generic", "avx2", "avx512vnni"]),
        (V4 + " avx_vnni amx_tile amx_int8", ["generic", "avx2", "avxvnni", "avx512vnni", "amx"]),
    ],
)
def test_tiers(flags, tiers):
    machine = found(host(flags=flags))
    assert list(machine.tiers) == tiers
    assert machine.choose_tier() == tiers[-1]
    assert machine.choose_tier("generic") == "generic"
    assert machine.tier_reason.startswith(tiers[-1])


def test_a_tier_that_does_not_run_here_is_refused_by_what_is_missing():
    machine = found(host(flags=V4 + " amx_tile"))
    with pytest.raises(SettingError, match=r"tier amx needs amx_int8, which .* the best here is avx512vnni"):
        machine.choose_tier("amx")
    assert machine.tier_reason == "avx512vnni is the fastest tier here; amx needs amx_int8"


def test_arm64_has_the_generic_tier():
    machine = found(
        host(**{"/proc/cpuinfo": "Features: fp asimd\n", "/proc/device-tree/model": "Board 5\0"}), kind="aarch64"
    )
    assert (machine.architecture, machine.name, machine.tiers) == ("arm64", "Board 5", ("generic",))
    with pytest.raises(SettingError, match="tier avx2 needs an x86-64 processor"):
        machine.choose_tier("avx2")


def test_tiers_ask_for_what_their_code_is_compiled_for():
    from engine.core.build import TARGETS

    levels = {
        "x86-64": set(),
        "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
        "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    }
    levels["x86-64-v4"] |= levels["x86-64-v3"]
    spelled = {"avxvnni": "avx_vnni", "avx512vnni": "avx512_vnni", "amx-tile": "amx_tile", "amx-int8": "amx_int8"}
    assert list(TARGETS) == list(cpu.TIER_FEATURES)
    for tier, (level, extra) in TARGETS.items():
        named = {spelled[feature.removeprefix("+")] for feature in extra.split(",") if feature}
        assert levels[level] | named == cpu.TIER_FEATURES[tier]


# ---------------------------------------------------------------- other systems


def record(kind, number, masks, *, in_use=True):
    """One SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX as Windows writes it."""
    body = bytes([0, number]) + bytes(20) if kind == 0 else struct.pack("<I", number) + bytes(18)
    body += struct.pack("<H", len(masks) if in_use else 0)
    for group, mask in masks:
        body += struct.pack("<QHHHH", mask, group, 0, 0, 0)
    return struct.pack("<II", kind, 8 + len(body)) + body


def test_windows_with_performance_and_efficiency_cores():
    cores = record(0, 1, [(0, 0b11)]) + record(0, 1, [(0, 0b1100)]) + record(0, 0, [(0, 1 << 4)])
    nodes = record(1, 0, [(0, 0b11111)], in_use=False)
    usable, physical, count = windows_cores(cores, nodes)
    assert usable == (Core((0, 1)), Core((2, 3)), Core((4,), fast=False))
    assert (physical, count) == (3, 1)
    assert windows_cores(cores, nodes, {2, 4})[0] == (Core((2,)), Core((4,), fast=False))


def test_windows_with_two_processor_groups():
    cores = record(0, 0, [(0, 1)]) + record(0, 0, [(1, 1)])
    nodes = record(1, 0, [(0, 1)]) + record(1, 1, [(1, 1)])
    assert windows_cores(cores, nodes) == ((Core((0,), node=0), Core((64,), node=1)), 2, 2)


def test_macos():
    intel = {
        "machdep.cpu.brand_string": "Intel Core i5",
        "machdep.cpu.features": "FPU FMA MOVBE POPCNT AVX1.0 F16C",
        "machdep.cpu.leaf7_features": "BMI1 AVX2 BMI2",
        "machdep.cpu.extfeatures": "LZCNT",
        "hw.logicalcpu": "8",
        "hw.physicalcpu": "4",
    }
    machine = macos(intel.get, "x86_64")
    assert machine.tiers == ("generic", "avx2")
    assert machine.default_threads == 4
    assert machine.most_threads == 8
    apple = {"hw.logicalcpu": "8", "hw.physicalcpu": "8", "hw.perflevel0.physicalcpu": "4"}
    assert macos(apple.get, "arm64").default_threads == 4
    assert macos({}.get, "arm64").default_threads >= 1


# ---------------------------------------------------------------- memory


def test_memory_without_limits_is_the_hosts():
    free = memory({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": "max\n"}.get)
    assert free.total == psutil.virtual_memory().total
    assert free.limit is None
    assert 0 < free.free <= free.total


def test_memory_limit_of_version_2():
    group = "/sys/fs/cgroup/app"
    found = memory(
        {
            "/proc/self/cgroup": "0::/app\n",
            f"{group}/memory.max": "1000000\n",
            f"{group}/memory.current": "700000\n",
            f"{group}/memory.stat": "anon 300000\nactive_file 100000\ninactive_file 200000\n",
        }.get
    )
    assert found == cpu.Memory(total=1_000_000, free=600_000, limit=1_000_000)


def test_memory_limit_of_version_1():
    group = "/sys/fs/cgroup/memory"
    files = {
        "/proc/self/cgroup": "5:memory:/app\n",
        f"{group}/app/memory.limit_in_bytes": "2000000\n",
        f"{group}/app/memory.usage_in_bytes": "2500000\n",
        f"{group}/app/memory.stat": "cache 5\ntotal_inactive_file 100000\n",
        f"{group}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{group}/memory.usage_in_bytes": "3000000\n",
    }
    assert memory(files.get) == cpu.Memory(total=2_000_000, free=0, limit=2_000_000)


def test_memory_with_rubbish_in_the_files():
    files = {"/sys/fs/cgroup/memory.max": "lots", "/sys/fs/cgroup/memory/memory.limit_in_bytes": ""}
    assert memory(files.get).limit is None


# ---------------------------------------------------------------- this machine


def test_this_machine():
    here = detect()
    assert here == machine()
    assert 1 <= here.default_threads <= here.most_threads
    assert len(here.cores) <= here.physical_cores
    assert json.loads(json.dumps(here.describe()))["default_threads"] == here.default_threads
    cpus = [cpu for core in here.cores for cpu in core.cpus]
    assert sorted(here.placement(len(cpus))) == sorted(cpus)
    assert here.placement(0) == ()


@pytest.mark.skipif(sys.platform != "linux", reason="an affinity mask set from outside")
def test_affinity_of_this_process():
    script = "import os; os.sched_setaffinity(0, {0}); from engine.core.cpu import machine; print(machine().threads(9))"
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True
    )
    assert run.stdout == "1\n"


@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="CPUID is an x86 instruction")
def test_cpuid_agrees_with_the_system():
    name, features = cpuid.ask()
    assert name
    if sys.platform == "linux":
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
        known = {bit[4] for bit in cpuid._BITS}
        assert features == known & set(flags.split())


def registers(leaves):
    return lambda leaf, subleaf: cpuid.Registers(*leaves.get((leaf, subleaf), (0, 0, 0, 0)))


def test_cpuid_needs_a_system_that_saves_the_registers():
    all_bits = (0xFFFF_FFFF,) * 4
    leaves = {(0, 0): (7, 0, 0, 0), (0x8000_0000, 0): (0x8000_0004, 0, 0, 0), (1, 0): all_bits, (7, 0): all_bits}
    leaves |= {(7, 1): all_bits, (0x8000_0001, 0): all_bits}
    everything = {bit[4] for bit in cpuid._BITS}
    assert cpuid.features(registers(leaves), 0xFFFF_FFFF) == everything
    without_amx = {name for name in everything if not name.startswith("amx")}
    assert cpuid.features(registers(leaves), 0b1110_0111) == without_amx
    assert cpuid.features(registers(leaves), 0b111) == {n for n in without_amx if not n.startswith("avx512")}
    assert cpuid.features(registers(leaves), 0) == {"movbe", "popcnt", "bmi1", "bmi2", "abm"}
    leaves[7, 0] = (0, *all_bits[1:])
    assert "avx_vnni" not in cpuid.features(registers(leaves), 0xFFFF_FFFF)
    leaves[0, 0] = (1, 0, 0, 0)
    assert cpuid.features(registers(leaves), 0xFFFF_FFFF) == {"fma", "movbe", "popcnt", "avx", "f16c", "abm"}


def test_cpuid_spells_the_name():
    text = b"  Toy(R)   CPU\0".ljust(48, b"\0")
    leaves = {(0x8000_0000, 0): (0x8000_0004, 0, 0, 0)}
    leaves |= {(0x8000_0002 + i, 0): struct.unpack_from("<IIII", text, 16 * i) for i in range(3)}
    assert cpuid.brand(registers(leaves)) == "Toy(R) CPU"
    assert cpuid.brand(registers({})) == ""


def test_amx_counts_only_when_the_system_grants_it(monkeypatch):
    full = Machine("Toy", "x86-64", cpu.TIER_FEATURES["amx"], (Core((0,)),), 1, None, 1)
    monkeypatch.setattr(cpu, "linux", lambda *_: full)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.setattr(cpu, "request_amx", lambda: True)
    assert detect().choose_tier() == "amx"
    monkeypatch.setattr(cpu, "request_amx", lambda: False)
    assert detect().choose_tier() == "avx512vnni"
    assert detect() == replace(full, features=cpu.TIER_FEATURES["avx512vnni"])
