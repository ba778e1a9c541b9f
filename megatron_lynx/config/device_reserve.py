"""Device memory that a job's plan cannot use, by part, in bytes.

cluster.reserve_gib     a total, if given: the job's own margin, or a paper's
cluster.reserve         else the parts: context, libraries, NCCL buffers of the layout, DeepEP or HybridEP buffers, allocator
slack
neither                 nothing is reserved (testbed)
budget.share, .beside   in addition: memory of other processes on the device
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_lynx.config.cluster import Cluster
from megatron_lynx.config.communicators import Communicator
from megatron_lynx.units import GIB

OTHERS = "others' share"
"""Key of the memory that `budget.share` leaves to other processes."""
DISPATCH = "dispatch"
"""Key of DeepEP's and HybridEP's buffers."""
SLACK = "allocator"
"""Key of the allocator's slack. Plan files use this name too (`plan.facts`)."""


@dataclass(frozen=True)
class DeviceReserve:
    """Memory of one device, in bytes."""

    memory_bytes: int
    """Total, as PyTorch reports it."""
    parts: Mapping[str, int]
    """Ordered by when they are allocated."""
    communicators: Mapping[str, int]
    """The NCCL part by communicator."""
    others: Mapping[str, int] = field(default_factory=dict)
    """Memory of other processes, by name. `parts` excludes them."""

    def beside(self, share: float | None, held_gib: Mapping[str, float]) -> DeviceReserve:
        """Return a copy with other processes: all but `share` of the memory is theirs, and `held_gib` by name."""
        rest = {} if share is None else {OTHERS: self.memory_bytes - int(share * self.memory_bytes)}
        return replace(self, others={**rest, **{name: int(GIB * size) for name, size in held_gib.items()}})

    @property
    def left_bytes(self) -> int:
        """Bytes that a plan may use; negative if the parts exceed the device."""
        return self.memory_bytes - sum(self.parts.values()) - sum(self.others.values())

    @property
    def as_json(self) -> dict[str, Any]:
        told = {"memory_bytes": self.memory_bytes, "reserve_bytes": dict(self.parts), "nccl_bytes": dict(self.communicators)}
        others = {"others_bytes": dict(self.others)} if self.others else {}
        return {**told, **others, "left_bytes": self.left_bytes}

    @property
    def in_words(self) -> str:
        """One line for people; empty if nothing is reserved."""
        if not self.parts and not self.others:
            return ""
        parts = ", ".join(f"{self._name(part)} {size / GIB:.2f}" for part, size in {**self.others, **self.parts}.items())
        return f"device {self.memory_bytes / GIB:.2f} GiB: {parts}; left {self.left_bytes / GIB:.2f}"

    def _name(self, part: str) -> str:
        return f"NCCL ({', '.join(self.communicators)})" if part == "nccl" and self.communicators else part


def device_reserve(
    cluster: Cluster, groups: Sequence[Communicator], *, expandable_segments: bool, dispatch_bytes: int = 0
) -> DeviceReserve:
    """Return the reserve of a job. `groups`: communicators of the layout. `dispatch_bytes`: DeepEP or HybridEP buffers."""
    memory_bytes, reserve = int(GIB * cluster.memory_gib), cluster.reserve
    if cluster.reserve_gib:
        return DeviceReserve(memory_bytes, {"stated": int(GIB * cluster.reserve_gib)}, {})
    if reserve is None:
        return DeviceReserve(memory_bytes, {}, {})
    buffers = {each.name: each.buffer_bytes(reserve.nccl) for each in groups}
    slack = reserve.allocator
    parts = {
        "context": int(GIB * reserve.context_gib),
        "libraries": int(GIB * reserve.libraries_gib),
        "nccl": sum(buffers.values()),
        **({DISPATCH: dispatch_bytes} if dispatch_bytes else {}),
        SLACK: int(GIB * (slack.expandable_gib if expandable_segments else slack.fixed_gib)),
    }
    return DeviceReserve(memory_bytes, parts, buffers)
