"""GPUs, NUMA nodes and host memory of this machine, from nvidia-smi and /sys without initialising CUDA; installed versions."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from megatron_lynx.config.cluster import Cluster
from megatron_lynx.errors import HookRefused
from megatron_lynx.free_memory import free_memory
from megatron_lynx.units import GIB, format_bytes

Level = Literal["good", "note", "slows", "defeats"]
"""good: as it should be; note: worth knowing; slows: overlap gains less; defeats: plans are refused or hide nothing, Megatron
stops, or stock's gradients are wrong."""


@dataclass(frozen=True)
class Finding:
    topic: str
    level: Level
    state: str
    costs: str = ""
    todo: str = ""


BINDERS = ("numactl", "--numa-binding", "--cpu-bind", "--cpu-bind=", "bindpcie")
"""Words of a launcher that bind ranks to their GPU's socket."""


def machine(launcher: Sequence[str] = (), root: Path = Path("/"), *, elsewhere: Cluster | None = None) -> Iterator[Finding]:
    """`launcher`: a launch's words before its script. `elsewhere`: its cluster, if this machine is not one of the nodes."""
    if elsewhere is not None and (node := elsewhere.node) is not None:
        yield Finding("GPUs", "note", f"none here; {node.gpus} on each node of {elsewhere.name}")
        words = f"{node.host_memory_gib:g} GiB on each node, which {elsewhere.name} is taken to have (node.host_memory_gib)"
        yield Finding("host memory", "good", words)
        return
    devices = gpus()
    gpu_names = ", ".join(sorted(set(devices))) + f" ({len(devices)})" if devices else "none here"
    yield Finding("GPUs", "good" if devices else "note", gpu_names)
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
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _host_memory(root: Path) -> Finding:
    free = free_memory(root)
    least = free.least
    limited = "" if least is free.pots[0] else f", the limit of {least.words}"
    little = least.free_bytes < 64 * GIB
    words = f"{format_bytes(least.free_bytes)} for offloaded activations, less a reserve of a tenth at least{limited}"
    if free.unread:
        costs = f"limits in {', '.join(free.unread)} cannot be read: whether offloaded activations fit is not known"
        return Finding("host memory", "note", words, costs)
    return Finding("host memory", "note" if little else "good", words, "little can be offloaded" if little else "")


def software() -> Iterator[Finding]:
    """Versions of torch, Transformer Engine, Apex and megatron-core, and whether megatron-core is as recorded."""
    torch = version_of("torch")
    yield Finding("torch", "good", torch) if torch else Finding("torch", "defeats", "not installed", "no training", "install it")
    te = version_of("transformer-engine", "transformer_engine")
    if te is None:
        costs, todo = "Megatron's default layers need it", "install it, or launch with --transformer-impl local"
        yield Finding("Transformer Engine", "note", "not installed", costs, todo)
    else:
        yield _te(te)
    apex = version_of("apex")
    costs = "local layers have no fused norm, and refuse --sequence-parallel" if te is None else ""
    yield Finding("Apex", "good" if apex or te else "note", apex or "not installed", costs if apex is None else "")
    yield from _megatron()


def _te(release: str) -> Finding:
    """Whether this release is known. Its functions are compared when a plan is installed: importing them needs a GPU."""
    from megatron_lynx.apply.releases import KNOWN_TE, minor_of

    if minor_of(release) in KNOWN_TE:
        return Finding("Transformer Engine", "good", release)
    costs, todo = (
        "plans for its layers are refused",
        f"install one of {', '.join(KNOWN_TE)}, or launch with --transformer-impl local",
    )
    return Finding("Transformer Engine", "defeats", release, costs, todo)


def version_of(*names: str) -> str | None:
    """The version of a package under the first of its names that is installed. Imports nothing."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _megatron() -> Iterator[Finding]:
    try:
        from megatron_lynx.apply.releases import installed_version, present_release

        release = installed_version()
    except ImportError as error:
        yield Finding("megatron-core", "defeats", f"cannot be imported: {error}", "no training", "install it")
        return
    try:
        held = list(present_release().rows())
    except HookRefused as error:
        problem = error.problems[0]
        yield Finding(
            "megatron-core", "defeats", release, "every plan is refused: its functions are not known", f"{problem.needed}"
        )
        return
    yield Finding("megatron-core", "good", release)
    stale = [function.site for function in held if not function.as_recorded]
    if stale:
        costs, todo = "every plan is refused", "megatron-lynx hooks says which; install the release as it was published"
        yield Finding("hooks", "defeats", f"{len(stale)} of {len(held)} functions not as recorded: {stale[0]}", costs, todo)
    else:
        yield Finding("hooks", "good", f"all {len(held)} functions as recorded")
