"""Planning interfaces of all kinds, by section.

Opaque halves are planned from figures in a job (`config.experts`) or a measured profile. Their seconds are lower bounds:

    forward     max(FLOPs at a GEMM's rate, saved bytes written and read once)       and two tensor-parallel collectives
    backward    twice the FLOPs, twice the bytes, as many collectives
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import ceil

from megatron_lynx.config.experts import Opaque
from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.errors import Problem
from megatron_lynx.kinds.dense.planning import DenseAttention, DenseMlp
from megatron_lynx.kinds.dense.section import ATTENTION, MLP
from megatron_lynx.kinds.experts.planning import MixtureOfExperts
from megatron_lynx.kinds.experts.section import EXPERTS
from megatron_lynx.kinds.face import HalfParameters, Linear, Planning, Step, longer
from megatron_lynx.kinds.latent.planning import LatentAttention, SparseAttention
from megatron_lynx.kinds.latent.section import LATENT, SPARSE
from megatron_lynx.kinds.mamba.planning import DeltaNet, MambaLayer
from megatron_lynx.kinds.mamba.section import DELTA_NET, MAMBA
from megatron_lynx.kinds.opaque.section import OPAQUE
from megatron_lynx.kinds.saved import dropout_tensor
from megatron_lynx.kinds.section import HALVES, Half, Item, Section
from megatron_lynx.profiler.profile import HalfProfile, ItemProfile, SavedTensor, own_tensors
from megatron_lynx.profiler.roofline import Kernels, Roofline, collective_s
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.timeline import Passes

NO_SECONDS = ItemProfile(forward_s=0.0, backward_s=0.0, saved_bytes=0, output_bytes=0, flops=0)
COLLECTIVES = 2
"""Per pass; an all-reduce counts as a gather and a scatter."""


class OpaqueHalf(Planning):
    """An opaque half; all figures of an absent one are 0."""

    def figures(self, shape: LayerShape) -> Opaque:
        return shape.model.opaque_in(self.section)

    def linears(self, shape: LayerShape) -> Mapping[str, Linear]:
        return {}

    def kernels(self, shape: LayerShape, item: Item) -> Kernels:
        return Kernels((), ())

    def half(self, job: Job, shape: LayerShape, roof: Roofline) -> HalfProfile:
        if self.figures(shape).nothing:
            return HalfProfile(input_bytes=0, items=dict.fromkeys(self.section.names, NO_SECONDS), tensors=())
        half = super().half(job, shape, roof)
        tensor, [name] = shape.parallel.tensor, self._inside
        waits_s = COLLECTIVES * collective_s(job.cluster, tensor, shape.gathered_bytes * (tensor - 1) / tensor)
        return longer(half, name, Passes(waits_s, waits_s))

    def seconds(self, shape: LayerShape, item: Item, roof: Roofline) -> Passes:
        if item.role != "opaque":
            return super().seconds(shape, item, roof)
        figures, tokens = self.figures(shape), shape.tokens / shape.parallel.tensor
        flops, moved = figures.flops * tokens, 2 * figures.kept_bytes * tokens
        return Passes(roof.seconds(flops, moved), roof.seconds(2 * flops, 2 * moved))

    def saved(self, shape: LayerShape) -> Iterator[SavedTensor]:
        figures, [name] = self.figures(shape), self._inside
        if figures.nothing:
            return
        kept = ceil(figures.margin * figures.kept_bytes * shape.tokens / shape.parallel.tensor)
        yield from own_tensors(name, shape.input_bytes + kept)
        yield dropout_tensor(shape, self.section)

    def parameters(self, model: Model, layout: Parallel) -> HalfParameters:
        figures = model.opaque_in(self.section)
        if figures.nothing:
            return HalfParameters(cut=0, passed=0, vectors=0, weights=0, biased=0, norms=0)
        return HalfParameters(
            cut=figures.parameters,
            passed=figures.flops // 2,
            vectors=model.norm_parameters(),
            weights=2,
            biased=0,
        )

    def backward(self, shape: LayerShape) -> Iterator[Step]:
        figures, [name] = self.figures(shape), self._inside
        made = ceil(figures.margin * figures.in_hand_bytes * shape.tokens / shape.parallel.tensor)
        yield Step(name, made, made)

    def refusals(self, job: Job) -> Iterator[Problem]:
        if job.parallel.context > 1 and not self.figures(LayerShape.of(job)).nothing:
            needed = (
                f"1 with {self.section.name}: its state goes through the whole sequence, and what it exchanges is not counted"
            )
            yield Problem("job: parallel.context", str(job.parallel.context), needed, "stock policies can be estimated")

    @property
    def _inside(self) -> list[str]:
        return [item.name for item in self.section.items if item.role == "opaque"]


FACES: dict[str, type[Planning]] = {
    ATTENTION.name: DenseAttention,
    MLP.name: DenseMlp,
    LATENT[True, False].name: LatentAttention,
    SPARSE[True].name: SparseAttention,
    EXPERTS.name: MixtureOfExperts,
    **dict.fromkeys(OPAQUE, OpaqueHalf),
    DELTA_NET.name: DeltaNet,
    MAMBA.name: MambaLayer,
}


@lru_cache(maxsize=64)
def planning_of(section: Section) -> Planning:
    return FACES[section.name](section)


def half_tensors(shape: LayerShape, half: Half) -> tuple[SavedTensor, ...]:
    return planning_of(shape.model.halves[half]).tensors(shape)


def flops_of(shape: LayerShape) -> dict[str, int]:
    return {item: flops for half in HALVES for item, flops in planning_of(shape.model.halves[half]).flops(shape).items()}
