"""Estimates a profile from layer shapes, by the kinds' formulas (`kinds`), and the cluster's figures, by its `roofline`.

Layers of an FP8 model that stay in bf16 (`--first-last-layers-bf16`) have FP8's figures. Their additional time is added to the
embedding or output layer, except for gathers of two bytes. In a ring of n ranks each sends (n - 1)/n of a gathered tensor, twice
that in an all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lynx.config.cluster import Link
from megatron_lynx.config.job import Job
from megatron_lynx.kinds.opaque.section import OPAQUE
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.profiler.profile import BlockProfile, HalfProfile, LinkKind, LinkPoint, Profile, Source, hiding_of, shape_of
from megatron_lynx.profiler.roofline import Roofline, kernels_s, link_among, norm_kernels
from megatron_lynx.profiler.shape import FP32_BYTES, LayerShape, embedding_bytes, head_bytes
from megatron_lynx.version import __version__

LOSS_BYTES = {"unfused": (38, 14), "native": (22, 6), "te": (6, 4)}
"""Bytes read and written per logit by the loss, forward and backward, from its operators in megatron-core.

unfused   copy in fp32 6, maximum 4, difference 8, exponential 8, sum 4, quotient 8     product 8, copy in 16 bits 6
native    copy and maximum 6; difference, exponential and sum 8; quotient 8             product and copy 6
te        maximum and sum 2, gradient in place 4                                        product 4
"""


def analytic_profile(job: Job) -> Profile:
    """Estimate a job's profile. Raises `ConfigError` with every missing figure of the cluster."""
    roof, shape = Roofline.of(job), LayerShape.of(job)
    moved_s = roof.seconds(0, 2 * shape.input_bytes)
    embedding = BlockProfile(forward_s=moved_s, backward_s=moved_s, saved_bytes=embedding_bytes(shape))
    figures = {section.profiled_as: planning_of(section).half(job, shape, roof) for section in job.model.every_section}
    usual = {place: half for place, half in figures.items() if place not in OPAQUE}
    return Profile(
        source=Source(how="analytic", machine=job.cluster.name, made_by=f"megatron-lynx {__version__}", repetitions=1),
        shape=shape_of(job),
        links=_links(job, shape),
        embedding=embedding.longer(*_beyond_fp8(job, figures, job.model.first_in_bf16)),
        head=_head(shape, roof).longer(*_beyond_fp8(job, figures, job.model.last_in_bf16)),
        head_summand_s=roof.seconds(0, 2 * FP32_BYTES * shape.model.vocab * shape.model.hidden // shape.parallel.tensor),
        interference=_interference(job, roof),
        host_time=job.cluster.host_time,
        opaque={opaque.kind: figures[opaque.kind] for opaque in job.model.opaque},
        **usual,
        **_said_by(job),
    )


def _interference(job: Job, roof: Roofline) -> float:
    """Return the slowdown of computation during a collective. HybridEP's exchanges overlap only in `cost.combined`."""
    kept, experts = 1 - roof.matmul.beside_collective, job.model.experts
    beside = experts is not None and experts.dispatcher == "deepep"
    return 1 / min(kept, job.fused_dispatch.computing_kept if beside else 1.0)


def _beyond_fp8(job: Job, in_fp8: Mapping[str, HalfProfile], layers: range) -> tuple[float, float]:
    """Return the additional forward and backward seconds of bf16 layers at one end of an FP8 model."""
    if not layers:
        return 0.0, 0.0
    plain = job.model_copy(update={"model": job.model.model_copy(update={"fp8": None})})
    roof, shape, forward_s, backward_s = Roofline.of(plain), LayerShape.of(plain), 0.0, 0.0
    for section in (section for layer in layers for section in job.model.sections(layer)):
        half, usual = planning_of(section).half(plain, shape, roof), in_fp8[section.profiled_as]
        forward_s += max(0.0, half.forward_s - usual.forward_s)
        backward_s += max(0.0, half.backward_s - usual.backward_s)
    return forward_s, backward_s


def on_cluster(profile: Profile, job: Job) -> Profile:
    """Return a profile measured elsewhere, on one device for example, with the links of the job's cluster, and its host time if
    the profile has none. Raises as `analytic_profile` does."""
    Roofline.of(job)
    source = profile.source.model_copy(update={"interconnect": f"figures of {job.cluster.name}"})
    host_time = profile.host_time or job.cluster.host_time
    changed = {"source": source, "links": _links(job, LayerShape.of(job)), "host_time": host_time}
    return profile.model_copy(update=changed | _said_by(job))


def _said_by(job: Job) -> dict[str, Any]:
    return {"hiding": hiding_of(job), "messages_between_passes": not job.overlap.messages}


def _head(shape: LayerShape, roof: Roofline) -> BlockProfile:
    logits = shape.tokens * shape.model.vocab // shape.parallel.tensor
    gemm_s = roof.seconds(2 * logits * shape.model.hidden, shape.gathered_bytes + shape.model.element_bytes * logits)
    norm = kernels_s(norm_kernels(shape), roof)
    loss_s = [roof.seconds(0, moved * logits) for moved in LOSS_BYTES[shape.model.cross_entropy]]
    return BlockProfile(
        forward_s=gemm_s + norm.forward_s + loss_s[0],
        backward_s=(2 if shape.model.adapters is None else 1) * gemm_s + norm.backward_s + loss_s[1],
        saved_bytes=head_bytes(shape) + FP32_BYTES * logits,
    )


def _links(job: Job, shape: LayerShape) -> tuple[LinkPoint, ...]:
    """Return two points of each kind of message of this job, on a line that starts at the latency."""
    kinds: dict[LinkKind, tuple[Link, float]] = {}
    tensor = job.parallel.tensor
    if tensor > 1:
        link, share = link_among(job.cluster, tensor), (tensor - 1) / tensor
        kinds |= {"all_reduce": (link, 2 * share), "all_gather": (link, share), "reduce_scatter": (link, share)}
    if job.parallel.pipeline > 1:
        kinds["p2p"] = (link_among(job.cluster, job.gpus), 1.0)
    if job.cluster.pcie is not None:
        kinds["host"] = (job.cluster.pcie, job.cluster.pcie.gpus_per_link)  # concurrent copies share the uplink
    size, scattered = shape.gathered_bytes, job.parallel.scattered_messages and tensor > 1
    points = {
        (kind, message_bytes): link.seconds(share * message_bytes)
        for kind, (link, share) in kinds.items()
        for message_bytes in (1, size)
    }
    if scattered and "p2p" in kinds:
        link = kinds["p2p"][0]
        for message_bytes in (1, size):
            points["p2p", message_bytes] = link.seconds(message_bytes / tensor) + points["all_gather", message_bytes]
    return tuple(LinkPoint(kind=kind, bytes=message_bytes, seconds=seconds) for (kind, message_bytes), seconds in points.items())
