"""What one rank holds while the embedding's backward runs in Megatron's combined schedule. Runs inside `RankPool`."""

from __future__ import annotations

import gc
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.measure.memory import ActivationMeter
from tests.cost.on_ranks import forget_auxiliary_losses

BEGINS = "embedding's gradient is made"


def count_embedding(rank: int, job: Job) -> list[int]:
    """For each micro-batch of the second step the most that is held from when the embedding is given a gradient until the next
    forward begins; the last one's until the step is over."""
    from megatron.core.utils import unwrap_model

    from megatron_lynx.measure.memory import activation_meter, remember_blocks
    from megatron_lynx.testbed.training import forward_step, run_schedule, synthetic_batches
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    remember_blocks()
    initialise(job)
    forget_auxiliary_losses()
    batches = synthetic_batches(job)
    gc.collect()
    with activation_meter("cpu") as meter:
        training = Training(job, build_model(job), optimizer="megatron", ddp=True)
        gc.collect()
        (model,) = unwrap_model(training.chunks)
        _watch(model, meter)
        training.step(batches)
        for chunk in training.chunks:
            chunk.zero_grad_buffer()
        meter.mark("second step")

        def begun(*args: Any, **named: Any) -> Any:
            meter.mark("the next micro-batch begins")
            return forward_step(*args, **named)

        run_schedule(training.chunks, job, batches, forward_step_func=begun)
    forget_auxiliary_losses()
    names = [mark.name for mark in meter.use.marks]
    return [mark.peak_bytes for mark in meter.use.marks[names.index("second step") :] if mark.name == BEGINS]


def _watch(model: Any, meter: ActivationMeter) -> None:
    words = model.embedding.word_embeddings
    words.register_forward_hook(lambda _, given, made: made.register_hook(lambda gradient: meter.mark(BEGINS)) and None)
