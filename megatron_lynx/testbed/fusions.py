"""Megatron's fusions in the testbed's layers, their compiler, and in-place accumulation of weight gradients.

Fusions are `job.model.fusions`; by default all that the layers support on GPUs, as in Megatron, and none on CPU ranks.

    backward of a linear layer, fused:   main_grad (H, h) += grad_output (n, H)^T x total_input (n, h)

Megatron's CUDA extension `fused_weight_gradient_mlp_cuda` also sets a flag on the parameter for the data-parallel reduction (rule
R11). The stand-in does the same in plain torch. Jobs that delay weight gradients use it, for stock as well as ours.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, partial
from types import ModuleType
from typing import Any, Literal

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Fusion
from megatron_lynx.errors import Problem
from megatron_lynx.testbed.stand_in import TRANSFORMER_ENGINE, replace, replace_entry

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


def compiler_for(job: Job) -> Backend | None:
    """Return the `torch.compile` backend of the job's ranks; None if no fusion is compiled."""
    if not {"bias_dropout", "bias_activation"} & set(fusions_of(job)):
        return None
    cpu_can = shutil.which(os.environ.get("CXX", "g++")) is not None
    return "inductor" if job.cluster.device == "cuda" or cpu_can else "aot_eager"


def fusion_problems(job: Job) -> list[Problem]:
    model, said = job.model, job.model.fusions or ()
    problems, needed = [], "a GPU and Transformer Engine, whose kernel it is"
    without_te = job.cluster.device == "cpu" or importlib.util.find_spec(TRANSFORMER_ENGINE) is None
    if "rope" in said and without_te:
        problems.append(Problem("job: model.fusions", "rope", needed, "leave it out"))
    if model.cross_entropy == "te" and without_te:
        problems.append(Problem("job: model.cross_entropy", "te", needed, "take native, or unfused"))
    if "bias_activation" in said and model.activation == "gelu" and not model.bias:
        problems.append(Problem("job: model.fusions", "bias_activation", "biases (model.bias), or swiglu", "leave it out"))
    if "bias_activation" in said and model.activation == "squared_relu":
        problems.append(Problem("job: model.fusions", "bias_activation", "gelu or swiglu (model.activation)", "leave it out"))
    return problems


Backend = Literal["aot_eager", "inductor"]

DISABLED = "TORCHDYNAMO_DISABLE"


def stand_in_for_compiler(backend: Backend) -> ExitStack:
    """Make `torch.compile` use this backend until the returned stack is closed.

    Call it before importing Megatron, whose `jit_fuser` is `torch.compile`, and before the CUDA emulation: torch's compiler
    builds tables of torch's own functions. The bits of `aot_eager` equal uncompiled code's; `inductor` draws other dropout masks.
    """
    import torch._dynamo
    from torch._dynamo import trace_rules

    undo = ExitStack()
    rules = trace_rules.get_torch_obj_rule_map()
    replace(undo, trace_rules, "get_torch_obj_rule_map", cache(lambda: rules))  # new process groups clear its cache
    if backend == "inductor":
        from torch._inductor.codecache import CacheBase

        CacheBase.get_system()  # cached here, because it would query a GPU's properties under the emulation
    replace(undo, torch, "compile", partial(torch.compile, backend=backend))
    if (disabled := os.environ.pop(DISABLED, None)) is not None:
        undo.callback(os.environ.__setitem__, DISABLED, disabled)
    return undo


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
        extension.wgrad_gemm_accum_fp32 = accumulate  # type: ignore[attr-defined]
        extension.wgrad_gemm_accum_fp16 = accumulate  # type: ignore[attr-defined]
        replace_entry(undo, sys.modules, NAME, extension)
        replace(undo, layers, NAME, extension)
        replace(undo, layers, "_grad_accum_fusion_available", True)
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
    """Give a module zeroed `main_grad` tensors for in-place accumulation without DistributedDataParallel, if the job uses it."""
    if adds_up_in_place(job):
        kept = torch.float32 if job.optimizer.gradients == "fp32" else None
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=kept)  # type: ignore[attr-defined]
