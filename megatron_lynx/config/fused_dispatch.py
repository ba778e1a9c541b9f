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

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_lynx.config.job import Job

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
SCALED = 128
"""Numbers with one scale."""


def multiprocessors_of(job: Job) -> int:
    """How many one kernel holds while tokens travel to experts or back; 0 where no kernel of a backend's does that."""
    experts = job.model.experts
    if experts is None or experts.dispatcher == "alltoall" or _ranks(job) == 1:
        return 0
    return experts.multiprocessors or MULTIPROCESSORS[experts.dispatcher]


def computing_kept(job: Job) -> float:
    """The share of its rate that compute keeps beside such a kernel; 1 where nobody says how many multiprocessors there are."""
    attention = job.cluster.ordered_attention
    return 1.0 if attention is None else max(0.1, 1 - multiprocessors_of(job) / attention.multiprocessors)


def buffers_bytes(job: Job) -> int:
    """Of the buffers of one device, on the testbed of none."""
    experts = job.model.experts
    if experts is None or experts.dispatcher == "alltoall" or _ranks(job) == 1 or job.cluster.device == "cpu":
        return 0
    return _deep_ep_bytes(job) if experts.dispatcher == "deepep" else _hybrid_ep_bytes(job)


def _own_tokens(job: Job) -> int:
    tokens = job.model.seq // job.parallel.context * job.batch.micro
    return tokens // job.parallel.tensor if job.parallel.sequence_parallel else tokens


def _ranks(job: Job) -> int:
    return job.parallel.expert * job.parallel.expert_tensor_size


def _deep_ep_bytes(job: Job) -> int:
    ranks, channels = _ranks(job), multiprocessors_of(job) // 2
    token_bytes = job.model.hidden * max(2, job.model.element_bytes) + META_BYTES + TOPK_AND_SCALES_BYTES
    size = channels * min(ranks, NVLINK_PEERS) * _chunk(NVLINK_CHUNK, ranks, NVLINK_CHUNK_BEYOND) * token_bytes
    if ranks > NVLINK_PEERS:
        both = 2 * (token_bytes + FLAGS_BYTES)
        size += channels * (ranks // NVLINK_PEERS) * _chunk(RDMA_CHUNK, ranks, RDMA_CHUNK_BEYOND) * both
    return size + WORKSPACE_BYTES


def _chunk(by_ranks: dict[int, int], ranks: int, beyond: int) -> int:
    return next((tokens for most, tokens in by_ranks.items() if ranks <= most), beyond)


def _hybrid_ep_bytes(job: Job) -> int:
    """A node is a domain of NVLink."""
    ranks, node = _ranks(job), job.cluster.node.gpus if job.cluster.node is not None else NVLINK_PEERS
    within = min(ranks, node)
    others, tokens = -(-ranks // within) - 1, -(-_own_tokens(job) // HYBRID_CHUNK) * HYBRID_CHUNK
    own = job.model.experts.count // job.parallel.expert if job.model.experts is not None else 0
    token = 2 * job.model.hidden
    scales, of_node, of_all = FP32_BYTES * (job.model.hidden // SCALED), FP32_BYTES * own * within, own * ranks
    worst = tokens * ranks * (token + scales + of_node)
    gathered = tokens * ranks * of_all
    if not others:
        return worst + gathered
    sent = tokens * (token + scales + FP32_BYTES * of_all)
    travelling = others * tokens * (3 * (token + of_node) + scales)
    return worst + gathered + sent + travelling
