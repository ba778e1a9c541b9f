"""Weight gradients beside mixtures of experts: tokens travel while they run, those of attention and those of shared experts.

Main gradients, weights and losses are stock's in every bit; experts' gradients are reduced by a group of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.anatomy import ATTENTION, EXPERTS, EXPERTS_WITH_SHARED
from megatron_lynx.anatomy.address import is_forward
from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.testbed.ranks import RankPool
from tests.deferring import deferring
from tests.long import long
from tests.transparency.plans import plan_for, recomputable
from tests.transparency.queued import held_bytes
from tests.transparency.test_experts import STATEFUL, exchanging, job_of
from tests.transparency.test_weight_gradients import FUSED, counts_of
from tests.transparency.trials import Trial

Pools = Callable[[int], RankPool]
BOUND = 20_000
LINEARS = ATTENTION.linears + EXPERTS_WITH_SHARED.linears
EXCHANGES = tuple(f"{passing}.mlp.{number}" for passing in ("fwd", "bwd") for number in range(3))


def with_shared(job: Job) -> Job:
    experts = job.model.experts.model_copy(update={"shared_ffn": 32})  # type: ignore[union-attr]
    return job.model_copy(update={"model": job.model.model_copy(update={"experts": experts})})


def into_exchanges(wait: str) -> bool:
    return wait[:9] in EXCHANGES


def trial_of(**model: Any) -> Trial:
    return Trial(training={"ddp": True, "optimizer": "megatron"}, model={**FUSED, **model}, traced=True)


def plans(job: Job) -> tuple[Plan, Plan]:
    """Everything kept, and everything recomputed in exchanges of tokens or on demand."""
    kept = exchanging(plan_for(job, lambda layer: (), windows=False), {})
    recomputed = plan_for(job, lambda layer: [item for item in recomputable(job) if item != "mlp_bda"], windows=False)
    return kept, exchanging(recomputed, {"mlp": "bwd.mlp.0", "attention": "bwd.mlp.2"})


@pytest.mark.parametrize("layout", ["EP2", *long("PP2, EP2")])
def test_while_tokens_travel(pool_of: Pools, layout: str) -> None:
    """Attention's linears, shared experts' and those of each expert, into exchanges of the same layer, of the layer below and of
    forwards; with few bytes. Other tokens in every step; at last none for the experts of the second rank."""
    job = with_shared(job_of(layout, layers=2 if layout == "EP2" else 4))
    kept, recomputed = plans(job)
    candidates = [
        deferring(kept, LINEARS, into_exchanges),
        deferring(recomputed, LINEARS, lambda wait: into_exchanges(wait) and is_forward(wait)),
        deferring(recomputed, LINEARS, into_exchanges, most_bytes=BOUND),
    ]
    for starved in (False, True):
        trial = trial_of(**STATEFUL)
        trial.starved = starved
        for at_once, later, bounded in counts_of(pool_of, job, candidates, trial):
            assert at_once.deferred == later.deferred == bounded.deferred > 0
            assert at_once.filled > later.filled > 0, "the last ones have no forward behind them"
            assert 0 < bounded.deferred_bytes <= BOUND < later.deferred_bytes


def test_experts_alone_while_backward_reduces(pool_of: Pools) -> None:
    """Their gradients are reduced by a group of their own, which finds them whole; so does the optimizer."""
    job = job_of("EP2", layers=2)
    job = job.model_copy(update={"gpus": 2, "batch": job.batch.model_copy(update={"global_": 3 * job.batch.global_ // 2})})
    kept, _ = plans(job)
    trial = trial_of()
    trial.training |= {"overlap_grad_reduce": True}
    for counts in counts_of(pool_of, job, [deferring(kept, EXPERTS.linears, into_exchanges)], trial):
        assert counts[0].filled > 0


def test_what_is_counted_is_held(pool_of: Pools) -> None:
    """At every moment, whatever tokens come: all experts of a rank look into one block of rows, which counts once for each."""
    job = job_of("EP2", layers=2)
    plan = deferring(plans(job)[0], EXPERTS.linears, into_exchanges)
    for held in pool_of(2).run(held_bytes, job, plan):
        assert max(held.counted) == held.most > 0
        assert held.alive[-1] == held.counted[-1] == 0
        assert held.graphs == 0


CUT = "TP2+SP, experts cut"
CHUNKED = "PP2xVPP2, EP2"


@pytest.mark.parametrize("dispatcher", long("alltoall", "allgather"))
def test_experts_that_are_cut(pool_of: Pools, dispatcher: str) -> None:
    """Each rank's part of every expert, from the rows of all ranks of the group, beside its collectives; with few bytes."""
    job = job_of(CUT, layers=2)
    recomputed = plan_for(job, lambda layer: [item for item in recomputable(job) if item != "mlp_bda"])
    candidates = [
        deferring(plan_for(job, lambda layer: ()), LINEARS),
        deferring(recomputed, LINEARS),
        deferring(recomputed, LINEARS, most_bytes=BOUND),
    ]
    for rank in counts_of(pool_of, job, candidates, trial_of(moe_token_dispatcher_type=dispatcher, **STATEFUL)):
        kept, again, bounded = rank
        assert kept.deferred == again.deferred == bounded.deferred > 0
        assert kept.filled > 0 < again.filled
        assert 0 < bounded.deferred_bytes <= BOUND < again.deferred_bytes


def test_chunks_of_experts(pool_of: Pools) -> None:
    """Of each chunk's experts, while tokens of another chunk travel, or its own; in forwards alone; with few bytes, which each
    chunk has for itself."""
    job = job_of(CHUNKED)
    kept, recomputed = plans(job)
    candidates = [
        deferring(kept, EXPERTS.linears, lambda wait: into_exchanges(wait) and is_forward(wait)),
        deferring(recomputed, LINEARS, most_bytes=BOUND),
    ]
    for forwards, bounded in counts_of(pool_of, job, candidates, trial_of(**STATEFUL)):
        assert bounded.deferred > forwards.deferred > 0
        assert bounded.filled > 0 < forwards.filled
        assert 0 < bounded.deferred_bytes <= job.chunks * BOUND
