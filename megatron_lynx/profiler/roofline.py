"""Roofline of one device: kernel time from FLOPs and bytes moved.

    seconds of a kernel  =  start and end  +  max( FLOPs / achieved matrix rate ,  bytes moved / achieved memory rate )
                                              the rate grows with the size of a GEMM: `config.cluster.Matmul`

A GEMM slows down during a collective, so stock's overlap with linears is not free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lynx.config.cluster import AttentionKernel, Cluster, Link, Matmul
from megatron_lynx.config.job import Job
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.profiler.element_wise import Kernels
from megatron_lynx.profiler.profile import hiding_of
from megatron_lynx.profiler.quantized import Casts
from megatron_lynx.profiler.shape import LayerShape


@dataclass(frozen=True)
class Passes:
    forward_s: float
    backward_s: float

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward_s + other.forward_s, self.backward_s + other.backward_s)


@dataclass(frozen=True)
class Roofline:
    matmul: Matmul
    hbm: Link
    dtype: Literal["fp32", "bf16"]
    ring: Link
    """Link between context-parallel ranks, or between groups of them."""
    traders: Link
    """Link between context-parallel ranks of an all-to-all."""
    casts: Casts | None
    """Costs of FP8 casts; None if linears compute in the model's type."""
    fp8_speed: float
    """Speedup of linears' GEMMs over the model's type. FP4 reaches the same share of its peak as FP8."""
    beside_s: tuple[float, float]
    """Seconds of the collectives that stock overlaps with a column-parallel linear's dgrad and wgrad."""

    @classmethod
    def of(cls, job: Job) -> Roofline:
        matmul, hbm = job.cluster.matmul, job.cluster.hbm
        missing = [name for name in ("matmul", "hbm", "pcie", "nic", "node") if getattr(job.cluster, name) is None]
        if matmul is None or hbm is None or missing:
            problems = [Problem(f"cluster {job.cluster.name}: {name}", "nothing", "this part's figures") for name in missing]
            raise ConfigError("seconds cannot be estimated for this cluster", problems)
        ring = link_among(job.cluster, job.parallel.tensor * job.parallel.context)
        traders = link_among(job.cluster, job.parallel.tensor * job.parallel.context_groups[0])
        units, recipe = job.cluster.fp8, job.model.fp8_recipe
        casts, speed = None, 1.0
        if recipe is not None and units is not None:
            achieved = units.peak_of(recipe) * (units.efficiency or matmul.efficiency)
            casts, speed = Casts(recipe, units.transposes), achieved / (matmul.bf16_tflop_per_s * matmul.efficiency)
        return cls(matmul, hbm, job.model.dtype, ring, traders, casts, speed, _beside_s(job))

    def seconds(self, flops: float, moved_bytes: float) -> float:
        return self._seconds(self.matmul.gemm_s(flops, self.dtype), moved_bytes)

    def linear_s(self, flops: float, moved_bytes: float) -> float:
        """Return the seconds of a layer's linear GEMM, in FP8 if configured."""
        return self._seconds(self.matmul.gemm_s(flops, self.dtype) / self.fp8_speed, moved_bytes)

    def cast_s(self, cast: tuple[int, int]) -> float:
        moved, kernels = cast
        return kernels * self.hbm.latency_us * 1e-6 + moved / self.hbm.byte_per_s

    def attention_s(self, flops: float, moved_bytes: float, kernel: AttentionKernel) -> float:
        return self._seconds(self.matmul.attention_s(flops, self.dtype, kernel), moved_bytes)

    def batched_s(self, count: int, flops: float, moved_bytes: float) -> float:
        """Return the seconds of `count` GEMMs of one shape in one kernel, each as efficient as its size allows. FLOPs and bytes
        are totals."""
        return self._seconds(count * self.matmul.gemm_s(flops / count, self.dtype), moved_bytes)

    def slowed_s(self, alone_s: float, collective_s: float) -> float:
        """Return the seconds of a GEMM during a collective, which may outlast it."""
        lost = self.matmul.beside_collective
        return min(alone_s + lost * collective_s, alone_s / (1 - lost))

    def _seconds(self, compute_s: float, moved_bytes: float) -> float:
        return self.hbm.latency_us * 1e-6 + max(compute_s, moved_bytes / self.hbm.byte_per_s)


def kernels_s(kernels: Kernels, roof: Roofline) -> Passes:
    forward_s, backward_s = (sum(roof.seconds(0, moved) for moved in each) for each in kernels)
    return Passes(forward_s, backward_s)


def _beside_s(job: Job) -> tuple[float, float]:
    """Return the seconds of the input's all-gather during dgrad (sequence parallelism), and of its gradient's reduction during
    wgrad."""
    tensor = job.parallel.tensor
    if tensor == 1 or hiding_of(job) == "nothing":
        return 0.0, 0.0
    link, share, shape = link_among(job.cluster, tensor), (tensor - 1) / tensor, LayerShape.of(job)
    sent = share * shape.gathered_bytes
    if not job.parallel.sequence_parallel:
        return 0.0, link.seconds(2 * sent)
    return link.seconds(share * shape.gathered_input_bytes), link.seconds(sent)


def link_among(cluster: Cluster, ranks: int) -> Link:
    assert cluster.pcie is not None, "checked by Roofline.of"
    assert cluster.nic is not None, "checked by Roofline.of"
    assert cluster.node is not None, "checked by Roofline.of"
    if ranks > cluster.node.gpus:
        return cluster.nic
    if cluster.nvlink is not None:
        return cluster.nvlink
    return cluster.pcie.model_copy(update={"gb_per_s": cluster.pcie.gb_per_s / cluster.pcie.gpus_per_link})


def fewest_in_a_node(first: int, stride: int, members: int, node_gpus: int) -> int:
    """Return the minimum number of members in one node, of a group `first`, `first + stride`, ... Counts repeat after `stride`
    nodes."""
    if stride >= node_gpus:
        return 1
    begin, end = (rank // node_gpus for rank in (first, first + stride * (members - 1)))
    nodes = {begin, end, *range(begin + 1, min(end, begin + 1 + stride))}
    return min(
        _members_below(node + 1, first, stride, members, node_gpus) - _members_below(node, first, stride, members, node_gpus)
        for node in nodes
    )


def _members_below(node: int, first: int, stride: int, members: int, node_gpus: int) -> int:
    """Return the number of a group's members in earlier nodes."""
    return min(members, max(0, -((first - node * node_gpus) // stride)))
