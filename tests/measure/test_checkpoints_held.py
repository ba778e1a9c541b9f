"""What plans with checkpoints hold from forward to backward, counted beside stock Megatron under the settings they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.testbed.ranks import RankPool
from megatron_lynx.testbed.tiny_jobs import tiny_job
from tests.measure.on_ranks import held
from tests.transparency.checkpoints import FULL, checkpointed
from tests.transparency.plans import plan_for

Pools = Callable[[int], RankPool]

SIZE: dict[str, int] = {"layers": 4, "seq": 128, "micro": 2, "hidden": 64, "ffn": 256, "microbatches": 1}


def kept_but_for(job: Job, checkpoint: Any, layers: Any = None) -> Plan:
    return checkpointed(plan_for(job, lambda layer: ()), checkpoint, layers)


def uniform(layers: int) -> dict[str, Any]:
    return {**FULL, "recompute_num_layers": layers}


def block(layers: int) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}


SETTINGS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "none": ({}, "layer", ()),
    "uniform 1": (uniform(1), "layer", None),
    "uniform 2": (uniform(2), {"layers": 2}, None),
    "uniform 4": (uniform(4), {"layers": 4}, None),
    "block 1": (block(1), "layer", (1,)),
    "block 3": (block(3), "layer", (1, 2, 3)),
}
"""Stock's fields, and the checkpoint with the layers that have it."""


STATES = 3 * torch.get_rng_state().nbytes
"""What a checkpoint of stock's remembers: the CPU's random state, the device's, and the tracker's. Where nothing drops out ours
remember none. On GPUs all but a few bytes of it are on the host."""
IN_FLIGHT = 2 * SIZE["seq"] * SIZE["micro"] * 4
"""gloo's thread may still hold the results of reductions, a float for each token."""


def counted(pool: RankPool, job: Job) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    """By rank and setting: what is held from forward to backward and at the step's peak, of stock and of ours."""
    stock = [(one, None) for one, _, _ in SETTINGS.values()]
    ours = [({}, kept_but_for(job, checkpoint, layers)) for _, checkpoint, layers in SETTINGS.values()]
    for found in pool.run(held, job, [*stock, *ours]):
        yield from zip(SETTINGS, found[: len(SETTINGS)], found[len(SETTINGS) :], strict=True)


@pytest.mark.parametrize("fields", [{}, {"like": "llama"}, {"tensor": 2, "sequence_parallel": True}], ids=str)
def test_full_recomputation_holds_as_much(own_pool_of: Pools, fields: dict[str, Any]) -> None:
    """To the byte, but for random states, and no more at the peak: nothing is made again that stock does not make."""
    job = tiny_job(**{**SIZE, **fields})
    for name, (stocks, stocks_peak), (ours, ours_peak) in counted(own_pool_of(job.gpus), job):
        checkpoints = {"uniform 1": 4, "uniform 2": 2, "uniform 4": 1, "block 1": 1, "block 3": 3}.get(name, 0)
        assert -STATES * checkpoints - IN_FLIGHT <= ours - stocks <= IN_FLIGHT, name
        assert ours_peak <= stocks_peak + IN_FLIGHT, name


EXPERTS = {"count": 4, "per_token": 2, "ffn": 32, "layers": "all", "shared_ffn": 32}
ROUTED = 48
"""Bytes of a token in a layer that a router's decision takes here: probabilities and flags of four experts, their softmax, and
the places of its two rows (8 bytes each), by which combining brings them back."""


def test_with_experts_what_the_router_decided_is_held_beside_it(own_pool_of: Pools) -> None:
    job = tiny_job(**{**SIZE, "experts": EXPERTS, "bias": False})
    tokens = SIZE["seq"] * SIZE["micro"]
    for name, (stocks, _), (ours, _) in counted(own_pool_of(1), job):
        layers = {"none": 0, "block 1": 1, "block 3": 3}.get(name, 4)
        assert -STATES * layers <= ours - stocks <= ROUTED * tokens * layers + IN_FLIGHT, name
