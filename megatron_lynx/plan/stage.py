"""One stage of a plan: its layers, their rules, offloading, and predicted figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Annotated, Literal

from pydantic import Field

from megatron_lynx.plan.facts import Layers
from megatron_lynx.plan.rule import Rule
from megatron_lynx.timetable import PlannedHalf
from megatron_lynx.units import MIB
from megatron_lynx.validation import Part, formerly

ALWAYS = "always"
"""Key of the memory that a device uses at all moments."""


class Predicted(Part):
    """Predicted figures of one stage. Seconds and bytes are of one step on one rank."""

    step_s: float | None = None
    """Seconds of the step's forwards and backwards over all stages, without `update_s`."""
    update_s: float | None = None
    """Seconds of the gradients' reduction and the optimizer's update."""
    hidden_recompute_s: Annotated[float, formerly("hidden_recompute_s", "hidden_replay_s")] = 0.0
    """Seconds of recomputation inside windows."""
    exposed_recompute_s: Annotated[float, formerly("exposed_recompute_s", "exposed_replay_s")] = 0.0
    """Seconds of recomputation outside windows, or longer than these."""
    resident_activation_bytes: int = 0
    """Activations of the stage's layers between forward and backward of one micro-batch."""
    ahead_bytes: int = 0
    """Largest memory of frames that are recomputed ahead, at the ahead depth."""
    weight_gradient_hidden_s: float = 0.0
    """Seconds of delayed weight gradients inside windows."""
    weight_gradient_exposed_s: float = 0.0
    """Seconds of delayed weight gradients outside windows, or longer than these."""
    recomputed_flops: Annotated[int, formerly("recomputed_flops", "replayed_flops")] = 0
    """Floating-point operations of recomputed GEMMs and batched GEMMs, one micro-batch."""
    exposed_copy_s: float = 0.0
    """Seconds that the whole stage waits for copies from the host."""
    host_bytes: int = 0
    """Pinned host memory of the whole stage."""
    memory_bytes: int = 0
    """Peak memory of a device, parameters and optimizer included."""
    memory: Mapping[str, Mapping[str, int]] = {}
    """Its parts, by moment and kind: `always` has those of all moments, each moment has the additional ones. Only a stage's first
    chunk has it. Only the kind `learned` may be negative."""
    host_s: float = 0.0
    """Seconds of the host to launch the passes of a host-bound stage. 0 for others, and if unknown."""
    device_s: float = 0.0
    """Seconds of the device for the passes of a host-bound stage, without waits for the host."""
    moe_load: float = 0.0
    """Largest load of experts (`model.moe_load`) that fits the device. 0 if twice the planned load fits, and without experts."""
    moe_load_fallen_back: float = 0.0
    """The same once halves of experts have fallen back (`experts_hold`). 0 if none fall back, and in older plans."""

    def held_at(self, moment: str) -> Mapping[str, int] | None:
        """Predicted bytes by kind at one moment, or None if the plan has none."""
        return {**self.memory.get(ALWAYS, {}), **self.memory[moment]} if moment in self.memory else None


class Offload(Part):
    """Activations that are offloaded to the host, in every micro-batch of an offloaded chunk."""

    bytes: int = Field(ge=1)
    """Bytes of its layers' activations. A tensor at the limit is split."""
    smallest_tensor_bytes: int = Field(default=MIB, ge=0)
    """Smaller tensors stay on the device."""
    prefetch: int = Field(default=1, ge=1)
    """Ignored; in older plans. A micro-batch is copied back one backward before its own."""
    beside_messages: Literal["allow", "avoid"] = "allow"
    """Whether copies overlap with messages between stages, or take turns: on a shared link they slow each other. Stages that
    overlap messages with passes cannot avoid them."""
    experts: bool = False
    """Whether the activations of mixtures of experts are offloaded, too."""
    pace_bytes: int | None = Field(default=None, ge=1)
    """Bytes copied during one half's forward. If given, micro-batches whose own backward directly follows are offloaded half by
    half, too: compute waits for a half's copy at the end of that pace, and the copy back begins at the same place of backward."""
    half_by_half: Literal["at_once", "all"] = "at_once"
    """Micro-batches that are offloaded half by half: those whose own backward directly follows, or all. Their copies lie within
    their own forward and their own backward."""

    def _problems(self) -> Iterator[str]:
        if self.half_by_half == "all" and self.pace_bytes is None:
            yield "half_by_half is all, so pace_bytes must say how many bytes are copied beside one half's forward"

    def stays(self, half: PlannedHalf) -> bool:
        """Whether a half's kept activations stay on the device: with `half_by_half` all, those of halves whose recomputation
        begins before their own backward."""
        return self.half_by_half == "all" and half.begins_early


