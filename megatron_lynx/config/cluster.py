"""The machine that a job runs on: its devices, links and CPUs.

Profiling needs only `device`, `memory_gib` and, on the testbed, `link_mbit_per_s`. Estimates need the other fields;
`configs/clusters/` has them for common nodes, each figure with its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from megatron_lynx.anatomy import HALVES, Half
from megatron_lynx.fp8_recipes import Recipe
from megatron_lynx.timeline import Passes
from megatron_lynx.validation import Part, formerly

Setting = Literal["none", "full", "kept", "partly", "recomputed", "gathered", "offloaded", "deferred"]
"""Treatment of a half.

none, full    stock Megatron, without recomputation and with full recomputation
kept          a plan keeps its activations
partly        recomputed, except GEMMs and attention: its norm, and the MLP half's activation
recomputed    whole
gathered      recomputed whole, its input gathered once (sequence parallelism)
offloaded     activations kept, and offloaded to host memory
deferred      activations kept, and the weight gradients of all its linears delayed into waits
"""

Implementation = Literal["local", "transformer_engine"]
LAYERS: Mapping[Implementation, str] = {"local": "Megatron's own layers", "transformer_engine": "Transformer Engine's layers"}


class HostPasses(Part):
    """Host microseconds of one half and micro-batch: forward, and backward including recomputation."""

    forward_us: float = Field(ge=0)
    backward_us: float = Field(ge=0)

    @property
    def seconds(self) -> Passes:
        return Passes(1e-6 * self.forward_us, 1e-6 * self.backward_us)


class HalfHostTime(Part):
    none: HostPasses
    full: HostPasses
    kept: HostPasses
    partly: HostPasses
    recomputed: Annotated[HostPasses, formerly("recomputed", "replayed")]
    gathered: HostPasses | None = None
    """If None: not measured, taken as `recomputed`."""
    offloaded: HostPasses | None = None
    """If None: not measured, taken as `kept`. So is `deferred`."""
    deferred: HostPasses | None = None

    def under(self, setting: Setting) -> HostPasses:
        passes: HostPasses | None = getattr(self, setting)
        return passes or (self.recomputed if setting == "gathered" else self.kept)


class LayerHostTime(Part):
    """Host time of one layer by half and setting, without the collectives that it issues."""

    made_by: str
    attention: HalfHostTime
    mlp: HalfHostTime

    def half(self, half: Half) -> HalfHostTime:
        return self.attention if half == HALVES[0] else self.mlp

    def layer_s(self, setting: Setting) -> float:
        return sum(self.half(half).under(setting).seconds.both_s for half in HALVES)


class ExpertHostTime(Part):
    """Host time of a half with experts under stock none. Other settings differ from it as an MLP's do."""

    made_by: str
    half: HostPasses
    """Router, permutation, exchanges and the calls of the experts' grouped GEMMs, for any number of experts."""
    each: HostPasses
    """For each expert of a rank: its weights' arguments, GEMMs, and gradient hooks."""

    def of(self, local_experts: int) -> HostPasses:
        forward_us, backward_us = (
            getattr(self.half, name) + local_experts * getattr(self.each, name) for name in ("forward_us", "backward_us")
        )
        return HostPasses(forward_us=forward_us, backward_us=backward_us)


ADAM_BYTES = 28
"""Bytes of a parameter's update: reads it, its gradient and two moments, writes all but the gradient, in fp32."""


class HostAdam(Part):
    """Speed of PyTorch's fused AdamW on fp32 parameters on a node's CPUs (Megatron's `--optimizer-cpu-offload`)."""

    made_by: str
    alone_million_per_s: float = Field(gt=0)
    """Parameters per second of one rank while other ranks of the node are idle."""
    together_million_per_s: float | None = Field(default=None, gt=0)
    """Parameters per second of each rank while all ranks of the node step; None: not measured."""
    memory_gb_per_s: float | None = Field(default=None, gt=0)
    """Memory bandwidth that updates reach on a node, in 1e9 bytes per second; None: unknown, no limit."""
    memory_share: float | None = Field(default=None, gt=0, le=1)
    """Share of its peak that this is. A cluster that states its nodes' peak (`node.memory_gb_per_s`) has this share of that."""
    core_million_per_s: float | None = Field(default=None, gt=0)
    cores: int | None = Field(default=None, ge=1)
    """Cores of a node that its ranks may use; None: the cluster's (`node.cores`); unknown there, too: no limit."""

    def parameters_per_s(self, ranks: int, node: Node | None) -> float:
        cores, node_ranks, memory_gb_per_s = self.cores, ranks, self.memory_gb_per_s
        if node is not None:
            cores, node_ranks = cores or node.cores, node.gpus
            if node.memory_gb_per_s is not None and self.memory_share is not None:
                memory_gb_per_s = self.memory_share * node.memory_gb_per_s
        limits = [self.alone_million_per_s]
        if self.together_million_per_s is not None:
            limits.append(self.together_million_per_s * node_ranks / ranks)
        if memory_gb_per_s is not None:
            limits.append(1e3 * memory_gb_per_s / ADAM_BYTES / ranks)
        if cores is not None and self.core_million_per_s is not None:
            limits.append(self.core_million_per_s * cores / ranks)
        return 1e6 * min(limits)

    def _problems(self) -> Iterator[str]:
        if self.cores is not None and self.core_million_per_s is None:
            yield f"cores ({self.cores}) needs core_million_per_s, the rate of one"


