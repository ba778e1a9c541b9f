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

from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.linears import LinearOf
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.pending import Linear
from megatron_lynx.runtime.weight_gradients import WeightGradients


def claims(engine: Engine, linears: Mapping[LinearOf, Module]) -> Iterator[Claim]:
    """`linears`: those that defer."""
    from megatron.core.tensor_parallel import layers

    of_half: dict[FrameKey, list[tuple[LinearOf, Module]]] = defaultdict(list)
    for linear, module in linears.items():
        of_half[linear.frame].append((linear, module))

    def hooked(original: Any) -> Any:
        @wraps(original)
        def accumulate(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
            gradients = engine.weight_gradients
            linear = _whose(gradients, of_half, main_grad)
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


def _whose(
    gradients: WeightGradients, of_half: Mapping[FrameKey, list[tuple[LinearOf, Module]]], main_grad: Tensor
) -> Linear | None:
    """Of the half whose backward runs, the linear that has this gradient."""
    half = gradients.backward_of
    if half is None:
        return None
    whose = (of.linear for of, module in of_half.get(half, ()) if getattr(module.weight, "main_grad", None) is main_grad)
    return next(whose, None)
