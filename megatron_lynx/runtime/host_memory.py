"""Memory of the host for offloaded activations: how much a rank may have, and what is said where that is too little.

the machine       MemAvailable                                       the least of these, shared by the ranks of the host,
control groups    limit - in use + page cache, of every one          is what one rank may hold in all its pools
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_lynx.errors import OffloadError, Problem
from megatron_lynx.units import format_bytes


@dataclass
class HostLimit:
    """What one rank may hold of its host's memory, all its pools together."""

    most_bytes: int
    held_bytes: int = 0


def too_little(where: str, needed_bytes: int, found_bytes: int) -> OffloadError:
    """The host has too little memory for what a plan offloads."""
    problem = Problem(
        f"{where}: host memory for offloaded activations",
        f"{found_bytes} bytes ({format_bytes(found_bytes)}) available to this rank",
        f"{needed_bytes} bytes ({format_bytes(needed_bytes)})",
        "lower offload.bytes in the plan, or start fewer ranks on a host",
    )
    return OffloadError("the host has too little memory", [problem])


def available_bytes(ranks_on_host: int = 1, root: Path = Path("/")) -> int:
    """This rank's equal share of the memory that the operating system can still give, within the limits of its control groups.
    `root`: where the system's files are."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        found = _numbers_in(meminfo)["MemAvailable:"] * 1024
    for group in _control_groups(root):
        limit, used = group / "memory.max", group / "memory.current"
        if limit.exists() and used.exists() and (most := limit.read_text().strip()).isdigit():
            given_back = _numbers_in(group / "memory.stat").get("inactive_file", 0)  # page cache: what was read from files
            found = min(found, int(most) - int(used.read_text()) + given_back)
    return max(0, found) // ranks_on_host


def _control_groups(root: Path) -> Iterator[Path]:
    """This process's group, and all around it: the limit of each holds."""
    top, own = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    yield top
    lines = own.read_text().splitlines() if own.exists() else []
    path = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    for part in Path(path).parts:
        top /= part
        yield top


def _numbers_in(file: Path) -> dict[str, int]:
    """By the first word of a line, the second one."""
    lines = (line.split() for line in file.read_text().splitlines()) if file.exists() else ()
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
