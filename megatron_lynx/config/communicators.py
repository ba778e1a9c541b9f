"""The communicators of NCCL that a layout makes, and what their buffers take of each device.

    who              ranks                      for
    world            all                        barriers, the loss's time
    tensor           t                          collectives of layers
    context          c                          the exchange of keys and values: around a ring, gathered, or traded
    data             c x d                      gradients, parameters
    optimizer        all                        norms, with the distributed optimizer
    model            t x p                      norms, whether a step counts
    pipeline         p                          messages to both neighbours
    embedding        2                          the gradient of a shared embedding, on the ends of a pipeline
    expert           ep                         exchanges of tokens, with the alltoall dispatcher; DeepEP, HybridEP and the
                                                allgather dispatcher use the routing group alone
    expert tensor    etp                        collectives of experts
    routing          etp x ep                   how many tokens go where
    expert data      what remains               gradients of experts

PyTorch makes a communicator when a group is first used; those that Megatron makes and does not use are not here. Buffers, as NCCL
2.18 to 2.28 allocated them:

    collectives   16 MiB + 28 MiB a channel; of two ranks 22     4 A100: 688 and 544 MB, 24 channels (NVIDIA/nccl #964)
    multicast     32 MiB for each rank of a node, of 8 at most   8 H100: nvlsTotalSize 268435456 in NCCL's log
    peers         14 MiB a channel and peer of the same node     8 H100: 3.28e9 B for an exchange, 32 channels, 7 peers (#1685)
                  512 MiB for all those in other nodes           a pool of its own: 536870912 B (#2363, a B300)

Every pair of a communicator has as many channels, the least of any pair: of a pair in one NVLink domain twice its NVLinks, filled
up to a power of two and no more than the collectives have, however many ranks there are; over the network 2, from 2.29 on one for
each 14 GB/s of NIC (`ncclTopoComputeP2pChannels`, read in 2.18 to 2.30). So an exchange over several nodes has few channels to
near peers, too, and one among 64 GPUs of an NVL72 rack 63 x 32 x 14 MiB = 28 GiB.

Together, a check on a run that chose none of them: of a GB300 with t 4, p 8, d 8 6.2 GiB were not PyTorch's
(NVIDIA-NeMo/Megatron-Bridge #2221: 275.82 in use, of which 210.08 + 59.51 PyTorch's); its context, libraries and this are 5.8.
Newer releases connect what is used, when it is used, which makes these the most, not the mean.
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
"""At most, of a communicator over several nodes: a NIC of 800 Gbit/s (ConnectX-8)."""
NEIGHBOURS = 2
"""Ranks that a stage, or a place on a ring, exchanges messages with."""


@dataclass(frozen=True)
class Communicator:
    """A group of ranks that NCCL connects. `within`: how many of them are in one node."""

    name: str
    ranks: int
    within: int
    use: Use = "collectives"

    def buffer_bytes(self, nccl: NcclChannels) -> int:
        """On one device."""
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
    """Those of a rank at a pipeline's end, which has the most. Groups of one rank need none. `tied`: whether the model's two ends
    share the embedding; `dispatcher`: of tokens to experts, None without experts."""

    def every(name: str, ranks: int, stride: int, use: Use = "collectives") -> Communicator:
        """A group of every `stride`th rank."""
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
