"""Whether a traced run is one of the plan beside which it is to be shown.

ranks       a multiple of tensor x pipeline; Megatron counts them with the stage outermost: stage = rank // (ranks // pipeline)
layers      each rank's are its stage's
batch       no more micro-batches than the plan's, where the pipeline is flushed after each batch
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.config.experts import as_spans
from megatron_lynx.errors import PlanMismatch, Problem
from megatron_lynx.plan.plan import Plan
from megatron_lynx.report.trace_file import ReadTrace


def stages_of_rows(trace: ReadTrace, plan: Plan | None, where: str) -> dict[int, int]:
    """The stage of each row of a trace. Raises `PlanMismatch` where it is of another job than the plan."""
    rows = list(trace.timeline.ranks)
    if plan is None or trace.simulated:
        stages = {row: row for row in rows}
        problems = list(_too_many_stages(rows, plan, where)) if plan is not None else []
    else:
        group = max(1, len(rows) // plan.parallel.pipeline)
        stages = {row: row // group for row in rows}
        problems = list(_wrong_ranks(rows, plan, where))
    if plan is not None and not problems:
        problems = [*_wrong_layers(trace, stages, plan, where), *_wrong_batch(trace, plan, where)]
    if problems:
        raise PlanMismatch("the trace is of another job than the plan", problems)
    return stages


TODO = "give the trace of a run under this plan, or the plan of that run"


def _wrong_ranks(rows: list[int], plan: Plan, where: str) -> Iterator[Problem]:
    layout = plan.parallel
    needed = layout.tensor * layout.pipeline
    if len(rows) % needed or rows != list(range(len(rows))):
        of = f"a multiple of {needed} (tensor {layout.tensor} x pipeline {layout.pipeline}), counted from 0"
        yield Problem(f"{where}: ranks", ", ".join(map(str, as_spans(set(rows)))), of, TODO)


def _too_many_stages(rows: list[int], plan: Plan, where: str) -> Iterator[Problem]:
    if rows != list(range(plan.parallel.pipeline)):
        found = ", ".join(map(str, as_spans(set(rows))))
        yield Problem(f"{where}: stages", found, f"the plan's {plan.parallel.pipeline}, counted from 0", TODO)


def _wrong_layers(trace: ReadTrace, stages: dict[int, int], plan: Plan, where: str) -> Iterator[Problem]:
    owned = {
        stage: {layer for entry in plan.chunks_of(stage) for layer in entry.layers} for stage in range(plan.parallel.pipeline)
    }
    for row, spans in trace.timeline.ranks.items():
        found = {span.layer for span in spans if span.layer is not None}
        if not found <= owned[stages[row]]:
            said, needed = (", ".join(map(str, as_spans(layers))) for layers in (found, owned[stages[row]]))
            yield Problem(f"{where}: rank {row}", f"layers {said}", f"layers {needed}, which stage {stages[row]} owns", TODO)


def _wrong_batch(trace: ReadTrace, plan: Plan, where: str) -> Iterator[Problem]:
    if plan.schedule != "flush":
        return
    for row, spans in trace.timeline.ranks.items():
        found = len({span.micro_batch for span in spans if span.micro_batch is not None and span.kind == "forward"})
        if found > plan.batch.microbatches:
            needed = f"at most {plan.batch.microbatches}, as in the plan"
            yield Problem(f"{where}: rank {row}", f"{found} micro-batches in one step", needed, TODO)
