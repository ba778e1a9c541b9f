"""What a planned step does beyond stock's: exactly the plan's recomputations, and nothing that communicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.config.job import Job
from megatron_lynx.cost.recompute import recomputed_flops
from megatron_lynx.plan.plan import Plan
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.testbed.ranks import RankPool
from tests.long import with_models
from tests.tiny_jobs import tiny_job
from tests.transparency.plans import plan_for, recomputable
from tests.transparency.trials import Seen, Trial, compare_with_stock

Pools = Callable[[int], RankPool]
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP2": {"tensor": 2},
    "TP2+SP": {"tensor": 2, "sequence_parallel": True},
    "PP2xVPP2": {"pipeline": 2, "microbatches": 4, "layers_per_chunk": 1},
}


def recomputed_by(job: Job, plan: Plan, stage: int) -> int:
    """FLOPs that one rank of a stage repeats in one step, by the cost model."""
    shape = LayerShape(job.model, job.parallel, job.batch.micro)
    rules = (entry.rule_for(layer) for entry in plan.chunks_of(stage) for layer in entry.layers)
    return job.microbatches * sum(recomputed_flops(shape, rule.recompute) for rule in rules)


@with_models(LAYOUTS)
def test_flops_and_collectives(pool_of: Pools, layout: str, like: Any) -> None:
    job = tiny_job(like, **LAYOUTS[layout])
    candidates = [plan_for(job, lambda layer: recomputable(job)), plan_for(job, lambda layer: ["core_attention", "activation"])]
    for rank, outcomes in enumerate(pool_of(job.gpus).run(compare_with_stock, job, candidates, Trial(steps=1, counted=True))):
        for plan, outcome in zip(candidates, outcomes, strict=True):
            extra = outcome.planned.flops - outcome.stock.flops
            assert extra == recomputed_by(job, plan, rank // job.parallel.tensor)
            assert extra > 0
            assert without_messages(outcome.planned) == without_messages(outcome.stock)
            assert Counter(outcome.planned.collectives) == Counter(outcome.stock.collectives)


def without_messages(seen: Seen) -> list[str]:
    """The collectives that were issued, in order. Messages are not among them: where gradients have groups of their own
    (`apply.hooks.steps`), those of one exchange are posted in another order than stock's."""
    return [name for name in seen.collectives if name not in ("c10d::send", "c10d::recv_")]


@pytest.mark.parametrize("windows", [False, True])
def test_gathered_once_for_recompute_and_weight_gradient(pool_of: Pools, windows: bool) -> None:
    """The GEMMs behind an all-gather are recomputed, and no gather is issued that stock would not have issued."""
    job = tiny_job("llama", tensor=2, sequence_parallel=True)
    plan = plan_for(job, lambda layer: recomputable(job, gather=True), windows=windows)
    for outcomes in pool_of(2).run(compare_with_stock, job, [plan], Trial(steps=1, counted=True)):
        planned, stock = outcomes[0].planned, outcomes[0].stock
        assert planned.flops - stock.flops == recomputed_by(job, plan, 0)
        assert Counter(planned.collectives) == Counter(stock.collectives)
        assert planned.counts[0].gathered == 2 * job.model.layers * job.microbatches


@pytest.mark.quick
def test_an_input_gathered_for_the_weight_gradient_alone(pool_of: Pools) -> None:
    """Story: linear_fc1 alone, from a kept norm's output, is recomputed before its GEMM runs. The gather was started, nobody
    waited for it, and the weight gradient was computed from whatever the buffer held."""
    job = tiny_job("gpt", tensor=2, sequence_parallel=True)
    plan = plan_for(job, lambda layer: ["linear_fc1"], windows=False)
    for outcomes in pool_of(2).run(compare_with_stock, job, [plan], Trial(steps=1)):
        assert outcomes[0].differing == []
        assert outcomes[0].planned.counts[0].gathered == job.model.layers * job.microbatches


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_nothing_notices_that_what_was_let_go_is_gone(pool_of: Pools, sequence_parallel: bool) -> None:
    """Canaries: freed activations are overwritten with NaN between forward and backward."""
    job = tiny_job("gpt", tensor=2, sequence_parallel=sequence_parallel)
    plan = plan_for(job, lambda layer: recomputable(job, gather=sequence_parallel))
    for outcomes in pool_of(2).run(compare_with_stock, job, [plan], Trial(canaries=True)):
        assert outcomes[0].differing == []
        halves = 2 * job.model.layers * job.microbatches
        assert outcomes[0].planned.overwritten > 3 * halves


def test_memory_does_not_grow(pool_of: Pools) -> None:
    """A dozen steps. Gloo's own thread may still hold a message when a step ends, so single steps may differ by one."""
    job = tiny_job("gpt", tensor=2, layers=2)
    plan = plan_for(job, lambda layer: recomputable(job))
    trial = Trial(steps=12, alive=True, training={"optimizer": None})
    message_bytes = job.model.seq * job.batch.micro * job.model.hidden * job.model.element_bytes
    for outcomes in pool_of(2).run(compare_with_stock, job, [plan], trial):
        planned = outcomes[0].planned
        assert planned.frames_left == 0
        assert max(planned.live_bytes[6:]) <= max(planned.live_bytes[:6]) + message_bytes
