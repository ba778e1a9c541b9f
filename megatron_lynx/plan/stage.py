"""One stage of a plan: its layers, the rules they follow, what goes to host memory, and what the planner expects of it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Literal

from pydantic import Field, model_validator

from megatron_lynx.plan.layer_range import Layers
from megatron_lynx.plan.rule import Rule
from megatron_lynx.timetable import PlannedHalf
from megatron_lynx.units import MIB
from megatron_lynx.validation import Part

ALWAYS = "always"
"""Beside the moments of a step: what a device holds at all of them."""


class Predicted(Part):
    """What the planner expects of one stage. Seconds and bytes are of one step on one rank."""

    step_s: float | None = None
    """Seconds of the step's forwards and backwards over all stages; `update_s` comes on top."""
    update_s: float | None = None
    """Seconds that reducing gradients and the optimizer's update add to the step."""
    hidden_replay_s: float = 0.0
    """Seconds of replay that run inside windows."""
    exposed_replay_s: float = 0.0
    """Seconds of replay (or the part of them) that no window hides."""
    resident_activation_bytes: int = 0
    """What the stage's layers hold for one micro-batch between its forward and its backward."""
    ahead_bytes: int = 0
    """What regenerated frames hold at most, at the ahead depth."""
    weight_gradient_hidden_s: float = 0.0
    """Seconds of deferred weight gradients that run inside windows."""
    weight_gradient_exposed_s: float = 0.0
    """Seconds of deferred weight gradients (or the part of them) that no window hides."""
    replayed_flops: int = 0
    """Floating-point operations of the GEMMs and batched GEMMs that replays repeat, one micro-batch."""
    exposed_copy_s: float = 0.0
    """Seconds that the whole stage waits for copies from the host."""
    host_bytes: int = 0
    """Pinned host memory of the whole stage."""
    memory_bytes: int = 0
    """Everything on a device of the whole stage at its fullest, parameters and optimizer included."""
    memory: Mapping[str, Mapping[str, int]] = {}
    """What that consists of, by moment and kind: under `always` what is there all the time, under each moment that the stage has
    what is held beside it then. Stated once, with a stage's first chunk. Of all kinds only `learned` may be below 0."""
    host_s: float = 0.0
    """Of a whole stage that is host-bound: seconds of the host to issue its passes. 0 for others, and where that is not known."""
    device_s: float = 0.0
    """Of such a stage: seconds of the device to run what the host issues, if it never waited for the host."""
    moe_load: float = 0.0
    """The largest load of experts (`model.moe_load`) with which the stage fits its device, where twice the one that the plan was
    made for would not. 0 where it would, and where there are none."""
    moe_load_fallen_back: float = 0.0
    """The load with which it still fits once halves of experts have fallen back (`experts_hold`). 0 where none fall back, and in
    plans that were made when halves became checkpoints instead."""

    def held_at(self, moment: str) -> Mapping[str, int] | None:
        """Bytes by kind at one moment, as planned; None where the plan does not say."""
        return {**self.memory.get(ALWAYS, {}), **self.memory[moment]} if moment in self.memory else None


class Offload(Part):
    """What goes to host memory, of every micro-batch of a chunk that is offloaded at all."""

    bytes: int = Field(ge=1)
    """How much of what its layers keep. A tensor at the edge is split."""
    smallest_tensor_bytes: int = Field(default=MIB, ge=0)
    """Smaller tensors stay."""
    prefetch: int = Field(default=1, ge=1)
    """How many backwards before its own a micro-batch's copy comes back."""
    beside_messages: Literal["allow", "avoid"] = "allow"
    """Whether copies may run beside messages between stages, or take turns with them: where both go over one link, they disturb
    each other, and an exchange that ends in a synchronisation (Megatron's without chunks) waits for every copy before it. Stages
    that overlap messages with passes cannot avoid them."""
    experts: bool = False
    """Whether what mixtures of experts keep goes as well; otherwise it stays."""
    pace_bytes: int | None = Field(default=None, ge=1)
    """Given: a micro-batch whose own backward follows its forward at once goes, too, half by half; so many bytes are expected to
    be copied beside one half's forward. Compute waits for a half's copy when that should be over, and its copy back begins when
    backward comes to the same place. Not given: such a micro-batch stays on the device."""
    half_by_half: Literal["at_once", "all"] = "at_once"
    """Which micro-batches go half by half where a pace is given: those whose own backward follows at once, or all of them. The
    copies of each then lie within its own forward and its own backward, however many passes lie between these."""

    @model_validator(mode="after")
    def _paced(self) -> Offload:
        if self.half_by_half == "all" and self.pace_bytes is None:
            raise ValueError("half_by_half is all, so pace_bytes must say how many bytes are copied beside one half's forward")
        return self

    def stays(self, half: PlannedHalf) -> bool:
        """Whether a half keeps on the device what it keeps at all: of a micro-batch that comes back within its own backward, what
        is replayed before that begins."""
        return self.half_by_half == "all" and half.begins_early


