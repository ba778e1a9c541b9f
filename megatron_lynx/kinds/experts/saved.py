"""A mixture of experts on one rank by its shape: rows and columns, and every memory block that its backward reads.

    T tokens ── norm ──┬── shared experts: an MLP that every token passes
                       ├── router ── probabilities, which expert gets what
                       └── dispatch: permute ── all-to-all ── R rows ── experts ── combine: all-to-all ── unpermute ──> T

T: a rank's own tokens; k: experts for each; E: experts; f: width of one expert on a rank; R = T k etp x load: rows of the fullest
rank, with etp ranks among which each expert is cut (`expert_tensor`). Rows are counted as in megatron-core's
`MoEAlltoAllTokenDispatcher`; the fullest rank's experts get `experts.load` times as many as they would under a balanced load.
Bytes are counted for `experts.holds` times as many, where that is said.

    norm         as in a layer with an MLP, but a module of its own in Transformer Engine's layers, too
    router       `TopKRouter`: chosen experts (int64, twice), their scores in fp32; of all experts `experts.scores` numbers in
                 fp32, one of them for an auxiliary loss
    dispatch     the router's map (a byte each) and probabilities of all experts; `permute` keeps where each row came from
                 (int64), which `combine` reads as well. It hands on R rows, and the probability of each
    experts      what comes out of the first GEMM, and what goes into the second one:
                 fused     `WeightedSwiGLUFunction` saves its input and the probabilities: SwiGLU 2f + f. Without it nothing is
                           fused: f + f + f
                 eager     SwiGLU 2f, SiLU f, the other half f, their product f, times the probability f; GELU f + f + f
                 squared   ReLU f + f + f; f + f in one kernel with the probabilities (`WeightedSquaredReLUFunction`)
    shared       an MLP's, without norm and dropout
In FP8 each expert's rows are filled up to a multiple of 16, or 32 (mxfp8): by `Fp8Padding` before its GEMMs, or, as the launch
may say, by the router, whose rows then travel, too. Its linears keep bytes and scales of what they were given, each expert its
own, and nobody keeps the dispatched rows; a replay that passes them needs them. Megatron has the shared experts' first linear
keep the norm's output as it is (`set_save_original_input`), but for delayed scaling.
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
from megatron_lynx.profiler.profile import SavedTensor
from megatron_lynx.profiler.quantized import saved_bytes
from megatron_lynx.profiler.shape import FP32_BYTES, LayerShape

INDEX_BYTES = 8
"""The size of an index of PyTorch's."""

INPUT = "input"

SHARED = dict(zip(MLP.names[1:4], SHARED_EXPERTS, strict=True))
"""The items of shared experts, by those of the MLP that they are like."""


@lru_cache(maxsize=256)
def expert_tensors(shape: LayerShape) -> tuple[SavedTensor, ...]:
    """The memory blocks of the whole half, beside its input. Remembered: stock's settings are priced by the hundred."""
    shape = as_held(shape)
    section, readers = experts_of(shape).section, (SHARED_FC1, ROUTER) if experts_of(shape).shared_ffn else (ROUTER,)
    if shape.model.fp8_recipe == "delayed" or _gathers_apart(shape):  # Megatron has others keep the norm's output, as it is
        readers = (ROUTER,)
    norm, dropout = norm_tensors(shape, section, readers), dropout_tensor(shape, section)
    blocks = (*norm, *_shared(shape), *_router(shape), *_dispatch(shape), *_expert_rows(shape), dropout)
    return tuple(block for block in blocks if block.bytes)


def saved_parts(shape: LayerShape) -> dict[str, int]:
    """Bytes of the half's input, and of what each item is the first to save."""
    parts = dict.fromkeys((INPUT, *experts_of(shape).section.names), 0) | {INPUT: shape.input_bytes}
    for block in expert_tensors(shape):
        if block.saved_by:
            parts[block.saved_by[0]] += block.bytes
    return parts


def _router(shape: LayerShape) -> Iterator[SavedTensor]:
    experts, own = experts_of(shape), {"made_by": ROUTER, "saved_by": (ROUTER,)}
    choices = shape.own_tokens * experts.per_token
    yield SavedTensor(bytes=choices * (2 * INDEX_BYTES + FP32_BYTES), **own)
    yield SavedTensor(bytes=ceil(experts.scores * shape.own_tokens * experts.count * FP32_BYTES), **own)


