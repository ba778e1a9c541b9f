"""Modules that Megatron imports and a machine without a GPU has not.

    imported                                         answered by
    Apex's fused norm                                torch's; without it the local layers refuse sequence parallelism
    fused kernels (nvcc), modules that import        modules whose functions do nothing: training without padded or fused
      triton without looking whether it is there       routing calls none
    the compiled dataset helper                      the one that pip's megatron-core brings, where its source is the same
    the compiled parts of a Transformer Engine or    whom `compiled_parts` finds
      an Apex whose Python is on the import path
    Transformer Engine's GEMM, in routers (0.15,     "none": torch's is used then
      0.16 ask for it although it is not there)
    restarts inside a process, which Megatron-Bridge    classes without anything: nothing is restarted
      imports whether or not they are used
    typing.override (0.18 on Python < 3.12)          a decorator that changes nothing

Found by removing each alone and running megatron-core and the scripts of 0.16 to 0.19 on a CPU. What is installed is left alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import typing
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatron_lynx.testbed.stand_in import StandIn, ignore, replace, stand_in_for_compiled_parts

APEX = ("apex", "apex.normalization", "apex.normalization.fused_layer_norm")
RESTARTS = ("nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess")
HELPER = "megatron.core.datasets.helpers_cpp"
FUSED_KERNELS = "megatron.legacy.fused_kernels"
"""Compiled with nvcc when 0.16 starts."""

ROUTERS = "megatron.core.transformer.moe.moe_utils"
THEIR_GEMM = "te_general_gemm"
"""Imported there with Transformer Engine; without it 0.15 and 0.16 have no such name, and ask for it all the same."""

UNGUARDED = re.compile(r"^import triton", re.MULTILINE)
"""Matches modules that import triton without asking whether it is there."""


def stand_in_for_missing_modules(*, apex: bool = False) -> StandIn:
    """Answer Megatron's imports until the returned handle is removed. To be in place before Megatron is imported.

    `apex`: Apex's norm as well, which scripts build their layers with. (The testbed's own models bring a norm.)
    """
    undo = ExitStack()
    if not hasattr(typing, "override"):
        replace(undo, typing, "override", unchanged)
    undo.enter_context(stand_in_for_compiled_parts())
    finder = Answers(apex)
    sys.meta_path.insert(0, finder)
    undo.callback(sys.meta_path.remove, finder)
    return StandIn(undo)


class FusedLayerNorm:
    """Apex's function, as far as Megatron's FusedLayerNorm calls it."""

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, bias: Any, normalized_shape: Any, eps: float) -> None:
        """Never called: Megatron looks only at its parameters, among which `memory_efficient` is missing."""
        raise NotImplementedError

    @staticmethod
    def apply(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, shape: Sequence[int], eps: float) -> torch.Tensor:
        return torch.nn.functional.layer_norm(input, shape, weight, bias, eps)


class Answers(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that are missing, and no others."""

    def __init__(self, apex: bool) -> None:
        self._apex = APEX if apex and importlib.util.find_spec("apex") is None else ()
        self._restarts = RESTARTS if apex and _is_there("megatron.bridge") and not _is_there(RESTARTS[0]) else ()
        self._no_triton = importlib.util.find_spec("triton") is None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in self._apex:
            return importlib.machinery.ModuleSpec(name, self, is_package=name != APEX[-1])
        if name in self._restarts:
            return importlib.machinery.ModuleSpec(name, self, is_package=name == RESTARTS[0])
        if not name.startswith("megatron.") or not path:
            return None
        folder = Path(next(iter(path)))
        if name == ROUTERS:
            return naming_their_gemm(importlib.machinery.PathFinder.find_spec(name, path))
        if name == HELPER:
            return helper_spec(folder)
        if name == FUSED_KERNELS or (self._no_triton and _needs_triton(folder / f"{name.rpartition('.')[2]}.py")):
            return importlib.machinery.ModuleSpec(name, self)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        if spec.name == RESTARTS[-1]:
            return Classes(spec.name)
        return ModuleType(spec.name) if spec.name in (*APEX, *RESTARTS) else Inert(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == APEX[-1]:
            module.FusedLayerNormAffineFunction = FusedLayerNorm  # type: ignore[attr-defined]


def _needs_triton(source: Path) -> bool:
    return source.is_file() and UNGUARDED.search(source.read_text(encoding="utf-8")) is not None


def naming_their_gemm(spec: importlib.machinery.ModuleSpec | None) -> importlib.machinery.ModuleSpec | None:
    """The module as it is, with the name of a GEMM that is not there."""
    if spec is not None and spec.loader is not None:
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            vars(module).setdefault(THEIR_GEMM, None)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


class Inert(ModuleType):
    """A module in which every function exists and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ignore


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


def unchanged(function: Any) -> Any:
    return function
