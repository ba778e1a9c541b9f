"""Device memory that a job's plan cannot use, by part: context, libraries, NCCL, DeepEP or HybridEP, allocator slack.

NCCL's communicators and the size of their buffers per device:

    name             ranks                      used for
    world            all                        barriers, loss timing
    tensor           t                          collectives of layers
    context          c                          exchange of keys and values: ring, all-gather, or all-to-all
    data             c x d                      gradients, parameters
    optimizer        all                        norms, with the distributed optimizer
    model            t x p                      norms, whether a step is skipped
    pipeline         p                          messages to both neighbours
    embedding        2                          gradient of tied embeddings, on the first and last stage
    expert           ep                         token exchange with the alltoall dispatcher; others use only the routing group
    expert tensor    etp                        collectives of experts
    routing          etp x ep                   token counts
    expert data      all others                 gradients of experts

PyTorch makes a communicator at a group's first use; groups that Megatron makes but never uses are not listed. Sizes as allocated
by NCCL 2.18 to 2.28; newer releases connect peers lazily, so these are upper bounds:

    collectives   16 MiB + 28 MiB per channel (22 for two ranks)      4 A100: 688 and 544 MB, 24 channels (NVIDIA/nccl #964)
    multicast     32 MiB per rank of a node, at most 8 ranks          8 H100: nvlsTotalSize 268435456 in NCCL's log
    peers         14 MiB per channel and peer in the same node        8 H100: 3.28e9 B, 32 channels, 7 peers (#1685)
                  512 MiB for all peers in other nodes                a separate pool: 536870912 B (#2363, a B300)

All pairs of a communicator use the smallest channel count of any pair (`ncclTopoComputeP2pChannels`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from megatron_lynx.config.cluster import Cluster, NcclChannels
from megatron_lynx.config.experts import Experts
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.kinds.experts.section import FUSED
from megatron_lynx.units import GIB, MIB

Use = Literal["collectives", "exchange", "messages"]
BASE_MIB, CHANNEL_MIB, CHANNEL_OF_TWO_MIB = 16, 28, 22
MULTICAST_MIB, MULTICAST_RANKS = 32, 8
PEER_MIB, OTHER_NODES_MIB = 14, 512
PEER_CHANNELS_BETWEEN_NODES = 8
"""Upper bound for communicators over several nodes: a NIC of 800 Gbit/s (ConnectX-8)."""
NEIGHBOURS = 2


@dataclass(frozen=True)
class Communicator:
    """A group of ranks that NCCL connects. `within`: ranks of it in one node."""

    name: str
    ranks: int
    within: int
    use: Use = "collectives"

    def buffer_bytes(self, nccl: NcclChannels) -> int:
        in_node = self.within == self.ranks
        if self.use == "collectives":
            channels = nccl.within_node if in_node else nccl.between_nodes
            multicast = MULTICAST_MIB * min(self.within, MULTICAST_RANKS) if nccl.multicast and self.within > 2 else 0
            return MIB * (BASE_MIB + channels * (CHANNEL_OF_TWO_MIB if self.ranks == 2 else CHANNEL_MIB) + multicast)
        peers = self.ranks - 1 if self.use == "exchange" else min(NEIGHBOURS, self.ranks - 1)
        near = min(peers, self.within - 1)
        channels = nccl.of_peers if in_node else min(nccl.of_peers, PEER_CHANNELS_BETWEEN_NODES)
        return MIB * (BASE_MIB + near * channels * PEER_MIB + (OTHER_NODES_MIB if near < peers else 0))


def communicators(layout: Parallel, gpus: int, node_gpus: int, *, tied: bool, dispatcher: str | None) -> tuple[Communicator, ...]:
    """Return those of a rank on the first or last stage, which has the most. `tied`: these share the embedding."""

    def every(name: str, ranks: int, stride: int, use: Use = "collectives") -> Communicator:
        return Communicator(name, ranks, min(ranks, max(1, node_gpus // stride)), use)

    stage_ranks, model_ranks = gpus // layout.pipeline, layout.tensor * layout.pipeline
    uses: dict[str, Use] = {"p2p": "messages", "all_gather": "collectives"}
    groups = [
        every("world", gpus, 1),
        every("tensor", layout.tensor, 1),
        every("context", layout.context, layout.tensor, uses.get(layout.context_exchange, "exchange")),
        every("data", stage_ranks // layout.tensor, layout.tensor),
        every("optimizer", gpus // layout.optimizer_instances if layout.distributed_optimizer else 1, 1),
        Communicator("model", model_ranks, model_ranks if gpus <= node_gpus else min(layout.tensor, node_gpus)),
        every("pipeline", layout.pipeline, stage_ranks, "messages"),
        every("embedding", 2 if tied and layout.pipeline > 1 else 1, stage_ranks * max(1, layout.pipeline - 1)),
    ]
    if (instances := layout.optimizer_instances) > 1:
        instance_ranks = stage_ranks // layout.tensor // instances
        groups += [
            every("instance", instance_ranks, layout.tensor),
            every("instances", instances, layout.tensor * instance_ranks),
        ]
    if dispatcher is not None:
        expert_ranks = layout.expert_tensor_size * layout.expert
        groups += [
            every("expert", layout.expert if dispatcher == "alltoall" else 1, layout.expert_tensor_size, "exchange"),
            every("expert tensor", layout.expert_tensor_size, 1),
            every("routing", expert_ranks, 1),
            every("expert data", stage_ranks // expert_ranks, expert_ranks),
        ]
    return tuple(group for group in groups if group.ranks > 1)


OTHERS = "others' share"
DISPATCH = "dispatch"
SLACK = "allocator"


@dataclass(frozen=True)
class DeviceReserve:
    memory_bytes: int
    parts: Mapping[str, int]
    communicators: Mapping[str, int]
    taken_bytes: Mapping[str, int] = field(default_factory=dict)
    """Memory of other processes, by name. `parts` excludes them."""

    def beside(self, share: float | None, held_gib: Mapping[str, float]) -> DeviceReserve:
        rest = {} if share is None else {OTHERS: self.memory_bytes - int(share * self.memory_bytes)}
        return replace(self, taken_bytes={**rest, **{name: int(GIB * size) for name, size in held_gib.items()}})

    @property
    def left_bytes(self) -> int:
        return self.memory_bytes - sum(self.parts.values()) - sum(self.taken_bytes.values())

    @property
    def as_json(self) -> dict[str, Any]:
        parts = {"reserve_bytes": dict(self.parts), "nccl_bytes": dict(self.communicators)}
        parts |= {"others_bytes": dict(self.taken_bytes)} if self.taken_bytes else {}
        return {"memory_bytes": self.memory_bytes, **parts, "left_bytes": self.left_bytes}

    @property
    def in_words(self) -> str:
        if not self.parts and not self.taken_bytes:
            return ""
        names = {"nccl": f"NCCL ({', '.join(self.communicators)})"} if self.communicators else {}
        parts = ", ".join(
            f"{names.get(part, part)} {size / GIB:.2f}" for part, size in {**self.taken_bytes, **self.parts}.items()
        )
        return f"device {self.memory_bytes / GIB:.2f} GiB: {parts}; left {self.left_bytes / GIB:.2f}"


def device_reserve(
    cluster: Cluster, groups: Sequence[Communicator], *, expandable_segments: bool, dispatch_bytes: int = 0
) -> DeviceReserve:
    """Return the reserve of a job. `groups`: communicators of the layout. `dispatch_bytes`: DeepEP or HybridEP buffers."""
    memory_bytes, reserve = int(GIB * cluster.memory_gib), cluster.reserve
    if reserve is None:
        return DeviceReserve(memory_bytes, {}, {})
    buffers = {group.name: group.buffer_bytes(reserve.nccl) for group in groups}
    slack = reserve.allocator
    parts = {
        "context": int(GIB * reserve.context_gib),
        "libraries": int(GIB * reserve.libraries_gib),
        "nccl": sum(buffers.values()),
        **({DISPATCH: dispatch_bytes} if dispatch_bytes else {}),
        SLACK: int(GIB * (slack.expandable_gib if expandable_segments else slack.fixed_gib)),
    }
    return DeviceReserve(memory_bytes, parts, buffers)


FP32_BYTES = 4
MULTIPROCESSORS = {"deepep": 20, "hybridep": 16}
"""Megatron's defaults for one kernel (`moe_deepep_num_sms`, `moe_hybridep_num_sms`)."""
NVLINK_PEERS, WORKSPACE_BYTES, META_BYTES = 8, 32 << 20, 8
TOPK_AND_SCALES_BYTES = 128 * (8 + 4) + 128 * 4
"""Bytes per token: the maximum number of experts with probabilities, and the maximum number of FP8 scales."""
FLAGS_BYTES = 16
NVLINK_CHUNK = {8: 256, 64: 288, 96: 480, 128: 560, math.inf: 720}
RDMA_CHUNK = {16: 140, 64: 128, math.inf: 132}
"""Tokens per channel and peer, by the largest number of ranks they hold for: the larger of dispatch and combine, rounded up to
one send."""
HYBRID_CHUNK = 64
DEEP_EP_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""`Buffer.get_dispatch_config`."""
HYBRID_EXPERTS, HYBRID_COLUMNS, HYBRID_TOKENS = 4, 16, (65536 - 2) // 3
"""`BufferConfig.is_valid`, `hybrid_ep_token_capacity_is_valid`: three entries per token in a queue of fewer than 65536."""
SCALED = 128


class FusedDispatch(NamedTuple):
    """DeepEP's or HybridEP's buffers on one device, and their multiprocessors during an exchange.

    DeepEP has a ring per channel and peer, independent of the batch; two multiprocessors per channel. HybridEP has room for the
    worst case, in which all ranks send every token here; over several nodes also the rank's own tokens, one send and two receive
    buffers for the tokens of one rank of each other node.

    They are allocated outside PyTorch's allocator, once per process. Read in deepseek-ai/DeepEP at dd758ca
    (`csrc/legacy/config.hpp`, `deep_ep/buffers/legacy.py`) and its branch hybrid-ep at 94a9f8f
    (`csrc/hybrid_ep/buffer/intranode.cu`, `internode_doca.cu`, `extension/allgather.cu`), and in `fused_a2a.get_buffer` and
    `init_hybrid_ep_buffer` of megatron-core 0.16.1 to 0.19.2. Flags and counters of some kilobytes are not counted.
    """

    model: Model
    parallel: Parallel
    micro: int
    cluster: Cluster

    @property
    def _by_kernels(self) -> Experts | None:
        experts = self.model.experts
        return None if experts is None or experts.dispatcher not in FUSED or self._ranks == 1 else experts

    @property
    def _ranks(self) -> int:
        return self.parallel.expert * self.parallel.expert_tensor_size

    @property
    def _ranks_within(self) -> int:
        return min(self._ranks, NVLINK_PEERS if self.cluster.node is None else self.cluster.node.gpus)

    @property
    def multiprocessors(self) -> int:
        experts = self._by_kernels
        return 0 if experts is None else experts.multiprocessors or MULTIPROCESSORS[experts.dispatcher]

    @property
    def computing_kept(self) -> float:
        """Share of the compute rate left during an exchange; 1 if the device's multiprocessors are unknown."""
        attention = self.cluster.ordered_attention
        return 1.0 if attention is None else max(0.1, 1 - self.multiprocessors / attention.multiprocessors)

    @property
    def buffers_bytes(self) -> int:
        experts = self._by_kernels
        if experts is None or self.cluster.device == "cpu":
            return 0
        return self._deep_ep_bytes if experts.dispatcher == "deepep" else self._hybrid_ep_bytes(experts)

    def limits(self) -> Iterator[tuple[str, str]]:
        """Yield (found, needed) for limits of the kernels, which fail on all ranks at the first exchange."""
        experts, ranks = self._by_kernels, self._ranks
        if experts is None:
            return
        if experts.dispatcher == "deepep":
            if ranks not in DEEP_EP_RANKS:
                yield f"deepep over {ranks} ranks", f"{', '.join(map(str, DEEP_EP_RANKS))}, for which DeepEP has configurations"
            return
        within = self._ranks_within
        if ranks % within:
            yield f"hybridep over {ranks} ranks", f"a multiple of the {within} ranks of a node"
        of_node = experts.count // self.parallel.expert * within
        if of_node % HYBRID_EXPERTS or self.model.routed_hidden % HYBRID_COLUMNS:
            needed = f"multiples of {HYBRID_EXPERTS} experts in a node and of {HYBRID_COLUMNS} columns"
            yield f"hybridep with {of_node} experts in a node and {self.model.routed_hidden} columns", needed
        if ranks > within and self._own_tokens > HYBRID_TOKENS:
            needed = f"at most {HYBRID_TOKENS} on each rank between nodes, which its queues have room for"
            yield f"hybridep with {self._own_tokens} tokens", needed

    @property
    def _deep_ep_bytes(self) -> int:
        ranks, channels = self._ranks, self.multiprocessors // 2
        token_bytes = self.model.routed_hidden * max(2, self.model.element_bytes) + META_BYTES + TOPK_AND_SCALES_BYTES
        size = channels * min(ranks, NVLINK_PEERS) * _chunk(NVLINK_CHUNK, ranks) * token_bytes
        if ranks > NVLINK_PEERS:
            sent_and_received_bytes = 2 * (token_bytes + FLAGS_BYTES)
            size += channels * (ranks // NVLINK_PEERS) * _chunk(RDMA_CHUNK, ranks) * sent_and_received_bytes
        return size + WORKSPACE_BYTES

    def _hybrid_ep_bytes(self, experts: Experts) -> int:
        within = self._ranks_within
        other_domains, local_experts = -(-self._ranks // within) - 1, experts.count // self.parallel.expert
        tokens = -(-self._own_tokens // HYBRID_CHUNK) * HYBRID_CHUNK
        token, scales = 2 * self.model.routed_hidden, FP32_BYTES * (self.model.routed_hidden // SCALED)
        of_node, of_all = FP32_BYTES * local_experts * within, local_experts * self._ranks
        worst = tokens * self._ranks * (token + scales + of_node + of_all)
        if not other_domains:
            return worst
        sent = tokens * (token + scales + FP32_BYTES * of_all)
        return worst + sent + other_domains * tokens * (3 * (token + of_node) + scales)

    @property
    def _own_tokens(self) -> int:
        tokens = self.model.seq // self.parallel.context * self.micro
        return tokens // self.parallel.tensor if self.parallel.sequence_parallel else tokens


def _chunk(by_ranks: dict[float, int], ranks: int) -> int:
    return next(tokens for most_ranks, tokens in by_ranks.items() if ranks <= most_ranks)
