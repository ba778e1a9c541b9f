"""Rows of a report, one for each stage: figures of its ranks joined, and predictions scaled to the run's input.

A traced step is split into halves and waits:

    spans of a rank, nested     backward mlp(3) ┬ window bwd.mlp.0@3 ┬ recompute attention(3)    in the wait
                                                │                    └ (the rest of the wait)
                                                └ recompute mlp(3)                               on demand
    compute of a half           its forward and backward without the spans inside, and its delayed weight gradients
    a wait                      the communication, if longer than the work inside; else only an upper bound

Receives between stages are left out: their length depends on other stages.

Predicted seconds are scaled to the run's micro-batches:

    passes          x  (m + f) / (M + f)  x  [(1 - a) t + a q]   m, M   micro-batches, planned ones
    recomputations  x   m / M             x  [(1 - a) t + a q]   f      the filling of the pipeline, in micro-batches
                                                                 t      tokens of one, over those of a full one
                                                                 q      squares of its lengths, over the planned ones
                                                                 a      core attention's share of the passes; 0 if unknown
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median

from megatron_lynx.anatomy import EXPERTS
from megatron_lynx.figures import InputSeen
from megatron_lynx.measure.run_outcome import (
    HalfSeconds,
    PlannedReserve,
    StageMeasured,
    StagePredicted,
    StageRow,
    StepInput,
    StepParts,
    WaitSeconds,
    stage_of,
)
from megatron_lynx.plan import Plan
from megatron_lynx.timeline import Span

ON_COPY_STREAMS = ("offload", "reload")
COMPUTING = ("forward", "backward")

OVER = 0.02
"""A wait ends before the work in it if at most this fraction of it remains after the work."""


def rows(plan: Plan, ranks: Iterable[tuple[int, StageMeasured]]) -> tuple[StageRow, ...]:
    stages: dict[int, list[StageMeasured]] = defaultdict(list)
    for stage, measured in ranks:
        stages[stage].append(measured)
    return tuple(
        StageRow(stage=stage, predicted=predicted_of(plan, stage), measured=stage_of(measured))
        for stage, measured in sorted(stages.items())
    )


def predicted_of(plan: Plan, stage: int) -> StagePredicted | None:
    chunks = [entry.predicted for entry in plan.chunks_of(stage)]
    first = chunks[0]
    if first.step_s is None and not first.memory_bytes:
        return None
    rehearsed = first.step_s is not None
    return StagePredicted(
        passes_s=first.step_s,
        memory_bytes=first.memory_bytes or None,
        hidden_recompute_s=sum(chunk.hidden_recompute_s for chunk in chunks) if rehearsed else None,
        exposed_recompute_s=sum(chunk.exposed_recompute_s for chunk in chunks) if rehearsed else None,
        exposed_copy_s=first.exposed_copy_s if rehearsed else None,
    )


def reserve_of(plan: Plan) -> PlannedReserve | None:
    """The plan's reserve; None if it is not split into parts."""
    device = plan.device
    if device is None or device.outside_bytes is None or device.slack_bytes is None:
        return None
    return PlannedReserve(outside_bytes=device.outside_bytes, slack_bytes=device.slack_bytes)


def step_input(plan: Plan, seen: InputSeen, steps: int, shards: int) -> StepInput | None:
    """The input of one rank over `steps`; None without attention. Waits for the device if lengths are on it."""
    if not seen.microbatches or not steps:
        return None
    full, packed = plan.model.seq * plan.batch.micro, plan.batch.packed
    microbatches, planned = seen.microbatches / steps, plan.batch.microbatches
    tokens = seen.tokens * shards / (seen.microbatches * full)
    per_token = plan.model.seq if packed is None else packed.squares_per_token
    squares = float(seen.squares) / (seen.microbatches * full * per_token)
    core = 0.0 if packed is None else packed.core_share
    of_full = (1 - core) * tokens + core * squares
    return StepInput(
        microbatches=microbatches,
        planned_microbatches=planned,
        tokens=tokens,
        squares=squares,
        by_squares=packed is not None,
        passes=of_full * plan.passes(microbatches) / plan.passes(planned),
        recomputations=of_full * microbatches / planned,
    )


def largest_input(inputs: Iterable[StepInput | None]) -> StepInput | None:
    """The input of the rank with most work, which determines the step; None if it was as planned, or is unknown."""
    fullest = max((met for met in inputs if met is not None), key=lambda met: met.passes, default=None)
    return None if fullest is None or fullest.as_planned else fullest


def parts_of(spans: Sequence[Span], has_experts: Callable[[int], bool]) -> StepParts:
    """Split one rank's step. `has_experts` takes the number of a layer."""
    halves: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    waits: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for span, inside in _nested(span for span in spans if span.kind not in ON_COPY_STREAMS):
        own_s = span.end_s - span.start_s - sum(inner_span.end_s - inner_span.start_s for inner_span in inside)
        if span.kind in COMPUTING or span.kind == "weight_gradient":
            halves[_kind(span.half, span.layer, has_experts)][span.kind].append(own_s)
        elif span.kind == "window":
            name, _, layer = str(span.window).partition("@")
            passing, half, ordinal = name.split(".")
            place = f"{passing}.{_kind(half, int(layer), has_experts)}.{ordinal}"
            recompute_s = sum(inner_span.end_s - inner_span.start_s for inner_span in inside if inner_span.kind == "recompute")
            waits[place].append((span.end_s - span.start_s, own_s, recompute_s))
    return StepParts(
        halves={kind: _half(seconds_by_kind) for kind, seconds_by_kind in sorted(halves.items())},
        waits={place: _waits(wait_times) for place, wait_times in sorted(waits.items())},
    )


def _half(seconds_by_kind: Mapping[str, Sequence[float]]) -> HalfSeconds:
    """`seconds_by_kind`: seconds by kind of span. The median is used for passes, as other work may have delayed some."""
    seconds = sum(
        len(seconds_by_kind[passing]) * median(seconds_by_kind[passing]) for passing in COMPUTING if seconds_by_kind[passing]
    )
    return HalfSeconds(calls=len(seconds_by_kind["forward"]), seconds=seconds + sum(seconds_by_kind["weight_gradient"]))


def _waits(wait_times: Sequence[tuple[float, float, float]]) -> WaitSeconds:
    """`wait_times`: for each wait its length, its rest after the work in it, and the recomputations in it."""
    longer = [(whole_s, recompute_s) for whole_s, rest_s, recompute_s in wait_times if rest_s > OVER * whole_s]
    shorter = [(whole_s, recompute_s) for whole_s, rest_s, recompute_s in wait_times if rest_s <= OVER * whole_s]
    return WaitSeconds(
        longer=len(longer),
        longer_s=sum(whole_s for whole_s, _ in longer),
        longer_recompute_s=sum(recompute_s for _, recompute_s in longer),
        shorter=len(shorter),
        shorter_recompute_s=sum(recompute_s for _, recompute_s in shorter),
    )


def _kind(half: str | None, layer: int | None, has_experts: Callable[[int], bool]) -> str:
    return "experts" if half == EXPERTS.half and layer is not None and has_experts(layer) else str(half)


def _nested(spans: Iterable[Span]) -> Iterator[tuple[Span, list[Span]]]:
    around: list[tuple[Span, list[Span]]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        while around and around[-1][0].end_s < span.end_s:
            yield around.pop()
        if around:
            around[-1][1].append(span)
        around.append((span, []))
    yield from reversed(around)
