"""Planning of a mixture of experts.

    norm  shared  router  permute | all-to-all | (gather) sort  experts one after another  sort (scatter) | all-to-all | unpermute
    └────────────────────┴──────── dispatch ────────────────┘   fc1  activation  fc2      └────────────── combine ──────────────┘

Rows are the fullest rank's (`experts.load`), for which the others wait. Each expert's GEMMs have the efficiency of their own
size. Exchanges are separate from items. In an all-to-all over `expert` ranks each sends all but its own part,

    to ranks in its node     over NVLink, or PCIe without it
    to others                over its share of the node's NICs                  concurrently: the longer one counts

Ranks of such a group are `expert_tensor` apart, the ranks that split each expert (`parallel_state.initialize_model_parallel`,
order tp-ep-dp). If a node contains only part of a group, the rank with fewest peers in its node is slowest:

    6 ranks, nodes of 8     node 0  0 1 2 3 4 5 | 6 7     node 1  8 9 10 11 | ...     6 and 7 send four parts of six far away

The all-gather dispatcher sends every token to all of these ranks, those of split experts included, and sums the results.

DeepEP and HybridEP send a token once to each rank with any of its experts, and once to another node, where NVLink forwards it;
split experts are ranks of the same group. A token for k of E experts, chosen evenly, goes to one of n parts with E/n of them with
probability 1 - C(E - E/n, k) / C(E, k).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import ceil, comb

from megatron_lynx.config.cluster import Cluster
from megatron_lynx.config.experts import Experts
from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.kinds.experts.saved import (
    expert_linears,
    expert_tensors,
    expert_width,
    experts_of,
    gathered_tokens,
    local_experts,
    padded_rows,
    routed_rows,
    shared_width,
)
from megatron_lynx.kinds.experts.section import (
    COMBINE,
    DISPATCH,
    EXPERTS,
    EXPERTS_ACTIVATION,
    FUSED,
    ROUTER,
    SHARED_ACTIVATION,
    SHARED_LINEARS,
)
from megatron_lynx.kinds.face import HalfParameters, Linear, Planning, Step, kept_of_argument, made_bytes
from megatron_lynx.kinds.section import Item
from megatron_lynx.profiler.profile import ExpertHalf, Profile, SavedTensor
from megatron_lynx.profiler.roofline import (
    Kernels,
    Passes,
    Roofline,
    activation_kernels,
    collective_s,
    fewest_in_a_node,
    link_among,
    weighted_kernels,
)
from megatron_lynx.profiler.shape import FP32_BYTES, LayerShape


class MixtureOfExperts(Planning):
    def linears(self, shape: LayerShape) -> Mapping[str, Linear]:
        return expert_linears(shape)

    def kernels(self, shape: LayerShape, item: Item) -> Kernels:
        if item.name == SHARED_ACTIVATION:
            return activation_kernels(shape.model, shape.tokens, shared_width(shape))
        return weighted_kernels(shape.model, padded_rows(shape), expert_width(shape))

    def seconds(self, shape: LayerShape, item: Item, roof: Roofline) -> Passes:
        if item.name == ROUTER:
            return _router(shape, roof)
        return _moved_rows(shape, roof) if item.exchanges else super().seconds(shape, item, roof)

    def listed(self) -> Iterable[Item]:
        """Linears first, then the routed path, then the items of an MLP layer."""
        later_names = (EXPERTS_ACTIVATION, ROUTER, DISPATCH, COMBINE, self.section.norm, self.section.residual, SHARED_ACTIVATION)
        names = *EXPERTS.linears, *SHARED_LINEARS, *later_names
        return (self.section.of_name[name] for name in dict.fromkeys(names) if name in self.section.names)

    def output_bytes(self, shape: LayerShape, item: Item) -> int:
        """Return the outputs of linears; exchanged rows are counted elsewhere."""
        linear = self.linears(shape).get(item.name)
        return 0 if linear is None else shape.model.element_bytes * linear.times * linear.rows * linear.made

    def half(self, job: Job, shape: LayerShape, roof: Roofline) -> ExpertHalf:
        half = super().half(job, shape, roof)
        return ExpertHalf(
            input_bytes=half.input_bytes,
            items=half.items,
            tensors=half.tensors,
            exchange_s=_exchange_s(job, shape),
            cut_s=_cut_s(job, shape),
            collective_s=_shared_collective_s(job, shape),
            shared_rate=job.fused_dispatch.computing_kept if experts_of(shape).shared_beside else 0.0,
        )

    def saved(self, shape: LayerShape) -> Iterator[SavedTensor]:
        yield from expert_tensors(shape)

    def parameters(self, model: Model, layout: Parallel) -> HalfParameters:
        """Each of `expert` ranks holds its part of the experts, split among `expert_tensor` ranks; every rank has the router;
        shared experts are an MLP split among `tensor` ranks (`SequentialMLP`, `TopKRouter`, `SharedExpertMLP`)."""
        experts, local = mixture(model), mixture(model).count // layout.expert
        one, shared, router = expert_matrices(model), _mlp(model, experts.shared_ffn), model.hidden * experts.count
        linears, gate = 2 * local + (2 if experts.shared_ffn else 0), model.hidden * experts.shared_gate
        return HalfParameters(
            cut=shared,
            passed=experts.per_token * one + shared + router + gate,
            vectors=model.norm_parameters() + gate,
            weights=linears + 1 + experts.shared_gate,
            biased=linears,
            whole=router,
            router=router,
            apart=local * (one // layout.expert_tensor_size + _biases(model, layout.expert_tensor_size)),
        )

    def backward(self, shape: LayerShape) -> Iterator[Step]:
        """Empty: rows in flight bound its transients (`cost.stage_memory`)."""
        yield from ()

    def operands_bytes(self, profile: Profile, linear: str) -> tuple[int, int]:
        """Experts return as many rows as they get."""
        half, role = profile.of(self.section), self.section.of_name[linear].role
        if role == "experts_in":
            return kept_of_argument(half, linear), made_bytes(half, linear)
        if role == "experts_out":
            return kept_of_argument(half, linear), made_bytes(half, DISPATCH)
        return super().operands_bytes(profile, linear)


def mixture(model: Model) -> Experts:
    assert model.experts is not None, "asked only of models with experts"
    return model.experts


def expert_sharers(job: Job) -> int:
    """Return the expert data-parallel size, over which experts' optimizer states are sharded
    (`parallel_state.initialize_model_parallel`)."""
    layout = job.parallel
    return job.gpus // (layout.expert_tensor_size * layout.expert * layout.pipeline)


def expert_matrices(model: Model) -> int:
    return _mlp(model, mixture(model).ffn)


def _mlp(model: Model, ffn: int) -> int:
    return model.hidden * ffn * (3 if model.gated else 2)


def _biases(model: Model, tensor: int) -> int:
    if not model.bias:
        return 0
    ffn = mixture(model).ffn
    return (2 * ffn if model.gated else ffn) // tensor + model.hidden


def all_to_all_s(cluster: Cluster, gpus: int, ranks: int, stride: int, size_bytes: float) -> float:
    """Return the slowest group's all-to-all of `ranks` ranks, `stride` apart, that send `size_bytes` each."""
    assert cluster.node is not None, "checked by Roofline.of"
    assert cluster.nic is not None, "checked by Roofline.of"
    if ranks == 1:
        return 0.0
    blocks = range(0, gpus, ranks * stride)[: cluster.node.gpus]  # adjacent groups; later ones start at the same places of a node
    starts = {(block + rank) % cluster.node.gpus for block in blocks for rank in range(min(stride, cluster.node.gpus))}
    inside = min(fewest_in_a_node(start, stride, ranks, cluster.node.gpus) for start in starts)
    near_s = link_among(cluster, min(ranks * stride, cluster.node.gpus)).seconds(size_bytes * (inside - 1) / ranks)
    if inside == ranks:
        return near_s
    far = size_bytes * (ranks - inside) / ranks * cluster.node.gpus / cluster.nic.per_node
    return max(near_s, cluster.nic.seconds(far))


