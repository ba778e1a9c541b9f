"""Refuses runs that the hooks do not support, listing every reason (rules R6, R14).

settings       unsupported features (`limits`)
torch          windows whose collectives would retain memory (below)
groups         a model with other process groups than `parallel_state`'s
modules        wrappers, layers of another kind, random numbers that a recomputation could not draw again
schedule       features of the plan that this schedule lacks
gradients      weight gradients that cannot be delayed (`linears`)
head           a head that cannot run in pieces, if the plan needs it (`hooks.head_in_pieces`)
kinds          `apply.kinds`

Windows are refused if torch would retain the operands of their collectives for longer than a plan counts:

stock     a synchronous collective: its operands are free for compute after it
ours      the same collective, asynchronous, followed by the window's tasks
          torch below 2.8: NCCL's `record_stream` retains both operands until the host sees the collective complete, long after
          the device: several GiB more than planned, at 70B

Messages between stages are asynchronous in stock, too. On a CPU, gloo refers to its operands itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import distributed
from torch.nn import Module

from megatron_lynx.anatomy import ATTENTION, HALVES, Item
from megatron_lynx.anatomy.address import BACKWARD_PHASES, RECV_BACKWARD, BackwardPhase
from megatron_lynx.apply.hooks.head_in_pieces import refused_head
from megatron_lynx.apply.hooks.sites import places_of
from megatron_lynx.apply.hooks.weight_gradients import refused_deferrals
from megatron_lynx.apply.kinds import Classes, classes_of, layers_by_kind, sections_in
from megatron_lynx.apply.live_run import (
    CLASSES,
    OWNS_USERBUFFER,
    TE_MODULE,
    LiveRun,
    module_at,
    name_of,
    owner_of,
    recipe_of,
    refused_graphs,
)
from megatron_lynx.environment import AVOIDS_RECORDING, records_operands
from megatron_lynx.errors import Problem
from megatron_lynx.fp8_recipes import STORED, lacking
from megatron_lynx.kinds.dense.section import CORE_ATTENTION
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
        *refused_settings(run.config, te=run.uses_te),
        *refused_in_fp8(run),
        *refused_windows(plan, run),
        *_early_gradients(plan, run),
        *_messages_beside_copies(plan, run),
        *_groups(run),
        *_wrappers(run),
        *refused_layers(run),
        *_random_numbers(run),
        *refused_deferrals(plan, run),
        *(problem for face, layers in layers_by_kind(run) for problem in face.refusals(plan, run, layers)),
        *refused_head(plan, run),
    ]


UNSET = {
    "NVTE_BACKWARD_OVERRIDE": "",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "0",
}
"""Environment variables that change which tensors nodes save, with their defaults."""


def refused_settings(config: Any, *, te: bool) -> Iterator[Problem]:
    """Every unsupported setting. `te`: the layers are Transformer Engine's."""
    latent, experts = getattr(config, "multi_latent_attention", False), getattr(config, "num_moe_experts", None)
    circumstances = {
        "plan": True,
        "te": te,
        "fp8": te and recipe_of(config) is not None,
        "latent": latent,
        "planned latent": latent,
        "experts": experts,
        "flex": experts and config.moe_token_dispatcher_type == "flex",
    }
    yield from refused(config, [name for name, applies in circumstances.items() if applies])
    yield from refused_graphs(config)


def refused_in_fp8(run: LiveRun) -> Iterator[Problem]:
    recipe = recipe_of(run.config)
    if recipe is None:
        return
    bits = "fp8" if run.config.fp8 else "fp4"
    if not run.uses_te and run.layers:
        setting = str(getattr(run.config, bits))
        yield Problem(f"config.{bits}", setting, "off: these layers are Megatron's own", f"drop --{bits}-format")
        return
    if (known := next((stored for stored in STORED if stored == recipe), None)) is None:
        todo = f"drop --{bits}-recipe, or train without a plan"
        yield Problem(f"config.{bits}_recipe", recipe, f"{' or '.join(STORED)} under a plan", todo)
    else:
        from transformer_engine.common import recipe as installed

        if not hasattr(installed, STORED[known].made_by):
            yield lacking(known, f"config.{bits}_recipe")
    if bits == "fp4" and run.userbuffers:
        yield Problem("config.tp_comm_overlap", "True", "off with --fp4-format", "drop --tp-comm-overlap: such linears have none")
    for name, nothing in UNSET.items():
        if (setting := os.environ.get(name, nothing)) != nothing:
            yield Problem(name, setting, "unset under a plan", "unset it: what nodes save then is not known")


def _groups(run: LiveRun) -> Iterator[Problem]:
    """Hooks use the groups of `parallel_state`, and recognise a window's collectives by their group."""
    from megatron.core import parallel_state

    collection = getattr(run.chunks[0], "pg_collection", None)
    known = {"tp": run.tensor_group, "pp": parallel_state.get_pipeline_model_parallel_group()}
    for name, group in known.items():
        if (model_group := getattr(collection, name, None)) not in (None, group) and model_group.size() > 1:
            todo = "build it with ProcessGroupCollection.use_mpu_process_groups(), or without a collection"
            yield Problem(f"model.pg_collection.{name}", "another group", "parallel_state's", todo)


