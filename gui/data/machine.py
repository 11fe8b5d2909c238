"""What the operating system says of this computer and this program, and advice in words; knows no widget."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gui.kit.i18n import tr
from gui.kit.words import joined, size_words

__all__ = [
    "BYTES_PER_PARAMETER",
    "Sample",
    "advice",
    "connections",
    "hardware_words",
    "redacted",
    "sample",
    "write_bundle",
]

BYTES_PER_PARAMETER = 4.5 / 8
"""Of int4 with its scales."""

_SLOW_GB_PER_S = 13.0  # below it a desktop's memory is mostly one module alone
_LITTLE_BYTES = 2_000_000_000
_SHARE_FOR_WEIGHTS = 0.7  # the rest is for the conversation and other programs
_LOG_BYTES = 400_000


@dataclass(frozen=True, slots=True)
class Sample:
    """One look: shares 0..1 of the processor (this program, all), and bytes of memory (this program, in use, all)."""

    own_cpu: float
    all_cpu: float
    own_bytes: int
    used_bytes: int
    total_bytes: int


_PROCESS = psutil.Process()


def sample() -> Sample:
    """Look now; the shares are those since the last look."""
    memory = psutil.virtual_memory()
    own = _PROCESS.cpu_percent(None) / 100 / (psutil.cpu_count() or 1)
    return Sample(
        min(1.0, own),
        psutil.cpu_percent(None) / 100,
        int(_PROCESS.memory_info().rss),
        int(memory.total - memory.available),
        int(memory.total),
    )


def connections() -> list[str]:
    """Every network socket of this program, in words; empty when it has none."""
    try:
        found = _PROCESS.net_connections(kind="inet")
    except (psutil.Error, OSError) as error:
        return [tr("The system does not say ({reason}).", reason=str(error))]
    lines = []
    for entry in found:
        local = _address(entry.laddr)
        if remote := _address(entry.raddr):
            lines.append(tr("{local} is connected to {remote}", local=local, remote=remote))
        else:
            lines.append(tr("{local} waits for programs on this computer", local=local))
    return lines


def _address(address: Any) -> str:
    """An end of a connection; "" for the empty tuple that stands for none."""
    return f"{address.ip}:{address.port}" if address else ""


def hardware_words(facts: Mapping[str, Any]) -> str:
    """What this computer can do, in two or three sentences."""
    cpu, memory = facts.get("cpu", {}), facts.get("memory", {})
    total = int(memory.get("limit_bytes") or memory.get("total_bytes") or 0)
    free = int(memory.get("free_bytes") or 0)
    said = [
        tr(
            "{cores} cores and {total} of memory, {free} of them free.",
            cores=str(cpu.get("allowed_cores", "")),
            total=size_words(total),
            free=size_words(free),
        )
    ]
    most = max(free, total // 2) * _SHARE_FOR_WEIGHTS / BYTES_PER_PARAMETER / 1e9
    if most >= 1:
        said.append(tr("Models with up to about {count} billion parameters fit at 4 bits.", count=f"{most:.0f}"))
    rate = float(facts.get("benchmark", {}).get("read_bandwidth_gb_per_s") or 0)
    if rate:
        speed = rate / (1.5 * BYTES_PER_PARAMETER)
        said.append(tr("One with 1.5 billion will write up to {speed} tokens/s here.", speed=f"{speed:.0f}"))
    return joined(said)


def advice(facts: Mapping[str, Any]) -> list[str]:
    """What would make answers faster here, or why they are slow."""
    cpu, memory = facts.get("cpu", {}), facts.get("memory", {})
    said = []
    tiers = cpu.get("tiers", [])
    if cpu.get("architecture") == "x86-64" and tiers == ["generic"]:
        said.append(
            tr("This virtual machine hides AVX2 from its programs: let it use the processor of the host as it is.")
            if _is_virtual()
            else tr("This processor has no AVX2, so answers are several times slower than on a newer one.")
        )
    physical, allowed = int(cpu.get("physical_cores") or 0), int(cpu.get("allowed_cores") or 0)
    if cpu.get("cpu_quota"):
        said.append(tr("A quota holds this program to {count} cores of time.", count=f"{cpu['cpu_quota']:.1f}"))
    elif allowed and allowed < physical:
        said.append(
            tr("This program may use {allowed} of {physical} cores.", allowed=str(allowed), physical=str(physical))
        )
    rate = float(facts.get("benchmark", {}).get("read_bandwidth_gb_per_s") or 0)
    if 0 < rate < _SLOW_GB_PER_S:
        said.append(
            tr(
                "Memory is read at {rate} GB/s, which often means a single module: a second one of the same kind can"
                " nearly double the speed of answers.",
                rate=f"{rate:.0f}",
            )
        )
    if _saves_power():
        said.append(tr("The power saver is on: answers are faster with the balanced or performance profile."))
    battery = getattr(psutil, "sensors_battery", lambda: None)()
    if battery is not None and not battery.power_plugged:
        said.append(tr("On battery most computers are slower; plug it in for long answers."))
    free = int(memory.get("free_bytes") or 0)
    if 0 < free < _LITTLE_BYTES:
        said.append(
            tr("Only {size} of memory are free: close other programs, or use a smaller model.", size=size_words(free))
        )
    return said


def _is_virtual() -> bool:
    return " hypervisor" in _text(Path("/proc/cpuinfo"))


def _saves_power() -> bool:
    profile = _text(Path("/sys/firmware/acpi/platform_profile")).strip()
    wish = _text(Path("/sys/devices/system/cpu/cpu0/cpufreq/energy_performance_preference")).strip()
    return profile == "low-power" or wish == "power"


def _text(path: Path) -> str:
    """What a file of the kernel says; nothing on systems without it."""
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def redacted(text: str) -> str:
    """Without names of people, folders of theirs, and keys."""
    home = str(Path.home())
    text = text.replace(home, "~").replace(home.replace("\\", "\\\\"), "~")
    text = re.sub(r"(?i)([\\/](?:home|Users)[\\/])[^\\/\s\"']+", r"\1user", text)
    text = re.sub(r"(?i)(\"?api_?key\"?\s*[:=]\s*)(\[[^\]]*\]|\"[^\"]*\"|\S+)", r"\1(removed)", text)
    return re.sub(r"(?i)(bearer\s+)\S+", r"\1(removed)", text)


def write_bundle(path: Path, facts: Mapping[str, Any], preferences: Mapping[str, Any], logs: Path) -> None:
    """What helps to find a fault, and nothing of any conversation.

    Raises:
        OSError: it cannot be written
    """
    kept = {key: value for key, value in preferences.items() if key not in {"draft", "system", "presets", "geometry"}}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in (("computer.json", facts), ("settings.json", kept)):
            archive.writestr(name, redacted(json.dumps(value, ensure_ascii=False, indent=2, default=str)))
        for file in sorted(logs.glob("*.log*")):
            archive.writestr(f"logs/{file.name}", redacted(_text(file)[-_LOG_BYTES:]))
