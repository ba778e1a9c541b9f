"""Copies to host memory against the compute they hide behind.

    k = seconds to copy a layer's activations out and back  /  seconds of its forward and backward

k <= 1: everything can be offloaded for nothing (PipeOffload, 2503.01328). A backward is taken for two forwards.
"""

from __future__ import annotations

from megatron_lynx.config.job import Job


def copy_to_compute_ratio(copied_bytes: int, forward_flops: int, compute_flop_per_s: float, copy_byte_per_s: float) -> float:
    """The ratio k of what keeps `copied_bytes` and takes `forward_flops`; `copy_byte_per_s` in one direction at a time."""
    return (2 * copied_bytes / copy_byte_per_s) / (3 * forward_flops / compute_flop_per_s)


def meet_messages(job: Job) -> bool:
    """Whether copies and messages between stages go over one link: a NIC below a device's PCIe switch, or PCIe within a node."""
    cluster = job.cluster
    if cluster.pcie is None or job.parallel.pipeline == 1:
        return False
    if cluster.node is not None and job.gpus > cluster.node.gpus:
        return cluster.pcie.shared_with_nic
    return cluster.nvlink is None


def avoid_messages(job: Job) -> bool:
    """Whether a plan lets copies and messages take turns: wherever there is a time between messages. With chunks they overlap
    passes, and there is always one under way; without, Megatron ends every exchange in a synchronisation (`batch_p2p_sync`), for
    which a copy that was asked for before the exchange would be waited for at once, whatever link it goes over."""
    return job.chunks == 1 and job.schedule == "flush" and job.parallel.pipeline > 1
