"""Refuses runs that the hooks do not support (rules R6, R14), and plans for other models or layouts; lists every reason."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn import Module

from megatron_lynx.anatomy import ATTENTION, HALVES
from megatron_lynx.anatomy.address import RECV_BACKWARD
from megatron_lynx.apply.hooks.head_in_pieces import refused_head
from megatron_lynx.apply.hooks.weight_gradients import refused_deferrals
from megatron_lynx.apply.kinds import (
    KINDS_IN,
    dispatched_by,
    facts_in,
    layers_by_kind,
    other_classes,
    refused_experts,
    sections_in,
)
from megatron_lynx.apply.live_run import (
    CLASSES,
    TE_MODULE,
    LiveRun,
    captured_modules,
    layers_in,
    module_at,
    name_of,
    overlapped,
    owner_of,
    recipe_of,
    refused_graphs,
)
from megatron_lynx.environment import AVOIDS_RECORDING, records_operands
from megatron_lynx.errors import Problem
from megatron_lynx.fp8_recipes import STORED
from megatron_lynx.kinds.dense.section import CORE_ATTENTION
from megatron_lynx.kinds.experts.section import EXPERTS
from megatron_lynx.kinds.opaque.section import OPAQUE
from megatron_lynx.limits import refused
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.timetables import timetable_of

RANDOM = "megatron.core.tensor_parallel.random."
KNOWN_TRACKERS = (
    f"{RANDOM}CudaRNGStatesTracker",
    f"{TE_MODULE}TECudaRNGStatesTracker",
    f"{RANDOM}initialize_rng_tracker.<locals>.InferenceCudaRNGStatesTracker",
)
"""Trackers of random numbers whose states `hooks.random_state` restores; the last one has none."""


def refusals(plan: Plan, run: LiveRun) -> list[Problem]:
    return [
        *refused_settings(run.config, te=run.uses_te if run.layers else None),
        *refused_in_fp8(run),
        *refused_windows(plan, run),
        *_early_gradients(plan, run),
        *_messages_beside_copies(plan, run),
        *_groups(run),
        *refused_layers(run),
        *_random_numbers(run),
        *refused_deferrals(plan, run),
        *refused_experts(plan, run),
        *refused_head(plan, run),
    ]


UNSET = {
    "NVTE_BACKWARD_OVERRIDE": "",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "0",
}
"""Environment variables that change which tensors nodes save, with their defaults."""


def refused_settings(config: Any, *, te: bool | None) -> Iterator[Problem]:
    """`te`: whether the rank's layers are Transformer Engine's; None: it has none."""
    experts = getattr(config, "num_moe_experts", None)
    circumstances = {
        "plan": True,
        "te": te,
        "local": te is False,
        "fp8": te and recipe_of(config) is not None,
        "fp4": te and recipe_of(config) == "nvfp4",
        "latent": getattr(config, "multi_latent_attention", False),
        "experts": experts,
        "flex": experts and config.moe_token_dispatcher_type == "flex",
    }
    yield from refused(config, [name for name, applies in circumstances.items() if applies])
    yield from refused_graphs(config)


def refused_in_fp8(run: LiveRun) -> Iterator[Problem]:
    recipe = recipe_of(run.config)
    if recipe is None or not run.uses_te:
        return
    if recipe not in STORED:
        bits = "fp8" if run.config.fp8 else "fp4"
        todo = f"drop --{bits}-recipe, or train without a plan"
        yield Problem(f"config.{bits}_recipe", recipe, f"{' or '.join(STORED)} under a plan", todo)
    for name, nothing in UNSET.items():
        if (setting := os.environ.get(name, nothing)) != nothing:
            yield Problem(name, setting, "unset under a plan", "unset it: what nodes save then is not known")


def _groups(run: LiveRun) -> Iterator[Problem]:
    """Hooks use the groups of `parallel_state`, and recognise a window's collectives by their group. Wrappers may not shard."""
    from megatron.core import parallel_state

    collection = getattr(run.chunks[0], "pg_collection", None)
    known = {"tp": run.tensor_group, "pp": parallel_state.get_pipeline_model_parallel_group()}
    for name, group in known.items():
        if (model_group := getattr(collection, name, None)) not in (None, group) and model_group.size() > 1:
            todo = "build it with ProcessGroupCollection.use_mpu_process_groups(), or without a collection"
            yield Problem(f"model.pg_collection.{name}", "another group", "parallel_state's", todo)
    for kind in (type(wrapper).__name__ for wrapper in run.wrappers):
        if "FullyShardedDataParallel" in kind:
            todo = "use Megatron's DistributedDataParallel; with FSDP parameters do not exist between their uses"
            yield Problem("model wrapper", kind, "no FSDP", todo)


