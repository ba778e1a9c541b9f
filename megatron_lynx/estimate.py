"""Cost of a job with its given policy and offload ratio, without a search.

job ──smallest_ratio, if auto──> offload ratio ──stage_memory──> bytes of every stage ──> fits, or problems
 ├──if policy is planned─> a rehearsed plan: its bytes and its step
 ├──of a launch─> stock Megatron's setting, simulated: its bytes and its step
 └──a measured profile, or an analytic one if the cluster is described──> costs ──step_seconds──> step, tokens per second, MFU
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_lynx.config.job import Job
from megatron_lynx.cost.budget import BetweenSteps, between_steps
from megatron_lynx.cost.host import HostLoad, HostReport, issued, policy_host_s
from megatron_lynx.cost.host_optimizer import OnHost, host_shortage
from megatron_lynx.cost.moments import StageMemory
from megatron_lynx.cost.parameters import mfu
from megatron_lynx.cost.stage import of_every_stage
from megatron_lynx.cost.stage_memory import memory_of_stages
from megatron_lynx.cost.step import StepRange, StepSeconds, hiding_all, recomputing_stage_s, step_seconds
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import ConfigError, Infeasible, Problem
from megatron_lynx.planner import check_profile, decide, least_memory
from megatron_lynx.planner.evaluation import at_best
from megatron_lynx.planner.left_open import least_share_that_fits, with_share
from megatron_lynx.profiler.analytic import analytic_profile, on_cluster
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.simulator.double_buffered import simulate_without_flushes
from megatron_lynx.simulator.passes import plain_passes
from megatron_lynx.simulator.simulation import Simulation, in_steady_state
from megatron_lynx.solver.offload import shortages, smallest_ratio, too_much
from megatron_lynx.stock.price import priced
from megatron_lynx.stock.setting import OF_POLICY, StockSetting
from megatron_lynx.stock.stage import StockStage
from megatron_lynx.units import format_bytes

if TYPE_CHECKING:
    from megatron_lynx.launch_arguments.today import Today


@dataclass(frozen=True)
class Estimate:
    """`shortages` is empty if the job fits; `costs` and `step` are None if it has no figures: the cluster's description has no
    rates, or there is no plan."""

    job: Job
    offload_ratio: float
    stages: tuple[StageMemory, ...]
    shortages: tuple[Problem, ...]
    costs: Profile | None
    step: StepSeconds | None = None
    host: HostReport | None = None
    step_at_best: StepSeconds | None = None
    """Shortest step, if the step is a range (`cost.step`); `step` is then its longest."""
    today: Today | None = None
    """The launch's measures against activation memory, if the job is a launch as written."""

    @property
    def on_host(self) -> OnHost | None:
        return OnHost.of(self.job, None if self.costs is None else self.costs.host_adam, priced=self.costs is not None)

    @property
    def memory_bytes(self) -> int:
        return max(memory.total for memory in self.stages)

    @property
    def budget_bytes(self) -> int:
        return self.job.memory_budget_bytes

    @property
    def between(self) -> BetweenSteps | None:
        return between_steps(self.job, self.stages)

    @property
    def range(self) -> StepRange | None:
        if self.step is None:
            return None
        return StepRange((self.step_at_best or self.step).total_s, self.step.total_s)

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.step is None else self.job.batch.global_ * self.job.model.seq / self.step.total_s

    @property
    def mfu(self) -> float | None:
        """Utilisation of the peak of the model's dtype, also with FP8; causal attention counts half."""
        if self.tokens_per_s is None or self.job.cluster.matmul is None:
            return None
        return mfu(
            self.job.model, self.tokens_per_s, self.job.gpus * self.job.cluster.matmul.peak_flop_per_s(self.job.model.dtype)
        )

    @property
    def fits(self) -> bool:
        return not self.shortages

    @property
    def verdict(self) -> str:
        if self.memory_bytes > self.budget_bytes:
            return "does not fit"
        return "fits" if self.fits else "host memory is short, the device fits"

    @property
    def of_launch(self) -> str:
        """The launch's measures, step and bytes in words; empty without a launch."""
        if self.today is None:
            return ""
        step = "" if self.range is None else f"{self.range.in_words} a step, "
        held, budget = format_bytes(self.memory_bytes), format_bytes(self.budget_bytes)
        return f"today ({self.today.name}): {step}{held} on the fullest device: {self.verdict} in {budget}"

    @property
    def as_json(self) -> dict[str, Any]:
        stages = [
            {"stage": stage, "memory_bytes": memory.named, "moment": memory.moment, "moments_bytes": dict(memory.totals)}
            for stage, memory in enumerate(self.stages)
        ]
        without_flushes = self.job.schedule == "double_buffered"
        step = {"step_s": None} if self.range is None else self.range.as_json
        launch: dict[str, Any] = {}
        if (today := self.today) is not None:
            setting = {"memory_bytes": self.memory_bytes, "setting": today.name, "flags": list(today.flags)}
            launch = {"launch": {**step, **setting}, "verdict": self.of_launch}
        return {
            **({"schedule": self.job.schedule, "gradient_age_updates": 1} if without_flushes else {}),
            "fits": self.fits,
            "offload_ratio": self.offload_ratio,
            "budget_bytes": self.budget_bytes,
            "device": self.job.device_reserve.as_json,
            **({} if self.between is None else {"between_steps": self.between.as_json}),
            "stages": stages,
            **({} if self.on_host is None else {"optimizer_on_host": self.on_host.as_json}),
            **step,
            "step_parts_s": None if self.step is None else asdict(self.step),
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "host_time": None if self.host is None else self.host.as_json,
            **launch,
        }


