"""Planning of a mixture of experts.

    norm  shared  router  permute | all-to-all | (gather) sort  experts one after another  sort (scatter) | all-to-all | unpermute
    └────────────────────┴──────── dispatch ────────────────┘   fc1  activation  fc2      └────────────── combine ──────────────┘

Rows are the fullest rank's (`experts.load`), for which the others wait. Each expert's GEMMs have the efficiency of their own
size. In an all-to-all over `expert` ranks each sends all but its own part, to ranks in its node over NVLink (or PCIe) and to
others over its share of the node's NICs, concurrently. Ranks of such a group are `expert_tensor` apart
(`parallel_state.initialize_model_parallel`, order tp-ep-dp). The rank with fewest peers in its node is slowest.

The all-gather dispatcher sends every token to all of these ranks, those of split experts included, and sums the results.

DeepEP and HybridEP send a token once to each rank with any of its experts, and once to another node, where NVLink forwards it;
split experts are ranks of the same group. A token for k of E experts, chosen evenly, goes to one of n parts with E/n of them with
probability 1 - C(E - E/n, k) / C(E, k).

Saved tensors. T: a rank's own tokens; f: width of one expert on a rank; R = T k etp x load: rows of the fullest rank, with etp
ranks that split each expert. Bytes use `experts.holds` instead of `experts.load`, if given.

    norm         as in a layer with an MLP, but never fused into a linear
    router       `TopKRouter`: chosen experts (int64, twice), their scores in fp32; for all experts `experts.scores` numbers in
                 fp32, one of them for an auxiliary loss
    dispatch     routing map (a byte each) and probabilities of all experts; `permute` saves row sources (int64), which `combine`
                 reads as well. Outputs: R rows, and the probability of each
    experts      output of the first GEMM, and input of the second:
                 fused     `WeightedSwiGLUFunction` saves its input and the probabilities: SwiGLU 2f + f. Without it nothing is
                           fused: f + f + f
                 eager     SwiGLU 2f, SiLU f, the other half f, their product f, times the probability f; GELU f + f + f
                 squared   ReLU f + f + f; f + f in one kernel with the probabilities (`WeightedSquaredReLUFunction`)
    shared       an MLP's, without norm and dropout

In FP8 each expert's rows are padded to a multiple of 16, or 32 (mxfp8): by `Fp8Padding` before its GEMMs, or by the router, if so
configured, and padding is then exchanged, too. Linears save bytes and scales of their inputs, each expert its own, and the
dispatched rows are not saved. Except with delayed scaling, the shared experts' first linear saves the norm's output
(`set_save_original_input`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from math import ceil, comb

from megatron_lynx.config.cluster import Cluster
from megatron_lynx.config.experts import Experts
from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.fp8_recipes import STORED
from megatron_lynx.kinds.dense.planning import mlp_tensors
from megatron_lynx.kinds.dense.section import MLP
from megatron_lynx.kinds.experts.section import (
    COMBINE,
    DISPATCH,
    EXPERTS,
    EXPERTS_ACTIVATION,
    EXPERTS_FC1,
    EXPERTS_FC2,
    FUSED,
    ROUTER,
    SHARED_ACTIVATION,
    SHARED_EXPERTS,
    SHARED_FC1,
    SHARED_FC2,
    SHARED_LINEARS,
)
from megatron_lynx.kinds.face import HalfParameters, Linear, Planning, Step, kept_of_argument, made_bytes
from megatron_lynx.kinds.saved import dropout_tensor, norm_tensors
from megatron_lynx.kinds.section import Item
from megatron_lynx.profiler import roofline
from megatron_lynx.profiler.profile import ExpertHalf, Profile, SavedTensor, own_tensors
from megatron_lynx.profiler.roofline import Kernels, Roofline
from megatron_lynx.profiler.shape import FP32_BYTES, LayerShape, saved_bytes
from megatron_lynx.timeline import Passes


class MixtureOfExperts(Planning):
    def linears(self, shape: LayerShape) -> Mapping[str, Linear]:
        return expert_linears(shape)

    def kernels(self, shape: LayerShape, item: Item) -> Kernels:
        if item.name == SHARED_ACTIVATION:
            return roofline.activation_kernels(shape.model, shape.tokens, shared_width(shape))
        return roofline.weighted_kernels(shape.model, padded_rows(shape), expert_width(shape))

    def seconds(self, shape: LayerShape, item: Item, roof: Roofline) -> Passes:
        if item.name == ROUTER:
            counts_s = 0.0 if experts_of(shape).padded else roof.counts_s
            return _router(shape, roof) + Passes(counts_s, counts_s)
        if item.name == COMBINE and shape.model.bias:
            return _moved_rows(shape, roof) + roofline.kernels_s(_weighted_bias(shape), roof)
        return _moved_rows(shape, roof) if item.exchanges else super().seconds(shape, item, roof)

    def listed(self) -> Iterable[Item]:
        later_names = (EXPERTS_ACTIVATION, ROUTER, DISPATCH, COMBINE, self.section.norm, self.section.residual, SHARED_ACTIVATION)
        names = *EXPERTS.linears, *SHARED_LINEARS, *later_names
        return (self.section.of_name[name] for name in dict.fromkeys(names) if name in self.section.names)

    def output_bytes(self, shape: LayerShape, item: Item) -> int:
        linear = self.linears(shape).get(item.name)
        return 0 if linear is None else shape.model.element_bytes * linear.times * linear.rows * linear.made

    def half(self, job: Job, shape: LayerShape, roof: Roofline) -> ExpertHalf:
        half, tensor = super().half(job, shape, roof), shape.parallel.tensor
        shared_s = roofline.collective_s(job.cluster, tensor, shape.gathered_bytes * (tensor - 1) / tensor)  # an MLP's, exposed
        return ExpertHalf(
            **dict(half),
            exchange_s=_exchange_s(job, shape),
            cut_s=_cut_s(job, shape),
            collective_s=shared_s if shared_width(shape) else 0.0,
            shared_rate=job.fused_dispatch.computing_kept if experts_of(shape).shared_beside else 0.0,
        )

    def saved(self, shape: LayerShape) -> Iterator[SavedTensor]:
        yield from expert_tensors(shape)

    def parameters(self, model: Model, layout: Parallel) -> HalfParameters:
        """Each of `expert` ranks holds its part of the experts, split among `expert_tensor` ranks; every rank has the router and
        the projections to a latent width and back; shared experts are an MLP split among `tensor` ranks (`SequentialMLP`,
        `TopKRouter`, `SharedExpertMLP`)."""
        experts, local = mixture(model), mixture(model).count // layout.expert
        one, shared = mlp_matrices(model, experts.ffn, model.routed_hidden), mlp_matrices(model, experts.shared_ffn, model.hidden)
        router = model.hidden * experts.count
        linears, gate = 2 * local + (2 if experts.shared_ffn else 0), model.hidden * experts.shared_gate
        projections = 0 if experts.latent is None else 2 * model.hidden * model.routed_hidden  # to a latent width and back
        biases = (2 * experts.ffn if model.gated else experts.ffn) // layout.expert_tensor_size + model.routed_hidden
        return HalfParameters(
            cut=shared,
            passed=experts.per_token * one + shared + router + gate + projections,
            vectors=model.norm_parameters() + gate,
            weights=linears + 1 + experts.shared_gate + 2 * bool(projections),
            biased=linears,
            whole=router + projections,
            router=router,
            apart=local * (one // layout.expert_tensor_size + biases * model.bias),
        )

    def backward(self, shape: LayerShape) -> Iterator[Step]:
        """Empty: rows in flight bound its transients (`cost.stage_memory`)."""
        yield from ()

    def operands_bytes(self, profile: Profile, linear: str) -> tuple[int, int]:
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
    """Return the expert data-parallel size (`parallel_state.initialize_model_parallel`)."""
    layout = job.parallel
    return job.gpus // (layout.expert_tensor_size * layout.expert * layout.pipeline)


def mlp_matrices(model: Model, ffn: int, hidden: int) -> int:
    return hidden * ffn * (3 if model.gated else 2)


def all_to_all_s(cluster: Cluster, gpus: int, ranks: int, stride: int, size_bytes: float) -> float:
    """Return the slowest group's all-to-all of `ranks` ranks, `stride` apart, that send `size_bytes` each."""
    assert cluster.node is not None, "checked by Roofline.of"
    if ranks == 1:
        return 0.0
    blocks = range(0, gpus, ranks * stride)[: cluster.node.gpus]  # adjacent groups; later ones start at the same places of a node
    starts = {(block + rank) % cluster.node.gpus for block in blocks for rank in range(min(stride, cluster.node.gpus))}
    inside = min(roofline.fewest_in_a_node(start, stride, ranks, cluster.node.gpus) for start in starts)
    near_bytes, far_bytes = (size_bytes * others / ranks for others in (inside - 1, ranks - inside))
    return _sent_s(cluster, min(ranks * stride, cluster.node.gpus), near_bytes, far_bytes)


