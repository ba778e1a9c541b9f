"""A plan in figures, for programs: what it asks of a launch, what every stage does, and what there was to choose from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lynx.plan.layout import launch_flags
from megatron_lynx.planner.decision import Decision


def summary(decision: Decision) -> dict[str, Any]:
    """As `megatron-lynx plan --json` prints it."""
    plan = decision.plan
    return {
        "step_s": decision.simulation.step_s,
        "partition": [len(stage.layers) for stage in plan.stages],
        "launch_flags": list(launch_flags(plan)),
        "stages": list(_stages(decision)),
    }


def _stages(decision: Decision) -> Iterator[dict[str, Any]]:
    memory = decision.memory
    for entry in decision.plan.stages:
        yield {
            "stage": entry.stage,
            "chunk": entry.chunk,
            "layers": str(entry.layers),
            "ahead_depth": entry.ahead_depth,
            "offload_ratio": decision.stages[entry.stage].offload_ratio,
            "offload_bytes": 0 if entry.offload is None else entry.offload.bytes,
            "memory_bytes": memory[entry.stage].named,
            "predicted": entry.predicted.model_dump(mode="json"),
        }
