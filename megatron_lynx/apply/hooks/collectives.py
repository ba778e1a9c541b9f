"""The tensor-parallel windows of local layers.

Replaces              `dist_all_gather_func` and `dist_reduce_scatter_func` in `megatron.core.tensor_parallel.mappings` and
                      `.layers` (bound there at import), and `torch.distributed.all_reduce`.
Why                   each of them is a stretch in which compute waits for the tensor-parallel group.
Calls the original    once per call; in a window asynchronously, and waited for here where the caller wanted to wait.
Holds                 the tensor-parallel group.
Passes through when   nothing runs in the window, the group is another one, or the call is made outside a half and its
                      backward (LM head, loss, data parallel), or is for the largest of all: FP8's amaxes. A gather that a frame
                      has started already is not started again, only waited for; of a gradient what was gathered is
                      returned (`_gather_along_first_dim` of `mappings`, which would make a tensor for it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

from megatron_lynx.apply.hook import Claim
from megatron_lynx.runtime.engine import Engine


def claims(engine: Engine, group: Any) -> Iterator[Claim]:
    from megatron.core.tensor_parallel import layers, mappings

    def in_window(original: Any) -> Any:
        @wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("group") is not group or not engine.in_half or _takes_largest(*args, **kwargs):
                return original(*args, **kwargs)
            return issued(engine.waits.window(), original, *args, **kwargs)

        return collective

    def served_or_in_window(original: Any) -> Any:
        windowed = in_window(original)

        @wraps(original)
        def gather(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            work = engine.waits.served(output) if engine.in_half else None
            if work is None:
                waited_for = windowed(output, *args, **kwargs)
                if waited_for is None:
                    engine.gathered(output)
                return waited_for
            return waited(work, kwargs.get("async_op"))

        return gather

    def served_gradient(original: Any) -> Any:
        @wraps(original)
        def gather(tensor: torch.Tensor, of_group: Any, *args: Any, **kwargs: Any) -> Any:
            begun = engine.waits.gathered_gradient(tensor) if of_group is group and engine.in_half else None
            if begun is None:
                return original(tensor, of_group, *args, **kwargs)
            whole, work = begun
            work.wait()
            return whole

        return gather

    yield Claim(mappings, "_gather_along_first_dim", served_gradient, "gathers a gradient that may be under way already")
    for module in (mappings, layers):
        yield Claim(module, "dist_reduce_scatter_func", in_window, "scatters a half's output or gradient")
    yield Claim(mappings, "dist_all_gather_func", in_window, "gathers a gradient")
    yield Claim(layers, "dist_all_gather_func", served_or_in_window, "gathers a half's input")
    yield Claim(torch.distributed, "all_reduce", in_window, "reduces a half's output or gradient")


def _takes_largest(tensor: Any, op: Any = None, *args: Any, **kwargs: Any) -> bool:
    return isinstance(op, type(torch.distributed.ReduceOp.MAX)) and op == torch.distributed.ReduceOp.MAX


def issued(window: Callable[[Any], Any] | None, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Issues a collective; its `Work` becomes the window, if there is one, and is waited for here if the caller wanted that."""
    if window is None:
        return collective(*args, **kwargs)
    return waited(window(collective(*args, **{**kwargs, "async_op": True})), kwargs.get("async_op"))


def waited(work: Any, async_op: bool | None) -> Any:
    """What a caller gets that asked for a `Work`, or to wait."""
    if async_op:
        return work
    work.wait()
    return None
