"""Host time: how long Python takes to issue the work of a layer, which no pass on a device can be shorter than.

    host      issue a half ──> issue the next ──> ...            seconds of the CPU, however fast the device and small the tensors
    device         └ runs it         └ runs it

It depends on the CPU, on PyTorch and Megatron, and on what becomes of a half: a replay is issued like a forward. So each half has
one figure for each *setting*. Figures are taken with tensors so small that next to nothing is computed (`testbed.host_time`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_lynx.anatomy import Half
from megatron_lynx.validation import Part

Setting = Literal["none", "full", "kept", "partly", "replayed", "gathered", "offloaded"]
"""What becomes of a half.

none, full    by stock Megatron: nothing is recomputed; whole layers are
kept          under a plan, kept whole
partly        replayed, but no GEMM and no attention: its norm, and the MLP half's activation
replayed      replayed whole
gathered      replayed whole, its input gathered once (sequence parallelism)
offloaded     kept whole, and sent to host memory
"""


class HostPasses(Part):
    """One half, one micro-batch: microseconds that the host takes for its forward, and for its backward with its replay."""

    forward_us: float = Field(ge=0)
    backward_us: float = Field(ge=0)

    @property
    def forward_s(self) -> float:
        return 1e-6 * self.forward_us

    @property
    def backward_s(self) -> float:
        return 1e-6 * self.backward_us


class HalfHostTime(Part):
    """One half under every setting."""

    none: HostPasses
    full: HostPasses
    kept: HostPasses
    partly: HostPasses
    replayed: HostPasses
    gathered: HostPasses | None = None
    """None: not measured (that takes two ranks), and counted as `replayed`."""
    offloaded: HostPasses | None = None
    """None: not measured (that takes two ranks), and counted as `kept`."""

    def under(self, setting: Setting) -> HostPasses:
        """The figures of a setting, or of the nearest one that was measured."""
        if setting == "gathered":
            return self.gathered or self.replayed
        if setting == "offloaded":
            return self.offloaded or self.kept
        passes: HostPasses = getattr(self, setting)
        return passes


class HostTime(Part):
    """The host time of one layer, by half and setting, without the collectives that it issues. Stated with the CPU."""

    cpu: str
    """The processor that the figures were taken on, as it names itself."""
    made_by: str
    """With what, and when it is worth knowing, under which circumstances."""
    attention: HalfHostTime
    mlp: HalfHostTime

    def half(self, half: Half) -> HalfHostTime:
        own: HalfHostTime = getattr(self, half)
        return own
