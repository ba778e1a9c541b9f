"""Cost of a job with its given policy and offload ratio, without a search.

job ──a measured profile, or an analytic one if the cluster is described──> costs
 ├──a policy of stock's, or a launch──> stock Megatron's setting ──┐
 └──any other─────────────────────────> a plan ────────────────────┴──simulated──> bytes of every stage, step, tokens per second
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megatron_lynx.config.job import Job
from megatron_lynx.cost.budget import BetweenSteps, between_steps, shortages
from megatron_lynx.cost.host import HostReport
from megatron_lynx.cost.host_optimizer import OnHost, host_shortage
from megatron_lynx.cost.moments import StageMemory
from megatron_lynx.cost.parameters import throughput
from megatron_lynx.cost.step import StepRange
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import ConfigError, Infeasible, Problem
from megatron_lynx.planner import check_profile, decide, leanest
from megatron_lynx.planner.decision import fastest_decision
from megatron_lynx.planner.left_open import least_share_that_fits, with_least_memory
from megatron_lynx.profiler.analytic import analytic_profile, on_cluster
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.stock.price import memory_of_stages, priced
from megatron_lynx.stock.setting import OF_POLICY, StockSetting
from megatron_lynx.units import format_bytes

if TYPE_CHECKING:
    from megatron_lynx.launch_arguments.today import Today


@dataclass(frozen=True)
class Estimate:
    """`shortages` is empty if the job fits; `costs` and those after it are None if the cluster's description has no rates."""

    job: Job
    offload_ratio: float
    stages: tuple[StageMemory, ...]
    shortages: tuple[Problem, ...]
    costs: Profile | None
    step: StepRange | None = None
    """With its update."""
    simulation: Simulation | None = None
    """The longest step, without its update."""
    today: Today | None = None
    """The launch's measures against activation memory, if the job is a launch as written."""

    @property
    def on_host(self) -> OnHost | None:
        return OnHost.of(self.job, None if self.costs is None else self.costs.host_adam, priced=self.costs is not None)

    @property
    def memory_bytes(self) -> int:
        return max(memory.total for memory in self.stages)

    @property
    def between(self) -> BetweenSteps | None:
        return between_steps(self.job, self.stages)

    @property
    def host(self) -> HostReport | None:
        if self.costs is None or self.simulation is None:
            return None
        return HostReport.of(self.costs, self.simulation.host_bound)

    @cached_property
    def step_parts_s(self) -> dict[str, float] | None:
        """Parts of the longest step, by the busiest stage. Messages between stages are in its bubble."""
        if self.step is None or self.simulation is None:
            return None
        simulation, passes_s = self.simulation, self.simulation.step_s
        busiest = max(range(self.job.parallel.pipeline), key=simulation.busy_s)
        return {
            "pipeline_s": simulation.busy_s(busiest),
            "bubble_s": simulation.bubble_s(busiest),
            "copies_s": simulation.exposed_copy_s(busiest),
            "update_s": self.step.most_s - passes_s,
        }

    @property
    def throughput(self) -> dict[str, float | None]:
        return {"tokens_per_s": None, "mfu": None} if self.step is None else throughput(self.job, self.step.most_s)

    @property
    def fits(self) -> bool:
        return not self.shortages

    @property
    def verdict(self) -> str:
        if self.fits:
            return "fits"
        on_device = self.memory_bytes <= self.job.memory_budget_bytes
        host = on_device and any(short.where.startswith("host memory") for short in self.shortages)
        return "host memory is short, the device fits" if host else "does not fit"

    @property
    def of_launch(self) -> str:
        """The launch's measures, step and bytes in words; empty without a launch."""
        if self.today is None:
            return ""
        step = "" if self.step is None else f"{self.step.in_words} a step, "
        held, budget = format_bytes(self.memory_bytes), format_bytes(self.job.memory_budget_bytes)
        return f"today ({self.today.name}): {step}{held} on the fullest device: {self.verdict} in {budget}"

    @property
    def as_json(self) -> dict[str, Any]:
        stages = [
            {"stage": stage, "memory_bytes": memory.named, "moment": memory.moment, "moments_bytes": dict(memory.totals)}
            for stage, memory in enumerate(self.stages)
        ]
        step, today, launch = {"step_s": None} if self.step is None else self.step.as_json, self.today, {}
        if today is not None:
            figures = {**step, "memory_bytes": self.memory_bytes, "setting": today.name, "flags": list(today.flags)}
            launch = {"launch": figures, "verdict": self.of_launch}
        return {
            **({"schedule": self.job.schedule, "gradient_age_updates": 1} if self.job.schedule == "double_buffered" else {}),
            "fits": self.fits,
            "offload_ratio": self.offload_ratio,
            "budget_bytes": self.job.memory_budget_bytes,
            "device": self.job.device_reserve.as_json,
            **({} if self.between is None else {"between_steps": self.between.as_json}),
            "stages": stages,
            **({} if self.on_host is None else {"optimizer_on_host": self.on_host.as_json}),
            **step,
            "step_parts_s": self.step_parts_s,
            **self.throughput,
            "host_time": None if self.host is None else self.host.as_json,
            **launch,
        }


