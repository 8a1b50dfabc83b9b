"""Memory for snapshots is counted against everything that bounds it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from elastic_trainer.state.snapshots import image
from elastic_trainer.state.snapshots.image import limits, no_room

MIB = 1 << 20


def machine(root: Path, *, total_mib: int, free_mib: int) -> Path:
    (root / "proc").mkdir()
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {total_mib << 10} kB\nMemFree: 1 kB\nMemAvailable: {free_mib << 10} kB\n"
    )
    return root


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tenth that is left alone counts here; of the disk all is free."""
    of_disk = os.statvfs

    def empty(path: Path) -> os.statvfs_result:
        found = of_disk(path)
        blocks = found[2]
        return os.statvfs_result((*found[:3], blocks, blocks, *found[5:]))

    monkeypatch.setattr(image.os, "statvfs", empty)


def test_the_machines_memory_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, total_mib=1000, free_mib=300)
    assert no_room(tmp_path, 100 * MIB, root=root) is None
    reason = no_room(tmp_path, 250 * MIB, root=root)
    assert re.findall(r"\d+", reason or "") == ["250", "300", "1000"]


@pytest.mark.parametrize(
    ("limit", "usage"),
    [
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ],
)
def test_the_cgroups_limit_counts(tmp_path: Path, limit: str, usage: str) -> None:
    root = machine(tmp_path, total_mib=100_000, free_mib=90_000)
    for name, mib in ((limit, 200), (usage, 150)):
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{mib * MIB}\n")
    assert no_room(tmp_path, 10 * MIB, root=root) is None
    reason = no_room(tmp_path, 40 * MIB, root=root)
    assert re.findall(r"\d+", reason or "") == ["40", "50", "200"]


@pytest.mark.parametrize("unlimited", ["max", str(2**63 - 4096)])
def test_no_limit_is_none(tmp_path: Path, unlimited: str) -> None:
    root = machine(tmp_path, total_mib=100_000, free_mib=90_000)
    (root / "sys/fs/cgroup/memory.max").write_text(unlimited)
    (root / "sys/fs/cgroup/memory.current").write_text("1")
    assert len(list(limits(tmp_path, root=root))) == 2, "the disk's and the machine's"


def test_this_machine_can_be_read(tmp_path: Path) -> None:
    found = {name: (total, free) for name, total, free in limits(tmp_path)}
    assert 0 < found["memory"][1] <= found["memory"][0]
    assert no_room(tmp_path, 1 << 60) is not None