class WeightGradients(Part):
    """Limit of one chunk's delayed weight gradients."""

    bytes: int = Field(ge=1)
    """The most bytes of their operands at a time. If a new one does not fit, the oldest are computed."""


class Whole(Part):
    """Micro-batches without recomputation (Korthikanti et al., appendix C): `first` of every `of_every` keep all activations."""

    of_every: int = Field(ge=1)
    first: int = Field(ge=1)

    def _problems(self) -> Iterator[str]:
        if self.first > self.of_every:
            yield f"the first {self.first} of every {self.of_every} micro-batches are more than there are"

    def __contains__(self, micro_batch: object) -> bool:
        return isinstance(micro_batch, int) and micro_batch % self.of_every < self.first


class Stage(Part):
    """One pipeline stage, or one chunk of it."""

    stage: int = Field(ge=0)
    chunk: int = Field(default=0, ge=0)
    layers: Layers
    ahead_depth: int = Field(ge=0)
    """Limit of frames that are recomputed before backward reaches them (rule R4)."""
    rules: tuple[Rule, ...]
    offload: Offload | None = None
    weight_gradients: WeightGradients | None = None
    """Given if a rule delays weight gradients."""
    experts_hold: float | None = Field(default=None, gt=0, le=1_000)
    """Load of experts (`model.moe_load`) that fits the stage's memory, averaged over its live halves. A half with which a rank
    exceeds it falls back for this micro-batch: its rows are kept, and the experts' first linears and activation are recomputed,
    which fits up to `predicted.moe_load_fallen_back`; None: halves never fall back."""
    whole: Whole | None = None
    """Micro-batches, counted from 0 in each step, that keep everything regardless of the rules."""
    predicted: Predicted = Field(default_factory=Predicted)

    def rule_for(self, layer: int) -> Rule:
        for rule in self.rules:  # called thousands of times per plan
            if rule.layers.first <= layer <= rule.layers.last:
                return rule
        raise LookupError(f"layer {layer} is none of {self.layers}")

    @property
    def defers(self) -> bool:
        return any(rule.weight_gradients for rule in self.rules)

    def _problems(self) -> Iterator[str]:
        for count, group in groupby(self.layers, key=lambda layer: sum(layer in rule.layers for rule in self.rules)):
            layers = list(group)
            if count != 1:
                yield f"layers {layers[0]}-{layers[-1]} have {count} rules each, each needs exactly one"
        for rule in self.rules:
            if not len(self.layers):
                yield f"a rule names layers {rule.layers}, but there are none"
            if not len(rule.layers):
                yield "a rule is for no layers: leave it out"
            elif len(self.layers) and not (rule.layers.first in self.layers and rule.layers.last in self.layers):
                yield f"a rule names layers {rule.layers}, but the stage owns {self.layers}"
        if self.defers and self.weight_gradients is None:
            yield "rules defer weight gradients, so weight_gradients.bytes must say how much these may hold"
        if not self.defers and self.weight_gradients is not None:
            yield f"weight_gradients.bytes is {self.weight_gradients.bytes}, but no rule defers weight gradients"
