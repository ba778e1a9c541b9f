"""Norms of Apex in local layers are sites as any other: what they save of what they made is let go, and made again."""

from __future__ import annotations

import pytest

from tests.tiny_jobs import tiny_job

from ..transparency.plans import plan_for, recomputable
from ..transparency.trials import Trial
from . import apex_on_ranks

NORMS = ("input_layernorm", "pre_mlp_layernorm")


@pytest.mark.parametrize("layout", [{}, {"tensor": 2, "sequence_parallel": True}], ids=["one rank", "TP2+SP"])
def test_a_norm_that_keeps_its_output_equals_stock_in_every_bit(pool_of, layout):
    job = tiny_job("gpt", **layout)
    candidates = [
        plan_for(job, lambda layer: NORMS),
        plan_for(job, lambda layer: recomputable(job)),
        plan_for(job, lambda layer: [item for item in recomputable(job) if item not in NORMS]),
    ]
    trial = Trial(model={"memory_efficient_layer_norm": True})
    for outcomes in pool_of(job.gpus).run(apex_on_ranks.compared, job, candidates, trial):
        for outcome in outcomes:
            assert outcome.differing == []
            assert outcome.planned.frames_left == 0
            assert outcome.planned.counts[-1].recomputed > 0
