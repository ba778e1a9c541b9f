"""Experts whose tokens travel by DeepEP's or HybridEP's kernels (Megatron's flex dispatcher): stand-ins of their buffers, over
all-to-alls, whose outputs are NaN until what travelled is waited for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.testbed.ranks import RankError, RankPool
from tests.long import long
from tests.tiny_jobs import tiny_job
from tests.transparency.checkpoints import checkpointed
from tests.transparency.plans import plan_for, recomputable
from tests.transparency.test_every_bit import checked
from tests.transparency.test_experts import EXPERTS, exchanging, trial_of, window_names

Pools = Callable[[int], RankPool]

LAYOUTS = {
    "EP2": {"replicas": 2, "expert": 2, "layers": 2},
    "TP2+SP x EP2": {"tensor": 2, "sequence_parallel": True, "replicas": 2, "expert": 2, "expert_tensor": 2, "layers": 2},
    "PP2 x EP2": {"pipeline": 2, "microbatches": 4, "replicas": 2, "expert": 2, "layers": 2},
    "experts cut": {"tensor": 2, "sequence_parallel": True, "layers": 2},
}


def job_of(layout: str, dispatcher: str, **experts: object) -> Job:
    mixture = {**EXPERTS, "dispatcher": dispatcher, **experts}
    return tiny_job("gpt", **LAYOUTS[layout], experts=mixture, bias=False)


def in_windows(job: Job, windows: dict[str, object], layers: tuple[int, ...] = (1, 2)) -> Plan:
    """Everything recomputed that can be before the first exchange of a backward, in these windows."""
    items = [item for item in recomputable(job) if item != "mlp_bda"]
    return exchanging(plan_for(job, lambda layer: items if layer in layers else (), windows=False), windows, layers)


def test_exchanges_of_deepep_are_windows(pool_of: Pools) -> None:
    """Two in each pass: probabilities travel with their tokens."""
    job = job_of("EP2", "deepep", shared_ffn=32)
    windows = {"mlp": "bwd.mlp.0", "attention": "bwd.mlp.1"}
    for [outcome] in checked(pool_of, job, [in_windows(job, windows)], trial_of(steps=3)):
        assert outcome.planned.collectives == outcome.stock.collectives, "in kind and order"
        assert outcome.planned.counts[-1].on_demand == 0
        assert outcome.planned.counts[-1].in_windows > 0
        assert window_names(outcome) == {f"{way}.mlp.{n}@{layer}" for way in ("fwd", "bwd") for layer in (1, 2) for n in (0, 1)}


@pytest.mark.parametrize(
    ("layout", "dispatcher"),
    [("TP2+SP x EP2", "deepep"), ("EP2", "hybridep"), *long(("experts cut", "deepep"), ("TP2+SP x EP2", "hybridep"))],
)
def test_every_bit(pool_of: Pools, layout: str, dispatcher: str) -> None:
    job = job_of(layout, dispatcher)
    candidates = [plan_for(job, lambda layer: ()), plan_for(job, lambda layer: recomputable(job))]
    for outcomes in checked(pool_of, job, candidates, trial_of()):
        for outcome in outcomes:
            assert sorted(outcome.planned.collectives) == sorted(outcome.stock.collectives)


@pytest.mark.parametrize("dispatcher", ["deepep", *long("hybridep")])
def test_tokens_travel_again_in_a_checkpoint(pool_of: Pools, dispatcher: str) -> None:
    """As the router decided, and the dispatcher is then as its forward left it."""
    job = job_of("EP2", dispatcher)
    kept = plan_for(job, lambda layer: ())
    checked(pool_of, job, [checkpointed(kept, one) for one in ("layer", "mlp")], trial_of(steps=3))


def test_a_plan_for_another_dispatcher_is_refused(pool_of: Pools) -> None:
    """Its windows are others: one of the all-to-all's is none of DeepEP's."""
    job = job_of("EP2", "deepep")
    plan = in_windows(job_of("EP2", "alltoall"), {"mlp": "bwd.mlp.0", "attention": "bwd.mlp.2"})
    with pytest.raises(RankError, match="found alltoall, needed deepep, as this run has it"):
        checked(pool_of, job, [plan], trial_of())
