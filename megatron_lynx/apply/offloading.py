"""Makes the offload policies of a stage from its plan, and finds this rank's share of host memory.

The launcher's variables are no help: torchrun sets `LOCAL_WORLD_SIZE`, srun does not. So all ranks exchange their machine and
control groups, and each counts the ranks that share its own.
"""

from __future__ import annotations

import logging
from typing import Any

from megatron_lynx.apply.live_run import LiveRun, of_all_ranks
from megatron_lynx.free_memory import free_memory
from megatron_lynx.plan.plan import Plan
from megatron_lynx.runtime.device import Device
from megatron_lynx.runtime.offload import HostFacts, HostLimit, Offloader, OffloadPolicy, limit_of
from megatron_lynx.runtime.order import OrderOfStep
from megatron_lynx.runtime.saved import memory_of
from megatron_lynx.schedule.one_stage import most_in_flight, most_on_host


def offloader_of(plan: Plan, run: LiveRun, order: OrderOfStep, device: Device, limit: HostLimit | None) -> Offloader | None:
    """Return None if this stage offloads nothing: the plan has no offload for it, or every backward directly follows its forward
    and
    no pace is given. `limit`: this rank's, if the plan offloads at all.

    Raises `OffloadError` with both numbers if the host has too little memory.
    """
    step = order(plan.batch.microbatches)
    policies = {}
    for entry in plan.chunks_of(run.stage):
        if entry.offload is None:
            continue
        every = entry.offload.half_by_half == "all"
        within = {every or one.virtual in step.at_once for one, _ in step.all if one.chunk == entry.chunk}
        sets = most_on_host(step.all, entry.offload.prefetch)[entry.chunk] if False in within else 0
        pace_bytes = entry.offload.pace_bytes if True in within else None
        if pace_bytes is not None:
            sets += most_in_flight(step.all)[entry.chunk] if every else 1 + step.in_turns
        if not sets:
            continue
        policies[entry.chunk] = OffloadPolicy(
            bytes=entry.offload.bytes,
            smallest_tensor_bytes=entry.offload.smallest_tensor_bytes,
            prefetch=entry.offload.prefetch,
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


log = logging.getLogger(__name__)

STATE_BYTES = 14
"""Per parameter: weight in 16 bits, master weight and Adam's two moments in 32 (arXiv 1910.02054, section 3.1)."""


def host_limit_of(plan: Plan, run: Any) -> HostLimit | None:
    """Return None if the plan does not offload. Collective: every rank must call it, also one that cannot have the plan. `run`:
    this
    rank's, or the problems that it has.
    """
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
