"""What a plan may ask of a launch with userbuffers, and what the planner makes for one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from benchmarks.when_not import on_devices_of
from megatron_lynx.anatomy import COLUMN_PARALLEL, HALVES
from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.config.job import Job
from megatron_lynx.errors import ConfigError
from megatron_lynx.launch.launch import arguments_against
from megatron_lynx.plan.layout import launch_flags
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.plan_file import dump_plan
from megatron_lynx.planner import decide, make_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.stock import FULL, priced
from megatron_lynx.units import GIB
from tests.stock.parts import stage_parts
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

from ..config.jobs import catalogued_job

LAYOUT = {"tensor": 2, "pipeline": 2, "sequence_parallel": True, "microbatches": 4}


def tiny_plan(userbuffers: bool = True) -> Plan:
    return uniform_plan(tiny_job(implementation="transformer_engine", userbuffers=userbuffers, **LAYOUT), ["activation"])


def large_job(cluster: str = "h100-80g", userbuffers: bool = True, **changes: Any) -> Job:
    layout = {"tensor": 8, "pipeline": 4, "sequence_parallel": True, "distributed_optimizer": True}
    shared = {"gpus": 32, "batch": 64, "parallel": layout, "policy": "planned", "implementation": "transformer_engine"}
    return catalogued_job("llama3-70b", cluster, overlap={"userbuffers": userbuffers}, **shared | changes)


def test_a_plan_says_so_and_asks_for_the_flag() -> None:
    assert "userbuffers: true" in dump_plan(tiny_plan())
    assert "--tp-comm-overlap" in launch_flags(tiny_plan())
    assert "userbuffers" not in dump_plan(tiny_plan(userbuffers=False))
    assert "--tp-comm-overlap" not in launch_flags(tiny_plan(userbuffers=False))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"recompute": "linear_fc1"}, "linear_fc1 is recomputed, but with parallel.userbuffers .* it would communicate again"),
        ({"windows": {"mlp": "bwd.attention.2+1"}}, "windows.mlp is bwd.attention.2.1, needed on_demand or pipe.recv_backward"),
        ({"gather": {"mlp": "bwd.attention.0+1"}, "recompute": "linear_fc1"}, "gather.mlp is bwd.attention.0.1, needed"),
        ({"sequence_parallel": False}, "parallel.sequence_parallel is False, needed True with parallel.userbuffers"),
        ({"implementation": "local"}, "model.implementation is local, needed transformer_engine with parallel.userbuffers"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_conflicts_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    raw = tiny_plan().model_dump(mode="json")
    rule = raw["stages"][0]["rules"][0]
    rule["windows"], raw["stages"][0]["ahead_depth"] = {}, 1
    for name, value in change.items():
        if name == "recompute":
            rule["keep"], rule["recompute"] = [item for item in rule["keep"] if item != value], [*rule["recompute"], value]
            rule["keep"].remove("pre_mlp_layernorm")
            rule["recompute"].append("pre_mlp_layernorm")
        else:
            holder = {"sequence_parallel": raw["parallel"], "implementation": raw["model"]}.get(name, rule)
            holder[name] = value
    with pytest.raises(ValidationError, match=says):
        Plan.model_validate(raw)


@pytest.mark.parametrize(("given", "planned"), [(True, False), (False, True), (True, True), (False, False)])
def test_a_launch_and_its_plan_agree(given: bool, planned: bool) -> None:
    problems = arguments_against(tiny_plan(planned), SimpleNamespace(tp_comm_overlap=given))
    found = [problem for problem in problems if problem.where == "--tp-comm-overlap"]
    assert len(found) == (given != planned)
    if found:
        assert found[0].finding == ("given" if given else "not given")
        assert "with userbuffers linears have no windows" in str(found[0])


@pytest.mark.parametrize("budget_gib", [80, 55])
def test_the_planner_makes_plans_without_windows_and_without_linears(budget_gib: float) -> None:
    job = large_job(budget={"memory_gib": budget_gib})
    plan = make_plan(job, analytic_profile(job))
    assert plan.parallel.userbuffers
    rules = [rule for stage in plan.stages for rule in stage.rules]
    assert {item for rule in rules for item in rule.recompute} & set(COLUMN_PARALLEL) == set()
    windows = {rule.windows.of(half) for rule in rules for half in HALVES}
    assert windows == {ON_DEMAND}
    if budget_gib == 55:
        assert any(rule.recompute for rule in rules)


def test_the_buffers_are_counted() -> None:
    """Twelve, each of all rows of a micro-batch; with FP8 the eight that are gathered hold bytes."""
    with_them, without = (stage_parts(large_job(userbuffers=on, policy="none"), 1).fullest.buffers for on in (True, False))
    row_bytes = LayerShape.of(large_job()).gathered_bytes
    assert with_them - without == 12 * row_bytes
    fp8 = {"fp8": "delayed", "policy": "none"}
    with_them, without = (stage_parts(large_job(userbuffers=on, **fp8), 1).fullest.buffers for on in (True, False))
    assert with_them - without == 8 * row_bytes


def test_what_no_plan_can_do_is_refused() -> None:
    for changes, place in (({"implementation": "local"}, "job: model.implementation"), ({"policy": "full"}, "job: policy")):
        job = large_job(**changes)
        with pytest.raises(ConfigError) as refused:
            make_plan(job, analytic_profile(job))
        assert [problem.where for problem in refused.value.problems] == [place]


@pytest.mark.parametrize("pieces", [1, 2])
def test_no_weight_gradient_is_deferred(pieces: int) -> None:
    """Transformer Engine refuses some of them itself; those of row-parallel linears would read what another layer gathered. In
    pieces neither."""
    raw = tiny_plan().model_dump(mode="json")
    raw["stages"][0]["rules"][0]["weight_gradients"] = {"linear_fc2": ["pipe.recv_backward"] * pieces}
    raw["stages"][0]["rules"][0]["weight_gradient_pieces"] = {"linear_fc2": pieces} if pieces > 1 else {}
    raw["stages"][0]["weight_gradients"] = {"bytes": 2**20}
    with pytest.raises(ValidationError, match=r"weight_gradients\.linear_fc2 is deferred, but with parallel.userbuffers"):
        Plan.model_validate(raw)
    decision = decide(large_job(), analytic_profile(large_job()))
    assert not any(stage.defers for stage in decision.plan.stages)
    assert "with userbuffers it exchanges in its GEMM" in decision.weight_gradients


def test_where_full_recomputation_fits_a_plan_does() -> None:
    """No layer could be a checkpoint, so launches that recompute whole layers beside userbuffers were told that no plan fits."""
    job = large_job()
    profile = analytic_profile(job)
    full = priced(job, profile, FULL)
    decision = decide(on_devices_of(job, full.most_bytes / GIB), profile)
    assert max(stage.total for stage in decision.memory) <= full.most_bytes
    assert decision.simulation.step_s <= full.step_s
