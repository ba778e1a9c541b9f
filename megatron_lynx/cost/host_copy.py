"""Host copies compared with the compute that hides them.

    k = seconds to copy a layer's activations out and back  /  seconds of its forward and backward

With k <= 1 all can be offloaded for free (PipeOffload, 2503.01328). A backward counts as two forwards.
"""

from __future__ import annotations

from megatron_lynx.config.job import Job


def copy_to_compute_ratio(copied_bytes: int, forward_flops: int, compute_flop_per_s: float, copy_byte_per_s: float) -> float:
    """Return k. `copy_byte_per_s`: of one direction at a time."""
    return (2 * copied_bytes / copy_byte_per_s) / (3 * forward_flops / compute_flop_per_s)


def meet_messages(job: Job) -> bool:
    """Whether copies and pipeline messages share a link: a NIC below the device's PCIe switch, or PCIe within a node."""
    cluster = job.cluster
    if cluster.pcie is None or job.parallel.pipeline == 1:
        return False
    if cluster.node is not None and job.gpus > cluster.node.gpus:
        return cluster.pcie.shared_with_nic
    return cluster.nvlink is None


def avoid_messages(job: Job) -> bool:
    """Whether a plan alternates copies and messages, which needs a time without messages.

    With chunks, messages always overlap passes. Without, Megatron synchronises after each exchange (`batch_p2p_sync`): a copy
    issued before it would be waited for at once, on any link.
    """
    return job.chunks == 1 and job.schedule == "flush" and job.parallel.pipeline > 1
