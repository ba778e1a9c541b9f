"""Plans with other Megatron flags: exchanges of experts overlapped, their weight gradients delayed, userbuffers.

job ──variants──> jobs that differ in these flags ──fastest_decision──> a plan each ──> the fastest

A plan with userbuffers has a range (`cost.step`). It is taken if even its longest step is the shortest, or if stock's best is
faster than every other plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import inf

from megatron_lynx.config.job import Job
from megatron_lynx.errors import LynxError
from megatron_lynx.planner.decision import Decision, fastest_decision
from megatron_lynx.planner.left_open import with_exchanges
from megatron_lynx.prediction import DENSE, EVEN
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.stock.legality import Facts, offered
from megatron_lynx.stock.setting import StockSetting

WORTH_COPIES = DENSE.ratios
"""Relative gain from which copies to the host are recommended: the mean error of such ratios."""

OVERLAPPED = (StockSetting(overlap=True), StockSetting(overlap=True, delayed=True))


def fastest_variant(job: Job, profile: Profile, release: str | None, rival_s: float | None = None) -> Decision | None:
    """Return the fastest plan of all variants of a job; None if none fits."""
    return fastest(planned(job, profile, release), rival_s)


def planned(job: Job, profile: Profile, release: str | None) -> list[Decision]:
    """Return the plan of each variant that has one. The last variants, which change most flags, are often the fastest: planned
    first, they spare others the work on plans that `fastest` would not return."""
    plans, least_s = list[Decision](), inf
    for variant in reversed([*variants(job, release)]):
        with suppress(LynxError):
            plans.append(fastest_decision(variant, profile, inf if variant.userbuffers else (1 + EVEN) * least_s))
            least_s = min(least_s, plans[-1].step.most_s)
    return plans[::-1]


def fastest(plans: Sequence[Decision], rival_s: float | None = None) -> Decision | None:
    """Return the plan with the shortest longest step, which is certain; if stock's best is faster, the one with the shortest
    middle.

    `rival_s`: middle of stock's best.
    """
    certain = _first_of_fastest(plans, lambda plan: plan.step.most_s)
    if certain is None or rival_s is None or certain.step.expected_s <= (1 + EVEN) * rival_s:
        return certain
    return _first_of_fastest(plans, lambda plan: plan.step.expected_s)


def _first_of_fastest(plans: Sequence[Decision], seconds: Callable[[Decision], float]) -> Decision | None:
    """Return the first plan that takes no longer than the shortest one by more than `EVEN`: later ones change more flags."""
    least_s = min(map(seconds, plans), default=0.0)
    return next((plan for plan in plans if seconds(plan) <= (1 + EVEN) * least_s), None)


def fastest_with_copies(
    job: Job, profile: Profile, release: str | None, without: Decision | None, rival_s: float | None = None
) -> Decision | None:
    """Return the fastest plan that offloads activations if it gains `WORTH_COPIES` over the fastest `without`, or anything over
    one that stock's best beats, or if none fits `without`. Returns None otherwise."""
    below_s = inf
    if without is not None:
        if not without.recomputes:
            return None
        beaten = rival_s is not None and rival_s < without.step.expected_s
        below_s = (1 - (0.0 if beaten else WORTH_COPIES)) * without.step.expected_s
    offloading = fastest_variant(job.model_copy(update={"offload_ratio": "auto"}), profile, release, rival_s)
    return None if offloading is None or offloading.step.expected_s >= below_s else offloading


def variants(job: Job, release: str | None) -> Iterator[Job]:
    """Yield the job, then it with other flags that Megatron accepts. `release`: of megatron-core; None keeps the flags."""
    yield job
    if release is not None:
        yield from _with_other_flags(job, Facts.of(job, release))


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
