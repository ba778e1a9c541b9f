"""Answers what Megatron's training *scripts* ask of a GPU machine, beyond what `cpu_device` answers for megatron.core.

    asked                                            answered by
    torch.cuda.is_available(), device_count()        yes, as many as this machine has ranks: Megatron refuses to start otherwise
    device properties, capability, memory            those of a card that has none of what is optional
    make, for the dataset helper                     nothing to do where `missing_modules` finds one that is built

    how much memory there is                         no bound, or the one that TESTBED_MEMORY_BYTES states: who exceeds it meets
                                                       `torch.OutOfMemoryError`

    processes for writing checkpoints                forked: one that is spawned imports torch and the script again, and could not
                                                       import the script here

Found by removing each alone and running the scripts of 0.16 to 0.19 on a CPU. To be in place before Megatron is imported.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.measure.memory import CpuTotal
from megatron_lynx.testbed.cpu_device import OneGenerator, stand_in_for_cuda, stay
from megatron_lynx.testbed.missing_modules import helper_spec, stand_in_for_missing_modules
from megatron_lynx.testbed.stand_in import StandIn, ignore, replace, replace_entry
from megatron_lynx.units import format_bytes

CAPABILITY = (8, 0)
"""Compute capability that is claimed: new enough for what Megatron requires, too old for what is optional."""


def stand_in_for_gpu_machine() -> StandIn:
    """Let this process run Megatron's training scripts without a GPU, until the returned handle is removed.

    Of a second call while one is active only the limit of memory is new.

    Raises:
        ConfigError: this machine has a working GPU, which is then the one to use; or a limit of memory that does not read.
    """
    undo = ExitStack()
    if not isinstance(torch.cuda.default_generators, OneGenerator):
        undo.enter_context(stand_in_for_cuda())
        answer_which_device(undo)
        undo.enter_context(stand_in_for_missing_modules(apex=True))
        build_nothing(undo)
        fork_children(undo)
    limit_memory(undo)
    return StandIn(undo)


def answer_which_device(undo: ExitStack) -> None:
    """There is a device; what it is like; and `.pin_memory()` of what lives on it."""
    properties = SimpleNamespace(name="CPU", major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=0, multi_processor_count=1)
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_name": lambda device=None: properties.name,
        "memory_stats": lambda device=None: {},
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": ignore,
    }
    for name, answer in answers.items():
        replace(undo, torch.cuda, name, answer)
    replace(undo, torch.Tensor, "pin_memory", stay)


def build_nothing(undo: ExitStack) -> None:
    """`make` in the folder of the dataset helper has nothing to do where `missing_modules` finds one that is built."""
    original = subprocess.run

    @functools.wraps(original)
    def run(command: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(command, list) and command[:2] == ["make", "-C"] and helper_spec(Path(command[2])) is not None:
            return subprocess.CompletedProcess(command, returncode=0)
        return original(command, *args, **kwargs)

    replace(undo, subprocess, "run", run)


def fork_children(undo: ExitStack) -> None:
    """Processes that are to be spawned are forked, as Megatron forks those that write asynchronously."""
    replace_entry(undo, context._concrete_contexts, "spawn", context._concrete_contexts["fork"])  # type: ignore[attr-defined]


MEMORY_BYTES = "TESTBED_MEMORY_BYTES"
"""The environment variable with a limit on what can be allocated; without it nothing is looked at."""


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
    """Inside, more than `limit_bytes` cannot be held.

    A GPU refuses in the middle of an operator, here it is refused when the operator is over: what it held inside is not seen.
    Host memory for offloading is no part of it, as it is mapped. Every operator of this thread is looked at, those of backward
    too, and meanwhile autograd takes its plain paths, which may make a temporary: for tests of what is said, not for measuring.
    """

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
