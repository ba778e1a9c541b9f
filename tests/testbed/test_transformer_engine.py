"""Transformer Engine's own Python on CPU ranks: real megatron-core trains its layers, and they compute what local layers do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from megatron_lynx.testbed.ranks import RankPool
from tests.tiny_jobs import tiny_job

from ..long import long
from ..te_releases import TE_RELEASES, pool_with
from . import on_ranks

LAYOUTS = [
    ("gpt", "bf16", {"tensor": 2}),
    ("llama", "fp32", {"tensor": 2, "sequence_parallel": True}),
    *long(("llama", "fp32", {"tensor": 2}), ("gpt", "fp32", {"pipeline": 2})),
]
PAIRS = [("2.9", None), ("2.17", "0.19")]
"""A Transformer Engine, and a megatron-core (none: the installed one) that is built with it."""

ROUNDING = {"fp32": 1e-4, "bf16": 0.1}
"""Relative to the largest number of a tensor. (Gradients of biases before a norm are small differences of large numbers.)"""


@pytest.fixture(scope="module", params=PAIRS, ids=["core 0.16", "core 0.19"])
def pool(request) -> Iterator[Callable[[int], RankPool]]:
    te, core = request.param
    pools: dict[int, RankPool] = {}
    yield lambda ranks: pools.setdefault(ranks, pool_with(te, ranks, core))
    for started in pools.values():
        started.close()


@pytest.mark.parametrize(("like", "dtype", "layout"), LAYOUTS, ids=str)
def test_layers_compute_what_local_layers_do(pool, like, dtype, layout):
    """With equal weights and without dropout: the same losses and gradients up to rounding; and twice the same to the bit."""
    shape = {"like": like, "dtype": dtype, "attention_dropout": 0.0, "hidden_dropout": 0.0, **layout}
    te, local = (tiny_job(implementation=name, **shape) for name in ("transformer_engine", "local"))
    for _, between_runs, to_local in pool(te.gpus).run(on_ranks.losses_and_differences, te, local):
        assert between_runs == 0
        assert 0 < to_local < ROUNDING[dtype]


@pytest.mark.parametrize("recipe", ["delayed", *long("tensorwise")])
def test_fp8_keeps_its_scales_in_order(pool, recipe):
    """Amax histories and scales are Transformer Engine's to keep; twice the same shows that each run has its own."""
    job = tiny_job(implementation="transformer_engine", tensor=2, sequence_parallel=True, dtype="bf16", attention_dropout=0.0)
    fp8 = {"fp8": "hybrid", "fp8_recipe": recipe}
    for losses, between_runs, to_bf16 in pool(2).run(on_ranks.losses_and_differences, job, job, fp8):
        assert losses[-1] < losses[0]
        assert between_runs == 0
        assert to_bf16 > 0.01, "nothing was quantized"


def test_weight_gradients_are_added_to_the_buffer_of_data_parallelism(pool):
    job = tiny_job(implementation="transformer_engine", replicas=2, dtype="bf16", attention_dropout=0.0, hidden_dropout=0.0)
    fused = {"gradient_accumulation_fusion": True}
    for _, between_runs, to_unfused in pool(2).run(on_ranks.losses_and_differences, job, job, fused, {"ddp": True}):
        assert between_runs == 0
        assert 0 < to_unfused < ROUNDING["bf16"]


@pytest.mark.parametrize("release", [release for release in TE_RELEASES if release not in dict(PAIRS)])
def test_other_releases_train_with_dropout(release):
    job = tiny_job(implementation="transformer_engine")
    with pool_with(release, 1) as ranks:
        [[losses, between_runs, _]] = ranks.run(on_ranks.losses_and_differences, job, job)
    assert losses[-1] < losses[0]
    assert between_runs == 0
