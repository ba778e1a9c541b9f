"""Plans with other Megatron flags: exchanges of experts overlapped, their weight gradients delayed, userbuffers.

job ──variants──> jobs that differ in these flags ──fastest_decision──> a plan each ──> the fastest

A plan with userbuffers has a range (`cost.step`). It is taken if even its longest step is the shortest, or if stock's best is
faster than every other plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megatron_lynx.config.job import Job
from megatron_lynx.cost.step import StepRange, hiding_all
from megatron_lynx.errors import Infeasible, LynxError
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner.checks import check_plannable
from megatron_lynx.planner.decision import Decision, completed, fastest_decision
from megatron_lynx.planner.evaluation import figures_of
from megatron_lynx.planner.left_open import with_exchanges, without_graphs
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.stock.legality import Facts, offered
from megatron_lynx.stock.setting import StockSetting

EQUAL = 1e-3
"""Relative gain below which no flag is changed."""

OVERLAPPED = (StockSetting(overlap=True), StockSetting(overlap=True, delayed=True))


@dataclass(frozen=True)
class Planned:
    """A job with its plan's flags, the plan, and its whole step including the optimizer's update. `memory_bytes`: of the fullest
    device."""

    job: Job
    profile: Profile = field(repr=False)
    draft: Decision
    step: StepRange
    memory_bytes: int

    @cached_property
    def decision(self) -> Decision:
        """As `decide` makes it."""
        return completed(self.draft, self.profile)

    @property
    def recomputes(self) -> bool:
        rules = (rule for entry in self.draft.plan.stages for rule in entry.rules)
        return any(rule.recompute or rule.checkpoint is not None for rule in rules)


def planned(job: Job, profile: Profile) -> Planned:
    """Plan the job with exactly the flags that it states. Raises as `fastest_decision` does."""
    decision = fastest_decision(job, profile)
    figures = figures_of(decision.job, profile, decision.simulation)
    passes = range_of(decision.plan, decision.job, profile, decision.simulation)
    return Planned(job, profile, decision, passes.plus(figures.update_s), figures.memory_bytes)


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


def planned_variants(job: Job, profile: Profile, release: str | None) -> Iterator[Planned]:
    """Plan all variants; skip those without a plan. `release`: of megatron-core; None keeps the flags."""
    fits_overlapped = True
    for variant in [job] if release is None else variants(job, release):
        model = variant.model
        if model.moe_delayed and not fits_overlapped:  # delayed weight gradients free no memory
            continue
        try:
            yield planned(variant, profile)
        except Infeasible:
            fits_overlapped = fits_overlapped and (model.moe_delayed or not model.moe_overlapped)
        except LynxError:
            continue


def variants(job: Job, release: str) -> Iterator[Job]:
    """Yield the job, then the job with other flags that Megatron accepts and plans can express."""
    yield job
    for other in _with_other_flags(job, Facts.of(job, release)):
        try:
            check_plannable(other)
        except LynxError:
            continue
        yield other


def _with_other_flags(job: Job, facts: Facts) -> Iterator[Job]:
    """Without captured graphs, which exclude both."""
    job, experts = without_graphs(job) if job.model.captured else job, job.model.experts
    if experts is not None:
        flags = experts.overlapped, experts.overlapped and experts.delayed
        for setting in (StockSetting(), *(() if experts.whole else OVERLAPPED)):
            if (setting.overlap, setting.delayed) != flags and offered(setting, facts):
                yield with_exchanges(job, overlapped=setting.overlap, delayed=setting.delayed)
    if job.userbuffers:
        yield job.with_userbuffers(False)
    elif job.cluster.nvlink is not None and not job.model.moe_overlapped and offered(StockSetting(userbuffers=True), facts):
        yield job.with_userbuffers(True)
