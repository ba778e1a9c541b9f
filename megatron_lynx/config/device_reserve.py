"""What a job's plan leaves alone on each device: the parts of its cluster's reserve, in bytes.

cluster.reserve_gib   stated: that much, in one piece         a job's own margin, or a paper's
cluster.reserve       otherwise the parts                     context, libraries, NCCL's buffers by layout, DeepEP's or
                                                              HybridEP's, allocator's slack
neither               nothing                                 the testbed
budget.share, .beside   in addition                           what others have of the same device
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_lynx.config.cluster import Cluster
from megatron_lynx.config.communicators import Communicator
from megatron_lynx.units import GIB

OTHERS = "others' share"
"""What a job's share of the device leaves to others, by name."""
DISPATCH = "dispatch"
"""Buffers of DeepEP's and HybridEP's."""
SLACK = "allocator"
"""The part that PyTorch's allocator reserves and nobody has; plan files know it by this name, too (`plan.facts`)."""


@dataclass(frozen=True)
class DeviceReserve:
    """Of one device, in bytes."""

    memory_bytes: int
    """As PyTorch reports it."""
    parts: Mapping[str, int]
    """In the order in which they come to the device."""
    communicators: Mapping[str, int]
    """NCCL's part, by who talks."""
    others: Mapping[str, int] = field(default_factory=dict)
    """What belongs to others, by whom. In none of the parts."""

    def beside(self, share: float | None, held_gib: Mapping[str, float]) -> DeviceReserve:
        """The same beside others: all but a `share` of the memory is theirs, and what they hold in GiB, by name."""
        rest = {} if share is None else {OTHERS: self.memory_bytes - int(share * self.memory_bytes)}
        return replace(self, others={**rest, **{name: int(GIB * size) for name, size in held_gib.items()}})

    @property
    def left_bytes(self) -> int:
        """What a plan may use; below 0 where the parts alone are too much."""
        return self.memory_bytes - sum(self.parts.values()) - sum(self.others.values())

    @property
    def as_json(self) -> dict[str, Any]:
        told = {"memory_bytes": self.memory_bytes, "reserve_bytes": dict(self.parts), "nccl_bytes": dict(self.communicators)}
        others = {"others_bytes": dict(self.others)} if self.others else {}
        return {**told, **others, "left_bytes": self.left_bytes}

    @property
    def in_words(self) -> str:
        """In a line; empty where nothing is left alone."""
        if not self.parts and not self.others:
            return ""
        parts = ", ".join(f"{self._name(part)} {size / GIB:.2f}" for part, size in {**self.others, **self.parts}.items())
        return f"device {self.memory_bytes / GIB:.2f} GiB: {parts}; left {self.left_bytes / GIB:.2f}"

    def _name(self, part: str) -> str:
        return f"NCCL ({', '.join(self.communicators)})" if part == "nccl" and self.communicators else part


def device_reserve(
    cluster: Cluster, groups: Sequence[Communicator], *, expandable_segments: bool, dispatch_bytes: int = 0
) -> DeviceReserve:
    """`groups`: the communicators that the layout makes. `dispatch_bytes`: buffers in which tokens travel to experts."""
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
