"""Deferred weight gradients: every bit stays stock's, all are done before gradients are read, and their bytes are bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.anatomy import LINEARS
from megatron_lynx.anatomy.address import RECV_BACKWARD, is_forward
from megatron_lynx.config.job import Job
from megatron_lynx.figures import Figures
from megatron_lynx.plan.plan import Plan
from megatron_lynx.testbed.ranks import RankPool
from tests.deferring import deferring
from tests.long import long, with_models
from tests.plan.strategies import plans_for, samples
from tests.tiny_jobs import tiny_job
from tests.transparency.offloaded import offloading
from tests.transparency.plans import plan_for, recomputable
from tests.transparency.queued import failing, held_and_given_back, held_bytes, pending_when_reduced
from tests.transparency.test_every_bit import LAYOUTS, checked
from tests.transparency.trials import Trial

Pools = Callable[[int], RankPool]
FUSED: dict[str, Any] = {"gradient_accumulation_fusion": True}
BOUND = 20_000


def everything(job: Job) -> Plan:
    return plan_for(job, lambda layer: recomputable(job, gather=job.parallel.sequence_parallel))


def nothing(job: Job) -> Plan:
    return plan_for(job, lambda layer: ())


def counts_of(pool_of: Pools, job: Job, plans: list[Plan], trial: Trial) -> list[list[Figures]]:
    """Of the last step, by rank and plan. What is deferred is done when the step ends; equality is asserted."""
    found = []
    for outcomes in checked(pool_of, job, plans, trial):
        for outcome in outcomes:
            assert all(counts.deferred == counts.filled + counts.flushed for counts in outcome.planned.counts)
        found.append([outcome.planned.counts[-1] for outcome in outcomes])
    return found


def per_step(job: Job, rank: int) -> int:
    """Weight gradients of a rank's linears in one step."""
    stage = rank // (job.parallel.tensor * job.replicas)
    layers = sum(len(job.layers_of(stage, chunk)) for chunk in range(job.chunks))
    return len(LINEARS) * layers * job.microbatches


@with_models(["TP2", "TP2+SP", "TP2xPP2xVPP2+SP"], ("TP2xPP2xVPP2+SP",))
def test_into_waits(pool_of: Pools, layout: str, like: Any) -> None:
    """Kept and recomputed (with sequence parallelism gathered once), into forwards alone, into everything; with few bytes. Tied
    embeddings with the GPT."""
    job = tiny_job(like, **LAYOUTS[layout])
    plans = [
        deferring(nothing(job), chosen=is_forward),
        deferring(everything(job)),
        deferring(everything(job), chosen=is_forward, most_bytes=BOUND),
    ]
    for rank, (later, at_once, bounded) in enumerate(
        counts_of(pool_of, job, plans, Trial(steps=2, training={"ddp": True}, model=FUSED))
    ):
        assert later.deferred == at_once.deferred == bounded.deferred == per_step(job, rank)
        assert at_once.flushed == 0, "each has a wait in its own backward"
        assert 0 < later.filled < later.deferred, "the last ones have no forward behind them"
        assert later.deferred_bytes > BOUND * job.chunks >= bounded.deferred_bytes > 0, "a bound is a chunk's"
        assert 0 < bounded.filled < later.filled


@pytest.mark.parametrize("layout", ["PP2", "PP2xVPP2"])
def test_while_a_gradient_is_received(pool_of: Pools, layout: str) -> None:
    job = tiny_job("gpt", **LAYOUTS[layout])
    plans = [deferring(plan, chosen=lambda wait: wait == RECV_BACKWARD) for plan in (nothing(job), everything(job))]
    for rank, both in enumerate(counts_of(pool_of, job, plans, Trial(training={"ddp": True}, model=FUSED))):
        receiving = per_step(job, 0) if rank == 0 else per_step(job, 1) * (job.chunks - 1) // job.chunks
        for counts in both:
            assert counts.deferred == receiving, "the last chunk receives nothing"
            assert (counts.filled > 0) == (receiving > 0)


OVERLAPPED = {"ddp": True, "overlap_grad_reduce": True, "optimizer": "megatron"}


@pytest.mark.parametrize(("like", "instances"), [("gpt", 1), *long(("llama", 1), ("gpt", 2))])
def test_reduced_while_backward_runs(pool_of: Pools, like: Any, instances: int) -> None:
    """Nothing is deferred in the last micro-batch, whose hooks reduce what they find. Both overlaps of the distributed optimizer,
    gradients clipped. Two instances of it reduce between them, too."""
    if instances > 1:
        pytest.importorskip("einops", reason="Megatron makes groups of instances with it")
    layout = {"tensor": 2, "replicas": 2, "distributed_optimizer": True, "optimizer_instances": instances}
    job = tiny_job(like, **layout, microbatches=3, dtype="bf16")
    trial = Trial(steps=3, training={**OVERLAPPED, "overlap_param_gather": True}, model=FUSED, compared="weights")
    plans = [deferring(everything(job), chosen=is_forward), deferring(nothing(job), linears=LINEARS[1:3])]
    for all_linears, two in counts_of(pool_of, job, plans, trial):
        assert all_linears.deferred == per_step(job, 0) * 2 // 3
        assert all_linears.filled == all_linears.deferred, "forwards of two micro-batches came behind them"
        assert two.deferred == per_step(job, 0) // 3


