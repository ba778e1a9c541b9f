"""A loss over a large vocabulary that computes logits, loss and gradients for a piece of the tokens at a time.

    rows of the input     0 ........ k ........ 2k ........ 3k

    forward    [1]        logits, loss
               [2]                   logits, loss
                          ...                              saved: input and labels; logits are dropped
    backward   [3]        logits and loss again, gradient of the logits ──> of these rows of the input
               [4]                                                      └─> of the weight: a summand

Backward needs the gradients of the losses (loss mask), so logits are computed twice: one GEMM more. Each row's loss and gradient
depend on that row only; the weight's gradient is summed in another order than without pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LossOfRows = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From rows of the input (S, B, H), the weight (V, H) and labels (B, S) to losses (B, S). Rows must not depend on each other."""


def loss_in_pieces(
    input_SBH: Tensor, weight_VH: Tensor, labels_BS: Tensor, pieces: int, loss_of: LossOfRows, *, adds_in_place: bool
) -> Tensor:
    """Return the losses (B, S) of all tokens, computed in `pieces` of the sequence; the last one may be shorter.

    `adds_in_place`: the backward of `loss_of` adds the weight's gradient to `main_grad` itself, and returns a dummy.
    """
    losses: Tensor = _LossInPieces.apply(input_SBH, weight_VH, labels_BS, pieces, loss_of, adds_in_place)  # type: ignore[no-untyped-call]
    return losses


class _LossInPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_SBH: Tensor,
        weight_VH: Tensor,
        labels_BS: Tensor,
        pieces: int,
        loss_of: LossOfRows,
        adds_in_place: bool,
    ) -> Tensor:
        ctx.save_for_backward(input_SBH, labels_BS)
        ctx.weight = weight_VH  # saved tensors lose a parameter's identity under hooks (rule R11)
        ctx.loss_of, ctx.adds_in_place = loss_of, adds_in_place
        ctx.rows = -(-len(input_SBH) // pieces)
        rows = zip(input_SBH.split(ctx.rows), labels_BS.split(ctx.rows, dim=1), strict=True)
        return torch.cat([loss_of(part, weight_VH, labels) for part, labels in rows], dim=1)  # [1] [2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BS: Tensor) -> tuple[Tensor | None, ...]:
        input_SBH, labels_BS = ctx.saved_tensors
        input_gradient, total = torch.empty_like(input_SBH), None
        split = (input_SBH.split(ctx.rows), labels_BS.split(ctx.rows, dim=1), gradient_BS.split(ctx.rows, dim=1))
        for part, labels, gradient, result in zip(*split, input_gradient.split(ctx.rows), strict=True):
            with torch.enable_grad():
                leaf = part.detach().requires_grad_()
                losses = ctx.loss_of(leaf, ctx.weight, labels)
            if ctx.adds_in_place:
                total = None  # free the previous dummy before the next one is made
            of_rows, of_weight = torch.autograd.grad(losses, (leaf, ctx.weight), gradient, allow_unused=True)
            result.copy_(of_rows)  # [3]
            if of_weight is None or ctx.adds_in_place:
                total = of_weight
            else:
                total = of_weight.float() if total is None else total.add_(of_weight)  # [4]
            del losses, of_rows, of_weight
        return input_gradient, None if total is None else total.to(ctx.weight.dtype), None, None, None, None
