"""Emulates the CUDA device on a CPU, so that the real megatron-core trains without a GPU.

call of megatron.core                            replaced by
torch.cuda.current_device()                      the CPU *device*, which is valid as `device=`
torch.zeros(..., device="cuda"), .to, .cuda()    the same call with device="cpu"
torch.cuda.get/set_rng_state, manual_seed,       the CPU's default generator, from which dropout on CPU tensors draws:
  default_generators, _lazy_call                 Megatron's RNG tracker forks and restores the state in use
streams, events, empty_cache                     torch.cpu's no-ops; profiler ranges (`nvtx`) are ignored
torch.cuda.synchronize()                         a no-op; tests/instruments wait for all posted work of the rank
missing modules                                  `stand_in_for_missing_modules`
all-to-all with sizes as tensors                 the same with sizes as integers, as Megatron passes them on GPUs
Tensor.type()                                    "torch.cuda.FloatTensor", required by gradient clipping and optimizers
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import re
import sys
import typing
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # Megatron imports it; it must build its tables from torch's functions before they are replaced

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.testbed.links import Works
from megatron_lynx.testbed.stand_in import ignore, replace, stand_in_for_compiled_parts

CPU = torch.device("cpu")

FACTORIES = (
    *("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "linspace", "eye"),
    *("rand", "randn", "randint", "randperm"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "empty_strided"),
)


def stand_in_for_cuda() -> ExitStack:
    """Emulate CUDA on the CPU in this process until the returned stack is closed. A second call changes nothing. Raises
    `ConfigError` on a machine with a working GPU."""
    if torch.cuda.is_available():
        gpu = f"a GPU ({torch.cuda.get_device_name()})"
        raise ConfigError(
            "The CUDA stand-in is for machines without a GPU.",
            [Problem("torch.cuda.is_available()", gpu, "no GPU", "run on the GPU, or hide it with CUDA_VISIBLE_DEVICES=''")],
        )
    undo = ExitStack()
    if not isinstance(torch.cuda.default_generators, OneGenerator):
        answer_device_calls(undo)
        Works().watch(undo)
        answer_random_numbers(undo)
        answer_placement(undo)
        answer_exchanges(undo)
    return undo


class OneGenerator(tuple[torch.Generator, ...]):
    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator


def answer_device_calls(undo: ExitStack) -> None:
    answers = {
        "current_device": lambda: CPU,
        "device": nullcontext,
        "is_initialized": lambda: True,
        "set_device": ignore,
        "empty_cache": ignore,
        "synchronize": ignore,
        "Stream": CpuStream,
        "Event": CpuEvent,
        "stream": torch.cpu.stream,
        "current_stream": torch.cpu.current_stream,
        "default_stream": torch.cpu.current_stream,
    }
    for name, answer in answers.items():
        replace(undo, torch.cuda, name, answer)
    for name in ("range_push", "range_pop"):
        replace(undo, torch.cuda.nvtx, name, ignore)
    replace(undo, torch.Tensor, "record_stream", ignore)


def answer_random_numbers(undo: ExitStack) -> None:
    """Replace CUDA's generator by the CPU's. (`_lazy_call` runs its callback at once because `is_initialized` is True.)"""
    replace(undo, torch.cuda, "default_generators", OneGenerator((torch.default_generator,)))
    answers = {
        "get_rng_state": lambda device="cuda": torch.default_generator.get_state(),
        "set_rng_state": lambda new_state, device="cuda": torch.default_generator.set_state(new_state),
        "manual_seed": lambda seed: ignore(torch.default_generator.manual_seed(int(seed))),
        "manual_seed_all": lambda seed: ignore(torch.default_generator.manual_seed(int(seed))),
    }
    for name, answer in answers.items():
        replace(undo, torch.cuda, name, answer)
        replace(undo, torch.cuda.random, name, answer)
    # The tracker's fork warns if the CPU's RNG state changed inside it, which is intended here.
    tracker_log = logging.getLogger("megatron.core.tensor_parallel.random")
    tracker_log.addFilter(is_not_about_cpu_state)
    undo.callback(tracker_log.removeFilter, is_not_about_cpu_state)


def answer_placement(undo: ExitStack) -> None:
    for name in FACTORIES:
        replace(undo, torch, name, with_device_on_cpu(getattr(torch, name)))
    replace(undo, torch.Tensor, "to", with_device_on_cpu(torch.Tensor.to))
    replace(undo, torch.Tensor, "type", with_cuda_type_name(torch.Tensor.type))
    replace(undo, torch.Tensor, "cuda", stay)
    replace(undo, torch.nn.Module, "cuda", stay)


def answer_exchanges(undo: ExitStack) -> None:
    original = torch.distributed.all_to_all_single

    @functools.wraps(original)
    def all_to_all_single(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        def numbers(value: Any) -> Any:
            return value.tolist() if isinstance(value, torch.Tensor) else value

        return original(output, input, *map(numbers, args), **{name: numbers(value) for name, value in kwargs.items()})

    replace(undo, torch.distributed, "all_to_all_single", all_to_all_single)


def with_device_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the CPU for CUDA, as `device=` or as first argument of `Tensor.to`, and without `pin_memory`."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and (is_cuda(kwargs["device"]) or isinstance(kwargs["device"], int)):
            kwargs["device"] = CPU
        elif len(args) > 1 and is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return on_cpu


def with_cuda_type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return f"torch.cuda.{original(tensor).split('.')[-1]}"  # a subclass of Tensor comes here twice
        return original(tensor, dtype, non_blocking, **kwargs)

    return type_


def is_cuda(place: Any) -> bool:
    if isinstance(place, str):
        return place.startswith("cuda")
    return isinstance(place, torch.device) and place.type == "cuda"


class CpuStream(torch.cpu.Stream):
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        super().__init__(priority)

    def synchronize(self) -> None:
        """Return at once: CPU streams are synchronous."""

    def record_event(self) -> CpuEvent:  # type: ignore[override]
        return CpuEvent()


class CpuEvent(torch.cpu.Event):
    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        super().__init__()


def is_not_about_cpu_state(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("CPU RNG state changed")


def stay(holder: Any, *args: Any, **kwargs: Any) -> Any:
    return holder


ROUTERS = "megatron.core.transformer.moe.moe_utils"
THEIR_GEMM = "te_general_gemm"
"""Transformer Engine's GEMM. Without it, 0.15 and 0.16 use this name undefined."""

