"""Transformer Engine's layers without flushes, alone and under plans: its nodes find the weights that their forward read.

Up to 2.14 a node saves the weight, since 2.15 it holds it weakly. They are where `tests/apply` finds them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_lynx.testbed.ranks import RankPool
from tests.tiny_jobs import tiny_job

from ..long import long
from ..te_releases import pool_with
from ..transparency.offloaded import offloading
from ..transparency.plans import plan_for, recomputable
from . import on_ranks
from .test_plans import without_flushes

HOW = {"ddp": True, "optimizer": "megatron", "defer_updates": True}
FUSED = {"model": {"gradient_accumulation_fusion": True}, "overlap_grad_reduce": True}
NORMS = ("input_layernorm", "pre_mlp_layernorm")


@pytest.fixture(scope="module", params=[*long((("2.9", None),), (("2.14", "0.17"),)), ("2.17", "0.19")], ids=str)
def pool(request) -> Iterator[RankPool]:
    te, core = request.param
    with pool_with(te, 2, core) as pool:
        yield pool


def te_job(**fields):
    return tiny_job("gpt", implementation="transformer_engine", pipeline=2, microbatches=3, **fields)


@pytest.mark.parametrize(("fields", "how"), [({}, {}), ({"dtype": "bf16"}, FUSED)], ids=["fp32", "fused, bf16"])
def test_the_version_rule_to_the_bit(pool, fields, how):
    assert pool.run(on_ranks.differing, te_job(**fields), {**HOW, **how}) == [[], []]


def test_plans_to_the_bit(pool):
    job = te_job(dtype="bf16")
    mixed = plan_for(job, lambda layer: () if layer == 2 else recomputable(job))
    plans = [plan_for(job, lambda _: recomputable(job)), plan_for(job, lambda _: NORMS, windows=False), offloading(mixed, 6_000)]
    runs = pool.run(on_ranks.planned, job, {**HOW, **FUSED}, [*map(without_flushes, plans)])
    for outcomes in runs:
        assert [outcome.differing for outcome in outcomes] == [[]] * len(plans)
        assert all(outcome.counts.recomputed > 0 for outcome in outcomes)
    first, _, last = (outcome.counts for outcome in runs[0])
    assert first.in_windows == 4 * job.microbatches
    assert last.offloaded_bytes > 0
