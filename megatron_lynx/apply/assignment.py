"""Makes the runtime's policies of halves and chunks from a plan, and the order of passes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from torch.nn import Module

from megatron_lynx.anatomy import Half, Section
from megatron_lynx.apply.hooks.sites import marked_in, may_draw_in
from megatron_lynx.apply.kinds import sections_in
from megatron_lynx.apply.live_run import LiveRun, of_all_ranks
from megatron_lynx.free_memory import free_memory
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.runtime.device import Device
from megatron_lynx.runtime.offload import HostFacts, HostLimit, Offloader, OffloadPolicy, limit_of
from megatron_lynx.runtime.order import OrderOfStep, StageOrder
from megatron_lynx.runtime.policy import ChunkPolicy, HalfPolicy
from megatron_lynx.runtime.record import GATHERED
from megatron_lynx.runtime.saved import memory_of
from megatron_lynx.runtime.surroundings import NO_HOOKS, ForwardHooks
from megatron_lynx.schedule.counts import most_in_flight, most_on_host
from megatron_lynx.schedule.flushes import passes_of
from megatron_lynx.timetable import PlannedHalf, Timetable

log = logging.getLogger(__name__)


def policies(
    plan: Plan, stage: Stage, timetable: Timetable, gather: Callable[[Any], Any], modules: Mapping[int, Module]
) -> dict[int, dict[Half, HalfPolicy]]:
    """The policy of every half of a chunk, by layer number. `modules`: the layers that Megatron built."""
    halves = timetable.chunks[stage.chunk]
    planned = {half.key: half for half in halves}
    fed_by = {half.key: before.key for before, half in pairwise(halves) if before.feeds}
    policies_by_layer: dict[int, dict[Half, HalfPolicy]] = {}
    for layer in stage.layers:
        policies_by_layer[layer] = {}
        for section in sections_in(modules[layer]):
            half = planned[layer, section.half]
            policy = _policy(plan, stage, half, section, gather, modules[layer])
            midway = section.core if half.key in timetable.core_halves else None
            policies_by_layer[layer][section.half] = replace(policy, fed_by=fed_by.get(half.key), midway=midway)
    return policies_by_layer


def _policy(
    plan: Plan, stage: Stage, planned: PlannedHalf, section: Section, gather: Callable[[Any], Any], module: Module
) -> HalfPolicy:
    recomputed = frozenset(planned.recompute)
    if planned.checkpoint:
        recomputed |= {GATHERED.name}
    falls_back = stage.experts_hold is not None and section.on_rows - recomputed and not planned.checkpoint
    hooks = ForwardHooks(module.modules(), _waits_for_weights) if recomputed or falls_back else NO_HOOKS
    rest_in_wait = planned.rest_after is not None and not section.exchanges
    gathers = plan.parallel.sequence_parallel and (planned.gathers or planned.gathers_ahead or rest_in_wait)
    kept = plan.parallel.sequence_parallel and not planned.checkpoint
    stays = stage.offload is None or stage.offload.stays(planned)
    stays |= section.kept_whole or (section.in_some_layers and not (stage.offload and stage.offload.experts))
    as_planned = {one.name: getattr(planned, one.name) for one in fields(planned)}
    return HalfPolicy(
        **as_planned | {"section": section, "recompute": recomputed},
        gather_site=section.gathered if gathers else None,
        gather=gather if gathers else None,
        keeps_gathered=recomputed.intersection(section.gathering_latents if kept else ()),
        chunk=stage.chunk,
        may_draw=may_draw_in(section, module, recomputed),
        stays=stays,
        marked=marked_in(section, module) if planned.checkpoint else (),
        allowed_load=stage.experts_hold if falls_back else None,
        hooks=hooks,
    )


def _waits_for_weights(hook: Callable[..., Any]) -> bool:
    """Megatron's own hook on every module, with --overlap-param-gather. In a recomputation the weights are already gathered."""
    return getattr(hook, "__module__", "") == "megatron.core.distributed.distributed_data_parallel"


def passing_over(
    of_layer: Mapping[int, Mapping[Half, HalfPolicy]], timetable: Timetable, offloading: Container[int]
) -> dict[int, dict[Half, HalfPolicy]]:
    """The same policies, with halves marked that have no work, and halves above these.

    `offloading`: chunks that offload.
    """
    marked: dict[int, dict[Half, HalfPolicy]] = {}
    below: HalfPolicy | None = None
    for layer, halves in of_layer.items():
        marked[layer] = {}
        for half, policy in halves.items():
            serves = policy.key in timetable.busy_halves[policy.chunk]
            busy = policy.goes_out(offloading) or policy.deferred or policy.may_recompute or serves
            of_chunk = below is not None and below.chunk == policy.chunk
            below = replace(policy, passed_over=not busy, below_passed_over=of_chunk and below.passed_over)  # type: ignore[union-attr]
            marked[layer][half] = below
    return marked


