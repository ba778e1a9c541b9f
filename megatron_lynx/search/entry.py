"""A candidate during the search: bounds of its step that only grow from look to look, then its simulated step.

    policies without a plan    floor ──> does it fit? closed form of the step ──> simulated
    plans                      floor ──> first and last stage solved ──> all stages solved ──> rehearsed

Solving all stages costs as much as a hundred floors, so it comes late. Of the first and the last stage one has most micro-batches
in flight, the other the head.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from megatron_lynx.config.job import Job
from megatron_lynx.cost.host_optimizer import least_left_bytes
from megatron_lynx.cost.step import step_seconds
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import Infeasible
from megatron_lynx.planner import fitting, least_memory
from megatron_lynx.planner.evaluation import fullest_bytes
from megatron_lynx.planner.writing import written
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.search.candidate import Candidate, Spent
from megatron_lynx.search.fit import Excess, Fits, fit
from megatron_lynx.search.floor import LayerCost
from megatron_lynx.search.simulated import pipeline_s
from megatron_lynx.solver.answer import StageAnswer
from megatron_lynx.solver.stages import Stages
from megatron_lynx.units import GIB

Looks = Generator[Spent, None, Candidate | Excess | None]
"""Yields larger and larger lower bounds; returns None if policy `none` fits and is a candidate, too."""


@dataclass
class Entry:
    """`spent`: the lower bound known so far."""

    job: Job
    spent: Spent
    looks: Looks

    def closer(self) -> Entry | Candidate | Excess | None:
        """Return the result of the next look."""
        try:
            self.spent = next(self.looks)
        except StopIteration as end:
            result: Candidate | Excess | None = end.value
            return result
        return self


def looks_at_stock(job: Job, cost: LayerCost, floor: Spent, *, offload: bool) -> Looks:
    """Look closer at a stock policy. `offload`: whether activations may go to the host."""
    fits = fit(job, offload)
    if isinstance(fits, Excess):
        return fits
    job = job.model_copy(update={"offload_ratio": fits.offload_ratio})
    step = step_seconds(job, cost.profile, fits.offload_ratio)
    messages_s = floor.communication_s + step.total_s - step.copies_s - floor.total_s  # messages that block a stage
    spent = replace(floor, communication_s=messages_s, copies_s=step.copies_s)
    yield spent
    return _candidate(job, cost, spent, pipeline_s(job, cost.profile, fits.offload_ratio), fits.offload_ratio, fits.memory.total)


def looks_at_plan(job: Job, cost: LayerCost, floor: Spent, *, offload: bool, besides_none: bool) -> Looks:
    """Look closer at a plan. `besides_none`: whether policy `none` is a candidate, too."""
    if besides_none and isinstance(fit(job.model_copy(update={"policy": "none"}), offload=False), Fits):
        return None
    job = _to_be_planned(job, offload)
    stages, pipeline = Stages(job, cost.profile), job.parallel.pipeline
    try:
        yield _spent(floor, cost, job, [stages.answer(stage) for stage in {0, pipeline - 1}])
        answers: Sequence[StageAnswer] = [stages.answer(stage) for stage in range(pipeline)]
        spent = _spent(floor, cost, job, answers)
        yield spent
        plan = written(job, answers, job=job.digest, profile=cost.profile.digest)
        simulation = rehearse(plan, cost.profile, job=job)
        if fullest_bytes(job, simulation) > job.memory_budget_bytes:  # copies lag: plan without such shares
            decision = fitting(stages)
            answers, simulation = decision.stages, decision.simulation
    except Infeasible:
        return _excess(job, stages)
    ratio = max(answer.offload_ratio for answer in answers)
    return _candidate(job, cost, spent, simulation.step_s, ratio, fullest_bytes(job, simulation))


def _candidate(job: Job, cost: LayerCost, spent: Spent, pipeline_s: float, ratio: float, memory_bytes: int) -> Candidate:
    """The bound is kept if the simulated step is shorter: only the closed form knows that copies and messages alternate. Without
    flushes, waits of stages for each other are added to the bubble."""
    step_s = max(pipeline_s + update_s(job, cost.profile), spent.total_s)
    parts = spent.up_to(step_s) if job.schedule == "double_buffered" else spent
    return Candidate(job, step_s, parts, ratio, memory_bytes)


def _to_be_planned(job: Job, offload: bool) -> Job:
    """The job with the policy `planned`, and with a budget: by default the planner assumes the device's memory only on a GPU."""
    budget = job.budget
    if budget.memory_gib is None:
        budget = budget.model_copy(update={"memory_gib": job.memory_budget_bytes / GIB})
    return job.model_copy(update={"policy": "planned", "offload_ratio": "auto" if offload else 0.0, "budget": budget})


def _spent(floor: Spent, cost: LayerCost, job: Job, answers: Sequence[StageAnswer]) -> Spent:
    """Add the exposed recomputation and copies of these stages to a floor; the slowest stage counts."""
    slowest_s = max(answer.stock.both_s + answer.longer_s for answer in answers)
    recompute_s = job.microbatches * max(0.0, slowest_s - cost.slowest_s(job))
    return replace(floor, recompute_s=recompute_s, copies_s=max(answer.exposed_copies_s for answer in answers))


def _excess(job: Job, stages: Stages) -> Excess:
    """The excess on the fullest stage with everything recomputed and offloaded that can be, or else on the host."""
    memory = least_memory(stages.job, stages.profile)
    stage = max(range(len(memory)), key=lambda number: memory[number].total)
    if memory[stage].total > job.memory_budget_bytes or job.cluster.node is None:
        return Excess(job, stage, memory[stage], memory[stage].total, job.memory_budget_bytes)
    needed = job.host_sharers * max(stages.least(number).host_bytes for number in range(len(memory)))
    return Excess(job, stage, memory[stage], needed, least_left_bytes(job), host=True)
