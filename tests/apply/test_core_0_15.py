"""megatron-core 0.15, smoke-tested: before the installed release on the ranks' import path, it equals itself under a plan.

`make test` puts it into build/megatron-core-0.15 and sets MEGATRON_CORE_0_15_DIR.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_lynx.testbed.ranks import RankPool
from megatron_lynx.testbed.tiny_jobs import tiny_job

from ..transparency.plans import plan_for, replayable
from . import on_ranks


@pytest.fixture(scope="module")
def pool_on_0_15() -> Iterator[Callable[[int], RankPool]]:
    folder = Path(os.environ.get("MEGATRON_CORE_0_15_DIR", "")).resolve()
    if not (folder / "megatron" / "core").is_dir():
        pytest.skip(f"no megatron-core 0.15 in {folder} (MEGATRON_CORE_0_15_DIR; `make test` downloads it where it can)")
    path = os.pathsep.join([str(folder), *(entry or os.getcwd() for entry in sys.path)])
    pools = {ranks: RankPool(ranks, env={"PYTHONPATH": path}) for ranks in (1, 2)}
    yield pools.__getitem__
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize(
    "layout", [{"tensor": 2}, {"tensor": 2, "sequence_parallel": True}, {"pipeline": 2, "microbatches": 4}], ids=str
)
def test_planned_training_equals_stock_in_every_bit(pool_on_0_15, layout):
    job = tiny_job("gpt", **layout)
    plans = [
        plan_for(job, lambda _: replayable(job), windows=False),
        plan_for(job, lambda _: replayable(job)),
        plan_for(job, lambda _: replayable(job, gather=True)),
    ]
    for rank, (version, outcomes) in enumerate(pool_on_0_15(job.gpus).run(on_ranks.compare_with_stock_of_release, job, plans)):
        assert version.startswith("0.15.")
        for outcome in outcomes:
            assert outcome.differing == []
            assert outcome.planned.frames_left == 0
        on_demand, ahead, _ = (outcome.planned.counts[-1] for outcome in outcomes)
        assert (on_demand.hidden, on_demand.replayed) == (0, ahead.replayed)
        assert ahead.hidden > 0 or rank == job.parallel.pipeline - 1 > 0, "only a last stage without collectives has no window"


def test_a_run_is_refused_there_too(pool_on_0_15):
    """Fields of TransformerConfig differ by release; what 0.15 has is found."""
    job = tiny_job()
    [refusal] = pool_on_0_15(1).run(on_ranks.refused, job, plan_for(job, lambda _: replayable(job)), on_ranks.rewrite_function)
    assert [place.rpartition(":")[2] for place in refusal.places] == ["MLP.forward", "_batched_p2p_ops"]
    assert refusal.changed == []
