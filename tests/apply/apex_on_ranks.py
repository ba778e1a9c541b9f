"""Apex's norm on ranks: Megatron's own wrapper around a stand-in for its function, in the mode that keeps what it made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan

from ..transparency.trials import Outcome, Trial, compare_with_stock


class MemoryEfficient(torch.autograd.Function):
    """`FusedLayerNormAffineFunction(memory_efficient=True)`: backward goes back from the output, so the input may go."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, shape: Sequence[int], eps: float, memory_efficient: bool = False
    ) -> Tensor:
        assert memory_efficient
        variance, mean = torch.var_mean(input, -1, correction=0, keepdim=True)
        inverse = (variance + eps).rsqrt()
        output = (input - mean) * inverse * weight + bias
        ctx.save_for_backward(output, weight, bias, inverse)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        output, weight, bias, inverse = ctx.saved_tensors
        normalised = (output - bias) / weight
        scaled = grad * weight
        along = (scaled.mean(-1, keepdim=True), (scaled * normalised).mean(-1, keepdim=True))
        rows = tuple(range(grad.dim() - 1))
        back = (scaled - along[0] - normalised * along[1]) * inverse
        return back, (grad * normalised).sum(rows), grad.sum(rows), None, None, None


def compared(rank: int, job: Job, plans: list[Plan], trial: Trial) -> list[Outcome]:
    from megatron.core.fusions import fused_layer_norm

    from megatron_lynx.testbed import tiny_models

    with (
        patch.object(fused_layer_norm, "FusedLayerNormAffineFunction", MemoryEfficient, create=True),
        patch.object(fused_layer_norm, "HAVE_FUSED_LAYER_NORM", True),
        patch.object(tiny_models, "Norm", fused_layer_norm.FusedLayerNorm),
    ):
        return compare_with_stock(rank, job, plans, trial)
