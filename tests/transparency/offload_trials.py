"""What one rank does where an offload trial is more than a training beside stock's. Runs inside `RankPool`."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan


@dataclass
class Failed:
    """A step whose copy failed, and what came behind it."""

    error: str = ""
    left: list[str] = field(default_factory=list)
    busy: bool = False
    threads: list[str] = field(default_factory=list)
    equal_afterwards: bool = False
    """Whether stock's gradients are what they were before, when the plan was removed."""


def fail_and_recover(rank: int, job: Job, plan: Plan, direction: Literal["offload", "reload"]) -> Failed:
    """The copies of the last micro-batch fail on one stage of one."""
    from megatron_lynx.apply.installation import install
    from megatron_lynx.testbed.groups import seed_random_numbers
    from megatron_lynx.testbed.training import synthetic_batches
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    initialise(job)
    training, result = Training(job, build_model(job), optimizer=None), Failed()
    dist.monitored_barrier(timeout=LONGEST_START)

    def step() -> dict[str, Tensor]:
        seed_random_numbers(7)
        training.step(synthetic_batches(job))
        return training.gradients()

    before = step()
    installation = install(training.chunks, plan)
    _break_last(installation.engine.offloader, direction, job.microbatches - 1)
    try:
        step()
    except OSError as error:
        result.error = str(error)
    result.left = left_over()
    result.busy = installation.engine.busy
    installation.remove()
    result.threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("lynx")]
    after = step()
    result.equal_afterwards = all(torch.equal(after[name], gradient) for name, gradient in before.items())
    return result


def _break_last(offloader: Any, direction: str, micro_batch: int) -> None:
    """Copies of this micro-batch raise."""
    copier = offloader.out if direction == "offload" else offloader.back
    start = copier.start

    def breaking(target: Tensor, source: Tensor) -> None:
        raise OSError("the link is down")

    def starting(pairs: Any, of: int, after: Any = ()) -> Any:
        if of == micro_batch:
            copier.move = breaking
        return start(pairs, of, after)

    copier.start = starting


def left_over(within_s: float = 0) -> list[str]:
    """What of a step is still alive. `within_s`: how long threads of groups that were left in the middle may take to let go."""
    until_s = time.monotonic() + within_s
    while True:
        gc.collect()
        kinds = (type(thing).__name__ for thing in gc.get_objects())
        found = [kind for kind in kinds if kind in ("Frame", "OffloadedStorage", "Lease")]
        if not found or time.monotonic() >= until_s:
            return found
        time.sleep(0.1)


PATIENCE, LONGEST_START = timedelta(seconds=10), timedelta(seconds=60)
"""Of the process groups of a step that fails, all of which is waited for; and of ranks that make models on a busy machine."""

MIDDLE = 1
"""The micro-batch, of four, that fails."""


def fail_mid_step(rank: int, job: Job, plan: Plan, where: Literal["backward", "offload"]) -> Failed:
    """The first stage fails in the middle of a step, with messages under way, and leaves; the other waits for what never comes,
    until its group says that somebody left. The groups are of no use afterwards."""
    from megatron.core import parallel_state

    from megatron_lynx.apply.installation import install
    from megatron_lynx.testbed.training import forward_step, run_schedule, synthetic_batches
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    with _groups_of_little_patience():
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("gloo", timeout=PATIENCE)
        initialise(job)
    training, result = Training(job, build_model(job), optimizer=None), Failed()
    dist.monitored_barrier(timeout=LONGEST_START)
    with install(training.chunks, plan) as installation:
        with _failing(installation.engine.offloader, where) if rank == 0 else nullcontext(forward_step) as function:
            try:
                run_schedule(training.chunks, job, synthetic_batches(job), forward_step_func=function)
            except Exception as error:  # noqa: BLE001 (on the other stage it is gloo's)
                result.error = f"{type(error).__name__}: {error}"
        result.left = left_over(within_s=10)
        result.busy = installation.engine.busy
    result.threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("lynx")]
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return result


@contextmanager
def _groups_of_little_patience() -> Iterator[None]:
    original = dist.new_group
    dist.new_group = lambda *args, **kwargs: original(*args, **{**kwargs, "timeout": PATIENCE})
    try:
        yield
    finally:
        dist.new_group = original


