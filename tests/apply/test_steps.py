"""Steps that fail, that evaluate, or that use more of torch than training does: right as without a plan, or refused by name."""

from __future__ import annotations

import pytest

from megatron_lynx.errors import RecomputeError
from tests.tiny_jobs import tiny_job

from ..transparency.plans import plan_for, recomputable
from . import steps_on_ranks

LAYOUTS = [{}, {"tensor": 2, "sequence_parallel": True}, {"pipeline": 2, "layers_per_chunk": 1, "microbatches": 4}]


def recomputing(job):
    return plan_for(job, lambda _: recomputable(job))


def keeping(job):
    return plan_for(job, lambda _: ())


def stock_and_planned(pool_of, job, trains):
    return pool_of(job.gpus).run(steps_on_ranks.stock_and_planned, job, recomputing(job), trains)


@pytest.mark.parametrize("trains", [steps_on_ranks.fails_in_forward, steps_on_ranks.fails_in_backward])
@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_the_steps_behind_one_that_failed(pool_of, layout, trains):
    for seen in stock_and_planned(pool_of, tiny_job(**layout), trains):
        assert seen["differing"] == []
        assert (seen["busy"], seen["frames"]) == (False, 0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_evaluation_records_nothing(pool_of, layout):
    job = tiny_job(**layout)
    for seen in stock_and_planned(pool_of, job, steps_on_ranks.only_evaluates):
        assert (seen["differing"], seen["busy"], seen["frames"]) == ([], False, 0)
        assert {each for each in vars(seen["counts"]).values() if each is not None} == {0}
    for seen in stock_and_planned(pool_of, job, steps_on_ranks.evaluates):
        assert (seen["differing"], seen["busy"], seen["frames"]) == ([], False, 0)
        # The one step's frames: forward only with gradients on records too, as stock saves then, and lets it all go.
        assert seen["counts"].recomputed == 2 * job.layers_on(0) * job.microbatches


@pytest.mark.parametrize("trains", [steps_on_ranks.with_user_hooks, steps_on_ranks.with_nvtx])
@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_hooks_and_ranges_of_others(pool_of, layout, trains):
    for seen in stock_and_planned(pool_of, tiny_job(**layout), trains):
        assert (seen["differing"], seen["frames"]) == ([], 0)


REFUSED = [
    (steps_on_ranks.saved_tensors_hooks, RecomputeError, "saved_tensors_hooks"),
    (steps_on_ranks.gradient_of_some, RecomputeError, "torch.autograd.grad"),
    (steps_on_ranks.backward_twice, RecomputeError, "retain_graph"),
    (steps_on_ranks.second_derivative, RecomputeError, "create_graph"),
]


@pytest.mark.parametrize(("asks", "kind", "named"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_a_recomputation_cannot_give(pool_of, asks, kind, named):
    """The refusal says what was found and leaves nothing; the next step is stock's."""
    job = tiny_job()
    [seen] = pool_of(1).run(steps_on_ranks.asked_for_too_much, job, recomputing(job), asks)
    assert type(seen["error"]) is kind
    assert named in str(seen["error"])
    assert all("layer" in problem.where or "(" in problem.where for problem in seen["error"].problems)
    assert (seen["busy"], seen["frames"], seen["differing"]) == (False, 0, [])


ALLOWED = [asks for asks, *_ in REFUSED]


@pytest.mark.parametrize("asks", ALLOWED, ids=lambda asks: asks.__name__)
def test_what_a_plan_that_keeps_everything_passes_on(pool_of, asks):
    job = tiny_job()
    [seen] = pool_of(1).run(steps_on_ranks.asked_for_too_much, job, keeping(job), asks)
    assert (seen["error"], seen["frames"], seen["differing"]) == (None, 0, [])
