"""Plans for tests, written out from a few words: which items each layer recomputes, and whether windows are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from megatron_lynx.anatomy import DENSE, HALVES, Facts, Half, Section, all_items, filling, sections_of
from megatron_lynx.config.job import Job
from megatron_lynx.plan.facts import IN_BF16
from megatron_lynx.plan.plan import Plan

SECTIONS = tuple(section for half in HALVES for section in filling(half))
RECOMPUTABLE = tuple(item for item in all_items() if any(item in section.recomputable for section in SECTIONS))


def recomputable(job: Job, *, gather: bool = False) -> tuple[str, ...]:
    """Everything that can be recomputed, of whichever section; under sequence parallelism without the GEMMs that gather, unless
    `gather`."""
    kept = () if gather or not job.parallel.sequence_parallel else tuple(section.gathered for section in SECTIONS)
    kept += DENSE["attention"].exchanging if job.parallel.context > 1 else ()
    return tuple(item for item in RECOMPUTABLE if item not in kept)


def plan_for(
    job: Job,
    recomputations: Callable[[int], Iterable[str]],
    *,
    windows: bool = True,
    ahead_depth: int = 1,
    whole: dict[str, int] | None = None,
) -> Plan:
    """One rule per layer: `recomputations(layer)` are its recomputed items, as far as it has them."""
    places = [(stage, chunk) for chunk in range(job.chunks) for stage in range(job.parallel.pipeline)]
    stages = [_stage(job, place, recomputations, windows, ahead_depth) | {"whole": whole} for place in places]
    model, parallel = job.model, job.parallel
    layout = {
        name: getattr(parallel, name) for name in ("tensor", "context", "pipeline", "microbatch_group", "sequence_parallel")
    }
    facts = ("layers", "hidden", "ffn", "heads", "kv_groups", "seq", "implementation", "moe_layers")
    return Plan.model_validate(
        {
            "version": 1,
            "model": {name: getattr(model, name) for name in facts}
            | {"fp8": model.fp8_recipe, "fp8_parameters": model.fp8_parameters, "shared_experts": has_shared_experts(job)}
            | {name: len(getattr(model, name)) for name in IN_BF16}
            | {"mtp": model.mtp, "moe_dispatcher": model.moe_dispatcher, "moe_overlapped": model.moe_overlapped}
            | {"captured": model.captured},
            "parallel": {**layout, "chunks": job.chunks},
            "batch": {"micro": job.batch.micro, "microbatches": job.microbatches},
            "stages": stages,
            "provenance": {"made_by": "a test"},
        }
    )


def has_shared_experts(job: Job) -> bool:
    return job.model.experts is not None and job.model.experts.shared_ffn > 0


def sections_in(job: Job, layer: int) -> dict[Half, Section]:
    """What fills the halves of a layer."""
    facts = Facts(
        experts=layer in job.model.expert_layers, shared_experts=has_shared_experts(job), overlapped=job.model.moe_overlapped
    )
    return {section.half: section for section in sections_of(facts)}


def _stage(
    job: Job, place: tuple[int, int], recomputations: Callable[[int], Iterable[str]], windows: bool, ahead_depth: int
) -> dict[str, Any]:
    """`place`: stage and chunk."""
    layers = job.layers_of(*place)
    rules = []
    for layer in layers:
        sections = sections_in(job, layer)
        names = [name for half in HALVES for name in sections[half].names]
        recomputed = set(recomputations(layer)) & set(names) - {name for section in sections.values() for name in section.apart}
        rule: dict[str, Any] = {"layers": layer, "keep": [i for i in names if i not in recomputed]}
        rule["recompute"] = [item for item in names if item in recomputed]
        halves = [half for half in HALVES if recomputed & set(sections[half].names)]
        if windows:
            rule["windows"] = {half: _window(job, place, layer, half, recomputed) for half in halves}
        if job.parallel.sequence_parallel:
            gathers = [half for half in halves if sections[half].gathered in recomputed]
            rule["gather"] = {half: _gather(job, place, layer, half) if windows else "on_demand" for half in gathers}
        rules.append(rule)
    depth = ahead_depth if windows else 0
    entry = {"stage": place[0], "chunk": place[1], "layers": f"{layers[0]}-{layers[-1]}"}
    return {**entry, "ahead_depth": depth, "rules": rules}


def _window(job: Job, place: tuple[int, int], layer: int, half: Half, recomputed: set[str]) -> str:
    has_experts = layer in job.model.expert_layers
    if half == "attention" and has_experts and recomputed & set(sections_in(job, layer)["mlp"].names):
        return "on_demand"  # experts have no windows, and the one before them is taken
    if job.parallel.tensor == 1:
        return _first_window(job, place, layer, half, recomputed)
    last = "2" if job.parallel.sequence_parallel else "0"
    if half == "attention" and not has_experts:
        return f"bwd.mlp.{last}"
    if layer < job.layers_of(*place)[-1]:
        return f"bwd.attention.{last}+1"
    return _first_window(job, place, layer, half, recomputed)


def _first_window(job: Job, place: tuple[int, int], layer: int, half: Half, recomputed: set[str]) -> str:
    """Of the frame that backward needs first: nothing precedes it in this backward."""
    needs_gather = job.parallel.sequence_parallel and sections_in(job, layer)[half].gathered in recomputed
    behind_mlp = half == "attention" and layer not in job.model.expert_layers
    in_experts = half == "mlp" and layer in job.model.expert_layers
    if needs_gather or layer < job.layers_of(*place)[-1] or behind_mlp:
        return "on_demand"
    if place == (job.parallel.pipeline - 1, job.chunks - 1):
        gathers_first = half == "mlp" and job.parallel.sequence_parallel and not in_experts
        in_time = gathers_first and "mlp_bda" not in recomputed and not job.model.uses_te
        return "bwd.mlp.0" if in_time else "on_demand"
    return "pipe.recv_backward"


def _gather(job: Job, place: tuple[int, int], layer: int, half: Half) -> str:
    if half == "attention" and layer not in job.model.expert_layers:
        return "bwd.mlp.0"
    return "bwd.attention.0+1" if layer < job.layers_of(*place)[-1] else "on_demand"
