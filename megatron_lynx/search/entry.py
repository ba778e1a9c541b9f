"""A candidate during the search: the bound known so far, and the next look.

    StockFloored ──> StockFitting ──> Candidate               policies without a plan
    Floored ──> Ends ──> AllStages ──> Candidate              plans
        └──────────┴─────────┴──> Excess: does not fit         └──> None: policy `none` fits and is a candidate, too

Bounds only grow from look to look. Solving all stages costs as much as a hundred floors, so it comes late: first the first and
the last stage are solved (one has most micro-batches in flight, the other the head), then all, then the plan is rehearsed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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
from megatron_lynx.search.simulated import pipeline_s, simulated_spent
from megatron_lynx.solver.answer import StageAnswer
from megatron_lynx.solver.stages import Stages
from megatron_lynx.units import GIB


@dataclass(frozen=True)
class Entry(ABC):
    """`spent`: a lower bound of its parts."""

    job: Job
    cost: LayerCost
    spent: Spent

    @abstractmethod
    def closer(self) -> Entry | Candidate | Excess | None:
        """Return the result of the next look."""


@dataclass(frozen=True)
class StockFloored(Entry):
    """A stock policy's bound without copies. `offload`: whether activations may go to the host."""

    offload: bool

    def closer(self) -> StockFitting | Excess:
        fits = fit(self.job, self.offload)
        if isinstance(fits, Excess):
            return fits
        job = self.job.model_copy(update={"offload_ratio": fits.offload_ratio})
        step = step_seconds(job, self.cost.profile, fits.offload_ratio)
        messages_s = self.spent.communication_s + step.total_s - step.copies_s - self.spent.total_s  # messages that block a stage
        return StockFitting(job, self.cost, replace(self.spent, communication_s=messages_s, copies_s=step.copies_s), fits)


@dataclass(frozen=True)
class StockFitting(Entry):
    """A stock policy that fits, by the closed form."""

    fit: Fits

    def closer(self) -> Candidate:
        """Simulate it. Only the closed form knows that copies and messages alternate, so its step is a lower bound."""
        profile, ratio = self.cost.profile, self.fit.offload_ratio
        step_s = max(pipeline_s(self.job, profile, ratio) + update_s(self.job, profile), self.spent.total_s)
        return Candidate(self.job, step_s, simulated_spent(self.job, self.spent, step_s), ratio, self.fit.memory.total)


@dataclass(frozen=True)
class Floored(Entry):
    """A plan's bound with all recomputation and copies hidden. `besides_none`: whether policy `none` is a candidate, too."""

    offload: bool
    besides_none: bool

    def closer(self) -> Ends | Excess | None:
        """Solve the first and the last stage."""
        kept = self.job.model_copy(update={"policy": "none"})
        if self.besides_none and isinstance(fit(kept, offload=False), Fits):
            return None
        job = _to_be_planned(self.job, self.offload)
        stages = Stages(job, self.cost.profile)
        try:
            ends = [stages.answer(stage) for stage in {0, job.parallel.pipeline - 1}]
        except Infeasible:
            return _excess(job, stages)
        return Ends(job, self.cost, _spent(self.spent, self.cost, job, ends), stages)


@dataclass(frozen=True)
class Ends(Entry):
    """A plan's bound if the first or the last stage is the slowest."""

    stages: Stages

    def closer(self) -> AllStages | Excess:
        """Solve all stages."""
        try:
            answers = [self.stages.answer(stage) for stage in range(self.job.parallel.pipeline)]
        except Infeasible:
            return _excess(self.job, self.stages)
        return AllStages(self.job, self.cost, _spent(self.spent, self.cost, self.job, answers), self.stages, answers)


@dataclass(frozen=True)
class AllStages(Entry):
    """A plan's bound by the solver."""

    stages: Stages
    answers: Sequence[StageAnswer]

    def closer(self) -> Candidate | Excess:
        """Rehearse the plan. If copies lag and it exceeds the budget, plan without such shares."""
        plan = written(self.job, self.answers, job=self.job.digest, profile=self.cost.profile.digest)
        simulation = rehearse(plan, self.cost.profile, job=self.job)
        pipeline_s, memory_bytes = simulation.step_s, fullest_bytes(self.job, simulation)
        answers = self.answers
        if memory_bytes > self.job.memory_budget_bytes:
            try:
                decision = fitting(self.stages)
            except Infeasible:
                return _excess(self.job, self.stages)
            answers, pipeline_s = decision.stages, decision.simulation.step_s
            memory_bytes = max(memory.total for memory in decision.memory)
        step_s, ratio = pipeline_s + update_s(self.job, self.cost.profile), max(answer.offload_ratio for answer in answers)
        step_s = max(step_s, self.spent.total_s)
        return Candidate(self.job, step_s, simulated_spent(self.job, self.spent, step_s), ratio, memory_bytes)


def _to_be_planned(job: Job, offload: bool) -> Job:
    """The job with the policy `planned`, and with a budget: by default the planner assumes the device's memory only on a GPU."""
    budget = job.budget
    if budget.memory_gib is None:
        budget = budget.model_copy(update={"memory_gib": job.memory_budget_bytes / GIB})
    return job.model_copy(update={"policy": "planned", "offload_ratio": "auto" if offload else 0.0, "budget": budget})


def _spent(floor: Spent, cost: LayerCost, job: Job, answers: Sequence[StageAnswer]) -> Spent:
    """Add the exposed recomputation and copies of these stages to a floor; the slowest stage counts."""
    slowest_s = max(answer.stock.both_s + answer.longer_s for answer in answers)
    replay_s = job.microbatches * max(0.0, slowest_s - cost.slowest_s(job))
    return replace(floor, replay_s=replay_s, copies_s=max(answer.exposed_copies_s for answer in answers))


def _excess(job: Job, stages: Stages) -> Excess:
    """The excess on the fullest stage with everything recomputed and offloaded that can be, or else on the host."""
    memory = least_memory(stages.job, stages.profile)
    stage = max(range(len(memory)), key=lambda number: memory[number].total)
    if memory[stage].total > job.memory_budget_bytes or job.cluster.node is None:
        return Excess(job, stage, memory[stage], memory[stage].total, job.memory_budget_bytes)
    needed = job.host_sharers * max(stages.least(each).host_bytes for each in range(len(memory)))
    return Excess(job, stage, memory[stage], needed, least_left_bytes(job), host=True)
