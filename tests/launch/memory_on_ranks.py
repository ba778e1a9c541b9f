"""What the tests of running out of memory run on ranks."""

from __future__ import annotations

from typing import Any

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan

Said = tuple[str | None, str]
"""The words for the moment at which a limit was met (None: it never was), and all that is said of it."""


def said_at(rank: int, job: Job, plan: Plan, limits: list[int], steps: int = 1) -> list[Said]:
    """What is said of a training under each limit, in bytes beyond what is there when its first step begins."""
    from tests.instruments.groups import initialise

    initialise(job)
    return [_trained(job, plan, limit, steps) for limit in limits]


def _trained(job: Job, plan: Plan, limit_bytes: int, steps: int) -> Said:
    import gc

    from megatron_lynx.apply.installation import install
    from megatron_lynx.apply.live_run import live_run
    from megatron_lynx.launch.out_of_memory import Rank, explained, moment_of
    from megatron_lynx.testbed.training import synthetic_batches
    from tests.instruments.cpu_total import CpuTotal
    from tests.instruments.script_device import LimitedMemory
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    training = Training(job, build_model(job), optimizer="megatron", ddp=True)
    batches = synthetic_batches(job)
    installation = install(training.chunks, plan)
    run: Any = live_run(training.chunks)
    gc.collect()  # of what was trained before
    before_bytes = CpuTotal().bytes
    for step in range(steps):
        at = Rank(plan, run.stage, run.chunks, training.optimizer)
        try:
            with LimitedMemory(before_bytes + limit_bytes):
                training.step(batches)
        except torch.OutOfMemoryError as error:
            moment = moment_of(error, at)
            explanation = explained(error, at, f"in step {step + 1} of this run", "plan.yaml")
            assert not installation.engine.busy
            installation.remove()
            return "nowhere" if moment is None else moment.words, str(explanation)
    installation.remove()
    return None, ""
