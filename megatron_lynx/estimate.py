"""What a job costs as it is stated: its policy and its offload ratio, nothing searched.

job ──smallest_ratio, where auto──> offload ratio ──stage_memory──> every stage's bytes ──> fits, or what is too much
 └──a measured profile, or an analytic one where the cluster is described──> costs ──step_seconds──> step, tokens per second, MFU
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.cost.flops import mfu
from megatron_lynx.cost.stage_memory import StageMemory, memory_of_stages
from megatron_lynx.cost.step import StepSeconds, step_seconds
from megatron_lynx.errors import ConfigError, Infeasible, Problem
from megatron_lynx.planner import check_profile
from megatron_lynx.profiler.analytic import analytic_profile, on_cluster
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.solver.offload import shortages, smallest_ratio


@dataclass(frozen=True)
class Estimate:
    """`shortages` is empty where the job fits; `step` is None where the cluster's description has no rates."""

    job: Job

    offload_ratio: float
    stages: tuple[StageMemory, ...]
    budget_bytes: int
    shortages: tuple[Problem, ...]
    step: StepSeconds | None

    @property
    def tokens_per_s(self) -> float | None:
        """Of all devices together."""
        return None if self.step is None else self.job.batch.global_ * self.job.model.seq / self.step.total_s

    @property
    def mfu(self) -> float | None:
        """In [0, 1], causal attention counted half."""
        if self.tokens_per_s is None or self.job.cluster.matmul is None:
            return None
        return mfu(
            self.job.model, self.tokens_per_s, self.job.gpus * self.job.cluster.matmul.peak_flop_per_s(self.job.model.dtype)
        )

    @property
    def fits(self) -> bool:
        return not self.shortages

    @property
    def as_json(self) -> dict[str, Any]:
        stages = [{"stage": stage, "memory_bytes": memory.named} for stage, memory in enumerate(self.stages)]
        return {
            "fits": self.fits,
            "offload_ratio": self.offload_ratio,
            "budget_bytes": self.budget_bytes,
            "stages": stages,
            "step_s": None if self.step is None else self.step.total_s,
            "step_parts_s": None if self.step is None else asdict(self.step),
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
        }


def estimate(job: Job, profile: Profile | None = None) -> Estimate:
    """With a measured `profile` of the job's layers, the cluster's description gives the links alone.

    Raises `ConfigError` for a policy that only a plan gives a meaning, and for a profile of another shape. A job that does not
    fit is an answer, not an error.
    """
    if job.policy == "planned":
        needed = "none, selective, balanced or full"
        todo = "what a plan decides is predicted by `megatron-lynx plan`"
        raise ConfigError("this job cannot be estimated", [Problem("job: policy", "planned", needed, todo)])
    ratio, missing = _ratio(job)
    return Estimate(
        job=job,
        offload_ratio=ratio,
        stages=memory_of_stages(job, ratio),
        budget_bytes=job.memory_budget_bytes,
        shortages=missing,
        step=_step(job, profile, ratio),
    )


def _step(job: Job, profile: Profile | None, ratio: float) -> StepSeconds | None:
    if profile is not None:
        check_profile(job, profile)
    if job.cluster.matmul is None:
        return None if profile is None else step_seconds(job, profile, ratio)
    return step_seconds(job, analytic_profile(job) if profile is None else on_cluster(profile, job), ratio)


def _ratio(job: Job) -> tuple[float, tuple[Problem, ...]]:
    """The share to be offloaded, and what then is too much."""
    if job.offload_ratio != "auto":
        return job.offload_ratio, tuple(shortages(job, job.offload_ratio))
    try:
        return smallest_ratio(job), ()
    except Infeasible as error:
        return 1.0, error.problems
