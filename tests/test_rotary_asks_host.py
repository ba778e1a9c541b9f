"""Packed sequences whose rotary positions are not fused: the code that turns queries and keys asks the host for lengths, and the
host waits for the device each time. So it is kept, with what is behind it, wherever a plan fits so."""

from __future__ import annotations

import pytest

from megatron_lynx.advise import answered, screen
from megatron_lynx.cli.terminal import show_screen
from megatron_lynx.config import load_job
from megatron_lynx.config.job import Job
from megatron_lynx.launch_arguments import read_launch
from megatron_lynx.planner import Decision, decide
from megatron_lynx.profiler.analytic import analytic_profile

pytestmark = pytest.mark.slow

BEHIND = {"rotary", "core_attention", "linear_proj"}
TIGHT_GIB, TIGHTER_GIB = 60, 48
"""Within the one a plan recomputes attention, and need not; within the other it has to."""


def job_with(memory_gib: float, *, fused: bool = False, packed: bool = True) -> Job:
    lengths = {"mean": 900.0} if packed else None
    job = load_job("jobs/llama-65b-h800-80g", {"budget.memory_gib": memory_gib, "batch.lengths": lengths})
    fusions = ("bias_dropout", "bias_activation", *(["rope"] if fused else []))
    return job.model_copy(update={"model": job.model.model_copy(update={"fusions": fusions})})


def decided(job: Job) -> Decision:
    return decide(job, analytic_profile(job))


def turns_again(decision: Decision) -> bool:
    """Whether any layer recomputes the code that turns queries and keys."""
    rules = [rule for stage in decision.plan.stages for rule in stage.rules]
    return any(BEHIND & set(rule.recompute) or rule.checkpoints("attention") for rule in rules)


def said_of(job: Job, capsys: pytest.CaptureFixture[str]) -> str:
    show_screen(screen(answered(job, analytic_profile(job), None, near=False)))
    return " ".join(capsys.readouterr().out.split())


def test_it_is_kept_where_a_plan_fits_so(capsys: pytest.CaptureFixture[str]) -> None:
    job = job_with(TIGHT_GIB)
    assert not turns_again(decided(job))
    assert "rotary is kept: of packed sequences it would make the host wait in each recomputation" in said_of(job, capsys)


@pytest.mark.parametrize("other", [{"packed": False}, {"fused": True}], ids=["not packed", "fused"])
def test_nothing_changes_where_nobody_asks(other: dict[str, bool], capsys: pytest.CaptureFixture[str]) -> None:
    job = job_with(TIGHT_GIB, **other)
    assert turns_again(decided(job))
    assert "rotary" not in said_of(job, capsys)


def test_it_runs_again_where_no_plan_fits_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    job = job_with(TIGHTER_GIB)
    decision = decided(job)
    assert turns_again(decision)
    assert decision.plan.provenance.job == job.digest
    assert "rotary recomputes, as no plan fits with it kept" in said_of(job, capsys)


def test_a_launch_that_slime_packs_is_packed() -> None:
    """It says no lengths. Where the kernel is fused nobody asks for any, and the job is the one that it was."""
    words = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-tokens-per-gpu 4096 --position-embedding-type rope"
    facts = {fact.place: fact.value for fact in read_launch([*words.split(), "--no-rope-fusion"]).facts}
    assert facts["batch.packed"]
    assert "batch.packed" not in {fact.place for fact in read_launch(words.split()).facts}
