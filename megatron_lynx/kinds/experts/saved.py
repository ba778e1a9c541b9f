"""Saved tensors, rows and widths of a mixture of experts on one rank.

    T tokens ── norm ──┬── shared experts: an MLP for every token
                       ├── router ── probabilities, expert choices
                       └── dispatch: permute ── all-to-all ── R rows ── experts ── combine: all-to-all ── unpermute ──> T

T: a rank's own tokens; k: experts per token; E: experts; f: width of one expert on a rank; R = T k etp x load: rows of the
fullest rank, with etp ranks that split each expert (`expert_tensor`). Rows are counted as in megatron-core's
`MoEAlltoAllTokenDispatcher`; `experts.load` is the fullest rank's load over a balanced one. Bytes use `experts.holds` instead, if
given.

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
dispatched rows are not saved; recomputation that passes them needs them. Except with delayed scaling, the shared experts' first
linear saves the norm's output (`set_save_original_input`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import ceil

from megatron_lynx.config.experts import Experts
from megatron_lynx.fp8_recipes import STORED
from megatron_lynx.kinds.dense.planning import mlp_tensors
from megatron_lynx.kinds.dense.section import MLP
from megatron_lynx.kinds.experts.section import (
    COMBINE,
    DISPATCH,
    EXPERTS_ACTIVATION,
    EXPERTS_FC1,
    EXPERTS_FC2,
    FUSED,
    ROUTER,
    SHARED_EXPERTS,
    SHARED_FC1,
    SHARED_FC2,
)
from megatron_lynx.kinds.face import Linear
from megatron_lynx.kinds.saved import dropout_tensor, norm_tensors
from megatron_lynx.profiler.profile import SavedTensor, own_tensors
from megatron_lynx.profiler.shape import FP32_BYTES, LayerShape, saved_bytes

INDEX_BYTES = 8

SHARED = dict(zip(MLP.names[1:4], SHARED_EXPERTS, strict=True))
"""Items of shared experts, by the MLP items that they resemble."""


@lru_cache(maxsize=256)
def expert_tensors(shape: LayerShape) -> tuple[SavedTensor, ...]:
    """Return the saved tensors of the whole half, except its input."""
    shape = as_held(shape)
    section, readers = experts_of(shape).section, (SHARED_FC1, ROUTER) if experts_of(shape).shared_ffn else (ROUTER,)
    if shape.model.fp8_recipe == "delayed" or _gathers_apart(shape):  # the norm's output is not the linear's saved input
        readers = (ROUTER,)
    norm, dropout = norm_tensors(shape, section, readers), dropout_tensor(shape, section)
    blocks = (*norm, *_shared(shape), *_router(shape), *_dispatch(shape), *_expert_rows(shape), dropout)
    return tuple(block for block in blocks if block.bytes)


def _router(shape: LayerShape) -> list[SavedTensor]:
    experts, choices = experts_of(shape), shape.own_tokens * experts_of(shape).per_token
    scores = ceil(experts.scores * shape.own_tokens * experts.count * FP32_BYTES)
    return own_tensors(ROUTER, choices * (2 * INDEX_BYTES + FP32_BYTES), scores)


def _dispatch(shape: LayerShape) -> Iterator[SavedTensor]:
    """Dispatch's own saved tensors, its output rows, and the probability of each."""
    experts, element, rows = experts_of(shape), shape.model.element_bytes, routed_rows(shape)
    fused = experts.dispatcher in FUSED
    kept, sorted_by = _fused_maps(shape) if fused else _maps(shape)
    yield SavedTensor(bytes=kept, made_by=DISPATCH if fused else ROUTER, saved_by=(DISPATCH,), output=not fused)
    yield SavedTensor(bytes=sorted_by, made_by=DISPATCH, saved_by=(DISPATCH, COMBINE))
    readers = (EXPERTS_FC1,) if shape.model.fp8_recipe is None else ()
    yield SavedTensor(bytes=rows * shape.model.hidden * element, made_by=DISPATCH, saved_by=readers, output=True)
    of_row = FP32_BYTES if fused else element
    yield SavedTensor(bytes=padded_rows(shape) * of_row, made_by=DISPATCH, saved_by=(EXPERTS_ACTIVATION,), output=True)


def _maps(shape: LayerShape) -> tuple[int, int]:
    """Return the bytes of (routing map and probabilities, row sources). After gathers every part of an expert has its tokens'
    own."""
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
    """Return the bytes that one layer's dispatcher keeps in attributes until its next call: routing map, probabilities, row
    sources (`MoEAlltoAllTokenDispatcher`)."""
    return sum(block.bytes for block in _dispatch(as_held(shape)) if DISPATCH in block.saved_by)


def _expert_rows(shape: LayerShape) -> Iterator[SavedTensor]:
    """Tensors between the experts' GEMMs, and their FP8 inputs."""
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
    assert shape.model.experts is not None, "asked only of layers with experts"
    return shape.model.experts


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
    """Return the rows of the experts' GEMMs: in FP8 each expert's are padded, unless the router did."""
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


def expert_linears(shape: LayerShape) -> dict[str, Linear]:
    count, rows = local_experts(shape), padded_rows(shape)
    linears = _pair(shape, (EXPERTS_FC1, EXPERTS_FC2), -(-rows // count), expert_width(shape), count)
    if width := shared_width(shape):
        linears |= _pair(shape, (SHARED_FC1, SHARED_FC2), shape.tokens, width)
    return linears


def _pair(shape: LayerShape, names: tuple[str, str], rows: int, width: int, count: int = 1) -> dict[str, Linear]:
    """Return `count` equal pairs of linears around an activation of `width` columns."""
    hidden, outer = shape.model.hidden, 2 * width if shape.model.gated else width
    return {names[0]: Linear(rows, hidden, outer, count), names[1]: Linear(rows, width, hidden, count)}
