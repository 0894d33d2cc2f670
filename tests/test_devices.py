"""Memory and cores of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gguf_fusion import devices
from gguf_fusion.devices import DeviceInfo, DeviceKind, by_preference, free_ram_bytes, total_ram_bytes, usable_cores


def test_numbers_are_plausible() -> None:
    """Free memory is positive and no more than the total; there is at least one core, no more than allowed."""
    assert 0 < free_ram_bytes() <= total_ram_bytes()
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_container_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A control group's limit counts, its cached file pages do not."""
    monkeypatch.setattr(devices, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 400000\n")
    assert free_ram_bytes() == 700_000
    assert total_ram_bytes() == 1_000_000


def test_no_container_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An unlimited or unreadable control group changes nothing."""
    monkeypatch.setattr(devices, "_CGROUP", tmp_path)
    unlimited = total_ram_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1\n")
    (tmp_path / "memory.stat").write_text("")
    assert total_ram_bytes() == unlimited


def test_preference() -> None:
    """A GPU of its own memory comes before a larger shared one; the CPU's numbers are the system's."""
    gib = 1 << 30

    def device(name: str, kind: DeviceKind, free: int) -> DeviceInfo:
        return DeviceInfo(name=name, description="", kind=kind, free_bytes=free, total_bytes=free)

    found = by_preference(
        [
            device("shared", DeviceKind.SHARED, 4096 * gib),
            device("cpu", DeviceKind.CPU, 4096 * gib),
            device("card", DeviceKind.GPU, 8 * gib),
        ]
    )
    assert [d.name for d in found] == ["card", "shared", "cpu"]
    assert found[0].free_bytes == 8 * gib
    assert found[1].free_bytes <= total_ram_bytes()
    assert found[2].total_bytes == total_ram_bytes()
