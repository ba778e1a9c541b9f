"""Answers what Transformer Engine's Python asks about the GPU, and only to it: nothing else may take the CPU for a GPU.

asked                                     answered, to files of transformer_engine
torch.cuda.is_available()                 yes: its modules refuse to be built otherwise
tensor.is_cuda                            yes
device properties and capability          those of a Hopper, which has FP8, or another's
NVTX ranges                               nothing
gathers that go out together              one by one: gloo has no other way
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from megatron_lynx.testbed.cpu_device import with_device_on_cpu
from tests.instruments.replacing import replace

CAPABILITY = tuple(int(part) for part in os.environ.get("TESTBED_CAPABILITY", "9.0").split("."))
"""A Hopper's, unless TESTBED_CAPABILITY names another: MXFP8 is Blackwell's (10.0)."""
PROPERTIES = SimpleNamespace(
    name="CPU", major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=0, multi_processor_count=1, shared_memory_per_block_optin=0
)


def answer_transformer_engine(undo: ExitStack) -> None:
    """Answer its questions; those of others go where they went before."""
    for name, answer in {
        "is_available": True,
        "current_device": 0,
        "is_current_stream_capturing": False,
        "get_device_properties": PROPERTIES,
        "get_device_capability": CAPABILITY,
    }.items():
        replace(undo, torch.cuda, name, told_to_transformer_engine(answer, getattr(torch.cuda, name)))
    for name, answer in {"range_push": 0, "range_pop": 0, "range": nullcontext()}.items():
        replace(undo, torch.cuda.nvtx, name, told_to_transformer_engine(answer, getattr(torch.cuda.nvtx, name)))
    manager = "_coalescing_manager"
    replace(undo, torch.distributed, manager, one_by_one(getattr(torch.distributed, manager)))
    make = with_device_on_cpu(torch.Tensor._make_wrapper_subclass)
    replace(undo, torch.Tensor, "_make_wrapper_subclass", staticmethod(make))
    is_cuda = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
    replace(undo, torch.Tensor, "is_cuda", property(lambda tensor: asked_by_transformer_engine() or is_cuda(tensor)))


class Gathers:
    """The `Work` of several gathers."""

    def __init__(self) -> None:
        self.works: list[Any] = []

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def one_by_one(original: Any) -> Any:
    """`_coalescing_manager`: what is gathered inside is under way when it ends, or over."""

    @contextmanager
    def together(gathers: Gathers, wait: bool) -> Iterator[Gathers]:
        with ExitStack() as undo:
            gather = torch.distributed.all_gather_into_tensor
            replace(
                undo,
                torch.distributed,
                "all_gather_into_tensor",
                lambda *args, **kwargs: gathers.works.append(gather(*args, **{**kwargs, "async_op": True})),
            )
            yield gathers
        if wait:
            gathers.wait()

    def manager(*args: Any, async_ops: bool = False, **kwargs: Any) -> Any:
        if not asked_by_transformer_engine():
            return original(*args, async_ops=async_ops, **kwargs)
        return together(Gathers(), not async_ops)

    return manager


def told_to_transformer_engine(answer: Any, otherwise: Any) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        return answer if asked_by_transformer_engine() else otherwise(*args, **kwargs)

    return function


def asked_by_transformer_engine() -> bool:
    """Whether the function that called this one was called from Transformer Engine's Python."""
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name.startswith("transformer_engine.")
