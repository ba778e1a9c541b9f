"""Packed sequences (T, ...), one behind the other, and the same padded to equal lengths (B, S, ...)."""

from __future__ import annotations

from itertools import pairwise

import torch

__all__ = ["convert_bshd_to_thd", "convert_thd_to_bshd", "thd_get_partitioned_indices"]


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


def thd_get_partitioned_indices(cu_seqlens: torch.Tensor, total_tokens: int, world_size: int, rank: int) -> torch.Tensor:
    """The places of a rank's rows: of each sequence a slice from the front, and one from the back."""
    assert cu_seqlens[-1] == total_tokens, "all rows are of some sequence"
    kept = []
    for first, last in _ends(cu_seqlens):
        slices = torch.arange(first, last, dtype=torch.int32).reshape(2 * world_size, -1)
        kept += [slices[rank], slices[2 * world_size - 1 - rank]]
    return torch.cat(kept)


def _ends(cu_seqlens: torch.Tensor) -> list[tuple[int, int]]:
    ends = cu_seqlens.tolist()
    return list(pairwise(ends))
