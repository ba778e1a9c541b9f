"""What a recomputation holds where it stops, what a gather holds ahead of it, and what else is there of what begins ahead, is
what plans are priced with, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_lynx.anatomy import DENSE
from megatron_lynx.config.job import Job
from megatron_lynx.cost.recompute import Checkpoint
from megatron_lynx.cost.section import Prices, priced
from megatron_lynx.cost.stage_memory import dispatched_bytes
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.timetables import timetable_of
from megatron_lynx.planner.loads import with_load
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.rehearsal import treated_halves
from megatron_lynx.testbed.ranks import RankPool
from tests.profiler.made_up import made_up_profile
from tests.tiny_jobs import tiny_job
from tests.transparency.ahead_bytes import bytes_begun, held_after_tasks
from tests.transparency.checkpoints import ahead, checkpointed
from tests.transparency.plans import plan_for, recomputable
from tests.transparency.test_experts import STATEFUL, job_of
from tests.transparency.test_overlapped import profile_of

Pools = Callable[[int], RankPool]

CASES: dict[str, tuple[dict[str, Any], dict[str, str], dict[str, str]]] = {
    "all-reduces": (
        {},
        {
            "attention": "bwd.mlp.0+1 until linear_qkv then bwd.attention.0+1 until rotary then bwd.mlp.0",
            "mlp": "bwd.attention.0+2 until linear_fc1 then bwd.mlp.0+1 until activation then bwd.attention.0+1",
        },
        {},
    ),
    "sequence parallel, gathered": (
        {"sequence_parallel": True},
        {
            "attention": "bwd.mlp.0 until rotary then bwd.mlp.2",
            "mlp": "bwd.attention.0+1 until activation then bwd.attention.2+1",
        },
        {"attention": "bwd.attention.0+1", "mlp": "bwd.mlp.0+1"},
    ),
    "sequence parallel, GEMMs kept": (
        {"sequence_parallel": True},
        {
            "attention": "bwd.mlp.0 until linear_qkv then bwd.mlp.1",
            "mlp": "bwd.attention.0+1 until linear_fc1 then bwd.attention.2+1",
        },
        {},
    ),
}
"""Layout, windows, gathers."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("like", ["gpt", "llama"])
def test_what_a_recomputation_holds_where_it_stops(pool_of: Pools, like: Any, case: str) -> None:
    layout, windows, gathers = CASES[case]
    job = tiny_job(like, tensor=2, layers=4, **layout)
    raw = plan_for(job, lambda layer: recomputable(job, gather=bool(gathers))).model_dump(mode="json")
    raw["stages"][0]["ahead_depth"] = 4
    for rule in raw["stages"][0]["rules"][:2]:
        rule["windows"], rule["gather"] = windows, gathers
    checked(pool_of, job, Plan.model_validate(raw))


@pytest.mark.parametrize("how", [True, "gather"])
@pytest.mark.parametrize("like", ["gpt", "llama"])
def test_what_is_held_of_a_layer_that_begins_ahead(pool_of: Pools, like: Any, how: Any) -> None:
    """A gathered input has a buffer of its own, which is gone when the recomputation stops the next time. What a reduction reads
    is held by nobody but what travels (`test_what_begins_ahead_holds_what_the_planner_says`)."""
    job = tiny_job(like, tensor=2, layers=3, microbatches=1, sequence_parallel=how == "gather")
    plan, profile = ahead(checkpointed(plan_for(job, lambda layer: ()), "layer"), how=how), made_up_profile(job)
    section = DENSE["attention"]
    checkpoint = Checkpoint(feeds=True, ahead_to=section.row_parallel, gathers_ahead=how == "gather")
    begun = priced(profile, section, checkpoint.items(section), checkpoint).stops
    stops = [section.row_parallel] if how is True else [section.column_parallel, section.row_parallel]
    travels = {section.row_parallel: profile.message_bytes if how == "gather" else 0}
    expected = [(layer, "attention", stop, begun[stop].bytes - travels.get(stop, 0)) for layer in (2, 1) for stop in stops]
    for held in pool_of(job.gpus).run(held_after_tasks, job, plan):
        assert held == expected


