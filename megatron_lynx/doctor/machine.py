"""GPUs, NUMA nodes and host memory of this machine, read from nvidia-smi and /sys without initialising CUDA."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_lynx.doctor.finding import Finding
from megatron_lynx.free_memory import free_memory
from megatron_lynx.units import GIB, format_bytes

BINDERS = ("numactl", "--numa-binding", "--cpu-bind", "--cpu-bind=", "bindpcie")
"""Words of a launcher that bind ranks to their GPU's socket."""


def machine(launcher: Sequence[str] = (), root: Path = Path("/")) -> Iterator[Finding]:
    """`launcher`: the words in front of the script, where a launch was given."""
    devices = gpus()
    found = ", ".join(sorted(set(devices))) + f" ({len(devices)})" if devices else "none here"
    yield Finding("GPUs", "good" if devices else "note", found)
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    bound = any(word.startswith(BINDERS) for word in launcher) or len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)
    if nodes > 1 and not bound:
        costs = "copies to the host may cross sockets, at a fraction of PCIe's rate"
        todo = "bind each rank to its GPU's node: torchrun --numa-binding node, or numactl"
        yield Finding("NUMA", "slows", f"{nodes} nodes, ranks not bound", costs, todo)
    else:
        yield Finding("NUMA", "good", f"{nodes} nodes, bound" if nodes > 1 else "one node")
    yield _host_memory(root)


def gpus() -> list[str]:
    """Names of the GPUs that the driver's tool lists; none where there is no such tool."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _host_memory(root: Path) -> Finding:
    found = free_memory(root)
    least = found.least
    limited = "" if least is found.pots[0] else f", the limit of {least.words}"
    little = least.free_bytes < 64 * GIB
    words = f"{format_bytes(least.free_bytes)} for offloaded activations, less a reserve of a tenth at least{limited}"
    if found.unread:
        costs = f"limits in {', '.join(found.unread)} cannot be read: whether offloaded activations fit is not known"
        return Finding("host memory", "note", words, costs)
    return Finding("host memory", "note" if little else "good", words, "little can be offloaded" if little else "")
