"""Makes a plan: the whole planning pipeline.

job, profile ──partitioned──> layers of each stage ──Stages──> answer of each stage ──write, rehearse──┬──> Plan
                                     ├── again with less memory for offloaded shares whose copies lag ──────────┤
                                     └── with weight gradients in the waits that are left (`filling`) ──────────┘

Among equally fast answers, the one with the fewest bytes leaves memory for weight gradients, the one with the fewest halves that
hide recomputation leaves waits for them (`Stages.leaving_waits`). Both are filled if they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from math import inf
from types import MappingProxyType

from megatron_lynx.config.job import Job
from megatron_lynx.cost.budget import bounded_by_device, layers_budget_bytes
from megatron_lynx.cost.host import HostReport
from megatron_lynx.cost.moments import StageMemory
from megatron_lynx.cost.update import late_reduction_s, update_s
from megatron_lynx.errors import Infeasible, LynxError, Problem
from megatron_lynx.plan.features import may_fall_back
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.planner import left_open
from megatron_lynx.planner.checks import check_plannable, check_profile, why_none_deferred
from megatron_lynx.planner.evaluation import check_budget_kept, memory_of_plan, packed_facts, peak_bytes
from megatron_lynx.planner.filling import Filler, Known, SendingFirst
from megatron_lynx.planner.left_open import Setting
from megatron_lynx.planner.nearest import loads_of_falling_back, loads_that_fit, nearest_change, smallest_budget
from megatron_lynx.planner.partitioning import partitioned
from megatron_lynx.planner.writing import least_memory_of, with_rehearsed, written
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.solver.answer import NOTHING_FITS, StageAnswer
from megatron_lynx.solver.problem import Option
from megatron_lynx.solver.stages import Lag, Stages
from megatron_lynx.units import SECOND_DIGITS

NONE_DEFERRED = "none deferred: no wait that is left, and for which there is memory, makes it faster"

WORTH_READING = 1e-3
"""Relative gain from which a plan with different layers is taken: it is harder to read, and may leave fewer waits to weight
gradients. If none are deferred, any gain is enough; else more memory could make a step longer by less than this."""

PLACED_AGAIN = 3
"""Most rounds of placing weight gradients."""


@dataclass(frozen=True)
class Decision:
    job: Job
    """With the layers of every stage, even if the job leaves them open."""
    stages: tuple[StageAnswer, ...]
    plan: Plan
    simulation: Simulation
    """One step under the plan."""
    host: HostReport
    """Host-bound stages."""
    weight_gradients: str = ""
    """Outcome of deferring weight gradients, in words."""

    @property
    def memory(self) -> tuple[StageMemory, ...]:
        return memory_of_plan(self.job, self.simulation)


def make_plan(job: Job, profile: Profile) -> Plan:
    """Return the plan for a job's policy.

    The budget is `cost.budget`'s: stated by the job, else on a GPU its memory less the cluster's reserve. The fastest plan within
    it is taken; on the testbed without a stated budget, the one with the least memory.

    Raises `ConfigError` if the profile has another shape or no plan can express the job, `Infeasible` if no choice fits (with
    each stage's binding limit, the excess, and the nearest change that fits), and `PlannerFault` if a finished plan exceeds its
    budget, which is an error of ours.
    """
    return decide(job, profile).plan


def decide(job: Job, profile: Profile) -> Decision:
    """Decide as `make_plan` does."""
    return completed(drafted(job, profile), profile)


def drafted(job: Job, profile: Profile) -> Decision:
    """Decide without `completed`: enough for the seconds and bytes of a plan. Raises as `decide` does."""
    try:
        return fastest_decision(job, profile)
    except Infeasible as error:
        tried = left_open.with_least_memory(job)
        changes = [*smallest_budget(tried, profile, least_memory(partitioned(tried, profile)[0], profile), plannable)]
        changes += [*nearest_change(tried, profile, plannable), *left_open.inexact_change(tried, profile, plannable)]
        raise Infeasible(error.headline, [*error.problems, *changes]) from None


def completed(decision: Decision, profile: Profile) -> Decision:
    """Add loads of experts and lengths of packed sequences to the plan."""
    return _with_lengths(_with_loads(decision, profile), profile)


def fastest_decision(job: Job, profile: Profile) -> Decision:
    """Decide without `completed`. Raises as `decide` does, without changes that would fit."""
    check_plannable(job)
    check_profile(job, profile)
    best = _best_way(job, profile, left_open.SETTINGS)
    origin = best.plan.provenance.model_copy(update={"job": job.digest})
    return replace(best, plan=best.plan.model_copy(update={"provenance": origin}))


def _best_way(job: Job, profile: Profile, settings: Sequence[Setting]) -> Decision:
    """Decide for a job that leaves these settings open. Raises the error of the last way that was tried if none fits."""
    if not settings:
        return _made(job, profile)
    best: Decision | None = None
    best_cost = inf
    failed: Infeasible | None = None
    costs: list[float] = []
    for way in settings[0](job, costs):
        if way.is_idle(None if best is None else best.plan):
            continue
        try:
            found = _best_way(way.job, profile, settings[1:])
        except Infeasible as error:
            failed = error
            costs.append(inf)
            continue
        costs.append(_cost(found, profile))
        if best is None or costs[-1] < (1 - way.worth) * best_cost:
            best, best_cost = found, costs[-1]
    if best is None:
        assert failed is not None, "a setting has a way"
        raise failed
    return best


def _cost(decision: Decision, profile: Profile) -> float:
    """Seconds of a step with its update; on the testbed without a budget for devices, bytes."""
    if not bounded_by_device(decision.job):
        return max(memory.total for memory in decision.memory)
    return decision.simulation.step_s + update_s(decision.job, profile)


def keeping_all(job: Job, profile: Profile, *, deferring: bool = True) -> Decision:
    """Decide as if memory were endless: all activations stay on the device, weight gradients are deferred unless excluded.

    Raises `ConfigError` if no plan can express the job.
    """
    decisions = []
    for endless in left_open.endless(job):
        check_plannable(endless)
        for parted in partitioned(endless, profile):
            stages = Stages(parted, profile)
            answers = tuple(stages.keeping_all(stage) for stage in range(parted.parallel.pipeline))
            plan = written(parted, answers, job=job.digest, profile=profile.digest, note=profile.source.caution)
            simulation = rehearse(plan, profile, job=parted)
            kept = _rehearsed(parted, profile, answers, plan, simulation)
            decisions.append(_sending_first(_filled(kept, profile), profile) if deferring else kept)
    return min(decisions, key=_step_s)


def _step_s(decision: Decision) -> float:
    return decision.simulation.step_s


def _made(job: Job, profile: Profile) -> Decision:
    parted = [Stages(parted, profile) for parted in partitioned(job, profile)]
    decision, stages = min(((_fitting(job, stages), stages) for stages in parted), key=lambda pair: pair[0].simulation.step_s)
    filled = _with_weight_gradients(decision, stages, job, profile)
    leaving_waits = stages.leaving_waits
    if job.policy == "planned" and why_none_deferred(decision.job) is None and _differ(leaving_waits, decision):
        other = _with_weight_gradients(
            _fitting(job, leaving_waits), leaving_waits, job, profile, below_s=filled.simulation.step_s
        )
        filled = min(filled, other, key=_step_s)
    filled = _sending_first(filled, profile)
    check_budget_kept(filled.job, filled.simulation)
    return filled


def _differ(stages: Stages, decision: Decision) -> bool:
    """Whether stages have other answers than a decision's; also if they have none."""
    try:
        return _layers_of(_answers(stages)) != _layers_of(decision.stages)
    except Infeasible:
        return True


def _with_weight_gradients(decision: Decision, stages: Stages, job: Job, profile: Profile, *, below_s: float = inf) -> Decision:
    """Return the decision refined and with weight gradients in its waits, whichever of both is worth it. `below_s`: a longer step
    is of no use."""
    refined = _refined(decision, stages, job, profile)
    little = refined.simulation.step_s > (1 - WORTH_READING) * decision.simulation.step_s
    filled = _filled(decision if little and why_none_deferred(job) is None else refined, profile, below_s)
    return replace(refined, weight_gradients=NONE_DEFERRED) if _faster(refined.simulation, filled) else filled


def _with_loads(decision: Decision, profile: Profile) -> Decision:
    """State, for each stage, the load of experts at which the plan still fits, and the load from which its expert halves fall
    back."""
    job, plan = decision.job, decision.plan
    loads = loads_that_fit(job, plan, profile, decision.simulation)
    looked_into = job.model.experts is not None and not job.model.experts.whole

    def stated(entry: Stage) -> Stage:
        load = loads[entry.stage]
        hold, fallen = load if load and looked_into and may_fall_back(plan, entry) else None, 0.0
        if hold:
            bounds = loads_of_falling_back(job, plan, entry, profile, load)
            hold, fallen = bounds if bounds[1] > load else (None, 0.0)
        predicted = entry.predicted.model_copy(update={"moe_load": load, "moe_load_fallen_back": fallen})
        return entry.model_copy(update={"predicted": predicted, "experts_hold": hold})

    return replace(decision, plan=plan.model_copy(update={"stages": tuple(map(stated, plan.stages))}))


def _with_lengths(decision: Decision, profile: Profile) -> Decision:
    packed = packed_facts(decision.plan, decision.job, profile, decision.simulation.step_s)
    if packed is None:
        return decision
    batch = decision.plan.batch.model_copy(update={"packed": packed})
    return replace(decision, plan=decision.plan.model_copy(update={"batch": batch}))


def plannable(job: Job, profile: Profile) -> bool:
    with suppress(LynxError):
        check_plannable(job)
        least = left_open.with_least_memory(job)
        _fitting(least, Stages(partitioned(least, profile)[0], profile))
        return True
    return False


def fitting(stages: Stages) -> Decision:
    """Decide for a known partition, before weight gradients are placed. Raises `Infeasible`."""
    return _fitting(stages.job, stages)


def least_memory(job: Job, profile: Profile) -> tuple[StageMemory, ...]:
    """Bytes of each stage with everything recomputed and offloaded that can be, whether it fits or not."""
    stages = Stages(job, profile)
    return tuple(least_memory_of(job, stages.least(stage)) for stage in range(job.parallel.pipeline))


def _fitting(job: Job, stages: Stages) -> Decision:
    """Decide for a known partition. Copies may lag behind the solver's estimate: stages that then exceed the budget in the
    rehearsal are solved again."""
    parted, profile = stages.job, stages.profile
    lags: dict[int, tuple[Lag, ...]] = {}
    while True:
        answers = _answers(stages, lags)
        plan = written(parted, answers, job=job.digest, profile=profile.digest, note=profile.source.caution)
        simulation = rehearse(plan, profile, job=parted)
        over = {
            answer.stage: (answer.asked, too_much)
            for answer in answers
            if answer.offload_ratio and (too_much := _over_budget_bytes(parted, answer.stage, simulation))
        }
        if not over:
            return _rehearsed(parted, profile, answers, plan, simulation)
        lags |= {stage: (*lags.get(stage, ()), lag) for stage, lag in over.items()}


def _refined(decision: Decision, stages: Stages, job: Job, profile: Profile) -> Decision:
    """Return the decision, or a faster one that keeps everything on stages that wait for recomputation or for their host, because
    not all that the solver takes for hidden is."""
    if job.policy != "planned" or layers_budget_bytes(decision.job, 0) is None:
        return decision
    kept = tuple(_kept_if_late(answer, decision.simulation, stages) for answer in decision.stages)
    return _faster_of(decision, kept, job, profile)


def _kept_if_late(answer: StageAnswer, simulation: Simulation, stages: Stages) -> StageAnswer:
    late_s = simulation.total(answer.stage, "exposed_s") + simulation.total(answer.stage, "host_late_s")
    if not late_s:
        return answer
    kept = stages.keeping_all(answer.stage)
    return kept if stages.fits(kept) else answer


def _faster_of(decision: Decision, answers: tuple[StageAnswer, ...], job: Job, profile: Profile) -> Decision:
    """Return the decision with these answers if that is faster and fits, else the given one."""
    if _layers_of(answers) == _layers_of(decision.stages):
        return decision
    plan = written(decision.job, answers, job=job.digest, profile=profile.digest, note=profile.source.caution)
    simulation = rehearse(plan, profile, job=decision.job)
    if not _faster(simulation, decision) or any(_over_budget_bytes(decision.job, answer.stage, simulation) for answer in answers):
        return decision
    return _rehearsed(decision.job, profile, answers, plan, simulation)


def _rehearsed(
    job: Job, profile: Profile, answers: tuple[StageAnswer, ...], plan: Plan, simulation: Simulation, weight_gradients: str = ""
) -> Decision:
    predicted, host = with_rehearsed(plan, job, profile, answers, simulation), HostReport.of(profile, simulation.host_bound)
    return Decision(job, answers, predicted, simulation, host, weight_gradients)


def _filled(decision: Decision, profile: Profile, below_s: float = inf) -> Decision:
    """Defer weight gradients into waits, with or without those of forwards, whole or in pieces, if that is faster and fits; in
    fewer ways if none is faster than `below_s`."""
    job = decision.job
    if (why := why_none_deferred(job)) is not None:
        return replace(decision, weight_gradients=f"none deferred: {why}")
    known, tried = Known(), list[Plan]()
    best = replace(decision, weight_gradients=NONE_DEFERRED)
    cut = (False, True) if job.overlap.weight_gradient_pieces else (False,)
    forwards = (range(job.parallel.pipeline), ()) if job.chunks > 1 else (range(job.parallel.pipeline),)  # see `planner.filling`
    for stages, pieces in product(forwards, cut):
        fillers = cache(partial(_filler, decision, profile, known, frozenset(stages), pieces))
        found = _first_that_fits(decision, profile, fillers, min(below_s, best.simulation.step_s), tried)
        if found is not None:
            said = f"deferred {'in pieces ' if pieces else ''}into waits: the step is {_gained(found[1], decision)} shorter"
            best = _rehearsed(job, profile, decision.stages, *found, said)
    return best


def _filler(
    decision: Decision, profile: Profile, known: Known, forwards: frozenset[int], pieces: bool, late: frozenset[int]
) -> Filler:
    forwards -= late
    return Filler(decision.plan, decision.job, profile, decision.simulation, known, forwards=forwards, pieces=pieces)


def _sending_first(decision: Decision, profile: Profile) -> Decision:
    job = decision.job
    if why_none_deferred(job) is not None or job.parallel.pipeline == 1:
        return decision
    best, said = decision, "deferred" if decision.weight_gradients == NONE_DEFERRED else decision.weight_gradients
    latest_s = late_reduction_s(job, decision.simulation.idle_at_end_s) + 10.0**-SECOND_DIGITS
    for placing in (SendingFirst(decision.plan, job, profile, decision.simulation, hiding) for hiding in (False, True)):
        found = _first_that_fits(decision, profile, partial(_as_it_is, placing), best.simulation.step_s, [])
        if found is None or late_reduction_s(job, found[1].idle_at_end_s) > latest_s:
            continue
        gained = f"{said}; gradients sent before others: {_gained(found[1], decision)} shorter"
        best = _rehearsed(job, profile, decision.stages, *found, gained)
    return best


def _as_it_is(placing: SendingFirst, late: frozenset[int]) -> SendingFirst:
    return placing


def _first_that_fits(
    decision: Decision,
    profile: Profile,
    fillers: Callable[[frozenset[int]], Filler | SendingFirst],
    below_s: float,
    tried: list[Plan],
) -> tuple[Plan, Simulation] | None:
    """Place weight gradients until the plan fits; None if none is placed, no plan fits, or the step is not below `below_s`.

    Bytes over the budget in the simulation are taken from the budget of weight gradients, and they are placed again: fewer of
    them, so a plan that is too slow is not tried again.

    Args:
        fillers: by the stages for which less memory alone did not help.
        tried: plans with which others began; None is returned if this one begins with one of them.
    """
    budgets = [_budget_bytes(decision, answer) for answer in decision.stages]
    late = frozenset[int]()
    for again in range(PLACED_AGAIN):
        plan = fillers(late).filled(budgets)
        if plan == decision.plan or (not again and plan in tried):
            return None
        tried += [] if again else [plan]
        simulation = rehearse(plan, profile, job=decision.job)
        if not simulation.step_s < below_s - 10.0**-SECOND_DIGITS:
            return None
        over = [_too_much_bytes(decision, answer, simulation) for answer in decision.stages]
        if not any(over):
            return plan, simulation
        budgets = [budget - size for budget, size in zip(budgets, over, strict=True)]
        if again:
            late |= {stage for stage, size in enumerate(over) if size}
    return None


def _gained(simulation: Simulation, decision: Decision) -> str:
    return f"{100 * (1 - simulation.step_s / decision.simulation.step_s):.1f} %"


def _budget_bytes(decision: Decision, answer: StageAnswer) -> int:
    """Budget of a stage's layers; without a budget, their bytes with nothing deferred."""
    budget_bytes = layers_budget_bytes(decision.job, answer.stage)
    return decision.simulation.memory(answer.stage).peak_bytes if budget_bytes is None else budget_bytes


def _too_much_bytes(decision: Decision, answer: StageAnswer, simulation: Simulation) -> int:
    held_bytes = simulation.memory(answer.stage).peak_bytes
    too_much = held_bytes - max(_budget_bytes(decision, answer), decision.simulation.memory(answer.stage).peak_bytes)
    if bounded_by_device(decision.job):
        too_much = max(too_much, peak_bytes(decision.job, simulation, answer.stage) - decision.job.memory_budget_bytes)
    return max(0, too_much)


def _faster(simulation: Simulation, decision: Decision) -> bool:
    """Whether a step is shorter than a decision's, at the written precision."""
    return simulation.step_s < decision.simulation.step_s - 10.0**-SECOND_DIGITS


def _layers_of(answers: Iterable[StageAnswer]) -> list[tuple[Option, ...]]:
    return [chunk.halves for answer in answers for chunk in answer.chunks]


def _answers(stages: Stages, lags: Mapping[int, tuple[Lag, ...]] = MappingProxyType({})) -> tuple[StageAnswer, ...]:
    """Raises `Infeasible` with the problems of all stages."""
    answers: list[StageAnswer] = []
    problems: list[Problem] = []
    for stage in range(stages.job.parallel.pipeline):
        try:
            answers.append(stages.answer(stage, lags.get(stage, ())))
        except Infeasible as error:
            problems += error.problems
    if problems:
        raise Infeasible(NOTHING_FITS, problems)
    return tuple(answers)


def _over_budget_bytes(job: Job, stage: int, simulation: Simulation) -> int:
    """Bytes by which a stage's layers, or its device at some moment, exceed the budget in the rehearsal."""
    budget_bytes = layers_budget_bytes(job, stage)
    if budget_bytes is None:
        return 0
    on_device = peak_bytes(job, simulation, stage) - job.memory_budget_bytes if bounded_by_device(job) else 0
    return max(0, on_device, simulation.memory(stage).peak_bytes - budget_bytes)
