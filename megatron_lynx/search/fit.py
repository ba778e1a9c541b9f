"""Decides whether a job fits its devices, and the share of its activations in host memory.

parameters, gradients, optimizer and the rest     too much: no policy and no micro-batch size of this layout fits
+ activations, nothing offloaded                  fits: nothing is offloaded
+ activations, everything offloaded               too much: does not fit
otherwise                                         the smallest share that fits, if the host has memory for it
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.config.job import Job
from megatron_lynx.cost.host_optimizer import least_left_bytes
from megatron_lynx.cost.moments import StageMemory
from megatron_lynx.cost.stage_memory import OffloadingStages, host_bytes
from megatron_lynx.errors import Infeasible
from megatron_lynx.solver.offload import smallest_ratio
from megatron_lynx.units import GIB, format_bytes


@dataclass(frozen=True)
class Excess:
    """Bytes over a limit: of a stage on its device, or of a node's offloaded tensors on its host."""

    job: Job
    stage: int
    memory: StageMemory
    """Memory of the stage with as much offloaded as possible."""
    usage: float
    limit: float
    host: bool = False

    @property
    def bytes(self) -> float:
        return self.usage - self.limit

    @property
    def largest_part(self) -> str:
        """The largest part of the stage's memory."""
        kinds = self.memory.kinds
        name = max(kinds, key=lambda kind: kinds[kind])
        return f"{name} {format_bytes(kinds[name])}"


@dataclass(frozen=True)
class Fits:
    offload_ratio: float
    memory: StageMemory


def fit(job: Job, offload: bool) -> Fits | Excess:
    """Fit a job whose policy is not `planned`. `offload`: whether activations may go to the host."""
    budget, stages = job.memory_budget_bytes, OffloadingStages.of(job)
    stage, kept = fullest(stages, 0.0)
    if job.cluster.node is not None and (left := least_left_bytes(job)) < 0:
        limit = job.cluster.node.host_memory_gib * GIB
        return Excess(job, stage, kept, limit - left, limit, host=True)
    if kept.total <= budget:
        return Fits(0.0, kept)
    if not offload or job.model.experts is not None:  # activations of experts stay, so no single share applies
        return Excess(job, stage, kept, kept.total, budget)
    stage, least = fullest(stages, 1.0)
    if least.total > budget:
        return Excess(job, stage, least, least.total, budget)
    try:
        ratio = smallest_ratio(job)
    except Infeasible:
        return _host_excess(job, stage, least)
    return Fits(ratio, fullest(stages, ratio)[1])


def fullest(stages: OffloadingStages, ratio: float) -> tuple[int, StageMemory]:
    """The fullest stage and its memory; of equals the first."""
    parts = stages.parts(ratio)
    peaks = [part.peak_bytes for part in parts]
    stage = max(range(len(peaks)), key=lambda number: peaks[number])
    return stage, parts[stage].fullest


def _host_excess(job: Job, stage: int, least: StageMemory) -> Excess:
    """The excess of a job that would fit with more host memory."""
    node = job.cluster.node
    assert node is not None, "who offloads says where to"
    roomy = job.cluster.model_copy(update={"node": node.model_copy(update={"host_memory_gib": float("inf")})})
    ratio = smallest_ratio(job.model_copy(update={"cluster": roomy}))
    needed = job.host_sharers * max(host_bytes(job, number, ratio) for number in range(job.parallel.pipeline))
    return Excess(job, stage, least, needed, least_left_bytes(job), host=True)
