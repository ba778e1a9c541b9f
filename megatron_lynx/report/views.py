"""Steps over time in the page's format: spans as columns, each with the index of its subject.

The predicted step is a rehearsal, else a file of `simulate`; the measured one is the trace of a run under the plan. A wait has
two bars: its communication, and the gap in the compute lane. In spans, a wait lasts until its work is complete; on the page it
ends where exposed work begins:

    wait             ├──────────────┤                 ├──────┤
    recomputations   ├hidden┤exposed┤      ─>         ├hidden┤exposed┤
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal

from megatron_lynx.plan.plan import Plan
from megatron_lynx.report.given import Given, stages_of_rows
from megatron_lynx.report.island import Memory, Row, Spans, Subject, View, is_wait, kind_of
from megatron_lynx.report.tables import Seen
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.timeline import MemoryCurve, Span, Timeline

NANO = 1e9

MOST_SPANS = 400_000
"""Limit of spans per view, so that mail servers accept the file; above it, one rank per stage is shown."""


def view(
    name: Literal["predicted", "measured"],
    title: str,
    timeline: Timeline,
    stages: Mapping[int, int],
    memory: Mapping[int, Memory] | None = None,
) -> View:
    subjects: dict[_Subject, int] = {}
    shown = _shown(timeline, stages)
    first = min((span.micro_batch for row in shown for span in timeline.ranks[row] if span.micro_batch is not None), default=0)
    rows = [
        Row(
            label=f"stage {stages[row]}" + ("" if name == "predicted" else f", rank {row}"),
            number=row,
            stage=stages[row],
            spans=_columns(timeline.ranks[row], subjects, first),
            memory=(memory or {}).get(row),
        )
        for row in shown
    ]
    named_subjects = [Subject(kind=kind, name=of, layer=layer, half=half, window=at) for kind, of, layer, half, at in subjects]
    return View(name=name, title=title, step_ns=_ns(timeline.seconds), subjects=named_subjects, rows=rows)


def memory_of(simulation: Simulation, stage: int) -> Memory:
    """Return the bytes of a stage's layers: kept since forward, and recomputed."""
    return by_kind(simulation.memory(stage), simulation.regenerated(stage))


def by_kind(total: MemoryCurve, regenerated: MemoryCurve | None = None) -> Memory:
    """Return a curve by kind; a time with several changes has its peak and its last value."""
    made = [(0.0, 0)] if regenerated is None else list(zip(regenerated.times_s, regenerated.bytes, strict=True))
    times: list[int] = []
    kept: list[int] = []
    again: list[int] = []
    behind, made_bytes = 0, 0
    for time_s, group in groupby(zip(total.times_s, total.bytes, strict=True), key=lambda point: point[0]):
        held = [count for _, count in group]
        before_bytes = made_bytes
        while behind < len(made) and made[behind][0] <= time_s:
            made_bytes = made[behind][1]
            behind += 1
        peak = [(max(held), min(max(before_bytes, made_bytes), max(held)))] if max(held) > held[-1] else []
        for count, of_recomputations in [*peak, (held[-1], made_bytes)]:
            times.append(_ns(time_s))
            again.append(of_recomputations)
            kept.append(count - of_recomputations)
    return Memory(time_ns=times, kinds={"kept": kept, "regenerated": again} if any(again) else {"kept": kept})


_Subject = tuple[str, str, int | None, str | None, str | None]


def _columns(spans: Iterable[Span], subjects: dict[_Subject, int], first_micro_batch: int) -> Spans:
    bars = sorted(_bars(spans), key=lambda bar: (bar[1].start_s, -bar[1].end_s))
    starts = [_ns(span.start_s) for _, span in bars]
    return Spans(
        subject=[
            subjects.setdefault((kind, span.name, span.layer, span.half, span.window), len(subjects)) for kind, span in bars
        ],
        micro_batch=[None if span.micro_batch is None else span.micro_batch - first_micro_batch for _, span in bars],
        start_ns=starts,
        length_ns=[_ns(span.end_s) - start for start, (_, span) in zip(starts, bars, strict=True)],
    )


