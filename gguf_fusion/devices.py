"""Memory and cores of this machine, as far as this process may use them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


class DeviceKind(Enum):
    """What sort of memory a device computes in."""

    CPU = "cpu"
    GPU = "gpu"
    """Memory of its own."""
    SHARED = "shared"
    """An integrated GPU: its memory is the computer's RAM and must not be counted twice."""
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One device the native library can compute on."""

    name: str
    description: str
    kind: DeviceKind
    free_bytes: int
    total_bytes: int


def free_ram_bytes() -> int:
    """Bytes of RAM this process can still take without swapping, a container's limit included."""
    free = int(psutil.virtual_memory().available)
    limit = _container_limit()
    if limit is not None:
        free = min(free, max(0, limit[0] - limit[1]))
    return free


def resident_bytes() -> int:
    """Bytes of RAM this process occupies now, mapped files included."""
    return int(psutil.Process().memory_info().rss)


def total_ram_bytes() -> int:
    """Bytes of RAM of the machine, or the container's limit where that is lower."""
    total = int(psutil.virtual_memory().total)
    limit = _container_limit()
    return total if limit is None else min(total, limit[0])


def _container_limit() -> tuple[int, int] | None:
    """(limit, used) bytes of the control group, or None where there is none. Cached file pages do not count as used."""
    for limit_file, used_file, stat_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (_CGROUP / limit_file).read_text().strip()
            used = int((_CGROUP / used_file).read_text())
            stat = (_CGROUP / limit_file).with_name("memory.stat").read_text()
        except (OSError, ValueError):
            continue
        if not limit.isdigit():
            return None
        for line in stat.splitlines():
            key, _, value = line.partition(" ")
            if key == stat_key and value.isdigit():
                used -= int(value)
        return int(limit), max(0, used)
    return None


def usable_cores() -> int:
    """Cores this process may keep busy: physical ones, within its affinity; at least 1.

    Two hardware threads of one core share its arithmetic units, so decoding gains nothing from the second.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min(physical, allowed))


def by_preference(devices: Iterable[DeviceInfo]) -> list[DeviceInfo]:
    """GPUs with memory of their own first (most free bytes first), then shared ones, then the CPU, then the rest.

    The CPU's numbers are replaced by what the operating system says: the native library reports free = total there.
    Shared memory is never more than the RAM that is free.
    """
    order = [DeviceKind.GPU, DeviceKind.SHARED, DeviceKind.CPU, DeviceKind.OTHER]
    free_ram, total_ram = free_ram_bytes(), total_ram_bytes()
    known = []
    for device in devices:
        free, total = device.free_bytes, device.total_bytes
        if device.kind is DeviceKind.CPU:
            free, total = free_ram, total_ram
        elif device.kind is DeviceKind.SHARED:
            free = min(free, free_ram)
        known.append(
            DeviceInfo(
                name=device.name, description=device.description, kind=device.kind, free_bytes=free, total_bytes=total
            )
        )
    return sorted(known, key=lambda device: (order.index(device.kind), -device.free_bytes))
