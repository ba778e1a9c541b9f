"""Figures of a simulated step, as JSON and as a table."""

from __future__ import annotations

from typing import Any

from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.tables import WrappedTable
from megatron_lynx.units import format_bytes, format_seconds


def as_json(simulation: Simulation, update_s: float | None) -> dict[str, Any]:
    """Return the step's seconds and, by stage, its busy and exposed seconds, peak bytes, and each action's start and end.

    `update_s`: seconds of the optimizer's update; None if unknown, and then `step_s` is None. Without flushes, the step is one
    batch in steady state, and the actions are those of the whole run.
    """
    numbers = range(len(simulation.executed))
    defers = any(simulation.total(stage, name) for stage in numbers for name in ("filled_s", "unfilled_s"))
    stages = [_stage(simulation, stage, defers) for stage in numbers]
    whole_s = None if update_s is None else simulation.step_s + update_s
    seconds: dict[str, Any] = {"step_s": whole_s, "passes_s": simulation.step_s, "update_s": update_s}
    if simulation.updates:
        updates = [[update._asdict() for update in stage] for stage in simulation.updates]
        seconds |= {"schedule": "double_buffered", "gradient_age_updates": 1, "updates": updates}
    return {**seconds, "stages": stages}


def table(simulation: Simulation, update_s: float | None) -> WrappedTable:
    rows = as_json(simulation, update_s)["stages"]
    deferred = ("weight gradients hidden", "exposed") if DEFERRED[0] in rows[0] else ()
    waits = ("waits for copies",) if any(row["exposed_copy_s"] for row in rows) else ()
    columns = ("stage", "busy", "bubble", "recompute hidden", "recompute exposed", *deferred, *waits, "activations at most")
    result = WrappedTable(columns, title=headline(simulation, update_s))
    for row in rows:
        seconds = (row["busy_s"], row["hidden_recompute_s"], row["exposed_recompute_s"])
        busy, hidden, exposed = map(format_seconds, seconds)
        copies = [format_seconds(row["exposed_copy_s"])] if waits else []
        bubble = f"{format_seconds(row['bubble_s'])} ({100 * row['bubble_s'] / (simulation.step_s or 1.0):.0f} %)"
        weight_gradients = [format_seconds(row[key]) for key in DEFERRED if deferred]
        peak = format_bytes(row["peak_activation_bytes"])
        result.add(str(row["stage"]), busy, bubble, hidden, exposed, *weight_gradients, *copies, peak)
    return result


DEFERRED = ("hidden_weight_gradient_s", "exposed_weight_gradient_s")


def headline(simulation: Simulation, update_s: float | None) -> str:
    what, old = "one step", ""
    if simulation.updates:
        what, old = "one batch without flushes, in the steady state", " (gradients are one update old)"
    if update_s is None:
        return f"{what}, without the optimizer's update: {format_seconds(simulation.step_s)}{old}"
    whole, update = format_seconds(simulation.step_s + update_s), format_seconds(update_s)
    return f"{what}: {whole}, of which the optimizer's update {update}{old}"


def _stage(simulation: Simulation, stage: int, defers: bool) -> dict[str, Any]:
    """Weight gradients are left out if none are delayed, the host's seconds if they are unknown."""
    hidden_s, exposed_s, filled_s, unfilled_s, host_s, host_late_s = (
        simulation.total(stage, name) for name in ("hidden_s", "exposed_s", "filled_s", "unfilled_s", "host_s", "host_late_s")
    )
    return {
        "stage": stage,
        "busy_s": simulation.busy_s(stage),
        "bubble_s": simulation.bubble_s(stage),
        "hidden_recompute_s": hidden_s,
        "exposed_recompute_s": exposed_s,
        **(dict(zip(DEFERRED, (filled_s, unfilled_s), strict=True)) if defers else {}),
        "exposed_copy_s": simulation.exposed_copy_s(stage),
        **({"host_s": host_s, "host_late_s": host_late_s} if host_s else {}),
        "peak_activation_bytes": simulation.memory(stage).peak_bytes,
        "actions": [
            {"action": str(one.action), "phase": one.phase, "start_s": one.start_s, "end_s": one.end_s}
            for one in simulation.executed[stage]
        ],
    }
