"""A mixture of experts on one rank by its shape: rows, experts, columns and the FLOPs of its GEMMs.

    T tokens ── k experts for each ── R = T k etp x load rows of the fullest rank

T: a rank's own tokens; etp: ranks among which each expert is cut (`expert_tensor`). Rows are counted as in megatron-core's
`MoEAlltoAllTokenDispatcher`; the fullest rank's experts get `experts.load` times as many as they would under a balanced load.
"""

from __future__ import annotations

from math import ceil

from megatron_lynx.config.experts import Experts
from megatron_lynx.kinds.experts.section import EXPERTS_FC1, EXPERTS_FC2, SHARED_FC1, SHARED_FC2
from megatron_lynx.kinds.face import Linear
from megatron_lynx.profiler.shape import LayerShape


def experts_of(shape: LayerShape) -> Experts:
    """The mixture of a layer's model."""
    assert shape.model.experts is not None, "asked only of layers with experts"
    return shape.model.experts


def routed_rows(shape: LayerShape) -> int:
    """Rows that the experts of the fullest rank are given (R)."""
    experts = experts_of(shape)
    return ceil(shape.own_tokens * experts.per_token * shape.parallel.expert_tensor_size * experts.load)


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
    count, rows = local_experts(shape), routed_rows(shape)
    linears = _pair(shape, (EXPERTS_FC1, EXPERTS_FC2), (-(-rows // count), count), expert_width(shape))
    if width := shared_width(shape):
        linears |= _pair(shape, (SHARED_FC1, SHARED_FC2), (shape.tokens, 1), width)
    return linears


def _pair(shape: LayerShape, names: tuple[str, str], rows_and_count: tuple[int, int], width: int) -> dict[str, Linear]:
    """Both linears around an activation of so many columns. `rows_and_count`: rows of each, and how many there are."""
    (rows, count), hidden = rows_and_count, shape.model.hidden
    outer = 2 * width if shape.model.activation == "swiglu" else width
    return {names[0]: Linear(rows, hidden, outer, count), names[1]: Linear(rows, width, hidden, count)}
