"""Bytes that operators read and write as they run: of each, what it is given and what it makes; views move nothing.

Three operators are two kernels each on CUDA: a part's gradient is cleared and copied into, what is masked is
copied first where it is not masked in place, and softmax's backward first multiplies its gradient with its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MAKES_NOTHING = {"aten.empty_like.default", "aten.new_empty_strided.default", "aten.empty.memory_format"}
SLICED_BACK = "aten.slice_backward.default"
MASKED = "aten.masked_fill.Scalar"
SOFTMAX_BACK = "aten._softmax_backward_data.default"


class Traffic(TorchDispatchMode):
    """Every kernel's bytes, by the operator's name."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function.is_view or str(function) in MAKES_NOTHING:
            return made
        read, written = _bytes((args, kwargs)), _bytes(made)
        if str(function) == SLICED_BACK:  # all is cleared, then a part is copied in
            self.kernels += [("clear", written), ("copy", 2 * read)] if read else [("clear", written)]
        elif str(function) == MASKED:
            self.kernels += [("copy", 2 * written), (MASKED, read + written)]
        elif str(function) == SOFTMAX_BACK:
            self.kernels += [("multiply", read + written), (SOFTMAX_BACK, read + written)]
        else:
            self.kernels.append((str(function), read + written))
        return made


def passes(function: Callable[..., torch.Tensor], *given: torch.Tensor) -> tuple[list[int], list[int]]:
    """Forward and backward. Gradients of one-dimensional parameters, which are sums over all rows, are left out."""
    with Traffic() as forward:
        made = function(*given)
    gradient = torch.empty_like(made)
    with Traffic() as backward:
        torch.autograd.grad(made, given, gradient)
    return _sizes(forward), [size for name, size in backward.kernels if not name.startswith("aten.sum")]


def _sizes(traffic: Traffic) -> list[int]:
    return [size for _, size in traffic.kernels]


def _bytes(nest: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor))
