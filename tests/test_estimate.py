"""Estimates: what they say, of what they refuse, and the command's answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from megatron_lynx.anatomy import DENSE, HALVES, PASSES
from megatron_lynx.cli import app
from megatron_lynx.config.job import Budget
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.errors import ConfigError
from megatron_lynx.estimate import estimate
from megatron_lynx.planner import make_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import ItemProfile, save_profile
from megatron_lynx.profiler.shape import LayerShape
from tests.config.jobs import catalogued_job
from tests.stock.parts import stage_parts
from tests.tiny_jobs import tiny_job

JOB = """\
model: {layers: 80, hidden: 8192, ffn: 22016, heads: 64, kv_groups: 64, vocab: 32004, seq: 8192,
        activation: swiglu, norm: rmsnorm, bias: false, attention: flash, tied_embeddings: false,
        implementation: transformer_engine}
cluster: clusters/h800-80g
gpus: 256
parallel: {tensor: 2, context: 2, pipeline: 8, layers_per_chunk: 2, sequence_parallel: true, distributed_optimizer: true}
batch: {micro: 1, global: 256}
policy: balanced
offload_ratio: auto
"""


def answered(folder: Path, budget: str = "", *options: str) -> Result:
    (folder / "job.yaml").write_text(JOB + budget)
    return CliRunner().invoke(app, ["estimate", str(folder / "job.yaml"), *options], catch_exceptions=False)


def test_a_job_that_fits(tmp_path: Path) -> None:
    answer = json.loads(answered(tmp_path, "budget: {memory_gib: 50}", "--json").stdout)
    assert answer["fits"] is True
    assert 0 < answer["offload_ratio"] < 1
    assert [stage["stage"] for stage in answer["stages"]] == list(range(8))
    for stage in answer["stages"]:
        parts = dict(stage["memory_bytes"])
        assert parts.pop("total") == sum(parts.values()) <= answer["budget_bytes"]


def test_offloading_is_declined_where_the_job_fits_without(tmp_path: Path) -> None:
    result = answered(tmp_path)
    assert result.exit_code == 0
    assert "offload ratio 0\n" in result.stdout


def test_a_job_that_does_not_fit_is_answered_and_says_no(tmp_path: Path) -> None:
    result = answered(tmp_path, "budget: {memory_gib: 20}", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["fits"] is False
    assert "stage 0: found" in result.stderr
    assert "are missing" in result.stderr


def test_a_stated_ratio_is_taken_as_stated() -> None:
    assert estimate(catalogued_job(offload_ratio=0.25)).offload_ratio == 0.25
    assert not estimate(catalogued_job(policy="none", seq=8192)).fits


@pytest.mark.slow
def test_the_planned_policy_is_estimated_as_its_plan() -> None:
    job = catalogued_job(policy="planned", budget={"memory_gib": 40})
    plan, answer = make_plan(job, analytic_profile(job)), estimate(job)
    assert answer.fits
    assert [memory.total for memory in answer.stages] == [stage.predicted.memory_bytes for stage in plan.stages[:8]]
    assert max(memory.total for memory in answer.stages) <= job.memory_budget_bytes
    assert answer.step.most_s - answer.step_parts_s["update_s"] == pytest.approx(plan.stages[0].predicted.step_s)
    tight = job.model_copy(update={"budget": Budget(memory_gib=10)})
    assert not estimate(tight).fits
    assert estimate(tight).stages[0].total > tight.memory_budget_bytes
    with pytest.raises(ConfigError, match="policy: found planned, needed figures"):
        estimate(tiny_job())


@pytest.mark.parametrize("budget", ["{memory_gib: 0}", "{memory_gib: -1}", "{memory_gib: .nan}", "{memory_gib: 1e400}"])
def test_nonsense_budgets_are_wrong_requests(tmp_path: Path, budget: str) -> None:
    result = answered(tmp_path, f"budget: {budget}")
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


def test_time_is_estimated_where_the_cluster_has_rates(tmp_path: Path) -> None:
    answer = json.loads(answered(tmp_path, "", "--json").stdout)
    assert answer["step_s"] == pytest.approx(sum(answer["step_parts_s"].values()))
    assert answer["tokens_per_s"] == pytest.approx(256 * 8192 / answer["step_s"])
    assert 0.3 < answer["mfu"] < 0.5
    assert "tokens/s, MFU" in answered(tmp_path).stdout


def test_without_rates_memory_alone_is_estimated() -> None:
    answer = estimate(tiny_job().model_copy(update={"policy": "full"})).as_json
    assert answer["fits"] is True
    assert answer["step_s"] is answer["tokens_per_s"] is answer["mfu"] is None


def test_layers_measured_on_one_device_serve_a_cluster(tmp_path: Path) -> None:
    """Twice as slow layers make a pass twice as long, but for its messages, which the cluster's figures give."""
    job = catalogued_job()
    analytic = analytic_profile(job)
    slow = {
        half: analytic.half(half).model_copy(
            update={"items": {name: _slower(item) for name, item in analytic.half(half).items.items()}}
        )
        for half in HALVES
    }
    measured = analytic.model_copy(update={**slow, "links": ()})
    fast_s, slow_s = (estimate(job, profile).step_parts_s["pipeline_s"] for profile in (None, measured))
    assert 1.5 < slow_s / fast_s < 2
    save_profile(measured, tmp_path / "profile.yaml")
    refused = answered(tmp_path, "", "--profile", str(tmp_path / "profile.yaml"))
    assert refused.exit_code == 2
    assert "shape.seq" in refused.stderr
    assert "shape.context" in refused.stderr


