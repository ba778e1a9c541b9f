"""What DeepEP's and HybridEP's kernels take of a device: bytes of their buffers, and multiprocessors while tokens travel.

    deepep     a ring for each channel and neighbour: tokens on their way, whatever the batch. Two multiprocessors a channel
               NVLink    channels x ranks of a node x chunk x (token + 8 + topk and scales)
               RDMA      channels x nodes x chunk x (token + 8 + topk and scales + 16), to send and to receive
               and a workspace of 32 MiB
    hybridep   room for the worst case, in which every token of all ranks goes to this one, with scales of each 128 numbers
               and the probabilities of all experts of a node; a map of all tokens to all experts;
               over several nodes its own tokens, and one buffer more for what travels out and two for what comes back, each
               for the tokens of one rank of each other node

They are allocated beside PyTorch's allocator, once for each process, when the first layer of experts runs, and so part of what
a plan leaves alone (`config.device_reserve`); there are none where a rank exchanges with itself alone. Read in deepseek-
ai/DeepEP at dd758ca (`csrc/legacy/config.hpp`: `get_nvl_buffer_size_hint`, `get_rdma_buffer_size_hint`;
`deep_ep/buffers/legacy.py`: recommended configurations) and its branch hybrid-ep at 94a9f8f
(`csrc/hybrid_ep/buffer/intranode.cu`, `internode_doca.cu`, `extension/allgather.cu`), and in Megatron's `fused_a2a.get_buffer`
and `init_hybrid_ep_buffer` of megatron-core 0.16.1 to 0.19.2. Flags and counters of some kilobytes are not counted.

A kernel holds its multiprocessors for as long as tokens travel, so GEMMs beside it have those that are left. Not priced: that
HybridEP's own kernels for sorting rows, which nothing runs beside, are given all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron_lynx.config.cluster import Cluster
from megatron_lynx.config.experts import Experts
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.kinds.experts.section import FUSED

FP32_BYTES = 4
MULTIPROCESSORS = {"deepep": 20, "hybridep": 16}
"""Of one kernel, as Megatron sets them where a launch says nothing (`moe_deepep_num_sms`, `moe_hybridep_num_sms`)."""
NVLINK_PEERS, WORKSPACE_BYTES, META_BYTES = 8, 32 << 20, 8
TOPK_AND_SCALES_BYTES = 128 * (8 + 4) + 128 * 4
"""Of a token: the most experts that one may have, with probabilities, and the most scales of one in FP8."""
FLAGS_BYTES = 16
NVLINK_CHUNK = {8: 256, 64: 288, 96: 480, 128: 560}
NVLINK_CHUNK_BEYOND = 720
RDMA_CHUNK = {16: 140, 64: 128}
RDMA_CHUNK_BEYOND = 132
"""Tokens that one channel has room for from one neighbour, by the most ranks of which that holds: the larger one of dispatch and
combine, filled up to what is sent at once."""
HYBRID_CHUNK = 64
"""Tokens, of which HybridEP's buffers have a multiple."""
DEEP_EP_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""`Buffer.get_dispatch_config`."""
HYBRID_EXPERTS, HYBRID_COLUMNS, HYBRID_TOKENS = 4, 16, (65536 - 2) // 3
"""`BufferConfig.is_valid`, `hybrid_ep_token_capacity_is_valid`: three entries a token in a queue of fewer than 65536."""
SCALED = 128
"""Numbers with one scale."""


class FusedDispatch(NamedTuple):
    """Tokens of one device on their way to experts and back."""

    model: Model
    parallel: Parallel
    micro: int
    """Sequences of a micro-batch."""
    cluster: Cluster

    @property
    def _by_kernels(self) -> Experts | None:
        """The experts, where a backend's kernels bring them tokens from other ranks."""
        experts = self.model.experts
        return None if experts is None or experts.dispatcher not in FUSED or self._ranks == 1 else experts

    @property
    def _ranks(self) -> int:
        return self.parallel.expert * self.parallel.expert_tensor_size

    @property
    def _ranks_within(self) -> int:
        """Of them those of one node, which is a domain of NVLink."""
        return min(self._ranks, NVLINK_PEERS if self.cluster.node is None else self.cluster.node.gpus)

    @property
    def multiprocessors(self) -> int:
        """How many one kernel holds while tokens travel; 0 where none does that."""
        experts = self._by_kernels
        return 0 if experts is None else experts.multiprocessors or MULTIPROCESSORS[experts.dispatcher]

    @property
    def computing_kept(self) -> float:
        """The share of its rate that compute keeps beside such a kernel; 1 where a device's multiprocessors are not known."""
        attention = self.cluster.ordered_attention
        return 1.0 if attention is None else max(0.1, 1 - self.multiprocessors / attention.multiprocessors)

    @property
    def buffers_bytes(self) -> int:
        """Of the buffers of one device, on the testbed of none."""
        experts = self._by_kernels
        if experts is None or self.cluster.device == "cpu":
            return 0
        return self._deep_ep_bytes if experts.dispatcher == "deepep" else self._hybrid_ep_bytes(experts)

    def limits(self) -> Iterator[tuple[str, str]]:
        """What a backend's kernels stop at, on all ranks when the first tokens travel: found, and needed."""
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
        if of_node % HYBRID_EXPERTS or self.model.hidden % HYBRID_COLUMNS:
            needed = f"multiples of {HYBRID_EXPERTS} experts in a node and of {HYBRID_COLUMNS} columns"
            yield f"hybridep with {of_node} experts in a node and {self.model.hidden} columns", needed
        if ranks > within and self._own_tokens > HYBRID_TOKENS:
            needed = f"at most {HYBRID_TOKENS} on each rank between nodes, which its queues have room for"
            yield f"hybridep with {self._own_tokens} tokens", needed

    @property
    def _deep_ep_bytes(self) -> int:
        ranks, channels = self._ranks, self.multiprocessors // 2
        token_bytes = self.model.hidden * max(2, self.model.element_bytes) + META_BYTES + TOPK_AND_SCALES_BYTES
        size = channels * min(ranks, NVLINK_PEERS) * _chunk(NVLINK_CHUNK, ranks, NVLINK_CHUNK_BEYOND) * token_bytes
        if ranks > NVLINK_PEERS:
            both = 2 * (token_bytes + FLAGS_BYTES)
            size += channels * (ranks // NVLINK_PEERS) * _chunk(RDMA_CHUNK, ranks, RDMA_CHUNK_BEYOND) * both
        return size + WORKSPACE_BYTES

    def _hybrid_ep_bytes(self, experts: Experts) -> int:
        within = self._ranks_within
        others, own = -(-self._ranks // within) - 1, experts.count // self.parallel.expert
        tokens = -(-self._own_tokens // HYBRID_CHUNK) * HYBRID_CHUNK
        token, scales = 2 * self.model.hidden, FP32_BYTES * (self.model.hidden // SCALED)
        of_node, of_all = FP32_BYTES * own * within, own * self._ranks
        worst = tokens * self._ranks * (token + scales + of_node + of_all)
        if not others:
            return worst
        sent = tokens * (token + scales + FP32_BYTES * of_all)
        return worst + sent + others * tokens * (3 * (token + of_node) + scales)

    @property
    def _own_tokens(self) -> int:
        tokens = self.model.seq // self.parallel.context * self.micro
        return tokens // self.parallel.tensor if self.parallel.sequence_parallel else tokens


def _chunk(by_ranks: dict[int, int], ranks: int, beyond: int) -> int:
    return next((tokens for most, tokens in by_ranks.items() if ranks <= most), beyond)
