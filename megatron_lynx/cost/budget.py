"""Memory available to the layers of a stage: the device's budget less everything else on the device at that moment.

budget.activation_mib   bounds the layers alone
budget.memory_gib       bounds the device; default: its memory less the cluster's reserve and less what others have
neither, on a GPU       the device's memory; the planner makes the fastest plan that fits
neither, on the testbed no bound, since other processes share the memory; the planner makes the plan with the least memory

If an inference engine shares the device, training keeps less between two steps: states less the parts moved to the host, without
the allocator's slack, because a framework that offloads weights also empties PyTorch's cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from megatron_lynx.config.device_reserve import SLACK
from megatron_lynx.config.job import Job
from megatron_lynx.cost.moments import StageMemory, fullest_half_bytes
from megatron_lynx.cost.stage_memory import parts_beside_layers
from megatron_lynx.errors import Problem
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.units import GIB, MIB, format_bytes


def layers_budget_bytes(job: Job, stage: int) -> int | None:
    """Return the tightest bound on layers in backward, or None if unbounded. Below 0 if everything else alone is too much."""
    bounds = []
    if job.budget.activation_mib is not None:
        bounds.append(int(job.budget.activation_mib * MIB))
    if bounded_by_device(job):
        bounds.append(_on_device_bytes(job, stage))
    return min(bounds, default=None)


def bounded_by_device(job: Job) -> bool:
    return job.budget.of_device or job.cluster.device == "cuda"


def loss_bytes(job: Job, stage: int) -> int:
    """Return how much less the layers may hold while the loss is computed than while they run backward."""
    bound = layers_budget_bytes(job, stage)
    if bound is None or not bounded_by_device(job):
        return 0
    parts = parts_beside_layers(job, stage)
    at_loss = max(parts.at(moment).total for moment in parts.moments if moment in ("forward", "loss", "head_backward"))
    return max(0, bound - (job.memory_budget_bytes - at_loss))


def if_it_runs(held_bytes: int) -> str:
    return f"If it runs, it holds less than counted, or has more: state that by --memory-gib {ceil(held_bytes / GIB)}."


def most_beside_layers(job: Job, stage: int) -> StageMemory:
    """Return the fullest moment without layers, if it alone is too much, else the layers' backward."""
    beside = parts_beside_layers(job, stage)
    without = [beside.at(moment) for moment in beside.moments if moment in ("reduction", "update", "optimizer_made")]
    fullest = max(without, key=lambda memory: memory.total)
    return fullest if fullest.total > job.memory_budget_bytes else beside.at("backward")


def shortages(job: Job, stages: Iterable[tuple[int, StageMemory]]) -> Iterator[Problem]:
    """Yield a problem for each of these stages that exceeds the budget."""
    budget_bytes = job.memory_budget_bytes
    for stage, memory in stages:
        if (missing_bytes := memory.total - budget_bytes) > 0:
            held_in_words = f"{format_bytes(memory.total)}, most of it {memory.largest_part}"
            limit, missing = f"at most {format_bytes(budget_bytes)}", f"{format_bytes(missing_bytes)} too much"
            yield Problem(f"stage {stage}", held_in_words, limit, missing)


def _on_device_bytes(job: Job, stage: int) -> int:
    """Return the device's bound on layers; below 0 if an update alone is too much. The embedding's backward, and updates without
    flushes, may need more than the layers' backward, but by then the micro-batch that has run backward holds less."""
    peak, beside = most_beside_layers(job, stage), parts_beside_layers(job, stage)
    left = job.memory_budget_bytes - peak.total
    if peak.moment != "backward":
        return left
    later = {"embedding_backward"} | (set() if beside.flushed else {"reduction", "first_update", "update"})
    later_bytes = max((beside.at(moment).total for moment in beside.moments if moment in later), default=0)
    shape, least = LayerShape.of(job), min(job.chunk_layers(stage))
    freed = least * shape.input_bytes + fullest_half_bytes(shape) if least else 0
    return left - max(0, later_bytes - peak.total - freed)


OF_LEAVING = {
    "parameters": ("parameters", "fp8_weights", "second_weights"),
    "gradients": ("gradients", "second_gradients"),
    "optimizer": ("optimizer",),
}
STATES = (*(kind for kinds in OF_LEAVING.values() for kind in kinds), "buffers", "rest")


@dataclass(frozen=True)
class BetweenSteps:
    stays: Mapping[str, int]
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
    states = [{kind: memory.kinds[kind] for kind in STATES if memory.kinds[kind] and kind not in gone} for memory in stages]
    fullest = max(states, key=lambda held: sum(held.values()))
    stays = {**fullest, **{part: size for part, size in reserve.parts.items() if part != SLACK and size}}
    return BetweenSteps(stays, reserve.memory_bytes - sum(stays.values()), budget.leaves)