SP = {"tensor": 2, "layers": 3, "microbatches": 1, "sequence_parallel": True}
COUNTED: dict[str, tuple[Callable[[], Job], Any]] = {
    "TP2": (lambda: tiny_job("llama", tensor=2, layers=3, microbatches=2), True),
    "TP2+SP": (lambda: tiny_job("llama", **SP), True),
    "TP2+SP, behind a gather": (lambda: tiny_job("llama", **SP), "gather"),
    "EP2": (lambda: job_of("EP2", attention_dropout=0.0, hidden_dropout=0.0), True),
}
"""Without dropout, whose random states are on the host of a GPU and on the device here."""


@pytest.mark.parametrize("layout", COUNTED)
def test_what_begins_ahead_holds_what_the_planner_says(pool_of: Pools, layout: str) -> None:
    """To the byte; rows of tokens are counted as in hand, here those of a rank that gets all of them. While a gather travels
    gloo has a copy of what it gathers."""
    made, how = COUNTED[layout]
    job = made()
    plan = ahead(checkpointed(plan_for(job, lambda layer: ()), "layer"), expert=job.parallel.expert, how=how)
    loaded = with_load(job, 2.0) if job.model.experts else job
    profile = profile_of(loaded) if job.model.experts else made_up_profile(job)
    rows_bytes = dispatched_bytes(LayerShape.of(loaded)) if job.model.experts else 0
    said = said_of(plan, profile) * job.microbatches
    extra = STATEFUL if job.model.experts else {}
    runs = (pool_of(job.gpus).run(bytes_begun, job, plan, extra)[0] for _ in range(RUNS))
    tried = []
    for found in runs:
        assert len(found) == len(said) > 0
        counted, expected = found, said
        if how == "gather":
            copied = {one - other for one, other in zip(found[::2], said[::2], strict=True)}
            assert copied <= {0, profile.message_bytes}
            counted, expected = ([sum(both) for both in batched(each)] for each in (found, said))
        tried.append(counted)
        if all(other <= one <= other + rows_bytes for one, other in zip(counted, expected, strict=True)):
            return
    raise AssertionError((tried, said))


RUNS = 3
"""A thread of gloo may free a copy between two marks instead of before them; what is held too long is held in every run."""


def batched(values: list[int]) -> Iterator[tuple[int, int]]:
    """What is gathered, and what goes on from there."""
    return zip(values[::2], values[1::2], strict=True)


def said_of(plan: Plan, profile: Profile) -> list[int]:
    """What the simulator takes for what begins ahead, in the order of a backward of the first stage."""
    timetable, prices = timetable_of(plan, 0), Prices(profile)
    halves = {half.planned.key: half for half in treated_halves(plan.stages[0], timetable.chunks[0], prices)}
    found, backward = [], timetable.backward(0)
    for half in backward.halves:
        first, *others = [backward.at("after", wait.window) for wait in half.waits] or [()]
        for tasks in (backward.at("enter", half.half), first, backward.at("core", half.half), *others):
            if any(task.do == "begin" for task in tasks):
                found.append(sum(halves[task.half].part(task).bytes for task in tasks))
    return found


def checked(pool_of: Pools, job: Any, plan: Plan) -> None:
    profile = made_up_profile(job)
    for held in pool_of(job.gpus).run(held_after_tasks, job, plan):
        assert held
        for layer, half, until, size in held:
            section = DENSE[half]  # type: ignore[index]
            price = priced(profile, section, plan.stages[0].rule_for(layer).recomputed_in(section.half))
            stop = section.column_parallel if until == "gather" else until
            assert (layer, half, until, size) == (
                layer,
                half,
                until,
                price.stops[stop].bytes if stop else price.memory.regenerated,
            )