def _dispatch(shape: LayerShape) -> Iterator[SavedTensor]:
    """What it keeps itself, and the rows that it hands on, with the probability of each."""
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
    """Bytes of what says where rows go, by itself and together with the way back: of the all-to-all, and of gathers, after which
    each part of an expert has those of its tokens."""
    experts = experts_of(shape)
    parts = shape.parallel.expert_tensor_size if experts.dispatcher == "allgather" else 1
    of_all = parts * shape.own_tokens * experts.count * (1 + shape.model.element_bytes)
    return of_all, parts * shape.own_tokens * experts.per_token * INDEX_BYTES


def _fused_maps(shape: LayerShape) -> tuple[int, int]:
    """The same of a flex dispatcher. With DeepEP: the choices, where each row's probability is read and put
    (`_indices_to_multihot`), and the map of what came, by experts of this rank. HybridEP's handle is taken to be as large as the
    map that it is made of."""
    experts, rows = experts_of(shape), routed_rows(shape)
    if experts.dispatcher == "hybridep":
        return shape.own_tokens * experts.count * (1 + FP32_BYTES), rows * INDEX_BYTES
    choices, came = shape.own_tokens * experts.per_token * INDEX_BYTES, rows * local_experts(shape) // experts.per_token
    return choices + 4 * rows * INDEX_BYTES + came, rows * INDEX_BYTES


def remembered_bytes(shape: LayerShape) -> int:
    """What the dispatcher of one layer keeps as attributes until its next call, once backward has let go of it: the map and the
    probabilities of all experts, and where each row came from (`MoEAlltoAllTokenDispatcher`)."""
    return sum(block.bytes for block in _dispatch(as_held(shape)) if DISPATCH in block.saved_by)


def _expert_rows(shape: LayerShape) -> Iterator[SavedTensor]:
    """Between the experts' GEMMs, and what these keep of what they were given in FP8."""
    model, own = shape.model, {"made_by": EXPERTS_ACTIVATION, "saved_by": (EXPERTS_ACTIVATION,)}
    block, gated = padded_rows(shape) * expert_width(shape) * model.element_bytes, model.gated
    apart = shape.sums_apart
    made = 2 * block if gated else block
    yield SavedTensor(bytes=made, made_by=EXPERTS_FC1, saved_by=() if apart else (EXPERTS_ACTIVATION,), output=True)
    inside = shape.gates_apart + shape.activation_apart if gated else not experts_of(shape).weighted_relu
    yield from (SavedTensor(bytes=block, **own) for _ in range(inside))
    if apart:
        yield SavedTensor(bytes=made, **own)
    if model.fp8_recipe is None:
        yield SavedTensor(bytes=block, made_by=EXPERTS_ACTIVATION, saved_by=(EXPERTS_FC2,))
        return
    for name in (EXPERTS_FC1, EXPERTS_FC2):
        linear = expert_linears(shape)[name]
        size = linear.times * saved_bytes(model.fp8_recipe, linear.rows, linear.taken)
        yield SavedTensor(bytes=size, made_by=name, saved_by=(name,))


def _shared(shape: LayerShape) -> Iterator[SavedTensor]:
    """Shared experts save what an MLP of their width does. Beside the exchanges they gather their input themselves, so that their
    first linear keeps it whole, and their gate has neither offset nor clamp (`SharedExpertMLP`)."""
    if not experts_of(shape).shared_ffn:
        return
    plain = {"glu_offset": False, "activation_clamped": False} if experts_of(shape).shared_beside else {}
    model = shape.model.model_copy(update={"ffn": experts_of(shape).shared_ffn, **plain})
    if model.fp8_recipe == "delayed":
        size = saved_bytes("delayed", shape.tokens if _gathers_apart(shape) else shape.own_tokens, model.hidden)
        yield SavedTensor(bytes=size, made_by=SHARED_FC1, saved_by=(SHARED_FC1,))
    elif _gathers_apart(shape):
        yield SavedTensor(bytes=shape.gathered_bytes, made_by=SHARED_FC1, saved_by=(SHARED_FC1,))
    for block in mlp_tensors(replace(shape, model=model)):
        readers = tuple(SHARED[item] for item in block.saved_by)
        yield block.model_copy(update={"made_by": SHARED[block.made_by], "saved_by": readers})
    if experts_of(shape).shared_gate:  # the gate's linear keeps what it was given, and the product what it multiplies
        yield from (SavedTensor(bytes=shape.input_bytes, made_by=SHARED_FC2, saved_by=(SHARED_FC2,)) for _ in range(2))


