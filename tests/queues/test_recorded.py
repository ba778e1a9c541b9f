"""Logs of real megatron-core, replayed with one hardware queue and with eight: nothing hangs, and no order differs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from megatron_lynx.anatomy import EXPERTS as EXPERTS_HALF
from megatron_lynx.anatomy import LINEARS
from megatron_lynx.config.job import Job
from megatron_lynx.testbed.cpu_device import stand_in_for_cuda
from megatron_lynx.testbed.ranks import RankPool
from tests.deferring import deferring
from tests.double_buffered.test_plans import without_flushes
from tests.instruments.posted import stand_in_for_posted
from tests.instruments.queues.differences import differences
from tests.instruments.queues.log import COMPUTE, Kernel
from tests.instruments.queues.recorder import Recorder
from tests.instruments.queues.replay import replay
from tests.instruments.queues.unawaited import unawaited
from tests.queues.on_ranks import Setting, recorded, trained
from tests.tiny_jobs import tiny_job
from tests.transparency.checkpoints import ahead, checkpointed, with_rest_in_wait, without_beginning
from tests.transparency.offloaded import offloading
from tests.transparency.plans import plan_for, recomputable
from tests.transparency.test_deferring_experts import into_exchanges, plans
from tests.transparency.test_experts import EXPERTS
from tests.transparency.test_pieces import in_pieces
from tests.transparency.test_weight_gradients import FUSED

Pools = Callable[[int], RankPool]
QUEUES = (1, 8)
BOTH_OVERLAPS = {"ddp": True, "optimizer": "megatron", "overlap_grad_reduce": True, "overlap_param_gather": True}
SHARDED = {"pipeline": 2, "replicas": 2, "distributed_optimizer": True}
LOGGED = Setting(timers=1)
ONE_CALL = {"overlap_p2p_comm": False}
"""An exchange between chunks is in all directions at once, and waited for."""
INTERLEAVED = {
    "p=2": {"pipeline": 2, "layers_per_chunk": 1, "microbatches": 4},
    "p=4": {"pipeline": 4, "layers": 8, "layers_per_chunk": 1, "microbatches": 8},
}
LAYERS_IN_TURNS = {"pipeline": 2, "layers": 8, "layers_per_chunk": 2, "microbatches": 4}


def planned(job: Job, **setting: Any) -> Setting:
    """Every other layer is recomputed, and some of what the others keep goes to the host; one step is traced."""
    plan = offloading(plan_for(job, lambda layer: recomputable(job) if layer % 2 else ()), 6_000)
    return Setting(plan=plan if "defers" not in setting else without_flushes(plan), trace=True, timers=1, **setting)


def received_apart(job: Job) -> Setting:
    """Recomputes while gradients are received: these travel in groups of their own."""
    return Setting(plan=plan_for(job, lambda _: recomputable(job)), timers=1)


def half_by_half(job: Job) -> Setting:
    """The same within each micro-batch: compute waits for copies between collectives."""
    plan = offloading(plan_for(job, lambda layer: recomputable(job) if layer % 2 else ()), 60_000, pace=2_000)
    return Setting(plan=plan, trace=True, timers=1)


def begun_ahead(job: Job) -> Setting:
    """Every layer is checkpointed, and what it communicates again travels behind the layer above."""
    plan = ahead(checkpointed(plan_for(job, lambda layer: ()), "layer"), expert=job.parallel.expert)
    return Setting(plan=plan, timers=1)


def gathered_ahead(job: Job) -> Setting:
    """The same, and the inputs of attentions are gathered before that."""
    return Setting(plan=ahead(checkpointed(plan_for(job, lambda layer: ()), "layer"), how="gather"), timers=1)


def gone_on(job: Job) -> Setting:
    """The same, and what comes behind all that a half communicates runs in the wait for its gradient."""
    begun = ahead(checkpointed(plan_for(job, lambda layer: ()), "layer"), expert=job.parallel.expert)
    return Setting(plan=with_rest_in_wait(begun if job.model.experts else without_beginning(begun)), timers=1)


def in_waits(job: Job) -> Setting:
    """Weight gradients run in waits, in pieces: those of experts by groups, others by rows."""
    if job.model.experts is None:
        plan, linears = plan_for(job, lambda layer: recomputable(job) if layer % 2 else ()), LINEARS
        delayed = deferring(plan)
    else:
        linears = EXPERTS_HALF.linears
        delayed = deferring(plans(job)[0], linears, into_exchanges)
    return Setting(plan=in_pieces(delayed, dict.fromkeys(linears, 2)), timers=1, trace=True, model=FUSED)


SPREAD = {"pipeline": 2, "replicas": 2, "expert": 2}


COMBINED = (
    *("p=4", "interleaved, p=4", "interleaved, p=4, a plan", "interleaved, p=2, t=2, gathered ahead"),
    *("no flushes, p=3, deferred", "no flushes, p=3, at once, logged", "no flushes, p=3, deferred, timed in passes"),
    *("no flushes, p=4, deferred", "no flushes, p=4, at once, logged"),
)
"""Cases whose every part is in another one."""


def case(name: str, layout: dict[str, Any], setting: Setting | Callable[[Job], Setting]) -> Any:
    job = tiny_job("gpt", **{"microbatches": layout.get("pipeline", 2), **layout})
    return pytest.param(job, setting, id=name, marks=[pytest.mark.long] if name in COMBINED else [])


def unflushed(pipeline: int) -> list[Any]:
    layout = {"pipeline": pipeline, "layers": 3 if pipeline == 3 else 4, "microbatches": pipeline + 1}
    settings = {
        "deferred": Setting(defers=True),
        "deferred, logged": Setting(defers=True, timers=1),
        "deferred, timed in passes": Setting(defers=True, timers=2),
        "at once, logged": Setting(defers=False, timers=1),
    }
    return [case(f"no flushes, p={pipeline}, {name}", layout, setting) for name, setting in settings.items()]


CASES = [
    case("p=4", {"pipeline": 4}, Setting()),
    case("p=4, logged", {"pipeline": 4}, LOGGED),
    case("t=2, p=2", {"pipeline": 2, "tensor": 2, "sequence_parallel": True}, LOGGED),
    *(case(f"interleaved, {name}", layout, LOGGED) for name, layout in INTERLEAVED.items()),
    case("interleaved, p=2, in one call", INTERLEAVED["p=2"], Setting(timers=1, model=ONE_CALL)),
    *(case(f"interleaved, {name}, a plan", layout, planned) for name, layout in INTERLEAVED.items()),
    case("interleaved, p=2, t=2, a plan", {**INTERLEAVED["p=2"], "tensor": 2, "sequence_parallel": True}, received_apart),
    case("both overlaps", SHARDED, Setting(BOTH_OVERLAPS, timers=1)),
    case("t=2, p=2, a plan", {"pipeline": 2, "tensor": 2, "microbatches": 3}, planned),
    case("t=2, p=2, begun ahead", {"pipeline": 2, "tensor": 2, "microbatches": 3}, begun_ahead),
    case("t=2, begun ahead behind a gather", {"tensor": 2, "sequence_parallel": True}, begun_ahead),
    case("t=2, p=2, gathered ahead", {"pipeline": 2, "tensor": 2, "sequence_parallel": True, "microbatches": 3}, gathered_ahead),
    case("interleaved, p=2, t=2, gathered ahead", {**LAYERS_IN_TURNS, "tensor": 2, "sequence_parallel": True}, gathered_ahead),
    case("e=2, p=2, begun ahead", {**SPREAD, "experts": EXPERTS, "bias": False}, begun_ahead),
    case("t=2, gone on", {"tensor": 2, "sequence_parallel": True, "hidden_dropout": 0.0}, gone_on),
    case("t=2, gone on, gradients gathered for nothing", {"tensor": 2, "sequence_parallel": True}, gone_on),
    case(
        "e=2, p=2, gone on",
        {"pipeline": 2, "replicas": 2, "expert": 2, "experts": EXPERTS, "bias": False, "hidden_dropout": 0.0},
        gone_on,
    ),
    case("t=2, weight gradients in pieces", {"tensor": 2}, in_waits),
    case("t=2 sliced, weight gradients in pieces", {"tensor": 2, "sequence_parallel": True}, in_waits),
    case("p=2, t=2, weight gradients in pieces", {"pipeline": 2, "tensor": 2, "microbatches": 3}, in_waits),
    case("e=2, weight gradients by groups of experts", {"replicas": 2, "expert": 2, "experts": EXPERTS, "bias": False}, in_waits),
    case("t=2, half by half", {"tensor": 2}, half_by_half),
    case("interleaved, p=2, half by half", INTERLEAVED["p=2"], half_by_half),
    *(each for pipeline in (2, 3, 4) for each in unflushed(pipeline)),
    case("no flushes, p=2, t=2, a plan", {"pipeline": 2, "tensor": 2}, lambda job: planned(job, defers=True)),
    case("no flushes, sharded", {**SHARDED, "microbatches": 3}, Setting(defers=True, timers=1)),
]


@pytest.mark.parametrize(("job", "setting"), CASES)
def test_nothing_hangs_and_no_order_differs(pool_of: Pools, job: Job, setting: Any) -> None:
    logs = pool_of(job.gpus).run(recorded, job, setting if isinstance(setting, Setting) else setting(job))
    for queues in QUEUES:
        outcome = replay(logs, queues)
        assert outcome.finished, str(outcome)
    assert differences(logs) == []
    assert [found for log in logs for found in unawaited(log)] == []


def test_memory_and_views_are_no_kernels() -> None:
    """What comes behind them on the host used to come behind them on the device."""
    with stand_in_for_cuda(), ExitStack() as undo:
        stand_in_for_posted(undo)
        recorder = undo.enter_context(Recorder(0))
        torch.empty(4).view(2, 2).detach()
        assert recorder.log.entries == []
        torch.empty(4).fill_(1)
    assert recorder.log.entries == [Kernel(COMPUTE, "kernels")]


@pytest.mark.parametrize("pipeline", [2, 3, 4])
def test_synchronising_behind_a_deferred_update_comes_back(pool_of: Pools, pipeline: int) -> None:
    """Without a recorder: the stand-in's synchronize waits for what a rank has posted. One stage used to wait there for a
    message, the other one in the barrier for that stage."""
    job = tiny_job("gpt", pipeline=pipeline, layers=3 if pipeline == 3 else 4, microbatches=pipeline)
    pool_of(pipeline).run(trained, job, Setting(defers=True, timers=1))
