"""Where a kernel's result goes: rounded once, from fp32, into a new tensor, a given one, or a quantizer."""

from __future__ import annotations

from typing import Any

import torch


def in_fp32(tensor: Any) -> torch.Tensor:
    """An operand as numbers. Quantized tensors know how to become numbers again."""
    if isinstance(tensor, torch.Tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.detach().float()
    return tensor.dequantize(dtype=torch.float32)  # type: ignore[no-any-return]


def delivered(numbers: torch.Tensor, out: Any, quantizer: Any, dtype: torch.dtype) -> Any:
    """`numbers` (fp32) as the caller wants them."""
    rounded = numbers.to(dtype)
    if quantizer is not None:
        return quantizer(rounded) if out is None else quantizer.update_quantized(rounded, out)
    if out is None:
        return rounded
    return out.copy_(rounded)