def estimate(job: Job, profile: Profile | None = None, today: Today | None = None) -> Estimate:
    """Estimate the job. With a measured `profile` only the links are the cluster's.

    `today`: of a launch, whose setting of stock Megatron counts in place of the job's policy. Everything that stock cannot do is
    priced as a plan: policies `planned` and `balanced`, offloading by a ratio, and training without flushes. With captured CUDA
    graphs no host time is counted.

    Raises `ConfigError` for a profile of another shape, for a plan without figures, and for a job that no plan can express.
    """
    costs = profile
    if profile is not None:
        check_profile(job, profile)
    if job.cluster.matmul is not None:
        costs = analytic_profile(job) if profile is None else on_cluster(profile, job)
    costs = None if costs is None else costs.issued(graphs=today is not None and today.graphs)
    setting = OF_POLICY.get(job.policy) if today is None else today.setting
    if setting is not None and job.schedule == "flush" and job.offload_ratio in (0, "auto"):
        answer = _of_stock(job, costs, setting)
        if answer.fits or job.offload_ratio == 0:
            return replace(answer, today=today)
    return replace(_planned(job, costs), today=today)


def _of_stock(job: Job, costs: Profile | None, setting: StockSetting) -> Estimate:
    """Estimate of stock Megatron's setting. Without figures its bytes are known, except those of copies in flight."""
    job = least_share_that_fits(job, setting) if job.optimizer.offload == "auto" else job
    if costs is None:
        memory = tuple(memory_of_stages(job, setting))
        return Estimate(job, 0.0, memory, tuple(shortages(job, enumerate(memory))), costs)
    price = priced(job, costs, setting)
    short = (*shortages(job, enumerate(price.stages)), *filter(None, [host_shortage(job, price.host_bytes)]))
    return Estimate(job, 0.0, price.stages, short, costs, price.step.plus(update_s(job, costs)), price.simulation)


def _planned(job: Job, costs: Profile | None) -> Estimate:
    """Estimate of the plan for the job's policy; if none fits, of the one with the least memory."""
    if costs is None:
        needed = "figures of the cluster, or a profile"
        todo = "what a plan decides depends on seconds: megatron-lynx profile"
        raise ConfigError("this job cannot be estimated", [Problem("job: policy", job.policy, needed, todo)])
    short: tuple[Problem, ...] = ()
    try:
        made = decide(job, costs) if job.policy == "planned" else fastest_decision(job, costs)
    except Infeasible as error:
        made, short = leanest(with_least_memory(job), costs), error.problems
    return Estimate(made.job, made.offload_ratio, made.memory, short, costs, made.step, made.simulation)
