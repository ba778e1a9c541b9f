"""Packed sequences (T, ...), one behind the other, and the same padded to equal lengths (B, S, ...)."""

from __future__ import annotations

from itertools import pairwise

import torch

__all__ = ["convert_bshd_to_thd", "convert_thd_to_bshd"]


def convert_thd_to_bshd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, b: int, max_seq_len: int) -> torch.Tensor:
    """`cu_seqlens` (B + 1): where each sequence begins, and the last one ends."""
    padded = tensor.new_zeros((b, int(max_seq_len), *tensor.shape[1:]))
    for row, (first, last) in enumerate(_ends(cu_seqlens)):
        padded[row, : last - first] = tensor[first:last]
    return padded


def convert_bshd_to_thd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, t: int) -> torch.Tensor:
    packed = tensor.new_zeros((int(t), *tensor.shape[2:]))
    for row, (first, last) in enumerate(_ends(cu_seqlens)):
        packed[first:last] = tensor[row, : last - first]
    return packed


def _ends(cu_seqlens: torch.Tensor) -> list[tuple[int, int]]:
    ends = cu_seqlens.tolist()
    return list(pairwise(ends))
