"""Halves of experts that fall back where a rank learns only of its own rows: DeepEP, HybridEP, overlapped exchanges.

Each rank decides for itself, because nothing that it then does otherwise communicates: the rows stay, and the experts' first
linears and activation run again.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_lynx.config.job import Job
from megatron_lynx.kinds.experts.saved import expert_tensors
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner.nearest import with_load
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.testbed.ranks import RankPool
from tests.long import long
from tests.transparency import test_flex, test_overlapped
from tests.transparency.load_trials import held_in_backward
from tests.transparency.plans import plan_for
from tests.transparency.test_experts import STATEFUL
from tests.transparency.test_falling_back import MOST_LOAD
from tests.transparency.trials import Trial, compare_with_stock

Pools = Callable[[int], RankPool]

JOBS: dict[str, Callable[[], Job]] = {
    "DeepEP": lambda: test_flex.job_of("EP2", "deepep", shared_ffn=32),
    "HybridEP": lambda: test_flex.job_of("EP2", "hybridep"),
    "DeepEP, PP2": lambda: test_flex.job_of("PP2 x EP2", "deepep"),
    "HybridEP, TP2": lambda: test_flex.job_of("TP2+SP x EP2", "hybridep"),
    "gathers": lambda: test_flex.job_of("EP2", "allgather"),
    "overlapped": lambda: test_overlapped.job_of("EP2"),
}


def holding(plan: Plan, load: float, job: Job) -> Plan:
    """The same plan, whose stages say which load their bytes hold for. Beside overlapped exchanges it names one rank."""
    overlapped = job.model.experts is not None and job.model.experts.overlapped
    parallel = plan.parallel.model_copy(update={"expert": 1 if overlapped else job.parallel.expert})
    stages = tuple(stage.model_copy(update={"experts_hold": load}) for stage in plan.stages)
    return Plan.model_validate(plan.model_copy(update={"parallel": parallel, "stages": stages}).model_dump())


@pytest.mark.parametrize("name", ["DeepEP", "HybridEP", "gathers", "overlapped", *long("DeepEP, PP2", "HybridEP, TP2")])
def test_every_bit(pool_of: Pools, name: str) -> None:
    """All tokens go to one rank, twice its share. It alone falls back, and the ranks communicate as in stock."""
    job = JOBS[name]()
    kept, some = plan_for(job, lambda layer: ()), plan_for(job, lambda layer: ("experts_activation",), windows=False)
    plans = [holding(kept, 1.0, job), holding(kept, MOST_LOAD, job), holding(some, 1.0, job)]
    trial = Trial(steps=2, model=STATEFUL, starved=True, canaries=True, counted=True)
    halves = job.model.layers // job.parallel.pipeline * job.microbatches
    for rank, outcomes in enumerate(pool_of(job.gpus).run(compare_with_stock, job, plans, trial)):
        for outcome in outcomes:
            assert outcome.differing == []
            assert outcome.planned.frames_left == 0
            assert outcome.planned.collectives == outcome.stock.collectives, "in kind and order"
        full = rank // job.parallel.tensor % job.parallel.expert == 0
        assert [outcome.planned.counts[-1].fell_back for outcome in outcomes] == ([halves, 0, halves] if full else [0, 0, 0])


@pytest.mark.parametrize("name", ["DeepEP", "HybridEP"])
def test_what_falls_back_keeps_its_rows_alone(pool_of: Pools, name: str) -> None:
    """Of the full rank: what the experts' first linears and activation made is gone; what the other one holds is unchanged."""
    job = JOBS[name]()
    kept = plan_for(job, lambda layer: ())
    full, other = pool_of(job.gpus).run(
        held_in_backward, job, [kept, *(holding(kept, load, job) for load in (2.0, 1.0))], STATEFUL
    )
    halves = job.model.layers * job.microbatches
    assert [fell_back for _, fell_back in full] == [0, 0, halves]
    assert [fell_back for _, fell_back in other] == [0, 0, 0]
    usual, held, fallen = (held for held, _ in full)
    assert 0 <= held - usual <= 16, "counts of rows"
    tensors = expert_tensors(LayerShape.of(with_load(job, MOST_LOAD)))
    gone = sum(each.bytes for each in tensors if each.made_by in ("experts_fc1", "experts_activation"))
    random = torch.get_rng_state().nbytes
    assert 0 <= job.model.layers * gone - (held - fallen) <= job.model.layers * (LayerShape.of(job).input_bytes + 3 * random)
