"""Deferring weight gradients of Transformer Engine's layers.

Replaces              `wgrad_store` on each linear that defers: what its backward asks whether to compute the weight gradient now,
                      and what it hands the operands to if not. Transformer Engine made it for `delay_wgrad_compute`.
Why                   nothing but the update waits for a weight gradient: computed in a later wait it hides that wait.
Calls the original    never; what it is asked beside that, it answers. It is switched off under a plan.
Holds                 the linear; what is pending holds operands, in FP8 their bytes and scales. A grouped linear hands on lists,
                      of all experts at once, and where their gradients are added up.
Passes through when   the backward is not one that defers (the last micro-batch with overlapped reduction, a backward outside of
                      Megatron's schedules): the linear is told to compute now, and what is pending of it is computed before.
                      A bias whose gradient the same GEMM makes gets it when that runs, added where autograd would have added it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.linears import LinearOf
from megatron_lynx.nest import map_nest
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.saved import memory_of
from megatron_lynx.runtime.weight_gradients import WeightGradients


def claims(engine: Engine, linears: Mapping[LinearOf, Module]) -> Iterator[Claim]:
    """`linears`: those that defer."""
    for linear, module in linears.items():

        def hooked(original: Any, linear: LinearOf = linear, module: Module = module) -> Any:
            return _Store(original, engine.weight_gradients, linear, module)

        yield Claim(module, "wgrad_store", hooked, "is asked whether to compute a weight gradient now", linear.place)


class _Store:
    """Takes the place of one linear's `WeightGradStore`."""

    def __init__(self, original: Any, gradients: WeightGradients, linear: LinearOf, module: Any) -> None:
        self._original = original
        self._gradients = gradients
        self._half, self._linear = linear.frame, linear.linear
        self._module = module

    def delay_wgrad_compute(self) -> bool:
        """In this linear's backward: whether its weight gradient is left for later. In a forward always: since 2.15 the store
        reaches backward only then."""
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
            self._module.bias.grad = torch.zeros_like(self._module.bias)  # DDP's hook asks for one; adding it changes nothing

    @property
    def _makes_bias_gradient(self) -> bool:
        """Whether the GEMM of the weight gradient also makes that of a bias. In FP8 it does not."""
        return bool(self._module.apply_bias and not self._module.gemm_bias_unfused_add)

    def _add_to_bias(self, gradient: Tensor | None) -> None:
        if gradient is not None and gradient.numel():
            bias = self._module.bias
            bias.main_grad.add_(gradient.to(bias.dtype).view_as(bias))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _detached(operand: Tensor) -> Tensor:
    return operand.detach() if type(operand) is Tensor else operand
