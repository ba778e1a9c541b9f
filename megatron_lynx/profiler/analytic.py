"""A profile without measuring: what one layer and its links cost by their shapes and the cluster's figures.

    seconds of a kernel  =  start and end  +  max( FLOPs / achieved matrix rate ,  bytes moved / achieved memory rate )
                                              the larger a GEMM, the nearer to its cluster's best: `config.cluster.Matmul`

    FLOPs of each item   profiler.shape   forward once, backward twice; fused attention's backward 2.5 times (it makes the
                                          scores again), and a causal mask halves both
    bytes of each item   `_traffic`       what its kernels read and write, each tensor once
    links                a ring: of n ranks each sends (n - 1)/n of a gathered tensor, twice that in an all-reduce

A GEMM beside a collective loses a share of its rate, so what stock Megatron hides behind linears is not free.
Tensor-parallel groups talk over NVLink if a node holds them and has it, over its PCIe links if not, and else over their NICs.
Context-parallel ranks pass keys and values around a ring while they work on those they have: a turn lasts as long as the slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lynx.anatomy import CODE_ITEMS, COLUMN_PARALLEL, DENSE, Half
from megatron_lynx.config.cluster import Link, Matmul
from megatron_lynx.config.job import Job
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.profiler.expert_seconds import Passes, expert_half
from megatron_lynx.profiler.link_levels import link_among
from megatron_lynx.profiler.profile import (
    BlockProfile,
    ExpertHalf,
    HalfProfile,
    ItemProfile,
    LinkKind,
    LinkPoint,
    Profile,
    Source,
    shape_of,
)
from megatron_lynx.profiler.quantized import FP8_BYTES, Casts
from megatron_lynx.profiler.shape import LayerShape, item_flops
from megatron_lynx.profiler.tensors import FP32_BYTES, MASK_BYTES, embedding_bytes, half_tensors, head_bytes, logits_bytes
from megatron_lynx.version import __version__

FUSED_BACKWARD = 2.5
"""GEMMs of fused attention's backward over those of its forward: five and two."""

LOSS_BYTES = (24, 12)
"""Read and written for each logit by the fp32 loss. Forward: copy, maximum, exponentials, sums; backward: gradient, copy."""


def analytic_profile(job: Job) -> Profile:
    """Raises `ConfigError` with every part of the cluster's description that is needed and missing."""
    roof, shape = Roofline.of(job), LayerShape.of(job)
    return Profile(
        source=Source(how="analytic", machine=job.cluster.name, made_by=f"megatron-lynx {__version__}", repetitions=1),
        shape=shape_of(job),
        attention=_half(shape, "attention", roof),
        mlp=_half(shape, "mlp", roof),
        links=_links(job, shape),
        experts=_experts(job, shape, roof),
        embedding=_embedding(shape, roof),
        head=_head(shape, roof),
        interference=1 / (1 - roof.matmul.beside_collective),
    )


def on_cluster(profile: Profile, job: Job) -> Profile:
    """A profile measured elsewhere, on one device say, with the links of the job's cluster. Raises as `analytic_profile` does."""
    Roofline.of(job)
    source = profile.source.model_copy(update={"interconnect": f"figures of {job.cluster.name}"})
    return profile.model_copy(update={"source": source, "links": _links(job, LayerShape.of(job))})


