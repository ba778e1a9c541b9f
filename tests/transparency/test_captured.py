"""Plans beside captured graphs (`--cuda-graph-impl transformer_engine`): what is captured is kept whole, the rest is planned, and
every bit is that of stock with the same graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.testbed.ranks import RankPool
from megatron_lynx.testbed.tiny_jobs import tiny_job
from tests.te_releases import pools_with
from tests.transparency.capturing import Captured
from tests.transparency.plans import plan_for, replayable
from tests.transparency.test_every_bit import LAYOUTS, checked
from tests.transparency.trials import Trial

Pools = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def te_pool_of() -> Iterator[Pools]:
    yield from pools_with("2.17")


def trial_of(**fields: Any) -> Trial:
    """One step before the capture, two with graphs."""
    return Trial(**{"steps": 3, "captured": Captured(), "training": {"ddp": True}, **fields})


def job_of(layout: str, captured: tuple[str, ...], **model: Any) -> Job:
    fields = {"dtype": "bf16", "implementation": "transformer_engine", "captured": captured, **model}
    return tiny_job("gpt", **LAYOUTS[layout], **fields)


def free(job: Job, *, gather: bool = False) -> list[str]:
    """What may be replayed beside the graphs."""
    sections = {section for layer in range(1, job.model.layers + 1) for section in job.model.sections(layer)}
    names = {name for section in sections for name in section.replayable}
    return [item for item in replayable(job, gather=gather) if item in names]


def candidates_for(job: Job) -> list[Plan]:
    return [
        plan_for(job, lambda layer: ()),
        plan_for(job, lambda layer: free(job), windows=False),
        plan_for(job, lambda layer: free(job)),
    ]


@pytest.mark.parametrize("captured", [("attn",), ("mlp",)], ids=" ".join)
@pytest.mark.parametrize("layout", ["one rank", "TP2+SP", "PP2"])
def test_the_other_half_is_planned(te_pool_of: Pools, layout: str, captured: tuple[str, ...]) -> None:
    job = job_of(layout, captured)
    for outcomes in checked(te_pool_of, job, candidates_for(job), trial_of()):
        for outcome in outcomes:
            assert outcome.planned.graph_replays == outcome.stock.graph_replays > 0
        assert outcomes[0].planned.counts[-1].let_go_bytes == 0 < outcomes[1].planned.counts[-1].let_go_bytes
