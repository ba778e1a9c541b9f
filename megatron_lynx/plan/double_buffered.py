"""Checks of plans for a pipeline without flushes, with two versions of the weights and one chunk on each stage.

batch j     ... F B F B F B        F of batch j + 1 runs between backwards of batch j, with another version of the weights: its
batch j + 1       F   F   F ...    collectives hide no recomputation; those of backwards, and receives, do

`whole` counts micro-batches in a step; here micro-batches of two batches are in flight.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.plan.contents import PlanContents

NO_FORWARD_WINDOW = (
    "but with schedule double_buffered the forward before a backward may be the next batch's, with other weights: "
    "only windows of backwards and pipe.recv_backward hide replays"
)


def problems(plan: PlanContents) -> Iterator[str]:
    """Contradictions between schedule and layout, with both numbers."""
    layout, found = plan.parallel, plan.batch.microbatches
    if plan.schedule == "flush":
        if not plan.defer_updates:
            yield "defer_updates is false, but schedule flush has nothing to defer"
        return
    if layout.pipeline == 1:
        yield "schedule is double_buffered, but pipeline is 1: it needs at least 2 stages"
    if layout.chunks > 1:
        yield f"schedule is double_buffered, but parallel.chunks is {layout.chunks}: it needs 1, as it cannot be interleaved"
    if plan.model.moe_layers:
        found_layers = ", ".join(map(str, plan.model.moe_layers))
        why = "it needs none, as routers keep state from batch to batch, and two are in flight"
        yield f"schedule is double_buffered, but model.moe_layers is {found_layers}: {why}"
    for entry in plan.stages:
        if entry.whole is not None:
            found_whole = f"{entry.whole.first} of every {entry.whole.of_every} micro-batches"
            why = "it needs none, as they are counted in each step, and steps overlap"
            yield f"schedule is double_buffered, but {plan.place_of(entry)}.whole is {found_whole}: {why}"
        if entry.offload is not None and entry.offload.pace_bytes is not None:
            why = "it needs none: offloading within a micro-batch was not tried without flushes"
            yield f"schedule is double_buffered, but {plan.place_of(entry)}.offload.pace_bytes is given: {why}"
    if found < layout.pipeline:
        yield f"schedule is double_buffered, but batch.microbatches is {found}: it needs at least pipeline ({layout.pipeline})"
