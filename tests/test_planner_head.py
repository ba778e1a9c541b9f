"""Plans whose head is in pieces: only where that is asked for, and only where it helps."""

from __future__ import annotations

import pytest

from megatron_lynx.config.job import Head
from megatron_lynx.config.loader import load_job
from megatron_lynx.errors import ConfigError, Infeasible
from megatron_lynx.launch_arguments import job_of
from megatron_lynx.plan import load_plan
from megatron_lynx.planner import decide, make_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import BlockProfile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.stock import FULL
from megatron_lynx.stock.stage import StockStage
from tests.config.jobs import catalogued_job
from tests.launch_arguments.test_reading import SMALL, read
from tests.profiler.made_up import made_up_profile
from tests.test_cli import lynx
from tests.tiny_jobs import tiny_job


def eight_billion(**changes):
    """Llama 3 8B on one node of A100s without a pipeline: states fill a device, and 6.4 GB of logits have no room."""
    return load_job("jobs/llama3-8b-a100-80g", {"parallel.pipeline": 1, **changes})


def test_where_logits_have_no_room_pieces_of_the_head_have():
    short_of = {"budget.memory_gib": 64}  # with half a GiB more layers that share inputs leave the logits room
    whole = eight_billion(**short_of)
    with pytest.raises(Infeasible) as short:
        make_plan(whole, analytic_profile(whole))
    assert str(short.value.problems[-1]).startswith("inexact change that fits: head.pieces: 8")
    job = eight_billion(**short_of, **{"head.pieces": "auto"})
    decision = decide(job, analytic_profile(job))
    assert decision.plan.head.pieces == decision.job.head_pieces == 8
    (memory,) = decision.memory
    assert memory.total <= job.memory_budget_bytes
    more = decide(eight_billion(**short_of, **{"head.pieces": 32}), analytic_profile(job))
    assert more.simulation.step_s >= decision.simulation.step_s, "the fewest that help: further ones only take time"


def test_a_head_that_fits_stays_whole():
    """It would cost a GEMM and bits, for nothing."""
    job = catalogued_job("llama3-8b", "h100-80g", gpus=64, batch=64, policy="planned", parallel={"tensor": 8, "pipeline": 1})
    plan = make_plan(job, analytic_profile(job))
    auto = job.model_copy(update={"head": Head(pieces="auto")})
    assert make_plan(auto, analytic_profile(auto)).model_copy(update={"provenance": plan.provenance}) == plan


def test_nobody_gets_what_was_not_asked_for():
    job = tiny_job("gpt", hidden=8, ffn=16, heads=2, kv_groups=2, vocab=16384, seq=64)
    assert make_plan(job, made_up_profile(job)).head is None
    auto = job.model_copy(update={"head": Head(pieces="auto")})
    assert make_plan(auto, made_up_profile(auto)).head.pieces > 1, "least memory is wanted where no budget is stated"
    assert job.digest != auto.digest
    assert '"head"' not in job.model_dump_json(exclude_defaults=True), "old plans know their jobs"


def test_a_plan_is_rehearsed_with_its_head():
    job = tiny_job("gpt", pipeline=2).model_copy(update={"head": Head(pieces=4)})
    profile = made_up_profile(job, 0.0, head=BlockProfile(forward_s=1.0, backward_s=2.0))
    plan = make_plan(job, profile)
    whole = plan.model_copy(update={"head": None})
    again_s = job.microbatches * 1.0
    assert plan.stages[0].predicted.step_s == pytest.approx(rehearse(plan, profile).step_s)
    assert rehearse(plan, profile).step_s == pytest.approx(rehearse(whole, profile).step_s + again_s, rel=1e-6)


def test_stock_has_no_pieces():
    job = catalogued_job("llama3-8b", "h100-80g", gpus=8, batch=8, policy="none", parallel={"tensor": 1})
    pieced = job.model_copy(update={"head": Head(pieces=8)})
    assert StockStage(pieced, FULL, 0).parts.fullest == StockStage(job, FULL, 0).parts.fullest


# --- what is refused -----------------------------------------------------------------------------------------------------


def test_pieces_of_a_job_must_be_equal_and_flushed():
    with pytest.raises(ConfigError, match=r"head.pieces \(3\) must divide the tokens of a sequence on one rank \(8192\)"):
        eight_billion(**{"head.pieces": 3})
    with pytest.raises(ConfigError, match=r"head.pieces needs schedule flush"):
        load_job("jobs/llama3-8b-a100-80g", {"schedule": "double_buffered", "head.pieces": "auto"})


def test_a_launch_that_wants_logits_is_refused_with_a_head_in_pieces():
    launch = read(f"{SMALL} --use-mup --config-logger-dir logs", planning=True)
    with pytest.raises(ConfigError) as refused:
        job_of(launch, "h100-80g", {"head.pieces": "auto"})
    assert [problem.where for problem in refused.value.problems] == ["--use-mup", "--config-logger-dir"]
    assert job_of(launch, "h100-80g").head is None


def test_the_command_asks_for_it_by_name(tmp_path):
    """And again with the same words, where a run that lacks memory says what to plan anew."""
    plan = tmp_path / "plan.yaml"
    unknown = lynx("plan", "jobs/demo", "--inexact", "tail", "-o", plan)
    assert unknown.exit_code == 2
    assert not plan.exists()
    made = lynx("plan", "jobs/llama3-8b-h800-80g", "--inexact", "head", "--memory-gib", 42, "-o", plan)
    assert made.exit_code == 0, made.output
    assert load_plan(plan).provenance.asked == "--memory-gib 42 --inexact head jobs/llama3-8b-h800-80g"