def _random_numbers(run: LiveRun) -> Iterator[Problem]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    if name_of(tracker) not in KNOWN_TRACKERS:
        todo = "train with Megatron's tracker, or with Transformer Engine's (--te-rng-tracker)"
        yield Problem("random-number tracker", name_of(tracker), " or ".join(KNOWN_TRACKERS), todo)
    for number, layer in run.layers.items():
        held = getattr(module_at(layer, ATTENTION.item("core").path), "rng_states_tracker", None)
        if held not in (None, tracker):
            where, tracker_kind = f"layer {number}.{CORE_ATTENTION}", "a random-number tracker of its own"
            todo = "seed before the model is built, or without force_reset_rng"
            yield Problem(where, tracker_kind, "Megatron's present one", todo)
            break


def _early_gradients(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    """In groups larger than the pipeline, gradients reach the last stage several backwards early. Then only a receive that is
    waited for right before each backward is a window."""
    if run.stage != run.pipeline - 1 or run.group_size <= run.pipeline or len(run.chunks) == 1:
        return
    if run.overlaps_exchanges and run.config.overlap_p2p_comm_warmup_flush:
        return
    timetable = timetable_of(plan, run.stage)
    for entry in plan.chunks_of(run.stage):
        if timetable.receive(entry.chunk).hides:
            found = f"{RECV_BACKWARD} in groups of {run.group_size} micro-batches"
            needed = f"another window, or groups of {run.pipeline}, the number of stages"
            todo = "drop --microbatch-group-size-per-virtual-pipeline-stage, or set --overlap-p2p-communication-warmup-flush"
            yield Problem(f"plan: {plan.place_of(entry)}.windows", found, needed, todo)


def _messages_beside_copies(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    """With overlapped exchanges a message is always in flight, and a copy that waited for it could not be cancelled when a step
    fails (docs/offloading.md)."""
    if not run.overlaps_exchanges:
        return
    for entry in plan.chunks_of(run.stage):
        if entry.offload is not None and entry.offload.beside_messages == "avoid":
            needed = "allow: with overlapped exchanges there is always a message under way"
            todo = "launch with --no-overlap-p2p-communication, or change the plan"
            yield Problem(f"plan: {plan.place_of(entry)}.offload.beside_messages", "avoid", needed, todo)


def refused_windows(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    """Checks the whole plan, not one stage, so that all ranks report the same."""
    on_cuda = any(parameter.is_cuda for chunk in run.chunks for parameter in chunk.parameters())  # a stage may have no parameters
    over_nccl = on_cuda or distributed.get_backend(run.tensor_group) == "nccl"
    if not over_nccl or not records_operands(torch.__version__, os.environ):
        return
    if any(any(timetable_of(plan, stage).busy_halves) for stage in range(plan.parallel.pipeline)):
        setting = f"{os.environ.get(AVOIDS_RECORDING) or 'not set'}, with torch {torch.__version__.partition('+')[0]}"
        needed = "1 below torch 2.8 for a plan with windows: their collectives would hold memory until the host sees them over"
        todo = f"export {AVOIDS_RECORDING}=1 on all nodes, or install torch 2.8 or later"
        yield Problem(AVOIDS_RECORDING, setting, needed, todo)


_LAYER_CLASS = "megatron.core.transformer.transformer_layer.TransformerLayer"
_OTHER_SITES = "launch with --transformer-impl local, or with transformer_engine and its usual layers"
_OTHER_KINDS = "layers of another kind, such as hybrid models have, are not planned yet"


def refused_layers(run: LiveRun) -> Iterator[Problem]:
    for number, layer in run.layers.items():
        of_half = dict.fromkeys(HALVES, (_LAYER_CLASS,)) if isinstance(layer, Module) else CLASSES
        sections = [section for section in sections_in(layer) if not section.kept_whole]
        owners = {owner_of(layer, section.half): of_half[section.half] for section in sections}
        others = {owner: needed for owner, needed in owners.items() if name_of(owner) not in needed}
        for owner, needed in others.items():
            yield Problem(f"layer {number}", name_of(owner), " or ".join(needed), _OTHER_KINDS)
        known = [section for section in sections if not section.exchanges] if not others else []
        try:
            yield from [one for section in known for one in other_classes(section, number, layer, _OTHER_SITES, te=run.uses_te)]
        except AttributeError as missing:
            yield Problem(f"layer {number}", str(missing), "the sites of a layer", _OTHER_KINDS)


def mismatches(plan: Plan, run: LiveRun, overlapping: bool = False) -> list[Problem]:
    """Every difference between the plan and the run. `overlapping`: the run has no flushes."""
    problems, needed = list[Problem](), "double_buffered" if overlapping else "flush"
    if plan.schedule != needed:
        run_schedule = f"{needed}, as this run has it"
        problems.append(Problem("plan: schedule", plan.schedule, run_schedule, "make a plan for this schedule"))
    problems += _facts(plan, run)
    if not plan.chunks_of(run.stage):
        problems.append(Problem("plan: stages", f"no stage {run.stage}", f"one for each of {run.pipeline} pipeline ranks"))
    elif plan.parallel.chunks == len(run.chunks):
        problems += (*_layers(plan, run), *_kinds(plan, run))
    return problems


FACTS: Mapping[str, Mapping[str, str]] = json.loads(Path(__file__).with_name("facts.json").read_text(encoding="utf-8"))
"""Facts that a launch states before a model is built, by a plan's key: their `flag`; where they are not computed, their name in a
`LiveRun` (`run`), in Megatron's arguments (`argument`), or also in model configurations (`setting`); `why` they matter."""


def _named(settings: Any, kind: str) -> dict[str, Any]:
    return {key: getattr(settings, fact[kind], None) for key, fact in FACTS.items() if kind in fact}


def facts_of_launch(args: Any) -> dict[str, Any]:
    facts = {
        **_named(args, "argument"),
        "parallel.chunks": getattr(args, "virtual_pipeline_model_parallel_size", None) or 1,
        **_of_settings(args, several=getattr(args, "tensor_model_parallel_size", None) != 1),
    }
    if not getattr(args, "hybrid_layer_pattern", None):  # two of its layers may be one of a plan's (`live_run`)
        facts["model.layers"] = getattr(args, "num_layers", None)
    implementation = getattr(args, "transformer_impl", None)
    if implementation is not None and getattr(args, "spec", None) is None:
        facts["model.implementation"] = implementation
    return facts


def facts_of_run(plan: Plan, run: LiveRun) -> dict[str, Any]:
    """`plan`: of facts that only some plans depend on, those of others are taken from it."""
    config, planned = run.config, plan.model
    latent = getattr(config, "multi_latent_attention", False)  # which has keys for every head
    facts = {
        **_named(run, "run"),
        "parallel.chunks": len(run.chunks),
        "model.layers": run.all_layers,
        **_of_settings(config, several=run.tensor > 1),
        "model.kv_groups": config.num_attention_heads if latent else config.num_query_groups,
        "model.captured": captured_modules(config),
    }
    if run.layers:
        of_layers = [facts_in(layer) for layer in run.layers.values()]
        facts["model.implementation"] = "transformer_engine" if run.uses_te else "local"
        facts["model.adapted"] = run.adapted
        facts["model.latent_attention"] = next((of.latent for of in of_layers if of.latent is not None), None)
        if any(of.experts for of in of_layers):
            facts["model.moe_dispatcher"] = dispatched_by(config) if plan.exchanging else planned.moe_dispatcher
            facts["model.shared_experts"] = planned.shared_experts and bool(config.moe_shared_expert_intermediate_size)
            facts["parallel.expert"] = run.expert if plan.parallel.expert > 1 else 1
    return facts


def _of_settings(settings: Any, *, several: bool) -> dict[str, Any]:
    """Facts that Megatron's arguments and a model's config say alike. `several`: whether there are tensor-parallel ranks."""
    recipe, held = recipe_of(settings), ("fp8_param_gather", "fp8_param", "fp4_param")
    ends = recipe is not None and getattr(settings, "first_last_layers_bf16", False)  # as `get_fp8_context` reads them
    return {
        "parallel.sequence_parallel": bool(getattr(settings, "sequence_parallel", False)) and several,
        "parallel.userbuffers": bool(getattr(settings, "tp_comm_overlap", False)) and several,
        **_named(settings, "setting"),
        "model.mtp": getattr(settings, "mtp_num_layers", None) or 0,
        "model.moe_overlapped": overlapped(settings),
        "model.fp8": recipe,
        "model.fp8_parameters": recipe is not None and any(getattr(settings, name, False) for name in held),
        "model.first_in_bf16": settings.num_layers_at_start_in_bf16 if ends else 0,
        "model.last_in_bf16": settings.num_layers_at_end_in_bf16 if ends else 0,
    }


def differing(plan: Plan, facts: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key, fact in facts.items():
        planned = attrgetter(key)(plan)
        if planned != fact:
            yield key, planned, fact


def launch_mismatches(plan: Plan, args: Any) -> Iterator[Problem]:
    for key, planned, fact in differing(plan, facts_of_launch(args)):
        flag = "--fp4-recipe" if "nvfp4" in (planned, fact) else FACTS[key]["flag"]
        todo = "; ".join(filter(None, ("launch with the plan's, or make a plan for this launch", FACTS[key].get("why"))))
        yield Problem(flag, _said(fact), f"{_said(planned)}, as the plan has it ({key})", todo)


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "given" if value else "not given"
    return "none" if value is None else str(value)


def _facts(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    differences = list(differing(plan, facts_of_run(plan, run)))
    interleaved = plan.parallel.chunks == len(run.chunks) > 1 and plan.parallel.pipeline == run.pipeline
    if interleaved and plan.parallel.group != run.group_size:
        differences.append(("parallel.microbatch_group", plan.parallel.group, run.group_size))
    for key, planned, fact in differences:
        part = key.partition(".")[0].replace("parallel", "layout")
        yield Problem(f"plan: {key}", str(planned), f"{fact}, as this run has it", f"make a plan for this {part}")


def _kinds(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    """Layers of this stage with a half of another kind than planned."""
    stated_as = {EXPERTS.name: "model.moe_layers"} | dict.fromkeys(OPAQUE, "model.opaque_layers")
    having = layers_by_kind(run)
    for name, key in (stated_as | dict.fromkeys(KINDS_IN, "model.kinds")).items():
        live = having[name].keys()
        planned = {layer for layer in run.layers if any(section.name == name for section in plan.model.sections_of(layer))}
        for numbers, said in ((live - planned, "in this run alone"), (planned - live, "in the plan alone")):
            if numbers:
                place = f"plan: {key}: layers {', '.join(map(str, sorted(numbers)))}"
                yield Problem(place, f"{name} {said}", "the same in both", "make a plan for this model")


def _layers(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    for entry, chunk in zip(plan.chunks_of(run.stage), run.chunks, strict=True):
        live = [layer.layer_number for layer in layers_in(chunk)]
        if list(entry.layers) != live:
            span = f"{live[0]}-{live[-1]}" if live else "none"
            todo = "launch with the plan's layout, or make a plan for this one"
            yield Problem(f"plan: {plan.place_of(entry)}.layers", str(entry.layers), f"{span}, as this rank has them", todo)
