"""What the tests of FP8 run on ranks."""

from __future__ import annotations

import sys
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


def with_wrong_recomputations(rank: int, job: Job, plan: Plan, trial: Trial, wrong: str) -> list[str]:
    """What differs from stock, if recomputations use the live quantizers' `amax` or `scale` or both."""
    from megatron_lynx.apply import transformer_engine as fp8

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
    from megatron_lynx.launch.training_state import TrainingState
    from megatron_lynx.testbed.training import run_schedule, synthetic_batches

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
    from megatron_lynx.testbed.groups import seed_random_numbers
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

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


def without_recipe(training: Any, undo: ExitStack, name: str) -> None:
    """A Transformer Engine of before."""
    from transformer_engine.common import recipe

    undo.enter_context(patch.object(recipe, name))
    delattr(recipe, name)


def with_other_kernels(training: Any, undo: ExitStack) -> list[torch.nn.Module]:
    """Grouped experts, whose linears read otherwise than in any release; and so does what casts to FP4."""
    from transformer_engine.pytorch.module.grouped_linear import GroupedLinear
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    from tests.instruments.tiny_models import build_model

    model = build_model(training.job, moe_grouped_gemm=True)
    undo.enter_context(patch.object(GroupedLinear, "forward", training.step))
    undo.enter_context(patch.object(sys.modules[NVFP4Quantizer.__module__], NVFP4Quantizer.__name__, type(training)))
    return model


def ends_in_bf16(training: Any, undo: ExitStack, first: int, last: int) -> None:
    """A run that leaves so many layers in bf16."""
    config = training.chunks[0].config
    fields = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": first, "num_layers_at_end_in_bf16": last}
    for name, value in fields.items():
        undo.enter_context(patch.object(config, name, value))


def read_back(rank: int) -> dict[str, float]:
    """How far operands with block scales are off from what Transformer Engine's own Python casts blocks of 128 to, and from the
    numbers, over the largest of all."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    from tests.instruments.transformer_engine.blocks import numbers_in_blocks, quantize_blocks
    from tests.instruments.transformer_engine.enums import DType

    numbers = torch.randn(160, 224, generator=torch.Generator().manual_seed(3))
    both = {"rowwise": True, "columnwise": True}
    blocks = [Float8BlockQuantizer(DType.kFloat8E4M3, **both, block_scaling_dim=dim) for dim in (1, 2)]
    own = against = 0.0
    for quantizer in (*blocks, MXFP8Quantizer(DType.kFloat8E4M3, **both)):
        tensor = quantize_blocks(numbers, quantizer)
        read = [numbers_in_blocks(tensor, columns=columns) for columns in (False, True)]
        against = max(against, *(float((numbers - each).abs().max() / numbers.abs().max()) for each in read))
        for at, each in enumerate(read if quantizer in blocks else ()):
            alone = quantize_blocks(numbers, quantizer)
            alone.update_usage(rowwise_usage=not at, columnwise_usage=bool(at))
            own = max(own, float((alone.dequantize(dtype=torch.float32) - each).abs().max()))
    fp4 = NVFP4Quantizer(**both, with_rht=True, with_post_rht_amax=True)
    tensor = quantize_blocks(numbers, fp4)
    read_rows = numbers_in_blocks(tensor, columns=False)
    own = max(own, float((tensor.dequantize(dtype=torch.float32) - read_rows).abs().max()))
    turned = numbers_in_blocks(tensor, columns=True)
    product = turned.t() @ turned - numbers.t() @ numbers
    return {
        "against its own Python": own,
        "against the numbers": against,
        "FP4 against the numbers": float((numbers - read_rows).abs().max() / numbers.abs().max()),
        "FP4, of a product over rows": float(product.abs().max() / (numbers.t() @ numbers).abs().max()),
    }
