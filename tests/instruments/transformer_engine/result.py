"""Rounds a kernel's result once, from fp32, into a new tensor, a given one, or a quantizer."""

from __future__ import annotations

from typing import Any

import torch


def in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """An operand as numbers."""
    return tensor.detach().float()


def delivered(numbers: torch.Tensor, out: Any, quantizer: Any, dtype: torch.dtype) -> Any:
    """`numbers` (fp32) rounded to what the caller asked for."""
    rounded = numbers.to(dtype)
    if quantizer is not None:
        return quantizer(rounded) if out is None else quantizer.update_quantized(rounded, out)
    if out is None:
        return rounded
    with torch.no_grad():
        return out.copy_(rounded)
