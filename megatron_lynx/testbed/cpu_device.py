"""A stand-in for the CUDA device, so that the real megatron-core trains on a CPU.

What megatron.core asks, and who answers while the stand-in is active:

    asked                                            answered by
    torch.cuda.current_device()                      the CPU *device*, so that `device=current_device()` just works
    torch.zeros(..., device="cuda"), .to, .cuda()    the same call with device="cpu"
    torch.cuda.get/set_rng_state, manual_seed,       the CPU's default generator: dropout on CPU tensors draws from it, so
      default_generators, _lazy_call                 Megatron's tracker forks and restores the numbers that are really used
    streams, events, empty_cache                     torch.cpu's empty versions; ranges for a profiler (`nvtx`) are ignored
    torch.cuda.synchronize()                         `posted`: it waits for all that this rank has posted
    all-to-all with its sizes in tensors             the same with numbers: from a GPU Megatron would have fetched them as such
    Tensor.type()                                    "torch.cuda.FloatTensor", which gradient clipping and optimizers insist on

Functions are replaced where they are looked up; a `TorchFunctionMode` would do the same, but it is consulted on every
operation (which doubles the cost of a small one) and only in the thread that entered it, while backward may run in another.
`torch.cuda.is_available()` keeps saying no: nothing may take the stand-in for a GPU.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch._dynamo  # Megatron's import loads it; its tables must be made of torch's own functions, before they are replaced

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.testbed.posted import LONGEST_S, PostedWorks, Synchronize
from megatron_lynx.testbed.stand_in import StandIn, ignore, replace

CPU = torch.device("cpu")

SYNCHRONIZE_S = "TESTBED_SYNCHRONIZE_S"
"""The environment variable with the seconds after which a synchronisation is taken for a hang; 0: it waits for nothing."""

FACTORIES = (
    *("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "linspace", "eye"),
    *("rand", "randn", "randint", "randperm"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "empty_strided"),
)


def stand_in_for_cuda() -> StandIn:
    """Let the CPU answer for CUDA in this process, until the returned handle is removed.

    A second call while one is active changes nothing, and its handle removes nothing.

    Raises:
        ConfigError: this machine has a working GPU, which is then the one to use.
    """
    if torch.cuda.is_available():
        found = f"a GPU ({torch.cuda.get_device_name()})"
        raise ConfigError(
            "The CUDA stand-in is for machines without a GPU.",
            [Problem("torch.cuda.is_available()", found, "no GPU", "run on the GPU, or hide it with CUDA_VISIBLE_DEVICES=''")],
        )
    undo = ExitStack()
    if not isinstance(torch.cuda.default_generators, OneGenerator):
        answer_device_calls(undo)
        answer_synchronize(undo)
        answer_random_numbers(undo)
        answer_placement(undo)
        answer_exchanges(undo)
    return StandIn(undo)


class OneGenerator(tuple[torch.Generator, ...]):
    """`torch.cuda.default_generators` of a machine whose only device is the CPU: any index finds its generator."""

    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator


def answer_device_calls(undo: ExitStack) -> None:
    """Answer calls that ask for the current device, its streams and events, or wait for it."""
    answers = {
        "current_device": lambda: CPU,
        "device": OnlyDevice,
        "is_initialized": lambda: True,
        "set_device": ignore,
        "empty_cache": ignore,
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


def answer_synchronize(undo: ExitStack) -> None:
    """A synchronisation ends when this rank's messages and collectives have ended."""
    works = PostedWorks()
    works.watch(undo)
    replace(undo, torch.cuda, "synchronize", Synchronize(works, float(os.environ.get(SYNCHRONIZE_S, LONGEST_S))))


def answer_random_numbers(undo: ExitStack) -> None:
    """CUDA's generator is the CPU's. (`_lazy_call` runs its callback at once because `is_initialized` says yes.)"""
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
    # A fork of the tracker warns when the CPU's numbers moved while it was open. Here they must.
    tracker_log = logging.getLogger("megatron.core.tensor_parallel.random")
    tracker_log.addFilter(is_not_about_cpu_state)
    undo.callback(tracker_log.removeFilter, is_not_about_cpu_state)


def answer_placement(undo: ExitStack) -> None:
    """Whatever is to be put on CUDA stays on the CPU."""
    for name in FACTORIES:
        replace(undo, torch, name, with_device_on_cpu(getattr(torch, name)))
    replace(undo, torch.Tensor, "to", with_device_on_cpu(torch.Tensor.to))
    replace(undo, torch.Tensor, "type", with_cuda_type_name(torch.Tensor.type))
    replace(undo, torch.Tensor, "cuda", stay)
    replace(undo, torch.nn.Module, "cuda", stay)


def answer_exchanges(undo: ExitStack) -> None:
    """Answer the all-to-all that dispatches tokens to experts."""
    original = torch.distributed.all_to_all_single

    @functools.wraps(original)
    def all_to_all_single(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        def numbers(value: Any) -> Any:
            return value.tolist() if isinstance(value, torch.Tensor) else value

        return original(output, input, *map(numbers, args), **{name: numbers(value) for name, value in kwargs.items()})

    replace(undo, torch.distributed, "all_to_all_single", all_to_all_single)


def with_device_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with the CPU in place of CUDA (as `device=`, or as the first argument of `Tensor.to`), and with plain
    memory where page-locked memory is asked for."""

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
    """`Tensor.type`: asked for the name it says `torch.cuda.FloatTensor`; a conversion is passed on."""

    @functools.wraps(original)
    def type_(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return f"torch.cuda.{original(tensor).split('.')[-1]}"  # a subclass of Tensor comes here twice
        return original(tensor, dtype, non_blocking, **kwargs)

    return type_


def is_cuda(place: Any) -> bool:
    """Whether a `device` argument names CUDA."""
    if isinstance(place, str):
        return place.startswith("cuda")
    return isinstance(place, torch.device) and place.type == "cuda"


class OnlyDevice(nullcontext[None]):
    """`torch.cuda.device`: to be on the device that there is."""

    def __init__(self, device: Any) -> None:
        super().__init__()


class CpuStream(torch.cpu.Stream):
    """`torch.cuda.Stream`: torch.cpu's, which has nothing to wait for, with the arguments and waits of CUDA's."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        super().__init__(priority)

    def synchronize(self) -> None:
        """Everything on a CPU stream is done when the call that did it returns."""

    def record_event(self) -> CpuEvent:  # type: ignore[override]
        return CpuEvent()


class CpuEvent(torch.cpu.Event):
    """`torch.cuda.Event`, always reached."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        super().__init__()


def is_not_about_cpu_state(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("CPU RNG state changed")


def stay(holder: Any, *args: Any, **kwargs: Any) -> Any:
    """`.cuda()` of a tensor or module that is where it should be."""
    return holder
