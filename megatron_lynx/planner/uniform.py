"""Plans that treat every layer alike, without a profile: to compare with, and to begin an own plan from."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from megatron_lynx.anatomy import COLUMN_PARALLEL, DENSE, HALVES, ITEMS, ROW_PARALLEL, Half
from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD
from megatron_lynx.config.job import Job
from megatron_lynx.cost.layer import LayerShape, replayed_flops
from megatron_lynx.plan.plan import ByPhase, Plan, Predicted, Provenance, Rule, Stage
from megatron_lynx.planner.checks import check_plannable
from megatron_lynx.planner.writing import made_by, plan_of, rule_of, stage_of, window_of

REPLAYABLE = tuple(item for item in ITEMS if item not in ROW_PARALLEL)


def uniform_plan(
    job: Job,
    replay: Literal["all", "none"] | Collection[str] = "all",
    *,
    windows: bool = True,
    gather: Literal["keep", "once"] = "keep",
    note: str | None = None,
) -> Plan:
    """The same for every layer, without a profile: to compare with, and to begin an own plan from.

    `replay` names the items. With `windows` each half runs in its usual window, else on demand. Under sequence parallelism
    `gather` says what becomes of linear_qkv and linear_fc1: they are kept, or replayed from an input that is gathered once.
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
    """Experts are kept whole."""
    return [item for item in items if item in DENSE["attention"].names] if layer in job.model.expert_layers else items


def _uniform_rule(job: Job, place: tuple[int, int], layer: int, items: Collection[str], ahead: bool) -> Rule:
    """`place`: stage and chunk."""
    top = layer == job.layers_of(*place)[-1]
    windows: dict[Half, str | ByPhase | None] = {}
    gathers: dict[Half, str | None] = {}
    for half in (half for half in HALVES if set(items) & set(DENSE[half].names)):
        first = top and (half == "mlp" or layer in job.model.expert_layers)
        hidden = ahead and not (job.reduces_amaxes and DENSE[half].norm in items)
        gathers_once = job.parallel.sequence_parallel and DENSE[half].column_parallel in items
        too_late = gathers_once or f"{half}_bda" in items or job.model.uses_te
        own = job.parallel.sequence_parallel and not too_late
        window = _usual_window(job, place, (layer, half), first, own) if hidden and not (first and gathers_once) else ON_DEMAND
        windows[half] = window
        if gathers_once:
            gathers[half] = ON_DEMAND if first or not hidden else f"bwd.{_before(job, layer, half)}".format(0)
    return rule_of(layer, items, windows, gathers)


def _before(job: Job, layer: int, half: Half) -> str:
    """The nearest half that backward passes before this one and that has windows: experts have none."""
    own_mlp = half == "attention" and layer not in job.model.expert_layers
    return "mlp.{}" if own_mlp else "attention.{}+1"


def _usual_window(job: Job, place: tuple[int, int], frame: tuple[int, Half], first: bool, own: bool) -> str | ByPhase:
    """Where a half is replayed when no figures say better.

    `first`: no backward with windows comes before it on this stage. `own`: the first window of its own backward comes in time.
    """
    (layer, half), parallel, last_stage = frame, job.parallel, place == (job.parallel.pipeline - 1, job.chunks - 1)
    if own:
        return f"bwd.{half}.0"
    if (first and last_stage) or (parallel.tensor == 1 and not first):
        return ON_DEMAND
    if first:
        lies_there = place[0] == parallel.pipeline - 1 and job.microbatch_group > parallel.pipeline
        received, layers = ON_DEMAND if lies_there else RECV_BACKWARD, job.chunk_layers(place[0])
        precedes = parallel.tensor > 1 and layers[place[1]] == min(layers) and job.schedule == "flush"
        return window_of(f"fwd.{half}.0" if precedes else received, received)
    return f"bwd.{_before(job, layer, half)}".format(2 if parallel.sequence_parallel else 0)
