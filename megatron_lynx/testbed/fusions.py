"""Megatron's fusions in the testbed's layers, and in-place accumulation of weight gradients.

Fusions are `job.model.fusions`; by default all that the layers support on GPUs, as in Megatron. CPU ranks have none.

    backward of a linear layer, fused:   main_grad (H, h) += grad_output (n, H)^T x total_input (n, h)

Megatron's CUDA extension `fused_weight_gradient_mlp_cuda` also sets a flag on the parameter for the data-parallel reduction (rule
R11). The stand-in does the same in plain torch. Jobs that delay weight gradients use it, for stock as well as ours.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Fusion
from megatron_lynx.errors import Problem
from megatron_lynx.testbed.cpu_device import TRANSFORMER_ENGINE, answer, with_module

FIELDS: dict[Fusion, str] = {
    "bias_dropout": "bias_dropout_fusion",
    "bias_activation": "bias_activation_fusion",
    "rope": "apply_rope_fusion",
}


def fusions_of(job: Job) -> tuple[Fusion, ...]:
    said, model = job.model.fusions, job.model
    if said is not None:
        return tuple(name for name in FIELDS if name in said)
    if job.cluster.device == "cpu":
        return ()
    offered = {
        "bias_dropout": True,
        "bias_activation": model.activation == "swiglu" or (model.activation == "gelu" and model.bias and model.experts is None),
        "rope": model.position == "rope" and importlib.util.find_spec(TRANSFORMER_ENGINE) is not None,
    }
    return tuple(name for name in FIELDS if offered[name])


def fusion_fields(job: Job) -> dict[str, bool]:
    return {field: name in fusions_of(job) for name, field in FIELDS.items()}


def compiles(job: Job) -> bool:
    """Whether the job's fusions include some that `torch.compile` makes; only GPUs are offered them."""
    return not {"bias_dropout", "bias_activation"}.isdisjoint(fusions_of(job))


def fusion_problems(job: Job) -> list[Problem]:
    model, said = job.model, job.model.fusions or ()
    problems, place, todo = [], "job: model.fusions", "leave it out"
    without_te = job.cluster.device == "cpu" or importlib.util.find_spec(TRANSFORMER_ENGINE) is None
    if compiles(job) and job.cluster.device == "cpu":
        problems.append(Problem(place, ", ".join(said), "a GPU, for which they are compiled", todo))
    if "rope" in said and without_te:
        problems.append(Problem(place, "rope", "a GPU and Transformer Engine, whose kernel it is", todo))
    if model.cross_entropy == "te" and without_te:
        needed = "a GPU and Transformer Engine, whose kernel it is"
        problems.append(Problem("job: model.cross_entropy", "te", needed, "take native, or unfused"))
    if "bias_activation" in said and model.activation == "gelu" and not model.bias:
        problems.append(Problem(place, "bias_activation", "biases (model.bias), or swiglu", todo))
    if "bias_activation" in said and model.activation == "squared_relu":
        problems.append(Problem(place, "bias_activation", "gelu or swiglu (model.activation)", todo))
    return problems


NAME = "fused_weight_gradient_mlp_cuda"


def accumulate(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add the weight gradient to `main_grad` in place. As in the extension, the product is not rounded to the operands' type."""
    main_grad.add_(grad_output.t().to(main_grad.dtype).matmul(total_input.to(main_grad.dtype)))


def stand_in_for_fused_gradient() -> ExitStack:
    """Provide the extension to megatron-core until the returned stack is closed, unless the real one is installed with a GPU."""
    from megatron.core.tensor_parallel import layers

    undo = ExitStack()
    if not (layers._grad_accum_fusion_available and torch.cuda.is_available()):
        extension = ModuleType(NAME)
        vars(extension).update(wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate)
        undo.enter_context(with_module(NAME, extension))
        answer(undo, layers, _grad_accum_fusion_available=True)
        undo.enter_context(patch.object(layers, NAME, extension, create=True))
    return undo


def adds_up_in_place(job: Job) -> bool:
    """Whether the testbed's models of this job accumulate weight gradients in `main_grad`, which delaying them requires."""
    return job.overlap.weight_gradients == "deferred"


def deferring_job(job: Job) -> Job:
    return job.model_copy(update={"overlap": job.overlap.model_copy(update={"weight_gradients": "deferred"})})


def fused_gradient_fields(job: Job) -> dict[str, Any]:
    return {"gradient_accumulation_fusion": True} if adds_up_in_place(job) else {}


def fused_gradients(job: Job) -> AbstractContextManager[object]:
    return stand_in_for_fused_gradient() if adds_up_in_place(job) else nullcontext()


def give_main_gradients(job: Job, module: torch.nn.Module) -> None:
    """Give a module zeroed `main_grad` tensors, as Megatron's DistributedDataParallel does, if the job accumulates in place."""
    if adds_up_in_place(job):
        kept = torch.float32 if job.optimizer.gradients == "fp32" else None
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=kept)  # type: ignore[attr-defined]


def add_up_in_place(job: Job, module: torch.nn.Module) -> None:
    """Accumulate all of a module's gradients in `main_grad` tensors, also those that backward leaves in `grad`."""
    give_main_gradients(job, module)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(_into_main_gradient)


def _into_main_gradient(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None
