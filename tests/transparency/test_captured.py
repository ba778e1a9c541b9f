"""Plans beside captured graphs (`--cuda-graph-impl transformer_engine`): what is captured is kept whole, the rest is planned, and
every bit is that of stock with the same graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner import uniform_plan
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


def free(job: Job) -> list[str]:
    """What may be replayed beside the graphs."""
    sections = {section for layer in range(1, job.model.layers + 1) for section in job.model.sections(layer)}
    names = {name for section in sections for name in section.replayable}
    return [item for item in replayable(job) if item in names]


def candidates_for(job: Job) -> list[Plan]:
    """Nothing replayed; all that is in no graph, on demand; the same in the windows that are left, under sequence parallelism
    from inputs that are gathered once."""
    windows = [uniform_plan(job), *([uniform_plan(job, gather="once")] if job.parallel.sequence_parallel else [])]
    return [plan_for(job, lambda layer: ()), plan_for(job, lambda layer: free(job), windows=False), *windows]


@pytest.mark.parametrize("captured", [("attn",), ("mlp",)], ids=" ".join)
@pytest.mark.parametrize("layout", ["one rank", "TP2+SP", "PP2"])
def test_the_other_half_is_planned(te_pool_of: Pools, layout: str, captured: tuple[str, ...]) -> None:
    job = job_of(layout, captured)
    for outcomes in checked(te_pool_of, job, candidates_for(job), trial_of()):
        for outcome in outcomes:
            assert outcome.planned.graph_replays == outcome.stock.graph_replays > 0
        assert outcomes[0].planned.counts[-1].let_go_bytes == 0 < outcomes[1].planned.counts[-1].let_go_bytes


EXPERTS: dict[str, Any] = {"count": 4, "per_token": 2, "ffn": 64, "shared_ffn": 32}
SPREAD = {
    "EP2": {"expert": 2, "replicas": 2},
    "PP2, EP2": {"expert": 2, "replicas": 2, "pipeline": 2, "microbatches": 4},
}
ROUTED = (("moe_router",), ("attn", "moe_router", "moe_preprocess"))


@pytest.mark.parametrize("captured", ROUTED, ids=" ".join)
@pytest.mark.parametrize("layout", SPREAD)
def test_what_experts_compute_is_planned_behind_a_captured_router(
    te_pool_of: Pools, layout: str, captured: tuple[str, ...]
) -> None:
    """Norm, router and shared experts are in the graph; what is between dispatch and combine runs again, beside attention halves
    that are not captured."""
    fields = {"dtype": "bf16", "implementation": "transformer_engine", "captured": captured, "bias": False}
    job = tiny_job("gpt", **SPREAD[layout], experts=EXPERTS, **fields)
    experts = [item for item in ("experts_fc1", "experts_activation") if item in free_of_experts(job)]
    candidates = [plan_for(job, lambda layer: ()), plan_for(job, lambda layer: [*experts, *free(job)], windows=False)]
    for outcomes in checked(te_pool_of, job, candidates, trial_of()):
        for outcome in outcomes:
            assert outcome.planned.graph_replays == outcome.stock.graph_replays > 0
        assert outcomes[0].planned.counts[-1].let_go_bytes == 0 < outcomes[1].planned.counts[-1].let_go_bytes


def free_of_experts(job: Job) -> set[str]:
    return {item for section in job.model.sections(1) for item in section.replayable}
