"""Training with `--deterministic-mode`: under a plan every bit is that of stock in the same mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.testbed.ranks import RankPool
from tests.long import long
from tests.tiny_jobs import tiny_job
from tests.transparency.offloaded import offloading
from tests.transparency.trials import Trial, compare_with_stock
from tests.uniform import uniform_plan

EXPERTS = {"count": 4, "per_token": 2, "ffn": 32}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2+SP": {"tensor": 2, "sequence_parallel": True},
    "PP2xVPP2": {"pipeline": 2, "microbatches": 4, "layers_per_chunk": 1},
    "EP2": {"replicas": 2, "expert": 2, "experts": EXPERTS, "bias": False},
}


@pytest.mark.parametrize("layout", ["EP2", *long(*(layout for layout in LAYOUTS if layout != "EP2"))])
def test_every_bit_in_deterministic_mode(pool_of: Callable[[int], RankPool], layout: str) -> None:
    """Its permutations add rows in another way than without, and torch fills new memory with NaN."""
    job = tiny_job("gpt", **LAYOUTS[layout], deterministic=True, hidden_dropout=0.1)
    everything = uniform_plan(job, gather="once") if "tensor" in LAYOUTS[layout] else uniform_plan(job)
    plans = [everything, offloading(uniform_plan(job, ("activation",)), 8_000)]
    for outcomes in pool_of(job.gpus).run(compare_with_stock, job, plans, Trial(steps=2, canaries=True, deterministic=True)):
        assert [outcome.differing for outcome in outcomes] == [[]] * len(plans)
        assert [outcome.planned.frames_left for outcome in outcomes] == [0] * len(plans)
        assert outcomes[0].planned.counts[-1].recomputed > 0
