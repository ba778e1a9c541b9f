"""Scaled and masked softmax of attention scores (b, a, s, s), or with a causal mask (ba, s, s). fp32 inside, rounded once."""

from __future__ import annotations

import torch

__all__ = [
    "scaled_aligned_causal_masked_softmax_backward",
    "scaled_aligned_causal_masked_softmax_forward",
    "scaled_masked_softmax_backward",
    "scaled_masked_softmax_forward",
    "scaled_softmax_backward",
    "scaled_softmax_forward",
    "scaled_upper_triang_masked_softmax_backward",
    "scaled_upper_triang_masked_softmax_forward",
]

MASKED = -10000.0
"""What an explicit mask puts in place of a score, so that a row in which everything is masked is uniform."""


def scaled_softmax_forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    return (input.float() * scale_factor).softmax(-1).to(input.dtype)


def scaled_masked_softmax_forward(input: torch.Tensor, mask: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """`mask` (1 or b, 1, s, s) is 1 where a score does not count."""
    return (input.float() * scale_factor).masked_fill(mask.bool(), MASKED).softmax(-1).to(input.dtype)


def scaled_aligned_causal_masked_softmax_forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """Causal, the last query seeing all keys."""
    queries, keys = input.shape[-2:]
    later = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
    return (input.float() * scale_factor).masked_fill(later, float("-inf")).softmax(-1).to(input.dtype)


def scaled_softmax_backward(output_grad: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float) -> torch.Tensor:
    gradient, probabilities = output_grad.float(), softmax_results.float()
    through = probabilities * (gradient - (gradient * probabilities).sum(-1, keepdim=True))
    return (through * scale_factor).to(output_grad.dtype)


scaled_upper_triang_masked_softmax_forward = scaled_aligned_causal_masked_softmax_forward
scaled_upper_triang_masked_softmax_backward = scaled_softmax_backward
scaled_aligned_causal_masked_softmax_backward = scaled_softmax_backward
scaled_masked_softmax_backward = scaled_softmax_backward
