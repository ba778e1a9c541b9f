"""Python stand-in for `fused_weight_gradient_mlp_cuda`, the CUDA extension behind `gradient_accumulation_fusion`.

    backward of a linear layer, fused:   main_grad (H, h) += grad_output (n, H)^T x total_input (n, h)

Megatron's default on GPUs. It adds the weight gradient to `weight.main_grad` where it lies and tells the data-parallel
reduction so by a flag on the parameter object, which is what rule R11 is about; with this stand-in a CPU can test it.

The testbed's models are built with it where their job defers weight gradients into waits, stock's as well as ours, so that they
differ in nothing else. Megatron's DistributedDataParallel is then around them: `main_grad` lies in its buffers.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import ModuleType
from typing import Any

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.testbed.stand_in import StandIn, replace, replace_entry

NAME = "fused_weight_gradient_mlp_cuda"


def accumulate(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add the weight gradient to `main_grad` in place. As in the extension the product is not rounded to its operands' type."""
    main_grad.add_(grad_output.t().to(main_grad.dtype).matmul(total_input.to(main_grad.dtype)))


def stand_in_for_fused_gradient() -> StandIn:
    """Offer the extension to megatron-core until the returned handle is removed.

    Where the real extension is installed, and there is a GPU that it can run on, nothing is changed. Imports megatron.core.
    """
    from megatron.core.tensor_parallel import layers

    undo = ExitStack()
    if not (layers._grad_accum_fusion_available and torch.cuda.is_available()):
        extension = ModuleType(NAME, __doc__)
        extension.wgrad_gemm_accum_fp32 = accumulate  # type: ignore[attr-defined]
        extension.wgrad_gemm_accum_fp16 = accumulate  # type: ignore[attr-defined]
        replace_entry(undo, sys.modules, NAME, extension)
        replace(undo, layers, NAME, extension)
        replace(undo, layers, "_grad_accum_fusion_available", True)
    return StandIn(undo)


def adds_up_in_place(job: Job) -> bool:
    """Whether the testbed's models of this job add their weight gradients to `main_grad`, without which none can be deferred."""
    return job.overlap.weight_gradients == "deferred"


def deferring(job: Job) -> Job:
    """The same job, said to defer weight gradients."""
    return job.model_copy(update={"overlap": job.overlap.model_copy(update={"weight_gradients": "deferred"})})


def fused_gradient_fields(job: Job) -> dict[str, Any]:
    """Fields of TransformerConfig for a job whose weight gradients are added up in place; none for another."""
    return {"gradient_accumulation_fusion": True} if adds_up_in_place(job) else {}


def fused_gradients(job: Job) -> AbstractContextManager[object]:
    """The extension is on offer while the block runs, where the job's models need it."""
    return stand_in_for_fused_gradient() if adds_up_in_place(job) else nullcontext()


def give_main_gradients(job: Job, module: torch.nn.Module) -> None:
    """Zeros to which a module's weight gradients are added where the job's are, without DistributedDataParallel around it."""
    if adds_up_in_place(job):
        kept = torch.float32 if job.optimizer.gradients == "fp32" else None
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=kept)  # type: ignore[attr-defined]
