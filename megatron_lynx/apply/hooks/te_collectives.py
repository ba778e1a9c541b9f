"""The tensor-parallel windows of Transformer Engine's layers.

Replaces              `gather_along_first_dim` and `reduce_scatter_along_first_dim` as bound in `module.base`, `module.linear` and
                      `module.layernorm_linear` of `transformer_engine.pytorch`. Its `allreduce` ends in
                      `torch.distributed.all_reduce`, which `collectives` holds.
Why                   each of them is a stretch in which compute waits for the tensor-parallel group.
                        forward    the gather of a norm's output, the scatter or reduction behind a row-parallel GEMM
                        backward   the gather of a row-parallel GEMM's gradient (`base`); what the gather of the input and the
                                   scatter or reduction of its gradient take beyond the GEMMs that stock hides them behind
Calls the original    once per call; in a window asynchronously, and waited for here where the caller wanted to wait.
Holds                 the tensor-parallel group.
Passes through when   nothing runs in the window, the group is another one, or the call is made outside a half and its
                      backward. A gather of a linear's input, or of a gradient, that a frame has started already is not started
                      again, only waited for; the caller gets an alias of the input, which it empties when it has used it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

from torch import Tensor

from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.hooks.collectives import waited
from megatron_lynx.apply.transformer_engine.fp8 import as_alias, in_fp8_itself, with_bytes
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.run import DONE


def claims(engine: Engine, group: Any) -> Iterator[Claim]:
    from transformer_engine.pytorch.module import base, layernorm_linear, linear

    def in_window(original: Any) -> Any:
        @wraps(original)
        def collective(tensor: Tensor, tp_group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
            if tp_group is not group or not engine.in_half:
                return original(tensor, tp_group, async_op, **kwargs)
            window = engine.waits.window()
            if window is None:
                return original(tensor, tp_group, async_op, **kwargs)
            output, work = original(tensor, tp_group, True, **kwargs)
            return output, waited(window(work or DONE), async_op)  # waited for there: FP8's bytes that are wanted by columns

        return collective

    def served_or_in_window(original: Any) -> Any:
        windowed = in_window(original)

        @wraps(original)
        def gather(tensor: Tensor, process_group: Any, async_op: bool = False, **kwargs: Any) -> Any:
            gathered = engine.waits.gathered_input() if process_group is group and engine.in_half else None
            if gathered is None:
                whole, work = windowed(tensor, process_group, async_op, **kwargs)
                if process_group is group and work is None and engine.owns_gathered:
                    engine.gathered(as_alias(whole) if in_fp8_itself(whole) else whole)
                return whole, work
            return _of_kind(tensor, gathered), waited(engine.waits.served(gathered), async_op)

        return gather

    def served_gradient(original: Any) -> Any:
        windowed = in_window(original)

        @wraps(original)
        def gather(tensor: Any, process_group: Any, async_op: bool = False, **kwargs: Any) -> Any:
            of_half = process_group is group and engine.in_half and not kwargs and isinstance(tensor, Tensor)
            begun = engine.waits.gathered_gradient(tensor) if of_half else None
            if begun is None:
                return windowed(tensor, process_group, async_op, **kwargs)
            return begun[0], waited(begun[1], async_op)

        return gather

    for module in (linear, layernorm_linear):
        yield Claim(module, "reduce_scatter_along_first_dim", in_window, "scatters a half's output or gradient")
    yield Claim(base, "gather_along_first_dim", served_gradient, "gathers a gradient")
    for module in (linear, layernorm_linear):
        yield Claim(module, "gather_along_first_dim", served_or_in_window, "gathers a linear's input")


def _of_kind(tensor: Any, gathered: Any) -> Any:
    """An alias of what was gathered: of `tensor`, which is the rank's part, or of its bytes in FP8."""
    if in_fp8_itself(gathered):
        return as_alias(gathered)
    return gathered.detach() if isinstance(tensor, Tensor) else with_bytes(tensor, gathered.detach())
