"""Plans with other Megatron flags: exchanges of experts overlapped, their weight gradients delayed, userbuffers.

job ──variants──> jobs that differ in these flags ──fastest_decision──> a plan each ──> the fastest

A plan with userbuffers has a range (`cost.step`). It is taken if even its longest step is the shortest, or if stock's best is
faster than every other plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import inf
from types import MappingProxyType

from megatron_lynx.config.job import Budget, Job
from megatron_lynx.cost.step import StepRange, hiding_all
from megatron_lynx.errors import LynxError
from megatron_lynx.once import once
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner.checks import check_plannable, why_none_deferred
from megatron_lynx.planner.decision import Decision, completed, fastest_decision, keeping_all
from megatron_lynx.planner.evaluation import figures_of
from megatron_lynx.planner.left_open import with_exchanges
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.stock.legality import Facts, offered
from megatron_lynx.stock.setting import StockSetting

EQUAL = 1e-3
"""Relative gain below which no flag is changed."""

WORTH_COPIES = 0.02
"""Relative gain from which copies to the host are recommended."""

OF_DEFERRED = 0.1
"""Relative gain that deferred weight gradients may have."""

OVERLAPPED = (StockSetting(overlap=True), StockSetting(overlap=True, delayed=True))


@dataclass(frozen=True)
class Planned:
    """`job` has its plan's flags, `step` includes the optimizer's update, `memory_bytes` are of the fullest device."""

    job: Job
    profile: Profile = field(repr=False)
    draft: Decision
    step: StepRange
    memory_bytes: int

    @cached_property
    def decision(self) -> Decision:
        return completed(self.draft, self.profile)

    @property
    def recomputes(self) -> bool:
        rules = (rule for entry in self.draft.plan.stages for rule in entry.rules)
        return any(rule.recompute or rule.checkpoint is not None for rule in rules)


def planned(job: Job, profile: Profile) -> Planned:
    """Plan the job with exactly the flags that it states. Raises as `fastest_decision` does."""
    decision = fastest_decision(job, profile)
    return Planned(job, profile, decision, *_figures(decision, profile))


def _figures(decision: Decision, profile: Profile) -> tuple[StepRange, int]:
    figures = figures_of(decision.job, profile, decision.simulation)
    passes = range_of(decision.plan, decision.job, profile, decision.simulation)
    return passes.plus(figures.update_s), figures.memory_bytes


def range_of(plan: Plan, job: Job, profile: Profile, simulation: Simulation) -> StepRange:
    """Forwards and backwards of a simulated step. With userbuffers, from the most that GEMMs can hide to stock's hidden seconds
    without them."""
    best = at_best(plan, job, profile)
    return StepRange.known(simulation.step_s) if best is None else StepRange(best.step_s, simulation.step_s)


def at_best(plan: Plan, job: Job, profile: Profile) -> Simulation | None:
    """The plan's step if userbuffers hide all that their GEMMs can; None without userbuffers."""
    return rehearse(plan, hiding_all(profile), job=job) if job.userbuffers else None


def fastest(plans: Sequence[Planned], rival_s: float | None = None) -> Planned | None:
    """Return the plan with the shortest longest step, which is certain; if stock's best is faster, the one with the shortest
    middle.

    `rival_s`: middle of stock's best. The first of plans within `EQUAL` is taken, as later ones change more flags.
    """
    certain = _first_of_fastest(plans, lambda plan: plan.step.most_s)
    if certain is None or rival_s is None or certain.step.expected_s <= (1 + EQUAL) * rival_s:
        return certain
    return _first_of_fastest(plans, lambda plan: plan.step.expected_s)


def _first_of_fastest(plans: Sequence[Planned], seconds: Callable[[Planned], float]) -> Planned | None:
    least_s = min(map(seconds, plans), default=0.0)
    return next((plan for plan in plans if seconds(plan) <= (1 + EQUAL) * least_s), None)


