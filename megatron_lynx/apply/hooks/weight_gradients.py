"""Delays weight gradients.

Replaces              local layers     `wgrad_gemm_accum_fp32` and `wgrad_gemm_accum_fp16` of `fused_weight_gradient_mlp_cuda`,
                                       the extension that adds a weight gradient to `main_grad` in place
                      TE's layers      `wgrad_store` on each linear that delays: its backward asks it whether to compute the
                                       weight gradient now, else stores the operands. Made for `delay_wgrad_compute`
Why                   only the update needs a weight gradient, so it can run in a later wait.
Calls the original    local layers: once per call, now or later, with the same operands; for one parameter in the order of the
                      calls. TE's store: never for these decisions; it is disabled under a plan.
Holds                 the weights of linears that delay; pending ones keep their operands, detached from the graph, in FP8 bytes
                      and scales. A grouped linear has lists with the operands of all experts.
Passes through when   the call is not the backward of such a linear (recognised by `main_grad` in local layers); or nothing
                      may be delayed (the last micro-batch with overlapped reduction, a backward outside of Megatron's
                      schedules): then pending gradients of the linear are computed first. A bias gradient of the same GEMM is
                      added when that runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.weak import WeakIdKeyDictionary

from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.linears import LinearOf
from megatron_lynx.nest import map_nest
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.pending import Linear
from megatron_lynx.runtime.saved import memory_of
from megatron_lynx.runtime.weight_gradients import WeightGradients


def claims(engine: Engine, linears: Mapping[LinearOf, Module]) -> Iterator[Claim]:
    """`linears`: those that delay."""
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
    """Finds the linear of a `main_grad`. Cached, because a half has as many linears as a rank has experts."""

    def __init__(self, linears: Mapping[LinearOf, Module]) -> None:
        self._linears = linears
        self._known = WeakIdKeyDictionary()

    def of(self, main_grad: Tensor) -> Linear | None:
        if main_grad not in self._known:
            having = (of for of, module in self._linears.items() if getattr(module.weight, "main_grad", None) is main_grad)
            self._known[main_grad] = next((of.linear for of in having), None)
        linear: Linear | None = self._known[main_grad]
        return linear


def te_claims(engine: Engine, linears: Mapping[LinearOf, Module]) -> Iterator[Claim]:
    """`linears`: those that delay."""
    for linear, module in linears.items():

        def hooked(original: Any, linear: LinearOf = linear, module: Module = module) -> Any:
            return _Store(original, engine.weight_gradients, linear, module)

        yield Claim(module, "wgrad_store", hooked, "is asked whether to compute a weight gradient now", linear.place)


class _Store:
    """Replaces one linear's `WeightGradStore`."""

    def __init__(self, original: Any, gradients: WeightGradients, linear: LinearOf, module: Any) -> None:
        self._original = original
        self._gradients = gradients
        self._half, self._linear = linear.frame, linear.linear
        self._module = module

    def delay_wgrad_compute(self) -> bool:
        """In backward: whether the linear delays its weight gradient. In forward: True, because since 2.15 the store reaches
        backward
        only then.
        """
        if self._gradients.backward_of != self._half:
            return True
        if self._gradients.puts_off(self._linear):
            return True
        self._gradients.catch_up(self._linear)
        return False

    def put(self, tensor_list: Sequence[Any], func: Callable[..., tuple[Any, Any]]) -> None:
        operands = [map_nest(Tensor, _detached, operand) for operand in tensor_list]

        def compute() -> None:
            made = func(*operands)
            if self._makes_bias_gradient:
                self._add_to_bias(made[1])

        if self._gradients.puts_off(self._linear):
            self._gradients.put_off(self._linear, memory_of(operands[:2]), compute)
        else:
            self._gradients.catch_up(self._linear)
            compute()
        if self._makes_bias_gradient and type(operands[1]) is Tensor:
            self._module.bias.grad = torch.zeros_like(self._module.bias)  # DDP's hook needs one; adding zeros changes nothing

    @property
    def _makes_bias_gradient(self) -> bool:
        """Whether the wgrad GEMM computes the bias gradient, too. In FP8 it does not."""
        return bool(self._module.apply_bias and not self._module.gemm_bias_unfused_add)

    def _add_to_bias(self, gradient: Tensor | None) -> None:
        if gradient is not None and gradient.numel():
            bias = self._module.bias
            bias.main_grad.add_(gradient.to(bias.dtype).view_as(bias))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _detached(operand: Tensor) -> Tensor:
    return operand.detach() if type(operand) is Tensor else operand
