"""The machine a job runs on: its devices, and what lies between them.

    node:  device ──NVLink── device ──NVLink── ...     one figure per direction
             │ PCIe (shared by `gpus_per_link` devices)
           host memory
             │ NICs
           other nodes

`device`, `memory_gib` and, on the testbed, `link_mbit_per_s` are all that measuring needs. Estimating without measuring needs the
other parts; `configs/clusters/` has them for common nodes, each figure with its source.

What a plan leaves alone of a device's memory comes in parts, each with its source:

   what PyTorch reports = context [1] + libraries [2] + buffers of NCCL [3] + allocator's slack [4] + what a plan may use

[1] of CUDA: the driver's share, and kernels of PyTorch
[2] code of other libraries, which is loaded when it is first called. Their workspaces PyTorch allocates: these a plan counts
[3] by communicator: the layout decides how many there are (`config.communicators`)
[4] what PyTorch's allocator has reserved and nobody has
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_lynx.config.host_time import HostTime
from megatron_lynx.fp8_recipes import Recipe
from megatron_lynx.validation import Part

AttentionKernel = Literal["usual", "flash_attention_2"]


class Matmul(Part):
    """Matrix units. A GEMM of size n, the edge of a cube of its FLOPs, reaches efficiency x n / (n + half_size) of the peak."""

    bf16_tflop_per_s: float = Field(gt=0)
    """Dense peak with fp32 accumulation."""
    fp32_tflop_per_s: float = Field(gt=0)
    """Peak of what PyTorch uses for fp32 by default: no TF32."""
    efficiency: float = Field(gt=0, le=1)
    """Achieved share of the peak on GEMMs without end."""
    half_size: float = Field(default=0.0, ge=0)
    """Size at which half of that is reached: the smaller a GEMM, the more of it is filling and draining. 0: no such loss."""
    attention_efficiency: float = Field(gt=0, le=1)
    """Achieved share of the peak in fused attention, of the FLOPs that a causal mask leaves, with the kernels that Transformer
    Engine takes on these GPUs."""
    flash_attention_2_efficiency: float | None = Field(default=None, gt=0, le=1)
    """The same share with FlashAttention-2 where that is not what Transformer Engine takes. None: as `attention_efficiency`."""
    beside_collective: float = Field(default=0.0, ge=0, lt=1)
    """Share of its rate that a GEMM loses to a collective that runs beside it."""

    def peak_flop_per_s(self, dtype: Literal["fp32", "bf16"]) -> float:
        return 1e12 * (self.bf16_tflop_per_s if dtype == "bf16" else self.fp32_tflop_per_s)

    def gemm_s(self, flops: float, dtype: Literal["fp32", "bf16"]) -> float:
        """Seconds of one GEMM, as far as computing goes."""
        size = (flops / 2) ** (1 / 3)
        return flops * (size + self.half_size) / (size * self.efficiency * self.peak_flop_per_s(dtype)) if flops else 0.0

    def attention_s(self, flops: float, dtype: Literal["fp32", "bf16"], kernel: AttentionKernel = "usual") -> float:
        """Seconds of fused attention, as far as computing goes."""
        asked = self.flash_attention_2_efficiency if kernel == "flash_attention_2" else None
        return flops / ((asked or self.attention_efficiency) * self.peak_flop_per_s(dtype))


class OrderedAttention(Part):
    """What fused attention's backward costs more where it must add up in one order (Megatron's `--deterministic-mode`)."""

    way: Literal["copies", "products", "free"]
    """How the usual kernels do it. copies: the gradient of the queries in several copies, which are added up afterwards
    (FlashAttention-2); products: the gradient of all scores is written down in 16 bits (cuDNN on Hopper); free: nothing more."""
    multiprocessors: int = Field(ge=1)
    """Of one device. FlashAttention-2 makes so many copies that every multiprocessor has work."""
    rate_kept: float = Field(default=1.0, gt=0, le=1)
    """Share of the backward's rate that is left with `products`."""


class Fp8Units(Part):
    """Matrix units in FP8."""

    tflop_per_s: float = Field(gt=0)
    """Dense peak with fp32 accumulation."""
    efficiency: float | None = Field(default=None, gt=0, le=1)
    """Achieved share of this peak on GEMMs without end. None: as in bf16."""
    recipes: tuple[Recipe, ...] = Field(min_length=1)
    """The recipes for FP8 that these GPUs take."""
    fp4_tflop_per_s: float | None = Field(default=None, gt=0)
    """Dense peak in FP4. None: these GPUs do not take nvfp4."""
    transposes: bool
    """Whether both operands are read by rows alone, so that what is read by columns has a transposed copy (Hopper)."""

    @property
    def taken(self) -> tuple[Recipe, ...]:
        """Every recipe that these GPUs take."""
        return self.recipes if self.fp4_tflop_per_s is None else (*self.recipes, "nvfp4")

    def peak_of(self, recipe: Recipe) -> float:
        """Dense peak of a recipe's GEMMs, in TFLOP/s."""
        fp4 = self.fp4_tflop_per_s
        return self.tflop_per_s if fp4 is None or recipe != "nvfp4" else fp4