class HostTime(Part):
    """Seconds that Python takes to issue layers on one CPU (`testbed.host_time`), a lower bound of every pass. An implementation
    that was not measured takes the figures of the other."""

    cpu: str
    local: LayerHostTime | None = None
    transformer_engine: LayerHostTime | None = None
    counts_us: float = Field(default=0.0, ge=0)
    """Microseconds in which a device waits, once per pass of experts: the host reads how many rows each expert gets, and only
    then issues the exchange and the experts."""
    experts: ExpertHostTime | None = None
    adam: HostAdam | None = None

    def _problems(self) -> Iterator[str]:
        if self.local is None and self.transformer_engine is None:
            yield "there are no layers: give local, or transformer_engine, or both"

    def taken_for(self, implementation: Implementation) -> Implementation:
        if getattr(self, implementation) is not None:
            return implementation
        return "local" if self.transformer_engine is None else "transformer_engine"

    @property
    def measured(self) -> tuple[Implementation, ...]:
        return tuple(implementation for implementation in LAYERS if getattr(self, implementation) is not None)

    def of(self, implementation: Implementation) -> LayerHostTime:
        layer: LayerHostTime = getattr(self, self.taken_for(implementation))
        return layer

    def words_for(self, implementation: Implementation) -> str:
        taken = self.taken_for(implementation)
        if taken == implementation:
            return f"{LAYERS[taken]} on {self.cpu}"
        return f"{LAYERS[taken]} on {self.cpu}, where {LAYERS[implementation]} were not measured"


AttentionKernel = Literal["usual", "flash_attention_2"]


class Matmul(Part):
    """Matrix units. A GEMM of n^3 multiply-adds reaches efficiency x n / (n + half_size) of the peak."""

    bf16_tflop_per_s: float = Field(gt=0)
    """Dense peak with fp32 accumulation."""
    fp32_tflop_per_s: float = Field(gt=0)
    """Peak of PyTorch's default for fp32, without TF32."""
    efficiency: float = Field(gt=0, le=1)
    """Share of the peak that very large GEMMs reach."""
    half_size: float = Field(default=0.0, ge=0)
    """Size at which a GEMM reaches half of `efficiency`. 0: efficiency does not depend on size."""
    attention_efficiency: float = Field(gt=0, le=1)
    """Share of the peak that causal fused attention reaches with Transformer Engine's default kernels on these GPUs."""
    flash_attention_2_efficiency: float | None = Field(default=None, gt=0, le=1)
    """Share of the peak with FlashAttention-2, if it is not Transformer Engine's default; None: as `attention_efficiency`."""
    beside_collective: float = Field(default=0.0, ge=0, lt=1)
    """Share of its rate that a GEMM loses while it overlaps a collective."""

    def peak_flop_per_s(self, dtype: Literal["fp32", "bf16"]) -> float:
        return 1e12 * (self.bf16_tflop_per_s if dtype == "bf16" else self.fp32_tflop_per_s)

    def gemm_s(self, flops: float, dtype: Literal["fp32", "bf16"]) -> float:
        size = (flops / 2) ** (1 / 3)
        return flops * (size + self.half_size) / (size * self.efficiency * self.peak_flop_per_s(dtype)) if flops else 0.0

    def attention_s(self, flops: float, dtype: Literal["fp32", "bf16"], kernel: AttentionKernel = "usual") -> float:
        asked = self.flash_attention_2_efficiency if kernel == "flash_attention_2" else None
        return flops / ((asked or self.attention_efficiency) * self.peak_flop_per_s(dtype))


class OrderedAttention(Part):
    """Extra cost of fused attention's deterministic backward (Megatron's `--deterministic-mode`)."""

    way: Literal["copies", "products", "free"]
    """How the default kernels sum in a fixed order. copies: several copies of the query gradient, summed afterwards
    (FlashAttention-2); products: all score gradients are stored in 16 bits (cuDNN on Hopper); free: at no cost."""
    multiprocessors: int = Field(ge=1)
    """Multiprocessors of one device. FlashAttention-2 makes enough copies to occupy each of them."""
    rate_kept: float = Field(default=1.0, gt=0, le=1)
    """With `products`: rate of the deterministic backward, relative to the usual one."""


class Fp8Units(Part):
    tflop_per_s: float = Field(gt=0)
    efficiency: float | None = Field(default=None, gt=0, le=1)
    """Share of this peak that very large GEMMs reach; None: as in bf16."""
    recipes: tuple[Recipe, ...] = Field(min_length=1)
    fp4_tflop_per_s: float | None = Field(default=None, gt=0)
    """Dense peak in FP4; None: no nvfp4 on these GPUs."""
    transposes: bool
    """Whether GEMMs read both operands by rows only, so that columnwise reads need a transposed copy (Hopper)."""

    @property
    def taken(self) -> tuple[Recipe, ...]:
        return self.recipes if self.fp4_tflop_per_s is None else (*self.recipes, "nvfp4")

    def peak_of(self, recipe: Recipe) -> float:
        fp4 = self.fp4_tflop_per_s
        return self.tflop_per_s if fp4 is None or recipe != "nvfp4" else fp4