@pytest.mark.parametrize(
    ("layout", "overlapped"),
    [("TP2xPP2", False), ("TP2xPP2xVPP2+SP", True), *long(("TP2xPP2", True), ("TP2xPP2xVPP2+SP", False))],
)
def test_nothing_is_pending_when_a_reduction_begins(pool_of: Pools, layout: str, overlapped: bool) -> None:
    """In cool-down no forward comes that would take what is pending: with overlapped reduction a linear catches up right before
    its last gradient, else when the last backward ends."""
    job = tiny_job("gpt", **LAYOUTS[layout])
    plan = deferring(nothing(job), chosen=is_forward)
    for seen, flushed in pool_of(job.gpus).run(pending_when_reduced, job, plan, overlapped):
        assert seen
        assert not any(seen)
        assert flushed > 0 or overlapped
    if overlapped:
        assert any(flushed > 0 for _, flushed in pool_of(job.gpus).run(pending_when_reduced, job, plan, overlapped))


@pytest.mark.quick
def test_hooks_are_held_and_given_back(pool_of: Pools) -> None:
    """Also the buffer that a gathered input lies in."""
    job = tiny_job("gpt", tensor=2, sequence_parallel=True)
    for claimed, changed in pool_of(2).run(held_and_given_back, job, deferring(nothing(job))):
        assert claimed == [f"fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_{kind}" for kind in ("fp16", "fp32")]
        assert changed == []


def test_random_plans(pool_of: Pools) -> None:
    """Any linears, any waits that come, recomputations of any kind beside them."""
    job = tiny_job("llama", **LAYOUTS["TP2xPP2+SP"])

    candidates = samples(plans_for(job, whole=True, defers=True).filter(defers), 3)
    counts_of(pool_of, job, candidates, Trial(steps=1, training={"ddp": True}, model=FUSED))


def defers(plan: Plan) -> bool:
    return any(stage.defers for stage in plan.stages)


VARIANTS: dict[str, tuple[dict[str, Any], Trial]] = {
    "backward in a second thread": ({"tensor": 2}, Trial(backward_thread=True)),
    "what was let go is overwritten": ({"tensor": 2, "sequence_parallel": True}, Trial(canaries=True)),
    "gradients in 16 bits": ({"tensor": 2, "dtype": "bf16"}, Trial()),
    "without a reduction in the last micro-batch": ({"pipeline": 2, "microbatches": 1, "tensor": 2}, Trial()),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(pool_of: Pools, variant: str) -> None:
    fields, trial = VARIANTS[variant]
    job = tiny_job("llama", **fields)
    trial.training, trial.model = {"ddp": True}, FUSED
    [counts] = counts_of(pool_of, job, [deferring(everything(job))], trial)[0]
    assert counts.filled > 0


def test_beside_offloading(pool_of: Pools) -> None:
    """Inputs that came back from the host are held until their weight gradient is computed. Copies come late by a random time."""
    job = tiny_job("gpt", **LAYOUTS["TP2xPP2"])
    plans = [offloading(deferring(plan, chosen=is_forward), 12_000) for plan in (nothing(job), everything(job))]
    for rank, both in enumerate(counts_of(pool_of, job, plans, Trial(training={"ddp": True}, model=FUSED, tampered=True))):
        assert rank > 1 or all(counts.offloaded_bytes > 0 and counts.filled > 0 for counts in both)


@pytest.mark.parametrize("layout", ["TP2", "TP2+SP"])
def test_what_is_counted_is_held(pool_of: Pools, layout: str) -> None:
    """At every moment; with sequence parallelism the gathered input is an entry's own. A bound is kept."""
    job = tiny_job("llama", **LAYOUTS[layout])
    tokens, model, ranks = job.model.seq * job.batch.micro, job.model, job.parallel.tensor
    heads = model.hidden + 2 * model.hidden * model.kv_groups // model.heads
    widths = [model.hidden + heads // ranks, model.hidden // ranks + model.hidden]
    widths += [model.hidden + 2 * model.ffn // ranks, model.ffn // ranks + model.hidden]
    bounds = {1 << 30: sum(widths) * tokens * 4 * model.layers, BOUND * 2: BOUND * 2}
    for bound, most in bounds.items():
        for base in (nothing(job), everything(job)):
            plan = deferring(base, chosen=is_forward, most_bytes=bound)
            for held in pool_of(2).run(held_bytes, job, plan):
                assert held.counted == held.alive
                assert (held.alive[-1], held.graphs) == (0, 0)
                assert max(held.counted) == held.most
                assert held.most == most if bound > BOUND * 2 else 0 < held.most <= most


def test_nothing_survives_a_step_that_fails(pool_of: Pools) -> None:
    """The exception is the caller's; what was pending is dropped, and the next step is stock's."""
    job = tiny_job("llama", tensor=2, microbatches=3)
    for failed in pool_of(2).run(failing, job, deferring(nothing(job), chosen=is_forward)):
        assert failed.said == "a kernel failed"
        assert failed.pending > 0
        assert (failed.pending_then, failed.busy) == (0, False)
        assert failed.differing == []


def test_the_trace_tells_where_each_ran(pool_of: Pools) -> None:
    job = tiny_job("gpt", tensor=2)
    plan = deferring(nothing(job), linears=LINEARS[2:3], chosen=lambda wait: wait == "fwd.mlp.0")
    outcomes = checked(pool_of, job, [plan], Trial(training={"ddp": True}, model=FUSED, traced=True))
    events = [event for event in outcomes[0][0].planned.events if event["kind"] == "weight_gradient"]
    assert {(event["window"], event["half"]) for event in events} == {("flushed", "mlp")} | {
        (f"fwd.mlp.0@{layer}", "mlp") for layer in range(1, job.model.layers + 1)
    }
    assert [event["layer"] for event in events if event["window"] == "flushed"] == [4, 3, 2, 1], "the oldest first"
    assert RECV_BACKWARD not in {event["window"] for event in events}