def _wrappers(run: LiveRun) -> Iterator[Problem]:
    for wrapper in run.wrappers:
        if "FullyShardedDataParallel" in type(wrapper).__name__:
            todo = "use Megatron's DistributedDataParallel; with FSDP parameters do not exist between their uses"
            yield Problem("model wrapper", type(wrapper).__name__, "no FSDP", todo)


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
    phases: tuple[BackwardPhase, ...] = BACKWARD_PHASES
    if run.overlaps_exchanges:
        phases = () if run.config.overlap_p2p_comm_warmup_flush else ("cooldown",)
    timetable = timetable_of(plan, run.stage)
    for entry in plan.chunks_of(run.stage):
        if not any(timetable.receive(entry.chunk, phase).hides for phase in phases):
            continue
        phases_in_words = f"{RECV_BACKWARD} ({', '.join(phases)}) in groups of {run.group_size} micro-batches"
        needed = f"another window, or groups of {run.pipeline}, the number of stages"
        todo = "drop --microbatch-group-size-per-virtual-pipeline-stage, or set --overlap-p2p-communication-warmup-flush"
        yield Problem(f"plan: {plan.place_of(entry)}.windows", phases_in_words, needed, todo)


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
    if any(timetable_of(plan, stage).in_collectives for stage in range(plan.parallel.pipeline)):
        setting = f"{os.environ.get(AVOIDS_RECORDING) or 'not set'}, with torch {torch.__version__.partition('+')[0]}"
        needed = "1 below torch 2.8 for a plan with windows: their collectives would hold memory until the host sees them over"
        todo = f"export {AVOIDS_RECORDING}=1 on all nodes, or install torch 2.8 or later"
        yield Problem(AVOIDS_RECORDING, setting, needed, todo)


_LAYER_CLASS = "megatron.core.transformer.transformer_layer.TransformerLayer"
_TE_FLAGS = ("return_layernorm_output", "fsdp_group")
"""Attributes of its linears that must be off: they return or keep tensors that belong to no item."""

_OTHER_KINDS = "layers of another kind, such as hybrid models have, are not planned yet"


def refused_layers(run: LiveRun) -> Iterator[Problem]:
    first = next(iter(run.layers), None)
    for number, layer in run.layers.items():
        if problems := [*_other_layers(number, layer)]:
            yield from problems
            continue
        try:
            sections = [section for section in sections_in(layer) if not (section.in_some_layers or section.captured)]
            sites = {place.item: place.owner for section in sections for place in places_of(section, layer)}
        except AttributeError as missing:
            yield Problem(f"layer {number}", str(missing), "the sites of a layer", _OTHER_KINDS)
            continue
        for section in sections:
            held = {item: sites[item] for item in section.sites if section.fuses_norm or item.role != "norm"}
            yield from _other_classes(number, held, classes_of(section, te=run.uses_te))
        if run.uses_te and number == first:  # all are built from one config
            yield from _te_flags(number, sites, _TE_FLAGS if run.userbuffers else (*OWNS_USERBUFFER, *_TE_FLAGS))
    if run.userbuffers and run.layers and not run.uses_te:
        todo = "drop --tp-comm-overlap, or launch with --transformer-impl transformer_engine"
        yield Problem("config.tp_comm_overlap", "True", "off with Megatron's own layers, which have no userbuffers", todo)


def _other_layers(number: int, layer: Any) -> Iterator[Problem]:
    """A live layer, or either of the two layers of a hybrid stack, of another class than Megatron's, unless its half is kept
    whole."""
    of_half = dict.fromkeys(HALVES, (_LAYER_CLASS,)) if isinstance(layer, Module) else CLASSES
    known = [section.half for section in sections_in(layer) if not section.kept_whole]
    owners = {owner_of(layer, half): of_half[half] for half in known}
    for owner, needed in owners.items():
        if name_of(owner) not in needed:
            yield Problem(f"layer {number}", name_of(owner), " or ".join(needed), _OTHER_KINDS)


def _other_classes(number: int, sites: Mapping[Item, Module], classes: Classes) -> Iterator[Problem]:
    for site, module in sites.items():
        known = classes.get(site.role)
        if known is not None and name_of(module) not in known:
            needed = " or ".join(known)
            todo = "launch with --transformer-impl local, or with transformer_engine and its usual layers"
            yield Problem(f"layer {number}.{site.name}", name_of(module), needed, todo)


def _te_flags(number: int, sites: Mapping[Item, Module], flags: Sequence[str]) -> Iterator[Problem]:
    for site, module in sites.items():
        for flag in flags:
            if site.is_linear and getattr(module, flag, None):
                yield Problem(f"layer {number}.{site.name}.{flag}", str(getattr(module, flag)), "off under a plan")