class WeightGradients(Part):
    """Weight gradients that are deferred, of one chunk: how much they may hold until they are computed."""

    bytes: int = Field(ge=1)
    """The most that their operands hold at once. Where a new one does not fit, the oldest are computed at once."""


class Whole(Part):
    """Recomputation for a part of the micro-batches (Korthikanti et al., appendix C): `first` of every `of_every` keep all."""

    of_every: int = Field(ge=1)
    first: int = Field(ge=1)

    @model_validator(mode="after")
    def _some(self) -> Whole:
        if self.first > self.of_every:
            raise ValueError(f"the first {self.first} of every {self.of_every} micro-batches are more than there are")
        return self

    def __contains__(self, micro_batch: object) -> bool:
        return isinstance(micro_batch, int) and micro_batch % self.of_every < self.first


class Stage(Part):
    """One pipeline stage; with several chunks on each stage, one chunk of it."""

    stage: int = Field(ge=0)
    chunk: int = Field(default=0, ge=0)
    layers: Layers
    ahead_depth: int = Field(ge=0)
    """How many frames may be regenerated before backward reaches them (rule R4)."""
    rules: tuple[Rule, ...]
    offload: Offload | None = None
    weight_gradients: WeightGradients | None = None
    """Given where a rule defers weight gradients."""
    experts_hold: float | None = Field(default=None, gt=0, le=1_000)
    """The load of experts (`model.moe_load`) that the stage's bytes hold for, on average over what it holds at once. A half with
    which a rank holds more falls back on this rank, for this micro-batch: its rows stay, and the experts' first linears and
    activation run again. So bytes hold up to `predicted.moe_load_fallen_back`. None: halves do what their rules say, whatever
    comes."""
    whole: Whole | None = None
    """Micro-batches, counted from 0 in each step, that keep everything whatever the rules say."""
    predicted: Predicted = Predicted()

    def rule_for(self, layer: int) -> Rule:
        for rule in self.rules:  # asked for thousands of times while a plan is made
            if rule.layers.first <= layer <= rule.layers.last:
                return rule
        raise LookupError(f"layer {layer} is none of {self.layers}")

    @property
    def defers(self) -> bool:
        """Whether any rule defers weight gradients."""
        return any(rule.weight_gradients for rule in self.rules)

    @model_validator(mode="after")
    def _covered(self) -> Stage:
        problems = [] if len(self.layers) else [f"a rule names layers {rule.layers}, but there are none" for rule in self.rules]
        for count, group in groupby(self.layers, key=lambda layer: sum(layer in rule.layers for rule in self.rules)):
            layers = list(group)
            if count != 1:
                problems.append(f"layers {layers[0]}-{layers[-1]} have {count} rules each, each needs exactly one")
        for rule in self.rules:
            if not len(rule.layers):
                problems.append("a rule is for no layers: leave it out")
            elif len(self.layers) and not (rule.layers.first in self.layers and rule.layers.last in self.layers):
                problems.append(f"a rule names layers {rule.layers}, but the stage owns {self.layers}")
        if self.defers and self.weight_gradients is None:
            problems.append("rules defer weight gradients, so weight_gradients.bytes must say how much these may hold")
        if not self.defers and self.weight_gradients is not None:
            problems.append(f"weight_gradients.bytes is {self.weight_gradients.bytes}, but no rule defers weight gradients")
        if problems:
            raise ValueError("; ".join(problems))
        return self
