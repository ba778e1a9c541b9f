"""Seconds of a mixture of experts, item by item, by its shape and the cluster's figures.

    norm  shared  router  permute | all-to-all | (gather) sort  experts one after another  sort (scatter) | all-to-all | unpermute
    └────────────────────┴──────── dispatch ────────────────┘   fc1  activation  fc2      └────────────── combine ──────────────┘

Rows are those of the fullest rank (`experts.load`), for which the others wait. Each expert's GEMMs are as efficient as their own
size: few rows for each expert make them slow. The exchanges are counted beside the items. Of an all-to-all over `expert` ranks
each sends all but its own part,

    to ranks in its node     over NVLink, or PCIe where there is none
    to others                over its share of the node's NICs                  the two at once: the longer one counts

The ranks of such a group are consecutive but for the `expert_tensor` ranks among which each expert is cut, as
`parallel_state.initialize_model_parallel` numbers them (order tp-ep-dp). Where nodes cut groups, the rank with fewest others in
its node is waited for:

    6 ranks, nodes of 8     node 0  0 1 2 3 4 5 | 6 7     node 1  8 9 10 11 | ...     6 and 7 send four parts of six far away
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.anatomy import MLP, Role
from megatron_lynx.anatomy.experts import (
    COMBINE,
    DISPATCH,
    EXPERTS_ACTIVATION,
    ROUTER,
    SHARED_ACTIVATION,
)
from megatron_lynx.config.cluster import Cluster
from megatron_lynx.config.job import Job
from megatron_lynx.profiler.element_wise import activation_kernels, weighted_kernels
from megatron_lynx.profiler.expert_shape import (
    ExpertLinear,
    expert_linears,
    expert_width,
    experts_of,
    local_experts,
    routed_rows,
    shared_width,
)
from megatron_lynx.profiler.expert_tensors import expert_tensors, saved_parts
from megatron_lynx.profiler.item_seconds import kernels_s, unmultiplied_s
from megatron_lynx.profiler.link_levels import fewest_in_a_node, link_among
from megatron_lynx.profiler.profile import ExpertHalf, ItemProfile
from megatron_lynx.profiler.roofline import Passes, Roofline
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.profiler.tensors import FP32_BYTES

AROUND: tuple[Role, ...] = ("norm", "residual")
"""What is as in a layer with an MLP."""


def expert_half(job: Job, shape: LayerShape, roof: Roofline) -> ExpertHalf:
    """The figures of the half."""
    parts = saved_parts(shape)
    return ExpertHalf(
        input_bytes=shape.input_bytes,
        items={name: item.model_copy(update={"saved_bytes": parts[name]}) for name, item in _items(shape, roof)},
        tensors=expert_tensors(shape),
        exchange_s=_exchange_s(job, shape),
        cut_s=_cut_s(job, shape),
        collective_s=_shared_collective_s(job, shape),
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


def _exchange_s(job: Job, shape: LayerShape) -> float:
    """One all-to-all, of which there are two in each pass: rows out, rows back."""
    tensor, row_bytes = shape.parallel.expert_tensor_size, shape.model.hidden * shape.model.element_bytes
    return all_to_all_s(job.cluster, job.gpus, shape.parallel.expert, tensor, routed_rows(shape) // tensor * row_bytes)


def _cut_s(job: Job, shape: LayerShape) -> float:
    """Cut experts gather rows, and scatter their sums."""
    tensor, row_bytes = shape.parallel.expert_tensor_size, shape.model.hidden * shape.model.element_bytes
    gathered = routed_rows(shape) * row_bytes * (tensor - 1) / tensor
    return link_among(job.cluster, tensor).seconds(gathered) if tensor > 1 else 0.0


def _shared_collective_s(job: Job, shape: LayerShape) -> float:
    """One collective of shared experts, which are an MLP on all rows: nothing hides those of sequence parallelism."""
    tensor = shape.parallel.tensor
    if tensor == 1 or not shared_width(shape):
        return 0.0
    return link_among(job.cluster, tensor).seconds(shape.gathered_bytes * (tensor - 1) / tensor)


def _items(shape: LayerShape, roof: Roofline) -> Iterator[tuple[str, ItemProfile]]:
    rows = routed_rows(shape)
    yield from ((name, _linear(shape, roof, linear)) for name, linear in expert_linears(shape).items())
    yield EXPERTS_ACTIVATION, _unmultiplied(kernels_s(weighted_kernels(shape.model, rows, expert_width(shape)), roof))
    yield ROUTER, _unmultiplied(_router(shape, roof))
    yield from ((name, _unmultiplied(_moved_rows(shape, roof))) for name in (DISPATCH, COMBINE))
    yield from ((MLP.item(role).name, _unmultiplied(unmultiplied_s(shape, MLP.item(role), roof))) for role in AROUND)
    if width := shared_width(shape):
        yield SHARED_ACTIVATION, _unmultiplied(kernels_s(activation_kernels(shape.model, shape.tokens, width), roof))


def _unmultiplied(passes: Passes) -> ItemProfile:
    """An item of which no linear is looked into. What it saves is counted elsewhere (`profiler.expert_tensors`)."""
    return ItemProfile(forward_s=passes.forward_s, backward_s=passes.backward_s, saved_bytes=0, output_bytes=0, flops=0)


def _router(shape: LayerShape, roof: Roofline) -> Passes:
    """A GEMM of every token with every expert's row; choosing among scores in fp32."""
    count, tokens, element = experts_of(shape).count, shape.own_tokens, shape.model.element_bytes
    gemm_s = roof.seconds(2 * tokens * shape.model.hidden * count, element * tokens * (shape.model.hidden + count))
    chosen_s = roof.seconds(0, 4 * FP32_BYTES * tokens * count)
    return Passes(gemm_s + chosen_s, 2 * gemm_s + chosen_s)


def _moved_rows(shape: LayerShape, roof: Roofline) -> Passes:
    """On one way: permuted or put back, and sorted by expert where a rank has several. Each row is read and written."""
    row_bytes = 2 * shape.model.hidden * shape.model.element_bytes
    sent_s = roof.seconds(0, row_bytes * routed_rows(shape) / shape.parallel.expert_tensor_size)
    sorted_s = roof.seconds(0, row_bytes * routed_rows(shape)) if local_experts(shape) > 1 else 0.0
    return Passes(sent_s + sorted_s, sent_s + sorted_s)


def _linear(shape: LayerShape, roof: Roofline, linear: ExpertLinear) -> ItemProfile:
    """One expert's GEMM after another's. A weight's gradient is added to an fp32 buffer: read and written."""
    count, element = linear.experts, shape.model.element_bytes
    tensors, weight = linear.rows * (linear.taken + linear.made), linear.taken * linear.made
    once_s = count * roof.seconds(linear.one_flops, element * (tensors + weight))
    wgrad_s = count * roof.seconds(linear.one_flops, element * tensors + 2 * FP32_BYTES * weight)
    return ItemProfile(
        forward_s=once_s,
        backward_s=once_s + wgrad_s,
        saved_bytes=0,
        output_bytes=element * count * linear.rows * linear.made,
        flops=count * linear.one_flops,
        dgrad_s=once_s,
        wgrad_s=wgrad_s,
    )
