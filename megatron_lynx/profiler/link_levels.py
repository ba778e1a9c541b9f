"""Which link lies between the ranks of a group: within a node, or between nodes."""

from __future__ import annotations

from megatron_lynx.config.cluster import Cluster, Link


def link_among(cluster: Cluster, ranks: int) -> Link:
    """The link between neighbours among so many consecutive ranks. Ranks below one PCIe switch share its uplink."""
    assert cluster.pcie is not None, "checked by Roofline.of"
    assert cluster.nic is not None, "checked by Roofline.of"
    assert cluster.node is not None, "checked by Roofline.of"
    if ranks > cluster.node.gpus:
        return cluster.nic
    if cluster.nvlink is not None:
        return cluster.nvlink
    return cluster.pcie.model_copy(update={"gb_per_s": cluster.pcie.gb_per_s / cluster.pcie.gpus_per_link})
