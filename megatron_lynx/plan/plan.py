"""The plan: for every pipeline stage, its layers and the treatment of their activations. docs/plan_file.md explains every key.

Reading a plan checks each part by itself, and all of them together in `consistency`. `apply.refusals` compares it with a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from typing import Annotated, Literal

from pydantic import Field

from megatron_lynx.anatomy import HALVES, Half
from megatron_lynx.anatomy.address import RECV_BACKWARD
from megatron_lynx.plan.facts import BatchFacts, LayerRange, Layers, ModelFacts, ParallelFacts, PlannedDevice, Provenance
from megatron_lynx.plan.rule import Rule, joined
from megatron_lynx.timetable import PlannedHalf
from megatron_lynx.units import MIB
from megatron_lynx.validation import Part, digest_of, formerly

PLAN_VERSION = 1
ALWAYS = "always"


class Predicted(Part):
    """Predicted figures of one stage. Seconds and bytes are of one step on one rank."""

    step_s: float | None = None
    """Seconds of the step's forwards and backwards over all stages, without `update_s`."""
    update_s: float | None = None
    """Seconds of the gradients' reduction and the optimizer's update."""
    hidden_recompute_s: Annotated[float, formerly("hidden_recompute_s", "hidden_replay_s")] = 0.0
    exposed_recompute_s: Annotated[float, formerly("exposed_recompute_s", "exposed_replay_s")] = 0.0
    """Seconds of recomputation outside windows, or longer than these."""
    resident_activation_bytes: int = 0
    """Activations of the stage's layers between forward and backward of one micro-batch."""
    ahead_bytes: int = 0
    """Largest memory of frames that are recomputed ahead, at the ahead depth."""
    weight_gradient_hidden_s: float = 0.0
    weight_gradient_exposed_s: float = 0.0
    """Seconds of delayed weight gradients outside windows, or longer than these."""
    recomputed_flops: Annotated[int, formerly("recomputed_flops", "replayed_flops")] = 0
    """Floating-point operations of recomputed GEMMs and batched GEMMs, one micro-batch."""
    exposed_copy_s: float = 0.0
    """Seconds that the whole stage waits for copies from the host."""
    host_bytes: int = 0
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
        return {**self.memory.get(ALWAYS, {}), **self.memory[moment]} if moment in self.memory else None


class Offload(Part):
    """Activations that are offloaded to the host, in every micro-batch of an offloaded chunk."""

    bytes: int = Field(ge=1)
    """Bytes of its layers' activations. A tensor at the limit is split."""
    smallest_tensor_bytes: int = Field(default=MIB, ge=0)
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
        return self.half_by_half == "all" and RECV_BACKWARD in half.windows


class WeightGradients(Part):
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
    stage: int = Field(ge=0)
    chunk: int = Field(default=0, ge=0)
    layers: Layers
    ahead_depth: int = Field(ge=0)
    """Limit of frames that are recomputed before backward reaches them (rule R4)."""
    rules: tuple[Rule, ...]
    offload: Offload | None = None
    weight_gradients: WeightGradients | None = None
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


class Head(Part):
    pieces: int = Field(ge=2, le=1_000_000)
    """Parts of a sequence, one after the other, with one part's logits, loss and gradients in memory at a time. The weight's
    gradient is summed in another order than stock's, and is not bitwise equal to it."""


class Plan(Part):
    version: Literal[1]
    model: ModelFacts
    parallel: ParallelFacts
    batch: BatchFacts
    schedule: Literal["flush", "double_buffered"] = "flush"
    """flush: the pipeline is drained before each update (1F1B, interleaved). double_buffered: never (gradients are one update
    old)."""
    defer_updates: bool = True
    """Without flushes: whether stages continue with the next batch until all can update together (second gradient buffer)."""
    head: Head | None = None
    """How output projection and loss run; None: as in stock, all tokens of a micro-batch at once."""
    stages: tuple[Stage, ...]
    device: PlannedDevice | None = None
    """The devices of the launch; None: CPU ranks, or unknown."""
    provenance: Provenance

    def chunks_of(self, stage: int) -> tuple[Stage, ...]:
        return tuple(entry for entry in self.stages if entry.stage == stage)

    def passes(self, microbatches: float) -> float:
        filling = 0 if self.schedule == "double_buffered" else (self.parallel.pipeline - 1) / self.parallel.chunks
        return microbatches + filling

    @property
    def exchanging(self) -> frozenset[int]:
        windows = self.parallel.expert > 1 and self.model.exchanges_in_windows
        return _layers_in(self.model.moe_layers) if windows else frozenset()

    @property
    def checkpointed(self) -> str:
        rules = joined(rule for stage in self.stages for rule in stage.rules)
        named = (
            (rule.layers, rule.checkpoint_said.removeprefix("checkpoint is ") + rule.ahead_in_words)
            for rule in rules
            if rule.checkpoint is not None
        )
        return ", ".join(f"{layers} ({said})" for layers, said in named)

    def kept_input(self, entry: Stage, rule: Rule, half: Half) -> str:
        kept = rule.kept_input(half)
        if entry.offload is None or (half != HALVES[0] and rule.feeds(rule.layers.last, HALVES[0])):
            return kept
        of_experts = self.model.sections_of(rule.layers.last)[HALVES.index(half)].exchanges
        of_chunk = half == HALVES[0] and rule.layers.last == entry.layers.first  # Megatron refers to it
        return kept if of_chunk or (of_experts and not entry.offload.experts) else f"{kept}, to the host"

    @property
    def digest(self) -> str:
        return digest_of(self, {})

    def with_stages(self, stages: Iterable[Stage]) -> Plan:
        return Plan.model_validate(self.model_copy(update={"stages": tuple(stages)}).model_dump())

    def _problems(self) -> list[str]:
        from megatron_lynx.plan.consistency import problems

        return problems(self)

    def place_of(self, entry: Stage) -> str:
        return f"stages.{entry.chunk * self.parallel.pipeline + entry.stage}"


@lru_cache
def _layers_in(spans: tuple[LayerRange, ...]) -> frozenset[int]:
    return frozenset(layer for span in spans for layer in span)
