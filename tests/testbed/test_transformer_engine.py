"""Transformer Engine's own Python on CPU ranks: real megatron-core trains its layers, and they compute what local layers do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from megatron_lynx.testbed.ranks import RankPool
from megatron_lynx.testbed.tiny_jobs import tiny_job
from megatron_lynx.testbed.tiny_models import SAME

from ..engines import ENGINES, pool_with
from . import on_ranks
from .on_ranks import Run

LAYOUTS = [
    {},
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": True},
    {"pipeline": 2},
]
WITH_CORE = [("2.9", None), ("2.17", "0.19")]
"""What Megatron 0.16 and 0.19 are built with."""


@pytest.fixture(scope="module", params=WITH_CORE, ids=lambda pair: f"engine {pair[0]}, core {pair[1] or 'installed'}")
def pool_of_pair(request) -> Iterator[Callable[[int], RankPool]]:
    engine, core = request.param
    pools: dict[int, RankPool] = {}

    def pool(ranks: int) -> RankPool:
        return pools.setdefault(ranks, pool_with(engine, ranks, core))

    yield pool
    for started in pools.values():
        started.close()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("like", "dtype"), [("gpt", "fp32"), ("llama", "fp32"), ("gpt", "bf16")])
def test_layers_compute_what_local_layers_do(pool_of_pair, layout, like, dtype):
    """With equal weights and without dropout: the same losses and gradients up to rounding; and twice the same to the bit."""
    shape = {"like": like, "dtype": dtype, "attention_dropout": 0.0, "hidden_dropout": 0.0, **layout}
    local, engine = (tiny_job(implementation=name, **shape) for name in ("local", "transformer_engine"))
    pool = pool_of_pair(local.gpus)
    tolerance = 1e-5 if dtype == "fp32" else 3e-2
    for [expected], [found, again] in zip(pool.run(on_ranks.train, local, [{}]), pool.run(on_ranks.train, engine, [{}, {}]), strict=True):
        assert again.equals(found)
        torch.testing.assert_close(found.losses + found.evaluation, expected.losses + expected.evaluation, rtol=tolerance, atol=0)
        for ours, theirs in zip(by_local_name(found), expected.gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def by_local_name(run: Run) -> list[dict[str, torch.Tensor]]:
    """Gradients of every step, named as in a local layer."""
    renamed = []
    for gradients in run.gradients:
        for fused, own in SAME.items():
            gradients = {name.replace(fused, own): tensor for name, tensor in gradients.items()}
        renamed.append(gradients)
    return renamed


@pytest.mark.parametrize("release", ENGINES)
def test_every_release_trains_with_dropout(release):
    job = tiny_job(implementation="transformer_engine")
    with pool_with(release, 1) as pool:
        [[run, again]] = pool.run(on_ranks.train, job, [{}, {}])
    assert run.equals(again)
    assert float(run.losses[-1]) < float(run.losses[0])
