"""The contents of a plan file. Each part is checked by itself here; `consistency` checks whether the parts go together."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from pydantic import Field

from megatron_lynx.anatomy import HALVES, Half
from megatron_lynx.plan.facts import BatchFacts, ModelFacts, ParallelFacts, PlannedDevice, Provenance
from megatron_lynx.plan.layer_range import LayerRange
from megatron_lynx.plan.rule import Rule, joined
from megatron_lynx.plan.stage import Stage
from megatron_lynx.validation import Part


class Head(Part):
    """A head in pieces."""

    pieces: int = Field(ge=2, le=1_000_000)
    """Parts of a sequence, one after the other: logits, loss and gradients of one are there at a time. The weight's gradient is
    then summed in another order than stock's, and is not equal to it in every bit."""


class PlanContents(Part):
    """The keys of a plan file, version 1."""

    version: Literal[1]
    model: ModelFacts
    parallel: ParallelFacts
    batch: BatchFacts
    schedule: Literal["flush", "double_buffered"] = "flush"
    """Whether the pipeline is emptied before each update (1F1B, interleaved), or never (gradients are then one update old)."""
    defer_updates: bool = True
    """Without flushes: whether stages go on with the next batch until all can update together, into a second gradient buffer."""
    head: Head | None = None
    """How output projection and loss run. None: as stock has them, all tokens of a micro-batch at once."""
    stages: tuple[Stage, ...]
    device: PlannedDevice | None = None
    """The devices that it was made for. None: CPU ranks, or not known."""
    provenance: Provenance

    def chunks_of(self, stage: int) -> tuple[Stage, ...]:
        """The entries of a pipeline stage: one, or one for each of its chunks."""
        return tuple(entry for entry in self.stages if entry.stage == stage)

    def passes(self, microbatches: float) -> float:
        """How many micro-batches of its slowest stage, one behind the other, a step of so many takes: the pipeline fills, and is
        emptied."""
        filling = 0 if self.schedule == "double_buffered" else (self.parallel.pipeline - 1) / self.parallel.chunks
        return microbatches + filling

    @property
    def exchanging(self) -> frozenset[int]:
        """The layers whose windows in the MLP half are exchanges of tokens."""
        windows = self.parallel.expert > 1 and self.model.exchanges_in_windows
        return _layers_in(self.model.moe_layers) if windows else frozenset()

    @property
    def checkpointed(self) -> str:
        """The layers that are checkpointed, in words; empty where none is."""
        rules = joined(rule for stage in self.stages for rule in stage.rules)
        named = (
            (rule.layers, rule.checkpoint_said.removeprefix("checkpoint is ") + rule.ahead_in_words)
            for rule in rules
            if rule.checkpoint is not None
        )
        return ", ".join(f"{layers} ({said})" for layers, said in named)

    def kept_input(self, entry: Stage, rule: Rule, half: Half) -> str:
        """What a checkpointed half of an entry keeps, and whether that goes to the host, in words."""
        kept = rule.kept_input(half)
        if entry.offload is None or (half != HALVES[0] and rule.feeds(rule.layers.last, HALVES[0])):
            return kept
        of_experts = self.model.sections_of(rule.layers.last)[HALVES.index(half)].in_some_layers
        of_chunk = half == HALVES[0] and rule.layers.last == entry.layers.first  # Megatron holds it
        return kept if of_chunk or (of_experts and not entry.offload.experts) else f"{kept}, to the host"

    def place_of(self, entry: Stage) -> str:
        """Where an entry stands in the plan, for messages: `stages.3`."""
        return f"stages.{entry.chunk * self.parallel.pipeline + entry.stage}"


@lru_cache
def _layers_in(spans: tuple[LayerRange, ...]) -> frozenset[int]:
    """Asked for each half of each layer of each plan that is weighed."""
    return frozenset(layer for span in spans for layer in span)
