"""Device resources of DeepEP's and HybridEP's kernels: buffer bytes, and multiprocessors during token exchanges.

    deepep     a ring per channel and peer, independent of the batch. Two multiprocessors per channel
               NVLink    channels x ranks of a node x chunk x (token + 8 + topk and scales)
               RDMA      channels x nodes x chunk x (token + 8 + topk and scales + 16), to send and to receive
               and a workspace of 32 MiB
    hybridep   the worst case, in which all ranks send every token here, with a scale per 128 values and the probabilities of
               all experts of a node; a map of all tokens to all experts;
               over several nodes also the rank's own tokens, one send and two receive buffers, each for the tokens of one rank
               of each other node

They are allocated outside PyTorch's allocator, once per process, when the first MoE layer runs, and count towards the reserve
(`config.device_reserve`). A rank that exchanges only with itself has none. Read in deepseek-ai/DeepEP at dd758ca
(`csrc/legacy/config.hpp`: `get_nvl_buffer_size_hint`, `get_rdma_buffer_size_hint`; `deep_ep/buffers/legacy.py`: recommended
configurations) and its branch hybrid-ep at 94a9f8f (`csrc/hybrid_ep/buffer/intranode.cu`, `internode_doca.cu`,
`extension/allgather.cu`), and in `fused_a2a.get_buffer` and `init_hybrid_ep_buffer` of megatron-core 0.16.1 to 0.19.2. Flags and
counters of some kilobytes are not counted.

A dispatch kernel occupies its multiprocessors during the whole exchange; overlapped GEMMs run on the others. HybridEP's sorting
kernels, which overlap nothing, are priced as if they had fewer multiprocessors than they have.
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
"""Megatron's defaults for one kernel (`moe_deepep_num_sms`, `moe_hybridep_num_sms`)."""
NVLINK_PEERS, WORKSPACE_BYTES, META_BYTES = 8, 32 << 20, 8
TOPK_AND_SCALES_BYTES = 128 * (8 + 4) + 128 * 4
"""Bytes per token: the maximum number of experts with probabilities, and the maximum number of FP8 scales."""
FLAGS_BYTES = 16
NVLINK_CHUNK = {8: 256, 64: 288, 96: 480, 128: 560}
NVLINK_CHUNK_BEYOND = 720
RDMA_CHUNK = {16: 140, 64: 128}
RDMA_CHUNK_BEYOND = 132
"""Tokens per channel and peer, by the largest number of ranks they hold for: the larger of dispatch and combine, rounded up to
one send."""
HYBRID_CHUNK = 64
"""HybridEP's buffers are multiples of this many tokens."""
DEEP_EP_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""`Buffer.get_dispatch_config`."""
HYBRID_EXPERTS, HYBRID_COLUMNS, HYBRID_TOKENS = 4, 16, (65536 - 2) // 3
"""`BufferConfig.is_valid`, `hybrid_ep_token_capacity_is_valid`: three entries per token in a queue of fewer than 65536."""
SCALED = 128
"""Values per scale."""


class FusedDispatch(NamedTuple):
    """Token exchange of one device."""

    model: Model
    parallel: Parallel
    micro: int
    """Sequences of a micro-batch."""
    cluster: Cluster

    @property
    def _by_kernels(self) -> Experts | None:
        """The experts, if fused kernels exchange their tokens with other ranks; else None."""
        experts = self.model.experts
        return None if experts is None or experts.dispatcher not in FUSED or self._ranks == 1 else experts

    @property
    def _ranks(self) -> int:
        return self.parallel.expert * self.parallel.expert_tensor_size

    @property
    def _ranks_within(self) -> int:
        """Ranks of the exchange in one node (one NVLink domain)."""
        return min(self._ranks, NVLINK_PEERS if self.cluster.node is None else self.cluster.node.gpus)

    @property
    def multiprocessors(self) -> int:
        """Multiprocessors that one kernel occupies during an exchange; 0 without fused kernels."""
        experts = self._by_kernels
        return 0 if experts is None else experts.multiprocessors or MULTIPROCESSORS[experts.dispatcher]

    @property
    def computing_kept(self) -> float:
        """Share of the compute rate left during an exchange; 1 if the device's multiprocessors are unknown."""
        attention = self.cluster.ordered_attention
        return 1.0 if attention is None else max(0.1, 1 - self.multiprocessors / attention.multiprocessors)

    @property
    def buffers_bytes(self) -> int:
        """Bytes of one device's buffers; 0 on the testbed."""
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
