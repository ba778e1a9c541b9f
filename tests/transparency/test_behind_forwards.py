"""Plans that recompute in windows of forwards, which the planner does not make: they train, and memory comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest
from hypothesis import given

from megatron_lynx.config import Job
from megatron_lynx.plan import Plan
from megatron_lynx.planner import uniform_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.testbed.ranks import RankPool
from megatron_lynx.testbed.tiny_jobs import tiny_job
from tests.config.jobs import catalogued_job
from tests.plan.strategies import drawn, plans_for
from tests.transparency import test_experts
from tests.transparency.trials import Trial, compare_with_stock

RECEIVED = "pipe.recv_backward"
DENSE = {half: {"steady": f"fwd.{half}.0", "cooldown": RECEIVED} for half in ("attention", "mlp")}
EXCHANGES = {
    "attention": {"steady": "fwd.mlp.0", "cooldown": RECEIVED},
    "mlp": {"steady": "fwd.mlp.2", "cooldown": RECEIVED},
}
BEGUN = EXCHANGES | {"attention": {"steady": "fwd.mlp.0 until rotary then bwd.mlp.2", "cooldown": RECEIVED}}


def behind_forwards(job: Job, windows: Mapping[str, Any]) -> Plan:
    """All that may be is recomputed, on the first stage in these windows."""
    raw = uniform_plan(job, windows=False).model_dump(mode="json")
    first, *_ = raw["stages"]
    first["ahead_depth"] = 4
    for rule in first["rules"]:
        rule["windows"] = windows
    return Plan.model_validate(raw)


@pytest.mark.parametrize("like", ["gpt", "llama"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp+sp"])
def test_training_recomputes_every_half_behind_forwards_as_planned(
    pool_of: Callable[[int], RankPool], like: Literal["gpt", "llama"], sequence_parallel: bool
) -> None:
    """Gradients to the bit, and of the steady micro-batches every recomputation of the first stage is where it was planned."""
    job = tiny_job(like, tensor=2, pipeline=2, microbatches=4, sequence_parallel=sequence_parallel)
    plan = behind_forwards(job, DENSE)
    for rank, [outcome] in enumerate(pool_of(4).run(compare_with_stock, job, [plan], Trial(steps=1, traced=True))):
        assert outcome.differing == []
        recomputations = [event for event in outcome.planned.events if event["kind"] == "recompute" and event["micro_batch"] < 3]
        assert all(recompute["window"].startswith("fwd.") == (rank < 2) for recompute in recomputations)
        assert len({(recompute["layer"], recompute["half"]) for recompute in recomputations}) == 2 * job.model.layers // 2


def test_training_recomputes_while_tokens_of_later_micro_batches_travel(pool_of: Callable[[int], RankPool]) -> None:
    """Losses, gradients and weights to the bit. Of the steady micro-batches every recomputation of the first stage is where it
    was planned, wholly or begun there."""
    job, _ = experts()
    plans = [behind_forwards(job, windows) for windows in (EXCHANGES, BEGUN)]
    trial = Trial(training={"ddp": True, "optimizer": "megatron"}, steps=1, traced=True, counted=True)
    for rank, outcomes in enumerate(pool_of(4).run(compare_with_stock, test_experts.job_of("PP2, EP2"), plans, trial)):
        for outcome, begun in zip(outcomes, (False, True), strict=True):
            assert outcome.differing == []
            assert outcome.planned.frames_left == 0
            assert outcome.planned.collectives == outcome.stock.collectives, "in kind and order"
            recomputations = [
                event for event in outcome.planned.events if event["kind"] == "recompute" and event["micro_batch"] < 3
            ]
            windows = {(event["half"], event["window"].partition("@")[0]) for event in recomputations}
            expected = {("attention", "fwd.mlp.0"), ("mlp", "fwd.mlp.2"), *([("attention", "bwd.mlp.2")] if begun else [])}
            assert rank >= 2 or windows == expected


@pytest.mark.slow
def test_whatever_a_plan_says_of_exchanges_memory_comes_back() -> None:
    """Of drawn plans, among them some that recompute in exchanges of forwards what other windows go on with."""
    job, profile = experts()

    @drawn(30)
    @given(plans_for(job))
    def check(plan: Plan) -> None:
        for stage in range(2):
            held = rehearse(plan, profile).memory(stage).bytes
            assert min(held) >= 0 == held[-1]

    check()


def experts() -> tuple[Job, Profile]:
    """A job of four ranks that this machine can run, whose exchanges outlast all recomputation."""
    job = test_experts.job_of("PP2, EP2")
    priced = job.model_copy(update={"cluster": catalogued_job("gpt-22b", "h800-80g").cluster})
    profile = analytic_profile(priced)
    assert profile.experts is not None
    return priced, profile.model_copy(update={"experts": profile.experts.model_copy(update={"exchange_s": 1.0})})
