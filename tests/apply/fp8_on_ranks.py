"""What the tests of FP8 run on ranks."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan

from ..transparency.fp8_state import fp8_state
from ..transparency.trials import Trial, compare_with_stock
from .on_ranks import one_step, trained
from .te_on_ranks import copies_of_weights


def with_wrong_replays(rank: int, job: Job, plan: Plan, trial: Trial, wrong: str) -> list[str]:
    """What differs from stock, if replays use the live quantizers' `amax` or `scale` or both."""
    from megatron_lynx.apply.transformer_engine import fp8

    def own_quantizers(live: Any, scale: torch.Tensor | None) -> Any:
        own = right(live, scale)
        for mine, theirs in zip(own, live, strict=True):
            for name in wrong.split():
                setattr(mine, name, getattr(theirs, name))
        return own

    right = fp8.own_quantizers
    with patch.object(fp8, "own_quantizers", own_quantizers):
        [outcome] = compare_with_stock(rank, job, [plan], trial)
    return outcome.differing


def passes_from_one_state(rank: int, job: Job) -> tuple[list[str], int]:
    """What differs between a model's first pass and the same pass again, its state put back; and how many tensors of FP8 were
    compared."""
    from megatron_lynx.launch.check.training_state import TrainingState
    from megatron_lynx.testbed.batches import synthetic_batches
    from megatron_lynx.testbed.step import run_schedule

    training = trained(job)
    before = TrainingState(training.chunks)
    seen = []
    for _ in range(2):
        losses = run_schedule(training.chunks, job, synthetic_batches(job))
        seen.append(dict(fp8_state(training.chunks)) | {f"loss {i}": loss.detach() for i, loss in enumerate(losses)})
        before.restore()
    first, second = seen
    differing = [name for name in first if name not in second or not torch.equal(first[name], second[name])]
    return differing, sum("amax_history" in name for name in first)


def buffers(rank: int, job: Job, trial: Trial) -> dict[str, int]:
    """Bytes of the buffers that DDP makes of a rank's parameters and gradients, and of what its weights hold beside these."""
    from megatron_lynx.testbed.groups import initialise, seed_random_numbers
    from megatron_lynx.testbed.tiny_models import build_model
    from megatron_lynx.testbed.training import Training

    initialise(job)
    seed_random_numbers(7)
    training = Training(job, build_model(job, **trial.model), **trial.training)
    one_step(training)
    made = [buffer for chunk in training.chunks for buffer in chunk.buffers]
    return {
        "parameters": sum(buffer.param_data.nbytes for buffer in made),
        "gradients": sum(buffer.grad_data.nbytes for buffer in made),
        "fp8_weights": sum(part.nbytes for chunk in training.chunks for part in copies_of_weights(chunk, beside=True)),
    }


def spoiled(training: Any, undo: ExitStack, **fields: Any) -> None:
    """Settings of the model, and one of the environment."""
    config = training.chunks[0].config
    for name, value in fields.items():
        undo.enter_context(patch.object(config, name, value))
    undo.enter_context(patch.dict("os.environ", {"NVTE_BACKWARD_OVERRIDE": "high_precision"}))
