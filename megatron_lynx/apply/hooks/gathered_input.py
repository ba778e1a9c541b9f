"""Gathering a replayed GEMM's input once (sequence parallelism).

Replaces              `get_global_memory_buffer` in `megatron.core.tensor_parallel.layers`.
Why                   Megatron gathers into one global buffer; a frame's gathered input must outlive it, and serves the
                      replay and then the weight gradient.
Calls the original    whenever no frame holds the input asked for.
Holds                 nothing.
Passes through when   the present site or backward has no gathered input.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.apply.hook import Claim
from megatron_lynx.runtime.engine import Engine


class _OneTensor:
    """A memory buffer that holds just the tensor asked for."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_tensor(self, tensor_shape: Any, dtype: torch.dtype, name: str, *args: Any, **kwargs: Any) -> Tensor:
        assert tuple(tensor_shape) == tuple(self._tensor.shape), (
            f"{name}: {tuple(tensor_shape)} asked, {tuple(self._tensor.shape)} held"
        )
        assert dtype == self._tensor.dtype, f"{name}: {dtype} asked, {self._tensor.dtype} held"
        return self._tensor


def claims(engine: Engine) -> Iterator[Claim]:
    from megatron.core.tensor_parallel import layers

    def hooked(original: Any) -> Any:
        @wraps(original)
        def get_global_memory_buffer() -> Any:
            gathered = engine.gathered_input() if engine.in_half else None
            return original() if gathered is None else _OneTensor(gathered)

        return get_global_memory_buffer

    yield Claim(layers, "get_global_memory_buffer", hooked, "lends the buffer for a gathered input")


def start_gather(group: Any) -> Any:
    """An all-gather along the first dimension into a new buffer: `tensor [s/t, b, h] -> (buffer [s, b, h], Work)`."""

    def gather(tensor: Tensor) -> tuple[Tensor, Any]:
        source = tensor.contiguous()
        buffer = source.new_empty((source.size(0) * group.size(), *source.shape[1:]))
        return buffer, torch.distributed.all_gather_into_tensor(buffer, source, group=group, async_op=True)

    return gather
