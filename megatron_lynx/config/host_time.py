"""Host time: seconds that Python takes to issue a layer, a lower bound of every pass.

    host      issue a half ──> issue the next ──> ...            CPU seconds, independent of device and tensor sizes
    device         └ runs it         └ runs it

It depends on the CPU, on PyTorch and Megatron, on the layer implementation, and on the treatment of a half: a recomputation is
issued like a forward. Each half has a figure per setting and implementation, measured with tensors so small that device time is
negligible (`testbed.host_time`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_lynx.anatomy import HALVES, Half
from megatron_lynx.validation import Part

Setting = Literal["none", "full", "kept", "partly", "replayed", "gathered", "offloaded", "deferred"]
"""Treatment of a half.

none, full    stock Megatron, without recomputation and with full recomputation
kept          a plan keeps its activations
partly        recomputed, except GEMMs and attention: its norm, and the MLP half's activation
replayed      recomputed whole
gathered      recomputed whole, its input gathered once (sequence parallelism)
offloaded     activations kept, and offloaded to host memory
deferred      activations kept, and the weight gradients of all its linears delayed into waits
"""

Implementation = Literal["local", "transformer_engine"]
"""Layer implementation, as in Megatron's `--transformer-impl`."""

LAYERS: Mapping[Implementation, str] = {"local": "Megatron's own layers", "transformer_engine": "Transformer Engine's layers"}
"""Names of the implementations in messages."""


class HostPasses(Part):
    """Host microseconds of one half and micro-batch: forward, and backward including recomputation."""

    forward_us: float = Field(ge=0)
    backward_us: float = Field(ge=0)

    @property
    def forward_s(self) -> float:
        return 1e-6 * self.forward_us

    @property
    def backward_s(self) -> float:
        return 1e-6 * self.backward_us


class HalfHostTime(Part):
    """Host time of one half under every setting."""

    none: HostPasses
    full: HostPasses
    kept: HostPasses
    partly: HostPasses
    replayed: HostPasses
    gathered: HostPasses | None = None
    """If None: not measured, taken as `replayed`."""
    offloaded: HostPasses | None = None
    """If None: not measured, taken as `kept`. So is `deferred`."""
    deferred: HostPasses | None = None

    def under(self, setting: Setting) -> HostPasses:
        """Return the figures of a setting, or of the nearest one that was measured."""
        passes: HostPasses | None = getattr(self, setting)
        return passes or (self.replayed if setting == "gathered" else self.kept)


class LayerHostTime(Part):
    """Host time of one layer by half and setting, without the collectives that it issues."""

    made_by: str
    """Tool and, where relevant, conditions of the measurement."""
    attention: HalfHostTime
    mlp: HalfHostTime

    def half(self, half: Half) -> HalfHostTime:
        own: HalfHostTime = getattr(self, half)
        return own

    def layer_s(self, setting: Setting) -> float:
        return sum(each.forward_s + each.backward_s for each in (self.half(half).under(setting) for half in HALVES))


class HostAdam(Part):
    """Speed of PyTorch's fused AdamW on fp32 parameters on a node's CPUs (Megatron's `--optimizer-cpu-offload`)."""

    made_by: str
    """Tool and thread count of the measurement, or the source of the figures."""
    alone_million_per_s: float = Field(gt=0)
    """Parameters per second of one rank while other ranks of the node are idle."""
    together_million_per_s: float = Field(gt=0)
    """Parameters per second of each rank while all ranks of the node step."""

    def parameters_per_s(self, ranks: int, node_ranks: int) -> float:
        """Return the rate of each of `ranks` ranks of a node, which share its memory bandwidth and cores."""
        return 1e6 * min(self.alone_million_per_s, self.together_million_per_s * node_ranks / ranks)


class HostTime(Part):
    """Host time of layers on one CPU. An implementation that was not measured takes the figures of the other."""

    cpu: str
    """Processor name, as reported by the CPU."""
    local: LayerHostTime | None = None
    transformer_engine: LayerHostTime | None = None
    adam: HostAdam | None = None
    """If None: unknown."""

    @model_validator(mode="before")
    @classmethod
    def _of_one_implementation(cls, data: Any) -> Any:
        """Read the older format with figures of one implementation, which `made_by` names."""
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
        """Return the implementation whose figures are used: the given one if it was measured, else the other."""
        if getattr(self, implementation) is not None:
            return implementation
        return "local" if self.transformer_engine is None else "transformer_engine"

    @property
    def measured(self) -> tuple[Implementation, ...]:
        return tuple(each for each in LAYERS if getattr(self, each) is not None)

    def of(self, implementation: Implementation) -> LayerHostTime:
        layer: LayerHostTime = getattr(self, self.taken_for(implementation))
        return layer

    def words_for(self, implementation: Implementation) -> str:
        taken = self.taken_for(implementation)
        if taken == implementation:
            return f"{LAYERS[taken]} on {self.cpu}"
        return f"{LAYERS[taken]} on {self.cpu}, where {LAYERS[implementation]} were not measured"
