"""Weight gradients after the send of their chunk's input gradient (`pipe.send_backward`), in cool-down and in each chunk's last
backward: every bit is stock's, they run once the send is posted, and before gradients are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.anatomy import DENSE, EXPERTS, LINEARS
from megatron_lynx.anatomy.address import SEND_BACKWARD
from megatron_lynx.apply.installation import order_of
from megatron_lynx.config.job import Job
from megatron_lynx.cost.section import weight_gradient
from megatron_lynx.plan.plan import Plan
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.report.drawing import kind_of
from megatron_lynx.testbed.ranks import RankPool
from tests.deferring import deferring
from tests.long import long, with_models
from tests.profiler.made_up import made_up_profile
from tests.tiny_jobs import tiny_job
from tests.transparency.queued import held_bytes, pending_when_reduced, posted_and_computed
from tests.transparency.test_deferring_experts import plans as plans_of_experts
from tests.transparency.test_deferring_experts import trial_of
from tests.transparency.test_every_bit import LAYOUTS
from tests.transparency.test_experts import job_of
from tests.transparency.test_weight_gradients import FUSED, OVERLAPPED, counts_of, everything, nothing, per_step
from tests.transparency.trials import Trial

Pools = Callable[[int], RankPool]
BOUND = 20_480
"""Bytes of the largest entry of a layer in these models."""


def sent_first(plan: Plan, linears: tuple[str, ...] = (), most_bytes: int = 1 << 30) -> Plan:
    return deferring(plan, linears, lambda wait: wait == SEND_BACKWARD, most_bytes)


def sending(job: Job, rank: int, *, flushed: bool = True) -> int:
    """Weight gradients in one step of a rank's chunks that send the gradient of their input, in the drain. `flushed`: with those
    that the first stage computes before it sends, because gradients of a chunk may be read before its last one."""
    stage = rank * job.parallel.pipeline // job.gpus
    order = order_of(job.parallel.pipeline, stage, job.chunks, job.microbatch_group)(job.microbatches)
    chunks = [
        action.chunk
        for action, phase in order.backwards
        if phase == "cooldown" or action.virtual in order.completing
        if (stage, action.chunk) != (0, 0)
        if flushed or stage > 0 or action.virtual not in order.completing
    ]
    return sum(len(LINEARS) * len(job.layers_of(stage, chunk)) for chunk in chunks)


@with_models(["PP2", "TP2xPP2", "PP2 with 3+1 layers", "PP2xVPP2", "TP2xPP2xVPP2+SP"], ("PP2 with 3+1 layers", "PP2xVPP2"))
def test_every_bit_is_stocks(pool_of: Pools, layout: str, like: Any) -> None:
    """Kept and recomputed; with few bytes, beyond which the oldest run in backward. Dropout is on in the GPT."""
    job = tiny_job(like, **LAYOUTS[layout])
    plans = [sent_first(nothing(job)), sent_first(everything(job)), sent_first(nothing(job), most_bytes=BOUND)]
    trial = Trial(steps=2, training={"ddp": True}, model=FUSED)
    for rank, (kept, again, bounded) in enumerate(counts_of(pool_of, job, plans, trial)):
        assert kept.deferred == again.deferred == bounded.deferred == sending(job, rank)
        assert kept.filled == again.filled == sending(job, rank, flushed=False)
        assert bounded.deferred_bytes <= BOUND * job.chunks
        assert (bounded.flushed > 0) == (bounded.deferred > 0)


@pytest.mark.parametrize(
    "model",
    [{"overlap_p2p_comm": False}, {"overlap_p2p_comm": False, "batch_p2p_comm": True}, {"overlap_p2p_comm_warmup_flush": True}],
    ids=["one call", "one batched call", "received ahead"],
)
def test_every_way_of_exchanging(pool_of: Pools, model: dict[str, Any]) -> None:
    job = tiny_job("gpt", **LAYOUTS["PP2xVPP2"])
    trial = Trial(training={"ddp": True}, model={**FUSED, **model})
    for rank, (counts,) in enumerate(counts_of(pool_of, job, [sent_first(everything(job))], trial)):
        assert counts.filled == sending(job, rank, flushed=False) > 0
        assert counts.deferred == sending(job, rank)


@pytest.mark.parametrize(("layout", "aligned"), [("PP2", True), ("PP2xVPP2", False), *long(("PP2", False), ("PP2xVPP2", True))])
def test_reductions_of_replicas(pool_of: Pools, layout: str, aligned: bool) -> None:
    """If stages reduce together (--align-grad-reduce, Megatron's default), the last micro-batch's wait for the send, too; else
    they are computed in backward, where gradients are reduced."""
    job = tiny_job("gpt", **LAYOUTS[layout], replicas=2, distributed_optimizer=True, dtype="bf16")
    training = {**OVERLAPPED, "align_grad_reduce": aligned}
    trial = Trial(steps=3, training=training, model=FUSED, compared="weights")
    for rank, (counts,) in enumerate(counts_of(pool_of, job, [sent_first(nothing(job))], trial)):
        last = (
            per_step(job, rank) // job.microbatches
            if rank >= job.replicas
            else per_step(job, rank) // job.microbatches // job.chunks
        )
        assert counts.deferred == sending(job, rank) - (0 if aligned or not sending(job, rank) else last)


@pytest.mark.parametrize(
    ("layout", "overlapped"), [("PP2", True), ("PP2xVPP2", False), *long(("PP2", False), ("PP2xVPP2", True))]
)
def test_nothing_is_pending_when_a_reduction_begins(pool_of: Pools, layout: str, overlapped: bool) -> None:
    job = tiny_job("gpt", **LAYOUTS[layout], replicas=2)
    for seen, _ in pool_of(job.gpus).run(pending_when_reduced, job, sent_first(nothing(job)), overlapped):
        assert seen
        assert not any(seen)


def test_the_gradient_is_sent_before_weight_gradients(pool_of: Pools) -> None:
    """On the last of two stages, which sends nothing but gradients."""
    job = tiny_job("gpt", **LAYOUTS["PP2"])
    seen = pool_of(2).run(posted_and_computed, job, sent_first(nothing(job)))[1]
    assert seen[seen.index("computed") - 1 :] == ["posted", *["computed"] * sending(job, 1)]


def test_experts(pool_of: Pools) -> None:
    """Each expert's, and attention's; other tokens in every step."""
    job = job_of("PP2, EP2", layers=4)
    kept, _ = plans_of_experts(job)
    first, *_, last = counts_of(pool_of, job, [sent_first(kept, EXPERTS.linears)], trial_of())
    assert first[0].deferred == 0
    assert last[0].filled == last[0].deferred > 0


@pytest.mark.parametrize("layout", ["PP2", "TP2xPP2+SP"])
def test_bytes_and_counts_are_those_that_are_priced(pool_of: Pools, layout: str) -> None:
    """All of a chunk's layers wait for the send: at the end of a backward all of them are pending, one by one they are freed."""
    job = tiny_job("llama", **LAYOUTS[layout])
    profile, plan = made_up_profile(job), sent_first(nothing(job))
    layer_bytes = sum(weight_gradient(profile, section, linear).bytes for section in DENSE.values() for linear in section.linears)
    simulation = rehearse(plan, profile)
    for rank, held in enumerate(pool_of(job.gpus).run(held_bytes, job, plan)):
        stage = rank // job.parallel.tensor
        assert held.counted == held.alive
        assert held.graphs == 0
        assert held.most == (layer_bytes * len(job.layers_of(stage)) if stage else 0)
        spans = [span for span in simulation.timeline().ranks[stage] if span.kind == "weight_gradient"]
        assert len({(span.start_s, span.name) for span in spans if kind_of(span) == "weight_gradient"}) == sending(job, rank)
