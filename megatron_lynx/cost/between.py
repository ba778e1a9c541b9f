"""What training keeps of a device while others have it: between two steps of a loop in which an inference engine takes turns.

    training   parameters, gradients, optimizer, activations  | context, libraries, NCCL, allocator | what others always hold
    between    of the first three what stays on the device    | context, libraries, NCCL            | the rest is theirs

The allocator's slack is not counted between: whoever lets weights leave empties PyTorch's cache, or nothing would be free.
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
"""The kinds of bytes that go to the host with each part of training."""
STATES = (*(kind for kinds in OF_LEAVING.values() for kind in kinds), "buffers", "rest")
"""What is there between two steps, by kind: `StageMemory.before_step`."""


@dataclass(frozen=True)
class BetweenSteps:
    """Of the device that keeps most, in bytes."""

    stays: Mapping[str, int]
    """What training still holds, by kind."""
    left_bytes: int
    """What others may use; below 0 where what stays is too much."""
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
    """What stays of a job whose budget speaks of others; None where it does not. `stages`: of every stage, at any moment."""
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
