"""The plan: for every pipeline stage, which layers it owns and what becomes of each layer's activations.

    plan.yaml ──load_plan──> Plan ──apply──> a training job
                              │
              stages[k].rules[i]: a range of layers that are treated alike. Entry k is chunk k // p of stage k % p
                              ├── keep / replay      every item of the layer is in exactly one of them
                              ├── windows            where each half is replayed, by phase where phases differ
                              └── gather             (sequence parallelism) where a replayed GEMM's input is gathered

A plan is checked when it is read, as far as it can be without a model: each part by itself where it is declared, all of them
together in `consistency`. Whether it fits a live run is `apply.match`'s question.
"""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from megatron_lynx.plan import consistency
from megatron_lynx.plan.facts import BatchFacts, ModelFacts, ParallelFacts, Provenance
from megatron_lynx.plan.layer_range import LayerRange
from megatron_lynx.plan.part import Part
from megatron_lynx.plan.rule import ByPhase, Gather, Rule, Windows
from megatron_lynx.plan.stage import Offload, Predicted, Stage, Whole

__all__ = [
    "BatchFacts",
    "ByPhase",
    "Gather",
    "LayerRange",
    "ModelFacts",
    "Offload",
    "ParallelFacts",
    "Plan",
    "Predicted",
    "Provenance",
    "Rule",
    "Stage",
    "Whole",
    "Windows",
]
"""With the parts that a plan is made of: whoever builds one needs no other module."""

PLAN_VERSION = 1


class Plan(Part):
    """A whole plan, version 1."""

    version: Literal[1]
    model: ModelFacts
    parallel: ParallelFacts
    batch: BatchFacts
    schedule: Literal["flush", "double_buffered"] = "flush"
    """Whether the pipeline is emptied before each update (1F1B, interleaved), or never (gradients are then one update old)."""
    defer_updates: bool = True
    """Without flushes: whether stages go on with the next batch until all can update together, into a second gradient buffer."""
    stages: tuple[Stage, ...]
    provenance: Provenance

    def chunks_of(self, stage: int) -> tuple[Stage, ...]:
        """The entries of a pipeline stage: one, or one for each of its chunks."""
        return tuple(entry for entry in self.stages if entry.stage == stage)

    def place_of(self, entry: Stage) -> str:
        """Where an entry stands in the plan, for messages: `stages.3`."""
        return f"stages.{entry.chunk * self.parallel.pipeline + entry.stage}"

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        if problems := consistency.problems(self):
            raise ValueError("; ".join(problems))
        return self
