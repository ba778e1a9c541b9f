"""What the tests of counting run on a rank. Megatron is imported inside, after the rank's stand-in is in place."""

from __future__ import annotations

from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.measure.memory import MemoryUse, count_step, marked


def count(rank: int, trials: list[tuple[Job, dict[str, Any]]]) -> list[MemoryUse]:
    """One counted step of each job under its setting, after a warm-up."""
    from megatron_lynx.testbed.training import initialise

    initialise(trials[0][0])
    return [_count_one(job, setting) for job, setting in trials]


def _count_one(job: Job, setting: dict[str, Any]) -> MemoryUse:
    from megatron_lynx.testbed import training as testbed
    from megatron_lynx.testbed.tiny_models import build_model

    training = testbed.Training(job, build_model(job, **setting), optimizer=None)
    training.step(testbed.synthetic_batches(job))
    batches, plain = testbed.synthetic_batches(job), testbed.forward_step

    def step(meter):
        testbed.forward_step = marked(plain, meter, "forward")  # which run_schedule looks up
        try:
            testbed.run_schedule(training.chunks, job, batches)
        finally:
            testbed.forward_step = plain

    return count_step(step, "cpu", training.parameters().values())
