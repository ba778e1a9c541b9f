"""Checkpoints: a layer, a half or several layers keep one input; all inside runs again in backward, what communicates included.

Losses and gradients equal stock's in every bit, as everywhere; what is held is stock's full recomputation's; what is communicated
is counted: at most what stock communicates when it recomputes all, and less, as nobody needs a checkpoint's own output again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.timetables import timetable_of
from megatron_lynx.testbed.ranks import RankPool
from tests.long import long, with_models
from tests.tiny_jobs import tiny_job
from tests.transparency.checkpoints import FULL, checkpointed
from tests.transparency.plans import plan_for, recomputable
from tests.transparency.test_every_bit import LAYOUTS, checked
from tests.transparency.test_experts import STATEFUL, job_of
from tests.transparency.trials import Trial, stock_seen

Pools = Callable[[int], RankPool]


def kept_but_for(job: Job, checkpoint: Any, layers: Any = None) -> Plan:
    return checkpointed(plan_for(job, lambda layer: ()), checkpoint, layers)


@with_models(["one rank", "TP2", "TP2+SP", "PP2", "TP2xPP2xVPP2+SP"], combined=["TP2+SP"])
def test_every_bit(pool_of: Pools, layout: str, like: Any) -> None:
    job = tiny_job(like, **LAYOUTS[layout])
    candidates = [kept_but_for(job, one) for one in ("layer", "halves", "attention", "mlp", {"layers": 2}, {"layers": 3})]
    candidates.append(kept_but_for(job, "layer", (2, 3)))
    checked(pool_of, job, candidates, Trial(canaries=layout == "one rank"))


EXPERTS = {
    "one rank": Trial(model=STATEFUL, counted=True),
    "EP2": Trial(model=STATEFUL, counted=True),
    "TP2+SP, EP2, every second layer": Trial(counted=True),
    "PP2xVPP2, EP2": Trial(),
}


@pytest.mark.parametrize("layout", ["EP2", *long("one rank", "TP2+SP, EP2, every second layer", "PP2xVPP2, EP2")])
def test_tokens_travel_again_as_the_router_decided(pool_of: Pools, layout: str) -> None:
    """Rows are brought to their experts again, and back only where the next layer's input is made of them."""
    job, trial = job_of(layout), EXPERTS[layout]
    trial.training = {"ddp": True, "optimizer": "megatron"}
    candidates = [kept_but_for(job, one) for one in ("layer", "mlp", {"layers": 2})]
    for outcomes in checked(pool_of, job, candidates, trial):
        layers, groups = (Counter(outcomes[at].planned.collectives) - Counter(outcomes[0].stock.collectives) for at in (0, 2))
        if layout == "EP2":
            passes = job.model.layers * job.microbatches
            assert (layers["c10d::alltoall_base_"], groups["c10d::alltoall_base_"]) == (2 * passes, 2 * passes + passes // 2)


@pytest.mark.parametrize("layout", ["TP2xPP2xVPP2+SP", *long("TP2", "TP2+SP")])
def test_beside_halves_that_are_recomputed_in_windows(pool_of: Pools, layout: str) -> None:
    """A half that is checkpointed has windows for others: what is recomputed in them is not moved by what it communicates."""
    job = tiny_job("llama", **LAYOUTS[layout])
    everything = plan_for(job, lambda layer: recomputable(job, gather=job.parallel.sequence_parallel))
    some: tuple[tuple[Any, tuple[int, ...]], ...] = (("mlp", (1, 3)), ("layer", (2,)), ("attention", (2, 3)))
    for outcomes in checked(pool_of, job, [checkpointed(everything, *each) for each in some]):
        assert all(counts.in_windows > 0 for outcome in outcomes for counts in outcome.planned.counts)


AGAIN = {
    "TP2": ({"allreduce_": 1}, {"allreduce_": 2}),
    "TP2+SP": ({"_allgather_base_": 2, "_reduce_scatter_base_": 1}, {"_allgather_base_": 2, "_reduce_scatter_base_": 2}),
}
"""By layout: the collectives that a layer and micro-batch has more than without recomputation, ours and stock's."""


@pytest.mark.parametrize("layout", AGAIN)
def test_what_nobody_needs_is_not_communicated_again(pool_of: Pools, layout: str) -> None:
    """The attention half's output is reduced again, because the MLP half reads it; the MLP half's is not."""
    job, (more, more_of_stock) = tiny_job("gpt", **LAYOUTS[layout]), AGAIN[layout]
    [outcome] = checked(pool_of, job, [kept_but_for(job, "layer")], Trial(counted=True))[0]
    full = {**FULL, "recompute_num_layers": 1}
    recomputed = pool_of(job.gpus).run(stock_seen, job, Trial(counted=True, model=full))[0]
    times = job.model.layers * job.microbatches
    for again, seen in ((more, outcome.planned), (more_of_stock, recomputed)):
        found = Counter(seen.collectives) - Counter(outcome.stock.collectives)
        assert found == {f"c10d::{name}": times * count for name, count in again.items()}


def test_a_recomputation_from_one_input_is_traced_as_the_timetable_says(pool_of: Pools) -> None:
    job = tiny_job("gpt")
    plan = kept_but_for(job, {"layers": 2})
    [outcome] = checked(pool_of, job, [plan], Trial(steps=2, traced=True))[0]
    seen = [
        (event["layer"], event["half"])
        for event in outcome.planned.events
        if event["kind"] == "recompute" and event["micro_batch"] == 2
    ]
    backward = timetable_of(plan, 0).backward(0)
    tasks = [task for half in backward.halves for task in backward.at("enter", half.half)]
    assert seen == [task.half for task in tasks]
    assert seen == [(at, half) for group in ((3, 4), (1, 2)) for at in group for half in ("attention", "mlp")]
    assert all(moment.at == "enter" for moment in backward.tasks), "no window communicates"


def test_a_checkpoint_runs_again_where_backward_enters_it(pool_of: Pools) -> None:
    """Before the first collective of its own backward: with sequence parallelism that gathers its gradient, and comes before
    anything that was saved is asked for."""
    job = tiny_job("llama", **LAYOUTS["TP2+SP"])
    [outcome] = checked(pool_of, job, [kept_but_for(job, "layer")], Trial(steps=2, traced=True))[0]
    events = [event for event in outcome.planned.events if event["kind"] in ("recompute", "window") and event["micro_batch"] == 2]
    kinds = [(event["kind"], f"{event['window']}") for event in sorted(events, key=lambda one: one["start_s"])]
    for layer in range(1, job.model.layers + 1):
        window = next(at for at, (_, place) in enumerate(kinds) if place == f"bwd.mlp.0@{layer}")
        assert kinds[window - 1] == ("recompute", "on_demand")
