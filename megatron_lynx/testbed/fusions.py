"""Which of Megatron's fusions the testbed's layers have, and what compiles them.

    job.model.fusions said       those
    not said, on GPUs            what a launch has if it says nothing: all that its layers can have
    not said, on CPU ranks       none: nothing is compiled

Profiles are measured, and plans compared with stock, with the same ones.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import TYPE_CHECKING

from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Fusion
from megatron_lynx.errors import Problem
from megatron_lynx.testbed.compiled_parts import TRANSFORMER_ENGINE

if TYPE_CHECKING:
    from megatron_lynx.testbed.compiler import Backend

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
