"""Planning interfaces of all kinds, by section."""

from __future__ import annotations

from functools import lru_cache

from megatron_lynx.kinds.dense.planning import DenseAttention, DenseMlp
from megatron_lynx.kinds.dense.section import ATTENTION, MLP
from megatron_lynx.kinds.experts.planning import MixtureOfExperts
from megatron_lynx.kinds.experts.section import EXPERTS
from megatron_lynx.kinds.face import Planning
from megatron_lynx.kinds.latent.planning import LatentAttention
from megatron_lynx.kinds.latent.section import LATENT
from megatron_lynx.kinds.opaque.planning import OpaqueHalf
from megatron_lynx.kinds.opaque.section import OPAQUE
from megatron_lynx.kinds.section import HALVES, Half, Section
from megatron_lynx.profiler.profile import SavedTensor
from megatron_lynx.profiler.shape import LayerShape

FACES: dict[str, type[Planning]] = {
    ATTENTION.name: DenseAttention,
    MLP.name: DenseMlp,
    LATENT[True, True, False].name: LatentAttention,
    EXPERTS.name: MixtureOfExperts,
    **dict.fromkeys(OPAQUE, OpaqueHalf),
}
"""By section name."""


@lru_cache(maxsize=64)
def planning_of(section: Section) -> Planning:
    return FACES[section.name](section)


def half_tensors(shape: LayerShape, half: Half) -> tuple[SavedTensor, ...]:
    """Return the saved tensors of a half with its usual content, except its input."""
    return planning_of(shape.model.halves[half]).tensors(shape)


def flops_of(shape: LayerShape) -> dict[str, int]:
    """Return the forward GEMM FLOPs of each item of a layer with usual content."""
    return {item: flops for half in HALVES for item, flops in planning_of(shape.model.halves[half]).flops(shape).items()}
