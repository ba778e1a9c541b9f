"""Compiled fusions on a CPU."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import cache, partial
from typing import Literal

from tests.instruments.replacing import replace

COMPILER = "TESTBED_COMPILER"
"""The environment variable with the `torch.compile` backend of ranks; without it they compile nothing."""

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
        from torch._inductor import config
        from torch._inductor.codecache import CacheBase

        undo.enter_context(config.patch({"cpp.vec_isa_ok": False}))  # to try each vector extension takes C++'s compiler seconds
        CacheBase.get_system()  # cached here, because it would query a GPU's properties under the emulation
    replace(undo, torch, "compile", partial(torch.compile, backend=backend))
    if (disabled := os.environ.pop(DISABLED, None)) is not None:
        undo.callback(os.environ.__setitem__, DISABLED, disabled)
    return undo
