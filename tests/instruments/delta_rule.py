"""Kernels of flash-linear-attention that gated delta nets call, in torch. Each saves the tensors that the kernel saves.

    causal_conv1d             its input, which may be a view
    l2norm                    its result, and the inverse length of each row
    chunk_gated_delta_rule    queries, keys, values, summed decay, step, and the solved scores of each chunk

Backward differentiates Megatron's code for deterministic runs. Shapes: b sequences, t tokens, h heads, c tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64


def _rule(*given: Tensor) -> Tensor:
    from megatron.core.ssm import gated_delta_net

    queries, keys, values, decay, step = given
    function = gated_delta_net.torch_chunk_gated_delta_rule
    result: Tensor = function(queries, keys, values, g=decay, beta=step)[0]
    return result


def _convolved(x_BTD: Tensor, weight_DW: Tensor) -> Tensor:
    width, rows = weight_DW.shape[1], x_BTD.shape[1]
    mixed = F.conv1d(x_BTD.mT, weight_DW[:, None], padding=width - 1, groups=len(weight_DW))[..., :rows]
    return F.silu(mixed).mT.contiguous()


def _gradients(function: Any, given: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, ...]:
    again = [one.detach().requires_grad_() for one in given]
    with torch.enable_grad():
        result = function(*again)
    gradients: tuple[Tensor, ...] = torch.autograd.grad(result, again, gradient)
    return gradients


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _convolved(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _gradients(_convolved, ctx.saved_tensors, gradient)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        inverse = (x.float().square().sum(-1) + 1e-6).rsqrt()
        normed = (x * inverse[..., None]).to(x.dtype)
        ctx.save_for_backward(normed, inverse)
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        normed, inverse = ctx.saved_tensors
        along = (gradient * normed).sum(-1, keepdim=True)
        return (gradient - along * normed) * inverse[..., None]


def _chunks(given_BTH: Tensor) -> Tensor:
    padded = F.pad(given_BTH, (0, 0, 0, -given_BTH.shape[1] % CHUNK))
    return padded.reshape(len(given_BTH), -1, CHUNK, given_BTH.shape[2])


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, decay: Tensor, step: Tensor) -> Tensor:
        summed = _chunks(decay).cumsum(2).flatten(1, 2)[:, : decay.shape[1]].contiguous()
        scores = keys.new_zeros(*keys.shape[:3], CHUNK)  # only their size matters
        ctx.save_for_backward(queries, keys, values, summed, step, scores)
        return _rule(queries, keys, values, decay, step)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        queries, keys, values, summed, step, _ = ctx.saved_tensors
        decay = torch.diff(F.pad(_chunks(summed), (0, 0, 1, 0)), dim=2).flatten(1, 2)[:, : summed.shape[1]]
        return _gradients(_rule, (queries, keys, values, decay, step), gradient)


def causal_conv1d(x: Tensor, weight: Tensor, bias: None, activation: str, **_: Any) -> tuple[Tensor, None]:
    assert activation in ("silu", "swish")
    return _Convolution.apply(x, weight), None  # type: ignore[no-untyped-call]


def l2norm(x: Tensor) -> Tensor:
    normed: Tensor = _Norm.apply(x)  # type: ignore[no-untyped-call]
    return normed


def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
    return _Rule.apply(q, k, v, g, beta), None  # type: ignore[no-untyped-call]
