"""Memory available to the layers of a stage: the device's budget less everything else on the device at that moment.

    device budget  -  states, buffers, messages, backward transients          =  layers, while they run backward
                   -  states, ..., the head's inputs, copies of the logits    =  layers, while the loss is computed
                   -  states, copies made by the update                       =  no layers; without flushes all micro-batches
                                                                                 in flight but one
                   `cost.stage_memory` has the parts, `cost.moments` the moments

budget.activation_mib   bounds the layers alone
budget.memory_gib       bounds the device; default: its memory less the cluster's reserve and less what others have
neither, on a GPU       the device's memory; the planner makes the fastest plan that fits
neither, on the testbed no bound, since other processes share the memory; the planner makes the plan with the least memory

A solver gets the first bound, and the difference to the second (`loss_bytes`).
"""

from __future__ import annotations

from math import ceil

from megatron_lynx.config.job import Job
from megatron_lynx.cost.in_hand import fullest_half_bytes
from megatron_lynx.cost.moments import Parts, StageMemory
from megatron_lynx.cost.stage_memory import parts_beside_layers
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.units import GIB, MIB


def layers_budget_bytes(job: Job, stage: int) -> int | None:
    """Return the tightest bound on layers in backward, or None if unbounded. Below 0 if everything else alone is too much."""
    return _budget_bytes(job, stage, beside_layers(job, stage)) if _bounded(job) else None


def loss_bytes(job: Job, stage: int) -> int:
    """Return how much less the layers may hold while the loss is computed than while they run backward."""
    if not bounded_by_device(job):
        return 0
    parts = beside_layers(job, stage)
    at_loss = max(parts.at(moment).total for moment in parts.moments if moment in ("forward", "loss", "head_backward"))
    return max(0, _budget_bytes(job, stage, parts) - (job.memory_budget_bytes - at_loss))


def if_it_runs(held_bytes: int) -> str:
    """Return the advice for a launch that is predicted not to fit but runs."""
    return f"If it runs, it holds less than counted, or has more: state that by --memory-gib {ceil(held_bytes / GIB)}."


def bounded_by_device(job: Job) -> bool:
    return job.budget.of_device or job.cluster.device == "cuda"


def beside_layers(job: Job, stage: int) -> Parts:
    """Return all that a device of a stage holds except its layers."""
    return parts_beside_layers(job, stage)


def most_beside_layers(job: Job, stage: int) -> StageMemory:
    """Return the fullest moment without layers: an update if it alone is too much, else the layers' backward."""
    return _most(job, beside_layers(job, stage))


def _bounded(job: Job) -> bool:
    return job.budget.activation_mib is not None or bounded_by_device(job)


def _budget_bytes(job: Job, stage: int, beside: Parts) -> int:
    """Return the tightest bound. `beside`: the stage's parts without layers."""
    bounds = []
    if job.budget.activation_mib is not None:
        bounds.append(int(job.budget.activation_mib * MIB))
    if bounded_by_device(job):
        bounds.append(_on_device_bytes(job, stage, beside))
    return min(bounds)


def _most(job: Job, beside: Parts) -> StageMemory:
    update = max(beside.at("reduction"), beside.at("update"), key=lambda memory: memory.total)
    return update if update.total > job.memory_budget_bytes else beside.at("backward")


def _on_device_bytes(job: Job, stage: int, beside: Parts) -> int:
    """Return the device's bound on layers; below 0 if an update alone is too much."""
    most = _most(job, beside)
    if most.moment != "backward":
        return job.memory_budget_bytes - most.total
    return job.memory_budget_bytes - most.total - _more_behind_backward(job, stage, beside)


def _more_behind_backward(job: Job, stage: int, beside: Parts) -> int:
    """Return the memory needed beyond the layers' backward by later moments: the embedding's backward, and updates without
    flushes.

    The micro-batch that has run backward holds less by then: at least its layers' inputs and the tensors saved by one half.
    """
    later = {"embedding_backward"} | (set() if beside.flushed else {"reduction", "first_update", "update"})
    most = max((beside.at(moment).total for moment in beside.moments if moment in later), default=0)
    shape, least = LayerShape.of(job), min(job.chunk_layers(stage))
    held = least * shape.input_bytes + fullest_half_bytes(shape) if least else 0
    return max(0, most - beside.at("backward").total - held)
