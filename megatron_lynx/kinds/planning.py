"""The kinds' faces to planning: who walks over layers asks for that of a section, and knows no kind."""

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
"""By the name of the sections of a kind."""


@lru_cache(maxsize=64)
def planning_of(section: Section) -> Planning:
    """The face of a section."""
    return FACES[section.name](section)


def half_tensors(shape: LayerShape, half: Half) -> tuple[SavedTensor, ...]:
    """The memory blocks of a half, beside its input, in layers that have its usual content."""
    return planning_of(shape.model.halves[half]).tensors(shape)


def flops_of(shape: LayerShape) -> dict[str, int]:
    """FLOPs of the GEMMs in one forward of each item of a layer that has the usual content of its halves."""
    return {item: flops for half in HALVES for item, flops in planning_of(shape.model.halves[half]).flops(shape).items()}
