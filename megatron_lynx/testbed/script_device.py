"""What Megatron's training *scripts* ask of a GPU machine, beyond what `cpu_device` answers for megatron.core.

    asked                                            answered by
    torch.cuda.is_available(), device_count()        yes, as many as this machine has ranks: Megatron refuses to start otherwise
    device properties, capability, memory            those of a card that has none of what is optional
    make, for the dataset helper                     the helper that pip's megatron-core brings, where its source is the same
    nvcc and triton, for kernels (0.16)              modules whose functions do nothing; training calls none of them
    Apex's fused norm                                torch's; without it the local layers refuse sequence parallelism
    typing.override (Python < 3.12, 0.18)            typing_extensions'

and one thing that gloo needs: the interleaved schedule frees what it sends as soon as `isend` returns, so an alias is sent, which
keeps the storage.

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
import typing
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
import typing_extensions

from megatron_lynx.testbed.cpu_device import StandIn, ignore, replace, stand_in_for_cuda, stay

CAPABILITY = (8, 0)
"""Of the card that the CPU plays: new enough for everything that Megatron insists on, too old for what is optional."""

HELPER = "megatron.core.datasets.helpers_cpp"

APEX = ("apex", "apex.normalization", "apex.normalization.fused_layer_norm")

NEED_CUDA = (
    "megatron.legacy.fused_kernels",
    "megatron.core.inference.contexts.fused_kv_append_kernel",
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops",
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
)
"""Compiled with nvcc, or by triton, which they import without looking whether it is there. Training calls none of them."""


def stand_in_for_gpu_machine() -> StandIn:
    """Let this process run Megatron's training scripts without a GPU, until the returned handle is removed.

    Raises:
        ConfigError: this machine has a working GPU, which is then the one to use.
    """
    undo = ExitStack()
    undo.enter_context(stand_in_for_cuda())
    answer_which_device(undo)
    answer_imports(undo)
    build_nothing(undo)
    keep_what_is_sent(undo)
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


def answer_imports(undo: ExitStack) -> None:
    """Modules that a GPU machine has."""
    if not hasattr(typing, "override"):
        replace(undo, typing, "override", typing_extensions.override)
    finder = Answers()
    sys.meta_path.insert(0, finder)
    undo.callback(sys.meta_path.remove, finder)


def build_nothing(undo: ExitStack) -> None:
    """`make` in the folder of the dataset helper has nothing to do where `Answers` finds one that is built."""
    original = subprocess.run

    @functools.wraps(original)
    def run(command: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(command, list) and command[:2] == ["make", "-C"] and _helper_spec(Path(command[2])) is not None:
            return subprocess.CompletedProcess(command, returncode=0)
        return original(command, *args, **kwargs)

    replace(undo, subprocess, "run", run)


def keep_what_is_sent(undo: ExitStack) -> None:
    """Send an alias, whose storage outlives the sender's (`deallocate_output_tensor`)."""
    original = c10d.isend

    @functools.wraps(original)
    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(tensor.detach(), *args, **kwargs)

    for owner in (torch.distributed, c10d):
        replace(undo, owner, "isend", isend)


class FusedLayerNorm:
    """Apex's function, as far as Megatron's FusedLayerNorm calls it."""

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, bias: Any, normalized_shape: Any, eps: float) -> None:
        """Only its parameters are looked at: this one has no `memory_efficient`."""
        raise NotImplementedError

    @staticmethod
    def apply(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, shape: Sequence[int], eps: float) -> torch.Tensor:
        return torch.nn.functional.layer_norm(input, shape, weight, bias, eps)


class Answers(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds Apex's norm, the dataset helper that is there, and modules of Megatron that need a compiler for CUDA."""

    def __init__(self) -> None:
        self._apex = () if importlib.util.find_spec("apex") else APEX

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name == HELPER:
            return _helper_spec(Path(next(iter(path))))
        if name in NEED_CUDA or name in self._apex:
            return importlib.machinery.ModuleSpec(name, self, is_package=name in APEX[:-1])
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Inert(spec.name) if spec.name in NEED_CUDA else ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == APEX[-1]:
            module.FusedLayerNormAffineFunction = FusedLayerNorm  # type: ignore[attr-defined]


class Inert(ModuleType):
    """A module in which every function exists and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ignore


def _helper_spec(folder: Path) -> importlib.machinery.ModuleSpec | None:
    """The dataset helper of the installed megatron-core, for a tree whose source of it is the same."""
    try:
        installed = Path(str(importlib.metadata.distribution("megatron-core").locate_file("megatron/core/datasets")))
    except importlib.metadata.PackageNotFoundError:
        return None
    built = next(iter(installed.glob("helpers_cpp*.so")), None)
    if built is None or (installed / "helpers.cpp").read_bytes() != (folder / "helpers.cpp").read_bytes():
        return None
    return importlib.util.spec_from_file_location(HELPER, built)
