"""What a page says in words: what was trained, and what a reader must know to judge the figures."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.plan.plan import Plan
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.simulator.simulation import Simulation


def subject_of(plan: Plan) -> str:
    """One line on what is trained."""
    model, layout, batch = plan.model, plan.parallel, plan.batch
    chunks = f" with {layout.chunks} chunks each" if layout.chunks > 1 else ""
    sequence = " with sequence parallelism" if layout.sequence_parallel else ""
    head = "" if plan.head is None else f"; the head in {plan.head.pieces} pieces (inexact)"
    return (
        f"{model.layers} layers of {model.hidden}, sequence {model.seq}; tensor {layout.tensor}{sequence}, "
        f"pipeline {layout.pipeline}{chunks}; {batch.microbatches} micro-batches of {batch.micro} a step{head}"
    )


def notes_of(plan: Plan | None, costs: Profile | None, simulation: Simulation | None) -> Iterator[str]:
    """Where figures are from, and what they leave out."""
    if plan is not None:
        note = f": {plan.provenance.note}" if plan.provenance.note else ""
        yield f"The plan was made by {plan.provenance.made_by}{note}."
    if costs is not None:
        how = "measured on" if costs.source.how == "measured" else "computed from the figures of"
        yield f"Predicted seconds are from a profile that was {how} {costs.source.machine}."
    elif plan is not None:
        yield "There were no figures to simulate the plan with: give its profile, or --job."
    if simulation is not None and simulation.host_bound:
        stages = ", ".join(str(load.stage) for load in simulation.host_bound)
        yield f"Host-bound stages: {stages}. There the device waits for Python, and hiding replays gains nothing."
    if plan is not None and plan.schedule == "double_buffered":
        yield "The pipeline is never flushed: the schedule is a whole run of several batches; gradients are one update old."
