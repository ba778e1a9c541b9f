"""Decides a plan: the whole planning pipeline.

job, profile ──partitioned──> layers of each stage ──Stages──> answer of each stage ──write, rehearse──┬──> Decision
                                     ├── again with less memory for offloaded shares whose copies lag ──────────┤
                                     └── with weight gradients in the waits that are left (`filling`) ──────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf

from megatron_lynx.config.job import Job
from megatron_lynx.cost.budget import bounded_by_device, layers_budget_bytes
from megatron_lynx.cost.host import HostReport
from megatron_lynx.cost.moments import StageMemory
from megatron_lynx.cost.section import Prices
from megatron_lynx.cost.step import StepRange
from megatron_lynx.cost.update import late_reduction_s, update_s
from megatron_lynx.errors import Infeasible, LynxError, Problem
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner import left_open
from megatron_lynx.planner.checks import check_plannable, check_profile, why_none_deferred
from megatron_lynx.planner.evaluation import (
    PlanFigures,
    check_budget_kept,
    excesses,
    figures_of,
    held_by_moment,
    range_of,
    with_lengths,
)
from megatron_lynx.planner.filling import Filler
from megatron_lynx.planner.loads import with_loads
from megatron_lynx.planner.partitioning import partitioned
from megatron_lynx.planner.writing import with_rehearsed, written
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.solver.answer import NOTHING_FITS, StageAnswer
from megatron_lynx.solver.stages import Lag, Stages
from megatron_lynx.units import SECOND_DIGITS

SHORTER_S = 10.0**-SECOND_DIGITS
"""Least difference of two steps that a plan file can state."""

FILLINGS = ((True, False), (True, True), (False, False))
"""Whether waits of forwards are filled, and whether weight gradients are cut: see `planner.filling`."""

PLACED_AGAIN = 3
"""Most rounds of placing weight gradients. With one, 100 rows take 0.06 % longer in the mean, a launch 4.8 %."""


@dataclass(frozen=True)
class Decision:
    asked: Job
    job: Job
    """With the layers of every stage, and everything else that the asked one leaves open."""
    prices: Prices
    stages: tuple[StageAnswer, ...]
    draft: Plan
    """Without its origin and predictions."""
    simulation: Simulation
    """One step under the plan."""
    weight_gradients: str = ""
    """Outcome of deferring weight gradients, in words."""

    @classmethod
    def of(cls, stages: Stages, answers: tuple[StageAnswer, ...]) -> Decision:
        job, prices, draft = stages.job, stages.prices, written(stages.job, answers)
        return cls(job, job, prices, answers, draft, rehearse(draft, prices.profile, job=job, prices=prices))

    @property
    def profile(self) -> Profile:
        return self.prices.profile

    @cached_property
    def plan(self) -> Plan:
        """The draft with its origin, predictions of the rehearsal, loads of experts, and lengths of packed sequences."""
        origin = {"job": self.asked.digest, "profile": self.profile.digest, "note": self.profile.source.caution}
        plan = self.draft.model_copy(update={"provenance": self.draft.provenance.model_copy(update=origin)})
        plan = with_rehearsed(plan, self.job, self.profile, self.simulation)
        plan = with_loads(plan, self.job, self.profile, self.simulation)
        return with_lengths(plan, self.job, self.profile, self.simulation.step_s)

    @property
    def memory(self) -> tuple[StageMemory, ...]:
        """Bytes of each stage's device at its fullest moment, by kind."""
        moments = (held_by_moment(self.job, self.simulation, stage) for stage in range(self.job.parallel.pipeline))
        totals = (({moment: memory.total for moment, memory in held.items()}, held) for held in moments)
        return tuple(replace(held[max(sizes, key=sizes.__getitem__)], totals=sizes) for sizes, held in totals)

    @cached_property
    def figures(self) -> PlanFigures:
        return figures_of(self.job, self.profile, self.simulation)

    @cached_property
    def step(self) -> StepRange:
        """A whole step, with its update."""
        return range_of(self.draft, self.job, self.profile, self.simulation).plus(self.figures.update_s)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the fullest device."""
        return self.figures.memory_bytes

    @property
    def host(self) -> HostReport:
        """Host-bound stages."""
        return HostReport.of(self.profile, self.simulation.host_bound)

    @property
    def offload_ratio(self) -> float:
        """The largest of all stages."""
        return max(answer.asked.ratio for answer in self.stages)

    @property
    def recomputes(self) -> bool:
        rules = (rule for entry in self.draft.stages for rule in entry.rules)
        return any(rule.recompute or rule.checkpoint is not None for rule in rules)

    @property
    def cost(self) -> float:
        """Seconds of a step with its update; on the testbed without a budget for devices, bytes."""
        return self.figures.step_s if bounded_by_device(self.job) else self.memory_bytes

    @property
    def filler(self) -> Filler:
        return Filler(self.draft, self.job, self.prices, self.simulation)

    def excess_bytes(self, stage: int, layers_bytes: float = inf) -> int:
        """Bytes by which a stage exceeds the budget, or its layers these bytes."""
        over = [size for size, _ in excesses(self.job, self.simulation, stage)]
        return int(max([0, *over, self.simulation.memory(stage).peak_bytes - layers_bytes]))

    def gained(self, other: Decision) -> str:
        """How much shorter its step is, in words."""
        return f"{100 * (1 - self.simulation.step_s / other.simulation.step_s):.1f} % shorter"


def fastest_decision(job: Job, profile: Profile, below_s: float = inf) -> Decision:
    """Return the fastest plan of all ways to decide the job's open settings. `below_s`: with this step or a longer one, less of
    it is worked out. Raises as `planner.decide` does, without changes that would fit."""
    check_plannable(job)
    check_profile(job, profile)
    best: Decision | None = None
    failed: Infeasible | None = None
    for way in left_open.ways(job):
        if (gain := left_open.worth(job, way, None if best is None else best.draft)) == inf:
            continue
        try:
            fits = min(map(fitting, partitioned(way, profile)), key=lambda fits: fits.simulation.step_s)
            found = finished(fits, below_s)
        except Infeasible as error:
            failed = error
            continue
        best = found if best is None or found.cost < (1 - gain) * best.cost else best
        below_s = min(below_s, best.cost) if bounded_by_device(job) else inf
    if best is None:
        assert failed is not None, "there is a way"
        raise failed
    return replace(best, asked=job)


def finished(decision: Decision, below_s: float = inf) -> Decision:
    """Place weight gradients of a decision as `fitting` returns it, if its step gets shorter than `below_s`. Check its budget."""
    decision = _deferring(decision, below_s - update_s(decision.job, decision.profile))
    check_budget_kept(decision.job, decision.simulation)
    return decision


def plannable(job: Job, profile: Profile) -> bool:
    with suppress(LynxError):
        check_plannable(job)
        fitting(partitioned(left_open.with_least_memory(job), profile)[0])
        return True
    return False


def leanest(job: Job, profile: Profile) -> Decision:
    """Decide with everything recomputed and offloaded that can be, whether it fits or not."""
    stages = Stages(job, profile)
    return Decision.of(stages, tuple(map(stages.least, range(job.parallel.pipeline))))


def fitting(stages: Stages) -> Decision:
    """Decide for a known partition, before weight gradients are placed. Copies may lag behind the solver's estimate, and whole
    micro-batches hold more in their backward: stages that then exceed the budget in the rehearsal are solved again. Raises
    `Infeasible` with the problems of all stages."""
    lags: dict[int, tuple[Lag, ...]] = dict.fromkeys(range(stages.job.parallel.pipeline), ())
    while True:
        answers, problems = list[StageAnswer](), list[Problem]()
        for stage, of_stage in lags.items():
            try:
                answers.append(stages.answer(stage, of_stage))
            except Infeasible as error:
                problems += error.problems
        if problems:
            raise Infeasible(NOTHING_FITS, problems)
        found = Decision.of(stages, tuple(answers))
        copying = (answer for answer in found.stages if answer.asked.ratio or answer.whole)
        over = {answer.stage: (answer.asked, excess) for answer in copying if (excess := found.excess_bytes(answer.stage))}
        if not over:
            return found
        lags |= {stage: (*lags[stage], lag) for stage, lag in over.items()}


def _deferring(decision: Decision, below_s: float) -> Decision:
    """Defer weight gradients into waits, whole or in pieces, or without waits of forwards, if that is faster and fits. Then send
    gradients before weight gradients that are left, unless the reduction would end later. `below_s`: of the simulation."""
    job, filler, best = decision.job, decision.filler, decision
    said = "none deferred: no wait that is left, and for which there is memory, makes it faster"
    if (why := why_none_deferred(job)) is not None:
        return replace(decision, weight_gradients=f"none deferred: {why}")
    for forwards, pieces in FILLINGS:
        if (pieces and not job.overlap.weight_gradient_pieces) or (not forwards and job.chunks == 1):
            continue
        place = partial(filler.filled, forwards=forwards, pieces=pieces)
        if (found := _placed(decision, place, best, below_s)) is not None:
            best, said = found, f"deferred {'in pieces ' if pieces else ''}into waits: the step is {found.gained(decision)}"
    found = _placed(best, partial(best.filler.filled, sending=True), best, below_s)
    latest_s, late_s = (late_reduction_s(job, each.simulation.idle_at_end_s) for each in (best, found or best))
    if found is not None and late_s <= latest_s + SHORTER_S:
        before = "deferred" if best is decision else said
        best, said = found, f"{before}; gradients sent before others: {found.gained(best)}"
    return replace(best, weight_gradients=said)


def _placed(decision: Decision, place: Callable[[Sequence[int]], Plan], best: Decision, below_s: float) -> Decision | None:
    """Place weight gradients until the plan fits; None if none is placed, no plan fits, or the step is not below the best one's
    and `below_s`.

    Bytes over the budget in the simulation are taken from the budget of weight gradients, and they are placed again: fewer of
    them, so a plan that is too slow is not tried again. `place`: by the bytes of each stage's layers, the plan.
    """
    job, prices = decision.job, decision.prices
    held_bytes = [decision.simulation.memory(stage).peak_bytes for stage in range(job.parallel.pipeline)]
    bounds_bytes = [layers_budget_bytes(job, stage) for stage in range(job.parallel.pipeline)]
    budgets = [held if bound is None else bound for held, bound in zip(held_bytes, bounds_bytes, strict=True)]
    for _ in range(PLACED_AGAIN):
        if (plan := place(budgets)) in (decision.draft, best.draft):
            return None
        found = replace(decision, draft=plan, simulation=rehearse(plan, prices.profile, job=job, prices=prices))
        if found.simulation.step_s >= min(best.simulation.step_s - SHORTER_S, below_s):
            return None
        over = [found.excess_bytes(stage, held if bounds_bytes[stage] is None else inf) for stage, held in enumerate(held_bytes)]
        if not any(over):
            return found
        budgets = [budget - size for budget, size in zip(budgets, over, strict=True)]
    return None
