"""Every bit is stock's, and nothing is used before it was waited for, though copies are late and memory is NaN once let go.

One case for each way to train; the ranks of a case run stock first, and then each of its plans under watch.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lynx.anatomy import LINEARS
from megatron_lynx.anatomy.address import is_forward
from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from tests.deferring import deferring
from tests.long import long
from tests.tiny_jobs import tiny_job
from tests.transparency.checkpoints import ahead, checkpointed, with_rest_in_wait
from tests.transparency.offloaded import offloading
from tests.transparency.plans import plan_for, recomputable
from tests.transparency.test_every_bit import OVERLAPPED
from tests.transparency.test_offload import chunk_bytes
from tests.transparency.test_pieces import in_pieces
from tests.transparency.trials import Trial

from . import on_ranks

TP2 = {"tensor": 2}
SP = {"tensor": 2, "sequence_parallel": True}
PP2 = {"pipeline": 2, "microbatches": 3}
PP4 = {"pipeline": 4, "microbatches": 5}
INTERLEAVED = {"pipeline": 2, "microbatches": 4, "layers_per_chunk": 1}
ALL_FOUR = {"tensor": 2, "pipeline": 2, "sequence_parallel": True, "microbatches": 4, "layers_per_chunk": 1}
NO_SYNC = {"batch_p2p_sync": False}
"""Megatron's exchanges in plain 1F1B end in a synchronisation, which would wait for all copies, and hide what is missing."""
DISTRIBUTED = {"replicas": 2, "distributed_optimizer": True}
BOTH_OVERLAPS = {**OVERLAPPED, "overlap_param_gather": True}


def recomputing(job: Job, **how: Any) -> Plan:
    """Everything that can be is recomputed, in the windows that there are."""
    return plan_for(job, lambda layer: recomputable(job, gather=job.parallel.sequence_parallel), **how)


def begun_ahead(job: Job) -> Plan:
    """Every layer is checkpointed, and what its attention returns is reduced again while the layer above runs backward."""
    return ahead(checkpointed(plan_for(job, lambda layer: ()), "layer"))


def gathered_ahead(job: Job) -> Plan:
    """The same, and the inputs of attentions are gathered before that."""
    return ahead(checkpointed(plan_for(job, lambda layer: ()), "layer"), how="gather")


def gone_on(job: Job) -> Plan:
    """The same, and what comes behind what a half gathers runs beside the gather of its gradient."""
    return with_rest_in_wait(gathered_ahead(job))


def leaving(job: Job, share: float = 1.0, beside: str = "allow") -> Plan:
    """Nothing is recomputed, everything or a share of it goes to the host."""
    return offloading(plan_for(job, lambda layer: ()), int(share * chunk_bytes(job)), beside=beside)


def half_by_half(job: Job) -> Plan:
    """Everything that may leaves within its own micro-batch, and is soon let go: compute waits for each copy."""
    return offloading(plan_for(job, lambda layer: ()), chunk_bytes(job), pace=chunk_bytes(job))


