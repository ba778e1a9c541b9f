"""Halves of experts that fall back when more rows come than a stage's bytes hold for.

Each rank decides for itself, because nothing that it then does otherwise communicates: the rows stay, and the experts' first
linears and activation run again.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lynx.config.job import Job
from megatron_lynx.kinds.experts.planning import expert_tensors
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner.loads import with_load
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.testbed.ranks import RankPool
from tests.long import long
from tests.plan.strategies import drawn
from tests.te_releases import folder_of, python_path
from tests.transparency import test_experts, test_flex, test_overlapped
from tests.transparency.load_trials import held_in_backward
from tests.transparency.plans import plan_for
from tests.transparency.test_experts import STATEFUL, exchanging
from tests.transparency.trials import Trial, compare_with_stock

Pools = Callable[[int], RankPool]

MOST_LOAD = 2.0
"""Of two ranks with two experts each, of which every token passes two."""
JOBS: dict[str, Callable[[], Job]] = {
    "all-to-all": lambda: test_experts.job_of("EP2"),
    "all-to-all, PP2": lambda: test_experts.job_of("PP2, EP2"),
    "all-to-all, TP2": lambda: test_experts.job_of("TP2+SP, EP2, every second layer"),
    "all-to-all, PP2xVPP2": lambda: test_experts.job_of("PP2xVPP2, EP2"),
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


ALWAYS = ("all-to-all", "all-to-all, PP2", "DeepEP", "HybridEP", "gathers", "overlapped")


@pytest.mark.parametrize("name", [*ALWAYS, *long("all-to-all, TP2", "all-to-all, PP2xVPP2", "DeepEP, PP2", "HybridEP, TP2")])
def test_every_bit(pool_of: Pools, name: str) -> None:
    """All tokens go to one rank, twice its share. It alone falls back, and the ranks communicate as in stock."""
    job = JOBS[name]()
    kept, some = plan_for(job, lambda layer: ()), plan_for(job, lambda layer: ("experts_activation",), windows=False)
    plans = [holding(kept, 1.0, job), holding(kept, MOST_LOAD, job), holding(some, 1.0, job)]
    trial = Trial(steps=2, model=STATEFUL, starved=True, canaries=True, counted=True)
    halves = len(job.model.expert_layers) // job.parallel.pipeline * job.microbatches
    for rank, outcomes in enumerate(pool_of(job.gpus).run(compare_with_stock, job, plans, trial)):
        for outcome in outcomes:
            assert outcome.differing == []
            assert outcome.planned.frames_left == 0
            assert outcome.planned.collectives == outcome.stock.collectives, "in kind and order"
        full = rank // job.parallel.expert_tensor_size % job.parallel.expert == 0
        assert [outcome.planned.counts[-1].fell_back for outcome in outcomes] == ([halves, 0, halves] if full else [0, 0, 0])


def test_the_window_of_a_half_holds_what_fell_back(pool_of: Pools) -> None:
    """Nothing of it communicates, so it runs again where the rule's recomputation does."""
    job = JOBS["all-to-all"]()
    normed = plan_for(job, lambda layer: ("pre_mlp_layernorm",), windows=False)
    windowed = exchanging(normed, {"mlp": "bwd.mlp.0"})
    trial = Trial(steps=2, model=STATEFUL, starved=True, counted=True)
    full, _ = pool_of(job.gpus).run(compare_with_stock, job, [windowed, holding(windowed, 1.0, job)], trial)
    usual, fell = full
    assert (usual.differing, fell.differing) == ([], [])
    halves = job.model.layers * job.microbatches
    assert [each.planned.counts[-1].fell_back for each in full] == [0, halves]
    assert usual.planned.counts[-1].in_windows == fell.planned.counts[-1].in_windows > 0
    assert usual.planned.counts[-1].on_demand == fell.planned.counts[-1].on_demand


@pytest.mark.parametrize("name", ["all-to-all", *long("all-to-all, PP2", "DeepEP")])
def test_drawn_loads(pool_of: Pools, name: str) -> None:
    """Whatever comes and whatever the plan holds for, bits are stock's; the more it holds for, the fewer halves fall back."""
    job = JOBS[name]()

    @drawn(3)
    @given(st.floats(1.0, MOST_LOAD), st.sampled_from([(), ("pre_mlp_layernorm", "experts_activation")]), st.booleans())
    def check(load: float, items: tuple[str, ...], starved: bool) -> None:
        plan = plan_for(job, lambda layer: items, windows=False)
        plans = [holding(plan, each, job) for each in (load, (load + MOST_LOAD) / 2)]
        trial = Trial(model=STATEFUL, starved=starved, counted=True)
        for outcomes in pool_of(job.gpus).run(compare_with_stock, job, plans, trial):
            assert [outcome.differing for outcome in outcomes] == [[], []]
            less, more = (outcome.planned.counts[-1] for outcome in outcomes)
            assert less.fell_back >= more.fell_back

    check()


@pytest.mark.parametrize("release", long("0.17", "0.18", "0.19"))
def test_other_releases(release: str) -> None:
    job = JOBS["all-to-all"]()
    plans = [holding(plan_for(job, lambda layer: ()), 1.0, job)]
    trial = Trial(steps=2, model=STATEFUL, starved=True, canaries=True, counted=True)
    with RankPool(2, env={"PYTHONPATH": python_path(folder_of("MEGATRON_CORE", release, "megatron/core"))}) as pool:
        (full,), (other,) = pool.run(compare_with_stock, job, plans, trial)
    assert (full.differing, other.differing) == ([], [])
    assert full.planned.counts[-1].fell_back > other.planned.counts[-1].fell_back == 0


@pytest.mark.parametrize("name", ["all-to-all", "DeepEP", "HybridEP"])
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