def _gathers_apart(shape: LayerShape) -> bool:
    return experts_of(shape).shared_beside and shape.parallel.sequence_parallel


def experts_of(shape: LayerShape) -> Experts:
    """The mixture of a layer's model."""
    assert shape.model.experts is not None, "asked only of layers with experts"
    return shape.model.experts


def as_held(shape: LayerShape) -> LayerShape:
    """The shape whose rows are those that bytes are counted for: of `experts.holds`, where that is said."""
    experts = experts_of(shape)
    if experts.holds is None:
        return shape
    heavier = experts.model_copy(update={"load": experts.held_load, "holds": None})
    return replace(shape, model=shape.model.model_copy(update={"experts": heavier}))


def routed_rows(shape: LayerShape) -> int:
    """Rows that the experts of the fullest rank are given (R). A router that fills them up does so for each expert, on each rank
    that tokens come from."""
    experts, ranks = experts_of(shape), shape.parallel.expert * shape.parallel.expert_tensor_size
    rows = ceil(shape.own_tokens * experts.per_token * shape.parallel.expert_tensor_size * experts.load)
    by_router = experts.filled and experts.dispatcher == "alltoall"
    return rows + (_filled_up(shape, rows, ranks * local_experts(shape)) if by_router else 0)


def gathered_tokens(shape: LayerShape) -> int:
    """Tokens that every rank has where they are gathered."""
    return shape.own_tokens * shape.parallel.expert * shape.parallel.expert_tensor_size


def padded_rows(shape: LayerShape) -> int:
    """Rows that their GEMMs work on: in FP8 each expert's are filled up, where the router did not do so."""
    experts, rows = experts_of(shape), routed_rows(shape)
    if shape.model.fp8_recipe is None or (experts.filled and experts.dispatcher == "alltoall"):
        return rows
    return rows + _filled_up(shape, rows, local_experts(shape))


def _filled_up(shape: LayerShape, rows: int, parts: int) -> int:
    """Rows that so many parts of these are filled up with, to a multiple that FP8 needs: half of it for each, in the mean, and
    where every token goes to every expert as many as it takes."""
    recipe, experts = shape.model.fp8_recipe, experts_of(shape)
    if recipe is None:
        return 0
    multiple = STORED[recipe].rows_of_expert
    if experts.per_token == experts.count:
        return parts * (-(rows // parts) % multiple)
    return parts * (multiple - 1) // 2


def local_experts(shape: LayerShape) -> int:
    """Experts of one rank."""
    return experts_of(shape).count // shape.parallel.expert


def expert_width(shape: LayerShape) -> int:
    """Columns between an expert's GEMMs on one rank."""
    return experts_of(shape).ffn // shape.parallel.expert_tensor_size


def shared_width(shape: LayerShape) -> int:
    """Columns between the GEMMs of shared experts on one rank; 0 without any."""
    return experts_of(shape).shared_ffn // shape.parallel.tensor


def expert_linears(shape: LayerShape) -> dict[str, Linear]:
    """The linears of the half by item."""
    count, rows = local_experts(shape), padded_rows(shape)
    linears = _pair(shape, (EXPERTS_FC1, EXPERTS_FC2), (-(-rows // count), count), expert_width(shape))
    if width := shared_width(shape):
        linears |= _pair(shape, (SHARED_FC1, SHARED_FC2), (shape.tokens, 1), width)
    return linears


def _pair(shape: LayerShape, names: tuple[str, str], rows_and_count: tuple[int, int], width: int) -> dict[str, Linear]:
    """Both linears around an activation of so many columns. `rows_and_count`: rows of each, and how many there are."""
    (rows, count), hidden = rows_and_count, shape.model.hidden
    outer = 2 * width if shape.model.gated else width
    return {names[0]: Linear(rows, hidden, outer, count), names[1]: Linear(rows, width, hidden, count)}