@dataclass(frozen=True)
class Variants:
    """`release`: of megatron-core; None keeps the flags."""

    job: Job
    profile: Profile = field(repr=False)
    release: str | None

    def fastest(self, rival_s: float | None = None, **changes: object) -> Planned | None:
        """Plan the variants with these fields of the job changed, and choose as `fastest` does; None if no plan fits."""
        return _chosen(self._planned(changes) if changes else self._plans, rival_s)

    def fastest_in(self, budget: Budget) -> Planned | None:
        """The fastest in less memory than the job's. Variants are never faster there than in the job's."""
        return _chosen(self._planned({"budget": budget}, self._plans), None)

    @cached_property
    def _plans(self) -> Mapping[int, Planned]:
        return self._planned({})

    def _planned(
        self, changes: Mapping[str, object], in_more: Mapping[int, Planned] = MappingProxyType({})
    ) -> Mapping[int, Planned]:
        """Plans by the variant's number. Variants with the most changed flags, the fastest if they fit, are planned first; those
        that cannot win are not. `in_more`: their plans in more memory."""
        plans: dict[int, Planned] = {}
        for place, job in reversed([*enumerate(self._jobs)]):
            if plans and self._is_slower(place, in_more.get(place), plans.values()):
                continue
            with suppress(LynxError):
                plans[place] = planned(job.model_copy(update=dict(changes)), self.profile)
        return plans

    def _is_slower(self, place: int, in_more: Planned | None, plans: Collection[Planned]) -> bool:
        if in_more is not None:
            return _is_slower(in_more.step, plans)
        return _is_slower(self._endless(place), plans, OF_DEFERRED if why_none_deferred(self._jobs[place]) is None else 0.0)

    def may_take(self, seconds: float) -> bool:
        """Whether a plan may have a shorter step than this, however much memory there is."""
        ways = product((False, True), range(len(self._jobs)))
        return any(self._endless(place, deferring).expected_s < seconds for deferring, place in ways)

    def fastest_with_copies(self, without: Planned | None, rival_s: float | None = None) -> Planned | None:
        """Return the fastest plan that offloads activations if it gains `WORTH_COPIES` over the fastest `without`, or anything
        over one that stock's best beats, or if none fits `without`. Returns None otherwise."""
        below_s = inf
        if without is not None:
            beaten = rival_s is not None and rival_s < without.step.expected_s
            below_s = (1 - (0.0 if beaten else WORTH_COPIES)) * without.step.expected_s
            if not without.recomputes or not self.may_take(below_s):  # copies gain no more than endless memory
                return None
        offloading = self.fastest(rival_s, offload_ratio="auto")
        return None if offloading is None or offloading.step.expected_s >= below_s else offloading

    @cached_property
    def _jobs(self) -> tuple[Job, ...]:
        return (self.job,) if self.release is None else tuple(variants(self.job, self.release))

    @once
    def _endless(self, place: int, deferring: bool = False) -> StepRange:
        """A variant's step in endless memory, infinite if it has no plan. `deferring`: with deferred weight gradients; then no
        plan is faster by more than what heuristics miss."""
        if deferring and why_none_deferred(self._jobs[place]) is not None:
            return self._endless(place)
        try:
            return _figures(keeping_all(self._jobs[place], self.profile, deferring=deferring), self.profile)[0]
        except LynxError:
            return StepRange.known(inf)


def _is_slower(step: StepRange, plans: Collection[Planned], gain: float = 0.0) -> bool:
    """Whether a step that may still lose `gain` takes longer than the best of these plans', at its longest and in its middle."""
    expected_s, most_s = (min(plan.step.expected_s for plan in plans), min(plan.step.most_s for plan in plans))
    slack = (1 + EQUAL) / (1 - gain)
    return step.expected_s > slack * expected_s and step.most_s > slack * most_s


def _chosen(plans: Mapping[int, Planned], rival_s: float | None) -> Planned | None:
    return fastest([plans[place] for place in sorted(plans)], rival_s)


def variants(job: Job, release: str) -> Iterator[Job]:
    """Yield the job, then it with other flags that Megatron accepts and plans can express."""
    yield job
    for other in _with_other_flags(job, Facts.of(job, release)):
        try:
            check_plannable(other)
        except LynxError:
            continue
        yield other


def _with_other_flags(job: Job, facts: Facts) -> Iterator[Job]:
    """Without captured graphs, which exclude both."""
    job, experts = job.with_captured(()), job.model.experts
    if experts is not None:
        flags = experts.overlapped, experts.overlapped and experts.delayed
        for setting in (StockSetting(), *(() if experts.whole else OVERLAPPED)):
            if (setting.overlap, setting.delayed) != flags and offered(setting, facts):
                yield with_exchanges(job, overlapped=setting.overlap, delayed=setting.delayed)
    if job.userbuffers:
        yield job.with_userbuffers(False)
    elif job.cluster.nvlink is not None and not job.model.moe_overlapped and offered(StockSetting(userbuffers=True), facts):
        yield job.with_userbuffers(True)