def half_by_half_and_recomputed(job: Job) -> Plan:
    """Recomputations in windows read what is on its way back, some of it a little at a time."""
    some = plan_for(job, lambda layer: ["input_layernorm", "core_attention", "activation"][layer % 2 :])
    return offloading(some, chunk_bytes(job) // 2, pace=chunk_bytes(job) // 16)


def both(job: Job) -> Plan:
    """Some is recomputed, some of the rest goes to the host, two micro-batches ahead."""
    some = plan_for(job, lambda layer: ["input_layernorm", "core_attention", "activation"][layer % 2 :])
    return offloading(some, chunk_bytes(job) // 2)


def filling(job: Job) -> Plan:
    """Weight gradients run in whatever wait comes, those of what was recomputed and of what came back from the host."""
    return deferring(recomputing(job))


def filling_later(job: Job) -> Plan:
    return deferring(offloading(recomputing(job), chunk_bytes(job) // 2), chosen=is_forward)


def filling_in_pieces(job: Job) -> Plan:
    return in_pieces(filling(job), dict.fromkeys(LINEARS, 2))


DEFERRED: dict[str, Any] = {"training": {"ddp": True}, "model": {"gradient_accumulation_fusion": True}}

CASES: dict[str, tuple[dict[str, Any], list[Any], Trial, bool]] = {
    "TP2": (TP2, [recomputing], Trial(steps=2), False),
    "TP2, begun ahead": (TP2, [begun_ahead], Trial(steps=2), False),
    "sequence parallel, begun ahead": (SP, [begun_ahead, gathered_ahead], Trial(steps=2), False),
    "sequence parallel, gone on in waits": ({**SP, "hidden_dropout": 0.0}, [gone_on], Trial(steps=2), False),
    "sequence parallel, gathered once": (SP, [recomputing], Trial(steps=2), False),
    "sequence parallel, gathered on demand": (SP, [lambda job: recomputing(job, windows=False)], Trial(steps=2), False),
    "weight gradients in waits, sequence parallel": (
        SP,
        [filling, filling_later, filling_in_pieces],
        Trial(steps=2, **DEFERRED),
        False,
    ),
    "weight gradients in waits, TP2xPP2xVPP2": (ALL_FOUR, [filling_later], Trial(steps=1, **DEFERRED), False),
    "PP4": (PP4, [recomputing], Trial(steps=1), False),
    "PP4, offloaded": (PP4, [leaving], Trial(steps=1, model=NO_SYNC), False),
    "PP4, copies away from messages": (PP4, [lambda job: leaving(job, beside="avoid")], Trial(steps=1, model=NO_SYNC), False),
    "PP2, exchanges that synchronise, offloaded": (PP2, [leaving], Trial(steps=2), False),
    "PP2, offloaded in part, and recomputed": (PP2, [both, lambda job: leaving(job, 0.3)], Trial(steps=2, model=NO_SYNC), False),
    "interleaved": (INTERLEAVED, [recomputing], Trial(steps=2), False),
    "interleaved, offloaded and recomputed": (INTERLEAVED, [both], Trial(steps=2), False),
    "TP2xPP2xVPP2, sequence parallel, offloaded and recomputed": (ALL_FOUR, [both], Trial(steps=1), False),
    "one stage, half by half": ({"microbatches": 2}, [half_by_half, half_by_half_and_recomputed], Trial(steps=2), False),
    "TP2, half by half, and recomputed": (TP2, [half_by_half_and_recomputed], Trial(steps=1), False),
    "interleaved, half by half": (INTERLEAVED, [half_by_half_and_recomputed], Trial(steps=1), False),
    "reductions in backward": ({"replicas": 2}, [recomputing], Trial(steps=2, training=OVERLAPPED), False),
    "distributed optimizer, both overlaps": (
        DISTRIBUTED,
        [recomputing],
        Trial(steps=3, training=BOTH_OVERLAPS, compared="weights"),
        False,
    ),
    "distributed optimizer, both overlaps, pipeline, offloaded": (
        {**DISTRIBUTED, **PP2},
        [both],
        Trial(steps=2, training=BOTH_OVERLAPS, model=NO_SYNC, compared="weights"),
        False,
    ),
    "a log of each step, offloaded": (PP2, [both], Trial(steps=2, model=NO_SYNC), True),
    "timers with barriers, interleaved, offloaded": (INTERLEAVED, [both], Trial(steps=2), True),
    "a trace, offloaded and recomputed": (PP2, [both], Trial(steps=2, traced=True, model=NO_SYNC), False),
}
"""Layout, plans, how it is trained, whether each step is timed between barriers."""


COMBINED = (
    "weight gradients in waits, TP2xPP2xVPP2",
    "TP2xPP2xVPP2, sequence parallel, offloaded and recomputed",
    "distributed optimizer, both overlaps",
)
"""Cases whose every part is in another one."""


@pytest.mark.parametrize("case", [*(case for case in CASES if case not in COMBINED), *long(*COMBINED)])
def test_every_bit_and_no_race(pool_of: Any, case: str) -> None:
    layout, plans, trial, logged = CASES[case]
    job = tiny_job("gpt", **layout)
    made = [plan(job) for plan in plans]
    for rank, found in enumerate(pool_of(job.gpus).run(on_ranks.watched, job, made, trial, logged)):
        for plan, under in zip(made, found, strict=True):
            assert_clean(under, f"rank {rank}")
            offloads = any(stage.offload for stage in plan.stages)
            paced = any(stage.offload and stage.offload.pace_bytes for stage in plan.stages)
            last = rank // job.parallel.tensor // job.replicas == job.parallel.pipeline - 1 and job.chunks == 1 and not paced
            assert (under.moved > 0) == (offloads and not last), f"rank {rank}: {under.moved} copies on streams"


def assert_clean(under: on_ranks.Under, where: str) -> None:
    assert under.races == [], where
    assert under.found == [], where
    assert under.differing == [], where