def estimate(job: Job, profile: Profile | None = None, today: Today | None = None) -> Estimate:
    """Estimate the job, or with policy `planned` a plan. With a measured `profile` only the links are the cluster's.

    `today`: of a launch, whose setting of stock Megatron counts in place of the job's policy. A setting is simulated; without
    flushes and with an offload ratio the policy counts. With captured CUDA graphs no host time is counted.

    Raises `ConfigError` for a profile of another shape, and for a plan without figures.
    """
    if job.policy == "planned":
        return _planned(job, profile)
    if job.model.experts is not None and job.offload_ratio != 0:
        problem = Problem("job: offload_ratio", str(job.offload_ratio), "0", "policy planned offloads what is not of experts")
        raise ConfigError("what experts keep stays on the device", [problem])
    job = job if job.optimizer.offload != "auto" else least_share_that_fits(job)
    costs = _costs(job, profile)
    costs = None if costs is None else costs.issued(graphs=today is not None and today.graphs)
    setting = OF_POLICY.get(job.policy) if today is None else today.setting
    if setting is not None and job.schedule == "flush" and job.offload_ratio == 0:
        return replace(_of_stock(job, costs, setting), today=today)
    ratio, missing = _ratio(job)
    answer = Estimate(job, ratio, memory_of_stages(job, ratio), missing, costs, today=today)
    if costs is None:
        return answer
    best = _step(job, hiding_all(costs), ratio) if job.userbuffers else None
    return replace(answer, step=_step(job, costs, ratio), host=host_report(job, costs), step_at_best=best)


def _of_stock(job: Job, costs: Profile | None, setting: StockSetting) -> Estimate:
    """Estimate of stock Megatron's setting. Without figures its bytes are known, except those of copies in flight."""
    if costs is None:
        memory = tuple(of_every_stage(job, lambda stage: StockStage(job, setting, stage).parts().fullest))
        return Estimate(job, 0.0, memory, tuple(too_much(job, memory)), costs)
    price = priced(job, costs, setting)
    least, most = (_of_price(job, costs, price.busy_s, step_s) for step_s in (price.step.least_s, price.step.most_s))
    return Estimate(
        job,
        0.0,
        price.stages,
        shortages=(*too_much(job, price.stages), *filter(None, [host_shortage(job, price.host_bytes)])),
        costs=costs,
        step=most,
        host=host_report(job, costs),
        step_at_best=None if price.step.is_known else least,
    )


