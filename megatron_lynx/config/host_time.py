"""Host time: how long Python takes to issue the work of a layer, which no pass on a device can be shorter than.

    host      issue a half ──> issue the next ──> ...            seconds of the CPU, however fast the device and small the tensors
    device         └ runs it         └ runs it

It depends on the CPU, on PyTorch and Megatron, on whose layers they are, and on what becomes of a half: a replay is issued like a
forward. So each half has one figure for each *setting*, and each *implementation* has halves of its own. Figures are taken with
tensors so small that next to nothing is computed (`testbed.host_time`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_lynx.anatomy import HALVES, Half
from megatron_lynx.validation import Part

Setting = Literal["none", "full", "kept", "partly", "replayed", "gathered", "offloaded", "deferred"]
"""What becomes of a half.

none, full    by stock Megatron: nothing is recomputed; whole layers are
kept          under a plan, kept whole
partly        replayed, but no GEMM and no attention: its norm, and the MLP half's activation
replayed      replayed whole
gathered      replayed whole, its input gathered once (sequence parallelism)
offloaded     kept whole, and sent to host memory
deferred      kept whole, and the weight gradients of all its linears run in waits
"""

Implementation = Literal["local", "transformer_engine"]
"""Whose layers, as Megatron's `--transformer-impl` says it."""

LAYERS: Mapping[Implementation, str] = {"local": "Megatron's own layers", "transformer_engine": "Transformer Engine's layers"}
"""Their names for people."""


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
    """None: not measured, and counted as `replayed`."""
    offloaded: HostPasses | None = None
    """None: not measured, and counted as `kept`; so is `deferred`."""
    deferred: HostPasses | None = None

    def under(self, setting: Setting) -> HostPasses:
        """The figures of a setting, or of the nearest one that was measured."""
        passes: HostPasses | None = getattr(self, setting)
        return passes or (self.replayed if setting == "gathered" else self.kept)


class LayerHostTime(Part):
    """The host time of one layer of one implementation, by half and setting, without the collectives that it issues."""

    made_by: str
    """With what, and when it is worth knowing, under which circumstances."""
    attention: HalfHostTime
    mlp: HalfHostTime

    def half(self, half: Half) -> HalfHostTime:
        own: HalfHostTime = getattr(self, half)
        return own

    def layer_s(self, setting: Setting) -> float:
        """Both halves, forward and backward."""
        return sum(each.forward_s + each.backward_s for each in (self.half(half).under(setting) for half in HALVES))


class HostAdam(Part):
    """How fast PyTorch's fused AdamW steps fp32 parameters on a node's CPUs (Megatron's `--optimizer-cpu-offload`)."""

    made_by: str
    """With what it was measured, with how many threads; or where the figures are from."""
    alone_million_per_s: float = Field(gt=0)
    """Parameters of one rank, if no other rank of the node steps."""
    together_million_per_s: float = Field(gt=0)
    """Of each rank, if all of a node do."""

    def parameters_per_s(self, ranks: int, node_ranks: int) -> float:
        """Of each of so many ranks of a node, which share what its memory and its cores can do."""
        return 1e6 * min(self.alone_million_per_s, self.together_million_per_s * node_ranks / ranks)


class HostTime(Part):
    """The host time of layers on one CPU. An implementation that was not measured there is counted as the other."""

    cpu: str
    """The processor that the figures were taken on, as it names itself."""
    local: LayerHostTime | None = None
    transformer_engine: LayerHostTime | None = None
    adam: HostAdam | None = None
    """None: not known."""

    @model_validator(mode="before")
    @classmethod
    def _of_one_implementation(cls, data: Any) -> Any:
        """Files from before figures were told apart have those of one implementation, which `made_by` names."""
        if not isinstance(data, dict) or not data.keys() & HALVES:
            return data
        layer = {name: data[name] for name in ("made_by", *HALVES) if name in data}
        whose: Implementation = "transformer_engine" if "transformer_engine layers" in str(data.get("made_by")) else "local"
        return {**{name: value for name, value in data.items() if name not in layer}, whose: layer}

    @model_validator(mode="after")
    def _of_some(self) -> HostTime:
        if self.local is None and self.transformer_engine is None:
            raise ValueError("there are no layers: give local, or transformer_engine, or both")
        return self

    def taken_for(self, implementation: Implementation) -> Implementation:
        """Whose figures count for these layers: their own, if they were measured."""
        if getattr(self, implementation) is not None:
            return implementation
        return "local" if self.transformer_engine is None else "transformer_engine"

    @property
    def measured(self) -> tuple[Implementation, ...]:
        """The implementations that were."""
        return tuple(each for each in LAYERS if getattr(self, each) is not None)

    def of(self, implementation: Implementation) -> LayerHostTime:
        """The figures that count for these layers."""
        layer: LayerHostTime = getattr(self, self.taken_for(implementation))
        return layer

    def words_for(self, implementation: Implementation) -> str:
        """What these figures are, for people."""
        taken = self.taken_for(implementation)
        if taken == implementation:
            return f"{LAYERS[taken]} on {self.cpu}"
        return f"{LAYERS[taken]} on {self.cpu}, where {LAYERS[implementation]} were not measured"
