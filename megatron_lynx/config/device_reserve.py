"""What a job's plan leaves alone on each device: the parts of its cluster's reserve, in bytes.

cluster.reserve_gib   stated: that much, in one piece         a job's own margin, or a paper's
cluster.reserve       otherwise the parts                     context, libraries, NCCL's buffers by layout, allocator's slack
neither               nothing                                 the testbed
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_lynx.config.communicators import communicators
from megatron_lynx.units import GIB

if TYPE_CHECKING:
    from megatron_lynx.config.job import Job


def reserve_bytes(job: Job) -> Mapping[str, int]:
    """Bytes of each part, in the order in which they come to the device."""
    cluster = job.cluster
    if cluster.reserve_gib:
        return {"stated": int(GIB * cluster.reserve_gib)}
    if (reserve := cluster.reserve) is None:
        return {}
    slack = reserve.allocator
    return {
        "context": int(GIB * reserve.context_gib),
        "libraries": int(GIB * reserve.libraries_gib),
        "nccl": sum(each.buffer_bytes(reserve.nccl) for each in communicators(job)),
        "allocator": int(GIB * (slack.expandable_gib if job.budget.expandable_segments else slack.fixed_gib)),
    }


def reserve_as_json(job: Job) -> dict[str, Any]:
    """The device, the parts and NCCL's communicators in bytes, and what is left."""
    parts, reserve = reserve_bytes(job), job.cluster.reserve
    each = (
        {} if reserve is None or "nccl" not in parts else {one.name: one.buffer_bytes(reserve.nccl) for one in communicators(job)}
    )
    memory_bytes = int(GIB * job.cluster.memory_gib)
    left_bytes = memory_bytes - sum(parts.values())
    return {"memory_bytes": memory_bytes, "reserve_bytes": dict(parts), "nccl_bytes": each, "left_bytes": left_bytes}


def reserve_in_words(job: Job) -> str:
    """The same in a line, and which budget that gives; empty where nothing is left alone."""
    told = reserve_as_json(job)
    if not told["reserve_bytes"]:
        return ""
    parts = ", ".join(f"{_name(part, told)} {size / GIB:.2f}" for part, size in told["reserve_bytes"].items())
    stated = "" if job.budget.memory_gib is None else f"; stated {job.budget.memory_gib:.2f}"
    return f"device {told['memory_bytes'] / GIB:.2f} GiB: {parts}; left {told['left_bytes'] / GIB:.2f}{stated}"


def _name(part: str, told: Mapping[str, Any]) -> str:
    return f"NCCL ({', '.join(told['nccl_bytes'])})" if part == "nccl" and told["nccl_bytes"] else part