@dataclass(frozen=True)
class Roofline:
    """One device."""

    matmul: Matmul
    hbm: Link
    dtype: Literal["fp32", "bf16"]
    ring: Link
    """Between context-parallel ranks."""
    casts: Casts | None
    """Of linears in FP8."""
    fp8_speed: float
    """How many times faster their GEMMs are."""
    beside_s: tuple[float, float]
    """Collectives that stock Megatron runs beside the dgrad, and beside the wgrad of a column-parallel linear."""

    @classmethod
    def of(cls, job: Job) -> Roofline:
        matmul, hbm = job.cluster.matmul, job.cluster.hbm
        missing = [name for name in ("matmul", "hbm", "pcie", "nic", "node") if getattr(job.cluster, name) is None]
        if matmul is None or hbm is None or missing:
            problems = [Problem(f"cluster {job.cluster.name}: {name}", "nothing", "this part's figures") for name in missing]
            raise ConfigError("seconds cannot be estimated for this cluster", problems)
        ring = link_among(job.cluster, job.parallel.tensor * job.parallel.context)
        units, recipe = job.cluster.fp8, job.model.fp8_recipe
        casts, speed = None, 1.0
        if recipe is not None and units is not None:
            casts, speed = Casts(recipe, units.transposes), 1e12 * units.tflop_per_s / matmul.peak_flop_per_s("bf16")
        return cls(matmul, hbm, job.model.dtype, ring, casts, speed, _beside_s(job))

    def seconds(self, flops: float, moved_bytes: float) -> float:
        return self._seconds(self.matmul.gemm_s(flops, self.dtype), moved_bytes)

    def linear_s(self, flops: float, moved_bytes: float) -> float:
        """A GEMM of a layer's linear, in FP8 where that is asked for."""
        return self._seconds(self.matmul.gemm_s(flops, self.dtype) / self.fp8_speed, moved_bytes)

    def cast_s(self, cast: tuple[int, int]) -> float:
        """`cast`: bytes moved, kernels, as `Casts` has them."""
        moved, kernels = cast
        return kernels * self.hbm.latency_us * 1e-6 + moved / self.hbm.byte_per_s

    def attention_s(self, flops: float, moved_bytes: float) -> float:
        """In fused kernels."""
        return self._seconds(self.matmul.attention_s(flops, self.dtype), moved_bytes)

    def slowed_s(self, alone_s: float, collective_s: float) -> float:
        """Of a GEMM beside a collective, which may outlast it."""
        lost = self.matmul.beside_collective
        return min(alone_s + lost * collective_s, alone_s / (1 - lost))

    def _seconds(self, compute_s: float, moved_bytes: float) -> float:
        return self.hbm.latency_us * 1e-6 + max(compute_s, moved_bytes / self.hbm.byte_per_s)


def _half(shape: LayerShape, half: Half, roof: Roofline) -> HalfProfile:
    tensors = half_tensors(shape, half)
    items = {item: _item(shape, item, roof) for item in DENSE[half].names}
    first_saved = {item: sum(tensor.bytes for tensor in tensors if tensor.saved_by[:1] == (item,)) for item in items}
    priced = {name: item.model_copy(update={"saved_bytes": first_saved[name]}) for name, item in items.items()}
    return HalfProfile(input_bytes=shape.input_bytes, items=priced, tensors=tensors)


def _experts(job: Job, shape: LayerShape, roof: Roofline) -> ExpertHalf | None:
    if job.model.experts is None:
        return None
    around = [Passes(*(roof.seconds(0, moved) for moved in _traffic(shape, item))) for item in ("pre_mlp_layernorm", "mlp_bda")]
    return expert_half(job, shape, roof, around[0] + around[1])


def _item(shape: LayerShape, item: str, roof: Roofline) -> ItemProfile:
    flops = item_flops(shape)[item]
    if item.startswith("linear_"):
        return _linear(shape, item, flops, roof)
    if item == "core_attention":
        forward_s, backward_s = _in_turns(_attention_s(shape, flops, roof), shape, roof)
        return ItemProfile(
            forward_s=forward_s, backward_s=backward_s, saved_bytes=0, output_bytes=_output(shape, item), flops=flops
        )
    forward, backward = (roof.seconds(0, moved) if moved else 0.0 for moved in _traffic(shape, item))
    if roof.casts is not None and item.endswith("layernorm"):
        both = not shape.parallel.sequence_parallel
        forward += roof.cast_s(roof.casts.of_norm(shape.own_tokens * shape.model.hidden, both=both))
    return ItemProfile(forward_s=forward, backward_s=backward, saved_bytes=0, output_bytes=_output(shape, item), flops=0)


