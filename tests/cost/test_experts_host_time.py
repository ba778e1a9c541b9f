"""Host time of layers with experts: it grows with the experts of a rank, and holds passes up."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lynx.config.cluster import ExpertHostTime, HostPasses
from megatron_lynx.config.job import Job
from megatron_lynx.cost.host import half_host_s, stage_host_s
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.published.row import catalogued_job, stock_step_s
from megatron_lynx.stock import NONE

HALF, EACH = HostPasses(forward_us=1000, backward_us=500), HostPasses(forward_us=100, backward_us=200)


def job_of(expert: int, known: bool = True, **model: Any) -> Job:
    job = catalogued_job(
        "mixtral-8x7b",
        "h100-80g",
        gpus=8,
        parallel={"expert": expert},
        model=model,
        policy="none",
        batch={"micro": 1, "global": 8},
    )
    times = ExpertHostTime(made_by="a test", half=HALF, each=EACH) if known else None
    assert job.cluster.host_time is not None
    host_time = job.cluster.host_time.model_copy(update={"experts": times})
    return job.model_copy(update={"cluster": job.cluster.model_copy(update={"host_time": host_time})})


def test_a_rank_with_more_experts_needs_longer_to_issue_them() -> None:
    times = {}
    for expert in (8, 2):
        profile = analytic_profile(job_of(expert))
        _, experts = profile.shape.sections
        times[8 // expert] = half_host_s(profile, experts, ())
    assert 1e6 * (times[4].forward_s - times[1].forward_s) == pytest.approx(3 * 100)
    assert 1e6 * (times[4].backward_s - times[1].backward_s) == pytest.approx(3 * 200)


def test_a_norm_made_again_takes_as_much_whatever_the_experts_and_all_of_it_their_forward() -> None:
    beyond = {}
    for expert in (8, 2):
        profile = analytic_profile(job_of(expert))
        _, experts = profile.shape.sections
        kept, partly, whole = (half_host_s(profile, experts, items) for items in ((), (experts.norm,), experts.names))
        beyond[8 // expert] = partly.backward_s - kept.backward_s, whole.backward_s - kept.backward_s
    assert beyond[4][0] == pytest.approx(beyond[1][0])
    assert beyond[4][1] > beyond[1][1] + 1e-6 * 3 * 50


def test_a_stage_issues_its_experts_and_its_attention() -> None:
    profile = analytic_profile(job_of(2))
    alone = stage_host_s(job_of(2, known=False), analytic_profile(job_of(2, known=False)), 0, "none")
    beyond = stage_host_s(job_of(2), profile, 0, "none") + alone * -1
    assert beyond.forward_s == pytest.approx(32 * 1e-6 * (1000 + 4 * 100))
    assert beyond.backward_s == pytest.approx(32 * 1e-6 * (500 + 4 * 200))


def test_small_experts_are_host_bound() -> None:
    small = {"hidden": 1024, "ffn": 1024, "seq": 512, "experts": {"count": 64, "per_token": 8, "ffn": 512}}
    known, unknown = (job_of(1, known, **small) for known in (True, False))
    assert stock_step_s(known, NONE) > 1.5 * stock_step_s(unknown, NONE)
    assert stock_step_s(known, NONE, graphs=True) == stock_step_s(unknown, NONE, graphs=True)
