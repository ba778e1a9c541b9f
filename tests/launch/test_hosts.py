"""Frameworks in one process, each under a launch of its own."""

from __future__ import annotations

from megatron_lynx.planner import uniform_plan
from megatron_lynx.testbed.tiny_jobs import tiny_job

from .hosts_on_ranks import one_after_the_other
from .launched import saved


def test_one_after_the_other(pool_of, tmp_path):
    """Megatron-LM's launch, then Megatron-Bridge under another plan and under the first one: every bit is stock's, each says what
    it did, and nothing of one is there when the next begins."""
    job = tiny_job(tensor=2, sequence_parallel=True, attention_dropout=0.1, hidden_dropout=0.1)
    plans = [uniform_plan(job, gather="once"), uniform_plan(job, ("activation",))]
    paths = [str(saved(plan, tmp_path / f"{number}.yaml")) for number, plan in enumerate(plans)]
    for rank, launches in enumerate(pool_of(2).run(one_after_the_other, job, paths, str(tmp_path))):
        for plan, seen in zip((0, 1, 0), launches, strict=True):
            assert (seen["differing"], seen["changed"], seen["left"]) == ([], [], 0)
            if rank == 0:
                assert f"training under {paths[plan]}" in seen["said"]
                assert seen["said"].count("rank 0 replayed ") == 1
