"""What a replay holds where it stops, and what a gather holds ahead of it, is what plans are priced with, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.anatomy import DENSE
from megatron_lynx.cost.replay import Checkpoint
from megatron_lynx.cost.section import priced
from megatron_lynx.plan.plan import Plan
from megatron_lynx.testbed.ranks import RankPool
from megatron_lynx.testbed.tiny_jobs import tiny_job
from tests.profiler.made_up import made_up_profile
from tests.transparency.ahead_bytes import held_after_tasks
from tests.transparency.checkpoints import ahead, checkpointed
from tests.transparency.plans import plan_for, replayable

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
def test_what_a_replay_holds_where_it_stops(pool_of: Pools, like: Any, case: str) -> None:
    layout, windows, gathers = CASES[case]
    job = tiny_job(like, tensor=2, layers=4, **layout)
    raw = plan_for(job, lambda layer: replayable(job, gather=bool(gathers))).model_dump(mode="json")
    raw["stages"][0]["ahead_depth"] = 4
    for rule in raw["stages"][0]["rules"][:2]:
        rule["windows"], rule["gather"] = windows, gathers
    checked(pool_of, job, Plan.model_validate(raw))


@pytest.mark.parametrize("how", [True, "gather"])
@pytest.mark.parametrize("like", ["gpt", "llama"])
def test_what_is_held_of_a_layer_that_begins_ahead(pool_of: Pools, like: Any, how: Any) -> None:
    """A gathered input has a buffer of its own, which is gone when the replay stops the next time. What a reduction reads is held
    by nobody but what travels (`test_ahead`)."""
    job = tiny_job(like, tensor=2, layers=3, microbatches=1, sequence_parallel=how == "gather")
    plan, profile = ahead(checkpointed(plan_for(job, lambda layer: ()), "layer"), how=how), made_up_profile(job)
    section = DENSE["attention"]
    checkpoint = Checkpoint(feeds=True, ahead_to=section.row_parallel, gathers_ahead=how == "gather")
    begun = priced(profile, section, checkpoint.items(section), checkpoint).begun
    stops = [section.row_parallel] if how is True else [section.column_parallel, section.row_parallel]
    travels = {section.row_parallel: profile.message_bytes if how == "gather" else 0}
    expected = [(layer, "attention", stop, begun[stop].bytes - travels.get(stop, 0)) for layer in (2, 1) for stop in stops]
    for held in pool_of(job.gpus).run(held_after_tasks, job, plan):
        assert held == expected


def checked(pool_of: Pools, job: Any, plan: Plan) -> None:
    profile = made_up_profile(job)
    for held in pool_of(job.gpus).run(held_after_tasks, job, plan):
        assert held
        for layer, half, until, size in held:
            section = DENSE[half]  # type: ignore[index]
            price = priced(profile, section, plan.stages[0].rule_for(layer).replays(section.half))
            stop = section.column_parallel if until == "gather" else until
            assert (layer, half, until, size) == (
                layer,
                half,
                until,
                price.stops[stop].bytes if stop else price.memory.regenerated,
            )
