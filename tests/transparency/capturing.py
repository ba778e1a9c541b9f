"""Trials with captured graphs: Megatron's helper captures after some steps, as its training loop does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron_lynx.config.job import Job
from tests.instruments.graphs import Tracker, stand_in_for_graphs


@dataclass(frozen=True)
class Captured:
    """How a trial captures."""

    after: int | None = 1
    """Steps before the capture (`--cuda-graph-warmup-steps`); None: Megatron's helper captures nothing."""
    tracker: Tracker = "graph-safe"
    """Whose random numbers."""


@dataclass
class Graphs:
    """The graphs of one training."""

    job: Job
    asked: Captured
    captured: list[Any] = field(default_factory=list)

    def capture(self, training: Any) -> None:
        """What `megatron.training.training.train` does when the steps of the warm-up are over."""
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
        from megatron.core.utils import get_model_config

        config = get_model_config(training.chunks[0])
        helper = TECudaGraphHelper(
            model=training.chunks,
            config=config,
            seq_length=self.job.model.seq,
            micro_batch_size=self.job.batch.micro,
            optimizers=[],
        )
        helper.create_cudagraphs()
        self.captured = [graph for layers in helper.callables_per_chunk for layer in layers for graph in layer.cuda_graphs]

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.captured)


@contextmanager
def capturing(job: Job, asked: Captured) -> Iterator[Graphs]:
    """Let a training capture."""
    from megatron.core import num_microbatches_calculator

    num_microbatches_calculator.destroy_num_microbatches_calculator()
    samples = job.batch.micro * job.microbatches
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, samples, job.batch.micro, 1)
    try:
        with stand_in_for_graphs(asked.tracker):
            yield Graphs(job, asked)
    finally:
        num_microbatches_calculator.destroy_num_microbatches_calculator()
