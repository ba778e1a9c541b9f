"""From a plan's stage to what goes to the host: a policy for every chunk that offloads."""

from __future__ import annotations

from megatron_lynx.apply.live_run import LiveRun
from megatron_lynx.plan.plan import Plan
from megatron_lynx.runtime.device import Device
from megatron_lynx.runtime.offload import HostLimit, Offloader, OffloadPolicy
from megatron_lynx.runtime.stage_order import OrderOfStep
from megatron_lynx.schedule.one_stage import most_on_host
from megatron_lynx.schedule.schedule import Action


def offloader_of(plan: Plan, run: LiveRun, order: OrderOfStep, device: Device, limit: HostLimit | None) -> Offloader | None:
    """None where nothing of this stage goes to the host: no plan for it, or every backward follows its forward at once, and no
    pace is given for that. `limit`: of this rank, where the plan offloads at all.

    Raises `OffloadError` with both numbers where the host has too little memory.
    """
    step = order(plan.batch.microbatches)
    passes = [(Action(one.micro_batch, one.kind, one.chunk), one.phase) for one in step.all]
    policies = {}
    for entry in plan.chunks_of(run.stage):
        if entry.offload is None:
            continue
        sets = most_on_host(passes, entry.offload.prefetch)[entry.chunk]
        at_once = any(step.at_once(one.virtual) for one in step.all if one.chunk == entry.chunk)
        pace_bytes = entry.offload.pace_bytes if at_once else None
        if not sets and pace_bytes is None:
            continue
        policies[entry.chunk] = OffloadPolicy(
            bytes=entry.offload.bytes,
            smallest_tensor_bytes=entry.offload.smallest_tensor_bytes,
            prefetch=entry.offload.prefetch,
            sets=sets,
            ragged=entry.offload.experts,
            avoids_messages=entry.offload.beside_messages == "avoid",
            pace_bytes=pace_bytes,
            layers=(entry.layers.first, len(entry.layers)),
        )
    if not policies or limit is None:
        return None
    return Offloader(
        policies,
        device=device,
        limit=limit,
        where=f"stage {run.stage}",
        lasting=lambda chunk: (*run.chunks[chunk].parameters(), *run.chunks[chunk].buffers()),
    )
