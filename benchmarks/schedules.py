"""Ranks that train one job in turns with and without flushes, each way with a model of its own.

way ──> TrainedModel    batches from an empty pipeline to an empty one ──> when each update was over       `time_ways`
  └──────────────> the same batches by the version rule: Megatron's own flushing schedule, W(j-1) put there by hand for batch j,
                   its update made to W(j) ──> what differs of the weights, to the bit                `differing`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan

if TYPE_CHECKING:
    import torch

UPDATES_ALONE = 5
"""How often an update is timed while nothing else runs."""

SEED = 7
"""Seed of the random numbers drawn in batches that are compared."""


@dataclass(frozen=True)
class Way:
    """One way to train a job."""

    name: str
    defers: bool | None = None
    """What `DoubleBuffered` is told about deferring updates; None: Megatron's own schedule."""
    plan: Plan | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron's TransformerConfig."""


@dataclass(frozen=True)
class Timed:
    """Seconds of one way on one rank."""

    batch_s: list[float]
    """Seconds of a batch by round: the mean over batches in the middle of the run."""
    update_s: float
    """Seconds of an update behind a drain, without waiting for other stages: norm, clipping, Adam, copying the weights."""


class TrainedModel:
    """A model being trained in one way, by Megatron's Adam with clipping."""

    def __init__(self, job: Job, way: Way, learning_rate: float = 1e-4) -> None:
        from megatron_lynx.double_buffered.pipeline import DoubleBuffered
        from megatron_lynx.testbed.groups import seed_random_numbers
        from tests.instruments.tiny_models import build_model
        from tests.instruments.training import Training

        seed_random_numbers(1234)
        self.job, self.way = job, way
        model = build_model(job, **way.fields)
        self.training = Training(job, model, ddp=True, optimizer="megatron", learning_rate=learning_rate)
        sizes = {"microbatches": job.microbatches, "seq_length": job.model.seq, "micro_batch_size": job.batch.micro}
        chunks, optimizer = self.training.chunks, self.training.optimizer
        self.pipeline = None if way.defers is None else DoubleBuffered(chunks, optimizer, **sizes, defer_updates=way.defers)

    def run(self, batches: int) -> list[float]:
        """Train so many batches, from an empty pipeline to an empty one; when each update was over."""
        from megatron_lynx.testbed.training import synthetic_batches

        text = (micro_batch for batch in range(batches) for micro_batch in synthetic_batches(self.job, batch))
        ends = []
        with self._in_force():
            for batch in range(batches):
                self.clear()
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

    def clear(self) -> None:
        """The gradients, as Megatron's training does before each step."""
        buffers: Any = self.training.chunks[0]
        buffers.zero_grad_buffer()
        self.training.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.training.parameters().items()}

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.training.parameters().items():
            parameter.data.copy_(weights[name])

    def _in_force(self) -> AbstractContextManager[object]:
        """The way's plan is in force inside. Hooks are on Megatron's functions, so only one model's plan may be installed."""
        from megatron_lynx.apply.installation import install

        if self.way.plan is None:
            return nullcontext()
        without_flushes: Any = {} if self.pipeline is None else {"without_flushes": self.pipeline}
        return install(self.training.chunks, self.way.plan, **without_flushes)

    def _forward_backward(self, text: Iterator[Any], drains: bool) -> None:
        from megatron_lynx.testbed.training import forward_step, run_schedule

        if self.pipeline is None:
            run_schedule(self.training.chunks, self.job, islice(text, self.job.microbatches))
        else:
            self.pipeline.forward_backward(forward_step, text, drains=drains)

    def _update(self) -> Callable[[], Any]:
        return self.training.optimizer.step if self.pipeline is None else self.pipeline.update


def time_ways(rank: int, job: Job, ways: list[Way], rounds: int, batches: int) -> dict[str, Timed]:
    """Runs inside `RankPool`. All ways, round by round; a first run of each is not timed. At least four batches have a middle."""
    import torch.distributed as dist

    from tests.instruments.groups import initialise

    initialise(job)
    models = {way.name: TrainedModel(job, way) for way in ways}
    batch_s: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds + 1):
        for name, model in models.items():
            dist.barrier()
            ends = model.run(batches if number else 2)
            if number:
                steps = [after - before for before, after in pairwise(ends[1:-1])]
                batch_s[name].append(sum(steps) / len(steps))
    return {name: Timed(batch_s[name], model.update_s()) for name, model in models.items()}


def differing(rank: int, job: Job, way: Way, batches: int) -> list[str]:
    """Runs inside `RankPool`. The parameters that are not what the rule makes of them, to the bit, after so many batches."""
    import torch

    from megatron_lynx.testbed.groups import seed_random_numbers
    from megatron_lynx.testbed.training import run_schedule, synthetic_batches
    from tests.instruments.groups import initialise

    initialise(job)
    ours, rule = TrainedModel(job, way, learning_rate=0.01), TrainedModel(job, Way("the rule"), learning_rate=0.01)
    seed_random_numbers(SEED)
    ours.run(batches)
    versions = [rule.weights()]
    seed_random_numbers(SEED)
    for batch in range(batches):
        rule.load(versions[max(batch - 1, 0)])
        rule.clear()
        run_schedule(rule.training.chunks, job, synthetic_batches(job, batch))
        rule.load(versions[batch])
        rule.training.optimizer.step()
        versions.append(rule.weights())
    found = ours.weights()
    return [name for name, value in versions[-1].items() if not torch.equal(value, found[name])]