UNGUARDED = re.compile(r"^import triton", re.MULTILINE)


def stand_in_for_missing_modules() -> ExitStack:
    """Provide modules that megatron.core imports and this machine lacks, until the returned stack is closed. Call before
    importing Megatron.

    These are `typing.override` (0.18 on Python < 3.12), compiled parts of Transformer Engine (`stand_in_for_compiled_parts`),
    modules that import triton unguarded (their functions do nothing), and the GEMM in routers (None: torch's is used).
    """
    undo = ExitStack()
    if not hasattr(typing, "override"):
        replace(undo, typing, "override", lambda function: function)
    undo.enter_context(stand_in_for_compiled_parts())
    finder = Answers()
    sys.meta_path.insert(0, finder)
    undo.callback(sys.meta_path.remove, finder)
    return undo


class Answers(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self) -> None:
        self._no_triton = importlib.util.find_spec("triton") is None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("megatron.") or not path:
            return None
        if name == ROUTERS:
            return naming_their_gemm(importlib.machinery.PathFinder.find_spec(name, path))
        source = Path(next(iter(path))) / f"{name.rpartition('.')[2]}.py"
        missing = self._no_triton and source.is_file() and UNGUARDED.search(source.read_text(encoding="utf-8"))
        return importlib.machinery.ModuleSpec(name, self) if missing else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Inert(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def naming_their_gemm(spec: importlib.machinery.ModuleSpec | None) -> importlib.machinery.ModuleSpec | None:
    if spec is not None and spec.loader is not None:
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            vars(module).setdefault(THEIR_GEMM, None)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


class Inert(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ignore
