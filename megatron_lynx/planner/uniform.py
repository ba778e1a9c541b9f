"""Plans that treat every layer alike and need no profile: to compare with, and to begin an own plan from."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal

from megatron_lynx.anatomy import COLUMN_PARALLEL, DENSE, ITEMS, REPLAYABLE, Half, Section, sections_of
from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD, window_name
from megatron_lynx.anatomy.in_time import half_before, own_window, own_windows_in_time
from megatron_lynx.config.job import Job
from megatron_lynx.cost.layer import LayerShape, replayed_flops
from megatron_lynx.plan.plan import ByPhase, Plan, Predicted, Provenance, Rule, Stage
from megatron_lynx.planner.checks import check_plannable
from megatron_lynx.planner.writing import made_by, plan_of, rule_of, stage_of, window_of


def uniform_plan(
    job: Job,
    replay: Literal["all", "none"] | Collection[str] = "all",
    *,
    windows: bool = True,
    gather: Literal["keep", "once"] = "keep",
    note: str | None = None,
) -> Plan:
    """A plan that replays the items of `replay` in every layer.

    With `windows` each half is replayed in its usual window, else on demand. Under sequence parallelism `gather` says what
    becomes of linear_qkv and linear_fc1: they are kept, or replayed from an input that is gathered once.
    """
    check_plannable(job)
    items = REPLAYABLE if replay == "all" else () if replay == "none" else tuple(item for item in ITEMS if item in replay)
    if job.parallel.sequence_parallel and gather == "keep":
        items = tuple(item for item in items if item not in COLUMN_PARALLEL)
    places = ((stage, chunk) for chunk in range(job.chunks) for stage in range(job.parallel.pipeline))
    stages = tuple(_uniform_stage(job, stage, chunk, items, windows) for stage, chunk in places)
    return plan_of(job, stages, Provenance(made_by=made_by(), job=job.digest, note=note))


def _uniform_stage(job: Job, stage: int, chunk: int, items: Collection[str], ahead: bool) -> Stage:
    layers = job.layers_of(stage, chunk)
    shape = LayerShape(job.model, job.parallel, job.batch.micro)
    of_layers = [_items_of(job, layer, items) for layer in layers]
    rules = [_uniform_rule(job, (stage, chunk), layer, some, ahead) for layer, some in zip(layers, of_layers, strict=True)]
    return stage_of(job, (stage, chunk), rules, Predicted(replayed_flops=sum(replayed_flops(shape, some) for some in of_layers)))


def _items_of(job: Job, layer: int, items: Collection[str]) -> Collection[str]:
    """Those that the layer has: experts are kept whole."""
    return [item for item in items if any(item in section.names for section in _replayed_sections(job, layer))]


def _replayed_sections(job: Job, layer: int) -> Iterator[Section]:
    """What a layer consists of, but for what is kept whole."""
    return (section for section in sections_of(experts=layer in job.model.expert_layers) if not section.opaque)


def _uniform_rule(job: Job, where: tuple[int, int], layer: int, items: Collection[str], ahead: bool) -> Rule:
    """`where`: stage and chunk."""
    windows: dict[Half, str | ByPhase | None] = {}
    gathers: dict[Half, str | None] = {}
    for section in _replayed_sections(job, layer):
        if not set(items) & set(section.names):
            continue
        before = _half_with_windows_before(job, where, layer, section.half)
        gathers_once = job.parallel.sequence_parallel and section.column_parallel in items
        hidden = ahead and not (job.reduces_amaxes and section.norm in items) and not (before is None and gathers_once)
        windows[section.half] = _usual_window(job, where, section, items, before) if hidden else ON_DEMAND
        if gathers_once:
            gathers[section.half] = window_name("bwd", before[0], 0, before[1]) if hidden and before else ON_DEMAND
    return rule_of(layer, items, windows, gathers)


def _half_with_windows_before(job: Job, where: tuple[int, int], layer: int, half: Half) -> tuple[Half, int] | None:
    """The nearest half that has windows and whose backward comes before this one's, and how many layers above it is.

    Experts have none. None where no such half is on this stage.
    """
    at = layer
    while True:
        half, above = half_before(half)
        at += above
        if at > job.layers_of(*where)[-1]:
            return None
        if any(section.half == half for section in _replayed_sections(job, at)):
            return half, at - layer


def _usual_window(
    job: Job, where: tuple[int, int], section: Section, items: Collection[str], before: tuple[Half, int] | None
) -> str | ByPhase:
    """Where a half is replayed when no figures say better. `before`: the half before it that has windows."""
    parallel, half = job.parallel, section.half
    gathers_once = parallel.sequence_parallel and section.column_parallel in items
    in_time = own_windows_in_time(section, items, sequence_parallel=parallel.sequence_parallel, te=job.model.uses_te)
    if in_time and not gathers_once:
        return own_window(half)
    if before is not None:
        last = len(DENSE[before[0]].collectives("bwd", parallel.sequence_parallel)) - 1
        return ON_DEMAND if parallel.tensor == 1 else window_name("bwd", before[0], last, before[1])
    stage, chunk = where
    last_stage = stage == parallel.pipeline - 1
    if last_stage and chunk == job.chunks - 1:
        return ON_DEMAND
    lies_there = last_stage and job.microbatch_group > parallel.pipeline
    received, layers = ON_DEMAND if lies_there else RECV_BACKWARD, job.chunk_layers(stage)
    precedes = parallel.tensor > 1 and layers[chunk] == min(layers) and job.schedule == "flush"
    return window_of(window_name("fwd", half, 0) if precedes else received, received)