def chunk_policies(plan: Plan, timetable: Timetable, stage: int) -> list[ChunkPolicy]:
    return [
        ChunkPolicy(
            entry.ahead_depth,
            entry.whole or (),
            frozenset((half.layer, linear) for half in halves for linear in half.deferred),
            frozenset((half.layer, linear) for half in halves for linear in half.deferred.keys() - half.delayed(drains=False)),
            0 if entry.weight_gradients is None else entry.weight_gradients.bytes,
            read_after_send=stage > 0 and plan.schedule == "flush",
        )
        for entry, halves in zip(plan.chunks_of(stage), timetable.chunks, strict=True)
    ]


def order_of(pipeline: int, stage: int, chunks: int, group_size: int, more: int = 0) -> OrderOfStep:
    """The passes of a stage in a step, by the number of micro-batches.

    `group_size`: Megatron's `microbatch_group_size_per_vp_stage`. `more`: additional warm-up forwards.
    """

    @lru_cache(maxsize=8)
    def order(microbatches: int) -> StageOrder:
        passes = passes_of(pipeline, stage, microbatches, chunks, group_size, more)
        return StageOrder(list(passes), in_turns=more > 0 and chunks == 1)

    return order


def offloader_of(plan: Plan, run: LiveRun, order: OrderOfStep, device: Device, limit: HostLimit | None) -> Offloader | None:
    """Return None if this stage offloads nothing: the plan has no offload for it, or every backward directly follows its forward
    and no pace is given. `limit`: this rank's, if the plan offloads at all.

    Raises `OffloadError` with both numbers if the host has too little memory.
    """
    step = order(plan.batch.microbatches)
    policies = {}
    for entry in plan.chunks_of(run.stage):
        if entry.offload is None:
            continue
        every = entry.offload.half_by_half == "all"
        within = {every or one.virtual in step.at_once for one, _ in step.all if one.chunk == entry.chunk}
        sets = most_on_host(step.all)[entry.chunk] if False in within else 0
        pace_bytes = entry.offload.pace_bytes if True in within else None
        if pace_bytes is not None:
            sets += most_in_flight(step.all)[entry.chunk] if every else 1 + step.in_turns
        if not sets:
            continue
        policies[entry.chunk] = OffloadPolicy(
            bytes=entry.offload.bytes,
            smallest_tensor_bytes=entry.offload.smallest_tensor_bytes,
            sets=sets,
            ragged=entry.offload.experts,
            avoids_messages=entry.offload.beside_messages == "avoid",
            pace_bytes=pace_bytes,
            all_half_by_half=every,
            layers=(entry.layers.first, len(entry.layers)),
        )
    if not policies or limit is None:
        return None
    return Offloader(
        policies,
        device=device,
        limit=limit,
        where=f"stage {run.stage}",
        lasting=lambda chunk: memory_of((*run.chunks[chunk].parameters(), *run.chunks[chunk].buffers())),
    )


STATE_BYTES = 14
"""Per parameter: weight in 16 bits, master weight and Adam's two moments in 32 (arXiv 1910.02054, section 3.1)."""


def host_limit_of(plan: Plan, run: Any) -> HostLimit | None:
    """Return None if the plan does not offload. Collective: every rank must call it, also one that cannot have the plan. `run`:
    this rank's, or the problems that it has."""
    if not any(stage.offload for stage in plan.stages):
        return None
    free = free_memory()
    mine = HostFacts(free, _state_bytes(run) if isinstance(run, LiveRun) else 0)
    limit = limit_of(mine, of_all_ranks(mine))
    if free.unread:
        log.warning("no limit of host memory can be read in %s: counted on %s", ", ".join(free.unread), limit.words)
    return limit


def _state_bytes(run: LiveRun) -> int:
    """Upper bound of the rank's part of a checkpoint, or of an optimizer on the CPU."""
    parameters = sum(parameter.numel() for chunk in run.chunks for parameter in chunk.parameters() if parameter.requires_grad)
    configs = (getattr(wrapper, "ddp_config", None) for wrapper in run.wrappers)
    shared_out = next((config for config in configs if getattr(config, "use_distributed_optimizer", False)), None)
    instances = getattr(shared_out, "num_distributed_optimizer_instances", 1)
    return STATE_BYTES * parameters // (run.replicas // instances if shared_out is not None else 1)
