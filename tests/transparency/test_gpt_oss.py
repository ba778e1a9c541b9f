"""What gpt-oss has of its own under plans: attention that sees a window in some layers, sinks that are learned, and a gated
activation that is clamped and has an offset. Every bit is stock's, and all parameters are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Window
from megatron_lynx.cost.parameters import flops_per_token
from megatron_lynx.kinds.dense.section import CORE_ATTENTION
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.testbed.ranks import RankPool
from tests.config.jobs import catalogued_job
from tests.cost.test_prediction import assert_parameters
from tests.long import long
from tests.tiny_jobs import tiny_job
from tests.transparency.test_every_bit import checked
from tests.transparency.trials import Trial
from tests.uniform import uniform_plan

Pools = Callable[[int], RankPool]

ITS_OWN: dict[str, Any] = {
    "activation": "quick_geglu",
    "activation_clamped": True,
    "sinks": True,
    "window": Window(keys=4, share=0.5),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP2+SP": {"tensor": 2, "sequence_parallel": True},
    "experts": {"experts": {"count": 4, "per_token": 2, "ffn": 32}},
}


def job_of(layout: str) -> Job:
    return tiny_job("llama", layers=2, **ITS_OWN, **LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["one rank", *long("TP2+SP", "experts")])
def test_every_bit(pool_of: Pools, layout: str) -> None:
    job = job_of(layout)
    checked(pool_of, job, [uniform_plan(job), uniform_plan(job, windows=False)], Trial(canaries=True))


def test_parameters(pool_of: Pools) -> None:
    """Sinks are as many as heads."""
    assert_parameters(pool_of, job_of("one rank"))


def test_seconds_and_flops_follow_the_window() -> None:
    """As many pairs of queries and keys as are seen, in the mean of all layers; one key each is no more than its own."""
    assert Window(keys=16).seen(16) == 1.0
    assert Window(keys=4, share=0.5).seen(16) == 0.5 + 0.5 * (1 + 2 + 3 + 4 * 13) / (16 * 17 / 2)
    usual = catalogued_job()
    seen = usual.model_copy(update={"model": usual.model.model_copy(update={"window": Window(keys=128)})})
    attention = 6 * usual.model.layers * usual.model.query_width * usual.model.seq
    assert flops_per_token(usual.model) - flops_per_token(seen.model) == pytest.approx(
        attention * (1 - seen.model.seen), rel=1e-6
    )
    most, least = (analytic_profile(job).attention.items[CORE_ATTENTION] for job in (usual, seen))
    assert least.forward_s < most.forward_s
    assert least.saved_bytes == most.saved_bytes
