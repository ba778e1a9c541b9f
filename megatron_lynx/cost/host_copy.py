"""Copies to host memory against the compute they hide behind.

    k = seconds to copy a layer's activations out and back  /  seconds of its forward and backward

k <= 1: everything can be offloaded for nothing (PipeOffload, 2503.01328). A backward is two forwards, but for fused attention:
its backward makes the scores again, five GEMMs where the forward has two.
"""

from __future__ import annotations

from megatron_lynx.config.job import Policy
from megatron_lynx.cost.layer import kept_bytes
from megatron_lynx.profiler.shape import LayerShape, item_flops


def copy_to_compute_ratio(shape: LayerShape, policy: Policy, compute_flop_per_s: float, copy_byte_per_s: float) -> float:
    """k of one layer under `policy`; `copy_byte_per_s` in each direction, one direction at a time."""
    forward = sum(item_flops(shape).values())
    return (2 * kept_bytes(shape, policy) / copy_byte_per_s) / (3 * forward / compute_flop_per_s)
