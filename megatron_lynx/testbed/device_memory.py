"""A limit on what the stand-in for a GPU holds, as a GPU has one: who exceeds it meets `torch.OutOfMemoryError`.

    operator ── allocates ── the allocator's total above the limit?  ── no ──> what it made
                                                                    └─ yes ──> what it made is let go; out of memory

The limit is in `TESTBED_MEMORY_BYTES`; without it nothing is looked at. A GPU refuses in the middle of an operator, here it is
refused when the operator is over: what it held inside is not seen. Host memory for offloading is no part of it, as it is mapped.

Every operator of this thread is looked at (a `TorchDispatchMode`), those of backward too: on a CPU it runs on the calling thread.
Meanwhile autograd takes its plain paths, which may make a temporary that it would have saved: for tests of what is said, not for
measuring.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.measure.cpu_total import CpuTotal
from megatron_lynx.units import format_bytes

MEMORY_BYTES = "TESTBED_MEMORY_BYTES"
"""The environment variable with the limit."""


def limit_memory(undo: ExitStack) -> None:
    """Enforce the limit that the environment states, if it states one. Raises `ConfigError` where it is no number of bytes."""
    stated = os.environ.get(MEMORY_BYTES)
    if stated is None:
        return
    if not stated.isdecimal():
        raise ConfigError("this launch cannot be limited", [Problem(MEMORY_BYTES, stated, "a number of bytes")])
    undo.enter_context(LimitedMemory(int(stated)))


@final
class LimitedMemory(TorchDispatchMode):
    """Inside, more than `limit_bytes` cannot be held."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit_bytes = limit_bytes
        self._total = CpuTotal()
        self.most_bytes = 0
        """The most that was there behind an operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before_bytes = self._total.bytes
        made = func(*args, **(kwargs or {}))
        asked_bytes = self._total.bytes - before_bytes
        self.most_bytes = max(self.most_bytes, before_bytes + asked_bytes)
        if asked_bytes > 0 and before_bytes + asked_bytes > self._limit_bytes:
            del made
            raise torch.OutOfMemoryError(out_of_memory(asked_bytes, self._limit_bytes, before_bytes))
        return made


def out_of_memory(asked_bytes: int, limit_bytes: int, allocated_bytes: int, reserved_bytes: int = 0) -> str:
    """What PyTorch's allocator says. `reserved_bytes`: what it holds and nobody has."""
    free_bytes = max(0, limit_bytes - allocated_bytes - reserved_bytes)
    return (
        f"CUDA out of memory. Tried to allocate {format_bytes(asked_bytes)}. GPU 0 has a total capacity of "
        f"{format_bytes(limit_bytes)} of which {format_bytes(free_bytes)} is free. Including non-PyTorch memory, this process "
        f"has {format_bytes(limit_bytes - free_bytes)} memory in use. Of the allocated memory {format_bytes(allocated_bytes)} is "
        f"allocated by PyTorch, and {format_bytes(reserved_bytes)} is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )
