"""The plan: for every pipeline stage, its layers and the treatment of their activations.

    plan.yaml ──load_plan──> Plan ──apply──> a training job
                              │
              stages[k].rules[i]: a range of layers with equal treatment. Entry k is chunk k // p of stage k % p
                              ├── keep / recompute   every item of the layer is in exactly one of them
                              ├── windows            where each half is recomputed, by phase if phases differ
                              ├── gather             (sequence parallelism) where a recomputed GEMM's input is gathered
                              └── weight_gradients   which linears delay theirs, and in which waits they run

Reading a plan checks each part by itself, and all of them together in `consistency`. `apply.refusals` compares it with a run.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_lynx.plan import consistency
from megatron_lynx.plan.facts import BatchFacts, LayerRange, ModelFacts, ParallelFacts, Provenance
from megatron_lynx.plan.rule import ByPhase, CheckpointGroups, Gather, Rule, Windows
from megatron_lynx.plan.stage import Head, Offload, PlanContents, Predicted, Stage, WeightGradients, Whole
from megatron_lynx.validation import digest_of

__all__ = [
    "BatchFacts",
    "ByPhase",
    "CheckpointGroups",
    "Gather",
    "Head",
    "LayerRange",
    "ModelFacts",
    "Offload",
    "ParallelFacts",
    "Plan",
    "Predicted",
    "Provenance",
    "Rule",
    "Stage",
    "WeightGradients",
    "Whole",
    "Windows",
]
"""Includes the parts of a plan, so that code that builds one needs only this module."""

PLAN_VERSION = 1


class Plan(PlanContents):
    """A whole plan, version 1."""

    @property
    def digest(self) -> str:
        return digest_of(self, {})

    def with_stages(self, stages: Iterable[Stage]) -> Plan:
        """The same plan with these stages, checked again."""
        return Plan.model_validate(self.model_copy(update={"stages": tuple(stages)}).model_dump())

    def _problems(self) -> list[str]:
        return consistency.problems(self)
