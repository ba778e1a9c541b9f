"""The contents of a plan file. Each part checks itself here; `consistency` checks them together."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from pydantic import Field

from megatron_lynx.anatomy import HALVES, Half
from megatron_lynx.plan.facts import BatchFacts, LayerRange, ModelFacts, ParallelFacts, PlannedDevice, Provenance
from megatron_lynx.plan.rule import Rule, joined
from megatron_lynx.plan.stage import Stage
from megatron_lynx.validation import Part


class Head(Part):
    """Output projection and loss in pieces."""

    pieces: int = Field(ge=2, le=1_000_000)
    """Parts of a sequence, one after the other, with one part's logits, loss and gradients in memory at a time. The weight's
    gradient is summed in another order than stock's, and is not bitwise equal to it."""


class PlanContents(Part):
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
        """Length of a step in micro-batches of its slowest stage, with the pipeline's fill and drain."""
        filling = 0 if self.schedule == "double_buffered" else (self.parallel.pipeline - 1) / self.parallel.chunks
        return microbatches + filling

    @property
    def exchanging(self) -> frozenset[int]:
        """The layers whose windows in the MLP half are exchanges of tokens."""
        windows = self.parallel.expert > 1 and self.model.exchanges_in_windows
        return _layers_in(self.model.moe_layers) if windows else frozenset()

    @property
    def checkpointed(self) -> str:
        """The checkpointed layers, in words, or ""."""
        rules = joined(rule for stage in self.stages for rule in stage.rules)
        named = (
            (rule.layers, rule.checkpoint_said.removeprefix("checkpoint is ") + rule.ahead_in_words)
            for rule in rules
            if rule.checkpoint is not None
        )
        return ", ".join(f"{layers} ({said})" for layers, said in named)

    def kept_input(self, entry: Stage, rule: Rule, half: Half) -> str:
        """Activations that a checkpointed half keeps, and whether they are offloaded, in words."""
        kept = rule.kept_input(half)
        if entry.offload is None or (half != HALVES[0] and rule.feeds(rule.layers.last, HALVES[0])):
            return kept
        of_experts = self.model.sections_of(rule.layers.last)[HALVES.index(half)].in_some_layers
        of_chunk = half == HALVES[0] and rule.layers.last == entry.layers.first  # Megatron refers to it
        return kept if of_chunk or (of_experts and not entry.offload.experts) else f"{kept}, to the host"

    def place_of(self, entry: Stage) -> str:
        """Key of an entry in messages: `stages.3`."""
        return f"stages.{entry.chunk * self.parallel.pipeline + entry.stage}"


@lru_cache
def _layers_in(spans: tuple[LayerRange, ...]) -> frozenset[int]:
    """Cached: called for each half of each layer of each candidate plan."""
    return frozenset(layer for span in spans for layer in span)
