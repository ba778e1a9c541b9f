"""Weight gradients beside mixtures of experts: tokens travel while they run, those of attention and those of shared experts.

Main gradients, weights and losses are stock's in every bit; experts' gradients are reduced by a group of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.anatomy import ATTENTION, EXPERTS_WITH_SHARED
from megatron_lynx.anatomy.address import is_forward
from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.testbed.ranks import RankPool
from tests.long import long
from tests.transparency.deferring import deferring
from tests.transparency.plans import plan_for, replayable
from tests.transparency.test_experts import STATEFUL, exchanging, job_of
from tests.transparency.test_weight_gradients import FUSED, counts_of
from tests.transparency.trials import Trial

Pools = Callable[[int], RankPool]
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
    """Everything kept, and everything replayed in exchanges of tokens or on demand."""
    kept = exchanging(plan_for(job, lambda layer: (), windows=False), {})
    replayed = plan_for(job, lambda layer: [item for item in replayable(job) if item != "mlp_bda"], windows=False)
    return kept, exchanging(replayed, {"mlp": "bwd.mlp.0", "attention": "bwd.mlp.2"})


@pytest.mark.parametrize("layout", ["EP2", *long("PP2, EP2")])
def test_while_tokens_travel(pool_of: Pools, layout: str) -> None:
    """Shared experts' linears and attention's, into exchanges of the same layer, of the layer below and of forwards; with few
    bytes."""
    job = with_shared(job_of(layout, layers=2 if layout == "EP2" else 4))
    kept, replayed = plans(job)
    candidates = [
        deferring(kept, LINEARS, into_exchanges),
        deferring(replayed, LINEARS, lambda wait: into_exchanges(wait) and is_forward(wait)),
        deferring(replayed, LINEARS, into_exchanges, most_bytes=20_000),
    ]
    for at_once, later, bounded in counts_of(pool_of, job, candidates, trial_of(**STATEFUL)):
        assert at_once.deferred == later.deferred == bounded.deferred > 0
        assert at_once.filled > later.filled > 0, "the last ones have no forward behind them"
        assert 0 < bounded.deferred_bytes <= 20_000 < later.deferred_bytes
