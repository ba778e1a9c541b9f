"""Checkpoints beside everything else: Transformer Engine's layers and FP8, latent attention, sequences cut among ranks, weight
gradients that are deferred, offloading, pipelines without flushes, the check of frames. Every bit is stock's in all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_lynx.plan.plan import Plan
from megatron_lynx.testbed.ranks import RankPool
from tests.apply import test_fp8_kinds
from tests.apply.test_fp8 import fp8_job
from tests.deferring import deferring
from tests.double_buffered import on_ranks as without_flush
from tests.double_buffered.test_plans import MEGATRON, without_flushes
from tests.launch import frames_on_ranks
from tests.long import long
from tests.te_releases import pools_with
from tests.tiny_jobs import tiny_job
from tests.transparency import test_context, test_latent
from tests.transparency.checkpoints import ahead, checkpointed, with_rest_in_wait, without_copies
from tests.transparency.offloaded import offloading
from tests.transparency.plans import plan_for
from tests.transparency.test_checkpoints import kept_but_for
from tests.transparency.test_every_bit import LAYOUTS, checked
from tests.transparency.trials import Trial

Pools = Callable[[int], RankPool]
SP2: dict[str, Any] = {"tensor": 2, "sequence_parallel": True}
TE: dict[str, Any] = {"implementation": "transformer_engine"}
CHECKPOINTS: tuple[Any, ...] = ("layer", "attention", {"layers": 2})


@pytest.fixture(scope="module")
def te_pool_of() -> Iterator[Pools]:
    yield from pools_with("2.9")


OF_TE = {
    "one rank": tiny_job("gpt", **TE),
    "TP2+SP": tiny_job("llama", **SP2, **TE),
    "FP8, delayed": fp8_job("delayed", "gpt"),
    "FP8, delayed, TP2+SP": fp8_job("delayed", **SP2),
    "FP8, tensorwise, TP2+SP": fp8_job("tensorwise", **SP2),
}


@pytest.mark.parametrize(
    "layout", ["one rank", "FP8, delayed, TP2+SP", *long("TP2+SP", "FP8, delayed", "FP8, tensorwise, TP2+SP")]
)
def test_transformer_engine(te_pool_of: Pools, layout: str) -> None:
    """In FP8 nothing is scaled or counted a second time: scales, histories and quantized weights are compared, too."""
    job = OF_TE[layout]
    plans = [kept_but_for(job, one) for one in CHECKPOINTS]
    if job.parallel.sequence_parallel:
        plans.append(ahead(plans[0], how="gather"))
    if job.model.fp8 is not None:
        plans += [without_copies(plan) for plan in (plans[0], plans[-1])]
    for outcomes in checked(te_pool_of, job, plans, Trial(steps=2)):
        begun = [any(rule.ahead for stage in plan.stages for rule in stage.rules) for plan in plans]
        counted = [outcome.planned.counts[-1].ahead for outcome in outcomes]
        assert counted == [2 * job.microbatches * (job.model.layers - 1) * each for each in begun]


@pytest.mark.parametrize(
    "layout", ["TP2+SP", *long("one rank", "TP2", "TP2+SP, queries as they are", "TP2+SP, fused", "CP2, a ring, fused")]
)
def test_latent_attention(te_pool_of: Pools, layout: str) -> None:
    """What ranks gather between its sites is gathered again, not kept."""
    job = test_latent.job_of(layout)
    kept = test_latent.latent_plan(job, ())
    checked(te_pool_of, job, [checkpointed(kept, one) for one in CHECKPOINTS])


@pytest.mark.parametrize("layout", ["CP2, a ring", *long("CP2, traded", "CP2xTP2+SP, gathered")])
def test_sequences_cut_among_ranks(pool_of: Pools, layout: str) -> None:
    job = test_context.job_of(layout)
    checked(pool_of, job, [kept_but_for(job, one) for one in CHECKPOINTS], Trial(training=test_context.TRAINING))


def test_weight_gradients_are_deferred_as_elsewhere(pool_of: Pools) -> None:
    job = tiny_job("llama", **LAYOUTS["TP2+SP"])
    plan = kept_but_for(job, "layer")
    trial = Trial(training={"ddp": True}, model={"gradient_accumulation_fusion": True})
    plans = [plan, ahead(plan, how="gather"), with_rest_in_wait(plan)]
    for outcomes in checked(pool_of, job, [deferring(each) for each in plans], trial):
        for counts in (each for outcome in outcomes for each in outcome.planned.counts):
            assert counts.deferred == counts.filled + counts.flushed
            assert counts.filled > 0


def test_what_it_keeps_may_go_to_the_host(pool_of: Pools) -> None:
    """The input of a checkpoint, too: of a stage with nothing but checkpoints, nothing else is left to go."""
    job = tiny_job("gpt", **LAYOUTS["PP2"])
    plans = [offloading(kept_but_for(job, "layer", layers), 1 << 20) for layers in (None, (1, 3))]
    for rank, outcomes in enumerate(checked(pool_of, job, plans, Trial(tampered=True))):
        counts = [outcome.planned.counts[-1] for outcome in outcomes]
        assert all(each.offloaded_bytes == each.reloaded_bytes for each in counts)
        assert all((each.offloaded_bytes > 0) == (rank == 0) for each in counts)


@pytest.mark.parametrize("checkpoint", ["layer", {"layers": 2}], ids=str)
def test_what_it_keeps_may_leave_within_a_micro_batch(pool_of: Pools, checkpoint: Any) -> None:
    """It is back where the last half of its group runs backward, which begins with it."""
    job = tiny_job("gpt")
    plan = offloading(kept_but_for(job, checkpoint), 1 << 20, pace=1 << 12)
    [[outcome]] = checked(pool_of, job, [plan], Trial(tampered=True))
    assert all(each.offloaded_bytes == each.reloaded_bytes > 0 for each in outcome.planned.counts)


def test_it_goes_on_beside_copies_of_what_it_keeps(pool_of: Pools) -> None:
    """Between passes on the first stage, within micro-batches on the second."""
    job = tiny_job("llama", pipeline=2, microbatches=3, **SP2)
    plan = with_rest_in_wait(kept_but_for(job, "layer"))
    for outcomes in checked(
        pool_of, job, [offloading(plan, 1 << 20), offloading(plan, 1 << 20, pace=1 << 12)], Trial(tampered=True)
    ):
        assert any(outcome.planned.counts[-1].offloaded_bytes > 0 for outcome in outcomes)


@pytest.mark.parametrize("recipe", long("delayed", "tensorwise"))
def test_experts_go_on_in_fp8(te_pool_of: Pools, recipe: str) -> None:
    """Where no copies stay their last linears run again there, too."""
    job = test_fp8_kinds.job_of(recipe, "EP2", experts=test_fp8_kinds.MIXTURE | {"filled": True}, hidden_dropout=0.0)
    plan = with_rest_in_wait(ahead(kept_but_for(job, "layer"), expert=2))
    trial = Trial(steps=2, training={"ddp": True, "optimizer": "megatron"}, model={"moe_grouped_gemm": True})
    checked(te_pool_of, job, [plan, without_copies(plan)], trial)


@pytest.mark.parametrize(
    "layout", [{"pipeline": 2, "microbatches": 3}, *long({"pipeline": 2, "microbatches": 3, **SP2})], ids=str
)
def test_without_flushes(pool_of: Pools, layout: dict[str, Any]) -> None:
    """A whole recomputation sees the weights of its forward."""
    job = tiny_job("llama", **layout)
    plans = [kept_but_for(job, one) for one in ("layer", {"layers": 2})]
    if job.parallel.sequence_parallel:
        plans.append(with_rest_in_wait(plans[0]))
    how = {**MEGATRON, "defer_updates": True}
    for outcomes in pool_of(job.gpus).run(without_flush.planned, job, how, [*map(without_flushes, plans)], 4):
        assert all(outcome.differing == [] for outcome in outcomes)
        assert not any(outcome.busy for outcome in outcomes)


def test_frames_are_checked(pool_of: Pools) -> None:
    job = tiny_job("gpt", **SP2)
    plan = kept_but_for(job, "layer")
    trials = [frames_on_ranks.Trial(each) for each in (plan, ahead(plan, how="gather"), with_rest_in_wait(plan))]
    for checked_ranks in zip(*pool_of(2).run(frames_on_ranks.check_frames, job, trials), strict=True):
        for rank in checked_ranks:
            assert (rank.status, rank.observer, rank.kept) == (None, None, 0), rank.said
        assert "recomputed" in str(checked_ranks[0].summary)


def test_micro_batches_that_keep_everything(pool_of: Pools) -> None:
    job = tiny_job("gpt", **LAYOUTS["PP2xVPP2"])
    plan: Plan = checkpointed(plan_for(job, lambda layer: (), whole={"of_every": 2, "first": 1}), "layer")
    checked(pool_of, job, [plan])
