"""A stated policy with a share of its activations on the host: bytes, seconds, and what binds where nothing fits."""

from __future__ import annotations

from megatron_lynx.config.job import Job
from megatron_lynx.estimate import Estimate, estimate
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.solver.answer import StageAnswer
from megatron_lynx.solver.stages import Stages
from tests.config.jobs import catalogued_job
from tests.profiler.made_up import made_up_profile
from tests.tiny_jobs import tiny_job

ENDLESS = {"memory_gib": 1e6}


def offloading(ratio: float) -> StageAnswer:
    job = catalogued_job(budget=ENDLESS, offload_ratio=ratio)
    return Stages(job, analytic_profile(job)).answer(0)


def test_offloading_frees_a_share_of_all_chunks_but_four() -> None:
    whole, half, hardly = map(offloading, (0.0, 0.5, 1e-6))
    assert abs(whole.peak_bytes - half.peak_bytes - 0.5 * (whole.in_flight - 4) * whole.chunks.most_resident_bytes) <= 1
    assert 0 <= whole.peak_bytes - hardly.peak_bytes < 1e-5 * whole.peak_bytes


def test_few_chunks_in_flight_are_not_offloaded() -> None:
    job = tiny_job(pipeline=4, microbatches=8).model_copy(update={"policy": "none", "offload_ratio": 1.0})
    answer = Stages(job, made_up_profile(job, link_s=1e-4)).answer(0)
    assert answer.host_bytes == 0
    assert answer.asked.ratio == 0


def within(gib: float, **fields: object) -> Estimate:
    return estimate(catalogued_job(budget={"memory_gib": gib}, offload_ratio="auto", **fields))


def bounds_gib() -> tuple[float, float]:
    """With everything offloaded, and with nothing."""
    least, most = (estimate(catalogued_job(budget=ENDLESS, offload_ratio=ratio)).memory_bytes for ratio in (1.0, 0.0))
    return least / 2**30, most / 2**30


def test_the_fastest_share_fits_and_more_memory_is_never_slower() -> None:
    least, most = bounds_gib()
    answers = [within(least + share * (most - least)) for share in (0.3, 0.6, 1.01)]
    assert all(answer.fits for answer in answers)
    assert answers[0].offload_ratio > answers[-1].offload_ratio == 0
    steps_s = [answer.step.most_s for answer in answers]
    assert steps_s == sorted(steps_s, reverse=True)


def test_what_cannot_fit_says_which_stage_and_by_how_much() -> None:
    answer = within(10.0)
    assert answer.verdict == "does not fit"
    assert answer.shortages[0].where == "memory of a device, stage 0"
    assert "are missing" in answer.shortages[0].todo


def test_host_memory_bounds_what_can_be_offloaded() -> None:
    least, most = bounds_gib()
    job: Job = catalogued_job(budget={"memory_gib": (least + most) / 2}, offload_ratio="auto")
    small = job.cluster.model_copy(update={"node": job.cluster.node.model_copy(update={"host_memory_gib": 8.0})})
    answer = estimate(job.model_copy(update={"cluster": small}))
    assert not answer.fits
    assert any(short.where.startswith("host memory of a node") for short in answer.shortages)