def _linear(shape: LayerShape, item: str, flops: int, roof: Roofline) -> ItemProfile:
    """The weight's gradient is added to an fp32 buffer: read and written."""
    size = LinearShape.of(shape, item)
    element, read, weight = shape.model.element_bytes, size.read_bytes, size.inside * size.outside
    taken, made = shape.tokens * size.inside, shape.tokens * size.outside
    forward_s = roof.linear_s(flops, read * (taken + weight) + element * made)
    dgrad_s = roof.linear_s(flops, read * (made + weight) + element * taken)
    wgrad_s = roof.linear_s(flops, read * (taken + made) + 2 * FP32_BYTES * weight)
    if item in COLUMN_PARALLEL:
        dgrad_s, wgrad_s = (roof.slowed_s(*both) for both in zip((dgrad_s, wgrad_s), roof.beside_s, strict=True))
    cast_forward_s, cast_backward_s = _casts_s(shape, item, size, roof)
    return ItemProfile(
        forward_s=forward_s + cast_forward_s,
        backward_s=dgrad_s + wgrad_s + cast_backward_s,
        saved_bytes=0,
        output_bytes=_output(shape, item),
        flops=flops,
        dgrad_s=dgrad_s,
        wgrad_s=wgrad_s,
    )


@dataclass(frozen=True)
class LinearShape:
    """A linear of one rank: columns of what it takes and of what it makes, and in how many bytes its GEMMs read."""

    inside: int
    outside: int
    read_bytes: int

    @classmethod
    def of(cls, shape: LayerShape, item: str) -> LinearShape:
        hidden = shape.model.hidden
        inside, outside = {
            "linear_qkv": (hidden, shape.qkv_width),
            "linear_proj": (shape.query_width, hidden),
            "linear_fc1": (hidden, shape.fc1_width),
            "linear_fc2": (shape.ffn, hidden),
        }[item]
        return cls(inside, outside, shape.model.element_bytes if shape.model.fp8 is None else FP8_BYTES)


def _casts_s(shape: LayerShape, item: str, size: LinearShape, roof: Roofline) -> tuple[float, float]:
    """Forward and backward seconds of a linear's casts: of its input, where no norm makes it, and of its output's gradient.

    Under sequence parallelism what is gathered is gathered in FP8, and by columns only afterwards.
    """
    casts, sliced = roof.casts, shape.parallel.sequence_parallel
    if casts is None:
        return 0.0, 0.0
    taken, made = shape.tokens * size.inside, shape.tokens * size.outside
    if item in COLUMN_PARALLEL:
        gathered_s = roof.cast_s(casts.transposed(taken)) if sliced else 0.0
        return 0.0, roof.cast_s(casts.of(made, both=True)) + gathered_s
    gradient_s = roof.cast_s(casts.of(shape.own_tokens * size.outside, both=not sliced))
    return roof.cast_s(casts.of(taken, both=True)), gradient_s + (roof.cast_s(casts.transposed(made)) if sliced else 0.0)


def _attention_s(shape: LayerShape, flops: int, roof: Roofline) -> tuple[float, float]:
    """Forward and backward. Unfused: two batched GEMMs, softmax with its mask and dropout pass over all scores."""
    element = shape.model.element_bytes
    read = element * shape.tokens * 2 * (shape.query_width + shape.key_width)
    if shape.model.attention == "flash":
        causal = flops / 2
        return roof.attention_s(causal, read), roof.attention_s(FUSED_BACKWARD * causal, 2 * read)
    scores = element * shape.scores
    gemms_s = roof.seconds(flops, read + 2 * scores)
    dropout = 2 * scores + MASK_BYTES * shape.scores if shape.model.attention_dropout else 0
    forward_s = gemms_s + roof.seconds(0, 2 * scores) + roof.seconds(0, dropout)
    return forward_s, 2 * gemms_s + roof.seconds(0, 3 * scores) + roof.seconds(0, dropout)


def _in_turns(alone_s: tuple[float, float], shape: LayerShape, roof: Roofline) -> tuple[float, float]:
    """Attention in as many turns as there are context ranks; in all but the last the next keys and values come in, in backward
    with their gradients."""
    ranks, forward_s, backward_s = shape.parallel.context, *alone_s
    if ranks == 1:
        return alone_s
    arriving = 2 * shape.model.element_bytes * shape.tokens * shape.key_width
    moved_s = roof.ring.seconds(arriving), roof.ring.seconds(2 * arriving)
    turns_s = forward_s / ranks, backward_s / ranks
    forward_s, backward_s = (turn + (ranks - 1) * max(turn, moved) for turn, moved in zip(turns_s, moved_s, strict=True))
    return forward_s, backward_s


