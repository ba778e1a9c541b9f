"""Megatron compiles what its fusions run: `megatron.core.jit.jit_fuser` is `torch.compile`. Here that is the compiler on a CPU.

    import of megatron.core.jit    jit_fuser = torch.compile          <── asked here, with a backend that a CPU has
    @jit_fuser                     bias_dropout_add_fused_train, bias_gelu, bias_swiglu, ... and their backwards
    first call                     traced, compiled, guarded; a call that its guards do not know compiles once more

Backend `aot_eager` traces, guards and makes autograd nodes as the real thing does, and runs torch's own kernels: no compiler of
C++ is needed, and bits are those of uncompiled code. `inductor` is torch's default, generates C++ on a CPU, and draws other
dropout masks than uncompiled code does.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import cache, partial
from typing import Literal

import torch
import torch._dynamo
from torch._dynamo import trace_rules

from megatron_lynx.testbed.stand_in import StandIn, replace

Backend = Literal["aot_eager", "inductor"]

DISABLED = "TORCHDYNAMO_DISABLE"
"""The environment variable with which `torch.compile` compiles nothing."""


def stand_in_for_compiler(backend: Backend) -> StandIn:
    """Let `torch.compile` use this backend, until the returned handle is removed. To be in place before Megatron is imported, and
    before the CUDA stand-in: what torch's compiler knows of torch is asked for while torch has its own functions."""
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
