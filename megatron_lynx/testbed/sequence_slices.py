"""Which rows of a sequence each context-parallel rank has: of 2c slices rank r has slices r and 2c - 1 - r, as Megatron cuts it.

So every rank has an early slice and a late one, and causal attention is as much work on each.
"""

from __future__ import annotations

import torch


def rows_of(rank: int, ranks: int, count: int, device: torch.device) -> torch.Tensor:
    """The places in a sequence of the `count` rows that a rank has."""
    half = torch.arange(count // 2, device=device)
    return torch.cat([half + rank * (count // 2), half + (2 * ranks - 1 - rank) * (count // 2)])


def all_rows(ranks: int, count: int, device: torch.device) -> torch.Tensor:
    """Those of all ranks, one after the other."""
    return torch.cat([rows_of(rank, ranks, count, device) for rank in range(ranks)])