def _slower(item: ItemProfile) -> ItemProfile:
    return item.model_copy(update={name: 2 * getattr(item, name) for name in ("forward_s", "backward_s", "dgrad_s", "wgrad_s")})


def test_it_says_which_moment_binds_on_each_stage(tmp_path: Path) -> None:
    """With much vocabulary the last stage is fullest in the loss, the others while a layer runs backward."""
    job = catalogued_job("llama3-8b", gpus=8, batch=32, parallel={"tensor": 1, "pipeline": 8}, policy="none")
    first, *_, last = estimate(job).as_json["stages"]
    assert (first["moment"], last["moment"]) == ("backward", "loss")
    for stage in (first, last):
        parts = dict(stage["memory_bytes"])
        assert parts["total"] == stage["moments_bytes"][stage["moment"]] == max(stage["moments_bytes"].values())
    assert "loss" not in first["moments_bytes"]
    assert last["memory_bytes"]["logits"] == 6 * job.model.seq * job.model.vocab
    printed = answered(tmp_path).stdout
    assert "at its fullest moment" in printed
    assert "backward" in printed


def test_userbuffers_are_priced_as_what_they_hide_at_worst_and_at_best(tmp_path: Path) -> None:
    """At worst as stock; at best every exchange behind its own GEMM, which here outlasts it."""
    stock = json.loads(answered(tmp_path, "", "--json").stdout)
    said = json.loads(answered(tmp_path, "overlap: {userbuffers: true}", "--json").stdout)
    assert said["step_s"] == stock["step_s"]
    assert said["step_at_best_s"] < 0.97 * said["step_s"]
    assert "step_at_best_s" not in stock
    assert "at best" in answered(tmp_path, "overlap: {userbuffers: true}").stdout
    hidden = catalogued_job("llama-65b", "a100-80g", seq=8192, overlap={"userbuffers": True})
    profile = analytic_profile(hidden).model_copy(update={"hiding": "userbuffers"})
    size = LayerShape.of(hidden).gathered_bytes
    assert [window_lengths_s(profile, passing, section, size) for section in DENSE.values() for passing in PASSES] == [
        (0.0, 0.0),
        (0.0, 0.0, 0.0),
    ] * 2


def test_a_chunk_may_have_the_embedding_or_the_loss_alone() -> None:
    """As --account-for-embedding-in-pipeline-split makes it, where chunks have one layer."""
    layout = {"pipeline": 4, "partition": [0, *[5] * 6, 2]}
    job = catalogued_job("llama-7b", "a100-80g", gpus=4, batch=8, policy="none", parallel=layout)
    even = catalogued_job("llama-7b", "a100-80g", gpus=4, batch=8, policy="none", parallel={"pipeline": 4, "layers_per_chunk": 4})
    first, last = estimate(job).stages[0], estimate(job).stages[-1]
    assert first.parameters < estimate(even).stages[0].parameters
    assert last.moment == "backward", "two layers keep less beside the loss than five in their backward"
    assert stage_parts(job, 3).at("loss").logits == stage_parts(even, 3).at("loss").logits > 0
    assert estimate(job).step.most_s > estimate(even).step.most_s, "two stages have ten layers"
    planned = job.model_copy(update={"policy": "planned", "budget": Budget(memory_gib=40)})
    plan = make_plan(planned, analytic_profile(job))
    assert [str(stage.layers) for stage in plan.stages][:2] == ["none", "1-5"]
    assert any(rule.recompute for stage in plan.stages for rule in stage.rules)
    assert max(stage.predicted.memory_bytes for stage in plan.stages) <= planned.memory_budget_bytes


def test_a_plan_with_userbuffers_is_a_range() -> None:
    layout = {"tensor": 8, "pipeline": 4, "sequence_parallel": True, "distributed_optimizer": True}
    shared = {"gpus": 32, "batch": 64, "parallel": layout, "policy": "planned", "implementation": "transformer_engine"}
    found = estimate(catalogued_job("llama3-70b", "h100-80g", overlap={"userbuffers": True}, **shared)).as_json
    assert found["step_at_best_s"] < found["step_s"]
