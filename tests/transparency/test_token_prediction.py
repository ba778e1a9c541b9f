"""Multi-token prediction under plans: its layers keep everything, those before them are planned, and every bit is stock's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.config.job import Job
from megatron_lynx.errors import PlanMismatch
from megatron_lynx.testbed.ranks import RankPool
from tests.apply import on_ranks
from tests.deferring import deferring
from tests.te_releases import pool_with
from tests.tiny_jobs import tiny_job
from tests.transparency.test_every_bit import checked
from tests.transparency.trials import Trial
from tests.uniform import uniform_plan

Pools = Callable[[int], RankPool]

EXPERTS = {"count": 4, "per_token": 2, "ffn": 32, "layers": ("2",)}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank": ("gpt", {"layers": 2}),
    "TP2+SP": ("gpt", {"layers": 2, "tensor": 2, "sequence_parallel": True}),
    "PP2": ("llama", {"layers": 3, "pipeline": 2, "partition": (2, 1), "microbatches": 4}),
    "PP2xVPP2, two more tokens": ("gpt", {"pipeline": 2, "layers_per_chunk": 1, "microbatches": 4, "mtp": 2}),
    "EP2": ("llama", {"layers": 2, "experts": EXPERTS, "replicas": 2, "expert": 2}),
}
LONG = ("PP2xVPP2, two more tokens", "EP2")


def job_of(layout: str, **more: Any) -> Job:
    like, sizes = LAYOUTS[layout]
    return tiny_job(like, **{"mtp": 1, **sizes, **more})


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in LAYOUTS])
def test_every_bit(pool_of: Pools, layout: str) -> None:
    """Collectives of the layers that predict are no windows: those of the others keep their names, and each runs once."""
    job = job_of(layout)
    plans = [uniform_plan(job), uniform_plan(job, windows=False)]
    if job.parallel.tensor > 1:
        plans += [uniform_plan(job, gather="once"), deferring(uniform_plan(job))]
    trial = Trial(training={"ddp": True}, model={"gradient_accumulation_fusion": job.parallel.tensor > 1}, counted=True)
    for outcomes in checked(pool_of, job, plans, trial):
        for outcome in outcomes:
            assert sorted(outcome.planned.collectives) == sorted(outcome.stock.collectives)


@pytest.mark.long
@pytest.mark.parametrize(("te", "core"), [("2.14", "0.17"), ("2.14", "0.18"), ("2.17", "0.19")])
def test_other_releases(te: str, core: str) -> None:
    """Transformer Engine's layers, its compiled part stood in for."""
    job = job_of("TP2+SP", implementation="transformer_engine")
    pool = pool_with(te, job.gpus, core)
    try:
        checked(lambda _: pool, job, [uniform_plan(job)])
    finally:
        pool.close()


@pytest.mark.long
def test_one_layer_that_predicts_all_tokens() -> None:
    """`--mtp-use-repeated-layer`, from 0.17 on: the layer is called for each of them."""
    job = job_of("TP2+SP", implementation="transformer_engine", mtp=2)
    pool = pool_with("2.17", job.gpus, "0.19")
    try:
        checked(lambda _: pool, job, [uniform_plan(job)], Trial(model={"mtp_use_repeated_layer": True}))
    finally:
        pool.close()


@pytest.mark.parametrize(("planned", "live"), [(0, 1), (1, 0)])
def test_a_plan_made_without_is_refused_with_it_and_the_other_way_round(pool_of: Pools, planned: int, live: int) -> None:
    [refusal] = pool_of(1).run(
        on_ranks.refused, job_of("one rank", mtp=live), uniform_plan(job_of("one rank", mtp=planned)), None
    )
    assert isinstance(refusal.error, PlanMismatch)
    assert refusal.places == ["plan: model.mtp"]
    assert refusal.changed == []
