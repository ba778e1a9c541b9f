"""What the ranks of `benchmarks.without_flushes` do: train a tiny model, sleeping in every forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from megatron_lynx.config.job import Job

BACKWARD = 2.0
"""Seconds of a backward, over those of a forward."""
SETTINGS: dict[str, tuple[bool, bool | None]] = {
    "flush": (True, None),
    "updates at once": (True, False),
    "updates deferred": (True, True),
    "no barrier": (False, False),
}
"""Whether Megatron's optimizer updates (torch's SGD otherwise), and whether updates are deferred (None: stock's schedule)."""


def batch_times(rank: int, job: Job, batches: int, forward_s: float) -> dict[str, list[float]]:
    """Seconds of each batch but the first two and the last, by setting."""
    from tests.instruments.groups import initialise

    initialise(job)
    found = {}
    for name, (barrier, defers) in SETTINGS.items():
        ends = [time.perf_counter() for _ in trained(job, batches, forward_s, barrier, defers)]
        found[name] = [later - earlier for earlier, later in pairwise(ends[1:-1])]
    return found


def trained(job: Job, batches: int, forward_s: float, barrier: bool, defers: bool | None) -> Iterator[None]:
    """Train; yields behind each update."""
    from megatron_lynx.double_buffered.pipeline import DoubleBuffered
    from megatron_lynx.testbed.training import run_schedule, synthetic_batches
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    training = Training(job, build_model(job), ddp=barrier, optimizer="megatron" if barrier else "sgd", learning_rate=0.001)
    sizes = {"microbatches": job.microbatches, "seq_length": job.model.seq, "micro_batch_size": job.batch.micro}
    pipeline = None if defers is None else DoubleBuffered(training.chunks, training.optimizer, **sizes, defer_updates=defers)
    text = (micro_batch for batch in range(batches) for micro_batch in synthetic_batches(job, batch))
    for batch in range(batches):
        if barrier:
            training.chunks[0].zero_grad_buffer()  # type: ignore[operator]
        training.optimizer.zero_grad()
        if pipeline is None:
            run_schedule(training.chunks, job, synthetic_batches(job, batch), forward_step_func=sleeping(forward_s))
            training.optimizer.step()
        else:
            pipeline.forward_backward(sleeping(forward_s), text, drains=batch == batches - 1)
            pipeline.update()
        yield


def sleeping(forward_s: float) -> Callable[..., Any]:
    """Megatron's `forward_step_func`, which takes its time, as does the backward of what it returns."""
    from megatron_lynx.testbed.training import forward_step

    def sleeping_forward_step(batches: Any, model: Any) -> tuple[Any, Any]:
        time.sleep(forward_s)
        output, loss_of = forward_step(batches, model)
        output.register_hook(lambda _: time.sleep(BACKWARD * forward_s))
        return output, loss_of

    return sleeping_forward_step
