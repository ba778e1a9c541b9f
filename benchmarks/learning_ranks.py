"""What the ranks of `benchmarks.delayed_gradients` do: train a small language model on text, and evaluate it now and then."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
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


def learned(rank: int, job: Job, rate: float, seeds: int, batches: int, every: int) -> dict[str, list[list[float]]]:
    """Validation losses before the first batch and behind each `every` batches, by setting and seed. On the last stage."""
    from megatron_lynx.testbed.training import initialise

    initialise(job)
    settings = {"flush": False, "without flushes": True}
    return {
        name: [list(curve(job, without, rate, seed, batches, every)) for seed in range(seeds)]
        for name, without in settings.items()
    }


def curve(job: Job, without_flushes: bool, rate: float, seed: int, batches: int, every: int) -> Iterator[float]:
    """The same weights, text and learning rate with either. The pipeline drains for an evaluation."""
    from megatron_lynx.double_buffered.pipeline import DoubleBuffered
    from megatron_lynx.testbed.tiny_models import build_model
    from megatron_lynx.testbed.training import Training, forward_step, run_schedule, seed_random_numbers

    training = Training(job, build_model(job, seed=seed), ddp=True, optimizer="megatron", learning_rate=rate)
    sizes: dict[str, Any] = {"microbatches": job.microbatches, "seq_length": job.model.seq, "micro_batch_size": job.batch.micro}
    pipeline = DoubleBuffered(training.chunks, training.optimizer, **sizes) if without_flushes else None
    seed_random_numbers(seed)
    text = windows(job, seed, validation=False)
    yield validation_loss(job, training)
    for batch in range(1, batches + 1):
        training.chunks[0].zero_grad_buffer()
        training.optimizer.zero_grad()
        if pipeline is None:
            run_schedule(training.chunks, job, [next(text) for _ in range(job.microbatches)])
            training.optimizer.step()
        else:
            pipeline.forward_backward(forward_step, text, drains=batch % every == 0)
            pipeline.update()
        if batch % every == 0:
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
