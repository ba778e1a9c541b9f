"""Groups of layers that keep one input: what they hold, byte by byte, and that they are made where nothing else fits."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.when_not import job_of, on_devices_of
from megatron_lynx.cost.recompute import INSIDE
from megatron_lynx.errors import Infeasible
from megatron_lynx.plan.rule import CheckpointGroups
from megatron_lynx.plan.timetables import timetable_of
from megatron_lynx.planner import decide
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.stock import priced
from megatron_lynx.stock.setting import StockSetting
from megatron_lynx.units import GIB
from tests.solver.problems import catalogued_problems, grouped, least_memory, solve


def inputs_of(answer):
    """By layer: whether it keeps an input."""
    return [not attention.fed for attention, _ in answer.layers]


def held_at_most(answer, problem):
    """A walk through one backward: a group makes all of itself again when its last half begins, and goes half by half."""
    halves = list(answer.halves)
    own = [problem.inside[at].inside if half.checkpoint == INSIDE else half for at, half in enumerate(halves)]
    made = {}
    for at, half in enumerate(halves):
        same = (each for each in problem.halves[at].joined if half.joined and each.checkpoint == half.checkpoint)
        made[at] = next(same, own[at]).memory.regenerated
    resident = sum(half.memory.resident for half in halves)
    others = ceil((answer.in_flight - 1) * resident)
    most = resident + answer.loss_bytes
    there = {}
    for at in reversed(range(len(halves))):
        first = at
        while halves[first].checkpoint is not None and halves[first].checkpoint.fed:
            first -= 1
        there |= {each: made[each] for each in range(first, at + 1) if each not in there or each == at}
        most = max(most, resident + sum(there.values()) - halves[at].memory.less_in_hand)
        resident -= halves[at].memory.resident
        del there[at]
    return most + others


@settings(max_examples=12, deadline=None)
@given(catalogued_problems(), st.floats(0.0, 1.0))
def test_below_what_single_layers_hold_at_least_they_share_inputs(problem, part):
    single, least = least_memory(replace(problem, inside=())), least_memory(problem)
    if not grouped(least):  # no group is small enough to be there at once
        return
    budget = least.peak_bytes + int(part * max(0, single.peak_bytes - 1 - least.peak_bytes))
    limited = replace(problem, budget_bytes=budget)
    answer = solve(limited)
    assert answer.peak_bytes <= budget
    assert grouped(answer)
    assert held_at_most(answer, problem) <= answer.peak_bytes
    with pytest.raises(Infeasible):
        solve(replace(problem, inside=(), budget_bytes=budget))


@settings(max_examples=10, deadline=None)
@given(catalogued_problems())
def test_where_anything_else_fits_every_layer_has_its_own_input(problem):
    assert all(inputs_of(solve(problem)))


UNIFORM = ("llama3-70b", 8, 4, 32)


def decided(size):
    model, tensor, pipeline, microbatches = UNIFORM
    layout = {"tensor": tensor, "pipeline": pipeline, "microbatches": microbatches}
    job = job_of({"model": model, "cluster": "h800-80g", **layout})
    profile = analytic_profile(job)
    rival = priced(job, profile, StockSetting(method="uniform", layers=size))
    limited = on_devices_of(job, rival.most_bytes / GIB).model_copy(update={"policy": "planned"})
    return decide(limited, profile), rival


@pytest.mark.parametrize("size", [2, 3])
def test_a_plan_fits_where_uniform_with_several_layers_does(size):
    """None did: stock full of one layer each holds more here."""
    decision, rival = decided(size)
    assert max(stage.total for stage in decision.memory) <= rival.most_bytes
    assert decision.simulation.step_s <= rival.step_s
    rules = [rule for stage in decision.plan.stages for rule in stage.rules]
    assert any(isinstance(rule.checkpoint, CheckpointGroups) for rule in rules)


def test_the_plan_has_the_groups_that_were_chosen_weight_gradients_beside_them_or_not():
    """Rules that put weight gradients off in some layers once began groups of their own."""
    decision, _ = decided(2)
    assert any(rule.weight_gradients for stage in decision.plan.stages for rule in stage.rules)
    for answer in decision.stages:
        first_half = timetable_of(decision.plan, answer.stage).chunks[0]
        feeding = [half.feeds for half in first_half if half.half == "mlp"]
        assert feeding == [mlp.feeds for _, mlp in answer.chunks[0].layers]
