"""Profiles nobody measured: seconds from FLOPs, bytes from shapes, links as a test wants them."""

from __future__ import annotations

from typing import Any

from megatron_lynx.anatomy import CODE_ITEMS, Half
from megatron_lynx.config.cluster import HalfHostTime, HostPasses, HostTime, LayerHostTime
from megatron_lynx.config.job import Job
from megatron_lynx.kinds.experts.planning import expert_tensors
from megatron_lynx.kinds.planning import flops_of, half_tensors
from megatron_lynx.profiler.profile import HalfProfile, ItemProfile, LinkPoint, Profile, Source, shape_of
from megatron_lynx.profiler.shape import LayerShape

FLOPS_PER_S = 1e9
SMALL_S = 1e-6
"""Seconds of an item without a GEMM."""


def made_up_profile(job: Job, link_s: float = 1e-3, **changes: Any) -> Profile:
    """Every collective of a layer takes `link_s`; a GEMM's backward takes twice its forward."""
    shape = LayerShape(job.model, job.parallel, job.batch.micro)
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "p2p")
    fields = {
        "source": Source(how="analytic", machine="none", made_by="a test", repetitions=1),
        "shape": shape_of(job),
        "attention": made_up_half(shape, "attention"),
        "mlp": made_up_half(shape, "mlp"),
        "links": tuple(LinkPoint(kind=kind, bytes=shape.gathered_bytes, seconds=link_s) for kind in kinds),
    }
    return Profile(**{**fields, **changes})


def made_up_half(shape: LayerShape, half: Half) -> HalfProfile:
    flops, tensors = flops_of(shape), half_tensors(shape, half)
    section = next(section for section in shape.model.kind_sections(experts=False) if section.half == half)
    items = {}
    for item in section.names:
        gemm_s = flops[item] / FLOPS_PER_S
        linear = item in section.linears
        items[item] = ItemProfile(
            forward_s=gemm_s or SMALL_S,
            backward_s=2 * gemm_s or SMALL_S,
            saved_bytes=sum(tensor.bytes for tensor in tensors if tensor.saved_by[:1] == (item,)),
            output_bytes=0 if item in CODE_ITEMS else shape.input_bytes,
            flops=flops[item],
            dgrad_s=gemm_s if linear else 0.0,
            wgrad_s=gemm_s if linear else 0.0,
        )
    return HalfProfile(input_bytes=shape.input_bytes, items=items, tensors=tensors)


HOST_US = {
    "none": (500, 500),
    "full": (500, 1000),
    "kept": (550, 550),
    "partly": (600, 750),
    "recomputed": (700, 1200),
    "gathered": (700, 1300),
    "offloaded": (650, 650),
    "deferred": (570, 730),
}
"""Microseconds (forward, backward) of one half on a host that nobody has."""


def made_up_host_time(times: float = 1.0, **halves: HalfHostTime) -> HostTime:
    """A host so many times slower than `HOST_US`, on which both halves of Megatron's own layers take as long."""
    return HostTime(cpu="a CPU of a test", local=made_up_layer_host_time(times, **halves))


def made_up_layer_host_time(times: float = 1.0, **halves: HalfHostTime) -> LayerHostTime:
    figures = {name: (times * forward, times * backward) for name, (forward, backward) in HOST_US.items()}
    half = HalfHostTime(**{name: HostPasses(forward_us=each[0], backward_us=each[1]) for name, each in figures.items()})
    return LayerHostTime(made_by="a test", **{"attention": half, "mlp": half, **halves})


def saved_parts(shape: LayerShape) -> dict[str, int]:
    """Bytes of the input of a half of experts, and of the tensors that each item is the first to save."""
    assert shape.model.experts is not None
    parts = dict.fromkeys(("input", *shape.model.experts.section.names), 0) | {"input": shape.input_bytes}
    for block in expert_tensors(shape):
        if block.saved_by:
            parts[block.saved_by[0]] += block.bytes
    return parts
