"""The front of plans over budgets."""

from __future__ import annotations

from itertools import pairwise

from megatron_lynx.config import load_job
from megatron_lynx.config.job import Budget
from megatron_lynx.cost.update import update_s
from megatron_lynx.planner import decide
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.report.contents import devices_of, plans_over_budgets, point_of, stock_points, verdict_of
from megatron_lynx.units import GIB

JOB = load_job("jobs/llama3-8b-h800-80g")
PROFILE = analytic_profile(JOB)


def test_more_memory_is_never_slower_and_no_plan_is_over_its_budget() -> None:
    done: list[tuple[int, int]] = []
    points = list(plans_over_budgets(JOB, PROFILE, 4, lambda number, of: done.append((number, of))))
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert len(points) >= 3
    for before, after in pairwise(points):
        assert after.step_s <= before.step_s
    for each in points:
        assert each.memory_bytes is not None
        assert each.budget_bytes is not None
        assert each.memory_bytes <= each.budget_bytes


def test_a_point_says_what_its_plan_does() -> None:
    decision = decide(JOB, PROFILE)
    made = point_of(decision.plan, decision.simulation, decision.figures)
    assert made.step_s == decision.simulation.step_s + update_s(decision.job, PROFILE)
    rules = [rule for entry in decision.plan.stages for rule in entry.rules]
    assert set(made.recomputed.split(", ")) == {item for rule in rules for item in rule.recompute}
    assert made.exposed_s == max(decision.simulation.total(stage, "exposed_s") for stage in range(JOB.parallel.pipeline))
    (first, *_) = devices_of(decision.plan, {})
    assert first.bytes == decision.memory[0].total


def test_stock_settings_stand_beside_plans() -> None:
    none, selective, full = stock_points(JOB, PROFILE)
    assert [each.label for each in (none, selective, full)] == ["stock none", "stock selective", "stock full"]
    assert none.step_s < full.step_s
    assert (none.memory_bytes or 0) > (full.memory_bytes or 0)


def test_the_header_names_the_fastest_stock_setting_that_fits() -> None:
    none, selective, full = stock_points(JOB, PROFILE)
    plan = none._replace(by="plan", label="the plan", shown=True, step_s=0.9 * full.step_s)
    job = JOB.model_copy(update={"budget": Budget(memory_gib=((full.memory_bytes or 0) + 1) / GIB)})
    text = verdict_of([plan, none, selective, full], job)
    assert text.startswith("Simulated: ours is 1.11 times as fast as stock full, the fastest stock setting that fits into ")
    assert text.endswith(" (--recompute-granularity full --recompute-method uniform --recompute-num-layers 1).")
    near = verdict_of([plan._replace(step_s=0.99 * full.step_s), none, selective, full], job)
    assert near.endswith("within the error of such ratios, 2 %: measure both.")
    none_fits = JOB.model_copy(update={"budget": Budget(memory_gib=1.0)})
    assert "No stock setting fits into 1.00 GiB" in verdict_of([plan, none, selective, full], none_fits)
    assert verdict_of([plan], JOB) == "", "without a baseline"
