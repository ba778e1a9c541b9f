"""Halves of experts that fall back to checkpoints when more rows come than a stage's bytes hold for, whatever they do otherwise.

The ranks that share out a layer's experts decide alike: if one of them did not, another would wait for its tokens for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lynx.config.job import Job
from megatron_lynx.kinds.experts.saved import saved_parts
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner.nearest import with_load
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.testbed.ranks import RankPool
from tests.long import long
from tests.plan.strategies import drawn
from tests.te_releases import folder_of, python_path
from tests.transparency.load_trials import held_in_backward
from tests.transparency.plans import plan_for, replayable
from tests.transparency.test_experts import STATEFUL, exchanging, job_of
from tests.transparency.trials import Outcome, Trial, compare_with_stock

Pools = Callable[[int], RankPool]

EXPERTS_ITEMS = ("pre_mlp_layernorm", "experts_fc1", "experts_activation")
MOST_LOAD = 2.0
"""Of two ranks with two experts each, of which every token passes two."""


def holding(plan: Plan, load: float) -> Plan:
    """The same plan for experts over two ranks, whose stages say which load their bytes hold for."""
    raw = plan.model_dump(mode="json")
    raw["parallel"]["expert"] = 2
    for stage in raw["stages"]:
        stage["experts_hold"] = load
    return Plan.model_validate(raw)


def candidates_of(job: Job) -> list[Plan]:
    """Halves of experts that are kept whole, whose experts run again on demand, and of which all runs again with a mask."""
    kept, experts = plan_for(job, lambda layer: ()), plan_for(job, lambda layer: EXPERTS_ITEMS, windows=False)
    return [kept, experts, plan_for(job, lambda layer: replayable(job), windows=False)]


def fallen(pool_of: Pools, job: Job, plans: list[Plan], **trial: Any) -> list[list[Outcome]]:
    """Outcomes by rank. Every bit is stock's, nothing is left, and ranks of one stage fell back as often."""
    ranks = pool_of(job.gpus).run(compare_with_stock, job, plans, Trial(counted=True, **trial))
    of_stage = job.gpus // job.parallel.pipeline
    for rank, outcomes in enumerate(ranks):
        first = ranks[rank // of_stage * of_stage]
        for plan, outcome, beside in zip(plans, outcomes, first, strict=True):
            assert outcome.differing == [], f"rank {rank}, plan {plan.model_dump_json()}"
            assert outcome.planned.frames_left == 0
            assert [each.fell_back for each in outcome.planned.counts] == [each.fell_back for each in beside.planned.counts]
    return ranks


@pytest.mark.parametrize("layout", ["EP2", "TP2+SP, EP2, every second layer", "PP2, EP2", *long("PP2xVPP2, EP2")])
def test_every_bit(pool_of: Pools, layout: str) -> None:
    job = job_of(layout)
    candidates = candidates_of(job)
    plans = [*(holding(plan, 1.0) for plan in candidates), holding(candidates[0], MOST_LOAD)]
    for outcomes in fallen(pool_of, job, plans, steps=2, canaries=True):
        for at, outcome in enumerate(outcomes):
            fell_back = sum(each.fell_back for each in outcome.planned.counts)
            assert (fell_back > 0) == (at < len(candidates)), "a load is above 1 somewhere, and never above 2"
            extra = len(outcome.planned.collectives) - len(outcome.stock.collectives)
            assert (extra > 0) == (outcome.planned.counts[-1].fell_back > 0), "tokens travel again, and nothing else"


def test_a_rank_without_tokens(pool_of: Pools) -> None:
    """All tokens go to the experts of the first rank, twice its share. Where bytes hold for half as much more, three of four
    halves fit, and the last one falls back, on both ranks."""
    job = job_of("EP2")
    plans = [holding(plan, 1.5) for plan in candidates_of(job)]
    for outcomes in fallen(pool_of, job, plans, steps=2, model=STATEFUL, starved=True, backward_thread=True):
        for outcome in outcomes:
            assert outcome.planned.counts[-1].fell_back == job.microbatches


def test_rows_that_went_with_a_half_leave_room_for_the_next(pool_of: Pools) -> None:
    """Two micro-batches of two halves are in flight on the first stage, and three of these four fit: every second micro-batch has
    one that falls back, and the one behind it finds room for both."""
    job = job_of("PP2, EP2")
    plan = holding(candidates_of(job)[0], 1.5)
    for outcomes in fallen(pool_of, job, [plan], steps=2, model=STATEFUL, starved=True)[: job.gpus // 2]:
        assert outcomes[0].planned.counts[-1].fell_back == job.microbatches // 2


def test_windows_leave_what_fell_back_to_its_backward(pool_of: Pools) -> None:
    """A checkpoint communicates, and so no window runs it: those of halves that do not fall back are filled as before."""
    job = job_of("EP2", layers=2)
    own = plan_for(job, lambda layer: [item for item in replayable(job) if item != "mlp_bda"], windows=False)
    windowed = exchanging(own, {"mlp": "bwd.mlp.0", "attention": "bwd.mlp.2"})
    for outcomes in fallen(pool_of, job, [windowed, holding(windowed, MOST_LOAD), holding(windowed, 1.0)], steps=2):
        usual, held, fell = (outcome.planned.counts[-1] for outcome in outcomes)
        assert (usual.on_demand, usual.fell_back) == (held.on_demand, held.fell_back) == (0, 0)
        assert fell.on_demand == fell.fell_back > 0
        assert fell.hidden == usual.hidden - fell.fell_back


def test_waits_of_forwards_leave_what_fell_back_to_its_backward(pool_of: Pools) -> None:
    """Backward has not come to it then: it would communicate in the wait for others' tokens."""
    job = job_of("PP2, EP2", layers=2)
    own = plan_for(job, lambda layer: [item for item in replayable(job) if item != "mlp_bda"], windows=False)
    windowed = exchanging(own, {"mlp": {"steady": "fwd.mlp.2", "cooldown": "bwd.mlp.0"}}, layers=(1,))
    for rank, outcomes in enumerate(fallen(pool_of, job, [windowed, holding(windowed, 1.0)], steps=2)):
        usual, fell = (outcome.planned.counts[-1] for outcome in outcomes)
        if rank < job.gpus // 2:
            assert usual.hidden > 0 < fell.fell_back
        assert fell.hidden == usual.hidden - min(usual.hidden, fell.fell_back)


def test_attention_is_recomputed_while_a_half_that_may_fall_back_is_recorded(pool_of: Pools) -> None:
    """Its dispatch is recorded under default hooks, and waits in the middle of that: a plan of the planner's ended in step 1 with
    "a replayed activation has no second derivative"."""
    job = job_of("PP2, EP2")
    own = plan_for(job, lambda layer: [item for item in replayable(job) if not item.endswith("_bda")], windows=False)
    steady = "fwd.mlp.0 until rotary then bwd.mlp.2"
    windowed = exchanging(own, {"attention": {"steady": steady, "cooldown": "bwd.mlp.2"}, "mlp": "bwd.mlp.0"})
    for rank, (outcome,) in enumerate(fallen(pool_of, job, [holding(windowed, 1.01)], steps=2, traced=True)):
        replays = [event["window"] for event in outcome.planned.events if event["kind"] == "replay"]
        assert any(f"{window}".startswith("fwd.mlp.0") for window in replays) == (rank < job.gpus // 2)


@pytest.mark.parametrize("layout", ["EP2", *long("PP2, EP2")])
def test_drawn_loads(pool_of: Pools, layout: str) -> None:
    """Whatever comes and whatever the plan holds for, bits are stock's; the more it holds for, the fewer halves fall back."""
    job = job_of(layout)

    @drawn(3)
    @given(st.floats(1.0, MOST_LOAD), st.sampled_from(range(3)), st.booleans())
    def check(load: float, which: int, starved: bool) -> None:
        plan = candidates_of(job)[which]
        plans = [holding(plan, each) for each in (load, (load + MOST_LOAD) / 2)]
        for outcomes in fallen(pool_of, job, plans, model=STATEFUL, starved=starved):
            less, more = (outcome.planned.counts[-1] for outcome in outcomes)
            assert less.fell_back >= more.fell_back

    check()


def test_what_is_held_is_bounded(pool_of: Pools) -> None:
    """Of four halves that get twice their share each, as many keep their rows as the plan holds for. Of the others what rows
    leave is gone, and there are an input, what the router decided, and random states."""
    job = job_of("EP2")
    kept = plan_for(job, lambda layer: ())
    plans = [kept, *(holding(kept, load) for load in (2.0, 1.5, 1.0))]
    (first, second) = pool_of(job.gpus).run(held_in_backward, job, plans, STATEFUL)
    assert [fell_back for _, fell_back in first] == [fell_back for _, fell_back in second]
    assert [fell_back for _, fell_back in first] == [job.microbatches * halves for halves in (0, 0, 1, 2)]
    usual, all_kept, one_less, two_less = (held for held, _ in first)
    assert 0 <= all_kept - usual <= 16, "two ranks' counts of rows"
    parts = saved_parts(LayerShape.of(with_load(job, MOST_LOAD)))
    rows = sum(parts[item] for item in ("dispatch", "experts_fc1", "experts_activation", "experts_fc2"))
    kept_instead = parts["input"] + parts["router"] + 2 * torch.get_rng_state().nbytes
    for less in (all_kept - one_less, one_less - two_less):
        assert rows - kept_instead <= less <= rows


@pytest.mark.parametrize("release", long("0.17", "0.18", "0.19"))
def test_other_releases(release: str) -> None:
    job = job_of("EP2")
    plans = [holding(plan, 1.0) for plan in candidates_of(job)]
    with RankPool(2, env={"PYTHONPATH": python_path(folder_of("MEGATRON_CORE", release, "megatron/core"))}) as pool:
        for outcomes in fallen(lambda ranks: pool, job, plans, steps=2, canaries=True):
            assert all(sum(each.fell_back for each in outcome.planned.counts) > 0 for outcome in outcomes)
