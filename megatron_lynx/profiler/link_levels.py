"""Which link lies between the ranks of a group: within a node, or between nodes; and how nodes cut a group."""

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


def fewest_in_a_node(first: int, stride: int, members: int, node_gpus: int) -> int:
    """The fewest members of a group in one node: `first`, `first + stride`, ... Counts repeat after `stride` whole nodes."""
    if stride >= node_gpus:
        return 1
    begin, end = (rank // node_gpus for rank in (first, first + stride * (members - 1)))
    nodes = {begin, end, *range(begin + 1, min(end, begin + 1 + stride))}
    return min(
        _members_below(node + 1, first, stride, members, node_gpus) - _members_below(node, first, stride, members, node_gpus)
        for node in nodes
    )


def _members_below(node: int, first: int, stride: int, members: int, node_gpus: int) -> int:
    """Members of a group in nodes before this one."""
    return min(members, max(0, -((first - node * node_gpus) // stride)))