def _exchange_s(job: Job, shape: LayerShape) -> float:
    """Return one exchange of tokens; each pass has two."""
    tensor, row_bytes = shape.parallel.expert_tensor_size, shape.model.hidden * shape.model.element_bytes
    if experts_of(shape).dispatcher in FUSED:
        return _fused_exchange_s(job.cluster, shape, row_bytes)
    if experts_of(shape).dispatcher == "allgather":
        ranks = shape.parallel.expert * tensor
        sent_bytes = (ranks - 1) * shape.own_tokens * row_bytes
        return collective_s(job.cluster, ranks, sent_bytes)
    return all_to_all_s(job.cluster, job.gpus, shape.parallel.expert, tensor, routed_rows(shape) // tensor * row_bytes)


def _fused_exchange_s(cluster: Cluster, shape: LayerShape, row_bytes: int) -> float:
    """Return the same for a flex dispatcher: every token once per rank, and once per other node."""
    assert cluster.node is not None, "checked by Roofline.of"
    assert cluster.nic is not None, "checked by Roofline.of"
    experts, ranks = experts_of(shape), shape.parallel.expert * shape.parallel.expert_tensor_size
    if ranks == 1:
        return 0.0
    inside, nodes = min(ranks, cluster.node.gpus), ceil(ranks / cluster.node.gpus)
    sent_bytes = shape.own_tokens * row_bytes * experts.load
    received = shape.parallel.expert_tensor_size * expected_parts(experts, shape.parallel.expert)
    near_s = link_among(cluster, inside).seconds(sent_bytes * received * (inside - 1) / inside)
    if nodes == 1:
        return near_s
    far_bytes = sent_bytes * expected_parts(experts, min(nodes, shape.parallel.expert)) * (nodes - 1) / nodes
    return max(near_s, cluster.nic.seconds(far_bytes * cluster.node.gpus / cluster.nic.per_node))


def expected_parts(experts: Experts, parts: int) -> float:
    """Return the expected number of parts that a token is sent to, of `parts` equal parts of a layer's experts."""
    other_experts = experts.count - experts.count // parts
    return parts * (1 - comb(other_experts, experts.per_token) / comb(experts.count, experts.per_token))


def _cut_s(job: Job, shape: LayerShape) -> float:
    """Return one gather of rows to split experts, or scatter of sums; other dispatchers include it."""
    if experts_of(shape).dispatcher != "alltoall":
        return 0.0
    tensor, row_bytes = shape.parallel.expert_tensor_size, shape.model.hidden * shape.model.element_bytes
    gathered = routed_rows(shape) * row_bytes * (tensor - 1) / tensor
    return collective_s(job.cluster, tensor, gathered)


def _shared_collective_s(job: Job, shape: LayerShape) -> float:
    """Return one exposed collective of shared experts, an MLP on all rows."""
    tensor = shape.parallel.tensor
    return collective_s(job.cluster, tensor, shape.gathered_bytes * (tensor - 1) / tensor) if shared_width(shape) else 0.0


def _router(shape: LayerShape, roof: Roofline) -> Passes:
    """A GEMM of every token with every expert's row, and top-k in fp32."""
    count, tokens, element = experts_of(shape).count, shape.own_tokens, shape.model.element_bytes
    gemm_s = roof.seconds(2 * tokens * shape.model.hidden * count, element * tokens * (shape.model.hidden + count))
    chosen_s = roof.seconds(0, 4 * FP32_BYTES * tokens * count)
    return Passes(gemm_s + chosen_s, 2 * gemm_s + chosen_s)


def _moved_rows(shape: LayerShape, roof: Roofline) -> Passes:
    """Return one permutation of rows, and the sorting by expert if a rank has several: each row is read and written. Flex
    dispatchers only sort."""
    row_bytes = 2 * shape.model.hidden * shape.model.element_bytes
    sent_s = roof.seconds(0, row_bytes * routed_rows(shape) / shape.parallel.expert_tensor_size)
    if experts_of(shape).dispatcher == "allgather":  # one copy, from all tokens to the rows of this rank's experts
        return Passes(*2 * (roof.seconds(0, row_bytes * max(padded_rows(shape), gathered_tokens(shape))),))
    sorted_s = roof.seconds(0, row_bytes * routed_rows(shape)) if local_experts(shape) > 1 else 0.0
    if padded_rows(shape) > routed_rows(shape):  # copied to padded rows
        sorted_s += roof.seconds(0, row_bytes * padded_rows(shape))
    if experts_of(shape).dispatcher in FUSED:
        return Passes(max(sent_s, sorted_s), max(sent_s, sorted_s))
    return Passes(sent_s + sorted_s, sent_s + sorted_s)
