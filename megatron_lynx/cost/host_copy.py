"""Copies to host memory against the compute they hide behind.

    k = seconds to copy a layer's activations out and back  /  seconds of its forward and backward

k <= 1: everything can be offloaded for nothing (PipeOffload, 2503.01328). A backward is taken for two forwards.
"""

from __future__ import annotations


def copy_to_compute_ratio(copied_bytes: int, forward_flops: int, compute_flop_per_s: float, copy_byte_per_s: float) -> float:
    """k of what keeps `copied_bytes` and takes `forward_flops`; `copy_byte_per_s` in one direction at a time."""
    return (2 * copied_bytes / copy_byte_per_s) / (3 * forward_flops / compute_flop_per_s)
