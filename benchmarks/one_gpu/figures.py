"""Figures of a tensor and of stretches of time. Nothing here imports Megatron."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from scripts.gpu_check.overlap import merged


def fingerprint(tensor: torch.Tensor) -> list[int]:
    """Sums of a tensor's bits, by rows and by columns: equal for equal bits, and hardly ever for others."""
    bits = tensor.detach().float().contiguous().view(torch.int32).reshape(tensor.shape[0] if tensor.ndim > 1 else 1, -1)
    found = []
    for dim in (0, 1):
        sums = bits.sum(dim, dtype=torch.int64)
        found += [int(sums.sum()), int((sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum())]
    return found


def covered_s(stretches_us: Iterable[tuple[float, float]]) -> float:
    """Seconds that at least one of these stretches covers."""
    return sum(end - begin for begin, end in merged(stretches_us)) / 1e6
