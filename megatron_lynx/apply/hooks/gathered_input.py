"""The buffer of a linear's gathered input (sequence parallelism).

Replaces              `get_global_memory_buffer` in `megatron.core.tensor_parallel.layers`.
Why                   Megatron gathers into one global buffer. The input of a recomputed GEMM is gathered once and used by the
                      recomputation and then by the weight gradient, so it must outlive that buffer. A delayed weight gradient,
                      and a kept gathered input, must not be overwritten by the next gather.
Calls the original    unless a frame has the gathered input; if a weight gradient will be delayed, or the gathered input is
                      kept, only for the shape of a new buffer.
Holds                 which linears that gather their input delay.
Passes through when   the present site or backward has no gathered input, and its weight gradient is computed at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.hooks.weight_gradients import LinearOf
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.pending import Linear


def claims(engine: Engine, linears: Iterable[LinearOf] = ()) -> Iterator[Claim]:
    from megatron.core.tensor_parallel import layers

    puts_off = _puts_off(engine, linears)

    def hooked(original: Any) -> Any:
        @wraps(original)
        def get_global_memory_buffer() -> Any:
            gathered = engine.gathered_input() if engine.in_half else None
            if gathered is not None:
                return SimpleNamespace(get_tensor=partial(_held, gathered))
            shared = original()
            if puts_off() or engine.owns_gathered:
                return SimpleNamespace(get_tensor=lambda *args, **kwargs: torch.empty_like(shared.get_tensor(*args, **kwargs)))
            return shared

        return get_global_memory_buffer

    yield Claim(layers, "get_global_memory_buffer", hooked, "lends the buffer for a gathered input")


def _held(gathered: Tensor, tensor_shape: Any, dtype: torch.dtype, name: str, *args: Any, **kwargs: Any) -> Tensor:
    asked, held = (tuple(tensor_shape), dtype), (tuple(gathered.shape), gathered.dtype)
    assert asked == held, f"{name}: {asked} asked, {held} held"
    return gathered


def _puts_off(engine: Engine, linears: Iterable[LinearOf]) -> Callable[[], bool]:
    """Whether the present gather may feed a delayed weight gradient. In backward only linears that are not row-parallel gather
    their input. Latent attention has several, which cannot be distinguished here: if one of them delays, none uses the global
    buffer."""
    of_half: dict[FrameKey, list[Linear]] = defaultdict(list)
    for linear in linears:
        if linear.role != "row_parallel":
            of_half[linear.frame].append(linear.linear)

    def puts_off() -> bool:
        half = engine.weight_gradients.backward_of
        return half is not None and any(map(engine.weight_gradients.puts_off, of_half.get(half, ())))

    return puts_off


def start_gather(group: Any) -> Any:
    """Make an asynchronous all-gather along the first dimension: `tensor [s/t, b, h] -> (buffer [s, b, h], Work)`."""

    def gather(tensor: Tensor) -> tuple[Tensor, Any]:
        source = tensor.contiguous()
        buffer = source.new_empty((source.size(0) * group.size(), *source.shape[1:]))
        return buffer, torch.distributed.all_gather_into_tensor(buffer, source, group=group, async_op=True)

    return gather
