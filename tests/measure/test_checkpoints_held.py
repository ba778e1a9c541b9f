"""What plans with checkpoints hold from forward to backward, counted beside stock Megatron under the settings they stand for."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.testbed.tiny_jobs import tiny_job
from tests.measure.on_ranks import held
from tests.transparency.checkpoints import FULL, checkpointed
from tests.transparency.plans import plan_for

SIZE = {"layers": 4, "seq": 128, "micro": 2, "hidden": 64, "ffn": 256, "microbatches": 1}


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


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"like": "llama"},
        {"tensor": 2, "sequence_parallel": True},
        {"experts": {"count": 4, "per_token": 2, "ffn": 32, "layers": "all", "shared_ffn": 32}, "bias": False},
    ],
    ids=str,
)
def test_full_recomputation_holds_as_much(own_pool_of, fields):
    job = tiny_job(**SIZE, **fields)
    stock = [(one, None) for one, _, _ in SETTINGS.values()]
    ours = [({}, kept_but_for(job, checkpoint, layers)) for _, checkpoint, layers in SETTINGS.values()]
    counted = own_pool_of(job.gpus).run(held, job, [*stock, *ours])
    for ranks in counted:
        for name, stocks, plans in zip(SETTINGS, ranks[: len(SETTINGS)], ranks[len(SETTINGS) :], strict=True):
            print(name, stocks, plans, [p / s - 1 for s, p in zip(stocks, plans, strict=True)])