def _bars(spans: Iterable[Span]) -> Iterator[tuple[str, Span]]:
    for span in spans:
        yield kind_of(span), span
        if is_wait(span):
            yield "wait", span


def _shown(timeline: Timeline, stages: Mapping[int, int]) -> list[int]:
    """Return the rows to show by stage: all, or the one of each stage that ends last."""
    rows = sorted(timeline.ranks, key=lambda row: (stages[row], row))
    if sum(len(timeline.ranks[row]) for row in rows) <= MOST_SPANS:
        return rows
    ends_s = {row: max((span.end_s for span in timeline.ranks[row]), default=0.0) for row in rows}
    return [max(group, key=ends_s.__getitem__) for _, group in groupby(rows, key=stages.__getitem__)]


def _ns(seconds: float) -> int:
    return round(seconds * NANO)


def views_of(given: Given, plan: Plan | None, simulation: Simulation | None) -> list[tuple[View, Seen]]:
    """Return the views, predicted first. Raises `PlanMismatch` for a trace of another job."""
    measured = None if given.trace is None or given.trace.simulated else _traced("measured", given, plan)
    return [drawn for drawn in (_predicted(given, plan, simulation), measured) if drawn is not None]


def _predicted(given: Given, plan: Plan | None, simulation: Simulation | None) -> tuple[View, Seen] | None:
    if simulation is not None:
        simulation = simulation.whole()
        stages = {stage: stage for stage in range(len(simulation.executed))}
        memory = {stage: memory_of(simulation, stage) for stage in stages}
        return _drawn("predicted", "simulated", simulation.timeline(), stages, memory, plan, simulation.step_s)
    if given.trace is not None and given.trace.simulated:
        return _traced("predicted", given, plan)
    return None


def _traced(name: Literal["predicted", "measured"], given: Given, plan: Plan | None) -> tuple[View, Seen]:
    assert given.trace is not None, "asked for only where there is one"
    where, timeline = given.sources["trace"], given.trace.timeline
    memory = {row: by_kind(curve) for row, curve in given.trace.memory.items()}
    return _drawn(name, f"from {where}", timeline, stages_of_rows(given.trace, plan, where), memory, plan, timeline.seconds)


def _drawn(
    name: Literal["predicted", "measured"],
    title: str,
    timeline: Timeline,
    stages: Mapping[int, int],
    memory: Mapping[int, Memory],
    plan: Plan | None,
    passes_s: float,
) -> tuple[View, Seen]:
    timeline = trimmed(timeline)
    made = view(name, title, timeline, stages, memory)
    rows = {row["number"]: row for row in made["rows"]}
    owned = {} if plan is None else {number: plan.chunks_of(row["stage"]) for number, row in rows.items()}
    held = {number: zip(*memory[number]["kinds"].values(), strict=True) for number in rows if number in memory}
    held_bytes = {number: max(map(sum, kinds), default=0) for number, kinds in held.items()}
    labels = {number: row["label"] for number, row in rows.items()}
    layers = {number: ", ".join(str(entry.layers) for entry in chunks) for number, chunks in owned.items()}
    return made, Seen(name, passes_s, timeline, labels, layers, held_bytes)


def trimmed(timeline: Timeline) -> Timeline:
    """Return the timeline with every wait ended at its first exposed bar."""
    return Timeline({row: tuple(_trimmed(spans)) for row, spans in timeline.ranks.items()})


def _trimmed(spans: Sequence[Span]) -> Iterator[Span]:
    exposed = sorted(span.start_s for span in spans if kind_of(span) in ("on_demand", "flushed"))
    for span in spans:
        place = bisect_left(exposed, span.start_s)
        yield span._replace(end_s=min([span.end_s, *exposed[place : place + 1]])) if is_wait(span) else span
