"""Device memory that training keeps between two steps, for loops in which an inference engine shares the device.

    training   parameters, gradients, optimizer, activations  | context, libraries, NCCL, allocator | reserved for others
    between    the first three, less the parts moved to host  | context, libraries, NCCL            | free for others

Between steps the allocator's slack is not counted: a framework that offloads weights also empties PyTorch's cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lynx.config.device_reserve import SLACK
from megatron_lynx.config.job import Job
from megatron_lynx.cost.moments import StageMemory
from megatron_lynx.units import format_bytes

OF_LEAVING = {
    "parameters": ("parameters", "fp8_weights", "second_weights"),
    "gradients": ("gradients", "second_gradients"),
    "optimizer": ("optimizer",),
}
"""The kinds of bytes that leave with each part of training."""
STATES = (*(kind for kinds in OF_LEAVING.values() for kind in kinds), "buffers", "rest")
"""The kinds that remain between two steps (`StageMemory.before_step`)."""


@dataclass(frozen=True)
class BetweenSteps:
    """Bytes on the fullest device between two steps."""

    stays: Mapping[str, int]
    """Bytes that training keeps, by kind."""
    left_bytes: int
    """Bytes free for others; below 0 if training keeps more than the device has."""
    leaves: Sequence[str]

    @property
    def in_words(self) -> str:
        gone = f"with {', '.join(self.leaves)} on the host" if self.leaves else "with nothing moved to the host"
        parts = ", ".join(f"{kind.replace('_', ' ')} {format_bytes(size)}" for kind, size in self.stays.items())
        kept = format_bytes(sum(self.stays.values()))
        left = f"{format_bytes(self.left_bytes)} left to others" if self.left_bytes >= 0 else "nothing left to others"
        return f"between steps, {gone}: training keeps {kept} ({parts}); {left}"

    @property
    def as_json(self) -> dict[str, Any]:
        return {"leaves": list(self.leaves), "stays_bytes": dict(self.stays), "left_bytes": self.left_bytes}


def between_steps(job: Job, stages: Sequence[StageMemory]) -> BetweenSteps | None:
    """Return the memory between steps; None if the job's budget does not share the device. `stages`: all stages."""
    budget, reserve = job.budget, job.device_reserve
    if budget.share is None and not budget.beside and not budget.leaves:
        return None
    gone = {kind for part in budget.leaves for kind in OF_LEAVING[part]}
    fullest = max((_held(memory, gone) for memory in stages), key=lambda held: sum(held.values()))
    stays = {**fullest, **{part: size for part, size in reserve.parts.items() if part != SLACK and size}}
    return BetweenSteps(stays, reserve.memory_bytes - sum(stays.values()), budget.leaves)


def _held(memory: StageMemory, gone: set[str]) -> dict[str, int]:
    kinds = memory.kinds
    return {kind: kinds[kind] for kind in STATES if kinds[kind] and kind not in gone}
