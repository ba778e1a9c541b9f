"""What a job costs as it is stated: its policy and its offload ratio, nothing searched.

job ──smallest_ratio, where auto──> offload ratio ──stage_memory──> every stage's bytes ──> fits, or what is too much
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.cost.stage_memory import StageMemory, offloads, stage_memory
from megatron_lynx.errors import ConfigError, Infeasible, Problem
from megatron_lynx.solver.offload import shortages, smallest_ratio


@dataclass(frozen=True)
class Estimate:
    """`shortages` is empty where the job fits."""

    offload_ratio: float
    stages: tuple[StageMemory, ...]
    budget_bytes: int
    shortages: tuple[Problem, ...]

    @property
    def fits(self) -> bool:
        return not self.shortages

    @property
    def as_json(self) -> dict[str, Any]:
        stages = [{"stage": stage, "memory_bytes": memory.named} for stage, memory in enumerate(self.stages)]
        return {"fits": self.fits, "offload_ratio": self.offload_ratio, "budget_bytes": self.budget_bytes, "stages": stages}


def estimate(job: Job) -> Estimate:
    """Raises `ConfigError` for a policy that only a plan gives a meaning. A job that does not fit is an answer, not an error."""
    if job.policy == "planned":
        needed = "none, selective, balanced or full"
        todo = "what a plan decides is predicted by `megatron-lynx plan`"
        raise ConfigError("this job cannot be estimated", [Problem("job: policy", "planned", needed, todo)])
    ratio, missing = _ratio(job)
    stages = range(job.parallel.pipeline)
    return Estimate(
        offload_ratio=ratio,
        stages=tuple(stage_memory(job, stage, ratio if offloads(job, stage) else 0.0) for stage in stages),
        budget_bytes=job.memory_budget_bytes,
        shortages=tuple(missing),
    )


def _ratio(job: Job) -> tuple[float, tuple[Problem, ...]]:
    """The share to be offloaded, and what then is too much."""
    if job.offload_ratio != "auto":
        return job.offload_ratio, tuple(shortages(job, job.offload_ratio))
    try:
        return smallest_ratio(job), ()
    except Infeasible as error:
        return 1.0, error.problems
