"""What runs on the ranks. Megatron is imported inside, after the rank's stand-in is in place."""

from __future__ import annotations

from typing import Any

import torch

from megatron_lynx.config.job import Job

from ..testbed.on_ranks import Run, same


def stock_and_interpreted(rank: int, job: Job, how: dict[str, Any], setting: dict[str, Any]) -> tuple[Run, Run]:
    """Two steps of Megatron's 1F1B, and two of the interpreter given 1F1B's order; everything else equal.

    `how`: arguments of Training, and `align`: only the first stage starts reducing gradients during backward.
    """
    from megatron_lynx.testbed.training import initialise

    initialise(job)
    return one_f_one_b(job, how, setting, interpreted=False), one_f_one_b(job, how, setting, interpreted=True)


def one_f_one_b(job: Job, how: dict[str, Any], setting: dict[str, Any], interpreted: bool) -> Run:
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    from megatron_lynx.double_buffered.interpreter import Interpreter
    from megatron_lynx.schedule.one_f_one_b import order
    from megatron_lynx.testbed.tiny_models import build_model
    from megatron_lynx.testbed.training import Training, forward_step, seed_random_numbers, synthetic_batches

    training = Training(job, build_model(job, **setting), **{key: value for key, value in how.items() if key != "align"})
    if how.get("align"):
        get_model_config(training.chunks[0]).grad_sync_func = training.chunks[0].start_grad_sync
    interpreter = Interpreter(
        training.chunks[0], microbatches=job.microbatches, seq_length=job.model.seq, micro_batch_size=job.batch.micro
    )
    actions = order(job.parallel.pipeline, parallel_state.get_pipeline_model_parallel_rank(), job.microbatches)
    seed_random_numbers(7)
    run = Run()
    for step in range(2):
        batches = synthetic_batches(job, step)
        if interpreted:
            clear_gradients(training)
            run.losses += interpreter.run(actions, forward_step, iter(batches))
            assert interpreter.in_flight == ()
            training.optimizer.step()
        else:
            run.losses += training.step(batches)
        run.gradients.append(training.gradients())
        run.parameters.append(weights(training))
    return run


def clear_gradients(training: Any) -> None:
    """As Megatron's training does before each step."""
    for chunk in training.chunks:
        if hasattr(chunk, "zero_grad_buffer"):
            chunk.zero_grad_buffer()
        chunk.zero_grad(set_to_none=True)


def weights(training: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in training.parameters().items()}


def trained_twice(rank: int, job: Job, how: dict[str, Any], batches: int) -> tuple[Run, Run]:
    """Some batches under the independent reference, and without flushes."""
    from megatron_lynx.testbed.training import initialise

    initialise(job)
    return reference(job, how, batches), double_buffered(job, how, batches)


def reference(job: Job, how: dict[str, Any], batches: int) -> Run:
    """Megatron's own schedule, a flush per batch: batch j runs on W(j-1), put there by hand, and its update is made to W(j)."""
    from megatron_lynx.testbed.training import run_schedule, seed_random_numbers, synthetic_batches

    training = build(job, how)
    seed_random_numbers(7)
    run, versions = Run(), [weights(training)]
    for batch in range(batches):
        load(training, versions[max(batch - 1, 0)])
        clear_gradients(training)
        run.losses += run_schedule(training.chunks, job, synthetic_batches(job, batch))
        run.gradients.append(training.gradients())
        load(training, versions[batch])
        training.optimizer.step()
        versions.append(weights(training))
    run.parameters = versions[1:]
    return run


def double_buffered(job: Job, how: dict[str, Any], batches: int) -> Run:
    from megatron_lynx.testbed.training import forward_step, seed_random_numbers, synthetic_batches

    training = build(job, how)
    pipeline = without_flushes(job, training)
    seed_random_numbers(7)
    run = Run()
    text = (micro_batch for batch in range(batches) for micro_batch in synthetic_batches(job, batch))
    for batch in range(batches):
        clear_gradients(training)
        run.losses += pipeline.forward_backward(forward_step, text, drains=batch == batches - 1)
        run.gradients.append(training.gradients())
        pipeline.update()
        run.parameters.append(weights(training))
    return run


def build(job: Job, how: dict[str, Any]) -> Any:
    from megatron_lynx.testbed.tiny_models import build_model
    from megatron_lynx.testbed.training import Training

    return Training(job, build_model(job), **how)


def without_flushes(job: Job, training: Any) -> Any:
    from megatron.core import parallel_state

    from megatron_lynx.double_buffered.pipeline import DoubleBuffered

    return DoubleBuffered(
        training.chunks[0],
        training.optimizer,
        pipeline=job.parallel.pipeline,
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        microbatches=job.microbatches,
        seq_length=job.model.seq,
        micro_batch_size=job.batch.micro,
    )


def load(training: Any, weights: dict[str, torch.Tensor]) -> None:
    for name, parameter in training.parameters().items():
        parameter.data.copy_(weights[name])
