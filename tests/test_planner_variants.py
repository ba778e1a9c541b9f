"""Plans with other flags of Megatron: which variants are planned, and which one is taken."""

from __future__ import annotations

import shlex

import pytest

from megatron_lynx.advise.today import asked_launch
from megatron_lynx.config.job import Job
from megatron_lynx.errors import LynxError
from megatron_lynx.planner import Decision
from megatron_lynx.planner import variants as module
from megatron_lynx.planner.decision import fastest_decision
from megatron_lynx.planner.variants import Variants, fastest, variants
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile
from tests.advise.test_never_slower import OVERLAPPING
from tests.advise.test_screen import LAUNCH
from tests.test_filling import deferring

pytestmark = pytest.mark.slow

RELEASE = "0.19.2"


def job_of(flags: str, memory_gib: float, cluster: str = "h100-80g") -> Job:
    return asked_launch(shlex.split(f"{LAUNCH} {flags}"), cluster, changes={"budget.memory_gib": memory_gib}).job


@pytest.mark.parametrize("flags", ["", OVERLAPPING])
@pytest.mark.parametrize("memory_gib", [25.0, 40.0, 70.0])
def test_the_plan_is_the_fastest_of_all_variants(flags: str, memory_gib: float) -> None:
    job = job_of(flags, memory_gib)
    profile, plans = analytic_profile(job), list[Decision]()
    for variant in variants(job, RELEASE):
        try:
            plans.append(fastest_decision(variant, profile))
        except LynxError:
            continue
    best, taken = fastest(plans), Variants(job, profile, RELEASE).fastest()
    assert (best is None) == (taken is None)
    if best is not None and taken is not None:
        assert (taken.asked, taken.step) == (best.asked, best.step)


def test_a_variant_that_cannot_win_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without deferred weight gradients, overlapped exchanges and userbuffers the step is longer even in endless memory."""
    job, tried = deferring(job_of(OVERLAPPING, 130.0, "a800-80g"), "none"), list[tuple[bool, bool]]()

    def noted(variant: Job, profile: Profile) -> Decision:
        if variant.budget == job.budget:
            tried.append((variant.model.moe_overlapped, variant.userbuffers))
        return fastest_decision(variant, profile)

    monkeypatch.setattr(module, "fastest_decision", noted)
    taken = Variants(job, analytic_profile(job), RELEASE).fastest()
    assert taken is not None
    assert taken.job.model.moe_overlapped
    assert (True, False) in tried
    assert (False, False) not in tried


def test_no_plan_takes_less_than_with_endless_memory() -> None:
    job = job_of(OVERLAPPING, 70.0)
    plans = Variants(job, analytic_profile(job), RELEASE)
    taken = plans.fastest()
    assert taken is not None
    assert not plans.may_take(0.5 * taken.step.expected_s)
    assert plans.may_take(1.01 * taken.step.expected_s)
