"""How much memory a process may still take follows from its control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemini.system import process
from gemini.system.device import free_memory_bytes

GIB = 2**30


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory in place of /sys/fs/cgroup, for a process of no group."""
    monkeypatch.setattr(process, "MOUNTS", tmp_path)
    monkeypatch.setattr(process, "MEMBERSHIP", tmp_path / "self")
    return tmp_path


def join(mounts: Path, line: str) -> None:
    with (mounts / "self").open("a") as file:
        file.write(line + "\n")


def v1(group: Path, limit: int, usage: int, cached: int = 0) -> None:
    write(
        group, "memory.limit_in_bytes", limit, "memory.usage_in_bytes", usage, f"total_inactive_file {cached}"
    )


def v2(group: Path, limit: int | str, usage: int, cached: int = 0) -> None:
    write(group, "memory.max", limit, "memory.current", usage, f"inactive_file {cached}")


def write(group: Path, limit_file: str, limit: int | str, usage_file: str, usage: int, stat: str) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / limit_file).write_text(f"{limit}\n")
    (group / usage_file).write_text(f"{usage}\n")
    (group / "memory.stat").write_text(f"anon 5\n{stat}\nactive_file 7\n")


def test_no_group_and_no_limit_leave_the_machine_s_memory(mounts: Path) -> None:
    assert process.free_bytes() is None
    join(mounts, "0::/user.slice/job")
    v2(mounts / "user.slice/job", "max", 5)
    assert process.free_bytes() is None
    assert free_memory_bytes() > 0


def test_the_tightest_group_counts_those_above_included(mounts: Path) -> None:
    join(mounts, "0::/slurm/job_7/step")
    v2(mounts / "slurm/job_7/step", "max", 10)
    v2(mounts / "slurm/job_7", GIB, GIB // 2)
    v2(mounts / "slurm", 2 * GIB, GIB)
    assert process.free_bytes() == GIB // 2
    v2(mounts / "slurm", 2 * GIB, 2 * GIB - 100)
    assert process.free_bytes() == free_memory_bytes() == 100


def test_both_versions_are_read_where_they_are_mounted(mounts: Path) -> None:
    join(mounts, "4:cpu,memory:/docker/abc")
    join(mounts, "2:cpuset:/elsewhere")
    join(mounts, "0::/docker/abc")
    v1(mounts / "memory/docker/abc", 1000, 400)
    assert process.free_bytes() == 600
    v2(mounts / "unified/docker/abc", 1000, 700)
    assert process.free_bytes() == 300


def test_a_container_sees_its_own_group_as_the_root(mounts: Path) -> None:
    join(mounts, "4:memory:/kubepods/hidden/from/here")
    v1(mounts / "memory", 1000, 100)
    assert process.free_bytes() == 900


def test_file_pages_that_come_back_by_themselves_are_free(mounts: Path) -> None:
    join(mounts, "0::/")
    v2(mounts, 1000, 990, cached=500)
    assert process.free_bytes() == 510
    v2(mounts, 1000, 1100)
    assert process.free_bytes() == 0