class Link(Part):
    gb_per_s: float = Field(gt=0)
    """Peak rate, in 1e9 bytes per second."""
    efficiency: float = Field(gt=0, le=1)
    """Share of the peak that large messages reach."""
    latency_us: float = Field(default=0.0, ge=0)

    @property
    def byte_per_s(self) -> float:
        return 1e9 * self.gb_per_s * self.efficiency

    def seconds(self, size_bytes: float) -> float:
        return self.latency_us * 1e-6 + size_bytes / self.byte_per_s


class Pcie(Link):
    gpus_per_link: int = Field(default=1, ge=1)
    """Devices that share the uplink of one PCIe switch."""
    shared_with_nic: bool = False
    """Whether the NIC is on the same PCIe switch, so that inter-node messages use this link too (GPUDirect)."""

    def shared_s(self, size_bytes: float) -> float:
        """Seconds of one copy while all devices on the switch copy as many bytes."""
        return self.latency_us * 1e-6 + size_bytes * self.gpus_per_link / self.byte_per_s


class Nic(Link):
    per_node: int = Field(ge=1)


class Node(Part):
    gpus: int = Field(ge=1)
    host_memory_gib: float = Field(gt=0)
    cores: int | None = Field(default=None, ge=1)
    """Cores of its CPUs, and peak bandwidth of their memory in 1e9 bytes per second; None: unknown."""
    memory_gb_per_s: float | None = Field(default=None, gt=0)

    @property
    def cpus_in_words(self) -> str:
        known = {"cores": self.cores, "GB/s of host memory": self.memory_gb_per_s}
        return ", ".join(f"{figure:g} {name}" for name, figure in known.items() if figure is not None) or "unknown CPUs"


class NcclChannels(Part):
    """Channels that NCCL opens. Each has a buffer per peer."""

    within_node: int = Field(ge=1)
    """For communicators inside one node (one NVLink domain)."""
    between_nodes: int = Field(ge=1)
    of_peers: int = Field(ge=1)
    """Between two ranks of a node in point-to-point messages and all-to-all."""
    multicast: bool = False
    """Whether NVLink SHARP reduces in the switches, which takes more buffers."""


class AllocatorSlack(Part):
    """Memory that PyTorch's allocator has reserved but not allocated, at its peak."""

    expandable_gib: float = Field(ge=0)
    fixed_gib: float = Field(ge=0)


class Reserve(Part):
    context_gib: float = Field(ge=0)
    """CUDA driver and PyTorch's kernels."""
    libraries_gib: float = Field(ge=0)
    """Code of other libraries, loaded at the first call, without their workspaces, which PyTorch allocates."""
    nccl: NcclChannels
    allocator: AllocatorSlack


class Cluster(Part):
    name: str
    device: Literal["cpu", "cuda"]
    memory_gib: float = Field(gt=0, le=1e9)
    """Memory of one device, as PyTorch reports it."""
    reserve: Reserve | None = None
    """Memory per device that plans do not use, in parts (`config.device_reserve`); None: nothing is reserved."""
    link_mbit_per_s: float | None = Field(default=None, gt=0)
    """Testbed only: rate of each rank's emulated link; None: the speed of this machine's loopback."""
    matmul: Matmul | None = None
    fp8: Fp8Units | None = None
    """If None: no FP8 on these GPUs, or unknown."""
    ordered_attention: OrderedAttention | None = None
    hbm: Link | None = None
    nvlink: Link | None = None
    """Link to all other devices of the node together; None: they communicate over PCIe."""
    pcie: Pcie | None = None
    nic: Nic | None = None
    node: Node | None = None
    host_time: HostTime | None = None
    """Time that the nodes' CPUs take to issue a layer, or the name of a file with it (`hosts/NAME`); None: unknown."""

    def keeps_together(self, ranks: int, gpus: int) -> bool:
        """Whether each group of `ranks` consecutive ranks, in a job on `gpus` GPUs, lies within one node."""
        return self.node is None or gpus <= self.node.gpus or self.node.gpus % ranks == 0

    @property
    def links_in_words(self) -> str | None:
        if self.nic is None or self.matmul is None:
            return None
        nvlink = "no NVLink" if self.nvlink is None else f"NVLink {self.nvlink.gb_per_s:g} GB/s"
        cpu = "unknown" if self.host_time is None else self.host_time.cpu.replace("(R)", "")
        return f"seconds assume {self.nic.per_node} NICs of {8 * self.nic.gb_per_s:g} Gbit/s, {nvlink}, CPU {cpu}"

    @property
    def transposes_fp8(self) -> bool:
        """Whether FP8 tensors that are read columnwise have a transposed copy. The testbed emulates a Hopper."""
        return self.fp8 is None or self.fp8.transposes
