"""What a mixture of experts keeps from forward to backward on one rank, part by part, under a balanced load.

    T tokens ── norm ──┬── router ── probabilities, which expert gets what
                       ├── permute ── all-to-all ── R = T k etp rows ── experts of this rank ── all-to-all ── unpermute ──> T
                       └── shared experts: an MLP that every token passes

T: a rank's own tokens; k: experts for each; E: experts; f: width of one on each of its `expert_tensor` ranks (etp). Every
expert is taken to get as many rows as every other one. Rows are counted as in megatron-core's `MoEAlltoAllTokenDispatcher`.

    norm       as in a layer with an MLP
    router     `TopKRouter` with an auxiliary loss: chosen experts (int64, twice), their scores in fp32; the scores of all for the
               loss in fp32, the map (a byte each) and the probabilities; `permute` keeps where each row came from (int64)
    experts    rows on arrival, their probabilities; what comes out of the first GEMM, and what goes into the second one:
               fused     `WeightedSwiGLUFunction` saves its input alone: SwiGLU 2f + f. Without it nothing is fused: f + f + f
               eager     SwiGLU 2f, SiLU f, the other half f, their product f, times the probability f; GELU f + f + f
    shared     an MLP's, without norm and dropout
Where every rank's experts come from a grouped GEMM, its padding is not counted.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_lynx.anatomy import EXPERTS, MLP
from megatron_lynx.config.experts import Experts
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.profiler.tensors import FP32_BYTES, half_tensors

INDEX_BYTES = 8
"""The size of an index of PyTorch's."""


def routed_rows(shape: LayerShape) -> int:
    """Rows that the experts of one rank are given (R)."""
    return shape.own_tokens * _experts(shape).per_token * shape.parallel.expert_tensor_size


def local_experts(shape: LayerShape) -> int:
    """Experts of one rank."""
    return _experts(shape).count // shape.parallel.expert


def expert_width(shape: LayerShape) -> int:
    """Columns between an expert's GEMMs on one rank."""
    return _experts(shape).ffn // shape.parallel.expert_tensor_size


def saved_parts(shape: LayerShape) -> dict[str, int]:
    """Bytes by part, the half's input included."""
    dense = half_tensors(shape, MLP.half)
    made = {item: sum(block.bytes for block in dense if block.made_by == item and block.saved_by) for item in MLP.on_own_rows}
    return {
        "input": shape.input_bytes,
        "norm": made[MLP.norm],
        "router": _router(shape),
        EXPERTS.name: _expert_rows(shape),
        "shared": _shared(shape),
        "dropout": made[MLP.residual],
    }


def saved_bytes(shape: LayerShape) -> int:
    """Bytes of the whole half."""
    return sum(saved_parts(shape).values())


def _router(shape: LayerShape) -> int:
    experts, element = _experts(shape), shape.model.element_bytes
    of_choice = 3 * INDEX_BYTES + FP32_BYTES
    of_expert = FP32_BYTES + 1 + element
    return shape.own_tokens * (experts.per_token * of_choice + experts.count * of_expert)


def _expert_rows(shape: LayerShape) -> int:
    width, gated = expert_width(shape), shape.model.activation == "swiglu"
    between = (6 if shape.eager else 3) * width if gated else 3 * width
    biased = width if shape.model.bias and shape.eager else 0
    return routed_rows(shape) * shape.model.element_bytes * (shape.model.hidden + 1 + between + biased)


def _shared(shape: LayerShape) -> int:
    """Shared experts save what an MLP of their width does."""
    if not _experts(shape).shared_ffn:
        return 0
    model = shape.model.model_copy(update={"ffn": _experts(shape).shared_ffn})
    blocks = half_tensors(replace(shape, model=model), MLP.half)
    return sum(block.bytes for block in blocks if block.made_by not in MLP.on_own_rows and block.saved_by)


def _experts(shape: LayerShape) -> Experts:
    assert shape.model.experts is not None, "asked only of layers with experts"
    return shape.model.experts
