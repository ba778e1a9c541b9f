"""Answers what Megatron's training *scripts* ask of a GPU machine, beyond what `cpu_device` answers for megatron.core.

    asked                                            answered by
    torch.cuda.is_available(), device_count()        yes, as many as this machine has ranks: Megatron refuses to start otherwise
    device properties, capability, memory            those of a card that has none of what is optional
    make, for the dataset helper                     nothing to do where `ScriptModules` finds one that is built

    how much memory there is                         no bound, or the one that TESTBED_MEMORY_BYTES states: who exceeds it meets
                                                       `torch.OutOfMemoryError`

    processes for writing checkpoints                forked: one that is spawned imports torch and the script again, and could not
                                                       import the script here

Found by removing each alone and running the scripts of 0.16 to 0.19 on a CPU. To be in place before Megatron is imported.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing import context
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.testbed.cpu_device import Inert, OneGenerator, ignore, named_stand_in, stand_in_for_cuda, stay
from megatron_lynx.units import format_bytes
from tests.instruments.cpu_total import CpuTotal
from tests.instruments.posted import stand_in_for_posted
from tests.instruments.replacing import replace, replace_entry
from tests.instruments.tensor_types import stand_in_for_tensor_types

CAPABILITY = (8, 0)
"""Compute capability that is claimed: new enough for what Megatron requires, too old for what is optional."""


def stand_in_for_gpu_machine() -> ExitStack:
    """Let this process run Megatron's training scripts without a GPU, until the returned stack is closed.

    Of a second call while one is active only the limit of memory is new.

    Raises:
        ConfigError: this machine has a working GPU, which is then the one to use; or a limit of memory that does not read.
    """
    undo = ExitStack()
    if not isinstance(torch.cuda.default_generators, OneGenerator):
        undo.enter_context(stand_in_for_cuda())
        answer_which_device(undo)
        undo.enter_context(stand_in_for_tensor_types())
        undo.enter_context(named_stand_in())
        sys.meta_path.insert(0, finder := ScriptModules())
        undo.callback(sys.meta_path.remove, finder)
        stand_in_for_posted(undo)
        build_nothing(undo)
        fork_children(undo)
    limit_memory(undo)
    return undo


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
    """`make` in the folder of the dataset helper has nothing to do where `ScriptModules` finds one that is built."""
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


APEX = ("apex", "apex.normalization", "apex.normalization.fused_layer_norm")
RESTARTS = ("nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess")
HELPER = "megatron.core.datasets.helpers_cpp"
FUSED_KERNELS = "megatron.legacy.fused_kernels"
"""Compiled with nvcc when 0.16 starts."""


class ScriptModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that scripts import and this machine lacks, and no others.

    Apex's fused norm                    torch's; without it the local layers refuse sequence parallelism
    fused kernels (nvcc)                 a module whose functions do nothing
    the compiled dataset helper          the one of pip's megatron-core, where its source is the same
    restarts inside a process            classes without anything: Megatron-Bridge imports them, and restarts nothing
    """

    def __init__(self) -> None:
        self._apex = APEX if importlib.util.find_spec("apex") is None else ()
        self._restarts = RESTARTS if _is_there("megatron.bridge") and not _is_there(RESTARTS[0]) else ()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in self._apex:
            return importlib.machinery.ModuleSpec(name, self, is_package=name != APEX[-1])
        if name in self._restarts:
            return importlib.machinery.ModuleSpec(name, self, is_package=name == RESTARTS[0])
        if name == HELPER and path:
            return helper_spec(Path(next(iter(path))))
        return importlib.machinery.ModuleSpec(name, self) if name == FUSED_KERNELS else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        if spec.name == RESTARTS[-1]:
            return Classes(spec.name)
        return ModuleType(spec.name) if spec.name in (*APEX, *RESTARTS) else Inert(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == APEX[-1]:
            module.FusedLayerNormAffineFunction = FusedLayerNorm  # type: ignore[attr-defined]


class FusedLayerNorm:
    """Apex's function, as far as Megatron's FusedLayerNorm calls it."""

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, bias: Any, normalized_shape: Any, eps: float) -> None:
        """Never called: Megatron looks only at its parameters, among which `memory_efficient` is missing."""
        raise NotImplementedError

    @staticmethod
    def apply(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, shape: Sequence[int], eps: float) -> torch.Tensor:
        return torch.nn.functional.layer_norm(input, shape, weight, bias, eps)


class Classes(ModuleType):
    """A module in which every name is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # nor is the package that it would be in
        return False


def helper_spec(folder: Path) -> importlib.machinery.ModuleSpec | None:
    """The dataset helper of an installed megatron-core, built for this Python, for a tree whose source of it is the same."""
    for installed in importlib.metadata.distributions(name="megatron-core"):
        beside = Path(str(installed.locate_file("megatron/core/datasets")))
        built = next(
            (path for suffix in importlib.machinery.EXTENSION_SUFFIXES for path in beside.glob(f"helpers_cpp{suffix}")), None
        )
        if built is not None and (beside / "helpers.cpp").read_bytes() == (folder / "helpers.cpp").read_bytes():
            return importlib.util.spec_from_file_location(HELPER, built)
    return None
