"""The front of plans over budgets."""

from __future__ import annotations

from itertools import pairwise

from megatron_lynx.anatomy import ITEMS
from megatron_lynx.config import load_job
from megatron_lynx.config.job import Budget
from megatron_lynx.cost.update import update_s
from megatron_lynx.planner import decide
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.report.contents import plans_over_budgets, point_of, stock_points, verdict_of
from megatron_lynx.units import GIB, format_bytes, format_seconds

JOB = load_job("jobs/llama3-8b-h800-80g")
PROFILE = analytic_profile(JOB)


def test_more_memory_is_never_slower_and_no_plan_is_over_its_budget() -> None:
    done: list[tuple[int, int]] = []
    points = list(plans_over_budgets(JOB, PROFILE, 4, lambda number, of: done.append((number, of))))
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert len(points) >= 3
    for before, after in pairwise(points):
        assert after["step_s"] <= before["step_s"]
    for each in points:
        assert each["memory_bytes"] is not None
        assert each["budget_bytes"] is not None
        assert each["memory_bytes"] <= each["budget_bytes"]
        assert all(sum(stage["memory_bytes"].values()) <= each["memory_bytes"] for stage in each["stages"])


def test_a_point_says_what_its_plan_does() -> None:
    decision = decide(JOB, PROFILE)
    made = point_of(decision, PROFILE, "the plan", 0)
    assert made["step_s"] == decision.simulation.step_s + update_s(decision.job, PROFILE)
    stage, entry = made["stages"][0], decision.plan.stages[0]
    assert [name for treatment in stage["treatments"][:2] for name, _ in treatment["items"]] == list(ITEMS)
    recomputed = {name for treatment in stage["treatments"][:2] for name, what in treatment["items"] if what == "recompute"}
    assert recomputed == set(entry.rules[0].recompute)
    assert sum(stage["memory_bytes"].values()) == decision.memory[0].total


def test_stock_settings_stand_beside_plans() -> None:
    none, selective, full = stock_points(JOB, PROFILE)
    assert [each["label"] for each in (none, selective, full)] == ["stock none", "stock selective", "stock full"]
    assert none["step_s"] < full["step_s"]
    assert (none["memory_bytes"] or 0) > (full["memory_bytes"] or 0)


def test_the_header_names_the_fastest_stock_setting_that_fits() -> None:
    none, selective, full = stock_points(JOB, PROFILE)
    plan = {**none, "by": "plan", "label": "the plan", "shown": True, "step_s": 0.9 * full["step_s"]}
    job = JOB.model_copy(update={"budget": Budget(memory_gib=((full["memory_bytes"] or 0) + 1) / GIB)})
    text = verdict_of([plan, none, selective, full], job)  # type: ignore[list-item]
    assert "10.0 % less than the fastest of stock none, stock selective, stock full that fits" in text
    assert text.endswith(
        f": stock full takes {format_seconds(full['step_s'])} a step in {format_bytes(full['memory_bytes'] or 0)}."
    )
    near = verdict_of([{**plan, "step_s": 0.99 * full["step_s"]}, none, selective, full], job)  # type: ignore[list-item]
    assert near.endswith("within the error of such ratios, 2 %: measure both.")
    none_fits = JOB.model_copy(update={"budget": Budget(memory_gib=1.0)})
    assert "none fits 1.00 GiB" in verdict_of([plan, none, selective, full], none_fits)  # type: ignore[list-item]
    assert verdict_of([plan], JOB) == "", "without a baseline"  # type: ignore[list-item]
