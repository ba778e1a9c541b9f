"""Plans without flushes: recomputations in windows and activations on the host change no bit, and see the weights of their
forward."""

from __future__ import annotations

import pytest

from megatron_lynx.anatomy.address import is_forward
from megatron_lynx.plan.plan import Plan
from megatron_lynx.schedule.flushes import with_flushes
from tests.deferring import deferring
from tests.tiny_jobs import tiny_job

from ..long import long
from ..transparency.offloaded import offloading
from ..transparency.plans import plan_for, recomputable
from . import on_ranks

MEGATRON = {"ddp": True, "optimizer": "megatron"}
FEW = ("activation", "core_attention", "input_layernorm")
LAYOUTS = [
    ({"pipeline": 2, "microbatches": 3}, {"defer_updates": False}),
    ({"pipeline": 2, "microbatches": 2}, {"defer_updates": True}),
    *long(({"pipeline": 2, "tensor": 2, "sequence_parallel": True, "microbatches": 3}, {"defer_updates": True})),
    *long(({"pipeline": 2, "context": 2, "context_exchange": "all_gather", "microbatches": 3}, {"defer_updates": True})),
]
BATCHES = 4


def without_flushes(plan: Plan) -> Plan:
    """The same plan for a pipeline without flushes, where forwards have no windows."""
    raw = plan.model_dump(mode="json") | {"schedule": "double_buffered"}
    return Plan.model_validate(raw)


@pytest.mark.parametrize(("layout", "how"), LAYOUTS, ids=str)
def test_plans_to_the_bit(pool_of, layout, how):
    """Everything recomputed, in windows and on demand; every layer its own choice; with half of what is kept on the host."""
    job = tiny_job("gpt", **layout)
    everything = plan_for(job, lambda _: recomputable(job, gather=True))
    few = [item for item in FEW if item in recomputable(job)]
    mixed = plan_for(job, lambda layer: () if layer == 2 else few if layer == 3 else recomputable(job))
    plans = [everything, plan_for(job, lambda _: recomputable(job), windows=False), mixed]
    plans += [offloading(plan_for(job, lambda _: ()), 12_000), offloading(mixed, 6_000)]
    runs = pool_of(job.gpus).run(on_ranks.planned, job, {**MEGATRON, **how}, [*map(without_flushes, plans)], BATCHES)
    for rank, outcomes in enumerate(runs):
        assert [outcome.differing for outcome in outcomes] == [[]] * len(plans), f"rank {rank}"
        assert not any(outcome.busy for outcome in outcomes)
        check_counts(job, rank // (job.gpus // job.parallel.pipeline), outcomes)


def check_counts(job, stage, outcomes):
    """Nothing is missed: on the first stage each micro-batch has its window while its gradient is awaited."""
    in_windows, on_demand, _, kept, some = (outcome.counts for outcome in outcomes)
    passes = BATCHES * job.microbatches
    assert in_windows.recomputed == on_demand.recomputed == 2 * 2 * passes
    assert on_demand.in_windows == 0
    if job.parallel.tensor == 1:
        assert in_windows.in_windows == (passes if stage == 0 else 0)
    assert (kept.recomputed, some.recomputed > 0) == (0, True)
    assert (kept.offloaded_bytes > 0) == (some.offloaded_bytes > 0) == (stage == 0), "the last stage has nothing in flight"


@pytest.mark.parametrize("overlapped", [False, True])
def test_weight_gradients_that_are_deferred(pool_of, overlapped):
    """Also into forwards of the next batch. All of a batch are done before its gradient is reduced, and those of the next batch
    before the gradients are pointed at another buffer."""
    job = tiny_job("gpt", pipeline=2, tensor=2, microbatches=3)
    how = {**MEGATRON, "defer_updates": True, "model": {"gradient_accumulation_fusion": True}, "overlap_grad_reduce": overlapped}
    kept = deferring(without_flushes(plan_for(job, lambda _: ())), chosen=is_forward)
    recomputed = deferring(without_flushes(plan_for(job, lambda _: recomputable(job))))
    for rank, outcomes in enumerate(pool_of(job.gpus).run(on_ranks.planned, job, how, [kept, recomputed], BATCHES)):
        assert [outcome.differing for outcome in outcomes] == [[], []], f"rank {rank}"
        assert not any(outcome.busy for outcome in outcomes)
        assert all(outcome.counts.deferred == outcome.counts.filled + outcome.counts.flushed for outcome in outcomes)
        assert all(outcome.counts.filled > 0 for outcome in outcomes)


@pytest.mark.quick
def test_a_plan_for_another_schedule(pool_of):
    """Refused by name, on either side."""
    job = tiny_job("gpt", pipeline=2, microbatches=2)
    stock = plan_for(job, lambda _: recomputable(job))
    plans = {"stock's": stock, "ours": without_flushes(stock)}
    for said in pool_of(2).run(on_ranks.installed_differently, job, plans):
        assert "plan: schedule: found double_buffered, needed flush, as this run has it" in said["its plan, flushing"]
        assert "plan: schedule: found flush, needed double_buffered, as this run has it" in said["stock's plan"]
        assert "a plan is installed while micro-batches are in flight" in said["in flight"]


@pytest.mark.parametrize(("pipeline", "stage", "microbatches"), [(1, 0, 2), (2, 0, 2), (2, 1, 3), (4, 1, 4), (4, 3, 5)])
@pytest.mark.parametrize("deferred", [False, True])
def test_turns_are_those_of_1f1b_until_it_drains(pipeline, stage, microbatches, deferred):
    """Batch by batch, and with the phases that a step of as many micro-batches would have."""
    from megatron_lynx.double_buffered.pipeline import order_of_batch
    from megatron_lynx.schedule.double_buffered import deferral

    deferral_ = deferral(stage) if deferred else 0
    stock = with_flushes(pipeline, 3 * microbatches).phases(stage)
    expected = [(action.kind, action.micro_batch, phase) for action, phase in stock]
    found, length = [], 0
    for batch in range(3):
        turns = order_of_batch(pipeline, stage, microbatches, batch, deferral=deferral_, drains=batch == 2).all
        ends = (batch + 1) * microbatches + (0 if batch == 2 else deferral_)
        own = next(i + 1 for i, (turn, _) in enumerate(turns) if (turn.kind, turn.micro_batch) == ("B", ends - 1))
        found += [(turn.kind, turn.micro_batch, phase) for turn, phase in turns[:own]]
        length += own
    assert found == expected