class Link(Part):
    """One direction of one link."""

    gb_per_s: float = Field(gt=0)
    """Peak rate, in 1e9 bytes a second."""
    efficiency: float = Field(gt=0, le=1)
    """Share of the peak that large messages achieve."""
    latency_us: float = Field(default=0.0, ge=0)

    @property
    def byte_per_s(self) -> float:
        """The achieved rate."""
        return 1e9 * self.gb_per_s * self.efficiency

    def seconds(self, size_bytes: float) -> float:
        return self.latency_us * 1e-6 + size_bytes / self.byte_per_s


class Pcie(Link):
    """A device's link to host memory."""

    gpus_per_link: int = Field(default=1, ge=1)
    """Devices below one switch, whose copies share its uplink."""
    shared_with_nic: bool = False
    """Whether messages to other nodes go over a device's own link, too: its NIC is below the same switch (GPUDirect)."""

    def shared_s(self, size_bytes: float) -> float:
        """Seconds of one copy while every device below the switch makes one like it."""
        return self.latency_us * 1e-6 + size_bytes * self.gpus_per_link / self.byte_per_s


class Nic(Link):
    """A network card, one port, one direction."""

    per_node: int = Field(ge=1)


class Node(Part):
    """A server."""

    gpus: int = Field(ge=1)
    host_memory_gib: float = Field(gt=0)


class NcclChannels(Part):
    """How many channels NCCL opens, each of which has buffers for every neighbour."""

    within_node: int = Field(ge=1)
    """Of a communicator whose ranks are all in one node (of one NVLink domain)."""
    between_nodes: int = Field(ge=1)
    of_peers: int = Field(ge=1)
    """Between two ranks of a node that send to each other: messages, exchanges of tokens."""
    multicast: bool = False
    """Whether switches add up for them (NVLink SHARP), which takes buffers of its own."""


class AllocatorSlack(Part):
    """What PyTorch has reserved and not allocated when it is fullest."""

    expandable_gib: float = Field(ge=0)
    """With `expandable_segments:True`."""
    fixed_gib: float = Field(ge=0)
    """Without."""


class Reserve(Part):
    """The parts, as far as the layout does not decide them."""

    context_gib: float = Field(ge=0)
    libraries_gib: float = Field(ge=0)
    nccl: NcclChannels
    allocator: AllocatorSlack


class Cluster(Part):
    """Devices and the links between them."""

    name: str
    device: Literal["cpu", "cuda"]
    memory_gib: float = Field(gt=0, le=1e9)
    """Memory of one device, as PyTorch reports it."""
    reserve: Reserve | None = None
    """Left alone on each device, in parts (`config.device_reserve`). None: nothing."""
    reserve_gib: float = Field(default=0.0, ge=0)
    """The same in one piece, instead of the parts. 0: not stated."""
    link_mbit_per_s: float | None = Field(default=None, gt=0)
    """Testbed only: the rate of the link between the two emulated hosts; none: as fast as this machine's loopback."""
    matmul: Matmul | None = None
    fp8: Fp8Units | None = None
    """None: these GPUs have no FP8, or the description does not say."""
    ordered_attention: OrderedAttention | None = None
    """What `model.deterministic` costs. None: nothing, as far as is known."""
    hbm: Link | None = None
    """The device's own memory."""
    nvlink: Link | None = None
    """The link to all other devices of a node together. None: they talk over PCIe."""
    pcie: Pcie | None = None
    nic: Nic | None = None
    node: Node | None = None
    host_time: HostTime | None = None
    """How long the nodes' CPUs take to issue a layer, or the name of a file that says it (`hosts/NAME`). None: not known."""

    def keeps_together(self, ranks: int, gpus: int) -> bool:
        """Whether so many consecutive ranks of a job on so many GPUs are always on one node."""
        return self.node is None or gpus <= self.node.gpus or self.node.gpus % ranks == 0

    @property
    def transposes_fp8(self) -> bool:
        """Whether what is read in FP8 by columns has a transposed copy. The testbed plays a Hopper."""
        return self.fp8 is None or self.fp8.transposes

    @model_validator(mode="after")
    def _reserve_below_memory(self) -> Cluster:
        if self.reserve_gib >= self.memory_gib:
            raise ValueError(f"reserve_gib ({self.reserve_gib:g}) must be less than memory_gib ({self.memory_gib:g})")
        return self
