"""What one rank holds when a backward begins, under plans whose halves of experts may fall back. Runs inside `RankPool`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.measure.memory import wait_for_other_threads
from megatron_lynx.plan.plan import Plan
from tests.instruments.cpu_total import CpuTotal
from tests.transparency.trials import starve


def held_in_backward(rank: int, job: Job, plans: list[Plan], model: dict[str, Any]) -> list[tuple[int, int]]:
    """For each plan the most bytes that are there when a backward of the second step begins, beyond what was there before the
    step, and how many halves of it fell back. The first two experts get all tokens."""
    from megatron_lynx.apply.installation import install
    from megatron_lynx.testbed.groups import seed_random_numbers
    from megatron_lynx.testbed.training import synthetic_batches
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    initialise(job)
    total, found = CpuTotal(), []
    for plan in plans:
        seed_random_numbers(7)
        training = Training(job, build_model(job, **model))
        starve(training.chunks)
        batches = synthetic_batches(job)
        with install(training.chunks, plan) as installation:
            training.step(batches)
            gc.collect()
            wait_for_other_threads()
            before, begun = total.bytes, list[int]()
            installation.engine.take_counts()
            installation.engine.backward_pass = _noting(installation.engine.backward_pass, begun, total)  # type: ignore[method-assign]
            training.step(batches)
            found.append((max(begun) - before, installation.engine.take_counts().fell_back))
    return found


def _noting(backward_pass: Any, begun: list[int], total: CpuTotal) -> Any:
    @contextmanager
    def noted(output: Any) -> Iterator[Any]:
        wait_for_other_threads()
        begun.append(total.bytes)
        with backward_pass(output) as returns:
            yield returns

    return noted
