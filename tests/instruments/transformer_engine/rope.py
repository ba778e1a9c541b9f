"""Rotary positions in one kernel: the first r numbers of each head turn in pairs half of r apart, those behind them stay.

turned = t cos(f) + (-t_2, t_1) sin(f)          t (s, b, a, d), in halves t_1 and t_2 of its first r; f (S, 1, 1, r), S >= s
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["fused_rope_backward", "fused_rope_forward"]


def fused_rope_forward(
    input: torch.Tensor, freqs: torch.Tensor, start_positions: Any, qkv_format: Any, interleaved: bool, *packed: Any
) -> torch.Tensor:
    """Only rows (s, b, a, d) whose pairs are not next to each other, and which begin at the first position."""
    if qkv_format.name != "NVTE_SBHD" or interleaved or start_positions is not None:
        raise NotImplementedError(f"rotary positions of {qkv_format.name}, interleaved {interleaved}, from {start_positions}")
    turning, staying, cosine, sine = _parts(input, freqs)
    first, second = turning.chunk(2, -1)
    turned = turning * cosine + torch.cat((-second, first), -1) * sine
    return torch.cat((turned.to(input.dtype), staying), -1)


def fused_rope_backward(output_grads: torch.Tensor, freqs: torch.Tensor, *as_in_forward: Any) -> torch.Tensor:
    """Turned back by the same angles."""
    turning, staying, cosine, sine = _parts(output_grads, freqs)
    first, second = (turning * sine).chunk(2, -1)
    turned = turning * cosine + torch.cat((second, -first), -1)
    return torch.cat((turned.to(output_grads.dtype), staying), -1)


def _parts(heads: torch.Tensor, freqs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What turns, in fp32, and what stays; cosine and sine of the angles of these rows."""
    freqs = freqs[: heads.shape[0]].float()
    turning, staying = heads.split([freqs.shape[-1], heads.shape[-1] - freqs.shape[-1]], -1)
    return turning.float(), staying, freqs.cos(), freqs.sin()
