"""Seconds of a mixture of experts, by its shape and the cluster's figures, under a balanced load.

    norm  router  permute | all-to-all | (gather) sort  experts one after another  sort (scatter) | all-to-all | unpermute  bda

Each expert's GEMMs are as efficient as their own size: few rows for each expert make them slow. Nothing hides the exchanges: they
are part of the half's seconds, not windows. Of an all-to-all over `expert` ranks each sends all but its own part,

    to ranks in its node     over NVLink, or PCIe where there is none
    to others                over its share of the node's NICs                  the two at once: the longer one counts

The ranks of such a group are consecutive but for the `expert_tensor` ranks among which each expert is cut, as
`parallel_state.initialize_model_parallel` numbers them (order tp-ep-dp). Where nodes cut groups, the rank with fewest others in
its node is waited for:

    6 ranks, nodes of 8     node 0  0 1 2 3 4 5 | 6 7     node 1  8 9 10 11 | ...     6 and 7 send four parts of six far away
"""

from __future__ import annotations

from megatron_lynx.config.cluster import Cluster
from megatron_lynx.config.job import Job
from megatron_lynx.profiler.expert_tensors import expert_width, local_experts, routed_rows, saved_bytes
from megatron_lynx.profiler.link_levels import fewest_in_a_node, link_among
from megatron_lynx.profiler.profile import ExpertHalf
from megatron_lynx.profiler.roofline import Passes, Roofline
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.profiler.tensors import FP32_BYTES


def expert_half(job: Job, shape: LayerShape, roof: Roofline, around: Passes) -> ExpertHalf:
    """The figures of the whole half. `around`: norm, dropout and residual addition, as in a layer with an MLP."""
    exchanged = _exchanges(job, shape)
    passes = (
        around + _router(shape, roof) + _moved_rows(shape, roof) + _experts(shape, roof) + _shared(shape, roof, job) + exchanged
    )
    return ExpertHalf(
        input_bytes=shape.input_bytes,
        saved_bytes=saved_bytes(shape),
        forward_s=passes.forward_s,
        backward_s=passes.backward_s,
        communication_s=exchanged.forward_s + exchanged.backward_s,
    )


def all_to_all_s(cluster: Cluster, gpus: int, ranks: int, stride: int, size_bytes: float) -> float:
    """Seconds of an all-to-all of so many ranks, `stride` apart, that hand out `size_bytes` each: of the slowest group."""
    assert cluster.node is not None, "checked by Roofline.of"
    assert cluster.nic is not None, "checked by Roofline.of"
    if ranks == 1:
        return 0.0
    blocks = range(0, gpus, ranks * stride)[: cluster.node.gpus]  # groups side by side; then they begin as before in a node
    starts = {(block + rank) % cluster.node.gpus for block in blocks for rank in range(min(stride, cluster.node.gpus))}
    inside = min(fewest_in_a_node(start, stride, ranks, cluster.node.gpus) for start in starts)
    near_s = link_among(cluster, min(ranks * stride, cluster.node.gpus)).seconds(size_bytes * (inside - 1) / ranks)
    if inside == ranks:
        return near_s
    far = size_bytes * (ranks - inside) / ranks * cluster.node.gpus / cluster.nic.per_node
    return max(near_s, cluster.nic.seconds(far))


def _exchanges(job: Job, shape: LayerShape) -> Passes:
    """Rows out and back, in backward the same with their gradients; cut experts gather rows, and scatter their sums."""
    tensor, row_bytes = shape.parallel.expert_tensor_size, shape.model.hidden * shape.model.element_bytes
    rows = routed_rows(shape)
    sent_s = all_to_all_s(job.cluster, job.gpus, shape.parallel.expert, tensor, rows // tensor * row_bytes)
    gathered = rows * row_bytes * (tensor - 1) / tensor
    gathered_s = link_among(job.cluster, tensor).seconds(gathered) if tensor > 1 else 0.0
    return Passes(2 * (sent_s + gathered_s), 2 * (sent_s + gathered_s))


def _router(shape: LayerShape, roof: Roofline) -> Passes:
    """A GEMM of every token with every expert's row; choosing among scores in fp32."""
    experts = shape.model.experts
    assert experts is not None, "asked only of layers with experts"
    tokens, element = shape.own_tokens, shape.model.element_bytes
    gemm_s = roof.seconds(
        2 * tokens * shape.model.hidden * experts.count, element * tokens * (shape.model.hidden + experts.count)
    )
    chosen_s = roof.seconds(0, 4 * FP32_BYTES * tokens * experts.count)
    return Passes(gemm_s + chosen_s, 2 * gemm_s + chosen_s)


def _moved_rows(shape: LayerShape, roof: Roofline) -> Passes:
    """Permuted and put back, and sorted by expert where a rank has several: each row read and written."""
    row_bytes = 2 * shape.model.hidden * shape.model.element_bytes
    sent_s = roof.seconds(0, row_bytes * routed_rows(shape) / shape.parallel.expert_tensor_size)
    sorted_s = roof.seconds(0, row_bytes * routed_rows(shape)) if local_experts(shape) > 1 else 0.0
    return Passes(2 * (sent_s + sorted_s), 2 * (sent_s + sorted_s))


def _experts(shape: LayerShape, roof: Roofline) -> Passes:
    count, inner = local_experts(shape), expert_width(shape)
    outer = 2 * inner if shape.model.activation == "swiglu" else inner
    rows = -(-routed_rows(shape) // count)
    one = _gemm(shape, roof, rows, shape.model.hidden, outer) + _gemm(shape, roof, rows, inner, shape.model.hidden)
    moved = shape.model.element_bytes * routed_rows(shape)
    activation = Passes(roof.seconds(0, moved * (outer + inner)), roof.seconds(0, moved * (2 * outer + inner)))
    return Passes(count * one.forward_s, count * one.backward_s) + activation


def _shared(shape: LayerShape, roof: Roofline, job: Job) -> Passes:
    """An MLP on all rows, with the collectives of sequence parallelism in the open."""
    experts, tensor = shape.model.experts, shape.parallel.tensor
    if experts is None or not experts.shared_ffn:
        return Passes(0.0, 0.0)
    inner = experts.shared_ffn // tensor
    outer = 2 * inner if shape.model.activation == "swiglu" else inner
    gemms = _gemm(shape, roof, shape.tokens, shape.model.hidden, outer) + _gemm(
        shape, roof, shape.tokens, inner, shape.model.hidden
    )
    moved = shape.model.element_bytes * shape.tokens
    activation = Passes(roof.seconds(0, moved * (outer + inner)), roof.seconds(0, moved * (2 * outer + inner)))
    sent_s = link_among(job.cluster, tensor).seconds(shape.gathered_bytes * (tensor - 1) / tensor) if tensor > 1 else 0.0
    return gemms + activation + Passes(2 * sent_s, 2 * sent_s)


def _gemm(shape: LayerShape, roof: Roofline, rows: int, inner: int, width: int) -> Passes:
    """Rows x inner x width. The weight's gradient is added to an fp32 buffer: read and written."""
    flops, tensors, weight = 2 * rows * inner * width, rows * (inner + width), inner * width
    element = shape.model.element_bytes
    once_s = roof.seconds(flops, element * (tensors + weight))
    return Passes(once_s, once_s + roof.seconds(flops, element * tensors + 2 * FP32_BYTES * weight))
