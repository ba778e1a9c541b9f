"""Available host memory of the machine and of every control group around this process.

    the machine      MemAvailable
    control groups   limit - in use + page cache     of version 2 (`memory.max`) and 1 (`memory.limit_in_bytes`): this group and
                                                     all above it

Processes that share one of them find out by its identity: for a machine its kernel's boot id, as containers may share a host
name, for a group its inode in the kernel's file system.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Pot(NamedTuple):
    """Memory that all processes of a machine, or of a control group, share."""

    words: str
    identity: str
    """Equal for processes that share it."""
    free_bytes: int


@dataclass(frozen=True)
class FreeMemory:
    pots: tuple[Pot, ...]
    unread: tuple[str, ...] = ()
    """Files of limits that cannot be read."""

    @property
    def least(self) -> Pot:
        return min(self.pots, key=lambda pot: pot.free_bytes)


class _Files(NamedTuple):
    folder: str
    limit: str
    used: str
    cache: tuple[str, ...]
    """Names in `memory.stat` for reclaimable page cache; the first that exists counts."""


SECOND = _Files("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file",))
FIRST = _Files("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "inactive_file"))


def free_memory(root: Path = Path("/")) -> FreeMemory:
    unread: list[str] = []
    machine = _machine(root)
    paths = _paths(root, unread)
    groups = (pot for files, path in paths for pot in _groups(root, files, path, machine.identity, unread))
    return FreeMemory((machine, *groups), tuple(unread))


def _machine(root: Path) -> Pot:
    try:
        identity = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        identity = socket.gethostname()
    try:
        free_bytes = _numbers_in(root / "proc/meminfo")["MemAvailable:"] * 1024
    except (OSError, KeyError):
        free_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Pot("the machine", identity, free_bytes)


def _paths(root: Path, unread: list[str]) -> Iterator[tuple[_Files, str]]:
    membership = root / "proc/self/cgroup"
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        unread.append(str(membership))
        lines = []
    paths = {tuple(controllers.split(",")): path for _, controllers, path in (line for line in lines if len(line) == 3)}
    yield SECOND, paths.get(("",), "")
    yield FIRST, next((path for controllers, path in paths.items() if "memory" in controllers), "")


def _groups(root: Path, files: _Files, path: str, machine: str, unread: list[str]) -> Iterator[Pot]:
    """The group at a path, and all above it. In a container the path may be the host's; then only the top exists."""
    group = root / files.folder
    for part in ("", *Path(path.strip("/")).parts):
        group /= part
        try:
            limit = (group / files.limit).read_text().strip()
            if not limit.isdigit():
                continue
            used, facts, status = int((group / files.used).read_text()), _numbers_in(group / "memory.stat"), group.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError):
            unread.append(str(group / files.limit))
            continue
        cache = next((facts[name] for name in files.cache if name in facts), 0)
        identity = f"{machine} {status.st_dev}:{status.st_ino}"
        yield Pot(f"the control group {group}", identity, max(0, int(limit) - used + cache))


def _numbers_in(file: Path) -> Mapping[str, int]:
    """The second word of each line, by its first one; empty if the file is missing."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except FileNotFoundError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