def _of_price(job: Job, costs: Profile, busy_s: float, step_s: float) -> StepSeconds:
    """The parts of a simulated step; messages between stages are in its bubble, exposed copies in its passes."""
    busy_s = min(busy_s, step_s)
    return StepSeconds(busy_s, step_s - busy_s, 0.0, 0.0, update_s(job, costs))


def host_report(job: Job, profile: Profile) -> HostReport:
    loads = []
    for stage in range(job.parallel.pipeline):
        device = recomputing_stage_s(job, profile, stage)
        host = policy_host_s(job, profile, stage)
        if host.beyond(device.forward_s, device.backward_s):
            loads.append(HostLoad(stage, job.microbatches * host.both_s, job.microbatches * device.both_s))
    return HostReport.of(profile, loads)


def _step(job: Job, costs: Profile, ratio: float) -> StepSeconds:
    """Without flushes there is no closed form for the stages' waits before an update, so these are simulated."""
    step = step_seconds(job, costs, ratio)
    if job.schedule == "flush":
        return step
    stages = range(job.parallel.pipeline)
    seconds = [issued(recomputing_stage_s(job, costs, stage), job, costs, stage) for stage in stages]
    passes = [plain_passes(stage_s.forward_s, stage_s.backward_s) for stage_s in seconds]
    message_s = costs.link_s("p2p", LayerShape.of(job).input_bytes) if len(stages) > 1 else 0.0
    simulated = partial(simulate_without_flushes, chunks=passes, p2p_s=message_s, deferred=job.defer_updates)
    waited_s = in_steady_state(len(stages), job.microbatches, simulated).step_s - step.pipeline_s
    return replace(step, bubble_s=max(0.0, waited_s))


def _costs(job: Job, profile: Profile | None) -> Profile | None:
    if profile is not None:
        check_profile(job, profile)
    if job.cluster.matmul is None:
        return profile
    return analytic_profile(job) if profile is None else on_cluster(profile, job)


def _planned(job: Job, profile: Profile | None) -> Estimate:
    costs = _costs(job, profile)
    if costs is None:
        needed = "figures of the cluster, or a profile"
        todo = "what a plan decides depends on seconds: megatron-lynx profile"
        raise ConfigError("this job cannot be estimated", [Problem("job: policy", "planned", needed, todo)])
    try:
        decision = decide(job, costs)
    except Infeasible as error:
        ratio = 1.0 if job.offload_ratio == "auto" else job.offload_ratio
        least = least_memory(job if job.optimizer.offload != "auto" else with_share(job, 1.0), costs)
        return Estimate(job, ratio, least, error.problems, costs=None)
    job, best = decision.job, at_best(decision.draft, decision.job, costs)
    return Estimate(
        job,
        decision.offload_ratio,
        decision.memory,
        shortages=(),
        costs=costs,
        step=_simulated(job, decision.simulation, costs),
        host=decision.host,
        step_at_best=None if best is None else _simulated(job, best, costs),
    )


def _simulated(job: Job, simulation: Simulation, costs: Profile) -> StepSeconds:
    """The parts of a rehearsed step, by its busiest stage; messages between stages are in its bubble."""
    busiest = max(range(job.parallel.pipeline), key=simulation.busy_s)
    return StepSeconds(
        pipeline_s=simulation.busy_s(busiest),
        bubble_s=simulation.bubble_s(busiest),
        messages_s=0.0,
        copies_s=simulation.exposed_copy_s(busiest),
        update_s=update_s(job, costs),
    )


def _ratio(job: Job) -> tuple[float, tuple[Problem, ...]]:
    if job.offload_ratio != "auto":
        return job.offload_ratio, tuple(shortages(job, job.offload_ratio))
    try:
        return smallest_ratio(job), ()
    except Infeasible as error:
        return 1.0, error.problems
