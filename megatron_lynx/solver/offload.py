"""Finds how much must be offloaded: the smallest share of every chunk's bytes with which all stages fit.

    held by a stage, r offloaded     fixed + (N - (N - 4)r)C  <=  budget        falls as r grows: the first that fits is found

One share for all stages, as Yuan et al. have it; stages with too few chunks in flight do not offload. Zero where the run fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from megatron_lynx.config.job import Job
from megatron_lynx.cost.host_optimizer import host_shortage
from megatron_lynx.cost.moments import StageMemory
from megatron_lynx.cost.stage_memory import OffloadingStages, host_bytes, memory_of_stages
from megatron_lynx.errors import Infeasible, Problem
from megatron_lynx.units import format_bytes

STEPS = 1000
"""A share is given in thousandths, rounded up."""


def smallest_ratio(job: Job) -> float:
    """Raises `Infeasible`, saying for every stage by how much, where not even offloading everything fits."""
    stages, budget = OffloadingStages.of(job), job.memory_budget_bytes

    def fits(steps: int) -> bool:
        return all(parts.peak_bytes <= budget for parts in stages.parts(steps / STEPS))

    if fits(0) and _host_shortage(job, 0.0) is None:
        return 0.0
    if problems := [*too_much(job, [parts.fullest for parts in stages.parts(1.0)]), *_beside_optimizer(job, 1.0)]:
        raise Infeasible("no share of offloaded activations makes this job fit", problems)
    ratio = bisect_left(range(STEPS), True, key=fits) / STEPS
    if problem := _host_shortage(job, ratio):
        raise Infeasible("the activations that must be offloaded do not fit into host memory", [problem])
    return ratio


def shortages(job: Job, ratio: float) -> list[Problem]:
    """What exceeds the budget when this share is offloaded: empty if every stage fits."""
    return [*too_much(job, memory_of_stages(job, ratio)), *_beside_optimizer(job, ratio)]


def too_much(job: Job, stages: Sequence[StageMemory]) -> list[Problem]:
    """The stages that hold more than the budget."""
    budget, problems = job.memory_budget_bytes, []
    for stage, memory in enumerate(stages):
        if memory.total > budget:
            found = f"{format_bytes(memory.total)}, most of it {_largest(memory)}"
            short = f"{format_bytes(memory.total - budget)} too much"
            problems.append(Problem(f"stage {stage}", found, f"at most {format_bytes(budget)}", short))
    return problems


def _largest(memory: StageMemory) -> str:
    kinds = memory.kinds
    name = max(kinds, key=lambda kind: kinds[kind])
    return f"{name} ({format_bytes(kinds[name])})"


def _beside_optimizer(job: Job, ratio: float) -> list[Problem]:
    """What host memory lacks where a part of the optimizer is there, too."""
    problem = _host_shortage(job, ratio) if job.optimizer.offloaded else None
    return [] if problem is None else [problem]


def _host_shortage(job: Job, ratio: float) -> Problem | None:
    """What host memory lacks where this share is offloaded."""
    return host_shortage(job, max(host_bytes(job, stage, ratio) for stage in range(job.parallel.pipeline)))
