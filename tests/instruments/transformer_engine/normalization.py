"""LayerNorm and RMSNorm. Statistics are fp32, one per row, as the kernels save them for backward."""

from __future__ import annotations

from typing import Any

import torch

from tests.instruments.transformer_engine.gemm import torch_type
from tests.instruments.transformer_engine.result import delivered, in_fp32

__all__ = ["layernorm_bwd", "layernorm_fwd", "rmsnorm_bwd", "rmsnorm_bwd_add", "rmsnorm_fwd"]


def layernorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: Any,
    quantizer: Any,
    out_dtype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """(normalised, mean, 1 / standard deviation)"""
    x = in_fp32(input)
    mean = x.mean(-1, keepdim=True)
    rsigma = ((x - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    y = (x - mean) * rsigma * gain(weight, zero_centered_gamma)
    if bias is not None:
        y += in_fp32(bias)
    return delivered(y, out, quantizer, torch_type(out_dtype)), mean.flatten(), rsigma.flatten()


def rmsnorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: Any,
    quantizer: Any,
    out_dtype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, None, torch.Tensor]:
    """(normalised, nothing, 1 / root mean square)"""
    x = in_fp32(input)
    rsigma = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = x * rsigma * gain(weight, zero_centered_gamma)
    return delivered(y, out, quantizer, torch_type(out_dtype)), None, rsigma.flatten()


def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of input, weight and bias."""
    dy, rows = in_fp32(dz), (*x.shape[:-1], 1)
    normalised = (in_fp32(x) - mu.view(rows)) * rsigma.view(rows)
    inner = dy * gain(gamma, zero_centered_gamma)
    dx = inner - inner.mean(-1, keepdim=True) - normalised * (inner * normalised).mean(-1, keepdim=True)
    return (dx * rsigma.view(rows)).to(x.dtype), over_rows(dy * normalised).to(gamma.dtype), over_rows(dy).to(gamma.dtype)


def rmsnorm_bwd(
    dz: torch.Tensor, x: torch.Tensor, rsigma: torch.Tensor, gamma: torch.Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of input and weight."""
    dx, dgamma = rmsnorm_gradients(dz, x, rsigma, gamma, zero_centered_gamma)
    return dx.to(x.dtype), dgamma


def rmsnorm_bwd_add(
    dz: torch.Tensor,
    x: torch.Tensor,
    add: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rmsnorm_bwd`, with another gradient added to the input's."""
    dx, dgamma = rmsnorm_gradients(dz, x, rsigma, gamma, zero_centered_gamma)
    return (dx + in_fp32(add)).to(x.dtype), dgamma


def rmsnorm_gradients(
    dz: torch.Tensor, x: torch.Tensor, rsigma: torch.Tensor, gamma: torch.Tensor, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dy, rows = in_fp32(dz), (*x.shape[:-1], 1)
    normalised = in_fp32(x) * rsigma.view(rows)
    inner = dy * gain(gamma, zero_centered)
    dx = (inner - normalised * (inner * normalised).mean(-1, keepdim=True)) * rsigma.view(rows)
    return dx, over_rows(dy * normalised).to(gamma.dtype)


def gain(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    """What a normalised row is multiplied by: the weight, or one more than it."""
    return in_fp32(weight) + 1 if zero_centered else in_fp32(weight)


def over_rows(values: torch.Tensor) -> torch.Tensor:
    return values.flatten(0, -2).sum(0)
