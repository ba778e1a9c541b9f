"""Plans for tests, written out from a few words: which items each layer replays, and whether windows are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from megatron_lynx.anatomy import COLUMN_PARALLEL, DENSE, HALVES, ITEMS, ROW_PARALLEL, Half
from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan

REPLAYABLE = tuple(item for item in ITEMS if item not in ROW_PARALLEL)


def replayable(job: Job, *, gather: bool = False) -> tuple[str, ...]:
    """Everything that can be replayed; under sequence parallelism without the GEMMs that gather, unless `gather`."""
    kept = () if gather or not job.parallel.sequence_parallel else tuple(COLUMN_PARALLEL)
    kept += DENSE["attention"].exchanging if job.parallel.context > 1 else ()
    return tuple(item for item in REPLAYABLE if item not in kept)


def plan_for(
    job: Job,
    replays: Callable[[int], Iterable[str]],
    *,
    windows: bool = True,
    ahead_depth: int = 1,
    whole: dict[str, int] | None = None,
) -> Plan:
    """One rule per layer: `replays(layer)` are its replayed items, of a layer with experts as far as they are in its attention
    half."""
    places = [(stage, chunk) for chunk in range(job.chunks) for stage in range(job.parallel.pipeline)]
    stages = [_stage(job, place, replays, windows, ahead_depth) | {"whole": whole} for place in places]
    model, parallel = job.model, job.parallel
    layout = {
        name: getattr(parallel, name) for name in ("tensor", "context", "pipeline", "microbatch_group", "sequence_parallel")
    }
    facts = ("layers", "hidden", "ffn", "heads", "kv_groups", "seq", "implementation", "moe_layers")
    return Plan.model_validate(
        {
            "version": 1,
            "model": {name: getattr(model, name) for name in facts} | {"fp8": model.fp8_recipe},
            "parallel": {**layout, "chunks": job.chunks},
            "batch": {"micro": job.batch.micro, "microbatches": job.microbatches},
            "stages": stages,
            "provenance": {"made_by": "a test"},
        }
    )


def _stage(
    job: Job, place: tuple[int, int], replays: Callable[[int], Iterable[str]], windows: bool, ahead_depth: int
) -> dict[str, Any]:
    """`place`: stage and chunk."""
    layers = job.layers_of(*place)
    rules = []
    for layer in layers:
        replayed = set(replays(layer)) - set(DENSE["mlp"].names if layer in job.model.expert_layers else ())
        rule: dict[str, Any] = {"layers": layer, "keep": [i for i in ITEMS if i not in replayed]}
        rule["replay"] = [item for item in ITEMS if item in replayed]
        halves = [half for half in HALVES if replayed & set(DENSE[half].names)]
        if windows:
            rule["windows"] = {half: _window(job, place, layer, half, replayed) for half in halves}
        if job.parallel.sequence_parallel:
            gathers = [half for half in halves if DENSE[half].column_parallel in replayed]
            rule["gather"] = {half: _gather(job, place, layer, half) if windows else "on_demand" for half in gathers}
        rules.append(rule)
    depth = ahead_depth if windows else 0
    entry = {"stage": place[0], "chunk": place[1], "layers": f"{layers[0]}-{layers[-1]}"}
    return {**entry, "ahead_depth": depth, "rules": rules}


def _window(job: Job, place: tuple[int, int], layer: int, half: Half, replayed: set[str]) -> Any:
    if job.parallel.tensor == 1:
        return _first_window(job, place, layer, half, replayed)
    last = "2" if job.parallel.sequence_parallel else "0"
    if half == "attention" and layer not in job.model.expert_layers:
        return f"bwd.mlp.{last}"
    if layer < job.layers_of(*place)[-1]:
        return f"bwd.attention.{last}+1"
    return _first_window(job, place, layer, half, replayed)


def _first_window(job: Job, place: tuple[int, int], layer: int, half: Half, replayed: set[str]) -> Any:
    """Of the frame that backward needs first: nothing precedes it in this backward."""
    needs_gather = job.parallel.sequence_parallel and DENSE[half].column_parallel in replayed
    behind_mlp = half == "attention" and layer not in job.model.expert_layers
    if needs_gather or layer < job.layers_of(*place)[-1] or behind_mlp:
        return "on_demand"
    if place == (job.parallel.pipeline - 1, job.chunks - 1):
        in_time = half == "mlp" and job.parallel.sequence_parallel and "mlp_bda" not in replayed and not job.model.uses_te
        return "bwd.mlp.0" if in_time else "on_demand"
    in_every_chunk = len(job.layers_of(*place)) == min(job.chunk_layers(place[0]))
    steady = f"fwd.{half}.0" if job.parallel.tensor > 1 and in_every_chunk else "pipe.recv_backward"
    return {"steady": steady, "cooldown": "pipe.recv_backward"}


def _gather(job: Job, place: tuple[int, int], layer: int, half: Half) -> str:
    if half == "attention" and layer not in job.model.expert_layers:
        return "bwd.mlp.0"
    return "bwd.attention.0+1" if layer < job.layers_of(*place)[-1] else "on_demand"
