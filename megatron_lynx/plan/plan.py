"""The plan: for every pipeline stage, which layers it owns and what becomes of each layer's activations.

    plan.yaml ──load_plan──> Plan ──apply──> a training job
                              │
              stages[k].rules[i]: a range of layers that are treated alike. Entry k is chunk k // p of stage k % p
                              ├── keep / replay      every item of the layer is in exactly one of them
                              ├── windows            where each half is replayed, by phase where phases differ
                              ├── gather             (sequence parallelism) where a replayed GEMM's input is gathered
                              └── weight_gradients   which linears defer theirs, and in which waits they run

A plan is checked when it is read, as far as it can be without a model: each part by itself where it is declared, all of them
together in `consistency`. Whether it fits a live run is `apply.match`'s question.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from pydantic import model_validator

from megatron_lynx.plan import consistency
from megatron_lynx.plan.contents import Head, PlanContents
from megatron_lynx.plan.facts import BatchFacts, ModelFacts, ParallelFacts, Provenance
from megatron_lynx.plan.layer_range import LayerRange
from megatron_lynx.plan.rule import ByPhase, CheckpointGroups, Gather, GatherByPhase, Rule, Windows
from megatron_lynx.plan.stage import Offload, Predicted, Stage, WeightGradients, Whole

__all__ = [
    "BatchFacts",
    "ByPhase",
    "CheckpointGroups",
    "Gather",
    "GatherByPhase",
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
"""The parts that a plan is made of are offered here as well: code that builds a plan needs no other module."""

PLAN_VERSION = 1


class Plan(PlanContents):
    """A whole plan, version 1."""

    @property
    def digest(self) -> str:
        """SHA-256 of what it says, whatever its file looks like. A key with its default says nothing, so that a plan keeps its
        digest when plans learn to say more."""
        return hashlib.sha256(self.model_dump_json(exclude_defaults=True).encode()).hexdigest()

    def with_stages(self, stages: Iterable[Stage]) -> Plan:
        """The same plan with these stages, checked again."""
        return Plan.model_validate(self.model_copy(update={"stages": tuple(stages)}).model_dump())

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        if problems := consistency.problems(self):
            raise ValueError("; ".join(problems))
        return self
