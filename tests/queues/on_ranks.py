"""What runs on the ranks: a training loop like Megatron's, recorded. Megatron is imported inside, under the stand-in."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_lynx.anatomy.address import RECV_BACKWARD
from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from tests.instruments.queues.log import HostWait, Log

STEPS = 3


@dataclass(frozen=True)
class Setting:
    """How a job is trained."""

    how: dict[str, Any] = field(default_factory=lambda: {"ddp": True, "optimizer": "megatron"})
    """Arguments of `Training`."""
    defers: bool | None = None
    """Without flushes, with updates deferred or not; None: Megatron's own schedule."""
    timers: int | None = None
    """`--log-interval 1` with this `--timing-log-level`."""
    trace: bool = False
    """The second step is traced, as `--lynx-trace` traces one; needs a plan."""
    plan: Plan | None = None
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of TransformerConfig."""


def recorded(rank: int, job: Job, setting: Setting) -> Log:
    """Runs inside `RankPool`. The log of a few steps."""
    from megatron_lynx.testbed.fusions import stand_in_for_fused_gradient
    from tests.instruments.groups import initialise
    from tests.instruments.queues.recorder import Recorder

    initialise(job)
    with stand_in_for_fused_gradient():
        loop = Loop(job, setting)
        with loop.in_force(), Recorder(rank) as recorder:
            for step in range(STEPS):
                loop.step(step, recorder)
    return recorder.log


def trained(rank: int, job: Job, setting: Setting) -> None:
    """Runs inside `RankPool`. The same steps, not recorded: where Megatron synchronises the device, this rank waits."""
    from tests.instruments.groups import initialise
    from tests.instruments.posted import synchronizing_within

    initialise(job)
    loop = Loop(job, setting)
    with loop.in_force(), synchronizing_within(20.0):
        for step in range(STEPS):
            loop.step(step, Unrecorded())


def named_recomputations(rank: int, job: Job, setting: Setting) -> Log:
    """As `recorded`; what runs while a gradient is received is named after its micro-batch."""
    from megatron_lynx.runtime.engine import Engine
    from megatron_lynx.runtime.frame import Frame
    from megatron_lynx.timetable import Moment, Task
    from tests.instruments.queues import recorder

    original, recorders = Engine._recompute, []

    class Naming(recorder.Recorder):
        def __enter__(self) -> Any:
            recorders.append(self)
            return super().__enter__()

    def run(engine: Engine, frame: Frame, task: Task, reached: Moment) -> None:
        if reached.place != RECV_BACKWARD:
            original(engine, frame, task, reached)
            return
        with recorders[0].part(f"recompute of {task.half} for {frame.micro_batch.number}"):
            original(engine, frame, task, reached)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Engine, "_recompute", run)
        patched.setattr(recorder, "Recorder", Naming)
        return recorded(rank, job, setting)


def reads_of_losses(rank: int, mode: str) -> list[int]:
    """Runs inside `RankPool`. How often the host waits in each of two steps of two micro-batches, whose losses are checked as
    `loss_func` of pretrain_gpt.py checks them. `mode`: `--rerun-mode`."""
    import torch
    from megatron.core.rerun_state_machine import (
        RerunMode,
        destroy_rerun_state_machine,
        get_rerun_state_machine,
        initialize_rerun_state_machine,
    )

    from tests.instruments.groups import initialise
    from tests.instruments.queues.recorder import Recorder
    from tests.tiny_jobs import tiny_job

    initialise(tiny_job("gpt"))
    destroy_rerun_state_machine()
    initialize_rerun_state_machine(mode=RerunMode(mode))
    machine, found, loss = get_rerun_state_machine(), list[int](), torch.ones(4).sum()
    for _ in range(2):
        waits = 0
        while machine.should_run_forward_backward(None):
            with Recorder(rank) as recorder:
                for _ in range(2):
                    machine.validate_result(result=loss, rejection_func=torch.isnan, message="NaN")
                    machine.validate_result(result=loss, rejection_func=torch.isinf, message="Inf")
            waits += sum(isinstance(entry, HostWait) for entry in recorder.log.entries)
        machine.should_checkpoint_and_exit()  # as training does behind each step
        found.append(waits)
    destroy_rerun_state_machine()
    return found


class Unrecorded:
    """In a recorder's place."""

    def part(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


class Loop:
    """One rank's training, with the barriers and reads of `megatron.training`."""

    def __init__(self, job: Job, setting: Setting) -> None:
        from megatron.core.timers import Timers
        from megatron.core.utils import get_model_config

        from megatron_lynx.double_buffered.pipeline import DoubleBuffered
        from megatron_lynx.testbed.training import synthetic_batches
        from tests.instruments.tiny_models import build_model
        from tests.instruments.training import Training

        self._job, self._setting = job, setting
        self._training = Training(job, build_model(job, **setting.model), **setting.how)
        chunks, sizes = self._training.chunks, {"seq_length": job.model.seq, "micro_batch_size": job.batch.micro}
        self._pipeline: Any = None
        if setting.defers is not None:
            optimizer, defers = self._training.optimizer, setting.defers
            self._pipeline = DoubleBuffered(chunks, optimizer, microbatches=job.microbatches, defer_updates=defers, **sizes)
        self._text = [micro_batch for step in range(STEPS) for micro_batch in synthetic_batches(job, step)]
        self._coming = iter(self._text)
        self._folder = tempfile.TemporaryDirectory()
        self._installation: Any = None
        self._timers = None if setting.timers is None else Timers(setting.timers, "minmax")
        config = get_model_config(chunks[0])
        config.timers, config.barrier_with_L1_time = self._timers, True

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """The setting's plan is installed inside."""
        from megatron_lynx.apply.installation import install

        with ExitStack() as undo:
            if self._setting.plan is not None:
                without_flushes = {} if self._pipeline is None else {"without_flushes": self._pipeline}
                self._installation = undo.enter_context(install(self._training.chunks, self._setting.plan, **without_flushes))
            if self._timers is not None:
                self._timers("interval-time", log_level=0).start(barrier=True)
            yield
            self._folder.cleanup()

    def step(self, number: int, recorder: Any) -> None:
        from megatron_lynx.launch.reporter import traced_step

        traces = self._setting.trace and number == 1
        path = Path(self._folder.name, "trace.json")
        with traced_step(self._installation.engine.trace, path, 2) if traces else nullcontext():
            with recorder.part(f"batch {number}"):
                losses = self._forward_backward(number)
            with recorder.part(f"update {number}"):
                self._update()
        if self._timers is not None:
            with recorder.part(f"log {number}"):
                for loss in losses:
                    loss.item()
                self._timers("interval-time").elapsed(barrier=True)

    def _forward_backward(self, number: int) -> list[Any]:
        from megatron_lynx.testbed.training import forward_step, run_schedule

        for chunk in self._training.chunks:
            if hasattr(chunk, "zero_grad_buffer"):
                chunk.zero_grad_buffer()
            chunk.zero_grad(set_to_none=True)
        if self._pipeline is not None:
            return self._pipeline.forward_backward(forward_step, self._coming, drains=number == STEPS - 1)
        micro_batches = self._job.microbatches
        return run_schedule(self._training.chunks, self._job, self._text[number * micro_batches : (number + 1) * micro_batches])

    def _update(self) -> None:
        if self._timers is not None:
            self._timers("optimizer", log_level=1).start(barrier=True)
        (self._training.optimizer.step if self._pipeline is None else self._pipeline.update)()
        if self._timers is not None:
            self._timers("optimizer").stop()
