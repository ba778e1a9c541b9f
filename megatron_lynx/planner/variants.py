"""Plans with other Megatron flags: exchanges of experts overlapped, their weight gradients delayed, userbuffers.

job ──variants──> jobs that differ in these flags ──fastest_decision──> a plan each ──> the fastest

A plan with userbuffers has a range (`cost.step`). It is taken if even its longest step is the shortest, or if stock's best is
faster than every other plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import inf

from megatron_lynx.config.job import Job
from megatron_lynx.cost.step import StepRange
from megatron_lynx.errors import LynxError
from megatron_lynx.once import once
from megatron_lynx.planner.checks import is_plannable
from megatron_lynx.planner.decision import Decision, fastest_decision
from megatron_lynx.planner.left_open import endless, with_exchanges
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.stock.legality import Facts, offered
from megatron_lynx.stock.setting import StockSetting
from megatron_lynx.units import SECOND_DIGITS

WORTH_COPIES = 0.02
"""Relative gain from which copies to the host are recommended."""

OVERLAPPED = (StockSetting(overlap=True), StockSetting(overlap=True, delayed=True))


def fastest(plans: Sequence[Decision], rival_s: float | None = None) -> Decision | None:
    """Return the plan with the shortest longest step, which is certain; if stock's best is faster, the one with the shortest
    middle.

    `rival_s`: middle of stock's best. The first of equal plans is taken, as later ones change more flags.
    """
    certain = min(plans, key=lambda plan: round(plan.step.most_s, SECOND_DIGITS), default=None)
    if certain is None or rival_s is None or certain.step.expected_s <= rival_s:
        return certain
    return min(plans, key=lambda plan: round(plan.step.expected_s, SECOND_DIGITS))


@dataclass(frozen=True)
class Variants:
    """`release`: of megatron-core; None keeps the flags."""

    job: Job
    profile: Profile = field(repr=False)
    release: str | None

    def fastest(self, rival_s: float | None = None, **changes: object) -> Decision | None:
        """Plan the variants with these fields of the job changed, and choose as `fastest` does; None if no plan fits.

        Variants with the most changed flags, the fastest if they fit, are planned first; those that are slower even in endless
        memory are not.
        """
        plans: list[Decision] = []
        for job in reversed(self._jobs):
            if not plans or _may_win(self._endless(job), plans):
                with suppress(LynxError):
                    plans.insert(0, fastest_decision(job.model_copy(update=changes), self.profile))
        return fastest(plans, rival_s)

    def may_take(self, seconds: float) -> bool:
        """Whether a plan may have a shorter step than this, however much memory there is."""
        return any(self._endless(job).expected_s < seconds for job in self._jobs)

    def fastest_with_copies(self, without: Decision | None, rival_s: float | None = None) -> Decision | None:
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
    def _endless(self, job: Job) -> StepRange:
        """A variant's step in endless memory, infinite if it has no plan. In less, only heuristics may find a faster one."""
        try:
            return fastest_decision(endless(job), self.profile).step
        except LynxError:
            return StepRange.known(inf)


def _may_win(step: StepRange, plans: Sequence[Decision]) -> bool:
    """Whether a step is as short as the best of these plans', at its longest or in its middle."""
    shortest_s = min(plan.step.expected_s for plan in plans), min(plan.step.most_s for plan in plans)
    return step.expected_s <= shortest_s[0] or step.most_s <= shortest_s[1]


def variants(job: Job, release: str) -> Iterator[Job]:
    """Yield the job, then it with other flags that Megatron accepts and plans can express."""
    return chain([job], filter(is_plannable, _with_other_flags(job, Facts.of(job, release))))


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