def _sent_s(cluster: Cluster, near_ranks: int, near_bytes: float, far_bytes: float) -> float:
    """Return the seconds in which a rank sends to ranks of its node and, over its share of the NICs, to others."""
    assert cluster.node is not None, "checked by Roofline.of"
    assert cluster.nic is not None, "checked by Roofline.of"
    near_s = roofline.link_among(cluster, near_ranks).seconds(near_bytes)
    return max(near_s, cluster.nic.seconds(far_bytes * cluster.node.gpus / cluster.nic.per_node)) if far_bytes else near_s


def _exchange_s(job: Job, shape: LayerShape) -> float:
    """Return one exchange of tokens; each pass has two."""
    tensor, row_bytes = shape.parallel.expert_tensor_size, shape.model.routed_hidden * shape.model.element_bytes
    if experts_of(shape).dispatcher in FUSED:
        return _fused_exchange_s(job.cluster, shape, row_bytes)
    if experts_of(shape).dispatcher == "allgather":
        ranks = shape.parallel.expert * tensor
        sent_bytes = (ranks - 1) * shape.own_tokens * row_bytes
        return roofline.collective_s(job.cluster, ranks, sent_bytes)
    return all_to_all_s(job.cluster, job.gpus, shape.parallel.expert, tensor, routed_rows(shape) // tensor * row_bytes)


def _fused_exchange_s(cluster: Cluster, shape: LayerShape, row_bytes: int) -> float:
    assert cluster.node is not None, "checked by Roofline.of"
    experts, ranks = experts_of(shape), shape.parallel.expert * shape.parallel.expert_tensor_size
    if ranks == 1:
        return 0.0
    inside, nodes = min(ranks, cluster.node.gpus), ceil(ranks / cluster.node.gpus)
    sent_bytes = shape.own_tokens * row_bytes * experts.load
    received = shape.parallel.expert_tensor_size * expected_parts(experts, shape.parallel.expert)
    far_bytes = sent_bytes * expected_parts(experts, min(nodes, shape.parallel.expert)) * (nodes - 1) / nodes
    return _sent_s(cluster, inside, sent_bytes * received * (inside - 1) / inside, far_bytes)


def expected_parts(experts: Experts, parts: int) -> float:
    """Return the expected number of parts that a token is sent to, of `parts` equal parts of a layer's experts."""
    other_experts = experts.count - experts.count // parts
    return parts * (1 - comb(other_experts, experts.per_token) / comb(experts.count, experts.per_token))


def _cut_s(job: Job, shape: LayerShape) -> float:
    """Return one gather of rows to split experts, or scatter of sums; other dispatchers include it."""
    if experts_of(shape).dispatcher != "alltoall":
        return 0.0
    tensor, row_bytes = shape.parallel.expert_tensor_size, shape.model.routed_hidden * shape.model.element_bytes
    gathered = routed_rows(shape) * row_bytes * (tensor - 1) / tensor
    return roofline.collective_s(job.cluster, tensor, gathered)


def _router(shape: LayerShape, roof: Roofline) -> Passes:
    """A GEMM of every token with every expert's row, and top-k in fp32; with them the projections to a latent width and back."""
    count, tokens, element = experts_of(shape).count, shape.own_tokens, shape.model.element_bytes
    gemm_s = roof.seconds(2 * tokens * shape.model.hidden * count, element * tokens * (shape.model.hidden + count))
    if latent := experts_of(shape).latent:
        gemm_s += 2 * roof.seconds(2 * tokens * shape.model.hidden * latent, element * tokens * (shape.model.hidden + latent))
    chosen_s = roof.seconds(0, 4 * FP32_BYTES * tokens * count)
    return Passes(gemm_s + chosen_s, 2 * gemm_s + chosen_s)


def _moved_rows(shape: LayerShape, roof: Roofline) -> Passes:
    """Return one permutation of rows, and the sorting by expert if a rank has several. Flex dispatchers only sort."""
    row_bytes = 2 * shape.model.routed_hidden * shape.model.element_bytes
    sent_s = roof.seconds(0, row_bytes * routed_rows(shape) / shape.parallel.expert_tensor_size)
    if experts_of(shape).dispatcher == "allgather":  # one copy, from all tokens to the rows of this rank's experts
        return Passes(*2 * (roof.seconds(0, row_bytes * max(padded_rows(shape), gathered_tokens(shape))),))
    sorted_s = roof.seconds(0, row_bytes * routed_rows(shape)) if local_experts(shape) > 1 else 0.0
    if padded_rows(shape) > routed_rows(shape):  # copied to padded rows
        sorted_s += roof.seconds(0, row_bytes * padded_rows(shape))
    if experts_of(shape).dispatcher in FUSED:
        return Passes(max(sent_s, sorted_s), max(sent_s, sorted_s))
    return Passes(sent_s + sorted_s, sent_s + sorted_s)


INDEX_BYTES = 8

SHARED = dict(zip(MLP.names[1:4], SHARED_EXPERTS, strict=True))


@lru_cache(maxsize=256)
def expert_tensors(shape: LayerShape) -> tuple[SavedTensor, ...]:
    shape = as_held(shape)
    section, readers = experts_of(shape).section, (SHARED_FC1, ROUTER) if experts_of(shape).shared_ffn else (ROUTER,)
    if shape.model.fp8_recipe == "delayed" or _gathers_apart(shape):  # the norm's output is not the linear's saved input
        readers = (ROUTER,)
    norm, dropout = norm_tensors(shape, section, readers), dropout_tensor(shape, section)
    # the input of the projection back from a latent width; the other one's is the router's, too
    latent = own_tensors(COMBINE, shape.own_tokens * (experts_of(shape).latent or 0) * shape.model.element_bytes)
    blocks = (*norm, *_shared(shape), *_router_tensors(shape), *_dispatch(shape), *_expert_rows(shape), *latent, dropout)
    return tuple(block for block in blocks if block.bytes)


def _router_tensors(shape: LayerShape) -> list[SavedTensor]:
    experts, choices = experts_of(shape), shape.own_tokens * experts_of(shape).per_token
    scores = ceil(experts.scores * shape.own_tokens * experts.count * FP32_BYTES)
    return own_tensors(ROUTER, choices * (2 * INDEX_BYTES + FP32_BYTES), scores)


def _dispatch(shape: LayerShape) -> Iterator[SavedTensor]:
    experts, element, rows = experts_of(shape), shape.model.element_bytes, routed_rows(shape)
    fused = experts.dispatcher in FUSED
    kept, sorted_by = _fused_maps(shape) if fused else _maps(shape)
    yield SavedTensor(bytes=kept, made_by=DISPATCH if fused else ROUTER, saved_by=(DISPATCH,), output=not fused)
    yield SavedTensor(bytes=sorted_by, made_by=DISPATCH, saved_by=(DISPATCH, COMBINE))
    readers = (EXPERTS_FC1,) if shape.model.fp8_recipe is None else ()
    yield SavedTensor(bytes=rows * shape.model.routed_hidden * element, made_by=DISPATCH, saved_by=readers, output=True)
    of_row = FP32_BYTES if fused else element
    yield SavedTensor(bytes=padded_rows(shape) * of_row, made_by=DISPATCH, saved_by=(EXPERTS_ACTIVATION,), output=True)


def _maps(shape: LayerShape) -> tuple[int, int]:
    """Return the bytes of (routing map and probabilities, row sources); after gathers, of each part of an expert."""
    experts = experts_of(shape)
    parts = shape.parallel.expert_tensor_size if experts.dispatcher == "allgather" else 1
    of_all = parts * shape.own_tokens * experts.count * (1 + shape.model.element_bytes)
    return of_all, parts * shape.own_tokens * experts.per_token * INDEX_BYTES


def _fused_maps(shape: LayerShape) -> tuple[int, int]:
    """Return the same for a flex dispatcher. DeepEP: choices, sources and targets of probabilities (`_indices_to_multihot`), and
    the map of received rows by local expert. HybridEP's handle is taken to be as large as its map."""
    experts, rows = experts_of(shape), routed_rows(shape)
    if experts.dispatcher == "hybridep":
        return shape.own_tokens * experts.count * (1 + FP32_BYTES), rows * INDEX_BYTES
    choices, came = shape.own_tokens * experts.per_token * INDEX_BYTES, rows * local_experts(shape) // experts.per_token
    return choices + 4 * rows * INDEX_BYTES + came, rows * INDEX_BYTES


def remembered_bytes(shape: LayerShape) -> int:
    """Return the bytes that one layer's dispatcher keeps in attributes until its next call (`MoEAlltoAllTokenDispatcher`)."""
    return sum(block.bytes for block in _dispatch(as_held(shape)) if DISPATCH in block.saved_by)


def _expert_rows(shape: LayerShape) -> Iterator[SavedTensor]:
    model = shape.model
    block, gated = padded_rows(shape) * expert_width(shape) * model.element_bytes, model.gated
    apart = shape.sums_apart
    made = 2 * block if gated else block
    yield SavedTensor(bytes=made, made_by=EXPERTS_FC1, saved_by=() if apart else (EXPERTS_ACTIVATION,), output=True)
    inside = shape.gates_apart + shape.activation_apart if gated else not experts_of(shape).weighted_relu
    yield from own_tensors(EXPERTS_ACTIVATION, *[block] * inside, *[made] * apart)
    if model.fp8_recipe is None:
        yield SavedTensor(bytes=block, made_by=EXPERTS_ACTIVATION, saved_by=(EXPERTS_FC2,))
        return
    for name in (EXPERTS_FC1, EXPERTS_FC2):
        linear = expert_linears(shape)[name]
        size = linear.times * saved_bytes(model.fp8_recipe, linear.rows, linear.taken)
        yield SavedTensor(bytes=size, made_by=name, saved_by=(name,), blocks=linear.times)


def _shared(shape: LayerShape) -> Iterator[SavedTensor]:
    """Shared experts save as an MLP of their width. If overlapped with exchanges they gather their input themselves and save it
    whole, and their gate has neither offset nor clamp (`SharedExpertMLP`)."""
    if not experts_of(shape).shared_ffn:
        return
    plain = {"glu_offset": False, "activation_clamped": False} if experts_of(shape).shared_beside else {}
    model = shape.model.model_copy(update={"ffn": experts_of(shape).shared_ffn, **plain})
    if model.fp8_recipe == "delayed":
        rows = shape.tokens if _gathers_apart(shape) else shape.own_tokens
        yield from own_tensors(SHARED_FC1, saved_bytes("delayed", rows, model.hidden))
    elif _gathers_apart(shape):
        yield from own_tensors(SHARED_FC1, shape.gathered_bytes)
    for block in mlp_tensors(replace(shape, model=model)):
        readers = tuple(SHARED[item] for item in block.saved_by)
        yield block.model_copy(update={"made_by": SHARED[block.made_by], "saved_by": readers})
    if experts_of(shape).shared_gate:  # the gate's linear saves its input, and the product the other factor
        yield from own_tensors(SHARED_FC2, shape.input_bytes, shape.input_bytes)


def _gathers_apart(shape: LayerShape) -> bool:
    return experts_of(shape).shared_beside and shape.parallel.sequence_parallel


def experts_of(shape: LayerShape) -> Experts:
    return mixture(shape.model)


def as_held(shape: LayerShape) -> LayerShape:
    """Return the shape with `experts.holds` as load, if given, for counting bytes."""
    experts = experts_of(shape)
    if experts.holds is None:
        return shape
    heavier = experts.model_copy(update={"load": experts.held_load, "holds": None})
    return replace(shape, model=shape.model.model_copy(update={"experts": heavier}))


def routed_rows(shape: LayerShape) -> int:
    """Return the rows of the fullest rank's experts (R), with a router's padding for each expert and source rank."""
    experts, ranks = experts_of(shape), shape.parallel.expert * shape.parallel.expert_tensor_size
    rows = ceil(shape.own_tokens * experts.per_token * shape.parallel.expert_tensor_size * experts.load)
    by_router = experts.filled and experts.dispatcher == "alltoall"
    return rows + (_filled_up(shape, rows, ranks * local_experts(shape)) if by_router else 0)


def gathered_tokens(shape: LayerShape) -> int:
    return shape.own_tokens * shape.parallel.expert * shape.parallel.expert_tensor_size


def padded_rows(shape: LayerShape) -> int:
    experts, rows = experts_of(shape), routed_rows(shape)
    if shape.model.fp8_recipe is None or (experts.filled and experts.dispatcher == "alltoall"):
        return rows
    return rows + _filled_up(shape, rows, local_experts(shape))


def _filled_up(shape: LayerShape, rows: int, parts: int) -> int:
    """Return the padding of `parts` parts: half a multiple each on average; exact if every token goes to every expert."""
    recipe, experts = shape.model.fp8_recipe, experts_of(shape)
    if recipe is None:
        return 0
    multiple = STORED[recipe].rows_of_expert
    if experts.per_token == experts.count:
        return parts * (-(rows // parts) % multiple)
    return parts * (multiple - 1) // 2


def local_experts(shape: LayerShape) -> int:
    return experts_of(shape).count // shape.parallel.expert


def expert_width(shape: LayerShape) -> int:
    return experts_of(shape).ffn // shape.parallel.expert_tensor_size


def shared_width(shape: LayerShape) -> int:
    return experts_of(shape).shared_ffn // shape.parallel.tensor


def _weighted_bias(shape: LayerShape) -> Kernels:
    """Return the kernels that add an expert's bias, times each row's probability, and join the experts' rows
    (`TEGroupedMLP._apply_bias`): product, sum, copy; backward: products with probabilities and biases, each with its sums."""
    rows = padded_rows(shape) * shape.model.routed_hidden * shape.model.element_bytes
    return Kernels((rows, 3 * rows, 2 * rows), (2 * rows, rows, 2 * rows, rows))


def expert_linears(shape: LayerShape) -> dict[str, Linear]:
    count, rows = local_experts(shape), padded_rows(shape)
    linears = _pair(shape, (EXPERTS_FC1, EXPERTS_FC2), -(-rows // count), expert_width(shape), count, shape.model.routed_hidden)
    if width := shared_width(shape):
        linears |= _pair(shape, (SHARED_FC1, SHARED_FC2), shape.tokens, width, 1, shape.model.hidden)
    return linears


def _pair(shape: LayerShape, names: tuple[str, str], rows: int, width: int, count: int, hidden: int) -> dict[str, Linear]:
    outer = 2 * width if shape.model.gated else width
    return {names[0]: Linear(rows, hidden, outer, count), names[1]: Linear(rows, width, hidden, count)}