def _traffic(shape: LayerShape, item: str) -> tuple[int, int]:
    """Bytes read and written by items without a GEMM, forward and backward."""
    element, residual = shape.model.element_bytes, shape.model.element_bytes * shape.own_tokens * shape.model.hidden
    if item.endswith("layernorm"):
        return 2 * residual, 3 * residual
    if item.endswith("_bda"):
        mask = MASK_BYTES * shape.own_tokens * shape.model.hidden if shape.model.hidden_dropout else 0
        dropped = 2 * residual + mask if shape.model.hidden_dropout else 0
        return (
            3 * residual + mask,
            dropped + 3 * residual,
        )  # backward: through the dropout, and the sum with the residual's gradient
    if item == "rotary":
        both = element * shape.tokens * (shape.query_width + shape.key_width)
        turned = 2 * both if shape.model.position == "rope" else 0
        copied, normed, back = (
            (2 * both, 2 * both, 3 * both) if shape.model.qk_norm else (0, 0, 0)
        )  # out of the projection's block
        return turned + copied + normed, turned + copied + back
    inner, outer = element * shape.tokens * shape.fc1_width, element * shape.tokens * shape.ffn
    apart = outer if shape.model.activation == "swiglu" else 0  # SiLU is a kernel of its own
    return inner + outer + 2 * apart, 2 * inner + outer + 3 * apart


def _output(shape: LayerShape, item: str) -> int:
    if item in CODE_ITEMS:
        return 0
    widths = {"linear_qkv": shape.qkv_width, "core_attention": shape.query_width, "linear_fc1": shape.fc1_width}
    return shape.tokens * widths[item] * shape.model.element_bytes if item in widths else shape.input_bytes


def _embedding(shape: LayerShape, roof: Roofline) -> BlockProfile:
    rows = shape.input_bytes
    seconds = roof.seconds(0, 2 * rows)
    return BlockProfile(forward_s=seconds, backward_s=seconds, saved_bytes=embedding_bytes(shape))


def _head(shape: LayerShape, roof: Roofline) -> BlockProfile:
    """Final norm, output projection on all rows, loss."""
    logits = shape.tokens * shape.model.vocab // shape.parallel.tensor
    gemm_s = roof.seconds(2 * logits * shape.model.hidden, shape.gathered_bytes + shape.model.element_bytes * logits)
    norm_s = [roof.seconds(0, moved) for moved in _traffic(shape, "input_layernorm")]
    loss_s = [roof.seconds(0, moved * logits) for moved in LOSS_BYTES]
    return BlockProfile(
        forward_s=gemm_s + norm_s[0] + loss_s[0],
        backward_s=2 * gemm_s + norm_s[1] + loss_s[1],
        saved_bytes=head_bytes(shape) + logits_bytes(shape),
    )


def _links(job: Job, shape: LayerShape) -> tuple[LinkPoint, ...]:
    """Straight lines from the latency on: two points of each kind that this job's layers and stages send."""
    kinds: dict[LinkKind, tuple[Link, float]] = {}
    tensor = job.parallel.tensor
    if tensor > 1:
        link, share = link_among(job.cluster, tensor), (tensor - 1) / tensor
        kinds |= {"all_reduce": (link, 2 * share), "all_gather": (link, share), "reduce_scatter": (link, share)}
    if job.parallel.pipeline > 1:
        kinds["p2p"] = (link_among(job.cluster, job.gpus), 1.0)
    if job.cluster.pcie is not None:
        kinds["host"] = (job.cluster.pcie, job.cluster.pcie.gpus_per_link)  # their copies share the uplink
    size = shape.gathered_bytes
    return tuple(
        LinkPoint(kind=kind, bytes=each, seconds=link.seconds(share * each))
        for kind, (link, share) in kinds.items()
        for each in (1, size)
    )


def _beside_s(job: Job) -> tuple[float, float]:
    """The input gathered again beside the dgrad, under sequence parallelism; its gradient reduced beside the wgrad."""
    tensor = job.parallel.tensor
    if tensor == 1:
        return 0.0, 0.0
    link, share, shape = link_among(job.cluster, tensor), (tensor - 1) / tensor, LayerShape.of(job)
    sent = share * shape.gathered_bytes
    if not job.parallel.sequence_parallel:
        return 0.0, link.seconds(2 * sent)
    return link.seconds(share * shape.gathered_input_bytes), link.seconds(sent)
