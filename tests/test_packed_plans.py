"""Plans for packed sequences say what attention takes: what a run with other lengths should have taken follows from that."""

from __future__ import annotations

from functools import cache

import pytest

from megatron_lynx.config import Job, load_job
from megatron_lynx.config.job import Lengths
from megatron_lynx.figures import InputSeen
from megatron_lynx.launch.reporter import step_input
from megatron_lynx.plan import Plan
from megatron_lynx.planner import decide
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.rehearsal import rehearse

SEQ, MICROBATCHES, SQUARES = 8192, 32, 6144.0


@cache
def made() -> tuple[Job, Plan]:
    job = load_job("jobs/llama3-8b-a100-80g")
    job = with_lengths(job, SEQ, SQUARES)
    return job, decide(job, analytic_profile(job)).plan


def with_lengths(job: Job, seq: int, squares: float) -> Job:
    """Half as many of the sequences' tokens are in sequences that are longer than the mean."""
    lengths = Lengths(mean=squares / 1.5, mean_square=squares**2 / 1.5)
    given = {"model": job.model.model_copy(update={"seq": seq}), "batch": job.batch.model_copy(update={"lengths": lengths})}
    return job.model_copy(update=given)


def rehearsed_s(plan: Plan, job: Job, seq: int = SEQ, squares: float = SQUARES, microbatches: int = MICROBATCHES) -> float:
    """Seconds of the same plan for what came, priced anew."""
    facts = {"model": plan.model.model_copy(update={"seq": seq})}
    facts |= {"batch": plan.batch.model_copy(update={"microbatches": microbatches})}
    profile = analytic_profile(with_lengths(job, seq, squares))
    return rehearse(plan.model_copy(update=facts), profile, job=job).step_s


def test_a_plan_for_packed_sequences_says_for_which() -> None:
    """Others say nothing: their files, and digests, are as they were."""
    job, plan = made()
    assert plan.batch.packed is not None
    assert plan.batch.packed.squares_per_token == pytest.approx(SQUARES)
    core = analytic_profile(job).attention.items["core_attention"]
    assert 0.1 < plan.batch.packed.core_share < 0.2
    again = sum(entry.layers.last - entry.layers.first + 1 for entry in plan.chunks_of(1)) * (core.forward_s + core.backward_s)
    assert plan.batch.packed.core_share >= again * plan.passes(MICROBATCHES) / plan.stages[0].predicted.step_s - 1e-3
    whole = load_job("jobs/llama3-8b-a100-80g")
    assert decide(whole, analytic_profile(whole)).plan.batch.packed is None


@pytest.mark.parametrize(
    ("microbatches", "seq", "squares"),
    [(32, SEQ, 500.0), (32, SEQ, 8000.0), (16, SEQ, SQUARES), (48, SEQ, SQUARES), (32, 6144, 6000.0), (16, 4096, 1000.0)],
)
def test_scaled_seconds_are_those_of_the_plan_priced_anew(microbatches: int, seq: int, squares: float) -> None:
    job, plan = made()
    met = step_input(plan, InputSeen(microbatches, microbatches * seq, microbatches * seq * squares), 1, 1)
    assert met is not None
    anew = rehearsed_s(plan, job, seq, squares, microbatches) / rehearsed_s(plan, job)
    assert met.passes == pytest.approx(anew, rel=0.05)
