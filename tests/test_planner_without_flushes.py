"""Plans without flushes: what they may ask for, what they hold, and what they come to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_lynx.cli import app
from megatron_lynx.config import Job
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import Infeasible
from megatron_lynx.estimate import estimate
from megatron_lynx.plan import Plan, load_plan
from megatron_lynx.planner import Decision, decide
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.yaml_file import write_yaml
from tests.config.jobs import catalogued_job
from tests.test_filling import deferring

pytestmark = pytest.mark.slow

LAYOUT = {"tensor": 4, "pipeline": 8, "sequence_parallel": True, "distributed_optimizer": True}


def job_of(schedule: str = "double_buffered", memory_gib: float | None = None, **fields) -> Job:
    """Eight micro-batches on eight stages: nowhere does a flush cost more."""
    given = {"gpus": 64, "batch": 16, "seq": 4096, "policy": "planned", "parallel": LAYOUT, "schedule": schedule, **fields}
    job = catalogued_job("llama-65b", "a100-80g", **given)
    return job.model_copy(update={"budget": job.budget.model_copy(update={"memory_gib": memory_gib})})


def decided(job: Job) -> Decision:
    return decide(job, analytic_profile(job))


def windows_of(plan: Plan) -> set[str]:
    halves = (rule.windows.model_dump() for stage in plan.stages for rule in stage.rules)
    found: set[str] = set()
    for half in halves:
        for window in half.values():
            found |= set(window.values()) if isinstance(window, dict) else {window} if window else set()
    return found


@pytest.fixture(scope="module")
def roomy() -> Decision:
    return decided(job_of())


def test_the_flush_is_gained_and_two_versions_are_paid_for(roomy: Decision) -> None:
    flushing = decided(deferring(job_of("flush"), "none"))  # neither defers weight gradients
    assert 0.5 < roomy.simulation.step_s / flushing.simulation.step_s < 0.65, "8/15 and less than two forwards"
    for stage, (after, before) in enumerate(zip(roomy.memory, flushing.memory, strict=True)):
        assert after.second_weights == before.parameters
        assert after.second_gradients == (before.gradients if stage else 0)


def test_a_plan_says_its_schedule_and_reads_back(roomy: Decision) -> None:
    plan = Plan.model_validate(roomy.plan.model_dump())
    assert (plan.schedule, plan.defer_updates) == ("double_buffered", True)
    assert plan.stages[0].predicted.step_s == pytest.approx(roomy.simulation.step_s)


@pytest.mark.parametrize("memory_gib", [40.0, 48.0])
def test_recomputations_are_in_windows_of_backwards_and_receives(memory_gib: float) -> None:
    decision = decided(job_of(memory_gib=memory_gib))
    assert all(memory.total <= memory_gib * 2**30 for memory in decision.memory)
    windows = windows_of(decision.plan)
    assert windows
    assert not any(window.startswith("fwd.") for window in windows)


def test_at_once_needs_less_memory_and_more_time(roomy: Decision) -> None:
    at_once = decided(job_of(defer_updates=False))
    assert at_once.simulation.step_s > roomy.simulation.step_s
    assert [memory.second_gradients for memory in at_once.memory] == [0] * 8
    assert not at_once.plan.defer_updates


def test_activations_go_to_the_host_where_recomputations_cost_more() -> None:
    """What recomputations alone make fit, copies make faster."""
    recomputed, offloaded = (decided(job_of(memory_gib=38.0, offload_ratio=ratio)) for ratio in (0.0, "auto"))
    assert all(memory.total <= 38 * 2**30 for each in (recomputed, offloaded) for memory in each.memory)
    assert any(stage.offload for stage in offloaded.plan.stages)
    assert offloaded.simulation.step_s <= recomputed.simulation.step_s


def test_layers_go_where_the_slowest_stage_is_fastest() -> None:
    """The last stage has the head: without flushes nothing else counts than the pace."""
    partition = {**LAYOUT, "partition": "auto"}
    free, even = decided(job_of(parallel=partition)), decided(job_of())
    assert free.simulation.step_s <= even.simulation.step_s


def test_what_does_not_fit_says_what_is_missing() -> None:
    with pytest.raises(Infeasible) as caught:
        decided(job_of(memory_gib=24.0))
    assert "second_gradients" in str(caught.value)
    assert "second_weights" in str(caught.value)


def test_updates_at_once_are_the_nearest_change() -> None:
    with pytest.raises(Infeasible) as caught:
        decided(job_of(memory_gib=32.0))
    assert "nearest change that fits: defer_updates: false" in str(caught.value)


def test_an_estimate_of_a_plan_is_the_plans(roomy: Decision) -> None:
    said = estimate(job_of())
    assert said.step.most_s == pytest.approx(roomy.simulation.step_s + update_s(roomy.job, analytic_profile(roomy.job)))
    assert said.as_json["gradient_age_updates"] == 1
    assert "gradient_age_updates" not in estimate(job_of("flush")).as_json


@pytest.mark.slow
def test_commands(tmp_path: Path) -> None:
    """plan, explain, simulate, estimate and compare, of one job."""
    job_file, plan_file = tmp_path / "job.yaml", tmp_path / "plan.yaml"
    layout = {**LAYOUT, "tensor": 2, "pipeline": 4}
    job = catalogued_job(
        "llama-7b", "a100-80g", gpus=8, batch=4, seq=4096, policy="planned", parallel=layout, schedule="double_buffered"
    )
    job_file.write_text(write_yaml(job.model_dump(mode="json", by_alias=True, exclude_none=True)))

    def run(*words: object) -> str:
        result = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert "--lynx-schedule double-buffered" in run("plan", job_file, "-o", plan_file)
    assert load_plan(plan_file).schedule == "double_buffered"
    launch = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 --bf16"
    launch += " --micro-batch-size 1 --vocab-size 50304 --pipeline-model-parallel-size 4 --global-batch-size 4"
    launch += " --lynx-schedule double-buffered"
    pasted = run("plan", "--cluster", "a100-80g", "--gpus", 4, "-o", tmp_path / "l.yaml", "--", *launch.split())
    assert pasted.rstrip().endswith("--rerun-mode disabled --lynx-plan " + str(tmp_path / "l.yaml"))
    assert load_plan(tmp_path / "l.yaml").schedule == "double_buffered"
    assert "never flushed: two versions of the weights, gradients are one update old" in run("explain", plan_file)
    assert "gradients are one update old" in run("estimate", job_file)
    simulated = json.loads(run("simulate", plan_file, "--job", job_file, "--trace", tmp_path / "t.json", "--json"))
    assert simulated["gradient_age_updates"] == 1
    assert len(simulated["updates"][0]) == 5
    assert any(event["name"] == "update 2" for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"])
    rows = json.loads(run("compare", job_file, "-o", tmp_path / "compared", "--json"))["rows"]
    ours = next(row for row in rows if row["setting"] == "ours, without flushes")
    assert ours["ratio_to_none"] < 0.75
