"""NCCL communicators of a layout, and the size of their buffers on each device.

    name             ranks                      used for
    world            all                        barriers, loss timing
    tensor           t                          collectives of layers
    context          c                          exchange of keys and values: ring, all-gather, or all-to-all
    data             c x d                      gradients, parameters
    optimizer        all                        norms, with the distributed optimizer
    model            t x p                      norms, whether a step is skipped
    pipeline         p                          messages to both neighbours
    embedding        2                          gradient of tied embeddings, on the first and last stage
    expert           ep                         token exchange with the alltoall dispatcher; DeepEP, HybridEP and the
                                                allgather dispatcher use only the routing group
    expert tensor    etp                        collectives of experts
    routing          etp x ep                   token counts
    expert data      all others                 gradients of experts

PyTorch makes a communicator at a group's first use; groups that Megatron makes but never uses are not listed. Buffer sizes, as
allocated by NCCL 2.18 to 2.28:

    collectives   16 MiB + 28 MiB per channel (22 for two ranks)      4 A100: 688 and 544 MB, 24 channels (NVIDIA/nccl #964)
    multicast     32 MiB per rank of a node, at most 8 ranks          8 H100: nvlsTotalSize 268435456 in NCCL's log
    peers         14 MiB per channel and peer in the same node        8 H100: 3.28e9 B, 32 channels, 7 peers (#1685)
                  512 MiB for all peers in other nodes                a separate pool: 536870912 B (#2363, a B300)

All pairs of a communicator use the smallest channel count of any pair. A pair in one NVLink domain has twice its NVLinks, rounded
up to a power of two, at most the channels of collectives. Over the network it has 2; from NCCL 2.29 on, one per 14 GB/s of NIC
(`ncclTopoComputeP2pChannels`, read in 2.18 to 2.30). So an all-to-all over several nodes has few channels to near peers as well;
one among 64 GPUs of an NVL72 rack takes 63 x 32 x 14 MiB = 28 GiB.

Checked against a GB300 run with t 4, p 8, d 8: 6.2 GiB outside PyTorch (NVIDIA-NeMo/Megatron-Bridge #2221: 275.82 used, PyTorch
210.08 + 59.51); context, libraries and these buffers predict 5.8. Newer NCCL connects peers lazily, so these are upper bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lynx.config.cluster import NcclChannels
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.units import MIB

Use = Literal["collectives", "exchange", "messages"]

BASE_MIB, CHANNEL_MIB, CHANNEL_OF_TWO_MIB = 16, 28, 22
MULTICAST_MIB, MULTICAST_RANKS = 32, 8
PEER_MIB, OTHER_NODES_MIB = 14, 512
PEER_CHANNELS_BETWEEN_NODES = 8
"""Upper bound for communicators over several nodes: a NIC of 800 Gbit/s (ConnectX-8)."""
NEIGHBOURS = 2
"""Peers of a pipeline stage, or of a rank in a ring."""


@dataclass(frozen=True)
class Communicator:
    """A group of ranks that NCCL connects. `within`: ranks of it in one node."""

    name: str
    ranks: int
    within: int
    use: Use = "collectives"

    def buffer_bytes(self, nccl: NcclChannels) -> int:
        mib = BASE_MIB + (self._of_collectives_mib(nccl) if self.use == "collectives" else self._of_peers_mib(nccl))
        return mib * MIB

    def _of_collectives_mib(self, nccl: NcclChannels) -> int:
        channels = nccl.within_node if self.within == self.ranks else nccl.between_nodes
        multicast = MULTICAST_MIB * min(self.within, MULTICAST_RANKS) if nccl.multicast and self.within > 2 else 0
        return channels * (CHANNEL_OF_TWO_MIB if self.ranks == 2 else CHANNEL_MIB) + multicast

    def _of_peers_mib(self, nccl: NcclChannels) -> int:
        peers = self.ranks - 1 if self.use == "exchange" else min(NEIGHBOURS, self.ranks - 1)
        near = min(peers, self.within - 1)
        most = nccl.of_peers if self.within == self.ranks else PEER_CHANNELS_BETWEEN_NODES
        return near * min(nccl.of_peers, most) * PEER_MIB + (OTHER_NODES_MIB if near < peers else 0)


def communicators(layout: Parallel, gpus: int, node_gpus: int, *, tied: bool, dispatcher: str | None) -> tuple[Communicator, ...]:
    """Return the communicators of a rank on the first or last stage, which has the most. Groups of one rank are left out.

    `tied`: the first and last stage share the embedding. `dispatcher`: Megatron's token dispatcher, None without experts.
    """

    def every(name: str, ranks: int, stride: int, use: Use = "collectives") -> Communicator:
        return Communicator(name, ranks, min(ranks, max(1, node_gpus // stride)), use)

    stage_ranks, model_ranks = gpus // layout.pipeline, layout.tensor * layout.pipeline
    groups = [
        every("world", gpus, 1),
        every("tensor", layout.tensor, 1),
        every("context", layout.context, layout.tensor, _use_of_context(layout)),
        every("data", stage_ranks // layout.tensor, layout.tensor),
        every("optimizer", gpus // layout.optimizer_instances if layout.distributed_optimizer else 1, 1),
        Communicator("model", model_ranks, model_ranks if gpus <= node_gpus else min(layout.tensor, node_gpus)),
        every("pipeline", layout.pipeline, stage_ranks, "messages"),
        every("embedding", 2 if tied and layout.pipeline > 1 else 1, stage_ranks * max(1, layout.pipeline - 1)),
    ]
    if (instances := layout.optimizer_instances) > 1:
        own = stage_ranks // layout.tensor // instances
        groups += [every("instance", own, layout.tensor), every("instances", instances, layout.tensor * own)]
    if dispatcher is not None:
        both = layout.expert_tensor_size * layout.expert
        groups += [
            every("expert", layout.expert if dispatcher == "alltoall" else 1, layout.expert_tensor_size, "exchange"),
            every("expert tensor", layout.expert_tensor_size, 1),
            every("routing", both, 1),
            every("expert data", stage_ranks // both, both),
        ]
    return tuple(each for each in groups if each.ranks > 1)


def _use_of_context(layout: Parallel) -> Use:
    uses: dict[str, Use] = {"p2p": "messages", "all_gather": "collectives"}
    return uses.get(layout.context_exchange, "exchange")
