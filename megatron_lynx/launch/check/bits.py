"""Tensors compared by their bits: NaN equals the same NaN, and 0 is not -0."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The same bits as integers of the same size."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])


def unlike(one: Tensor, other: Tensor, names: tuple[str, str]) -> str:
    """How two tensors differ in shape or type, in words; empty where they can be compared by their bits."""
    if (one.shape, one.dtype) == (other.shape, other.dtype):
        return ""
    return f"{tuple(one.shape)} {one.dtype} in {names[0]}, {tuple(other.shape)} {other.dtype} in {names[1]}"
