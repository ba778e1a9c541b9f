"""What the ranks of `benchmarks.double_buffered` do: train in turns with and without flushes, computing in earnest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from megatron_lynx.config.job import Job

UPDATES_ALONE = 5
"""How often an update is timed with nothing else under way."""


@dataclass(frozen=True)
class Timed:
    """One setting on one rank. Seconds."""

    batch_s: list[float]
    """By round: of one batch, the mean of those in the middle of the run."""
    update_s: float
    """Of an update behind a drain, when all stages are there: the norm, clipping, Adam, and what fills the retired weights."""


class Subject:
    """A model being trained in one of the ways. `defers` as `DoubleBuffered` has it; None: Megatron's own schedule."""

    def __init__(self, job: Job, defers: bool | None) -> None:
        from megatron_lynx.double_buffered.pipeline import DoubleBuffered
        from megatron_lynx.testbed.tiny_models import build_model
        from megatron_lynx.testbed.training import Training, seed_random_numbers

        seed_random_numbers(1234)
        self.job = job
        self.training = Training(job, build_model(job), ddp=True, optimizer="megatron", learning_rate=1e-4)
        sizes = {"microbatches": job.microbatches, "seq_length": job.model.seq, "micro_batch_size": job.batch.micro}
        chunks, optimizer = self.training.chunks, self.training.optimizer
        self.pipeline = None if defers is None else DoubleBuffered(chunks, optimizer, **sizes, defer_updates=defers)

    def run(self, batches: int) -> list[float]:
        """Train so many batches, from an empty pipeline to an empty one; when each update was over."""
        from megatron_lynx.testbed.training import synthetic_batches

        text = (micro_batch for batch in range(batches) for micro_batch in synthetic_batches(self.job, batch))
        ends = []
        for batch in range(batches):
            self._clear()
            self._forward_backward(text, batch == batches - 1)
            self._update()()
            ends.append(time.perf_counter())
        return ends

    def update_s(self) -> float:
        """Seconds of an update alone, the gradients being those of the last batch; the least of a few."""
        import torch.distributed as dist

        found = []
        for _ in range(UPDATES_ALONE):
            dist.barrier()
            begin_s = time.perf_counter()
            self._update()()
            dist.barrier()
            found.append(time.perf_counter() - begin_s)
        return min(found)

    def _clear(self) -> None:
        self.training.chunks[0].zero_grad_buffer()
        self.training.optimizer.zero_grad()

    def _forward_backward(self, text: Iterator[Any], drains: bool) -> None:
        from megatron_lynx.testbed.training import forward_step, run_schedule

        if self.pipeline is None:
            run_schedule(self.training.chunks, self.job, islice(text, self.job.microbatches))
        else:
            self.pipeline.forward_backward(forward_step, text, drains=drains)

    def _update(self) -> Callable[[], Any]:
        return self.training.optimizer.step if self.pipeline is None else self.pipeline.update


def race(rank: int, job: Job, settings: dict[str, bool | None], rounds: int, batches: int) -> dict[str, Timed]:
    """All settings, round by round, each from an empty pipeline to an empty one. One run of each is not timed."""
    import torch.distributed as dist

    from megatron_lynx.testbed.training import initialise

    initialise(job)
    subjects = {name: Subject(job, defers) for name, defers in settings.items()}
    batch_s: dict[str, list[float]] = {name: [] for name in settings}
    for number in range(rounds + 1):
        for name, subject in subjects.items():
            dist.barrier()
            ends = subject.run(batches if number else 2)
            if number:
                steps = [after - before for before, after in pairwise(ends[1:-1])]
                batch_s[name].append(sum(steps) / len(steps))
    return {name: Timed(batch_s[name], subject.update_s()) for name, subject in subjects.items()}
