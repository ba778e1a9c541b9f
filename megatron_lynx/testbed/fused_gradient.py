"""Python stand-in for `fused_weight_gradient_mlp_cuda`, the CUDA extension behind `gradient_accumulation_fusion`.

    backward of a linear layer, fused:   main_grad (H, h) += grad_output (n, H)^T x total_input (n, h)

Megatron's default on GPUs. It adds the weight gradient to `weight.main_grad` where it lies and tells the data-parallel
reduction so by a flag on the parameter object, which is what rule R11 is about; with this stand-in a CPU can test it.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import ModuleType

import torch

from megatron_lynx.testbed.stand_in import StandIn, replace

NAME = "fused_weight_gradient_mlp_cuda"


def accumulate(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add the weight gradient to `main_grad` in place. As in the extension the product is not rounded to its operands' type."""
    main_grad.add_(grad_output.t().to(main_grad.dtype).matmul(total_input.to(main_grad.dtype)))


def stand_in_for_fused_gradient() -> StandIn:
    """Offer the extension to megatron-core until the returned handle is removed.

    Where the real extension is installed nothing is changed. Imports megatron.core.
    """
    from megatron.core.tensor_parallel import layers

    undo = ExitStack()
    if not layers._grad_accum_fusion_available:
        extension = ModuleType(NAME, __doc__)
        extension.wgrad_gemm_accum_fp32 = accumulate  # type: ignore[attr-defined]
        extension.wgrad_gemm_accum_fp16 = accumulate  # type: ignore[attr-defined]
        sys.modules[NAME] = extension
        undo.callback(sys.modules.pop, NAME)
        replace(undo, layers, NAME, extension)
        replace(undo, layers, "_grad_accum_fusion_available", True)
    return StandIn(undo)
