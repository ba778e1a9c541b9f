"""Tensors in FP4: E2M1 numbers, two in a byte, with two scales each.

                     a scale for             data          scales (E4M3)                          for m x k numbers
    by rows          16 numbers of a row     m x k / 2     m, up to 128's  x  k / 16, up to 4's
    by columns       16 of a column          k x m / 2     k, up to 128's  x  m / 16, up to 4's
    2D (weights)     16 x 16 numbers         as above, a block's scale in each of its rows

    a number = E2M1  x  its block's scale  x  largest of all / (6 x 448)

By columns a quantizer may turn sixteen numbers at a time by a Hadamard matrix, whose product with itself is 1: where both
operands of a weight's gradient are turned, it is as without. Then the largest of all is that of turned numbers. Where ranks
gather, the largest of all is over the group. Rounding is to the nearest; stochastic rounding, which gradients ask for, draws from
torch's generator, as the kernels draw from the device's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["swap_first_dims"]

BLOCK, LARGEST, LARGEST_SCALE = 16, 6.0, 448.0
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""What E2M1 has, without its sign, which is the fourth bit."""
BETWEEN = (VALUES[1:] + VALUES[:-1]) / 2


class Parts(NamedTuple):
    """One direction of a tensor."""

    data: torch.Tensor
    scale_inv: torch.Tensor
    amax: torch.Tensor


def swap_first_dims(tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """What is gathered by columns lies rank after rank: (a, b, ...) as (b, a, ...)."""
    return tensor.transpose(0, 1).contiguous()


def in_fp4(thing: Any) -> bool:
    """Whether it is a tensor in FP4."""
    return hasattr(thing, "_fp4_dtype")


def fp4_parts(tensor: torch.Tensor, quantizer: Any, columns: bool) -> dict[str, torch.Tensor]:
    """Data, scales and the largest number in one direction, by the names that tensors have for them."""
    numbers = tensor.detach().float().reshape(-1, tensor.shape[-1])
    if columns:
        numbers = numbers.t().contiguous()
        if quantizer.with_rht:
            numbers = (numbers.view(-1, BLOCK) @ quantizer.rht_matrix.float()).view(numbers.shape)
    made, name = _cast(numbers, quantizer), "columnwise" if columns else "rowwise"
    data = made.data if columns else made.data.view(*tensor.shape[:-1], tensor.shape[-1] // 2)
    return {f"{name}_data": data, f"{name}_scale_inv": made.scale_inv, f"amax_{name}": made.amax}


def _cast(numbers: torch.Tensor, quantizer: Any) -> Parts:
    amax = (numbers.abs().max() if numbers.numel() else numbers.new_zeros(())).view(1)
    if quantizer.with_amax_reduction:
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    m, k = numbers.shape
    of_blocks = numbers.abs().view(m, k // BLOCK, BLOCK).amax(-1)
    if quantizer.with_2d_quantization:
        of_blocks = of_blocks.view(m // BLOCK, BLOCK, -1).amax(1).repeat_interleave(BLOCK, 0)
    whole = torch.where(amax > 0, LARGEST * LARGEST_SCALE / amax, torch.ones_like(amax))
    scales = (of_blocks / LARGEST * whole).clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn)
    each = torch.where(scales.float() > 0, whole / scales.float(), torch.zeros(())).repeat_interleave(BLOCK, 1)
    bits = _rounded((numbers * each).clamp(-LARGEST, LARGEST), quantizer.stochastic_rounding).to(torch.uint8)
    packed = bits[:, 0::2] | (bits[:, 1::2] << 4)
    return Parts(packed, padded(scales.view(torch.uint8)), amax)


def padded(scales: torch.Tensor) -> torch.Tensor:
    """Up to the multiples that GEMMs read (`triton.pad.pad_columnwise_scale_inv`)."""
    m, k = scales.shape
    return torch.nn.functional.pad(scales, (0, -k % 4, 0, -m % 128)).contiguous()


def _rounded(numbers: torch.Tensor, stochastic: bool) -> torch.Tensor:
    """The four bits of each, as numbers."""
    size = numbers.abs().contiguous()
    if stochastic:
        below = (torch.bucketize(size, VALUES, right=True) - 1).clamp(max=len(VALUES) - 2)
        up = (size - VALUES[below]) / (VALUES[below + 1] - VALUES[below])
        nearest = below + (torch.rand(size.shape) < up)
    else:
        nearest = torch.bucketize(size, BETWEEN)
    return nearest + 8 * torch.signbit(numbers)


def numbers_in_fp4(tensor: Any, columns: bool) -> torch.Tensor:
    """What a tensor stands for (fp32), read in one direction; by columns turned as it is stored, with rows first.

    Raises:
        RuntimeError: it was not stored in that direction.
    """
    name = "columnwise" if columns else "rowwise"
    data, scales = getattr(tensor, f"_{name}_data"), getattr(tensor, f"_{name}_scale_inv")
    if data is None or scales is None:
        raise RuntimeError(f"an operand in FP4 has no {'columns' if columns else 'rows'}")
    bits = torch.stack((data & 15, data >> 4), -1).flatten(-2).long()
    values = VALUES[bits & 7] * torch.where(bits > 7, -1.0, 1.0)
    flat = values.flatten(0, -2)
    m, k = flat.shape
    of_all = getattr(tensor, f"_amax_{name}") / (LARGEST * LARGEST_SCALE)
    each = of_all * scales.view(torch.float8_e4m3fn).float()[:m, : k // BLOCK]
    numbers: torch.Tensor = (flat * each.repeat_interleave(BLOCK, 1)).view(values.shape)
    return numbers.t() if columns else numbers
