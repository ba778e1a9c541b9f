"""Deferring weight gradients of local layers.

Replaces              `wgrad_gemm_accum_fp32` and `wgrad_gemm_accum_fp16` of `fused_weight_gradient_mlp_cuda`, the extension that
                      adds a weight gradient to `main_grad` where it lies.
Why                   nothing but the update waits for a weight gradient: computed in a later wait it hides that wait.
Calls the original    once per call, now or later, with the same operands; for one parameter in the order of the calls.
Holds                 the weights of linears that defer; what is pending holds the operands, detached from the graph.
Passes through when   the call is not the backward of such a linear, told by `main_grad`; or nothing may be left for later (the
                      last micro-batch with overlapped reduction, a backward outside of Megatron's schedules). Then what is
                      pending of the linear is computed before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import wraps
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils.weak import WeakIdKeyDictionary

from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.linears import LinearOf
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.pending import Linear


def claims(engine: Engine, linears: Mapping[LinearOf, Module]) -> Iterator[Claim]:
    """`linears`: those that defer."""
    from megatron.core.tensor_parallel import layers

    of_half: dict[FrameKey, dict[LinearOf, Module]] = defaultdict(dict)
    for linear, module in linears.items():
        of_half[linear.frame][linear] = module
    owners = {half: _Owners(of) for half, of in of_half.items()}

    def hooked(original: Any) -> Any:
        @wraps(original)
        def accumulate(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
            gradients = engine.weight_gradients
            half = gradients.backward_of
            linear = owners[half].of(main_grad) if half in owners else None
            if linear is None:
                original(total_input, grad_output, main_grad)
            elif gradients.puts_off(linear):
                operands = total_input.detach(), grad_output.detach()
                gradients.put_off(linear, operands, lambda: original(*operands, main_grad))
            else:
                gradients.catch_up(linear)
                original(total_input, grad_output, main_grad)

        return accumulate

    for name in ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"):
        yield Claim(layers.fused_weight_gradient_mlp_cuda, name, hooked, "adds a weight gradient to where it lies")


class _Owners:
    """Which linear of a half has a gradient. Remembered, because a half has as many linears as a rank has experts."""

    def __init__(self, linears: Mapping[LinearOf, Module]) -> None:
        self._linears = linears
        self._known = WeakIdKeyDictionary()

    def of(self, main_grad: Tensor) -> Linear | None:
        if main_grad not in self._known:
            having = (of for of, module in self._linears.items() if getattr(module.weight, "main_grad", None) is main_grad)
            self._known[main_grad] = next((of.linear for of in having), None)
        linear: Linear | None = self._known[main_grad]
        return linear
