"""Megatron's fusions in the testbed's layers: which ones a job has, what compiles them, what adds weight gradients up in place.

    job.model.fusions set        those
    not set, on GPUs             all that its layers can have, as in a launch that sets nothing
    not set, on CPU ranks        none: nothing is compiled

Profiles are measured, and plans compared with stock, with the same ones.

    backward of a linear layer, fused:   main_grad (H, h) += grad_output (n, H)^T x total_input (n, h)

`gradient_accumulation_fusion` is Megatron's default on GPUs. Its CUDA extension `fused_weight_gradient_mlp_cuda` adds the weight
gradient to `weight.main_grad` in place and sets a flag on the parameter for the data-parallel reduction (rule R11). The stand-in
does the same in plain torch. Models of jobs that delay weight gradients are built with it, stock's as well as ours, inside
Megatron's DistributedDataParallel, whose buffers hold `main_grad`.
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
from megatron_lynx.testbed.stand_in import TRANSFORMER_ENGINE, StandIn, replace, replace_entry

FIELDS: dict[Fusion, str] = {
    "bias_dropout": "bias_dropout_fusion",
    "bias_activation": "bias_activation_fusion",
    "rope": "apply_rope_fusion",
}
"""Their names in Megatron's TransformerConfig."""


def fusions_of(job: Job) -> tuple[Fusion, ...]:
    """Those that the job's layers have on this machine, in the order of `FIELDS`."""
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
    """Fields of TransformerConfig."""
    return {field: name in fusions_of(job) for name, field in FIELDS.items()}


def compiler_for(job: Job) -> Backend | None:
    """What `torch.compile` is for the job's ranks: torch's default, except on a CPU without a compiler of C++; None: nothing."""
    if not {"bias_dropout", "bias_activation"} & set(fusions_of(job)):
        return None
    cpu_can = shutil.which(os.environ.get("CXX", "g++")) is not None
    return "inductor" if job.cluster.device == "cuda" or cpu_can else "aot_eager"


def fusion_problems(job: Job) -> list[Problem]:
    """Fusions that a job says and that its layers cannot have on this machine: Megatron would stop at them."""
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
"""The environment variable with which `torch.compile` compiles nothing."""


def stand_in_for_compiler(backend: Backend) -> StandIn:
    """Make `torch.compile` use this backend until the returned handle is removed.

    Call it before Megatron is imported, whose `jit_fuser` is `torch.compile`, and before the CUDA stand-in: torch's compiler
    makes tables of torch's own functions. `aot_eager` traces and guards and runs torch's kernels: it needs no C++ compiler, and
    bits are those of uncompiled code. `inductor` is torch's default, and draws other dropout masks.
    """
    import torch._dynamo
    from torch._dynamo import trace_rules

    undo = ExitStack()
    rules = trace_rules.get_torch_obj_rule_map()
    replace(undo, trace_rules, "get_torch_obj_rule_map", cache(lambda: rules))  # new process groups make it be asked anew
    if backend == "inductor":
        from torch._inductor.codecache import CacheBase

        CacheBase.get_system()  # its answer is remembered; it would ask the stand-in for properties of a GPU
    replace(undo, torch, "compile", partial(torch.compile, backend=backend))
    if (disabled := os.environ.pop(DISABLED, None)) is not None:
        undo.callback(os.environ.__setitem__, DISABLED, disabled)
    return StandIn(undo)


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
        extension = ModuleType(NAME)
        extension.wgrad_gemm_accum_fp32 = accumulate  # type: ignore[attr-defined]
        extension.wgrad_gemm_accum_fp16 = accumulate  # type: ignore[attr-defined]
        replace_entry(undo, sys.modules, NAME, extension)
        replace(undo, layers, NAME, extension)
        replace(undo, layers, "_grad_accum_fusion_available", True)
    return StandIn(undo)


def adds_up_in_place(job: Job) -> bool:
    """Whether the testbed's models of this job add their weight gradients to `main_grad`, without which none can be deferred."""
    return job.overlap.weight_gradients == "deferred"


def deferring_job(job: Job) -> Job:
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
