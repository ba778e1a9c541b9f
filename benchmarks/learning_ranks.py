"""What the ranks of `benchmarks.delayed_gradients` and `delayed_optimizers` do: train a small language model, and evaluate it."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lynx.config.job import Job

SOURCES = (
    "argparse",
    "ast",
    "configparser",
    "datetime",
    "decimal",
    "difflib",
    "doctest",
    "inspect",
    "mailbox",
    "optparse",
    "pdb",
)
"""Modules of Python's library, whose text is learned; the last tenth of each is kept for validation."""
VALIDATION_BATCHES = 8


@dataclass(frozen=True)
class Course:
    """How a run goes: its learning rate by update, and when it is evaluated."""

    rate: float
    """The highest."""
    updates: int
    every: int
    """Updates from one evaluation to the next."""
    warmup: int = 0
    """Updates of a linear rise to `rate`."""
    decay: bool = False
    """A cosine down to nearly zero at the end, behind the warm-up; else the rate stays."""
    optimizer: tuple[tuple[str, Any], ...] = ()
    """Settings of Megatron's optimizer other than of its AdamW with clipping at 1."""

    def rate_of(self, update: int) -> float:
        """The rate of an update, counted from 0."""
        if update < self.warmup:
            return self.rate * (update + 1) / self.warmup
        done = (update - self.warmup) / (self.updates - self.warmup)
        return self.rate * (1 + math.cos(math.pi * done)) / 2 if self.decay else self.rate


def learned(rank: int, job: Job, course: Course, seeds: int) -> dict[str, list[list[float]]]:
    """Validation losses before the first batch and at each evaluation, by setting and seed. On the last stage."""
    from tests.instruments.groups import initialise

    initialise(job)
    settings = {"flush": False, "without flushes": True}
    return {name: [list(curve(job, without, course, seed)) for seed in range(seeds)] for name, without in settings.items()}


def curve(job: Job, without_flushes: bool, course: Course, seed: int) -> Iterator[float]:
    """Train with either schedule from the same weights, text and learning rates. The pipeline drains for an evaluation."""
    from megatron_lynx.double_buffered.pipeline import DoubleBuffered
    from megatron_lynx.testbed.groups import seed_random_numbers
    from megatron_lynx.testbed.training import forward_step, run_schedule
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    given: dict[str, Any] = {"optimizer": "megatron", "learning_rate": course.rate, "settings": dict(course.optimizer)}
    training = Training(job, build_model(job, seed=seed), ddp=True, **given)
    sizes: dict[str, Any] = {"microbatches": job.microbatches, "seq_length": job.model.seq, "micro_batch_size": job.batch.micro}
    pipeline = DoubleBuffered(training.chunks, training.optimizer, **sizes) if without_flushes else None
    seed_random_numbers(seed)
    text = windows(job, seed, validation=False)
    yield validation_loss(job, training)
    for batch in range(1, course.updates + 1):
        for group in training.optimizer.param_groups:
            group["lr"] = course.rate_of(batch - 1)
        training.chunks[0].zero_grad_buffer()  # type: ignore[operator]
        training.optimizer.zero_grad()
        if pipeline is None:
            run_schedule(training.chunks, job, [next(text) for _ in range(job.microbatches)])
            training.optimizer.step()
        else:
            pipeline.forward_backward(forward_step, text, drains=batch % course.every == 0)
            pipeline.update()
        if batch % course.every == 0:
            yield validation_loss(job, training)


def validation_loss(job: Job, training: Any) -> float:
    """Mean over the same windows each time; 0 on stages that have no loss."""
    text = windows(job, 0, validation=True)
    losses = [loss for _ in range(VALIDATION_BATCHES) for loss in training.evaluate(next(text) for _ in range(job.microbatches))]
    return float(sum(losses) / len(losses)) if losses else 0.0


def windows(job: Job, seed: int, validation: bool) -> Iterator[Any]:
    """Micro-batches of random windows of the text, one character a token."""
    import torch

    from megatron_lynx.testbed.training import MicroBatch

    texts = [(Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_bytes() for name in SOURCES]
    parts = [text[len(text) * 9 // 10 :] if validation else text[: len(text) * 9 // 10] for text in texts]
    tokens = torch.tensor(list(b"".join(parts))) % job.model.vocab
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(job.model.seq).expand(job.batch.micro, -1)
    while True:
        starts = torch.randint(len(tokens) - job.model.seq, (job.batch.micro,), generator=generator).tolist()
        rows = torch.stack([tokens[start : start + job.model.seq + 1] for start in starts])
        yield MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), positions)
