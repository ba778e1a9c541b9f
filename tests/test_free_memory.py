"""What the system can still give, by the machine's files and those of both versions of control groups."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_lynx.free_memory import free_memory

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/meminfo", "MemTotal: 100 kB\nMemAvailable: 90 kB\n")
    write("proc/self/cgroup", "0::/jobs/7\n")
    return write


def least(root: Path) -> int:
    return free_memory(root).least.free_bytes


def test_this_machine_has_some() -> None:
    found = free_memory()
    assert 0 < found.least.free_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert len({pot.identity for pot in found.pots}) == len(found.pots)
    assert [pot.identity for pot in free_memory().pots] == [pot.identity for pot in found.pots]


def test_the_limit_of_a_container_counts_without_what_it_has_read_from_files(tmp_path: Path, write: Write) -> None:
    """Page cache goes when memory is asked for: a container that has read its data set is not full."""
    assert least(tmp_path) == 90 * 1024
    write("sys/fs/cgroup/jobs/7/memory.max", "50000\n")
    write("sys/fs/cgroup/jobs/7/memory.current", "49000\n")
    assert least(tmp_path) == 1000
    write("sys/fs/cgroup/jobs/7/memory.stat", "anon 9000\ninactive_file 30000\n")
    assert least(tmp_path) == 31000
    write("sys/fs/cgroup/jobs/memory.max", "max\n")
    write("sys/fs/cgroup/jobs/memory.current", "60000\n")
    assert least(tmp_path) == 31000
    write("sys/fs/cgroup/jobs/memory.max", "61000\n")
    assert least(tmp_path) == 1000, "the limit of each group around it holds"


@pytest.mark.parametrize("mounted", ["jobs/7/", ""], ids=["on the host", "in a container"])
def test_limits_of_version_1_were_not_seen(tmp_path: Path, write: Write, mounted: str) -> None:
    """In a container the group is mounted at the top, and its path is the host's, which is not there."""
    write("proc/self/cgroup", "12:cpu,cpuacct:/jobs/7\n5:memory:/jobs/7\n0::/system.slice\n")
    write(f"sys/fs/cgroup/memory/{mounted}memory.limit_in_bytes", "50000\n")
    write(f"sys/fs/cgroup/memory/{mounted}memory.usage_in_bytes", "49000\n")
    write(f"sys/fs/cgroup/memory/{mounted}memory.stat", "inactive_file 1\ntotal_inactive_file 4000\n")
    assert least(tmp_path) == 5000
    if mounted:
        write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")  # none
        write("sys/fs/cgroup/memory/memory.usage_in_bytes", "60000\n")
        assert least(tmp_path) == 5000


def test_who_takes_from_the_same(tmp_path: Path, write: Write) -> None:
    """Two groups of one machine: they share the machine, and each has its own limit."""
    write("proc/sys/kernel/random/boot_id", "3f6c\n")
    for job in "7", "8":
        write(f"sys/fs/cgroup/jobs/{job}/memory.max", "50000\n")
        write(f"sys/fs/cgroup/jobs/{job}/memory.current", "0\n")
    seventh = free_memory(tmp_path).pots
    write("proc/self/cgroup", "0::/jobs/8\n")
    machine, group = free_memory(tmp_path).pots
    assert machine.identity == seventh[0].identity == "3f6c"
    assert group.identity != seventh[1].identity
    assert group.words.endswith("jobs/8")


def test_files_that_cannot_be_read_are_named(tmp_path: Path, write: Write) -> None:
    """The machine's own word is taken then."""
    assert free_memory(tmp_path).unread == ()
    (tmp_path / "sys/fs/cgroup/jobs/7/memory.max").mkdir(parents=True)
    write("sys/fs/cgroup/jobs/memory.max", "50000\n")
    write("sys/fs/cgroup/jobs/memory.current", "not a number\n")
    (tmp_path / "proc/self/cgroup").unlink()
    assert free_memory(tmp_path).unread == (str(tmp_path / "proc/self/cgroup"),)
    write("proc/self/cgroup", "0::/jobs/7\n")
    found = free_memory(tmp_path)
    assert found.unread == tuple(str(tmp_path / f"sys/fs/cgroup/{group}/memory.max") for group in ("jobs", "jobs/7"))
    assert found.least.words == "the machine"


def test_without_any_file_physical_memory_is_what_there_is(tmp_path: Path) -> None:
    found = free_memory(tmp_path)
    assert found.least.free_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert found.least.identity
