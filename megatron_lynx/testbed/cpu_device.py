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
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import re
import sys
import typing
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.testbed.links import Works

if TYPE_CHECKING:
    from megatron_lynx.config.job import Job

CPU = torch.device("cpu")

FACTORIES = (
    *("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "linspace", "eye"),
    *("rand", "randn", "randint", "randperm"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "empty_strided"),
)


def stand_in() -> ExitStack:
    """Let this process import and run megatron.core without a GPU until the returned stack is closed. Call it before."""
    undo = ExitStack()
    undo.enter_context(stand_in_for_cuda())
    undo.enter_context(stand_in_for_missing_modules())
    if TRANSFORMER_ENGINE not in sys.modules and not has_compiled_extension():
        undo.enter_context(with_module(TRANSFORMER_ENGINE, None))  # its import fails as if it were not installed
    return undo


def named_stand_in() -> ExitStack:
    """The stand-in of the module that the environment names, by default `stand_in`."""
    return importlib.import_module(os.environ.get(STAND_INS, __name__)).stand_in()  # type: ignore[no-any-return]


def with_module(name: str, module: ModuleType | None) -> ExitStack:
    undo = ExitStack()
    undo.callback(sys.modules.update, {name: sys.modules[name]} if name in sys.modules else {})
    undo.callback(sys.modules.pop, name)
    sys.modules[name] = module  # type: ignore[assignment]
    return undo


def stand_in_for_cuda() -> ExitStack:
    """Emulate CUDA on the CPU in this process until the returned stack is closed. A second call changes nothing. Raises
    `ConfigError` on a machine with a working GPU."""
    import torch._dynamo  # Megatron imports it; it must build its tables from torch's functions before they are replaced

    undo = ExitStack()
    if isinstance(torch.cuda.default_generators, OneGenerator):
        return undo
    if torch.cuda.is_available():
        gpu = f"a GPU ({torch.cuda.get_device_name()})"
        raise ConfigError(
            "The CUDA stand-in is for machines without a GPU.",
            [Problem("torch.cuda.is_available()", gpu, "no GPU", "run on the GPU, or hide it with CUDA_VISIBLE_DEVICES=''")],
        )
    answer(undo, torch.cuda, **DEVICE, **RANDOM, default_generators=OneGenerator((torch.default_generator,)))
    answer(undo, torch.cuda.random, **RANDOM)
    answer(undo, torch.cuda.nvtx, range_push=ignore, range_pop=ignore)
    # The tracker's fork warns if the CPU's RNG state changed inside it, which is intended here.
    tracker_log = logging.getLogger("megatron.core.tensor_parallel.random")
    tracker_log.addFilter(is_not_about_cpu_state)
    undo.callback(tracker_log.removeFilter, is_not_about_cpu_state)
    Works().watch(undo)
    answer(undo, torch, **{name: with_device_on_cpu(getattr(torch, name)) for name in FACTORIES})
    answer(undo, torch.Tensor, to=with_device_on_cpu(torch.Tensor.to), cuda=stay, record_stream=ignore)
    answer(undo, torch.nn.Module, cuda=stay)
    answer(undo, dist, all_to_all_single=with_sizes_as_numbers(dist.all_to_all_single))
    return undo


def answer(undo: ExitStack, owner: Any, **answers: Any) -> None:
    for name, new in answers.items():
        undo.enter_context(patch.object(owner, name, new))


class OneGenerator(tuple[torch.Generator, ...]):
    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator


def with_sizes_as_numbers(original: Callable[..., Any]) -> Callable[..., Any]:
    def numbers(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    @functools.wraps(original)
    def all_to_all_single(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(output, input, *map(numbers, args), **{name: numbers(value) for name, value in kwargs.items()})

    return all_to_all_single


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


def ignore(*args: Any, **kwargs: Any) -> None:
    """A no-op for requests that need nothing on a CPU."""


DEVICE: dict[str, Any] = {
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
RANDOM: dict[str, Any] = {
    "get_rng_state": lambda device="cuda": torch.default_generator.get_state(),
    "set_rng_state": lambda new_state, device="cuda": torch.default_generator.set_state(new_state),
    "manual_seed": lambda seed: ignore(torch.default_generator.manual_seed(int(seed))),
    "manual_seed_all": lambda seed: ignore(torch.default_generator.manual_seed(int(seed))),
}
"""The CPU's generator in place of CUDA's. (`_lazy_call` runs its callback at once because `is_initialized` is True.)"""

ROUTERS = "megatron.core.transformer.moe.moe_utils"
THEIR_GEMM = "te_general_gemm"
"""Transformer Engine's GEMM. Without it, 0.15 and 0.16 use this name undefined."""

UNGUARDED = re.compile(r"^import triton", re.MULTILINE)


def stand_in_for_missing_modules() -> ExitStack:
    """Provide modules that megatron.core imports and this machine lacks, until the returned stack is closed. Call before
    importing Megatron.

    These are `typing.override` (0.18 on Python < 3.12), modules that import triton unguarded (their functions do nothing), and
    the GEMM in routers (None: torch's is used).
    """
    undo = ExitStack()
    if not hasattr(typing, "override"):
        undo.enter_context(patch.object(typing, "override", lambda function: function, create=True))
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


TRANSFORMER_ENGINE = "transformer_engine"

STAND_INS = "TESTBED_STAND_INS"
"""Environment variable with the name of a module whose `stand_in() -> ExitStack` replaces this one's on CPU ranks. That of this
repository's tests, `tests.instruments`, also stands in for compiled parts of Transformer Engine and Apex."""


def transformer_engine_can_run() -> bool:
    return importlib.util.find_spec(TRANSFORMER_ENGINE) is not None and (has_compiled_extension() or STAND_INS in os.environ)


def has_compiled_extension() -> bool:
    spec = importlib.util.find_spec(TRANSFORMER_ENGINE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return any(True for folder in folders for _ in Path(folder).parent.glob("**/transformer_engine_torch*.so"))


def stood_in_for(job: Job) -> str | None:
    """Name the part of the job's layers that a stand-in computes on this machine; None if there is none."""
    return "Transformer Engine's kernels" if job.model.uses_te and not has_compiled_extension() else None
