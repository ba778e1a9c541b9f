"""Figures of a simulated step, as JSON and as a table."""

from __future__ import annotations

from typing import Any

from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.tables import WrappedTable
from megatron_lynx.units import format_bytes, format_seconds

RECOMPUTE = {"hidden_recompute_s": "hidden_s", "exposed_recompute_s": "exposed_s"}
DEFERRED = {"hidden_weight_gradient_s": "filled_s", "exposed_weight_gradient_s": "unfilled_s"}
HOST = {"host_s": "host_s", "host_late_s": "host_late_s"}
"""By key, the field of a stage's passes that is summed. Weight gradients are left out if none are delayed, the host's seconds if
they are unknown."""


def as_json(simulation: Simulation, update_s: float | None) -> dict[str, Any]:
    """Return the step's seconds and, by stage, its busy and exposed seconds, peak bytes, and each action's start and end.

    `update_s`: seconds of the optimizer's update; None if unknown, and then `step_s` is None. Without flushes, the step is one
    batch in steady state, and the actions are those of the whole run.
    """
    stages = range(len(simulation.executed))
    defers = any(simulation.total(stage, name) for stage in stages for name in DEFERRED.values())
    whole_s = None if update_s is None else simulation.step_s + update_s
    seconds: dict[str, Any] = {"step_s": whole_s, "passes_s": simulation.step_s, "update_s": update_s}
    if simulation.updates:
        updates = [[update._asdict() for update in stage] for stage in simulation.updates]
        seconds |= {"schedule": "double_buffered", "gradient_age_updates": 1, "updates": updates}
    return {**seconds, "stages": [_stage(simulation, stage, RECOMPUTE | (DEFERRED if defers else {})) for stage in stages]}


def _stage(simulation: Simulation, stage: int, sums: dict[str, str]) -> dict[str, Any]:
    host = HOST if simulation.total(stage, "host_s") else {}
    return {
        "stage": stage,
        "busy_s": simulation.busy_s(stage),
        "bubble_s": simulation.bubble_s(stage),
        **{key: simulation.total(stage, name) for key, name in sums.items()},
        "exposed_copy_s": simulation.exposed_copy_s(stage),
        **{key: simulation.total(stage, name) for key, name in host.items()},
        "peak_activation_bytes": simulation.memory(stage).peak_bytes,
        "actions": [
            {"action": str(one.action), "phase": one.phase, "start_s": one.start_s, "end_s": one.end_s}
            for one in simulation.executed[stage]
        ],
    }


def table(simulation: Simulation, update_s: float | None) -> WrappedTable:
    stages = as_json(simulation, update_s)["stages"]
    shown = {"busy": "busy_s", "bubble": "bubble_s"} | dict(
        zip(("recompute hidden", "recompute exposed"), RECOMPUTE, strict=True)
    )
    if stages[0].keys() >= DEFERRED.keys():
        shown |= dict(zip(("weight gradients hidden", "exposed"), DEFERRED, strict=True))
    if any(stage["exposed_copy_s"] for stage in stages):
        shown["waits for copies"] = "exposed_copy_s"
    what, old = "one step", ""
    if simulation.updates:
        what, old = "one batch without flushes, in the steady state", " (gradients are one update old)"
    title = f"{what}, without the optimizer's update: {format_seconds(simulation.step_s)}{old}"
    if update_s is not None:
        whole, update = format_seconds(simulation.step_s + update_s), format_seconds(update_s)
        title = f"{what}: {whole}, of which the optimizer's update {update}{old}"
    result = WrappedTable(("stage", *shown, "activations at most"), title=title)
    for stage in stages:
        cells = {column: format_seconds(stage[key]) for column, key in shown.items()}
        cells["bubble"] += f" ({100 * stage['bubble_s'] / (simulation.step_s or 1.0):.0f} %)"
        result.add(str(stage["stage"]), *cells.values(), format_bytes(stage["peak_activation_bytes"]))
    return result
