"""What the tests of counting run on a rank. Megatron is imported inside, after the rank's stand-in is in place."""

from __future__ import annotations

from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.measure.memory import MemoryUse, count_step, marked
from megatron_lynx.plan.plan import Plan


def count(rank: int, trials: list[tuple[Job, dict[str, Any]]]) -> list[MemoryUse]:
    """One counted step of each job under its setting, after a warm-up."""
    from tests.instruments.groups import initialise

    initialise(trials[0][0])
    return [_count_one(job, setting) for job, setting in trials]


def _count_one(job: Job, setting: dict[str, Any]) -> MemoryUse:
    from megatron_lynx.testbed.training import forward_step, run_schedule, synthetic_batches
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    training = Training(job, build_model(job, **setting), optimizer=None)
    batches = synthetic_batches(job)
    training.step(batches)

    def step(meter):
        run_schedule(training.chunks, job, batches, forward_step_func=marked(forward_step, meter, "forward"))

    return count_step(step, "cpu", training.parameters().values())


def held(rank: int, job: Job, cases: list[tuple[dict[str, Any], Plan | None]]) -> list[tuple[int, int]]:
    """What the forward of the last micro-batch leaves behind, and the most that its step holds, by stock setting or plan, after a
    warm-up. All share their weights, and their gradients are equal in every bit.

    The smallest of three counts where ranks communicate: gloo's thread may hold the last collective's result a moment longer,
    whatever the setting is.
    A dispatcher of experts holds on to the graph of its last pass, until a forward lets go of it (`tests.stock.on_ranks`)."""
    import torch

    from megatron_lynx.measure.memory import remember_blocks
    from megatron_lynx.testbed.candidates import Candidate
    from megatron_lynx.testbed.comparison import same_bits, subjects_of
    from tests.instruments.training import evaluated

    remember_blocks()
    candidates = [Candidate(f"{at}", fields, plan) for at, (fields, plan) in enumerate(cases)]
    found, reference = [], None
    for subject in subjects_of(job, candidates).values():
        with subject.in_force():
            gradients = subject.repeatable_step()
            reference = reference or gradients
            assert same_bits(gradients, reference), subject.candidate
            uses = []
            for _ in range(3 if job.gpus > 1 else 1):
                if job.model.experts is not None:
                    with torch.no_grad():
                        evaluated(subject.chunks, subject.job, subject.batches)
                uses.append(subject.counted_step())
            found.append((min(use.marks[-1].bytes for use in uses), min(use.peak_bytes for use in uses)))
    return found
