"""The kernels of a Mamba layer in torch, for a machine without a GPU: those of the package `mamba_ssm` that Megatron calls.

    in_proj ──> mamba_split_conv1d_scan_combined: split, convolve, scan, gate ──> RMSNorm ──> out_proj
                stood in for                                                      stood in for

The scan is written as what it amounts to: of head h, row l of the result is the sum over rows s up to it of

    (C_l . B_s)  exp(A (t_s+1 + ... + t_l))  t_s x_s         t: seconds that softplus makes of the layer's dt

and D x_l beside it. Scan and norm save what the kernels save: their arguments, the result before the gate, and an inverse per
group of columns; backward differentiates these formulas. Shapes: b sequences, l or s rows, h heads of size p, g groups of heads,
n entries of a state.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional as F

from tests import instruments
from tests.instruments.replacing import replace_entry

PACKAGE = "mamba_ssm"


def stand_in_for_mamba() -> ExitStack:
    """Answer for the package until the returned stack is closed. To be in place before Megatron is imported."""
    undo = ExitStack()
    if PACKAGE not in sys.modules and importlib.util.find_spec(PACKAGE) is None:
        scan = {"mamba_split_conv1d_scan_combined": split_conv1d_scan, "mamba_chunk_scan_combined": None}
        contents: dict[str, dict[str, Any]] = {"": {}, ".ops": {}, ".ops.triton": {}, ".ops.triton.ssd_combined": scan}
        for name, values in {**contents, ".ops.triton.layernorm_gated": {"RMSNorm": RMSNorm}}.items():
            module = ModuleType(PACKAGE + name)
            module.__dict__.update(values)
            replace_entry(undo, sys.modules, module.__name__, module)
    return undo


def stand_in() -> ExitStack:
    """Answer for everything that `tests.instruments` does, and for this package: for ranks with hybrid models."""
    undo = ExitStack()
    undo.enter_context(instruments.stand_in())
    undo.enter_context(stand_in_for_mamba())
    return undo


class RMSNorm(torch.nn.Module):
    """Over groups of columns. A gate is applied before."""

    def __init__(self, size: int, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: Any) -> None:
        super().__init__()
        assert not norm_before_gate
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, given: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        gated = given if gate is None else given.float() * F.silu(gate.float())
        normed: torch.Tensor = _Norm.apply(gated, self.weight, self.eps, self.group_size)  # type: ignore[no-untyped-call]
        return normed.to(given.dtype)


def _inverse(given: torch.Tensor, eps: float, group_size: int) -> torch.Tensor:
    inverse: torch.Tensor = (given.float().unflatten(-1, (-1, group_size)).square().mean(-1, keepdim=True) + eps).rsqrt()
    return inverse


def _normed(given: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor, group_size: int) -> torch.Tensor:
    groups = given.float().unflatten(-1, (-1, group_size)) * inverse
    normed: torch.Tensor = (groups.flatten(-2) * weight).to(given.dtype)
    return normed


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor, eps: float, group_size: int) -> torch.Tensor:
        inverse = _inverse(given, eps, group_size)
        ctx.save_for_backward(given, weight, inverse)
        ctx.sizes = eps, group_size
        return _normed(given, weight, inverse, group_size)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        given, weight, _ = ctx.saved_tensors
        eps, group_size = ctx.sizes

        def normed(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return _normed(given, weight, _inverse(given, eps, group_size), group_size)

        return *_gradients(normed, (given, weight), gradient), None, None


def _gradients(function: Any, given: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    again = [one.detach().requires_grad_() for one in given]
    with torch.enable_grad():
        result = function(*again)
    gradients: tuple[torch.Tensor, ...] = torch.autograd.grad(result, again, gradient)
    return gradients


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, headdim: int, ngroups: int, *given: torch.Tensor) -> torch.Tensor:
        gated, before_gate = _split_conv1d_scan(headdim, ngroups, *given)
        ctx.save_for_backward(*given, before_gate.to(gated.dtype))
        ctx.sizes = headdim, ngroups
        return gated

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        *given, _ = ctx.saved_tensors
        return None, None, *_gradients(lambda *again: _split_conv1d_scan(*ctx.sizes, *again)[0], tuple(given), gradient)


def split_conv1d_scan(
    columns_BLD: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor,
    dt_bias_H: torch.Tensor,
    A_H: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    activation: str,
    headdim: int | None,
    ngroups: int,
    norm_before_gate: bool,
    seq_idx: Any = None,
) -> torch.Tensor:
    """`columns_BLD`: gate, x, B, C and dt side by side."""
    assert headdim is not None
    assert seq_idx is None
    given = columns_BLD, weight_DW, bias_D, dt_bias_H, A_H, D
    gated: torch.Tensor = _Scan.apply(headdim, ngroups, *given)  # type: ignore[no-untyped-call]
    return gated


def _split_conv1d_scan(
    headdim: int,
    ngroups: int,
    columns_BLD: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor,
    dt_bias_H: torch.Tensor,
    A_H: torch.Tensor,
    D: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result with its gate, and without."""
    heads = len(A_H)
    inner = heads * headdim
    gate, convolved, dt = columns_BLD.split([inner, len(weight_DW), heads], dim=-1)
    width, rows = weight_DW.shape[1], columns_BLD.shape[1]
    mixed = F.conv1d(convolved.mT, weight_DW[:, None], bias_D, padding=width - 1, groups=len(weight_DW))[..., :rows]
    state = (len(weight_DW) - inner) // (2 * ngroups)
    x, B, C = F.silu(mixed).mT.float().split([inner, ngroups * state, ngroups * state], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    seconds_BLH = F.softplus(dt.float() + dt_bias_H)
    result = _scanned(x, seconds_BLH, A_H, *(each.unflatten(-1, (ngroups, state)) for each in (B, C)))
    whole = (result + D[:, None] * x).flatten(-2)
    return (whole * F.silu(gate.float())).to(columns_BLD.dtype), whole


def _scanned(
    x_BLHP: torch.Tensor, seconds_BLH: torch.Tensor, A_H: torch.Tensor, B_BLGN: torch.Tensor, C_BLGN: torch.Tensor
) -> torch.Tensor:
    total, rows = (seconds_BLH * A_H).cumsum(1), x_BLHP.shape[1]
    later = torch.ones(rows, rows, dtype=torch.bool, device=x_BLHP.device).triu(1)
    decay_BLSH = (total[:, :, None] - total[:, None]).masked_fill(later[..., None], float("-inf")).exp()
    of_groups = torch.einsum("blgn,bsgn->blsg", C_BLGN, B_BLGN)
    weights = of_groups.repeat_interleave(len(A_H) // of_groups.shape[-1], dim=-1) * decay_BLSH
    return torch.einsum("blsh,bsh,bshp->blhp", weights, seconds_BLH, x_BLHP)