@contextmanager
def _failing(offloader: Any, where: Literal["backward", "offload"]) -> Iterator[Any]:
    """Megatron's `forward_step_func` to run with, while the second micro-batch fails where it is said."""
    from megatron_lynx.testbed.training import forward_step

    calls = Counter[str]()

    def broken(_: Tensor) -> None:
        raise ValueError("a backward in the middle")

    def failing_later(batches: Any, model: Any) -> Any:
        output, loss = forward_step(batches, model)
        calls["forward"] += 1
        if where == "backward" and calls["forward"] == MIDDLE + 1:
            output.register_hook(broken)
        return output, loss

    start, move = offloader.out.start, offloader.out.move
    if where == "offload":
        _break_last(offloader, where, MIDDLE)
    try:
        yield failing_later
    finally:
        offloader.out.start, offloader.out.move = start, move


@dataclass
class Reshaped:
    """Steps of several shapes under one plan."""

    equal: list[bool] = field(default_factory=list)
    host_bytes: list[int] = field(default_factory=list)
    copied_by_evaluation: list[int] = field(default_factory=list)


def reshape(rank: int, jobs: list[Job], plan: Plan) -> Reshaped:
    """One step of each job, with the model of the first: stock, then all of them under the plan, an evaluation behind each."""
    from megatron_lynx.apply.installation import install
    from megatron_lynx.testbed.groups import seed_random_numbers
    from megatron_lynx.testbed.training import run_schedule, synthetic_batches
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    initialise(jobs[0])
    chunks = build_model(jobs[0])

    def step(job: Job) -> dict[str, Tensor]:
        seed_random_numbers(7)
        training = Training(job, chunks, optimizer=None)
        training.step(synthetic_batches(job))
        return training.gradients()

    stock = [step(job) for job in jobs]
    result = Reshaped()
    with install(chunks, plan) as installation:
        for job, expected in zip(jobs, stock, strict=True):
            found = step(job)
            result.equal.append(all(torch.equal(found[name], gradient) for name, gradient in expected.items()))
            result.host_bytes.append(installation.engine.take_counts().host_bytes)
            with torch.no_grad():
                run_schedule(chunks, job, synthetic_batches(job), forward_only=True)
            result.copied_by_evaluation.append(installation.engine.take_counts().offloaded_bytes)
    return result


def bytes_at_marks(rank: int, job: Job, plans: list[Plan]) -> list[list[int]]:
    """Live activation bytes at the end of every forward of one counted step, under each plan, after a warm-up.

    Copies to the host are waited for before each mark, so that what is counted does not depend on how fast they are.
    """
    from megatron_lynx.testbed.training import forward_step, run_schedule

    def step(training: Any, batches: Any, offloader: Any, meter: Any) -> None:
        def marked(*args: Any, **kwargs: Any) -> Any:
            result = forward_step(*args, **kwargs)
            if offloader is not None:
                offloader.device.synchronize()
                offloader.settle()
            meter.mark("forward")
            return result

        run_schedule(training.chunks, job, batches, forward_step_func=marked)

    return _counted(job, plans, step)


def bytes_at_halves(rank: int, job: Job, plans: list[Plan]) -> list[list[int]]:
    """Live activation bytes before every half's forward, and before its backward, of one counted step under each plan."""
    from megatron_lynx.runtime.offload import OffloadGroup
    from megatron_lynx.testbed.training import run_schedule

    def step(training: Any, batches: Any, offloader: Any, meter: Any) -> None:
        def marked(report: Any) -> Any:
            def reporting(*where: Any) -> Any:
                reported = report(*where)
                offloader.device.synchronize()
                offloader.out.settle()  # a copy holds what it reads until it is over
                meter.mark("half")
                return reported

            return reporting

        offloader.group_for = marked(offloader.group_for)
        with mock.patch.object(OffloadGroup, "backward_reaches", marked(OffloadGroup.backward_reaches)):
            run_schedule(training.chunks, job, batches)

    return _counted(job, plans, step)


def _counted(job: Job, plans: list[Plan], step: Callable[[Any, Any, Any, Any], None]) -> list[list[int]]:
    """Live bytes at each mark of a step under each plan, after a warm-up. `step`: of (training, batches, offloader, meter)."""
    from megatron_lynx.measure.memory import remember_blocks
    from tests.instruments.groups import initialise

    initialise(job)
    remember_blocks()
    return [_counted_under(job, plan, step) for plan in plans]


def _counted_under(job: Job, plan: Plan, step: Callable[[Any, Any, Any, Any], None]) -> list[int]:
    from megatron_lynx.apply.installation import install
    from megatron_lynx.measure.memory import count_step
    from megatron_lynx.testbed.training import synthetic_batches
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    training, batches = Training(job, build_model(job), optimizer=None), synthetic_batches(job)
    with install(training.chunks, plan) as installation:
        training.step(batches)
        offloader = installation.engine.offloader
        counted = count_step(partial(step, training, batches, offloader), "cpu", training.parameters().values())
        return [mark.bytes for mark in counted.marks]
